"""AdamW and the learning-rate schedule, as the official RWKV-7 trainer has them."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from smi.training.sharding import local, whole

# the decay's bias learns at twice the rate of everything else
DECAY_BIAS = "att.w0"


def parameter_groups(model: nn.Module, lr: float, weight_decay: float) -> list[dict]:
    """RWKV-LM's groups for x070: ``att.w0`` at twice the rate; weight decay on matrices only.

    "Matrices" are the weights of Linear and Embedding layers. The low-rank factors and r_k, though of two
    dimensions, are not among them.
    """
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)}
    decayed, plain, fast = [], [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.endswith(DECAY_BIAS):
            fast.append(parameter)
        elif id(parameter) in matrices:
            decayed.append(parameter)
        else:
            plain.append(parameter)
    groups = [
        {"name": "matrices", "params": decayed, "lr": lr, "weight_decay": weight_decay},
        {"name": "vectors", "params": plain, "lr": lr, "weight_decay": 0.0},
        {"name": "decay_bias", "params": fast, "lr": 2 * lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def cosine_with_warmup(step: int, *, max_steps: int, warmup_steps: int, final_ratio: float) -> float:
    """Factor on the learning rate in optimizer step `step` (from 0): linear to 1, then a cosine to `final_ratio`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(max_steps - warmup_steps, 1)
    return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def average_and_clip(parameters: Iterable[nn.Parameter], share: float, max_norm: float | None) -> torch.Tensor:
    """Multiplies all gradients by `share`, and by less where their norm would be above `max_norm`; in place.

    Both are one pass over the gradients: a second would cost as much as the optimizer. Returns their norm after
    `share` and before clipping, [].
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = whole(torch.nn.utils.get_total_norm(gradients)) * share
    factor = torch.as_tensor(share, dtype=norm.dtype, device=norm.device)
    if max_norm:
        # as torch.nn.utils.clip_grad_norm_ has it
        factor = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients:
        torch._foreach_mul_([local(gradient) for gradient in gradients], factor)  # pyright: ignore[reportPrivateImportUsage]
    return norm
