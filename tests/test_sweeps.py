"""Sweeps: jobs in processes of their own, and what is said of those that fail."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_ranks import TINY, smi

from smi.sweeps import Job, _execute, check_installed, read_jobs, report, swept


def test_an_optuna_sweep_with_a_trial_that_diverges_and_one_that_raises(tmp_path: Path) -> None:
    """The sampler's seed has it try each value once; the best is the one that is left."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="pip install 'smi[sweep]' for this test")
    values = "optim.lr=choice(5e-3,1e38,fast)"
    output = smi(
        *[*TINY, "trainer.batch_size=1", "trainer.max_steps=2", "trainer.val_every=2"],
        *["sweep=optuna", "sweep.trials=3", values, "seed=1", "hydra.sweep.dir=sweep"],
        cwd=tmp_path,
        code=1,
    )
    folder = tmp_path / "sweep"
    jobs = {job.values["optim.lr"]: job for job in read_jobs(folder)}
    assert {lr: job.status for lr, job in jobs.items()} == {"0.005": "ok", "1e+38": "diverged", "fast": "failed"}
    assert "the loss of step 2 is nan" in jobs["1e+38"].error
    assert "optim.lr should be a number, not 'fast'" in jobs["fast"].error
    for lr in ("1e+38", "fast"):
        assert f"job {jobs[lr].number} (optim.lr={lr}) {jobs[lr].status}: {jobs[lr].error}" in output
    assert "1 of 3 jobs ended well" in output
    assert "Traceback" not in output
    best = (folder / "optimization_results.yaml").read_text()
    assert "optim.lr: '0.005'" in best or "optim.lr: 0.005" in best
    with (folder / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["status"] == "ok"
    assert [row["val/loss"] for row in rows[1:]] == ["", ""]
    figures = json.loads((folder / str(jobs["0.005"].number) / "figures.json").read_text())
    assert float(rows[0]["val/loss"]) == figures["val/loss"] == jobs["0.005"].objective
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")


def job(number: int, objective: float | None = None, status: str = "ok", **values: object) -> Job:
    overrides = ["+recipe=quickstart", "seed=1", *(f"optim.{name}={value}" for name, value in values.items())]
    return Job(number, overrides, status, objective, 1.0, None if status == "ok" else "it broke")


@pytest.mark.parametrize(("direction", "order"), [("minimize", [2, 0, 1]), ("maximize", [0, 2, 1])])
def test_the_best_job_comes_first_and_a_failed_one_never(tmp_path, capsys, direction, order):
    jobs = [job(0, 2.0, lr="1e-5"), job(1, status="diverged", lr="1.0"), job(2, 1.0, lr="1e-3")]
    report(jobs, tmp_path, "val/loss", direction)
    ranked = json.loads((tmp_path / "sweep.json").read_text())["jobs"]
    assert [row["number"] for row in ranked] == order
    shown = capsys.readouterr().out
    assert "job 1 (optim.lr=1.0) diverged: it broke" in shown
    assert "seed" not in shown


def test_what_is_the_same_in_all_jobs_is_not_swept():
    assert swept([job(0, lr=1, clip=2), job(1, lr=2, clip=2)]) == ["optim.lr"]
    assert swept([job(0, lr=1)]) == []


def test_plots_take_words_as_well_as_numbers(tmp_path):
    report([job(0, 1.0, lr="fast", clip=1), job(1, 2.0, lr="slow", clip=100)], tmp_path, "val/loss", "minimize")
    assert (tmp_path / "sweep.png").stat().st_size > 5000


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_job_that_is_killed_is_a_failed_job(tmp_path):
    code, error = _execute(
        python("import os; print('begun', flush=True); os.kill(os.getpid(), 9)"), tmp_path / "log", 3
    )
    assert (code, error) == (-9, "ended by SIGKILL")
    assert (tmp_path / "log").read_text() == "begun\n"


def test_the_error_of_a_job_is_what_it_says_last(tmp_path, capfd):
    shown = "import sys; print('error: first'); print('error: last:\\n  it broke'); sys.exit(2)"
    assert _execute(python(shown), tmp_path / "log", 3) == (2, "last:\n  it broke")
    assert "[3] error: last:\n[3]   it broke\n" in capfd.readouterr().out
    assert _execute(python("print('words'); exit(1)"), tmp_path / "log", 3) == (1, "words")


def test_sigterm_stops_the_job_in_progress_before_the_sweep_leaves(tmp_path):
    """The handler is that of before again."""
    waits = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    before = signal.getsignal(signal.SIGTERM)

    def stop() -> None:
        while not (tmp_path / "log").exists() or "ready" not in (tmp_path / "log").read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    started = time.monotonic()
    with pytest.raises(SystemExit) as stopped:
        _execute(python(waits), tmp_path / "log", 0)
    assert stopped.value.code == 143
    assert time.monotonic() - started < 50
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("option", "extra"), [("optuna", "sweep"), ("ray", "ray"), ("slurm", "slurm")])
def test_a_plugin_that_is_missing_is_named_with_what_to_install(monkeypatch, option, extra):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"sweep={option} needs hydra_.*: pip install 'smi\[{extra}\]'"):
        check_installed(["+recipe=quickstart", f"sweep={option}"])
    check_installed(["sweep=grid", "name=optuna", "ray"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hardware=slurm"], "hardware.launcher=slurm cannot be swept"),
        (["paths.run_dir=x"], "set hydra.sweep.dir instead of paths.run_dir"),
    ],
)
def test_what_cannot_be_swept_is_refused_with_the_reason(tmp_path, arguments, message):
    output = smi("-m", *TINY, "seed=1,2", *arguments, "hydra.sweep.dir=sweep", cwd=tmp_path, code=1)
    assert output.count(message) == 2
    assert "0 of 2 jobs ended well" in output
    assert "Traceback" not in output


def test_a_value_that_fits_no_job_ends_the_sweep_before_it_begins(tmp_path):
    output = smi("-m", *TINY, "model=tiny,huge", "hydra.sweep.dir=sweep", cwd=tmp_path, code=2)
    assert "Could not find 'model/huge'" in output
    assert "Traceback" not in output


def test_importing_sweeps_costs_no_torch():
    code = "import sys, smi.sweeps, smi.hardware; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
