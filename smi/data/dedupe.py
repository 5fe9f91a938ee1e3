"""Telling duplicates: by the canonical conversation, exactly or nearly."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from smi.protocol.json_text import dumps
from smi.protocol.stream import Block, Payload, Span, Stream
from smi.protocol.tokens import BlockType

SHINGLE_WORDS = 5
PERMUTATIONS = 128
# 16 bands of 8: of pairs at 0.8, 95% meet in one; at 0.7 61%, at 0.5 6%
BANDS = 16
JUDGED_ROWS = 1_000

_JSON_BLOCKS = (BlockType.CTRL, BlockType.CAPS, BlockType.ACT, BlockType.OBS)
_ID_KEYS = {BlockType.ACT: ("id",), BlockType.OBS: ("caused_by",)}


def fingerprint(stream: Stream) -> bytes:
    """The sha256 of a conversation in its canonical form.

    That form is its stream: the same conversation has the same one whatever columns, wrappers, null members
    or argument encodings its rows came with, and two rows with one stream are one training example.
    """
    return _digest(stream, lambda block: block.payload)


def fingerprint_key(stream: Stream, mode: str) -> bytes:
    """What duplicates have in common, 32 bytes.

    mode: "exact", the `fingerprint`; "normalised", the same for conversations that differ only in

    - white space: a run of it is one space, none stands at either end of a payload, and JSON is compared by its
      values, with the texts in it treated alike;
    - the ids of calls: each is replaced by its number in the order of the calls, in the ACT and in its OBS.

    Letters keep their case, since in names and code it tells things apart.

    Raises ValueError for another mode.
    """
    if mode == "exact":
        return fingerprint(stream)
    if mode != "normalised":
        raise ValueError(f"duplicates are told by their exact or normalised form, not by {mode!r}")
    ids: dict[str, str] = {}
    return _digest(stream, lambda block: _normalised(block, ids))


def _digest(stream: Stream, payload_of: Callable[[Block], Payload]) -> bytes:
    digest = hashlib.sha256()
    for transmission in stream.transmissions:
        for block in transmission.blocks:
            payload = payload_of(block)
            # lengths keep the boundary between two payloads from moving; a number of parts cannot be taken for one
            if not isinstance(payload, str):
                digest.update(b"%d parts %d\n" % (block.type, len(payload)))
            for part in (payload,) if isinstance(payload, str) else payload:
                text = part if isinstance(part, str) else f"{part.namespace}:{','.join(map(str, part.ids))}"
                data = text.encode()
                digest.update(b"%d %d\n" % (block.type if isinstance(part, str) else -1, len(data)))
                digest.update(data)
        digest.update(b"eot\n")
    return digest.digest()


def _normalised(block: Block, ids: dict[str, str]) -> Payload:
    if not isinstance(block.payload, str):
        return tuple(part if isinstance(part, Span) else _spaced(part) for part in block.payload)
    value = json_object(block.payload) if block.type in _JSON_BLOCKS else None
    if value is None:
        return _spaced(block.payload)
    value = _each_text(value)
    for key in _ID_KEYS.get(block.type, ()):
        if isinstance(value.get(key), str):
            value[key] = ids.setdefault(value[key], str(len(ids)))
    return dumps(value)


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a payload is; None for one that is text."""
    if not text.startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _each_text(value: Any) -> Any:
    if isinstance(value, str):
        return _spaced(value)
    if isinstance(value, list):
        return [_each_text(item) for item in value]
    if isinstance(value, dict):
        return {key: _each_text(item) for key, item in value.items()}
    return value


_SPACE = re.compile(r"\s+")


def _spaced(text: str) -> str:
    return _SPACE.sub(" ", text).strip()


class NearDuplicates:
    """Conversations that are nearly one that came before: MinHash signatures, found by locality-sensitive hashing.

    What is compared is what is said: the runs of `SHINGLE_WORDS` words in USR, OBS, THINK, OUT and ACT. Instructions
    and declarations of tools, which unlike conversations share, do not count. Two conversations are nearly the same
    where the estimated share of runs that they have in common, of all that either has, reaches the threshold; the
    estimate is off by some 0.04. A. Broder, "On the resemblance and containment of documents", 1997.

    Signatures are made anywhere; one writer asks and adds in the order of the rows, so that the result depends on
    nothing else. A row takes about 2.5 KB of memory.

    Args:
        threshold: the share from which on a conversation is a near-duplicate.
        limit: the share of near-duplicates that is taken for a mistake, such as text that all rows begin with.

    Raises:
        ValueError: a threshold or limit that is no share, or a threshold too low for the bands to find.
    """

    def __init__(self, threshold: float = 0.8, limit: float = 0.5) -> None:
        if not 0.7 <= threshold <= 1:
            raise ValueError(f"the threshold of near-duplicates is from 0.7 to 1, not {threshold}")
        if not 0 < limit <= 1:
            raise ValueError(f"the limit of near-duplicates is a share above 0, up to 1, not {limit}")
        self.threshold = threshold
        self.limit = limit
        self.asked = 0
        self.removed = 0
        self._signatures: list[np.ndarray] = []
        self._indices: list[int] = []
        self._bands: list[defaultdict[bytes, list[int]]] = [defaultdict(list) for _ in range(BANDS)]

    @staticmethod
    def signature(stream: Stream) -> np.ndarray:
        """The MinHash signature of a conversation; uint32 [PERMUTATIONS]. The same in every process."""
        # imported here: compiled loops take a while to load, and few runs ask for them
        from smi.data.words import minhash, ngram_hashes, spoken

        hashes = [ngram_hashes(text, SHINGLE_WORDS, short=True) for text in spoken(stream)]
        return minhash(np.concatenate(hashes) if hashes else np.zeros(0, np.uint64), PERMUTATIONS)

    def first_like(self, signature: np.ndarray) -> int | None:
        """The index of the first conversation added that this one nearly is, or None. Counts the question.

        Raises:
            ValueError: the share of near-duplicates is above the limit; it is named.
        """
        self.asked += 1
        places = sorted({place for band, key in self._keys(signature) for place in band.get(key, ())})
        for place in places:
            if np.count_nonzero(self._signatures[place] == signature) >= self.threshold * PERMUTATIONS:
                self.removed += 1
                # a share of few rows says little; `finish` asks whatever their number
                if self.asked >= JUDGED_ROWS:
                    self.finish()
                return self._indices[place]
        return None

    def add(self, signature: np.ndarray, index: int) -> None:
        """Remember a conversation that was accepted, under any number that names it."""
        for band, key in self._keys(signature):
            band[key].append(len(self._signatures))
        self._signatures.append(signature)
        self._indices.append(index)

    def _keys(self, signature: np.ndarray) -> list[tuple[defaultdict[bytes, list[int]], bytes]]:
        rows = PERMUTATIONS // BANDS
        return [(band, signature[i * rows : (i + 1) * rows].tobytes()) for i, band in enumerate(self._bands)]

    @property
    def share(self) -> float:
        """The share of the conversations asked about that were near-duplicates."""
        return self.removed / self.asked if self.asked else 0.0

    def finish(self) -> None:
        """Raises ValueError where the share of near-duplicates is above the limit."""
        if self.share > self.limit:
            raise ValueError(
                f"{self.removed:,} of {self.asked:,} conversations ({self.share:.0%}) are near-duplicates, above the "
                f"limit of {self.limit:.0%}: a threshold of {self.threshold} takes too much for the same here, or the "
                "source repeats itself; raise the limit if that is so"
            )
