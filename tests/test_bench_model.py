"""The suite at a size where its figures mean nothing: that it measures what it says."""

import torch
from torch import nn

from smi.bench import model as suite
from smi.model import RWKV7Config, RWKV7ForCausalLM

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "decay_low_rank_dim": 8,
    "a_low_rank_dim": 8,
    "v_low_rank_dim": 4,
    "gate_low_rank_dim": 16,
}


def test_every_figure_is_there():
    figures = suite.run(tokens=32, rounds=1, **SMALL)
    assert figures["step_vs_matmul_floor_0b1"].at_most == 1.20
    assert {"loss_vs_plain", "adamw_fused_vs_foreach", "step_tokens_per_s_0b1"} < figures.keys()
    assert all(figure.value > 0 for figure in figures.values())


def test_the_floor_holds_the_products_of_the_step_and_no_other():
    """Against the products that torch runs in one."""
    model = RWKV7ForCausalLM(RWKV7Config(**SMALL))
    flops = {}
    for name, run in (("step", suite.Step(model, 32)), ("floor", suite.Floor(model, 32))):
        with torch.profiler.profile(with_flops=True) as profile:
            run()
        flops[name] = sum(event.flops for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm"))
    assert flops["step"] == flops["floor"]
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    low_rank = 64 * 2 * (2 * 8 + 2 * 8 + 4 + 2 * 16)
    assert flops["floor"] == 3 * 2 * 32 * (linear + low_rank)
