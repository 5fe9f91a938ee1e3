"""The three layouts in which RWKV-7 checkpoints travel, as one map from our parameter names to theirs.

- native: BlinkDL's names (``blocks.0.att.w1``);
- hf: the public Hugging Face layout: ``rwkv7.`` before the native names, but for ``head.weight``; our own names;
- fla: flash-linear-attention's names; low-rank factors transposed, most vectors without their unit axes.

Layer 0 has no use for its value residual (v0, v1, v2). The native and the public HF layout hold it all the same, as
the publishers' own code expects; flash-linear-attention has no place for it (`DEAD`).

This module is about weights alone. Recurrent states differ too: [H, V, K] in native and public HF ones,
[H, K, V] in flash-linear-attention's. Nothing here converts them.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from smi.model.configuration import RWKV7Config
from smi.model.modeling import GROUP_NORM_EPS

Layout = Literal["native", "hf", "fla"]
Form = Literal["same", "transposed", "flat"]

# names that one layout has and the others do not
_MARKS: dict[Layout, re.Pattern[str]] = {
    "native": re.compile(r"blocks\.\d+\.att\."),
    "hf": re.compile(r"rwkv7\.blocks\.\d+\.att\."),
    "fla": re.compile(r"model\.layers\.\d+\.attn\.[rwkvag]_(lora|proj)\."),
}
_BLOCK = {
    "native": re.compile(r"blocks\.(\d+)\."),
    "hf": re.compile(r"rwkv7\.blocks\.(\d+)\."),
    "fla": re.compile(r"model\.layers\.(\d+)\."),
}
_FLA_TOP = {
    "emb.weight": "model.embeddings.weight",
    "ln_out.weight": "model.norm.weight",
    "ln_out.bias": "model.norm.bias",
    "head.weight": "lm_head.weight",
}
_FLA_MODULES = {
    "ln0": "pre_norm",
    "ln1": "attn_norm",
    "ln2": "ffn_norm",
    "att": "attn",
    "att.receptance": "attn.r_proj",
    "att.key": "attn.k_proj",
    "att.value": "attn.v_proj",
    "att.output": "attn.o_proj",
    "att.ln_x": "attn.g_norm",
    "ffn": "ffn",
    "ffn.key": "ffn.key",
    "ffn.value": "ffn.value",
}
_FLA_LOW_RANK: dict[str, tuple[str, Form]] = {
    "0": ("2.bias", "flat"),
    "1": ("0.weight", "transposed"),
    "2": ("2.weight", "transposed"),
}
_FLA_FLAT = ("att.k_k", "att.k_a", "ffn.x_k")

# our names of the tensors that every file may leave out and that have no effect
DEAD = tuple(f"rwkv7.blocks.0.att.{name}" for name in ("v0", "v1", "v2"))


class Place(NamedTuple):
    """Where a layout keeps one of our tensors: under which name, and in which form."""

    name: str
    form: Form


def place(name: str, layout: Layout) -> Place:
    """The place of our tensor `name` (``rwkv7.blocks.0.att.w1``) in `layout`."""
    if layout == "hf":
        return Place(name, "same")
    name = name.removeprefix("rwkv7.")
    if layout == "native":
        return Place(name, "same")
    if name in _FLA_TOP:
        return Place(_FLA_TOP[name], "same")
    _, block, part = name.split(".", 2)
    layer = f"model.layers.{block}"
    if low_rank := re.fullmatch(r"att\.([wavg])([012])", part):
        leaf, form = _FLA_LOW_RANK[low_rank[2]]
        return Place(f"{layer}.attn.{low_rank[1]}_lora.lora.{leaf}", form)
    module, _, leaf = part.rpartition(".")
    return Place(f"{layer}.{_FLA_MODULES[module]}.{leaf}", "flat" if part in _FLA_FLAT else "same")


def to_form(tensor: Tensor, form: Form) -> Tensor:
    """One of our tensors, as a layout keeps it."""
    match form:
        case "same":
            return tensor
        case "transposed":
            return tensor.T.contiguous()
        case "flat":
            return tensor.flatten()


def from_form(tensor: Tensor, form: Form) -> Tensor:
    """The inverse of `to_form`."""
    match form:
        case "same":
            return tensor
        case "transposed":
            return tensor.T.contiguous()
        case "flat":
            return tensor.view(1, 1, -1)


def layout_of(names: Iterable[str]) -> Layout | None:
    """The layout that most of the names are in; None where no name is RWKV's."""
    votes: Counter[Layout] = Counter(layout for name in names for layout, mark in _MARKS.items() if mark.match(name))
    return votes.most_common(1)[0][0] if votes else None


def config_of(
    tensors: Mapping[str, Tensor], layout: Layout, stated: Mapping[str, Any]
) -> tuple[RWKV7Config, list[str]]:
    """The configuration that fits some weights, and what a stated one says otherwise.

    Every size is that of most layers, so that one misshaped tensor is told as such, not as the measure of the rest.

    Args:
        tensors: of a whole model, by the names of `layout`.
        stated: the contents of its config.json: consulted for what weights do not show (eps, special ids), and
            else only compared, since published ones are wrong in places (a head count of 32 for any size).

    Returns:
        The configuration, and a line for each stated size that the weights contradict.

    Raises:
        ValueError: the weights show no RWKV-7 model, or the stated settings one that this code cannot run.
    """
    layers = {int(match[1]) for name in tensors if (match := _BLOCK[layout].match(name))}
    if layers != set(range(len(layers))):
        raise ValueError(f"blocks {', '.join(map(str, sorted(layers)))} are not numbered from 0 without a gap")
    absent: list[str] = []

    def size(axis: int, *names: str) -> int:
        """The length that `axis` of our tensors `names` mostly has; {} stands for each layer."""
        votes: Counter[int] = Counter()
        for name in names:
            for each in {name.format(layer): None for layer in sorted(layers)}:
                spot = place(each, layout)
                shape = tensors[spot.name].shape if spot.name in tensors else ()
                if axis < len(shape):
                    votes[shape[-1 - axis if spot.form == "transposed" else axis]] += 1
        if not votes:
            absent.extend(names)
            return 1
        return votes.most_common(1)[0][0]

    block = "rwkv7.blocks.{}."
    sizes = {
        "vocab_size": size(0, "rwkv7.emb.weight", "head.weight"),
        "hidden_size": size(0, block + "ln1.weight", block + "ln2.weight"),
        "head_dim": size(1, block + "att.r_k"),
        "intermediate_size": size(0, block + "ffn.key.weight"),
        "decay_low_rank_dim": size(1, block + "att.w1"),
        "a_low_rank_dim": size(1, block + "att.a1"),
        "gate_low_rank_dim": size(1, block + "att.g1"),
    }
    # a single layer has no value residual, and need not say its rank
    lone = len(layers) == 1 and place(DEAD[1], layout).name not in tensors
    sizes["v_low_rank_dim"] = stated.get("v_low_rank_dim", 1) if lone else size(1, block + "att.v1")
    if absent:
        names = ", ".join(place(name.format(0), layout).name.replace(".0.", ".N.", 1) for name in absent)
        raise ValueError(f"not RWKV-7 (x070): no layer has {names}")

    kept = ("norm_eps", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "wkv_implementation")
    config = RWKV7Config(
        num_hidden_layers=len(layers), **sizes, **{name: stated[name] for name in kept if name in stated}
    )
    if layout == "fla":
        if stated.get("hidden_act", "sqrelu") != "sqrelu":
            raise ValueError(f"hidden_act {stated['hidden_act']} is not supported: RWKV-7's is sqrelu")
        check_fla(config)
    contradicted = [
        f"{name} {stated[name]} (the weights have {getattr(config, name)})"
        for name in (*sizes, "num_hidden_layers", "num_heads")
        if stated.get(name) not in (None, getattr(config, name))
    ]
    return config, contradicted


def check_fla(config: RWKV7Config) -> None:
    """Raises ValueError where flash-linear-attention would compute another function of the same weights.

    Its GroupNorm takes head_dim * norm_eps where RWKV-7 has 64e-5 whatever the head's size.
    """
    eps = config.head_dim * config.norm_eps
    if not math.isclose(eps, GROUP_NORM_EPS):
        raise ValueError(
            f"flash-linear-attention takes head_dim * norm_eps = {eps:.3g} as the eps of RWKV-7's GroupNorm, which is "
            f"{GROUP_NORM_EPS:.3g}: models with heads of {config.head_dim} do not carry over"
        )


def fla_config(config: RWKV7Config, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of flash-linear-attention for a model; what it leaves out is that library's default."""
    sizes = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "head_dim",
        "num_heads",
        "intermediate_size",
        "decay_low_rank_dim",
        "a_low_rank_dim",
        "v_low_rank_dim",
        "gate_low_rank_dim",
        "norm_eps",
        "norm_bias",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "tie_word_embeddings",
        "use_cache",
    )
    return {
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "dtype": str(dtype).removeprefix("torch."),
        "attn": None,
        "attn_mode": "chunk",
        "hidden_act": "sqrelu",
        "norm_first": True,
        "value_dim": [config.hidden_size] * config.num_hidden_layers,
    } | {name: getattr(config, name) for name in sizes}
