"""Sweeps: many runs of one command line, and what became of each.

Hydra's sweeper chooses the values and its launcher the machine. Every job is a new process of `python -m smi.train`
with the values of that job alone: whatever one job sets, starts or breaks is gone before the next, several devices
are launched as in any other run, and a job that is killed ends nothing but itself.

The sweep's directory holds of job N the run directory `N`, what it printed in `N.log` and what became of it in
`N.json`; and of them all `sweep.json`, `sweep.csv` and `sweep.png`, written again after each job.
"""

import csv
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from smi.composing import config_dir
from smi.files import write_whole
from smi.provenance import FIGURES_FILE

# exit statuses of a run: its loss was no longer finite; of a sweep: a job did not end well
DIVERGED, SOME_FAILED = 3, 1
# seconds that a job is given to save and to leave when the sweep is stopped
GRACE = 60.0

# options of the group `sweep` that need a package: the module to look for, and our extra that brings it
NEEDED = {
    "optuna": ("hydra_plugins.hydra_optuna_sweeper", "sweep"),
    "ray": ("hydra_plugins.hydra_ray_launcher", "ray"),
    "slurm": ("hydra_plugins.hydra_submitit_launcher", "slurm"),
}


@dataclass(frozen=True)
class Job:
    """What became of a job.

    status: ok, failed, or diverged, where the loss or the objective was not finite.
    objective: the figure that `sweep.objective` names, where the status is ok and there is one.
    error: the last thing it said, or why there is no objective.
    """

    number: int
    overrides: list[str]
    status: str
    objective: float | None
    seconds: float
    error: str | None

    @property
    def values(self) -> dict[str, str]:
        """Its settings as the command line has them, by name."""
        pairs = (override.split("=", 1) for override in self.overrides if "=" in override)
        return {key.lstrip("+"): value for key, value in pairs}


def is_installed(group: str, option: str) -> bool:
    """Whether Hydra's plugin for an option of the group `sweep` is there; other options need none."""
    if group != "sweep" or option not in NEEDED:
        return True
    try:
        return importlib.util.find_spec(NEEDED[option][0]) is not None
    except ModuleNotFoundError:
        return False


def check_installed(arguments: Sequence[str]) -> None:
    """Raises ValueError where the command line asks for a sweeper or launcher that is not installed."""
    for argument in arguments:
        group, _, option = argument.partition("=")
        if not is_installed(group, option):
            module, extra = NEEDED[option]
            raise ValueError(f"{argument} needs {module.split('.')[1]}: pip install 'smi[{extra}]'")


def run_job(config: DictConfig) -> float | str:
    """Runs the job that Hydra has composed in a process of its own; the objective, or why there is none.

    The reason is returned rather than raised: Hydra would end the sweep with a traceback, and its Optuna sweeper takes
    what is no number for a failed trial.
    """
    hydra = HydraConfig.get()
    folder, number = Path(hydra.sweep.dir), int(hydra.job.num)
    overrides = list(hydra.overrides.task)
    start = time.monotonic()
    status, objective, error = "failed", None, None
    try:
        if config.hardware.launcher != "lightning":
            error = (
                f"hardware.launcher={config.hardware.launcher} cannot be swept: a job starts its own processes, on one "
                "machine; choose the hardware of that machine"
            )
        elif any(override.startswith("paths.run_dir=") for override in overrides):
            error = "each job of a sweep has a directory of its own: set hydra.sweep.dir instead of paths.run_dir"
        else:
            code, last = _execute(_command(hydra), folder / f"{number}.log", number)
            status = {0: "ok", DIVERGED: "diverged"}.get(code, "failed")
            error = last if code else None
        if status == "ok":
            status, objective, error = _objective(Path(hydra.runtime.output_dir), config.sweep.objective)
    except BaseException as stop:
        error = f"stopped: {type(stop).__name__}"
        raise
    finally:
        job = Job(number, overrides, status, objective, round(time.monotonic() - start, 1), error)
        write_whole(folder / f"{number}.json", json.dumps(asdict(job), indent=1))
    return (error or status) if objective is None else objective


def _command(hydra: Any) -> list[str]:
    """The command line of the job as a run of its own."""
    command = [sys.executable, "-m", "smi.train"]
    for source in hydra.runtime.config_sources:
        if source.provider == "command-line":
            command += ["--config-dir", source.path]
        elif source.provider == "main" and Path(source.path) != config_dir():
            command += ["--config-path", source.path]
    if hydra.job.config_name != "train":
        command += ["--config-name", hydra.job.config_name]
    # what concerns the sweep itself stays with it
    own = re.compile(r"[+~]*hydra[./](mode|run|sweep|sweeper|launcher|callbacks)\b")
    command += [override for override in hydra.overrides.hydra if not own.match(override)]
    folder = str(hydra.runtime.output_dir).replace("\\", "\\\\").replace("'", "\\'")
    return [*command, *hydra.overrides.task, "hydra.mode=RUN", f"hydra.run.dir='{folder}'"]


def _execute(command: list[str], log: Path, number: int) -> tuple[int, str]:
    """Runs a job, shows what it prints under its number, and keeps it in `log`; exit status and last words."""
    environment = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
    last = ""
    error: list[str] = []
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            bufsize=1,
            env=environment,
        )
        assert process.stdout is not None
        before = _stop_on_sigterm()
        try:
            for line in process.stdout:
                file.write(line)
                file.flush()
                print(f"[{number}] {line}", end="", flush=True)
                last = line.strip() or last
                # an error may have several lines; it is the last thing that a run says
                if line.startswith("error"):
                    error = [line]
                elif error:
                    error.append(line)
            code = process.wait()
        except BaseException:
            # Ctrl-C reaches the job as well; both ways it saves and leaves
            process.terminate()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)
    if code < 0:
        return code, f"ended by {signal.Signals(-code).name}"
    return code, ("".join(error).rstrip() or last).removeprefix("error: ")


def _stop_on_sigterm() -> Any:
    """Has SIGTERM end the sweep in order; the handler before, None where there is none to be set."""
    if threading.current_thread() is not threading.main_thread():
        return None

    def stop(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    return signal.signal(signal.SIGTERM, stop)


def _objective(run_dir: Path, name: str) -> tuple[str, float | None, str | None]:
    """Status, objective and error of a run that ended well."""
    figures = json.loads((run_dir / FIGURES_FILE).read_text(encoding="utf-8"))
    if name not in figures:
        return "ok", None, f"sweep.objective={name} is no figure of this run; there are: {', '.join(figures)}"
    value = figures[name]
    return ("diverged", None, f"{name} is not finite") if value is None else ("ok", value, None)


class SweepReport(Callback):
    """Hydra's hook, which tells `conclude` of the sweep that has begun in this process."""

    begun: DictConfig | None = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        SweepReport.begun = config
        # hydra hands on what ends a sweep, instead of printing a traceback
        os.environ["HYDRA_FULL_ERROR"] = "1"


def conclude(application: Callable[[], None]) -> int:
    """Runs Hydra's application. Reports the sweep that it was, whatever ended it; returns the exit status."""
    SweepReport.begun = None
    code = 0
    try:
        application()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except SystemExit as stop:
        if SweepReport.begun is None:
            raise
        code = stop.code if isinstance(stop.code, int) else 1
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if SweepReport.begun is None:
            raise
        # the Optuna sweeper's way of saying that no trial has an objective, which the report says better
        code = SOME_FAILED
        if "No trials are completed yet" not in str(error):
            print(f"error: {error}", file=sys.stderr)
            code = 2
    finally:
        os.environ.pop("HYDRA_FULL_ERROR", None)
    sweep = SweepReport.begun
    if sweep is None:
        return code
    jobs = read_jobs(Path(sweep.hydra.sweep.dir))
    if jobs:
        report(jobs, Path(sweep.hydra.sweep.dir), sweep.sweep.objective, sweep.sweep.direction)
    return code or (SOME_FAILED if any(job.status != "ok" for job in jobs) else 0)


def read_jobs(folder: Path) -> list[Job]:
    """The jobs of a sweep that have ended, in order."""
    files = (file for file in folder.glob("*.json") if file.stem.isdigit())
    jobs = (Job(**json.loads(file.read_text(encoding="utf-8"))) for file in files)
    return sorted(jobs, key=lambda job: job.number)


def swept(jobs: Sequence[Job]) -> list[str]:
    """The settings that are not the same in all jobs."""
    names = dict.fromkeys(name for job in jobs for name in job.values)
    return [name for name in names if len({job.values.get(name) for job in jobs}) > 1]


def report(jobs: Sequence[Job], folder: Path, objective: str, direction: str) -> None:
    """Prints the jobs, the best first and those that failed last, and writes table and plot into `folder`."""
    sign = 1 if direction == "minimize" else -1
    ranked = sorted(jobs, key=lambda job: math.inf if job.objective is None else sign * job.objective)
    names = swept(jobs)
    first = "lowest" if direction == "minimize" else "highest"
    table = Table(title=f"{objective}, the {first} first", title_justify="left")
    for name in ("job", "status", objective, *names, "seconds"):
        table.add_column(name, justify="left" if name == "status" else "right")
    for job in ranked:
        value = "" if job.objective is None else f"{job.objective:.6g}"
        table.add_row(
            str(job.number), job.status, value, *(escape(job.values.get(n, "")) for n in names), f"{job.seconds:.0f}"
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print()
    console.print(table)
    for job in jobs:
        if job.error is not None:
            what = " ".join(f"{name}={job.values.get(name, '')}" for name in names)
            console.print(f"job {job.number} ({what}) {job.status}: {job.error}", markup=False, soft_wrap=True)
    ok = sum(job.status == "ok" for job in jobs)
    console.print(f"{ok} of {len(jobs)} jobs ended well; see {folder}/sweep.csv and sweep.png", soft_wrap=True)

    content = {"objective": objective, "direction": direction, "jobs": [asdict(job) for job in ranked]}
    write_whole(folder / "sweep.json", json.dumps(content, indent=1))
    with (folder / "sweep.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["job", "status", objective, "seconds", *names, "error"])
        for job in ranked:
            values = (job.values.get(name) for name in names)
            writer.writerow([job.number, job.status, job.objective, job.seconds, *values, job.error])
    if names:
        _plot(jobs, names, objective, folder / "sweep.png")


def _plot(jobs: Sequence[Job], names: Sequence[str], objective: str, file: Path) -> None:
    """The objective against each swept value; jobs without one are marked at the upper edge."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure((3.4 * len(names) + 0.6, 3.2), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False, sharey=True)[0], names, strict=True):
            texts = [job.values.get(name, "") for job in jobs]
            numbers = [_number(text) for text in texts]
            known = [number for number in numbers if number is not None]
            places: list[Any] = numbers if len(known) == len(texts) else texts
            if len(known) == len(texts) and min(known) > 0 and max(known) / min(known) > 20:
                axes.set_xscale("log")
            good = [(x, job.objective) for x, job in zip(places, jobs, strict=True) if job.objective is not None]
            bad = [x for x, job in zip(places, jobs, strict=True) if job.objective is None]
            if good:
                axes.scatter(*zip(*good, strict=True), s=28)
            axes.scatter(bad, [0.97] * len(bad), transform=axes.get_xaxis_transform(), marker="x", color="tab:red")
            axes.set_xlabel(name)
        figure.axes[0].set_ylabel(objective)
        figure.suptitle(f"{objective}; crosses: jobs without one")
        figure.savefig(file, dpi=110, metadata={"Software": None})


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
