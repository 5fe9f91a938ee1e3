"""Initial WKV states as files, in the form that the RWKV ecosystem exchanges them in.

A flat dictionary in torch's zip format: ``blocks.N.att.time_state`` [H, V, K] for each layer, float32; value rows and
key columns, as in `RWKV7State` and as RWKV-LM's and RWKV-PEFT's state tuning of x070 writes it. Runtimes of earlier
RWKV generations transpose such a state when they load it; for RWKV-7 none does.
"""

import os
from pathlib import Path

import torch
from torch import Tensor

from smi.model.checkpoint import publish
from smi.model.configuration import RWKV7Config

TIME_STATE_FILE = "time_state.pth"


def _name(layer: int) -> str:
    return f"blocks.{layer}.att.time_state"


def save_time_state(time_state: Tensor, file: Path) -> Path:
    """Writes a state [L, H, V, K] to `file`, whole or not at all."""
    layers = time_state.detach().float().cpu().unbind()
    draft = file.with_name(f".{file.name}.partial")
    try:
        torch.save({_name(i): layer.clone() for i, layer in enumerate(layers)}, draft)
        publish(draft, file)
    finally:
        draft.unlink(missing_ok=True)
    return file


def load_time_state(file: str | os.PathLike, config: RWKV7Config) -> Tensor:
    """The state in `file` for a model of this shape, float32 [L, H, V, K].

    Raises:
        ValueError: a file that cannot be read, or that is of another model; what is wrong is named.
    """
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"the initial state {file} cannot be read: {reason}") from error
    shape = (config.num_heads, config.head_dim, config.head_dim)
    wanted = [_name(i) for i in range(config.num_hidden_layers)]
    if not isinstance(stored, dict) or set(stored) != set(wanted):
        raise ValueError(f"{file} should hold {wanted[0]} to {wanted[-1]} and nothing else")
    for name in wanted:
        if not isinstance(stored[name], Tensor) or tuple(stored[name].shape) != shape:
            found = list(getattr(stored[name], "shape", ()))
            raise ValueError(f"{file}: {name} has shape {found}, and this model's states are {list(shape)}")
        if not bool(stored[name].isfinite().all()):
            raise ValueError(f"{file}: {name} holds values that are not finite")
    return torch.stack([stored[name].float() for name in wanted])
