"""A schema is whoever's declares it: none may hold up the check of arguments."""

import signal

import pytest

from smi.protocol import schemas
from smi.protocol.payloads import act_payload, declare, parse_act
from smi.protocol.stream import ProtocolError

# minutes to years for an engine that backtracks
LONG = "a" * 40 + "!"
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}


@pytest.fixture(autouse=True)
def _in_time():
    def late(*_):
        raise AssertionError("the check still runs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refusal(parameters, arguments):
    """The reason, place and message of a call's refusal; None where it is valid."""
    try:
        parse_act(act_payload("a", "f", arguments), [{"name": "f", "parameters": parameters}])
    except ProtocolError as error:
        return error.reason, error.where, error.message
    return None


def named(pattern, **more):
    return {"type": "object", "patternProperties": {pattern: {"type": "integer"}}, **more}


def test_patterns_take_linear_time():
    reason, where, message = refusal({"properties": {"x": {"pattern": "^(a+)+$"}}}, {"x": LONG})
    assert (reason, where) == ("arguments", "arguments.x")
    assert "does not match '^(a+)+$'" in message
    assert refusal(named("^(a|aa)+$"), {LONG: "no integer"}) is None
    assert refusal(named("^(a|aa)+$", additionalProperties=False), {LONG: 1})[:2] == ("arguments", "arguments")
    # a reference to the root, whose dialect is named, leaves these patterns in force
    again = {**DRAFT_7, "properties": {"x": {"pattern": "^(a+)+$"}, "again": {"$ref": "#"}}}
    assert refusal(again, {"again": {"x": LONG}})[:2] == ("arguments", "arguments.again.x")


@pytest.mark.parametrize(
    ("parameters", "arguments", "where"),
    [
        ({"properties": {"x": {"pattern": "b[0-9]"}}}, {"x": "ab1c"}, None),
        ({"properties": {"x": {"pattern": "^b$"}}}, {"x": "b\n"}, "arguments.x"),
        ({"properties": {"x": {"pattern": "b"}}}, {"x": 3}, None),
        (named("^n_"), {"n_1": 3, "other": "x"}, None),
        (named("^n_"), {"n_1": "x"}, "arguments.n_1"),
        (named("^n_", additionalProperties=False), {"n_1": 3}, None),
        (named("^n_", additionalProperties=False), {"n_1": 3, "other": 3}, "arguments"),
        (named("^n_", additionalProperties={"type": "string"}), {"n_1": 3, "other": 3}, "arguments.other"),
        (named("^n_", additionalProperties=False, properties={"it": {}}), {"n_1": 3, "it": 3}, None),
        ({"properties": {"it": {}}, "unevaluatedProperties": False}, {"other": 3}, "arguments"),
    ],
)
def test_patterns_mean_what_they_do_in_json_schema(parameters, arguments, where):
    found = refusal(parameters, arguments)
    assert (found and found[1]) == where


@pytest.mark.parametrize(
    ("parameters", "place", "says"),
    [
        ({"properties": {"x": {"pattern": "(?=a)b"}}}, "properties.x.pattern", "look-around"),
        (
            {"properties": {"x": {"items": [{"pattern": r"(a)\1"}]}}, **DRAFT_7},
            "properties.x.items[0].pattern",
            "backr",
        ),
        (named(r"^(?!n)"), "patternProperties", "look-around"),
        (
            {**named(r"^(?!n)"), "$schema": "http://json-schema.org/draft-04/schema#"},
            "patternProperties",
            "look-around",
        ),
        # no place for schemas in this dialect, but a reference finds it
        ({**DRAFT_7, "$defs": {"a": {"pattern": "(?<=a)b"}}}, "$defs.a.pattern", "look-around"),
        ({"properties": {"default": {"pattern": "("}}}, "properties.default.pattern", "unclosed group"),
        ({"properties": {"x": {"pattern": r"\p{L}{399}"}}}, "properties.x.pattern", "size limit"),
        ({"properties": {"x": {"pattern": "a{18446744073709551616}"}}}, "", "patterns of 184,467,440 characters"),
        ({"properties": {"x": {"pattern": r"^(\w{9}){99}$"}}}, "", "patterns of 44,"),
        ({"properties": {"x": {"pattern": "(([ab]{2}|c){3}+{50}){99}"}}}, "", "patterns of "),
        ({"properties": {"x": {"pattern": "(?ix) # (["}}}, "properties.x.pattern", "verbose"),
        (named("a", unevaluatedProperties=False), "", "unevaluatedProperties beside patternProperties"),
        ({"properties": {"x": {**DRAFT_7, "pattern": "^(a+)+$"}}}, "", "$schema can stand only at the root"),
    ],
)
def test_what_no_linear_engine_checks_is_refused_at_declaration(parameters, place, says):
    with pytest.raises(ProtocolError) as caught:
        declare([{"name": "f", "parameters": parameters}])
    assert (caught.value.reason, caught.value.where) == ("schema", "tools.f.parameters")
    assert place in caught.value.message
    assert says in caught.value.message


def test_patterns_are_bounded_over_all_declarations():
    tools = [{"name": f"f{i}", "parameters": {"properties": {"x": {"pattern": "[a-z]{999}"}}}} for i in range(21)]
    declare(tools[:20])
    with pytest.raises(ProtocolError, match="patterns of 20,979 characters") as caught:
        declare(tools)
    assert (caught.value.reason, caught.value.where) == ("schema", "tools.f20.parameters")
    with pytest.raises(ProtocolError, match="patterns of 20,979 characters") as caught:
        declare(None, {"actions": tools})
    assert (caught.value.reason, caught.value.where) == ("schema", "tools.f20.parameters")


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("^a+$", 4),
        ("a{3}", 3),
        ("a{2,5}b", 6),
        ("(ab){3}", 9),
        ("((ab){3}c){2}", 22),
        (r"[a-z(\]{2}]", 1),
        (r"[\w-]{2}\w", 150),
        (r"\x{41}\{2}", 4),
        ("(a+{9})?", 12),
        ("a{0}", 1),
        ("[a{99}", 1),
        ("^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", 41),
    ],
)
def test_the_size_of_a_pattern(pattern, size):
    assert schemas.patterns_size({"items": {"pattern": pattern}}) == size


def test_data_and_names_are_no_patterns():
    properties = {
        "pattern": {"type": "string", "default": "(?=a)"},
        "x": {
            "enum": [{"pattern": "(?=a)"}],
            "default": {"pattern": "("},
            "examples": [{"patternProperties": {"(": 1}}],
        },
    }
    parameters = {"type": "object", "properties": properties}
    declare([{"name": "f", "parameters": parameters}])
    assert refusal(parameters, {"pattern": "(", "x": {"pattern": "(?=a)"}}) is None
    # until a reference makes one of them
    loose = {"properties": {"y": {"$ref": "#/properties/x/default"}, "x": {"default": {"pattern": "("}}}}
    assert refusal(loose, {"y": "a"})[0] == "schema"


@pytest.mark.parametrize(
    "twice",
    [
        lambda ref: {"allOf": [ref, ref]},
        lambda ref: {"anyOf": [{"allOf": [ref, False]}, ref]},
        lambda ref: {"properties": {}, "dependentSchemas": {"x": ref, "y": ref}},
    ],
)
def test_references_do_not_multiply(twice, monkeypatch):
    monkeypatch.setattr(schemas, "MOST_STEPS", 5000)
    levels = {f"d{i}": twice({"$ref": f"#/$defs/d{i + 1}"}) for i in range(60)}
    parameters = {"unevaluatedProperties": False, "$ref": "#/$defs/d0", "$defs": {**levels, "d60": {"type": "object"}}}
    reason, where, message = refusal(parameters, {"x": 1, "y": 2})
    assert (reason, where) == ("schema", "tools.f.parameters")
    assert "more than 5,000 steps" in message
    # what one check took is not missing in the next
    assert refusal({"type": "object"}, {}) is None
