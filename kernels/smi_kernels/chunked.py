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
them in a CPU's cache: products of matrices that are not there run at a third of the speed. What the
sequence and the inverse produced is kept for the backward pass (the states at the chunks' starts, UV, G and T: a
quarter more than the inputs at head size 64); what is a product of inputs and decays is made again.

The decays are relative to their own chunk: e^-W stays below e^(16 |w|), which float32 holds with room for the keys
for any log decay above -4 (RWKV-7's lies in (-0.6065, 0)). The inverse is a triangular solve; inverting by doubling
loses all digits on repeated keys.

The form is the WY representation of "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
(arXiv:2406.06484) with a diagonal decay.
"""

from dataclasses import dataclass
from functools import lru_cache

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
# fewer steps in a group would spend more on calls than the cache gains
MIN_STEPS = 4


@dataclass(frozen=True)
class _Group:
    """Consecutive sequential steps; M chunks, ordered by step, then lane.

    tokens: int64 [M * C] rows of a [B * T, H, N] view; tails point at row 0.
    held: int64 places in `tokens` that hold a token, or None when all do.
    tails: int64 places that hold none.
    active: lanes in each step, never more than in the step before.
    even: the time steps of the group when every lane is full and lanes are rows of one length; None otherwise.
    """

    tokens: Tensor
    held: Tensor | None
    tails: Tensor
    active: tuple[int, ...]
    even: slice | None

    def view(self, x: Tensor) -> Tensor:
        """The tokens of an even group in [B, T, H, N]: a view [steps, lanes, C, H, N]."""
        lanes = x.flatten(0, 1).unflatten(0, (self.active[0], -1))
        return lanes[:, self.even].unflatten(1, (-1, CHUNK)).transpose(0, 1)

    def steps(self, heads: int, x: Tensor) -> tuple[Tensor, ...]:
        """[M * H, ...] -> the rows of each step."""
        return x.split([lanes * heads for lanes in self.active])


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
    even = bool((lengths == lengths[0]).all())
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
        rows = slice(first * CHUNK, last * CHUNK) if even and held is None else None
        groups.append(_Group(tokens.to(device), held, tails, tuple(active[first:last]), rows))
        first = last
    blocks = tuple(slice(h, min(h + block, heads)) for h in range(0, heads, block))
    return _Layout(order.to(device), blocks, tuple(groups))


def _deal(x: Tensor, group: _Group, dtype: torch.dtype) -> Tensor:
    """[B, T, H, N] -> [steps, lanes, C, H, N] or, where lanes differ, [M, 1, C, H, N]; a view where there is one.

    Tails are zero, which leaves the state as it is.
    """
    if group.even is not None:
        return group.view(x).to(dtype)
    rows = x.flatten(0, 1).index_select(0, group.tokens).to(dtype)
    if group.held is not None:
        rows.index_fill_(0, group.tails, 0)
    return rows.unflatten(0, (-1, 1, CHUNK))


def _collect(rows: Tensor, scale: Tensor | None, group: _Group, out: Tensor) -> None:
    """[M * H, C, N], times a `scale` in the shape of `_deal`, -> their places in [B, T, H, N] without the tails."""
    heads, size = out.shape[2:]
    lanes = 1 if group.even is None else group.active[0]
    rows = rows.unflatten(0, (-1, lanes, heads)).transpose(2, 3)
    if group.even is not None:
        place = group.view(out)
        place.copy_(rows) if scale is None else torch.mul(rows, scale, out=place)
        return
    # in the order of the tokens, which is not that of `rows`
    rows = rows.contiguous() if scale is None else torch.mul(rows, scale, out=rows.new_empty(rows.shape))
    rows, tokens = rows.view(-1, heads, size), group.tokens
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
    """The inputs of one group in the terms of the module docstring: R = M * H matrices of each kind.

    before, grow, shrink: [..., C, H, N] e^(W - w), e^W and e^-W, in the shape of `_deal`.
    last: [R, K, 1] e^W_C.
    ar, bk: [R, 2C, N].
    mask: [2C, 2C] what a token may see: in the rows of `a` earlier tokens, in the rows of `r` its own as well.
    """

    def __init__(self, group: _Group, r, w, k, a, b):
        dtype = state_dtype(r.dtype)
        r, w, k, a, b = (_deal(x, group, dtype) for x in (r, w, k, a, b))
        steps, lanes, _, heads, size = r.shape
        lower = r.new_ones(CHUNK + 1, CHUNK).tril(-1)
        decay = torch.bmm(lower.expand(steps * lanes, -1, -1), w.flatten(3).flatten(0, 1)).exp_()
        decay = decay.view(steps, lanes, CHUNK + 1, heads, size)
        self.before, self.grow = decay[:, :, :-1], decay[:, :, 1:]
        self.shrink = self.grow.reciprocal()
        self.last = decay[:, :, -1].reshape(-1, size, 1)

        ar, bk = (r.new_empty(steps, lanes, heads, 2 * CHUNK, size) for _ in range(2))
        for x, scale, out in (
            (a, self.before, ar[..., :CHUNK, :]),
            (r, self.grow, ar[..., CHUNK:, :]),
            (b, self.shrink, bk[..., :CHUNK, :]),
            (k, self.shrink, bk[..., CHUNK:, :]),
        ):
            torch.mul(x.transpose(2, 3), scale.transpose(2, 3), out=out)
        self.ar, self.bk = (x.view(-1, 2 * CHUNK, size) for x in (ar, bk))
        self.mask = torch.cat([lower[:CHUNK], lower[1:]]).repeat(1, 2)


class _ChunkedWKV7(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, w, k, v, a, b, initial_state, layout):
        inputs = (r, w, k, v, a, b)
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        final = torch.empty_like(initial_state, memory_format=torch.contiguous_format)
        kept = []
        for block in layout.heads:
            x = _lanes(initial_state, layout, block)
            for group in layout.groups:
                tensors = _forward_group(group, [y[:, :, block] for y in inputs], x, o[:, :, block])
                if any(ctx.needs_input_grad):
                    kept.extend(tensors)
            _segments(x, layout, block, final)
        ctx.save_for_backward(*inputs, *kept)
        ctx.layout = layout
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o, grad_final):  # type: ignore[override]
        layout: _Layout = ctx.layout
        # asked for once: activation checkpointing recomputes them at every asking
        saved = ctx.saved_tensors
        inputs, kept = saved[:6], saved[6:]
        kept = [kept[i : i + 4] for i in range(0, len(kept), 4)]
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
        dinitial = torch.empty_like(grad_final, memory_format=torch.contiguous_format)
        with torch.autocast(grad_o.device.type, enabled=False):
            for block in reversed(layout.heads):
                dx = _lanes(grad_final, layout, block)
                for group in reversed(layout.groups):
                    _backward_group(
                        group,
                        [x[:, :, block] for x in inputs],
                        kept.pop(),
                        grad_o[:, :, block],
                        dx,
                        [x[:, :, block] for x in grads],
                    )
                _segments(dx, layout, block, dinitial)
        return *grads, dinitial, None


def _forward_group(group: _Group, inputs: list[Tensor], state: Tensor, o: Tensor) -> tuple[Tensor, ...]:
    """Writes one group's part of `o` and moves the lanes' states [S * H, K, V] on.

    Returns for the backward pass the states at the chunks' starts [R, K, V], and UV, G and T of the module docstring.
    """
    heads, size = o.shape[2:]
    r, w, k, v, a, b = inputs
    c = _Chunks(group, r, w, k, a, b)
    gram = torch.bmm(c.ar, c.bk.mT).mul_(c.mask)
    uv = torch.empty_like(c.bk)
    v = _deal(v, group, uv.dtype)
    uv.view(*v.shape[:2], heads, 2 * CHUNK, size)[..., CHUNK:, :] = v.transpose(2, 3)
    identity = torch.eye(CHUNK, dtype=uv.dtype, device=uv.device)
    inverse = torch.linalg.solve_triangular(
        identity - gram[:, :CHUNK, :CHUNK], identity, upper=False, unitriangular=True
    )
    # [U; O] = left X + base
    left, base = c.ar, torch.bmm(gram[:, :, CHUNK:], uv[:, CHUNK:])
    for part in (left, base):
        u = torch.bmm(inverse, part[:, :CHUNK])
        part[:, :CHUNK] = u
        part[:, CHUNK:] += torch.bmm(gram[:, CHUNK:, :CHUNK], u)
    x = uv.new_empty(len(uv), size, size)
    xs = group.steps(heads, x)
    xs[0].copy_(state[: len(xs[0])])
    steps = (group.steps(heads, y) for y in (left, base, uv[:, :CHUNK], uv, c.bk.mT, c.last))
    for x_i, after, left_i, base_i, u_i, uv_i, kb_i, last_i in zip(xs, [*xs[1:], None], *steps, strict=True):
        u_i.copy_(torch.baddbmm(base_i, left_i, x_i, out=base_i)[:, :CHUNK])
        on = 0 if after is None else len(after)
        if on < len(x_i):
            # lanes that end here, whose states go back to the caller's
            torch.baddbmm(x_i[on:], kb_i[on:], uv_i[on:], out=state[on : len(x_i)]).mul_(last_i[on:])
        if after is not None:
            torch.baddbmm(x_i[:on], kb_i[:on], uv_i[:on], out=after).mul_(last_i[:on])
    _collect(base[:, CHUNK:], None, group, o)
    return x, uv, gram, inverse


def _backward_group(group: _Group, inputs: list[Tensor], kept, grad_o: Tensor, dx: Tensor, grads: list[Tensor]) -> None:
    """Writes one group's part of `grads`; moves `dx`, the gradients of the states, from its end to its start."""
    heads, size = grad_o.shape[2:]
    r, w, k, _, a, b = inputs
    c = _Chunks(group, r, w, k, a, b)
    x, uv, gram, inverse = kept

    # the scan's mirror: dX' -> dY = D dX' -> dP, the gradient of what T is applied to -> dX
    pdo = torch.empty_like(uv)  # [dP; dO]
    grad_o = _deal(grad_o, group, pdo.dtype)
    pdo.view(*grad_o.shape[:2], heads, 2 * CHUNK, size)[..., CHUNK:, :] = grad_o.transpose(2, 3)
    left = c.bk.clone()
    pdv = torch.bmm(gram[:, CHUNK:].mT, pdo[:, CHUNK:])  # [dP; dv]
    for part in (left, pdv):
        part[:, :CHUNK] = torch.bmm(inverse.mT, part[:, :CHUNK])
    dy = torch.empty_like(x)
    steps = (group.steps(heads, y) for y in (dy, left, pdv, pdo, pdo[:, :CHUNK], c.ar.mT, c.last))
    for dy_i, left_i, pdv_i, pdo_i, p_i, ra_i, last_i in reversed(list(zip(*steps, strict=True))):
        on = dx[: len(dy_i)]
        torch.mul(on, last_i, out=dy_i)
        p_i.copy_(torch.baddbmm(pdv_i, left_i, dy_i, out=pdv_i)[:, :CHUNK])
        torch.baddbmm(dy_i, ra_i, pdo_i, out=on)
    dbk = torch.bmm(uv, dy.mT)
    # the gradient of W_C through D, as X' = D (X + BK^T UV)
    dlast = dy.mul_(x).sum(-1).add_((dbk * c.bk).sum(1)).unsqueeze(1)

    dgram = torch.bmm(pdo, uv.mT).mul_(c.mask)
    dar = torch.bmm(pdo, x.mT).baddbmm_(dgram, c.bk)
    dbk.baddbmm_(dgram.mT, c.ar)
    dv = pdv[:, CHUNK:] + torch.bmm(gram[:, :CHUNK, CHUNK:].mT, pdo[:, :CHUNK])

    # w_t is in every W from t on: W_s scales r, k and b of token s and the a of the next
    by_ar, by_bk = c.mask[:, :CHUNK].mT, c.mask[CHUNK:, :CHUNK].mT.repeat(1, 2)
    dw = torch.bmm(by_ar.expand(len(dar), -1, -1), c.ar.mul_(dar))
    dw.baddbmm_(by_bk.expand(len(dar), -1, -1), c.bk.mul_(dbk), alpha=-1).add_(dlast)

    parts = (
        (dar[:, CHUNK:], c.grow),
        (dw, None),
        (dbk[:, CHUNK:], c.shrink),
        (dv, None),
        (dar[:, :CHUNK], c.before),
        (dbk[:, :CHUNK], c.shrink),
    )
    for (part, scale), grad in zip(parts, grads, strict=True):
        _collect(part, scale, group, grad)


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
