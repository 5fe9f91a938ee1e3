"""A packed row of documents, as the model and the loss take it."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smi.data.packing import cut_points
from smi.protocol.codec import Example
from smi.protocol.tokens import BlockType

IGNORE = -100


# not frozen: making one then takes a third of the time, and each pack has one
@dataclass(eq=False, slots=True)
class Origin:
    """Where the documents of a batch are from.

    sources: names of all sources of the stream, the same in each of its batches.
    targets: int64 [sources], supervised tokens of each in this batch.
    where: the place of document s for people, such as "ultrachat: train-0.parquet row 5".
    """

    sources: tuple[str, ...]
    targets: NDArray[np.int64]
    where: Callable[[int], str]

    @classmethod
    def join(cls, origins: Sequence[Origin], documents: Sequence[int]) -> Origin:
        """Of batches that become one, of so many documents each."""
        ends = list(itertools.accumulate(documents))
        targets = np.sum([origin.targets for origin in origins], axis=0)
        return cls(origins[0].sources, targets, partial(_place, list(origins), ends))


def _place(origins: list[Origin], ends: list[int], document: int) -> str:
    number = bisect_right(ends, document)
    return origins[number].where(document - (ends[number - 1] if number else 0))


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Documents one after another in a single row of T tokens; each starts from a fresh state.

    Args:
        input_ids: int64 [1, T].
        labels: int64 [1, T]; `labels[0, t]` is the id to predict after reading token t, -100 where that token
            is not supervised and at each document's last token.
        cu_seqlens: int32 [S + 1]; document s is the tokens cu_seqlens[s] to cu_seqlens[s + 1].
        block_types: uint8 [1, T]; BlockType of the token to predict, so that it goes with `labels`. A
            document's last token predicts nothing and carries its own type.
        capacity: tokens the row could have held.
        pieces: of a row that is too long to be read in one go: where each piece of it ends, the last one at T. A
            piece is some whole documents, or a part of one, which goes on from the state that the part before it
            left. Empty where the row is read in one go.
        origin: where the documents are from, as far as that is known.

    Raises:
        ValueError: shapes or dtypes that differ from the above, boundaries or ends of pieces that do not rise
            strictly to T, or a piece of parts of several documents. Values are checked where the tensors are made;
            moving them checks nothing.
    """

    input_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    block_types: Tensor
    capacity: int
    pieces: tuple[int, ...] = ()
    origin: Origin | None = None
    supervised_tokens: int = field(init=False)
    """Labels that are not -100; a plain number, known without asking the device."""

    def __post_init__(self) -> None:
        row = tuple(self.input_ids.shape)
        if len(row) != 2 or row[0] != 1 or row[1] == 0:
            raise ValueError(f"input_ids must be [1, T] with T > 0, not {list(row)}")
        expected = {
            "input_ids": torch.int64,
            "labels": torch.int64,
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
        ends = set(bounds)
        for a, b in pairwise((0, *self.pieces)):
            parts = {a, b} - ends and any(a < end < b for end in bounds)
            if a >= b or parts or self.pieces[-1] != row[1]:
                raise ValueError(
                    f"pieces must rise strictly to {row[1]}, each of whole documents or within one, not "
                    f"{_short(list(self.pieces))} with documents at {_short(bounds)}"
                )
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

    @property
    def position_ids(self) -> Tensor:
        """int64 [1, T]: the place of each token in its document, from 0."""
        starts = self.cu_seqlens[:-1].long().repeat_interleave(self.cu_seqlens.diff(), output_size=self.tokens)
        return (torch.arange(self.tokens, device=starts.device) - starts)[None]

    @property
    def document_ids(self) -> Tensor:
        """int32 [1, T]: the number of each token's document, from 0."""
        lengths = self.cu_seqlens.diff()
        numbers = torch.arange(self.documents, dtype=torch.int32, device=lengths.device)
        return numbers.repeat_interleave(lengths, output_size=self.tokens)[None]

    def padded(self, pad_id: int = 0) -> PaddedBatch:
        """The documents as rows of their own, for models that know no boundaries."""
        document, position = self.document_ids.long(), self.position_ids
        shape = (self.documents, int(position.max()) + 1)

        def spread(tensor: Tensor, fill: int) -> Tensor:
            rows = tensor.new_full(shape, fill)
            rows[document, position] = tensor
            return rows

        return PaddedBatch(
            input_ids=spread(self.input_ids, pad_id),
            labels=spread(self.labels, IGNORE),
            attention_mask=spread(torch.ones_like(self.input_ids, dtype=torch.bool), 0),
            position_ids=spread(position, 0),
            block_types=spread(self.block_types, 0),
        )

    @classmethod
    def join(cls, batches: Sequence[PackedBatch]) -> PackedBatch:
        """Several rows one after another in a single one, with the documents and the capacity of all."""
        if len(batches) == 1:
            return batches[0]
        starts = itertools.accumulate((batch.tokens for batch in batches[:-1]), initial=0)
        rows = list(zip(batches, starts, strict=True))
        bounds = [batch.cu_seqlens[1:] + start for batch, start in rows]
        ends = [start + end for batch, start in rows for end in batch.pieces or (batch.tokens,)]
        origins = [batch.origin for batch in batches if batch.origin is not None]
        return cls(
            input_ids=torch.cat([batch.input_ids for batch in batches], 1),
            labels=torch.cat([batch.labels for batch in batches], 1),
            cu_seqlens=torch.cat([batches[0].cu_seqlens[:1], *bounds]),
            block_types=torch.cat([batch.block_types for batch in batches], 1),
            capacity=sum(batch.capacity for batch in batches),
            # those beside a long document are read one by one
            pieces=tuple(ends) if any(batch.pieces for batch in batches) else (),
            origin=None
            if len(origins) < len(batches)
            else Origin.join(origins, [batch.documents for batch in batches]),
        )

    def unsupervised(self) -> PackedBatch:
        """The same tokens with nothing to learn or to measure: adds nothing to any sum."""
        return replace(self, labels=torch.full_like(self.labels, IGNORE), origin=None)

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


class Piece(NamedTuple):
    """What is read of a row in one go; shapes [1, T'] and dtypes as in a `PackedBatch`.

    continues: whether it goes on with the document of the piece before it, whose last token predicts its first.
    """

    input_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    block_types: Tensor
    continues: bool

    @property
    def documents(self) -> int:
        return self.cu_seqlens.shape[0] - 1


def pieces(batch: PackedBatch) -> list[Piece]:
    """The pieces of a row, in order; views. The whole row where it has none."""
    if not batch.pieces:
        return [Piece(batch.input_ids, batch.labels, batch.cu_seqlens, batch.block_types, False)]
    bounds = batch.cu_seqlens.tolist()
    found = []
    for a, b in pairwise((0, *batch.pieces)):
        inside = [0, *(end - a for end in bounds if a < end < b), b - a]
        cu_seqlens = batch.cu_seqlens.new_tensor(inside)
        ids, labels, types = (part[:, a:b] for part in (batch.input_ids, batch.labels, batch.block_types))
        found.append(Piece(ids, labels, cu_seqlens, types, a not in bounds))
    return found


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """Documents in a row each, filled up to the longest one; see `PackedBatch.padded`.

    Args:
        input_ids, labels, position_ids: int64 [S, L], as in a `PackedBatch`. Padding has no labels.
        attention_mask: bool [S, L]; False for padding, which is on the right.
        block_types: uint8 [S, L].
    """

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    block_types: Tensor

    def __repr__(self) -> str:
        rows, length = self.input_ids.shape
        share = float(self.attention_mask.float().mean())
        return f"PaddedBatch({rows} documents of at most {length:,} tokens, fill {share:.1%}, {self.input_ids.device})"


def piece_ends(block_types: np.ndarray, most: int) -> tuple[int, ...]:
    """Where to cut a document into pieces of at most `most` tokens, see `cut_points`.

    block_types: uint8 [T], of its targets, as in a `PackedBatch`.
    """
    closing = block_types == BlockType.EOT
    # a target is the token behind its place; the EOS goes with the transmission before it
    after = np.flatnonzero(closing[:-1] & ~closing[1:] & (block_types[1:] != BlockType.EOS)) + 2
    return tuple(cut_points([*after[after < block_types.size].tolist(), block_types.size], most))


def pack(
    examples: Sequence[Example],
    indices: Iterable[int] | None = None,
    capacity: int | None = None,
    piece: int | None = None,
    origin: Origin | None = None,
) -> PackedBatch:
    """Lay documents one after another.

    Args:
        examples: compiled documents.
        indices: which of them, in this order; all where absent.
        capacity: tokens the row may hold; exactly as many as there are where absent.
        piece: tokens of a piece of a document that alone is longer than the capacity; absent where none may be.
        origin: where they are from.

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
    capacity = ids.size if capacity is None else capacity
    pieces: tuple[int, ...] = ()
    if piece is not None and len(chosen) == 1 and ids.size > capacity:
        pieces = piece_ends(targets, piece)
        capacity = len(pieces) * piece
    return PackedBatch(
        input_ids=torch.from_numpy(ids)[None],
        labels=torch.from_numpy(labels)[None],
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        block_types=torch.from_numpy(targets)[None],
        capacity=capacity,
        pieces=pieces,
        origin=origin,
    )


def cut(
    ids: np.ndarray,
    labels: np.ndarray,
    types: np.ndarray,
    *,
    lengths: np.ndarray,
    supervised: np.ndarray,
    bounds: np.ndarray,
    capacity: int,
    origins: Sequence[Origin | None],
    piece: int | None = None,
) -> list[PackedBatch]:
    """Packs that are laid out one behind another, as batches that are views of the same memory.

    The checks of `PackedBatch`, once for all of them.

    Args:
        ids, labels: int64 [tokens].
        types: uint8 [tokens].
        lengths, supervised: int64 [documents], tokens of each document, and labels that are not -100.
        bounds: int64 [packs + 1], ascending from 0: the documents of each pack.
        capacity: tokens of a pack.
        origins: of each pack.
        piece: as for `pack`.

    Raises:
        ValueError: more tokens in a pack than the capacity, or a label at a document's last token.
    """
    ends = np.concatenate(([0], np.cumsum(lengths)))
    assert lengths.min() >= 1, "a document is empty"
    assert ends[-1] == ids.size == labels.size == types.size
    if (labels[ends[1:] - 1] != IGNORE).any():
        raise ValueError("labels at a document's last token must be -100: it predicts nothing")
    starts = ends[bounds]
    sizes = np.diff(starts)
    too_long = sizes > capacity if piece is None else (sizes > capacity) & (np.diff(bounds) > 1)
    if too_long.any():
        raise ValueError(f"{sizes[too_long].max()} tokens are more than the capacity of {capacity}")
    # each pack has one boundary more than documents
    pack_of = np.repeat(np.arange(sizes.size), np.diff(bounds) + 1)
    cu_seqlens = torch.from_numpy((ends[np.arange(pack_of.size) - pack_of] - starts[pack_of]).astype(np.int32))
    # one call cuts a whole row: slicing it pack by pack would take longer than reading the documents
    sizes = sizes.tolist()
    rows = (torch.from_numpy(array)[None].split(sizes, dim=1) for array in (ids, labels, types))
    boundaries = cu_seqlens.split((np.diff(bounds) + 1).tolist())
    counts = np.add.reduceat(supervised, bounds[:-1]).tolist()
    batches = []
    for input_ids, targets, kinds, boundary, count, origin in zip(*rows, boundaries, counts, origins, strict=True):
        batch = object.__new__(PackedBatch)
        batch.__dict__.update(
            input_ids=input_ids,
            labels=targets,
            cu_seqlens=boundary,
            block_types=kinds,
            capacity=capacity,
            supervised_tokens=count,
            origin=origin,
        )
        if piece is not None and batch.tokens > capacity:
            pieces = piece_ends(kinds[0].numpy(), piece)
            batch.__dict__.update(capacity=len(pieces) * piece, pieces=pieces)
        batches.append(batch)
    return batches


def _short(bounds: list[int]) -> str:
    return str(bounds) if len(bounds) <= 8 else f"[{', '.join(map(str, bounds[:4]))}, ..., {bounds[-1]}]"
