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
import pyarrow.parquet as pq

from smi.data.adapters import get_adapter
from smi.data.pipeline import fingerprint
from smi.data.shards import SCHEMA, ids_column, runs
from smi.data.sources import Block, Row, SourceSpec, find_files, list_blocks, missing_columns, read_block
from smi.data.workers import Attempt, Mark
from smi.protocol.codec import Example, encode_many
from smi.protocol.conversation import Conversation, to_stream
from smi.protocol.json_text import dumps
from smi.protocol.stream import ProtocolError, Stream
from smi.protocol.transcript import from_stream
from smi.tokenizer import Tokenizer

CHUNK_ROWS = 128
# a Parquet row group with more rows is shared out
STRETCH_ROWS = 1024

CHUNK_SCHEMA = pa.schema(
    [
        ("row", pa.int32()),
        # null where the row was accepted
        ("reason", pa.string()),
        ("detail", pa.string()),
        # what duplicates have in common
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


def stretches(source: SourceSpec, root: Path, seed: int, part: tuple[int, int] = (0, 1)) -> list[Stretch]:
    """The stretches of a source, its blocks in the order that the seed gives.

    Args:
        part: (i, n): every n-th one from the i-th on.

    Raises ValueError for files that are not there, cannot be opened or lack columns; each named.
    """
    adapter = get_adapter(source.adapter)
    blocks: list[Block] = []
    for file in find_files(source, root):
        if missing := missing_columns(file, adapter.needs):
            raise ValueError(
                f"source {source.name!r}: {file} has no column {missing[0]}, which the adapter "
                f"{adapter.name!r} needs; it has {', '.join(missing[1])}"
            )
        blocks += list_blocks(file)
    Random(f"{seed}/{source.name}").shuffle(blocks)
    pieces = [(block, *piece) for block, bounds in zip(blocks, _bounds(blocks), strict=True) for piece in bounds]
    return [Stretch(source.name, i, *piece) for i, piece in enumerate(pieces[part[0] :: part[1]])]


def _bounds(blocks: list[Block]) -> Iterator[list[tuple[int, int | None]]]:
    rows: dict[Path, list[int]] = {}
    for block in blocks:
        if block.path.suffix != ".parquet":
            yield [(0, None)]
            continue
        if block.path not in rows:
            metadata = pq.read_metadata(block.path)
            rows[block.path] = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        count = sum(rows[block.path][block.start : block.end])
        yield list(pairwise([*range(0, count, STRETCH_ROWS), count]))


@dataclass
class RowCompiler:
    """Turns stretches into chunks; the work of `smi.data.workers`.

    Args:
        sources: by name.
        root: what file patterns are relative to.
        tokenizer: of the mixture.
        max_length: tokens of a document; a longer one is rejected, never cut.
        key: what duplicates have in common, from the canonical conversation's stream.
        overlap: where a conversation repeats held-out text, or None; None asks nobody.
    """

    sources: Mapping[str, SourceSpec]
    root: Path
    tokenizer: Tokenizer
    max_length: int
    key: Callable[[Stream], bytes] = fingerprint
    overlap: Callable[[Conversation], str | None] | None = None
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
        self._chunk(0, [to_stream(words), ProtocolError("none", "", "")])

    def __call__(self, task: Stretch, attempt: Attempt, mark: Mark) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The chunks of a stretch, each with the number of the row after it."""
        convert = get_adapter(self.sources[task.source].adapter).convert
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
        columns = get_adapter(self.sources[task.source].adapter).columns
        return _skip(iter(read_block(task.block, task.source, self.root, columns)), number, mark)

    def _parse(self, row: Row, convert: Callable[[Any], Conversation]) -> Stream | ProtocolError:
        if isinstance(row.value, ProtocolError):
            return row.value
        try:
            conversation = convert(row.value)
            stream = to_stream(conversation)
            if self.overlap is not None and (found := self.overlap(conversation)) is not None:
                raise ProtocolError("contaminated", "", found)
        except ProtocolError as error:
            return error
        except Exception as error:
            # an adapter may be anyone's: what it trips over is one row
            return ProtocolError("adapter", "", f"the adapter failed: {type(error).__name__}: {error}")
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

    def _columns(self, examples: list[Example], streams: list[Stream]) -> dict[str, pa.Array]:
        talks = [from_stream(stream, check=False) for stream in streams]
        marks = [fingerprint(stream) for stream in streams]
        columns = {
            "key": marks if self.key is fingerprint else [self.key(stream) for stream in streams],
            "input_ids": ids_column(examples),
            "blocks": runs(examples, self._starts),
            "tokens": [example.input_ids.size for example in examples],
            # nothing comes before the first token, so it is never predicted
            "supervised_tokens": [int(np.count_nonzero(example.loss_mask[1:])) for example in examples],
            "fingerprint": marks,
            "messages_json": [dumps(talk.messages) for talk in talks],
            "tools_json": [_json(talk.tools) for talk in talks],
            "smi_ctrl": [_json(talk.ctrl) for talk in talks],
            "smi_caps": [_json(talk.caps) for talk in talks],
        }
        return {
            name: column if isinstance(column, pa.Array) else pa.array(column, CHUNK_SCHEMA.field(name).type)
            for name, column in columns.items()
        }


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
