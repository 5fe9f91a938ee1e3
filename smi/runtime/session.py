"""Sessions: one state each, fed with the blocks of a runtime and continued by a model under the grammar.

    runtime = Runtime(model, tokenizer)
    with runtime.open() as session:
        session.send([Block(BlockType.USR, "How warm is it in Oslo?")])
        for event in session.generate():
            ...

A session goes on from its state and from the ids that were generated, never from text encoded anew. The tree of what
was said stands beside it, for people and for the checks of actions.

Protocol sections: "Stateful Inference", "Session Isolation", "Runtime and Model Transmissions", "Reasoning Control".
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smi.model.modeling import RWKV7ForCausalLM, RWKV7State
from smi.protocol.codec import encode
from smi.protocol.json_text import loads
from smi.protocol.payloads import ctrl_payload
from smi.protocol.stream import Block, ProtocolError, Stream, Transmission
from smi.protocol.tokens import BlockType, Side, TokenNamespace
from smi.runtime import saved
from smi.runtime.decoding import decoder_for
from smi.runtime.grammar import Grammar, Limits
from smi.runtime.pool import StatePool, model_fingerprint
from smi.runtime.sampling import Sampling
from smi.runtime.turn import Constraint, Reply, Turn, TurnEvent
from smi.tokenizer import Tokenizer

# prompt tokens that are read in one go
PREFILL_TOKENS = 8192


class SessionError(RuntimeError):
    """A session was used in a way that its condition does not allow."""


class Session:
    """Made by `Runtime.open`, `Runtime.restore` and `fork`; a context manager that closes itself.

    transmissions: what was said so far, in order.
    """

    def __init__(self, runtime: Runtime, slot: int) -> None:
        self._runtime = runtime
        self._slot: int | None = slot
        self.transmissions: list[Transmission] = []
        # the runtime's transmission that has not been handed over, and all ids with how many the state has read
        self._open: list[Block] = []
        self._ids: list[int] = []
        self._read = 0
        self._scores: Tensor | None = None
        self._turn: Turn | None = None
        self._undo: tuple[RWKV7State, int, int, Tensor | None] | None = None

    # --- what people ask

    @property
    def closed(self) -> bool:
        return self._slot is None

    @property
    def slot(self) -> int:
        """Where its state is kept; SessionError once it is closed."""
        if self._slot is None:
            raise SessionError("the session is closed")
        return self._slot

    @property
    def stream(self) -> Stream:
        """Everything that was handed over, from both sides."""
        return Stream(tuple(self.transmissions))

    @property
    def tokens(self) -> int:
        """Ids in the session so far, those that the state has yet to read included."""
        return len(self._ids)

    @property
    def unread(self) -> int:
        """Ids that the state has yet to read."""
        return len(self._ids) - self._read

    @property
    def controls(self) -> dict[str, Any]:
        """The latest CTRL object; empty where none was sent."""
        for block in reversed(self._runtime_blocks()):
            if block.type is BlockType.CTRL:
                return loads(block.text)
        return {}

    @property
    def capabilities(self) -> dict[str, Any]:
        """The latest CAPS object; empty where none was sent."""
        for block in reversed(self._runtime_blocks()):
            if block.type is BlockType.CAPS:
                return loads(block.text)
        return {}

    def _runtime_blocks(self) -> list[Block]:
        return [block for t in self.transmissions for block in t.blocks if t.side is Side.RUNTIME] + self._open

    # --- what the runtime says

    def send(self, blocks: Sequence[Block]) -> None:
        """Add blocks to the runtime's transmission. `begin` and `generate` hand it over.

        Raises ProtocolError for blocks of the model's side, an order that the protocol does not have, CTRL or CAPS
        that are no JSON objects, and text that the tokenizer could not give back; then nothing was added.
        """
        self._check()
        blocks = list(blocks)
        if not blocks:
            return
        whole = Transmission((*self._open, *blocks))
        if whole.side is not Side.RUNTIME:
            raise ProtocolError("mixed_sides", "", f"{blocks[0].type.token} is the model's to write: generate it")
        for block in blocks:
            if block.type is BlockType.CTRL:
                ctrl_payload(loads(block.text))
            elif block.type is BlockType.CAPS and not isinstance(loads(block.text), dict):
                raise ProtocolError("caps", "", "a CAPS payload is a JSON object")
        # structural ids are the only seams, so blocks encoded apart are the transmission encoded whole
        ids = self._runtime.encode(Stream((Transmission(tuple(blocks)),)))[: -len(self._runtime.handover)]
        self._ids += ids
        self._open += blocks
        self._scores = None

    def replay(self, stream: Stream) -> None:
        """Let the session have said and heard all of `stream`, whoever wrote it. Nothing is generated."""
        self._check()
        if self._open:
            raise SessionError("a transmission of the runtime is open: replay before sending, or generate first")
        self._ids += self._runtime.encode(stream)
        self.transmissions += stream.transmissions
        self._scores = None

    def prefill(self) -> None:
        """Let the state read everything sent so far. Forks made afterwards share the work."""
        self._check()
        self._runtime.read([self])

    # --- what the model says

    def begin(
        self,
        limits: Limits | None = None,
        sampling: Sampling | None = None,
        *,
        stops: Sequence[str] = (),
        constrain: Callable[[BlockType], Constraint | None] = lambda kind: None,
    ) -> Turn:
        """Hand over to the model; `Runtime.step` then writes its transmission, beside those of other sessions.

        limits: CTRL tightens them: reasoning disabled means no THINK, and its max_tokens holds as well.
        Raises SessionError where the model has the floor already or nothing was sent.
        """
        self._check()
        if not self._open and (not self.transmissions or self.transmissions[-1].side is Side.MODEL):
            raise SessionError("there is nothing to answer: send blocks first")
        # made first: it refuses bad settings, and the session is then as it was
        turn = Turn(
            self._runtime.grammar,
            self._tightened(limits or Limits()),
            sampling or Sampling(),
            stops,
            constrain,
            self._runtime.namespaces,
        )
        if self._open:
            self._ids += self._runtime.handover
            self.transmissions.append(Transmission(tuple(self._open)))
            self._open = []
            self._scores = None
        self._turn = turn
        self._undo = None
        return turn

    def generate(
        self,
        limits: Limits | None = None,
        sampling: Sampling | None = None,
        *,
        stops: Sequence[str] = (),
        constrain: Callable[[BlockType], Constraint | None] = lambda kind: None,
    ) -> Iterator[TurnEvent]:
        """The model's transmission as events; the last one is `TurnEnded`. Arguments as for `begin`.

        Leaving the iterator before the model hands over cancels the turn: the session is then as it was when the
        model got the floor, and may generate again. Raises SessionError where somebody else ended the turn.
        """
        turn = self.begin(limits, sampling, stops=stops, constrain=constrain)
        try:
            while turn.reply is None:
                if self._turn is not turn:
                    raise SessionError("the turn was cancelled")
                for _, event in self._runtime.step([self]):
                    yield event
        finally:
            # by now the floor may be another turn's
            if self._turn is turn:
                self.cancel()

    def reply(self, *arguments: Any, **settings: Any) -> Reply:
        """`generate` to its end."""
        *_, last = self.generate(*arguments, **settings)
        return last.reply  # type: ignore[union-attr]

    def cancel(self) -> None:
        """Give up a turn in progress, as if it had not begun. Without one, nothing happens."""
        if self._turn is None or self.closed:
            return
        if self._undo is not None:
            state, ids, read, scores = self._undo
            self._runtime.restore_slot(self, state)
            del self._ids[ids:]
            self._read, self._scores = read, scores
        # last: if this is interrupted, nothing but another cancel is let in
        self._turn = self._undo = None

    def _tightened(self, limits: Limits) -> Limits:
        reasoning = self.controls.get("reasoning", {})
        asked = 0 if reasoning.get("mode") == "disabled" else reasoning.get("max_tokens")
        given = limits.max_think_tokens
        most = given if asked is None else asked if given is None else min(given, asked)
        return replace(limits, max_think_tokens=most)

    # --- its life

    def fork(self, wait: float = 0.0) -> Session:
        """A session of its own that has read and heard the same. Raises PoolFull."""
        self._check()
        copy = self._runtime.open(wait=wait)
        with self._runtime.closing_if_it_fails([copy]):
            self._runtime.restore_slot(copy, self._runtime.state_of(self))
            copy.transmissions, copy._open = list(self.transmissions), list(self._open)
            copy._ids, copy._read, copy._scores = list(self._ids), self._read, self._scores
        return copy

    def save(self, path: str | Path) -> None:
        """Write the session to one file (safetensors): state, ids, fingerprints of model and tokenizer."""
        self._check()
        saved.save(
            Path(path),
            self._runtime.state_of(self),
            scores=self._scores,
            ids=self._ids,
            read=self._read,
            open_blocks=len(self._open),
            model=self._runtime.fingerprint,
            tokenizer=self._runtime.tokenizer.fingerprint,
        )

    def close(self) -> None:
        """Clear the slot and give it up. A second time changes nothing."""
        self._runtime.release(self)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(self) -> None:
        if self.closed:
            raise SessionError("the session is closed")
        if self._turn is not None:
            raise SessionError("the model has the floor: let its turn end, or cancel it")


class Runtime:
    """A model, its tokenizer, and room for `capacity` sessions.

    Args:
        model: in the dtype it is to run in; put into eval mode.
        tokenizer: that of the streams it was trained on.
        capacity: sessions at a time. A full pool refuses or waits; slots are never shared.
        namespaces: of spans in blocks of either side.
        time_state: float32 [L, H, V, K], the WKV state that sessions begin with; zero when absent.

    A session's logits are what they are for it alone, but for the rounding of sums that a batch adds up in another
    order: in float32 within 1e-4 of the largest logit.

    One thread at a time moves sessions; others wait for it. Raises ValueError where tokenizer and model do not fit.
    """

    def __init__(
        self,
        model: RWKV7ForCausalLM,
        tokenizer: Tokenizer,
        capacity: int = 16,
        namespaces: Sequence[TokenNamespace] = (),
        time_state: Tensor | None = None,
    ) -> None:
        rows = model.head.weight.shape[0]
        if tokenizer.vocab_size > rows:
            raise ValueError(
                f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids and the model {rows} rows: "
                "they do not belong together"
            )
        self.model = model.eval()
        self.tokenizer = tokenizer
        self._decoder = decoder_for(model)
        self.namespaces = tuple(namespaces)
        self.grammar = Grammar(tokenizer, rows, namespaces, model.head.weight.device)
        self.time_state = time_state
        self.pool = StatePool(model, capacity, time_state)
        self.handover = [tokenizer.structural.eot, *tokenizer.encode("\n")]
        self._lock = threading.RLock()

    @cached_property
    def fingerprint(self) -> str:
        return model_fingerprint(self.model)

    def encode(self, stream: Stream) -> list[int]:
        """Ids of a stream without EOS."""
        return encode(stream, self.tokenizer, complete=False, namespaces=self.namespaces).input_ids.tolist()

    def open(self, wait: float = 0.0) -> Session:
        """A session with a fresh state. Raises PoolFull when no slot is free within `wait` seconds."""
        session = Session(self, -1)
        session._slot = self.pool.take(session, wait)
        return session

    def restore(self, path: str | Path, wait: float = 0.0) -> Session:
        """A saved session, as it was.

        Raises ValueError for a file that is truncated, foreign (another model or tokenizer) or of a wrong form;
        the slot that was taken for it is then clear and free again.
        """
        session = self.open(wait)
        with self.closing_if_it_fails([session]):
            found = saved.load(
                Path(path),
                self.pool.read([session.slot], [session]),
                rows=self.grammar.rows,
                model=self.fingerprint,
                tokenizer=self.tokenizer.fingerprint,
            )
            try:
                stream, session._open = saved.tree(found, self.tokenizer, self.namespaces, self.handover)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            session.transmissions = list(stream.transmissions)
            session._ids, session._read = list(found.ids), found.read
            if found.scores is not None:
                session._scores = found.scores.to(self.grammar.device)
            elif found.read == len(found.ids) and not session._open and session._ids:
                raise ValueError(f"{path} has neither ids left to read nor scores to go on from")
            self.restore_slot(session, found.state)
        return session

    @contextlib.contextmanager
    def closing_if_it_fails(self, sessions: Sequence[Session]) -> Iterator[None]:
        """Close these sessions on any error or interruption: nothing tells how much of it their states have seen."""
        try:
            yield
        except BaseException:
            for session in sessions:
                self.release(session)
            raise

    def step(self, sessions: Sequence[Session]) -> list[tuple[Session, TurnEvent]]:
        """One more id for each of these turns, in one batch; the events it completes, by session.

        Prompts that have not been read are read first. A session whose turn has ended is one that may be sent to
        again. If the model fails, the sessions of this step are closed: their states are not to be trusted.
        """
        with self._lock:
            for session in sessions:
                if session.closed or session._turn is None:
                    raise SessionError("step needs sessions in which the model has the floor: begin a turn first")
            with self.closing_if_it_fails(sessions):
                return self._step(list(sessions))

    def _step(self, sessions: list[Session]) -> list[tuple[Session, TurnEvent]]:
        self.read(sessions)
        events: list[tuple[Session, TurnEvent]] = []
        going = []
        for session in sessions:
            turn = session._turn
            assert turn is not None
            assert session._scores is not None
            if session._undo is None:
                session._undo = (self.state_of(session), len(session._ids), session._read, session._scores)
            written = len(turn.ids)
            events += ((session, event) for event in turn.choose(session._scores))
            session._ids += turn.ids[written:]
            if turn.reply is None:
                going.append(session)
                continue
            session._ids += self.handover
            session.transmissions.append(turn.reply.transmission)
            session._turn = session._undo = session._scores = None
        if going:
            self._feed(going)
        return events

    @torch.inference_mode()
    def _feed(self, sessions: list[Session]) -> None:
        """Let each session read its one unread id."""
        slots, device = [s.slot for s in sessions], self.grammar.device
        ids = torch.tensor([s._ids[s._read] for s in sessions], device=device)
        state = self.pool.read(slots, sessions)
        logits = self._decoder.step(ids, state)
        self.pool.write(slots, sessions, state)
        for session, scores in zip(sessions, logits, strict=True):
            session._read += 1
            session._scores = scores

    @torch.inference_mode()
    def read(self, sessions: Sequence[Session], at_most: int | None = None) -> None:
        """Let each session read its unread ids, packed into rows of at most PREFILL_TOKENS.

        at_most: ids that are read now, over all sessions; None for all there are. If the model fails or this is
        interrupted, the sessions that were being read are closed.
        """
        left = sum(s.unread for s in sessions) if at_most is None else at_most
        with self._lock:
            while left and (waiting := [s for s in sessions if s.unread]):
                room, group = min(PREFILL_TOKENS, left), []
                for session in waiting:
                    if take := min(session.unread, room):
                        group.append((session, take))
                        room -= take
                with self.closing_if_it_fails([session for session, _ in group]):
                    self._read_group(group)
                left -= sum(take for _, take in group)

    def _read_group(self, group: list[tuple[Session, int]]) -> None:
        device = self.grammar.device
        sessions, slots = [s for s, _ in group], [s.slot for s, _ in group]
        bounds = np.cumsum([0, *(take for _, take in group)]).astype(np.int32)
        row = np.concatenate([np.asarray(s._ids[s._read : s._read + take], np.int64) for s, take in group])
        out = self.model.rwkv7(
            input_ids=torch.from_numpy(row).unsqueeze(0).to(device),
            state=self.pool.read(slots, sessions),
            cu_seqlens=torch.from_numpy(bounds).to(device),
            use_cache=True,
        )
        self.pool.write(slots, sessions, out.state)
        scores = self.model.head(out.last_hidden_state[0, torch.from_numpy(bounds[1:].astype(np.int64) - 1).to(device)])
        for (session, take), logits in zip(group, scores, strict=True):
            session._read += take
            session._scores = logits

    def state_of(self, session: Session) -> RWKV7State:
        """A copy of the session's state (S = 1)."""
        with self._lock:
            return self.pool.read([session.slot], [session])

    def restore_slot(self, session: Session, state: RWKV7State) -> None:
        """Put a state (S = 1) into the session's slot."""
        with self._lock:
            self.pool.write([session.slot], [session], state)

    def release(self, session: Session) -> None:
        """Close a session."""
        with self._lock:
            if session._slot is None:
                return
            self.pool.free(session._slot, session)
            session._slot = session._turn = session._undo = session._scores = None
