"""Rows that are compiled on the way as training and validation data; `smi.data.mixing` is their prepared peer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from smi.data.epochs import Ahead, epoch_documents
from smi.data.packing import pack_windows
from smi.data.pipeline import AnySource, Compiler, Document, DocumentSource, RowAccount, share_of
from smi.data.sources import Location, SourceSpec

if TYPE_CHECKING:
    from smi.data.batch import Origin, PackedBatch
    from smi.data.order import Shuffle

# how far to look for held-out documents before saying that there are too few
VALIDATION_ROWS = 200_000

Refuse = Callable[[str, bytes], str | None]


@dataclass(frozen=True, eq=False)
class RawTraining:
    """The training stream of some sources, and what of them, or of others, is validated on.

    Args:
        sources, val_sources, val_fraction, val_batches, root: as for `SMIDataModule`.
        compiler: of the rows.
        shuffle: of the training stream.
        piece: as for `smi.data.batch.pack`.
    """

    sources: Sequence[AnySource]
    val_sources: Sequence[AnySource] | None
    val_fraction: float
    val_batches: int
    root: str | Path
    compiler: Compiler
    shuffle: Shuffle
    piece: int | None

    def packs(self, account: RowAccount, held_out: frozenset[bytes], workers: int = 0) -> Iterator[list[Document]]:
        """The documents of each pack of the training stream, from its beginning and without end.

        held_out: fingerprints of the validation documents. workers: processes that compile ahead.
        Raises ValueError with the account where an epoch holds no document.
        """
        ahead = Ahead(self.sources, self.root, self.compiler.tokenizer, workers) if workers else None
        try:
            for epoch in itertools.count():
                yield from self._epoch(epoch, account, held_out, ahead)
        finally:
            if ahead is not None:
                ahead.close()

    def _epoch(
        self, epoch: int, account: RowAccount, held_out: frozenset[bytes], ahead: Ahead | None
    ) -> Iterator[list[Document]]:
        files = _by_content(self.sources)

        def refuse(source: str, mark: bytes) -> str | None:
            # rows of validation files of their own are no part of the training data: see _checked
            out = self.val_sources is None and mark in held_out
            out = out or (source in files and share_of(mark) < self.val_fraction)
            return "held_out" if out else None

        order = f"{self.shuffle.seed}/{epoch}"
        documents = epoch_documents(
            self.sources,
            self.compiler,
            account,
            root=self.root,
            order=order,
            epoch=epoch,
            ahead=ahead,
            refuse=refuse,
        )
        pack_count = 0
        for members in pack_windows(
            ((document, document.tokens) for document in self._checked(documents, account, held_out)),
            window=self.shuffle.window,
            capacity=self.shuffle.pack_length,
            rng=Random(f"{order}/packs"),
        ):
            pack_count += 1
            yield members
        if not pack_count:
            raise ValueError(f"no training row was accepted, so there is nothing to train on\n{account}")

    def _checked(
        self, documents: Iterator[Document], account: RowAccount, held_out: frozenset[bytes]
    ) -> Iterator[Document]:
        for document in documents:
            if document.fingerprint in held_out:
                raise ValueError(f"{document.where} is among the validation rows as well: take it out of one of them")
            if document.tokens > self.shuffle.pack_length:
                account.sources[document.where.source].in_pieces += 1
            yield document

    def validation(self, account: RowAccount) -> tuple[list[PackedBatch], frozenset[bytes]]:
        """The validation batches, and the fingerprints of the documents in them.

        Raises ValueError with the account where there is no document for them.
        """
        sources = self.sources if self.val_sources is None else self.val_sources
        share = 1.0 if self.val_sources is not None else self.val_fraction
        files = _by_content(sources)
        documents: list[Document] = []
        room = self.val_batches * self.shuffle.pack_length
        for document in epoch_documents(
            sources,
            self.compiler,
            account,
            root=self.root,
            # one order for every seed, so that runs can be compared
            order="validation",
            held_out=True,
            limit=VALIDATION_ROWS,
            refuse=lambda source, mark: "not_held_out" if source in files and share_of(mark) >= share else None,
        ):
            room -= document.tokens
            documents.append(document)
            if room <= 0:
                break
        if not documents:
            if self.val_sources is None and not account.rejected["not_held_out"]:
                raise ValueError(f"no training row was accepted, so there is nothing to train on\n{account}")
            hint = "" if self.val_sources else f"; raise val_fraction ({self.val_fraction}) or set it to 0"
            raise ValueError(f"no validation row among {account.rows:,}{hint}\n{account}")
        packs = pack_windows(
            ((document, document.tokens) for document in documents),
            window=len(documents) + 1,
            capacity=self.shuffle.pack_length,
            rng=Random("validation"),
        )
        chosen = list(itertools.islice(packs, self.val_batches))
        marks = frozenset(document.fingerprint for members in chosen for document in members)
        return [self.batch(members) for members in chosen], marks

    def batch(self, members: list[Document]) -> PackedBatch:
        """A pack as a batch."""
        from smi.data.batch import pack

        examples = [document.example for document in members]
        capacity = self.shuffle.pack_length
        return pack(examples, capacity=capacity, piece=self.piece, origin=self._origin(members))

    def _origin(self, members: list[Document]) -> Origin:
        from smi.data.batch import Origin

        # held-out documents may be from sources of their own
        names = tuple(dict.fromkeys(source.name for source in (*self.sources, *(self.val_sources or ()))))
        targets = np.zeros(len(names), np.int64)
        for document in members:
            targets[names.index(document.where.source)] += document.targets
        return Origin(names, targets, partial(_place, [document.where for document in members]))


def _place(places: list[Location], document: int) -> str:
    return str(places[document])


def _by_content(sources: Sequence[AnySource]) -> set[str]:
    """The sources whose held-out share is chosen by content; the others hold out rows of their own."""
    return {source.name for source in sources if isinstance(source, SourceSpec | DocumentSource)}
