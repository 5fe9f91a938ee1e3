"""One token of each sequence through a model on x86 processors, in vector code: `decoding_loops`.

What torch does for a token is some hundred small operations a layer between matrix products that wait for memory; here
it is one call, with the threads at work from the first weight to the last. Weights of float32, bfloat16 and float16
are read where the model has them, so half precision is half the time; sums are float32.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from smi.model.modeling import DECAY_SCALE, RWKV7Block, RWKV7ForCausalLM, RWKV7State
from smi.runtime import decoding_loops as loops
from smi_kernels import cpu

# bytes of weights that make it worthwhile to wake one more thread
_SHARE = 4 << 20


@dataclass(frozen=True)
class _Matrix:
    """[rows, columns]; see the columns of the table in `decoding_loops`."""

    weight: Tensor
    source: int
    target: int
    activation: int = loops.NONE

    def entry(self) -> tuple[int, ...]:
        w = self.weight
        return w.data_ptr(), *w.shape, cpu.KINDS[w.dtype], self.source, self.target, self.activation


class CPUDecoder:
    """The model as it is now: matrices are referred to, vectors and low-rank factors copied."""

    def __init__(self, model: RWKV7ForCausalLM) -> None:
        config, body = model.config, model.rwkv7
        blocks = [block for block in body.blocks if isinstance(block, RWKV7Block)]
        self._width, self._size, self._rows = config.hidden_size, config.head_dim, config.vocab_size
        self._constants = torch.tensor([config.norm_eps, blocks[0].att.ln_x.eps, -DECAY_SCALE])
        self._matrices = [m for block in blocks for m in _matrices(block)]
        self._matrices.append(_Matrix(model.head.weight.detach().contiguous(), loops.X_FFN, loops.LOGITS))
        self._table = np.array([m.entry() for m in self._matrices], np.int64)
        self._vectors = torch.stack([_vectors(block) for block in blocks])
        first, last = blocks[0].ln0, body.ln_out
        assert isinstance(first, torch.nn.LayerNorm)
        self._ends = torch.stack([first.weight, first.bias, last.weight, last.bias]).detach().float()
        self._embedding = body.emb.weight.detach().contiguous()
        # floats a sequence has in each place
        self._widths = np.full(loops.PLACES, self._width, np.int64)
        for matrix in self._matrices:
            self._widths[matrix.target] = -(-matrix.weight.shape[0] // loops.LANES) * loops.LANES
        self._bytes = sum(m.weight.nbytes for m in self._matrices)

    def step(self, ids: Tensor, state: RWKV7State) -> Tensor:
        """See `Decoder.step`."""
        batch, layers = len(ids), len(self._vectors)
        if not 0 <= int(ids.min()) <= int(ids.max()) < self._rows:
            raise IndexError(f"ids are from 0 to {self._rows - 1}, not {ids.tolist()}")
        parts = (state.wkv, state.att_shift, state.ffn_shift)
        assert all(x.is_contiguous() and x.shape[:2] == (layers, batch) for x in parts)
        threads = max(1, min(torch.get_num_threads(), self._bytes // _SHARE))
        places = np.concatenate([[0], np.cumsum(self._widths * batch * 4)])
        scratch = torch.empty(int(places[-1]) // 4)
        partial = torch.empty(threads, loops.scratch_size(self._size))
        counters = np.zeros((layers * loops.PHASES + 2, loops.COUNTERS // 8), np.int64)
        ids = ids.contiguous()
        loops.step.run(
            threads, layers, batch, self._width, self._size,
            self._table.ctypes.data, self._vectors.data_ptr(), self._ends.data_ptr(), self._constants.data_ptr(),
            self._embedding.data_ptr(), cpu.KINDS[self._embedding.dtype], ids.data_ptr(),
            *(x.data_ptr() for x in parts), cpu.KINDS[state.att_shift.dtype],
            scratch.data_ptr(), places.ctypes.data, partial.data_ptr(), counters.ctypes.data,
        )  # fmt: skip
        logits = scratch[int(places[loops.LOGITS]) // 4 :].view(batch, -1)[:, : self._rows]
        return logits.to(self._embedding.dtype)


def _matrices(block: RWKV7Block) -> list[_Matrix]:
    """A layer's, in the order of the phases."""
    att, ffn = block.att, block.ffn

    def whole(linear: torch.nn.Linear, source: int, target: int, activation: int = loops.NONE) -> _Matrix:
        return _Matrix(linear.weight.detach().contiguous(), source, target, activation)

    def factor(name: str, source: int, target: int, activation: int = loops.NONE) -> _Matrix:
        """As an output x input matrix. The rank is filled up to whole vectors, with numbers that meet zeros."""
        weight = getattr(att, name).detach()
        first = name.endswith("1")
        if att.layer_id == 0 and name.startswith("v"):
            # layer 0 makes v_first and mixes nothing in
            weight = weight[:, :0] if first else weight[:0]
        missing = -weight.shape[1 if first else 0] % loops.LANES
        padding = (0, missing) if first else (0, 0, 0, missing)
        return _Matrix(torch.nn.functional.pad(weight, padding).t().contiguous(), source, target, activation)

    return [
        whole(att.receptance, loops.X_R, loops.R),
        whole(att.key, loops.X_K, loops.K),
        whole(att.value, loops.X_V, loops.V),
        factor("w1", loops.X_W, loops.LOW_W, loops.TANH),
        factor("a1", loops.X_A, loops.LOW_A),
        factor("v1", loops.X_V, loops.LOW_V),
        factor("g1", loops.X_G, loops.LOW_G, loops.SIGMOID),
        factor("w2", loops.LOW_W, loops.W),
        factor("a2", loops.LOW_A, loops.A),
        factor("v2", loops.LOW_V, loops.V_MIX),
        factor("g2", loops.LOW_G, loops.G),
        whole(att.output, loops.MIXED, loops.OUT),
        whole(ffn.key, loops.X_FFN, loops.INNER, loops.SQUARED_RELU),
        whole(ffn.value, loops.INNER, loops.OUT),
    ]


def _vectors(block: RWKV7Block) -> Tensor:
    """float32 [vectors, C], in the order in which `decoding_loops` names them."""
    att = block.att
    mixes = [getattr(att, f"x_{name}") for name in "rwkvag"]
    norms = [block.ln1, att.ln_x, block.ln2]
    ln1, ln_x, ln2 = ([norm.weight, norm.bias] for norm in norms)
    parts = [*ln1, *mixes, att.w0, att.a0, att.v0, att.k_k, att.k_a, att.r_k, *ln_x, *ln2, block.ffn.x_k]
    return torch.stack([part.detach().reshape(-1).float() for part in parts])
