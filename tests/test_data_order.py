"""A prepared mixture as a stream: every document once, whatever the files, ranks and workers; found again anywhere."""

import itertools
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shards import example, number_of, prepared
from test_data_datamodule import Bytes, Killed, Recorder, SaveAt, mark, marks, threads, trainer_for

from smi.data import SMIDataModule
from smi.data.batch import PackedBatch, pack
from smi.data.order import Corpus, Place, Shuffle, epoch_order
from smi.data.prepared import PreparedSource
from smi.data.reading import read_row_group

DOCUMENTS = 150


def module(train: Any, **options: Any) -> SMIDataModule:
    settings: dict[str, Any] = {"steps": 10, "max_length": 100, "pack_length": 128, "window": 16, "workers": 0}
    return SMIDataModule(Bytes(), train, **settings | options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, PreparedSource]:
    """The same documents in 1, 3 and 12 files."""
    return {files: prepared(tmp_path_factory.mktemp(f"files{files}"), DOCUMENTS, files=files) for files in (1, 3, 12)}


@pytest.fixture
def source(folders: dict[int, PreparedSource]) -> PreparedSource:
    return folders[3]


def numbers(batch: PackedBatch) -> list[int]:
    ids = batch.input_ids[0].tolist()
    return [number_of(ids[a:b]) for a, b in itertools.pairwise(batch.cu_seqlens.tolist())]


def epoch_of(data: SMIDataModule, rank: int = 0, world_size: int = 1, epoch: int = 0) -> list[PackedBatch]:
    """One rank's batches of an epoch."""
    begun: list[int] = []
    stream = data.batches(Place(epoch), rank, world_size, lambda _, packs: begun.append(packs))
    taken: list[PackedBatch] = []
    # threads plan ahead: the next epoch may begin before this one is read
    while len(begun) < 2 or rank + len(taken) * world_size < begun[1]:
        taken.append(next(stream))
    while rank + (len(taken) - 1) * world_size >= begun[1]:
        taken.pop()
    stream.close()
    return taken


@pytest.mark.parametrize("files", [1, 3, 12])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_document_once_an_epoch_for_any_files_ranks_and_workers(
    folders: dict[int, PreparedSource], files: int, world_size: int
) -> None:
    orders = []
    for workers in (0, 2, 4):
        data = module(folders[files], workers=workers, val_fraction=0.1)
        ranks = [epoch_of(data, rank, world_size) for rank in range(world_size)]
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
        batches = [batch for turn in itertools.zip_longest(*ranks) for batch in turn if batch is not None]
        trained = [number for batch in batches for number in numbers(batch)]
        validated = [number for batch in data.val_dataloader() for number in numbers(batch)]
        assert sorted(trained + validated) == list(range(DOCUMENTS))
        # tokens in = tokens out + tokens left out, by reason
        corpus = Corpus([folders[files]])
        assert sum(batch.tokens for batch in batches) == corpus.tokens.sum() - corpus.tokens[validated].sum()
        whole = module(folders[files], val_fraction=0.1)
        epoch_of(whole)
        account = whole.account.sources["s"]
        assert account.rejected["held_out"] == 2 * len(validated)  # the second epoch was begun
        assert account.rows == account.accepted + account.rejected.total()
        orders.append([mark(batch) for batch in batches])
    assert orders[0] == orders[1] == orders[2]
    # the order depends on the files, not on the ranks
    assert orders[0] == [mark(batch) for batch in epoch_of(module(folders[files], val_fraction=0.1))]
    assert threads() == 0


def test_batches_are_what_packing_the_examples_gives(source: PreparedSource) -> None:
    data = module(source)
    lengths = Corpus([source]).tokens
    for batch in epoch_of(data):
        want = pack([example(n, int(lengths[n])) for n in numbers(batch)], capacity=128)
        assert batch.origin is not None
        assert want.origin is None
        for name, value in vars(want).items():
            got = None if name == "origin" else getattr(batch, name)
            same = torch.equal(got, value) and got.dtype == value.dtype if isinstance(value, torch.Tensor) else None
            assert got == value if same is None else same, name
    # and documents for people are the same as batches
    shown = itertools.chain.from_iterable(data.packs())
    first = [number_of(document.example.input_ids.tolist()) for document in itertools.islice(shown, 5)]
    assert first == [n for batch in epoch_of(data) for n in numbers(batch)][:5]
    assert data.preview(2)[0].example.input_ids.tolist()[0] == 259


def test_epochs_seeds_and_packs(source: PreparedSource) -> None:
    first, second = ([n for batch in epoch_of(module(source), epoch=epoch) for n in numbers(batch)] for epoch in (0, 1))
    assert sorted(first) == sorted(second)
    assert first != second
    assert first != [n for batch in epoch_of(module(source, seed=1)) for n in numbers(batch)]
    batches = epoch_of(module(source, window=64))
    assert sum(batch.fill for batch in batches) / len(batches) > 0.95


def test_sources_are_mixed_evenly_and_come_as_often_as_stated(tmp_path: Path) -> None:
    small = prepared(tmp_path, 40, name="small", epochs=3)
    large = prepared(tmp_path, 200, name="large", first=1000)
    data = module([small, large])
    come = Counter(n for batch in epoch_of(data) for n in numbers(batch))
    assert come == {n: 3 if n < 1000 else 1 for n in (*range(40), *range(1000, 1200))}
    corpus = Corpus([small, large])
    order = epoch_order(corpus, np.ones(240, bool), "0/0")
    # at any moment each has given the same share of its supervised tokens, give or take a document
    given = np.cumsum(np.where(order[:, None] < 40, [1, 0], [0, 1]) * corpus.targets[order][:, None], axis=0)
    assert np.abs(given[:, 0] / given[-1, 0] - given[:, 1] / given[-1, 1]).max() < 70 / min(given[-1])


def test_a_damaged_row_is_named(source: PreparedSource) -> None:
    corpus = Corpus([source])
    assert read_row_group(corpus.groups[0]).ids.base is not None
    data = module(source)
    data._prepared().corpus.tokens[3] += 1
    with pytest.raises(ValueError, match=r"s-0.parquet, row 3 of row group 0: its columns disagree"):
        epoch_of(data)


# --- places -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_six_interruptions_change_nothing(source: PreparedSource, workers: int) -> None:
    # 45 packs an epoch: the cuts are at the start, in an epoch, at its end and in the third one
    steps = 130
    whole = marks(module(source, steps=steps))
    length = len(epoch_of(module(source)))
    cuts = [0, 1, 20, length, length + 7, 2 * length, 2 * length + 5, steps]
    seen: list[str] = []
    state = None
    for start, end in itertools.pairwise(cuts):
        loader = module(source, steps=steps, workers=workers).train_dataloader()
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
            # a state that is saved again before it was used is the same
            assert loader.state_dict()["place"] == state["place"]
        seen += [mark(batch) for batch in itertools.islice(loader, end - start)]
        state = loader.state_dict()
        assert state["batches"] == end
        assert len(json.dumps(state)) < 2_000
    assert seen == whole


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_under_a_trainer_six_interruptions_change_nothing(source: PreparedSource, tmp_path: Path, workers: int) -> None:
    def run(accumulate: int, checkpoint: Path | None = None, cut: tuple[int, Path] | None = None, **more: Any) -> Any:
        recorder = Recorder()
        trainer = trainer_for(tmp_path, 30, accumulate, callbacks=[SaveAt(*cut)] if cut else [])
        data = module(source, steps=30, accumulate=accumulate, workers=workers, **more)
        if cut is None:
            trainer.fit(recorder, datamodule=data, ckpt_path=checkpoint)
        else:
            with pytest.raises(Killed):
                trainer.fit(recorder, datamodule=data, ckpt_path=checkpoint)
        return recorder

    # 37 packs an epoch: in the first step, at its end, in a step, at an epoch's end and behind it
    whole = run(2)
    consumed: list[str] = []
    path = None
    for turn, cut in enumerate((0, 1, 12, 36, 37, 51)):
        kept = tmp_path / f"{turn}.ckpt"
        consumed = consumed[: len(consumed) // 2 * 2] + run(2, path, (cut, kept)).seen
        path = kept
    last = run(2, path)
    assert consumed + last.seen == whole.seen
    assert torch.equal(last.table.weight, whole.table.weight)
    # steps of another size take the stream up where it is, and the trainer's own count goes on
    with pytest.raises(ValueError, match="accumulate was 2 and is 3"):
        run(3, path)
    other = run(3, path, on_change="continue")
    assert other.seen[: len(last.seen)] == last.seen
    assert len(other.seen) == 3 * (30 - 26)


def drain(data: SMIDataModule, state: dict[str, Any]) -> tuple[list[list[int]], int]:
    """The batches from a state to the end of its epoch, and the packs of the next."""
    loader = data.train_dataloader()
    loader.load_state_dict(state)
    batches = iter(loader)
    rest = []
    while loader.state_dict()["place"]["epoch"] == state["place"]["epoch"]:
        rest.append(numbers(next(batches)))
    data.teardown()
    return rest, loader.state_dict()["place"]["epoch"]


@pytest.mark.parametrize("change", [{"seed": 1}, {"window": 40}, {"pack_length": 300}, {"accumulate": 3}])
def test_other_settings_go_on_with_exactly_the_unseen_documents(source: PreparedSource, change: dict[str, int]) -> None:
    data = module(source, steps=500)
    loader = data.train_dataloader()
    seen = [n for batch in itertools.islice(loader, 11) for n in numbers(batch)]
    state = loader.state_dict()
    (name, value), *_ = change.items()
    with pytest.raises(ValueError, match=rf"{name} was \d+ and is {value}\b.*data.on_change=continue"):
        module(source, **change).train_dataloader().load_state_dict(state)

    # changed, and a few batches later once more, and back
    went_on = module(source, steps=500, on_change="continue", **change)
    loader = went_on.train_dataloader()
    loader.load_state_dict(state)
    more = [n for batch in itertools.islice(loader, 3) for n in numbers(batch)]
    back = module(source, steps=500, on_change="continue")
    rest, _ = drain(back, json.loads(json.dumps(loader.state_dict())))
    # the place is in the next epoch with its first pack, which was taken
    flat = [n for batch in rest for n in batch]
    left = DOCUMENTS - len(seen) - len(more)
    assert sorted(seen + more + flat[:left]) == list(range(DOCUMENTS))


def test_repeated_sources_go_on_with_what_is_left(tmp_path: Path) -> None:
    source = prepared(tmp_path, 30, epochs=3)
    loader = module(source).train_dataloader()
    seen = [n for batch in itertools.islice(loader, 9) for n in numbers(batch)]
    rest, _ = drain(module(source, steps=500, seed=4, on_change="continue"), loader.state_dict())
    flat = [n for batch in rest for n in batch]
    assert Counter(seen + flat[: 90 - len(seen)]) == dict.fromkeys(range(30), 3)


def test_another_number_of_ranks_goes_on_where_the_others_were(source: PreparedSource) -> None:
    whole = marks(module(source, steps=20))
    loader = module(source).train_dataloader()
    list(itertools.islice(loader, 6))
    state = loader.state_dict()
    state["settings"]["world_size"] = 2  # six packs, of two ranks with three batches each
    with pytest.raises(ValueError, match="world_size was 2 and is 1"):
        module(source).train_dataloader().load_state_dict(state)
    loader = module(source, steps=20, on_change="continue").train_dataloader()
    loader.load_state_dict(state)
    assert [mark(batch) for batch in loader] == whole[6:]


@pytest.mark.parametrize("change", [{"val_fraction": 0.2}, {"max_length": 90}, {"start": 3}])
def test_other_data_is_always_refused(source: PreparedSource, change: dict[str, Any]) -> None:
    state = module(source).train_dataloader().state_dict()
    with pytest.raises(ValueError, match=rf"{next(iter(change))} was .* to resume, or start a new run"):
        module(source, on_change="continue", **change).train_dataloader().load_state_dict(state)


def test_validation_rows_of_the_mixture_are_an_error(source: PreparedSource, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="20 documents of the mixture are among the validation rows"):
        module(source, val=prepared(tmp_path, 20, name="val"), val_batches=100).setup("fit")


def test_validation_is_the_same_for_every_seed_and_bounded(source: PreparedSource) -> None:
    first, second = (module(source, val_fraction=0.3, seed=seed, val_batches=3).val_dataloader() for seed in (0, 1))
    assert [mark(batch) for batch in first] == [mark(batch) for batch in second]
    assert len(first) == 3
    with pytest.raises(ValueError, match="no validation row among 150"):
        module(source, val_fraction=1e-9).setup("fit")


def test_places_survive_as_plain_values() -> None:
    place = Place(3, 17).under_other_settings(Shuffle(1, 2, 3)).under_other_settings(Shuffle(4, 5, 6))
    assert place.legs == ((Shuffle(1, 2, 3), 17), (Shuffle(4, 5, 6), 0))
    assert Place.from_dict(json.loads(json.dumps(place.to_dict()))) == place


def test_saving_a_place_takes_no_time(source: PreparedSource) -> None:
    loader = module(source, val_fraction=0.1).train_dataloader()
    next(iter(loader))
    loader.state_dict()
    began = time.perf_counter()
    for _ in range(20):
        loader.state_dict()
    # 5 ms are the limit; a busy machine is given twice that
    assert (time.perf_counter() - began) / 20 < 0.01
