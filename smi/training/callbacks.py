"""What a run does beside training, as a config asks for it."""

from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping
from rich.console import Console

from smi.config import Config
from smi.training.lr_finder import LRFinder
from smi.training.progress import ProgressReport
from smi.training.report import WriteReport
from smi.training.samples import Samples
from smi.training.stopping import StopOnSignal
from smi.training.throughput import Throughput


def build_callbacks(config: Config, console: Console) -> list[L.Callback]:
    """In the order that they need: each adds to the figures that the next may show."""
    run_dir, chosen = Path(config.paths.run_dir), config.callbacks
    found: list[L.Callback] = [
        StopOnSignal(),
        Throughput(config.hardware.peak_tflops),
        ProgressReport(console, run_dir),
        WriteReport(run_dir),
    ]
    if chosen.samples is not None:
        found.append(Samples(chosen.samples, run_dir))
    if (stop := chosen.early_stopping) is not None:
        found.append(
            EarlyStopping(stop.monitor, mode=stop.mode, patience=stop.patience, min_delta=stop.min_delta, verbose=True)
        )
    if chosen.lr_finder is not None:
        found.append(LRFinder(chosen.lr_finder))
    return found
