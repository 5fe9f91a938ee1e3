"""Best-fit-decreasing packing on lengths alone. Nothing is cut, nothing is dropped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

T = TypeVar("T")


def best_fit_decreasing(lengths: ArrayLike, capacity: int) -> list[list[int]]:
    """Spread documents over as few packs of `capacity` tokens as best-fit-decreasing finds.

    Args:
        lengths: [n] whole numbers, the tokens of each document, each in 1..capacity.
        capacity: tokens that fit into one pack.

    Returns:
        One list of document indices a pack; every index 0..n-1 appears exactly once.

    Raises:
        ValueError: a length outside 1..capacity, naming the document.

    Time is O(n log n) for the sorts, plus work that depends on the number of distinct lengths only:
    documents of one length are placed together, a whole class of equally full packs at a time.
    """
    sizes = np.asarray(lengths)
    if sizes.ndim != 1 or (sizes.size and not np.issubdtype(sizes.dtype, np.integer)):
        raise ValueError(f"lengths must be one row of whole numbers, not {sizes.dtype} of shape {sizes.shape}")
    bad = np.flatnonzero((sizes < 1) | (sizes > capacity))
    if bad.size:
        raise ValueError(
            f"document {bad[0]} has {sizes[bad[0]]} tokens; a pack takes 1 to {capacity} "
            f"({bad.size} of {sizes.size} documents do not fit)"
        )
    if not sizes.size:
        return []
    pack_of = _assign(sizes.astype(np.int64), capacity)
    order = np.argsort(pack_of, kind="stable")
    ends = np.cumsum(np.bincount(pack_of)).tolist()
    members = order.tolist()
    return [members[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _assign(sizes: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The pack of each document, packs numbered from 0 in the order they were opened."""
    # 16-bit keys take numpy's radix sort
    keys = capacity - sizes
    order = np.argsort(keys.astype(np.uint16) if capacity < 1 << 16 else keys, kind="stable")
    counts = np.bincount(sizes, minlength=capacity + 1)
    pack_of = np.empty(sizes.size, dtype=np.int64)

    # packs by the room they have left, and a bit set of the rooms in use: the best fit for a length is
    # the lowest set bit at or above it
    by_room: dict[int, NDArray[np.int64]] = {}
    rooms = 0
    opened = 0
    placed = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            above = rooms >> length
            if above:
                room = length + (above & -above).bit_length() - 1
                packs = by_room.pop(room)
                rooms &= ~(1 << room)
            else:
                room = capacity
                packs = np.arange(opened, opened - (-left // (capacity // length)), dtype=np.int64)
                opened += packs.size
            # the tightest pack stays the tightest until it takes no more of this length, so fill each in turn
            each = room // length
            full = min(packs.size, left // each)
            extra = left - full * each if full < packs.size else 0
            take = full * each + extra
            documents = order[placed : placed + take]
            pack_of[documents[: full * each]] = np.repeat(packs[:full], each)
            shares = [(room - each * length, packs[:full])]
            if extra:
                pack_of[documents[full * each :]] = packs[full]
                shares.append((room - extra * length, packs[full : full + 1]))
                full += 1
            shares.append((room, packs[full:]))
            for remaining, share in shares:
                if share.size and remaining:
                    known = by_room.get(remaining)
                    by_room[remaining] = share if known is None else np.concatenate((known, share))
                    rooms |= 1 << remaining
            placed += take
            left -= take
    return pack_of


def pack_windows(documents: Iterable[tuple[T, int]], *, window: int, capacity: int, rng: Random) -> Iterator[list[T]]:
    """Pack a stream: gather `window` documents, shuffle them, pack them, hand the packs out in random order.

    The emptiest pack of a window is carried into the next one, so that a window's end costs no fill; the
    last window carries nothing. Every document comes out exactly once. The order depends on the stream and
    on `rng` alone.

    Args:
        documents: (document, its tokens), each of 1..capacity tokens.
        window: documents gathered before packing.
        capacity: tokens that fit into one pack.
        rng: source of the shuffles.
    """
    waiting: list[tuple[T, int]] = []
    for document in documents:
        waiting.append(document)
        if len(waiting) >= window:
            packs = _pack_window(waiting, capacity, rng)
            waiting = min(packs, key=_tokens) if len(packs) > 1 else []
            for pack in packs:
                if pack is not waiting:
                    yield [item for item, _ in pack]
    for pack in _pack_window(waiting, capacity, rng):
        yield [item for item, _ in pack]


def _pack_window(waiting: list[tuple[T, int]], capacity: int, rng: Random) -> list[list[tuple[T, int]]]:
    rng.shuffle(waiting)
    packs = best_fit_decreasing(np.array([length for _, length in waiting], dtype=np.int64), capacity)
    # packing opens packs from the longest documents to the shortest: without a shuffle the order would tell
    rng.shuffle(packs)
    return [[waiting[index] for index in pack] for pack in packs]


def _tokens(pack: Sequence[tuple[object, int]]) -> int:
    return sum(length for _, length in pack)
