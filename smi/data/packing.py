"""Best-fit-decreasing packing on lengths alone, offline and in windows of a stream.

Nothing is cut here and nothing is dropped. Whether a document may be longer than a pack is decided before: the
compiler rejects and counts such documents, or lets them through. Then each is a pack of its own, which is trained in
pieces that end at its `cut_points`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

T = TypeVar("T")

# of a window's documents, at most this share waits for the next window
CARRIED = 1 / 16


@dataclass(frozen=True, eq=False)
class Packs:
    """Documents by pack. Pack p holds `members[bounds[p]:bounds[p + 1]]`, the longest first.

    members: int64 [n], indices of documents, each exactly once. bounds: int64 [packs + 1].
    rooms: int64 [packs], the tokens that each pack has left.
    """

    members: NDArray[np.int64]
    bounds: NDArray[np.int64]
    rooms: NDArray[np.int64]

    def __len__(self) -> int:
        return self.rooms.size

    def lists(self) -> list[list[int]]:
        """The indices of each pack, as lists."""
        members = self.members.tolist()
        return [members[start:end] for start, end in pairwise(self.bounds.tolist())]


def pack_lengths(lengths: ArrayLike, capacity: int) -> Packs:
    """Spread documents over as few packs of `capacity` tokens as best-fit-decreasing finds.

    Every document, the longest first, goes into the pack that it leaves the least room in; a new pack is opened
    where it fits into none. Of documents of one length the first given goes first, of packs with equal room the one
    filled last takes the next. Time is O(n) and memory O(n + capacity), without an object per document.

    Args:
        lengths: [n] whole numbers, the tokens of each document, each in 1..capacity.
        capacity: tokens that fit into one pack.

    Raises:
        ValueError: a length outside 1..capacity, naming the document.
    """
    # imported here: numba takes longer to load than everything else in this package
    from smi.data.packing_kernel import best_fit_decreasing as kernel

    sizes = np.asarray(lengths)
    if sizes.ndim != 1 or (sizes.size and not np.issubdtype(sizes.dtype, np.integer)):
        raise ValueError(f"lengths must be one row of whole numbers, not {sizes.dtype} of shape {sizes.shape}")
    if sizes.size and not (sizes.min() >= 1 and sizes.max() <= capacity):
        bad = np.flatnonzero((sizes < 1) | (sizes > capacity))
        raise ValueError(
            f"document {bad[0]} has {sizes[bad[0]]} tokens; a pack takes 1 to {capacity} "
            f"({bad.size} of {sizes.size} documents do not fit)"
        )
    return Packs(*kernel(np.ascontiguousarray(sizes, dtype=np.int64), capacity))


def best_fit_decreasing(lengths: ArrayLike, capacity: int) -> list[list[int]]:
    """`pack_lengths` with one list of document indices a pack."""
    return pack_lengths(lengths, capacity).lists()


def permutation(rng: Random, count: int) -> NDArray[np.int64]:
    """A random order of `count` things, int64 [count]; from bits that are the same in every version of Python."""
    return np.argsort(np.frombuffer(rng.randbytes(8 * count), "<u8"), kind="stable")


def pack_windows(documents: Iterable[tuple[T, int]], *, window: int, capacity: int, rng: Random) -> Iterator[list[T]]:
    """Pack a stream: gather `window` documents, shuffle them, pack them, hand the packs out in random order.

    The emptiest packs of a window, up to `CARRIED` of its documents, wait for the next one, so that a window's end
    costs no fill; no document waits twice, and the last window carries nothing. Every document comes out exactly
    once. The order depends on the stream and on `rng` alone.

    Args:
        documents: (document, its tokens). One of more than `capacity` tokens gets a pack of its own.
        window: documents gathered before packing.
        capacity: tokens that fit into one pack.
        rng: source of the shuffles.
    """
    stream = iter(documents)
    carried: list[tuple[T, int]] = []
    while True:
        waiting = [*carried, *itertools.islice(stream, window - len(carried))]
        if not waiting:
            return
        lengths = np.array([tokens for _, tokens in waiting], dtype=np.int64)
        last = len(waiting) < window
        members, bounds, kept = _pack_window(lengths, len(waiting) if last else len(carried), capacity, rng)
        for start, end in pairwise(bounds.tolist()):
            yield [waiting[index][0] for index in members[start:end].tolist()]
        if last:
            return
        carried = [waiting[index] for index in kept.tolist()]


def pack_order(
    lengths: NDArray[np.integer], *, window: int, capacity: int, rng: Random
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """`pack_windows` on lengths alone, window by window.

    Args:
        lengths: int [n], the tokens of the documents, in the order of the stream.

    Yields:
        The documents of a window's packs, as places in the stream, int64 [members], and where each pack begins and
        ends among them, int64 [packs + 1].
    """
    carried = np.empty(0, dtype=np.int64)
    taken, last = 0, False
    while not last:
        fresh = np.arange(taken, min(taken + window - carried.size, lengths.size))
        taken += fresh.size
        waiting = np.concatenate((carried, fresh))
        if not waiting.size:
            return
        last = waiting.size < window
        waited = waiting.size if last else carried.size
        members, bounds, kept = _pack_window(lengths[waiting], waited, capacity, rng)
        yield waiting[members], bounds
        carried = waiting[kept]


def _pack_window(
    lengths: NDArray[np.integer], waited: int, capacity: int, rng: Random
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The documents of the packs to hand out, the bounds of these packs, and the documents to carry.

    The first `waited` documents are not carried again.
    """
    # equal lengths go in the order of the window, which must not tell the order of the stream
    order = permutation(rng, lengths.size)
    # a document that is longer than a pack fills one: nothing goes beside it
    packs = pack_lengths(np.minimum(lengths[order], capacity), capacity)
    kept = np.zeros(len(packs), dtype=bool)
    kept[_to_carry(packs, order < waited, max(int(CARRIED * lengths.size), 1))] = True
    sizes = np.diff(packs.bounds)
    # packing opens packs from the longest documents to the shortest: without a shuffle the order would tell
    given = permutation(rng, len(packs))
    given = given[~kept[given]]
    bounds = np.concatenate(([0], np.cumsum(sizes[given])))
    places = np.repeat(packs.bounds[given] - bounds[:-1], sizes[given]) + np.arange(bounds[-1])
    return order[packs.members[places]], bounds, order[packs.members[np.repeat(kept, sizes)]]


def _to_carry(packs: Packs, waited: NDArray[np.bool_], most: int) -> list[int]:
    """The emptiest packs of documents that have not waited yet, together `most` documents or a single pack; not all."""
    if waited.all():
        return []
    stale = np.logical_or.reduceat(waited[packs.members], packs.bounds[:-1])
    kept: list[int] = []
    for pack in np.argsort(-packs.rooms, kind="stable").tolist():
        size = int(packs.bounds[pack + 1] - packs.bounds[pack])
        if packs.rooms[pack] == 0 or len(kept) + 1 == len(packs) or (kept and size > most):
            break
        if not stale[pack]:
            kept.append(pack)
            most -= size
    return kept


def cut_points(ends: ArrayLike, most: int) -> list[int]:
    """Where to cut a document into the fewest pieces: after whole transmissions, and inside one that is longer still.

    For training that carries the state from one piece to the next: nothing is lost at a cut but the gradient that
    would flow back through it. Without the state, what comes after a cut would be trained without what it answers.

    Args:
        ends: [transmissions] whole numbers, ascending: the tokens up to the end of each transmission, its EOT and
            newline included; the last is the length of the document.
        most: tokens of a piece.

    Returns:
        The end of each piece, the last one that of the document.
    """
    places = np.asarray(ends, dtype=np.int64)
    if places.ndim != 1 or not places.size or (np.diff(places, prepend=0) < 1).any():
        raise ValueError("ends must be one row of whole numbers that ascend from 1, one a transmission")
    points: list[int] = []
    start = 0
    while start < places[-1]:
        fitting = int(np.searchsorted(places, start + most, side="right"))
        end = int(places[fitting - 1]) if fitting else 0
        start = end if end > start else start + most
        points.append(start)
    return points
