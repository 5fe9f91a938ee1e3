"""Continuous batching: one thread moves the turns of all requests together and keeps their sessions for what follows.

A request whose conversation extends one that was answered goes on from that session's state; only what is new is
read. What finds a kept session is the whole conversation, as its owner saw it, and nothing that a client could make
up; so nobody reaches a state whose full history they do not have.

Protocol sections: "Stateful Inference", "Session Isolation".
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from smi.protocol.stream import ProtocolError, Stream, Transmission
from smi.protocol.tokens import BlockType, Side
from smi.runtime.grammar import Limits
from smi.runtime.sampling import Sampling
from smi.runtime.session import Runtime, Session
from smi.runtime.turn import Constraint, TurnEnded, TurnEvent

log = logging.getLogger("smi")

# prompt tokens that are read between two steps of the turns in progress
READ_AT_A_TIME = 1024


@dataclass(frozen=True)
class Started:
    """The model has the floor. prompt: tokens of the conversation; cached: of these, read for an earlier answer."""

    prompt: int
    cached: int


@dataclass(frozen=True)
class Failed:
    """There will be no answer. `error` is ProtocolError or ValueError where the request is to blame, TimeoutError
    where its time is over, EngineClosed, and anything else where the model failed."""

    error: BaseException


News: TypeAlias = Started | TurnEvent | Failed
"""What becomes of a job, in order; the last is TurnEnded or Failed."""


class EngineClosed(RuntimeError):
    """The engine stopped before the job was done."""


@dataclass(eq=False)
class Job:
    """One turn to be generated.

    prompt: the conversation; its last transmission is the runtime's. owner: who asks; sessions are kept by owner.
    seconds: until it times out, waiting included.
    tell: called with news, on the engine's thread; it must not block.
    answered: the conversation with the answer, as the client will send it again; None keeps no session. Called on
        the engine's thread when the turn has ended, after `tell`.
    """

    prompt: Stream
    owner: str
    limits: Limits
    sampling: Sampling
    stops: tuple[str, ...]
    constrain: Callable[[BlockType], Constraint | None]
    seconds: float
    tell: Callable[[list[News]], None]
    answered: Callable[[], Stream | None] = lambda: None
    session: Session | None = None
    deadline: float = 0.0


class Engine:
    """The thread that owns a runtime. A context manager; leaving it ends what is in progress.

    keep: sessions that are kept after their turn, at most; they give way to turns that need their slots.
    """

    def __init__(self, runtime: Runtime, keep: int | None = None) -> None:
        self._runtime = runtime
        self._keep = runtime.pool.capacity if keep is None else keep
        self._kept = _Kept()
        self._wake = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._cancelled: set[Job] = set()
        self._active: list[Job] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="smi-engine", daemon=True)

    # --- from any thread

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    @property
    def waiting(self) -> int:
        """Jobs without a slot."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Turns in progress."""
        return len(self._active)

    @property
    def kept(self) -> int:
        """Sessions that wait for their conversation to go on."""
        return len(self._kept)

    def submit(self, job: Job) -> None:
        """Have a job done. Raises EngineClosed."""
        job.deadline = time.monotonic() + job.seconds
        with self._wake:
            if not self.alive:
                raise EngineClosed("the server is shutting down")
            self._waiting.append(job)
            self._wake.notify()

    def cancel(self, job: Job) -> None:
        """Give a job up; its slot is free soon. Nothing happens where it has ended."""
        with self._wake:
            if job in self._waiting:
                self._waiting.remove(job)
            elif job in self._active:
                self._cancelled.add(job)
                self._wake.notify()

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    # --- on the engine's own

    def _run(self) -> None:
        try:
            while not self._closing:
                with self._wake:
                    while not (self._waiting or self._active or self._closing):
                        self._wake.wait()
                    self._expire()
                    for job in self._admitted():
                        self._active.append(job)
                for job in [job for job in self._active if job.session is None]:
                    self._begin(job)
                self._move()
        finally:
            with self._wake:
                self._closing = True
                left = [*self._active, *self._waiting]
                self._waiting.clear()
            for job in left:
                self._drop(job, EngineClosed("the server is shutting down"))
            self._kept.clear()

    def _expire(self) -> None:
        """End jobs that were cancelled or whose time is over."""
        now = time.monotonic()
        late = [job for job in [*self._active, *self._waiting] if job.deadline < now and job not in self._cancelled]
        for job in self._cancelled & {*self._active}:
            self._end(job)
        self._cancelled.clear()
        for job in late:
            if job in self._waiting:
                self._waiting.remove(job)
            self._drop(job, TimeoutError(f"no answer within {job.seconds:g} s"))

    def _admitted(self) -> Iterator[Job]:
        """Jobs for which there is a slot, or one that a kept session can be asked for."""
        room = self._runtime.pool.capacity - len(self._active)
        while self._waiting and room > 0:
            room -= 1
            yield self._waiting.popleft()

    def _begin(self, job: Job) -> None:
        try:
            said = job.prompt.transmissions
            session, known = self._kept.take(job.owner, said)
            if session is None:
                while not self._runtime.pool.free_slots:
                    self._kept.evict()
                session = self._runtime.open()
            job.session = session
            cached = session.tokens - session.unread
            *before, last = said[known:]
            if before:
                session.replay(Stream(tuple(before)))
            session.send(last.blocks)
            session.begin(job.limits, job.sampling, stops=job.stops, constrain=job.constrain)
        except Exception as error:
            self._drop(job, error)
            return
        job.tell([Started(session.tokens, cached)])

    def _move(self) -> None:
        """Read some of the prompts, then one more id for every turn whose prompt is read."""
        jobs = {job.session: job for job in self._active if job.session is not None}
        try:
            self._runtime.read(list(jobs), at_most=READ_AT_A_TIME)
            ready = [session for session in jobs if not session.unread]
            news: dict[Job, list[News]] = {}
            for session, event in self._runtime.step(ready) if ready else ():
                news.setdefault(jobs[session], []).append(event)
        except Exception as error:
            # nothing tells whose state is sound
            log.exception("the model failed; %d turns end", len(jobs))
            for job in jobs.values():
                self._drop(job, error)
            return
        for job, events in news.items():
            try:
                job.tell(events)
                if isinstance(events[-1], TurnEnded):
                    self._finish(job)
            except Exception as error:
                # one listener that fails ends its own turn and no other
                log.exception("what a turn came to could not be told; it ends")
                self._drop(job, error)

    def _finish(self, job: Job) -> None:
        session, said = job.session, job.answered()
        assert session is not None
        if said is None or not self._keep:
            self._end(job)
            return
        self._active.remove(job)
        self._kept.put(job.owner, said, session)
        while len(self._kept) > self._keep:
            self._kept.evict()

    def _drop(self, job: Job, error: BaseException) -> None:
        self._end(job)
        job.tell([Failed(error)])

    def _end(self, job: Job) -> None:
        """Take a job out; its slot is clear and free."""
        if job in self._active:
            self._active.remove(job)
        if job.session is not None:
            job.session.close()


class _Kept:
    """Sessions by owner and conversation, the one that was used last at the end."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[bytes, tuple[Session, tuple[Transmission, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def put(self, owner: str, said: Stream, session: Session) -> None:
        """Keep a session whose conversation is `said`; one of the same conversation gives way."""
        *_, key = _keys(owner, said.transmissions)
        if known := self._sessions.pop(key, None):
            known[0].close()
        self._sessions[key] = session, said.transmissions

    def take(self, owner: str, said: tuple[Transmission, ...]) -> tuple[Session | None, int]:
        """The session that knows most of a conversation, and how many of its transmissions that is."""
        keys = list(_keys(owner, said))
        for known in range(len(said) - 1, 0, -1):
            found = self._sessions.get(keys[known - 1])
            if found is not None and all(map(_agree, said[:known], found[1])):
                del self._sessions[keys[known - 1]]
                return found[0], known
        return None, 0

    def evict(self) -> None:
        """Close the session that was not used for longest."""
        _, (session, _) = self._sessions.popitem(last=False)
        session.close()

    def clear(self) -> None:
        while self._sessions:
            self.evict()


def _keys(owner: str, said: tuple[Transmission, ...]) -> Iterator[bytes]:
    """A key for each beginning of a conversation: sha256 over its owner and all that was said but thoughts."""
    digest = hashlib.sha256(repr(owner).encode())
    for transmission in said:
        # the representation of a payload tells texts and spans apart, and where each ends
        digest.update(repr([(int(b.type), b.payload) for b in _spoken(transmission)]).encode())
        yield digest.digest()


def _spoken(transmission: Transmission) -> list:
    """The blocks without thoughts, which clients may leave out when they send the history."""
    return [block for block in transmission.blocks if block.type is not BlockType.THINK]


def _agree(sent: Transmission, known: Transmission) -> bool:
    """Whether a client tells what was said: word for word, or without thoughts of which it then repeats none."""
    return sent == known or (sent.side is Side.MODEL and list(sent.blocks) == _spoken(known))


__all__ = ["Engine", "EngineClosed", "Failed", "Job", "News", "ProtocolError", "Started"]
