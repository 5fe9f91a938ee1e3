"""How an optimizer step is dealt out to the devices of a run, and which of its processes this one is; without torch."""

import os
import sys
import time
from dataclasses import dataclass

from smi.config import Config


@dataclass(frozen=True)
class BatchSplit:
    """`world_size * micro_batch * accumulate` packs make an optimizer step.

    world_size: devices, each with a process of its own.
    micro_batch: packs that a device takes at a time.
    accumulate: micro-batches of a step, on each device.
    """

    world_size: int
    micro_batch: int
    accumulate: int


def split_batch(config: Config) -> BatchSplit:
    """How the packs of a step are shared out: the largest micro-batch that the hardware allows and that divides.

    Raises:
        ValueError: `trainer.batch_size` is no multiple of the devices, or the strategy does not fit their number.
    """
    hardware, batch_size = config.hardware, config.trainer.batch_size
    world_size = hardware.devices * hardware.nodes
    if world_size > 1 and hardware.strategy == "single":
        raise ValueError(f"hardware.strategy=single is for one device, not {world_size}: choose ddp or fsdp")
    share, rest = divmod(batch_size, world_size)
    if rest:
        raise ValueError(
            f"trainer.batch_size is {batch_size}, which {world_size} devices cannot share evenly: "
            f"give a multiple of {world_size}, such as {-(-batch_size // world_size) * world_size}"
        )
    micro_batch = max(n for n in range(1, min(share, hardware.max_micro_batch) + 1) if share % n == 0)
    return BatchSplit(world_size, micro_batch, share // micro_batch)


def check_launch(config: Config) -> None:
    """Raises ValueError where the processes of `config.hardware` are not started as its launcher does it."""
    hardware = config.hardware
    by_torchrun, by_slurm = "TORCHELASTIC_RUN_ID" in os.environ, "SLURM_PROCID" in os.environ
    if hardware.launcher == "torchrun" and not by_torchrun:
        raise ValueError("hardware.launcher=torchrun: start it with torchrun --nproc-per-node GPUS -m smi.train ...")
    if hardware.launcher == "slurm" and not by_slurm:
        raise ValueError("hardware.launcher=slurm: start it in a SLURM job with srun python -m smi.train ...")
    if hardware.launcher == "lightning" and by_torchrun:
        raise ValueError("torchrun has started this process: choose hardware=torchrun, which takes its number of GPUs")
    if hardware.launcher == "lightning" and hardware.nodes > 1:
        raise ValueError(
            f"hardware.nodes is {hardware.nodes}, and one command cannot start processes on other machines: "
            "choose hardware=slurm or hardware=torchrun"
        )


def process_rank() -> int:
    """The number of this process among those of its run, from 0, as its launcher left it in the environment."""
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


# seconds that another process than the first keeps its error to itself
PATIENCE = 3.0


def say_error(error: BaseException) -> None:
    """Prints the error that ends a run, once: what all processes meet is told by the first, which ends the others."""
    rank = process_rank()
    if rank:
        time.sleep(PATIENCE)
    print(f"error: {error}" if rank == 0 else f"error in process {rank}: {error}", file=sys.stderr, flush=True)
