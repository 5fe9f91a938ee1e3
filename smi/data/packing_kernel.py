"""Best-fit-decreasing in compiled code: one pass over the documents, a few steps each.

Packs wait in stacks, one for each room that a pack may have left. Which stacks hold something stands in a tree of
64-bit words: a bit of a word says that a room, or a word of the level below, is in use. So the tightest room for a
document is found in as many steps as there are levels: two for 2,048 tokens, four for a million.
"""

from __future__ import annotations

import numba
import numpy as np


@numba.njit("int64(uint64)", cache=True)
def _lowest_bit(word):
    """The index of the lowest set bit of a word that is not 0."""
    index = 0
    for width in (32, 16, 8, 4, 2, 1):
        if word & ((np.uint64(1) << np.uint64(width)) - np.uint64(1)) == 0:
            word >>= np.uint64(width)
            index += width
    return index


@numba.njit("Tuple((int64[::1], int64[::1], int64[::1]))(int64[::1], int64)", nogil=True, cache=True)
def best_fit_decreasing(sizes, capacity):
    """Packs `sizes`, int64 [n], each in 1..capacity.

    Returns the documents pack by pack, int64 [n], where each pack begins and ends among them, int64 [packs + 1],
    and the room that each has left, int64 [packs]. Packs are numbered as they are opened. Documents go longest
    first, those of one length as they were given; of packs with equal room the one filled last takes the next.
    """
    n = sizes.size
    ends = np.zeros(capacity + 2, dtype=np.int64)
    for size in sizes:
        ends[capacity - size + 1] += 1
    for key in range(capacity + 1):
        ends[key + 1] += ends[key]
    order = np.empty(n, dtype=np.int64)
    for document in range(n):
        key = capacity - sizes[document]
        order[ends[key]] = document
        # from where the key's documents begin to where they end
        ends[key] += 1

    levels = 1
    words = (capacity >> 6) + 1
    total = words
    while words > 1:
        words = ((words - 1) >> 6) + 1
        total += words
        levels += 1
    first = np.empty(levels + 1, dtype=np.int64)
    first[0], words = 0, capacity + 1
    for level in range(levels):
        words = ((words - 1) >> 6) + 1
        first[level + 1] = first[level] + words
    tree = np.zeros(total, dtype=np.uint64)

    # the stacks: the pack on top by room, and what lies under each pack
    top = np.full(capacity + 1, -1, dtype=np.int32)
    under = np.empty(n, dtype=np.int32)
    rooms = np.empty(n, dtype=np.int64)
    pack_of = np.empty(n, dtype=np.int32)
    packs = 0
    at = 0
    for size in range(capacity, 0, -1):
        while at < ends[capacity - size]:
            # the lowest room in use from `size` on: up to the first word that has one, then down to its lowest
            room = -1
            place = size
            for level in range(levels):
                index = place >> 6
                if first[level] + index >= first[level + 1]:
                    break
                word = tree[first[level] + index] >> np.uint64(place & 63)
                if word != 0:
                    room = place + _lowest_bit(word)
                    for lower in range(level - 1, -1, -1):
                        room = (room << 6) + _lowest_bit(tree[first[lower] + room])
                    break
                place = index + 1
            if room < 0:
                pack, room = packs, capacity
                packs += 1
            else:
                pack = top[room]
                top[room] = under[pack]
                index = room
                for level in range(levels if top[room] < 0 else 0):
                    word = tree[first[level] + (index >> 6)] & ~(np.uint64(1) << np.uint64(index & 63))
                    tree[first[level] + (index >> 6)] = word
                    if word != 0:
                        break
                    index >>= 6
            pack_of[at] = pack
            at += 1
            room -= size
            rooms[pack] = room
            if room == 0:
                continue
            index = room
            for level in range(levels if top[room] < 0 else 0):
                word = tree[first[level] + (index >> 6)]
                tree[first[level] + (index >> 6)] = word | (np.uint64(1) << np.uint64(index & 63))
                if word != 0:
                    break
                index >>= 6
            under[pack] = top[room]
            top[room] = pack

    bounds = np.zeros(packs + 1, dtype=np.int64)
    for pack in pack_of:
        bounds[pack + 1] += 1
    for pack in range(packs):
        bounds[pack + 1] += bounds[pack]
    free = bounds[:-1].copy()
    members = np.empty(n, dtype=np.int64)
    for at in range(n):
        pack = pack_of[at]
        members[free[pack]] = order[at]
        free[pack] += 1
    return members, bounds, rooms[:packs].copy()
