"""What is particular to the `cpu` backend: threads, forks, memory, its refusals and its cache."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from test_wkv7 import make_inputs, make_state, run_all

import smi_kernels
from smi_kernels import cpu, wkv7

CPU = torch.device("cpu")
ANSWER = cpu.verify(CPU, torch.float32, 64)
needs_kernel = pytest.mark.skipif(not ANSWER.ok, reason=f"cpu: {ANSWER.reason}")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def sample(seed=0, T=70):
    return make_inputs(1, T, 3, 32, torch.float32, seed), make_state(3, 3, 32, torch.float32)


CUT = torch.tensor([0, 5, 40, 70], dtype=torch.int32)


@needs_kernel
def test_the_number_of_threads_changes_no_bit(threads):
    inputs, state = sample()
    results = []
    for count in (1, 2, 5):
        threads(count)
        results.append(run_all("cpu", inputs, state, CUT))
    for result in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], result, strict=True))


@needs_kernel
def test_gradients_of_packed_documents_are_isolated_bit_for_bit():
    inputs, state = sample()
    changed = [x.clone() for x in inputs]
    for x, y in zip(changed, sample(seed=1)[0], strict=True):
        x[:, 5:40] = y[:, 5:40]
    one, two = run_all("cpu", inputs, state, CUT), run_all("cpu", changed, state, CUT)
    for x, y in zip([one[0], *one[2:8]], [two[0], *two[2:8]], strict=True):
        assert torch.equal(x[:, :5], y[:, :5])
        assert torch.equal(x[:, 40:], y[:, 40:])
        assert not torch.equal(x[:, 5:40], y[:, 5:40])
    assert torch.equal(one[8][[0, 2]], two[8][[0, 2]])


@needs_kernel
def test_python_threads_may_call_it_at_once(threads):
    threads(2)
    samples = [sample(seed) for seed in range(4)]
    want = [run_all("cpu", *x, CUT) for x in samples]
    wrong = []

    def call(i):
        for _ in range(5):
            got = run_all("cpu", *samples[i], CUT)
            if not all(torch.equal(x, y) for x, y in zip(got, want[i], strict=True)):
                wrong.append(i)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@needs_kernel
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_may_call_it():
    # in a process of its own: pytest's may hold threads of others
    code = """
import os, sys, torch
sys.path[:0] = sys.argv[1:]
from test_cpu_kernel import CUT, run_all, sample
torch.set_num_threads(2)
want = run_all("cpu", *sample(), CUT)
child = os.fork()
if child == 0:
    got = run_all("cpu", *sample(), CUT)
    os._exit(0 if all(torch.equal(x, y) for x, y in zip(got, want)) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    paths = [str(Path(__file__).parent), str(Path(smi_kernels.__file__).parents[1])]
    assert subprocess.run([sys.executable, "-c", code, *paths], timeout=120, check=False).returncode == 0


@needs_kernel
def test_nothing_is_kept_without_a_gradient(monkeypatch):
    kept = []
    save = cpu._in_parallel
    monkeypatch.setattr(cpu, "_in_parallel", lambda loop, tensors, states, segments: (
        kept.append(states[2].numel() + tensors[-1].numel()), save(loop, tensors, states, segments)
    ))  # fmt: skip
    inputs, _ = sample()
    wkv7(*inputs, backend="cpu")
    with torch.no_grad():
        wkv7(*(x.requires_grad_() for x in inputs), backend="cpu")
    assert kept == [0, 0]
    wkv7(*inputs, backend="cpu")
    assert kept[2] > 0


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_have_the_dtype_of_their_inputs(dtype):
    inputs = make_inputs(1, 40, 2, 64, dtype)
    inputs[1] = inputs[1].float()
    got = run_all("cpu", inputs, make_state(1, 2, 64, torch.float32))
    want = run_all("recurrent", [x.double() for x in inputs], make_state(1, 2, 64))
    assert [x.dtype for x in got] == [dtype, torch.float32, dtype, torch.float32, *[dtype] * 4, torch.float32]
    for x, y in zip(got, want, strict=True):
        # the gradient of the output comes in the dtype of the output, so all of them inherit its rounding
        assert (x.double() - y).abs().max() < max(torch.finfo(dtype).eps, 1e-6) * y.abs().max()


@needs_kernel
def test_not_a_number_stays_one():
    for i in range(6):
        inputs, _ = sample()
        inputs[i][0, 3, 0, 0] = float("nan")
        o, _ = wkv7(*inputs, backend="cpu")
        assert torch.isnan(o[0, 3:5, 0]).any()
        assert torch.isfinite(o[0, :3]).all()
        assert torch.isfinite(o[:, :, 1:]).all()


@needs_kernel
def test_decays_to_nothing_and_below_the_smallest_number():
    inputs, _ = sample(T=3)
    inputs[1].fill_(float("-inf"))
    o, final = wkv7(*inputs, backend="cpu")
    want, last = wkv7(*(x.double() for x in inputs), backend="recurrent")
    torch.testing.assert_close(o.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(final.double(), last, rtol=1e-5, atol=1e-5)


@needs_kernel
def test_the_processor_takes_denormal_numbers_again_afterwards():
    inputs, _ = sample()
    wkv7(*inputs, backend="cpu")
    assert torch.tensor(1e-40) * 0.5 > 0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((torch.device("cuda"), torch.float32, 64), "tensors are on cuda"),
        ((CPU, torch.float64, 64), "computes in float32, not in float64"),
        ((CPU, torch.float32, 48), "head size 48 is not a multiple of 32"),
    ],
)
def test_what_it_does_not_take_is_refused_with_a_reason(arguments, match):
    answer = cpu.verify(*arguments)
    assert not answer.ok
    assert match in answer.reason


def test_another_processor_falls_back_to_chunked_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(cpu, "_missing_features", lambda: ("avx2", "fma"))
    smi_kernels.resolve.cache_clear()
    try:
        with caplog.at_level("INFO"):
            for _ in range(2):
                assert smi_kernels.resolve("auto", CPU, torch.float32, 64).name == "chunked"
    finally:
        smi_kernels.resolve.cache_clear()
    (record,) = caplog.records
    assert "not cpu: this processor has no avx2, fma" in record.getMessage()


def test_importing_the_package_imports_no_numba():
    code = "import sys; sys.path[:0] = sys.argv[1:]; import smi_kernels; sys.exit('numba' in sys.modules)"
    path = str(Path(smi_kernels.__file__).parents[1])
    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == 0


@needs_kernel
def test_it_runs_where_no_cache_can_be_written(monkeypatch):
    from numba.core.ccallback import CFunc

    from smi_kernels.compiled import Loop, table
    from smi_kernels.vectors import fetch_add

    def refuse(self):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(CFunc, "enable_caching", refuse)
    counted = torch.zeros(1, dtype=torch.int64)

    def count(arguments):
        fetch_add(table(arguments, 1, 2)[0, 1])

    Loop(count).run(3, counted.data_ptr())
    assert counted.item() == 3


@needs_kernel
def test_pythons_threads_do_where_openmp_is_not_at_hand(monkeypatch, threads):
    from smi_kernels import compiled

    threads(2)
    want = run_all("cpu", *sample(), CUT)
    monkeypatch.setattr(compiled, "_openmp", lambda: None)
    assert all(torch.equal(x, y) for x, y in zip(run_all("cpu", *sample(), CUT), want, strict=True))


@needs_kernel
def test_loops_run_in_the_threads_of_torch(threads):
    """On Linux; nothing falls back in silence."""
    from smi_kernels import compiled

    library = torch.__config__.parallel_info()
    if sys.platform != "linux" or "OpenMP" not in library:
        pytest.skip(f"torch has no OpenMP here: {library}")
    assert compiled._openmp() is not None
