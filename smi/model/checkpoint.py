"""RWKV-7 checkpoints in the three layouts of the ecosystem, read into and written from our model.

- native: BlinkDL's names (``blocks.0.att.w1``), one ``.pth`` or ``.safetensors`` file;
- hf: the public Hugging Face layout, ``rwkv7.`` before the native names but for ``head.weight``; our own names;
- fla: flash-linear-attention's names, low-rank factors transposed, vectors without their unit axes.

A layout is told by the names in it, never by the file's.
"""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.initialization import no_init_weights

from smi.model.configuration import RWKV7Config
from smi.model.modeling import RWKV7ForCausalLM

Layout = Literal["native", "hf", "fla"]

_EMBEDDING = {"native": "emb.weight", "hf": "rwkv7.emb.weight", "fla": "model.embeddings.weight"}

_FLA_TOP = {
    "model.embeddings.weight": "emb.weight",
    "model.norm.weight": "ln_out.weight",
    "model.norm.bias": "ln_out.bias",
    "lm_head.weight": "head.weight",
}
_FLA_BLOCK = {
    "pre_norm": "ln0",
    "attn_norm": "ln1",
    "ffn_norm": "ln2",
    "attn.r_proj": "att.receptance",
    "attn.k_proj": "att.key",
    "attn.v_proj": "att.value",
    "attn.o_proj": "att.output",
    "attn.g_norm": "att.ln_x",
    "attn": "att",
    "ffn": "ffn",
}
_FLA_LOW_RANK = {"0.weight": "1", "2.weight": "2", "2.bias": "0"}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not hold an RWKV-7 model."""


def load_pretrained(
    source: str | os.PathLike, *, revision: str | None = None, dtype: torch.dtype | None = None
) -> RWKV7ForCausalLM:
    """The model in `source`, on the CPU, in eval mode.

    Args:
        source: a file (.pth, .safetensors), a directory that holds one (sharded safetensors included), or a
            hub id "owner/name".
        revision: of a hub id: a commit hash, tag or branch.
        dtype: of the parameters; as stored when absent.

    Raises:
        CheckpointError: nothing there, not readable, not RWKV-7, or missing, unexpected or misshaped names, all
            of them listed.
    """
    path = _local(source, revision)
    tensors = read_checkpoint(path)
    config_file = path / "config.json"
    extra = _read_json(config_file) if config_file.is_file() else {}
    config = config_of(tensors, extra, where=str(path))
    with no_init_weights(), torch.device("meta"):
        model = RWKV7ForCausalLM(config)

    wanted = model.state_dict()
    # layer 0 has no use for its value residual: files may leave it out
    for name in ("v0", "v1", "v2"):
        key = f"rwkv7.blocks.0.att.{name}"
        tensors.setdefault(key, torch.zeros(wanted[key].shape, dtype=tensors["rwkv7.emb.weight"].dtype))
    problems = [f"missing {name}" for name in wanted if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in wanted]
    problems += [
        f"{name} has shape {list(tensors[name].shape)}, not {list(wanted[name].shape)}"
        for name in wanted
        if name in tensors and tensors[name].shape != wanted[name].shape
    ]
    if problems:
        raise CheckpointError(f"{path} does not fit RWKV-7:\n  " + "\n  ".join(problems))
    model.load_state_dict(
        {name: tensors[name] if dtype is None else tensors[name].to(dtype) for name in wanted}, assign=True
    )
    for parameter in model.parameters():
        parameter.requires_grad_()
    return model.eval()


def _local(source: str | os.PathLike, revision: str | None) -> Path:
    path = Path(source)
    if path.exists():
        return path
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(str(source), revision=revision, allow_patterns=["*.safetensors*", "*.json"]))
        except Exception as error:
            raise CheckpointError(
                f"{source} is neither here (no such directory) nor could it be fetched from the hub: {error}"
            ) from error
    raise CheckpointError(f"no checkpoint at {source}: give a file, a directory, or a hub id owner/name")


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """All tensors of a file or directory, memory-mapped, under our names and shapes."""
    tensors = _read_files(path)
    layout = layout_of(tensors, where=str(path))
    return dict(_from_layout(name, tensor, layout) for name, tensor in tensors.items())


def _read_files(path: Path) -> dict[str, Tensor]:
    if path.is_file():
        return _read_file(path)
    index = path / "model.safetensors.index.json"
    if index.exists():
        shards = sorted(set(_read_json(index).get("weight_map", {}).values()))
        absent = [shard for shard in shards if not (path / shard).exists()]
        if absent:
            raise CheckpointError(f"{path}: {index.name} names files that are not there: {', '.join(absent)}")
        tensors: dict[str, Tensor] = {}
        for shard in shards:
            tensors |= _read_file(path / shard)
        return tensors
    candidates = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.pth"))
    if len(candidates) != 1:
        found = ", ".join(file.name for file in candidates) or "none"
        raise CheckpointError(
            f"{path} should hold one .safetensors or .pth file, or model.safetensors.index.json; found: {found}"
        )
    return _read_file(candidates[0])


def _read_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} should hold a JSON object")
    return content


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as handle:
                return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not iterable itself)
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise CheckpointError(f"{file} is no flat dictionary of tensors")
    return loaded


def layout_of(tensors: Mapping[str, Tensor], where: str = "checkpoint") -> Layout:
    """Which layout the names are in. Raises CheckpointError if none."""
    for layout, name in _EMBEDDING.items():
        if name in tensors:
            return layout  # type: ignore[return-value]
    raise CheckpointError(
        f"{where} holds no RWKV-7 model: none of {', '.join(_EMBEDDING.values())} among its {len(tensors)} "
        f"tensors ({', '.join(sorted(tensors)[:3])} ...)"
    )


def _from_layout(name: str, tensor: Tensor, layout: Layout) -> tuple[str, Tensor]:
    if layout == "fla":
        name, tensor = _native_from_fla(name, tensor)
    if layout != "hf" and name != "head.weight":
        name = f"rwkv7.{name}"
    return name, tensor


def _native_from_fla(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    if name in _FLA_TOP:
        return _FLA_TOP[name], tensor
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if match is None:
        return name, tensor
    block, rest = match.groups()
    low_rank = re.fullmatch(r"attn\.([wavg])_lora\.lora\.(.+)", rest)
    if low_rank and low_rank[2] in _FLA_LOW_RANK:
        native = f"att.{low_rank[1]}{_FLA_LOW_RANK[low_rank[2]]}"
        tensor = tensor.view(1, 1, -1) if tensor.ndim == 1 else tensor.T.contiguous()
    else:
        for fla, ours in _FLA_BLOCK.items():
            if rest.startswith(f"{fla}."):
                native = ours + rest[len(fla) :]
                break
        else:
            return name, tensor
        if native in ("att.k_k", "att.k_a", "ffn.x_k"):
            tensor = tensor.view(1, 1, -1)
    return f"blocks.{block}.{native}", tensor


def config_of(tensors: Mapping[str, Tensor], extra: Mapping[str, object], where: str) -> RWKV7Config:
    """The configuration that fits some weights (our names); `extra` gives what weights do not show."""

    def shape(name: str) -> torch.Size:
        if name not in tensors:
            raise CheckpointError(f"{where} does not fit RWKV-7:\n  missing {name}")
        if tensors[name].ndim != 2:
            raise CheckpointError(f"{where} does not fit RWKV-7:\n  {name} has shape {list(tensors[name].shape)}")
        return tensors[name].shape

    layers = {int(m[1]) for name in tensors if (m := re.match(r"rwkv7\.blocks\.(\d+)\.", name))}
    if layers != set(range(len(layers))) or not layers:
        raise CheckpointError(f"{where}: blocks {sorted(layers)} are not numbered from 0 without a gap")
    first, last = "rwkv7.blocks.0.", f"rwkv7.blocks.{len(layers) - 1}."
    kept = ("norm_eps", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "wkv_implementation")
    vocab, width = shape("rwkv7.emb.weight")
    # a single layer has no value residual, and need not say its rank
    lone = len(layers) == 1 and last + "att.v1" not in tensors
    value_rank = 1 if lone else shape(last + "att.v1")[1]
    return RWKV7Config(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=len(layers),
        head_dim=shape(first + "att.r_k")[1],
        intermediate_size=shape(first + "ffn.key.weight")[0],
        decay_low_rank_dim=shape(first + "att.w1")[1],
        a_low_rank_dim=shape(first + "att.a1")[1],
        v_low_rank_dim=value_rank,
        gate_low_rank_dim=shape(first + "att.g1")[1],
        **{name: extra[name] for name in kept if name in extra},  # type: ignore[arg-type]
    )


def save_native(model: RWKV7ForCausalLM, file: str | os.PathLike) -> Path:
    """Writes BlinkDL's layout to `file` (.pth or .safetensors), whole or not at all.

    The .pth form is the zip format that the `rwkv` package maps into memory.
    """
    file = Path(file)
    tensors = {
        name.removeprefix("rwkv7."): tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    if file.suffix not in (".pth", ".safetensors"):
        raise ValueError(f"a native checkpoint is a .pth or .safetensors file, not {file.name}")
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        draft = Path(folder) / file.name
        if file.suffix == ".pth":
            torch.save(tensors, draft)
        else:
            save_file(tensors, draft)
        os.replace(draft, file)
    return file
