"""RWKV-7 on GPUs with the kernels of flash-linear-attention (FLA): backends `triton` and `tilelang`.

FLA calls the recurrence DPLR, a delta rule with a diagonal plus low-rank transition. Both backends call its one
public function, `fla.ops.generalized_delta_rule.chunk_dplr_delta_rule` (`fla.ops.rwkv7.chunk_rwkv7` is the same
under other names of the arguments). FLA imports Triton, so it is imported when a backend is first asked about a CUDA
device, never before.

Which of FLA's kernels run follows from what it is promised of the decay:

- Promised nothing, FLA takes chunks of 16 and inverts I - A by substitution: that is `triton`.
- Promised a lower bound, FLA's Triton kernels invert by doubling, in float16 (0.6.0). On a token repeated with a gate
  near 1 the powers of A reach into the thousands, and nothing is left of the result. `triton` never promises.
- Promised a lower bound and asked for chunks of 32, FLA takes its TileLang kernels, which substitute in float32: that
  is `tilelang`. But FLA passes over TileLang, call by call, where it expects to lose: at head size 64, where sequences
  x heads are fewer than half the GPU's multiprocessors. `tilelang` asks FLA first, and runs what `triton` runs for
  the shapes that FLA declines. Which kernels ran is logged, once for each answer.

Precision: products in the dtype of the inputs, accumulated in float32; state and cumulative decay in float32. A float32
`w` beside 16-bit inputs is read as it is, and so is its gradient given; tensor cores round it to TF32 (11 bits where
bfloat16 has 8) on its way into the cumulative decay. Float32 inputs are multiplied in TF32 throughout (about 1e-3), so
`triton` takes them only where torch is allowed TF32 as well.
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
# what makes FLA prefer TileLang from Ampere to Hopper
PROMISE = {"chunk_size": 32, "lower_bound": LOWER_BOUND}


def _function() -> Callable[..., Any]:
    """FLA's function, with its dispatcher."""
    return importlib.import_module("fla.ops.generalized_delta_rule").chunk_dplr_delta_rule


@cache
def _triton_function() -> Callable[..., Any]:
    """FLA's function without its dispatcher; like FLA, out of sight of torch.compile."""
    return torch.compiler.disable(inspect.unwrap(_function()))


@cache
def _tilelang() -> Any:
    """FLA's own judge of its TileLang kernels for DPLR, which came with 0.6.

    Raises:
        ImportError: this FLA has none.
    """
    return importlib.import_module("fla.ops.generalized_delta_rule.dplr.backends").DPLRTileLangBackend()


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
def _log_once(message: str) -> None:
    log.info(message)


def _arguments(r, w, k, v, a, b, initial_state, cu_seqlens) -> dict[str, Any]:
    """Ours in FLA's terms. Its Triton path makes its inputs contiguous, its TileLang path takes them to be."""
    arguments: dict[str, Any] = {"q": r, "k": k, "v": v, "a": a, "b": b, "gk": w}
    arguments = {name: x.contiguous() for name, x in arguments.items()}
    # FLA's states are [S, H, K, V]
    arguments["initial_state"] = None if initial_state is None else initial_state.mT.contiguous()
    if cu_seqlens is not None:
        bounds = _boundaries(segment_bounds(cu_seqlens), r.device)
        arguments["cu_seqlens"], arguments["cu_seqlens_cpu"] = bounds
    return arguments | {"scale": 1.0, "output_final_state": True}


def run_triton(r, w, k, v, a, b, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """See `smi_kernels.wkv7`. FLA's Triton kernels, chunks of 16, any log decay."""
    arguments = _arguments(r, w, k, v, a, b, initial_state, cu_seqlens)
    o, final_SHKV = _triton_function()(**arguments)
    return o, final_SHKV.mT


def run_tilelang(r, w, k, v, a, b, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """See `smi_kernels.wkv7`. FLA's TileLang kernels, chunks of 32, log decays from -5; or as `run_triton`.

    Raises:
        RuntimeError: TileLang failed in a call that FLA said it would take. FLA goes over to Triton kernels of the
            kind that loses accuracy, so the result is not handed on.
    """
    arguments = _arguments(r, w, k, v, a, b, initial_state, cu_seqlens)
    accepted, why = _tilelang().verify("chunk_dplr_delta_rule", **arguments, **PROMISE)
    if not accepted:
        _log_once(f"WKV backend tilelang: FLA's Triton kernels, since {why}")
        o, final_SHKV = _triton_function()(**arguments)
        return o, final_SHKV.mT
    o, final_SHKV = _function()(**arguments, **PROMISE)
    if path(o) == "Triton":
        raise RuntimeError("TileLang failed (FLA's warning says how): choose the WKV backend triton")
    _log_once("WKV backend tilelang: FLA's TileLang kernels")
    return o, final_SHKV.mT


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
        return Verdict(False, "it compiles with nvcc, which is missing: install a CUDA toolkit or nvidia-cuda-nvcc")
    try:
        _tilelang()
    except (ImportError, AttributeError):
        return Verdict(False, "it needs flash-linear-attention 0.6 or later: pip install -U flash-linear-attention")
    return Verdict(True)


TRITON = Backend(name="triton", needs=f"a CUDA GPU; {INSTALL}", run=run_triton, verify=verify_triton)
TILELANG = Backend(name="tilelang", needs=f"an NVIDIA GPU, nvcc; {INSTALL}", run=run_tilelang, verify=verify_tilelang)
