"""Runs of a model of a few thousand parameters, in the process of the test, as a config describes them."""

from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import lightning as L
from hydra import compose, initialize_config_dir
from rich.console import Console

from smi.composing import config_dir, judge, register
from smi.config import Config
from smi.data.recipe import build_data, build_tokenizer
from smi.training.models import build_model
from smi.training.module import SMIModule
from smi.training.run_directory import write_config
from smi.training.setup import optimization
from smi.training.trainer import build_trainer

SMALL = (
    "data=synthetic",
    "data.max_questions=1",
    "data.max_length=400",
    "data.pack_length=400",
    "data.window=16",
    "data.val_batches=2",
    "data.held_out_tasks=0",
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.head_dim=32",
    "kernel=chunked",
    "optim.lr=1e-3",
    "optim.warmup_steps=2",
    "trainer.max_steps=4",
    "trainer.val_every=2",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1000",
    "callbacks=none",
    "logger=none",
)


def small_config(folder: Path, *overrides: str) -> Config:
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return judge(compose("train", overrides=[*SMALL, f"paths.run_dir={folder}", *overrides]))


def undrawn():
    """Reports without their curves, which take longer to draw than such a run to make."""
    return patch("smi.training.report.plots", lambda figures: {})


def fit(
    config: Config, checkpoint: Path | None = None, callbacks=(), *, drawn: bool = False
) -> tuple[L.Trainer, SMIModule]:
    """`callbacks` come before those of the config. The report has its curves where they are to be `drawn`."""
    L.seed_everything(config.seed, verbose=False)
    tokenizer = build_tokenizer(config)
    data, model = build_data(config, tokenizer), build_model(config, tokenizer)
    write_config(config)
    module = SMIModule(model, optimization(config))
    trainer = build_trainer(config, Console(file=StringIO()))
    trainer.callbacks[:0] = callbacks
    with nullcontext() if drawn else undrawn():
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    return trainer, module
