import json
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from hypothesis import given
from hypothesis import strategies as st
from talk import NAMESPACES, conversations, hostile, objects

from smi.protocol import (
    BlockType,
    Conversation,
    ProtocolError,
    Side,
    Span,
    Stream,
    decode,
    encode,
    loads,
    to_stream,
)
from smi.tokenizer import Tokenizer

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
            lines += [block.type.token, block.text]
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
        ([{"type": "text", "text": "t"}, {"type": "text", "text": "u"}], '"tu"'),
        ([{"type": "text", "text": "t"}, 1], '[{"type":"text","text":"t"},1]'),
        ([], "[]"),
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
    ("messages[1]", "field", [user(), says("hello", weight=0)]),
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
        ({"caps": {"actions": "wave"}}, "caps"),
        ({"caps": {"actions": ["wave", "wave"]}}, "tools"),
        ({"caps": {"actions": [{"name": "wave", "parameters": {"type": "dict"}}]}}, "schema"),
        ({"tools": [{"name": "bash", "parameters": {"type": "dict"}}]}, "schema"),
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


def span(*ids: int, namespace: str = "v") -> dict[str, Any]:
    return {"type": "span", "namespace": namespace, "ids": list(ids)}


def blocks(*messages: dict[str, Any], **more: Any) -> list[tuple[str, Any]]:
    options: dict[str, Any] = {"tools": TOOLS, "caps": {"actions": ["wave", GRIP]}, **more}
    stream = to_stream(Conversation(list(messages), **options))
    found = [(block.type.name, block.payload) for part in stream.transmissions for block in part.blocks]
    return [block for block in found if block[0] != "CAPS"]


NAMED = {"id": "a1", "type": "action", "name": "wave", "arguments": {}}
GRIP = {"name": "grip", "parameters": {"properties": {"force": {"type": "number"}}}}


def test_parts_become_one_payload() -> None:
    data = {"type": "smi_payload", "payload": {"name": "Alice", "age": 31}}
    text = {"type": "text", "text": "<|sys|>"}
    assert blocks(user([text, data, text]), says([data]), tools=None) == [
        ("USR", '<|sys|>{"name":"Alice","age":31}<|sys|>'),
        ("OUT", '{"name":"Alice","age":31}'),
    ]
    assert blocks(user([text, span(1, 2), span(3)]), says([span(4)], thinking=[span(5)])) == [
        ("USR", ("<|sys|>", Span("v", (1, 2, 3)))),
        ("THINK", (Span("v", (5,)),)),
        ("OUT", (Span("v", (4,)),)),
    ]
    # the code points of a token over two parts meet as text
    assert blocks(user([{"type": "text", "text": "<|s"}, {"type": "text", "text": "ys|>"}]), says())[0][1] == "<|sys|>"


def test_actions() -> None:
    named = {"id": "a1", "type": "action", "name": "grip", "arguments": {"force": 2}}
    observed = {"role": "environment", "content": "bump"}
    assert blocks(
        user(),
        says(None, tool_calls=[named, {"type": "action", "content": [span(7)]}, {"type": "action", "content": "left"}]),
        result(content=None),
        observed,
        says(),
    )[1:-1] == [
        ("ACT", '{"id":"a1","type":"action","name":"grip","arguments":{"force":2}}'),
        ("ACT", (Span("v", (7,)),)),
        ("ACT", "left"),
        ("OBS", '{"caused_by":"a1","ok":true}'),
        ("OBS", "bump"),
    ]


MORE_BAD: list[tuple[str, str, list[Any]]] = [
    ("messages[0].content[0]", "content", [user([{"type": "smi_payload", "payload": "text"}]), says()]),
    ("messages[0].content[0]", "content", [user([{"type": "smi_payload"}]), says()]),
    ("messages[0].content[1].x", "number", [user([span(1), {"type": "smi_payload", "payload": {"x": 1e999}}]), says()]),
    ("messages[0].content[0]", "span", [user([span()]), says()]),
    ("messages[0].content[0]", "span", [user([span(-1)]), says()]),
    ("messages[0].content[0]", "span", [user([span(True)]), says()]),
    ("messages[0].content[0]", "span", [user([{"type": "span", "namespace": "v"}]), says()]),
    ("messages[0].content[0]", "span", [user([{"type": "span", "ids": [1]}]), says()]),
    ("messages[1].content[0]", "content", [user(), says([{"type": "thinking", "thinking": "hm"}])]),
    ("messages[0]", "field", [user(images=["x.png"]), says()]),
    ("messages[1].tool_calls[0]", "tool_calls", [user(), says(tool_calls=[call() | {"type": "custom"}])]),
    ("messages[1].tool_calls[0]", "undeclared_action", [user(), says(tool_calls=[{**NAMED, "name": "fly"}])]),
    ("messages[1].tool_calls[0]", "undeclared_action", [user(), says(tool_calls=[{**NAMED, "name": "bash"}])]),
    ("messages[1].tool_calls[0]", "undeclared_tool", [user(), says(tool_calls=[call(name="wave")])]),
    ("messages[1].tool_calls[0].arguments", "arguments", [user(), says(tool_calls=[{**NAMED, "arguments": "{"}])]),
    ("messages[1].tool_calls[0]", "tool_calls", [user(), says(tool_calls=[{"type": "action", "content": ' {"a":1}'}])]),
    ("messages[1].tool_calls[0]", "tool_calls", [user(), says(tool_calls=[{"type": "action", "content": []}])]),
    ("messages[1].tool_calls[0]", "tool_calls", [user(), says(tool_calls=[{**NAMED, "content": "left"}])]),
    ("messages[1]", "observation", [user(), {"role": "environment", "content": '{"caused_by":"a1","ok":true}'}]),
    ("messages[1]", "observation", [user(), {"role": "environment", "content": ' {"a":1,"a":2}'}]),
    ("messages[1]", "content", [user(), {"role": "environment"}]),
    ("messages[2].content[0]", "content", [user(), says(tool_calls=[call()]), result(content=[span(1)])]),
]


@pytest.mark.parametrize(("where", "reason", "messages"), MORE_BAD)
def test_parts_and_actions_refused_with_the_place(where: str, reason: str, messages: list[Any]) -> None:
    with pytest.raises(ProtocolError) as caught:
        to_stream(Conversation(messages, tools=TOOLS, caps={"actions": ["wave"]}))
    assert caught.value.reason == reason
    assert caught.value.where.startswith(where)


def test_readings_of_the_environment_may_be_json() -> None:
    for reading in ('{"temperature":3}', "{not json", '{"x":{"caused_by":"a1"}}'):
        assert blocks({"role": "environment", "content": reading}, says())[0] == ("OBS", reading)


TURNS = [
    user("one"),
    says("a", thinking="first"),
    user("two"),
    says("", thinking="second", tool_calls=[call()]),
    result(),
    says("b", thinking="third"),
]


@pytest.mark.parametrize(
    ("policy", "thoughts"),
    [("keep", ["first", "second", "third"]), ("last", ["second", "third"]), ("drop", [])],
)
def test_reasoning_policy(policy: Any, thoughts: list[str]) -> None:
    stream = to_stream(Conversation(TURNS, tools=TOOLS), reasoning=policy)
    found = [block for part in stream.transmissions for block in part.blocks]
    assert [block.payload for block in found if block.type is BlockType.THINK] == thoughts
    assert [block.payload for block in found if block.type is BlockType.OUT] == ["a", "b"]


def test_reasoning_policy_never_leaves_an_empty_turn() -> None:
    with pytest.raises(ProtocolError, match=r"messages\[1\].*reasoning \[empty_turn\]"):
        to_stream(Conversation([user(), says(None, thinking="hm")]), reasoning="drop")
    with pytest.raises(ValueError, match="keep, last, drop"):
        to_stream(Conversation(TURNS, tools=TOOLS), reasoning="some")  # pyright: ignore[reportArgumentType]


def test_no_supervised_thought_is_empty(world: Tokenizer) -> None:
    for thought in ("", " ", "\n\t", [], [{"type": "text", "text": " "}], None):
        example = encode(to_stream(Conversation([user(), says(reasoning_content=thought)])), world)
        assert BlockType.THINK not in example.block_types


@given(conversation=conversations(hostile()), name=st.sampled_from(["world", "t1", *FAMILIES]))
def test_injection_is_impossible_in_any_slot(
    conversation: Conversation, name: str, family: dict[str, Tokenizer], special: dict[str, set[int]]
) -> None:
    stream = to_stream(conversation)
    tokenizer = family[name]
    ids = encode(stream, tokenizer, namespaces=NAMESPACES).input_ids.tolist()
    reserved = tokenizer.structural.all | special[name] | {tokenizer.eos_id}
    kinds = [[*(block.type for block in part.blocks), BlockType.EOT] for part in stream.transmissions]
    expected = [tokenizer.structural.id(kind) for part in kinds for kind in part]
    assert [id for id in ids if id in reserved] == [*expected, tokenizer.eos_id]
    assert decode(ids, tokenizer, namespaces=NAMESPACES) == stream


@given(arguments=objects(hostile()))
def test_arguments_as_text_or_mapping_give_the_same_ids(arguments: dict[str, Any], world: Tokenizer) -> None:
    first, second = (
        encode(to_stream(Conversation([user(), says(tool_calls=[call(arguments=given)])], tools=TOOLS)), world)
        for given in (arguments, json.dumps(arguments, indent=1))
    )
    assert first.input_ids.tolist() == second.input_ids.tolist()


@given(conversation=conversations(hostile()))
def test_supervised_tokens_are_the_words_of_the_model(conversation: Conversation, world: Tokenizer) -> None:
    stream = to_stream(conversation)
    example = encode(stream, world, namespaces=NAMESPACES)
    said = decode(example.input_ids[example.loss_mask], world, namespaces=NAMESPACES)
    assert said == Stream(tuple(part for part in stream.transmissions if part.side is Side.MODEL))
    ends = example.input_ids == world.structural.eot
    kinds = [part.side is Side.MODEL for part in stream.transmissions]
    assert example.loss_mask[ends].tolist() == kinds
