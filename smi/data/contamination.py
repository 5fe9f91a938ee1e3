"""The contamination gate: training rows that repeat text of held-out files are found by the long runs they share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from smi.data.dedupe import json_object
from smi.data.readers import READERS, list_blocks, read_values
from smi.data.words import ngram_hashes, ngram_text, spoken, texts
from smi.protocol.conversation import REASONING_FIELDS, Conversation
from smi.protocol.stream import ProtocolError, Stream

WORDS = 13
"""How long a run must be to tell that a text was copied; as T. Brown et al., "Language Models are Few-Shot Learners",
2020, took it."""


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Runs of words that training rows must not share. It travels to other processes.

    n: words of a run.
    hashes: uint64 [G], sorted.
    sources: int32 [G], for each which of `files` it is from.
    files: the held-out files, as they were named.
    texts: how many texts they hold, and `short`, how many have fewer than n words: of those nothing can be found.
    """

    n: int
    hashes: np.ndarray
    sources: np.ndarray
    files: tuple[str, ...]
    texts: int
    short: int

    @classmethod
    def from_files(cls, paths: Iterable[str | Path], n: int = WORDS) -> HeldOut:
        """Read held-out files: rows in Parquet, Arrow, JSONL or JSON, every text in them whatever its column; or .txt.

        n: words of a run, at least 5.

        Raises:
            ValueError: no files, one that is not there or not readable, a row that is not; each named.
        """
        if n < 5:
            raise ValueError(f"runs of {n} words are shared by chance: take at least 5, usually {WORDS}")
        files = tuple(str(path) for path in paths)
        if not files:
            raise ValueError("no held-out files are named")
        found: list[np.ndarray] = []
        count = short = 0
        sizes = []
        for file in files:
            before = len(found)
            for text in _texts_of(Path(file)):
                runs = ngram_hashes(text, n)
                count += 1
                short += not runs.size
                found.append(runs)
            sizes.append(sum(runs.size for runs in found[before:]))
        hashes = np.concatenate(found) if found else np.zeros(0, np.uint64)
        # the first file that has a run is the one that is named
        unique, first = np.unique(hashes, return_index=True)
        sources = np.repeat(np.arange(len(files), dtype=np.int32), sizes)[first]
        return cls(n, unique, sources, files, count, short)

    def overlap(self, said: Conversation | Stream) -> str | None:
        """The first run of words that a conversation shares with a held-out file, and the file; None without one.

        Looked at is what is said and done: not instructions and declarations of tools, nor roles, names and ids.
        A conversation is one that `to_stream` takes.
        """
        for text in spoken(said) if isinstance(said, Stream) else _said(said):
            runs = ngram_hashes(text, self.n)
            for index in np.flatnonzero(self._marks[runs & np.uint64(self._marks.size - 1)]).tolist():
                place = int(np.searchsorted(self.hashes, runs[index]))
                if place < self.hashes.size and self.hashes[place] == runs[index]:
                    return f"shares {ngram_text(text, self.n, index)!r} with {self.files[self.sources[place]]}"
        return None

    @cached_property
    def _marks(self) -> np.ndarray:
        """Marked at the low bits of every hash, bool [2^k]: nearly all runs that are not there are told at a glance."""
        marks = np.zeros(1 << max(10, (16 * self.hashes.size).bit_length()), np.bool_)
        marks[self.hashes & np.uint64(marks.size - 1)] = True
        return marks

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_marks"}


def _said(conversation: Conversation) -> Iterator[str]:
    for message in conversation.messages:
        if message["role"] in ("system", "developer"):
            continue
        yield from texts([message.get(field) for field in ("content", *REASONING_FIELDS)])
        for call in message.get("tool_calls") or ():
            arguments = (call.get("function") or call).get("arguments")
            yield from texts(json_object(arguments) if isinstance(arguments, str) else arguments)


def _texts_of(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise ValueError(f"there is no held-out file {path}")
    if path.suffix == ".txt":
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"the held-out file {path} is not UTF-8: {error}") from error
        return
    if path.suffix not in READERS:
        raise ValueError(f"the held-out file {path} is of no known format; known are .txt, {', '.join(READERS)}")
    for block in list_blocks(path):
        for offset, row in enumerate(read_values(block, None)):
            if not isinstance(row, ProtocolError):
                yield from texts(row)
                continue
            place = block.first_row() + offset
            raise ValueError(f"the held-out file {path} cannot be read whole: row {place}: {row}")
