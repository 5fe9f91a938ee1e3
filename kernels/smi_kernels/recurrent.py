"""The recurrence as it is written, one token at a time: the ground truth for every other backend."""

from itertools import pairwise

import torch
from torch import Tensor

from smi_kernels.backend import Backend, Verdict
from smi_kernels.inputs import segment_bounds, state_dtype


def run(r, w, k, v, a, b, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """See `smi_kernels.wkv7`. Plain autograd; O(T) steps; any device and dtype."""
    _, _, heads, size = r.shape
    dtype = state_dtype(r.dtype)
    if cu_seqlens is None:
        rows = [slice(None)]
        segments = r.shape[0]
    else:
        bounds = segment_bounds(cu_seqlens)
        rows = [slice(i, j) for i, j in pairwise(bounds)]
        segments = len(rows)
    if initial_state is None:
        initial_state = r.new_zeros(segments, heads, size, size, dtype=dtype)
    states = [initial_state] if cu_seqlens is None else initial_state.split(1)

    outputs, finals = [], []
    for row, state in zip(rows, states, strict=True):
        state_BHVK = state
        # unbind, not slicing: the backward of a slice writes a full-size zero tensor at every step
        steps = zip(*(x[:, row].to(dtype).unbind(1) for x in (r, w, k, v, a, b)), strict=True)
        for r_t, w_t, k_t, v_t, a_t, b_t in steps:
            removed = torch.einsum("bhvk,bhk->bhv", state_BHVK, a_t)
            state_BHVK = (
                state_BHVK * w_t.exp().unsqueeze(-2)
                + removed.unsqueeze(-1) * b_t.unsqueeze(-2)
                + v_t.unsqueeze(-1) * k_t.unsqueeze(-2)
            )
            outputs.append(torch.einsum("bhvk,bhk->bhv", state_BHVK, r_t))
        finals.append(state_BHVK)
    return torch.stack(outputs, 1).to(v.dtype), torch.cat(finals)


BACKEND = Backend(name="recurrent", needs="nothing", run=run, verify=lambda device, dtype, head_size: Verdict(True))
