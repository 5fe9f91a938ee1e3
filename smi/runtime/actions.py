"""Actions: every ACT is held against what was declared, allowed and possible before anything runs.

The steps come in this order, and each refuses with an error type of its own:

    malformed         no JSON, no envelope, too large; or an id that another action of the turn has
    unfinished        cut by a limit: never executed, never repaired
    undeclared        CAPS does not name it
    invalid_arguments the arguments do not fit the declared schema
    permission_denied the policy or the person asked says no
    policy            too many calls in this turn, or within the time
    environment       the host's own checks, which have the last word
    no_handler        declared, but nothing here can run it

Then the handler runs, and may end as `timeout`, `failed`, or the type of its own `ToolError`. Every ACT yields an OBS.

An ACT that holds token spans is physical: no JSON names it. To the policy it is an action named `physical` whose one
argument, `act`, is the block. It goes to the host's `embodiment`, if CAPS declares any actions, and what the
environment shows afterwards is its observation.

Protocol sections: "Actions and Observations", "Parallel Actions", "Errors", "Security".
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from smi.protocol.json_text import loads
from smi.protocol.payloads import Action, obs_payload, parse_act
from smi.protocol.stream import Block, ProtocolError, Span
from smi.protocol.tokens import BlockType
from smi.runtime.tools import Tool, ToolError

Permission: TypeAlias = Literal["allow", "deny", "ask"]
PHYSICAL = "physical"
"""What policies call an ACT that holds token spans, as its type and its name."""
Check: TypeAlias = Callable[[Action], str | None]
"""A check of the host: what speaks against running an action now, or None."""


@dataclass(frozen=True)
class Policy:
    """What may run, and how much of it.

    permissions: by name of tool or action; `default` for all others.
    ask: asked for an action whose permission is "ask"; plain or async; anything but True denies, an error too, and
        so does None.
    checks: of the environment, in order; the first that returns a text refuses with it.
    max_per_turn: actions of one transmission that may run; None for no limit.
    rate: (calls, seconds): at most so many calls of one name within any such time; None for no limit.
    timeout: seconds that a handler may take; `timeouts` by name go before it. None for no limit.
    max_concurrent: handlers that run at a time.
    max_payload: characters of an ACT payload.
    max_result: characters of the JSON of a result.
    """

    permissions: Mapping[str, Permission] = field(default_factory=dict)
    default: Permission = "allow"
    ask: Callable[[Action], bool | Awaitable[bool]] | None = None
    checks: Sequence[Check] = ()
    max_per_turn: int | None = 16
    rate: tuple[int, float] | None = None
    timeout: float | None = 60.0
    timeouts: Mapping[str, float] = field(default_factory=dict)
    max_concurrent: int = 8
    max_payload: int = 1 << 16
    max_result: int = 1 << 16

    def __post_init__(self) -> None:
        for name, permission in {**self.permissions, "default": self.default}.items():
            if permission not in ("allow", "deny", "ask"):
                raise ValueError(f"the permission of {name!r} must be allow, deny or ask, not {permission!r}")
        for name, low in (("max_concurrent", 1), ("max_payload", 1), ("max_result", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise ValueError(f"{name} must be a whole number from {low} up, not {value!r}")
        for name, value in {**self.timeouts, "timeout": self.timeout}.items():
            if value is not None and not value > 0:
                raise ValueError(f"the time-out of {name!r} must be above 0 seconds or None, not {value!r}")
        if self.rate is not None and not (self.rate[0] >= 1 and self.rate[1] > 0):
            raise ValueError(f"rate must be (calls from 1 up, seconds above 0), not {self.rate!r}")


_TYPES = {
    "undeclared_tool": "undeclared",
    "undeclared_action": "undeclared",
    "arguments": "invalid_arguments",
}


@dataclass(frozen=True)
class Refusal:
    """Why an action did not run: an error type of this module, the place, and the message for the model."""

    type: str
    message: str
    path: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of one ACT block.

    caused_by: its id; `#n`, counted from 1, for the n-th ACT of a transmission where it has none that can be used.
    action: as it was understood; None where it was not, and for a physical one.
    result: of the handler. seen: OBS blocks of the environment after a physical action. error: why it did not run,
    or not to its end.
    seconds: that the handler took.
    """

    caused_by: str
    action: Action | None
    result: Any = None
    seen: tuple[Block, ...] = ()
    error: Refusal | None = None
    seconds: float = 0.0

    @property
    def observations(self) -> tuple[Block, ...]:
        """The OBS blocks that tell the model: one, but for physical actions."""
        if self.error is None:
            return self.seen or (Block(BlockType.OBS, obs_payload(self.caused_by, True, self.result)),)
        error = {"type": self.error.type, "message": self.error.message}
        if self.error.path:
            error["path"] = self.error.path
        return (Block(BlockType.OBS, obs_payload(self.caused_by, False, error=error)),)


class ActionRunner:
    """Judges and runs the actions of one session's turns.

    Args:
        tools: what can be run, by name of the tool or action.
        policy: what may be run.
        embodiment: runs a physical action and returns what the environment shows then, as OBS blocks; plain or
            async. It judges for itself what the body may do, by raising.
        clock: seconds; for the rate.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        policy: Policy | None = None,
        embodiment: Callable[[Block], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tools = tools
        self.policy = policy or Policy()
        self._embodiment = embodiment
        self._clock = clock
        self._calls: dict[str, deque[float]] = {}

    async def run(
        self, acts: Sequence[Block], capabilities: Mapping[str, Any], cut: Collection[int] = ()
    ) -> list[Outcome]:
        """Judge and run the ACT blocks of one transmission; one outcome each, in their order.

        capabilities: the CAPS object in force. cut: numbers within `acts` of blocks that the model did not finish.
        Actions that may run do so concurrently, physical ones one after the other. If this is cancelled, so are the
        handlers.
        """
        limit = asyncio.Semaphore(self.policy.max_concurrent)
        body = asyncio.Semaphore(1)
        jobs: list[asyncio.Task[Outcome]] = []
        seen: set[str] = set()
        running = 0
        try:
            # judged one after the other: what one action uses up, the next one does not have
            for number, act in enumerate(acts):
                verdict = self._parse(act, capabilities, number in cut, seen)
                action = verdict if isinstance(verdict, Action) else None
                if action is None or action.type == PHYSICAL:
                    name = _usable_id(act, seen) or _made_up_id(number + 1, acts)
                else:
                    name = action.id
                seen.add(name)
                refusal = await self._judge(action, running) if action else verdict
                if isinstance(refusal, Refusal):
                    jobs.append(asyncio.create_task(_at_once(Outcome(name, _named(action), error=refusal))))
                    continue
                assert action is not None
                running += 1
                job = self._embody(name, action, body) if action.type == PHYSICAL else self._execute(action, limit)
                jobs.append(asyncio.create_task(job))
            return list(await asyncio.gather(*jobs))
        except BaseException:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            raise

    def _parse(self, act: Block, capabilities: Mapping[str, Any], cut: bool, seen: set[str]) -> Action | Refusal:
        """The action, or why there is none."""
        if cut:
            return Refusal("unfinished", "the action was cut by a limit on generated tokens; it was not executed")
        if any(isinstance(part, Span) for part in act.parts):
            if not capabilities.get("actions"):
                return Refusal("undeclared", "no actions are declared")
            return Action("", PHYSICAL, PHYSICAL, {"act": act})
        if len(act.text) > self.policy.max_payload:
            size = f"{len(act.text):,} characters, at most {self.policy.max_payload:,} are read"
            return Refusal("malformed", f"the action is too large: {size}")
        try:
            action = parse_act(act.payload, capabilities.get("tools") or [], capabilities.get("actions"))
        except ProtocolError as error:
            return Refusal(_TYPES.get(error.reason, "malformed"), error.message, error.where)
        if action.id in seen:
            return Refusal("malformed", f"another action of this transmission has the id {action.id!r}", "id")
        return action

    async def _judge(self, action: Action, running: int) -> Refusal | None:
        policy, name = self.policy, action.name
        permission = policy.permissions.get(name, policy.default)
        if permission == "ask":
            try:
                answer = False if policy.ask is None else policy.ask(action)
                permission = "allow" if (await answer if inspect.isawaitable(answer) else answer) is True else "deny"
            except Exception as error:  # whoever could not be asked has not said yes
                return Refusal(
                    "permission_denied", f"nobody could be asked: {type(error).__name__}: {error}".rstrip(": ")
                )
        if permission == "deny":
            return Refusal("permission_denied", f"{name!r} may not be used here")
        if policy.max_per_turn is not None and running >= policy.max_per_turn:
            return Refusal("policy", f"at most {policy.max_per_turn} actions run in one turn")
        if policy.rate is not None and self._too_fast(name, *policy.rate):
            calls, seconds = policy.rate
            return Refusal("policy", f"{name!r} may be used {calls} times in {seconds:g} s; try again later")
        for check in policy.checks:
            try:
                objection = check(action)
            except Exception as error:  # a check that fails has not said yes
                objection = f"the check of the environment failed: {type(error).__name__}: {error}"
            if objection is not None:
                return Refusal("environment", objection)
        if (self._embodiment is None) if action.type == PHYSICAL else (name not in self.tools):
            return Refusal("no_handler", f"{name!r} is declared, but nothing here can run it")
        if policy.rate is not None:
            self._calls.setdefault(name, deque()).append(self._clock())
        return None

    def _too_fast(self, name: str, calls: int, seconds: float) -> bool:
        times = self._calls.setdefault(name, deque())
        while times and times[0] <= self._clock() - seconds:
            times.popleft()
        return len(times) >= calls

    async def _execute(self, action: Action, limit: asyncio.Semaphore) -> Outcome:
        seconds = self.policy.timeouts.get(action.name, self.policy.timeout)
        async with limit:
            result, error, took = await _timed(self.tools[action.name].run, action.arguments, seconds)
        error = error or self._unfit(result)
        return Outcome(action.id, action, None if error else result, error=error, seconds=took)

    async def _embody(self, name: str, action: Action, body: asyncio.Semaphore) -> Outcome:
        assert self._embodiment is not None
        seconds = self.policy.timeouts.get(PHYSICAL, self.policy.timeout)
        async with body:
            result, error, took = await _timed(self._embodiment, action.arguments, seconds)
        seen = tuple(result) if isinstance(result, Sequence) else ()
        if error is None and not (seen and all(isinstance(b, Block) and b.type is BlockType.OBS for b in seen)):
            error = Refusal("failed", "the embodiment must return at least one OBS block, and nothing else")
        return Outcome(name, None, seen=() if error else seen, error=error, seconds=took)

    def _unfit(self, result: Any) -> Refusal | None:
        """What keeps a result from being an observation."""
        try:
            size = len(obs_payload("x", True, result))
        except ProtocolError as error:
            return Refusal("failed", f"the result is no JSON: {error.message}", error.where)
        if size > self.policy.max_result:
            return Refusal(
                "failed", f"the result has {size:,} characters; at most {self.policy.max_result:,} are passed on"
            )
        return None


async def _at_once(outcome: Outcome) -> Outcome:
    return outcome


async def _timed(
    run: Callable[..., Any], arguments: Mapping[str, Any], seconds: float | None
) -> tuple[Any, Refusal | None, float]:
    """What a handler returned, what went wrong, and the seconds it took."""
    start = time.monotonic()
    result, error = None, None
    try:
        async with asyncio.timeout(seconds) as limit:
            result = await (run(**arguments) if inspect.iscoroutinefunction(run) else _in_thread(run, arguments))
            # objects and partial functions may be async without showing it
            if inspect.isawaitable(result):
                result = await result
    except TimeoutError as failure:
        late = limit.expired()
        message = f"took longer than {seconds:g} s" if late else f"{type(failure).__name__}: {failure}"
        error = Refusal("timeout" if late else "failed", message)
    except ToolError as refusal:
        error = Refusal(refusal.type, refusal.message)
    except Exception as failure:
        error = Refusal("failed", f"{type(failure).__name__}: {failure}")
    return result, error, time.monotonic() - start


def _in_thread(run: Callable[..., Any], arguments: Mapping[str, Any]) -> asyncio.Future:
    """A plain function in a thread of its own. A thread cannot be stopped: past its time its result is thrown away,
    and it keeps neither others nor the end of the program waiting."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(result: Any, failure: BaseException | None) -> None:
        if not future.done():
            future.set_exception(failure) if failure else future.set_result(result)

    def work() -> None:
        result, failure = None, None
        try:
            result = run(**arguments)
        except BaseException as error:
            # a handler that asks the program to exit does not decide that
            failure = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop may be gone by now
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, daemon=True, name="smi-action").start()
    return future


def _named(action: Action | None) -> Action | None:
    """An action that JSON names."""
    return None if action is None or action.type == PHYSICAL else action


def _made_up_id(number: int, acts: Sequence[Block]) -> str:
    """`#n`, with as many more marks as it takes: a model may give such ids to its own actions."""
    own = {_usable_id(act, set()) for act in acts}
    id = f"#{number}"
    while id in own:
        id = f"#{id}"
    return id


def _usable_id(act: Block, seen: set[str]) -> str | None:
    """The id of an action that was not understood whole, so that the model can tell which one it was."""
    if not isinstance(act.payload, str):
        return None
    try:
        value = loads(act.payload)
    except ProtocolError:
        return None
    id = value.get("id") if isinstance(value, dict) else None
    return id if isinstance(id, str) and id and id not in seen else None
