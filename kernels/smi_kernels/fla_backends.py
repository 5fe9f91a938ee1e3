"""RWKV-7 on GPUs with the kernels of flash-linear-attention (FLA): backends `triton` and `tilelang`.

FLA calls the recurrence DPLR, a delta rule with a diagonal plus low-rank transition. Both backends call its one
public function, `fla.ops.generalized_delta_rule.chunk_dplr_delta_rule` (`fla.ops.rwkv7.chunk_rwkv7` is the same
under other names of the arguments):

- `triton` calls FLA's own Triton kernels. FLA puts a dispatcher around its functions, which may prefer TileLang; what
  lies under it is called, so that the name of the backend is the truth.
- `tilelang` calls the dispatcher with chunks of 32, the size at which it prefers TileLang on Ampere to Hopper. The
  last word is FLA's, call by call: it takes its Triton kernels, at the same chunk size, where sequences x heads are
  too few to fill the GPU (below half its multiprocessors at head size 64), and where TileLang cannot compile. The
  first call of each path is logged, and FLA's logger `fla.backends` tells at INFO why TileLang was passed over.

FLA is imported when a backend is first asked about a CUDA device, never before: importing it starts Triton.

Precision: products in the dtype of the inputs, accumulated in float32; state and cumulative decay in float32. A float32
`w` beside bfloat16 inputs stays float32 in both paths, and so does its gradient. Float32 inputs are multiplied in
TF32 (about 1e-3), so `triton` takes them only where torch is allowed TF32 as well.

The decay's lower bound is a promise to FLA that licenses its tensor-core scheme. The scheme keeps within float32 for
log decays down to -2.6 at chunks of 64 and -5 at chunks of 32: RWKV-7's end at -0.6065.
"""

import importlib
import inspect
import logging
import os
import shutil
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smi_kernels.backend import Backend, Verdict
from smi_kernels.inputs import segment_bounds

log = logging.getLogger(__name__)

INSTALL = "pip install 'smi[gpu]'"
HEAD_SIZES = {"triton": (32, 64, 128), "tilelang": (64, 128)}
# -exp(-0.5): the fastest decay of RWKV-7
LOWER_BOUND = -0.6065306597126334


def _function() -> Callable[..., Any]:
    """FLA's function, with its dispatcher."""
    return importlib.import_module("fla.ops.generalized_delta_rule").chunk_dplr_delta_rule


@cache
def _triton_function() -> Callable[..., Any]:
    """FLA's function without its dispatcher; like FLA, out of sight of torch.compile."""
    return torch.compiler.disable(inspect.unwrap(_function()))


def _knows_lower_bound() -> bool:
    """FLA 0.6 came with the argument, and with TileLang kernels for DPLR."""
    return "lower_bound" in inspect.signature(_function()).parameters


@lru_cache(maxsize=64)
def _boundaries(bounds: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """cu_seqlens on the device and on the host, int32 [S + 1].

    FLA keeps what it derives from a boundary tensor by the tensor's identity. A tensor of our own for each list of
    boundaries makes that hit in every layer, and keeps a caller who writes to his tensor from getting stale results.
    """
    host = torch.tensor(bounds, dtype=torch.int32)
    return host.to(device), host


def path(o: Tensor) -> str | None:
    """Which of FLA's paths made the output `o`: "Triton" or "TileLang"; None where no gradient was asked for."""
    if o.grad_fn is None:
        return None
    return "Triton" if "ChunkDPLRDeltaRuleFunction" in type(o.grad_fn).__name__ else "TileLang"


@cache
def _log_path(backend: str, ran: str, chunk: int | None) -> None:
    log.info("WKV backend %s: FLA ran its %s kernels (chunk size %s)", backend, ran, chunk or "of its choice")


def _call(backend, function, chunk, r, w, k, v, a, b, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    how: dict[str, Any] = {"lower_bound": LOWER_BOUND} if _knows_lower_bound() else {"safe_gate": True}
    if cu_seqlens is not None:
        how["cu_seqlens"], how["cu_seqlens_cpu"] = _boundaries(segment_bounds(cu_seqlens), r.device)
    o, final_SHKV = function(
        # the Triton path makes its inputs contiguous, the TileLang path takes them to be
        q=r.contiguous(),
        k=k.contiguous(),
        v=v.contiguous(),
        a=a.contiguous(),
        b=b.contiguous(),
        gk=w.contiguous(),
        scale=1.0,
        # FLA's states are [S, H, K, V]
        initial_state=None if initial_state is None else initial_state.mT.contiguous(),
        output_final_state=True,
        chunk_size=chunk,
        **how,
    )
    ran = path(o)
    if ran is not None:
        _log_path(backend, ran, chunk)
    return o, final_SHKV.mT


def run_triton(r, w, k, v, a, b, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """See `smi_kernels.wkv7`. Chunks of 64 (of 16 under FLA 0.5 or Triton before 3.4)."""
    return _call("triton", _triton_function(), None, r, w, k, v, a, b, initial_state, cu_seqlens)


def run_tilelang(r, w, k, v, a, b, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """See `smi_kernels.wkv7`. Chunks of 32."""
    return _call("tilelang", _function(), 32, r, w, k, v, a, b, initial_state, cu_seqlens)


def has_nvcc() -> bool:
    """Whether TileLang would find CUDA's compiler, which it calls when a kernel first runs."""
    homes = [home for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda") if home]
    if shutil.which("nvcc") or any((Path(home) / "bin" / "nvcc").exists() for home in homes):
        return True
    try:
        return any(file.name == "nvcc" for file in files("nvidia-cuda-nvcc") or ())
    except PackageNotFoundError:
        return False


def _verify(backend: str, device: torch.device, dtype: torch.dtype, head_size: int) -> Verdict:
    if device.type != "cuda":
        return Verdict(False, f"it needs a CUDA device, not {device.type}")
    if not torch.cuda.is_available():
        return Verdict(False, "torch sees no CUDA device")
    if head_size not in HEAD_SIZES[backend]:
        sizes = ", ".join(map(str, HEAD_SIZES[backend]))
        return Verdict(False, f"its head sizes are {sizes}, not {head_size}")
    if dtype == torch.float64:
        return Verdict(False, "it has no float64")
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        return Verdict(False, f"it needs compute capability 8.0 (Ampere) or later, and this GPU has {major}.{minor}")
    packages = {"triton": "triton", "fla": "flash-linear-attention"}
    if backend == "tilelang":
        packages["tilelang"] = "tilelang"
    missing = [name for module, name in packages.items() if find_spec(module) is None]
    if missing:
        return Verdict(False, f"{' and '.join(missing)} not installed: {INSTALL}")
    try:
        _function()
    except Exception as error:  # whatever keeps FLA from being imported here, another backend may still run
        return Verdict(False, f"flash-linear-attention cannot be imported: {type(error).__name__}: {error}")
    return Verdict(True)


def verify_triton(device: torch.device, dtype: torch.dtype, head_size: int) -> Verdict:
    """Whether FLA's Triton kernels run here."""
    if dtype == torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() == "highest":
        return Verdict(
            False, "it multiplies float32 in TF32: torch.set_float32_matmul_precision('high') allows that, or use bf16"
        )
    return _verify("triton", device, dtype, head_size)


def verify_tilelang(device: torch.device, dtype: torch.dtype, head_size: int) -> Verdict:
    """Whether FLA's TileLang kernels run here."""
    if dtype not in (torch.bfloat16, torch.float16):
        return Verdict(False, f"it takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}")
    verdict = _verify("tilelang", device, dtype, head_size)
    if not verdict.ok:
        return verdict
    if torch.version.hip is not None:
        return Verdict(False, "it needs an NVIDIA GPU")
    for switch, off in (("FLA_TILELANG", "0"), ("FLA_DISABLE_BACKEND_DISPATCH", "1")):
        if os.environ.get(switch) == off:
            return Verdict(False, f"the environment's {switch}={off} turns it off in flash-linear-attention")
    if not has_nvcc():
        return Verdict(False, "it compiles with nvcc, which is missing: pip install nvidia-cuda-nvcc, or a CUDA toolkit")
    if not _knows_lower_bound():
        return Verdict(False, "flash-linear-attention is older than 0.6: pip install -U flash-linear-attention")
    return Verdict(True)


TRITON = Backend(name="triton", needs=f"a CUDA GPU; {INSTALL}", run=run_triton, verify=verify_triton)
TILELANG = Backend(name="tilelang", needs=f"an NVIDIA GPU, nvcc; {INSTALL}", run=run_tilelang, verify=verify_tilelang)
