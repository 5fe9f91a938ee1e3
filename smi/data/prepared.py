"""Opening what was prepared: our mixtures, and Parquet that the protocol's reference project compiled (format 2).

Everything is checked before the first document comes out: a mixture that was changed, or compiled for another
tokenizer or with other options, is refused with both values named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from smi.data.manifest import Manifest, check_files, check_fit, check_shards, read_manifest
from smi.data.pipeline import Document, DocumentSource
from smi.data.shards import examples, identity
from smi.data.sources import Block, Location
from smi.protocol.codec import Example
from smi.protocol.tokens import BlockType
from smi.tokenizer import Tokenizer

IGNORE = -100


def open_mixture(
    path: str | Path, tokenizer: Tokenizer, max_length: int | None, *, mirror: str | Path | None = None
) -> list[DocumentSource]:
    """The sources of a prepared mixture.

    Args:
        path: the directory of a mixture, or a Parquet file of the reference project's format 2.
        tokenizer: the run's; the mixture must have been compiled with the same vocabulary and structural ids.
        max_length: the run's, None where it takes any document; the mixture's must be the same.
        mirror: directory of the source files; those that are there must be the ones that were prepared.

    Raises ValueError for what is not there, not whole or does not fit; all of it named.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        return [_open_precompiled(path, tokenizer)]
    manifest = read_manifest(path)
    check_fit(manifest, path, tokenizer, {"max_length": max_length})
    check_shards(manifest, path)
    if mirror is not None:
        check_files(manifest, Path(mirror))
    return [source for name in manifest.sources if (source := _source(manifest, path, name)).shards]


def _source(manifest: Manifest, directory: Path, name: str) -> PreparedSource:
    shards = [shard for shard in manifest.shards if shard["source"] == name]
    epochs = manifest.settings["sources"][name]["epochs"]
    return PreparedSource(
        name=name,
        shards=[directory / shard["file"] for shard in shards],
        weight=float(epochs * sum(shard["supervised_tokens"] for shard in shards)),
        epochs=epochs,
        identity=[name, epochs, [shard["sha256"] for shard in shards]],
    )


@dataclass(frozen=True)
class PreparedSource:
    """One source of a mixture; an epoch goes `epochs` times through its rows."""

    name: str
    shards: list[Path]
    weight: float
    epochs: int
    identity: list[Any]

    def documents(self, order: str) -> Iterator[Document]:
        for epoch in range(self.epochs):
            for block in _shuffled(self.shards, f"{order}/{epoch}"):
                for rows in _read(block, ["input_ids", "blocks", "fingerprint"]):
                    marks = rows.column("fingerprint").to_pylist()
                    for i, (example, mark) in enumerate(zip(examples(rows), marks, strict=True)):
                        yield Document(example, mark, Location(self.name, block.path.name, block, i))


def _shuffled(files: list[Path], order: str) -> list[Block]:
    groups = [(file, pq.read_metadata(file).num_row_groups) for file in files]
    blocks = [Block(file, group, group + 1) for file, count in groups for group in range(count)]
    Random(order).shuffle(blocks)
    return blocks


def _read(block: Block, columns: list[str]) -> Iterator[pa.RecordBatch]:
    assert isinstance(block.path, Path)
    with pq.ParquetFile(block.path, memory_map=True) as file:
        rows = file.read_row_group(block.start, columns=columns, use_threads=False)
        yield from rows.combine_chunks().to_batches()


def _open_precompiled(path: Path, tokenizer: Tokenizer) -> PrecompiledSource:
    """A Parquet file with a sidecar manifest beside it."""
    beside = (path.with_name(f"{path.name}.manifest.json"), path.with_suffix(".manifest.json"))
    sidecar = next((file for file in beside if file.is_file()), None)
    if not path.is_file() or sidecar is None:
        lacking = path if not path.is_file() else beside[0]
        raise ValueError(f"{lacking} is not there: compiled Parquet is read together with its manifest")
    try:
        manifest = json.loads(sidecar.read_text(encoding="utf-8"))
        wanted = {name: manifest[name] for name in ("output_sha256", "tokenizer", "tokenizer_revision")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{sidecar} cannot be read as a manifest: {error!r}") from error
    found = identity(path)["sha256"]
    if wanted["output_sha256"] != found:
        raise ValueError(f"{path} has the sha256 {found}, and {sidecar.name} says {wanted['output_sha256']}")
    if missing := {"input_ids", "labels"} - set(pq.read_schema(path).names):
        raise ValueError(f"{path} has no column {', '.join(sorted(missing))}")
    return PrecompiledSource(path.stem, path, tokenizer, wanted)


@dataclass(frozen=True)
class PrecompiledSource:
    """Rows of `input_ids` and `labels` (the id itself where it is supervised, -100 elsewhere), compiled by others.

    What such a file says of its tokenizer is a name and a revision (`origin`); the ids are held against ours row by
    row, and one that is no document of this vocabulary is an error.
    """

    name: str
    path: Path
    tokenizer: Tokenizer
    origin: Mapping[str, str]
    epochs: int = field(default=1, init=False)

    @property
    def weight(self) -> float:
        """Rows stand for supervised tokens: it is the only source."""
        return float(pq.read_metadata(self.path).num_rows)

    @property
    def shards(self) -> list[Path]:
        return [self.path]

    @property
    def identity(self) -> list[Any]:
        return [self.name, dict(self.origin)]

    def documents(self, order: str) -> Iterator[Document]:
        types = np.full(self.tokenizer.vocab_size, -1, np.int16)
        for kind in BlockType:
            types[self.tokenizer.eos_id if kind is BlockType.EOS else self.tokenizer.structural.id(kind)] = kind
        for block in _shuffled(self.shards, order):
            for rows in _read(block, ["input_ids", "labels"]):
                for i in range(rows.num_rows):
                    where = Location(self.name, self.path.name, block, i)
                    ids, labels = (rows.column(name)[i].values.to_numpy() for name in ("input_ids", "labels"))
                    example = self._example(ids.astype(np.int32), labels, types, where)
                    yield Document(example, sha256(example.input_ids.tobytes()).digest(), where)

    def _example(self, ids: np.ndarray, labels: np.ndarray, types: np.ndarray, where: Location) -> Example:
        if not ids.size or ids.min() < 0 or ids.max() >= types.size or types[ids[0]] < 0:
            raise ValueError(
                f"{where} is no document of the tokenizer {self.tokenizer.name!r}: it should begin with a structural "
                f"token and hold ids below {types.size:,}; it was compiled with {self.origin['tokenizer']!r} at "
                f"revision {self.origin['tokenizer_revision']!r}"
            )
        mask = labels != IGNORE
        if labels.size != ids.size or (labels[mask] != ids[mask]).any():
            raise ValueError(f"{where} has labels that are neither its ids nor {IGNORE}")
        # a token is of the type that was opened last
        opened = np.maximum.accumulate(np.where(types[ids] >= 0, np.arange(ids.size), 0))
        return Example(ids, mask, types[ids[opened]].astype(np.uint8))
