"""Two ranks over gloo: ``python -m torch.distributed.run --nproc-per-node 2 ranks.py FOLDER``.

Each rank writes what it saw, run by run, to FOLDER/RANK.json. With ``--steps N`` it makes one run, which saves at
every step, goes on from what was saved, and may be killed at any time.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from shards import prepared
from test_data_datamodule import Bytes, Recorder, mark

from smi.data import SMIDataModule
from smi.training.checkpoint import AtomicCheckpointIO, Checkpoints, list_checkpoints


class Ranked(Recorder):
    """Sums what the ranks validate, as the real module does."""

    def on_validation_epoch_end(self) -> None:
        self.trainer.strategy.reduce(torch.ones(1), reduce_op="sum")


def fit(folder: Path, steps: int, accumulate: int, checkpoint: Path | None = None, **data) -> Ranked:
    """One run; checkpoints of every step in `folder`."""
    module = Ranked()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60)),
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        val_check_interval=accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Checkpoints(folder, every=1, keep=100)],
        plugins=[AtomicCheckpointIO()],
        default_root_dir=folder,
    )
    settings = {"max_length": 100, "pack_length": 128, "window": 16, "workers": 1, "val_batches": 5}
    source = data.pop("source")
    stream = SMIDataModule(Bytes(), source, steps=steps, accumulate=accumulate, **settings | data)
    trainer.fit(module, datamodule=stream, ckpt_path=checkpoint)
    return module


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    root = folder / f"rank{rank}"
    root.mkdir(exist_ok=True)
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    seen = {}
    if "--steps" in sys.argv:
        steps = int(sys.argv[-1])
        source = prepared(root, 150)
        saved = list_checkpoints(folder / "run")
        module = fit(folder / "run", steps, 2, saved[-1] if saved else None, source=source, val_fraction=0.1)
        seen["last"] = module.seen
    else:
        # 12 packs of training data, seven for one rank and five for the other would they keep to files of their own,
        # and five of validation; then less of both than there are ranks
        for name, count, val_count in (("uneven", 42, 16), ("empty", 2, 2)):
            source, val = prepared(root, count), prepared(root, val_count, first=1000, name="val")
            run = {"source": source, "val": val}
            whole = fit(folder / name, 7, 2, **run)
            resumed = fit(folder / f"{name}2", 7, 2, folder / name / "step-3.ckpt", **run)
            assert torch.equal(whole.table.weight, resumed.table.weight)
            batches = SMIDataModule(
                Bytes(), source, steps=14 * 2, max_length=100, pack_length=128, window=16
            ).train_dataloader()
            seen[name] = {
                "seen": whole.seen,
                "resumed": resumed.seen,
                "validated": whole.validated,
                "stream": [mark(batch) for batch in batches],
            }
    (folder / f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
