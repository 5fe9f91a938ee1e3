"""Every backend on a CUDA device, held against the recurrence in float64: ``pytest -m gpu tests/kernels``."""

import pytest
import torch

import smi_kernels
from smi_kernels import numerics

pytestmark = pytest.mark.gpu

SETTINGS = [("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 32), ("float16", 64), ("float32", 64)]


@pytest.mark.parametrize("case", numerics.CASES, ids=lambda case: case.__name__.strip("_"))
@pytest.mark.parametrize(("dtype", "head_size"), SETTINGS)
@pytest.mark.parametrize("backend", smi_kernels.available())
def test_numerics(backend, dtype, head_size, case):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    setting = numerics.Setting(torch.device("cuda"), getattr(torch, dtype), head_size)
    try:
        smi_kernels.resolve(backend, setting.device, setting.dtype, head_size)
    except ValueError as refusal:
        pytest.skip(str(refusal))
    finding = case(backend, setting)
    assert finding.ok, finding
