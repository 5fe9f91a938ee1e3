"""What a person sees of a run while it trains."""

import time
from pathlib import Path
from typing import cast

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from smi.data.batch import PackedBatch
from smi.training.checkpoint import list_checkpoints
from smi.training.module import SMIModule

# seconds between the lines of a run whose output is no terminal
LINE_EVERY = 10.0


class ProgressReport(L.Callback):
    """Loss, tokens a second and the time left: a bar in a terminal, a line now and then elsewhere.

    The rate is the one that `Throughput` counts, which comes before this.
    """

    def __init__(self, console: Console, run_dir: Path):
        self.console = console
        self.run_dir = run_dir
        self._bar: Progress | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero and self.console.is_terminal:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=trainer.max_steps, completed=trainer.global_step, figures="")
        self._begin, self._first_step = time.monotonic(), trainer.global_step
        self._last_line = time.monotonic()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs,
        batch: PackedBatch,
        batch_idx: int,
    ) -> None:
        module = cast(SMIModule, pl_module)
        if not module.stepped:
            return
        step = trainer.global_step
        figures = f"loss {module.figures['train/loss']:.3f}  {module.figures['speed/tokens_per_s']:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=figures)
        elif trainer.is_global_zero and (
            time.monotonic() - self._last_line >= LINE_EVERY or step in (self._first_step + 1, trainer.max_steps)
        ):
            self._last_line = time.monotonic()
            left = (time.monotonic() - self._begin) / (step - self._first_step) * (trainer.max_steps - step)
            minutes, rest = divmod(round(left), 60)
            self.console.print(
                f"step {step}/{trainer.max_steps}  {figures}  {minutes}:{rest:02d} left", highlight=False
            )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            metrics = trainer.callback_metrics
            self.console.print(
                f"step {trainer.global_step}: validation loss {metrics['val/loss']:.3f}, "
                f"accuracy {metrics['val/accuracy']:.1%}",
                highlight=False,
            )

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()
        if trainer.is_global_zero and isinstance(exception, KeyboardInterrupt | SIGTERMException):
            saved = list_checkpoints(self.run_dir / "checkpoints")
            rest = (
                f"the same command with paths.run_dir={self.run_dir} resume=auto goes on from {saved[-1].name}"
                if saved
                else "there is no checkpoint yet"
            )
            self.console.print(
                f"stopped in step {trainer.global_step + 1}; {rest}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
