"""Runs that are killed, out of disk, or resumed from what is damaged, crafted or not theirs."""

import errno
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import failing_ranks
import pytest
import torch
from crafted import crafted
from hydra import compose, initialize_config_dir
from killed_run import assert_identical, fit, outcome
from shards import prepared
from two_ranks import run_on_two_ranks

from smi.composing import config_dir, judge, register
from smi.data.prepared import PreparedSource
from smi.training.checkpoint import (
    AtomicCheckpointIO,
    DamagedCheckpoint,
    check_checkpoint,
    list_checkpoints,
    newest_sound,
    read_checkpoint,
)
from smi.training.run_directory import find_checkpoint, write_config

TESTS = Path(__file__).parent


def content(step: int = 1, size: int = 50) -> dict[str, Any]:
    """As much of a checkpoint as makes it one."""
    weights = torch.arange(size * size, dtype=torch.float32).reshape(size, size)
    return {"pytorch-lightning_version": "2.6.4", "global_step": step, "state_dict": {"weight": weights}}


def save(file: Path, **how: Any) -> Path:
    AtomicCheckpointIO().save_checkpoint(content(**how), file)
    return file


# --- killed -------------------------------------------------------------------------------------------------


def killed(root: Path, seed: int, kills: int, steps: int, every: int) -> int:
    """Makes a run in `root` that is not disturbed and one that is killed, and holds one against the other."""
    arguments = [str(argument) for argument in (root, seed, kills, steps, every)]
    process = subprocess.run(
        [sys.executable, str(TESTS / "killing_runs.py"), *arguments], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    whole, resumed = (outcome(root / name, steps) for name in ("whole", "killed"))
    assert_identical(whole, resumed)
    assert list(whole["logged"]) == list(range(1, steps + 1))
    left = {file.name for file in (root / "killed" / "checkpoints").iterdir()}
    assert left == {f"step-{steps}.ckpt"}
    return int(process.stdout)


def test_a_run_that_saves_each_step_is_always_resumable(tmp_path: Path) -> None:
    assert killed(tmp_path, 0, kills=6, steps=24, every=1) >= 3


@pytest.mark.full
def test_fifty_kills_of_a_run_that_saves_each_step(tmp_path: Path) -> None:
    assert killed(tmp_path, 1, kills=50, steps=300, every=1) >= 40


@pytest.mark.full
def test_five_kills_in_sixty_steps(tmp_path: Path) -> None:
    assert killed(tmp_path, 2, kills=5, steps=60, every=3) == 5


# --- resumed ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> PreparedSource:
    return prepared(tmp_path_factory.mktemp("source"), 150)


def test_retention_leaves_alone_what_the_run_did_not_write(source: PreparedSource, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    foreign = {save(folder / "step-1.ckpt"), folder / "step-0.ckpt", folder / "step-x.ckpt", folder / "notes.txt"}
    for file in foreign - {folder / "step-1.ckpt"}:
        file.write_text("mine")
    # another run's, in another directory, whose checkpoint is copied here
    fit(tmp_path / "other", source, steps=2)
    (tmp_path / "other" / "checkpoints" / "step-2.ckpt").rename(folder / "step-2.ckpt")
    for file in list_checkpoints(folder):
        file.rename(file.with_suffix(".away"))
    fit(tmp_path / "run", source, steps=4, keep=2)
    assert [file.name for file in list_checkpoints(folder)] == ["step-3.ckpt", "step-4.ckpt"]
    for file in folder.glob("*.away"):
        file.rename(file.with_suffix(".ckpt"))
    before = {file: file.read_bytes() for file in (*foreign, folder / "step-2.ckpt")}
    # what a kill between a save and the removal of the old one leaves is this run's, and goes
    fit(tmp_path / "run", source, steps=6, keep=1)
    assert [file.name for file in list_checkpoints(folder)] == [
        "step-0.ckpt",
        "step-1.ckpt",
        "step-2.ckpt",
        "step-6.ckpt",
    ]
    assert {file: file.read_bytes() for file in before} == before


def test_a_run_that_branches_off_touches_nothing_of_the_first(source: PreparedSource, tmp_path: Path) -> None:
    fit(tmp_path / "first", source, steps=2)
    start = tmp_path / "first" / "checkpoints" / "step-2.ckpt"
    before = start.read_bytes()
    fit(tmp_path / "second", source, steps=4, start=start)
    assert start.read_bytes() == before
    assert [file.name for file in list_checkpoints(tmp_path / "second" / "checkpoints")] == ["step-4.ckpt"]
    runs = [read_checkpoint(list_checkpoints(tmp_path / n / "checkpoints")[0]) for n in ("first", "second")]
    assert len({checkpoint["callbacks"]["Checkpoints"]["run"] for checkpoint in runs}) == 2


# --- damaged ------------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    file = save(tmp_path / "step-1.ckpt")
    sound = file.read_bytes()
    rng = random.Random(0)
    noticed = 0
    # everywhere in what is not the large tensor, and here and there in that
    for place in {*range(0, len(sound), 29), *range(len(sound) - 1200, len(sound), 3)}:
        flipped = bytearray(sound)
        flipped[place] ^= 1 << rng.randrange(8)
        file.write_bytes(flipped)
        try:
            check_checkpoint(file)
        except ValueError:
            noticed += 1
        else:
            # a date, or what fills up to the next record
            assert_identical(content(), read_checkpoint(file))
    assert noticed > 300


def run_directory(folder: Path, *steps: int, **overrides: Any) -> Any:
    """A run directory with checkpoints of these steps; gives the config that would go on with it."""
    register()
    named = [f"{key}={value}" for key, value in overrides.items()]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = judge(compose("train", overrides=["+recipe=quickstart", f"paths.run_dir={folder}", *named]))
    if not folder.exists():
        write_config(config)
    for step in steps:
        save(folder / "checkpoints" / f"step-{step}.ckpt", step=step)
    return config


class TestWhichCheckpoint:
    @pytest.fixture
    def config(self, tmp_path: Path) -> Any:
        config = run_directory(tmp_path / "run", 2, 4, 6)
        config.resume = "auto"
        return config

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return tmp_path / "run" / "checkpoints"

    def test_the_newest(self, config: Any, folder: Path, caplog: Any) -> None:
        assert find_checkpoint(config) == folder / "step-6.ckpt"
        assert "DAMAGED" not in caplog.text

    def test_damaged_ones_are_passed_over_aloud(self, config: Any, folder: Path, caplog: Any) -> None:
        (folder / "step-6.ckpt").write_bytes(b"")
        torn = (folder / "step-4.ckpt").read_bytes()
        (folder / "step-4.ckpt").write_bytes(torn[:3000] + b"x" + torn[3001:])
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        with caplog.at_level(logging.WARNING):
            assert find_checkpoint(config) == folder / "step-2.ckpt"
        for name in ("step-6.ckpt", "step-4.ckpt"):
            assert f"DAMAGED: the checkpoint {folder / name} cannot be read" in caplog.text
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before

    def test_where_all_are_damaged_it_does_not_begin_anew(self, config: Any, folder: Path) -> None:
        for file in folder.iterdir():
            file.write_bytes(b"x")
        with pytest.raises(ValueError, match="There is no other to go on from") as error:
            find_checkpoint(config)
        assert all(str(folder / f"step-{step}.ckpt") in str(error.value) for step in (2, 4, 6))

    def test_a_damaged_one_that_was_asked_for_is_an_error(self, config: Any, folder: Path) -> None:
        config.resume = str(folder / "step-6.ckpt")
        (folder / "step-6.ckpt").write_bytes(b"x")
        with pytest.raises(DamagedCheckpoint, match="step-6"):
            find_checkpoint(config)

    @pytest.mark.parametrize("form", ["zip", "pickle"])
    @pytest.mark.parametrize("resume", ["auto", "path"])
    def test_a_crafted_pickle_does_not_run(self, config: Any, folder: Path, form: str, resume: str) -> None:
        file = folder / "step-6.ckpt"
        crafted(file, folder / "it_ran", form)
        config.resume = "auto" if resume == "auto" else str(file)
        if form == "pickle" and resume == "auto":
            # not even of the format: as good as damaged
            assert find_checkpoint(config) == folder / "step-4.ckpt"
        else:
            with pytest.raises(ValueError, match="step-6"):
                find_checkpoint(config)
        assert not (folder / "it_ran").exists()
        with pytest.raises(Exception, match=r"weights_only|Weights only"):
            AtomicCheckpointIO().load_checkpoint(file, weights_only=False)
        assert not (folder / "it_ran").exists()

    def test_the_past_of_a_run_is_for_another_directory(self, config: Any, folder: Path, tmp_path: Path) -> None:
        config.resume = str(folder / "step-2.ckpt")
        with pytest.raises(ValueError, match=r"has come further than step-2.ckpt: to step-4.ckpt, step-6.ckpt"):
            find_checkpoint(config)
        config.paths.run_dir = str(tmp_path / "branch")
        assert find_checkpoint(config) == folder / "step-2.ckpt"


# --- out of disk --------------------------------------------------------------------------------------------


def assert_intact(file: Path) -> None:
    check_checkpoint(file)
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_a_file_size_limit_is_an_error_with_the_path(tmp_path: Path) -> None:
    first = save(tmp_path / "step-1.ckpt")
    child = os.fork()
    if not child:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        code = 1
        try:
            save(tmp_path / "step-2.ckpt", size=200)
        except OSError as error:
            named = f"the checkpoint {tmp_path / 'step-2.ckpt'} could not be written" in str(error)
            code = 0 if named and "File too large" in str(error) and error.errno == errno.EFBIG else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_intact(first)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"no small file system can be mounted here: {mount.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_ends_the_run_and_what_was_saved_goes_on(
    source: PreparedSource, tmp_path: Path, disk: Path
) -> None:
    def fill(trainer: Any) -> None:
        if trainer.global_step == 2:
            with suppress(OSError), (disk / "other").open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)

    with pytest.raises(OSError, match="No space left on device") as caught:
        fit(disk / "run", source, steps=4, at_step=fill)
    assert f"the checkpoint {disk / 'run' / 'checkpoints' / 'step-2.ckpt'} could not be written" in str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert_intact(disk / "run" / "checkpoints" / "step-1.ckpt")
    (disk / "other").unlink()
    fit(disk / "run", source, steps=4)
    fit(tmp_path / "whole", source, steps=4)
    there, here = (outcome(folder / name, 4) for folder, name in ((tmp_path, "whole"), (disk, "run")))
    assert_identical(there["state_dict"], here["state_dict"])


def test_a_read_only_folder_is_an_error_with_the_path(disk: Path) -> None:
    first = save(disk / "step-1.ckpt")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(OSError, match="Read-only file system") as caught:
        save(disk / "step-2.ckpt")
    assert f"the checkpoint {disk / 'step-2.ckpt'} could not be written" in str(caught.value)
    assert_intact(first)


def test_what_could_not_be_read_again_is_not_saved(tmp_path: Path) -> None:
    """A callback's state that weights_only refuses shows at the save, not after the crash."""
    first = save(tmp_path / "step-1.ckpt")
    with pytest.raises(OSError, match=r"step-2.ckpt could not be written: .* holds more than tensors"):
        AtomicCheckpointIO().save_checkpoint(content() | {"callbacks": {"Mine": Path("x")}}, tmp_path / "step-2.ckpt")
    assert_intact(first)


def test_a_save_that_fails_on_one_rank_ends_all_of_them(tmp_path: Path) -> None:
    run_on_two_ranks(failing_ranks.main, tmp_path)
    for rank in (0, 1):
        said = (tmp_path / f"{rank}.txt").read_text()
        assert f"the checkpoint {tmp_path / 'run' / 'checkpoints' / 'step-2.ckpt'} could not be written" in said
        assert "Not a directory" in said or "File exists" in said


def test_the_last_is_the_newest_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(tmp_path / f"step-{step}.ckpt", step=step)
    assert newest_sound(list_checkpoints(tmp_path)).name == "step-100.ckpt"
    shutil.rmtree(tmp_path)
