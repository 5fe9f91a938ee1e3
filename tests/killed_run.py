"""A run of a small RWKV-7 that takes moments, in this process, and what such runs came to."""

import csv
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from test_data_datamodule import Bytes

from smi.data import SMIDataModule
from smi.data.batch import PackedBatch
from smi.data.prepared import PreparedSource
from smi.model import RWKV7Config, RWKV7ForCausalLM
from smi.training.checkpoint import AtomicCheckpointIO, Checkpoints, list_checkpoints, newest_sound, read_checkpoint
from smi.training.module import Optimization, SMIModule
from smi.training.setup import quiet_libraries

RANKS = {"decay_low_rank_dim": 8, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8}


class Drawing(SMIModule):
    """Draws from every random generator in each batch, as dropout and samples would."""

    def training_step(self, batch: PackedBatch, batch_idx: int) -> torch.Tensor:
        share = float(torch.rand(())) + np.random.random() + random.random()
        return super().training_step(batch, batch_idx) * (1 + share)


def fit(
    run_dir: Path,
    source: PreparedSource,
    *,
    steps: int,
    every: int = 1,
    keep: int = 1,
    accumulate: int = 2,
    val_every: int = 3,
    start: Path | None = None,
    at_step: Callable[[L.Trainer], None] = lambda trainer: None,
    **trainer: Any,
) -> L.Trainer:
    """Begins a run, at a checkpoint `start` perhaps, or goes on with it. Counts are in optimizer steps.

    `at_step` is called before what is saved; `trainer` are more arguments of Lightning's.
    """
    quiet_libraries()
    saved = list_checkpoints(run_dir / "checkpoints")
    L.seed_everything(0, verbose=False)
    model = RWKV7ForCausalLM(RWKV7Config(vocab_size=320, hidden_size=16, num_hidden_layers=1, head_dim=16, **RANKS))
    model.train()
    model.wkv_backend = "chunked"
    callbacks = [
        Checkpoints(run_dir / "checkpoints", every, keep),
        LambdaCallback(on_train_batch_end=lambda t, *_: at_step(t)),
    ]
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": steps,
        "accumulate_grad_batches": accumulate,
        "gradient_clip_val": 1.0,
        "val_check_interval": val_every * accumulate,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "logger": CSVLogger(run_dir, name="csv"),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "plugins": [AtomicCheckpointIO()],
    }
    fitted = L.Trainer(callbacks=callbacks, **settings | trainer)
    module = Drawing(model, Optimization(lr=1e-2, max_steps=steps, warmup_steps=5))
    fitted.fit(module, datamodule=data(source, steps, accumulate), ckpt_path=newest_sound(saved) if saved else start)
    return fitted


def data(source: PreparedSource, steps: int, accumulate: int) -> SMIDataModule:
    return SMIDataModule(
        Bytes(),
        source,
        steps=steps,
        accumulate=accumulate,
        max_length=80,
        pack_length=96,
        window=16,
        workers=1,
        val_fraction=0.1,
        val_batches=1,
    )


def outcome(run_dir: Path, step: int) -> dict[str, Any]:
    """What a run comes to: weights, optimizer state, rates, random states, and every figure logged, by step."""
    checkpoint = read_checkpoint(run_dir / "checkpoints" / f"step-{step}.ckpt")
    names = ("state_dict", "optimizer_states", "lr_schedulers", "random_states", "global_step")
    return {name: checkpoint[name] for name in names} | {"logged": logged(run_dir)}


def logged(run_dir: Path) -> dict[int, dict[str, str]]:
    """Every figure in the CSV files of a run, by step and name; a later part of the run overrides an earlier one."""
    rows: dict[int, dict[str, str]] = {}
    for number in range(len(list(run_dir.glob("csv/version_*")))):
        file = run_dir / "csv" / f"version_{number}" / "metrics.csv"
        if file.exists():
            with file.open() as lines:
                for row in csv.DictReader(lines):
                    rows.setdefault(int(row["step"]), {}).update({key: value for key, value in row.items() if value})
    return dict(sorted(rows.items()))


def assert_identical(there: Any, here: Any, place: str = "") -> None:
    """Equal to the last bit, tensors within plain values."""
    if isinstance(there, torch.Tensor):
        assert torch.equal(there, here), place
    elif isinstance(there, dict):
        assert there.keys() == here.keys(), (place, there.keys() ^ here.keys())
        for key in there:
            assert_identical(there[key], here[key], f"{place}/{key}")
    elif isinstance(there, list | tuple):
        assert len(there) == len(here), place
        for index, (a, b) in enumerate(zip(there, here, strict=True)):
            assert_identical(a, b, f"{place}/{index}")
    else:
        assert there == here, (place, there, here)
