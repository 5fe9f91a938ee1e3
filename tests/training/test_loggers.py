"""Figures are read back from every logger: the same steps, the same values."""

import csv
import dataclasses
import math
import shutil
import struct
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from small_run import fit, small_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from smi.training.loggers import HISTORY_FILE, append_lines, cut_lines, read_history, read_lines

WANDB = find_spec("wandb") is not None
needs_wandb = pytest.mark.skipif(not WANDB, reason="wandb is not installed: pip install 'smi[wandb]'")


def from_csv(run_dir):
    found = {}
    for file in sorted(run_dir.glob("csv/version_*/metrics.csv")):
        with file.open() as rows:
            for row in csv.DictReader(rows):
                for name, text in row.items():
                    if name != "step" and text:
                        found.setdefault(name, {})[int(row["step"])] = float(text)
    return found


def from_tensorboard(run_dir):
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]
    }, events


def wandb_records(file):
    """The records of a file that W&B keeps offline: LevelDB's log format behind a header of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, held = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, part = struct.unpack("<IHB", data[at : at + 7])
        held += data[at + 7 : at + 7 + length]
        at += 7 + length
        # a whole record, or the last of its parts
        if part in (1, 4):
            yield Record.FromString(held)
            held = b""


def from_wandb(run_dir):
    """The history of the runs that were kept offline, and how each ended."""
    found, exits = {}, []
    for file in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        # a process of its own writes it
        deadline = time.monotonic() + 60
        while not any(record.WhichOneof("record_type") == "exit" for record in wandb_records(file)):
            assert time.monotonic() < deadline, "the run did not end"
            time.sleep(0.1)
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "exit":
                exits.append(record.exit.exit_code)
            if record.WhichOneof("record_type") != "history":
                continue
            row = {(item.key or item.nested_key[0]): item.value_json for item in record.history.item}
            step = int(row.pop("trainer/global_step", -1))
            for name, text in row.items():
                if not name.startswith("_") and name != "samples/text":
                    found.setdefault(name, {})[step] = float(text)
    return found, exits


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loggers") / "run"
    config = small_config(
        folder,
        *(("logger=[tensorboard,csv,wandb]", "logger.wandb.offline=true") if WANDB else ("logger=[tensorboard,csv]",)),
        "callbacks=default",
        "callbacks.samples.count=2",
        "trainer.checkpoint_every=2",
        "trainer.keep_checkpoints=9",
    )
    return config, fit(config)[1]


def test_all_loggers_agree(run):
    folder = Path(run[0].paths.run_dir)
    want = read_history(folder)
    assert list(want["train/loss"]) == [1, 2, 3, 4]
    assert list(want["val/loss"]) == [2, 4]
    assert all(math.isfinite(value) for points in want.values() for value in points.values())
    assert from_csv(folder) == want
    board, _ = from_tensorboard(folder)
    assert board.keys() == want.keys()
    for name, points in want.items():
        # single precision is all that TensorBoard keeps
        assert board[name] == {step: pytest.approx(value, rel=1e-6) for step, value in points.items()}, name


@needs_wandb
def test_wandb_agrees_as_well(run):
    folder = Path(run[0].paths.run_dir)
    kept, exits = from_wandb(folder)
    assert kept == read_history(folder)
    assert exits == [0]


def test_what_is_logged(run):
    config, module = run
    figures = read_history(Path(config.paths.run_dir))
    for kind in ("act", "eot", "eos", "out"):
        for stage in ("train", "val"):
            for what in ("loss", "accuracy", "entropy"):
                assert f"{stage}/{what}_{kind}" in figures
    for name in (
        "train/grad_norm",
        "train/lr_matrices",
        "train/lr_vectors",
        "train/lr_decay_bias",
        "train/supervised_tokens",
        "speed/tokens_per_s",
        "speed/supervised_per_s",
        "speed/model_tokens_per_s",
        "speed/loader_tokens_per_s",
        "speed/wait_share",
        "memory/rss_gib",
        "data/packing",
        "data/tokens",
        "data/supervised_tokens",
        "data/share_synthetic",
    ):
        assert name in figures, name
    assert "speed/mfu" not in figures
    assert figures["data/supervised_tokens"][4] == module.consumed.supervised_tokens
    assert set(figures["data/share_synthetic"].values()) == {1.0}
    assert figures["train/lr_decay_bias"][2] == pytest.approx(2 * figures["train/lr_matrices"][2])


def test_the_means_by_type_add_up(run):
    """Weighted by their tokens, the types give the whole; what is logged for one cannot be that of another."""
    folder = Path(run[0].paths.run_dir)
    figures = read_history(folder)
    losses = [points[4] for name, points in figures.items() if name.startswith("val/loss_")]
    assert min(losses) <= figures["val/loss"][4] <= max(losses)
    assert len(set(losses)) == len(losses) >= 4


def test_samples_reach_tensorboard_as_text(run):
    folder = Path(run[0].paths.run_dir)
    _, events = from_tensorboard(folder)
    [text] = [
        event.tensor_proto.string_val[0].decode()
        for event in events.Tensors("samples/0/text_summary")
        if event.step == 4
    ]
    assert "usr " in text
    assert "---" in text


@needs_wandb
def test_each_run_of_a_process_is_a_run_of_wandb(tmp_path):
    """As the jobs of a sweep are; one that fails ends as a failed one, and does not go on in the next."""
    import wandb

    settings = ("logger=wandb", "logger.wandb.offline=true", "trainer.max_steps=1")

    for job in ("0", "1"):
        config = small_config(tmp_path / job, *settings)
        if job == "0":
            config.optim.lr = 1e30
            config.trainer.max_steps = 3
            with pytest.raises(FloatingPointError):
                fit(config)
        else:
            fit(config)
        assert wandb.run is None
    (_, failed), (_, good) = from_wandb(tmp_path / "0"), from_wandb(tmp_path / "1")
    assert (failed, good) == ([1], [0])


def test_a_resumed_run_goes_on_in_the_same_files_and_the_same_run_of_wandb(run, tmp_path):
    config, whole = run
    shutil.copytree(config.paths.run_dir, tmp_path / "run", symlinks=True)
    # as if it had been killed in the middle of a line, later than the checkpoint
    with (tmp_path / "run" / HISTORY_FILE).open("a") as file:
        file.write('{"step": 9, "train/loss": 1.0}\n{"step": 10, "trai')
    resumed = dataclasses.replace(config, paths=dataclasses.replace(config.paths, run_dir=str(tmp_path / "run")))
    _, module = fit(resumed, tmp_path / "run" / "checkpoints" / "step-2.ckpt")
    got, want = read_history(tmp_path / "run"), read_history(Path(config.paths.run_dir))
    assert got.keys() == want.keys()
    for name in want:
        if not name.startswith(("speed/", "memory/")):
            assert got[name] == want[name], name
    assert module.consumed == whole.consumed
    runs = [run.name.split("-")[-1] for run in (tmp_path / "run" / "wandb").glob("offline-run-*")]
    assert len(runs) == 2 * WANDB
    assert len(set(runs)) == WANDB


def test_lines_that_a_killed_run_left_half_written_are_not_read(tmp_path):
    file = tmp_path / "x.jsonl"
    assert read_lines(file) == []
    append_lines(file, [{"step": 1, "a": 1}, {"step": 2, "a": 2}])
    with file.open("a") as lines:
        lines.write('{"step": 3')
    assert [row["step"] for row in read_lines(file)] == [1, 2]
    cut_lines(file, 1)
    append_lines(file, [{"step": 2, "a": 5}])
    assert read_lines(file) == [{"step": 1, "a": 1}, {"step": 2, "a": 5}]
