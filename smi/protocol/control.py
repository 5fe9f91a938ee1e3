"""CTRL for training rows: what a row shows of its own reasoning, so that a model sees its controls obeyed.

Protocol sections: "Reasoning Control", "Reasoning Modes", "Reasoning Budget".
"""

from __future__ import annotations

from typing import Any

from smi.protocol.codec import PlainTokenizer
from smi.protocol.conversation import Conversation, to_stream
from smi.protocol.json_text import loads
from smi.protocol.payloads import ctrl_payload
from smi.protocol.stream import Block, ProtocolError, Stream
from smi.protocol.tokens import BlockType, Side

_SMALLEST_BUDGET = 16


def derive_ctrl(subject: Stream | Conversation, tokenizer: PlainTokenizer) -> dict[str, Any]:
    """The CTRL object that a finished row obeys: its own, with reasoning mode and budget filled in where absent.

    mode: "disabled" without THINK, "fixed" when every model transmission has one, "adaptive" otherwise.
    max_tokens: the smallest power of two, from 16 up, that no model transmission's THINK blocks exceed. Tokens of
    a payload count with the newlines around it, ids of spans one each; the type id does not. A budget is left out
    where nothing reasons. An effort is never made up.

    Raises ProtocolError "ctrl" where the row breaks what its own CTRL says (reasoning although disabled, or past
    its budget), "no_target" without a model transmission to look at, and the reasons of `to_stream`.
    """
    stream = to_stream(subject, require_target=False) if isinstance(subject, Conversation) else subject
    spent = [
        sum(_tokens(block, tokenizer) for block in transmission.blocks if block.type is BlockType.THINK)
        for transmission in stream.transmissions
        if transmission.side is Side.MODEL
    ]
    if not spent:
        raise ProtocolError("no_target", "", "no model transmission shows whether the row reasons")
    ctrl = _given(stream)
    stated = ctrl.get("reasoning", {})
    most = max(spent)
    mode = "disabled" if not most else "fixed" if all(spent) else "adaptive"
    if most and stated.get("mode") == "disabled":
        raise ProtocolError("ctrl", "ctrl.reasoning.mode", "the row reasons although its CTRL disables it")
    if most > stated.get("max_tokens", most):
        problem = f"a transmission reasons for {most} tokens, past the budget of {stated['max_tokens']}"
        raise ProtocolError("ctrl", "ctrl.reasoning.max_tokens", problem)
    reasoning = {"mode": stated.get("mode", mode)}
    reasoning |= {"effort": stated["effort"]} if "effort" in stated else {}
    reasoning |= {"max_tokens": max(_SMALLEST_BUDGET, 1 << (most - 1).bit_length())} if most else {}
    return {**ctrl, "reasoning": reasoning | stated} if ctrl else {"reasoning": reasoning}


def _given(stream: Stream) -> dict[str, Any]:
    """The CTRL object at the head of a stream; empty where there is none."""
    first = stream.transmissions[0].blocks[0]
    if first.type is not BlockType.CTRL:
        return {}
    ctrl = loads(first.text)
    # held against the same rules as one that is written
    ctrl_payload(ctrl)
    return ctrl


def _tokens(block: Block, tokenizer: PlainTokenizer) -> int:
    """Tokens of a payload in its frame: each run of text encoded as one string, as the codec does it."""
    parts = list(block.parts)
    if not parts or not isinstance(parts[0], str):
        parts.insert(0, "")
    parts[0] = f"\n{parts[0]}"
    if not isinstance(parts[-1], str):
        parts.append("")
    parts[-1] = f"{parts[-1]}\n"
    return sum(len(tokenizer.encode(part)) if isinstance(part, str) else len(part.ids) for part in parts)
