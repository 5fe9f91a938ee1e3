"""What every backend may rely on: shapes, dtypes, devices and boundaries, checked before any kernel runs."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# boundaries already read off a cu_seqlens tensor: every layer of a model is handed the same one, and
# reading it on a GPU costs a synchronisation.
_bounds: WeakIdKeyDictionary = WeakIdKeyDictionary()


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the recurrent state for inputs of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _version(x: Tensor) -> int:
    # tensors made under inference_mode cannot be written to in place outside it and count no versions
    return 0 if x.is_inference() else x._version


def segment_bounds(cu_seqlens: Tensor) -> tuple[int, ...]:
    """The boundaries as integers, checked once per tensor.

    Raises:
        ValueError: not a one-dimensional integer tensor that starts at 0 and strictly increases.
    """
    known = _bounds.get(cu_seqlens)
    if known is not None and known[0] == _version(cu_seqlens):
        return known[1]
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.numel() < 2:
        raise ValueError(
            f"cu_seqlens must be an int32 tensor of shape [segments + 1], "
            f"not {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
        )
    bounds = tuple(cu_seqlens.tolist())
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, not {bounds[0]}")
    for i, (start, end) in enumerate(pairwise(bounds)):
        if end <= start:
            raise ValueError(f"cu_seqlens must strictly increase, but entry {i} is {start} and entry {i + 1} is {end}")
    _bounds[cu_seqlens] = (_version(cu_seqlens), bounds)
    return bounds


def check_inputs(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Raises ValueError unless the arguments are as `smi_kernels.wkv7` documents them."""
    if r.ndim != 4:
        raise ValueError(f"r must be [B, T, H, N], not of shape {list(r.shape)}")
    if r.dtype not in DTYPES:
        raise ValueError(f"r must be float64, float32, bfloat16 or float16, not {r.dtype}")
    batch, length, heads, size = r.shape
    if min(batch, length, heads, size) == 0:
        raise ValueError(f"empty inputs: r has shape {list(r.shape)}")
    for name, x in (("w", w), ("k", k), ("v", v), ("a", a), ("b", b)):
        if x.shape != r.shape:
            raise ValueError(f"{name} has shape {list(x.shape)} and r {list(r.shape)}: they must be equal")
        if x.dtype != r.dtype and not (name == "w" and x.dtype == torch.float32 and r.dtype != torch.float64):
            raise ValueError(f"{name} is {x.dtype} and r {r.dtype}: they must be equal (w may be float32)")
        if x.device != r.device:
            raise ValueError(f"{name} is on {x.device} and r on {r.device}")

    segments = batch
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(f"cu_seqlens packs one row: B must be 1, not {batch}")
        bounds = segment_bounds(cu_seqlens)
        if bounds[-1] != length:
            raise ValueError(f"cu_seqlens ends at {bounds[-1]}, but the row has {length} tokens")
        segments = len(bounds) - 1
    if initial_state is not None:
        want = (segments, heads, size, size)
        if tuple(initial_state.shape) != want:
            raise ValueError(f"initial_state must be [S, H, V, K] = {list(want)}, not {list(initial_state.shape)}")
        if initial_state.dtype != state_dtype(r.dtype):
            raise ValueError(f"initial_state must be {state_dtype(r.dtype)}, not {initial_state.dtype}")
        if initial_state.device != r.device:
            raise ValueError(f"initial_state is on {initial_state.device} and r on {r.device}")
