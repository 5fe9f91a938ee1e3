"""Chat messages, as Hugging Face and OpenAI write them, to streams; `smi.protocol.transcript` leads back.

Protocol sections: "Runtime and Model Transmissions", "Authority Model", "Actions and Observations", "Errors",
"Multimodality".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from smi.protocol.json_text import dumps, loads
from smi.protocol.payloads import Capabilities, act_payload, ctrl_payload, declare, obs_payload, require_declared
from smi.protocol.stream import Block, Payload, ProtocolError, Span, Stream, Transmission, check_text, in_order
from smi.protocol.tokens import BlockType, Side

_RUNTIME_ROLES = {
    "system": BlockType.SYS,
    "developer": BlockType.DEV,
    "user": BlockType.USR,
    "environment": BlockType.OBS,
}
ROLES = (*_RUNTIME_ROLES, "assistant", "tool")

Reasoning = Literal["keep", "last", "drop"]
_REASONING = get_args(Reasoning)

# the names the ecosystem gives to the reasoning of an assistant message
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_ASSISTANT_FIELDS = ("tool_calls", *REASONING_FIELDS)

# fields that carry content of a kind the protocol layer would otherwise lose without a word
_FOREIGN_FIELDS = {
    "function_call": "write it as tool_calls with an id",
    "refusal": "write it as content",
    "audio": "write it as a span among the parts of the content",
    "images": "write them as spans among the parts of the content",
    "videos": "write them as spans among the parts of the content",
}


_NOTHING_SAID = "the assistant says, thinks and does nothing: drop the message"


@dataclass(frozen=True)
class Conversation:
    """Messages with what surrounds them; plain JSON values throughout. Checked by `to_stream`, not here.

    messages: `{"role", "content", ...}` with the roles system, developer, user, assistant, tool (the result of
    a call) and environment (an observation that answers no call). Content is text or a list of parts:
    `{"type": "text", "text": str}`, `{"type": "smi_payload", "payload": object or list}` (written by the one
    JSON writer) and `{"type": "span", "namespace": str, "ids": [int, ...]}`, joined with nothing between.
    tools: tool declarations, flat or OpenAI-wrapped. ctrl: the CTRL object. caps: further capabilities.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    ctrl: dict[str, Any] | None = None
    caps: dict[str, Any] | None = None


def to_stream(conversation: Conversation, *, reasoning: Reasoning = "keep", require_target: bool = True) -> Stream:
    """Turn a conversation into the stream it stands for. Nothing is repaired: what does not fit is refused.

    system becomes SYS, developer DEV, user USR, tool and environment OBS; an assistant message THINK, OUT and
    ACT, each only where it has content. Consecutive messages of a side share a transmission. CTRL, and CAPS with
    the tools, take their places in the first runtime transmission.

    reasoning: "keep" writes all of it; "last" only that of the last turn, the messages after the last user
    message; "drop" none. An assistant message that has nothing else is refused then, not left out.
    require_target: refuse a conversation without an assistant message ("no_target"); a prompt may have none.

    Raises ProtocolError with the index of the message. Reasons: "messages", "empty", "no_target", "role",
    "order", "content", "text", "span", "field", "empty_turn", "reasoning", "tools", "schema", "caps", "ctrl",
    "tool_calls", "missing_call_id", "duplicate_call_id", "undeclared_tool", "undeclared_action", "arguments",
    "orphan_observation", "duplicate_observation", "observation", and those of `dumps`.
    """
    if reasoning not in _REASONING:
        raise ValueError(f"reasoning is {reasoning!r}; it must be one of {', '.join(_REASONING)}")
    messages = conversation.messages
    if not isinstance(messages, list):
        raise ProtocolError("messages", "messages", f"expected a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ProtocolError("empty", "messages", "the conversation has no messages")
    capabilities = declare(conversation.tools, conversation.caps)
    calls = _Calls(capabilities)
    header = [] if conversation.ctrl is None else [Block(BlockType.CTRL, ctrl_payload(conversation.ctrl))]
    pending = [] if capabilities.payload is None else [Block(BlockType.CAPS, capabilities.payload)]
    thinks_from = _thinks_from(messages, reasoning)

    transmissions: list[list[Block]] = [header] if header else []
    supervised = False
    last_side: Side | None = Side.RUNTIME if header else None
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        blocks = _blocks(message, calls, where, index >= thinks_from)
        first = blocks[0].type
        side = first.side
        supervised = supervised or side is Side.MODEL
        if pending and first not in (BlockType.SYS, BlockType.DEV):
            _extend(transmissions, pending)
            last_side = Side.RUNTIME
            pending = []
        if last_side is not side:
            transmissions.append(blocks)
            last_side = side
            continue
        before = transmissions[-1][-1].type
        if not in_order(before, first):
            role = message["role"]
            raise ProtocolError(
                "order", where, f"a {role} message must stand before {before.token} in its transmission"
            )
        transmissions[-1].extend(blocks)
    if pending:
        _extend(transmissions, pending)
    if require_target and not supervised:
        raise ProtocolError("no_target", "messages", "no assistant message: there is nothing to learn from")
    return Stream(tuple(Transmission(tuple(blocks)) for blocks in transmissions))


def _extend(transmissions: list[list[Block]], blocks: list[Block]) -> None:
    if not transmissions:
        transmissions.append([])
    transmissions[-1].extend(blocks)


def _thinks_from(messages: list[Any], reasoning: Reasoning) -> int:
    """The index of the first message whose reasoning is written."""
    if reasoning == "last":
        users = (i for i in range(len(messages) - 1, -1, -1) if _role(messages[i]) == "user")
        return next(users, 0)
    return 0 if reasoning == "keep" else len(messages)


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None


class _Calls:
    """The calls made so far: ids are unique, and each may be answered once."""

    def __init__(self, declared: Capabilities) -> None:
        self.declared = declared
        self.answered: dict[str, bool] = {}

    def make(self, call: object, where: str) -> Block:
        if not isinstance(call, dict):
            raise ProtocolError("tool_calls", where, f"expected a call object, got {type(call).__name__}")
        kind = call.get("type")
        if kind not in (None, "function", "tool", "action"):
            raise ProtocolError("tool_calls", where, f"unknown type {kind!r}; known: function, tool, action")
        if kind == "action" and call.get("content") is not None:
            return self._representation(call, where)
        function = call if call.get("function") is None or kind == "action" else call["function"]
        if not isinstance(function, dict):
            raise ProtocolError("tool_calls", where, f"function must be an object, got {type(function).__name__}")
        id, name = call.get("id"), function.get("name")
        if not isinstance(id, str) or not id:
            raise ProtocolError("missing_call_id", where, "a call needs an id that its result can name")
        if not isinstance(name, str) or not name:
            raise ProtocolError("tool_calls", where, f"a call needs the name of a tool, got {name!r}")
        if id in self.answered:
            raise ProtocolError("duplicate_call_id", where, f"the call id {id!r} was used before")
        kind = "action" if kind == "action" else "tool"
        require_declared(kind, name, self.declared.actions if kind == "action" else self.declared.tools, where)
        self.answered[id] = False
        return Block(BlockType.ACT, _at(where, act_payload, id, name, function.get("arguments"), kind))

    def _representation(self, call: dict[str, Any], where: str) -> Block:
        """An action that is no call but a representation of its own: tokens of the embodiment, or text."""
        beside = [key for key, value in call.items() if key not in ("type", "content") and value is not None]
        if beside:
            raise ProtocolError("tool_calls", where, f"{beside} beside the content of an action would be lost")
        if not self.declared.actions:
            raise ProtocolError("undeclared_action", where, "no actions are declared; name them in caps.actions")
        payload = _payload(call["content"], where)
        if isinstance(payload, str) and payload.lstrip()[:1] in ("", "{"):
            raise ProtocolError("tool_calls", where, "an action is tokens or text; a JSON object is written as a call")
        assert payload is not None
        return Block(BlockType.ACT, payload)

    def answer(self, message: dict[str, Any], where: str) -> Block:
        id = message.get("tool_call_id")
        if not isinstance(id, str) or not id:
            raise ProtocolError("missing_call_id", where, "a tool message needs the tool_call_id it answers")
        if id not in self.answered:
            raise ProtocolError("orphan_observation", where, f"no call before this has the id {id!r}")
        if self.answered[id]:
            raise ProtocolError("duplicate_observation", where, f"the call {id!r} was answered before")
        self.answered[id] = True
        ok, failed, error = message.get("ok"), message.get("is_error"), message.get("error")
        for key, flag in (("ok", ok), ("is_error", failed)):
            if flag is not None and type(flag) is not bool:
                raise ProtocolError("observation", where, f"{key} must be true or false, got {flag!r}")
        if ok is not None and ok is failed:
            raise ProtocolError("observation", where, "ok and is_error contradict each other")
        good = ok if ok is not None else not failed
        content = _result(message.get("content"), where)
        # an empty string is how the ecosystem spells "no content" beside an error
        content = None if not good and content == "" else content
        return Block(BlockType.OBS, _at(where, obs_payload, id, good, content, error))


def _result(content: Any, where: str) -> Any:
    """The content of a tool message: any JSON value, where a list of text parts stands for its text."""
    if not isinstance(content, list):
        return content
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
    for index, (kind, part) in enumerate(zip(kinds, content, strict=True)):
        if (kind == "span" and "namespace" in part) or (kind == "smi_payload" and "payload" in part):
            problem = f"a result is JSON and holds no {kind}; put it into an environment message after the result"
            raise ProtocolError("content", f"{where}.content[{index}]", problem)
    if kinds and all(kind == "text" and "text" in part for kind, part in zip(kinds, content, strict=True)):
        return _payload(content, where)
    return content


def _blocks(message: object, calls: _Calls, where: str, thinks: bool) -> list[Block]:
    """The blocks of one message; never none."""
    if not isinstance(message, dict):
        raise ProtocolError("messages", where, f"expected a message object, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise ProtocolError("role", where, f"unknown role {role!r}; known: {', '.join(ROLES)}")
    # most messages have nothing but a role and a content
    plain = len(message) == 2 and "content" in message
    if not plain:
        for field, advice in _FOREIGN_FIELDS.items():
            if message.get(field):
                raise ProtocolError("field", where, f"{field} is not supported; {advice}")
    if role == "assistant":
        if plain:
            return [_said(message["content"], where)]
        # a weight asks for less training than a supervised message gets: to overlook it would train on the unwanted
        if message.get("weight") not in (None, 1):
            raise ProtocolError("field", where, "every assistant message is trained on: a weight can only be 1")
        return _assistant(message, calls, where, thinks)
    if not plain:
        for field in filter(message.get, _ASSISTANT_FIELDS):
            raise ProtocolError("field", where, f"only an assistant message may carry {field}")
    if role == "tool":
        return [calls.answer(message, where)]
    content = _payload(message.get("content"), where)
    if content is None:
        raise ProtocolError("content", where, f"a {role} message needs content, got null")
    if role == "environment" and isinstance(content, str) and answers_a_call(content):
        raise ProtocolError("observation", where, "the result of a call is a tool message with its tool_call_id")
    return [Block(_RUNTIME_ROLES[role], content)]


def answers_a_call(payload: str) -> bool:
    """Whether a runtime would take the text of an OBS for the result of a call, well made or not."""
    if not payload.lstrip().startswith("{"):
        return False
    try:
        value = loads(payload)
    except ProtocolError as error:
        # duplicate keys, NaN and the like: JSON to one reader and not to the next
        return error.reason != "json"
    return "caused_by" in value


def _said(content: object, where: str) -> Block:
    """The OUT of an assistant message that has content alone."""
    payload = _payload(content, where)
    if payload is None or not _says(payload):
        raise ProtocolError("empty_turn", where, _NOTHING_SAID)
    return Block(BlockType.OUT, payload)


def _assistant(message: dict[str, Any], calls: _Calls, where: str, thinks: bool) -> list[Block]:
    thoughts: list[Payload | None] = []
    if not message.keys().isdisjoint(REASONING_FIELDS):
        thoughts = [_payload(message.get(field), where) for field in REASONING_FIELDS]
        thoughts = [thought for thought in thoughts if _says(thought)]
        if len(set(thoughts)) > 1:
            raise ProtocolError("reasoning", where, f"{', '.join(REASONING_FIELDS)} differ; give one of them")
    content = _payload(message.get("content"), where)
    requested = message.get("tool_calls")
    if requested is None:
        requested = []
    if not isinstance(requested, list):
        raise ProtocolError("tool_calls", where, f"tool_calls must be a list, got {type(requested).__name__}")
    blocks = [Block(BlockType.THINK, thoughts[0])] if thoughts and thinks and thoughts[0] is not None else []
    if content is not None and _says(content):
        blocks.append(Block(BlockType.OUT, content))
    if requested:
        blocks += [calls.make(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(requested)]
    if not blocks and thoughts:
        raise ProtocolError("empty_turn", where, "nothing is left of the message without its reasoning")
    if not blocks:
        raise ProtocolError("empty_turn", where, _NOTHING_SAID)
    return blocks


def _says(payload: Payload | None) -> bool:
    """Whether there is more to a payload than white space."""
    return bool(payload) and not (isinstance(payload, str) and payload.isspace())


def _payload(content: object, where: str) -> Payload | None:
    """Content as a payload: a string as it is, a list of parts with nothing between, null as None."""
    if content is None:
        return None
    if isinstance(content, str):
        return content if content.isascii() else check_text(content, where)
    if not isinstance(content, list):
        raise ProtocolError("content", where, f"content must be text or a list of parts, got {type(content).__name__}")
    parts = [_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else tuple(parts)


def _part(part: object, where: str) -> str | Span:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in ("text", "span", "smi_payload"):
        raise ProtocolError("content", where, f"unknown part {kind!r}; known are text, smi_payload and span")
    if kind == "text":
        return check_text(part.get("text"), where)
    if kind == "smi_payload":
        if not isinstance(part.get("payload"), dict | list):
            raise ProtocolError("content", where, "the payload of an smi_payload is a JSON object or a list")
        return _at(where, dumps, part["payload"])
    ids = part.get("ids")
    if not isinstance(ids, list):
        raise ProtocolError("span", where, f"the ids of a span are a list of whole numbers, got {ids!r}")
    return _at(where, Span, part.get("namespace"), tuple(ids))


def _at(where: str, function: Any, *arguments: Any) -> Any:
    """Call a writer and put the place of the message before the place it complains about."""
    try:
        return function(*arguments)
    except ProtocolError as error:
        inner = f"{where}.{error.where}" if error.where else where
        raise ProtocolError(error.reason, inner, error.message) from None
