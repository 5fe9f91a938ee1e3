"""How fast a run is, of what the device could do, and how much memory it takes."""

import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn

from smi.data.batch import PackedBatch
from smi.data.loader import Clock
from smi.model.configuration import RWKV7Config
from smi.model.modeling import RWKV7TimeMix
from smi.training.consumed import Consumed
from smi.training.module import SMIModule

GIB = 2**30

# dense bfloat16 TFLOPS of NVIDIA's data sheets, by what the device's name holds; the first that fits
PEAK_TFLOPS = {
    "B200": 2250.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H100 PCIe": 756.5,
    "H100 NVL": 835.5,
    "H100": 989.4,
    "A100": 311.9,
    "L40S": 362.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


def known_peak(device: torch.device, precision: str) -> float | None:
    """TFLOPS of a device whose name is known, in bfloat16; None for any other precision."""
    if device.type != "cuda" or not precision.startswith("bf16"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def step_flops(model: nn.Module) -> tuple[float, float]:
    """What a training step has to compute: flops a token, and flops a supervised token on top of that.

    A matrix takes 2 a parameter forward, 2 for its input's gradient and 2 for its own, where it learns. The head is
    multiplied at supervised positions alone. The WKV takes 9 N^2 a head and token forward (decay, removal, addition,
    readout of the recurrence as written) and twice that backward. What is computed a second time to save memory does
    not count.
    """
    head = getattr(model, "head", None)
    per_token = per_target = 0.0
    for module, weight in _matrices(model):
        flops = weight.numel() * (6.0 if weight.requires_grad else 4.0)
        if module is head:
            per_target += flops
        else:
            per_token += flops
    config = getattr(model, "config", None)
    if isinstance(config, RWKV7Config):
        per_token += 3 * 9 * config.head_dim**2 * config.num_heads * config.num_hidden_layers
    return per_token, per_target


def _matrices(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield module, module.weight
        elif isinstance(module, RWKV7TimeMix):
            # in layer 0 the residual of the values is no parameter, and not computed
            low_rank = (getattr(module, f"{name}{i}") for name in "wavg" for i in (1, 2))
            yield from ((module, weight) for weight in low_rank if isinstance(weight, nn.Parameter))


class Throughput(L.Callback):
    """Adds ``speed/`` and ``memory/`` to the figures that are logged, over the steps since they were last.

    tokens_per_s, supervised_per_s: over all ranks, counted; validation, samples and saves are left out.
    model_tokens_per_s: without the time that the ranks waited for data, wait_share of the whole.
    loader_tokens_per_s: what the loaders could deliver, from the time that their threads were at it in the whole run.
    mfu: of the devices' peak, where that is known; see `step_flops`.

    Memory is the largest of the ranks', in GiB: allocated, reserved and peak on a GPU, resident on a CPU.
    """

    def __init__(self, peak_tflops: float | None = None):
        self.peak_tflops = peak_tflops

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module = cast(SMIModule, pl_module)
        # a loader that is not ours does not say
        self._clock: Clock = getattr(getattr(trainer, "datamodule", None), "clock", None) or Clock()
        self._flops = step_flops(module.model)
        self._peak = self.peak_tflops or known_peak(trainer.strategy.root_device, str(trainer.precision))
        self._restart(module.consumed)

    def _restart(self, consumed: Consumed) -> None:
        self._since = consumed
        self._batches = 0
        self._model_seconds = 0.0
        self._waited = self._clock.waited

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._begin = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: PackedBatch, batch_idx: int
    ) -> None:
        module = cast(SMIModule, pl_module)
        self._model_seconds += time.perf_counter() - self._begin
        self._batches += 1
        if not module.stepped:
            return
        tokens = module.consumed.tokens - self._since.tokens
        targets = module.consumed.supervised_tokens - self._since.supervised_tokens
        waited = self._clock.waited - self._waited
        if not module.due:
            module.figures["speed/tokens_per_s"] = tokens / (self._model_seconds + waited)
            return
        # of all ranks: seconds as a mean, what the loaders could do as a sum. They make a window of packs at a time,
        # so only the whole run tells
        working = self._clock.working
        rate = self._clock.items / working * tokens / (self._batches * trainer.world_size) if working else 0.0
        sums = self._over_ranks(trainer, [self._model_seconds, waited, rate], "sum")
        model_seconds, waited = (seconds / trainer.world_size for seconds in sums[:2])
        figures = {
            "speed/tokens_per_s": tokens / (model_seconds + waited),
            "speed/supervised_per_s": targets / (model_seconds + waited),
            "speed/model_tokens_per_s": tokens / model_seconds,
        }
        if working:
            figures["speed/loader_tokens_per_s"] = sums[2]
            figures["speed/wait_share"] = waited / (model_seconds + waited)
        if self._peak is not None:
            flops = self._flops[0] * tokens + self._flops[1] * targets
            figures["speed/mfu"] = flops / model_seconds / (self._peak * 1e12 * trainer.world_size)
        memory = _memory(trainer.strategy.root_device)
        largest = self._over_ranks(trainer, list(memory.values()), "max")
        module.figures |= figures | {f"memory/{name}_gib": value for name, value in zip(memory, largest, strict=True)}
        self._restart(module.consumed)

    def _over_ranks(self, trainer: L.Trainer, values: list[float], how: str) -> list[float]:
        if trainer.world_size == 1:
            return values
        # float32, which every device has
        tensor = torch.tensor(values, device=trainer.strategy.root_device)
        return cast(Tensor, trainer.strategy.reduce(tensor, reduce_op=how)).tolist()


def _memory(device: torch.device) -> dict[str, float]:
    """GiB by name."""
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.memory_allocated(device) / GIB,
            "reserved": torch.cuda.memory_reserved(device) / GIB,
            "peak": torch.cuda.max_memory_allocated(device) / GIB,
        }
    status = Path("/proc/self/statm")
    if status.exists():
        return {"rss": int(status.read_text().split()[1]) * resource.getpagesize() / GIB}
    # elsewhere there is the peak alone, in bytes on macOS
    return {"rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / GIB}
