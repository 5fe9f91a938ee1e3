"""Training checkpoints: written whole or not at all, found again, and read without running anything in them.

A checkpoint is in torch's zip format, which holds a CRC-32 of each of its records, computed while they are written.
So one pass over the file tells whether it is what was written, without a second file or format; torch itself does not
look at them. It is made before a new checkpoint gets its name, and before a run goes on from an old one.
"""

import logging
import os
import pickle
import re
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

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
            check_checkpoint(draft)
            os.replace(draft, target)
            _sync_folder(target.parent)
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


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def step_of(file: Path) -> int:
    """The optimizer step that a checkpoint's name says."""
    match = _NAME.fullmatch(file.name)
    assert match, file
    return int(match[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest step first; drafts and other files are passed over."""
    return sorted((file for file in folder.glob("*.ckpt") if _NAME.fullmatch(file.name)), key=step_of)


def check_checkpoint(file: Path) -> None:
    """Reads the whole of `file` and holds it against the checksums in it.

    Raises:
        DamagedCheckpoint: a file that is torn, or has a bit that was not written so.
        ValueError: no such file; one that holds more than tensors and plain values; one that is something else.
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
    content = read_checkpoint(file)
    if "pytorch-lightning_version" not in content:
        raise ValueError(f"{file} is no training checkpoint: to start from a model's weights, use model.pretrained")


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
        raise ValueError(f"{file} is no training checkpoint: it holds a {type(content).__name__}")
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
        f"{'; '.join(damage)}. There is no other to go on from: restore one, or start a new run in another paths.run_dir"
    )
