"""From a judged config to the objects of a run. Everything that can be wrong shows here, before training starts."""

import importlib.util
import logging
import warnings
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
from smi.data import SMIDataModule
from smi.data.sources import Source, SourceSpec
from smi.data.synthetic import SyntheticTools
from smi.model.checkpoint import load_pretrained
from smi.model.configuration import RWKV7Config
from smi.model.modeling import RWKV7ForCausalLM
from smi.protocol.tokens import grow_embeddings
from smi.runtime.evaluation import score_actions
from smi.tokenizer import Tokenizer, load_tokenizer
from smi.training.checkpoint import newest_checkpoint
from smi.training.module import Optimization

log = logging.getLogger("smi")

CONFIG_FILE = "config.yaml"
# rows of the embedding and the head: tensor cores want the head's width in multiples of this
VOCABULARY_MULTIPLE = 64


def quiet_libraries() -> None:
    """Leaves the console to what a person training a model wants to read."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    for message in (
        ".*isinstance\\(treespec, LeafSpec\\).*",  # lightning's own use of torch
        ".*smaller than the logging interval.*",  # short runs are fine
        ".*does not have many workers.*",  # the data module prefetches in a thread
    ):
        warnings.filterwarnings("ignore", message=message)


def summary(config: Config, model: RWKV7ForCausalLM, tokenizer: Tokenizer) -> Table:
    """What is about to be trained, on what, and where the results will be."""
    shape, data, run = model.config, config.data, config.trainer
    source = {
        "synthetic": "synthetic tool-use conversations",
        "files": ", ".join(data.train_files),
        "mixture": ", ".join(data.source),
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


def prepare_run_dir(config: Config) -> Path | None:
    """Makes the run directory, writes the config into it, and finds the checkpoint to go on from.

    Raises:
        ValueError: the directory holds another run, or the checkpoint is not there.
    """
    folder = Path(config.paths.run_dir)
    checkpoint = None
    if config.resume == "auto":
        checkpoint = newest_checkpoint(folder / "checkpoints")
        if checkpoint is None:
            log.info("resume=auto: no checkpoint in %s yet, starting from the beginning", folder / "checkpoints")
    elif config.resume != "none":
        checkpoint = Path(config.resume)
        if not checkpoint.is_file():
            raise ValueError(f"resume={config.resume}: no such checkpoint file")
    if config.resume == "none" and folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"the run directory {folder} exists and is not empty: choose another paths.run_dir, "
            "or add resume=auto to go on with the run in it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(yaml.safe_dump(asdict(config), sort_keys=False), encoding="utf-8")
    if checkpoint is not None:
        log.info("going on from %s", checkpoint)
    return checkpoint


def build_tokenizer(config: Config) -> Tokenizer:
    return load_tokenizer(config.tokenizer.source)


def build_data(config: Config, tokenizer: Tokenizer) -> SMIDataModule:
    """The data module of `config.data`. Raises ValueError for files that are not there."""
    data = config.data
    train: list[Source]
    if data.kind == "synthetic":
        train = [SyntheticTools(config.seed, data.max_questions)]
    elif data.kind == "files":
        if not data.train_files:
            raise ValueError("data.train_files is empty: name your files, as in data.train_files=[talk.jsonl]")
        train = [SourceSpec("train", data.train_files, data.adapter)]
    else:
        if data.mirror is None:
            raise ValueError("data.mirror is not set: name the directory that holds the sources' files")
        train = [
            SourceSpec(name, source.files, source.adapter, quota=source.quota) for name, source in data.source.items()
        ]
    return SMIDataModule(
        tokenizer,
        train,
        val=[SourceSpec("val", data.val_files, data.adapter)] if data.val_files else None,
        val_fraction=0.0 if data.val_files else data.val_fraction,
        val_batches=data.val_batches,
        root=data.mirror or ".",
        max_length=data.max_length,
        pack_length=data.pack_length,
        window=data.window,
        seed=config.seed,
        steps=config.trainer.max_steps,
        accumulate=config.trainer.accumulate,
    )


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

    model = from_checkpoint(config, tokenizer) if config.model.pretrained else from_scratch(config, tokenizer)
    model.wkv_backend = config.kernel.backend
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
    for key in ("hidden_size", "num_hidden_layers", "head_dim"):
        if getattr(found, key) != getattr(config.model, key):
            raise ValueError(
                f"{source} has {key} {getattr(found, key)}, but model={config.model.name} says "
                f"{getattr(config.model, key)}: choose the model group that fits the checkpoint"
            )
    text_rows = min(tokenizer.structural.ids)
    if found.vocab_size < text_rows:
        raise ValueError(
            f"the tokenizer {config.tokenizer.source} has {text_rows} tokens of text, but {source} only "
            f"{found.vocab_size} rows: they do not belong together"
        )
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
    )


def build_logger(config: Config) -> Any:
    """Lightning's logger of `config.logger`; False for none. Raises ValueError where wandb is not installed."""
    folder = config.paths.run_dir
    match config.logger.kind:
        case "tensorboard":
            return loggers.TensorBoardLogger(folder, name="tensorboard", version="")
        case "csv":
            return loggers.CSVLogger(folder, name="csv", version="")
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
