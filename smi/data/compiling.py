"""What a worker does: a stretch of raw rows -> chunks of compiled rows and rejections, in the order of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

from smi.data.adapters import adapter_for
from smi.data.contamination import HeldOut
from smi.data.dedupe import NearDuplicates, fingerprint, fingerprint_key
from smi.data.shards import SCHEMA, ids_column, runs
from smi.data.sources import Block, Row, SourceSpec, find_files, list_blocks, missing_columns, read_block
from smi.data.workers import Attempt, Mark
from smi.protocol.codec import Example, PlainTokenizer, encode_many
from smi.protocol.conversation import Conversation, to_stream
from smi.protocol.json_text import dumps
from smi.protocol.stream import ProtocolError, Stream
from smi.protocol.transcript import from_stream

CHUNK_ROWS = 128
# of the digest that duplicates have in common: 128 bits, one false duplicate in 10^19 rows
DIGEST_BYTES = 16
# a Parquet row group with more rows is shared out
STRETCH_ROWS = 1024

CHUNK_SCHEMA = pa.schema(
    [
        ("row", pa.int32()),
        # null where the row was accepted
        ("reason", pa.string()),
        ("detail", pa.string()),
        # what duplicates have in common: a digest, and behind it the signature that near ones are told by
        ("key", pa.binary()),
        *(column for column in SCHEMA if column.name != "source"),
    ]
)
"""Columns of a chunk: the place of the row in its block, why it was rejected, and what it was compiled to."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows [first, last) of a block; to its end where `last` is None. `number` counts them within a source."""

    source: str
    number: int
    block: Block
    first: int = 0
    last: int | None = None

    def __str__(self) -> str:
        return f"{self.source}: {self.block.path}, block at {self.block.start}"


def shuffled_blocks(source: SourceSpec, root: str | Path, order: str, *, held_out: bool = False) -> list[Block]:
    """The blocks of a source's files in the order that the text `order` seeds.

    Raises ValueError for files that are not there, cannot be opened or lack columns; each named.
    """
    adapter = adapter_for(source)
    blocks: list[Block] = []
    for file in find_files(source, root, held_out=held_out):
        if missing := missing_columns(file, adapter.needs):
            raise ValueError(
                f"source {source.name!r}: {file} has no column {missing[0]}, which the adapter "
                f"{adapter.name!r} needs; it has {', '.join(missing[1])}"
            )
        blocks += list_blocks(file)
    Random(f"{order}/{source.name}").shuffle(blocks)
    return blocks


def stretches(source: SourceSpec, root: str | Path, seed: int | str, part: tuple[int, int] = (0, 1)) -> list[Stretch]:
    """The stretches of a source, its blocks in the order that the seed gives.

    Args:
        part: (i, n): every n-th one from the i-th on.

    Raises ValueError for files that are not there, cannot be opened or lack columns; each named.
    """
    blocks = shuffled_blocks(source, root, str(seed))
    pieces = [(block, *piece) for block in blocks for piece in _bounds(block)]
    return [Stretch(source.name, i, *piece) for i, piece in enumerate(pieces[part[0] :: part[1]])]


def _bounds(block: Block) -> list[tuple[int, int | None]]:
    """The pieces [first, last) of a block, in its rows; one to its end where it does not say how many it has."""
    if block.rows is None:
        return [(0, None)]
    return list(pairwise([*range(0, block.rows, STRETCH_ROWS), block.rows]))


@dataclass
class RowCompiler:
    """Turns stretches into chunks; the work of `smi.data.workers`.

    Args:
        sources: by name.
        root: what file patterns are relative to.
        tokenizer: of the mixture.
        max_length: tokens of a document; a longer one is rejected, never cut.
        dedupe: how duplicates are told: exact, normalised, or near (see `smi.data.dedupe`).
        held_out: text that no row may repeat; None asks nothing.
        canonical: whether chunks hold the conversations as well; null where not, like what duplicates are told by.
    """

    sources: Mapping[str, SourceSpec]
    root: str | Path
    tokenizer: PlainTokenizer
    max_length: int
    dedupe: str = "exact"
    held_out: HeldOut | None = None
    canonical: bool = True
    schema: pa.Schema = field(default=CHUNK_SCHEMA, init=False)
    _open: tuple[str, Block, int, Iterator[Row]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._starts = np.zeros(self.tokenizer.vocab_size, np.bool_)
        self._starts[[*self.tokenizer.structural.ids, self.tokenizer.eos_id]] = True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": None}

    def warm_up(self) -> None:
        """See `smi.data.workers.Work`."""
        words = Conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        self._chunk(0, [to_stream(words), ProtocolError("role", "", "")])

    def __call__(self, task: Stretch, attempt: Attempt, mark: Mark) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The chunks of a stretch, each with the number of the row after it."""
        convert = adapter_for(self.sources[task.source]).convert
        rows = self._rows(task, attempt.first, mark)
        number = max(task.first, attempt.first)
        size = 1 if attempt.singly else CHUNK_ROWS
        while task.last is None or number < task.last:
            parsed: list[Stream | ProtocolError] = []
            start = number
            while len(parsed) < size and (task.last is None or number < task.last):
                mark(number)
                row = next(rows, None)
                if row is None:
                    break
                if number in attempt.refused:
                    parsed.append(_FAILED[attempt.refused[number]])
                else:
                    parsed.append(self._parse(row, convert))
                number += 1
            if not parsed:
                return
            if not attempt.singly:
                mark(None)
            self._open = (task.source, task.block, number, rows)
            yield number, self._chunk(start, parsed)

    def _rows(self, task: Stretch, first: int, mark: Mark) -> Iterator[Row]:
        """The rows of the block from the first one on; goes on with the rows of the last task where it can."""
        number = max(task.first, first)
        if self._open is not None:
            source, block, at, rows = self._open
            if (source, block) == (task.source, task.block) and at <= number:
                return _skip(rows, number - at, mark)
        columns = adapter_for(self.sources[task.source]).columns
        return _skip(iter(read_block(task.block, task.source, self.root, columns)), number, mark)

    def _parse(self, row: Row, convert: Callable[[Any], Conversation]) -> Stream | ProtocolError:
        if isinstance(row.value, ProtocolError):
            return row.value
        try:
            stream = to_stream(convert(row.value))
            if self.held_out is not None and (found := self.held_out.overlap(stream)) is not None:
                raise ProtocolError("contaminated", "", found)
        except ProtocolError as error:
            return error
        return stream

    def _chunk(self, start: int, parsed: list[Stream | ProtocolError]) -> pa.RecordBatch:
        outcomes: list[Example | ProtocolError] = []
        compiled = iter(encode_many([stream for stream in parsed if isinstance(stream, Stream)], self.tokenizer))
        for stream in parsed:
            outcome = next(compiled) if isinstance(stream, Stream) else stream
            if isinstance(outcome, Example):
                outcome = self._judge(outcome)
            outcomes.append(outcome)
        accepted = [outcome for outcome in outcomes if isinstance(outcome, Example)]
        said = [stream for stream, outcome in zip(parsed, outcomes, strict=True) if isinstance(outcome, Example)]
        columns = self._columns(accepted, [stream for stream in said if isinstance(stream, Stream)])
        if len(accepted) < len(parsed):
            # rejected rows have null in all of them
            places = np.full(len(parsed), -1)
            places[[isinstance(outcome, Example) for outcome in outcomes]] = np.arange(len(accepted))
            index = pa.array(places, mask=places < 0)
            columns = {name: column.take(index) for name, column in columns.items()}
        errors = [outcome if isinstance(outcome, ProtocolError) else None for outcome in outcomes]
        head = {
            "row": pa.array(range(start, start + len(parsed)), pa.int32()),
            "reason": pa.array([error and error.reason for error in errors], pa.string()),
            "detail": pa.array([error and _detail(error) for error in errors], pa.string()),
        }
        return pa.record_batch([(head | columns)[name] for name in CHUNK_SCHEMA.names], schema=CHUNK_SCHEMA)

    def _judge(self, example: Example) -> Example | ProtocolError:
        tokens = example.input_ids.size
        if tokens > self.max_length:
            return ProtocolError("too_long", "", f"{tokens:,} tokens; at most {self.max_length:,} fit")
        if not example.loss_mask[1:].any():
            return ProtocolError("no_target", "", "no supervised tokens: there is nothing to learn from")
        return example

    def _key(self, stream: Stream, mark: bytes) -> bytes:
        if self.dedupe == "near":
            return mark[:DIGEST_BYTES] + NearDuplicates.signature(stream).tobytes()
        return (mark if self.dedupe == "exact" else fingerprint_key(stream, self.dedupe))[:DIGEST_BYTES]

    def _columns(self, examples: list[Example], streams: list[Stream]) -> dict[str, pa.Array]:
        marks = [fingerprint(stream) for stream in streams]
        columns = {
            "input_ids": ids_column(examples),
            "blocks": runs(examples, self._starts),
            "tokens": [example.input_ids.size for example in examples],
            # nothing comes before the first token, so it is never predicted
            "supervised_tokens": [int(np.count_nonzero(example.loss_mask[1:])) for example in examples],
            "fingerprint": marks,
        }
        columns |= self._canonical(streams, marks) if self.canonical else dict.fromkeys(_CANONICAL, [None] * len(marks))
        return {
            name: column if isinstance(column, pa.Array) else pa.array(column, CHUNK_SCHEMA.field(name).type)
            for name, column in columns.items()
        }

    def _canonical(self, streams: list[Stream], marks: list[bytes]) -> dict[str, list[Any]]:
        talks = [from_stream(stream, check=False) for stream in streams]
        return {
            "key": [self._key(stream, mark) for stream, mark in zip(streams, marks, strict=True)],
            "messages_json": [dumps(talk.messages) for talk in talks],
            "tools_json": [_json(talk.tools) for talk in talks],
            "smi_ctrl": [_json(talk.ctrl) for talk in talks],
            "smi_caps": [_json(talk.caps) for talk in talks],
        }


_CANONICAL = ("key", "messages_json", "tools_json", "smi_ctrl", "smi_caps")

_FAILED = {
    "time_out": ProtocolError("time_out", "", "the row took longer than prepare.row_timeout"),
    "crash": ProtocolError("crash", "", "the process that worked on the row died"),
}


def _skip(rows: Iterator[Row], count: int, mark: Mark) -> Iterator[Row]:
    for _ in range(count):
        mark(None)
        next(rows, None)
    return rows


def _detail(error: ProtocolError) -> str:
    return f"{error.where}: {error.message}" if error.where else error.message


def _json(value: Any) -> str | None:
    return None if value is None else dumps(value)
