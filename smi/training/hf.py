"""Any causal language model of transformers, through the same data, loss and trainer.

What differs between architectures is tried on the model itself when it is built: whether it keeps packed documents
apart, whether padding leaves the tokens before it alone, and whether its logits are its hidden states times its
output embedding, as the loss takes them to be. What cannot be had is refused, not hoped for.
"""

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from smi.config import Config, TuningConfig
from smi.data.batch import PackedBatch
from smi.model.checkpoint import publish_over
from smi.protocol.tokens import grow_embeddings
from smi.tokenizer import Tokenizer
from smi.training.loss import LossSums
from smi.training.module import Optimization, SMIModule
from smi.training.origin import attribution, read_origin
from smi.training.tuning import plain_weights

log = logging.getLogger("smi")

# lengths of the probe's documents: longer than the convolutions of state-space models
PROBE = (11, 7, 13)
# share of the largest hidden value by which float32 may round differently
TOLERANCE = 1e-4
# rows past the vocabulary that a checkpoint may have; with more it was made for another tokenizer
MOST_PADDING = 1024


class HFModule(SMIModule):
    """`SMIModule` for a model of transformers.

    packed: documents are read one behind another in a row, with positions that begin anew in each; otherwise in rows
    of their own, padded on the right.
    """

    def __init__(self, model: PreTrainedModel, optimization: Optimization, *, packed: bool):
        super().__init__(model, optimization)
        self.packed = packed

    def configure_model(self) -> None:
        """Nothing: weights that are shared out are RWKV-7's alone, and `hardware.strategy=fsdp` is refused."""

    def _loss(self, batch: PackedBatch) -> LossSums:
        assert not batch.pieces, "a document in pieces needs a state that goes on"
        head = self.model.get_output_embeddings().weight
        if self.packed:
            hidden = packed_hidden(self.model, batch.input_ids, batch.position_ids)
            return self._sums(hidden, head, batch.labels, batch.block_types)
        rows = batch.padded()
        hidden = padded_hidden(self.model, rows.input_ids, rows.attention_mask)
        return self._sums(hidden, head, rows.labels, rows.block_types)


def packed_hidden(model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Hidden states [1, T, C] of documents in one row. Positions that begin anew tell transformers where; where an
    architecture pays no heed to that, `keeps_apart` finds out."""
    return model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state


def padded_hidden(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Hidden states [S, L, C] of documents in rows of their own."""
    mask = attention_mask.to(input_ids.dtype)
    return model.base_model(input_ids=input_ids, attention_mask=mask, use_cache=False).last_hidden_state


def build_hf(config: Config, tokenizer: Tokenizer) -> PreTrainedModel:
    """The model of `config.model.pretrained`, float32, with rows for the structural tokens.

    Only safetensors are read, and no code that comes with a checkpoint is run.

    Raises:
        ValueError: a checkpoint that cannot be had or does not fit the tokenizer, settings that are RWKV-7's alone, or
            a model whose logits are more than its hidden states times its output embedding.
    """
    _check_settings(config)
    model = _load(config, AutoModelForCausalLM, dtype=torch.float32, use_safetensors=True)
    _check_head(model, str(config.model.pretrained))
    _fit_vocabulary(model, tokenizer, config)
    if config.hardware.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def outline_hf(config: Config) -> PreTrainedModel:
    """The model of the checkpoint's config.json, without memory for its parameters. Raises ValueError."""
    _check_settings(config)
    shape = _load(config, AutoConfig)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape)


def _load(config: Config, kind: Any, **options: Any) -> Any:
    source = str(config.model.pretrained)
    try:
        return kind.from_pretrained(
            source, revision=config.model.revision or "main", trust_remote_code=False, **options
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"transformers cannot load a causal language model from {source}: {reason}") from error


def _check_settings(config: Config) -> None:
    for wrong, reason in (
        (config.model.pretrained is None, "model=hf starts from a checkpoint: set model.pretrained"),
        (config.tuning.kind == "state", "tuning.kind=state tunes the state of RWKV-7; model=hf has full and lora"),
        (config.data.over_long == "split", "data.over_long=split carries the state of RWKV-7; model=hf has none"),
        (config.data.held_out_tasks > 0, "held-out tasks are played with RWKV-7's runtime: data.held_out_tasks=0"),
        (config.kernel.compile, "kernel.compile compiles the blocks of RWKV-7: leave it false with model=hf"),
        (config.trainer.export != ["hf"], "model=hf is exported in transformers' layout: trainer.export=[hf]"),
    ):
        if wrong:
            raise ValueError(reason)


def _rows(model: Any) -> int:
    return model.get_input_embeddings().weight.shape[0]


def _fit_vocabulary(model: PreTrainedModel, tokenizer: Tokenizer, config: Config) -> None:
    source, rows = config.model.pretrained, _rows(model)
    known = min(tokenizer.structural.ids)
    if not known <= rows < tokenizer.vocab_size + MOST_PADDING:
        raise ValueError(
            f"the tokenizer {config.tokenizer.source} has {known:,} tokens of text, but {source} {rows:,} rows: they "
            "do not belong together"
        )
    ids = Path(str(source)) / "smi_token_ids.json"
    if ids.is_file():
        if json.loads(ids.read_text(encoding="utf-8")) != tokenizer.structural.to_dict():
            raise ValueError(f"{ids} has other structural ids than the tokenizer {config.tokenizer.source}")
        return
    grow_embeddings(model, tokenizer.vocab_size, list(tokenizer.structural.ids), known, config.seed)
    log.info("the structural tokens got rows of their own, after %d of text", known)


@torch.no_grad()
def _check_head(model: PreTrainedModel, source: str) -> None:
    """Raises ValueError unless logits are hidden states times the output embedding, and nothing more.

    A head that is made to answer with large numbers shows what is done to them behind it, a soft cap or a factor.
    """
    head, base = model.get_output_embeddings(), model.base_model
    refusal = f"{source} ({type(model).__name__}) cannot be trained here: "
    if not isinstance(head, nn.Linear) or head.bias is not None or base is model:
        raise ValueError(f"{refusal}the loss needs an output embedding without a bias on top of a stack")
    seen: dict[str, Tensor] = {}

    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen["input"] = inputs[0]

    def after(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        seen["output"] = torch.linspace(-200, 200, output.numel(), dtype=output.dtype).view(output.shape)
        return seen["output"]

    ids = torch.arange(PROBE[0])[None] % head.out_features
    hooks = [head.register_forward_pre_hook(before), head.register_forward_hook(after)]
    training = model.training
    model.eval()
    try:
        logits = model(input_ids=ids, use_cache=False).logits
        hidden = base(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)
    if not torch.equal(logits, seen["output"]):
        raise ValueError(f"{refusal}it changes its logits after the output embedding, by a soft cap or a factor")
    if seen["input"].shape != hidden.shape or not _alike(seen["input"], hidden):
        raise ValueError(f"{refusal}it changes its hidden states before the output embedding")


def keeps_apart(model: PreTrainedModel) -> bool:
    """Whether documents in one row are read as each would be alone.

    Raises ValueError where they are not in padded rows either. Tried with the weights that the model has.
    """
    packed, padded = _probe(model)
    if not padded:
        raise ValueError(
            f"{type(model).__name__} reads a document differently when others, or padding, are beside it: it cannot "
            "be trained on several at a time"
        )
    return packed


@torch.no_grad()
def _probe(model: PreTrainedModel) -> tuple[bool, bool]:
    """Whether hidden states of documents packed, and padded, are those of each alone."""
    rows = _rows(model)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(rows, (1, length), generator=generator) for length in PROBE]
    ids = torch.zeros(len(PROBE), max(PROBE), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, document in enumerate(documents):
        ids[row, : document.shape[1]] = document
        mask[row, : document.shape[1]] = 1
    training = model.training
    model.eval()
    try:
        alone = [model.base_model(input_ids=document, use_cache=False).last_hidden_state for document in documents]
        positions = torch.cat([torch.arange(length) for length in PROBE])[None]
        together = packed_hidden(model, torch.cat(documents, 1), positions)
        padded = padded_hidden(model, ids, mask)
    finally:
        model.train(training)
    return (
        all(_alike(part, want) for part, want in zip(together.split(PROBE, 1), alone, strict=True)),
        all(_alike(padded[i : i + 1, : want.shape[1]], want) for i, want in enumerate(alone)),
    )


def _alike(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max())


def build_hf_module(model: PreTrainedModel, optimization: Optimization) -> HFModule:
    """The module that trains `model`: packed where it keeps documents apart, padded otherwise."""
    packed = keeps_apart(model)
    log.info(
        "%s: documents are %s",
        type(model).__name__,
        "packed in one row" if packed else "in padded rows: it would mix packed ones",
    )
    return HFModule(model, optimization, packed=packed)


def trained_hf(weights: Mapping[str, Tensor], origin: Path, tuning: TuningConfig) -> PreTrainedModel:
    """`smi.training.export.trained_model` for a run with ``model=hf``.

    Raises ValueError for weights that are not those of the whole model whose config.json is in `origin`.
    """
    own, _ = plain_weights(weights, tuning)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(origin / "base"), dtype=torch.float32)
    [table] = [name for name, value in model.named_parameters() if value is model.get_input_embeddings().weight]
    if table not in own:
        raise ValueError(f"the checkpoint does not hold a whole {type(model).__name__}: {table} is missing")
    model.resize_token_embeddings(own[table].shape[0], mean_resizing=False)
    try:
        model.load_state_dict(own)
    except RuntimeError as error:
        raise ValueError(f"the checkpoint does not hold a whole {type(model).__name__}: {error}") from error
    return model.eval()


@torch.no_grad()
def export_hf(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    directory: Path,
    *,
    formats: Sequence[str],
    config_yaml: str,
    figures: Mapping[str, Any],
    origin: Path | None = None,
) -> Path:
    """`smi.training.export.export_model` for a model of transformers: `directory`, whole or not at all.

    The model goes to the processor for it, where what is read back is compared: weights bit for bit, and logits.

    Raises:
        ValueError: a directory that has something else in it.
        RuntimeError: the export does not read back; an earlier one is then left as it was.
    """
    from smi.training.export import EXPORT_FILE, carry, check_target

    assert list(formats) == ["hf"]
    source = None
    if origin is not None:
        source = read_origin(origin)
        check_target(directory, source)
    draft = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    eot = tokenizer.structural.eot
    model.generation_config = GenerationConfig(eos_token_id=[tokenizer.eos_id, eot], pad_token_id=tokenizer.eos_id)
    model = model.cpu().eval()
    model.save_pretrained(draft)
    again = AutoModelForCausalLM.from_pretrained(draft, dtype=model.dtype)
    weights = model.state_dict()
    if wrong := [name for name, value in again.state_dict().items() if not torch.equal(value, weights[name])]:
        raise RuntimeError(f"the export does not read back: {draft} has other values in {', '.join(wrong)}")
    ids = torch.arange(PROBE[0])[None]
    found, wanted = (each(input_ids=ids, use_cache=False).logits for each in (again, model))
    if not _alike(found, wanted):
        raise RuntimeError(f"the export does not read back: logits of {draft} are off")
    tokenizer.save_pretrained(draft)
    (draft / "config.yaml").write_text(config_yaml, encoding="utf-8")
    section = ""
    if origin is not None and source is not None:
        (draft / EXPORT_FILE).write_text(json.dumps(source, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        carry(origin / "base", draft, code=False)
        section = f"\n{attribution(source)}\n"
    rows = "\n".join(f"| {name} | {value:.4g} |" for name, value in figures.items())
    (draft / "README.md").write_text(
        f"""---
library_name: transformers
tags: [state-model-interface]
---
# {type(model).__name__}

Trained on State Model Interface streams. `config.yaml` holds the whole configuration of the run; the ids of the
structural tokens are in `smi_token_ids.json`.

| figure | value |
|---|---|
| parameters | {model.num_parameters():,} |
{rows}
{section}""",
        encoding="utf-8",
    )
    publish_over(draft, directory)
    return directory
