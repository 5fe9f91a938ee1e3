"""The loop: the model's transmission, its actions, their observations, until it answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from smi.protocol.json_text import loads
from smi.protocol.payloads import ctrl_payload, declare
from smi.protocol.stream import Block, Stream
from smi.protocol.tokens import BlockType
from smi.runtime.actions import ActionRunner, Outcome, Policy
from smi.runtime.constrained import Constrainer
from smi.runtime.grammar import Limits
from smi.runtime.sampling import Sampling
from smi.runtime.session import Runtime, Session
from smi.runtime.tools import Tool, toolbox
from smi.runtime.turn import Reason, Reply, TurnEnded, TurnEvent

Ended: TypeAlias = Literal["answer", "max_steps", "max_tokens"]
"""Why a run ended: a transmission without actions, or a budget of the run."""


@dataclass(frozen=True)
class Answer:
    """What a run came to.

    text: the OUT text of the last transmission. ended: why the run ended. reason: why its last transmission did.
    steps: transmissions of the model. tokens: that it wrote in them. outcomes: of all actions, in order.
    """

    text: str
    ended: Ended
    reason: Reason
    steps: int
    tokens: int
    outcomes: tuple[Outcome, ...]


class Agent:
    """A model with tools, and a session that remembers.

    Args:
        runtime: whose model thinks.
        tools: functions, or `Tool`s; they are declared in CAPS and run when called.
        policy: what of it may run.
        embodiment: see `ActionRunner`.
        system, developer: texts of SYS and DEV.
        caps: further capabilities, as for `smi.protocol.declare`; `actions` among them run by the tools' names.
        ctrl: the CTRL object.
        limits, sampling: of each transmission.
        max_steps: transmissions of the model in one run.
        max_tokens: ids that the model may write in one run, over all transmissions; None for no such limit.
        constrainer: holds actions to the declared schemas while they are written.
        on_event: gets every event of generation as it comes.
        on_outcomes: gets the outcomes of each transmission's actions before the model does.

    Close it, or use it in a `with`: its session holds a slot. Raises ValueError and ProtocolError for declarations
    and settings that cannot be.
    """

    def __init__(
        self,
        runtime: Runtime,
        tools: Iterable[Tool | Callable[..., Any]] = (),
        policy: Policy | None = None,
        *,
        embodiment: Callable[[Block], Any] | None = None,
        system: str | None = None,
        developer: str | None = None,
        caps: Mapping[str, Any] | None = None,
        ctrl: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
        sampling: Sampling | None = None,
        max_steps: int = 8,
        max_tokens: int | None = None,
        constrainer: Constrainer | None = None,
        on_event: Callable[[TurnEvent], None] = lambda event: None,
        on_outcomes: Callable[[Sequence[Outcome]], None] = lambda outcomes: None,
    ) -> None:
        box = toolbox(tools)
        extra = dict(caps or {})
        acting = {item if isinstance(item, str) else item.get("name") for item in extra.get("actions", ())}
        declared = declare(
            [item.declaration for name, item in box.items() if name not in acting] or None, extra or None
        )
        self._header: list[Block] = []
        if ctrl is not None:
            self._header.append(Block(BlockType.CTRL, ctrl_payload(dict(ctrl))))
        for kind, text in ((BlockType.SYS, system), (BlockType.DEV, developer), (BlockType.CAPS, declared.payload)):
            if text is not None:
                self._header.append(Block(kind, text))
        self._least = runtime.grammar.frame_tokens + 1
        if max_steps < 1 or (max_tokens is not None and max_tokens < self._least):
            least = f"max_steps must be 1 or more and max_tokens {self._least} or more"
            raise ValueError(f"{least}, not {max_steps} and {max_tokens}")
        self.runner = ActionRunner(box, policy, embodiment)
        # the CAPS object that its own sessions are given
        self.capabilities: dict[str, Any] = {} if declared.payload is None else loads(declared.payload)
        self._constrainer = constrainer
        self._hold(self.capabilities)
        self.limits, self.sampling = limits or Limits(), sampling or Sampling()
        self._max_steps, self._max_tokens = max_steps, max_tokens
        self.on_event, self.on_outcomes = on_event, on_outcomes
        self._runtime, self._instructions = runtime, tuple(self._header)
        self.session: Session = runtime.open()

    def _hold(self, capabilities: Mapping[str, Any]) -> None:
        """Hold decoding to these declarations, where it is held at all."""
        held = self._constrainer
        self._constrain = (lambda kind: None) if held is None else held.actions(capabilities)

    @property
    def declared(self) -> dict[str, Any]:
        """The CAPS object in force: a session that was adopted brings its own."""
        return self.session.capabilities if self.session.tokens else self.capabilities

    @property
    def transcript(self) -> Stream:
        """Everything that was said."""
        return self.session.stream

    def run(self, said: str | Sequence[Block]) -> Answer:
        """`run_async`, for code without an event loop."""
        return asyncio.run(self.run_async(said))

    async def run_async(self, said: str | Sequence[Block]) -> Answer:
        """Say something and let the model act until it answers or a budget of the run is spent.

        said: the text of a USR block, or USR and OBS blocks.
        """
        blocks = [Block(BlockType.USR, said)] if isinstance(said, str) else list(said)
        self.session.send([*self._header, *blocks])
        self._header = []
        outcomes: list[Outcome] = []
        tokens = steps = 0
        reply: Reply | None = None
        ended: Ended = "max_steps"
        while steps < self._max_steps:
            left = None if self._max_tokens is None else self._max_tokens - tokens
            if left is not None and left < self._least:
                ended = "max_tokens"
                break
            reply = await self._written(left)
            steps += 1
            tokens += len(reply.ids)
            acts, cut = _acts(reply)
            if not acts:
                ended = "answer"
                break
            made = await self.runner.run(acts, self.session.capabilities, cut)
            outcomes += made
            self.on_outcomes(made)
            self.session.send([block for outcome in made for block in outcome.observations])
        assert reply is not None
        return Answer(reply.text, ended, reply.reason, steps, tokens, tuple(outcomes))

    async def _written(self, left: int | None) -> Reply:
        """A turn in a thread. If this is cancelled, so is the turn, before anyone else can use the session."""
        halt = threading.Event()
        turn = asyncio.ensure_future(asyncio.to_thread(self._turn, left, halt))
        try:
            return await asyncio.shield(turn)
        except asyncio.CancelledError:
            halt.set()
            await asyncio.gather(turn, return_exceptions=True)
            raise

    def _turn(self, left: int | None, halt: threading.Event) -> Reply:
        limits = self.limits
        if left is not None:
            limits = replace(limits, max_tokens=min(limits.max_tokens, left))
        for event in self.session.generate(limits, self.sampling, constrain=self._constrain):
            if halt.is_set():
                break
            self.on_event(event)
            if isinstance(event, TurnEnded):
                return event.reply
        assert halt.is_set(), "a turn ends with TurnEnded"
        raise asyncio.CancelledError

    def adopt(self, session: Session) -> Session:
        """Go on in another session, such as a fork or a restored one; returns the one so far, still open."""
        before, self.session = self.session, session
        if session.tokens:
            # it has its instructions and declarations already
            self._header = []
            self._hold(session.capabilities)
        return before

    def renew(self) -> None:
        """Forget everything: a fresh session, with the same instructions and tools."""
        self.session.close()
        self.session, self._header = self._runtime.open(), list(self._instructions)
        self._hold(self.capabilities)

    def close(self) -> None:
        """Give the session up."""
        self.session.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _acts(reply: Reply) -> tuple[list[Block], frozenset[int]]:
    """The ACT blocks of a transmission, and which of them were cut, by their number among these."""
    numbered = [(i, block) for i, block in enumerate(reply.transmission.blocks) if block.type is BlockType.ACT]
    return [block for _, block in numbered], frozenset(n for n, (i, _) in enumerate(numbered) if i in reply.cut)
