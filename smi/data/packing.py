"""Best-fit-decreasing packing on lengths alone, offline and in windows of a stream.

Nothing is cut here and nothing is dropped: a document that is too long for a pack is an error. What to do about
long ones is decided before: the compiler rejects and counts them, and `cut_points` says where one may be cut
without cutting what somebody said.
"""

from __future__ import annotations

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


def pack_windows(documents: Iterable[tuple[T, int]], *, window: int, capacity: int, rng: Random) -> Iterator[list[T]]:
    """Pack a stream: gather `window` documents, shuffle them, pack them, hand the packs out in random order.

    The emptiest packs of a window, up to `CARRIED` of its documents, wait for the next one, so that a window's end
    costs no fill; no document waits twice, and the last window carries nothing. Every document comes out exactly
    once. The order depends on the stream and on `rng` alone.

    Args:
        documents: (document, its tokens), each of 1..capacity tokens.
        window: documents gathered before packing.
        capacity: tokens that fit into one pack.
        rng: source of the shuffles.
    """
    waiting: list[tuple[T, int]] = []
    waited = 0
    for document in documents:
        waiting.append(document)
        if len(waiting) < window:
            continue
        packs, carried = _pack_window(waiting, waited, capacity, rng)
        yield from packs
        waiting, waited = carried, len(carried)
    if waiting:
        # what waited may go on waiting no longer
        packs, _ = _pack_window(waiting, len(waiting), capacity, rng)
        yield from packs


def _pack_window(
    waiting: list[tuple[T, int]], waited: int, capacity: int, rng: Random
) -> tuple[list[list[T]], list[tuple[T, int]]]:
    """The packs to hand out, and the documents to carry; the first `waited` documents are not carried again."""
    # equal lengths go in the order of the window, which must not tell the order of the stream
    order = list(range(len(waiting)))
    rng.shuffle(order)
    packs = pack_lengths(np.array([waiting[index][1] for index in order], dtype=np.int64), capacity)
    kept = _to_carry(packs, np.array(order) < waited, max(int(CARRIED * len(waiting)), 1))
    members = [[order[index] for index in pack] for pack in packs.lists()]
    carried = [waiting[index] for pack in sorted(kept) for index in members[pack]]
    given = [[waiting[index][0] for index in pack] for number, pack in enumerate(members) if number not in kept]
    # packing opens packs from the longest documents to the shortest: without a shuffle the order would tell
    rng.shuffle(given)
    return given, carried


def _to_carry(packs: Packs, waited: NDArray[np.bool_], most: int) -> set[int]:
    """The emptiest packs of documents that have not waited yet, together `most` documents or a single pack; not all."""
    stale = np.logical_or.reduceat(waited[packs.members], packs.bounds[:-1])
    kept: set[int] = set()
    for pack in np.argsort(-packs.rooms, kind="stable").tolist():
        size = int(packs.bounds[pack + 1] - packs.bounds[pack])
        if packs.rooms[pack] == 0 or len(kept) + 1 == len(packs) or (kept and size > most):
            break
        if not stale[pack]:
            kept.add(pack)
            most -= size
    return kept


def cut_points(ends: ArrayLike, capacity: int) -> list[int] | None:
    """Where to cut a document that is longer than a pack: after whole transmissions, into the fewest pieces.

    For training that carries the state from one piece to the next; without it, what comes after a cut would be
    trained without what it answers.

    Args:
        ends: [transmissions] whole numbers, ascending: the tokens up to the end of each transmission, its EOT and
            newline included; the last is the length of the document.
        capacity: tokens that fit into one pack.

    Returns:
        The end of each piece, the last one that of the document; None where a transmission alone is longer than a
        pack, so that the document has to be rejected.
    """
    places = np.asarray(ends, dtype=np.int64)
    if places.ndim != 1 or not places.size or (np.diff(places, prepend=0) < 1).any():
        raise ValueError("ends must be one row of whole numbers that ascend from 1, one a transmission")
    points: list[int] = []
    start = 0
    while start < places[-1]:
        fitting = int(np.searchsorted(places, start + capacity, side="right"))
        end = int(places[fitting - 1]) if fitting else 0
        if end <= start:
            return None
        points.append(end)
        start = end
    return points
