"""Two ranks over gloo whose second save fails on the one that writes; each tells in FOLDER/RANK.txt what it raised."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from killed_run import fit
from lightning.pytorch.strategies import DDPStrategy
from shards import prepared

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
(folder / f"rank{rank}").mkdir()


def block(trainer: Any) -> None:
    """A file where the checkpoints were."""
    if trainer.global_step == 2 and trainer.is_global_zero:
        shutil.rmtree(folder / "run" / "checkpoints")
        (folder / "run" / "checkpoints").write_text("in the way")


try:
    source = prepared(folder / f"rank{rank}", 150)
    fit(folder / "run", source, steps=3, at_step=block, devices=2, strategy=DDPStrategy(process_group_backend="gloo"))
except OSError as error:
    (folder / f"{rank}.txt").write_text(str(error))
