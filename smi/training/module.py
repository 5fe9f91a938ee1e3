"""SMIModule: RWKV-7 as a LightningModule that learns from packed SMI streams."""

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from smi.data.batch import PackedBatch
from smi.model.modeling import RWKV7ForCausalLM
from smi.protocol.tokens import BlockType
from smi.training.loss import LossSums, supervised_loss
from smi.training.optim import cosine_with_warmup, parameter_groups, scale_gradients


@dataclass(frozen=True)
class Optimization:
    """How a model learns.

    lr: peak rate of AdamW; ``att.w0`` learns at twice that.
    final_lr_ratio: share of the rate that is left at `max_steps`.
    warmup_steps, max_steps: of the schedule, in optimizer steps.
    weight_decay: on matrices only.
    """

    lr: float
    max_steps: int
    final_lr_ratio: float = 0.1
    warmup_steps: int = 0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-18


def _added(table: Tensor | None, sums: LossSums) -> Tensor:
    """The table [3, types] that a step, or a validation run, adds up: tokens, losses, right predictions."""
    new = torch.stack([sums.tokens, sums.by_type, sums.correct]).double()
    return new if table is None else table + new


class SMIModule(L.LightningModule):
    """Trains a model on `PackedBatch`es.

    The loss of an optimizer step is the sum of its token losses over the number of its supervised tokens, across
    micro-batches and ranks: each supervised token weighs the same, wherever it was packed. So every micro-batch
    back-propagates its plain sum, and the gradients are divided once, before clipping.
    """

    def __init__(self, model: RWKV7ForCausalLM, optimization: Optimization):
        super().__init__()
        self.model = model
        self.optimization = optimization
        self.save_hyperparameters({"optimization": {**asdict(optimization), "betas": list(optimization.betas)}})
        self._step: Tensor | None = None
        self._validation: Tensor | None = None

    def _loss(self, batch: PackedBatch) -> LossSums:
        hidden = self.model.rwkv7(
            input_ids=batch.input_ids, cu_seqlens=batch.cu_seqlens, use_cache=False
        ).last_hidden_state
        return supervised_loss(hidden, self.model.head.weight, batch.labels, batch.block_types)

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        sums = self._loss(batch)
        self._step = _added(self._step, sums)
        return sums.loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        tokens, loss, correct = self._totals(self._step)
        self._step = None
        count = max(tokens.sum(), 1.0)
        mean = loss.sum() / count
        if not math.isfinite(mean):
            raise FloatingPointError(
                f"the loss of step {self.global_step + 1} is {mean}: lower optim.lr or check the data"
            )
        # lightning has divided each micro-batch's loss by their number, and DDP averages over the ranks
        factor = self.trainer.accumulate_grad_batches * self.trainer.world_size / count
        scale_gradients(self.model.parameters(), factor)
        self.log("train/loss", mean, prog_bar=True)
        self.log("train/accuracy", correct.sum() / count)
        self.log("train/supervised_tokens", tokens.sum())
        self.log("train/lr", optimizer.param_groups[0]["lr"])

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val or float("inf"))
        self.log("train/grad_norm", norm)

    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self._validation = _added(self._validation, self._loss(batch))

    def on_validation_epoch_end(self) -> None:
        tokens, loss, correct = self._totals(self._validation)
        self._validation = None
        count = max(tokens.sum(), 1.0)
        self.log("val/loss", loss.sum() / count, prog_bar=True)
        self.log("val/accuracy", correct.sum() / count)
        for kind in BlockType:
            if tokens[kind]:
                name = kind.name.lower()
                self.log(f"val/loss_{name}", loss[kind] / tokens[kind])
                self.log(f"val/accuracy_{name}", correct[kind] / tokens[kind])

    def _totals(self, table: Tensor | None) -> np.ndarray:
        """The table summed over ranks, float64 [3, types], on the CPU."""
        if table is None:
            return np.zeros((3, len(BlockType)))
        if self.trainer.world_size > 1:
            table = cast(Tensor, self.trainer.strategy.reduce(table, reduce_op="sum"))
        return table.cpu().numpy()

    def configure_optimizers(self) -> Any:
        how = self.optimization
        optimizer = torch.optim.AdamW(
            parameter_groups(self.model, how.lr, how.weight_decay), betas=how.betas, eps=how.eps, fused=True
        )
        factor = partial(
            cosine_with_warmup,
            max_steps=how.max_steps,
            warmup_steps=how.warmup_steps,
            final_ratio=how.final_lr_ratio,
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"},
        }
