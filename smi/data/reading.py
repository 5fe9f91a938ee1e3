"""From the row groups of a prepared mixture to batches, without a Python object per token or document.

Ids stay in Arrow's memory until one compiled loop lays a window of documents out in the order of its packs, with
labels, positions and block types; batches are views of that. Threads read row groups and lay out windows ahead;
what comes out, and in which order, does not depend on them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from smi.data.order import Corpus, Window
from smi.data.pipeline import Document
from smi.data.shards import examples
from smi.data.sources import Block

if TYPE_CHECKING:
    from smi.data.batch import Origin, PackedBatch


# tokens of packs that share memory, 9 MB: enough to make light of what a part costs, few enough for the allocator to
# use the same memory again and again
TOKENS_AT_ONCE = 1 << 19
# such parts that each thread runs ahead
AHEAD = 2


@dataclass(frozen=True, eq=False)
class RowGroup:
    """The documents of a row group, as views of Arrow's memory.

    Document d has the ids `ids[bounds[d]:bounds[d + 1]]` and the runs `run_bounds[d]` to `run_bounds[d + 1]`; a run
    has a number of tokens, a block type, and is supervised or not.
    """

    ids: NDArray[np.int32]
    bounds: NDArray[np.int32]
    run_bounds: NDArray[np.int32]
    run_tokens: NDArray[np.int32]
    run_types: NDArray[np.uint8]
    run_supervised: NDArray[np.bool_]


def read_row_group(block: Block, metadata: pq.FileMetaData | None = None) -> RowGroup:
    """Read and decompress the columns that training needs; `metadata` is the file's."""
    with pq.ParquetFile(block.path, memory_map=True, metadata=metadata) as file:
        table = file.read_row_group(block.start, columns=["input_ids", "blocks"], use_threads=False)
    ids, blocks = (c.chunk(0) if c.num_chunks == 1 else c.combine_chunks() for c in table.columns)
    runs = blocks.values
    return RowGroup(
        ids.values.to_numpy(),
        ids.offsets.to_numpy(),
        blocks.offsets.to_numpy(),
        runs.field("tokens").to_numpy(),
        runs.field("type").to_numpy(),
        runs.field("supervised").to_numpy(zero_copy_only=False),
    )


def read_batches(
    corpus: Corpus, chosen: Iterator[Window], capacity: int, workers: int, piece: int | None = None
) -> Iterator[PackedBatch]:
    """The packs of some windows as batches.

    Args:
        corpus: of the documents.
        chosen: windows of packs; taken a few ahead of the batches.
        capacity: tokens of a pack.
        workers: threads that read ahead; with 0 everything is done when it is asked for.
        piece: as for `smi.data.batch.pack`.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="smi-reader") if workers else None
    submit: Callable[..., Future[Any]] = pool.submit if pool else _at_once

    def read(window: Window | None, groups: dict[int, Future[RowGroup]]) -> dict[int, Future[RowGroup]]:
        # neighbouring windows share row groups; one that no longer occurs is let go
        needed = [] if window is None else np.unique(corpus.groups_of(window.members)).tolist()
        return {n: groups.get(n) or _read(submit, corpus, n) for n in needed}

    at_once = max(1, TOKENS_AT_ONCE // capacity)
    ahead: deque[Future[list[PackedBatch]]] = deque()
    following: dict[int, Future[RowGroup]] | None = None
    try:
        for window, after in pairwise(chain(chosen, [None])):
            assert window is not None
            groups = read(window, {}) if following is None else following
            for first in range(0, window.bounds.size - 1, at_once):
                part = window.select(slice(first, first + at_once))
                ahead.append(submit(_lay_out, corpus, part, groups, capacity, piece))
                if first == 0:
                    # reading holds no lock: it goes on while the rest of this window is laid out
                    following = read(after, groups)
                while len(ahead) > workers * AHEAD:
                    yield from ahead.popleft().result()
        for batches in ahead:
            yield from batches.result()
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)


def _read(submit: Callable[..., Future[RowGroup]], corpus: Corpus, number: int) -> Future[RowGroup]:
    block = corpus.groups[number]
    assert isinstance(block.path, Path)  # shards are files of this machine
    return submit(read_row_group, block, corpus.metadata[block.path])


def read_documents(corpus: Corpus, window: Window) -> Iterator[list[Document]]:
    """The packs of a window as documents, for people to look at."""
    group_of = corpus.groups_of(window.members)
    found: dict[int, Document] = {}
    for number in np.unique(group_of).tolist():
        block = corpus.groups[number]
        with pq.ParquetFile(block.path, memory_map=True) as file:
            rows = file.read_row_group(block.start, columns=["input_ids", "blocks", "fingerprint"]).combine_chunks()
        marks = rows.column("fingerprint").to_pylist()
        all_examples = examples(rows.to_batches()[0])
        for document in window.members[group_of == number].tolist():
            row = document - int(corpus.group_starts[number])
            found[document] = Document(all_examples[row], marks[row], corpus.where(document))
    for start, end in pairwise(window.bounds.tolist()):
        yield [found[document] for document in window.members[start:end].tolist()]


def _at_once(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(function(*arguments))
    return done


def _lay_out(
    corpus: Corpus, window: Window, groups: dict[int, Future[RowGroup]], capacity: int, piece: int | None
) -> list[PackedBatch]:
    from smi.data.batch import cut
    from smi.data.layout_kernel import lay_out

    lengths = corpus.tokens[window.members].astype(np.int64)
    ends = np.cumsum(lengths)
    ids, labels = np.empty(ends[-1], np.int64), np.empty(ends[-1], np.int64)
    types = np.empty(ends[-1], np.uint8)
    supervised = np.empty(lengths.size, np.int64)
    group_of = corpus.groups_of(window.members)
    for number in np.unique(group_of).tolist():
        group = groups[number].result()
        chosen = np.flatnonzero(group_of == number)
        targets = np.empty(chosen.size, np.int64)
        wrong = lay_out(
            group.ids,
            group.bounds,
            group.run_bounds,
            group.run_tokens,
            group.run_types,
            group.run_supervised,
            window.members[chosen] - corpus.group_starts[number],
            ends[chosen] - lengths[chosen],
            lengths[chosen],
            ids,
            labels,
            types,
            targets,
        )
        supervised[chosen] = targets
        if wrong >= 0:
            block = corpus.groups[number]
            raise ValueError(
                f"{block.path}, row {wrong} of row group {block.start}: its columns disagree on its length"
            )
    return cut(
        ids,
        labels,
        types,
        lengths=lengths,
        supervised=supervised,
        bounds=window.bounds,
        capacity=capacity,
        piece=piece,
        origins=_origins(corpus, window, supervised),
    )


def _origins(corpus: Corpus, window: Window, supervised: NDArray[np.int64]) -> list[Origin]:
    """Of each pack of a window; `supervised`: int64 [members]."""
    from smi.data.batch import Origin

    names = tuple(source.name for source in corpus.sources)
    packs = window.bounds.size - 1
    places = np.repeat(np.arange(packs), np.diff(window.bounds)) * len(names) + corpus.sources_of(window.members)
    targets = np.bincount(places, supervised, packs * len(names)).astype(np.int64).reshape(packs, len(names))
    return [
        Origin(names, row, partial(_place, corpus, window.members, start))
        for row, start in zip(targets, window.bounds[:-1].tolist(), strict=True)
    ]


def _place(corpus: Corpus, members: NDArray[np.int64], start: int, document: int) -> str:
    return str(corpus.where(int(members[start + document])))
