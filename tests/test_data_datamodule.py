"""SMIDataModule: order, epochs, validation, prefetching; and resuming under Lightning, batch by batch."""

import gc
import hashlib
import itertools
import json
import pickle
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from smi.data import SMIDataModule
from smi.data.batch import PackedBatch
from smi.data.loader import Prefetch
from smi.data.sources import ConversationSource, SourceSpec
from smi.protocol.conversation import Conversation
from smi.protocol.tokens import StructuralIds

HUB = Path(__file__).parent / "data" / "hub"


class Bytes:
    """A tokenizer of bytes."""

    structural = StructuralIds(tuple(range(256, 266)))
    eos_id = 266
    vocab_size = 267
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode()


class Endless:
    """Conversations that never end; held-out ones differ from all others."""

    name = "endless"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def conversations(self, epoch: int, held_out: bool) -> Iterator[Conversation]:
        for number in itertools.count():
            yield talk(f"{'held out ' if held_out else ''}{self.seed} {epoch} {number}", number * 7 % 40)


def talk(text: str, length: int = 10) -> Conversation:
    return Conversation([{"role": "user", "content": text}, {"role": "assistant", "content": "y" * (length + 1)}])


def write_rows(path: Path, count: int, prefix: str = "row") -> None:
    rows = ({"inputs": f"{prefix} {n}", "targets": "y" * (1 + n * 7 % 50)} for n in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def rows(tmp_path: Path) -> SourceSpec:
    """120 rows in two files."""
    write_rows(tmp_path / "a.jsonl", 70, "a")
    write_rows(tmp_path / "b.jsonl", 50, "b")
    return SourceSpec("rows", str(tmp_path / "*.jsonl"), "aya")


def module(train: Any, **options: Any) -> SMIDataModule:
    settings: dict[str, Any] = {"steps": 10, "max_length": 200, "pack_length": 256, "window": 16}
    return SMIDataModule(Bytes(), train, **settings | options)


def mark(batch: PackedBatch) -> str:
    tensors = (batch.input_ids, batch.labels, batch.cu_seqlens)
    return hashlib.sha256(b"|".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:12]


def marks(data: SMIDataModule) -> list[str]:
    return [mark(batch) for batch in data.train_dataloader()]


def texts(batch: PackedBatch) -> list[str]:
    """What the user said in each document."""
    bounds = batch.cu_seqlens.tolist()
    ids = batch.input_ids[0].tolist()
    documents = [ids[a:b] for a, b in itertools.pairwise(bounds)]
    return [bytes(document[2 : document.index(10, 2)]).decode() for document in documents]


# --- order --------------------------------------------------------------------------------------------------


def test_the_stream_is_a_function_of_data_and_seed(rows: SourceSpec) -> None:
    first = marks(module(rows))
    assert len(first) == len(set(first)) == 10
    assert marks(module(rows)) == first
    assert marks(module(rows, seed=1)) != first
    # a longer run begins the same, and `start` leaves out the head
    longer = marks(module(rows, steps=5, accumulate=3))
    assert longer[:10] == first
    assert marks(module(rows, steps=6, start=4)) == first[4:]


def test_every_document_comes_once_an_epoch_and_epochs_differ_in_order(rows: SourceSpec) -> None:
    data = module(rows, steps=60)
    stream = data.packs()
    epochs: list[list[str]] = [[], []]
    for epoch in epochs:
        while len(epoch) < 120:
            epoch.extend(str(document.where) for document in next(stream))
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert len(set(epochs[0])) == 120
    assert epochs[0] != epochs[1]
    assert data.account.sources["rows"].rejected == {}


def test_documents_and_tokens_add_up(rows: SourceSpec) -> None:
    data = module(rows, steps=40)
    stream = data.packs()
    packs = [next(stream)]
    while data.account.epochs < 2:
        packs.append(next(stream))
    packs.pop()
    batches = [data._raw.batch(pack) for pack in packs]
    assert sum(batch.documents for batch in batches) == 120
    account = data.account.sources["rows"]
    first = [document for pack in packs for document in pack]
    assert sum(batch.tokens for batch in batches) == sum(document.tokens for document in first)
    assert sum(batch.supervised_tokens for batch in batches) == sum(document.targets for document in first)
    assert account.rows == account.accepted + account.rejected.total()


def test_ranks_share_the_stream_without_overlap(rows: SourceSpec) -> None:
    whole = marks(module(rows, steps=12))
    for world_size in (2, 3):
        shares = []
        for rank in range(world_size):
            data = module(rows, steps=12 // world_size)
            packs = itertools.islice(data.packs(), rank, 12, world_size)
            shares.append([mark(data._raw.batch(pack)) for pack in packs])
        assert [share[i] for i in range(12 // world_size) for share in shares] == whole


def test_the_first_batch_needs_one_window_of_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "many.jsonl", 5_000)
    data = module(SourceSpec("many", "many.jsonl", "aya"), root=tmp_path, window=32)
    next(data.packs())
    assert data.account.rows == 32


# --- settings and errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"max_length": 300}, "max_length must be from 2 to pack_length, not 300 with pack_length 256"),
        ({"val_fraction": 1.0}, "val_fraction must be from 0"),
        ({"val": Endless(), "val_fraction": 0.1}, "give either val .* or val_fraction"),
        ({"train": []}, "there are no sources"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(**({"train": Endless()} | options))


def test_missing_files_and_adapters_show_before_training(rows: SourceSpec) -> None:
    with pytest.raises(ValueError, match=r"no file matches 'gone\.jsonl'"):
        module(SourceSpec("x", "gone.jsonl", "aya")).setup("fit")
    with pytest.raises(ValueError, match="no adapter is named 'ayah'"):
        iter(module(SourceSpec("x", rows.files, "ayah")).train_dataloader())


def test_data_without_an_accepted_row_shows_the_table(rows: SourceSpec) -> None:
    data = module(SourceSpec("rows", rows.files, "sharegpt"))
    with pytest.raises(ValueError, match=r"(?s)no training row was accepted.*120.*schema 120.*expected a list"):
        iter(data.train_dataloader())


def test_report_prints_the_account(rows: SourceSpec, capsys: pytest.CaptureFixture[str]) -> None:
    data = module(rows, max_length=100, val_fraction=0.2)
    data.setup()
    marks(data)
    data.report()
    shown = capsys.readouterr().out
    for text in ("Training rows", "Validation rows", "held_out", "rows"):
        assert text in shown


# --- validation ---------------------------------------------------------------------------------------------


def test_held_out_rows_never_train(rows: SourceSpec) -> None:
    data = module(rows, steps=60, val_fraction=0.25)
    loader = data.val_dataloader()
    held_out = {text for batch in loader for text in texts(batch)}
    trained = {text for batch in data.train_dataloader() for text in texts(batch)}
    assert not held_out & trained
    assert len(held_out | trained) == 120
    assert 15 <= len(held_out) <= 45
    # the same for every seed, every time
    again = module(rows, seed=5, val_fraction=0.25).val_dataloader()
    assert [mark(batch) for batch in again] == [mark(batch) for batch in loader] == [mark(b) for b in loader]
    account = data.account.sources["rows"]
    assert account.rows == account.accepted + account.rejected["held_out"]


def test_validation_is_bounded_and_may_come_from_files_of_its_own(rows: SourceSpec, tmp_path: Path) -> None:
    write_rows(tmp_path / "val.json", 30, "v")
    lines = (tmp_path / "val.json").read_text().splitlines()
    (tmp_path / "val.json").write_text(f"[{','.join(lines)}]")
    val = SourceSpec("val", str(tmp_path / "val.json"), "aya")
    data = module(rows, steps=60, val=val, val_batches=100)
    assert {text for batch in data.val_dataloader() for text in texts(batch)} == {f"v {n}" for n in range(30)}
    assert len({text for batch in data.train_dataloader() for text in texts(batch)}) == 120
    assert len(module(rows, val_fraction=0.5, val_batches=2).val_dataloader()) == 2
    assert module(rows).val_dataloader() == []


def test_a_row_in_training_and_in_validation_is_an_error(rows: SourceSpec, tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    write_rows(tmp_path / "val" / "val.jsonl", 1, "a")
    data = module(rows, steps=60, val=SourceSpec("val", str(tmp_path / "val" / "val.jsonl"), "aya"))
    with pytest.raises(ValueError, match=r"a.jsonl.* is among the validation rows as well: take it out of one"):
        list(data.train_dataloader())


def test_sources_that_make_conversations_hold_out_their_own() -> None:
    data = module(Endless(), val_fraction=0.1, val_batches=3)
    held_out = [text for batch in data.val_dataloader() for text in texts(batch)]
    assert len(data.val_dataloader()) == 3
    assert all(text.startswith("held out") for text in held_out)
    assert isinstance(Endless(), ConversationSource)


def test_validation_without_a_row_is_an_error(rows: SourceSpec) -> None:
    with pytest.raises(ValueError, match="no validation row among 120"):
        module(rows, val_fraction=1e-9).setup("fit")


# --- prefetching --------------------------------------------------------------------------------------------


def threads() -> int:
    return sum(thread.name == "smi-prefetch" for thread in threading.enumerate())


def test_errors_in_the_thread_come_out_in_their_turn() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise RuntimeError("row 3")

    counted: list[int] = []
    ahead = Prefetch(items(), 4, lambda: counted.append(1))
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(RuntimeError, match="row 3"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)
    assert len(counted) == 2
    assert threads() == 0


def test_the_queue_is_bounded_and_the_thread_ends_with_its_reader() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in itertools.count():
            made.append(number)
            yield number

    ahead = Prefetch(items(), 3, lambda: None)
    assert next(ahead) == 0
    time.sleep(0.05)
    assert len(made) <= 6
    assert threads() == 1
    del ahead
    gc.collect()
    assert threads() == 0


def test_an_abandoned_loop_leaves_no_thread(rows: SourceSpec) -> None:
    data = module(rows)
    for _ in data.train_dataloader():
        break
    gc.collect()
    assert threads() == 0
    kept = iter(data.train_dataloader())
    assert threads() == 1
    data.teardown()
    assert threads() == 0
    assert list(kept) == []


def test_a_module_travels_to_other_processes(rows: SourceSpec) -> None:
    data = module(rows, val_fraction=0.1)
    kept = iter(data.train_dataloader())
    there = pickle.loads(pickle.dumps(data))
    assert marks(there) == [mark(batch) for batch in kept]
    there.teardown()


def run_python(code: str) -> tuple[str, str]:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, done.stderr


def test_a_process_ends_while_a_thread_still_prefetches() -> None:
    code = """
import itertools
from smi.data.loader import Prefetch
kept = Prefetch(itertools.count(), 2, lambda: None)
print(next(kept))
"""
    assert run_python(code) == ("0\n", "")


def test_importing_the_package_brings_no_torch() -> None:
    code = "import sys, smi.data, smi.data.pipeline, smi.data.loader; print('torch' in sys.modules)"
    assert run_python(code) == ("False\n", "")


# --- resuming -----------------------------------------------------------------------------------------------


def test_alone_a_loader_goes_on_from_its_state(rows: SourceSpec) -> None:
    whole = marks(module(rows))
    loader = module(rows).train_dataloader()
    seen = [mark(batch) for batch in itertools.islice(loader, 3)]
    for _ in range(3):
        state = json.loads(json.dumps(loader.state_dict()))
        loader = module(rows).train_dataloader()
        loader.load_state_dict(state)
        seen += [mark(batch) for batch in itertools.islice(loader, 2)]
    assert seen == whole[:9]
    loader.load_state_dict(loader.state_dict())
    assert [mark(batch) for batch in loader] == whole[9:]
    # the state is used once: the next loop begins at the head
    assert [mark(batch) for batch in loader] == whole


@pytest.mark.parametrize("change", [{"seed": 1}, {"window": 17}, {"pack_length": 300}, {"accumulate": 2}])
def test_a_state_of_another_order_is_refused(rows: SourceSpec, change: dict[str, int]) -> None:
    state = module(rows).train_dataloader().state_dict()
    (name, value), *_ = change.items()
    with pytest.raises(ValueError, match=rf"{name} was \d+ and is {value}\b"):
        module(rows, **change).train_dataloader().load_state_dict(state)


def test_a_state_of_other_data_is_refused(rows: SourceSpec, tmp_path: Path) -> None:
    state = module(rows).train_dataloader().state_dict()
    write_rows(tmp_path / "b.jsonl", 51, "b")
    with pytest.raises(ValueError, match="data was"):
        module(rows).train_dataloader().load_state_dict(state)
    assert module(Endless(1)).settings(1)["data"] != module(Endless(2)).settings(1)["data"]


class Recorder(LightningModule):
    """Learns a little from every batch and remembers which it saw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(267, 4)
        self.seen: list[str] = []
        self.validated: list[str] = []
        self.stop_in: int | None = None

    def training_step(self, batch: PackedBatch, index: int) -> torch.Tensor:
        assert isinstance(batch, PackedBatch)
        if self.stop_in == len(self.seen):
            raise KeyboardInterrupt
        self.seen.append(mark(batch))
        return self.table(batch.input_ids).square().mean() * batch.supervised_tokens / 100

    def validation_step(self, batch: PackedBatch, index: int) -> None:
        self.validated.append(mark(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}


class SaveAt(Callback):
    """Saves at the end of training batch `index`, then stops the run as a kill would."""

    def __init__(self, index: int, path: Path) -> None:
        self.index = index
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.index:
            trainer.save_checkpoint(self.path)
            raise Killed


class Killed(Exception):
    pass


def trainer_for(tmp_path: Path, steps: int, accumulate: int = 1, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_steps": steps,
        "accumulate_grad_batches": accumulate,
        "accelerator": "cpu",
        "default_root_dir": tmp_path,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**settings | options)


def undisturbed(tmp_path: Path, rows: Any, steps: int, accumulate: int, **options: Any) -> Recorder:
    recorder = Recorder()
    trainer_for(tmp_path, steps, accumulate, **options).fit(
        recorder, datamodule=module(rows, steps=steps, accumulate=accumulate)
    )
    return recorder


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("accumulate", "cuts"), [(1, [0, 1, 2, 5, 6, 8]), (2, [2, 7, 12]), (3, [0, 1, 7, 11])])
def test_a_run_that_is_killed_and_resumed_equals_one_that_was_not(
    rows: SourceSpec, tmp_path: Path, accumulate: int, cuts: list[int]
) -> None:
    # cuts are batch indices: some at the end of a step, some in the middle of one
    steps = 10
    whole = undisturbed(tmp_path, rows, steps, accumulate)
    assert whole.seen == marks(module(rows, steps=steps, accumulate=accumulate))
    consumed: list[str] = []
    checkpoint = None
    for turn, cut in enumerate([*cuts, None]):
        recorder = Recorder()
        path = tmp_path / f"{turn}.ckpt"
        callbacks = [] if cut is None else [SaveAt(cut, path)]
        trainer = trainer_for(tmp_path, steps, accumulate, callbacks=callbacks)
        data = module(rows, steps=steps, accumulate=accumulate)
        if cut is None:
            trainer.fit(recorder, datamodule=data, ckpt_path=checkpoint)
        else:
            with pytest.raises(Killed):
                trainer.fit(recorder, datamodule=data, ckpt_path=checkpoint)
        # what a step in the middle had taken is taken again, since its gradients were not saved
        consumed = consumed[: len(consumed) // accumulate * accumulate] + recorder.seen
        checkpoint = path
    assert consumed == whole.seen
    assert torch.equal(recorder.table.weight, whole.table.weight)
    gc.collect()
    assert threads() == 0


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_an_interrupted_step_is_made_again(rows: SourceSpec, tmp_path: Path) -> None:
    whole = undisturbed(tmp_path, rows, 6, 2)
    recorder = Recorder()
    # batches 0 to 6 are taken, the interrupt comes in batch 7, in the middle of step 3
    recorder.stop_in = 7
    keeper = ModelCheckpoint(tmp_path / "kept", save_on_exception=True, every_n_train_steps=100)
    trainer = trainer_for(tmp_path, 6, 2, callbacks=[keeper], enable_checkpointing=True)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(recorder, datamodule=module(rows, steps=6, accumulate=2))
    saved = list((tmp_path / "kept").glob("*.ckpt"))
    assert len(saved) == 1
    resumed = Recorder()
    trainer_for(tmp_path, 6, 2).fit(resumed, datamodule=module(rows, steps=6, accumulate=2), ckpt_path=saved[0])
    assert recorder.seen[:6] + resumed.seen == whole.seen
    assert torch.equal(resumed.table.weight, whole.table.weight)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_resuming_with_validation_and_with_more_steps(rows: SourceSpec, tmp_path: Path) -> None:
    options: dict[str, Any] = {"val_check_interval": 2, "check_val_every_n_epoch": None}

    def run(steps: int, checkpoint: Path | None = None, **more: Any) -> Recorder:
        recorder = Recorder()
        data = module(rows, steps=steps, val_fraction=0.2, val_batches=2)
        trainer_for(tmp_path, steps, **options, **more).fit(recorder, datamodule=data, ckpt_path=checkpoint)
        return recorder

    whole = run(9)
    keeper = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    short = run(5, callbacks=[keeper], enable_checkpointing=True)
    assert len(set(whole.validated)) == 2
    assert Counter(whole.validated) == dict.fromkeys(whole.validated, 4)
    for cut in (1, 4, 5):
        # a run that was planned shorter and goes on
        resumed = run(9, tmp_path / "kept" / f"step={cut}.ckpt")
        assert short.seen[:cut] + resumed.seen == whole.seen
        assert torch.equal(resumed.table.weight, whole.table.weight)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_trainer_that_goes_past_the_plan_goes_on_in_the_stream(rows: SourceSpec, tmp_path: Path) -> None:
    recorder = Recorder()
    trainer_for(tmp_path, 7).fit(recorder, datamodule=module(rows, steps=3))
    assert recorder.seen == marks(module(rows, steps=7))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_after_training_the_loader_begins_at_the_head_again(rows: SourceSpec, tmp_path: Path) -> None:
    data = module(rows, steps=3)
    recorder = Recorder()
    trainer_for(tmp_path, 3).fit(recorder, datamodule=data)
    assert marks(data) == recorder.seen


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_trainer_and_module_must_agree_on_accumulation(rows: SourceSpec, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the trainer accumulates 2 batches a step, the data module was told 3"):
        trainer_for(tmp_path, 4, 2).fit(Recorder(), datamodule=module(rows, steps=4, accumulate=3))
    # and a checkpoint of another seed does not resume
    path = tmp_path / "one.ckpt"
    with pytest.raises(Killed):
        trainer_for(tmp_path, 4, callbacks=[SaveAt(1, path)]).fit(Recorder(), datamodule=module(rows, steps=4))
    with pytest.raises(ValueError, match="seed was 0 and is 1"):
        trainer_for(tmp_path, 4).fit(Recorder(), datamodule=module(rows, steps=4, seed=1), ckpt_path=path)
