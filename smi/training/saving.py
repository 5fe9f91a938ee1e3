"""When a run saves, and what it keeps: beside the weights all that makes a resumed run equal one that was not killed."""

import random
import uuid
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed
from lightning.pytorch.callbacks import Checkpoint

from smi.training.checkpoint import list_checkpoints, read_checkpoint, step_of


class Checkpoints(Checkpoint):
    """Saves ``step-N.ckpt`` every so many optimizer steps and after the last one, and keeps the newest ones.

    - A step is saved after the validation that follows it, and what was logged up to it is on the disk before: a run
      that is killed at any moment leaves out nothing when it goes on.
    - An old checkpoint goes only when the new one is whole on the disk, and only one that this run wrote, here or
      before it was resumed.
    - A save that fails ends the run on every rank, with the path and the reason.

    Args:
        folder: where to save.
        every: optimizer steps between two saves.
        keep: how many to keep.
    """

    def __init__(self, folder: Path, every: int, keep: int):
        self.folder, self.every, self.keep = folder, every, keep
        # carried by every checkpoint of a run, however often it is resumed
        self.run = uuid.uuid4().hex
        self._saved = -1
        self._written: list[Path] = []
        self._logged: dict[str, float] = {}
        self._resumed: dict[str, Any] = {}
        self._random_states: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"run": self.run, "logged": self._logged}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        own = random_state()
        states: list[Any] = [own]
        if trainer.world_size > 1:
            states = [None] * trainer.world_size
            torch.distributed.all_gather_object(states, own)
        checkpoint["random_states"] = states

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._random_states = checkpoint.get("random_states", [])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        step = self._saved = trainer.global_step
        start = trainer.ckpt_path
        if start is None:
            return
        # a run that begins from another one's checkpoint is a run of its own
        if Path(start).resolve().parent == self.folder.resolve():
            self.run = self._resumed.get("run", self.run)
        if trainer.is_global_zero:
            found = [file for file in list_checkpoints(self.folder) if step_of(file) <= step]
            self._written = [file for file in found if run_of(file) == self.run]
        # lightning logs a step after the callbacks have seen its end, so that its line is not in the log yet
        if logged := self._resumed.get("logged"):
            for logger in trainer.loggers:
                logger.log_metrics(logged | {"epoch": trainer.current_epoch}, step=step - 1)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        # only now: what happens between the start of a run and its first batch may draw numbers as well
        states, self._random_states = self._random_states, []
        if len(states) == trainer.world_size:
            set_random_state(states[trainer.global_rank])

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not self._due(trainer) or validation_follows(trainer):
            return
        self._logged = {}
        if trainer.global_step % trainer.log_every_n_steps == 0:
            metrics = trainer.callback_metrics.items()
            self._logged = {name: float(value) for name, value in metrics if not name.startswith("val/")}
        self.save(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking and self._due(trainer):
            self._logged = {}
            self.save(trainer)

    def _due(self, trainer: L.Trainer) -> bool:
        step = trainer.global_step
        return step != self._saved and (step % self.every == 0 or step == trainer.max_steps or trainer.should_stop)

    def save(self, trainer: L.Trainer) -> None:
        """Saves the step that was just made; called on all ranks alike.

        Raises OSError on every rank where it fails on one.
        """
        file = self.folder / f"step-{trainer.global_step}.ckpt"
        failure: OSError | None = None
        try:
            for logger in trainer.loggers:
                logger.save()
        except OSError as error:
            failure = error
        written = False
        try:
            trainer.save_checkpoint(file)
            written = True
            if trainer.is_global_zero:
                self._keep(file)
        except OSError as error:
            failure = failure or error
            if not written:
                # the other ranks wait at the end of save_checkpoint for the one that writes
                trainer.strategy.barrier()
        message = trainer.strategy.broadcast(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        if message is not None:
            raise OSError(message)
        self._saved = trainer.global_step

    def _keep(self, file: Path) -> None:
        self._written = [*(known for known in self._written if known != file), file]
        while len(self._written) > self.keep:
            self._written[0].unlink(missing_ok=True)
            del self._written[0]


def run_of(file: Path) -> str | None:
    """The run that wrote a checkpoint; None for what is none, or has no mark of one."""
    try:
        return read_checkpoint(file)["callbacks"][Checkpoints.__qualname__]["run"]
    except (ValueError, KeyError, TypeError):
        return None


def validation_follows(trainer: L.Trainer) -> bool:
    """Whether Lightning is going to validate after the batch that has just ended."""
    loop = trainer.fit_loop
    fetcher = loop._data_fetcher
    assert fetcher is not None
    return loop.epoch_loop._should_check_val_fx(fetcher)


def random_state() -> dict[str, Any]:
    """The state of every random generator of this process, in values that weights_only lets through."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": [version, torch.tensor(numbers), gauss],
        "numpy": [name, torch.tensor(np.asarray(keys).astype(np.int64)), *rest],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Puts every random generator of this process where it was."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
