import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smi.protocol import Action, ProtocolError, Span, dumps, loads, parse_act
from smi.protocol.json_text import count_values
from smi.protocol.payloads import act_payload, ctrl_payload, declare, normalise_tools, obs_payload


def refused(reason: str):
    return pytest.raises(ProtocolError, match=rf"\[{reason}\]$")


# the JSON lines of the protocol text, byte for byte
@pytest.mark.parametrize(
    ("payload", "line"),
    [
        (
            act_payload("a1", "read_file", {"path": "a.py"}),
            '{"id":"a1","type":"tool","name":"read_file","arguments":{"path":"a.py"}}',
        ),
        (
            act_payload("a3", "edit_file", {"path": "src/auth.ts", "patch": "..."}),
            '{"id":"a3","type":"tool","name":"edit_file","arguments":{"path":"src/auth.ts","patch":"..."}}',
        ),
        (
            act_payload("a4", "bash", '{"command": "npm test"}'),
            '{"id":"a4","type":"tool","name":"bash","arguments":{"command":"npm test"}}',
        ),
        (obs_payload("a1", True, "..."), '{"caused_by":"a1","ok":true,"content":"..."}'),
        (obs_payload("a3", True), '{"caused_by":"a3","ok":true}'),
        (
            obs_payload("a4", True, "42 tests passed"),
            '{"caused_by":"a4","ok":true,"content":"42 tests passed"}',
        ),
        (
            obs_payload("a1", False, error={"message": "Access denied", "type": "permission_denied"}),
            '{"caused_by":"a1","ok":false,"error":{"type":"permission_denied","message":"Access denied"}}',
        ),
        (
            ctrl_payload({"reasoning": {"mode": "adaptive", "effort": "medium", "max_tokens": 2048}, "realtime": True}),
            '{"reasoning":{"mode":"adaptive","effort":"medium","max_tokens":2048},"realtime":true}',
        ),
        (declare([], {"actions": ["navigate", "speak"]}).payload, '{"actions":["navigate","speak"]}'),
    ],
)
def test_lines_of_the_protocol(payload: str, line: str) -> None:
    assert payload == line


def test_writer() -> None:
    assert dumps({"b": [1, 2.0, None, True], "a": 'é\u2028"\\\n'}) == '{"b":[1,2.0,null,true],"a":"é\u2028\\"\\\\\\n"}'
    assert obs_payload("a", True, 0) == '{"caused_by":"a","ok":true,"content":0}'
    assert obs_payload("a", True, "") == '{"caused_by":"a","ok":true,"content":""}'


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "number"),
        ([float("inf")], "number"),
        (10**400, "number"),
        ({1: 2}, "json"),
        ({None: 2}, "json"),
        ((1, 2), "json"),
        ({"a": {1, 2}}, "json"),
        (b"x", "json"),
        ({"a\ud800": 1}, "text"),
        (["\udfff"], "text"),
        (eval("[" * 65 + "]" * 65), "nesting"),
    ],
)
def test_writer_refuses(value: Any, reason: str) -> None:
    with refused(reason):
        dumps(value)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        # the reader of Python gives up on the last two
        ('{"a":[1,{"b c":' + "[" * 70 + "]" * 70 + "}]}", "a[1].b c" + "[0]" * 61),
        ('{"x":{"y":"{[,"},"a":[1,{"b c":' + "[" * 5000 + "]" * 5000 + "}]}", "a[1].b c" + "[0]" * 61),
        ('[0,"]\\"",{"k":{}},' + '{"k":[],"a":' * 5000, "[3]" + ".a" * 62 + ".k"),
    ],
)
def test_what_is_nested_too_deep_has_a_path(text: str, where: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        loads(text)
    assert (caught.value.reason, caught.value.where) == ("nesting", where)
    if len(text) < 1000:
        with pytest.raises(ProtocolError) as caught:
            dumps(json.loads(text))
        assert (caught.value.reason, caught.value.where) == ("nesting", where)


@pytest.mark.parametrize(
    ("text", "values"),
    [("3", 1), ('{"a":[1,"[,{",{"b":2}]}', 6), ('["\\",",",\\\\",2]', 4), ('[",', 2), ('"' + '\\"' * 10**6, 1)],
)
def test_values_are_counted_before_they_are_read(text: str, values: int) -> None:
    assert count_values(text) == values


def test_writer_refuses_circles() -> None:
    circle: list[Any] = []
    circle.extend([circle, circle])
    with refused("nesting"):
        dumps(circle)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "json"),
        ("{", "json"),
        ("{'a': 1}", "json"),
        ('{"a": 1} x', "json"),
        ("\ufeff{}", "json"),
        ('{"a": 1, "a": 1}', "duplicate_key"),
        ('[{"a": {"b": 1, "c": 2, "b": 3}}]', "duplicate_key"),
        ("NaN", "number"),
        ("[-Infinity]", "number"),
        ("1e999", "number"),
        ("9" * 5000, "number"),
        ("9" * 309, "number"),
        ('"\\ud800"', "text"),
        ('{"\\udc00": 1}', "text"),
        ('"\ud800"', "text"),
        ("[" * 65 + "]" * 65, "nesting"),
        ("[" * 200_000 + "]" * 200_000, "nesting"),
        ('{"a":' * 2000 + "1" + "}" * 2000, "nesting"),
    ],
)
def test_reader_refuses(text: str, reason: str) -> None:
    with refused(reason):
        loads(text)


def test_reader_takes_what_json_allows() -> None:
    assert loads(' {"a": [1, -0.5, 1E2, "\\ud83d\\ude00"]} ') == {"a": [1, -0.5, 100.0, "😀"]}
    assert loads("9" * 300) == int("9" * 300)
    assert loads("[" * 64 + "]" * 64) is not None


def values() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.text()
    leaves |= st.floats(allow_nan=False, allow_infinity=False)
    return st.recursive(
        leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=6
    )


@given(values())
def test_reading_inverts_writing(value: Any) -> None:
    assert loads(dumps(value)) == value
    assert dumps(loads(dumps(value))) == dumps(value)


@given(st.dictionaries(st.text(), values(), max_size=4))
def test_arguments_as_mapping_or_text(arguments: dict[str, Any]) -> None:
    for text in (json.dumps(arguments), json.dumps(arguments, ensure_ascii=False, indent=3)):
        assert act_payload("a1", "f", text) == act_payload("a1", "f", arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        '"{}"',
        '"{\\"a\\": 1}"',
        '{"a": 1',
        "[1]",
        "null",
        "",
        '{"a": NaN}',
        '{"a": 1, "a": 2}',
        None,
        [1],
        7,
        {1: 2},
    ],
)
def test_arguments_refused(arguments: object) -> None:
    with refused("arguments"):
        act_payload("a1", "f", arguments)


def test_envelopes_refused() -> None:
    for id in ("", None, 7):
        with refused("id"):
            act_payload(id, "f", {})  # pyright: ignore[reportArgumentType]
    with refused("name"):
        act_payload("a1", "", {})
    error = {"type": "t", "message": "m"}
    for ok, content, problem in [
        (True, None, error),
        (False, None, None),
        (False, None, {"type": "t"}),
        (False, None, {"type": 1, "message": "m"}),
        (False, "text", error),
        (1, None, None),
    ]:
        with refused("observation"):
            obs_payload("a1", ok, content, problem)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "ctrl",
    [
        7,
        {"reasoning": 1},
        {"reasoning": {"mode": "sometimes"}},
        {"reasoning": {"effort": True}},
        {"reasoning": {"effort": None}},
        {"reasoning": {"effort": " "}},
        {"reasoning": {"effort": -0.1}},
        {"reasoning": {"effort": float("nan")}},
        {"reasoning": {"max_tokens": -1}},
        {"reasoning": {"max_tokens": 1.5}},
        {"reasoning": {"max_tokens": True}},
    ],
)
def test_ctrl_refused(ctrl: Any) -> None:
    with refused("ctrl"):
        ctrl_payload(ctrl)


def test_ctrl_open_to_more() -> None:
    assert ctrl_payload({"reasoning": {"mode": "fixed", "effort": 0.3, "style": "terse"}, "x": [1]}) == (
        '{"reasoning":{"mode":"fixed","effort":0.3,"style":"terse"},"x":[1]}'
    )


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "number"}, "s": {"enum": ["C", "F"]}},
    "required": ["n"],
}


def test_tools_flattened() -> None:
    wrapped = {
        "type": "function",
        "function": {"parameters": SCHEMA, "strict": True, "description": "d", "name": "f"},
    }
    flat = normalise_tools([wrapped, {"type": "function", "name": "g", "description": None, "parameters": None}])
    assert dumps(flat) == (
        '[{"name":"f","description":"d","parameters":' + dumps(SCHEMA) + ',"strict":true},{"name":"g"}]'
    )
    assert normalise_tools(flat) == flat


@pytest.mark.parametrize(
    "tools",
    [
        7,
        "[]",
        {"name": "f"},
        [7],
        [{}],
        [{"name": ""}],
        [{"name": 1}],
        [{"name": "f"}, {"name": "f"}],
        [{"name": "f", "parameters": []}],
        [{"name": "f", "description": 1}],
        [{"type": "function", "function": "f"}],
        [{"type": "code", "function": {"name": "f"}}],
        [{"type": "function", "function": {"name": "f"}, "strict": True}],
    ],
)
def test_tools_refused(tools: object) -> None:
    with refused("tools"):
        normalise_tools(tools)


def act(arguments: str, name: str = "f") -> str:
    return f'{{"id":"a1","type":"tool","name":"{name}","arguments":{arguments}}}'


def test_actions_parse() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}, {"name": "g"}]
    assert parse_act(act('{"n": 1.5, "s": "C"}'), tools) == Action("a1", "tool", "f", {"n": 1.5, "s": "C"})
    assert parse_act(act('{"x": 1}', "g"), tools).arguments == {"x": 1}


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ("ls -l", "json"),
        (act('{"n": NaN}'), "number"),
        (act('{"n": 1, "n": 2}'), "duplicate_key"),
        ("[1]", "act"),
        ('{"id":"a1","type":"tool","name":"f"}', "act"),
        ('{"id":7,"type":"tool","name":"f","arguments":{}}', "act"),
        ('{"id":"","type":"tool","name":"f","arguments":{}}', "act"),
        ('{"id":"a1","type":"shell","name":"f","arguments":{}}', "act"),
        ('{"id":"a1","type":"tool","name":"f","arguments":"{}"}', "act"),
        ('{"id":"a1","type":"tool","name":"f","arguments":{"n":1},"sudo":true}', "act"),
        (act("{}", "h"), "undeclared_tool"),
        (act("{}"), "arguments"),
        (act('{"n": "1"}'), "arguments"),
        (act('{"n": true}'), "arguments"),
        (act('{"n": 1, "s": "K"}'), "arguments"),
        (act("{}", "odd"), "schema"),
        (act("{}", "remote"), "schema"),
        (act("{}", "loop"), "schema"),
        (act('{"a": "b"}', "pattern"), "schema"),
    ],
)
def test_actions_refused_one_step_at_a_time(payload: str, reason: str) -> None:
    tools = [
        {"name": "f", "parameters": SCHEMA},
        {"name": "odd", "parameters": {"type": "dict"}},
        {"name": "remote", "parameters": {"$ref": "http://127.0.0.1:9/schema.json"}},
        {"name": "loop", "parameters": {"$ref": "#"}},
        {"name": "pattern", "parameters": {"properties": {"a": {"pattern": "("}}}},
    ]
    with refused(reason):
        parse_act(payload, tools)


def test_declarations_are_written_as_the_protocol_shows_them() -> None:
    caps = {"actions": ["wave", {"parameters": SCHEMA, "name": "grip"}], "rate": 10}
    declared = declare([{"type": "function", "function": {"parameters": SCHEMA, "name": "f"}}], caps)
    text = dumps(SCHEMA)
    assert declared.payload == (
        f'{{"tools":[{{"name":"f","parameters":{text}}}],'
        f'"actions":["wave",{{"name":"grip","parameters":{text}}}],"rate":10}}'
    )
    assert (list(declared.tools), list(declared.actions)) == (["f"], ["wave", "grip"])
    assert declare().payload is declare([], {}).payload is None
    assert declare(caps={"tools": [{"name": "f"}], "x": 1}).payload == '{"tools":[{"name":"f"}],"x":1}'


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "dict"},
        {"properties": []},
        {"properties": {"a": {"type": "str"}}},
        {"required": "a"},
        {"properties": {"a": {"pattern": "("}}},
        {"$schema": "https://example.com/mine", "type": "object"},
        {"$schema": 7},
    ],
)
def test_broken_schemas_are_refused_at_declaration(parameters: dict[str, Any]) -> None:
    # twice, since the outcome is remembered
    for _ in range(2):
        with refused("schema"):
            declare([{"name": "f", "parameters": parameters}])
        with refused("schema"):
            declare(caps={"actions": [{"name": "f", "parameters": parameters}]})


def test_dialects() -> None:
    # a list under items is a tuple in draft 7, and no schema at all in 2020-12
    parameters = {"properties": {"a": {"items": [{"type": "string"}, {"type": "number"}]}}}
    draft_7 = {"$schema": "http://json-schema.org/draft-07/schema#", **parameters}
    with refused("schema"):
        declare([{"name": "f", "parameters": parameters}])
    declare([{"name": "f", "parameters": draft_7}])
    assert parse_act(act('{"a": ["x", 1]}'), [{"name": "f", "parameters": draft_7}]).name == "f"
    with refused("arguments"):
        parse_act(act('{"a": ["x", "y"]}'), [{"name": "f", "parameters": draft_7}])
    latest = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"}
    assert declare([{"name": "f", "parameters": latest}]).payload


def test_named_actions_parse() -> None:
    actions = ["wave", {"name": "grip", "parameters": SCHEMA}]

    def line(name: str, arguments: str) -> str:
        return f'{{"id":"a1","type":"action","name":"{name}","arguments":{arguments}}}'

    assert act_payload("a1", "wave", {}, "action") == line("wave", "{}")
    assert parse_act(line("wave", '{"x":1}'), [], actions) == Action("a1", "action", "wave", {"x": 1})
    assert parse_act(line("grip", '{"n":1}'), [], actions).name == "grip"
    for payload, reason in [
        (line("grip", "{}"), "arguments"),
        (line("fly", "{}"), "undeclared_action"),
        (act("{}", "wave"), "undeclared_tool"),
        ((Span("arm", (1, 2)),), "act"),
    ]:
        with refused(reason):
            parse_act(payload, [], actions)
    with refused("undeclared_action"):
        parse_act(line("wave", "{}"), [{"name": "wave"}])


def test_a_cached_declaration_hides_no_fault() -> None:
    assert declare([{"name": "f", "parameters": {"properties": {}, "x": {"1": 2}, "y": [1]}}]).payload
    for odd in ({"x": {1: 2}, "y": [1]}, {"x": {"1": 2}, "y": (1,)}):
        with refused("json"):
            declare([{"name": "f", "parameters": {"properties": {}, **odd}}])
