"""SIGTERM: the run ends after the micro-batch in progress, on all ranks together."""

import signal
import threading
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from smi.training.checkpoint import Checkpoints


class StopOnSigterm(L.Callback):
    """Has the last finished step saved, and raises SIGTERMException, before the next micro-batch.

    Lightning's own handling raises on the rank that got the signal and lets the others wait for it, and its handler
    talks to them from wherever the signal came. Here every rank asks the others at each micro-batch. A validation in
    progress is finished. Lightning puts its handlers back when training ends.
    """

    def __init__(self) -> None:
        self._asked = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._asked = False
        if threading.current_thread() is not threading.main_thread():
            return  # signals go to the main thread alone

        def ask(number: int, frame: FrameType | None) -> None:
            launcher: Any = trainer.strategy.launcher
            if not self._asked and launcher is not None:
                launcher.kill(number)
            self._asked = True

        signal.signal(signal.SIGTERM, ask)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        asked = self._asked
        if trainer.world_size > 1:
            asked = trainer.strategy.reduce_boolean_decision(asked, all=False)
        if asked:
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, Checkpoints):
                    callback.save(trainer)
            raise SIGTERMException
