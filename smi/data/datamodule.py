"""SMIDataModule: the one door between data and the trainer, and between data and a notebook.

The training stream is endless: epochs follow each other, each in an order of its own. Within an epoch the
blocks of each source's files are shuffled, sources are mixed by weight, and windows of documents are shuffled
and packed. The sequence of packs is a pure function of the data, the settings and the seed; rank r of W takes
the packs r, r + W, r + 2 W, ... of it, so every rank always has a next batch. A prepared mixture is planned from
its lengths (`smi.data.order`) and read by threads (`smi.data.reading`); rows of any other kind are compiled as
they come.

How a run resumes is told in `smi.data.loader`.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from smi.data.batch import PackedBatch
from smi.data.describe import Description, Facts
from smi.data.loader import Clock, FixedBatches, Prefetch, TrainLoader
from smi.data.mixing import OnEpoch, PreparedTraining
from smi.data.order import Corpus, Place, Shuffle
from smi.data.pipeline import (
    AnySource,
    Compiler,
    Document,
    DocumentSource,
    RowAccount,
    check_sources,
)
from smi.data.prepared import PreparedSource
from smi.data.raw import RawTraining
from smi.data.shards import identities
from smi.data.sources import SourceSpec, find_files
from smi.protocol.codec import PlainTokenizer
from smi.protocol.payloads import dumps
from smi.protocol.render import Preview

if TYPE_CHECKING:
    from rich.console import Console


class SMIDataModule(LightningDataModule):
    """Streams rows, compiles and packs them, and hands out `PackedBatch`es.

    Without a Trainer: `for batch in dm.train_dataloader(): ...`.

    Args:
        tokenizer: see `smi.protocol.codec.PlainTokenizer`.
        train: sources of rows, or a single one.
        steps: optimizer steps planned; the training loader is `steps * accumulate` batches long.
        val: sources of validation rows, read in full or until `val_batches` are full.
        val_fraction: instead of `val`, the share of `train` to hold out, chosen by the content of a row.
            Sources that make their conversations hold out their own kind instead.
        val_batches: validation batches at most; they are the same at every validation, for any seed.
        root: what relative file patterns are relative to.
        max_length: tokens of a document, and of a piece of one.
        over_long: what becomes of longer documents: "reject", or "split": one that does not fit into a packed row
            gets a row of its own, which is trained in pieces (`PackedBatch.pieces`).
        pack_length: tokens of a packed row.
        window: documents gathered for shuffling and packing.
        seed: of the training order.
        accumulate: micro-batches of an optimizer step, per rank.
        micro_batch: packs of a micro-batch; which packs make a step does not depend on how they are shared out.
        start: micro-batches at the head of the stream to leave out, per rank; for a run that goes on from the
            weights of another one alone.
        workers: threads that read ahead, where all of `train` is prepared; the order does not depend on them.
        compile_workers: processes that compile the rows of files, where it is not; with 0 the thread that runs ahead
            does so itself. The order does not depend on them. A script that starts some needs its
            `if __name__ == "__main__"`.
        on_change: what a checkpoint of another seed, window, pack length or number of packs a step meets.
            "refuse" names what differs; "continue" goes on with exactly the documents that its epoch has left.

    Raises:
        ValueError: settings that contradict each other; later, missing files, and data without a row that is
            accepted.
    """

    def __init__(
        self,
        tokenizer: PlainTokenizer,
        train: AnySource | Sequence[AnySource],
        *,
        steps: int,
        val: AnySource | Sequence[AnySource] | None = None,
        val_fraction: float = 0.0,
        val_batches: int = 16,
        root: str | Path = ".",
        max_length: int = 2048,
        over_long: str = "reject",
        pack_length: int = 2048,
        window: int = 512,
        seed: int = 0,
        accumulate: int = 1,
        micro_batch: int = 1,
        start: int = 0,
        workers: int = 2,
        compile_workers: int = 0,
        on_change: str = "refuse",
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.train_sources = _as_list(train)
        self.val_sources = None if val is None else _as_list(val)
        for name, value, least in (
            ("steps", steps, 1),
            ("accumulate", accumulate, 1),
            ("micro_batch", micro_batch, 1),
            ("window", window, 1),
            ("val_batches", val_batches, 1),
            ("start", start, 0),
            ("workers", workers, 0),
            ("compile_workers", compile_workers, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if not 2 <= max_length <= pack_length:
            raise ValueError(
                f"max_length must be from 2 to pack_length, not {max_length} with pack_length {pack_length}: "
                "a document must fit into one packed row"
            )
        if not 0.0 <= val_fraction < 1.0:
            raise ValueError(f"val_fraction must be from 0 up to, not including, 1, not {val_fraction}")
        if val is not None and val_fraction:
            raise ValueError("give either val (sources of their own) or val_fraction (a share of train), not both")
        if over_long not in ("reject", "split"):
            raise ValueError(f"over_long must be 'reject' or 'split', not {over_long!r}")
        if on_change not in ("refuse", "continue"):
            raise ValueError(f"on_change must be 'refuse' or 'continue', not {on_change!r}")
        check_sources(self.train_sources)
        if self.val_sources is not None:
            check_sources(self.val_sources)
        self.steps = steps
        self.val_fraction = val_fraction
        self.val_batches = val_batches
        self.root = root
        self.max_length = max_length
        self.over_long = over_long
        self.pack_length = pack_length
        self.window = window
        self.seed = seed
        self.accumulate = accumulate
        self.micro_batch = micro_batch
        self.start = start
        self.workers = workers
        self.compile_workers = compile_workers
        self.on_change = on_change
        self.account = RowAccount()
        """What became of the training rows since the stream was last begun, prefetched batches included."""
        self.val_account = RowAccount()
        self._piece = max_length if over_long == "split" else None
        compiler = Compiler(tokenizer, max_length if self._piece is None else sys.maxsize)
        self._raw = RawTraining(
            self.train_sources, self.val_sources, val_fraction, val_batches, root, compiler, self.shuffle, self._piece
        )
        self._contents: dict[str, list[Any]] = {}
        self._validation: tuple[list[PackedBatch], frozenset[bytes]] | None = None
        self._mixture: PreparedTraining | None = None
        self.clock = Clock()
        """What loading the training stream took."""
        # iterators in use, by the loaders; they hold the threads
        self.live: weakref.WeakSet[Prefetch[PackedBatch]] = weakref.WeakSet()

    @classmethod
    def from_recipe(cls, name: str, overrides: Sequence[str] = ()) -> SMIDataModule:
        """The data of a shipped recipe, as training would see it; for notebooks and scripts.

            dm = SMIDataModule.from_recipe("quickstart", overrides=["data.max_questions=2"])

        Raises ValueError for whatever is wrong with the recipe, the settings or the files.
        """
        # imported here: that module makes data modules
        from smi.data.recipe import build_data, build_tokenizer, read_recipe

        config = read_recipe(name, overrides)
        return build_data(config, build_tokenizer(config))

    def describe(self, documents: int = 2000) -> Description:
        """Lengths, packing, sources and supervised share: of a whole epoch of a prepared mixture, otherwise of the
        first so many `documents`. Shows itself in a notebook, and with rich's `print` in a terminal."""
        account = self.account
        found = self._prepared().facts() if self.prepared else self._facts(documents)
        # a look does not begin a stream
        self.account = account
        return Description(found, self.pack_length)

    def _facts(self, documents: int) -> Facts:
        names: list[str] = []
        rows: list[tuple[int, int]] = []
        fills: list[int] = []
        for members in self.packs():
            names += [document.where.source for document in members]
            rows += [(document.tokens, document.targets) for document in members]
            fills.append(sum(document.tokens for document in members))
            if len(rows) >= documents or self.account.epochs > 1:
                break
        tokens, targets = np.array(rows).T
        sources, source_of = np.unique(names, return_inverse=True)
        return Facts(sources.tolist(), source_of, tokens, targets, np.array(fills))

    def __getstate__(self) -> dict[str, Any]:
        # threads stay in the process that started them
        return {**vars(self), "live": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, live=weakref.WeakSet())

    def setup(self, stage: str | None = None) -> None:
        """Find the files and make the validation batches, so that what is wrong shows before training."""
        for source in self.train_sources:
            if isinstance(source, SourceSpec):
                find_files(source, self.root)
        if self.prepared:
            self._prepared()
        self._validate()

    def teardown(self, stage: str | None = None) -> None:
        """Stop the prefetching threads."""
        for batches in list(self.live):
            batches.close()

    def train_dataloader(self) -> TrainLoader:
        """The training stream, see `TrainLoader`."""
        return TrainLoader(self)

    def val_dataloader(self) -> FixedBatches | list[Any]:
        """The validation batches of this rank; an empty list where there are none.

        Ranks share them out evenly: where the last round has too few, a rank gets one without labels, which adds
        nothing to any sum, so that no rank waits for another.
        """
        batches, _ = self._validate()
        if not batches:
            return []
        trainer = self.trainer
        rank, world_size = (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)
        idle = [batches[0].unsupervised()] * (-len(batches) % world_size)
        return FixedBatches([*batches, *idle][rank::world_size])

    def report(self, console: Console | None = None) -> None:
        """Print what became of the rows, source by source, and one example of each reason to reject a row."""
        from rich.console import Console

        console = console or Console()
        console.print(self.account.table("Training rows"))
        for account in self.account.sources.values():
            for reason, kept in account.samples.items():
                if reason not in ("held_out", "duplicate"):
                    console.print(f"  {kept[0]}", markup=False, highlight=False, soft_wrap=True)
        if self.val_account.rows:
            console.print(self.val_account.table("Validation rows"))

    def preview(self, n: int = 3) -> list[Preview]:
        """The first `n` documents of the training stream; each shows itself in a notebook or with rich's `print`.

        Raises ValueError where an epoch holds no document.
        """
        account = self.account
        documents = itertools.islice(itertools.chain.from_iterable(self.packs()), n)
        previews = [Preview(document.example, self.tokenizer) for document in documents]
        # a look does not begin a stream: the report stays that of the one in use
        self.account = account
        return previews

    @property
    def shuffle(self) -> Shuffle:
        """What the order of the stream depends on, beside the data."""
        return Shuffle(self.seed, self.window, self.pack_length)

    @property
    def prepared(self) -> bool:
        """Whether all training data is a prepared mixture, whose order is known without reading it."""
        return all(isinstance(source, PreparedSource) for source in self.train_sources)

    def batches(self, place: Place, rank: int, world_size: int, on_epoch: OnEpoch) -> Iterator[PackedBatch]:
        """One rank's share of the training stream from a place on, without end.

        Begins a new `account`. `on_epoch` is told of each epoch that begins, and of the packs before it, counted
        from the beginning of the place's own; an unprepared stream is one long epoch to it.

        Raises ValueError with the account where an epoch holds no document.
        """
        if self.prepared:
            mixture = self._prepared()
            self.account = account = RowAccount()
            packs = mixture.batches(place, rank, world_size, account, on_epoch)
        else:
            on_epoch(0, 0)
            chosen = itertools.islice(self.packs(self.compile_workers), place.packs + rank, None, world_size)
            packs = (self._raw.batch(members) for members in chosen)
        return (PackedBatch.join(some) for some in _groups(packs, self.micro_batch))

    def packs(self, compile_workers: int = 0) -> Iterator[list[Document]]:
        """The documents of each pack of the training stream, from its beginning and without end.

        compile_workers: as for the module.

        Begins a new `account`. Raises ValueError with the account where an epoch holds no document.
        """
        if self.prepared:
            mixture = self._prepared()
            self.account = account = RowAccount()
            return mixture.packs(account)
        held_out = self._validate()[1]
        # the latest stream is the one reported
        self.account = account = RowAccount()
        return self._raw.packs(account, held_out, compile_workers)

    def _prepared(self) -> PreparedTraining:
        """The mixture, without what is held out. Made once."""
        if self._mixture is None:
            sources = [source for source in self.train_sources if isinstance(source, PreparedSource)]
            mixture = PreparedTraining(Corpus(sources), self.shuffle, self.val_fraction, self.workers, self._piece)
            if self.val_sources is not None and (leaks := mixture.among(self._validate()[1])):
                raise ValueError(
                    f"{leaks:,} documents of the mixture are among the validation rows as well: prepare the mixture "
                    "with prepare.held_out_files, or validate on other files"
                )
            self._mixture = mixture
        return self._mixture

    def _validate(self) -> tuple[list[PackedBatch], frozenset[bytes]]:
        """Validation batches, and the fingerprints of the documents in them. Made once."""
        if self._validation is None:
            self._validation = self._make_validation()
        return self._validation

    def _make_validation(self) -> tuple[list[PackedBatch], frozenset[bytes]]:
        if self.val_sources is None and not self.val_fraction:
            return [], frozenset()
        self.val_account = account = RowAccount()
        if self.val_sources is None and self.prepared:
            return self._prepared().validation(self.val_batches, account), frozenset()
        return self._raw.validation(account)

    def settings(self, world_size: int) -> dict[str, Any]:
        """What the order of batches depends on, as plain values."""
        data: list[Any] = []
        for source in self.train_sources:
            if isinstance(source, SourceSpec):
                files = self._files(source)
                data.append([source.name, source.adapter, source.weight, source.quota, files])
            elif isinstance(source, DocumentSource):
                data.append(source.identity)
            else:
                plain = {
                    k: v for k, v in sorted(getattr(source, "__dict__", {}).items()) if isinstance(v, int | float | str)
                }
                data.append([source.name, type(source).__qualname__, plain])
        marks = sorted(mark.hex() for mark in self._validate()[1])
        return {
            "data": _digest(data),
            "validation": _digest(marks),
            "val_fraction": self.val_fraction,
            "tokenizer": getattr(self.tokenizer, "fingerprint", None),
            "max_length": self.max_length,
            "over_long": self.over_long,
            **vars(self.shuffle),
            "accumulate": self.accumulate,
            "micro_batch": self.micro_batch,
            "start": self.start,
            "world_size": world_size,
        }

    def _files(self, source: SourceSpec) -> list[Any]:
        """Name and content of each file of a source; read once, since neither may change while it is trained on."""
        if source.name not in self._contents:
            files = find_files(source, self.root)
            named = zip(files, identities(files), strict=True)
            self._contents[source.name] = [[file.name, what] for file, what in named]
        return self._contents[source.name]

    def running(self) -> Trainer | None:
        """The Trainer, while it fits with this module."""
        trainer = self.trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return None
        return trainer if trainer.state.status == TrainerStatus.RUNNING else None


def _as_list(sources: AnySource | Sequence[AnySource]) -> list[AnySource]:
    return list(sources) if isinstance(sources, Sequence) else [sources]


def _groups(packs: Iterator[PackedBatch], size: int) -> Iterator[list[PackedBatch]]:
    """`size` packs at a time, without end."""
    while True:
        yield list(itertools.islice(packs, size))


def _digest(value: Any) -> str:
    return hashlib.sha256(dumps(value).encode()).hexdigest()
