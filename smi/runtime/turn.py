"""One transmission of the model while it is written: choosing ids, the events they complete, and what it came to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from smi.protocol.incremental import BlockClosed, BlockOpened, Event, PayloadText, StreamDecoder, TransmissionEnded
from smi.protocol.stream import Block, Transmission
from smi.protocol.tokens import BlockType, TokenNamespace
from smi.runtime.grammar import Grammar, Limits, Writer
from smi.runtime.sampling import Sampler, Sampling

Reason: TypeAlias = Literal["eot", "max_tokens", "stop"]
"""Why a turn ended: the model handed over, the limit on its tokens, or a text stop."""


@dataclass(frozen=True)
class Reply:
    """A finished turn.

    transmission: what stands in the stream now, cut blocks included.
    ids: its tokens, from the first type token to the one before EOT.
    cut: numbers of the blocks that a limit or a stop ended and not the model. They are never acted on.
    reason: why the turn ended.
    think_tokens: ids within THINK payloads.
    text: all OUT text, joined, up to the text stop.
    """

    transmission: Transmission
    ids: tuple[int, ...]
    cut: frozenset[int]
    reason: Reason
    think_tokens: int
    text: str

    @property
    def actions(self) -> tuple[Block, ...]:
        """The ACT blocks that the model finished, in order."""
        blocks = enumerate(self.transmission.blocks)
        return tuple(block for i, block in blocks if block.type is BlockType.ACT and i not in self.cut)


@dataclass(frozen=True, slots=True)
class BlockCut:
    """The open block was ended by a limit or a stop. It stands where `BlockClosed` would: nothing may act on it."""

    block: Block


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The model's transmission is over and the runtime has the floor."""

    reply: Reply


TurnEvent: TypeAlias = Event | BlockCut | TurnEnded


class Constraint(Protocol):
    """Holds the payload of one block to a form, its two newlines included."""

    def mask(self) -> Tensor:
        """bool [R]: ids that may come next."""
        ...

    def take(self, id: int) -> None:
        """One of them came."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the payload may end here."""
        ...


class Turn:
    """Made by `Session.begin`; `Runtime.step` moves it.

    Args:
        grammar: of the model and tokenizer.
        limits, sampling: of this turn.
        stops: the turn ends where one of these texts appears in OUT; it is not part of `Reply.text`.
        constrain: the form that the payload of a block of this type must have, or None.
        namespaces: of spans.
    """

    def __init__(
        self,
        grammar: Grammar,
        limits: Limits,
        sampling: Sampling,
        stops: Sequence[str] = (),
        constrain: Callable[[BlockType], Constraint | None] = lambda kind: None,
        namespaces: Sequence[TokenNamespace] = (),
    ) -> None:
        if any(not isinstance(stop, str) or not stop for stop in stops):
            raise ValueError(f"stops must be texts of at least one character, not {list(stops)!r}")
        self._structural = grammar.tokenizer.structural
        self._is_structural = torch.zeros(grammar.rows, dtype=torch.bool, device=grammar.device)
        self._is_structural[list(self._structural.ids)] = True
        self._writer = Writer(grammar, limits)
        self._sampler = Sampler(sampling)
        self._decoder = StreamDecoder(grammar.tokenizer, namespaces)
        self._constrain = constrain
        self._constraint: Constraint | None = None
        self._stops = tuple(stops)
        self._said: list[str] = []
        # OUT text that may be the beginning of a stop
        self._held = ""
        self._stopped = False
        self._block: BlockType | None = None
        self._closed = 0
        self.ids: list[int] = []
        self.reply: Reply | None = None

    def choose(self, scores: Tensor) -> list[TurnEvent]:
        """Take the next id from scores [R]; returns the events that it completes. After EOT `reply` is there."""
        allowed = self._writer.allowed()
        if self._constraint is not None and self._writer.kind is not None and not self._writer.ending:
            held = self._constraint.mask()
            ends = self._is_structural if self._constraint.complete else False
            allowed = allowed & (held & ~self._is_structural | ends)
        id = self._sampler.choose(scores, allowed)
        if id != self._structural.eot and not self._writer.fits(id):
            self._writer.refuse(id)
            id = self._sampler.choose(scores, self._writer.affordable())
        return self._take(id)

    def _take(self, id: int) -> list[TurnEvent]:
        if id == self._structural.eot:
            return self._translate(self._decoder.feed(id))
        self._writer.take(id)
        self.ids.append(id)
        opened = self._structural.type_of(id)
        if opened is not None:
            self._constraint = self._constrain(opened)
        else:
            self._sampler.count(id)
            if self._constraint is not None and not self._writer.ending:
                self._constraint.take(id)
        return self._translate(self._decoder.feed(id))

    def _translate(self, events: list[Event]) -> list[TurnEvent]:
        made: list[TurnEvent] = []
        for event in events:
            if isinstance(event, BlockOpened):
                self._block = event.type
                made.append(event)
            elif isinstance(event, PayloadText) and self._block is BlockType.OUT:
                made += self._out(event.text)
            elif isinstance(event, BlockClosed):
                made += self._flush()
                number = self._closed
                self._closed += 1
                made.append(BlockCut(event.block) if number in self._writer.cut else event)
            elif isinstance(event, TransmissionEnded):
                made += [event, TurnEnded(self._finish(event.transmission))]
            else:
                made.append(event)
        return made

    def _out(self, text: str) -> list[TurnEvent]:
        """OUT text that is certain to stand before any stop."""
        if self._stopped:
            return []
        text = self._held + text
        # the one that is whole first, so that it does not matter how tokens cut the text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._stopped = True
            self._writer.end()
            self._held = ""
            return self._say(text[: min(found)[1]])
        longest = max(
            (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )
        self._held = text[len(text) - longest :]
        return self._say(text[: len(text) - longest])

    def _flush(self) -> list[TurnEvent]:
        held, self._held = self._held, ""
        return self._say(held)

    def _say(self, text: str) -> list[TurnEvent]:
        if not text:
            return []
        self._said.append(text)
        return [PayloadText(text)]

    def _finish(self, transmission: Transmission) -> Reply:
        reason: Reason = "stop" if self._stopped else "max_tokens" if self._writer.full else "eot"
        self.reply = Reply(
            transmission=transmission,
            ids=tuple(self.ids),
            cut=frozenset(self._writer.cut),
            reason=reason,
            think_tokens=self._writer.think_tokens,
            text="".join(self._said),
        )
        return self.reply
