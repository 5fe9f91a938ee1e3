"""`smi_kernels.check` on the CPU, its limits, and the cases themselves: a wrong backend must not pass them."""

import json
import os
import sys
import time

import pytest
import torch

import smi_kernels
from smi_kernels import Backend, Verdict, check, numerics, recurrent

SMALL = numerics.Setting(torch.device("cpu"), torch.float32, 16, length=53, heads=2)


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(smi_kernels.registry, "_backends", dict(smi_kernels.registry._backends))
    smi_kernels.resolve.cache_clear()
    yield
    smi_kernels.resolve.cache_clear()


def findings(run):
    smi_kernels.register(Backend("wrong", "", run, lambda *what: Verdict(True)))
    return {finding.case: finding for finding in (case("wrong", SMALL) for case in numerics.CASES)}


def failed(run):
    return {name for name, finding in findings(run).items() if not finding.ok}


def test_the_reference_passes_its_own_cases():
    assert not failed(recurrent.run)


def test_a_transposed_state_fails():
    def run(*inputs):
        *inputs, state, cut = inputs
        o, final = recurrent.run(*inputs, state.mT, cut)
        return o, final.mT

    assert {"rows, strided", "packed", "in pieces"} <= failed(run)


def test_a_leak_between_documents_fails():
    def run(r, w, k, v, a, b, state, cut):
        o, final = recurrent.run(r, w, k, v, a, b, state, cut)
        return o + 1e-6 * v.roll(1, 1), final

    assert "isolated, bit for bit" in failed(run)


def test_a_lost_gradient_of_the_state_fails():
    def run(r, w, k, v, a, b, state, cut):
        return recurrent.run(r, w, k, v, a, b, state * 0.5 + state.detach() * 0.5, cut)

    assert findings(run)["rows, strided"].where == "dstate"


def test_nan_fails():
    def run(*inputs):
        o, final = recurrent.run(*inputs)
        return o * float("nan"), final

    assert "in pieces" in failed(run)


def test_the_dry_run_passes(tmp_path, capsys, monkeypatch):
    # one setting of each kind; the whole of it takes most of a minute
    monkeypatch.setattr(check, "CPU_SETTINGS", [("bfloat16", 32)])
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    file = tmp_path / "result.json"
    assert check.main(["--device", "cpu", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["finished"]
    assert result["machine"]["torch"] == torch.__version__
    assert not list(tmp_path.glob("*.partial"))
    rows = result["rows"]
    for backend in ("chunked", "recurrent"):
        cases = [row for row in rows if row["what"] == f"{backend}, bfloat16, N=32"]
        assert len(cases) == len(numerics.CASES)
        assert all(row["ok"] for row in cases)
    refused = {row["what"].split(",")[0]: row["note"] for row in rows if row["case"] == "refused"}
    assert refused["triton"] == refused["tilelang"] == "it needs a CUDA device, not cpu"
    assert {row["case"] for row in rows if row["section"] == "timing"} == {"forward", "forward and backward"}
    table = capsys.readouterr().out
    assert "| chunked, bfloat16, N=32 | packed |" in table


class Program(check.Job):
    """A job that is any program."""

    def command(self):
        return [sys.executable, "-c", self.arguments["program"]]


def rows_of(section, program, seconds=60.0):
    return check.run(Program(section, "it", {"program": program}), time.monotonic() + seconds)


ROW = """import json; print("ROW " + json.dumps(dict(section="numerics", what="it", case="one", value=1.0, ok=True)), flush=True)
"""


def test_a_job_that_dies_keeps_what_it_had_and_fails():
    rows = rows_of("numerics", ROW + "raise RuntimeError('no such kernel')")
    assert [(row.case, row.ok) for row in rows] == [("one", True), ("unfinished", False)]
    assert rows[1].note == "RuntimeError: no such kernel"


def test_a_job_that_takes_too_long_is_stopped_with_what_it_started(tmp_path):
    child = tmp_path / "pid"
    sleeper = f"""
import pathlib, subprocess, sys, time
it = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(child)!r}).write_text(str(it.pid))
{ROW}
time.sleep(600)
"""
    start = time.monotonic()
    rows = rows_of("numerics", sleeper, seconds=8)
    assert time.monotonic() - start < 60
    assert [(row.case, row.ok) for row in rows] == [("one", True), ("unfinished", False)]
    assert rows[1].note == "stopped after 8 s"
    for _ in range(100):
        try:
            os.kill(int(child.read_text()), 0)
        except ProcessLookupError:
            break
        if "Z" in open(f"/proc/{child.read_text()}/stat").read().split(")")[1][:3]:
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child runs on")


def test_no_time_left():
    (row,) = rows_of("timing", ROW, seconds=-1)
    assert (row.case, row.ok, row.note) == ("not started", None, "the time was up")


def test_a_failed_case_is_the_exit_status(monkeypatch, capsys):
    program = ROW.replace("ok=True", "ok=False")
    monkeypatch.setattr(check, "stages", lambda device: iter([(60, [Program("numerics", "it", {"program": program})])]))
    assert check.main(["--device", "cpu"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_the_last_row_of_a_case_counts():
    rows = rows_of("timing", ROW + ROW.replace("1.0", "2.0"))
    assert [row.value for row in rows] == [2.0]
