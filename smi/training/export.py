"""What a finished run hands over: a directory that loads anywhere."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from smi.model.checkpoint import save_native
from smi.model.modeling import RWKV7ForCausalLM
from smi.tokenizer import Tokenizer

NATIVE_FILE = "model.pth"


def export_model(
    model: RWKV7ForCausalLM,
    tokenizer: Tokenizer,
    directory: Path,
    *,
    formats: Sequence[str],
    config_yaml: str,
    figures: Mapping[str, Any],
) -> Path:
    """Writes `directory` whole or not at all: model, tokenizer, chat template, structural ids, config, card.

    Args:
        formats: "hf" (the public Hugging Face layout), "native" (BlinkDL's, as ``model.pth``), or both.
        config_yaml: the resolved config of the run.
        figures: what the card shows of the run, by name.
    """
    draft = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    model.config.eos_token_id = model.config.pad_token_id = tokenizer.eos_id
    model.config.bos_token_id = None
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_id, tokenizer.structural.eot], pad_token_id=tokenizer.eos_id
    )
    if "hf" in formats:
        model.save_pretrained(draft)
    else:
        model.config.save_pretrained(draft)
        model.generation_config.save_pretrained(draft)
    if "native" in formats:
        save_native(model, draft / NATIVE_FILE)
    tokenizer.save_pretrained(draft)
    (draft / "config.yaml").write_text(config_yaml, encoding="utf-8")
    write_card(draft, model, tokenizer, formats, figures)
    if directory.exists():
        shutil.rmtree(directory)
    os.replace(draft, directory)
    return directory


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
    native = (
        f"\n`{NATIVE_FILE}` is the same model in the native RWKV layout, for the `rwkv` package and other runtimes.\n"
        if "native" in formats
        else ""
    )
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

model, tokenizer = load_pretrained("."), load_tokenizer(".")
```
{native}
The ids of the structural tokens are in `smi_token_ids.json`. Insert them as ids; encode payloads with structural
recognition off, as `smi.protocol.codec.encode` does. `chat_template.jinja` is for trusted messages alone.
"""
    (directory / "README.md").write_text(text, encoding="utf-8")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
