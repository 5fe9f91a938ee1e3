"""`smi_kernels.check` on the CPU, its limits, and the cases themselves: a wrong backend must not pass them."""

import json
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

import smi_kernels
from smi_kernels import Backend, Verdict, check, check_workers, numerics, recurrent

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


ROW = """
import json
print("ROW " + json.dumps(dict(section="numerics", what="it", case="one", value=1.0, ok=True)), flush=True)
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
    status = Path(f"/proc/{child.read_text()}/stat")
    for _ in range(100):
        # gone, or a zombie that nobody has collected yet
        if not status.exists() or ") Z " in status.read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("what the job had started runs on")


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


def test_on_a_gpu_compiling_comes_before_timing():
    stages = list(check.stages("cuda"))
    assert sum(seconds for seconds, _ in stages) <= 250
    sections = [{job.section for job in jobs} for _, jobs in stages]
    assert sections == [{"build", "numerics"}, {"timing"}, {"step"}]
    told = [json.loads(job.command()[-1]) for job in stages[0][1]]
    # every backend in every setting, each in a process of its own
    numeric = {(call["backend"], *call["settings"][0]) for call in told if call["section"] == "numerics"}
    assert len(numeric) == len(smi_kernels.available()) * len(check.GPU_SETTINGS)
    shares = [call["share"] for call in told if call.get("peer") == "triton"]
    assert shares == list(range(check.CONFIGURATIONS))


@pytest.mark.parametrize("there_are", [1, 3, 5, 60])
def test_shares_of_configurations_together_are_what_is_timed(monkeypatch, there_are):
    def seen(keep):
        triton = ModuleType("triton")
        triton.autotune = lambda configs, key: (configs, key)
        monkeypatch.setitem(sys.modules, "triton", triton)
        check_workers.limit_autotuning(keep, 4)
        configs, key = triton.autotune(list(range(there_are)), key=["BT"])
        assert key == ["BT"]
        return configs

    timed = seen(slice(None))
    shares = [seen(slice(i, i + 1)) for i in range(4)]
    assert 1 <= len(timed) <= 4
    assert all(len(share) == 1 for share in shares)
    assert {config for share in shares for config in share} == set(timed)


def test_a_share_is_built_and_timed_as_it_will_be_on_a_gpu(capsys):
    check_workers.build({"device": "cpu", "peer": "chunked", "share": 0})
    (line,) = capsys.readouterr().out.splitlines()
    row = check.Row(**json.loads(line.removeprefix("ROW ")))
    assert (row.section, row.case) == ("build", "first call")
    assert row.value > 0
