"""What stands inside CTRL, CAPS, ACT and OBS: the one JSON writer, the strict reader, and the envelopes.

Protocol sections: "Reasoning Control", "Capabilities", "Actions and Observations", "Parallel Actions",
"Errors", "Structured Data".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smi.protocol.stream import ProtocolError, check_text

MAX_NESTING = 64
REASONING_MODES = ("disabled", "fixed", "adaptive")


def _check(value: object, where: str, depth: int = 0) -> None:
    """Refuse everything that is not a plain, finite, bounded JSON value; `where` grows with the path."""
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, int):
        try:
            float(value)
        except OverflowError:
            raise ProtocolError("number", where, "integer too large for a JSON number (about 1.8e308)") from None
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ProtocolError("number", where, f"{value} is not a JSON number; only finite numbers are allowed")
    elif isinstance(value, dict | list):
        if depth >= MAX_NESTING:
            raise ProtocolError("nesting", "", f"nested deeper than {MAX_NESTING} levels")
        if isinstance(value, list):
            for index, item in enumerate(value):
                _check(item, f"{where}[{index}]", depth + 1)
            return
        for key, item in value.items():
            if not isinstance(key, str):
                raise ProtocolError("json", where, f"object key {key!r} is not text")
            check_text(key, where)
            _check(item, f"{where}.{key}" if where else key, depth + 1)
    else:
        raise ProtocolError("json", where, f"{type(value).__name__} is not a plain JSON value")


def dumps(value: Any) -> str:
    """Write a JSON value the one way this package writes JSON: compact, UTF-8 kept, keys as given.

    value: None, bool, int, float, str, list and dict with str keys, nested at most 64 deep.
    Raises ProtocolError "json", "number", "text" or "nesting".
    """
    _check(value, "")
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ProtocolError("duplicate_key", "", f"the key {key!r} stands twice in one JSON object")
            seen.add(key)
    return result


def _constant(name: str) -> Any:
    raise ProtocolError("number", "", f"{name} is not JSON; only finite numbers are allowed")


def _integer(digits: str) -> int:
    # bounded before int(): parsing time grows faster than the number of digits
    if len(digits) > 310:
        raise ProtocolError("number", "", f"integer of {len(digits)} characters; too large for a JSON number")
    return int(digits)


def loads(text: str) -> Any:
    """Read JSON strictly: what Python's reader lets through or trips over is decided here.

    Raises ProtocolError "json" (syntax), "duplicate_key", "number" (NaN, infinities, integers past the range
    of a double), "text" (lone surrogates) or "nesting" (more than 64 levels).
    """
    check_text(text, "")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ProtocolError("json", "", f"not valid JSON: {error}") from None
    except RecursionError:
        raise ProtocolError("nesting", "", f"nested deeper than {MAX_NESTING} levels") from None
    _check(value, "")
    return value


def normalise_tools(tools: object, where: str = "tools") -> list[dict[str, Any]]:
    """Bring tool declarations to the protocol's form: name, description, parameters, then other keys.

    tools: a list of `{"name", "parameters", ...}` or of `{"type": "function", "function": {...}}`; nulls
    among a tool's own keys count as absent. Raises ProtocolError "tools".
    """
    if not isinstance(tools, list):
        raise ProtocolError("tools", where, f"expected a list of tool objects, got {type(tools).__name__}")
    result: list[dict[str, Any]] = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        place = f"{where}[{index}]"
        if not isinstance(tool, dict):
            raise ProtocolError("tools", place, f"expected a tool object, got {type(tool).__name__}")
        wrapped = tool.get("function") is not None
        if wrapped and tool.get("type") not in (None, "function"):
            raise ProtocolError("tools", place, f"type {tool['type']!r} cannot wrap a function")
        flat = tool["function"] if wrapped else tool
        if not isinstance(flat, dict):
            raise ProtocolError("tools", place, f"function must be an object, got {type(flat).__name__}")
        beside = [key for key, value in tool.items() if wrapped and key not in ("type", "function") and value]
        if beside:
            raise ProtocolError("tools", place, f"{beside} beside function would be lost; put them inside it")
        if not wrapped and flat.get("type") == "function":
            flat = {key: value for key, value in flat.items() if key != "type"}
        name, description, parameters = (flat.get(key) for key in ("name", "description", "parameters"))
        if not isinstance(name, str) or not name:
            raise ProtocolError("tools", place, f"a tool needs a name, got {name!r}")
        if name in names:
            raise ProtocolError("tools", place, f"the tool {name!r} is declared twice")
        if description is not None and not isinstance(description, str):
            raise ProtocolError("tools", place, f"description must be text, got {type(description).__name__}")
        if parameters is not None and not isinstance(parameters, dict):
            raise ProtocolError("tools", place, f"parameters must be a JSON Schema object, got {parameters!r}")
        names.add(name)
        ordered = {"name": name, "description": description, "parameters": parameters, **flat}
        result.append({key: value for key, value in ordered.items() if value is not None})
    return result


def normalise_arguments(arguments: object, where: str = "arguments") -> dict[str, Any]:
    """Arguments of a call as a mapping, from a mapping or its JSON text. Raises ProtocolError "arguments"."""
    try:
        value = loads(arguments) if isinstance(arguments, str) else arguments
        _check(value, "")
    except ProtocolError as error:
        raise ProtocolError("arguments", where, str(error)) from None
    if not isinstance(value, dict):
        hint = "; the JSON text looks encoded twice" if isinstance(value, str) else ""
        raise ProtocolError("arguments", where, f"expected a JSON object, got {type(value).__name__}{hint}")
    return value


def act_payload(id: str, name: str, arguments: object) -> str:
    """The payload of a tool call, keys in the order id, type, name, arguments.

    arguments: a mapping or its JSON text; both give the same payload. Raises ProtocolError.
    """
    _identifier(id, "id")
    _identifier(name, "name")
    return dumps({"id": id, "type": "tool", "name": name, "arguments": normalise_arguments(arguments)})


def obs_payload(caused_by: str, ok: bool, content: Any = None, error: Mapping[str, Any] | None = None) -> str:
    """The payload of an observation: caused_by, ok, then content (if not None) or the error.

    error: `{"type": str, "message": str, ...}`, given exactly when `ok` is False.
    Raises ProtocolError "observation" when ok, content and error do not fit together.
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
    number, or a max_tokens that is not a whole number from 0 up.
    """
    if not isinstance(ctrl, dict):
        raise ProtocolError("ctrl", "ctrl", f"expected an object, got {type(ctrl).__name__}")
    reasoning = ctrl.get("reasoning", {})
    if not isinstance(reasoning, dict):
        raise ProtocolError("ctrl", "ctrl.reasoning", f"expected an object, got {type(reasoning).__name__}")
    if "mode" in reasoning and reasoning["mode"] not in REASONING_MODES:
        raise ProtocolError("ctrl", "ctrl.reasoning.mode", f"{reasoning['mode']!r} is none of {REASONING_MODES}")
    effort = reasoning.get("effort", "medium")
    if isinstance(effort, bool) or not isinstance(effort, str | int | float):
        raise ProtocolError("ctrl", "ctrl.reasoning.effort", f"expected a name or a number, got {effort!r}")
    budget = reasoning.get("max_tokens", 0)
    if type(budget) is not int or budget < 0:
        raise ProtocolError("ctrl", "ctrl.reasoning.max_tokens", f"expected a number of tokens, got {budget!r}")
    return dumps(ctrl)


def caps_payload(tools: Sequence[Mapping[str, Any]], caps: Mapping[str, Any] | None = None) -> str:
    """The payload of a CAPS block: `tools` in the form `normalise_tools` gives, then further capabilities."""
    return dumps({**({"tools": list(tools)} if tools else {}), **(caps or {})})


@dataclass(frozen=True)
class Action:
    """A parsed and validated ACT: `arguments` fit the schema of the declared tool `name`."""

    id: str
    type: str
    name: str
    arguments: dict[str, Any]


def parse_act(payload: str, tools: object) -> Action:
    """Read the payload of an ACT block and hold it against the declared tools.

    tools: declarations in either form. The dialect is JSON Schema 2020-12; references to other documents are
    never fetched. The steps fail with reasons of their own, in this order, so that a caller can count what
    parses, what is declared and what is valid: any reason of `loads`; "act", JSON but not the envelope;
    "undeclared_tool"; "schema", the declaration is no JSON Schema; "arguments", they do not fit it.
    """
    value = loads(payload)
    if not isinstance(value, dict):
        raise ProtocolError("act", "", f"an action is a JSON object, got {type(value).__name__}")
    for key, kind in (("id", str), ("type", str), ("name", str), ("arguments", dict)):
        if not isinstance(value.get(key), kind) or not (value[key] or kind is dict):
            raise ProtocolError("act", key, f"an action needs {key} ({kind.__name__}), got {value.get(key)!r}")
    if value["type"] != "tool":
        raise ProtocolError("act", "type", f"expected type 'tool', got {value['type']!r}")
    extra = sorted(value.keys() - {"id", "type", "name", "arguments"})
    if extra:
        raise ProtocolError("act", extra[0], f"an action has no such keys: {extra}")
    declared = {tool["name"]: tool for tool in normalise_tools(tools)}
    tool = declared.get(value["name"])
    if tool is None:
        names = ", ".join(sorted(declared)) or "none"
        raise ProtocolError("undeclared_tool", "name", f"{value['name']!r} is not declared; declared: {names}")
    _validate(value["arguments"], tool.get("parameters", {}), value["name"])
    return Action(value["id"], value["type"], value["name"], value["arguments"])


def _validate(arguments: dict[str, Any], schema: dict[str, Any], name: str) -> None:
    # imported here: loading the validator takes longer than everything else in this package
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError, best_match
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        Draft202012Validator.check_schema(schema)
        # an empty registry: a reference in a declaration must not make the runtime fetch anything
        error = best_match(Draft202012Validator(schema, registry=Registry()).iter_errors(arguments))
    except (SchemaError, Unresolvable, RecursionError, re.error) as problem:
        text = problem.message if isinstance(problem, SchemaError) else f"{type(problem).__name__}: {problem}"
        raise ProtocolError("schema", f"tools.{name}.parameters", f"not a usable JSON Schema: {text}") from None
    if error is not None:
        raise ProtocolError("arguments", error.json_path.replace("$", "arguments", 1), error.message)


def _identifier(value: object, where: str) -> None:
    if not isinstance(value, str) or not value:
        raise ProtocolError("id" if where != "name" else "name", where, f"expected non-empty text, got {value!r}")
