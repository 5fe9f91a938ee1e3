"""A packed row of documents, as the model and the loss take it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from smi.protocol.codec import Example

IGNORE = -100


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Documents one after another in a single row of T tokens; each starts from a fresh state.

    Args:
        input_ids: int64 [1, T].
        labels: int64 [1, T]; `labels[0, t]` is the id to predict after reading token t, -100 where that token
            is not supervised and at each document's last token.
        cu_seqlens: int32 [S + 1]; document s is the tokens cu_seqlens[s] to cu_seqlens[s + 1].
        position_ids: int64 [1, T]; counts from 0 in each document.
        block_types: uint8 [1, T]; BlockType of the token to predict, so that it goes with `labels`. A
            document's last token predicts nothing and carries its own type.
        capacity: tokens the row could have held.

    Raises:
        ValueError: shapes or dtypes that differ from the above, or boundaries that do not start at 0, rise
            strictly and end at T. Values are checked where the tensors are made; moving them checks nothing.
    """

    input_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    position_ids: Tensor
    block_types: Tensor
    capacity: int
    supervised_tokens: int = field(init=False)
    """Labels that are not -100; a plain number, known without asking the device."""

    def __post_init__(self) -> None:
        row = tuple(self.input_ids.shape)
        if len(row) != 2 or row[0] != 1 or row[1] == 0:
            raise ValueError(f"input_ids must be [1, T] with T > 0, not {list(row)}")
        expected = {
            "input_ids": torch.int64,
            "labels": torch.int64,
            "position_ids": torch.int64,
            "block_types": torch.uint8,
        }
        for name, dtype in expected.items():
            tensor: Tensor = getattr(self, name)
            if tuple(tensor.shape) != row or tensor.dtype != dtype:
                raise ValueError(f"{name} must be {dtype} {list(row)}, not {tensor.dtype} {list(tensor.shape)}")
        if self.cu_seqlens.dtype != torch.int32 or self.cu_seqlens.ndim != 1 or len(self.cu_seqlens) < 2:
            shape = list(self.cu_seqlens.shape)
            raise ValueError(f"cu_seqlens must be int32 [S + 1], not {self.cu_seqlens.dtype} {shape}")
        bounds: list[int] = self.cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != row[1] or any(a >= b for a, b in pairwise(bounds)):
            raise ValueError(f"cu_seqlens must start at 0, rise strictly and end at {row[1]}, not {_short(bounds)}")
        if row[1] > self.capacity:
            raise ValueError(f"{row[1]} tokens are more than the capacity of {self.capacity}")
        # a label past a boundary would teach one document to foretell another
        if bool((self.labels[0, self.cu_seqlens[1:].long() - 1] != IGNORE).any()):
            raise ValueError("labels at a document's last token must be -100: it predicts nothing")
        object.__setattr__(self, "supervised_tokens", int((self.labels != IGNORE).sum()))

    @property
    def tokens(self) -> int:
        """T."""
        return self.input_ids.shape[1]

    @property
    def documents(self) -> int:
        """S."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def fill(self) -> float:
        """Share of the capacity that is in use, 0 to 1."""
        return self.tokens / self.capacity

    def to(self, device: torch.device | str) -> PackedBatch:
        """The batch on a device; copies from pinned memory do not block."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()))

    def pin_memory(self) -> PackedBatch:
        """The batch in page-locked memory, for quick copies to an accelerator."""
        return self._moved(Tensor.pin_memory)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> PackedBatch:
        # not through the constructor: reading boundaries back from a device would make it wait
        moved = object.__new__(PackedBatch)
        for name, value in vars(self).items():
            object.__setattr__(moved, name, move(value) if isinstance(value, Tensor) else value)
        return moved

    def __repr__(self) -> str:
        return (
            f"PackedBatch({self.documents} documents, {self.tokens:,} tokens, "
            f"{self.supervised_tokens:,} supervised, fill {self.fill:.1%}, {self.input_ids.device})"
        )


def pack(examples: Sequence[Example], indices: Iterable[int] | None = None, capacity: int | None = None) -> PackedBatch:
    """Lay documents one after another.

    Args:
        examples: compiled documents.
        indices: which of them, in this order; all where absent.
        capacity: tokens the row may hold; exactly as many as there are where absent.

    Raises:
        ValueError: no documents, or more tokens than the capacity.
    """
    chosen = list(examples) if indices is None else [examples[index] for index in indices]
    if not chosen:
        raise ValueError("a pack needs at least one document")
    lengths = np.array([example.input_ids.size for example in chosen])
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    ids = np.concatenate([example.input_ids for example in chosen]).astype(np.int64)
    supervised = np.concatenate([example.loss_mask for example in chosen])
    types = np.concatenate([example.block_types for example in chosen])
    last = bounds[1:] - 1

    # everything about targets moves one place to the left, and not across a document's end
    labels = np.full_like(ids, IGNORE)
    labels[:-1] = np.where(supervised[1:], ids[1:], IGNORE)
    labels[last] = IGNORE
    targets = np.append(types[1:], types[-1:])
    targets[last] = types[last]
    positions = np.arange(ids.size, dtype=np.int64) - np.repeat(bounds[:-1], lengths)
    return PackedBatch(
        input_ids=torch.from_numpy(ids)[None],
        labels=torch.from_numpy(labels)[None],
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        position_ids=torch.from_numpy(positions)[None],
        block_types=torch.from_numpy(targets)[None],
        capacity=ids.size if capacity is None else capacity,
    )


def _short(bounds: list[int]) -> str:
    return str(bounds) if len(bounds) <= 8 else f"[{', '.join(map(str, bounds[:4]))}, ..., {bounds[-1]}]"
