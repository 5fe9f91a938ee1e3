import asyncio
import threading
import time
from typing import Annotated, Literal

import pytest
from pydantic import Field

from smi.protocol.payloads import loads
from smi.protocol.stream import Block, Span
from smi.protocol.tokens import BlockType
from smi.runtime.actions import ActionRunner, Policy
from smi.runtime.tools import Tool, ToolError, tool, toolbox

PARAMETERS = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "x": {"type": "number"}, "s": {"type": "string"}, "deep": {}},
    "additionalProperties": False,
}


def echo(**arguments):
    return arguments


ECHO = Tool({"name": "echo", "parameters": PARAMETERS}, echo)


def act(payload):
    return Block(BlockType.ACT, payload)


def call(id="a1", name="echo", arguments="{}", type="tool"):
    return act(f'{{"id":"{id}","type":"{type}","name":"{name}","arguments":{arguments}}}')


def caps(*tools, **more):
    return {"tools": [t.declaration for t in tools], **more}


def run(acts, tools=(ECHO,), capabilities=None, cut=(), policy=None, **settings):
    runner = ActionRunner(toolbox(tools), policy, **settings)
    return asyncio.run(runner.run(acts, caps(*tools) if capabilities is None else capabilities, cut))


def payloads(outcomes):
    return [loads(block.text) for outcome in outcomes for block in outcome.observations]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"n":9007199254740993}', {"n": 9007199254740993}),
        ('{"n":-1234567890123456789}', {"n": -1234567890123456789}),
        ('{"x":1e-7,"s":""}', {"x": 1e-7, "s": ""}),
        ('{"s":"<|eot|> 漢"}', {"s": "<|eot|> 漢"}),
        ("{}", {}),
    ],
)
def test_accepted_unchanged(arguments, value):
    (outcome,) = run([call(arguments=arguments)])
    assert outcome.result == value
    assert payloads([outcome]) == [{"caused_by": "a1", "ok": True, "content": value}]


DEEP = '{"deep":' + "[" * 80 + "]" * 80 + "}"


@pytest.mark.parametrize(
    ("block", "kind", "path"),
    [
        (call(name="Echo"), "undeclared", "name"),
        (call(name="echo "), "undeclared", "name"),
        (call(type="action"), "undeclared", "name"),
        (call(arguments='{"n":"1"}'), "invalid_arguments", "arguments.n"),
        (call(arguments='{"n":true}'), "invalid_arguments", "arguments.n"),
        (call(arguments='{"x":true}'), "invalid_arguments", "arguments.x"),
        (call(arguments='{"n":1.5}'), "invalid_arguments", "arguments.n"),
        (call(arguments='{"extra":1}'), "invalid_arguments", "arguments"),
        (call(arguments='{"n":1,"n":2}'), "malformed", "arguments.n"),
        (call(arguments='{"deep":[{"a":1},{"a":1,"a":2}]}'), "malformed", "arguments.deep[1].a"),
        (call(arguments='{"\\ud800":1,"\\ud800":2}'), "malformed", "arguments"),
        (call(arguments='{"x":NaN}'), "malformed", "arguments.x"),
        (call(arguments='{"deep":[0,-Infinity]}'), "malformed", "arguments.deep[1]"),
        (call(arguments='{"x":1e999}'), "malformed", "arguments.x"),
        (call(arguments=DEEP), "malformed", "arguments.deep" + "[0]" * 62),
        (call(arguments='"{}"'), "malformed", "arguments"),
        (call(type="function"), "malformed", "type"),
        (act('{"id":"a1","type":"tool","name":"echo","arguments":{},"more":1}'), "malformed", "more"),
        (act('{"type":"tool","name":"echo","arguments":{}}'), "malformed", "id"),
        (act("hello"), "malformed", ""),
        (act("[1]"), "malformed", ""),
        (call(arguments='{"s":"' + "x" * 70000 + '"}'), "malformed", ""),
    ],
)
def test_refused_with_its_own_type_and_place(block, kind, path):
    ran = []
    spy = Tool(ECHO.declaration, lambda **arguments: ran.append(arguments))
    (outcome,) = run([block], [spy])
    assert ran == []
    assert outcome.error is not None
    assert (outcome.error.type, outcome.error.path) == (kind, path)
    (observation,) = payloads([outcome])
    assert observation["ok"] is False
    assert observation["error"]["type"] == kind


def test_nothing_cut_is_ever_run():
    ran = []
    spy = Tool(ECHO.declaration, lambda **arguments: ran.append(arguments))
    whole = call().text
    for end in range(len(whole)):
        (outcome,) = run([act(whole[:end])], [spy])
        assert outcome.error is not None
        assert outcome.error.type == "malformed"
    # also where what is there reads like the whole
    (outcome,) = run([act(whole)], [spy], cut=[0])
    assert outcome.error is not None
    assert (outcome.error.type, outcome.caused_by) == ("unfinished", "a1")
    assert ran == []


def test_the_steps_come_in_their_order():
    """An action that fails every step is refused by the first; mending one step shows the next."""
    tools = {"there": Tool({"name": "there", "parameters": PARAMETERS}, echo)}
    declared = {"tools": [{"name": "there", "parameters": PARAMETERS}, {"name": "gone", "parameters": PARAMETERS}]}
    policy = {"permissions": {"gone": "deny"}, "max_per_turn": 0, "checks": [lambda action: "the door is shut"]}

    def kind(block, **settings):
        runner = ActionRunner(tools, Policy(**{**policy, **settings}))
        (outcome,) = asyncio.run(runner.run([block], declared))
        return outcome.error.type if outcome.error else None

    assert kind(act("{")) == "malformed"
    assert kind(call(name="nowhere", arguments='{"n":"x"}')) == "undeclared"
    assert kind(call(name="gone", arguments='{"n":"x"}')) == "invalid_arguments"
    assert kind(call(name="gone")) == "permission_denied"
    assert kind(call(name="gone"), permissions={}) == "policy"
    assert kind(call(name="gone"), permissions={}, max_per_turn=1) == "environment"
    assert kind(call(name="gone"), permissions={}, max_per_turn=1, checks=[]) == "no_handler"
    assert kind(call(name="there"), permissions={}, max_per_turn=1, checks=[]) is None


@pytest.mark.parametrize("answer", [True, False, "yes", 1])
@pytest.mark.parametrize("slow", [False, True])
def test_people_are_asked_and_only_true_is_yes(answer, slow):
    asked = []

    async def later(action):
        asked.append(action.name)
        return answer

    def now(action):
        asked.append(action.name)
        return answer

    (outcome,) = run([call()], policy=Policy(default="ask", ask=later if slow else now))
    assert asked == ["echo"]
    assert (outcome.error is None) == (answer is True)
    assert run([call()], policy=Policy(default="ask"))[0].error.type == "permission_denied"


def test_ten_at_once_return_ten_tied_by_id():
    def explode():
        raise KeyError("no such thing")

    async def slow():
        await asyncio.sleep(30)

    def stuck():
        time.sleep(20)

    async def lazy():
        raise TimeoutError("the other side did not answer")

    tools = [
        ECHO,
        *(Tool({"name": f.__name__, "parameters": {"type": "object"}}, f) for f in (explode, slow, stuck, lazy)),
        Tool({"name": "odd", "parameters": {}}, lambda: {1, 2}),
        Tool({"name": "huge", "parameters": {}}, lambda: "x" * 100_000),
        Tool({"name": "forbidden", "parameters": {}}, lambda: 1),
    ]
    names = ["echo", "explode", "slow", "stuck", "odd", "huge", "forbidden", "nowhere", "lazy", "echo"]
    acts = [call(id=f"a{i}", name=name) for i, name in enumerate(names)]
    policy = Policy(permissions={"forbidden": "deny"}, timeouts={"slow": 0.3, "stuck": 0.3})
    start = time.monotonic()
    outcomes = run(acts, tools, policy=policy)
    assert time.monotonic() - start < 15
    kinds = [outcome.error.type if outcome.error else None for outcome in outcomes]
    assert kinds == [
        *(None, "failed", "timeout", "timeout", "failed", "failed"),
        *("permission_denied", "undeclared", "failed", None),
    ]
    assert [p["caused_by"] for p in payloads(outcomes)] == [f"a{i}" for i in range(10)]


def test_a_handler_refuses_in_its_own_words():
    def lookup(item: str):
        raise ToolError("not_found", f"no {item}")

    (outcome,) = run([call(name="lookup", arguments='{"item":"lamp"}')], [tool(lookup)])
    assert payloads([outcome])[0]["error"] == {"type": "not_found", "message": "no lamp"}


def test_independent_actions_run_at_the_same_time():
    gate = threading.Barrier(4, timeout=20)

    def meet():
        gate.wait()

    meeting = Tool({"name": "meet", "parameters": {}}, meet)
    outcomes = run([call(id=str(i), name="meet") for i in range(4)], [meeting], policy=Policy(max_concurrent=4))
    assert all(outcome.error is None for outcome in outcomes)


def test_no_more_run_at_a_time_than_the_policy_says():
    running, most = 0, 0

    async def count():
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    counting = Tool({"name": "count", "parameters": {}}, count)
    run([call(id=str(i), name="count") for i in range(9)], [counting], policy=Policy(max_concurrent=3))
    assert most == 3


def test_rates_by_name_over_time():
    now = 0.0
    tools = toolbox([ECHO, Tool({"name": "other", "parameters": {}}, echo)])
    runner = ActionRunner(tools, Policy(rate=(2, 10.0)), clock=lambda: now)

    def kinds(*names):
        acts = [call(id=str(i), name=name) for i, name in enumerate(names)]
        outcomes = asyncio.run(runner.run(acts, caps(*tools.values())))
        return [outcome.error and outcome.error.type for outcome in outcomes]

    assert kinds("echo", "echo", "echo", "other") == [None, None, "policy", None]
    now = 9.9
    assert kinds("echo") == ["policy"]
    now = 10.0
    assert kinds("echo", "echo", "echo") == [None, None, "policy"]


def test_a_check_that_fails_has_not_said_yes():
    def broken(action):
        raise OSError("the sensor is gone")

    (outcome,) = run([call()], policy=Policy(checks=[broken]))
    assert outcome.error is not None
    assert outcome.error.type == "environment"
    assert "the sensor is gone" in outcome.error.message


def test_an_id_used_twice_runs_once():
    one, two, three = run([call(arguments='{"n":1}'), call(arguments='{"n":2}'), act("{")])
    assert one.result == {"n": 1}
    assert (two.error.type, two.error.path, two.caused_by) == ("malformed", "id", "#2")
    assert three.caused_by == "#3"


def test_made_up_ids_are_nobody_elses():
    """A model may name its actions like those that have no name."""
    broken = act("{")
    for acts in ([call("#2"), broken], [broken, call("#1")], [call("##2"), broken, call("#2"), broken], [broken] * 3):
        outcomes = run(acts)
        assert len({outcome.caused_by for outcome in outcomes}) == len(acts)
        assert [payload["caused_by"] for payload in payloads(outcomes)] == [outcome.caused_by for outcome in outcomes]
        assert [outcome.error is None for outcome in outcomes] == [block is not broken for block in acts]


def test_whoever_cannot_be_asked_has_not_said_yes():
    def gone(action):
        raise EOFError

    async def later(action):
        raise ConnectionError("no line")

    for ask, says in ((gone, "EOFError"), (later, "ConnectionError: no line")):
        (outcome,) = run([call()], policy=Policy(default="ask", ask=ask))
        assert (outcome.error.type, outcome.error.message) == ("permission_denied", f"nobody could be asked: {says}")


def test_handlers_that_do_not_look_async():
    class Callable:
        async def __call__(self, **arguments):
            await asyncio.sleep(0)
            return arguments

    class Sleeper:
        async def __call__(self):
            await asyncio.sleep(20)

    (outcome,) = run([call(arguments='{"n":1}')], [Tool(ECHO.declaration, Callable())])
    assert outcome.result == {"n": 1}
    sleeper = Tool({"name": "sleep", "parameters": {}}, Sleeper())
    (outcome,) = run([call(name="sleep")], [sleeper], policy=Policy(timeout=0.05))
    assert outcome.error.type == "timeout"


def test_cancelling_reaches_the_handlers():
    reached = []

    async def slow():
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            reached.append("cancelled")
            raise

    async def main():
        runner = ActionRunner(toolbox([Tool({"name": "slow", "parameters": {}}, slow)]))
        job = asyncio.create_task(runner.run([call(name="slow")], {"tools": [{"name": "slow"}]}))
        await asyncio.sleep(0.05)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    asyncio.run(main())
    assert reached == ["cancelled"]


def test_physical_actions_go_to_the_body_one_after_the_other():
    done = []

    async def body(act):
        done.append(("begin", act.parts[0].ids))
        await asyncio.sleep(0.01)
        done.append(("end", act.parts[0].ids))
        return [Block(BlockType.OBS, (Span("vision", (1, 2)),))]

    moves = [act((Span("arm", (n,)),)) for n in range(2)]
    outcomes = run(moves, [], {"actions": ["arm_trajectory"]}, embodiment=body)
    assert done == [("begin", (0,)), ("end", (0,)), ("begin", (1,)), ("end", (1,))]
    assert [o.observations for o in outcomes] == [(Block(BlockType.OBS, (Span("vision", (1, 2)),)),)] * 2
    assert run(moves[:1], [], {}, embodiment=body)[0].error.type == "undeclared"
    assert run(moves[:1], [], {"actions": ["x"]})[0].error.type == "no_handler"
    assert run(moves[:1], [], {"actions": ["x"]}, cut=[0], embodiment=body)[0].error.type == "unfinished"
    for shown in ([], None, "seen", [Block(BlockType.USR, "seen")]):
        (outcome,) = run(moves[:1], [], {"actions": ["x"]}, embodiment=lambda act, shown=shown: shown)
        assert outcome.error.type == "failed"


def test_a_policy_governs_physical_actions_too():
    """Nothing that the body does goes past permissions, counts, rates, the environment and time."""
    moves = [act((Span("arm", (n,)),)) for n in range(3)]
    moved = []

    def body(act):
        moved.append(act)
        return [Block(BlockType.OBS, "moved")]

    def kinds(**policy):
        moved.clear()
        outcomes = run(moves, [], {"actions": ["x"]}, embodiment=body, policy=Policy(**policy))
        assert len(moved) == sum(outcome.error is None for outcome in outcomes)
        return [outcome.error and outcome.error.type for outcome in outcomes]

    assert kinds() == [None] * 3
    assert kinds(default="deny") == kinds(permissions={"physical": "deny"}) == ["permission_denied"] * 3
    assert kinds(default="deny", permissions={"physical": "allow"}) == [None] * 3
    asked = []
    assert kinds(default="ask", ask=lambda action: asked.append(action.arguments["act"]) or len(asked) == 2) == [
        *("permission_denied", None, "permission_denied")
    ]
    assert asked == moves
    assert kinds(max_per_turn=1) == kinds(rate=(1, 60.0)) == [None, "policy", "policy"]
    assert (
        kinds(checks=[lambda action: "a person is near" if action.type == "physical" else None]) == ["environment"] * 3
    )

    async def slow(act):
        await asyncio.sleep(20)

    (outcome,) = run(moves[:1], [], {"actions": ["x"]}, embodiment=slow, policy=Policy(timeouts={"physical": 0.05}))
    assert outcome.error.type == "timeout"


def test_signatures_become_schemas():
    def weather(city: str, days: Annotated[int, Field(ge=1, le=9)] = 3, unit: Literal["c", "f"] | None = None) -> dict:
        """The forecast
        for a city.

        More that the model need not read.
        """
        return {"city": city, "days": days, "unit": unit}

    made = tool(weather)
    assert made.declaration["name"] == "weather"
    assert made.declaration["description"] == "The forecast for a city."
    assert made.declaration["parameters"]["required"] == ["city"]
    assert "title" not in str(made.declaration)

    def kinds(arguments):
        (outcome,) = run([call(name="weather", arguments=arguments)], [made])
        return outcome.error.type if outcome.error else outcome.result

    assert kinds('{"city":"Oslo","days":9}') == {"city": "Oslo", "days": 9, "unit": None}
    for wrong in ('{"city":"Oslo","days":10}', '{"days":1}', '{"city":"Oslo","when":1}', '{"city":"Oslo","unit":"k"}'):
        assert kinds(wrong) == "invalid_arguments"

    def bare():
        return "done"

    (outcome,) = run([call(name="bare")], [tool(bare)])
    assert outcome.result == "done"


def test_a_parameter_named_title_keeps_its_name():
    def book(title: str):
        return title

    assert tool(book).declaration["parameters"]["required"] == ["title"]
    assert run([call(name="book", arguments='{"title":"Emma"}')], [tool(book)])[0].result == "Emma"


def test_functions_that_cannot_be_tools_are_refused():
    def many(*numbers):
        pass

    def place(x, /):
        pass

    for function in (many, place):
        with pytest.raises(ValueError, match="named arguments"):
            tool(function)
    with pytest.raises(ValueError, match="no name to be called by"):
        tool(lambda x: x)

    def sockets(s: type(threading.Lock())):  # type: ignore[valid-type]
        pass

    with pytest.raises(ValueError, match="no JSON Schema"):
        tool(sockets)
    with pytest.raises(ValueError, match="two tools"):
        toolbox([ECHO, ECHO])


@pytest.mark.parametrize(
    "wrong",
    [
        {"default": "maybe"},
        {"permissions": {"a": "no"}},
        {"max_concurrent": 0},
        {"timeout": 0},
        {"rate": (0, 1)},
        {"timeouts": {"a": -1}},
    ],
)
def test_policies_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        Policy(**wrong)
