"""`over_long="split"`: documents that are longer than a row, in streams of every kind."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from shards import example, number_of, prepared, rows
from test_data_datamodule import Bytes, mark, marks, talk

from smi.data import SMIDataModule
from smi.data.batch import PackedBatch
from smi.data.prepared import PreparedSource
from smi.data.shards import ShardFile
from smi.protocol.conversation import Conversation
from smi.protocol.tokens import BlockType

LENGTHS = [20, 300, 64, 65, 30, 128, 40, 1000, 12, 50, 63, 129]


class Talks:
    """Conversations of several turns, some of them long; none is held out."""

    name = "talks"

    def conversations(self, epoch: int, held_out: bool):
        for number in range(12):
            yield Conversation(
                [m for turn in range(1 + number % 4) for m in talk(f"{number} {turn}", number * 5).messages]
            )


def long_source(folder: Path) -> PreparedSource:
    shard = ShardFile(folder / "long.parquet")
    examples = [example(number, length) for number, length in enumerate(LENGTHS)]
    for first in range(0, 12, 4):
        shard.append(rows(examples[first : first + 4], first))
    return PreparedSource("long", [folder / "long.parquet"], 1.0, 1, ["long", shard.close()["sha256"]])


def module(train, **options) -> SMIDataModule:
    settings = {"steps": 12, "max_length": 50, "pack_length": 64, "window": 5, "over_long": "split"}
    return SMIDataModule(Bytes(), train, **settings | options)


def epoch(data: SMIDataModule) -> list[PackedBatch]:
    """The batches of the first epoch."""
    batches = []
    total = 0
    for batch in data.train_dataloader():
        batches.append(batch)
        total += batch.documents
        if total == 12:
            return batches
    raise AssertionError("the epoch did not end with a pack")


@pytest.mark.parametrize("workers", [0, 2])
def test_long_documents_get_rows_of_their_own(tmp_path: Path, workers: int) -> None:
    data = module(long_source(tmp_path), steps=40, workers=workers)
    batches = epoch(data)
    found = {}
    for batch in batches:
        bounds = batch.cu_seqlens.tolist()
        for start, end in itertools.pairwise(bounds):
            ids = batch.input_ids[0, start:end].tolist()
            found[number_of(ids)] = ids
        if batch.tokens > 64:
            assert batch.documents == 1
            assert batch.pieces[-1] == batch.tokens
            assert all(0 < b - a <= 50 for a, b in itertools.pairwise((0, *batch.pieces)))
            assert batch.capacity == 50 * len(batch.pieces)
        else:
            assert batch.pieces == ()
            assert batch.capacity == 64
    # every token of every document, and nothing twice
    assert {number: len(ids) for number, ids in found.items()} == dict(enumerate(LENGTHS))
    assert all(ids == example(number, len(ids)).input_ids.tolist() for number, ids in found.items())
    assert sum(batch.tokens for batch in batches) == sum(LENGTHS)


def test_they_are_counted(tmp_path: Path) -> None:
    from rich.console import Console

    data = module(long_source(tmp_path), steps=12, workers=0)
    stream = data.packs()
    documents = []
    while len(documents) < 12:
        documents += next(stream)
    account = data.account.sources["long"]
    assert account.in_pieces == sum(document.tokens > 64 for document in documents) == 5
    assert account.rejected["too_long"] == 0
    console = Console(width=200)
    with console.capture() as capture:
        data.report(console)
    assert "in pieces" in capture.get()
    reading = module(Talks(), steps=12, max_length=64)
    list(itertools.islice(reading.packs(), 6))
    assert reading.account.sources["talks"].in_pieces > 0


def test_other_data_is_not_moved(tmp_path: Path) -> None:
    """Where nothing is too long, the order is that of over_long="reject"."""
    source = prepared(tmp_path, 40)
    kept, split = (
        marks(module(source, max_length=100, pack_length=100, over_long=how, steps=20)) for how in ("reject", "split")
    )
    assert kept == split


def test_rejected_without_it() -> None:
    data = module(Talks(), over_long="reject", max_length=64)
    list(itertools.islice(data.packs(), 3))
    account = data.account.sources["talks"]
    assert account.rejected["too_long"] > 0
    assert account.in_pieces == 0


def test_cut_between_transmissions() -> None:
    data = module(Talks(), steps=30, max_length=64)
    seen = 0
    for batch in itertools.islice(data.train_dataloader(), 20):
        for end in batch.pieces[:-1]:
            # block types are those of the next token
            before, after = batch.block_types[0, end - 2 : end].tolist()
            if before == BlockType.EOT and after != BlockType.EOT:
                seen += 1
    assert seen > 0


@pytest.mark.parametrize("kind", ["prepared", "compiled"])
def test_ranks_and_resuming(tmp_path: Path, kind: str) -> None:
    def fresh(**options) -> SMIDataModule:
        source = long_source(tmp_path) if kind == "prepared" else Talks()
        return module(source, workers=0, **options)

    whole = marks(fresh(steps=10))
    loader = fresh(steps=10).train_dataloader()
    first = [mark(batch) for batch in itertools.islice(iter(loader), 4)]
    position = loader.state_dict()
    again = fresh(steps=10).train_dataloader()
    again.load_state_dict(position)
    assert first + [mark(batch) for batch in again] == whole


def test_validation_reads_them_too(tmp_path: Path) -> None:
    data = module(prepared(tmp_path, 20), val=long_source(tmp_path), workers=0, val_batches=50)
    batches = data.val_dataloader()
    assert sum(batch.tokens for batch in batches) == sum(LENGTHS)
    assert sorted(batch.tokens for batch in batches if batch.pieces) == [65, 128, 129, 300, 1000]


def test_a_longer_one_than_was_told_is_an_error(tmp_path: Path) -> None:
    data = module(long_source(tmp_path), over_long="reject", workers=0)
    with pytest.raises(ValueError, match="more than the capacity of 64"):
        list(data.train_dataloader())


def test_the_description_knows_them(tmp_path: Path) -> None:
    description = module(long_source(tmp_path), workers=0).describe()
    assert 0.5 < description.fill <= 1
    assert np.sum(description.facts.tokens) == sum(LENGTHS)


@pytest.mark.parametrize("how", ["reject", "split"])
def test_preparation_takes_what_training_takes(how: str) -> None:
    from smi.data.recipe import read_recipe
    from smi.prepare import make_plan

    plan = make_plan(read_recipe("rwkv7_pilot", ["tokenizer=compact", f"data.over_long={how}"]))
    limit = 2048 if how == "reject" else None
    assert plan.max_length == limit
    assert plan.compiler().max_length == (limit or sys.maxsize)
