"""`smi.bench step`: its model is the 1.5B one, and its motions run on a CPU."""

from pathlib import Path

import torch
import yaml

from smi.bench import step
from smi.model.configuration import RWKV7Config
from smi.model.modeling import RWKV7ForCausalLM


def test_the_model_is_the_one_that_the_recipes_name():
    file = Path(__file__).parents[1] / "configs" / "model" / "rwkv7_1b5.yaml"
    shipped = yaml.safe_load(file.read_text())
    assert {key: shipped[key] for key in step.MODEL_1B5} == step.MODEL_1B5
    with torch.device("meta"):
        model = RWKV7ForCausalLM(RWKV7Config(**step.MODEL_1B5))
    count = sum(p.numel() for p in model.parameters())
    # with or without layer 0's unused value residual
    assert abs(count - 1_527_668_736) < 300_000, count
    # six flops a weight and token, and the recurrence's on top
    weights = count - model.rwkv7.emb.weight.numel()
    assert 1.0 < step._flops_per_token(model) / (6 * weights) < 1.02


def test_a_cpu_goes_through_the_motions(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(step, "STEPS", 1)
    figures = step.run()
    # what share of its peak a CPU reaches says nothing
    assert figures.keys() == {"step_tokens_per_second", "step_peak_memory_gb"}
    assert all(figure.value > 0 for figure in figures.values())
