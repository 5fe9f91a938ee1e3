"""What stands inside CTRL, CAPS, ACT and OBS: the envelopes, the declarations and the check of an action.

Protocol sections: "Reasoning Control", "Capabilities", "Actions and Observations", "Parallel Actions",
"Errors", "Structured Data".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from smi.protocol.json_text import dumps, loads, read
from smi.protocol.schemas import MOST_PATTERNS, patterns_size, schema_problem, validate_arguments
from smi.protocol.stream import Payload, ProtocolError

__all__ = [
    "Action",
    "Capabilities",
    "act_payload",
    "ctrl_payload",
    "declare",
    "dumps",
    "loads",
    "normalise_tools",
    "obs_payload",
    "parse_act",
    "require_declared",
]

REASONING_MODES = ("disabled", "fixed", "adaptive")


def normalise_tools(tools: object, where: str = "tools") -> list[dict[str, Any]]:
    """Bring tool declarations to the protocol's form: name, description, parameters, then other keys.

    tools: a list of `{"name", "parameters", ...}` or of `{"type": "function", "function": {...}}`; nulls
    among a tool's own keys count as absent. Raises ProtocolError "tools". Protocol section: "Capabilities".
    """
    if not isinstance(tools, list):
        raise ProtocolError("tools", where, f"expected a list of tool objects, got {type(tools).__name__}")
    return _distinct([_declaration(tool, f"{where}[{index}]") for index, tool in enumerate(tools)], where)


def _distinct(declarations: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    names: set[str] = set()
    for index, declaration in enumerate(declarations):
        if declaration["name"] in names:
            raise ProtocolError("tools", f"{where}[{index}]", f"{declaration['name']!r} is declared twice")
        names.add(declaration["name"])
    return declarations


def _declaration(tool: object, place: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise ProtocolError("tools", place, f"expected an object, got {type(tool).__name__}")
    flat, wrapped = tool, tool.get("function") is not None
    if wrapped:
        flat = tool["function"]
        if tool.get("type") not in (None, "function"):
            raise ProtocolError("tools", place, f"type {tool['type']!r} cannot wrap a function")
        if not isinstance(flat, dict):
            raise ProtocolError("tools", place, f"function must be an object, got {type(flat).__name__}")
        beside = [key for key, value in tool.items() if key not in ("type", "function") and value]
        if beside:
            raise ProtocolError("tools", place, f"{beside} beside function would be lost; put them inside it")
    elif flat.get("type") == "function":
        flat = {key: value for key, value in flat.items() if key != "type"}
    name, description, parameters = flat.get("name"), flat.get("description"), flat.get("parameters")
    if not isinstance(name, str) or not name:
        raise ProtocolError("tools", place, f"a declaration needs a name, got {name!r}")
    if description is not None and not isinstance(description, str):
        raise ProtocolError("tools", place, f"description must be text, got {type(description).__name__}")
    if parameters is not None and not isinstance(parameters, dict):
        raise ProtocolError("tools", place, f"parameters must be a JSON Schema object, got {parameters!r}")
    ordered = {"name": name, "description": description, "parameters": parameters, **flat}
    return {key: value for key, value in ordered.items() if value is not None}


@dataclass(frozen=True)
class Capabilities:
    """What a runtime declares, checked and ready for calls to be held against.

    tools, actions: name -> declaration (`{"name", "description", "parameters", ...}`), in the order given.
    payload: of the CAPS block; None where nothing is declared.
    """

    tools: dict[str, dict[str, Any]]
    actions: dict[str, dict[str, Any]]
    payload: str | None


def declare(tools: object = None, caps: object = None) -> Capabilities:
    """Check the declarations of a conversation or a session and write them down.

    tools: as for `normalise_tools`, or None. caps: further capabilities, or None; `tools` may stand here
    instead, and `actions` is a list of names, or of declarations like a tool's where arguments have a schema.
    `parameters` are JSON Schema, in the dialect that `$schema` names and 2020-12 where it names none.

    Raises ProtocolError "tools", "caps", "schema" (parameters are no JSON Schema) and those of `dumps`.
    Protocol section: "Capabilities".
    """
    where = "tools"
    if caps is not None and not isinstance(caps, dict):
        raise ProtocolError("caps", "caps", f"expected an object, got {type(caps).__name__}")
    rest: dict[str, Any] = {}
    if caps:
        rest = {key: value for key, value in caps.items() if key != "tools"}
        if "tools" in caps:
            if tools:
                raise ProtocolError("caps", "caps.tools", "tools are declared twice; give them as tools or in caps")
            tools, where = caps["tools"], "caps.tools"
    declared = [] if tools is None else normalise_tools(tools, where)
    _check_size(declared)
    texts = [_declared(tool) for tool in declared]
    actions: list[dict[str, Any]] = []
    if "actions" in rest:
        actions, rest["actions"] = _actions(rest["actions"])
    parts = [f'"tools":[{",".join(texts)}]'] if texts else []
    if rest:
        parts.append(dumps(rest)[1:-1])
    return Capabilities(
        tools={tool["name"]: tool for tool in declared},
        actions={action["name"]: action for action in actions},
        payload=f"{{{','.join(parts)}}}" if parts else None,
    )


def _check_size(declarations: list[dict[str, Any]]) -> None:
    """Each may have few patterns while all of them have many."""
    size = 0
    for declaration in declarations:
        size += patterns_size(declaration.get("parameters"))
        if size > MOST_PATTERNS:
            what = f"with those before, patterns of {size:,} characters, repetitions written out"
            place = f"tools.{declaration['name']}.parameters"
            raise ProtocolError("schema", place, f"{what}; at most {MOST_PATTERNS:,} are read")


def _actions(actions: object) -> tuple[list[dict[str, Any]], list[Any]]:
    """`actions` as declarations, and as they are written: a bare name stays a bare name."""
    if not isinstance(actions, list):
        raise ProtocolError("caps", "caps.actions", f"expected a list of actions, got {type(actions).__name__}")
    declared, written = [], []
    for index, action in enumerate(actions):
        bare = isinstance(action, str)
        declared.append(_declaration({"name": action} if bare else action, f"caps.actions[{index}]"))
        written.append(action if bare else declared[-1])
    _check_size(declared)
    for declaration in declared:
        _declared(declaration)
    return _distinct(declared, "caps.actions"), written


def _declared(declaration: dict[str, Any]) -> str:
    """The text of a declaration with a sound schema."""
    text = dumps(declaration)
    problem = _problem(text)
    if problem is not None:
        raise ProtocolError("schema", f"tools.{declaration['name']}.parameters", problem)
    return text


# rows repeat their declarations by the million; checking one takes milliseconds
@lru_cache(maxsize=4096)
def _problem(declaration: str) -> str | None:
    """What is wrong with the schema in a declaration, given by its canonical text."""
    parameters = loads(declaration).get("parameters")
    return None if parameters is None else schema_problem(parameters)


def _arguments(arguments: object, where: str = "arguments") -> str:
    """The JSON text of the arguments of a call; the same for a mapping and for its JSON text."""
    try:
        value, text = read(arguments) if isinstance(arguments, str) else (arguments, dumps(arguments))
    except ProtocolError as error:
        raise ProtocolError("arguments", where, str(error)) from None
    if not isinstance(value, dict):
        hint = "; the JSON text looks encoded twice" if isinstance(value, str) else ""
        raise ProtocolError("arguments", where, f"expected a JSON object, got {type(value).__name__}{hint}")
    return text


def act_payload(id: str, name: str, arguments: object, type: str = "tool") -> str:
    """The payload of a call, keys in the order id, type, name, arguments.

    arguments: a mapping or its JSON text; both give the same payload. type: "tool" or "action".
    Raises ProtocolError. Protocol section: "Actions and Observations".
    """
    _identifier(id, "id")
    _identifier(name, "name")
    head = dumps({"id": id, "type": type, "name": name})
    return f'{head[:-1]},"arguments":{_arguments(arguments)}}}'


def obs_payload(caused_by: str, ok: bool, content: Any = None, error: Mapping[str, Any] | None = None) -> str:
    """The payload of an observation: caused_by, ok, then content (if not None) or the error.

    error: `{"type": str, "message": str, ...}`, given exactly when `ok` is False.
    Raises ProtocolError "observation" when ok, content and error do not fit together.
    Protocol sections: "Actions and Observations", "Errors".
    """
    _identifier(caused_by, "caused_by")
    if type(ok) is not bool:
        raise ProtocolError("observation", "ok", f"ok must be true or false, got {ok!r}")
    payload: dict[str, Any] = {"caused_by": caused_by, "ok": ok}
    if ok:
        if error is not None:
            raise ProtocolError("observation", "error", "a result with an error must say ok: false")
        if content is not None:
            payload["content"] = content
        return dumps(payload)
    if not isinstance(error, Mapping):
        raise ProtocolError("observation", "error", 'ok: false needs error: {"type": ..., "message": ...}')
    kind, message = error.get("type"), error.get("message")
    if not isinstance(kind, str) or not isinstance(message, str):
        raise ProtocolError("observation", "error", "an error needs a type and a message, both text")
    if content is not None:
        raise ProtocolError("observation", "content", "a failed result carries an error, not content")
    payload["error"] = {"type": kind, "message": message, **error}
    return dumps(payload)


def ctrl_payload(ctrl: Mapping[str, Any]) -> str:
    """The payload of a CTRL block; further keys pass as given.

    Raises ProtocolError "ctrl" when `reasoning` has an unknown mode, an effort that is neither a name nor a
    number from 0 up, or a max_tokens that is not a whole number from 0 up. Protocol section: "Reasoning Control".
    """
    if not isinstance(ctrl, dict):
        raise ProtocolError("ctrl", "ctrl", f"expected an object, got {type(ctrl).__name__}")
    reasoning = ctrl.get("reasoning", {})
    if not isinstance(reasoning, dict):
        raise ProtocolError("ctrl", "ctrl.reasoning", f"expected an object, got {type(reasoning).__name__}")
    if "mode" in reasoning and reasoning["mode"] not in REASONING_MODES:
        raise ProtocolError("ctrl", "ctrl.reasoning.mode", f"{reasoning['mode']!r} is none of {REASONING_MODES}")
    effort = reasoning.get("effort", "medium")
    number = isinstance(effort, int | float) and not isinstance(effort, bool) and effort >= 0
    if not number and not (isinstance(effort, str) and effort.strip()):
        expected = "expected a name such as 'low', 'medium' and 'high', or a number from 0 up"
        raise ProtocolError("ctrl", "ctrl.reasoning.effort", f"{expected}, got {effort!r}")
    budget = reasoning.get("max_tokens", 0)
    if type(budget) is not int or budget < 0:
        raise ProtocolError("ctrl", "ctrl.reasoning.max_tokens", f"expected a number of tokens, got {budget!r}")
    return dumps(ctrl)


@dataclass(frozen=True)
class Action:
    """A parsed and validated ACT: `arguments` fit the schema of the declared tool or action `name`."""

    id: str
    type: str
    name: str
    arguments: dict[str, Any]


def parse_act(payload: Payload, tools: object, actions: object = None) -> Action:
    """Read the payload of an ACT block and hold it against what is declared.

    tools: declarations in either form. actions: the list `caps["actions"]`. The dialect is the one of `declare`;
    references to other documents are never fetched. The steps fail with reasons of their own, in this order, so
    that a caller can count what parses, what is declared and what is valid: any reason of `loads`; "act", JSON
    but not the envelope, or token spans; "undeclared_tool" or "undeclared_action"; "schema", the declaration is
    no JSON Schema; "arguments", they do not fit it. Protocol sections: "Actions and Observations", "Security".
    """
    if not isinstance(payload, str):
        raise ProtocolError("act", "", "the payload holds token spans; the codec of the embodiment reads it")
    value = loads(payload)
    if not isinstance(value, dict):
        raise ProtocolError("act", "", f"an action is a JSON object, got {type(value).__name__}")
    for key, kind in (("id", str), ("type", str), ("name", str), ("arguments", dict)):
        if not isinstance(value.get(key), kind) or not (value[key] or kind is dict):
            raise ProtocolError("act", key, f"an action needs {key} ({kind.__name__}), got {value.get(key)!r}")
    if value["type"] not in ("tool", "action"):
        raise ProtocolError("act", "type", f"expected type 'tool' or 'action', got {value['type']!r}")
    extra = sorted(value.keys() - {"id", "type", "name", "arguments"})
    if extra:
        raise ProtocolError("act", extra[0], f"an action has no such keys: {extra}")
    given = normalise_tools(tools) if value["type"] == "tool" else _actions([] if actions is None else actions)[0]
    declaration = require_declared(value["type"], value["name"], {item["name"]: item for item in given}, "name")
    validate_arguments(value["arguments"], declaration.get("parameters", {}), value["name"])
    return Action(value["id"], value["type"], value["name"], value["arguments"])


def require_declared(type: str, name: str, declared: Mapping[str, Any], where: str) -> Any:
    """The declaration of that name; ProtocolError "undeclared_tool" or "undeclared_action" where there is none."""
    if name not in declared:
        names = ", ".join(sorted(declared)) or "none"
        raise ProtocolError(f"undeclared_{type}", where, f"{name!r} is not declared; declared: {names}")
    return declared[name]


def _identifier(value: object, where: str) -> None:
    if not isinstance(value, str) or not value:
        raise ProtocolError("id" if where != "name" else "name", where, f"expected non-empty text, got {value!r}")
