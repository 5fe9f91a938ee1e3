"""Greedy longest match over bytes: how the RWKV World vocabulary cuts text, as a double-array trie.

A node of the trie is an offset into one array of cells, and its child for a byte stands at offset + byte. No two
nodes share an offset, so the byte that a cell is for tells whose child it is, and a cell fits into 32 bits:

    bits 0-7 the byte, bit 8 set where the cell is in use, bit 9 set where a token ends, bits 10-31 the offset of
    the children, 0 for none

The half megabyte that the World vocabulary takes stays in the cache. Time is linear in the text, with the length
of the longest token as the factor at worst. The functions are compiled once and kept on disk; they release the
interpreter's lock, start no threads and hold no state, so threads may share a trie and workers may fork.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numba
import numpy as np
from numpy.typing import NDArray

_BYTE = 0xFF
_USED = 1 << 8
_ENDS = 1 << 9
_OFFSET = 10
_MOST_CELLS = 1 << (32 - _OFFSET)


class LongestMatch:
    """An encoder for a vocabulary of byte strings, every single byte among them.

    pieces: the bytes of each id; None or empty where an id stands for none. Of equal pieces the lowest id counts.
    Raises ValueError where a single byte is no piece, since some text would have no ids.
    """

    def __init__(self, pieces: Sequence[bytes | None]) -> None:
        ids: dict[bytes, int] = {}
        for id, piece in enumerate(pieces):
            if piece:
                ids.setdefault(piece, id)
        known = sorted(ids)
        missing = next((byte for byte in range(256) if bytes([byte]) not in ids), None)
        if missing is not None:
            raise ValueError(f"the vocabulary has no token for the byte 0x{missing:02X}: some text would be lost")
        self._cells, self._ids = _build(
            np.frombuffer(b"".join(known), dtype=np.uint8),
            _bounds(known),
            np.array([ids[piece] for piece in known], dtype=np.int32),
        )

    def __call__(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The ids of all texts in one row, int32 [T], and where each begins and ends in it, int64 [texts + 1].

        Raises UnicodeEncodeError for text that UTF-8 cannot carry.
        """
        data = [text.encode() for text in texts]
        bounds = _bounds(data)
        # a token takes a byte at least; pages that stay untouched cost nothing
        ids = np.empty(bounds[-1], dtype=np.int32)
        count = _encode(np.frombuffer(b"".join(data), dtype=np.uint8), bounds, self._cells, self._ids, ids)
        return ids[:count].copy(), bounds


def _bounds(parts: Sequence[bytes]) -> NDArray[np.int64]:
    """Where each part begins and ends in the row of all."""
    return np.fromiter(accumulate(map(len, parts), initial=0), dtype=np.int64, count=len(parts) + 1)


@numba.njit(
    "int64(Array(uint8, 1, 'C', readonly=True), int64[::1], uint32[::1], int32[::1], int32[::1])",
    nogil=True,
    cache=True,
)
def _encode(data, bounds, cells, ids_of_cells, ids):
    """Writes the ids of the texts between `bounds`, turns `bounds` into those of the ids, and counts them."""
    count = 0
    position = 0
    for text in range(bounds.size - 1):
        end = bounds[text + 1]
        while position < end:
            # all 256 bytes are tokens, and the root's children come first
            last = np.int64(data[position])
            cell = cells[last]
            position += 1
            ahead = position
            offset = np.int64(cell >> np.uint32(_OFFSET))
            while offset != 0 and ahead < end:
                byte = np.int64(data[ahead])
                cell = cells[offset + byte]
                if np.int64(cell) & (_USED | _BYTE) != _USED | byte:
                    break
                ahead += 1
                if np.int64(cell) & _ENDS:
                    last = offset + byte
                    position = ahead
                offset = np.int64(cell >> np.uint32(_OFFSET))
            ids[count] = ids_of_cells[last]
            count += 1
        bounds[text + 1] = count
    return count


@numba.njit(
    "Tuple((uint32[::1], int32[::1]))(Array(uint8, 1, 'C', readonly=True), int64[::1], int32[::1])",
    nogil=True,
    cache=True,
)
def _build(data, bounds, ids):
    """The cells, uint32 [C], and the id of the token that ends in each, int32 [C], -1 for none.

    data, bounds: the pieces, sorted, none twice and none empty. ids: int32 [pieces].
    """
    # level by level: a node is the run of pieces that share a prefix, and the children of one stand together
    most = bounds[-1] + 1
    begin = np.empty(most, dtype=np.int64)
    end = np.empty(most, dtype=np.int64)
    depth = np.empty(most, dtype=np.int64)
    label = np.empty(most, dtype=np.int64)
    token = np.full(most, -1, dtype=np.int32)
    first_child = np.empty(most, dtype=np.int64)
    children = np.zeros(most, dtype=np.int64)
    begin[0], end[0], depth[0] = 0, ids.size, 0
    nodes = 1
    node = 0
    while node < nodes:
        piece = begin[node]
        # the piece that ends here stands before those that go on
        if bounds[piece + 1] - bounds[piece] == depth[node]:
            token[node] = ids[piece]
            piece += 1
        first_child[node] = nodes
        while piece < end[node]:
            byte = np.int64(data[bounds[piece] + depth[node]])
            if children[node] == 0 or byte != label[nodes - 1]:
                begin[nodes], depth[nodes], label[nodes] = piece, depth[node] + 1, byte
                children[node] += 1
                nodes += 1
            piece += 1
            end[nodes - 1] = piece
        node += 1

    # those with most children choose first, the root before all, and those with one fill the gaps
    order = np.argsort(-children[:nodes], kind="mergesort")
    size = 4 * nodes + 1024
    cells = np.zeros(size, dtype=np.uint32)
    ids_of_cells = np.full(size, -1, dtype=np.int32)
    taken = np.zeros(size, dtype=np.bool_)
    offsets = np.zeros(nodes, dtype=np.int64)
    top = 256
    first_free = 256
    start = 256
    before = 257
    for node in order:
        count = children[node]
        if count == 0:
            break
        child = first_child[node]
        if count < before:
            while cells[first_free] != 0:
                first_free += 1
            before, start = count, first_free
        offset = 0
        while node != 0:
            offset = start - label[child]
            fits = offset > 0 and not taken[offset]
            for sibling in range(child, child + count):
                fits = fits and cells[offset + label[sibling]] == 0
            if fits:
                break
            start += 1
        taken[offset] = True
        offsets[node] = offset
        top = max(top, offset + 256)
        for sibling in range(child, child + count):
            cells[offset + label[sibling]] = _USED | label[sibling]
            ids_of_cells[offset + label[sibling]] = token[sibling]
            if token[sibling] >= 0:
                cells[offset + label[sibling]] |= np.uint32(_ENDS)
    assert top <= _MOST_CELLS
    for node in range(nodes):
        for sibling in range(first_child[node], first_child[node] + children[node]):
            cells[offsets[node] + label[sibling]] |= np.uint32(offsets[sibling] << _OFFSET)
    return cells[:top].copy(), ids_of_cells[:top].copy()
