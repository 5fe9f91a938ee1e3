"""Adapters: what each makes of a row, and the rows it refuses."""

import ast
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import smi
from smi.data import budget
from smi.data.adapters import ADAPTERS, adapter_for, get_adapter
from smi.data.budget import check_value
from smi.data.filters import parse_filter
from smi.data.reasons import REASONS, describe
from smi.data.sources import SourceSpec
from smi.protocol.conversation import Conversation, to_stream
from smi.protocol.stream import ProtocolError

TOOLS = [{"name": "find", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}]


def convert(name: str, row: dict[str, Any]) -> Conversation:
    return get_adapter(name).convert(row)


def refused(name: str, row: dict[str, Any]) -> str:
    with pytest.raises(ProtocolError) as caught:
        convert(name, row)
    return caught.value.reason


def test_adapters_are_found_by_name() -> None:
    assert set(ADAPTERS) == {"messages", "openai_tools", "sharegpt", "hermes", "aya", "openr1", "opencode"}
    assert get_adapter("aya").columns == ("inputs", "targets")
    with pytest.raises(ValueError, match="no adapter is named 'hermez'; known are messages"):
        get_adapter("hermez")


def test_messages_takes_values_and_json_text() -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    plain = convert("messages", {"messages": talk, "tools": TOOLS, "smi_ctrl": {"a": 1}, "smi_caps": {"b": 2}})
    assert plain == Conversation(talk, TOOLS, {"a": 1}, {"b": 2})
    as_text = {
        "messages": None,
        "messages_json": '[{"role":"user","content":"hi"},{"role":"assistant","content":"ho"}]',
        "tools_json": '[{"name":"find","parameters":{"type":"object","properties":{"q":{"type":"string"}}}}]',
        "smi_ctrl": '{"a":1}',
        "smi_caps": '{"b":2}',
    }
    assert convert("messages", as_text) == plain
    assert refused("messages", {"messages_json": "[NaN]"}) == "number"
    assert refused("messages", {"messages_json": 5}) == "schema"


def test_sharegpt_names_the_roles() -> None:
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "<tool_call>"},
        {"from": "gpt", "value": "a"},
    ]
    talk = convert("sharegpt", {"conversations": turns})
    assert [(m["role"], m["content"]) for m in talk.messages] == [
        ("system", "s"),
        ("user", "<tool_call>"),
        ("assistant", "a"),
    ]
    assert refused("sharegpt", {"conversations": [{"from": "wizard", "value": "x"}]}) == "role"
    assert refused("sharegpt", {"conversations": [{"from": "gpt", "value": None}]}) == "schema"
    assert refused("sharegpt", {"conversations": None}) == "schema"


def hermes(*turns: tuple[str, str], tools: Any = "[]") -> dict[str, Any]:
    return {"conversations": [{"from": who, "value": text} for who, text in turns], "tools": tools}


def test_hermes_numbers_calls_and_links_responses() -> None:
    row = hermes(
        ("human", "find both"),
        ("gpt", 'Sure. \n<tool_call>{"name": "find", "arguments": {"q": "x"}}</tool_call>\n'
                "<tool_call>\n{'arguments': {'q': '</b>', 'n': [-1, 2.5, None, True]}, 'name': 'find'}\n"
                "</tool_call>"),
        ("tool", "<tool_response>\none\n</tool_response>\n<tool_response>{\"two\": 2}</tool_response>"),
        ("gpt", "  done, with <b>spaces</b>  "),
        ("human", "again"),
        ("gpt", "<tool_call>{'name': 'find', 'arguments': {}}</tool_call>"),
        ("tool", "<tool_response>three</tool_response>"),
        tools="[{'name': 'find', 'parameters': {'type': 'object'}}]",
    )  # fmt: skip
    talk = convert("hermes", row)
    assert talk.tools == [{"name": "find", "parameters": {"type": "object"}}]
    first, second = talk.messages[1]["tool_calls"]
    assert talk.messages[1]["content"] == "Sure."
    assert (first["id"], first["function"]) == ("a1", {"name": "find", "arguments": {"q": "x"}})
    assert second["function"]["arguments"] == {"q": "</b>", "n": [-1, 2.5, None, True]}
    assert [(m["tool_call_id"], m["content"]) for m in talk.messages if m["role"] == "tool"] == [
        ("a1", "one"),
        ("a2", '{"two": 2}'),
        ("a3", "three"),
    ]
    assert talk.messages[4] == {"role": "assistant", "content": "  done, with <b>spaces</b>  "}


CALL = "<tool_call>{'name': 'find', 'arguments': %s}</tool_call>"


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([("gpt", "<tool_call>{'name': 'find'")], "tool_call"),
        ([("gpt", "no opening</tool_call>")], "tool_call"),
        ([("gpt", (CALL % "{}") + " and then")], "tool_call"),
        ([("gpt", "<tool_call>['find']</tool_call>")], "tool_call"),
        ([("gpt", "<tool_call>{'name': 'find'}</tool_call>")], "tool_call"),
        ([("gpt", CALL % "{'a': 1, 'a': 2}")], "tool_call"),
        ([("gpt", CALL % "{1: 2}")], "tool_call"),
        ([("gpt", CALL % "{**{}}")], "tool_call"),
        ([("gpt", CALL % "(1, 2)")], "tool_call"),
        ([("gpt", CALL % "b'bytes'")], "tool_call"),
        ([("gpt", CALL % "1j")], "tool_call"),
        ([("gpt", CALL % "f'{1}'")], "tool_call"),
        ([("gpt", CALL % "[i for i in 'ab']")], "tool_call"),
        ([("gpt", CALL % ("[" * 3000 + "]" * 3000))], "tool_call"),
        ([("gpt", CALL % ("9" * 5000))], "tool_call"),
        ([("gpt", CALL % f"'{'x' * 70_000}'")], "over_budget"),
        ([("gpt", '<tool_call>{"name": "find", "arguments": {"q": NaN}}</tool_call>')], "number"),
        ([("tool", "<tool_response>x</tool_response>")], "orphan_observation"),
        ([("gpt", CALL % "{}"), ("tool", "bare text")], "tool_response"),
        ([("gpt", CALL % "{}"), ("tool", "<tool_response>x")], "tool_response"),
        ([("gpt", CALL % "{}"), ("tool", "<tool_response>x</tool_response>" * 2)], "orphan_observation"),
    ],
)
def test_hermes_refuses(turns: list[tuple[str, str]], reason: str) -> None:
    assert refused("hermes", hermes(*turns)) == reason


def test_hermes_never_evaluates(tmp_path: Any) -> None:
    trap = tmp_path / "trap"
    for code in (f"__import__('pathlib').Path({str(trap)!r}).touch()", "[].append(1)", "1 + 1", "tools"):
        assert refused("hermes", hermes(("gpt", "x"), tools=code)) == "tools"
    assert not trap.exists()


def test_unknown_escapes_in_literals_pass_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    talk = convert("hermes", hermes(("gpt", CALL % r"{'q': '\d+'}")))
    assert talk.messages[0]["tool_calls"][0]["function"]["arguments"] == {"q": r"\d+"}
    assert not recwarn.list


def generations(**columns: Any) -> dict[str, Any]:
    row = {
        "problem": "1+1?",
        "generations": [
            "<think>\nno\n</think>\n\n3",
            "<think>\nyes\n</think>\n\n2",
            "<think>\nso\n</think>\n\ntwo",
        ],
        "is_reasoning_complete": [True, True, True],
        "correctness_math_verify": [False, True, True],
        "correctness_llama": None,
    }
    return row | columns


def test_openr1_takes_the_first_complete_and_correct_generation() -> None:
    talk = convert("openr1", generations())
    assert talk.messages == [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "yes"},
    ]
    by_llama = generations(correctness_math_verify=None, correctness_llama=[False, False, True])
    assert convert("openr1", by_llama).messages[1]["content"] == "two"
    incomplete = generations(is_reasoning_complete=[True, False, True])
    assert convert("openr1", incomplete).messages[1]["content"] == "two"


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"is_reasoning_complete": [True]}, "no_correct_generation"),
        ({"correctness_math_verify": [None, 1, "True"]}, "no_correct_generation"),
        ({"generations": []}, "no_correct_generation"),
        ({"generations": None}, "schema"),
        ({"generations": ["a", None, "c"]}, "schema"),
        ({"correctness_math_verify": 5}, "schema"),
        ({"generations": ["a", "no reasoning", "c"]}, "reasoning"),
        ({"generations": ["a", "<think>never closed", "c"]}, "reasoning"),
        ({"generations": ["a", "<think>x</think> \n", "c"]}, "empty_turn"),
        ({"problem": "\t"}, "empty_turn"),
    ],
)
def test_openr1_refuses(columns: dict[str, Any], reason: str) -> None:
    assert refused("openr1", generations(**columns)) == reason


def test_opencode_keeps_what_passed_its_tests() -> None:
    row = {"input": "task", "output": "code\r\n\t", "average_test_score": "0.8"}
    assert convert("opencode", row).messages[1]["content"] == "code\r\n\t"
    for score in ("0.79", "nan", "inf", "-inf", "", "good", None, [1.0]):
        assert refused("opencode", row | {"average_test_score": score}) == "score"
    assert refused("opencode", row | {"output": ""}) == "empty_turn"


def test_aya_needs_both_sides() -> None:
    assert convert("aya", {"inputs": " q ", "targets": "a"}).messages[0] == {"role": "user", "content": " q "}
    assert refused("aya", {"inputs": None, "targets": "a"}) == "schema"
    assert refused("aya", {"inputs": "q", "targets": " "}) == "empty_turn"


def test_messages_takes_nested_values_as_json_text_in_any_column() -> None:
    talk = '[{"role":"user","content":"hi"},{"role":"assistant","content":"ho"}]'
    assert convert("messages", {"messages": talk, "tools": "[]"}).messages[1]["content"] == "ho"
    assert refused("messages", {"messages": "hi"}) == "json"


THOUGHTS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "reasoning_content": "first"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d", "thinking": "second"},
]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (None, "keep"),
        ({}, "keep"),
        ({"preserve_thinking": None}, "keep"),
        ({"preserve_thinking": True}, "keep"),
        ({"preserve_thinking": False, "other": 1}, "last"),
        ('{"preserve_thinking": false}', "last"),
    ],
)
def test_preserve_thinking_says_which_reasoning_stays(settings: Any, kept: Any) -> None:
    talk = convert("messages", {"messages": THOUGHTS, "chat_template_kwargs": settings})
    assert to_stream(talk) == to_stream(Conversation(THOUGHTS), reasoning=kept)
    assert "reasoning_content" in THOUGHTS[1]


def test_preserve_thinking_is_true_or_false() -> None:
    for settings in ({"preserve_thinking": "yes"}, [], 5):
        assert refused("messages", {"messages": THOUGHTS, "chat_template_kwargs": settings}) == "schema"


def test_openai_tools_takes_calls_with_ids_as_they_are() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "find", "arguments": '{"q": "a"}'}}
    talk = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "r"},
        {"role": "assistant", "content": "ok"},
    ]
    tools = [{"type": "function", "function": TOOLS[0]}]
    assert convert("openai_tools", {"messages": talk, "tools": tools}) == Conversation(talk, tools)


def test_openai_tools_gives_ids_to_calls_of_functions() -> None:
    legacy = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "function_call": {"name": "find", "arguments": '{"q": "a"}'}},
        {"role": "function", "name": "find", "content": "r"},
        {"role": "assistant", "content": None, "function_call": {"name": "find", "arguments": "{}"}},
        {"role": "function", "name": "find", "content": "s"},
        {"role": "assistant", "content": "ok"},
    ]
    talk = convert("openai_tools", {"messages": legacy, "functions": TOOLS})
    assert talk.tools == TOOLS
    assert [m["tool_calls"][0]["id"] for m in talk.messages if "tool_calls" in m] == ["a1", "a2"]
    assert [m["tool_call_id"] for m in talk.messages if m["role"] == "tool"] == ["a1", "a2"]
    to_stream(talk)
    twice = [*legacy[:3], legacy[2]]
    other = [*legacy[:2], {"role": "function", "name": "lose", "content": "r"}]
    for orphan in (twice, other, legacy[2:]):
        assert refused("openai_tools", {"messages": orphan, "functions": TOOLS}) == "orphan_observation"
    both = [legacy[1] | {"tool_calls": [{"id": "x"}]}]
    assert refused("openai_tools", {"messages": both, "functions": TOOLS}) == "tool_calls"
    assert refused("openai_tools", {"messages": legacy, "functions": TOOLS, "tools": TOOLS}) == "tools"


def test_sharegpt_takes_a_column_of_system_text() -> None:
    row = {"conversations": '[{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]', "system": "s"}
    assert [m["role"] for m in convert("sharegpt", row).messages] == ["system", "user", "assistant"]
    assert len(convert("sharegpt", row | {"system": ""}).messages) == 2
    assert refused("sharegpt", row | {"system": 5}) == "schema"


def test_a_score_is_no_truth_value() -> None:
    assert refused("opencode", {"input": "q", "output": "a", "average_test_score": True}) == "score"


def source(adapter: str, **settings: Any) -> SourceSpec:
    return SourceSpec("mine", "x.jsonl", adapter, **settings)


def test_columns_go_by_the_names_of_the_source() -> None:
    adapter = adapter_for(source("aya", columns={"inputs": "question"}))
    assert adapter.needs == (("question",), ("targets",))
    assert adapter.columns == ("question", "targets")
    # its own name is of no account where another stands for it
    talk = adapter.convert({"question": "q", "targets": "a", "inputs": "other"})
    assert talk.messages[0]["content"] == "q"
    with pytest.raises(ValueError, match=r"'mine': the adapter 'aya' has no column input; it has inputs, targets"):
        adapter_for(source("aya", columns={"input": "question"}))


def test_filters_leave_rows_out_and_ask_for_their_columns() -> None:
    adapter = adapter_for(source("aya", filters=['lang in ["eng", "fra"]', "score >= 0.5"]))
    assert adapter.columns == ("inputs", "targets", "lang", "score")
    row = {"inputs": "q", "targets": "a", "lang": "fra", "score": "0.5"}
    assert adapter.convert(row).messages[1]["content"] == "a"
    assert pickle.loads(pickle.dumps(adapter)).convert(row) == adapter.convert(row)
    for change in ({"lang": "deu"}, {"lang": None}, {"score": 0.4}, {"score": "nan"}, {"score": None}):
        with pytest.raises(ProtocolError) as caught:
            adapter.convert(row | change)
        assert caught.value.reason == "filtered"
    assert str(caught.value) == "score: None is not >= 0.5 [filtered]"


@pytest.mark.parametrize(
    ("text", "value", "good"),
    [
        ("n == 1", 1, True),
        ("n == 1", 1.0, True),
        ("n == 1", True, False),
        ("n == true", 1, False),
        ("n == null", None, True),
        ("n != null", 0, True),
        ('n != "a in b"', "c", True),
        ("n not in [1, null]", None, False),
        ("n not in [1]", 2, True),
        ("n < 3", "2.5", True),
        ("n < 3", "-inf", False),
        ("n<=3", 3, True),
        ("n > 3", True, False),
        ("n > 3", [4], False),
        ("n > 3", 10**400, False),
    ],
)
def test_filters_compare_as_json_does(text: str, value: Any, good: bool) -> None:
    wanted = parse_filter(text)
    if good:
        wanted.check({"n": value})
    else:
        with pytest.raises(ProtocolError):
            wanted.check({"n": value})


def test_filters_name_columns_of_any_spelling() -> None:
    assert parse_filter('licence kind == "MIT"').column == "licence kind"
    assert parse_filter('origin not in ["a >= b"]') == parse_filter(' origin  not in  ["a >= b"] ')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("score", "cannot be read: write a column"),
        ("score >= high", "cannot be read"),
        ("score >= __import__('os')", "cannot be read"),
        ("score == NaN", "cannot be read"),
        ('score in "abc"', "asks for in without a list"),
        ('score >= "0.8"', "compares with '0.8': >= takes a number"),
        ("score < true", "compares with True"),
    ],
)
def test_filters_that_cannot_be_read_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapter_for(source("aya", filters=[text]))


FORMAT = """
from smi.protocol.conversation import Conversation
from smi.protocol.stream import ProtocolError

def talk(row):
    if row["kind"] == "loop":
        tools = []
        tools.append(tools)
        return Conversation([{"role": "assistant", "content": "a"}], tools)
    if row["kind"] == "many":
        return Conversation([{"role": "assistant", "content": "a"}] * 1000)
    if row["kind"] == "deep":
        value = []
        for _ in range(100):
            value = [value]
        return Conversation([{"role": "assistant", "content": value}])
    if row["kind"] == "own":
        raise ProtocolError("off_topic", "kind", "not ours")
    if row["kind"] == "nothing":
        return None
    return Conversation([{"role": "assistant", "content": row["text"]}])

number = 5
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a package with a module `form`, and one that does not import."""
    (tmp_path / "customfmt").mkdir()
    (tmp_path / "customfmt/form.py").write_text(FORMAT)
    (tmp_path / "customfmt/broken.py").write_text("import nothing_of_this_name")
    monkeypatch.syspath_prepend(tmp_path)
    yield "customfmt"
    for name in [name for name in sys.modules if name.startswith("customfmt")]:
        del sys.modules[name]


def test_a_format_of_ones_own_is_a_function_that_the_source_names(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = get_adapter(f"custom:{package}.form:talk")
    assert (adapter.columns, adapter.needs) == (None, ())
    assert adapter.convert({"kind": "", "text": "hi"}).messages[0]["content"] == "hi"
    assert get_adapter(f"custom: {package}.form:talk") == adapter
    monkeypatch.setattr(budget, "MAX_NODES", 500)
    reasons = {
        "loop": "over_budget",
        "many": "over_budget",
        "deep": "nesting",
        "own": "off_topic",
        "nothing": "adapter",
    }
    for kind, reason in reasons.items():
        assert refused(f"custom:{package}.form:talk", {"kind": kind}) == reason
    with pytest.raises(ProtocolError, match=r"customfmt\.form:talk: KeyError: 'text' \[adapter\]"):
        adapter.convert({"kind": ""})


def test_a_format_of_ones_own_reads_the_columns_that_the_source_names(package: str) -> None:
    spec = source(f"custom:{package}.form:talk", columns={"text": "body", "kind": "type"}, filters=["n > 1"])
    adapter = adapter_for(spec)
    assert adapter.columns == ("body", "type", "n")
    assert adapter.convert({"body": "hi", "type": "", "n": 2, "text": "no"}).messages[0]["content"] == "hi"


def test_formats_that_are_not_there_are_named(package: str) -> None:
    for path, message in {
        "form": r"custom:form: write custom:package\.module:function",
        f"{package}.form": "write custom:",
        f"{package}.gone:talk": rf"the module {package}\.gone cannot be imported: ModuleNotFoundError.*PYTHONPATH",
        f"{package}.broken:talk": "cannot be imported: ModuleNotFoundError: No module named 'nothing_of_this_name'",
        f"{package}.form:walk": rf"the module {package}\.form has no function walk",
        f"{package}.form:number": "has no function number",
    }.items():
        with pytest.raises(ValueError, match=message):
            get_adapter(f"custom:{path}")


def test_values_are_counted_once_for_each_place_they_stand_in() -> None:
    shared = ["a"] * 10
    check_value([shared] * 10, "x")
    loop: dict[str, Any] = {"a": [1]}
    loop["a"].append(loop)
    with pytest.raises(ProtocolError, match="contains itself"):
        check_value(loop, "x")
    with pytest.raises(ProtocolError, match="larger than"):
        check_value({"a": "x" * (budget.MAX_ROW_BYTES + 1)}, "x")
    # a bomb of 10^30 values in thirty lists
    bomb: list[Any] = ["x"] * 10
    for _ in range(30):
        bomb = [bomb] * 10
    with pytest.raises(ProtocolError, match="more than"):
        check_value(bomb, "x")


# these speak of what a model or a peer wrote, of streams and ids, never of rows
_ELSEWHERE = {
    "protocol/incremental.py",
    "protocol/codec.py",
    "protocol/control.py",
    "protocol/transcript.py",
    "protocol/tokens.py",
    "protocol/render.py",
}
_NOT_OF_ROWS = {"act", "block_type", "empty_transmission", "mixed_sides", "header", "id", "name"}


def test_every_reason_to_reject_a_row_has_its_sentence() -> None:
    root = Path(smi.__file__).parent
    given: set[str] = set()
    for file in [*(root / "data").glob("*.py"), *(root / "protocol").glob("*.py")]:
        if file.relative_to(root).as_posix() in _ELSEWHERE:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("ProtocolError", "Rejection"):
                given |= {c.value for c in ast.walk(node.args[0]) if isinstance(c, ast.Constant)}
    given -= {"undeclared_"} | _NOT_OF_ROWS
    assert given <= REASONS.keys()
    # and no sentence is left of a reason that is gone; the rest is given under a name, or by the writer of mixtures
    named = {"tool_call", "tool_response", "undeclared_tool", "undeclared_action", "tools"}
    writers = {"duplicate", "near_duplicate", "contaminated", "held_out", "not_held_out", "time_out", "crash", "span"}
    assert REASONS.keys() - given <= named | writers
    assert all(sentence and sentence[-1] != "." for sentence in REASONS.values())
    assert describe("off_topic") == "a reason of the source's own adapter"
