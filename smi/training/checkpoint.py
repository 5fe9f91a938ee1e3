"""Training checkpoints: written whole or not at all, found again, and read without running anything in them."""

import os
import re
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

_NAME = re.compile(r"step=(\d+)\.ckpt")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes under a temporary name, flushes to the disk, then renames: a killed run leaves no torn checkpoint."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.partial")
        with draft.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return super().load_checkpoint(path, map_location, weights_only=True)


def checkpoint_callback(folder: Path, every: int, keep: int) -> ModelCheckpoint:
    """Saves ``step=N.ckpt`` every so many optimizer steps and keeps the newest `keep`."""
    return ModelCheckpoint(
        dirpath=folder,
        filename="step={step}",
        auto_insert_metric_name=False,
        monitor="step",
        mode="max",
        save_top_k=keep,
        every_n_train_steps=every,
        save_on_train_epoch_end=False,
    )


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the latest step in `folder`; None where there is none."""
    found = [(int(m[1]), file) for file in folder.glob("*.ckpt") if (m := _NAME.fullmatch(file.name))]
    return max(found)[1] if found else None
