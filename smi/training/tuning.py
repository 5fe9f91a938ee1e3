"""What trains: all of a model, all but some of it, low-rank additions to its matrices, or its initial state alone."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from smi.config import TuningConfig
from smi.model.configuration import RWKV7Config
from smi.model.modeling import RWKV7State

log = logging.getLogger("smi")

# settings that only one kind of tuning reads
_READ_BY = {
    "freeze": ("full",),
    "train": ("lora", "state"),
    "rank": ("lora",),
    "alpha": ("lora",),
    "dropout": ("lora",),
    "targets": ("lora",),
}


# peft's names: of our adapters, and of the layer that one belongs to
_ADAPTER = "default"
_BASE = "base_layer"


class InitialState(nn.Module):
    """The WKV state that every document starts from, as the thing that is learned: state tuning.

    time_state: float32 [L, H, V, K], zero at first, which is where an untuned model starts.
    """

    def __init__(self, config: RWKV7Config):
        super().__init__()
        shape = config.num_hidden_layers, config.num_heads, config.head_dim, config.head_dim
        self.time_state = nn.Parameter(torch.zeros(shape))

    def forward(self, sequences: int) -> RWKV7State:
        """The state of so many new sequences."""
        return RWKV7State.tuned(self.time_state, sequences)


def check_tuning(how: TuningConfig) -> None:
    """Raises ValueError for settings that `tuning.kind` does not read."""
    for setting, kinds in _READ_BY.items():
        if how.kind not in kinds and getattr(how, setting) != getattr(TuningConfig(), setting):
            raise ValueError(
                f"tuning.{setting} is not read by tuning.kind={how.kind}: it belongs to {' and '.join(kinds)}"
            )


def tune(model: nn.Module, how: TuningConfig) -> None:
    """Lets train what `how` says, and puts LoRA's adapters in; in place.

    Raises:
        ValueError: settings that are not read, or a pattern or target that matches nothing.
    """
    check_tuning(how)
    if how.kind == "full":
        for parameter in _matching(model, how.freeze, "tuning.freeze"):
            parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("tuning.freeze leaves nothing to train")
        return
    chosen = _matching(model, how.train, "tuning.train")
    if how.kind == "lora":
        _add_adapters(model, how)
    else:
        model.requires_grad_(False)
    for parameter in chosen:
        parameter.requires_grad_(True)


def _matching(model: nn.Module, patterns: Sequence[str], setting: str) -> list[nn.Parameter]:
    """The parameters whose names match a pattern, with or without the prefix of the stack.

    Raises ValueError for a pattern that matches none.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    named = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, nn.Parameter] = {}
    for pattern in patterns:
        matches = [
            parameter
            for name, parameter in named.items()
            if fnmatchcase(name, pattern) or fnmatchcase(name.removeprefix(prefix), pattern)
        ]
        if not matches:
            some = ", ".join(name.removeprefix(prefix) for name in list(named)[:4])
            raise ValueError(f"{setting}: no parameter matches {pattern!r}; their names begin {some}")
        found |= {id(parameter): parameter for parameter in matches}
    return list(found.values())


def _add_adapters(model: nn.Module, how: TuningConfig) -> None:
    # imported here: it takes seconds, which only this way of training should cost
    from peft import LoraConfig, LoraModel

    modules = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in how.targets:
        if not any(name == target or name.endswith(f".{target}") for name in modules):
            ends = sorted({".".join(name.split(".")[-2:]) for name in modules})
            raise ValueError(f"tuning.targets: no linear layer is named {target!r}; there are {', '.join(ends)}")
    LoraModel(
        model,
        LoraConfig(r=how.rank, lora_alpha=how.alpha, lora_dropout=how.dropout, target_modules=list(how.targets)),
        _ADAPTER,
    )


def merge_adapters(model: nn.Module) -> None:
    """Adds LoRA's products to the matrices that they belong to and takes the adapters out; in place."""
    layers = [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]
    for name, layer in layers:
        adapted: Any = layer
        adapted.merge(safe_merge=True)
        model.set_submodule(name, adapted.get_base_layer())


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """LoRA's products in their matrices for a while, for what reads those alone; afterwards the matrices are what they
    were to the last bit, in the same memory. The device needs none for it: the originals wait in the processor's."""
    kept: list[tuple[Any, Tensor]] = []
    try:
        for layer in (module for module in model.modules() if hasattr(module, "lora_A")):
            adapted: Any = layer
            kept.append((adapted, adapted.weight.detach().to("cpu", copy=True)))
            adapted.merge()
        yield
    finally:
        for layer, weight in kept:
            layer.weight.data.copy_(weight)
            layer.merged_adapters.clear()


def plain_weights(stored: Mapping[str, Tensor], how: TuningConfig) -> tuple[dict[str, Tensor], Tensor | None]:
    """The weights of a plain model from a checkpoint's ``state_dict``, by the model's names, and the initial state
    [L, H, V, K] that was tuned, if one was.

    Does for a file what `merge_adapters` does for a model that is there.
    """
    weights = {name.removeprefix("model."): value for name, value in stored.items() if name.startswith("model.")}
    for name in [name for name in weights if f".{_BASE}." in name]:
        layer, kind = name.split(f"{_BASE}.")
        weights[layer + kind] = weights.pop(name)
        if kind == "weight":
            down, up = (weights.pop(f"{layer}lora_{side}.{_ADAPTER}.weight") for side in "AB")
            weights[layer + kind] = weights[layer + kind] + how.alpha / how.rank * up @ down
    return weights, stored.get("initial_state.time_state")


def count_trained(model: nn.Module, how: TuningConfig) -> int:
    """Numbers that the optimizer moves, those of a tuned initial state included."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if how.kind == "state":
        config: Any = getattr(model, "config", None)
        trained += config.num_hidden_layers * config.hidden_size * config.head_dim
    return trained


def describe(model: nn.Module, how: TuningConfig) -> str:
    """What trains, for people: how many parameters of how many, and what keeps the others from it."""
    trained, total = count_trained(model, how), sum(parameter.numel() for parameter in model.parameters())
    beside = f" and {', '.join(how.train)}" if how.train else ""
    match how.kind:
        case "lora":
            return f"LoRA of rank {how.rank}{beside}: {trained:,} of {total:,} parameters"
        case "state":
            return f"initial states{beside}: {trained:,} numbers, beside {total:,} parameters of the model"
        case _ if how.freeze:
            return f"{trained:,} of {total:,} parameters; frozen: {', '.join(how.freeze)}"
        case _:
            return f"all {total:,} parameters"


def warn_of_new_rows(model: Any, source: str) -> None:
    """Says so where the rows of the structural tokens are new to a model and do not train."""
    tables = {"embedding": model.get_input_embeddings().weight, "head": model.get_output_embeddings().weight}
    if still := [name for name, table in tables.items() if not table.requires_grad]:
        log.warning(
            "%s does not say that it knows the structural tokens: their rows are new and do not train in the %s. "
            "Start from a model that was trained on them, or let both tables train (tuning.train)",
            source,
            " and the ".join(still),
        )
