"""The recurrence in chunks of 16 tokens: batched matrix products in plain torch, on any device.

Within a chunk that starts from the state ``X`` = S^T [K, V], with ``W`` the cumulative log decay, ``D`` = diag(e^W_C)
and tokens stacked two by two, [2C, N] each:

    AR = [a e^(W - w); r e^W]     BK = [b e^-W; k e^-W]     UV = [U; v]     G = AR BK^T, causal
    U  = T (a e^(W - w) X + G_ak v)        T = (I - G_ab)^-1
    O  = r e^W X + G_r UV
    X' = D (X + BK^T UV)

where G's rows of ``a`` see earlier tokens and its rows of ``r`` their own as well. Everything but X -> U -> X' is
independent from chunk to chunk, so that is all that runs in sequence. Segments of a packed row advance side by side,
each in a lane of its own: a sequential step handles one chunk of every lane that is long enough.

Steps run in groups. One group's intermediates are alive at a time, which bounds memory and keeps them in a CPU's
cache; the backward pass saves the states at the groups' starts and the inverses T, and recomputes the rest.

The decays are relative to their own chunk: e^-W stays below e^(16 |w|), which float32 holds for any log decay
above -5 (RWKV-7's lies in (-0.6065, 0)). The inverse is a triangular solve; inverting by doubling loses all
digits on repeated keys.

The form is the WY representation of "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
(arXiv:2406.06484) with a diagonal decay.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smi_kernels.backend import Backend, Verdict
from smi_kernels.inputs import segment_bounds, state_dtype

CHUNK = 16
# chunks times heads whose intermediates are alive together: about 80 KiB each at head size 64. Long enough for
# batched products to pay, short enough for a cache. Many lanes may exceed it: fewer steps would save more states
# than recomputing is worth.
GROUP = 512
MIN_STEPS = 8


@dataclass(frozen=True)
class _Group:
    """Consecutive sequential steps; M chunks, ordered by step, then lane.

    tokens: int64 [M * C] rows of a [B * T, H * N] view; tails point at row 0.
    held: int64 places in `tokens` that hold a token, or None when all do.
    tails: int64 places that hold none.
    active: lanes in each step, never more than in the step before.
    """

    tokens: Tensor
    held: Tensor | None
    tails: Tensor
    active: tuple[int, ...]

    def steps(self, heads: int) -> Iterator[slice]:
        """The rows of each step in the group's [M * H, ...] tensors."""
        row = 0
        for lanes in self.active:
            yield slice(row, row + lanes * heads)
            row += lanes * heads


@dataclass(frozen=True)
class _Layout:
    """How tokens are dealt into chunks. order: int64 [S] segment handled in each lane, longest first."""

    order: Tensor
    groups: tuple[_Group, ...]


@lru_cache(maxsize=64)
def _layout(bounds: tuple[int, ...], heads: int, device: torch.device) -> _Layout:
    starts = torch.tensor(bounds[:-1])
    lengths = torch.tensor(bounds[1:]) - starts
    chunks = (lengths + CHUNK - 1) // CHUNK
    order = torch.argsort(chunks, descending=True, stable=True)
    starts, lengths, chunks = starts[order], lengths[order], chunks[order]
    active = [int((chunks > step).sum()) for step in range(int(chunks[0]))]

    groups = []
    first = 0
    while first < len(active):
        last = min(first + max(MIN_STEPS, GROUP // (active[first] * heads)), len(active))
        lane = torch.cat([torch.arange(n) for n in active[first:last]])
        step = torch.repeat_interleave(torch.arange(first, last), torch.tensor(active[first:last]))
        offset = step[:, None] * CHUNK + torch.arange(CHUNK)  # [M, C] inside the segment
        holds = offset < lengths[lane][:, None]
        tokens = torch.where(holds, starts[lane][:, None] + offset, 0).flatten()
        holds = holds.flatten()
        held = None if holds.all() else holds.nonzero().squeeze(1).to(device)
        tails = (~holds).nonzero().squeeze(1).to(device)
        groups.append(_Group(tokens.to(device), held, tails, tuple(active[first:last])))
        first = last
    return _Layout(order.to(device), tuple(groups))


def _deal(x: Tensor, group: _Group, dtype: torch.dtype) -> Tensor:
    """[B, T, H, N] -> [M, H, C, N], not contiguous; tails are zero, which leaves the state as it is."""
    _, _, heads, size = x.shape
    rows = x.reshape(-1, heads * size).index_select(0, group.tokens).to(dtype)
    if group.held is not None:
        rows.index_fill_(0, group.tails, 0)
    return rows.view(-1, CHUNK, heads, size).transpose(1, 2)


def _collect(rows: Tensor, group: _Group, out: Tensor) -> None:
    """[M, C, H, N] -> their places in [B, T, H, N]; tails are left behind."""
    tokens = group.tokens
    rows = rows.view(len(tokens), -1)
    if group.held is not None:
        tokens, rows = tokens[group.held], rows[group.held]
    out.view(-1, rows.shape[1]).index_copy_(0, tokens, rows.to(out.dtype))


class _Chunks:
    """The per-chunk quantities of the module docstring for one group: R = M * H matrices of each kind.

    before, grow, shrink: [M, H, C, N] e^(W - w), e^W and e^-W.
    last: [R, K, 1] e^W_C.
    ar, bk, uv: [R, 2C, N]; the U of `uv` is the caller's to fill in.
    gram: [R, 2C, 2C] G.
    """

    def __init__(self, group: _Group, r, w, k, v, a, b):
        dtype = state_dtype(r.dtype)
        r, w, k, v, a, b = (_deal(x, group, dtype) for x in (r, w, k, v, a, b))
        chunks, heads, _, size = r.shape
        decay = r.new_empty(chunks, heads, CHUNK + 1, size)
        decay[:, :, 0] = 0
        torch.cumsum(w, 2, out=decay[:, :, 1:])
        decay.exp_()
        self.before, self.grow = decay[:, :, :-1], decay[:, :, 1:]
        self.shrink = self.grow.reciprocal()
        self.last = self.grow[:, :, -1].reshape(-1, size, 1)

        ar, bk, uv = (r.new_empty(chunks, heads, 2 * CHUNK, size) for _ in range(3))
        torch.mul(a, self.before, out=ar[:, :, :CHUNK])
        torch.mul(r, self.grow, out=ar[:, :, CHUNK:])
        torch.mul(b, self.shrink, out=bk[:, :, :CHUNK])
        torch.mul(k, self.shrink, out=bk[:, :, CHUNK:])
        uv[:, :, CHUNK:] = v
        self.ar, self.bk, self.uv = (x.view(-1, 2 * CHUNK, size) for x in (ar, bk, uv))
        self.v = self.uv[:, CHUNK:]
        self.gram = _causal(torch.bmm(self.ar, self.bk.mT))


def _causal(gram: Tensor) -> Tensor:
    """Keeps what a token may see: in the rows of `a` earlier tokens, in the rows of `r` its own as well."""
    for rows, diagonal in ((slice(CHUNK), -1), (slice(CHUNK, None), 0)):
        for columns in (slice(CHUNK), slice(CHUNK, None)):
            gram[:, rows, columns].tril_(diagonal)
    return gram


class _ChunkedWKV7(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, w, k, v, a, b, initial_state, layout):
        _, _, heads, size = r.shape
        # a lane's state stays where its last step left it
        x = initial_state.index_select(0, layout.order).mT.reshape(-1, size, size)
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        identity = torch.eye(CHUNK, dtype=x.dtype, device=x.device)
        starts, inverses = [], []
        for group in layout.groups:
            c = _Chunks(group, r, w, k, v, a, b)
            inverse = torch.linalg.solve_triangular(
                identity - c.gram[:, :CHUNK, :CHUNK], identity, upper=False, unitriangular=True
            )
            starts.append(x[: group.active[0] * heads].clone())
            inverses.append(inverse)

            # [U; O] = left X + base
            left, base = c.ar.clone(), torch.bmm(c.gram[:, :, CHUNK:], c.v)
            for part in (left, base):
                u = torch.bmm(inverse, part[:, :CHUNK])
                part[:, :CHUNK] = u
                part[:, CHUNK:] += torch.bmm(c.gram[:, CHUNK:, :CHUNK], u)
            uo = torch.empty_like(base)
            for at in group.steps(heads):
                now = x[: at.stop - at.start]
                torch.baddbmm(base[at], left[at], now, out=uo[at])
                c.uv[at, :CHUNK] = uo[at, :CHUNK]
                now.baddbmm_(c.bk[at].mT, c.uv[at]).mul_(c.last[at])
            _collect(uo.view(-1, heads, 2 * CHUNK, size)[:, :, CHUNK:].transpose(1, 2).contiguous(), group, o)
        final = torch.empty_like(initial_state, memory_format=torch.contiguous_format)
        final[layout.order] = x.view(-1, heads, size, size).mT
        ctx.save_for_backward(r, w, k, v, a, b, *starts, *inverses)
        ctx.layout = layout
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o, grad_final):  # type: ignore[override]
        with torch.autocast(grad_o.device.type, enabled=False):
            return _ChunkedWKV7._backward(ctx, grad_o, grad_final)

    @staticmethod
    def _backward(ctx, grad_o, grad_final):
        layout: _Layout = ctx.layout
        inputs, saved = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
        _, _, heads, size = grad_o.shape
        count = len(layout.groups)
        dx = grad_final.index_select(0, layout.order).mT.reshape(-1, size, size)
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
        for group, start, inverse in zip(reversed(layout.groups), saved[count - 1 :: -1], saved[: count - 1 : -1], strict=True):
            _backward_group(group, inputs, start, inverse, grad_o, dx, grads)
        dinitial = torch.empty_like(grad_final, memory_format=torch.contiguous_format)
        dinitial[layout.order] = dx.view(-1, heads, size, size).mT
        return *grads, dinitial, None


def _backward_group(group: _Group, inputs, start: Tensor, inverse: Tensor, grad_o: Tensor, dx: Tensor, grads) -> None:
    """Writes one group's part of `grads`; `dx` holds the gradients of the states at its end, then at its start."""
    heads, size = grad_o.shape[2:]
    c = _Chunks(group, *inputs)
    x = c.gram.new_empty(c.gram.shape[0], size, size)  # the states at the starts of all chunks
    steps = list(group.steps(heads))

    left = torch.bmm(inverse, c.ar[:, :CHUNK])
    base = torch.bmm(inverse, torch.bmm(c.gram[:, :CHUNK, CHUNK:], c.v))
    x[steps[0]] = start
    for i, at in enumerate(steps):
        c.uv[at, :CHUNK] = torch.baddbmm(base[at], left[at], x[at])
        if i + 1 < len(steps):
            after = steps[i + 1]
            n = after.stop - after.start
            on = slice(at.start, at.start + n)
            torch.baddbmm(x[on], c.bk[on].mT, c.uv[on], out=x[after]).mul_(c.last[on])

    # dX' -> dY = D dX' -> dP, the gradient of what the inverse is applied to -> dX, the mirror of the forward scan
    pdo = torch.empty_like(c.uv)  # [dP; dO]
    pdo.view(-1, heads, 2 * CHUNK, size)[:, :, CHUNK:] = _deal(grad_o, group, pdo.dtype)
    left = c.bk.clone()
    left[:, :CHUNK] = torch.bmm(inverse.mT, c.bk[:, :CHUNK])
    base = torch.bmm(c.gram[:, CHUNK:].mT, pdo[:, CHUNK:])
    base[:, :CHUNK] = torch.bmm(inverse.mT, base[:, :CHUNK])
    pdv = torch.empty_like(base)  # [dP; dv]
    dbk = torch.empty_like(c.bk)
    dlast = torch.empty_like(c.last)
    for at in reversed(steps):
        dy = dx[: at.stop - at.start].mul_(c.last[at])
        torch.sum(dy * x[at], -1, keepdim=True, out=dlast[at])
        torch.baddbmm(base[at], left[at], dy, out=pdv[at])
        torch.bmm(c.uv[at], dy.mT, out=dbk[at])
        pdo[at, :CHUNK] = pdv[at, :CHUNK]
        dy.baddbmm_(c.ar[at].mT, pdo[at])
    # X' = D (X + BK^T UV): the part of BK in the gradient of e^W_C, times e^W_C
    dlast += (dbk * c.bk).sum(1).unsqueeze(-1)

    dgram = _causal(torch.bmm(pdo, c.uv.mT))
    dar = torch.bmm(pdo, x.mT).baddbmm_(dgram, c.bk)
    dbk.baddbmm_(dgram.mT, c.ar)
    dv = pdv[:, CHUNK:] + torch.bmm(c.gram[:, :CHUNK, CHUNK:].mT, pdo[:, :CHUNK])

    # W_t feeds r~, k~ and b~ of its own token and a~ of the next; w_t feeds every W from t on
    war, wbk = dar * c.ar, dbk * c.bk
    dw = war[:, CHUNK:] - wbk[:, :CHUNK] - wbk[:, CHUNK:]
    dw[:, :-1] += war[:, 1:CHUNK]
    dw[:, -1:] += dlast.mT
    dw = dw.flip(1).cumsum(1).flip(1)

    dar, dbk = (x.view(-1, heads, 2 * CHUNK, size) for x in (dar, dbk))
    parts = (
        (dar[:, :, CHUNK:], c.grow),
        (dw, None),
        (dbk[:, :, CHUNK:], c.shrink),
        (dv, None),
        (dar[:, :, :CHUNK], c.before),
        (dbk[:, :, :CHUNK], c.shrink),
    )
    for (part, scale), grad in zip(parts, grads, strict=True):
        part = part.view(-1, heads, CHUNK, size).transpose(1, 2)
        part = part.contiguous() if scale is None else (part * scale.transpose(1, 2)).contiguous()
        _collect(part, group, grad)


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
