"""The recurrence in chunks of 16 tokens: batched matrix products in plain torch, on any device.

Within a chunk that starts from the state ``X`` = S^T [K, V], with ``W`` the cumulative log decay,

    A~ = a e^(W - w)   B~ = b e^-W   K~ = k e^-W   R~ = r e^W                       [C, K]
    U  = (I - tril(A~ B~^T, -1))^-1 (A~ X + tril(A~ K~^T, -1) V)                    [C, V]
    O  = R~ X + tril(R~ K~^T) V + tril(R~ B~^T) U
    X' = diag(e^W_C) (X + K~^T V + B~^T U)

Everything but ``X -> U -> X'`` is independent from chunk to chunk, so that is all that runs in sequence. Segments
of a packed row advance side by side: a sequential step handles one chunk of every segment that is long enough.

The decays are relative to their own chunk: e^-W stays below e^(16 |w|), which float32 holds for any log decay
above -5 (RWKV-7's lies in (-0.6065, 0)). The inverse is a triangular solve; inverting by doubling loses all
digits on repeated keys.

The form is the WY representation of "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
(arXiv:2406.06484) with a diagonal decay. The backward pass recomputes the chunks from the inputs and the states
at their starts.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smi_kernels.backend import Backend, Verdict
from smi_kernels.inputs import segment_bounds, state_dtype

CHUNK = 16


@dataclass(frozen=True)
class _Layout:
    """How tokens are dealt into chunks. M chunks in all, in the order of the sequential steps.

    gather: int64 [M * H * C] rows of a [B * T * H, N] view; tails point at row 0.
    scatter: int64 [B * T * H] rows of a [M * H * C, N] view, the inverse.
    tails: int64 rows of the [M * H * C, N] view that hold no token.
    order: int64 [S] segment handled in each lane, longest first.
    active: lanes in each sequential step; their sum is M.
    """

    gather: Tensor
    scatter: Tensor
    tails: Tensor
    order: Tensor
    active: tuple[int, ...]


@lru_cache(maxsize=64)
def _layout(bounds: tuple[int, ...], heads: int, device: torch.device) -> _Layout:
    starts = torch.tensor(bounds[:-1])
    lengths = torch.tensor(bounds[1:]) - starts
    chunks = (lengths + CHUNK - 1) // CHUNK
    order = torch.argsort(chunks, descending=True, stable=True)
    steps = int(chunks.max())
    active = [int((chunks > step).sum()) for step in range(steps)]
    lane = torch.cat([torch.arange(n) for n in active])
    step = torch.repeat_interleave(torch.arange(steps), torch.tensor(active))
    offset = step[:, None] * CHUNK + torch.arange(CHUNK)  # [M, C] inside the segment
    segment = order[lane]
    valid = offset < lengths[segment][:, None]
    token = torch.where(valid, starts[segment][:, None] + offset, 0)

    head = torch.arange(heads)[None, :, None]
    rows = (token[:, None, :] * heads + head).reshape(-1)  # [M * H * C]
    valid = valid[:, None, :].expand(-1, heads, -1).reshape(-1)
    scatter = torch.empty(bounds[-1] * heads, dtype=torch.int64)
    scatter[rows[valid]] = torch.arange(rows.numel())[valid]
    tails = torch.nonzero(~valid).squeeze(1)
    return _Layout(rows.to(device), scatter.to(device), tails.to(device), order.to(device), tuple(active))


class _Chunks:
    """The per-chunk quantities of the module docstring, from inputs dealt as [M * H, C, N]."""

    def __init__(self, r, w, k, v, a, b):
        cumulative = w.cumsum(1)
        grow = cumulative.exp()
        shrink = cumulative.neg().exp()
        self.grow = grow
        self.shrink = shrink
        self.before = (cumulative - w).exp()
        self.last = grow[:, -1]  # e^W_C [M * H, K]
        self.r = r * grow
        self.a = a * self.before
        self.k = k * shrink
        self.b = b * shrink
        self.v = v
        self.ab = torch.bmm(self.a, self.b.mT).tril_(-1)
        self.ak = torch.bmm(self.a, self.k.mT).tril_(-1)
        self.rk = torch.bmm(self.r, self.k.mT).tril_()
        self.rb = torch.bmm(self.r, self.b.mT).tril_()
        identity = torch.eye(CHUNK, dtype=w.dtype, device=w.device).expand_as(self.ab)
        self.inverse = torch.linalg.solve_triangular(identity - self.ab, identity, upper=False, unitriangular=True)


def _deal(x: Tensor, layout: _Layout, dtype: torch.dtype) -> Tensor:
    """[B, T, H, N] -> [M * H, C, N]; tails are zero, which leaves the state as it is."""
    size = x.shape[-1]
    rows = x.reshape(-1, size).index_select(0, layout.gather).to(dtype)
    if layout.tails.numel():
        rows.index_fill_(0, layout.tails, 0)
    return rows.view(-1, CHUNK, size)


def _collect(x: Tensor, layout: _Layout, like: Tensor) -> Tensor:
    """[M * H, C, N] -> [B, T, H, N] in the dtype of `like`; tails are left behind."""
    size = x.shape[-1]
    return x.reshape(-1, size).index_select(0, layout.scatter).to(like.dtype).view(like.shape)


class _ChunkedWKV7(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, w, k, v, a, b, initial_state, layout):
        dtype = state_dtype(r.dtype)
        _, _, heads, size = r.shape
        chunks = _Chunks(*(_deal(x, layout, dtype) for x in (r, w, k, v, a, b)))
        lanes = len(layout.order)

        # X -> U -> X', with all that does not depend on X multiplied out beforehand
        au = torch.bmm(chunks.inverse, chunks.a)
        u0 = torch.bmm(chunks.inverse, torch.bmm(chunks.ak, chunks.v))
        kv = torch.bmm(chunks.k.mT, chunks.v)
        x = initial_state.mT.index_select(0, layout.order).reshape(lanes * heads, size, size)
        starts = torch.empty_like(kv)
        u = torch.empty_like(u0)
        # finished[lane] is set by the last step in which the lane is active
        finished = torch.empty_like(x)
        row = 0
        for step, lanes_now in enumerate(layout.active):
            n = lanes_now * heads
            at = slice(row, row + n)
            starts[at] = x
            torch.baddbmm(u0[at], au[at], x, out=u[at])
            x = torch.baddbmm(x + kv[at], chunks.b[at].mT, u[at]).mul_(chunks.last[at].unsqueeze(-1))
            row += n
            lanes_next = layout.active[step + 1] if step + 1 < len(layout.active) else 0
            if lanes_next < lanes_now:
                finished[lanes_next * heads : n] = x[lanes_next * heads :]
                x = x[: lanes_next * heads]

        o = torch.bmm(chunks.r, starts)
        o.baddbmm_(chunks.rk, chunks.v).baddbmm_(chunks.rb, u)
        final = torch.empty(lanes, heads, size, size, dtype=dtype, device=r.device)
        final[layout.order] = finished.view(lanes, heads, size, size).mT
        ctx.save_for_backward(r, w, k, v, a, b, starts, u, finished)
        ctx.layout = layout
        return _collect(o, layout, v), final

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o, grad_final):  # type: ignore[override]
        with torch.autocast(grad_o.device.type, enabled=False):
            return _ChunkedWKV7._backward(ctx, grad_o, grad_final)

    @staticmethod
    def _backward(ctx, grad_o, grad_final):
        r, w, k, v, a, b, starts, u, finished = ctx.saved_tensors
        layout: _Layout = ctx.layout
        dtype = state_dtype(r.dtype)
        _, _, heads, size = r.shape
        lanes = len(layout.order)
        c = _Chunks(*(_deal(x, layout, dtype) for x in (r, w, k, v, a, b)))
        do = _deal(grad_o, layout, dtype)

        # dX' -> dY = diag(e^W_C) dX' -> dP -> dX, the mirror of the forward scan
        dp0 = torch.bmm(c.inverse.mT, torch.bmm(c.rb.mT, do))
        bp = torch.bmm(c.inverse.mT, c.b)
        rdo = torch.bmm(c.r.mT, do)
        dfinal = grad_final.mT.index_select(0, layout.order).reshape(lanes * heads, size, size)
        dp = torch.empty_like(dp0)
        dy = torch.empty_like(rdo)
        dw_last = torch.empty_like(c.last)
        dx = dfinal[:0]
        ends = finished[:0]
        row = starts.shape[0]
        for step in reversed(range(len(layout.active))):
            n = layout.active[step] * heads
            # lanes that end in this step receive the gradient of their final state
            dx = torch.cat([dx, dfinal[dx.shape[0] : n]])
            ends = torch.cat([ends, finished[ends.shape[0] : n]])
            at = slice(row - n, row)
            torch.mul(dx, ends, out=dy[at])
            torch.sum(dy[at], -1, out=dw_last[at])
            torch.mul(dx, c.last[at].unsqueeze(-1), out=dy[at])
            torch.baddbmm(dp0[at], bp[at], dy[at], out=dp[at])
            dx = torch.baddbmm(rdo[at] + dy[at], c.a[at].mT, dp[at])
            ends = starts[at]
            row -= n
        dinitial = torch.empty(lanes, heads, size, size, dtype=dtype, device=r.device)
        dinitial[layout.order] = dx.view(lanes, heads, size, size).mT

        dab = torch.bmm(dp, u.mT).tril_(-1)
        dak = torch.bmm(dp, c.v.mT).tril_(-1)
        drk = torch.bmm(do, c.v.mT).tril_()
        drb = torch.bmm(do, u.mT).tril_()
        dv = torch.bmm(c.k, dy).baddbmm_(c.rk.mT, do).baddbmm_(c.ak.mT, dp)
        dr = torch.bmm(do, starts.mT).baddbmm_(drk, c.k).baddbmm_(drb, c.b)
        da = torch.bmm(dp, starts.mT).baddbmm_(dab, c.b).baddbmm_(dak, c.k)
        dk = torch.bmm(c.v, dy.mT).baddbmm_(drk.mT, c.r).baddbmm_(dak.mT, c.a)
        db = torch.bmm(u, dy.mT).baddbmm_(drb.mT, c.r).baddbmm_(dab.mT, c.a)

        # W_t feeds R~, K~ and B~ of its own token and A~ of the next; w_t feeds every W from t on
        da_scaled = da * c.a
        dw = (dr * c.r).sub_(dk * c.k).sub_(db * c.b)
        dw[:, :-1] += da_scaled[:, 1:]
        dw[:, -1] += dw_last
        dw = dw.flip(1).cumsum(1).flip(1)

        grads = (
            _collect(dr.mul_(c.grow), layout, r),
            _collect(dw, layout, w),
            _collect(dk.mul_(c.shrink), layout, k),
            _collect(dv, layout, v),
            _collect(da.mul_(c.before), layout, a),
            _collect(db.mul_(c.shrink), layout, b),
        )
        return *grads, dinitial, None


def run(r, w, k, v, a, b, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """See `smi_kernels.wkv7`."""
    batch, length, heads, size = r.shape
    rows = tuple(range(0, batch * length + 1, length))
    bounds = rows if cu_seqlens is None else segment_bounds(cu_seqlens)
    if initial_state is None:
        initial_state = r.new_zeros(len(bounds) - 1, heads, size, size, dtype=state_dtype(r.dtype))
    layout = _layout(bounds, heads, r.device)
    return _ChunkedWKV7.apply(r, w, k, v, a, b, initial_state, layout)  # type: ignore[return-value]


BACKEND = Backend(name="chunked", needs="nothing", run=run, verify=lambda device, dtype, head_size: Verdict(True))
