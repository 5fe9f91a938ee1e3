"""Several processes learn what one learns: gradients, weights, and going on; and they end together."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gradients
import pytest
import torch
from hydra import compose, initialize_config_dir
from killed_run import assert_identical
from small_run import undrawn
from two_ranks import run_on_two_ranks

from smi.composing import config_dir, judge, register
from smi.train import train
from smi.training.checkpoint import read_checkpoint

TINY = [
    "+recipe=quickstart",
    "model.hidden_size=64",
    "model.num_hidden_layers=2",
    "model.head_dim=32",
    "optim.warmup_steps=2",
    "logger=none",
    "callbacks=none",
    "trainer.max_steps=3",
    "trainer.batch_size=4",
    "trainer.val_every=3",
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=3",
    "trainer.export=[native]",
    "data.max_length=500",
    "data.pack_length=500",
    "data.window=8",
    "data.val_batches=3",
    "data.held_out_tasks=0",
]


def smi(*arguments: str, cwd: Path, code: int = 0, **more: str) -> str:
    """The output of a command line."""
    process = subprocess.run(
        [sys.executable, "-m", "smi.train", *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"} | more,
        timeout=500,
        check=False,
    )
    assert process.returncode == code, process.stdout
    return process.stdout


def weights(run_dir: Path, step: int = 3) -> dict[str, torch.Tensor]:
    return torch.load(run_dir / "checkpoints" / f"step-{step}.ckpt", weights_only=True)["state_dict"]


def furthest(run_dir: Path, other: Path) -> float:
    here, there = weights(run_dir), weights(other)
    assert here.keys() == there.keys()
    return max(float((here[name] - there[name]).abs().max()) for name in here)


def test_the_gradient_is_the_same_however_documents_are_split(tmp_path: Path) -> None:
    """Into packs, micro-batches and ranks, under DDP and FSDP; in float32."""
    run_on_two_ranks(gradients.main, tmp_path / "found")
    found = json.loads((tmp_path / "found").read_text())
    assert {way["strategy"] for way in found} == {"DDPStrategy", "ShardedStrategy"}
    assert len({str(way["batches"]) for way in found}) > 5
    for way in found:
        assert way["error"] < 1e-6, way
        assert way["norm"] == pytest.approx(1, abs=1e-5), way


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process learns."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"), undrawn():
        train(judge(compose("train", overrides=[*TINY, f"paths.run_dir={run_dir}"])))
    return run_dir


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The same in two processes, and in two that share the weights out: jobs of a sweep, after one that is refused."""
    folder = tmp_path_factory.mktemp("ranks")
    jobs = ["hardware=cpu_ddp2", "hardware.strategy=single,ddp,fsdp"]
    output = smi(*TINY, "sweep=grid", *jobs, "hydra.sweep.dir=sweep", cwd=folder, code=1)
    return folder / "sweep", output


REFUSED, DDP, FSDP = "012"


class TestSweepOfSeveralProcesses:
    @pytest.mark.parametrize("job", [DDP, FSDP])
    def test_they_learn_what_one_learns(self, alone, sweep, job):
        folder, _ = sweep
        assert furthest(folder / job, alone) < 1e-6

    def test_shared_weights_are_exported_whole(self, sweep):
        folder, _ = sweep
        export = torch.load(folder / FSDP / "export" / "model.pth", weights_only=True)
        assert torch.equal(export["head.weight"], weights(folder / FSDP)["model.head.weight"])

    @pytest.mark.parametrize("job", [DDP, FSDP])
    def test_they_have_one_folder_and_one_voice(self, sweep, job):
        folder, output = sweep
        lines = [line for line in output.splitlines() if line.startswith(f"[{job}] ")]
        for part in ("step 3: validation loss", "exported model", "WKV backend", "Training rows"):
            assert sum(part in line for line in lines) == 1, part
        assert {file.name for file in folder.iterdir() if file.is_dir()} == {REFUSED, DDP, FSDP}
        assert {file.name for file in (folder / job / "checkpoints").iterdir()} == {f"step-{n}.ckpt" for n in (1, 2, 3)}

    def test_a_job_that_cannot_run_is_reported_with_its_values(self, sweep):
        folder, output = sweep
        assert (
            f"job {REFUSED} (hardware.strategy=single) failed: "
            "hardware.strategy=single is for one device, not 2: choose ddp or fsdp\n"
        ) in output
        assert "Traceback" not in output
        assert "2 of 3 jobs ended well" in output
        ranked = json.loads((folder / "sweep.json").read_text())["jobs"]
        assert [job["status"] for job in ranked] == ["ok", "ok", "failed"]

    @pytest.mark.parametrize(("job", "strategy"), [(FSDP, "ddp"), pytest.param(None, "fsdp", marks=pytest.mark.full)])
    def test_they_go_on_from_a_checkpoint_of_other_hardware(self, alone, sweep, tmp_path, job, strategy):
        begun = alone if job is None else sweep[0] / job
        later = shutil.ignore_patterns("step-[23].ckpt", "export", "figures.json")
        shutil.copytree(begun, tmp_path / "run", ignore=later)
        hardware = ["hardware=cpu_ddp2", f"hardware.strategy={strategy}"]
        output = smi(*TINY, *hardware, "paths.run_dir=run", "resume=auto", cwd=tmp_path)
        assert output.count("going on from") == 1
        assert furthest(tmp_path / "run", alone) < 1e-6


@pytest.mark.full
def test_an_error_in_one_process_ends_all(tmp_path: Path) -> None:
    """It is told once, and nothing is left running."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('LOCAL_RANK') == '1':\n"
        "    import smi.data.batch as batch\n"
        "    def join(batches):\n"
        "        raise ValueError('the disk of this process is gone')\n"
        "    batch.PackedBatch.join = join\n"
    )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    start = time.monotonic()
    output = smi(*TINY, "hardware=cpu_ddp2", "paths.run_dir=run", cwd=tmp_path, code=2, PYTHONPATH=paths)
    assert time.monotonic() - start < 200
    assert output.count("error in process 1: the disk of this process is gone") == 1
    assert "error: " not in output
    assert "Traceback" not in output


@pytest.mark.full
@pytest.mark.parametrize(
    ("send", "sent", "code"),
    [(os.kill, signal.SIGTERM, 143), (os.killpg, signal.SIGTERM, 143), (os.killpg, signal.SIGINT, 130)],
    ids=["sigterm", "sigterm_to_all", "ctrl_c"],
)
def test_two_processes_that_are_stopped_save_once_and_go_on(tmp_path: Path, send: Any, sent: int, code: int) -> None:
    """A scheduler tells the first process or all of them, a terminal all; nothing is left running."""
    arguments = [
        *TINY,
        "hardware=cpu_ddp2",
        "paths.run_dir=run",
        "trainer.log_every=1",
        "trainer.checkpoint_every=9999",
    ]
    process = begin(*arguments, "trainer.max_steps=9999", "trainer.val_every=9999", cwd=tmp_path)
    deadline = time.monotonic() + 300
    while not (tmp_path / "run" / "history.jsonl").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    send(process.pid, sent)
    output = process.communicate(timeout=40)[0]
    assert process.returncode == code, output
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    [saved] = (tmp_path / "run" / "checkpoints").iterdir()
    assert output.count(f"resume=auto goes on from {saved.name}") == 1
    assert "Traceback" not in output
    step = int(saved.stem.removeprefix("step-"))
    output = smi(*arguments, f"trainer.max_steps={step + 2}", "resume=auto", cwd=tmp_path)
    assert output.count(f"going on from {saved}") == 1
    assert [row["step"] for row in losses(tmp_path / "run") if "train/loss" in row] == list(range(1, step + 3))


def begin(*arguments: str, cwd: Path) -> subprocess.Popen:
    """A run in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "smi.train", *arguments],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.full
def test_two_ranks_that_are_killed_come_to_what_two_come_to_that_are_not(tmp_path: Path) -> None:
    """By the command line: five kills in sixty steps, weights, optimizer, rates and logged losses to the last bit."""
    arguments = [*TINY, "hardware=cpu_ddp2", "trainer.max_steps=60", "trainer.keep_checkpoints=1"]
    smi(*arguments, "paths.run_dir=whole", cwd=tmp_path)
    saved = tmp_path / "killed" / "checkpoints"
    rng = random.Random(0)
    for step in sorted(rng.sample(range(1, 55), 5)):
        process = begin(*arguments, "paths.run_dir=killed", "resume=auto", cwd=tmp_path)
        deadline = time.monotonic() + 300
        while not any(int(file.stem.removeprefix("step-")) >= step for file in saved.glob("step-*.ckpt")):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.3))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    smi(*arguments, "paths.run_dir=killed", "resume=auto", cwd=tmp_path)
    whole, killed = (read_checkpoint(tmp_path / name / "checkpoints" / "step-60.ckpt") for name in ("whole", "killed"))
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "random_states"):
        assert_identical(whole[part], killed[part], part)
    assert_identical(losses(tmp_path / "whole"), losses(tmp_path / "killed"))


def losses(run_dir: Path) -> list[dict[str, float]]:
    """Every figure of the run but those of its speed and of the machine, row by row."""
    rows = [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
    assert any("train/loss" in row for row in rows)
    kept = ("step", "train/", "val/", "data/")
    return [{name: value for name, value in row.items() if name.startswith(kept)} for row in rows]
