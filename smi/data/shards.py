"""Shards of a prepared mixture: Parquet files that appear whole or not at all.

A shard grows as Parquet under a temporary name, one row group at a time, and in a spool beside it, where each is
flushed to the disk before it counts; when the shard is full it is flushed and renamed. A killed run makes the Parquet
again from the spool, so it has lost at most the row group that it was collecting.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from smi.data.hub import HubFile
from smi.data.readers import File
from smi.files import sync
from smi.protocol.codec import Example

COMPRESSION_LEVEL = 3
# the ids of a row group in one page: compressed together they take less room and a tenth less time to read
PAGE_BYTES = 4 << 20


def _member(name: str, kind: pa.DataType) -> pa.Field:
    # that no member is null halves the time it takes to read a list
    return pa.field(name, kind, nullable=False)


_RUN = pa.struct([_member("type", pa.uint8()), _member("supervised", pa.bool_()), _member("tokens", pa.int32())])

SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("input_ids", pa.list_(_member("element", pa.int32()))),
        # runs of tokens, in order: what block they are of, and whether they are supervised as targets
        ("blocks", pa.list_(_member("element", _RUN))),
        ("tokens", pa.int32()),
        ("supervised_tokens", pa.int32()),
        # sha256 of the canonical conversation; what is held out for validation depends on it alone
        ("fingerprint", pa.binary(32)),
        # the canonical conversation, in the columns that the adapter `messages` reads
        ("messages_json", pa.string()),
        ("tools_json", pa.string()),
        ("smi_ctrl", pa.string()),
        ("smi_caps", pa.string()),
    ]
)
"""Columns of a shard."""

# the upper halves of ids are nearly all alike: apart from the lower ones they take a fifth less room, and less time
_ENCODINGS = {"input_ids.list.element": "BYTE_STREAM_SPLIT"}
_DICTIONARIES = ["source", "blocks.list.element.type", "blocks.list.element.supervised", "tools_json", "smi_ctrl"]


def runs(examples: list[Example], starts: np.ndarray) -> pa.Array:
    """The column `blocks` of some examples.

    Args:
        examples: compiled streams.
        starts: bool [vocabulary]; which ids open a run: the structural ones and the end of a sequence.
    """
    if not examples:
        return pa.array([], SCHEMA.field("blocks").type)
    ids = np.concatenate([example.input_ids for example in examples])
    opens = starts[ids]
    lengths = np.array([example.input_ids.size for example in examples])
    ends = np.cumsum(lengths)
    opens[0] = True
    opens[ends[:-1]] = True
    first = np.flatnonzero(opens)
    kinds = np.concatenate([example.block_types for example in examples])[first]
    supervised = np.concatenate([example.loss_mask for example in examples])[first]
    tokens = np.diff(first, append=ids.size).astype(np.int32)
    offsets = np.searchsorted(first, np.concatenate(([0], ends))).astype(np.int32)
    members = pa.StructArray.from_arrays([pa.array(kinds), pa.array(supervised), pa.array(tokens)], fields=list(_RUN))
    return pa.ListArray.from_arrays(pa.array(offsets), members, type=SCHEMA.field("blocks").type)


def ids_column(examples: list[Example]) -> pa.Array:
    """The column `input_ids` of some examples."""
    offsets = np.cumsum([0, *(example.input_ids.size for example in examples)], dtype=np.int32)
    values = np.concatenate([np.empty(0, np.int32), *(example.input_ids for example in examples)])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=SCHEMA.field("input_ids").type)


def examples(batch: pa.RecordBatch) -> list[Example]:
    """The examples of a batch with the columns `input_ids` and `blocks`; their ids are views into it."""
    ids, blocks = batch.column("input_ids"), batch.column("blocks")
    values = ids.values.to_numpy()
    bounds = ids.offsets.to_numpy()
    members = blocks.flatten()
    tokens = members.field("tokens").to_numpy()
    kinds = np.repeat(members.field("type").to_numpy(), tokens)
    mask = np.repeat(members.field("supervised").to_numpy(zero_copy_only=False), tokens)
    head = int(bounds[0])
    return [
        Example(values[start:end], mask[start - head : end - head], kinds[start - head : end - head])
        for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]


class Spool:
    """The shard that is being made: row groups behind each other in one file, cut back to what is known to be good.

    Args:
        path: the file; made where it is not there.
        size: bytes of it that count. What a killed run wrote behind them goes.
    """

    def __init__(self, path: Path, size: int = 0) -> None:
        self.path = path
        self._file = path.open("ab")
        if self._file.tell() < size:
            raise ValueError(f"{path} has {self._file.tell():,} bytes of {size:,}: it was changed by something else")
        self._file.truncate(size)
        self.size = size

    def append(self, rows: pa.RecordBatch) -> None:
        """Add a row group; on return it is on the disk."""
        self._file.write(rows.serialize())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.size = self._file.tell()

    def row_groups(self) -> Iterator[pa.RecordBatch]:
        """What it holds, in order."""
        with pa.OSFile(str(self.path)) as file:
            while file.tell() < self.size:
                yield pa.ipc.read_record_batch(pa.ipc.read_message(file), SCHEMA)

    def clear(self) -> None:
        """Empty it."""
        self._file.truncate(0)
        self.size = 0

    def close(self) -> None:
        self._file.close()


class ShardFile:
    """A shard under a temporary name, one row group after another; nothing of it counts before `close`.

    Args:
        path: what it will be called; an existing file of the name is replaced then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._draft = path.with_name(f".{path.name}.partial")
        self._file = self._draft.open("wb")
        self._writer = pq.ParquetWriter(
            self._file,
            SCHEMA,
            compression="zstd",
            compression_level=COMPRESSION_LEVEL,
            use_dictionary=_DICTIONARIES,  # pyright: ignore[reportArgumentType]
            column_encoding=_ENCODINGS,
            data_page_size=PAGE_BYTES,
            # least and greatest texts serve nobody, and cost a quarter of the time
            write_statistics=["tokens", "supervised_tokens"],  # pyright: ignore[reportArgumentType]
        )
        self._counts = np.zeros(3, np.int64)

    def append(self, rows: pa.RecordBatch) -> None:
        """Add a row group."""
        self._writer.write_batch(rows, row_group_size=rows.num_rows)
        sums = (rows.column(name).to_numpy().sum() for name in ("tokens", "supervised_tokens"))
        self._counts += [rows.num_rows, *sums]

    def close(self) -> dict[str, Any]:
        """Give it its name, whole and on the disk.

        Returns:
            file, rows, tokens, supervised_tokens, bytes and sha256.
        """
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._draft, self.path)
        sync(self.path.parent)
        rows, tokens, supervised = self._counts.tolist()
        content = {"rows": rows, "tokens": tokens, "supervised_tokens": supervised}
        return {"file": self.path.name, **content, **identity(self.path)}

    def abandon(self) -> None:
        """Leave nothing of it."""
        # on a full disk there is no room for the end of the file either
        with contextlib.suppress(OSError):
            self._writer.close()
        with contextlib.suppress(OSError):
            self._file.close()
        self._draft.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all."""
    draft = path.with_name(f".{path.name}.partial")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    os.replace(draft, path)
    sync(path.parent)


def identity(path: File) -> dict[str, Any]:
    """What a file is, by its content: bytes and sha256 (hex); of a small file on the hub, git's hash instead."""
    if isinstance(path, HubFile):
        kind, _, digest = path.digest.partition(":")
        return {"bytes": path.size, kind: digest}
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def identities(paths: Sequence[File]) -> list[dict[str, Any]]:
    """`identity` of many files, read side by side."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(identity, paths))
