"""Lightning's learning-rate range test, for an optimizer with groups and a schedule."""

import logging
from typing import cast

import lightning as L
from lightning.pytorch.callbacks import LearningRateFinder

from smi.config import LRFinderConfig
from smi.training.module import SMIModule

log = logging.getLogger("smi")


class LRFinder(LearningRateFinder):
    """Tries rates on the first batches of a new run, puts weights and data back, and takes the rate it suggests.

    Lightning's own would set one rate for all groups, which the schedule undoes at its first step: here the schedule
    is scaled, so that groups keep their ratios. A resumed run goes on with the rate that was found for it.
    """

    def __init__(self, how: LRFinderConfig):
        super().__init__(how.min_lr, how.max_lr, how.steps, update_attr=False)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.ckpt_path is not None:
            return
        module = cast(SMIModule, pl_module)
        # a rate that is too high is what is looked for
        module.guarded = False
        try:
            self.lr_find(trainer, pl_module)
        finally:
            module.guarded = True
        found = None if self.optimal_lr is None else self.optimal_lr.suggestion()
        if found is None:
            raise ValueError(
                "the learning-rate finder saw too few finite losses: raise callbacks.lr_finder.steps, or lower max_lr"
            )
        ratio = found / module.optimization.lr
        for scheduler in trainer.lr_scheduler_configs:
            rates = scheduler.scheduler
            rates.base_lrs = [rate * ratio for rate in rates.base_lrs]  # type: ignore[union-attr]
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= ratio
                group["initial_lr"] *= ratio
        log.info("the learning-rate finder suggests %.3g, and the run takes it", found)
