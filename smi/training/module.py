"""SMIModule: RWKV-7 as a LightningModule that learns from packed SMI streams."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NoReturn, cast

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from smi.data.batch import IGNORE, PackedBatch, Piece, pieces
from smi.model.modeling import RWKV7State
from smi.protocol.tokens import BlockType
from smi.training.consumed import Consumed
from smi.training.guards import explain_gradient, explain_loss
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


def _means(stage: str, totals: np.ndarray) -> dict[str, float]:
    """Loss, accuracy and entropy as means over the tokens: of all, and of each block type that there was."""
    tokens = totals[0]
    means: dict[str, float] = {}
    for name, sums in zip(("loss", "accuracy", "entropy"), totals[1:].tolist(), strict=True):
        means[f"{stage}/{name}"] = sum(sums) / max(tokens.sum(), 1.0)
        for kind in BlockType:
            if tokens[kind]:
                means[f"{stage}/{name}_{kind.name.lower()}"] = sums[kind] / tokens[kind]
    return means


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
        # of the step in progress, for the guards to look at
        self._batches: list[PackedBatch] = []
        self._tokens = 0.0
        self.consumed = Consumed()
        """What went into the weights so far."""
        self.figures: dict[str, float] = {}
        """Of the latest optimizer step, over all ranks; callbacks add theirs in `on_train_batch_end`."""
        self.guarded = True
        """Whether a loss or a gradient that is not finite stops the run."""
        self.stepped = False
        """Whether the latest micro-batch finished an optimizer step."""
        self._row = -1

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

    @property
    def due(self) -> bool:
        """Whether the figures of the latest micro-batch are written: those of every so many steps, and of the last."""
        step, trainer = self.global_step, cast(Any, self.trainer)
        return self.stepped and (step % trainer.log_every_n_steps == 0 or step == trainer.max_steps)

    def on_train_batch_start(self, batch: PackedBatch, batch_idx: int) -> None:
        self.stepped = False

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        sums = self._loss(batch)
        self._step = _added(self._step, sums)
        self._batches.append(batch)
        return sums.loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        new = Consumed.of(self._batches)
        totals, counts = self._totals(self._step, new.to_array())
        new = new.with_counts(counts)
        self._step = None
        self._tokens = max(totals[0].sum(), 1.0)
        loss = totals[1].sum() / self._tokens
        if self.guarded and not math.isfinite(loss):
            self._stop(f"the loss of step {self.global_step + 1} is {loss}", explain_loss)
        self.consumed += new
        self.figures = _means("train", totals)
        self.figures["train/supervised_tokens"] = new.supervised_tokens
        self.figures["train/lr"] = optimizer.param_groups[0]["lr"]
        self.figures |= {f"train/lr_{group['name']}": group["lr"] for group in optimizer.param_groups}
        self.figures["data/packing"] = new.tokens / new.room
        self.figures |= self.consumed.figures()

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        # lightning has divided each micro-batch's loss by their number, and DDP averages over the ranks
        share = self.trainer.accumulate_grad_batches * self.trainer.world_size / self._tokens
        norm = float(average_and_clip(self.parameters(), share, gradient_clip_val))
        if self.guarded and not math.isfinite(norm):
            self._stop(f"the gradient's norm of step {self.global_step + 1} is {norm}", explain_gradient)
        self.figures["train/grad_norm"] = norm
        self._batches.clear()
        self.stepped = True

    def on_train_batch_end(self, outputs: Any, batch: PackedBatch, batch_idx: int) -> None:
        # after the callbacks', which add figures
        if self.due:
            # for other callbacks; what lightning does for each name is too slow for each step
            self.log_dict(self.figures, logger=False)
        self._write_row()

    def _write_row(self) -> None:
        """The row of the step that has just ended, once."""
        if self.due and self._row != self.global_step:
            self._row = self.global_step
            self.record(self.figures)

    def record(self, figures: dict[str, float]) -> None:
        """One row for each logger, under the number of optimizer steps that were made; rank 0 alone writes."""
        if self.trainer.is_global_zero:
            for logger in self.trainer.loggers:
                logger.log_metrics(figures, self.global_step)
                logger.save()

    def _stop(self, what: str, explain: Callable[..., str]) -> NoReturn:
        """Before the optimizer has moved a weight: says what is not finite, where it began, and on which documents."""
        # a tuned state is a parameter of this module
        learner = self.model if self.initial_state is None else self
        with self.trainer.precision_plugin.forward_context():
            found = explain(learner, lambda batch: self._loss(batch).loss, self._batches)
        if self.trainer.world_size > 1:
            everywhere: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(everywhere, found)
            found = "; ".join(f"on rank {rank} {text}" for rank, text in enumerate(everywhere) if text)
        raise FloatingPointError(
            f"{what}: {found or 'the same forward pass is finite when made again'}. No weight was changed by this "
            "step; lower optim.lr, or look at the documents"
        )

    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self._validation = _added(self._validation, self._loss(batch))

    def on_validation_epoch_end(self) -> None:
        totals, _ = self._totals(self._validation, np.zeros(0, np.int64))
        self._validation = None
        figures = _means("val", totals)
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        self.log_dict(figures, logger=False if fitting else None)
        if fitting and not self.trainer.sanity_checking:
            self.record(figures)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # a run that is killed right after this save goes on behind the step: its row has to be there before
        self._write_row()
        checkpoint["consumed"] = self.consumed.to_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.consumed = Consumed.from_dict(checkpoint["consumed"])

    def _totals(self, table: Tensor | None, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The table, float64 [4, types], and the counts, int64 [n], summed over ranks, on the CPU."""
        shape = (4, len(BlockType))
        if table is None:
            table = torch.zeros(shape, dtype=torch.float64, device=self.device)
        if self.trainer.world_size == 1:
            return table.cpu().numpy(), counts
        # one message for both
        both = torch.cat([table.flatten(), torch.from_numpy(counts).to(table)])
        summed = cast(Tensor, self.trainer.strategy.reduce(both, reduce_op="sum")).cpu().numpy()
        return summed[: table.numel()].reshape(shape), summed[table.numel() :].round().astype(np.int64)

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
