from typing import Any

import pytest
from hypothesis import given
from talk import NAMESPACES, clean, conversations, hostile

from smi.protocol import (
    Block,
    BlockType,
    Conversation,
    ProtocolError,
    Span,
    Stream,
    Transmission,
    decode,
    encode,
    from_stream,
    to_stream,
)
from smi.protocol.stream import Payload
from smi.tokenizer import Tokenizer

CAPS, CTRL, SYS, USR, OBS = BlockType.CAPS, BlockType.CTRL, BlockType.SYS, BlockType.USR, BlockType.OBS
THINK, OUT, ACT = BlockType.THINK, BlockType.OUT, BlockType.ACT
DECLARED = (CAPS, '{"tools":[{"name":"f"}],"actions":["wave"]}')
CALL = '{"id":"a1","type":"tool","name":"f","arguments":{}}'


def stream(*transmissions: list[tuple[BlockType, Payload]]) -> Stream:
    return Stream(tuple(Transmission(tuple(Block(*block) for block in blocks)) for blocks in transmissions))


@given(conversation=conversations(hostile()))
def test_streams_of_conversations_round_trip(conversation: Conversation, world: Tokenizer) -> None:
    made = to_stream(conversation)
    again = from_stream(made)
    assert to_stream(again) == made
    assert from_stream(to_stream(again)) == again
    # and through the ids
    assert (
        from_stream(decode(encode(made, world, namespaces=NAMESPACES).input_ids, world, namespaces=NAMESPACES)) == again
    )


@given(conversation=conversations(clean()))
def test_what_was_said_comes_back(conversation: Conversation) -> None:
    again = from_stream(to_stream(conversation))

    def kept(messages: list[dict[str, Any]]) -> list[Any]:
        ids = [call.get("id") for message in messages for call in message.get("tool_calls", [])]
        results = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
        return [ids, results, [message["role"] for message in messages if message["role"] != "assistant"]]

    assert kept(again.messages) == kept(conversation.messages)
    assert (again.ctrl, again.caps) == (conversation.ctrl, conversation.caps)


def test_order_of_blocks_decides_the_messages() -> None:
    made = stream(
        [(USR, "u"), DECLARED][::-1],
        [(OUT, "a"), (THINK, "b"), (THINK, "c"), (ACT, CALL), (OUT, "d"), (OUT, "e")],
        [(OBS, '{"caused_by":"a1","ok":true}')],
    )
    again = from_stream(made)
    assert to_stream(again) == made
    call = {"id": "a1", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert again.messages[1:6] == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "reasoning_content": "b"},
        {"role": "assistant", "reasoning_content": "c", "tool_calls": [call]},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]
    assert again.messages[6] == {"role": "tool", "tool_call_id": "a1", "ok": True}


def test_a_prompt_comes_back() -> None:
    for made in (stream([(SYS, "s"), DECLARED]), stream([(CTRL, "{}"), (USR, "u")])):
        assert to_stream(from_stream(made), require_target=False) == made


@pytest.mark.parametrize(
    ("made", "reason", "where"),
    [
        (stream(), "empty", ""),
        (stream([(CTRL, "{}")]), "empty", ""),
        (stream([(USR, "u")], [(USR, "v")]), "side", "transmissions[1]"),
        (stream([(OUT, "o")], [(CTRL, "{}"), (USR, "u")]), "header", "transmissions[1].blocks[0]"),
        (stream([(CTRL, "{}"), (CTRL, "{}"), (USR, "u")]), "header", "transmissions[0].blocks[1]"),
        (stream([(CTRL, '{ "a": 1}'), (USR, "u")]), "canonical", "transmissions[0].blocks[0]"),
        (stream([(CTRL, "adaptive"), (USR, "u")]), "json", "transmissions[0].blocks[0]"),
        (stream([(CTRL, '{"reasoning":{"mode":"x"}}'), (USR, "u")]), "ctrl", "ctrl.reasoning.mode"),
        (stream([(CTRL, (Span("v", (1,)),)), (USR, "u")]), "canonical", "transmissions[0].blocks[0]"),
        (stream([(CAPS, "[]"), (USR, "u")]), "canonical", "transmissions[0].blocks[0]"),
        (stream([(CAPS, '{"actions":["a"],"tools":[{"name":"f"}]}'), (USR, "u")]), "canonical", "transmissions[0]"),
        (stream([(CAPS, '{"tools":[]}'), (USR, "u")]), "canonical", "transmissions[0]"),
        (stream([(USR, "u")], [(THINK, " "), (OUT, "o")]), "canonical", "transmissions[1].blocks[0]"),
        (stream([(USR, "u")], [(OUT, "\n")]), "empty_turn", "transmissions[1].blocks[0]"),
        (stream([(USR, "u")], [(ACT, CALL)]), "undeclared_tool", "transmissions[1].blocks[0]"),
        (stream([DECLARED, (USR, "u")], [(ACT, CALL + " ")]), "canonical", "transmissions[1].blocks[0]"),
        (stream([DECLARED, (USR, "u")], [(OUT, "o"), (ACT, '{"go":1}')]), "act", "transmissions[1].blocks[1]"),
        (stream([DECLARED, (USR, "u")], [(ACT, '{"go')]), "json", "transmissions[1].blocks[0]"),
        (stream([(USR, "u")], [(ACT, "left")]), "undeclared_action", "transmissions[1].blocks[0]"),
        (stream([(OBS, '{"caused_by":"a9","ok":true}')]), "orphan_observation", "transmissions[0].blocks[0]"),
        (stream([(OBS, '{"caused_by":"a","caused_by":"b"}')]), "duplicate_key", "transmissions[0].blocks[0]"),
    ],
)
def test_streams_that_messages_cannot_express(made: Stream, reason: str, where: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        from_stream(made)
    assert caught.value.reason == reason
    assert caught.value.where.startswith(where)
