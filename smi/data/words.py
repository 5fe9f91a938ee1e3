"""Words of conversations as numbers, for comparisons over millions of rows.

A word is a run of letters, digits and marks, whatever its case. A character of a script that writes words without
spaces and has thousands of characters (Chinese, Japanese) is a word; Thai, Lao, Khmer and Burmese are taken as they
are written, in runs.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import njit

from smi.data.dedupe import json_object
from smi.protocol.stream import Stream
from smi.protocol.tokens import BlockType

_SAID = (BlockType.USR, BlockType.OBS, BlockType.THINK, BlockType.OUT, BlockType.ACT)

_WORD, _ALONE = 1, 2
# hiragana and katakana, ideographs with their extension, compatibility ideographs
_ALONE_RANGES = ((0x3040, 0x3100), (0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00))
_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_BASE = np.uint64(0x9E3779B97F4A7C15)
_FNV_PRIME = np.uint64(0x100000001B3)


def spoken(stream: Stream) -> Iterator[str]:
    """The texts of what is said and done: payloads, and the texts in those that are JSON."""
    for transmission in stream.transmissions:
        for block in transmission.blocks:
            if block.type not in _SAID:
                continue
            for part in block.parts:
                if not isinstance(part, str):
                    continue
                value = json_object(part) if block.type in (BlockType.ACT, BlockType.OBS) else None
                if value is None:
                    yield part
                else:
                    yield from texts(value.get("arguments", value.get("content", value.get("error"))))


def texts(value: Any) -> Iterator[str]:
    """The texts in a JSON value, without keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)


def ngram_hashes(text: str, n: int, *, short: bool = False) -> np.ndarray:
    """The hashes of the G runs of `n` words in a text; uint64 [G].

    short: a text of fewer words, but not of none, counts as one run.
    """
    return _ngrams(_words(text)[0], n, short)


def ngram_text(text: str, n: int, index: int) -> str:
    """The text of the run of `n` words at `index` in `ngram_hashes(text, n)`, as it was written."""
    _, starts, ends = _words(text)
    # where case folding changes the number of characters, the folded text is what can be shown
    folded = text.casefold()
    shown = text if len(folded) == len(text) else folded
    return shown[starts[index] : ends[index + n - 1]]


def _words(text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(hashes, starts, ends) of the W words of the case-folded text: uint64 [W], and characters, int64 [W] each."""
    points = np.frombuffer(text.casefold().encode("utf-32-le", errors="replace"), np.uint32)
    return _split(points, _classes())


@cache
def _classes() -> np.ndarray:
    """What each character below 0x10000 is: nothing, part of a word, a word; uint8. Those above are words."""
    table = np.array([unicodedata.category(chr(point))[0] in "LNM" for point in range(0x10000)], np.uint8)
    for first, end in _ALONE_RANGES:
        table[first:end] *= _ALONE
    return table


@njit(cache=True)
def _split(points, classes):  # pragma: no cover - compiled
    hashes = np.empty(len(points), np.uint64)
    starts = np.empty(len(points), np.int64)
    ends = np.empty(len(points), np.int64)
    count = 0
    inside = False
    for i in range(len(points)):
        point = points[i]
        kind = classes[point] if point < 0x10000 else 2
        if kind == 0:
            inside = False
            continue
        if kind == 2 or not inside:
            hashes[count] = _FNV_OFFSET
            starts[count] = i
            count += 1
        hashes[count - 1] = (hashes[count - 1] ^ np.uint64(point)) * _FNV_PRIME
        ends[count - 1] = i + 1
        inside = kind == 1
    return hashes[:count], starts[:count], ends[:count]


@njit(cache=True)
def _mixed(x):  # pragma: no cover - compiled
    # the finaliser of splitmix64: every bit of the result depends on every bit of x
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True)
def _ngrams(words, n, short):  # pragma: no cover - compiled
    count = len(words) - n + 1
    if count <= 0:
        count = 1 if short and len(words) > 0 else 0
        n = len(words)
    # a polynomial in the words' hashes, modulo 2^64: going on by a word takes the term of the oldest out
    result = np.empty(count, np.uint64)
    x, power = np.uint64(0), np.uint64(1)
    for i in range(n):
        x = x * _BASE + _mixed(words[i])
        power *= _BASE
    for i in range(count):
        result[i] = _mixed(x)
        if i + 1 < count:
            x = x * _BASE + _mixed(words[i + n]) - power * _mixed(words[i])
    return result


@njit(cache=True)
def _minima(hashes, factors, offsets):  # pragma: no cover - compiled
    result = np.full(len(factors), np.uint32(0xFFFFFFFF))
    for x in hashes:
        for i in range(len(factors)):
            # multiply-shift hashing: the upper half of the product
            y = np.uint32((x * factors[i] + offsets[i]) >> np.uint64(32))
            if y < result[i]:
                result[i] = y
    return result


@cache
def _permutations(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(0))
    factors, offsets = rng.integers(0, 2**64, (2, count), np.uint64)
    return factors | np.uint64(1), offsets


def minhash(hashes: np.ndarray, permutations: int) -> np.ndarray:
    """The least value of the hashes (uint64 [G]) under each of P fixed hash functions; uint32 [P]."""
    return _minima(hashes, *_permutations(permutations))
