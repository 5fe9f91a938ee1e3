"""The journey of a row: raw row -> Conversation -> Stream -> Example, or a rejection that says why and where.

Rows in = accepted + rejected, by source, at every moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from smi.data.dedupe import fingerprint
from smi.data.sources import Location, Source, SourceSpec
from smi.protocol.codec import Example, PlainTokenizer, encode
from smi.protocol.conversation import Conversation, to_stream
from smi.protocol.stream import ProtocolError

if TYPE_CHECKING:
    from rich.table import Table

SAMPLES = 3


@dataclass(frozen=True, eq=False, slots=True)
class Document:
    """An accepted row. `fingerprint` is the sha256 of its canonical conversation, see `fingerprint`."""

    example: Example
    fingerprint: bytes
    where: Location

    @property
    def tokens(self) -> int:
        return self.example.input_ids.size

    @property
    def targets(self) -> int:
        """Supervised tokens that a model can be asked to predict: nothing comes before the first one."""
        return int(np.count_nonzero(self.example.loss_mask[1:]))


@runtime_checkable
class DocumentSource(Protocol):
    """A source that is compiled already: `weight` supervised tokens an epoch.

    `identity` changes with the content; plain values.
    """

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float: ...

    @property
    def identity(self) -> list[Any]: ...

    def documents(self, order: str) -> Iterator[Document]:
        """The documents of one epoch, their blocks in the order that the text `order` seeds."""
        ...


@dataclass(frozen=True, slots=True)
class Rejection:
    """A row that was left out: a short code to count by, the place, and the message for people."""

    reason: str
    where: Location
    detail: str

    def __str__(self) -> str:
        return f"{self.where}: {self.detail} [{self.reason}]"


@dataclass
class SourceAccount:
    """What became of one source's rows. `quota` and `shortfall` count supervised tokens of one epoch."""

    rows: int = 0
    accepted: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    in_pieces: int = 0
    """Of the accepted ones, those longer than a row: each is trained whole, in pieces."""
    rejected: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[Rejection]] = field(default_factory=dict)
    quota: int | None = None
    shortfall: int = 0
    """What was missing to the quota when the latest finished epoch had no more rows."""


@dataclass
class RowAccount:
    """What became of all rows, source by source, over the epochs begun so far."""

    sources: dict[str, SourceAccount] = field(default_factory=dict)
    epochs: int = 0

    def add(self, outcome: Document | Rejection) -> None:
        """Count one row."""
        account = self.sources.setdefault(outcome.where.source, SourceAccount())
        account.rows += 1
        if isinstance(outcome, Document):
            account.accepted += 1
            account.tokens += outcome.tokens
            account.supervised_tokens += outcome.targets
            return
        account.rejected[outcome.reason] += 1
        samples = account.samples.setdefault(outcome.reason, [])
        if len(samples) < SAMPLES:
            samples.append(outcome)

    @property
    def rows(self) -> int:
        return sum(account.rows for account in self.sources.values())

    @property
    def accepted(self) -> int:
        return sum(account.accepted for account in self.sources.values())

    @property
    def tokens(self) -> int:
        return sum(account.tokens for account in self.sources.values())

    @property
    def supervised_tokens(self) -> int:
        return sum(account.supervised_tokens for account in self.sources.values())

    @property
    def rejected(self) -> Counter[str]:
        """Rejections by reason, over all sources."""
        return sum((account.rejected.copy() for account in list(self.sources.values())), Counter())

    @property
    def shortfalls(self) -> dict[str, int]:
        """Supervised tokens that sources were short of their quota in the latest finished epoch."""
        return {name: account.shortfall for name, account in self.sources.items() if account.shortfall}

    def table(self, title: str = "Rows") -> Table:
        """A table for people, one line a source."""
        from rich.table import Table

        sources = list(self.sources.items())
        quotas = any(account.quota for _, account in sources)
        pieces = any(account.in_pieces for _, account in sources)
        table = Table(title=f"{title}, {self.epochs} epochs begun" if self.epochs > 1 else title)
        table.add_column("source")
        columns = ["rows in", "accepted", "rejected", "tokens", "supervised"]
        columns += ["in pieces"] * pieces + ["quota", "short by"] * quotas
        for column in columns:
            table.add_column(column, justify="right")
        table.add_column("rejected for", overflow="fold")
        for name, account in sources:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in account.rejected.copy().most_common())
            goal = [f"{account.quota or 0:,}", f"{account.shortfall:,}"] if quotas else []
            long = [f"{account.in_pieces:,}"] * pieces
            table.add_row(name, *_figures(account), *long, *goal, reasons)
        if len(sources) != 1:
            table.add_section()
            table.add_row("all", *_figures(self))
        return table

    def __str__(self) -> str:
        """The table as text, with samples of what was rejected."""
        from rich.console import Console

        console = Console(width=110, color_system=None)
        with console.capture() as capture:
            console.print(self.table())
        samples = [
            f"  {sample}"
            for account in list(self.sources.values())
            for kept in list(account.samples.values())
            for sample in kept
        ]
        return capture.get() + "\n".join(samples)


def _figures(account: RowAccount | SourceAccount) -> list[str]:
    rejected = sum(account.rejected.values())
    figures = (account.rows, account.accepted, rejected, account.tokens, account.supervised_tokens)
    return [f"{figure:,}" for figure in figures]


def share_of(fingerprint: bytes) -> float:
    """A place in [0, 1) that depends on content alone: rows below a fraction are held out."""
    return int.from_bytes(fingerprint[:8], "big") / 2**64


@dataclass(frozen=True, slots=True)
class Compiler:
    """Turns conversations into documents.

    Args:
        tokenizer: see `PlainTokenizer`.
        max_length: tokens a document may have; a longer one is rejected, never cut.
    """

    tokenizer: PlainTokenizer
    max_length: int

    def __call__(
        self,
        raw: Conversation | Document | ProtocolError,
        where: Location,
        refuse: Callable[[bytes], str | None] = lambda fingerprint: None,
    ) -> Document | Rejection:
        """Compile one conversation, or say why not.

        Args:
            raw: the conversation, or why its row could not be turned into one, or what it was compiled to before.
            where: the place of the row.
            refuse: asked with the fingerprint; a text is the reason of the rejection.
        """
        try:
            if isinstance(raw, ProtocolError):
                raise raw
            document = raw if isinstance(raw, Document) else self._compile(raw, where)
        except ProtocolError as error:
            detail = f"{error.where}: {error.message}" if error.where else error.message
            return Rejection(error.reason, where, detail)
        except ValueError as error:
            # a tokenizer refuses text that it could not give back exactly
            return Rejection("text", where, str(error))
        if reason := refuse(document.fingerprint):
            return Rejection(reason, where, _REFUSALS.get(reason, reason))
        if document.tokens > self.max_length:
            detail = f"{document.tokens:,} tokens; at most {self.max_length:,} fit"
            return Rejection("too_long", where, detail)
        if not document.targets:
            return Rejection("no_target", where, "no supervised tokens: there is nothing to learn from")
        return document

    def _compile(self, talk: Conversation, where: Location) -> Document:
        stream = to_stream(talk)
        return Document(encode(stream, self.tokenizer), fingerprint(stream), where)


_REFUSALS = {
    "duplicate": "the same conversation came before in this epoch",
    "held_out": "kept for validation",
    "not_held_out": "kept for training",
}


AnySource = Source | DocumentSource
Raw = tuple[Conversation | Document | ProtocolError, Location]


def check_sources(sources: Sequence[AnySource]) -> None:
    """Refuse sources that cannot be mixed. Raises ValueError."""
    if not sources:
        raise ValueError("there are no sources; name at least one")
    names = Counter(source.name for source in sources)
    if len(names) < len(sources):
        raise ValueError(f"two sources are named {names.most_common(1)[0][0]!r}; accounts need names that differ")
    for source in sources:
        endless = not isinstance(source, SourceSpec | DocumentSource)
        if endless and quota_of(source) is None and len(sources) > 1:
            raise ValueError(
                f"source {source.name!r} may be endless: beside other sources it needs a quota of supervised "
                "tokens, or an epoch would never end"
            )
        for value in (quota_of(source), getattr(source, "weight", None)):
            if value is not None and not value > 0:
                raise ValueError(f"source {source.name!r}: weights and quotas must be above 0, not {value}")
    weighted = [source.name for source in sources if weight_of(source) is not None]
    if weighted and len(weighted) < len(sources):
        raise ValueError(f"only {', '.join(weighted)} have a weight or quota; give one to every source or to none")


def quota_of(source: AnySource) -> int | None:
    return getattr(source, "quota", None)


def weight_of(source: AnySource) -> float | None:
    weight = getattr(source, "weight", None)
    return quota_of(source) if weight is None else weight
