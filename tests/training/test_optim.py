import math

import pytest
import torch
from torch import nn

from smi.model import RWKV7Config, RWKV7ForCausalLM
from smi.training.module import Optimization, SMIModule
from smi.training.optim import average_and_clip, cosine_with_warmup, parameter_groups


@pytest.fixture(scope="module")
def model():
    return RWKV7ForCausalLM(RWKV7Config(vocab_size=70, hidden_size=64, num_hidden_layers=2))


def test_every_parameter_is_in_exactly_one_group(model):
    groups = parameter_groups(model, lr=1.0, weight_decay=0.1)
    ids = [id(p) for group in groups for p in group["params"]]
    assert len(ids) == len(set(ids)) == sum(1 for _ in model.parameters())


def test_groups_are_the_official_ones(model):
    names = {id(p): name.removeprefix("rwkv7.") for name, p in model.named_parameters()}
    groups = {g["name"]: g for g in parameter_groups(model, lr=1e-3, weight_decay=0.1)}
    members = {key: {names[id(p)] for p in group["params"]} for key, group in groups.items()}
    assert members["decay_bias"] == {"blocks.0.att.w0", "blocks.1.att.w0"}
    matrices = {"emb.weight", "head.weight"}
    for layer in range(2):
        matrices |= {f"blocks.{layer}.att.{n}.weight" for n in ("receptance", "key", "value", "output")}
        matrices |= {f"blocks.{layer}.ffn.{n}.weight" for n in ("key", "value")}
    assert members["matrices"] == matrices
    assert {"blocks.1.att.w1", "blocks.1.att.w2", "blocks.1.att.r_k", "blocks.0.ln0.weight"} < members["vectors"]
    rates = {key: (group["lr"], group["weight_decay"]) for key, group in groups.items()}
    assert rates == {"matrices": (1e-3, 0.1), "vectors": (1e-3, 0.0), "decay_bias": (2e-3, 0.0)}


def test_frozen_parameters_are_left_out(model):
    model.head.weight.requires_grad_(False)
    groups = parameter_groups(model, lr=1.0, weight_decay=0.1)
    model.head.weight.requires_grad_(True)
    assert all(p is not model.head.weight for group in groups for p in group["params"])


def test_schedule():
    def factor(step):
        return cosine_with_warmup(step, max_steps=110, warmup_steps=10, final_ratio=0.1)

    assert [factor(0), factor(4), factor(9)] == pytest.approx([0.1, 0.5, 1.0])
    assert factor(10) == pytest.approx(1.0)
    assert factor(60) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert factor(110) == pytest.approx(0.1)
    assert factor(500) == pytest.approx(0.1)
    falling = [factor(step) for step in range(10, 111)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize("max_norm", [None, 0.0, 0.5, 100.0])
@pytest.mark.parametrize("share", [1.0, 0.01])
def test_averaging_and_clipping_at_once_is_one_after_the_other(share, max_norm):
    torch.manual_seed(0)
    ours, theirs = (
        [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 5)), nn.Parameter(torch.ones(1))] for _ in "ab"
    )
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad * share
    norm = average_and_clip(ours, share, max_norm)
    want = torch.nn.utils.clip_grad_norm_(theirs, max_norm or math.inf)
    torch.testing.assert_close(norm, want)
    torch.testing.assert_close([p.grad for p in ours[:2]], [p.grad for p in theirs[:2]])
    assert ours[2].grad is None


def test_the_optimizer_is_the_official_one():
    model = RWKV7ForCausalLM(RWKV7Config(vocab_size=70, hidden_size=64, num_hidden_layers=1))
    module = SMIModule(model, Optimization(lr=1e-3, max_steps=10))
    optimizer = module.configure_optimizers()["optimizer"]
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert group["betas"] == (0.9, 0.99)
        assert group["eps"] == 1e-18
        assert group["fused"]
