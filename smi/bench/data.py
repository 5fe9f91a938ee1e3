"""Packing and loading, against TRL and bare pyarrow."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from smi.bench.measure import Figure, alternate, duration
from smi.data.datamodule import SMIDataModule
from smi.data.mixing import PreparedTraining
from smi.data.order import Corpus, Place, Shuffle
from smi.data.packing import pack_lengths, pack_windows
from smi.data.pipeline import RowAccount
from smi.data.prepared import PreparedSource
from smi.data.shards import SCHEMA, ShardFile
from smi.tokenizer import load_tokenizer
from smi.training.memory import keep_freed_memory

CAPACITY = 2048
DOCUMENTS = 1_000_000
# the peer takes about half a minute for them all; its time grows a little faster than their number
PEER_DOCUMENTS = 100_000
# of the mixture that is read: a tenth of a gigabyte of ids
READ_DOCUMENTS = 49_152
SHARD_ROWS, GROUP_ROWS = 16_384, 1024
ROUNDS = 5


def run() -> dict[str, Figure]:
    """All figures of the suite. ValueError names a peer that is not installed."""
    return packing() | loader() | resuming()


def lengths(count: int) -> np.ndarray:
    """Lognormal lengths with mean 630 before they are cut off at a pack, int64 [count]."""
    spread = 0.8
    drawn = np.random.default_rng(0).lognormal(np.log(630) - spread**2 / 2, spread, count)
    return np.clip(drawn, 1, CAPACITY).astype(np.int64)


def packing() -> dict[str, Figure]:
    """Best-fit-decreasing against TRL's, and what packing in windows costs."""
    every = lengths(DOCUMENTS)
    part = every[:PEER_DOCUMENTS]
    pack_by_trl = _trl(part)
    times = alternate(
        {"all": lambda: pack_lengths(every, CAPACITY), "part": lambda: pack_lengths(part, CAPACITY)}, rounds=5
    )
    began = time.perf_counter()
    theirs = pack_by_trl()
    peer = time.perf_counter() - began
    ours = len(pack_lengths(part, CAPACITY))
    if theirs != ours:
        raise ValueError(f"TRL packs {part.size:,} documents into {theirs:,} rows, this project into {ours:,}")
    scaled = peer * DOCUMENTS / PEER_DOCUMENTS
    figures = {
        "packing_vs_trl": Figure(
            scaled / times["all"],
            f"{DOCUMENTS:,} lengths in {duration(times['all'])}; trl.pack_dataset(strategy='bfd') takes "
            f"{duration(peer)} for {PEER_DOCUMENTS:,} of them ({duration(times['part'])} here), taken "
            f"{DOCUMENTS // PEER_DOCUMENTS} times",
            at_least=90,
        )
    }
    tokens = int(every.sum())
    offline = _fill(tokens, len(pack_lengths(every, CAPACITY)))
    documents = list(zip(range(DOCUMENTS), every.tolist(), strict=True))
    for window, most in ((4096, 0.15), (16_384, 0.05)):
        packs = pack_windows(documents, window=window, capacity=CAPACITY, rng=Random(0))
        filled = _fill(tokens, sum(1 for _ in packs))
        figures[f"packing_gap_points_{window}"] = Figure(
            offline - filled,
            f"packs filled to {filled:.3f}% with windows of {window:,}, to {offline:.3f}% offline",
            at_most=most,
        )
    return figures


def _fill(tokens: int, packs: int) -> float:
    return 100 * tokens / (packs * CAPACITY)


def _trl(documents: np.ndarray) -> Any:
    """A call that packs documents of these lengths with TRL and counts its rows; one byte a token to spare memory."""
    try:
        from trl.data_utils import pack_dataset  # pyright: ignore[reportMissingImports]  an extra
    except ImportError as error:
        raise ValueError(f"packing is measured against TRL; pip install 'smi[bench]' ({error})") from None
    import datasets
    import pyarrow as pa
    from datasets.table import InMemoryTable

    offsets = np.concatenate(([0], np.cumsum(documents))).astype(np.int32)
    tokens = pa.array(np.zeros(offsets[-1], dtype=np.int8))
    table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), tokens)})
    rows = datasets.Dataset(InMemoryTable(table))
    datasets.disable_progress_bars()
    return lambda: len(pack_dataset(rows, CAPACITY, strategy="bfd", map_kwargs={"batch_size": len(rows)}))


def loader() -> dict[str, Figure]:
    """From a prepared mixture to packed batches, against bare column reading by pyarrow, in turns."""
    # as the trainer does
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        source = _mixture(Path(folder), lengths(READ_DOCUMENTS))
        corpus = Corpus([source])
        training = PreparedTraining(corpus, Shuffle(0, 4096, CAPACITY), 0.0, workers=2)
        rates: dict[str, list[float]] = {"ours": [], "bare": []}
        for turn in range(ROUNDS + 1):
            for name in sorted(rates, reverse=turn % 2 == 0):
                began = time.perf_counter()
                documents = _read_batches(training) if name == "ours" else _read_columns(source)
                if turn:
                    rates[name].append(documents / (time.perf_counter() - began))
    ours, bare = (statistics.median(rates[name]) for name in ("ours", "bare"))
    ratio = statistics.median(a / b for a, b in zip(rates["ours"], rates["bare"], strict=True))
    detail = (
        f"{ours:,.0f} documents of {corpus.tokens.mean():.0f} tokens a second ({ours * corpus.tokens.mean():,.0f} "
        f"tokens) into packs of {CAPACITY:,}; bare pyarrow reads the columns of {bare:,.0f}"
    )
    return {
        "loader_docs_per_s": Figure(ours, detail, at_least=min(80_000, 0.6 * bare)),
        "loader_vs_arrow": Figure(ratio, detail, at_least=min(0.6, 80_000 / bare)),
    }


def resuming() -> dict[str, Figure]:
    """How soon a run that was interrupted far into a large mixture has its next batch, and what its position weighs."""
    tokenizer = load_tokenizer("compact")
    with tempfile.TemporaryDirectory() as folder:
        # the work depends on the number of documents, not on their lengths
        source = _mixture(Path(folder), np.full(DOCUMENTS, 8, np.int64))

        def open_mixture() -> SMIDataModule:
            data = SMIDataModule(
                tokenizer, source, steps=DOCUMENTS, pack_length=CAPACITY, window=4096, workers=2, seed=0
            )
            data.setup()
            return data

        data = open_mixture()
        loader = data.train_dataloader()
        for _ in itertools.islice(loader, DOCUMENTS * 8 // CAPACITY // 2):
            pass
        began = time.perf_counter()
        state = loader.state_dict()
        saving = time.perf_counter() - began
        data.teardown()
        waits = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            data = open_mixture()
            loader = data.train_dataloader()
            loader.load_state_dict(state)
            next(iter(loader))
            waits.append(time.perf_counter() - began)
            data.teardown()
    wait = statistics.median(waits)
    return {
        "resume_s": Figure(
            wait, f"from opening a mixture of {DOCUMENTS:,} documents to the batch in its middle", at_most=0.5
        ),
        "state_ms": Figure(1e3 * saving, "to ask the loader for its position", at_most=5),
        "state_bytes": Figure(len(json.dumps(state)), "of the position, as JSON", at_most=10_000),
    }


def _read_batches(training: PreparedTraining) -> int:
    """Documents that came out in batches, of an epoch or a little more."""
    documents = 0
    for batch in training.batches(Place(), 0, 1, RowAccount(), lambda epoch, packs: None):
        documents += batch.documents
        if documents >= len(training.corpus):
            break
    return documents


def _read_columns(source: PreparedSource) -> int:
    """Documents whose columns were read, as views."""
    documents = 0
    for shard in source.shards:
        with pq.ParquetFile(shard, memory_map=True) as file:
            for group in range(file.metadata.num_row_groups):
                rows = file.read_row_group(group, columns=["input_ids", "blocks"])
                rows.column("input_ids").chunk(0).values.to_numpy()
                documents += rows.num_rows
    return documents


def _mixture(folder: Path, every: np.ndarray) -> PreparedSource:
    """A prepared source of documents of these lengths; ids as skewed as words are, half of them supervised."""
    rng = np.random.default_rng(0)
    words = np.minimum(rng.zipf(1.2, 1 << 20), 65_535).astype(np.int32)
    shards = []
    for first in range(0, every.size, SHARD_ROWS):
        shards.append(folder / f"{first}.parquet")
        part = every[first : first + SHARD_ROWS]
        shard = ShardFile(shards[-1])
        for i in range(0, part.size, GROUP_ROWS):
            shard.append(_rows(part[i : i + GROUP_ROWS], words, rng))
        shard.close()
    return PreparedSource("bench", shards, 1.0, 1, [])


def _rows(tokens: np.ndarray, words: np.ndarray, rng: np.random.Generator) -> pa.RecordBatch:
    count, total = tokens.size, int(tokens.sum())
    bounds = np.concatenate(([0], np.cumsum(tokens))).astype(np.int32)
    starts = rng.integers(0, words.size - CAPACITY, -(-total // CAPACITY))
    ids = np.concatenate([words[start : start + CAPACITY] for start in starts])[:total]
    runs = np.stack([tokens // 2, tokens - tokens // 2], axis=1).ravel().astype(np.int32)
    kinds, supervised = np.tile(np.array([4, 7], np.uint8), count), np.tile([False, True], count)
    ids_type, runs_type = SCHEMA.field("input_ids").type, SCHEMA.field("blocks").type
    fields = list(runs_type.value_type)
    members = pa.StructArray.from_arrays([pa.array(kinds), pa.array(supervised), pa.array(runs)], fields=fields)
    places = pa.array(np.arange(count + 1, dtype=np.int32) * 2)
    columns = {
        "input_ids": pa.ListArray.from_arrays(pa.array(bounds), pa.array(ids), type=ids_type),
        "blocks": pa.ListArray.from_arrays(places, members, type=runs_type),
        "tokens": pa.array(tokens.astype(np.int32)),
        "supervised_tokens": pa.array((tokens - tokens // 2).astype(np.int32)),
    }
    empty = {field.name: pa.nulls(count, field.type) for field in SCHEMA}
    return pa.record_batch(empty | columns, schema=SCHEMA)
