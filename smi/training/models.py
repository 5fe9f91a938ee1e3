"""The model of a config, with a vocabulary for its tokenizer, and the module that trains it."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import smi_kernels
from smi.config import Config
from smi.model.checkpoint import is_on_hub, load_pretrained
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


def check_device(config: Config) -> str | None:
    """The name of the WKV backend that will run, if the model has WKV. Raises ValueError where device or backend are
    not to be had here."""
    if config.hardware.accelerator == "gpu" and not torch.cuda.is_available():
        raise ValueError("this hardware needs an NVIDIA GPU and a CUDA build of torch: use hardware=cpu here")
    if config.model.kind == "hf":
        return None
    device = torch.device("cuda" if config.hardware.accelerator == "gpu" else "cpu")
    dtype = torch.bfloat16 if config.hardware.precision.startswith("bf16") else torch.float32
    return smi_kernels.resolve(config.kernel.backend, device, dtype, config.model.head_dim).name


def outline_model(config: Config, tokenizer: Tokenizer) -> Any:
    """The model that `build_model` would give, without memory for its parameters.

    A checkpoint in a path is mapped and held against the config, one on the hub is left there, but for the
    config.json of a model of transformers. Raises ValueError.
    """
    _check_settings(config)
    source = config.model.pretrained
    if config.model.kind == "hf":
        from smi.training.hf import outline_hf

        model = outline_hf(config)
    else:
        if source is not None and not is_on_hub(source):
            found = load_pretrained(source, revision=config.model.revision)
            check_checkpoint_fits(found, config, tokenizer)
            shape = {key: getattr(found.config, key) for key in _SHAPE}
            config = replace(config, model=replace(config.model, **shape))
        with torch.device("meta"):
            model = from_scratch(config, tokenizer)
    tune(model, config.tuning)
    return model


def build_model(config: Config, tokenizer: Tokenizer) -> Any:
    """The model of `config.model`, with a vocabulary for `tokenizer`; what of it trains is as `config.tuning` says.

    An `RWKV7ForCausalLM` from a checkpoint or from scratch, or with ``model=hf`` a model of transformers.

    Raises:
        ValueError: a checkpoint that does not fit, a vocabulary that does not, settings that contradict each other,
            a kernel or device that is not to be had here.
    """
    check_device(config)
    _check_settings(config)
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


def _build_rwkv7(config: Config, tokenizer: Tokenizer) -> RWKV7ForCausalLM:
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


def _check_settings(config: Config) -> None:
    """Raises ValueError for settings that do not go together."""
    if config.model.revision and not config.model.pretrained:
        raise ValueError("model.revision is of model.pretrained, which is not set")
    tuning = f"tuning.kind={config.tuning.kind}"
    if config.tuning.kind != "full" and not config.model.pretrained:
        raise ValueError(f"{tuning} is for a model that has been trained: set model.pretrained to its export")
    if config.hardware.strategy == "fsdp":
        for setting, chosen in (
            ("model=hf", config.model.kind == "hf"),
            (tuning, config.tuning.kind != "full"),
            # its ranks gather weights together, and would read different numbers of pieces
            ("data.over_long=split", config.data.over_long == "split"),
        ):
            if chosen:
                raise ValueError(f"hardware.strategy=fsdp does not go with {setting}: choose ddp")


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
    check_checkpoint_fits(model, config, tokenizer)
    if model.config.vocab_size < tokenizer.vocab_size:
        known = model.config.vocab_size
        grow_embeddings(model, _rows(tokenizer), list(tokenizer.structural.ids), known, config.seed)
        log.info("the vocabulary grew from %d to %d rows for the structural tokens", known, _rows(tokenizer))
    return model


def check_checkpoint_fits(model: RWKV7ForCausalLM, config: Config, tokenizer: Tokenizer) -> None:
    """Raises ValueError where a checkpoint's model has another shape or vocabulary than the run."""
    source, found = config.model.pretrained, model.config
    assert source is not None
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
