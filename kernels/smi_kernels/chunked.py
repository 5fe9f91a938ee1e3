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

Heads run in blocks and steps in groups. One group's intermediates are alive at a time, which bounds memory and keeps
them in a CPU's cache: products of matrices that are not there run at a third of the speed. The backward pass gets
the states at the groups' starts and the inverses T, and recomputes the rest.

The decays are relative to their own chunk: e^-W stays below e^(16 |w|), which float32 holds with room for the keys
for any log decay above -4 (RWKV-7's lies in (-0.6065, 0)). The inverse is a triangular solve; inverting by doubling
loses all digits on repeated keys.

The form is the WY representation of "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
(arXiv:2406.06484) with a diagonal decay.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smi_kernels.backend import Backend, Verdict
from smi_kernels.inputs import segment_bounds, state_dtype

CHUNK = 16
# chunks alive together, counted once per head: in a group, and in one of its steps where steps can be split by heads.
# About 100 KiB each at head size 64, so that a group fits a CPU's cache; elsewhere long batches matter more.
GROUP = {"cpu": 128}
STEP = {"cpu": 32}
GROUP_ELSEWHERE = 4096
# fewer steps in a group would save more states than recomputing them is worth
MIN_STEPS = 4


@dataclass(frozen=True)
class _Group:
    """Consecutive sequential steps; M chunks, ordered by step, then lane.

    tokens: int64 [M * C] rows of a [B * T, H, N] view; tails point at row 0.
    held: int64 places in `tokens` that hold a token, or None when all do.
    tails: int64 places that hold none.
    active: lanes in each step, never more than in the step before.
    """

    tokens: Tensor
    held: Tensor | None
    tails: Tensor
    active: tuple[int, ...]

    def steps(self, heads: int) -> list[slice]:
        """The rows of each step in the group's [M * H, ...] tensors."""
        ends = list(accumulate(lanes * heads for lanes in self.active))
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class _Layout:
    """How heads are dealt into blocks and tokens into chunks.

    order: int64 [S] segment handled in each lane, longest first.
    heads: the blocks of heads, each of which goes through all groups.
    """

    order: Tensor
    heads: tuple[slice, ...]
    groups: tuple[_Group, ...]


@lru_cache(maxsize=64)
def _layout(bounds: tuple[int, ...], heads: int, device: torch.device) -> _Layout:
    starts = torch.tensor(bounds[:-1])
    lengths = torch.tensor(bounds[1:]) - starts
    chunks = (lengths + CHUNK - 1) // CHUNK
    order = torch.argsort(chunks, descending=True, stable=True)
    starts, lengths, chunks = starts[order], lengths[order], chunks[order]
    active = [int((chunks > step).sum()) for step in range(int(chunks[0]))]

    group_size = GROUP.get(device.type, GROUP_ELSEWHERE)
    block = min(heads, max(1, STEP.get(device.type, GROUP_ELSEWHERE) // active[0]))
    groups = []
    first = 0
    while first < len(active):
        last = min(first + max(MIN_STEPS, group_size // (active[first] * block)), len(active))
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
    blocks = tuple(slice(h, min(h + block, heads)) for h in range(0, heads, block))
    return _Layout(order.to(device), blocks, tuple(groups))


def _deal(x: Tensor, group: _Group, dtype: torch.dtype) -> Tensor:
    """[B, T, H, N] -> [M, C, H, N]; tails are zero, which leaves the state as it is."""
    rows = x.flatten(0, 1).index_select(0, group.tokens).to(dtype)
    if group.held is not None:
        rows.index_fill_(0, group.tails, 0)
    return rows.unflatten(0, (-1, CHUNK))


def _collect(rows: Tensor, group: _Group, out: Tensor) -> None:
    """[M, C, H, N] -> their places in [B, T, H, N]; tails are left behind."""
    rows, tokens = rows.flatten(0, 1), group.tokens
    if group.held is not None:
        rows, tokens = rows[group.held], tokens[group.held]
    out.flatten(0, 1).index_copy_(0, tokens, rows.to(out.dtype))


def _lanes(state: Tensor, layout: _Layout, block: slice) -> Tensor:
    """[S, H, V, K] -> [S * H, K, V] of a block of heads, in the order of the lanes; a copy."""
    size = state.shape[-1]
    return state[:, block].index_select(0, layout.order).mT.contiguous().view(-1, size, size)


def _segments(x: Tensor, layout: _Layout, block: slice, out: Tensor) -> None:
    """The inverse of `_lanes`, into its place in `out`."""
    size = x.shape[-1]
    out[:, block].index_copy_(0, layout.order, x.view(len(layout.order), -1, size, size).mT)


class _Chunks:
    """The per-chunk quantities of the module docstring for one group: R = M * H matrices of each kind.

    before, grow, shrink: [M, C, H, N] e^(W - w), e^W and e^-W.
    last: [R, K, 1] e^W_C.
    ar, bk, uv: [R, 2C, N]; the U of `uv` is the caller's to fill in.
    mask: [2C, 2C] what a token may see: in the rows of `a` earlier tokens, in the rows of `r` its own as well.
    gram: [R, 2C, 2C] G.
    """

    def __init__(self, group: _Group, r, w, k, v, a, b):
        dtype = state_dtype(r.dtype)
        r, w, k, v, a, b = (_deal(x, group, dtype) for x in (r, w, k, v, a, b))
        chunks, _, heads, size = r.shape
        lower = r.new_ones(CHUNK + 1, CHUNK).tril(-1)
        decay = torch.bmm(lower.expand(chunks, -1, -1), w.flatten(2)).exp_().unflatten(2, (heads, size))
        self.before, self.grow = decay[:, :-1], decay[:, 1:]
        self.shrink = self.grow.reciprocal()
        self.last = decay[:, -1].reshape(-1, size, 1)

        ar, bk, uv = (r.new_empty(chunks, heads, 2 * CHUNK, size) for _ in range(3))
        for x, scale, out in (
            (a, self.before, ar[:, :, :CHUNK]),
            (r, self.grow, ar[:, :, CHUNK:]),
            (b, self.shrink, bk[:, :, :CHUNK]),
            (k, self.shrink, bk[:, :, CHUNK:]),
        ):
            torch.mul(x.transpose(1, 2), scale.transpose(1, 2), out=out)
        uv[:, :, CHUNK:] = v.transpose(1, 2)
        self.ar, self.bk, self.uv = (x.view(-1, 2 * CHUNK, size) for x in (ar, bk, uv))
        self.v = self.uv[:, CHUNK:]
        self.mask = torch.cat([lower[:CHUNK], lower[1:]]).repeat(1, 2)
        self.gram = torch.bmm(self.ar, self.bk.mT).mul_(self.mask)


class _ChunkedWKV7(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, w, k, v, a, b, initial_state, layout):
        inputs = (r, w, k, v, a, b)
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        final = torch.empty_like(initial_state, memory_format=torch.contiguous_format)
        starts, inverses = [], []
        for block in layout.heads:
            x = _lanes(initial_state, layout, block)
            for group in layout.groups:
                starts.append(x[: group.active[0] * (block.stop - block.start)].clone())
                inverses.append(_forward_group(group, [y[:, :, block] for y in inputs], x, o[:, :, block]))
            _segments(x, layout, block, final)
        ctx.save_for_backward(*inputs, *starts, *inverses)
        ctx.layout = layout
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o, grad_final):  # type: ignore[override]
        layout: _Layout = ctx.layout
        inputs, saved = ctx.saved_tensors[:6], list(ctx.saved_tensors[6:])
        starts, inverses = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
        dinitial = torch.empty_like(grad_final, memory_format=torch.contiguous_format)
        with torch.autocast(grad_o.device.type, enabled=False):
            for block in reversed(layout.heads):
                dx = _lanes(grad_final, layout, block)
                for group in reversed(layout.groups):
                    _backward_group(
                        group,
                        [x[:, :, block] for x in inputs],
                        starts.pop(),
                        inverses.pop(),
                        grad_o[:, :, block],
                        dx,
                        [x[:, :, block] for x in grads],
                    )
                _segments(dx, layout, block, dinitial)
        return *grads, dinitial, None


def _forward_group(group: _Group, inputs: list[Tensor], x: Tensor, o: Tensor) -> Tensor:
    """Writes one group's part of `o` and moves the states `x` on; returns the inverses T [R, C, C].

    A lane's state stays where its last step left it.
    """
    heads, size = o.shape[2:]
    c = _Chunks(group, *inputs)
    identity = torch.eye(CHUNK, dtype=x.dtype, device=x.device)
    inverse = torch.linalg.solve_triangular(
        identity - c.gram[:, :CHUNK, :CHUNK], identity, upper=False, unitriangular=True
    )
    # [U; O] = left X + base
    left, base = c.ar.clone(), torch.bmm(c.gram[:, :, CHUNK:], c.v)
    for part in (left, base):
        u = torch.bmm(inverse, part[:, :CHUNK])
        part[:, :CHUNK] = u
        part[:, CHUNK:] += torch.bmm(c.gram[:, CHUNK:, :CHUNK], u)
    for at in group.steps(heads):
        now = x[: at.stop - at.start]
        uo = torch.baddbmm(base[at], left[at], now, out=base[at])
        c.uv[at, :CHUNK] = uo[:, :CHUNK]
        now.baddbmm_(c.bk[at].mT, c.uv[at]).mul_(c.last[at])
    _collect(base.view(-1, heads, 2 * CHUNK, size)[:, :, CHUNK:].transpose(1, 2), group, o)
    return inverse


def _backward_group(group, inputs: list[Tensor], start: Tensor, inverse: Tensor, grad_o, dx, grads) -> None:
    """Writes one group's part of `grads`; moves `dx`, the gradients of the states, from its end to its start."""
    heads, size = grad_o.shape[2:]
    c = _Chunks(group, *inputs)
    steps = group.steps(heads)

    # the forward scan again, for U and the states at the starts of all chunks
    x = c.gram.new_empty(c.gram.shape[0], size, size)
    x[steps[0]] = start
    left = torch.bmm(inverse, c.ar[:, :CHUNK])
    base = torch.bmm(inverse, torch.bmm(c.gram[:, :CHUNK, CHUNK:], c.v))
    for at, after in zip(steps, [*steps[1:], None], strict=True):
        c.uv[at, :CHUNK] = torch.baddbmm(base[at], left[at], x[at])
        if after is not None:
            on = slice(at.start, at.start + after.stop - after.start)
            torch.baddbmm(x[on], c.bk[on].mT, c.uv[on], out=x[after]).mul_(c.last[on])

    # its mirror: dX' -> dY = D dX' -> dP, the gradient of what T is applied to -> dX
    pdo = torch.empty_like(c.uv)  # [dP; dO]
    pdo.view(-1, heads, 2 * CHUNK, size)[:, :, CHUNK:] = _deal(grad_o, group, pdo.dtype).transpose(1, 2)
    left = c.bk.clone()
    pdv = torch.bmm(c.gram[:, CHUNK:].mT, pdo[:, CHUNK:])  # [dP; dv]
    for part in (left, pdv):
        part[:, :CHUNK] = torch.bmm(inverse.mT, part[:, :CHUNK])
    dbk = torch.empty_like(c.bk)
    dlast = torch.empty_like(c.last)
    for at in reversed(steps):
        dy = dx[: at.stop - at.start].mul_(c.last[at])
        torch.sum(dy * x[at], -1, keepdim=True, out=dlast[at])
        torch.baddbmm(pdv[at], left[at], dy, out=pdv[at])
        torch.bmm(c.uv[at], dy.mT, out=dbk[at])
        pdo[at, :CHUNK] = pdv[at, :CHUNK]
        dy.baddbmm_(c.ar[at].mT, pdo[at])
    # X' = D (X + BK^T UV), so this is the gradient of W_C through D
    dlast += (dbk * c.bk).sum(1).unsqueeze(-1)

    dgram = torch.bmm(pdo, c.uv.mT).mul_(c.mask)
    dar = torch.bmm(pdo, x.mT).baddbmm_(dgram, c.bk)
    dbk.baddbmm_(dgram.mT, c.ar)
    dv = pdv[:, CHUNK:] + torch.bmm(c.gram[:, :CHUNK, CHUNK:].mT, pdo[:, :CHUNK])

    # w_t is in every W from t on: W_s scales r, k and b of token s and the a of the next
    by_ar, by_bk = c.mask[:, :CHUNK].mT, c.mask[CHUNK:, :CHUNK].mT.repeat(1, 2)
    dw = torch.bmm(by_ar.expand(len(dar), -1, -1), c.ar.mul_(dar))
    dw.baddbmm_(by_bk.expand(len(dar), -1, -1), c.bk.mul_(dbk), alpha=-1).add_(dlast.mT)

    def scaled(x: Tensor, scale: Tensor | None) -> Tensor:
        x = x.unflatten(0, (-1, heads)).transpose(1, 2)
        # written in the order of the tokens, which is not that of x
        return x if scale is None else torch.mul(x, scale, out=x.new_empty(x.shape))

    parts = (
        scaled(dar[:, CHUNK:], c.grow),
        scaled(dw, None),
        scaled(dbk[:, CHUNK:], c.shrink),
        scaled(dv, None),
        scaled(dar[:, :CHUNK], c.before),
        scaled(dbk[:, :CHUNK], c.shrink),
    )
    for part, grad in zip(parts, grads, strict=True):
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
