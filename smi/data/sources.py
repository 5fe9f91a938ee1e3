"""Where rows come from: Parquet, JSONL and JSON files, and generators of conversations."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, runtime_checkable

import pyarrow as pa
import pyarrow.parquet as pq

from smi.protocol.conversation import Conversation
from smi.protocol.payloads import loads
from smi.protocol.stream import ProtocolError

# one JSONL block: small enough to shuffle a file well, large enough that seeking costs nothing
BLOCK_BYTES = 1 << 20
# a row of text past this size is rejected before it is parsed
MAX_ROW_BYTES = 16 << 20
PARQUET_BATCH_ROWS = 256


@dataclass(frozen=True)
class SourceSpec:
    """A source of rows in files.

    Args:
        name: what accounts and reports call it.
        files: a path or glob pattern (`**` allowed) or several, absolute or relative to the root given to the
            reader; the suffix decides the format: .parquet, .jsonl, .json (one array).
        adapter: name of the function in `smi.data.adapters` that turns a row into a conversation.
        weight: share of the mixture, by supervised tokens, relative to the other sources' weights.
        quota: supervised tokens that an epoch takes from this source; its weight too where none is given.
    """

    name: str
    files: str | Sequence[str]
    adapter: str
    weight: float | None = None
    quota: int | None = None


@runtime_checkable
class ConversationSource(Protocol):
    """A source that makes conversations itself, such as a synthetic world; it may be endless.

    Optional attributes `weight` and `quota` mean what they mean in `SourceSpec`.
    """

    @property
    def name(self) -> str:
        """What accounts and reports call it."""
        ...

    def conversations(self, epoch: int, held_out: bool) -> Iterable[Conversation]:
        """The conversations of one epoch, always the same ones; `held_out` ones are not among the others."""
        ...


Source: TypeAlias = SourceSpec | ConversationSource


@dataclass(frozen=True, slots=True)
class Block:
    """A run of rows that is read as a whole: a Parquet row group, a stretch of a JSONL file, a JSON file.

    `start` and `end` are row-group numbers in Parquet and byte offsets elsewhere. A line belongs to the block
    in which it begins.
    """

    path: Path
    start: int
    end: int

    def first_row(self) -> int:
        """How many rows of the file lie before this block.

        Counts lines in JSONL: made for messages, too slow for every row.
        """
        if self.path.suffix == ".parquet":
            with _open_parquet(self.path) as file:
                return sum(file.metadata.row_group(group).num_rows for group in range(self.start))
        if not self.start:
            return 0
        with self.path.open("rb") as file:
            return sum(1 for _ in _lines(file, 0, self.start))


@dataclass(frozen=True, slots=True)
class Location:
    """Where a row was found. `file` is empty for a source that makes its rows itself."""

    source: str
    file: str
    block: Block | None
    offset: int

    @property
    def row(self) -> int:
        """Number of the row in its file, from 0; blank lines are not rows."""
        return self.offset + (self.block.first_row() if self.block else 0)

    def __str__(self) -> str:
        return f"{self.source}: {self.file} row {self.row}" if self.file else f"{self.source}: row {self.row}"


@dataclass(frozen=True, slots=True)
class Row:
    """One raw row, or why it could not be read."""

    where: Location
    value: dict[str, Any] | ProtocolError


def find_files(spec: SourceSpec, root: str | Path = ".") -> list[Path]:
    """The files of a source: patterns in the order given, their matches sorted, each file once.

    Raises:
        ValueError: a pattern that matches nothing, or a file of unknown format; both named.
    """
    found: dict[Path, None] = {}
    for pattern in [spec.files] if isinstance(spec.files, str) else spec.files:
        path = Path(root, pattern)
        # a plain path may hold characters that glob would read as a pattern
        matches = [path] if path.is_file() else [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        files = [match for match in matches if match.is_file()]
        if not files:
            raise ValueError(
                f"source {spec.name!r}: no file matches {pattern!r} under {Path(root).absolute()}; "
                "check the spelling, and the root that patterns are relative to"
            )
        for file in files:
            if file.suffix not in _READERS:
                known = ", ".join(_READERS)
                raise ValueError(f"source {spec.name!r}: {file} is of no known format; known are {known}")
            found[file] = None
    if not found:
        raise ValueError(f"source {spec.name!r} names no files")
    return list(found)


def list_blocks(path: Path) -> list[Block]:
    """The blocks of a file, in file order. Reads footers and sizes, never rows.

    Raises:
        ValueError: a Parquet file that cannot be opened, named.
    """
    if path.suffix == ".parquet":
        with _open_parquet(path) as file:
            return [Block(path, group, group + 1) for group in range(file.num_row_groups)]
    size = path.stat().st_size
    if path.suffix == ".jsonl":
        return [Block(path, start, min(start + BLOCK_BYTES, size)) for start in range(0, size, BLOCK_BYTES)]
    return [Block(path, 0, size)]


def missing_columns(path: Path, needs: Sequence[Sequence[str]]) -> tuple[str, list[str]] | None:
    """Check a Parquet file's columns without reading rows; other formats name theirs row by row.

    Args:
        path: the file.
        needs: groups of columns, of which the file must have at least one each.

    Returns:
        None where all is well, else (what is missing, the columns there are).
    """
    if path.suffix != ".parquet":
        return None
    with _open_parquet(path) as file:
        names: list[str] = file.schema_arrow.names
    lacking = [" or ".join(group) for group in needs if not set(group) & set(names)]
    return (", ".join(lacking), names) if lacking else None


def read_block(
    block: Block, source: str, root: str | Path = ".", columns: Sequence[str] | None = None
) -> Iterator[Row]:
    """The rows of a block, in file order.

    A row that cannot be read (not JSON, invalid UTF-8, not an object, too large) comes out as its error, and
    the rows after it are read on.

    Args:
        block: from `list_blocks`.
        source: name that each row carries.
        root: file names are given relative to it, where they lie under it.
        columns: read only these columns of Parquet, as far as the file has them; None reads all.

    Raises:
        ValueError: the file as a whole is damaged; it is named.
    """
    path = block.path
    file = str(path.relative_to(root)) if path.is_relative_to(root) else os.fspath(path)
    for offset, value in enumerate(_READERS[path.suffix](block, columns)):
        yield Row(Location(source, file, block, offset), value)


def read_rows(spec: SourceSpec, root: str | Path = ".", columns: Sequence[str] | None = None) -> Iterator[Row]:
    """All rows of a source, file by file, in file order. Arguments and errors as in `read_block`."""
    for path in find_files(spec, root):
        for block in list_blocks(path):
            yield from read_block(block, spec.name, root, columns)


_Value: TypeAlias = dict[str, Any] | ProtocolError


def _read_parquet(block: Block, columns: Sequence[str] | None) -> Iterator[_Value]:
    with _open_parquet(block.path) as file:
        schema = file.schema_arrow
        names = schema.names if columns is None else [name for name in schema.names if name in columns]
        nested = [name for name in names if _holds_struct(schema.field(name).type)]
        batches = file.iter_batches(PARQUET_BATCH_ROWS, row_groups=range(block.start, block.end), columns=names)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"{block.path}: cannot read row group {block.start}: {error}") from error
            for value in _batch_rows(batch):
                if isinstance(value, dict):
                    for name in nested:
                        value[name] = _without_nulls(value[name])
                yield value


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be opened as Parquet: {error}") from error


def _batch_rows(batch: pa.RecordBatch) -> Iterator[_Value]:
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        # somewhere in the batch: find the rows that have it, keep the others
        pass
    for index in range(batch.num_rows):
        try:
            yield batch.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield ProtocolError("undecodable", "row", f"text is not UTF-8: {error}")


def _holds_struct(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) or any(_holds_struct(kind.field(i).type) for i in range(kind.num_fields))


def _without_nulls(value: Any) -> Any:
    """Drop null members of structs.

    Arrow gives all structs of a column one type: each row gains the keys of every other row, as nulls. A null
    that was really there is lost with them; sources that need theirs carry JSON text.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(member) for key, member in value.items() if member is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _read_jsonl(block: Block, columns: Sequence[str] | None) -> Iterator[_Value]:
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
        line = file.readline(MAX_ROW_BYTES + 1)
        if len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
            _finish_line(file)
        if line.strip(b" \t\r\n"):
            yield line


def _finish_line(file: BinaryIO) -> None:
    while (piece := file.readline(BLOCK_BYTES)) and not piece.endswith(b"\n"):
        pass


def _read_json(block: Block, columns: Sequence[str] | None) -> Iterator[_Value]:
    for element in _elements(block.path.read_bytes(), block.path):
        yield parse_row(element)


# strings are stepped over whole, so that the brackets and commas left are structure
_STRUCTURE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]', re.DOTALL)


def _elements(text: bytes, path: Path) -> Iterator[bytes]:
    """The elements of a JSON array, unparsed: each is judged by itself, so that a bad row costs one row."""
    opening = re.compile(rb"\s*\[").match(text)
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


def parse_row(text: bytes) -> _Value:
    """One row of JSON text: an object, or the reason why not."""
    if len(text) > MAX_ROW_BYTES:
        return ProtocolError("over_budget", "row", f"the row is larger than {MAX_ROW_BYTES:,} bytes")
    try:
        value = loads(text.strip().decode("utf-8"))
    except UnicodeDecodeError as error:
        return ProtocolError("undecodable", "row", f"text is not UTF-8: {error}")
    except ProtocolError as error:
        return error
    if not isinstance(value, dict):
        return ProtocolError("schema", "row", f"the row is not an object but {type(value).__name__}")
    return value


_READERS = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".json": _read_json}
