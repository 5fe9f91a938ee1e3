"""Packing and loading, against TRL and bare pyarrow."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import numpy as np

from smi.bench.measure import Figure, alternate, duration
from smi.data.packing import pack_lengths, pack_windows

CAPACITY = 2048
DOCUMENTS = 1_000_000
# the peer takes about half a minute for them all; its time grows a little faster than their number
PEER_DOCUMENTS = 100_000


def run() -> dict[str, Figure]:
    """All figures of the suite. ValueError names a peer that is not installed."""
    return packing()


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
