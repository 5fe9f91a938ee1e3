import json
from pathlib import Path
from typing import Any

import pytest

from smi.protocol import Conversation, ProtocolError, Stream, loads, to_stream

DATA = Path(__file__).parents[1] / "data"
TOOLS = [{"name": name, "parameters": {"type": "object"}} for name in ("read_file", "edit_file", "bash")]


def user(content: Any = "u", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def says(content: Any = "x", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(id: Any = "a1", name: Any = "bash", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(id: Any = "a1", content: Any = "ok", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content, **more}


def show(stream: Stream) -> str:
    """A stream as the protocol text prints it."""
    lines: list[str] = []
    for transmission in stream.transmissions:
        for block in transmission.blocks:
            lines += [block.type.token, block.payload]
        lines.append("<|eot|>")
    return "\n".join(lines)


def compiled(*messages: dict[str, Any], **more: Any) -> str:
    options: dict[str, Any] = {"tools": TOOLS, **more}
    return show(to_stream(Conversation(list(messages), **options)))


def test_coding_agent_of_the_protocol() -> None:
    messages = [
        {"role": "system", "content": "You are a secure autonomous coding agent."},
        {
            "role": "developer",
            "content": "Inspect code before modifying it.\nRun relevant tests after changes.",
        },
        user("Fix the failing authentication test."),
        says(
            None,
            reasoning_content="I need to inspect the implementation and its tests.",
            tool_calls=[
                call("a1", "read_file", {"path": "src/auth.ts"}),
                call("a2", "read_file", '{ "path" : "tests/auth.test.ts" }'),
            ],
        ),
        result("a1", "..."),
        result("a2", "..."),
        says(
            "",
            thinking="The timestamp comparison uses inconsistent units.",
            tool_calls=[{"id": "a3", "name": "edit_file", "arguments": {"path": "src/auth.ts", "patch": "..."}}],
        ),
        result("a3", None),
        {"role": "assistant", "tool_calls": [call("a4", "bash", '{"command":"npm test"}')]},
        result("a4", "42 tests passed"),
        says("Fixed the authentication timestamp comparison. All 42 tests pass.", tool_calls=[]),
    ]
    ctrl = {"reasoning": {"mode": "adaptive", "effort": "high", "max_tokens": 8192}}
    assert compiled(*messages, ctrl=ctrl) == (
        """<|ctrl|>
{"reasoning":{"mode":"adaptive","effort":"high","max_tokens":8192}}
<|sys|>
You are a secure autonomous coding agent.
<|dev|>
Inspect code before modifying it.
Run relevant tests after changes.
<|caps|>
{"tools":[{"name":"read_file","parameters":{"type":"object"}},"""
        """{"name":"edit_file","parameters":{"type":"object"}},{"name":"bash","parameters":{"type":"object"}}]}
<|usr|>
Fix the failing authentication test.
<|eot|>
<|think|>
I need to inspect the implementation and its tests.
<|act|>
{"id":"a1","type":"tool","name":"read_file","arguments":{"path":"src/auth.ts"}}
<|act|>
{"id":"a2","type":"tool","name":"read_file","arguments":{"path":"tests/auth.test.ts"}}
<|eot|>
<|obs|>
{"caused_by":"a1","ok":true,"content":"..."}
<|obs|>
{"caused_by":"a2","ok":true,"content":"..."}
<|eot|>
<|think|>
The timestamp comparison uses inconsistent units.
<|act|>
{"id":"a3","type":"tool","name":"edit_file","arguments":{"path":"src/auth.ts","patch":"..."}}
<|eot|>
<|obs|>
{"caused_by":"a3","ok":true}
<|eot|>
<|act|>
{"id":"a4","type":"tool","name":"bash","arguments":{"command":"npm test"}}
<|eot|>
<|obs|>
{"caused_by":"a4","ok":true,"content":"42 tests passed"}
<|eot|>
<|out|>
Fixed the authentication timestamp comparison. All 42 tests pass.
<|eot|>"""
    )


def test_parallel_calls_answered_out_of_order_and_a_failure() -> None:
    error = {"type": "permission_denied", "message": "Access denied"}
    text = compiled(
        user(),
        says(tool_calls=[call("a1", "read_file", {"path": "a.py"}), call("a2", "read_file", {"path": "b.py"})]),
        result("a2", "..."),
        result("a1", "", is_error=True, error=error),
        says(),
    )
    assert (
        """<|act|>
{"id":"a1","type":"tool","name":"read_file","arguments":{"path":"a.py"}}
<|act|>
{"id":"a2","type":"tool","name":"read_file","arguments":{"path":"b.py"}}
<|eot|>
<|obs|>
{"caused_by":"a2","ok":true,"content":"..."}
<|obs|>
{"caused_by":"a1","ok":false,"error":{"type":"permission_denied","message":"Access denied"}}
<|eot|>"""
        in text
    )


def test_consecutive_messages_share_a_transmission() -> None:
    assert compiled(user("a"), user("b"), says("c"), says("d", thinking="e"), user("f"), tools=None) == (
        "<|usr|>\na\n<|usr|>\nb\n<|eot|>\n<|out|>\nc\n<|think|>\ne\n<|out|>\nd\n<|eot|>\n<|usr|>\nf\n<|eot|>"
    )


def test_capabilities_take_their_place() -> None:
    caps = {"actions": ["navigate"]}
    line = '{"tools":[{"name":"f"}],"actions":["navigate"]}'
    for more in (
        {"tools": [{"name": "f"}], "caps": caps},
        {"tools": None, "caps": {"tools": [{"name": "f"}], **caps}},
    ):
        text = compiled({"role": "system", "content": "s"}, user(), says(tool_calls=[call("a1", "f")]), **more)
        assert text.startswith(f"<|sys|>\ns\n<|caps|>\n{line}\n<|usr|>\nu\n<|eot|>\n<|out|>")
    # a conversation that the model opens still hears first what it may do
    assert compiled(says(), tools=[{"name": "f"}]).startswith('<|caps|>\n{"tools":[{"name":"f"}]}\n<|eot|>\n<|out|>')
    assert compiled(says(), tools=[], caps={}, ctrl={"x": 1}) == '<|ctrl|>\n{"x":1}\n<|eot|>\n<|out|>\nx\n<|eot|>'


def test_later_instructions_open_a_transmission_of_their_own() -> None:
    text = compiled(user(), says(), {"role": "system", "content": "s"}, user("v"), says(), tools=None)
    assert "<|eot|>\n<|sys|>\ns\n<|usr|>\nv\n<|eot|>" in text


def test_payloads_are_kept_as_they_are() -> None:
    parts = [{"type": "text", "text": " a\n"}, {"type": "text", "text": "b "}]
    assert compiled(user(parts), says("\n x \n", reasoning=" \t\n"), tools=None) == (
        "<|usr|>\n a\nb \n<|eot|>\n<|out|>\n\n x \n\n<|eot|>"
    )
    assert compiled(user(""), says(), tools=None).startswith("<|usr|>\n\n<|eot|>")


@pytest.mark.parametrize(
    ("content", "written"),
    [
        ('{"a": 1}', '"{\\"a\\": 1}"'),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        ([{"type": "text", "text": "t"}], '[{"type":"text","text":"t"}]'),
        (3, "3"),
        (False, "false"),
        ("", '""'),
    ],
)
def test_results_as_text_or_json(content: Any, written: str) -> None:
    text = compiled(user(), says(tool_calls=[call()]), result(content=content), says())
    assert f'{{"caused_by":"a1","ok":true,"content":{written}}}' in text


def test_a_prompt_needs_no_target() -> None:
    stream = to_stream(Conversation([user("hi")]), require_target=False)
    assert show(stream) == "<|usr|>\nhi\n<|eot|>"


BAD: list[tuple[str, str, list[Any]]] = [
    ("messages[0]", "messages", ["hi"]),
    ("messages", "empty", []),
    ("messages", "no_target", [user()]),
    ("messages[0]", "role", [{"role": "wizard", "content": "x"}]),
    ("messages[0]", "role", [{"content": "x"}]),
    ("messages[0]", "role", [{"role": ["user"], "content": "x"}]),
    ("messages[1]", "order", [user(), {"role": "system", "content": "s"}, says()]),
    (
        "messages[1]",
        "order",
        [{"role": "developer", "content": "d"}, {"role": "system", "content": "s"}, says()],
    ),
    ("messages[0]", "content", [user(None), says()]),
    ("messages[0]", "content", [user(7), says()]),
    ("messages[0].content[0]", "content", [user([{"type": "image_url", "image_url": "x"}]), says()]),
    ("messages[0].content[0]", "content", [user(["bare"]), says()]),
    ("messages[0].content[0]", "text", [user([{"type": "text"}]), says()]),
    ("messages[0]", "text", [user("bad \ud800 char"), says()]),
    ("messages[1]", "text", [user(), says(thinking="\udfff")]),
    ("messages[0]", "field", [user(tool_calls=[call()]), says()]),
    ("messages[0]", "field", [user(thinking="hm"), says()]),
    ("messages[1]", "field", [user(), says(function_call={"name": "bash", "arguments": "{}"})]),
    ("messages[1]", "empty_turn", [user(), says("  \n\t ")]),
    ("messages[1]", "empty_turn", [user(), says(None, thinking=" ", tool_calls=[])]),
    ("messages[1]", "empty_turn", [user(), {"role": "assistant"}]),
    ("messages[1]", "reasoning", [user(), says(thinking="a", reasoning_content="b")]),
    ("messages[1]", "tool_calls", [user(), says(tool_calls={})]),
    ("messages[1].tool_calls[0]", "tool_calls", [user(), says(tool_calls=["bash"])]),
    ("messages[1].tool_calls[0]", "tool_calls", [user(), says(tool_calls=[call(name=None)])]),
    ("messages[1].tool_calls[0]", "missing_call_id", [user(), says(tool_calls=[call(id=None)])]),
    ("messages[1].tool_calls[1]", "duplicate_call_id", [user(), says(tool_calls=[call(), call()])]),
    (
        "messages[2].tool_calls[0]",
        "duplicate_call_id",
        [user(), says(tool_calls=[call()]), says(tool_calls=[call()])],
    ),
    ("messages[1].tool_calls[0]", "undeclared_tool", [user(), says(tool_calls=[call(name="launch_rocket")])]),
    ("messages[1].tool_calls[0].arguments", "arguments", [user(), says(tool_calls=[call(arguments="{")])]),
    (
        "messages[1].tool_calls[0].arguments",
        "arguments",
        [user(), says(tool_calls=[call(arguments='["a"]')])],
    ),
    ("messages[1].tool_calls[0].arguments", "arguments", [user(), says(tool_calls=[call(arguments=None)])]),
    ("messages[2]", "missing_call_id", [user(), says(tool_calls=[call()]), result(None)]),
    ("messages[2]", "orphan_observation", [user(), says(tool_calls=[call()]), result("b9")]),
    ("messages[1]", "orphan_observation", [user(), result(), says(tool_calls=[call()])]),
    ("messages[3]", "duplicate_observation", [user(), says(tool_calls=[call()]), result(), result()]),
    ("messages[2]", "observation", [user(), says(tool_calls=[call()]), result(ok="yes")]),
    ("messages[2]", "observation", [user(), says(tool_calls=[call()]), result(ok=True, is_error=True)]),
    ("messages[2].error", "observation", [user(), says(tool_calls=[call()]), result(ok=False)]),
    ("messages[2].error", "observation", [user(), says(tool_calls=[call()]), result(error={"type": "t"})]),
    (
        "messages[2].content.a",
        "number",
        [user(), says(tool_calls=[call()]), result(content={"a": float("nan")})],
    ),
]


@pytest.mark.parametrize(("where", "reason", "messages"), BAD)
def test_refused_with_the_place(where: str, reason: str, messages: list[Any]) -> None:
    with pytest.raises(ProtocolError) as caught:
        to_stream(Conversation(messages, tools=TOOLS))
    assert caught.value.reason == reason
    assert caught.value.where.startswith(where)


@pytest.mark.parametrize("messages", [None, "hi", {"role": "user"}])
def test_messages_must_be_a_list(messages: Any) -> None:
    with pytest.raises(ProtocolError, match=r"\[messages\]"):
        to_stream(Conversation(messages))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"tools": 7}, "tools"),
        ({"tools": []}, "undeclared_tool"),
        ({"tools": None}, "undeclared_tool"),
        ({"caps": []}, "caps"),
        ({"caps": {"tools": []}}, "caps"),
        ({"caps": {"x": {1}}}, "json"),
        ({"ctrl": []}, "ctrl"),
        ({"ctrl": {"reasoning": {"mode": "never"}}}, "ctrl"),
    ],
)
def test_surroundings_refused(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        compiled(user(), says(tool_calls=[call()]), **more)
    assert caught.value.reason == reason


def test_rows_of_public_form() -> None:
    path = DATA / "hub/nvidia/Nemotron-SFT-Agentic-v2/data/tool_calling.jsonl"
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    cases = json.loads((DATA / "hub/expectations.json").read_text())["nemotron_agentic"]["cases"]
    reasons: dict[int, str] = {}
    for index, line in enumerate(lines):
        try:
            row = loads(line)
            if not isinstance(row, dict):
                reasons[index] = "not a row"
                continue
            to_stream(Conversation(row["messages"], tools=row["tools"]))
        except ProtocolError as error:
            reasons[index] = error.reason
    assert sorted(reasons) == [case["row"] for case in cases if case["expect"] == "reject"]
    assert [reasons[index] for index in range(120, 132)] == [
        "undeclared_tool",
        "arguments",
        "arguments",
        "orphan_observation",
        "duplicate_call_id",
        "undeclared_tool",
        "tools",
        "json",
        "not a row",
        "text",
        "arguments",
        "arguments",
    ]
