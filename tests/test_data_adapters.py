"""Adapters: what each makes of a row, and the rows it refuses."""

from typing import Any

import pytest

from smi.data.adapters import ADAPTERS, get_adapter
from smi.protocol.conversation import Conversation
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
