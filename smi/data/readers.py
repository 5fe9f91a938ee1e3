"""Reading files block by block: Parquet, the Arrow files of `datasets`, JSONL, and JSON arrays.

A row that cannot be read comes out as its error, and the rows after it are read on. A file that is damaged as a whole
is an error: what could still be read of it would be another mixture than the one that was asked for.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from smi.data import budget
from smi.data.hub import HubFile
from smi.protocol.json_text import loads
from smi.protocol.stream import ProtocolError

# one JSONL block: small enough to shuffle a file well, large enough that seeking costs nothing
BLOCK_BYTES = 1 << 20
ARROW_BATCH_ROWS = 256

File: TypeAlias = Path | HubFile
Value: TypeAlias = dict[str, Any] | ProtocolError


@dataclass(frozen=True, slots=True)
class Block:
    """A run of rows that is read as a whole: a Parquet row group, a stretch of a JSONL file, a JSON file.

    `start` and `end` are row-group numbers in Parquet and byte offsets elsewhere. A line belongs to the block
    in which it begins. `rows` is how many there are, where the file says so without being read.
    """

    path: File
    start: int
    end: int
    rows: int | None = None

    def first_row(self) -> int:
        """How many rows of the file lie before this block.

        Counts lines in JSONL: made for messages, too slow for every row.
        """
        return sum(_COUNTERS[self.path.suffix](self)) if self.start else 0


def list_blocks(path: File) -> list[Block]:
    """The blocks of a file, in file order. Reads footers, headers and sizes, never rows.

    Raises:
        ValueError: a file that cannot be opened, named.
    """
    if path.suffix == ".parquet":
        with _open_parquet(path) as file:
            counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        return [Block(path, group, group + 1, count) for group, count in enumerate(counts)]
    if path.suffix == ".arrow":
        with _open_arrow(path) as (file, schema):
            return [Block(path, start, end, rows) for start, end, rows in _messages(path, file, schema)]
    size = path.stat().st_size
    if path.suffix == ".jsonl":
        return [Block(path, start, min(start + BLOCK_BYTES, size)) for start in range(0, size, BLOCK_BYTES)]
    return [Block(path, 0, size)]


def column_names(path: File) -> list[str] | None:
    """The columns of a Parquet or Arrow file; other formats name theirs row by row."""
    if path.suffix == ".parquet":
        with _open_parquet(path) as file:
            return file.schema_arrow.names
    if path.suffix == ".arrow":
        with _open_arrow(path) as (_, schema):
            return schema.names
    return None


def read_values(block: Block, columns: Sequence[str] | None) -> Iterator[Value]:
    """The rows of a block, in file order, each as an object or as the reason why it is none.

    Args:
        block: from `list_blocks`.
        columns: read only these of Parquet and Arrow, as far as the file has them; None reads all.

    Raises:
        ValueError: the file as a whole is damaged; it is named, and the row group.
    """
    return READERS[block.path.suffix](block, columns)


# Parquet and Arrow


def _read_parquet(block: Block, columns: Sequence[str] | None) -> Iterator[Value]:
    with _open_parquet(block.path) as file:
        schema = file.schema_arrow
        names = schema.names if columns is None else [name for name in schema.names if name in columns]
        batches = file.iter_batches(ARROW_BATCH_ROWS, row_groups=range(block.start, block.end), columns=names)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (pa.ArrowException, OSError) as error:
                raise ValueError(
                    f"{block.path}: cannot read row group {block.start}: {error}; the file is damaged, fetch it again"
                ) from error
            yield from _batch_rows(batch)


def _open_parquet(path: File) -> pq.ParquetFile:
    try:
        source = path if isinstance(path, Path) else path.open("rb")
        return pq.ParquetFile(source, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be opened as Parquet: {error}") from error


def _read_arrow(block: Block, columns: Sequence[str] | None) -> Iterator[Value]:
    with _open_arrow(block.path) as (file, schema):
        file.seek(block.start)
        try:
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{block.path}: cannot read the batch at byte {block.start}: {error}; the file is damaged"
            ) from error
        if columns is not None:
            batch = batch.select([name for name in schema.names if name in columns])
        for start in range(0, batch.num_rows, ARROW_BATCH_ROWS):
            yield from _batch_rows(batch.slice(start, ARROW_BATCH_ROWS))


@contextmanager
def _open_arrow(path: File) -> Iterator[tuple[pa.NativeFile, pa.Schema]]:
    """The file behind its schema. Written by `datasets`: the streaming form, without dictionaries."""
    try:
        file = pa.memory_map(str(path)) if isinstance(path, Path) else pa.PythonFile(path.open("rb"), "r")
    except OSError as error:
        raise ValueError(f"{path} cannot be opened: {error}") from error
    with file:
        try:
            schema = pa.ipc.read_schema(file)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{path} cannot be opened as an Arrow stream, the form in which datasets saves: {error}"
            ) from error
        yield file, schema


def _messages(path: File, file: pa.NativeFile, schema: pa.Schema) -> Iterator[tuple[int, int, int]]:
    """(start, end, rows) of each batch. On disk the file is mapped, and the rows themselves are not touched."""
    size = path.stat().st_size
    while (start := file.tell()) < size:
        try:
            message = pa.ipc.read_message(file)
            if message.type == "dictionary":
                raise ValueError(f"{path} holds dictionary-encoded columns; decode them before saving")
            rows = pa.ipc.read_record_batch(message, schema).num_rows
        except EOFError:
            return
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path}: cannot read the batch at byte {start}: {error}; the file is damaged") from error
        yield start, file.tell(), rows


def _batch_rows(batch: pa.RecordBatch) -> Iterator[Value]:
    arrays = [batch.column(i) for i in range(batch.num_columns)]
    size = heavy = np.zeros(0, np.int64)
    if batch.nbytes > budget.MAX_ROW_BYTES or sum(map(_node_count, arrays)) > budget.MAX_NODES:
        weights = [_weights(array) for array in arrays]
        size, nodes = np.sum(weights, axis=0)
        heavy = np.flatnonzero((size > budget.MAX_ROW_BYTES) | (nodes > budget.MAX_NODES))
    start = 0
    for index in [*heavy.tolist(), batch.num_rows]:
        yield from _python_rows(batch.slice(start, index - start))
        if index < batch.num_rows:
            fault = budget.too_many_bytes if size[index] > budget.MAX_ROW_BYTES else budget.too_many_nodes
            yield fault()
        start = index + 1


def _python_rows(batch: pa.RecordBatch) -> Iterator[Value]:
    cleaners = {
        name: clean
        for name, kind in zip(batch.schema.names, batch.schema.types, strict=True)
        if (clean := _cleaner(kind)) is not None
    }
    try:
        rows = batch.to_pylist(maps_as_pydicts="strict")
    except (UnicodeDecodeError, KeyError) as error:
        if batch.num_rows > 1:
            # somewhere in the batch: find the rows that have it, keep the others
            for index in range(batch.num_rows):
                yield from _python_rows(batch.slice(index, 1))
        elif isinstance(error, UnicodeDecodeError):
            yield ProtocolError("undecodable", "row", f"text is not UTF-8: {error}")
        else:
            yield ProtocolError("duplicate_key", "row", f"a map holds a key twice: {error}")
        return
    for row in rows:
        for name, clean in cleaners.items():
            if row[name] is not None:
                row[name] = clean(row[name])
        yield row


def _cleaner(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Drops null members of structs from values of a type; None where there are no structs.

    Arrow gives all structs of a column one type: each row gains the keys of every other row, as nulls. So a null
    member of a struct is an absent one. A null that was really there is lost with them; data that needs its own
    nulls carries them as JSON text, or in a map, whose keys are its own. Null items of lists stay.
    """
    if pa.types.is_struct(kind):
        inner = {kind.field(i).name: _cleaner(kind.field(i).type) for i in range(kind.num_fields)}

        def clean_struct(value: dict[str, Any]) -> dict[str, Any]:
            kept = {}
            for key, member in value.items():
                if member is not None:
                    clean = inner[key]
                    kept[key] = member if clean is None else clean(member)
            return kept

        return clean_struct
    if pa.types.is_map(kind):
        clean = _cleaner(kind.item_type)
        if clean is None:
            return None
        return lambda value: {key: member if member is None else clean(member) for key, member in value.items()}
    if _is_list(kind):
        clean = _cleaner(kind.value_type)
        if clean is None:
            return None
        return lambda value: [item if item is None else clean(item) for item in value]
    return None


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _node_count(array: pa.Array) -> int:
    """At least as many values as there are in the array; looks at no data."""
    if isinstance(array, pa.StructArray):
        return len(array) + sum(_node_count(array.field(i)) for i in range(array.type.num_fields))
    if _is_list(array.type) or pa.types.is_map(array.type):
        return len(array) + _node_count(array.values)
    return len(array)


def _weights(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of text and number of values of each of the array's N slots; int64 [N] each."""
    ones = np.ones(len(array), np.int64)
    if isinstance(array, pa.StructArray):
        size, nodes = np.sum([(0 * ones, ones), *map(_weights, array.flatten())], axis=0)
        return size, nodes
    if _is_list(array.type) or pa.types.is_map(array.type):
        fixed = pa.types.is_fixed_size_list(array.type)
        lengths = ones * array.type.list_size if fixed else _filled(array.value_lengths())
        if fixed:
            lengths = np.where(_filled(array.is_valid()) > 0, lengths, 0)
        ends = np.cumsum(lengths)
        inner = [np.concatenate([[0], np.cumsum(weight)]) for weight in _weights(array.flatten())]
        size, nodes = (weight[ends] - weight[ends - lengths] for weight in inner)
        return size, nodes + 1
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        return _filled(pc.binary_length(array)), ones  # pyright: ignore[reportAttributeAccessIssue]
    return 8 * ones, ones


def _filled(counts: pa.Array) -> np.ndarray:
    return counts.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)


# JSON


def _read_jsonl(block: Block, columns: Sequence[str] | None) -> Iterator[Value]:
    with block.path.open("rb") as file:
        for line in _lines(file, block.start, block.end):
            yield parse_row(line)


def _lines(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """The lines that begin in bytes [start, end), blank ones left out, the oversized cut off."""
    if start:
        # the line that reaches into this block belongs to the one before
        file.seek(start - 1)
        _finish_line(file)
    while file.tell() < end:
        line = file.readline(budget.MAX_ROW_BYTES + 1)
        if len(line) > budget.MAX_ROW_BYTES and not line.endswith(b"\n"):
            _finish_line(file)
        if line.strip(b" \t\r\n"):
            yield line


def _finish_line(file: BinaryIO) -> None:
    while (piece := file.readline(BLOCK_BYTES)) and not piece.endswith(b"\n"):
        pass


def _read_json(block: Block, columns: Sequence[str] | None) -> Iterator[Value]:
    with block.path.open("rb") as file:
        if isinstance(block.path, Path) and block.end:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                yield from map(parse_row, _elements(text, block.path))
        else:
            yield from map(parse_row, _elements(file.read(), block.path))


# strings are stepped over whole, so that the brackets and commas left are structure
_STRUCTURE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]', re.DOTALL)
_OPENING = re.compile(rb"\s*\[")


def _elements(text: bytes | mmap.mmap, path: File) -> Iterator[bytes]:
    """The elements of a JSON array, unparsed: each is judged by itself, so that a bad row costs one row."""
    opening = _OPENING.match(text)
    start = opening.end() if opening else len(text)
    depth = 1
    empty = True
    for match in _STRUCTURE.finditer(text, start):
        mark = text[match.start()]
        if mark in b"[{":
            depth += 1
        elif mark in b"]}":
            depth -= 1
        if depth == 0 or (depth == 1 and mark in b","):
            element = text[start : match.start()]
            empty = empty and depth == 0 and not element.strip()
            if not empty:
                yield element
            start = match.end()
        if depth == 0:
            break
    if depth or text[start:].strip():
        raise ValueError(f"{path} is not one complete JSON array of rows: cut short, or JSONL under the name .json?")


def parse_row(text: bytes) -> Value:
    """One row of JSON text: an object, or the reason why not."""
    if error := budget.check_text_size(text):
        return error
    try:
        value = loads(text.strip().decode("utf-8"))
    except UnicodeDecodeError as error:
        return ProtocolError("undecodable", "row", f"text is not UTF-8: {error}")
    except ProtocolError as error:
        return error
    if not isinstance(value, dict):
        return ProtocolError("schema", "row", f"the row is not an object but {type(value).__name__}")
    return value


READERS: dict[str, Callable[[Block, Sequence[str] | None], Iterator[Value]]] = {
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
}


def _count_footer(block: Block) -> Iterator[int]:
    return (before.rows or 0 for before in list_blocks(block.path) if before.start < block.start)


def _count_lines(block: Block) -> Iterator[int]:
    with block.path.open("rb") as file:
        for _ in _lines(file, 0, block.start):
            yield 1


# a JSON file is one block, and nothing lies before it
_COUNTERS = {".parquet": _count_footer, ".arrow": _count_footer, ".jsonl": _count_lines}
