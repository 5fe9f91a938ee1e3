"""What one row may cost, decided before it is worked on."""

from __future__ import annotations

import re
from typing import Any

from smi.protocol.json_text import MAX_NESTING
from smi.protocol.stream import ProtocolError

# a row of text past this size is rejected before it is parsed
MAX_ROW_BYTES = 16 << 20
# values in a row: a Python object each, some hundred bytes with what points at it
MAX_NODES = 1 << 18

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def check_text_size(text: bytes) -> ProtocolError | None:
    """Why JSON text is too much for a row; None where it is not. Nothing is parsed for it."""
    if len(text) > MAX_ROW_BYTES:
        return too_many_bytes()
    # every value but the first follows a comma or opens a container; only prose full of commas needs a closer look
    if len(text) > MAX_NODES and _marks(text) > MAX_NODES and _marks(_STRING.sub(b"", text)) > MAX_NODES:
        return too_many_nodes()
    return None


def _marks(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def check_value(value: Any, where: str) -> None:
    """Refuse Python values that are too much for a row, or contain themselves.

    value: dicts, lists and tuples, and whatever stands in them; leaves are not judged, only counted.
    Raises ProtocolError "over_budget" or "nesting".
    """
    nodes, size = 0, 0
    # ids of the containers that hold the value at hand; a None in the stack closes the innermost
    path: list[int] = []
    stack: list[Any] = [value]
    closing = object()
    while stack:
        item = stack.pop()
        if item is closing:
            path.pop()
            continue
        nodes += 1
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, dict | list | tuple):
            if id(item) in path:
                raise ProtocolError("over_budget", where, "a value contains itself")
            if len(path) >= MAX_NESTING:
                raise ProtocolError("nesting", where, f"nested deeper than {MAX_NESTING} levels")
            if nodes + len(item) > MAX_NODES:
                raise ProtocolError("over_budget", where, _NODES)
            path.append(id(item))
            stack.append(closing)
            if isinstance(item, dict):
                size += sum(len(key) for key in item if isinstance(key, str))
                stack.extend(item.values())
            else:
                stack.extend(item)
        if nodes > MAX_NODES:
            raise ProtocolError("over_budget", where, _NODES)
        if size > MAX_ROW_BYTES:
            raise ProtocolError("over_budget", where, _bytes())


_NODES = f"more than {MAX_NODES:,} values"


def _bytes() -> str:
    return f"the row is larger than {MAX_ROW_BYTES:,} bytes"


def too_many_bytes() -> ProtocolError:
    return ProtocolError("over_budget", "row", _bytes())


def too_many_nodes() -> ProtocolError:
    return ProtocolError("over_budget", "row", f"the row holds {_NODES}")
