"""FLA's kernels without a GPU: Triton's through its interpreter, TileLang's through nvcc. Minutes each, so `full`.

Each in a process of its own: the interpreter is chosen for a whole process, and neither may leak into other tests.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from smi_kernels.fla_backends import INSTALL, has_nvcc

HERE = Path(__file__).parent
CASES = ["rows, strided", "packed", "isolated, bit for bit", "in pieces", "repeated key", "fastest decay"]


def need(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: {INSTALL}")


def run(program, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, HERE / program, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "head_size"), [("float32", 32), ("float16", 64)])
def test_triton_kernels_agree_with_the_recurrence(dtype, head_size):
    need("triton", "fla")
    findings = run("fla_interpreted.py", dtype, str(head_size))
    assert [case for case, *_ in findings] == CASES
    for case, error, tolerance, where in findings:
        # the interpreter multiplies float32 in float32
        assert error <= (2e-6 if dtype == "float32" else tolerance), f"{case}: {where} is {error:.1e} off"


@pytest.mark.full
def test_tilelang_kernels_compile_for_hopper(tmp_path):
    need("triton", "fla", "tilelang")
    if not has_nvcc():
        pytest.skip("nvcc is missing: install a CUDA toolkit or nvidia-cuda-nvcc")
    seconds = run("fla_compiled.py", "bfloat16", "64", TILELANG_CACHE_DIR=str(tmp_path))
    print(seconds)
    assert len(seconds) == 8, seconds
