"""JSON Schema as declarations use it: whether a schema is sound, and whether arguments fit it.

A schema comes from whoever declares tools, and must not be able to hold up those who check against it. Python's
expressions backtrack: with every letter `(a+)+$` takes twice as long. So patterns are Rust's here, which pydantic
brings along and which take linear time; one that these cannot check, with a look-around or a back-reference, is
refused where it is declared. References multiply in the same way: what a check may take is counted.

Protocol sections: "Capabilities", "Structured Data", "Security".
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from smi.protocol.json_text import dumps, loads
from smi.protocol.stream import ProtocolError

# keywords whose value maps names to schemas, and those whose value is data
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_DATA = frozenset({"const", "enum", "default", "examples"})

# keywords that one check may look at, some 20 us each
MOST_STEPS = 100_000

# characters of all patterns that are declared together, see `patterns_size`; compiling so many takes about a second
MOST_PATTERNS = 20_000


class _Steps(threading.local):
    """What the check in progress has left."""

    left = 0

    def take(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise _Unusable(f"the check takes more than {MOST_STEPS:,} steps")


_STEPS = _Steps()


class _Unusable(ValueError):
    """A schema that cannot be checked."""


def schema_problem(schema: Mapping[str, Any]) -> str | None:
    """What is wrong with a schema and where, or None."""
    return _validator(dumps(schema))[1]


def validate_arguments(arguments: dict[str, Any], schema: Mapping[str, Any], name: str) -> None:
    """Hold the arguments of a call of `name` against its schema.

    Raises ProtocolError "schema" for a schema that cannot be used, "arguments" with the path of what does not fit.
    """
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    validator, problem = _validator(dumps(schema))
    error = None
    _STEPS.left = MOST_STEPS
    try:
        error = best_match(validator.iter_errors(arguments)) if problem is None else None
    except (Unresolvable, RecursionError) as unusable:
        problem = f"not a usable JSON Schema: {type(unusable).__name__}: {unusable}"
    except _Unusable as unusable:
        problem = f"not a usable JSON Schema: {unusable}"
    if problem is not None:
        raise ProtocolError("schema", f"tools.{name}.parameters", problem)
    if error is not None:
        raise ProtocolError("arguments", error.json_path.replace("$", "arguments", 1), error.message)


@lru_cache(maxsize=4096)
def _validator(schema: str) -> tuple[Any, str | None]:
    """The validator of a schema given by its canonical text, or (None, what is wrong with it)."""
    # imported here: loading the validator takes longer than everything else in this package
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from jsonschema.validators import validator_for
    from referencing import Registry

    value = loads(schema)
    dialect = value.get("$schema")
    # None marks a dialect that the library does not know, which it would take for its newest otherwise
    look_up: Any = validator_for
    kind = Draft202012Validator if dialect is None else look_up(value, None) if isinstance(dialect, str) else None
    if kind is None:
        return None, f"$schema names no known dialect of JSON Schema: {dialect!r}"
    try:
        error = best_match(_rules(kind).iter_errors(value))
        if error is not None:
            place = error.json_path.removeprefix("$").lstrip(".")
            return None, f"not a usable JSON Schema: {f'{place}: ' if place else ''}{error.message}"
        _check_patterns(value, schema)
    except RecursionError as error:
        return None, f"not a usable JSON Schema: {type(error).__name__}: {error}"
    except _Unusable as error:
        return None, f"not a usable JSON Schema: {error}"
    # an empty registry: a reference in a declaration must not make the runtime fetch anything
    # without $schema: where a reference leads to it, the library would go on with its own validator
    return _bounded(kind)({k: v for k, v in value.items() if k != "$schema"}, registry=Registry()), None


@lru_cache(maxsize=16)
def _rules(kind: Any) -> Any:
    """The validator of a dialect's schemas; without formats, of which it would check patterns alone, as Python's."""
    from jsonschema_specifications import REGISTRY

    whole = kind.META_SCHEMA
    parts = [REGISTRY.resolver(whole["$id"]).lookup(part["$ref"]).contents for part in whole.get("allOf", ())]
    if not parts:
        return kind(whole)
    # since 2019 the rules are spread over vocabularies that refer to each other by name; in one piece they say the
    # same in an eighth of the time
    flat = {
        "type": whole["type"],
        "properties": {name: rule for part in (*parts, whole) for name, rule in part["properties"].items()},
        "$defs": {name: rule for part in parts for name, rule in part.get("$defs", {}).items()},
    }
    text = dumps(flat).replace('"$dynamicRef":"#meta"', '"$ref":"#"').replace('"$recursiveRef":"#"', '"$ref":"#"')
    return kind(loads(text))


# --- patterns


def _check_patterns(value: Any, schema: str) -> None:
    """Refuse what takes more than linear time; also where only a reference finds it. schema: the canonical text."""
    if (size := patterns_size(value)) > MOST_PATTERNS:
        raise _Unusable(f"patterns of {size:,} characters, repetitions written out; at most {MOST_PATTERNS:,} are read")
    for place, pattern in _patterns(value, ""):
        if re.search(r"\(\?[a-zA-Z]*x", pattern):
            raise _Unusable(f"{place}: {pattern!r} asks for the verbose mode, which JSON Schema does not have")
        try:
            _compiled(pattern)
        except _Unusable as error:
            raise _Unusable(f"{place}: {error}") from None
    if schema.count('"$schema":"') > ("$schema" in value):
        raise _Unusable("$schema can stand only at the root")
    # the library looks for the evaluated properties with expressions of its own
    if '"unevaluatedProperties":' in schema and '"patternProperties":' in schema:
        raise _Unusable("unevaluatedProperties beside patternProperties cannot be checked in linear time")


def _patterns(schema: Any, where: str, named: bool = False) -> Iterator[tuple[str, str]]:
    """(where it stands, pattern). named: the keys of this object are names and no keywords."""
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from _patterns(item, f"{where}[{index}]")
    elif isinstance(schema, dict):
        for key, value in schema.items():
            place = f"{where}.{key}" if where else key
            if not named and key == "pattern" and isinstance(value, str):
                yield place, value
            if not named and key == "patternProperties" and isinstance(value, dict):
                yield from ((place, pattern) for pattern in value)
            if named or key not in _DATA:
                yield from _patterns(value, place, not named and key in _NAMED)


# what counts in a pattern: escapes, classes, counted repetitions, single characters
_TOKEN = re.compile(
    r"\\[pPuUx]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|$)|\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|.", re.DOTALL
)
_UNICODE_CLASS = re.compile(r"\\[wWdDsSpP]")


def patterns_size(schema: Any) -> int:
    """Characters of all patterns, as if their counted repetitions were written out; a class of Unicode counts as 50."""
    return sum(_size(pattern) for _, pattern in _patterns(schema, ""))


def _size(pattern: str) -> int:
    # of the groups that are open, and of what a repetition would repeat
    groups, last = [0], 0
    for token in _TOKEN.finditer(pattern):
        text = token[0]
        if token["least"]:
            # more digits than that, and the engine refuses it
            times = max(int((token["most"] or token["least"])[:9]), 1)
            groups[-1] += last * (times - 1)
            last *= times
        elif text == "(":
            groups.append(0)
        elif text == ")" and len(groups) > 1:
            last = groups.pop() + 1
            groups[-1] += last
        elif text in "*+?":
            groups[-1] += 1
        else:
            last = 1 + 49 * len(_UNICODE_CLASS.findall(text))
            groups[-1] += last
    return sum(groups)


@lru_cache(maxsize=512)
def _compiled(pattern: str) -> Any:
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError as error:
        # pydantic's frame is around it, and a picture of the place
        reason = str(error).splitlines()[-1].strip().removeprefix("SchemaError: ").removeprefix("error: ")
        raise _Unusable(f"{pattern!r} is no pattern that can be checked in linear time: {reason}") from None


def _found(pattern: str, text: str) -> bool:
    _STEPS.take()
    return _compiled(pattern).isinstance_python(text)


@lru_cache(maxsize=16)
def _bounded(kind: Any) -> Any:
    """A dialect's validator with these patterns in place of Python's, and with its steps counted."""
    from jsonschema.exceptions import ValidationError
    from jsonschema.validators import extend

    def pattern(validator: Any, value: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if validator.is_type(instance, "string") and not _found(value, instance):
            yield ValidationError(f"{instance!r} does not match {value!r}")

    def pattern_properties(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if validator.is_type(instance, "object"):
            for expression, inner in value.items():
                for key, item in instance.items():
                    if _found(expression, key):
                        yield from validator.descend(item, inner, path=key, schema_path=expression)

    def additional_properties(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if validator.is_type(instance, "object"):
            patterns = schema.get("patternProperties", ())
            rest = {k: v for k, v in instance.items() if not any(_found(p, k) for p in patterns)}
            plain = {key: item for key, item in schema.items() if key != "patternProperties"}
            yield from kind.VALIDATORS["additionalProperties"](validator, value, rest, plain)

    def counted(keyword: Callable) -> Callable:
        def look(*arguments: Any) -> Any:
            _STEPS.take()
            return keyword(*arguments)

        return look

    own = {
        "pattern": pattern,
        "patternProperties": pattern_properties,
        "additionalProperties": additional_properties,
    }
    keywords = {name: counted(keyword) for name, keyword in {**kind.VALIDATORS, **own}.items()}
    # unevaluated... follow references by themselves, and ask this at each
    boolean = counted(lambda checker, instance: isinstance(instance, bool))
    return extend(kind, keywords, type_checker=kind.TYPE_CHECKER.redefine("boolean", boolean))
