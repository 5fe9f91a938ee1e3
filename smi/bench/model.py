"""A training step of the 0.1B model on the CPU: what it takes beyond its matrix products, and why.

Sizes: 12 layers of 768 channels, 65,536 rows of vocabulary, one row of 2048 tokens, every one of them supervised;
float32, two threads. The floor is the products of every linear layer, the low-rank ones and the head included:
one in the forward pass and two in the backward pass, into memory that is already there.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smi.bench.measure import Figure, alternate, duration
from smi.data.batch import IGNORE
from smi.model.configuration import RWKV7Config
from smi.model.modeling import RWKV7Block, RWKV7ForCausalLM
from smi.protocol.tokens import BlockType
from smi.training.loss import supervised_loss
from smi.training.memory import keep_freed_memory
from smi.training.optim import average_and_clip, parameter_groups

TOKENS = 2048
THREADS = 2
SHAPE: dict[str, Any] = {
    "vocab_size": 65536,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "decay_low_rank_dim": 64,
    "a_low_rank_dim": 64,
    "v_low_rank_dim": 32,
    "gate_low_rank_dim": 128,
}


class Step:
    """A whole optimizer step, as `smi.training.module.SMIModule` makes it."""

    def __init__(self, model: RWKV7ForCausalLM, tokens: int):
        self.model = model.train()
        self.ids, self.labels = torch.randint(model.config.vocab_size, (2, 1, tokens))
        self.types = torch.full((1, tokens), BlockType.OUT, dtype=torch.uint8)
        self.optimizer = torch.optim.AdamW(parameter_groups(model, 1e-5, 0.1), betas=(0.9, 0.99), eps=1e-18, fused=True)

    def __call__(self) -> None:
        hidden = self.model.rwkv7(self.ids, use_cache=False).last_hidden_state
        supervised_loss(hidden, self.model.head.weight, self.labels, self.types).loss.backward()
        average_and_clip(self.model.parameters(), 1 / self.labels.numel(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Floor:
    """The bare matrix products of a step: ``X W``, ``dY W^T`` and ``X^T dY`` of each linear layer."""

    def __init__(self, model: RWKV7ForCausalLM, tokens: int):
        shapes = [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]
        for block in model.rwkv7.blocks:
            # layer 0 has the value residual's factors as buffers, and does not use them
            named = cast(RWKV7Block, block).att.named_parameters()
            factors = [f for name, f in named if name[0] in "wavg" and name[1:] in ("1", "2")]
            shapes += [(factor.shape[0], factor.shape[1]) for factor in factors]
        self.products = {}
        self.counts = {shape: shapes.count(shape) for shape in shapes}
        for width, out in self.counts:
            x, w, dy = torch.randn(tokens, width), torch.randn(out, width), torch.randn(tokens, out)
            self.products[width, out] = (x, w, dy, torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w))

    def __call__(self) -> None:
        for shape, (x, w, dy, y, dx, dw) in self.products.items():
            for _ in range(self.counts[shape]):
                torch.mm(x, w.T, out=y)
                torch.mm(dy, w, out=dx)
                torch.mm(dy.T, x, out=dw)


def _losses(tokens: int, vocabulary: int, width: int) -> dict:
    """Ours and its peers on the same leaves: forward and backward pass, summed over all tokens."""
    hidden = torch.randn(1, tokens, width, requires_grad=True)
    head = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    labels = torch.randint(vocabulary, (1, tokens))
    types = torch.full((1, tokens), BlockType.OUT, dtype=torch.uint8)

    def run(loss):
        def once() -> None:
            hidden.grad = head.grad = None
            loss().backward()

        return once

    def plain() -> Tensor:
        return F.cross_entropy((hidden[0] @ head.T), labels[0], ignore_index=IGNORE, reduction="sum")

    peers = {"ours": run(lambda: supervised_loss(hidden, head, labels, types).loss), "plain": run(plain)}
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=256)  # type: ignore[attr-defined]
        peers["torch"] = run(
            lambda: F.linear_cross_entropy(hidden[0], head, labels[0], reduction="sum", options=options)  # type: ignore[attr-defined]
        )
    return peers


def _optimizers(model: RWKV7ForCausalLM) -> dict:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    groups = parameter_groups(model, 1e-5, 0.1)
    return {
        name: torch.optim.AdamW([dict(group) for group in groups], betas=(0.9, 0.99), eps=1e-18, **{name: True}).step
        for name in ("fused", "foreach")
    }


def run(tokens: int = TOKENS, rounds: int = 5, **shape: Any) -> dict[str, Figure]:
    """The figures of the suite; `shape` changes the model's sizes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    keep_freed_memory()
    torch.manual_seed(0)
    try:
        return _figures(RWKV7ForCausalLM(RWKV7Config(**{**SHAPE, **shape})), tokens, rounds)
    finally:
        torch.set_num_threads(threads)


def _figures(model: RWKV7ForCausalLM, tokens: int, rounds: int) -> dict[str, Figure]:
    step, floor = Step(model, tokens), Floor(model, tokens)
    times = alternate({"step": step, "floor": floor}, rounds=rounds)
    figures = {
        "step_vs_matmul_floor_0b1": Figure(
            times["step"] / times["floor"],
            f"step {duration(times['step'])} / its bare matrix products {duration(times['floor'])}",
            at_most=1.20,
        ),
        "step_tokens_per_s_0b1": Figure(tokens / times["step"], f"{tokens} tokens in {duration(times['step'])}"),
    }
    del step, floor
    model.zero_grad()

    times = alternate(_losses(tokens, model.config.vocab_size, model.config.hidden_size), rounds=rounds)
    for peer in times.keys() - {"ours"}:
        figures[f"loss_vs_{peer}"] = Figure(
            times[peer] / times["ours"], f"{peer} {duration(times[peer])} / ours {duration(times['ours'])}"
        )

    times = alternate(_optimizers(model), rounds=rounds)
    figures["adamw_fused_vs_foreach"] = Figure(
        times["foreach"] / times["fused"], f"foreach {duration(times['foreach'])} / fused {duration(times['fused'])}"
    )
    return figures
