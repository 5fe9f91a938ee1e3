"""Ranks over gloo, in processes of their own: none waits for another, and each goes on where it was."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parent / "ranks.py"


def launch(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    paths = [str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(SCRIPT), str(folder), *arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float) -> None:
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"the ranks wait for each other: {process.communicate()[0]}") from None
    assert process.returncode == 0, output


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_uneven_and_empty_shares_finish_in_step(tmp_path: Path) -> None:
    finish(launch(tmp_path), 240)
    first, second = results(tmp_path)
    for name in ("uneven", "empty"):
        one, two = first[name], second[name]
        # seven steps of two batches on each rank, dealt from one stream in turn
        assert [mark for pair in zip(one["seen"], two["seen"], strict=True) for mark in pair] == one["stream"]
        # after three steps each goes on at its own place
        assert (one["resumed"], two["resumed"]) == (one["seen"][6:], two["seen"][6:])
        assert len(one["validated"]) == len(two["validated"])
    # each validation batch is one rank's; where there is one only, the other rank gets it without labels
    assert len(set(first["uneven"]["validated"]) & set(second["uneven"]["validated"])) <= 1
    assert set(first["empty"]["validated"]) != set(second["empty"]["validated"])


@pytest.mark.full
def test_two_ranks_that_are_killed_equal_two_that_are_not(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    finish(launch(tmp_path / "whole", "--steps", "60"), 200)
    rng = random.Random(0)
    for step in sorted(rng.sample(range(1, 55), 5)):
        process = launch(tmp_path / "killed", "--steps", "60")
        deadline = time.monotonic() + 120
        while not (tmp_path / "killed" / "run" / f"step-{step}.ckpt").exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.1))
        os.killpg(process.pid, signal.SIGKILL)
        # the launcher gives each rank a session of its own
        for pid in (tmp_path / "killed").glob("*.pid"):
            os.kill(int(pid.read_text()), signal.SIGKILL)
        process.communicate()
    finish(launch(tmp_path / "killed", "--steps", "60"), 200)
    whole, killed = (
        torch.load(tmp_path / name / "run" / "step-60.ckpt", weights_only=True) for name in ("whole", "killed")
    )
    assert torch.equal(killed["state_dict"]["table.weight"], whole["state_dict"]["table.weight"])
    there, here = (saved["optimizer_states"][0]["state"][0] for saved in (whole, killed))
    assert all(torch.equal(here[name], there[name]) for name in there)
    assert killed["lr_schedulers"] == whole["lr_schedulers"]
    for there, here in zip(results(tmp_path / "whole"), results(tmp_path / "killed"), strict=True):
        assert here["last"] == there["last"][-len(here["last"]) :]
