"""Two ranks over gloo, of which one has a long document."""

import os
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch.strategies import DDPStrategy
from test_module import module, trainer
from test_pieces import conversation, in_pieces, noisy

from smi.data.batch import PackedBatch, pack
from smi.data.loader import FixedBatches
from smi.training.module import SMIModule
from smi.training.tuning import InitialState


def batches() -> list[list[PackedBatch]]:
    """Of each rank: two steps of two micro-batches."""
    long = [in_pieces(conversation(20, 30, 9, 41, seed=seed), 50) for seed in (0, 1)]
    short = [pack([conversation(10, 12, seed=seed)]) for seed in range(2, 8)]
    return [[long[0], short[0], short[1], long[1]], short[2:]]


def subject() -> SMIModule:
    made = noisy(module(lr=1e-3))
    made.initial_state = InitialState(made.model.config).double()
    return made


def main(folder: Path) -> None:
    """Trains for two steps and writes the weights of each rank to FOLDER/RANK.pt."""
    rank = int(os.environ["RANK"])
    made = subject()
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60))
    trainer(devices=2, strategy=strategy, accumulate_grad_batches=2).fit(made, FixedBatches(batches()[rank]))
    torch.save(made.state_dict(), folder / f"{rank}.pt")
