"""Chat messages, as Hugging Face and OpenAI write them, to streams.

Protocol sections: "Runtime and Model Transmissions", "Authority Model", "Actions and Observations", "Errors".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smi.protocol.payloads import act_payload, caps_payload, ctrl_payload, normalise_tools, obs_payload
from smi.protocol.stream import Block, ProtocolError, Stream, Transmission, check_text, in_order
from smi.protocol.tokens import BlockType, Side

_RUNTIME_ROLES = {"system": BlockType.SYS, "developer": BlockType.DEV, "user": BlockType.USR}
ROLES = (*_RUNTIME_ROLES, "assistant", "tool")

# the names the ecosystem gives to the reasoning of an assistant message
_REASONING = ("reasoning_content", "thinking", "reasoning")

# fields that carry content of a kind the protocol layer would otherwise lose without a word
_FOREIGN_FIELDS = {
    "function_call": "write it as tool_calls with an id",
    "refusal": "write it as content",
    "audio": "audio belongs in a payload, not beside it",
}


@dataclass(frozen=True)
class Conversation:
    """Messages with what surrounds them; plain JSON values throughout. Checked by `to_stream`, not here.

    messages: `{"role", "content", ...}` with the roles system, developer, user, assistant and tool.
    tools: tool declarations, flat or OpenAI-wrapped. ctrl: the CTRL object. caps: further capabilities.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    ctrl: dict[str, Any] | None = None
    caps: dict[str, Any] | None = None


def to_stream(conversation: Conversation, *, require_target: bool = True) -> Stream:
    """Turn a conversation into the stream it stands for. Nothing is repaired: what does not fit is refused.

    system becomes SYS, developer DEV, user USR, tool OBS; an assistant message THINK, OUT and ACT, each only
    where it has content. Consecutive messages of a side share a transmission. CTRL, and CAPS with the tools,
    take their places in the first runtime transmission.

    require_target: refuse a conversation without an assistant message ("no_target"); a prompt may have none.

    Raises ProtocolError with the index of the message. Reasons: "messages", "empty", "no_target", "role",
    "order", "content", "text", "field", "empty_turn", "reasoning", "tools", "caps", "ctrl", "tool_calls",
    "missing_call_id", "duplicate_call_id", "undeclared_tool", "arguments", "orphan_observation",
    "duplicate_observation", "observation", and those of `dumps`.
    """
    messages = conversation.messages
    if not isinstance(messages, list):
        raise ProtocolError("messages", "messages", f"expected a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ProtocolError("empty", "messages", "the conversation has no messages")
    tools, caps = _capabilities(conversation)
    calls = _Calls({tool["name"] for tool in tools})
    header = [] if conversation.ctrl is None else [Block(BlockType.CTRL, ctrl_payload(conversation.ctrl))]
    capabilities = [Block(BlockType.CAPS, caps_payload(tools, caps))] if tools or caps else []

    transmissions: list[list[Block]] = [header] if header else []
    supervised = False
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        blocks = _blocks(message, calls, where)
        side = blocks[0].type.side
        supervised = supervised or side is Side.MODEL
        if capabilities and blocks[0].type not in (BlockType.SYS, BlockType.DEV):
            if not transmissions:
                transmissions.append([])
            transmissions[-1].extend(capabilities)
            capabilities = []
        if not transmissions or transmissions[-1][-1].type.side is not side:
            transmissions.append(blocks)
            continue
        before = transmissions[-1][-1].type
        if not in_order(before, blocks[0].type):
            raise ProtocolError(
                "order",
                where,
                f"a {message['role']} message must stand before {before.token} in its transmission",
            )
        transmissions[-1].extend(blocks)
    if require_target and not supervised:
        raise ProtocolError("no_target", "messages", "no assistant message: there is nothing to learn from")
    return Stream(tuple(Transmission(tuple(blocks)) for blocks in transmissions))


def _capabilities(conversation: Conversation) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The declared tools in the protocol's form, and the capabilities besides them."""
    tools = [] if conversation.tools is None else normalise_tools(conversation.tools)
    caps = conversation.caps
    if caps is None:
        return tools, {}
    if not isinstance(caps, dict):
        raise ProtocolError("caps", "caps", f"expected an object, got {type(caps).__name__}")
    if "tools" not in caps:
        return tools, caps
    if tools:
        raise ProtocolError("caps", "caps.tools", "tools are declared twice; give them as tools or in caps")
    rest = {key: value for key, value in caps.items() if key != "tools"}
    return normalise_tools(caps["tools"], "caps.tools"), rest


class _Calls:
    """The calls made so far: ids are unique, and each may be answered once."""

    def __init__(self, declared: set[str]) -> None:
        self.declared = declared
        self.answered: dict[str, bool] = {}

    def make(self, call: object, where: str) -> Block:
        if not isinstance(call, dict):
            raise ProtocolError("tool_calls", where, f"expected a call object, got {type(call).__name__}")
        function = call if call.get("function") is None else call["function"]
        if not isinstance(function, dict):
            raise ProtocolError("tool_calls", where, f"function must be an object, got {type(function).__name__}")
        id, name = call.get("id"), function.get("name")
        if not isinstance(id, str) or not id:
            raise ProtocolError("missing_call_id", where, "a call needs an id that its result can name")
        if not isinstance(name, str) or not name:
            raise ProtocolError("tool_calls", where, f"a call needs the name of a tool, got {name!r}")
        if id in self.answered:
            raise ProtocolError("duplicate_call_id", where, f"the call id {id!r} was used before")
        if name not in self.declared:
            names = ", ".join(sorted(self.declared)) or "none"
            raise ProtocolError("undeclared_tool", where, f"{name!r} is not declared; declared: {names}")
        self.answered[id] = False
        return Block(BlockType.ACT, _at(where, act_payload, id, name, function.get("arguments")))

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
        content = message.get("content")
        # an empty string is how the ecosystem spells "no content" beside an error
        content = None if not good and content == "" else content
        return Block(BlockType.OBS, _at(where, obs_payload, id, good, content, error))


def _blocks(message: object, calls: _Calls, where: str) -> list[Block]:
    """The blocks of one message; never none."""
    if not isinstance(message, dict):
        raise ProtocolError("messages", where, f"expected a message object, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise ProtocolError("role", where, f"unknown role {role!r}; known: {', '.join(ROLES)}")
    for field, advice in _FOREIGN_FIELDS.items():
        if message.get(field):
            raise ProtocolError("field", where, f"{field} is not supported; {advice}")
    if role == "assistant":
        return _assistant(message, calls, where)
    for field in ("tool_calls", *_REASONING):
        if message.get(field):
            raise ProtocolError("field", where, f"only an assistant message may carry {field}")
    if role == "tool":
        return [calls.answer(message, where)]
    content = _text(message.get("content"), where)
    if content is None:
        raise ProtocolError("content", where, f"a {role} message needs content, got null")
    return [Block(_RUNTIME_ROLES[role], content)]


def _assistant(message: dict[str, Any], calls: _Calls, where: str) -> list[Block]:
    thoughts = [_text(message.get(field), where) for field in _REASONING]
    thoughts = [text for text in thoughts if text is not None and text.strip()]
    if len(set(thoughts)) > 1:
        raise ProtocolError("reasoning", where, f"{', '.join(_REASONING)} differ; give one of them")
    content = _text(message.get("content"), where)
    requested = message.get("tool_calls")
    if requested is None:
        requested = []
    if not isinstance(requested, list):
        raise ProtocolError("tool_calls", where, f"tool_calls must be a list, got {type(requested).__name__}")
    blocks = [Block(BlockType.THINK, thoughts[0])] if thoughts else []
    if content is not None and content.strip():
        blocks.append(Block(BlockType.OUT, content))
    blocks += [calls.make(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(requested)]
    if not blocks:
        raise ProtocolError("empty_turn", where, "the assistant says, thinks and does nothing: drop the message")
    return blocks


def _text(content: object, where: str) -> str | None:
    """Content as text: a string as it is, a list of text parts joined with nothing between, null as None."""
    if content is None:
        return None
    if isinstance(content, str):
        return check_text(content, where)
    if not isinstance(content, list):
        raise ProtocolError("content", where, f"content must be text, got {type(content).__name__}")
    texts: list[str] = []
    for index, part in enumerate(content):
        place = f"{where}.content[{index}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ProtocolError("content", place, 'only parts {"type": "text", "text": ...} are known')
        texts.append(check_text(part.get("text"), place))
    return "".join(texts)


def _at(where: str, function: Any, *arguments: Any) -> str:
    """Call a payload writer and put the place of the message before the place it complains about."""
    try:
        return function(*arguments)
    except ProtocolError as error:
        inner = f"{where}.{error.where}" if error.where else where
        raise ProtocolError(error.reason, inner, error.message) from None
