"""Python functions as tools: the signature becomes the declaration, the function the handler."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from smi.protocol.payloads import normalise_tools


class ToolError(Exception):
    """Raised by a handler that refuses: the error observation carries this type and message."""

    def __init__(self, type: str, message: str) -> None:
        super().__init__(type, message)
        self.type = type
        self.message = message


@dataclass(frozen=True)
class Tool:
    """A declaration and what runs when it is called.

    declaration: `{"name", "description", "parameters"}`, in the protocol's form.
    run: called with the arguments by keyword; plain or async; what it returns must be JSON.
    """

    declaration: dict[str, Any]
    run: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.declaration["name"]


def tool(function: Callable[..., Any]) -> Tool:
    """A function as a tool: its name, the first paragraph of its docstring, and its parameters as JSON Schema.

    Types come from the annotations, by pydantic: `Literal` gives an enum, `Annotated[int, Field(ge=1)]` bounds and
    descriptions. Arguments that the signature does not name are refused when they come.

    Raises ValueError for a function whose parameters have no names that a call could use, or no schema.
    """
    from pydantic import PydanticUserError, TypeAdapter

    name = getattr(function, "__name__", "")
    where = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
    if not name.isidentifier():
        raise ValueError(f"{where} has no name to be called by: give a named function, or a Tool")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(
                f"{where}: the parameter {str(parameter)!r} has no name of its own to be given by; tools are called "
                "with named arguments"
            )
    try:
        # pydantic reads callables as well as types
        subject: Any = function
        schema = TypeAdapter(subject).json_schema()
    except PydanticUserError as error:
        raise ValueError(f"{where}: no JSON Schema for its parameters: {error.message}") from None
    if schema.get("type") != "object":
        # a function without parameters
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    declaration: dict[str, Any] = {"name": name}
    if summary := (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " "):
        declaration["description"] = summary
    (declaration,) = normalise_tools([{**declaration, "parameters": _without_titles(schema)}])
    return Tool(declaration, function)


def toolbox(tools: Iterable[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    """Tools by name; functions are made into tools. Raises ValueError for a name given twice."""
    box: dict[str, Tool] = {}
    for item in tools:
        made = item if isinstance(item, Tool) else tool(item)
        if made.name in box:
            raise ValueError(f"two tools are named {made.name!r}")
        box[made.name] = made
    return box


def _without_titles(schema: Any) -> Any:
    """The schema without the titles that pydantic makes up from the names; a property named `title` stays."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if not (key == "title" and isinstance(value, str))}
    return {
        key: {name: _without_titles(item) for name, item in value.items()}
        if key in ("properties", "$defs") and isinstance(value, dict)
        else value
        if key in ("default", "enum", "const", "examples")
        else _without_titles(value)
        for key, value in kept.items()
    }
