"""Small prepared sources for tests: shards of numbered documents, made without a tokenizer's help."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from smi.data.prepared import PreparedSource
from smi.data.shards import SCHEMA, ShardFile, ids_column, runs
from smi.protocol.codec import Example

# structural ids of the tokenizer `Bytes` in test_data_datamodule: USR opens the input, OUT the answer, then EOS
USR, OUT, EOS = 259, 262, 266


def example(number: int, length: int) -> Example:
    """Document `number`: its number in two bytes, then an answer; `length` tokens, 6 at least."""
    answer = length - 5
    ids = [USR, number // 256, number % 256, OUT, *((number * 7 + i) % 256 for i in range(answer)), EOS]
    types = [4] * 3 + [7] * (answer + 1) + [10]
    return Example(np.array(ids, np.int32), np.array([kind != 4 for kind in types]), np.array(types, np.uint8))


def number_of(ids: list[int]) -> int:
    return ids[1] * 256 + ids[2]


def rows(examples: list[Example], first: int) -> pa.RecordBatch:
    starts = np.zeros(267, bool)
    starts[256:] = True
    numbers = range(first, first + len(examples))
    columns = {
        "source": ["s"] * len(examples),
        "input_ids": ids_column(examples),
        "blocks": runs(examples, starts),
        "tokens": pa.array([e.input_ids.size for e in examples], pa.int32()),
        "supervised_tokens": pa.array([int(e.loss_mask[1:].sum()) for e in examples], pa.int32()),
        # spread evenly over the held-out shares
        "fingerprint": pa.array([np.random.default_rng(n).bytes(32) for n in numbers], pa.binary(32)),
    }
    empty = {name: pa.nulls(len(examples), pa.string()) for name in SCHEMA.names if name not in columns}
    return pa.record_batch({name: (columns | empty)[name] for name in SCHEMA.names}, schema=SCHEMA)


def prepared(
    folder: Path, count: int, *, files: int = 1, group: int = 8, first: int = 0, epochs: int = 1, name: str = "s"
) -> PreparedSource:
    """`count` documents from number `first` on, in so many files, with row groups of `group`."""
    lengths = 6 + np.random.default_rng(count).integers(0, 60, count)
    examples = [example(first + i, length) for i, length in enumerate(lengths.tolist())]
    paths, hashes = [], []
    for number, part in enumerate(np.array_split(np.arange(count), files)):
        paths.append(folder / f"{name}-{number}.parquet")
        groups = [part[i : i + group].tolist() for i in range(0, part.size, group)]
        shard = ShardFile(paths[-1])
        for members in groups:
            shard.append(rows([examples[i] for i in members], first + members[0]))
        hashes.append(shard.close()["sha256"])
    return PreparedSource(name, paths, 1.0, epochs, [name, epochs, hashes])
