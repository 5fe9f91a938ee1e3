"""One token for each of some sequences, with as few operations as it takes.

The same function as `RWKV7ForCausalLM` at T = 1; a test holds one against the other. The model's own forward pays for
what a single token does not need: modules, a kernel for whole sequences, checks of shapes. There are two forms: torch's
operations, for any device and dtype, and one compiled call, `decoding_cpu`, for x86 processors.

Source: "RWKV-7 Goose with Expressive Dynamic State Evolution" (arXiv:2503.14456), section 4.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from smi.model.modeling import DECAY_SCALE, RWKV7Block, RWKV7ForCausalLM, RWKV7State
from smi_kernels import cpu


class Decoder(Protocol):
    def step(self, ids: Tensor, state: RWKV7State) -> Tensor:
        """Logits [B, V] after one more id (int64 [B]) for each of the B sequences of `state`, which moves with them.

        Raises IndexError for ids that the embedding does not have.
        """
        ...


def decoder_for(model: RWKV7ForCausalLM) -> Decoder:
    """The faster form for a model: compiled where processor, dtype and sizes allow it. It is of the model as it is
    now: make another when the model has changed."""
    weight, config = model.head.weight, model.config
    if (
        cpu.verify(weight.device, weight.dtype, config.head_dim).ok
        and config.intermediate_size % cpu.SIZE_STEP == 0
        and all(parameter.dtype == weight.dtype for parameter in model.parameters())
    ):
        # numba takes half a second to import
        from smi.runtime.decoding_cpu import CPUDecoder

        return CPUDecoder(model)
    return TorchDecoder(model)


class TorchDecoder:
    """Reads the model's parameters at every step; only the mixing vectors are copied, when it is made."""

    def __init__(self, model: RWKV7ForCausalLM) -> None:
        self._model = model
        self._layers: list[tuple[RWKV7Block, Tensor]] = []
        for block in model.rwkv7.blocks:
            assert isinstance(block, RWKV7Block)
            mixes = torch.cat([getattr(block.att, f"x_{name}") for name in "rwkvag"]).detach()
            self._layers.append((block, mixes))

    @torch.inference_mode()
    def step(self, ids: Tensor, state: RWKV7State) -> Tensor:
        """See `Decoder.step`."""
        body = self._model.rwkv7
        x_BC = F.embedding(ids, body.emb.weight)
        v_first = x_BC
        for i, (block, mixes) in enumerate(self._layers):
            if i == 0:
                x_BC = block.ln0(x_BC)
            mixed, v_first = _time_mix(block, mixes, _norm(block.ln1, x_BC), v_first, state, i)
            x_BC = x_BC + mixed
            h_BC = _norm(block.ln2, x_BC)
            shift = state.ffn_shift[i]
            k = F.linear(torch.addcmul(h_BC, shift - h_BC, block.ffn.x_k[0]), block.ffn.key.weight)
            shift.copy_(h_BC)
            x_BC = x_BC + F.linear(k.relu_().square_(), block.ffn.value.weight)
        return F.linear(_norm(body.ln_out, x_BC), self._model.head.weight)


def _norm(norm: torch.nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def _time_mix(
    block: RWKV7Block, mixes: Tensor, x_BC: Tensor, v_first: Tensor, state: RWKV7State, layer: int
) -> tuple[Tensor, Tensor]:
    """The recurrent sub-layer; mixes [6, 1, C] in the order r, w, k, v, a, g."""
    att = block.att
    batch, width = x_BC.shape
    by_head = (batch * att.num_heads, att.head_dim)
    shift, wkv = state.att_shift[layer], state.wkv[layer]
    x_r, x_w, x_k, x_v, x_a, x_g = torch.addcmul(x_BC, shift - x_BC, mixes).unbind()
    shift.copy_(x_BC)

    r = F.linear(x_r, att.receptance.weight)
    k = F.linear(x_k, att.key.weight)
    v = F.linear(x_v, att.value.weight)
    w = torch.addmm(att.w0[0], torch.tanh(x_w @ att.w1), att.w2).to(wkv.dtype)
    decay = torch.exp(torch.sigmoid(w) * -DECAY_SCALE)
    if layer == 0:
        v_first = v
    else:
        v = torch.lerp(v, v_first, torch.sigmoid(torch.addmm(att.v0[0], x_v @ att.v1, att.v2)))
    a = torch.sigmoid(torch.addmm(att.a0[0], x_a @ att.a1, att.a2))
    g = torch.sigmoid(x_g @ att.g1) @ att.g2
    kk = F.normalize((k * att.k_k[0]).view(by_head), dim=-1, eps=1e-12)
    k = k * (1 + (a - 1) * att.k_a[0])

    # S <- S diag(decay) - (S kk) (kk a)^T + v k^T, as one update of rank two
    s_XVK = wkv.view(*by_head, att.head_dim)
    to = wkv.dtype
    removed = s_XVK @ kk.to(to).unsqueeze(-1)
    columns = torch.cat([-removed, v.view(by_head).to(to).unsqueeze(-1)], -1)
    rows = torch.stack([kk * a.view(by_head), k.view(by_head)], 1).to(to)
    s_XVK.mul_(decay.view(by_head).unsqueeze(1)).baddbmm_(columns, rows)
    o = (s_XVK @ r.view(by_head).to(to).unsqueeze(-1)).view(batch, width).to(v.dtype)

    o = F.group_norm(o, att.num_heads, att.ln_x.weight, att.ln_x.bias, att.ln_x.eps)
    bonus = (r * k * att.r_k.view(width)).view(by_head).sum(-1, keepdim=True) * v.view(by_head)
    return F.linear((o + bonus.view(batch, width)) * g, att.output.weight), v_first
