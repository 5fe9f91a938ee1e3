"""Training checkpoints: written whole or not at all, found again, and read without running anything in them.

A checkpoint is in torch's zip format, which holds a CRC-32 of each of its records, computed while they are written.
So one pass over the file tells whether it is what was written, without a second file or format; torch itself does not
look at them. It is made before a new checkpoint gets its name, and before a run goes on from an old one.
"""

import logging
import os
import pickle
import random
import re
import uuid
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint

from smi.files import sync

log = logging.getLogger("smi")

_NAME = re.compile(r"step-(\d+)\.ckpt")
# one a folder: what a killed run left behind is written over by the next save
_DRAFT = ".checkpoint.partial"


class DamagedCheckpoint(ValueError):
    """A checkpoint that is not what was written."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes under a temporary name, flushes to the disk, reads that back, then renames.

    Whatever has a checkpoint's name was whole once, and an earlier file of that name stays until then.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Raises OSError, with the path and the reason, for whatever goes wrong."""
        target = Path(path)
        draft = target.with_name(_DRAFT)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):
                    # what is read back should come from the disk, not from memory
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            read_whole(draft)
            os.replace(draft, target)
            sync(target.parent)
        except Exception as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            # torch reports a full disk as a position in the file, raised while it handles the real reason
            reason = error.__context__ if isinstance(error.__context__, OSError) else error
            failure = OSError(f"the checkpoint {target} could not be written: {reason}")
            failure.errno = getattr(reason, "errno", None)
            raise failure from error

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return super().load_checkpoint(path, map_location, weights_only=True)


def step_of(file: Path) -> int:
    """The optimizer step that a checkpoint's name says."""
    match = _NAME.fullmatch(file.name)
    assert match, file
    return int(match[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest step first; drafts and other files are passed over."""
    return sorted((file for file in folder.glob("*.ckpt") if _NAME.fullmatch(file.name)), key=step_of)


def check_checkpoint(file: Path) -> None:
    """Raises ValueError unless `file` is a training checkpoint, and whole; see `read_whole`."""
    if "pytorch-lightning_version" not in read_whole(file):
        raise ValueError(f"{file} is no training checkpoint: to start from a model's weights, use model.pretrained")


def read_whole(file: Path) -> dict[str, Any]:
    """The content of a checkpoint, as `read_checkpoint` has it, once all of it was held against the checksums in it.

    Raises:
        DamagedCheckpoint: a file that is torn, or has a bit that was not written so.
        ValueError: no such file; one that holds more than tensors and plain values.
    """
    if not file.is_file():
        raise ValueError(f"{file}: no such checkpoint file")
    try:
        with zipfile.ZipFile(file) as archive:
            broken = archive.testzip()
    except Exception as error:
        # besides its own error, zipfile lets through those of whatever it trips over
        raise DamagedCheckpoint(f"the checkpoint {file} cannot be read: {_first_line(error)}") from error
    if broken is not None:
        raise DamagedCheckpoint(f"the checkpoint {file} cannot be read: {broken} in it has another checksum")
    return read_checkpoint(file)


def read_checkpoint(file: Path) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU; tensors are mapped into memory, and read as they are used.

    Raises ValueError, or DamagedCheckpoint, for a file that cannot be read.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} is refused: it holds more than tensors and plain values, and unpickling that could run code of "
            f"whoever wrote it ({_first_line(error)})"
        ) from error
    except Exception as error:
        raise DamagedCheckpoint(f"the checkpoint {file} cannot be read: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is no training checkpoint: it holds a {type(content).__name__}")  # noqa: TRY004
    return content


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def newest_sound(files: Sequence[Path]) -> Path:
    """The last of some checkpoints, oldest first, that is not damaged; each one passed over is warned of.

    A run that is started again by a scheduler, with nobody there, should lose a few steps rather than all of its time.
    What is not damage stops it: a file that was made to run code, or that no run has written, is a matter for a person.

    Raises:
        ValueError: none is sound, or what stops it.
    """
    damage: list[str] = []
    for file in reversed(files):
        try:
            check_checkpoint(file)
        except DamagedCheckpoint as error:
            damage.append(str(error))
        else:
            for text in damage:
                log.warning("DAMAGED: %s. It is passed over", text)
            return file
    raise ValueError(
        f"{'; '.join(damage)}. There is no other to go on from: restore it, or start a new run in another paths.run_dir"
    )


class Checkpoints(Checkpoint):
    """Saves ``step-N.ckpt`` every so many optimizer steps and after the last one, and keeps the newest ones.

    - A step is saved after the validation that follows it: a run that goes on from there does not leave that out.
    - With the state of every random generator on every rank, draws go on as well as weights and data do.
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
        # in every checkpoint of a run, however often it is resumed
        self.run = uuid.uuid4().hex
        self._resumed_run = self.run
        self._saved = -1
        self._written: list[Path] = []
        # what is to be put back, by rank
        self._loaded_states: list[dict[str, Any]] = []
        # at the head of the step in progress, whose batches are drawn for again where it is saved in between
        self._head: tuple[int, dict[str, Any]] = -1, {}

    def state_dict(self) -> dict[str, Any]:
        return {"run": self.run}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed_run = state_dict["run"]

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        step, state = self._head
        states: list[Any] = [state if step == trainer.global_step else random_state()]
        if trainer.world_size > 1:
            (own,), states = states, [None] * trainer.world_size
            torch.distributed.all_gather_object(states, own)
        checkpoint["random_states"] = states

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._loaded_states = checkpoint.get("random_states", [])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved = trainer.global_step
        # a run that begins from another one's checkpoint is a run of its own
        if trainer.ckpt_path is None or Path(trainer.ckpt_path).resolve().parent != self.folder.resolve():
            return
        self.run = self._resumed_run
        if trainer.is_global_zero:
            earlier = [file for file in list_checkpoints(self.folder) if step_of(file) <= trainer.global_step]
            self._written = [file for file in earlier if run_of(file) == self.run]

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        # only now: what happens between the start of a run and its first batch may draw numbers as well
        states, self._loaded_states = self._loaded_states, []
        if len(states) == trainer.world_size:
            set_random_state(states[trainer.global_rank])
        elif states:
            log.warning("%d ranks went on as %d: their random generators start anew", len(states), trainer.world_size)
        if self._head[0] != trainer.global_step:
            self._head = trainer.global_step, random_state()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self._due(trainer) and not validation_follows(trainer):
            self.save(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking and self._due(trainer):
            self.save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # where it ended early
        self.save(trainer)

    def _due(self, trainer: L.Trainer) -> bool:
        return trainer.global_step % self.every == 0 or trainer.global_step == trainer.max_steps

    def save(self, trainer: L.Trainer) -> None:
        """Saves the step that was finished last, unless that was done; called on all ranks together.

        Raises OSError on every rank where it fails on the one that writes.
        """
        if trainer.global_step == self._saved:
            return
        file = self.folder / f"step-{trainer.global_step}.ckpt"
        failure: OSError | None = None
        try:
            trainer.save_checkpoint(file)
        except OSError as error:
            failure = error if str(file) in str(error) else OSError(f"the checkpoint {file} is not written: {error}")
            # the other ranks wait at the end of save_checkpoint for the one that writes
            trainer.strategy.barrier()
        if failure is None and trainer.is_global_zero:
            try:
                self._keep(file)
            except OSError as error:
                failure = error
        reason = trainer.strategy.broadcast(None if failure is None else str(failure))
        if reason is not None:
            raise failure or OSError(reason)
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
