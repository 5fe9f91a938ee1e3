"""The one JSON writer and the strict reader; every JSON text of the package comes from and goes through here.

Protocol section: "Structured Data".
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from smi.protocol.stream import ProtocolError, check_text

MAX_NESTING = 64

# what refers to itself is found by its depth
_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")).encode
_LEAVES = frozenset({str, bool, type(None)})
# every whole number up to here is a finite double
_SAFE_INTEGER = 2**1023


def dumps(value: Any) -> str:
    """Write a JSON value the one way this package writes JSON: compact, UTF-8 kept, keys as given.

    value: None, bool, int, float, str, list and dict with str keys, nested at most 64 deep.
    Raises ProtocolError "json", "number", "text" or "nesting", with the path to the fault.
    """
    try:
        text = _ENCODE(value)
        # surrogates stand in the text as they do in the value, and UTF-8 refuses them
        if _is_plain(value) and (text.isascii() or text.encode("utf-8")):
            return text
    except (TypeError, ValueError, RecursionError):
        pass
    # the encoder lets some things pass, and names no place where it does not
    check_json(value, "")
    return _ENCODE(value)


def _is_plain(value: object) -> bool:
    """Whether there are only plain JSON values, level by level; False also where a closer look is needed."""
    level: list[Any] = [value]
    for _ in range(MAX_NESTING):
        inner: list[Any] = []
        for item in level:
            kind = type(item)
            if kind in _LEAVES:
                continue
            if kind is dict:
                for key in item:
                    if type(key) is not str:
                        return False
                inner += item.values()
            elif kind is list:
                inner += item
            elif kind is int:
                if not -_SAFE_INTEGER <= item <= _SAFE_INTEGER:
                    return False
            elif kind is not float:
                return False
        if not inner:
            return True
        level = inner
    return False


def check_json(value: object, where: str, depth: int = 0) -> None:
    """Refuse everything that is not a plain, finite, bounded JSON value; `where` grows with the path.

    Raises ProtocolError as `dumps` does.
    """
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
            raise ProtocolError("nesting", where, f"nested deeper than {MAX_NESTING} levels")
        if isinstance(value, list):
            for index, item in enumerate(value):
                check_json(item, f"{where}[{index}]", depth + 1)
            return
        for key, item in value.items():
            if not isinstance(key, str):
                raise ProtocolError("json", where, f"object key {key!r} is not text")
            check_text(key, where)
            check_json(item, f"{where}.{key}" if where else key, depth + 1)
    else:
        raise ProtocolError("json", where, f"{type(value).__name__} is not a plain JSON value")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _Twice
    return result


class _Twice(Exception):
    """A key that stands twice in an object."""


class _Pairs(list):
    """An object with all of its keys."""


def _refuse_twice(value: object, where: str) -> None:
    """Refuse the first key that stands twice in an object, with its path."""
    if type(value) is list:
        for index, item in enumerate(value):
            _refuse_twice(item, f"{where}[{index}]")
    elif isinstance(value, _Pairs):
        seen: set[str] = set()
        for key, item in value:
            check_text(key, where)
            place = f"{where}.{key}" if where else key
            if key in seen:
                raise ProtocolError("duplicate_key", place, f"the key {key!r} stands twice in one JSON object")
            seen.add(key)
            _refuse_twice(item, place)


# a string that is not closed reaches to the end
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_MARK = re.compile(_STRING.pattern + r"|[\[\]{},:]", re.DOTALL)


def _too_deep(text: str) -> str:
    """The path of the first value that is nested too deep in a text that the reader gave up on."""
    path: list[int | str] = []
    last = ""
    for found in _MARK.finditer(text):
        mark = found[0]
        if mark in "[{":
            if len(path) == MAX_NESTING:
                break
            path.append(0 if mark == "[" else "")
        elif mark in "]}":
            del path[-1:]
        elif mark == ":" and path:
            path[-1] = last
        elif mark == "," and path and isinstance(path[-1], int):
            path[-1] += 1
        else:
            last = mark.strip('"')
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def count_values(text: str) -> int:
    """How many values a JSON text holds, about: without reading it, which takes longest where there are many."""
    bare = _STRING.sub("", text)
    return 1 + sum(bare.count(mark) for mark in ",[{")


def _constant(name: str) -> Any:
    raise _OutOfRange


def _bounded(digits: str) -> str:
    # bounded before int(): parsing time grows faster than the number of digits
    if len(digits) > 310:
        raise ProtocolError("number", "", f"integer of {len(digits)} characters; too large for a JSON number")
    return digits


def _integer(digits: str) -> int:
    number = int(_bounded(digits))
    if not -_SAFE_INTEGER <= number <= _SAFE_INTEGER:
        try:
            float(number)
        except OverflowError:
            raise _OutOfRange from None
    return number


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _OutOfRange
    return number


class _OutOfRange(Exception):
    """A number that no double can hold."""


_DECODE = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer, parse_float=_float
).decode
_LENIENT = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=float, parse_int=lambda digits: int(_bounded(digits))
).decode
_KEYS = json.JSONDecoder(object_pairs_hook=_Pairs, parse_int=len).decode


def loads(text: str) -> Any:
    """Read JSON strictly: what Python's reader lets through or trips over is decided here.

    Raises ProtocolError "json" (syntax), "duplicate_key", "number" (NaN, infinities, integers past the range
    of a double), "text" (lone surrogates) or "nesting" (more than 64 levels), with the path.
    """
    check_text(text, "")
    try:
        if text.startswith("\ufeff"):
            raise ProtocolError("json", "", "not valid JSON: it starts with a byte order mark")
        # what is refused is read once more to say where it stands
        try:
            try:
                value = _DECODE(text)
            except _OutOfRange:
                value = _LENIENT(text)
                check_json(value, "")
        except _Twice:
            value = _KEYS(text)
            _refuse_twice(value, "")
    except json.JSONDecodeError as error:
        raise ProtocolError("json", "", f"not valid JSON: {error}") from None
    except RecursionError:
        raise ProtocolError("nesting", _too_deep(text), f"nested deeper than {MAX_NESTING} levels") from None
    # what is left to judge is rare, and its marks are in the text: an escape can spell a surrogate, and what is
    # nested deep has many brackets
    if "\\ud" in text or "\\uD" in text or (text.count("[") + text.count("{") > MAX_NESTING and not _is_plain(value)):
        check_json(value, "")
    return value


def read(text: str) -> tuple[Any, str]:
    """As `loads`, with the value's canonical text, the one that `dumps` gives."""
    value = loads(text)
    return value, dumps(value)
