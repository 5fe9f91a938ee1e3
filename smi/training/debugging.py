"""Looking into a run: the same batches again and again, and where the time goes."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler

from smi.config import Config
from smi.data.batch import PackedBatch
from smi.data.datamodule import SMIDataModule
from smi.data.loader import FixedBatches

_PROFILERS: dict[str, type[Profiler]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "pytorch": PyTorchProfiler,
}


class Repeated:
    """The same batches in turn, `length` altogether."""

    def __init__(self, batches: list[PackedBatch], length: int):
        self.batches, self.length = batches, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[PackedBatch]:
        return (self.batches[i % len(self.batches)] for i in range(self.length))


def feed(config: Config, data: SMIDataModule) -> dict[str, Any]:
    """What `Trainer.fit` trains on: `data`, or its first batches alone, which are then validated on as well."""
    if not config.trainer.overfit_batches:
        return {"datamodule": data}
    loader = data.train_dataloader()
    batches = list(islice(iter(loader), config.trainer.overfit_batches))
    data.teardown()
    return {"train_dataloaders": Repeated(batches, len(loader)), "val_dataloaders": FixedBatches(batches)}


def build_profiler(config: Config) -> Profiler | None:
    """Lightning's profiler, which writes into the run directory."""
    if config.trainer.profiler is None:
        return None
    return _PROFILERS[config.trainer.profiler](dirpath=Path(config.paths.run_dir), filename="profile")
