"""The journey of a row: raw row -> Conversation -> Stream -> Example, or a rejection that says why and where.

Rows in = accepted + rejected, by source, at every moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from smi.data.adapters import adapter_for
from smi.data.dedupe import fingerprint
from smi.data.sources import (
    Location,
    Source,
    SourceSpec,
    find_files,
    list_blocks,
    missing_columns,
    read_block,
)
from smi.protocol.codec import Example, PlainTokenizer, encode
from smi.protocol.conversation import Conversation, to_stream
from smi.protocol.stream import ProtocolError

if TYPE_CHECKING:
    from rich.table import Table

SAMPLES = 3
# an endless source that repeats itself this often in a row has nothing new to say in this epoch
DRY_AFTER = 10_000


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
            refuse: asked with the fingerprint, before the costly part; a text is the reason of the rejection.
        """
        try:
            if isinstance(raw, ProtocolError):
                raise raw
            stream = raw if isinstance(raw, Document) else to_stream(raw)
            mark = stream.fingerprint if isinstance(stream, Document) else fingerprint(stream)
            reason = refuse(mark)
            if reason:
                return Rejection(reason, where, _REFUSALS.get(reason, reason))
            document = stream if isinstance(stream, Document) else Document(encode(stream, self.tokenizer), mark, where)
        except ProtocolError as error:
            detail = f"{error.where}: {error.message}" if error.where else error.message
            return Rejection(error.reason, where, detail)
        except ValueError as error:
            # a tokenizer refuses text that it could not give back exactly
            return Rejection("text", where, str(error))
        if document.tokens > self.max_length:
            detail = f"{document.tokens:,} tokens; at most {self.max_length:,} fit"
            return Rejection("too_long", where, detail)
        if not document.targets:
            return Rejection("no_target", where, "no supervised tokens: there is nothing to learn from")
        return document


_REFUSALS = {
    "duplicate": "the same conversation came before in this epoch",
    "held_out": "kept for validation",
    "not_held_out": "kept for training",
}


AnySource = Source | DocumentSource
Raw = tuple[Conversation | Document | ProtocolError, Location]


def raw_rows(source: AnySource, root: str | Path, epoch: int, order: str, *, held_out: bool = False) -> Iterator[Raw]:
    """The rows of one epoch of a source as conversations, in the order that the text `order` seeds.

    Blocks of files come in shuffled order, the rows of a block as they stand. A source that makes its
    conversations decides itself, by the epoch, and holds out its own.

    Raises:
        ValueError: no such files, adapter or columns; each named.
    """
    if isinstance(source, DocumentSource):
        return ((document, document.where) for document in source.documents(f"{order}/{source.name}"))
    if not isinstance(source, SourceSpec):
        conversations = source.conversations(epoch=epoch, held_out=held_out)
        return ((talk, Location(source.name, "", None, i)) for i, talk in enumerate(conversations))
    adapter = adapter_for(source)
    files = find_files(source, root, held_out=held_out)
    for file in files:
        if missing := missing_columns(file, adapter.needs):
            raise ValueError(
                f"source {source.name!r}: {file} has no column {missing[0]}, which the adapter "
                f"{adapter.name!r} needs; it has {', '.join(missing[1])}"
            )
    blocks = [block for file in files for block in list_blocks(file)]
    Random(f"{order}/{source.name}").shuffle(blocks)

    def read() -> Iterator[Raw]:
        for block in blocks:
            for row in read_block(block, source.name, root, adapter.columns):
                try:
                    talk = row.value if isinstance(row.value, ProtocolError) else adapter.convert(row.value)
                except ProtocolError as error:
                    talk = error
                yield talk, row.where

    return read()


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


class _Tap:
    """One source within one epoch: its rows, and how far it is from its share."""

    def __init__(self, source: AnySource, rows: Iterator[Raw]) -> None:
        self.name = source.name
        self.rows = rows
        # what was prepared holds no duplicates, and may be wanted several times an epoch
        self.repeats = isinstance(source, DocumentSource)
        self.weight = weight_of(source) or 1.0
        self.quota = quota_of(source)
        self.poured = 0
        self.refused = 0


def epoch_documents(
    sources: Sequence[AnySource],
    compiler: Compiler,
    account: RowAccount,
    *,
    root: str | Path = ".",
    order: str,
    epoch: int = 0,
    held_out: bool = False,
    limit: int | None = None,
    refuse: Callable[[str, bytes], str | None] = lambda source, fingerprint: None,
) -> Iterator[Document]:
    """The accepted documents of one epoch of a mixture; every row read is counted in `account`.

    At each step comes the source that is furthest behind its weight, by supervised tokens. A source ends for
    the epoch when its rows do, or with the document that reaches its quota; the epoch ends with its last
    source. Exact duplicates within the epoch are rejected.

    Args:
        order: seeds the order of blocks.
        epoch, held_out: for sources that make their conversations.
        limit: rows to read at most, over all sources.
        refuse: (source name, fingerprint) -> reason to reject, or None.
    """
    seen: set[bytes] = set()
    account.epochs += 1
    read = 0
    taps = [_Tap(s, raw_rows(s, root, epoch, order, held_out=held_out)) for s in sources]
    for tap in taps:
        account.sources.setdefault(tap.name, SourceAccount()).quota = tap.quota
    while taps:
        tap = min(taps, key=lambda tap: tap.poured / tap.weight)

        def verdict(mark: bytes, tap: _Tap = tap) -> str | None:
            return "duplicate" if mark in seen and not tap.repeats else refuse(tap.name, mark)

        for talk, where in tap.rows:
            if read == limit:
                return
            read += 1
            outcome = compiler(talk, where, verdict)
            account.add(outcome)
            if isinstance(outcome, Document):
                seen.add(outcome.fingerprint)
                tap.poured += outcome.targets
                tap.refused = 0
                yield outcome
                break
            tap.refused += 1
            if not where.file and tap.refused >= DRY_AFTER:
                tap.rows = iter(())
                break
        else:
            taps.remove(tap)
            account.sources[tap.name].shortfall = max(0, (tap.quota or 0) - tap.poured)
            continue
        if tap.quota is not None and tap.poured >= tap.quota:
            taps.remove(tap)
            account.sources[tap.name].shortfall = 0
