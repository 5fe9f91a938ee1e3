"""What a mixture is to be, and what became of the rows of its sources."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from smi.data.compiling import RowCompiler
from smi.data.contamination import HeldOut
from smi.data.manifest import adapter_settings, tokenizer_settings
from smi.data.pipeline import SAMPLES
from smi.data.shards import identities
from smi.data.sources import Location, SourceSpec, file_name, find_files
from smi.tokenizer import Tokenizer


@dataclass
class Account:
    """What became of one source's rows; every count but `quota` and `shortfall` is of rows read so far."""

    quota: int | None = None
    """Supervised tokens wanted; None takes every row."""
    shortfall: int = 0
    """Supervised tokens that were missing to the quota when there were no more rows."""
    rows: int = 0
    accepted: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """The first rejections of each reason: file, row and detail."""

    def reject(self, reason: str, where: Location, detail: str) -> None:
        self.rejected[reason] += 1
        kept = self.samples.setdefault(reason, [])
        if len(kept) < SAMPLES:
            kept.append({"file": where.file, "row": where.row, "detail": detail})

    @property
    def full(self) -> bool:
        return self.quota is not None and self.supervised_tokens >= self.quota

    def to_dict(self) -> dict[str, Any]:
        """As plain values, in an order that does not depend on how the run went."""
        plain = {name: getattr(self, name) for name in ("quota", "shortfall", "rows", "accepted", "tokens")}
        return plain | {
            "supervised_tokens": self.supervised_tokens,
            "rejected": {reason: self.rejected[reason] for reason in sorted(self.rejected)},
            "samples": {reason: self.samples[reason] for reason in sorted(self.samples)},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Account:
        account = cls(**values)
        account.rejected = Counter(values["rejected"])
        return account


@dataclass(frozen=True)
class Plan:
    """A mixture to be made.

    Args:
        sources: in the order in which they are taken; the quota of each is what all parts together take from it.
        tokenizer: of the mixture.
        root: what file patterns are relative to; see `find_files`.
        max_length: tokens of a document; longer ones are rejected. None takes any.
        dedupe: exact, normalised or near; near ones from `near_threshold` on, up to a share of `near_limit`.
        held_out: files with text that no row may repeat.
        seed: of the order of each source's blocks.
        part: (i, n): the i-th of n jobs that share the work, each with its share of rows and quotas.
        row_group_rows: rows of a row group, and of the work that a kill can cost.
        shard_rows: rows of a full shard.
        epochs: by source, how often an epoch of training goes through its rows; once where it is not named.
        compiler_type: makes the work of the workers.
    """

    sources: Sequence[SourceSpec]
    tokenizer: Tokenizer
    root: str | Path
    max_length: int | None
    dedupe: str = "exact"
    near_threshold: float = 0.8
    near_limit: float = 0.5
    held_out: Sequence[str] = ()
    seed: int = 0
    part: tuple[int, int] = (0, 1)
    row_group_rows: int = 1024
    shard_rows: int = 16384
    epochs: dict[str, int] = field(default_factory=dict)
    compiler_type: type[RowCompiler] = RowCompiler

    def compiler(self) -> RowCompiler:
        by_name = {source.name: source for source in self.sources}
        held_out = HeldOut.from_files(self.held_out) if self.held_out else None
        max_length = sys.maxsize if self.max_length is None else self.max_length
        return self.compiler_type(by_name, self.root, self.tokenizer, max_length, self.dedupe, held_out)

    def settings(self) -> dict[str, Any]:
        """Everything that the result depends on, with the hash of every source file."""
        import smi

        sources: dict[str, Any] = {}
        held_out = identities([Path(file) for file in self.held_out])
        for source in self.sources:
            files = find_files(source, self.root)
            names = [file_name(file, self.root) for file in files]
            sources[source.name] = {
                "dataset": source.dataset,
                "revision": source.revision,
                "licence": source.licence,
                "columns": dict(source.columns),
                "filters": list(source.filters),
                "epochs": self.epochs.get(source.name, 1),
                "adapter": adapter_settings(source.adapter),
                "part": f"{self.part[0]}/{self.part[1]}",
                "quota": source.quota,
                "files": [{"file": name} | what for name, what in zip(names, identities(files), strict=True)],
            }
        return {
            "tokenizer": tokenizer_settings(self.tokenizer),
            "compile": {"max_length": self.max_length},
            "seed": self.seed,
            "row_group_rows": self.row_group_rows,
            "shard_rows": self.shard_rows,
            "duplicates": self._duplicates(),
            "held_out": [{"file": file} | what for file, what in zip(self.held_out, held_out, strict=True)],
            "versions": {"smi": smi.__version__, "pyarrow": pa.__version__, "numpy": np.__version__},
            "sources": sources,
        }

    def _duplicates(self) -> dict[str, Any]:
        near = {"threshold": self.near_threshold, "limit": self.near_limit} if self.dedupe == "near" else {}
        return {"by": self.dedupe} | near


def share(quota: int | None, part: tuple[int, int]) -> int | None:
    """What the i-th of n jobs takes of a quota; all of them together take it all."""
    i, n = part
    return None if quota is None else quota * (i + 1) // n - quota * i // n
