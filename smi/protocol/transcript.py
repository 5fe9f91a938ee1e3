"""Streams back to chat messages: the inverse of `smi.protocol.conversation.to_stream`, where there is one.

Protocol sections: "Runtime and Model Transmissions", "Actions and Observations".
"""

from __future__ import annotations

import re
from typing import Any

from smi.protocol.conversation import Conversation, answers_a_call, to_stream
from smi.protocol.json_text import loads
from smi.protocol.stream import Block, Payload, ProtocolError, Stream
from smi.protocol.tokens import BlockType

_ROLES = {
    BlockType.SYS: "system",
    BlockType.DEV: "developer",
    BlockType.USR: "user",
    BlockType.OBS: "environment",
}


def from_stream(stream: Stream, *, check: bool = True) -> Conversation:
    """The conversation that a stream was, or could have been, made from.

    check: compile the conversation again and compare; needless for a stream that `to_stream` made.

    For every stream it takes, `to_stream(from_stream(stream), require_target=False) == stream`. Calls come back
    with their arguments as mappings, reasoning as `reasoning_content`, mixed payloads as lists of parts.

    Raises ProtocolError for a stream that messages cannot express, with the block as `transmissions[i].blocks[j]`:
    "empty"; "side", two transmissions of one side in a row; "header", a CTRL or CAPS that is not the only one, or
    not in the first transmission; "canonical", a payload that the package would write in another way (other white
    space or key order, a THINK of white space alone); "act", a JSON object that is no call; those of `loads`; and
    those of `to_stream`, such as "undeclared_tool" or "orphan_observation".
    """
    places: list[str] = []
    messages: list[dict[str, Any]] = []
    header: dict[BlockType, Any] = {}
    for i, transmission in enumerate(stream.transmissions):
        if i and transmission.side is stream.transmissions[i - 1].side:
            raise ProtocolError("side", f"transmissions[{i}]", "messages cannot express an EOT within one side")
        for j, block in enumerate(transmission.blocks):
            where = f"transmissions[{i}].blocks[{j}]"
            if block.type in (BlockType.CTRL, BlockType.CAPS):
                if i or block.type in header:
                    problem = f"messages have room for one {block.type.token}, in the first transmission"
                    raise ProtocolError("header", where, problem)
                header[block.type] = _json(block, where)
                continue
            field, value = _field(block, where)
            if field == "message":
                messages.append(value)
                places.append(where)
                continue
            if not messages or not _has_room(messages[-1], field):
                messages.append({"role": "assistant"})
                places.append(where)
            if field == "tool_calls":
                messages[-1].setdefault(field, []).append(value)
            else:
                messages[-1][field] = value
    caps = header.get(BlockType.CAPS)
    tools = caps.pop("tools", None) if caps is not None else None
    conversation = Conversation(messages, tools=tools, ctrl=header.get(BlockType.CTRL), caps=caps or None)
    if check:
        _check(conversation, stream, places)
    return conversation


# an assistant message holds one THINK, then one OUT, then its calls
_ORDER = ("reasoning_content", "content", "tool_calls")


def _has_room(message: dict[str, Any], field: str) -> bool:
    """Whether a block can join the message before it without changing the order."""
    if message["role"] != "assistant":
        return False
    later = _ORDER[_ORDER.index(field) + (field == "tool_calls") :]
    return not any(key in message for key in later)


def _field(block: Block, where: str) -> tuple[str, Any]:
    """What a block becomes: a message of its own, or a field of an assistant message."""
    content = _content(block.payload)
    if block.type is BlockType.THINK:
        return "reasoning_content", content
    if block.type is BlockType.OUT:
        return "content", content
    if block.type is BlockType.ACT:
        return "tool_calls", _call(block, where)
    if block.type is BlockType.OBS and isinstance(block.payload, str) and answers_a_call(block.payload):
        result = _json(block, where)
        message = {"role": "tool", "tool_call_id": result.get("caused_by"), "ok": result.get("ok")}
        return "message", message | {key: result[key] for key in ("content", "error") if key in result}
    return "message", {"role": _ROLES[block.type], "content": content}


def _call(block: Block, where: str) -> dict[str, Any]:
    if not isinstance(block.payload, str) or not block.payload.lstrip().startswith("{"):
        return {"type": "action", "content": _content(block.payload)}
    value = _json(block, where)
    kind = value.get("type")
    if kind not in ("tool", "action"):
        raise ProtocolError("act", where, f"the object is no call: its type is {kind!r}, not 'tool' or 'action'")
    function = {"name": value.get("name"), "arguments": value.get("arguments")}
    if kind == "action":
        return {"id": value.get("id"), "type": "action", **function}
    return {"id": value.get("id"), "type": "function", "function": function}


def _json(block: Block, where: str) -> dict[str, Any]:
    if not isinstance(block.payload, str):
        raise ProtocolError("canonical", where, f"a {block.type.token} of a conversation is JSON, without spans")
    try:
        value = loads(block.payload)
    except ProtocolError as error:
        raise ProtocolError(error.reason, where, error.message) from None
    if not isinstance(value, dict):
        raise ProtocolError("canonical", where, f"expected a JSON object, got {type(value).__name__}")
    return value


def _content(payload: Payload) -> str | list[dict[str, Any]]:
    if isinstance(payload, str):
        return payload
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "span", "namespace": part.namespace, "ids": list(part.ids)}
        for part in payload
    ]


def _check(conversation: Conversation, stream: Stream, places: list[str]) -> None:
    """Refuse the conversation unless it compiles back to the stream."""
    try:
        again = to_stream(conversation, require_target=False)
    except ProtocolError as error:
        # name the block, since the caller has never seen the message
        found = re.match(r"messages\[(\d+)\]", error.where)
        where = places[int(found[1])] if found else error.where
        raise ProtocolError(error.reason, where, error.message) from None
    if again == stream:
        return
    for i, (given, made) in enumerate(zip(stream.transmissions, again.transmissions, strict=False)):
        for j, (ours, theirs) in enumerate(zip(given.blocks, made.blocks, strict=False)):
            if ours != theirs:
                problem = f"a conversation writes {str(theirs.payload)[:80]!r}, here stands {str(ours.payload)[:80]!r}"
                raise ProtocolError("canonical", f"transmissions[{i}].blocks[{j}]", problem)
    raise ProtocolError("canonical", "", "some blocks of the stream say nothing that a conversation would write")
