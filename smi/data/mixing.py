"""A prepared mixture as training and validation data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from smi.data.describe import Facts
from smi.data.order import Corpus, Place, Shuffle, Window, epoch_order, epoch_packs, windows
from smi.data.packing import pack_lengths, permutation
from smi.data.pipeline import Document, RowAccount, SourceAccount
from smi.data.reading import read_batches, read_documents

if TYPE_CHECKING:
    from smi.data.batch import PackedBatch

OnEpoch = Callable[[int, int], None]


class PreparedTraining:
    """The training stream and the held-out share of a prepared mixture.

    Args:
        corpus: its documents.
        shuffle: of the training stream.
        val_fraction: share of the documents to hold out, by their fingerprints.
        workers: threads that read ahead.
        piece: as for `smi.data.batch.pack`.
    """

    def __init__(
        self, corpus: Corpus, shuffle: Shuffle, val_fraction: float, workers: int, piece: int | None = None
    ) -> None:
        self.corpus = corpus
        self.shuffle = shuffle
        self.workers = workers
        self.piece = piece
        self.held_out = np.zeros(len(corpus), bool)
        """Documents kept for validation, bool [documents]: those of which `share_of` is below the fraction."""
        if val_fraction:
            heads = [marks[:, :8].copy().view(">u8")[:, 0] for marks in corpus.fingerprints()]
            self.held_out = np.concatenate(heads) / 2**64 < val_fraction

    def among(self, marks: Collection[bytes]) -> int:
        """How many documents have one of these fingerprints."""
        wanted = np.frombuffer(b"".join(marks), "V32")
        return sum(int(np.isin(some.view("V32")[:, 0], wanted).sum()) for some in self.corpus.fingerprints())

    def batches(
        self, place: Place, rank: int, world_size: int, account: RowAccount, on_epoch: OnEpoch
    ) -> Iterator[PackedBatch]:
        """See `SMIDataModule.batches`."""
        chosen = (
            window.select(slice((place.packs + rank - window.first) % world_size, None, world_size))
            for window in self._windows(place, account, on_epoch)
        )
        chosen = (window for window in chosen if window.members.size)
        return read_batches(self.corpus, chosen, self.shuffle.pack_length, self.workers, self.piece)

    def packs(self, account: RowAccount) -> Iterator[list[Document]]:
        """The documents of each pack of the training stream, from its beginning."""
        for window in self._windows(Place(), account, lambda epoch, packs: None):
            yield from read_documents(self.corpus, window)

    def _windows(self, place: Place, account: RowAccount, on_epoch: OnEpoch) -> Iterator[Window]:
        """The windows from a place on, the first one cut to what is behind the place; counted."""
        if self.held_out.all():
            self._begin_epoch(account)
            raise ValueError(f"no training row was accepted, so there is nothing to train on\n{account}")
        epoch = None
        for window in windows(self.corpus, ~self.held_out, self.shuffle, place):
            if window.epoch != epoch:
                epoch = window.epoch
                self._begin_epoch(account)
                on_epoch(epoch, window.first)
            passed = place.packs - window.first
            if passed >= window.bounds.size - 1:
                continue
            if passed > 0:
                window = replace(window.select(slice(passed, None)), first=place.packs)
            self._count(account, window.members)
            yield window

    def facts(self) -> Facts:
        """What there is to see of the first epoch."""
        packs = list(epoch_packs(self.corpus, ~self.held_out, self.shuffle, 0))
        documents = np.concatenate([members for members, _ in packs])
        tokens = self.corpus.tokens
        fills = np.concatenate([np.add.reduceat(tokens[members], bounds[:-1]) for members, bounds in packs])
        names = [source.name for source in self.corpus.sources]
        return Facts(names, self.corpus.sources_of(documents), tokens[documents], self.corpus.targets[documents], fills)

    def _begin_epoch(self, account: RowAccount) -> None:
        account.epochs += 1
        held_out = np.add.reduceat(self.held_out, self.corpus.source_starts[:-1], dtype=np.int64).tolist()
        for source, rows in zip(self.corpus.sources, held_out, strict=True):
            counts = account.sources.setdefault(source.name, SourceAccount())
            counts.rows += rows * source.epochs
            counts.rejected["held_out"] += rows * source.epochs

    def _count(self, account: RowAccount, documents: NDArray[np.int64]) -> None:
        by_source = self.corpus.sources_of(documents)
        for number, source in enumerate(self.corpus.sources):
            chosen = documents[by_source == number]
            counts = account.sources[source.name]
            counts.rows += chosen.size
            counts.accepted += chosen.size
            counts.tokens += int(self.corpus.tokens[chosen].sum())
            counts.in_pieces += int((self.corpus.tokens[chosen] > self.shuffle.pack_length).sum())
            counts.supervised_tokens += int(self.corpus.targets[chosen].sum())

    def validation(self, most: int, account: RowAccount) -> list[PackedBatch]:
        """The held-out documents in at most `most` batches; the same for every seed, so that runs can be compared.

        Raises ValueError where no document is held out.
        """
        # a source may come several times an epoch: once is enough here
        documents, places = np.unique(epoch_order(self.corpus, self.held_out, "validation"), return_index=True)
        documents = documents[np.argsort(places)]
        room = most * self.shuffle.pack_length
        lengths = self.corpus.tokens[documents]
        documents = documents[: int(np.searchsorted(np.cumsum(lengths), room)) + 1]
        if not documents.size:
            raise ValueError(f"no validation row among {len(self.corpus):,}; raise val_fraction or set it to 0")
        account.epochs += 1
        for source in self.corpus.sources:
            account.sources[source.name] = SourceAccount()
        packs = pack_lengths(
            np.minimum(self.corpus.tokens[documents], self.shuffle.pack_length), self.shuffle.pack_length
        )
        window = Window(0, 0, documents[packs.members], packs.bounds)
        window = window.select(permutation(Random("validation"), len(packs))[:most])
        self._count(account, window.members)
        return list(read_batches(self.corpus, iter([window]), self.shuffle.pack_length, 0, self.piece))
