"""Figures of preparation end to end: rows -> shards on the disk, in one process and with two workers."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from smi.bench.measure import Figure, resident
from smi.bench.prepare import conversations
from smi.data.mixture import prepare
from smi.data.plan import Account, Plan
from smi.data.sources import SourceSpec
from smi.protocol.conversation import to_stream
from smi.tokenizer import load_tokenizer

ROWS = 8_000
ROUNDS = 2
# rows/s of the bare encoder on the core that the target is given for, and of preparation there
ENCODER, TARGET = 45_000, 2_000


def write_rows(path: Path, count: int) -> None:
    """The suite's conversations as JSONL."""
    rows = ({"messages": talk.messages, "tools": talk.tools} for talk in conversations(count))
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def rows_per_second(source: Path, workers: int) -> tuple[float, float]:
    """(rows/s from the first report on, peak MB of this process) of one preparation.

    The first report comes when everything is loaded and compiled. A clock that started later would not count what
    workers have done ahead of what is written by then.
    """
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        plan = Plan([SourceSpec("talk", source.name, "messages")], load_tokenizer("rwkv_world"), source.parent, 2048)
        begun: list[tuple[float, int]] = []

        def watch(source: str, account: Account) -> None:
            if not begun:
                begun.append((time.perf_counter(), account.rows))

        manifest = prepare(plan, Path(folder) / "mixture", workers=workers, progress=watch)
        took = time.perf_counter() - begun[0][0]
        rows = manifest.sources["talk"]["rows"] - begun[0][1]
    return rows / took, resident("VmHWM") / 2**20


def _measure(source: Path, workers: int) -> tuple[float, float]:
    """The same in a process of its own, whose memory is that of preparation alone."""
    command = [sys.executable, "-m", "smi.bench._prepare_run", str(source), str(workers)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=dict(os.environ)).stdout
    speed, peak = output.split()
    return float(speed), float(peak)


def _encoder(count: int = 1_000) -> float:
    """Rows/s of the bare encoder: the payloads of conversations, nothing else."""
    tokenizer = load_tokenizer("rwkv_world")
    streams = [to_stream(talk) for talk in conversations(count)]
    texts = [f"\n{block.text}\n" for s in streams for transmission in s.transmissions for block in transmission.blocks]
    best = float("inf")
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        tokenizer.encode_flat(texts)
        best = min(best, time.perf_counter() - start)
    return count / best


def figures() -> dict[str, Figure]:
    """`prepare_rows_per_s`, `prepare_two_processes_vs_one` and `prepare_peak_mb`."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "talk.jsonl"
        write_rows(source, ROWS)
        runs: dict[int, list[tuple[float, float]]] = {0: [], 2: []}
        for _ in range(ROUNDS):
            for workers, found in runs.items():
                found.append(_measure(source, workers))
    one, two = (statistics.median(speed for speed, _ in found) for found in runs.values())
    encoder = _encoder()
    return {
        "prepare_rows_per_s": Figure(
            one,
            f"rows of about 660 tokens, end to end in one process; {TARGET / ENCODER:.1%} of the bare encoder's "
            f"{encoder:,.0f} rows/s are asked for",
            at_least=encoder * TARGET / ENCODER,
        ),
        "prepare_two_processes_vs_one": Figure(
            two / one, f"two workers {two:,.0f} rows/s, none {one:,.0f}", at_least=1.6
        ),
        "prepare_peak_mb": Figure(
            max(peak for _, peak in runs[0]), f"peak RSS of the one process over {ROWS:,} rows", at_most=600
        ),
    }


if __name__ == "__main__":
    print(*rows_per_second(Path(sys.argv[1]), int(sys.argv[2])))
