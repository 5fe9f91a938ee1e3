"""The rows of an epoch, source by source, and the documents of a mixture that come of them.

Rows of files are turned into conversations here and compiled by whoever reads them, or compiled ahead of their reader
by processes of their own (`Ahead`); what comes out, and in which order, is the same.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from smi.data.adapters import adapter_for
from smi.data.compiling import RowCompiler, Stretch, shuffled_blocks, stretches
from smi.data.pipeline import (
    AnySource,
    Compiler,
    Document,
    DocumentSource,
    Raw,
    RowAccount,
    SourceAccount,
    quota_of,
    weight_of,
)
from smi.data.shards import examples
from smi.data.sources import Location, SourceSpec, file_name, read_block
from smi.data.workers import Workers
from smi.protocol.codec import PlainTokenizer
from smi.protocol.stream import ProtocolError

# an endless source that repeats itself this often in a row has nothing new to say in this epoch
DRY_AFTER = 10_000


class Ahead:
    """Processes that compile the rows of files ahead of their reader.

    Args:
        sources: those that will be read; the others than files make their rows themselves.
        root: what file patterns are relative to.
        tokenizer: of the documents; goes to each process by pickle.
        count: of processes, shared out among the sources; each has one at least. They live until `close`.
    """

    def __init__(self, sources: Sequence[AnySource], root: str | Path, tokenizer: PlainTokenizer, count: int) -> None:
        files = {source.name: source for source in sources if isinstance(source, SourceSpec)}
        self.root = root
        # lengths are judged by the reader, as those of other sources
        self._work = RowCompiler(files, root, tokenizer, sys.maxsize, canonical=False)
        self._each = max(1, count // max(1, len(files)))
        self._pools: list[Workers[Stretch]] = []
        # of sources; one that is in use belongs to its reader, who may let go of it late
        self._idle: dict[str, Workers[Stretch]] = {}

    def rows(self, source: SourceSpec, order: str) -> Iterator[Raw]:
        """As `raw_rows`, with documents in the place of conversations.

        Raises RuntimeError for a row at which two processes died: the order must not depend on such a thing.
        """
        pool = self._idle.pop(source.name, None)
        if pool is None:
            # a row is given all the time it takes, as where it is compiled by its reader
            pool = Workers(self._work, self._each, math.inf)
            self._pools.append(pool)
        try:
            for stretch, chunk in pool.run(((task, 0) for task in stretches(source, self.root, order)), _all):
                if chunk is not None:
                    yield from self._documents(stretch, chunk)
        except BaseException:
            # left in the midst of it: nobody waits for the rest
            pool.close()
            raise
        self._idle[source.name] = pool

    def _documents(self, stretch: Stretch, chunk: pa.RecordBatch) -> Iterator[Raw]:
        file = file_name(stretch.block.path, self.root)
        accepted = chunk.filter(chunk.column("reason").is_null())
        compiled = zip(examples(accepted), accepted.column("fingerprint").to_pylist(), strict=True)
        columns = (chunk.column(name).to_pylist() for name in ("row", "reason", "detail"))
        for row, reason, detail in zip(*columns, strict=True):
            where = Location(stretch.source, file, stretch.block, row)
            if reason == "crash":
                raise RuntimeError(f"{where}: {detail}")
            yield (Document(*next(compiled), where) if reason is None else ProtocolError(reason, "", detail)), where

    def close(self) -> None:
        """End the processes."""
        for pool in self._pools:
            pool.close()


def _all(task: Stretch) -> bool:
    return True


def raw_rows(
    source: AnySource,
    root: str | Path,
    epoch: int,
    order: str,
    *,
    held_out: bool = False,
    ahead: Ahead | None = None,
) -> Iterator[Raw]:
    """The rows of one epoch of a source as conversations, in the order that the text `order` seeds.

    Blocks of files come in shuffled order, the rows of a block as they stand. A source that makes its
    conversations decides itself, by the epoch, and holds out its own. `ahead` hands out those of files compiled.

    Raises:
        ValueError: no such files, adapter or columns; each named.
    """
    if isinstance(source, DocumentSource):
        return ((document, document.where) for document in source.documents(f"{order}/{source.name}"))
    if not isinstance(source, SourceSpec):
        conversations = source.conversations(epoch=epoch, held_out=held_out)
        return ((talk, Location(source.name, "", None, i)) for i, talk in enumerate(conversations))
    if ahead is not None:
        return ahead.rows(source, order)
    adapter = adapter_for(source)
    blocks = shuffled_blocks(source, root, order, held_out=held_out)

    def read() -> Iterator[Raw]:
        for block in blocks:
            for row in read_block(block, source.name, root, adapter.columns):
                try:
                    talk = row.value if isinstance(row.value, ProtocolError) else adapter.convert(row.value)
                except ProtocolError as error:
                    talk = error
                yield talk, row.where

    return read()


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
    ahead: Ahead | None = None,
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
        ahead: compiles the rows of files.
        limit: rows to read at most, over all sources.
        refuse: (source name, fingerprint) -> reason to reject, or None.
    """
    seen: set[bytes] = set()
    account.epochs += 1
    read = 0
    taps = [_Tap(s, raw_rows(s, root, epoch, order, held_out=held_out, ahead=ahead)) for s in sources]
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
