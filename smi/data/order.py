"""The order of a prepared mixture: which documents go into which pack, known from their lengths alone.

An epoch is planned without a look at a single token: row groups are shuffled, sources are merged so that each has
given the same share of its supervised tokens at every moment, and windows of documents are shuffled and packed. So
any position is found again in a fraction of a second, and nothing of what came before it is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from smi.data.packing import pack_order, permutation
from smi.data.prepared import PreparedSource
from smi.data.sources import Block, Location


class Corpus:
    """The documents of prepared sources, by number: source after source, shard after shard, row after row.

    Attributes:
        sources: where they are from.
        groups: the row groups that hold them.
        metadata: of each shard, so that it is read once.
        group_starts: int64 [groups + 1], the number of each row group's first document.
        source_starts: int64 [sources + 1], likewise.
        tokens: int32 [documents].
        targets: int32 [documents], supervised tokens.
    """

    def __init__(self, sources: Sequence[PreparedSource]) -> None:
        self.sources = list(sources)
        self.groups: list[Block] = []
        self.metadata: dict[Path, pq.FileMetaData] = {}
        rows: list[int] = []
        by_source: list[int] = []
        columns: list[list[NDArray[np.int32]]] = [[], []]
        for source in sources:
            before = sum(rows)
            for shard in source.shards:
                with pq.ParquetFile(shard, memory_map=True) as file:
                    self.metadata[shard] = file.metadata
                    count = file.metadata.num_row_groups
                    self.groups += [Block(shard, group, group + 1) for group in range(count)]
                    rows += [file.metadata.row_group(group).num_rows for group in range(count)]
                    table = file.read(["tokens", "supervised_tokens"])
                for column, name in zip(columns, table.column_names, strict=True):
                    column.append(table.column(name).to_numpy())
            by_source.append(sum(rows) - before)
        self.group_starts = np.cumsum([0, *rows])
        self.source_starts = np.cumsum([0, *by_source])
        self.tokens, self.targets = (np.concatenate(column) for column in columns)

    def __len__(self) -> int:
        return self.tokens.size

    def fingerprints(self) -> Iterator[NDArray[np.uint8]]:
        """The fingerprints of all documents, uint8 [rows, 32], shard by shard."""
        for source in self.sources:
            for shard in source.shards:
                column = pq.read_table(shard, columns=["fingerprint"], memory_map=True).column(0).combine_chunks()
                flat = np.frombuffer(column.buffers()[1], np.uint8, len(column) * 32, column.offset * 32)
                yield flat.reshape(-1, 32)

    def groups_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row group of each document."""
        return np.searchsorted(self.group_starts, documents, side="right") - 1

    def sources_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """The source of each document."""
        return np.searchsorted(self.source_starts, documents, side="right") - 1

    def where(self, document: int) -> Location:
        """The place of a document."""
        number = np.array([document])
        group, source = int(self.groups_of(number)[0]), int(self.sources_of(number)[0])
        block = self.groups[group]
        assert isinstance(block.path, Path)
        return Location(self.sources[source].name, block.path.name, block, document - int(self.group_starts[group]))


@dataclass(frozen=True)
class Shuffle:
    """What the order depends on, beside the data."""

    seed: int
    window: int
    pack_length: int


@dataclass(frozen=True)
class Place:
    """A position in the endless stream of packs that all ranks share: after `packs` packs, counted from the beginning
    of `epoch`.

    An epoch that was begun with other settings has `legs`: those settings, each with the packs it came to. The packs
    of this place are then counted from the end of the last leg, and leave out the documents of the legs.
    """

    epoch: int = 0
    packs: int = 0
    legs: tuple[tuple[Shuffle, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        legs = [vars(shuffle) | {"packs": packs} for shuffle, packs in self.legs]
        return {"epoch": self.epoch, "packs": self.packs, "legs": legs}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Place:
        legs = [({**leg}, leg["packs"]) for leg in values["legs"]]
        for leg, _ in legs:
            del leg["packs"]
        return cls(values["epoch"], values["packs"], tuple((Shuffle(**leg), packs) for leg, packs in legs))

    def under_other_settings(self, before: Shuffle) -> Place:
        """The same documents seen, for a stream that goes on with other settings than those of `before`."""
        return replace(self, packs=0, legs=(*self.legs, (before, self.packs)))


@dataclass(frozen=True, eq=False)
class Window:
    """Some packs in a row.

    epoch: that they are of.
    first: the number of the first one, counted from the beginning of the epoch in which the stream's place is.
    members: int64, documents, pack by pack. bounds: int64 [packs + 1], where each begins and ends among them.
    """

    epoch: int
    first: int
    members: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def select(self, packs: slice | NDArray[np.int64]) -> Window:
        """Some of the packs, by place; `first` stays."""
        starts, ends = self.bounds[:-1][packs], self.bounds[1:][packs]
        bounds = np.concatenate(([0], np.cumsum(ends - starts)))
        places = np.repeat(starts - bounds[:-1], ends - starts) + np.arange(bounds[-1])
        return Window(self.epoch, self.first, self.members[places], bounds)


def epoch_order(
    corpus: Corpus, keep: NDArray[np.bool_], name: str, seen: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """The documents of an epoch, in the order in which they are gathered into windows.

    Args:
        corpus: of the documents.
        keep: bool [documents]; the others are left out.
        name: of the order; seeds it.
        seen: int64 [documents], how often each has come in this epoch before; so many of its turns are left out.
    """
    orders: list[NDArray[np.int64]] = []
    shares: list[NDArray[np.float64]] = []
    for number, source in enumerate(corpus.sources):
        first, last = np.searchsorted(corpus.group_starts, corpus.source_starts[number : number + 2])
        turns = [np.empty(0, np.int64)]
        for turn in range(source.epochs):
            shuffled = first + permutation(Random(f"{name}/{source.name}/{turn}"), last - first)
            turns += [np.arange(*corpus.group_starts[group : group + 2]) for group in shuffled.tolist()]
        order = np.concatenate(turns)
        order = order[keep[order]]
        targets = corpus.targets[order]
        before = np.cumsum(targets) - targets
        orders.append(order)
        shares.append(before / max(targets.sum(), 1))
    merged = np.concatenate(orders)
    if len(orders) > 1:
        merged = merged[np.argsort(np.concatenate(shares), kind="stable")]
    if seen is not None and seen.any():
        merged = merged[_turns(merged) >= seen[merged]]
    return merged


def _turns(order: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each entry has come before, int64 [n]."""
    by_document = np.argsort(order, kind="stable")
    new = np.diff(order[by_document], prepend=-1) != 0
    starts = np.maximum.accumulate(np.where(new, np.arange(order.size), 0))
    turns = np.empty_like(order)
    turns[by_document] = np.arange(order.size) - starts
    return turns


def epoch_packs(
    corpus: Corpus, keep: NDArray[np.bool_], how: Shuffle, epoch: int, seen: NDArray[np.int64] | None = None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The packs of an epoch, window by window: the documents, int64, and the bounds of the packs among them."""
    name = f"{how.seed}/{epoch}"
    order = epoch_order(corpus, keep, name, seen)
    lengths = corpus.tokens[order]
    rng = Random(f"{name}/packs")
    for members, bounds in pack_order(lengths, window=how.window, capacity=how.pack_length, rng=rng):
        yield order[members], bounds


def windows(corpus: Corpus, keep: NDArray[np.bool_], how: Shuffle, place: Place) -> Iterator[Window]:
    """All windows from the beginning of the epoch of `place` on, without end.

    Those before the place come out as well, for the reader to pass over: they cost next to nothing.
    """
    number = 0
    seen = _seen(corpus, keep, place)
    for epoch in itertools.count(place.epoch):
        for members, bounds in epoch_packs(corpus, keep, how, epoch, seen):
            yield Window(epoch, number, members, bounds)
            number += bounds.size - 1
        seen = None


def _seen(corpus: Corpus, keep: NDArray[np.bool_], place: Place) -> NDArray[np.int64] | None:
    """How often each document has come in the legs of a place, int64 [documents]."""
    if not place.legs:
        return None
    seen = np.zeros(len(corpus), np.int64)
    for how, packs in place.legs:
        left = packs
        for members, bounds in epoch_packs(corpus, keep, how, place.epoch, seen.copy()):
            given = min(left, bounds.size - 1)
            np.add.at(seen, members[: bounds[given]], 1)
            left -= given
            if not left:
                break
    return seen
