"""The model of a config, with a vocabulary for its tokenizer, and the module that trains it."""

import json
import logging
from pathlib import Path
from typing import Any

import torch

import smi_kernels
from smi.config import Config
from smi.model.checkpoint import load_pretrained
from smi.model.configuration import RWKV7Config
from smi.model.modeling import RWKV7ForCausalLM
from smi.protocol.tokens import grow_embeddings
from smi.tokenizer import Tokenizer
from smi.training.module import Optimization, SMIModule
from smi.training.tuning import InitialState, tune, warn_of_new_rows

log = logging.getLogger("smi")

# rows of the embedding and the head: tensor cores want the head's width in multiples of this
VOCABULARY_MULTIPLE = 64
# rows past the vocabulary that a checkpoint may have; with more it was made for another tokenizer
MOST_PADDING = 1024
# beside a model that knows the structural tokens
STRUCTURAL_FILE = "smi_token_ids.json"

_SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "head_dim",
    "decay_low_rank_dim",
    "a_low_rank_dim",
    "v_low_rank_dim",
    "gate_low_rank_dim",
)


def build_model(config: Config, tokenizer: Tokenizer) -> Any:
    """The model of `config.model`, with a vocabulary for `tokenizer`; what of it trains is as `config.tuning` says.

    An `RWKV7ForCausalLM` from a checkpoint or from scratch, or with ``model=hf`` a model of transformers.

    Raises:
        ValueError: a checkpoint that does not fit, a vocabulary that does not, settings that contradict each other,
            a kernel or device that is not to be had here.
    """
    if config.hardware.accelerator == "gpu" and not torch.cuda.is_available():
        raise ValueError(
            "hardware.accelerator=gpu needs an NVIDIA GPU and a CUDA build of torch: use hardware=cpu here"
        )
    if config.model.revision and not config.model.pretrained:
        raise ValueError("model.revision is of model.pretrained, which is not set")
    _check_sharing(config)
    if config.tuning.kind != "full" and not config.model.pretrained:
        raise ValueError(
            f"tuning.kind={config.tuning.kind} is for a model that has been trained: set model.pretrained to its export"
        )
    if config.model.kind == "hf":
        # imported here: transformers' own models are seldom wanted
        from smi.training.hf import build_hf

        model = build_hf(config, tokenizer)
    else:
        model = _build_rwkv7(config, tokenizer)
    tune(model, config.tuning)
    start = config.model.pretrained
    if start is not None and not (Path(start) / STRUCTURAL_FILE).is_file():
        warn_of_new_rows(model, start)
    return model.train()


def _check_sharing(config: Config) -> None:
    """Raises ValueError for what FSDP cannot share out."""
    other = (
        ("model=hf", config.model.kind == "hf"),
        (f"tuning.kind={config.tuning.kind}", config.tuning.kind != "full"),
        # its ranks gather weights together, and would read different numbers of pieces
        ("data.over_long=split", config.data.over_long == "split"),
    )
    for setting, chosen in other:
        if chosen and config.hardware.strategy == "fsdp":
            raise ValueError(
                f"hardware.strategy=fsdp does not go with {setting}: choose ddp, as in hardware=h200x8_ddp"
            )


def _build_rwkv7(config: Config, tokenizer: Tokenizer) -> RWKV7ForCausalLM:
    device = torch.device("cuda" if config.hardware.accelerator == "gpu" else "cpu")
    dtype = torch.bfloat16 if config.hardware.precision.startswith("bf16") else torch.float32
    smi_kernels.resolve(config.kernel.backend, device, dtype, config.model.head_dim)

    model = from_checkpoint(config, tokenizer) if config.model.pretrained else from_scratch(config, tokenizer)
    model.wkv_backend = config.kernel.backend
    if config.kernel.compile:
        try:
            model.rwkv7.compile_blocks()
        except RuntimeError as error:
            raise ValueError(f"kernel.compile=true cannot run here: {error}") from error
    model.rwkv7.gradient_checkpointing = config.hardware.activation_checkpointing
    return model


def build_module(config: Config, model: Any, optimization: Optimization) -> SMIModule:
    """What trains the model that `build_model` made.

    Raises ValueError for a model of transformers that cannot be trained on several documents at a time.
    """
    if config.model.kind == "hf":
        from smi.training.hf import build_hf_module

        return build_hf_module(model, optimization)
    initial_state = InitialState(model.config) if config.tuning.kind == "state" else None
    return SMIModule(model, optimization, initial_state)


def _rows(tokenizer: Tokenizer) -> int:
    return -(-tokenizer.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def from_scratch(config: Config, tokenizer: Tokenizer) -> RWKV7ForCausalLM:
    """A new model in the official initialisation; float32."""
    shape: dict[str, Any] = {key: getattr(config.model, key) for key in _SHAPE}
    if missing := [f"model.{key}" for key, size in shape.items() if size is None]:
        raise ValueError(f"{', '.join(missing)} is missing: choose a model group, or start from model.pretrained")
    return RWKV7ForCausalLM(
        RWKV7Config(vocab_size=_rows(tokenizer), embedding_init=config.model.embedding_init, **shape)
    )


def from_checkpoint(config: Config, tokenizer: Tokenizer) -> RWKV7ForCausalLM:
    """The checkpoint's model, float32, with rows for the structural tokens."""
    source = config.model.pretrained
    assert source is not None
    model = load_pretrained(source, revision=config.model.revision, dtype=torch.float32)
    found = model.config
    for key in _SHAPE:
        if getattr(config.model, key) not in (None, getattr(found, key)):
            raise ValueError(
                f"{source} has {key} {getattr(found, key)}, but model={config.model.name} says "
                f"{getattr(config.model, key)}: choose the model group that fits the checkpoint"
            )
    text_rows = min(tokenizer.structural.ids)
    if not text_rows <= found.vocab_size < tokenizer.vocab_size + MOST_PADDING:
        raise ValueError(
            f"the tokenizer {config.tokenizer.source} has {text_rows:,} tokens of text, but {source} "
            f"{found.vocab_size:,} rows: they do not belong together"
        )
    ids = Path(source) / STRUCTURAL_FILE
    if ids.is_file() and json.loads(ids.read_text(encoding="utf-8")) != tokenizer.structural.to_dict():
        raise ValueError(f"{ids} has other structural ids than the tokenizer {config.tokenizer.source}")
    if found.vocab_size < tokenizer.vocab_size:
        known = found.vocab_size
        grow_embeddings(model, _rows(tokenizer), list(tokenizer.structural.ids), known, config.seed)
        log.info("the vocabulary grew from %d to %d rows for the structural tokens", known, _rows(tokenizer))
    return model
