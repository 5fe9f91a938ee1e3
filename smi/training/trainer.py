"""Lightning's Trainer as a config describes it."""

import subprocess
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console

from smi.config import Config, HardwareConfig
from smi.hardware import split_batch
from smi.training.callbacks import build_callbacks
from smi.training.checkpoint import AtomicCheckpointIO, Checkpoints
from smi.training.debugging import build_profiler
from smi.training.loggers import build_loggers
from smi.training.sharding import ShardedStrategy

_ENVIRONMENTS: dict[str, type[ClusterEnvironment]] = {
    "lightning": LightningEnvironment,
    "torchrun": TorchElasticEnvironment,
    "slurm": SLURMEnvironment,
}

# seconds that the other processes are given to leave by themselves
LEAVE = 20.0


def build_trainer(config: Config, console: Console) -> L.Trainer:
    """The trainer, with its logger, its checkpoints and what it shows on `console`."""
    run_dir, hardware = Path(config.paths.run_dir), config.hardware
    accumulate = split_batch(config).accumulate
    return L.Trainer(
        accelerator=hardware.accelerator,
        devices=hardware.devices,
        num_nodes=hardware.nodes,
        strategy=_strategy(hardware),
        precision=hardware.precision,  # type: ignore[arg-type]
        max_steps=config.trainer.max_steps,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=config.optim.clip,
        val_check_interval=config.trainer.val_every * accumulate,
        check_val_every_n_epoch=None,
        log_every_n_steps=config.trainer.log_every,
        logger=build_loggers(config),
        profiler=build_profiler(config),
        detect_anomaly=config.trainer.detect_anomaly,
        callbacks=[
            *build_callbacks(config, console),
            Checkpoints(run_dir / "checkpoints", config.trainer.checkpoint_every, config.trainer.keep_checkpoints),
        ],
        plugins=[AtomicCheckpointIO(), *_environment(hardware)],
        default_root_dir=run_dir,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def fit(trainer: L.Trainer, module: L.LightningModule, data: dict[str, Any], checkpoint: Path | None) -> None:
    """Trains on `data`, as `Trainer.fit` takes it. What ends one process of the run ends all of them.

    Raises:
        SystemExit: another process failed, and has said why.
        KeyboardInterrupt, SIGTERMException: the run was stopped.
    """
    try:
        trainer.fit(module, **data, ckpt_path=checkpoint, weights_only=True)
    except BaseException as error:
        failed = _end_children(getattr(trainer.strategy.launcher, "procs", []), error)
        if isinstance(error, RuntimeError) and failed:
            raise SystemExit(failed) from None
        if isinstance(error.__context__, KeyboardInterrupt):
            # lightning makes it an exit with 1, as though something were wrong
            raise KeyboardInterrupt from None
        raise


def _end_children(children: list[subprocess.Popen], error: BaseException) -> int:
    """Ends the processes that lightning has started; the exit status of one that failed by itself, or 0."""
    mine = list(children)
    # lightning's watch over them would kill this process
    children.clear()
    # after SIGTERM each leaves by itself, and one that failed leaves a broken connection, which shows here first
    patient = mine and isinstance(error, RuntimeError | SIGTERMException)
    deadline = time.monotonic() + (LEAVE if patient else 0)
    failed = 0
    while time.monotonic() < deadline:
        codes = [child.poll() for child in mine]
        failed = next((code for code in codes if code), 0)
        if failed or None not in codes:
            break
        time.sleep(0.05)
    for child in mine:
        child.kill()
        child.wait()
    return failed


def _environment(hardware: HardwareConfig) -> list[Any]:
    """Who starts the processes; said rather than guessed, so that a run in a SLURM shell is what it is elsewhere."""
    if hardware.launcher == "slurm":
        # a job that is queued again goes on by resume=auto, from our own checkpoints
        return [SLURMEnvironment(auto_requeue=False)]
    return [_ENVIRONMENTS[hardware.launcher]()]


def _strategy(hardware: HardwareConfig) -> str | Strategy:
    backend = "gloo" if hardware.accelerator == "cpu" else "nccl"
    if hardware.strategy == "single":
        return "auto"
    if hardware.strategy == "fsdp":
        return ShardedStrategy(hardware.devices * hardware.nodes, backend)
    # the buffers are constants
    return DDPStrategy(process_group_backend=backend, gradient_as_bucket_view=True, forward_sync_buffers=False)
