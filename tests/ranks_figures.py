"""Two ranks over gloo.

A run whose figures are to be those of one process; one that breaks on the second rank alone, whose reason each rank
writes to FOLDER/nan-RANK.txt; and one whose second rank alone gets SIGTERM.
"""

import os
import signal
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from small_run import fit, small_config

from smi.training.sharding import local

RANKS = ("hardware=cpu_ddp2", "hardware.launcher=torchrun", "trainer.batch_size=2")


class On(L.Callback):
    """Does something on the second rank, before a micro-batch."""

    def __init__(self, batch, what):
        self.batch, self.what = batch, what

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch and trainer.global_rank == 1:
            self.what(pl_module.model)


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    fit(small_config(folder / "run", *RANKS, "callbacks=default", "callbacks.samples.max_tokens=24"))

    def spoil(model):
        model.rwkv7.emb.weight.data.fill_(torch.inf)

    def spoil_shard(model):
        with torch.no_grad():
            local(model.rwkv7.emb.weight).fill_(torch.inf)

    def term(model):
        signal.raise_signal(signal.SIGTERM)

    try:
        fit(small_config(folder / "nan", *RANKS), callbacks=[On(2, spoil)])
    except FloatingPointError as error:
        (folder / f"nan-{rank}.txt").write_text(str(error))
    try:
        sharded = small_config(folder / "fsdp", *RANKS, "hardware.strategy=fsdp", "trainer.val_every=9")
        fit(sharded, callbacks=[On(2, spoil_shard)])
    except FloatingPointError as error:
        (folder / f"fsdp-{rank}.txt").write_text(str(error))
    try:
        fit(small_config(folder / "term", *RANKS, "trainer.batch_size=4"), callbacks=[On(3, term)])
    except SIGTERMException:
        (folder / f"term-{rank}.txt").write_text("stopped")
