"""Adapters: which function turns the rows of a source into conversations, and which columns it reads.

A new format is one function, a raw row -> a `Conversation`, named in the source's YAML as
`adapter: custom:package.module:function`. To name it there is to allow it: no other code of a user's is ever imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from smi.data import formats
from smi.data.budget import check_value
from smi.data.filters import Filter, parse_filter
from smi.data.hermes import hermes
from smi.data.sources import SourceSpec
from smi.protocol.conversation import Conversation
from smi.protocol.stream import ProtocolError

Raw = Mapping[str, Any]

CUSTOM = "custom:"


@dataclass(frozen=True)
class Adapter:
    """A format.

    convert: raw row -> conversation; raises ProtocolError.
    needs: groups of columns of which a file must have at least one each.
    optional: columns read where there are any; None reads every column there is.
    """

    name: str
    convert: Callable[[Raw], Conversation]
    needs: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...] | None = ()

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Every column the adapter looks at; None for all there are."""
        if self.optional is None:
            return None
        return tuple(column for group in self.needs for column in group) + self.optional


def get_adapter(name: str) -> Adapter:
    """The adapter of that name, or the one that `custom:package.module:function` names.

    Raises:
        ValueError: an unknown name, with the names there are; a module or function that is not there.
    """
    if name.startswith(CUSTOM):
        return _custom(name.removeprefix(CUSTOM).strip())
    if name not in ADAPTERS:
        raise ValueError(
            f"no adapter is named {name!r}; known are {', '.join(ADAPTERS)}, and {CUSTOM}package.module:function"
        )
    return ADAPTERS[name]


def adapter_for(spec: SourceSpec) -> Adapter:
    """The adapter of a source, under the source's names of columns and behind its filters.

    Raises:
        ValueError: as `get_adapter`; a column that the adapter does not have; a filter that cannot be read.
    """
    base = get_adapter(spec.adapter)
    try:
        filters = tuple(parse_filter(text) for text in spec.filters)
    except ValueError as error:
        raise ValueError(f"source {spec.name!r}: {error}") from None
    if base.columns is None and spec.columns:
        # a function of the user's own: what the source names is what it gets to see
        base = replace(base, needs=tuple((column,) for column in spec.columns), optional=())
    if base.columns is not None and (unknown := [name for name in spec.columns if name not in base.columns]):
        raise ValueError(
            f"source {spec.name!r}: the adapter {base.name!r} has no column {', '.join(unknown)}; "
            f"it has {', '.join(base.columns)}"
        )
    if not spec.columns and not filters:
        return base
    theirs = dict(spec.columns)
    return Adapter(
        base.name,
        _Convert(base, theirs, filters),
        tuple(tuple(theirs.get(name, name) for name in group) for group in base.needs)
        + tuple((wanted.column,) for wanted in filters),
        None if base.optional is None else tuple(theirs.get(name, name) for name in base.optional),
    )


@dataclass(frozen=True)
class _Convert:
    """Filters, then the names of columns, then the format."""

    base: Adapter
    theirs: dict[str, str]
    filters: tuple[Filter, ...]

    def __call__(self, row: Raw) -> Conversation:
        for wanted in self.filters:
            wanted.check(row)
        if self.theirs and self.base.columns is not None:
            row = {name: row.get(self.theirs.get(name, name)) for name in self.base.columns}
        return self.base.convert(row)


@dataclass(frozen=True)
class _Custom:
    """A function of the user's own: whatever it trips over, and whatever it makes, is judged row by row."""

    path: str
    function: Callable[[Raw], object]

    def __call__(self, row: Raw) -> Conversation:
        try:
            talk = self.function(row)
        except ProtocolError:
            raise
        except Exception as error:
            raise ProtocolError("adapter", self.path, f"{type(error).__name__}: {error}") from error
        if not isinstance(talk, Conversation):
            raise ProtocolError("adapter", self.path, f"made a {type(talk).__name__} instead of a Conversation")
        check_value([talk.messages, talk.tools, talk.ctrl, talk.caps], self.path)
        return talk


def _custom(path: str) -> Adapter:
    module_name, colon, function_name = path.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f"adapter {CUSTOM}{path}: write {CUSTOM}package.module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"adapter {CUSTOM}{path}: the module {module_name} cannot be imported: {type(error).__name__}: {error}; "
            "it must be installed, or stand in the working directory or on PYTHONPATH"
        ) from error
    function: Any = getattr(module, function_name, None)
    if function is None or not callable(function):
        raise ValueError(f"adapter {CUSTOM}{path}: the module {module_name} has no function {function_name}")
    return Adapter(f"{CUSTOM}{path}", _Custom(path, function), (), None)


ADAPTERS: dict[str, Adapter] = {
    adapter.name: adapter
    for adapter in (
        Adapter(
            "messages",
            formats.messages,
            (("messages", "messages_json"),),
            ("tools", "tools_json", "smi_ctrl", "smi_caps", "chat_template_kwargs"),
        ),
        Adapter(
            "openai_tools",
            formats.openai_tools,
            (("messages", "messages_json"),),
            ("tools", "tools_json", "functions"),
        ),
        Adapter("sharegpt", formats.sharegpt, (("conversations",),), ("system",)),
        Adapter("hermes", hermes, (("conversations",), ("tools",))),
        Adapter("aya", formats.aya, (("inputs",), ("targets",))),
        Adapter(
            "openr1",
            formats.openr1,
            (("problem",), ("generations",), ("is_reasoning_complete",)),
            ("correctness_math_verify", "correctness_llama"),
        ),
        Adapter("opencode", formats.opencode, (("input",), ("output",), ("average_test_score",))),
    )
}
