"""What went into the weights so far, counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from smi.data.batch import PackedBatch


@dataclass
class Consumed:
    """Counts over optimizer steps and ranks.

    room: tokens that the batches could have held. by_source: supervised tokens, of the sources that are known.
    """

    tokens: int = 0
    supervised_tokens: int = 0
    documents: int = 0
    room: int = 0
    by_source: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, batches: Sequence[PackedBatch]) -> Consumed:
        """The counts of some micro-batches."""
        sums = cls(
            sum(batch.tokens for batch in batches),
            sum(batch.supervised_tokens for batch in batches),
            sum(batch.documents for batch in batches),
            sum(batch.capacity for batch in batches),
        )
        for batch in batches:
            if batch.origin is not None:
                for name, tokens in zip(batch.origin.sources, batch.origin.targets.tolist(), strict=True):
                    sums.by_source[name] = sums.by_source.get(name, 0) + tokens
        return sums

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Consumed:
        return cls(**{**values, "by_source": dict(values["by_source"])})

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def to_array(self) -> np.ndarray:
        """int64 [4 + sources]; the same sources in the same order on every rank."""
        return np.array(
            [self.tokens, self.supervised_tokens, self.documents, self.room, *self.by_source.values()], np.int64
        )

    def with_counts(self, counts: np.ndarray) -> Consumed:
        """These sources with other counts, as `to_array` lays them out."""
        first, by_source = counts[:4].tolist(), counts[4:].tolist()
        return Consumed(*first, by_source=dict(zip(self.by_source, by_source, strict=True)))

    def __add__(self, other: Consumed) -> Consumed:
        names = dict.fromkeys((*self.by_source, *other.by_source))
        return Consumed(
            self.tokens + other.tokens,
            self.supervised_tokens + other.supervised_tokens,
            self.documents + other.documents,
            self.room + other.room,
            {name: self.by_source.get(name, 0) + other.by_source.get(name, 0) for name in names},
        )

    def figures(self) -> dict[str, float]:
        """``data/tokens``, ``data/supervised_tokens``, and each source's share of the supervised ones so far."""
        found: dict[str, float] = {"data/tokens": self.tokens, "data/supervised_tokens": self.supervised_tokens}
        known = sum(self.by_source.values())
        if known:
            found |= {f"data/share_{name}": tokens / known for name, tokens in self.by_source.items()}
        return found
