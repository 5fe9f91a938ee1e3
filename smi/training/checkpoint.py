"""Training checkpoints: written whole or not at all, found again, and read without running anything in them."""

import os
import re
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint

_NAME = re.compile(r"step-(\d+)\.ckpt")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes under a temporary name, flushes to the disk, then renames: a killed run leaves no torn checkpoint."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.partial")
        try:
            with draft.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, target)
        except (OSError, RuntimeError) as error:
            # torch reports a full disk as a RuntimeError about a position in the file
            draft.unlink(missing_ok=True)
            raise OSError(f"the checkpoint {target} could not be written: {error}; is the disk full?") from error
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return super().load_checkpoint(path, map_location, weights_only=True)


class Checkpoints(Checkpoint):
    """Saves ``step-N.ckpt`` every so many optimizer steps and after the last one, and keeps the newest ones.

    An old checkpoint goes only when the new one is whole on the disk.
    """

    def __init__(self, folder: Path, every: int, keep: int):
        self.folder, self.every, self.keep = folder, every, keep
        self._saved = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if step % self.every == 0 or step == trainer.max_steps:
            self.save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # where it ended early
        self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Saves the step that was finished last, unless that was done; on all ranks together."""
        step = trainer.global_step
        if step != self._saved:
            trainer.save_checkpoint(self.folder / f"step-{step}.ckpt")
            self._saved = step
            if trainer.is_global_zero:
                for old in list_checkpoints(self.folder)[: -self.keep]:
                    old.unlink()


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest step first; drafts and other files are passed over."""
    found = [(int(m[1]), file) for file in folder.glob("*.ckpt") if (m := _NAME.fullmatch(file.name))]
    return [file for _, file in sorted(found)]


def check_checkpoint(file: Path) -> None:
    """Raises ValueError unless `file` is a training checkpoint that can be read. Maps it, reads little of it."""
    if not file.is_file():
        raise ValueError(f"resume={file}: no such checkpoint file")
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"the checkpoint {file} cannot be read: {reason}") from error
    if not isinstance(content, dict) or "pytorch-lightning_version" not in content:
        raise ValueError(f"{file} is no training checkpoint: to start from a model's weights, use model.pretrained")
