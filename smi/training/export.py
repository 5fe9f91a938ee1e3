"""What a finished run hands over: a directory that loads anywhere."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.initialization import no_init_weights

from smi.model.checkpoint import load_pretrained, publish, save_native, save_pretrained
from smi.model.modeling import RWKV7ForCausalLM
from smi.model.time_state import TIME_STATE_FILE, save_time_state
from smi.tokenizer import Tokenizer
from smi.training.module import SMIModule
from smi.training.tuning import merge_adapters

NATIVE_FILE = "model.pth"
FLA_FOLDER = "fla"
# tokens of the text that every export is tried on
PROBE = 32


def export_trained(module: SMIModule, tokenizer: Tokenizer, directory: Path, **about: Any) -> Path:
    """`export_model` for what a module trained, LoRA's adapters merged and a tuned initial state beside the model.

    Changes the module's model; it is not trained any further.
    """
    merge_adapters(module.model)
    if not isinstance(module.model, RWKV7ForCausalLM):
        from smi.training.hf import export_hf

        return export_hf(module.model, tokenizer, directory, **about)
    return export_model(module.model, tokenizer, directory, time_state=module.time_state, **about)


def export_model(
    model: RWKV7ForCausalLM,
    tokenizer: Tokenizer,
    directory: Path,
    *,
    formats: Sequence[str],
    config_yaml: str,
    figures: Mapping[str, Any],
    time_state: torch.Tensor | None = None,
) -> Path:
    """Writes `directory` whole or not at all: model, tokenizer, chat template, structural ids, config, card.

    Each format is read back before the directory gets its name: every weight must be the same bit for bit, and the
    model built from it must give the same logits.

    Args:
        formats: any of "hf" (the public Hugging Face layout), "native" (BlinkDL's, as ``model.pth``) and "fla"
            (flash-linear-attention's, a directory ``fla/`` of its own, since its config.json is another).
        config_yaml: the resolved config of the run.
        figures: what the card shows of the run, by name.
        time_state: [L, H, V, K], the initial state that was tuned; becomes ``time_state.pth``.

    Raises:
        ValueError: a model that a format cannot hold.
        RuntimeError: a format that does not read back; an earlier export is then left as it was.
    """
    draft = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    model.config.eos_token_id = model.config.pad_token_id = tokenizer.eos_id
    model.config.bos_token_id = None
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_id, tokenizer.structural.eot], pad_token_id=tokenizer.eos_id
    )
    written: list[Path] = []
    if "hf" in formats:
        written.append(save_pretrained(model, draft, layout="hf"))
    else:
        draft.mkdir(parents=True)
        model.config.save_pretrained(draft)
        model.generation_config.save_pretrained(draft)
    if "fla" in formats:
        written.append(save_pretrained(model, draft / FLA_FOLDER, layout="fla"))
        tokenizer.save_pretrained(draft / FLA_FOLDER)
    if "native" in formats:
        written.append(save_native(model, draft / NATIVE_FILE))
    verify(model, written)
    if time_state is not None:
        save_time_state(time_state, draft / TIME_STATE_FILE)
    tokenizer.save_pretrained(draft)
    (draft / "config.yaml").write_text(config_yaml, encoding="utf-8")
    write_card(draft, model, tokenizer, formats, figures)
    earlier = directory.with_name(f".{directory.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    if directory.exists():
        directory.rename(earlier)
    publish(draft, directory)
    shutil.rmtree(earlier, ignore_errors=True)
    return directory


@torch.no_grad()
def verify(model: RWKV7ForCausalLM, written: Sequence[Path]) -> None:
    """Raises RuntimeError unless each checkpoint in `written` holds the weights and computes the logits of `model`."""
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    ours = model
    if model.device.type != "cpu":
        # on one device equal weights give equal logits; the one that trained may have no room for a second model
        with no_init_weights(), torch.device("meta"):
            ours = RWKV7ForCausalLM(model.config)  # pyright: ignore[reportArgumentType]
        ours.load_state_dict(weights, assign=True)
    ids = torch.arange(PROBE)[None] % model.config.vocab_size
    want = ours(ids, use_cache=False).logits
    tolerance = 1e-5 if want.dtype == torch.float32 else 1e-2
    for path in written:
        again = load_pretrained(path)
        again.wkv_backend = ours.wkv_backend
        changed = [name for name, tensor in again.state_dict().items() if not torch.equal(tensor, weights[name])]
        if changed:
            raise RuntimeError(f"the export does not read back: {path} has other values in {', '.join(changed)}")
        logits = again(ids, use_cache=False).logits
        error = float((logits - want).abs().max())
        if not error <= tolerance * float(want.abs().max()):
            raise RuntimeError(f"the export does not read back: logits of {path} are off by up to {error:.3g}")


def write_card(
    directory: Path,
    model: RWKV7ForCausalLM,
    tokenizer: Tokenizer,
    formats: Sequence[str],
    figures: Mapping[str, Any],
) -> None:
    """Writes the export's README.md: what the model is, the run's figures, how to load it."""
    config = model.config
    first, *_, last = tokenizer.structural.ids
    rows = "\n".join(f"| {name} | {_short(value)} |" for name, value in figures.items())
    source = "." if "hf" in formats or "native" in formats else FLA_FOLDER
    others = ""
    if "native" in formats:
        others += (
            f"\n`{NATIVE_FILE}` is the model in the native RWKV layout, for the `rwkv` package and other runtimes.\n"
        )
    if "fla" in formats:
        others += f"\n`{FLA_FOLDER}/` is the model in flash-linear-attention's layout, for its own RWKV7ForCausalLM.\n"
    text = f"""---
library_name: smi
tags: [rwkv7, state-model-interface]
---
# RWKV-7, {config.num_hidden_layers} layers of {config.hidden_size} channels

Trained on State Model Interface streams. `config.yaml` holds the whole configuration of the run.

| figure | value |
|---|---|
| parameters | {sum(p.numel() for p in model.parameters()):,} |
| vocabulary | {tokenizer.vocab_size:,} tokens, structural ids {first} to {last} |
{rows}

```python
from smi.model.checkpoint import load_pretrained
from smi.tokenizer import load_tokenizer

model, tokenizer = load_pretrained("{source}"), load_tokenizer(".")
```
{others}
The ids of the structural tokens are in `smi_token_ids.json`. Insert them as ids; encode payloads with structural
recognition off, as `smi.protocol.codec.encode` does. `chat_template.jinja` is for trusted messages alone.
"""
    (directory / "README.md").write_text(text, encoding="utf-8")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
