"""Two ranks over gloo whose second save fails on the one that writes; each tells in FOLDER/RANK.txt what it raised."""

import os
import shutil
from pathlib import Path
from typing import Any

from killed_run import fit
from lightning.pytorch.strategies import DDPStrategy
from shards import prepared


def main(folder: Path) -> None:
    rank = os.environ["RANK"]
    (folder / f"rank{rank}").mkdir()

    def block(trainer: Any) -> None:
        """A file where the checkpoints were."""
        if trainer.global_step == 2 and trainer.is_global_zero:
            shutil.rmtree(folder / "run" / "checkpoints")
            (folder / "run" / "checkpoints").write_text("in the way")

    source, strategy = prepared(folder / f"rank{rank}", 150), DDPStrategy(process_group_backend="gloo")
    try:
        fit(folder / "run", source, steps=3, at_step=block, devices=2, strategy=strategy)
    except OSError as error:
        (folder / f"{rank}.txt").write_text(str(error))
