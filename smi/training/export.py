"""What a run hands over: a directory that loads anywhere."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.initialization import no_init_weights

from smi.config import TuningConfig
from smi.model.checkpoint import load_pretrained, publish_over, save_native, save_pretrained
from smi.model.layouts import config_of
from smi.model.modeling import RWKV7ForCausalLM
from smi.model.time_state import TIME_STATE_FILE, save_time_state
from smi.tokenizer import Tokenizer
from smi.training.module import SMIModule
from smi.training.origin import attribution, read_origin
from smi.training.tuning import merge_adapters, plain_weights

NATIVE_FILE = "model.pth"
FLA_FOLDER = "fla"
# which run an export is of, and where that comes from
EXPORT_FILE = "export.json"
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
    origin: Path | None = None,
) -> Path:
    """Writes `directory` whole or not at all: model, tokenizer, chat template, structural ids, config, card.

    An earlier export makes way for it; with an `origin`, only one of the same run does.

    Each format is read back before the directory gets its name: every weight must be the same bit for bit, and the
    model built from it must give the same logits.

    Args:
        formats: any of "hf" (the public Hugging Face layout), "native" (BlinkDL's, as ``model.pth``) and "fla"
            (flash-linear-attention's, a directory ``fla/`` of its own, since its config.json is another).
        config_yaml: the resolved config of the run.
        figures: what the card shows of the run, by name.
        time_state: [L, H, V, K], the initial state that was tuned; becomes ``time_state.pth``.
        origin: what `smi.training.origin.keep_origin` made: licences go into the card, their texts and the code of
            the base's publisher beside the model, for transformers with trust_remote_code.

    Raises:
        ValueError: a model that a format cannot hold; a directory that has something else in it.
        RuntimeError: a format that does not read back; an earlier export is then left as it was.
    """
    source = None
    if origin is not None:
        source = read_origin(origin)
        check_target(directory, source)
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
    if origin is not None:
        (draft / EXPORT_FILE).write_text(json.dumps(source, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        carry(origin / "base", draft, code="hf" in formats)
    (draft / "config.yaml").write_text(config_yaml, encoding="utf-8")
    write_card(draft, model, tokenizer, formats, figures)
    publish_over(draft, directory)
    return directory


def trained_model(
    weights: Mapping[str, torch.Tensor], origin: Path, tuning: TuningConfig
) -> tuple[RWKV7ForCausalLM, torch.Tensor | None]:
    """The model that a run's checkpoint holds, in eval mode, and the initial state that was tuned, if one was.

    Its parameters are the tensors of `weights`, but for matrices with an adapter, which is merged into them.

    Args:
        weights: the checkpoint's ``state_dict``, by the names that the training module has for them.
        origin: of the run; the base's settings that weights do not show are in it.
        tuning: of the run.

    Raises ValueError for weights that are not those of a whole RWKV-7.
    """
    own, time_state = plain_weights(weights, tuning)
    stated = origin / "base" / "config.json"
    config, _ = config_of(own, "hf", json.loads(stated.read_text(encoding="utf-8")) if stated.is_file() else {})
    with no_init_weights(), torch.device("meta"):
        model = RWKV7ForCausalLM(config)
    try:
        model.load_state_dict(own, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the checkpoint does not hold a whole model: {error}") from error
    return model.eval(), time_state


def check_target(directory: Path, source: Mapping[str, Any]) -> None:
    """Raises ValueError where `directory` has contents that are no export of the run that `source` is the origin of."""
    if directory.is_dir() and not any(directory.iterdir()):
        return
    file = directory / EXPORT_FILE
    known = json.loads(file.read_text(encoding="utf-8"))["run"] if file.is_file() else None
    if directory.exists() and known != source["run"]:
        whose = "an export of another run" if known else "no export of a run that is known here"
        raise ValueError(f"{directory} exists and is {whose}: choose another directory, or move it away")


def carry(base: Path, draft: Path, *, code: bool) -> None:
    """Hands on the licence texts of a base checkpoint, and the code that its publisher ships, to which config.json then
    points as the base's did. The code is copied, never run."""
    if not base.is_dir():
        return
    texts = [file for file in base.iterdir() if file.suffix != ".py" and file.name != "config.json"]
    for file in texts:
        (draft / "base").mkdir(exist_ok=True)
        shutil.copyfile(file, draft / "base" / file.name)
    stated = base / "config.json"
    auto_map = json.loads(stated.read_text(encoding="utf-8")).get("auto_map") if stated.is_file() else None
    if code and auto_map:
        for file in base.glob("*.py"):
            shutil.copyfile(file, draft / file.name)
        config = json.loads((draft / "config.json").read_text(encoding="utf-8")) | {"auto_map": auto_map}
        (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


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
    if (directory / EXPORT_FILE).is_file():
        section = attribution(json.loads((directory / EXPORT_FILE).read_text(encoding="utf-8")))
        others += f"\n{section}\n" * bool(section)
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

The ids of the structural tokens are in `smi_token_ids.json`. Insert them as ids; encode payloads with structural
recognition off, as `smi.protocol.codec.encode` does. `chat_template.jinja` is for trusted messages alone.
{others}"""
    (directory / "README.md").write_text(text, encoding="utf-8")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
