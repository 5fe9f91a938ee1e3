"""SMIModule: RWKV-7 as a LightningModule that learns from packed SMI streams."""

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from smi.data.batch import IGNORE, PackedBatch, Piece, pieces
from smi.model.modeling import RWKV7State
from smi.protocol.tokens import BlockType
from smi.training.loss import LossSums, sum_of, supervised_loss
from smi.training.memory import keep_freed_memory
from smi.training.optim import average_and_clip, cosine_with_warmup, parameter_groups
from smi.training.sharding import shard
from smi.training.tuning import InitialState


@dataclass(frozen=True)
class Optimization:
    """How a model learns.

    lr: peak rate of AdamW; ``att.w0`` learns at twice that.
    final_lr_ratio: share of the rate that is left at `max_steps`.
    warmup_steps, max_steps: of the schedule, in optimizer steps.
    weight_decay: on matrices only.
    z_loss, l2wrap: additions to the loss and to its gradient; see `smi.training.loss.supervised_loss`.
    """

    lr: float
    max_steps: int
    final_lr_ratio: float = 0.1
    warmup_steps: int = 0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-18
    z_loss: float = 0.0
    l2wrap: bool = False


def _added(table: Tensor | None, sums: LossSums) -> Tensor:
    """The table [4, types] that a step, or a validation run, adds up: tokens, losses, right predictions, entropies."""
    new = torch.stack([sums.tokens, sums.by_type, sums.correct, sums.entropy]).double()
    return new if table is None else table + new


class SMIModule(L.LightningModule):
    """Trains a model on `PackedBatch`es; with an `initial_state`, each document starts from it, and it learns too.

    The loss of an optimizer step is the sum of its token losses over the number of its supervised tokens, across
    micro-batches and ranks: each supervised token weighs the same, wherever it was packed. So every micro-batch
    back-propagates its plain sum, and the gradients are divided once, together with clipping.
    """

    def __init__(self, model: Any, optimization: Optimization, initial_state: InitialState | None = None):
        super().__init__()
        self.model = model
        self.initial_state = initial_state
        self.optimization = optimization
        self.save_hyperparameters({"optimization": {**asdict(optimization), "betas": list(optimization.betas)}})
        self._step: Tensor | None = None
        self._validation: Tensor | None = None
        self._tokens = 0.0

    def configure_model(self) -> None:
        shard(self, self.model.rwkv7.blocks, forward="_loss")

    @property
    def time_state(self) -> Tensor | None:
        """The initial WKV state that was tuned, float32 [L, H, V, K]; None where none was."""
        return None if self.initial_state is None else self.initial_state.time_state.detach()

    def on_fit_start(self) -> None:
        if self.device.type == "cpu":
            keep_freed_memory()

    def _loss(self, batch: PackedBatch) -> LossSums:
        """The sums of a batch. Those of a document in pieces are of the whole document: its value is the one that
        reading it in one go has, and a gradient that would flow from a piece into the one before it is cut off.

        Each piece but the last is back-propagated as soon as it is read, so that the memory is that of one piece;
        what is left to back-propagate is the last one.
        """
        *firsts, last = pieces(batch)
        learning = torch.is_grad_enabled()
        earlier: list[LossSums] = []
        state: RWKV7State | None = None
        for piece in firsts:
            # what is only read, a long document of a user for example, has no gradient
            with torch.set_grad_enabled(learning and bool((piece.labels != IGNORE).any())):
                sums, state = self._read(piece, state, keep=True)
                if torch.is_grad_enabled():
                    # as lightning divides the loss that it is given
                    with torch.autocast(self.device.type, enabled=False):
                        (sums.loss / self.trainer.accumulate_grad_batches).backward()
            # weights that were cast for one graph, or for none, are not those of the next
            torch.clear_autocast_cache()
            state = None if state is None else state.detach()
            earlier.append(sums)
        sums, _ = self._read(last, state)
        if earlier and self.initial_state is not None:
            # DDP exchanges gradients in the backward pass that is left, of every parameter
            sums = replace(sums, loss=sums.loss + 0 * self.initial_state.time_state.sum())
        return sum_of([*earlier, sums])

    def _read(self, piece: Piece, before: RWKV7State | None, keep: bool = False) -> tuple[LossSums, RWKV7State | None]:
        """The sums of a piece, and where it is to be kept the state behind it; `before` is that of the last piece."""
        state = before if piece.continues else None
        if not piece.continues and self.initial_state is not None:
            state = self.initial_state(piece.documents)
        out = self.model.rwkv7(input_ids=piece.input_ids, cu_seqlens=piece.cu_seqlens, state=state, use_cache=keep)
        return self._sums(out.last_hidden_state, self.model.head.weight, piece.labels, piece.block_types), out.state

    def _sums(self, hidden: Tensor, head: Tensor, labels: Tensor, block_types: Tensor) -> LossSums:
        how = self.optimization
        return supervised_loss(hidden, head, labels, block_types, z_loss=how.z_loss, l2wrap=how.l2wrap)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Nothing. Lightning asks for it between a step's first loss and its gradients, when the pieces of a document
        have added theirs; they are dropped right after the step instead."""

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        sums = self._loss(batch)
        self._step = _added(self._step, sums)
        return sums.loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        totals = self._totals(self._step)
        self._step = None
        self._tokens = max(totals[0].sum(), 1.0)
        mean = totals[1].sum() / self._tokens
        if not math.isfinite(mean):
            raise FloatingPointError(
                f"the loss of step {self.global_step + 1} is {mean}: lower optim.lr or check the data"
            )
        self._log_totals("train", totals)
        self.log("train/supervised_tokens", totals[0].sum())
        self.log("train/lr", optimizer.param_groups[0]["lr"])

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        # lightning has divided each micro-batch's loss by their number, and DDP averages over the ranks
        share = self.trainer.accumulate_grad_batches * self.trainer.world_size / self._tokens
        self.log("train/grad_norm", average_and_clip(self.parameters(), share, gradient_clip_val))

    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self._validation = _added(self._validation, self._loss(batch))

    def on_validation_epoch_end(self) -> None:
        totals = self._totals(self._validation)
        self._validation = None
        self._log_totals("val", totals)

    def _log_totals(self, stage: str, totals: np.ndarray) -> None:
        """Means over the tokens: of all, and of each block type that there was."""
        tokens = totals[0]
        for name, sums in zip(("loss", "accuracy", "entropy"), totals[1:], strict=True):
            self.log(f"{stage}/{name}", sums.sum() / max(tokens.sum(), 1.0), prog_bar=name == "loss")
            for kind in BlockType:
                if tokens[kind]:
                    self.log(f"{stage}/{name}_{kind.name.lower()}", sums[kind] / tokens[kind])

    def _totals(self, table: Tensor | None) -> np.ndarray:
        """The table summed over ranks, float64 [4, types], on the CPU."""
        if table is None:
            return np.zeros((4, len(BlockType)))
        if self.trainer.world_size > 1:
            table = cast(Tensor, self.trainer.strategy.reduce(table, reduce_op="sum"))
        return table.cpu().numpy()

    def configure_optimizers(self) -> Any:
        how = self.optimization
        optimizer = torch.optim.AdamW(
            parameter_groups(self, how.lr, how.weight_decay), betas=how.betas, eps=how.eps, fused=True
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
