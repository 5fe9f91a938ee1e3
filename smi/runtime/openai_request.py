"""A request in OpenAI's form, as far as a stream can carry it: checked, bounded and understood.

What cannot be honoured is refused with the field's name; the few fields that change nothing here are named in
`_HARMLESS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from smi.protocol.conversation import Conversation, to_stream
from smi.protocol.json_text import count_values, dumps, loads
from smi.protocol.payloads import normalise_tools
from smi.protocol.stream import ProtocolError, Stream
from smi.protocol.tokens import BlockType, Side
from smi.runtime.constrained import Constrainer
from smi.runtime.grammar import Limits
from smi.runtime.openai_errors import ApiError, bad_request, protocol_refusal
from smi.runtime.sampling import Sampling
from smi.runtime.turn import Constraint

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
MOST_STOPS = 4
# JSON values of a body, and of the arguments of all calls; messages have some three each
MOST_VALUES = 100_000
# of them in what a request declares; to check and compile so many takes a second or two
MOST_DECLARED = 20_000

# what a client may send because others need it: accounting, caching and placement of a service this is not
_HARMLESS = {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
# what is fine as long as it asks for nothing
_ONLY: dict[str, Any] = {
    "n": 1,
    "store": False,
    "logprobs": False,
    "top_logprobs": 0,
    "logit_bias": {},
    "modalities": ["text"],
    "verbosity": "medium",
}
_MESSAGE_FIELDS = {
    "system": {"content"},
    "developer": {"content"},
    "user": {"content"},
    "environment": {"content"},
    # the answer's own fields come back as they went out
    "assistant": {"content", "tool_calls", "reasoning_content", "reasoning", "annotations", "smi_refused_actions"},
    # the name repeats that of the call, which its id tells already
    "tool": {"content", "tool_call_id", "name", "ok", "is_error", "error"},
}


@dataclass(frozen=True)
class ChatRequest:
    """A request that was understood.

    prompt: the whole conversation; its last transmission is the runtime's.
    conversation: as it was sent, with what it declares, for the checks of what the model calls.
    calls: ids that the conversation has used.
    """

    prompt: Stream
    model: str
    stream: bool
    include_usage: bool
    limits: Limits
    sampling: Sampling
    stops: tuple[str, ...]
    constrain: Callable[[BlockType], Constraint | None]
    conversation: Conversation
    calls: frozenset[str] = frozenset()


class _Fields:
    """The body's fields, each taken once; what is left at the end is unknown."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, *kinds: type, default: Any = None) -> Any:
        if name not in self._left:
            return default
        value = self._left.pop(name)
        # true and false are whole numbers to Python alone
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
            names |= {list: "a list", dict: "an object"}
            wanted = " or ".join(names[kind] for kind in kinds if not (kind is int and float in kinds))
            raise bad_request(f"{name} must be {wanted}, got {_short(value)}", name, "invalid_type")
        return value

    def finish(self) -> None:
        for name, value in self._left.items():
            if name in _HARMLESS:
                continue
            if name not in _ONLY:
                raise bad_request(f"{name} is not supported here: leave it out", name, "unsupported_parameter")
            allowed = dumps(_ONLY[name])
            # as text: true is 1 to Python, and not to JSON
            if dumps(value) != allowed:
                raise bad_request(f"{name} can only be {allowed} here, got {_short(value)}", name, "unsupported_value")


def _bounded(value: Any, name: str) -> Any:
    """A declaration of a size that can be checked soon."""
    values, level = 0, [value]
    while level:
        values += len(level)
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    if values > MOST_DECLARED:
        raise bad_request(f"{name}: {values:,} JSON values, at most {MOST_DECLARED:,} are read", name, "too_large")
    return value


def _short(value: Any) -> str:
    text = dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_values(text: str, name: str, param: str | None = None) -> None:
    """Refuse JSON text with more values than can be read soon: 413."""
    if (values := count_values(text)) > MOST_VALUES:
        message = f"{name}: {values:,} JSON values, at most {MOST_VALUES:,} are read"
        raise ApiError(413, message, code="body_too_large", param=param)


def read_request(data: bytes, *, most_tokens: int, constrainer: Constrainer) -> ChatRequest:
    """A JSON body as a request.

    most_tokens: that an answer may have, and the default for requests that name no limit.
    Raises ApiError: 413 for more than can be read soon; 400 that names the field, and for a conversation that the
    protocol refuses the message.
    """
    body = _parsed(data)
    if not isinstance(body, dict):
        raise bad_request(f"the body must be a JSON object, got {_short(body)}", None, "invalid_type")
    fields = _Fields(body)
    model = fields.take("model", str)
    messages = fields.take("messages", list)
    if model is None or messages is None:
        missing = "model" if model is None else "messages"
        raise bad_request(f"{missing} is missing", missing, "missing_required_parameter")
    stream = fields.take("stream", bool, default=False)
    options = fields.take("stream_options", dict, default={})
    if options and not stream:
        raise bad_request("stream_options need stream: true", "stream_options")
    # obfuscation pads chunks against eavesdroppers who count bytes; it is never done here
    if extra := options.keys() - {"include_usage", "include_obfuscation"}:
        name = f"stream_options.{min(extra)}"
        raise bad_request(f"{name} is not supported", name, "unsupported_parameter")
    usage = options.get("include_usage", False)
    if usage is not None and not isinstance(usage, bool):
        raise bad_request("include_usage must be true or false", "stream_options.include_usage", "invalid_type")

    tools = [_tool(tool, i) for i, tool in enumerate(_bounded(fields.take("tools", list, default=[]), "tools"))]
    # JSON within texts was not counted with the body
    _check_values(",".join(_arguments(messages)), "the arguments of all calls", "messages")
    conversation = Conversation(
        [read_message(message, i) for i, message in enumerate(messages)],
        tools=tools or None,
        ctrl=_ctrl(fields),
        caps=_bounded(fields.take("smi_caps", dict), "smi_caps"),
    )
    try:
        prompt = to_stream(conversation, require_target=False)
        declared = normalise_tools(tools)
    except ProtocolError as error:
        raise protocol_refusal(error) from None
    if prompt.transmissions[-1].side is not Side.RUNTIME:
        raise bad_request("there is nothing to answer: the last message is the assistant's", "messages")

    limits, constrain = _held(fields, declared, conversation, _max_tokens(fields, most_tokens), constrainer)
    request = ChatRequest(
        prompt=prompt,
        model=model,
        stream=stream,
        include_usage=bool(usage),
        limits=limits,
        sampling=_sampling(fields),
        stops=_stops(fields),
        constrain=constrain,
        conversation=conversation,
        calls=frozenset(c["id"] for m in conversation.messages for c in m.get("tool_calls") or () if "id" in c),
    )
    fields.finish()
    return request


def _parsed(data: bytes) -> Any:
    try:
        text = data.decode()
        _check_values(text, "the body")
        return loads(text)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error}", code="invalid_json") from None
    except ProtocolError as error:
        where = f" at {error.where}" if error.where else ""
        raise ApiError(400, f"the body is not usable JSON{where}: {error.message}", code="invalid_json") from None


def read_message(message: Any, index: int) -> Any:
    """A message without the fields that say nothing; `to_stream` judges the rest."""
    if not isinstance(message, dict) or message.get("role") not in _MESSAGE_FIELDS:
        return message
    known = _MESSAGE_FIELDS[message["role"]]
    for key, value in message.items():
        # clients write out what an answer left empty
        if key != "role" and key not in known and value not in (None, [], ""):
            where = f"messages[{index}].{key}"
            role = message["role"]
            raise bad_request(f"{where}: a {role} message has no {key} here", where, "unsupported_parameter")
    kept = {key: value for key, value in message.items() if key == "role" or key in known}
    for key in ("annotations", "smi_refused_actions"):
        kept.pop(key, None)
    return kept


def _arguments(messages: list[Any]) -> Iterator[str]:
    """JSON texts of the arguments of calls, wherever there are any."""
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str):
                yield arguments


def _tool(tool: Any, index: int) -> Any:
    """A declaration without `strict`: calls are always held to their schema."""
    if isinstance(tool, dict):
        if tool.get("type") != "function":
            where = f"tools[{index}].type"
            raise bad_request(f"{where} can only be 'function', got {_short(tool.get('type'))}", where)
        if isinstance(tool.get("function"), dict):
            return {**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}}
    return tool


def _ctrl(fields: _Fields) -> dict[str, Any] | None:
    effort, ctrl = fields.take("reasoning_effort", str), fields.take("smi_ctrl", dict)
    if effort is None:
        return ctrl
    if ctrl is not None:
        raise bad_request("give reasoning_effort or smi_ctrl, not both", "reasoning_effort")
    if effort not in EFFORTS:
        raise bad_request(f"reasoning_effort must be one of {', '.join(EFFORTS)}", "reasoning_effort")
    return {"reasoning": {"mode": "disabled"} if effort == "none" else {"effort": effort}}


def _max_tokens(fields: _Fields, most: int) -> int:
    old, new = fields.take("max_tokens", int), fields.take("max_completion_tokens", int)
    if old is not None and new is not None and old != new:
        raise bad_request("max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
    name = "max_tokens" if new is None else "max_completion_tokens"
    asked = new if new is not None else old if old is not None else most
    if asked > most:
        raise bad_request(f"{name} can be at most {most} here, got {asked}", name)
    if asked < 1:
        raise bad_request(f"{name} must be 1 or more, got {asked}", name)
    return asked


def _sampling(fields: _Fields) -> Sampling:
    given: dict[str, Any] = {"temperature": 1.0, "seed": None}
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    for name in (*names, "top_k", "seed"):
        value = fields.take(name, *((int,) if name in ("top_k", "seed") else (int, float)))
        if value is None:
            continue
        given[name] = value
        try:
            Sampling(**{name: value})
        except ValueError as error:
            raise bad_request(str(error), name) from None
    return Sampling(**given)


def _stops(fields: _Fields) -> tuple[str, ...]:
    stop = fields.take("stop", str, list, default=[])
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MOST_STOPS or not all(isinstance(text, str) and text for text in stops):
        raise bad_request(f"stop must be up to {MOST_STOPS} texts, none of them empty", "stop")
    return tuple(stops)


def _held(
    fields: _Fields,
    declared: list[dict[str, Any]],
    conversation: Conversation,
    max_tokens: int,
    constrainer: Constrainer,
) -> tuple[Limits, Callable[[BlockType], Constraint | None]]:
    """What tool_choice, parallel_tool_calls and response_format leave to the model."""
    caps = conversation.caps or {}
    may_call = bool(declared or caps.get("actions"))
    choice = fields.take("tool_choice", str, dict, default="auto" if may_call else "none")
    least: dict[BlockType, int] = {}
    most: dict[BlockType, int] = {}
    if not fields.take("parallel_tool_calls", bool, default=True):
        most[BlockType.ACT] = 1
    named = _named(choice)
    if choice == "none" or not may_call:
        if choice not in ("none", "auto"):
            raise bad_request("tool_choice asks for a call, but no tools are declared", "tool_choice")
        most[BlockType.ACT] = 0
    elif named is not None:
        least[BlockType.ACT] = most[BlockType.ACT] = 1
        declared = [tool for tool in declared if tool["name"] == named]
        caps = {}
        if not declared:
            raise bad_request(f"tool_choice names {named!r}, which is not among the tools", "tool_choice")
    elif choice == "required":
        least[BlockType.ACT] = 1
    elif choice != "auto":
        raise bad_request("tool_choice must be none, auto, required, or name a function", "tool_choice")

    acts = outs = _unheld
    if most.get(BlockType.ACT) != 0:
        try:
            acts = constrainer.actions({**caps, **({"tools": declared} if declared else {})})
        except ProtocolError as error:
            # without it a call is still checked when it is whole; only a call that was asked for has to be one
            if least:
                raise protocol_refusal(error) from None
    schema = _schema(_bounded(fields.take("response_format", dict), "response_format"))
    if schema is not None:
        try:
            outs = constrainer.output(schema)
        except ProtocolError as error:
            raise bad_request(str(error), "response_format.json_schema.schema", error.reason) from None
        most[BlockType.OUT] = 1
        if most.get(BlockType.ACT) == 0:
            least[BlockType.OUT] = 1
    limits = Limits(max_tokens, least=least, most=most)
    return limits, lambda kind: acts(kind) if kind is BlockType.ACT else outs(kind)


def _unheld(kind: BlockType) -> Constraint | None:
    return None


def _named(choice: Any) -> str | None:
    """The function that tool_choice names."""
    if not isinstance(choice, dict):
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise bad_request('tool_choice as an object is {"type": "function", "function": {"name": ...}}', "tool_choice")
    return name


def _schema(format: dict[str, Any] | None) -> dict[str, Any] | None:
    """The schema that response_format holds the answer to; None for text."""
    match format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
    raise bad_request(
        'response_format must be {"type": "text"}, {"type": "json_object"}, or '
        '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
        "response_format",
    )
