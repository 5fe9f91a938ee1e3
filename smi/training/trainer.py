"""Lightning's Trainer as a config describes it."""

from pathlib import Path

import lightning as L
from rich.console import Console

from smi.config import Config
from smi.training.callbacks import build_callbacks
from smi.training.checkpoint import AtomicCheckpointIO, Checkpoints
from smi.training.debugging import build_profiler
from smi.training.loggers import build_loggers


def build_trainer(config: Config, console: Console) -> L.Trainer:
    """The trainer, with its logger, its checkpoints and what it shows on `console`."""
    run_dir = Path(config.paths.run_dir)
    return L.Trainer(
        accelerator=config.hardware.accelerator,
        devices=1,
        precision=config.hardware.precision,  # type: ignore[arg-type]
        max_steps=config.trainer.max_steps,
        accumulate_grad_batches=config.trainer.accumulate,
        gradient_clip_val=config.optim.clip,
        val_check_interval=config.trainer.val_every * config.trainer.accumulate,
        check_val_every_n_epoch=None,
        log_every_n_steps=config.trainer.log_every,
        logger=build_loggers(config),
        profiler=build_profiler(config),
        detect_anomaly=config.trainer.detect_anomaly,
        callbacks=[
            *build_callbacks(config, console),
            Checkpoints(run_dir / "checkpoints", config.trainer.checkpoint_every, config.trainer.keep_checkpoints),
        ],
        plugins=[AtomicCheckpointIO()],
        default_root_dir=run_dir,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
