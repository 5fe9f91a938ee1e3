"""The baseline of the kernel suite: WKV-7 in chunks of 64 tokens, as model files that ship with checkpoints write it.

A triangular solve per chunk, decays relative to the chunk, autograd through everything. What can be batched over the
chunks is; the loop carries the state alone. It shares no code with `smi_kernels`.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def portable(r, w, k, v, a, b, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None):
    """The arguments and results of `smi_kernels.wkv7`, for log decays above -1.3.

    A packed row is cut at its boundaries and each document is a call of its own: padding all of them to the
    longest would charge this baseline for tokens that are not there.
    """
    if cu_seqlens is None:
        return _rows(r, w, k, v, a, b, initial_state)
    lengths = [end - start for start, end in pairwise(cu_seqlens.tolist())]
    # split, not slices: the backward of a slice writes a gradient as long as the whole row
    documents = zip(*(x.split(lengths, dim=1) for x in (r, w, k, v, a, b)), strict=True)
    states = [None] * len(lengths) if initial_state is None else initial_state.split(1)
    pairs = [_rows(r, w, k, v, a, b, x) for (r, w, k, v, a, b), x in zip(documents, states, strict=True)]
    outputs, finals = zip(*pairs, strict=True)
    return torch.cat(outputs, dim=1), torch.cat(finals)


def _rows(r, w, k, v, a, b, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    B, T, H, N = r.shape
    # a padded token has decay 1 and changes nothing
    r, w, k, v, a, b = (
        F.pad(x, (0, 0, 0, 0, 0, -T % CHUNK)).unflatten(1, (-1, CHUNK)).transpose(2, 3).contiguous()
        for x in (r, w, k, v, a, b)
    )  # [B, chunks, H, C, N]
    decay = w.cumsum(-2)
    r = r * decay.exp()
    a = a * (decay - w).exp()
    shrink = (-decay).exp()
    k, b = k * shrink, b * shrink
    last = decay[..., -1, :].exp().unsqueeze(-1)

    ab = (a @ b.mT).tril(-1)
    identity = torch.eye(CHUNK, dtype=r.dtype, device=r.device)
    inner = (a @ k.mT).tril(-1) @ v
    solved = torch.linalg.solve_triangular(identity - ab, torch.cat([a, inner], -1), upper=False, unitriangular=True)
    from_state, from_chunk = solved.split(N, dim=-1)
    rb = (r @ b.mT).tril()
    out = (r @ k.mT).tril() @ v
    added = k.mT @ v

    state = r.new_zeros(B, H, N, N) if initial_state is None else initial_state.mT
    outputs = []
    steps = zip(*(x.unbind(1) for x in (r, b, rb, from_state, from_chunk, out, added, last)), strict=True)
    for r_i, b_i, rb_i, from_state_i, from_chunk_i, out_i, added_i, last_i in steps:
        u = from_chunk_i + from_state_i @ state
        outputs.append(out_i + r_i @ state + rb_i @ u)
        state = last_i * (state + added_i + b_i.mT @ u)
    o = torch.stack(outputs, 1).transpose(2, 3).flatten(1, 2)
    return o[:, :T], state.mT
