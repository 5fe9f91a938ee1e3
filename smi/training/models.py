"""The model of a config: from a checkpoint or from scratch, with a vocabulary for its tokenizer."""

import json
import logging
from pathlib import Path

import torch

import smi_kernels
from smi.config import Config
from smi.model.checkpoint import is_on_hub, load_pretrained
from smi.model.configuration import RWKV7Config
from smi.model.modeling import RWKV7ForCausalLM
from smi.protocol.tokens import grow_embeddings
from smi.tokenizer import Tokenizer

log = logging.getLogger("smi")

# rows of the embedding and the head: tensor cores want the head's width in multiples of this
VOCABULARY_MULTIPLE = 64
# rows past the vocabulary that a checkpoint may have; with more it was made for another tokenizer
MOST_PADDING = 1024

_SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "head_dim",
    "decay_low_rank_dim",
    "a_low_rank_dim",
    "v_low_rank_dim",
    "gate_low_rank_dim",
)


def check_device(config: Config) -> str:
    """The name of the WKV backend that will run. Raises ValueError where device or backend are not to be had here."""
    if config.hardware.accelerator == "gpu" and not torch.cuda.is_available():
        raise ValueError("hardware=gpu needs an NVIDIA GPU and a CUDA build of torch: use hardware=cpu here")
    device = torch.device("cuda" if config.hardware.accelerator == "gpu" else "cpu")
    dtype = torch.bfloat16 if config.hardware.precision.startswith("bf16") else torch.float32
    return smi_kernels.resolve(config.kernel.backend, device, dtype, config.model.head_dim).name


def outline_model(config: Config, tokenizer: Tokenizer) -> RWKV7ForCausalLM:
    """The model that `build_model` would give, without memory for its parameters.

    A checkpoint in a path is mapped and held against the config, one on the hub is left there. Raises ValueError.
    """
    _check_revision(config)
    source = config.model.pretrained
    if source is not None and not is_on_hub(source):
        check_checkpoint_fits(load_pretrained(source, revision=config.model.revision), config, tokenizer)
    with torch.device("meta"):
        return from_scratch(config, tokenizer)


def build_model(config: Config, tokenizer: Tokenizer) -> RWKV7ForCausalLM:
    """The model of `config.model`, from its checkpoint or from scratch, with a vocabulary for `tokenizer`.

    Raises:
        ValueError: a checkpoint that does not fit, a vocabulary that does not, a kernel or device that is not
            to be had here.
    """
    check_device(config)
    _check_revision(config)
    model = from_checkpoint(config, tokenizer) if config.model.pretrained else from_scratch(config, tokenizer)
    model.train()
    model.wkv_backend = config.kernel.backend
    if config.kernel.compile:
        try:
            model.rwkv7.compile_blocks()
        except RuntimeError as error:
            raise ValueError(f"kernel.compile=true cannot run here: {error}") from error
    model.rwkv7.gradient_checkpointing = config.hardware.activation_checkpointing
    return model


def _check_revision(config: Config) -> None:
    if config.model.revision and not config.model.pretrained:
        raise ValueError("model.revision is of model.pretrained, which is not set")


def _rows(tokenizer: Tokenizer) -> int:
    return -(-tokenizer.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def from_scratch(config: Config, tokenizer: Tokenizer) -> RWKV7ForCausalLM:
    """A new model in the official initialisation; float32."""
    shape = config.model
    return RWKV7ForCausalLM(
        RWKV7Config(
            vocab_size=_rows(tokenizer),
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_hidden_layers,
            head_dim=shape.head_dim,
            decay_low_rank_dim=shape.decay_low_rank_dim,
            a_low_rank_dim=shape.a_low_rank_dim,
            v_low_rank_dim=shape.v_low_rank_dim,
            gate_low_rank_dim=shape.gate_low_rank_dim,
            embedding_init=shape.embedding_init,
        )
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
        if getattr(found, key) != getattr(config.model, key):
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
    ids = Path(source) / "smi_token_ids.json"
    if ids.is_file() and json.loads(ids.read_text(encoding="utf-8")) != tokenizer.structural.to_dict():
        raise ValueError(f"{ids} has other structural ids than the tokenizer {config.tokenizer.source}")
