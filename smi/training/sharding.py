"""Weights, gradients and optimizer shared out over the devices (FSDP2, `torch.distributed.fsdp.fully_shard`)."""

from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor


class ShardedStrategy(ModelParallelStrategy):
    """Data parallel over all devices, which share weights and optimizer out.

    Checkpoints are whole files, the same as those of any other strategy, and any strategy's can be loaded.
    """

    def __init__(self, world_size: int, backend: str):
        super().__init__(
            data_parallel_size=world_size,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=backend,
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        # lightning's own takes the optimizer's numbers of parameters for places in the model, without regard to groups
        checkpoint = self.checkpoint_io.load_checkpoint(checkpoint_path, map_location="cpu", weights_only=weights_only)
        assert self.model is not None
        own = self.model.state_dict()
        self.model.load_state_dict({name: _like(own[name], t) for name, t in checkpoint["state_dict"].items()})
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            states: dict[int, dict[str, Any]] = {}
            for group, numbers in zip(optimizer.param_groups, saved["param_groups"], strict=True):
                for parameter, number in zip(group["params"], numbers["params"], strict=True):
                    # moments have their parameter's shape; the count of steps is a number
                    states[number] = {
                        name: _like(parameter, value) if value.shape == parameter.shape else value
                        for name, value in saved["state"][number].items()
                    }
            optimizer.load_state_dict({"state": states, "param_groups": saved["param_groups"]})
        return checkpoint


def _like(there: Tensor, whole: Tensor) -> Tensor:
    """A whole tensor shared out as `there` is."""
    if not isinstance(there, DTensor):
        return whole
    return distribute_tensor(whole.to(there.device), there.device_mesh, there.placements)


def shard(module: L.LightningModule, blocks: Iterable[nn.Module], forward: str) -> None:
    """Shares out each of `blocks`, and the rest of `module` as one; for `LightningModule.configure_model`.

    Nothing happens under another strategy, or a second time. A block is whole while it computes. `forward` names the
    method that stands for the module's forward pass: the rest of the weights are whole from there on.
    """
    if not isinstance(module.trainer.strategy, ModelParallelStrategy) or any(map(is_shared, module.parameters())):
        return
    assert module.device_mesh is not None
    mesh = module.device_mesh["data_parallel"]
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    register_fsdp_forward_method(module, forward)


def is_shared(tensor: Tensor) -> bool:
    """Whether this process has but a part of it."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process has, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every process; they must all ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_model(trainer: L.Trainer, model: Any) -> Any:
    """The trained model with all its weights, on the first process; all must ask. `model` itself if it is not shared.

    On the others what comes back holds no weights.
    """
    if not any(map(is_shared, model.parameters())):
        return model
    state: dict[str, Tensor] = trainer.strategy.lightning_module_state_dict()
    with torch.device("meta"):
        copy = type(model)(model.config)
    if trainer.is_global_zero:
        copy.load_state_dict({name.removeprefix("model."): t for name, t in state.items()}, assign=True)
    return copy
