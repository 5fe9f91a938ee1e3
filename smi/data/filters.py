"""Conditions on columns, as a source's YAML writes them: `language in ["eng", "fra"]`. Read, never evaluated."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from smi.protocol.json_text import dumps, loads
from smi.protocol.stream import ProtocolError

_ORDER: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_FORM = re.compile(r"\s*(?P<column>.+?)\s*(?P<op>==|!=|<=|>=|<|>|\snot in\s|\sin\s)\s*(?P<value>.+?)\s*", re.DOTALL)


@dataclass(frozen=True)
class Filter:
    """One condition that a row must meet, see `parse_filter`."""

    column: str
    op: str
    value: Any

    def check(self, row: Mapping[str, Any]) -> None:
        """Raises ProtocolError "filtered" for a row that does not meet it."""
        found = row.get(self.column)
        if self.op in _ORDER:
            number = finite_number(found)
            good = number is not None and _ORDER[self.op](number, self.value)
        else:
            wanted = self.value if self.op in ("in", "not in") else [self.value]
            good = any(_same(found, item) for item in wanted) is (self.op in ("==", "in"))
        if not good:
            shown = repr(found) if len(repr(found)) <= 80 else f"{repr(found)[:80]}..."
            raise ProtocolError("filtered", self.column, f"{shown} is not {self.op} {dumps(self.value)}")


def parse_filter(text: str) -> Filter:
    """Read `COLUMN OP VALUE`.

    VALUE is JSON: a number, a text in double quotes, true, false, null; a list of these for `in` and `not in`. OP is
    ==, !=, <, <=, >, >=, in or not in. A column that a row does not have is null there. The order of numbers asks for
    a finite number in the column, or a text that spells one; anything else does not meet it.

    Raises:
        ValueError: what cannot be read, with the form that it should have.
    """
    match = _FORM.fullmatch(text)
    try:
        value = loads(match["value"]) if match else None
    except ProtocolError:
        match = value = None
    if not match:
        raise ValueError(
            f"the filter {text!r} cannot be read: write a column, ==, !=, <, <=, >, >=, in or not in, and a value in "
            'JSON, as in language == "eng" or score >= 0.8'
        )
    op = match["op"].strip()
    if op in ("in", "not in") and not isinstance(value, list):
        raise ValueError(f'the filter {text!r} asks for {op} without a list: write one, as in ["eng", "fra"]')
    if op in _ORDER and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"the filter {text!r} compares with {value!r}: {op} takes a number")
    return Filter(match["column"], op, value)


def finite_number(value: Any) -> float | None:
    """The number that a value is, or that its text spells; None for anything else, NaN and the infinities."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _same(one: Any, other: Any) -> bool:
    """Equality as JSON knows it: true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)
