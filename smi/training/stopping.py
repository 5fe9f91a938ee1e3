"""SIGTERM and Ctrl-C: the run is saved after the micro-batch in progress, and ends, on all ranks together."""

import os
import signal
import threading
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from smi.training.checkpoint import Checkpoints


class StopOnSignal(L.Callback):
    """Has the last finished step saved before the next micro-batch, and raises SIGTERMException or KeyboardInterrupt.

    Lightning's own handling raises on the rank that got the signal and lets the others wait for it, and its handler
    talks to them from wherever the signal came. Here every rank asks the others at each micro-batch, so one that got
    it is enough. A validation in progress is finished; a second Ctrl-C stops at once, unsaved. Lightning puts its
    handlers back when training ends.
    """

    def __init__(self) -> None:
        self._asked = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._asked = 0
        if threading.current_thread() is not threading.main_thread():
            return  # signals go to the main thread alone

        def ask(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGINT and self._asked:
                raise KeyboardInterrupt
            if number == signal.SIGINT and trainer.is_global_zero:
                # print is not to be called from wherever the signal came
                os.write(2, b"\nstopping after this micro-batch; Ctrl-C again stops at once, unsaved\n")
            self._asked = number

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, ask)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        asked = self._asked
        if trainer.world_size > 1:
            asked = int(trainer.strategy.reduce(torch.tensor(asked, device=pl_module.device), reduce_op="max"))
        if asked:
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, Checkpoints):
                    callback.save(trainer)
            raise KeyboardInterrupt if asked == signal.SIGINT else SIGTERMException
