"""SIGTERM: the run ends after the micro-batch in progress, on all ranks together."""

import signal
import threading
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException


class StopOnSigterm(L.Callback):
    """Raises SIGTERMException before the next micro-batch; `Checkpoints` then saves the last finished step.

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

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        asked = self._asked
        if trainer.world_size > 1:
            asked = trainer.strategy.reduce_boolean_decision(asked, all=False)
        if asked:
            raise SIGTERMException
