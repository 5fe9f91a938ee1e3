from dataclasses import replace
from typing import Any

import pytest

from smi.protocol import (
    Block,
    BlockType,
    Conversation,
    ProtocolError,
    Span,
    Stream,
    Transmission,
    derive_ctrl,
    to_stream,
)
from smi.tokenizer import Tokenizer


def talk(*thoughts: str | None, ctrl: dict[str, Any] | None = None) -> Conversation:
    messages: list[dict[str, Any]] = []
    for thought in thoughts:
        messages += [{"role": "user", "content": "u"}, {"role": "assistant", "content": "o", "thinking": thought}]
    return Conversation(messages, ctrl=ctrl)


@pytest.mark.parametrize(
    ("conversation", "expected"),
    [
        (talk(None, None), {"mode": "disabled"}),
        (talk("hm", "so"), {"mode": "fixed", "max_tokens": 16}),
        (talk("hm", None), {"mode": "adaptive", "max_tokens": 16}),
        (talk("word " * 40), {"mode": "fixed", "max_tokens": 64}),
    ],
)
def test_derived_from_what_the_row_contains(conversation: Conversation, expected: Any, world: Tokenizer) -> None:
    ctrl = derive_ctrl(conversation, world)
    assert ctrl == {"reasoning": expected}
    # the row with its own controls obeys them, and says the same of itself
    row = replace(conversation, ctrl=ctrl)
    assert derive_ctrl(row, world) == derive_ctrl(to_stream(row), world) == ctrl


def test_what_a_row_states_stays(world: Tokenizer) -> None:
    stated = {"reasoning": {"effort": 0.5, "max_tokens": 8192}, "realtime": True}
    derived = derive_ctrl(talk("hm", ctrl=stated), world)
    assert derived == {"reasoning": {"mode": "fixed", "effort": 0.5, "max_tokens": 8192}, "realtime": True}
    assert list(derived["reasoning"]) == ["mode", "effort", "max_tokens"]
    assert derive_ctrl(talk("hm", ctrl={"realtime": True}), world)["realtime"]


def test_the_policy_decides_what_there_is_to_derive_from(world: Tokenizer) -> None:
    conversation = talk("hm", "hm")
    assert derive_ctrl(to_stream(conversation, reasoning="drop"), world) == {"reasoning": {"mode": "disabled"}}
    assert derive_ctrl(to_stream(conversation, reasoning="last"), world)["reasoning"]["mode"] == "adaptive"


def test_spans_and_several_thoughts_count(world: Tokenizer) -> None:
    thought = Block(BlockType.THINK, ("a", Span("vision", (1,) * 20), "b"))
    stream = Stream((Transmission((thought, thought, Block(BlockType.THINK, (Span("vision", (1,)),)))),))
    assert derive_ctrl(stream, world) == {"reasoning": {"mode": "fixed", "max_tokens": 64}}


@pytest.mark.parametrize(
    ("conversation", "reason"),
    [
        (talk("hm", ctrl={"reasoning": {"mode": "disabled"}}), "ctrl"),
        (talk("word " * 40, ctrl={"reasoning": {"max_tokens": 8}}), "ctrl"),
        (Conversation([{"role": "user", "content": "u"}]), "no_target"),
        (Conversation([]), "empty"),
    ],
)
def test_rows_that_break_their_controls_are_refused(conversation: Conversation, reason: str, world: Tokenizer) -> None:
    with pytest.raises(ProtocolError, match=rf"\[{reason}\]"):
        derive_ctrl(conversation, world)
