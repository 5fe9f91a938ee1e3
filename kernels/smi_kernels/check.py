"""Does it work on this machine, and how fast? ``python -m smi_kernels.check --device cuda [--json FILE]``

Numerics of every backend against the recurrence in float64 (`smi_kernels.numerics` has the cases and tolerances), then
times of a forward and a forward with backward pass beside flash-linear-attention's own Triton path and the plain
chunked form, then, where the package `smi` is installed, the 1.5B training step (``python -m smi.bench step``).

Under four minutes on one GPU of the H100 class. Everything runs in processes of its own that have a time limit, and
each result is written to FILE when it comes: a kernel that takes too long to compile, or that takes
its process down, loses nothing but itself. ``--device cpu`` is the dry run, with small shapes.

The exit status is 1 if any numeric case failed, did not finish or could not run; a backend that refuses is reported and
is no failure. The table on standard output is Markdown; progress goes to standard error.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import smi_kernels

SECONDS = 235.0
# Triton's kernels are tuned over so many of FLA's configurations each: all of them take minutes to compile
CONFIGURATIONS = 4
FLA_ITSELF = "FLA's chunk_rwkv7"
GPU_SETTINGS = [("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 32), ("float16", 64), ("float32", 64)]
CPU_SETTINGS = [("float32", 64), ("bfloat16", 32)]


@dataclass(frozen=True)
class Row:
    """A line of the result.

    value: an error, milliseconds, or a figure of the step.
    ok: whether a numeric case held; None where there is nothing to hold.
    """

    section: str
    what: str
    case: str
    value: float | None = None
    ok: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Job:
    """A process. `arguments` go to `smi_kernels.check_workers`."""

    section: str
    what: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def command(self) -> list[str]:
        call = {"section": self.section, **self.arguments}
        return [sys.executable, "-m", "smi_kernels.check_workers", json.dumps(call)]


def stages(device: str) -> Iterator[tuple[float, list[Job]]]:
    """Jobs that run side by side, so that kernels compile on many cores, and the seconds they have."""
    backends = smi_kernels.available()
    call = {"device": device, "configurations": CONFIGURATIONS}
    if device == "cpu":
        small = {**call, "settings": CPU_SETTINGS, "length": 53, "heads": 2}
        yield 120, [Job("numerics", name, {**small, "backend": name}) for name in backends]
    else:
        # what the next stage times is compiled meanwhile
        builds = [
            Job("build", f"{peer}, share {share}", {**call, "peer": peer, "share": share})
            for peer in ("tilelang", "triton", FLA_ITSELF)
            for share in range(1 if peer == "tilelang" else CONFIGURATIONS)
        ]
        yield (
            120,
            builds
            + [
                Job(
                    "numerics",
                    f"{name}, {setting[0]}, N={setting[1]}",
                    {**call, "backend": name, "settings": [setting]},
                )
                for setting in GPU_SETTINGS
                for name in backends
            ],
        )
    yield 70, [Job("timing", "all", call)]
    if find_spec("smi") is not None:
        yield 60, [Job("step", "1.5B training step" if device == "cuda" else "dry run", call)]


def run(job: Job, deadline: float) -> list[Row]:
    """The rows of a job, of several for one case the last; one more where it did not end well."""
    limit = deadline - time.monotonic()
    if limit <= 0:
        return [Row(job.section, job.what, "not started", ok=_failed(job), note="the time was up")]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(job.command(), stdout=output, stderr=errors, start_new_session=True)
        try:
            status, ending = process.wait(limit), ""
        except subprocess.TimeoutExpired:
            status, ending = None, f"stopped after {limit:.0f} s"
        finally:
            # compilers that it started go with it
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        errors.seek(0)
        lines = output.read().splitlines()
        said = errors.read().strip().splitlines()
    rows = [Row(**json.loads(line.removeprefix("ROW "))) for line in lines if line.startswith("ROW ")]
    rows = list({(row.what, row.case): row for row in rows}.values())
    if status:
        ending = said[-1][:300] if said else f"exit status {status}"
    if ending:
        rows.append(Row(job.section, job.what, "unfinished", ok=_failed(job), note=ending))
    return rows


def _failed(job: Job) -> bool | None:
    return False if job.section == "numerics" else None


def machine(device: str) -> dict[str, str]:
    """What the figures hold for."""
    found = {"device": platform.processor() or platform.machine(), "python": platform.python_version()}
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
    for package in ("torch", "triton", "flash-linear-attention", "fla-core", "tilelang", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "without metadata" if find_spec(package.replace("-", "_")) else "missing"
    return found


def table(found: dict[str, str], rows: list[Row]) -> str:
    """The result in Markdown."""
    titles = {"numerics": "relative error", "timing": "ms", "step": "value", "build": "s"}
    lines = [", ".join(f"{name} {what}" for name, what in found.items())]
    for section in dict.fromkeys(row.section for row in rows):
        lines += ["", f"| {section} | case | {titles[section]} | | |", "|---|---|---:|---|---|"]
        for row in (row for row in rows if row.section == section):
            value = "" if row.value is None else f"{row.value:.3g}"
            verdict = {True: "ok", False: "FAILED", None: ""}[row.ok]
            lines.append(f"| {row.what} | {row.case} | {value} | {verdict} | {row.note} |")
    return "\n".join(lines)


def _write(path: Path, found: dict[str, str], rows: list[Row], finished: bool) -> None:
    result = {"machine": found, "finished": finished, "rows": [asdict(row) for row in rows]}
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m smi_kernels.check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE, as it grows")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything; what is left then is not run")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device")

    start = time.monotonic()
    deadline = start + arguments.seconds
    found, rows = machine(arguments.device), []
    side_by_side = min(os.cpu_count() or 1, 16) if arguments.device == "cuda" else 1
    for seconds, stage in stages(arguments.device):
        until = min(deadline, time.monotonic() + seconds)
        with ThreadPoolExecutor(side_by_side) as pool:
            running = {pool.submit(run, job, until): job for job in stage}
            for done in as_completed(running):
                rows += done.result()
                if arguments.json:
                    _write(arguments.json, found, rows, finished=False)
                job, bad = running[done], [row for row in done.result() if row.ok is False]
                state = f"{len(bad)} FAILED" if bad else "done"
                print(f"{time.monotonic() - start:5.0f} s  {job.section} {job.what}: {state}", file=sys.stderr)
    if arguments.json:
        _write(arguments.json, found, rows, finished=True)
    print(table(found, rows))
    return 1 if any(row.ok is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
