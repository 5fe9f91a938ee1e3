"""From a judged config to the objects of a run. Everything that can be wrong shows here, before training starts."""

import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from lightning.pytorch import loggers
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import smi_kernels
from smi.config import Config
from smi.data.synthetic import SyntheticTools
from smi.model.checkpoint import load_pretrained
from smi.model.configuration import RWKV7Config
from smi.model.modeling import RWKV7ForCausalLM
from smi.protocol.tokens import grow_embeddings
from smi.runtime.evaluation import score_actions
from smi.tokenizer import Tokenizer
from smi.training.checkpoint import check_checkpoint, list_checkpoints
from smi.training.module import Optimization

log = logging.getLogger("smi")

CONFIG_FILE = "config.yaml"
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


def quiet_libraries() -> None:
    """Leaves the console to what a person training a model wants to read."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    for message in (
        ".*isinstance\\(treespec, LeafSpec\\).*",  # lightning's own use of torch
        ".*smaller than the logging interval.*",  # short runs are fine
        ".*does not have many workers.*",  # the data module prefetches in a thread
        ".*Total length of `list` across ranks is zero.*",  # no validation was asked for
    ):
        warnings.filterwarnings("ignore", message=message)


def summary(config: Config, model: RWKV7ForCausalLM, tokenizer: Tokenizer) -> Table:
    """What is about to be trained, on what, and where the results will be."""
    shape, data, run = model.config, config.data, config.trainer
    source = {
        "synthetic": "synthetic tool-use conversations",
        "files": ", ".join(data.train_files),
        "mixture": data.mixture or ", ".join(data.source),
    }[data.kind]
    start = config.model.pretrained or "from scratch"
    rows = {
        "model": f"{config.model.name}, {model.num_parameters() / 1e6:,.1f}M parameters, "
        f"{shape.num_hidden_layers} layers of {shape.hidden_size}, {start}",
        "tokenizer": f"{config.tokenizer.source}, {tokenizer.vocab_size:,} tokens",
        "data": f"{source}; at most {data.max_length:,} tokens a conversation",
        "training": f"{run.max_steps:,} steps of {run.accumulate * data.pack_length:,} tokens, "
        f"peak learning rate {config.optim.lr:g}",
        "hardware": f"{config.hardware.accelerator}, {config.hardware.precision}, kernel {config.kernel.backend}",
        "run directory": str(config.paths.run_dir),
    }
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    return table


# what a resumed run may change; everything else decides what is learned, and in which order
_FREE_TO_CHANGE = ("name", "resume", "paths", "logger", "kernel", "hardware", "trainer")
_FREE_IN_DATA = ("workers", "on_change")
# what a run may go on with where data.on_change=continue; the loader judges what the data allows
_ORDER = ("seed", "data.window", "data.pack_length", "accumulate")


def find_checkpoint(config: Config) -> Path | None:
    """The checkpoint to go on from, None for a new run. Nothing is written.

    Raises:
        ValueError: the run directory holds another run, the checkpoint is not there or cannot be read, or the
            settings are not those that it was made with.
    """
    folder = Path(config.paths.run_dir)
    if config.resume == "none":
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(
                f"the run directory {folder} exists and is not empty: choose another paths.run_dir, "
                "or add resume=auto to go on with the run in it"
            )
        return None
    if config.resume == "auto":
        found = list_checkpoints(folder / "checkpoints")
        if not found:
            log.info("resume=auto: no checkpoint in %s yet, starting from the beginning", folder / "checkpoints")
            return None
        checkpoint = found[-1]
    else:
        checkpoint = Path(config.resume)
        own = checkpoint.parent.resolve() == (folder / "checkpoints").resolve()
        if folder.is_dir() and any(folder.iterdir()) and not own:
            raise ValueError(f"{checkpoint} is not of the run in {folder}: choose another paths.run_dir")
    check_checkpoint(checkpoint)
    _check_same_settings(config, checkpoint.parent.parent / CONFIG_FILE)
    log.info("going on from %s", checkpoint)
    return checkpoint


def _check_same_settings(config: Config, file: Path) -> None:
    if not file.is_file():
        raise ValueError(f"{file} is not there, so it cannot be told which settings the checkpoint belongs to")
    now, then = asdict(config), yaml.safe_load(file.read_text(encoding="utf-8"))
    for settings in (now, then):
        settings["accumulate"] = settings["trainer"]["accumulate"]
        settings["data"] = {key: value for key, value in settings["data"].items() if key not in _FREE_IN_DATA}
    changed = [
        f"{place} was {old} and is {new}"
        for section in now
        if section not in _FREE_TO_CHANGE
        for place, old, new in _differences(section, then.get(section), now[section])
        if not (place in _ORDER and config.data.on_change == "continue")
    ]
    if changed:
        raise ValueError(
            "the run to resume has other settings: " + "; ".join(changed) + ". Give the command that started it; "
            f"{', '.join(_ORDER)} may be changed with data.on_change=continue"
        )


def _differences(place: str, then: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(now, dict) and isinstance(then, dict):
        for key in dict.fromkeys((*then, *now)):
            yield from _differences(f"{place}.{key}", then.get(key), now.get(key))
    elif then != now:
        yield place, then, now


def write_config(config: Config) -> str:
    """Writes the resolved config into the run directory, which it makes; returns the text."""
    folder = Path(config.paths.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(asdict(config), sort_keys=False)
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    return text


def build_model(config: Config, tokenizer: Tokenizer) -> RWKV7ForCausalLM:
    """The model of `config.model`, from its checkpoint or from scratch, with a vocabulary for `tokenizer`.

    Raises:
        ValueError: a checkpoint that does not fit, a vocabulary that does not, a kernel or device that is not
            to be had here.
    """
    if config.hardware.accelerator == "gpu" and not torch.cuda.is_available():
        raise ValueError("hardware=gpu needs an NVIDIA GPU and a CUDA build of torch: use hardware=cpu here")
    device = torch.device("cuda" if config.hardware.accelerator == "gpu" else "cpu")
    dtype = torch.bfloat16 if config.hardware.precision.startswith("bf16") else torch.float32
    smi_kernels.resolve(config.kernel.backend, device, dtype, config.model.head_dim)

    if config.model.revision and not config.model.pretrained:
        raise ValueError("model.revision is of model.pretrained, which is not set")
    model = from_checkpoint(config, tokenizer) if config.model.pretrained else from_scratch(config, tokenizer)
    model.train()
    model.wkv_backend = config.kernel.backend
    if config.kernel.compile:
        try:
            model.rwkv7.compile_blocks()
        except RuntimeError as error:
            raise ValueError(f"kernel.compile=true cannot run here: {error}") from error
    model.rwkv7.gradient_checkpointing = config.model.gradient_checkpointing
    return model


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
    found = model.config
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
    if found.vocab_size < tokenizer.vocab_size:
        known = found.vocab_size
        grow_embeddings(model, _rows(tokenizer), list(tokenizer.structural.ids), known, config.seed)
        log.info("the vocabulary grew from %d to %d rows for the structural tokens", known, _rows(tokenizer))
    return model


def optimization(config: Config) -> Optimization:
    how = config.optim
    return Optimization(
        lr=how.lr,
        max_steps=config.trainer.max_steps,
        final_lr_ratio=how.final_lr_ratio,
        warmup_steps=how.warmup_steps,
        weight_decay=how.weight_decay,
        betas=(how.betas[0], how.betas[1]),
        eps=how.eps,
        z_loss=how.z_loss,
        l2wrap=how.l2wrap,
    )


def build_logger(config: Config) -> Any:
    """Lightning's logger of `config.logger`; False for none. Raises ValueError where wandb is not installed."""
    folder = config.paths.run_dir
    match config.logger.kind:
        case "tensorboard":
            return loggers.TensorBoardLogger(folder, name="tensorboard", version="")
        case "csv":
            # a resumed run writes a version of its own: the logger would empty an existing one
            return loggers.CSVLogger(folder, name="csv")
        case "wandb":
            if importlib.util.find_spec("wandb") is None:
                raise ValueError("logger=wandb needs wandb: pip install 'smi[wandb]', or choose another logger")
            return loggers.WandbLogger(project=config.logger.project, save_dir=folder, name=config.name)
        case _:
            return False


def evaluate_tasks(config: Config, model: RWKV7ForCausalLM, tokenizer: Tokenizer, console: Console) -> dict[str, float]:
    """Plays held-out tasks of the synthetic world with the trained model and prints how it did."""
    source = SyntheticTools(config.seed, config.data.max_questions)
    conversations = list(islice(source.conversations(held_out=True), config.data.held_out_tasks))
    scores = score_actions(model, tokenizer, conversations)
    of = f"of {scores.generated}"
    console.print(
        f"\n{len(conversations)} conversations about tasks held out of training:\n"
        f"  {scores.generated} actions written, {scores.expected} expected\n"
        f"  {scores.parsed} {of} parse, {scores.declared} {of} name a declared tool, "
        f"{scores.valid} {of} have valid arguments ({scores.valid_share:.1%})\n"
        f"  {scores.exact} are exactly right ({scores.exact_share:.1%})\n"
        f"  {scores.answers_exact} of {scores.answers} answers are right word for word",
        highlight=False,
        soft_wrap=True,
    )
    return {f"held_out/{name}": value for name, value in scores.to_dict().items()}
