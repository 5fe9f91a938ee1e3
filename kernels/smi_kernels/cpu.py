"""WKV-7 on x86 processors: the recurrence token by token, in vector code that numba compiles on first use.

A chunked form buys matrix products and pays for them with arithmetic. On a CPU it need not: the state of a head fits
the first-level cache, where the sequential form runs as fast as the machine can multiply. `cpu_loops` has the loops;
here are memory, threads and autograd.

Saved for the backward: the state every `WINDOW` tokens and S a of each token, in float32. Without a gradient to
compute, neither is.

Every head of every segment is computed by one thread, in one order: results do not depend on how many threads there
are (`torch.get_num_threads`), nor on what else is in the row.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smi_kernels.backend import Backend, Verdict
from smi_kernels.inputs import segment_bounds

if TYPE_CHECKING:
    from smi_kernels.compiled import Loop

# how compiled loops are told the dtype of a tensor
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# head sizes are multiples of it: two AVX-512 vectors, four of AVX2
SIZE_STEP = 32
_FEATURES = ("avx2", "fma", "f16c")


@cache
def _loops():
    # numba takes half a second to import: on first use, not with this package
    from smi_kernels import cpu_loops

    return cpu_loops


@cache
def _missing_features() -> tuple[str, ...]:
    import llvmlite.binding

    features = llvmlite.binding.get_host_cpu_features()
    return tuple(name for name in _FEATURES if not features.get(name, False))


def _segments(shape: torch.Size, bounds: tuple[int, ...] | None) -> tuple[np.ndarray, int]:
    """int64 [S, 5], the longest first: row of the batch, first token, tokens, segment, first window; and the number
    of windows in all."""
    batch, length, _, _ = shape
    spans = [(row, 0, length) for row in range(batch)] if bounds is None else [(0, i, j) for i, j in pairwise(bounds)]
    table, windows = [], 0
    for segment, (row, start, end) in enumerate(spans):
        table.append((row, start, end - start, segment, windows))
        windows += -(-(end - start) // _loops().WINDOW)
    table.sort(key=lambda entry: -entry[2])
    return np.array(table, np.int64), windows


def _in_parallel(loop: "Loop", tensors: Sequence[Tensor], states: Sequence[Tensor], segments: np.ndarray) -> None:
    """Lets each thread take jobs until none is left.

    tensors: [B, T, H, N] each, in the order of the loop's operands; states: contiguous, in the order of its arguments.
    """
    heads, size = tensors[0].shape[2:]
    threads = min(torch.get_num_threads(), len(segments) * heads)
    scratch = torch.empty(threads, _loops().scratch_size(size))
    # address, strides of B, T and H in bytes, kind
    table = [(x.data_ptr(), *(step * x.element_size() for step in x.stride()[:3]), KINDS[x.dtype]) for x in tensors]
    operands, taken = np.array(table, np.int64), np.zeros(1, np.int64)
    # the address of an empty tensor is 0, which tells the loop that there is none
    addresses = [x.data_ptr() for x in [*states, scratch]]
    loop.run(
        threads, operands.ctypes.data, segments.ctypes.data, len(segments), heads, size, *addresses, taken.ctypes.data
    )


def _rows(x: Tensor) -> Tensor:
    """x itself where the elements of a head lie side by side; strides of the other dimensions are free."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _CPUWKV7(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, w, k, v, a, b, initial_state, bounds, keep):
        inputs = [_rows(x) for x in (r, w, k, v, a, b)]
        batch, length, heads, size = r.shape
        segments, windows = _segments(r.shape, bounds)
        o = torch.empty(v.shape, dtype=v.dtype)
        final = torch.empty(len(segments), heads, size, size)
        checkpoints = torch.empty(windows if keep else 0, heads, size, size)
        sa = torch.empty(batch, heads, length if keep else 0, size).transpose(1, 2)
        initial = final.new_empty(0) if initial_state is None else initial_state.contiguous()
        _in_parallel(_loops().forward, [*inputs, o, sa], [initial, final, checkpoints], segments)
        ctx.save_for_backward(*inputs, sa, checkpoints)
        ctx.bounds = bounds
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o, grad_final):  # type: ignore[override]
        *inputs, sa, checkpoints = ctx.saved_tensors
        shape = inputs[0].shape
        segments, _ = _segments(shape, ctx.bounds)
        grad_o, grad_final = _rows(grad_o), grad_final.contiguous()
        grads = [torch.empty(shape, dtype=x.dtype) for x in inputs]
        grad_initial = torch.empty_like(grad_final)
        states = [grad_final, grad_initial, checkpoints]
        _in_parallel(_loops().backward, [*inputs, sa, grad_o, *grads], states, segments)
        return *grads, grad_initial if ctx.needs_input_grad[6] else None, None, None


def run(r, w, k, v, a, b, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """See `smi_kernels.wkv7`."""
    tensors = [x for x in (r, w, k, v, a, b, initial_state) if x is not None]
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    bounds = None if cu_seqlens is None else segment_bounds(cu_seqlens)
    return _CPUWKV7.apply(r, w, k, v, a, b, initial_state, bounds, keep)  # type: ignore[return-value]


def verify(device: torch.device, dtype: torch.dtype, head_size: int) -> Verdict:
    """Takes float32, bfloat16 and float16 on an x86 processor with AVX2, FMA and F16C; see `Backend`."""
    if device.type != "cpu":
        return Verdict(False, f"tensors are on {device.type}")
    if dtype not in KINDS:
        return Verdict(False, f"computes in float32, not in {str(dtype).removeprefix('torch.')}")
    if head_size % SIZE_STEP:
        return Verdict(False, f"head size {head_size} is not a multiple of {SIZE_STEP}")
    if find_spec("numba") is None:
        return Verdict(False, "numba is not installed")
    if missing := _missing_features():
        return Verdict(False, f"this processor has no {', '.join(missing)}")
    return Verdict(True)


BACKEND = Backend(name="cpu", needs="x86 with AVX2, FMA and F16C", run=run, verify=verify)
