"""A small mixture to prepare, and ``python preparing.py DIRECTORY`` to prepare it in a process that can be killed."""

import json
import os
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from smi.data.compiling import RowCompiler
from smi.data.mixture import prepare
from smi.data.plan import Plan
from smi.data.sources import SourceSpec
from smi.tokenizer import load_tokenizer

WORDS = (
    "the",
    "lamp",
    "costs",
    "nine",
    "euros",
    "and",
    "stands",
    "in",
    "aisle",
    "two",
    "beside",
    "a",
    "small",
    "kettle",
)


def talk(rng: random.Random, mark: str = "") -> list[dict[str, Any]]:
    """A conversation of a few turns, which says `mark` somewhere."""

    def say(most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))

    turns = []
    for _ in range(rng.randint(1, 3)):
        turns += [{"role": "user", "content": say(9)}, {"role": "assistant", "content": say(20)}]
    turns[0]["content"] += f" {mark}{rng.random()}"
    return turns


def write_sources(root: Path) -> None:
    """talk.jsonl with good, faulty and repeated rows, and books.parquet with row groups of 40 rows."""
    rng = random.Random(0)
    good = [json.dumps({"messages": talk(rng)}) for _ in range(150)]
    faulty = ["{", '{"messages":[]}', '{"messages":[{"role":"user","content":"hi"}]}', "[1]", good[3], good[100]]
    lines = [*good, *faulty]
    rng.shuffle(lines)
    (root / "talk.jsonl").write_text("\n".join(lines) + "\n")
    rows = [json.dumps(talk(rng)) for _ in range(120)]
    pq.write_table(pa.table({"messages_json": rows}), root / "books.parquet", row_group_size=40)


def plan(root: Path, **changes: Any) -> Plan:
    """Two sources; the second one reaches its quota before its end."""
    sources = [
        SourceSpec("talk", "talk.jsonl", "messages"),
        SourceSpec("books", "books.parquet", "messages", quota=2500),
    ]
    whole = Plan(sources, load_tokenizer("compact"), root, 400, row_group_rows=50, shard_rows=100)
    return replace(whole, **changes)


def content(directory: Path) -> dict[str, bytes]:
    """Every file of a directory."""
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


@dataclass
class TroubledCompiler(RowCompiler):
    """Some rows say what is to go wrong with them."""

    def _parse(self, row: Any, convert: Any) -> Any:
        text = str(row.value)
        if "HANG" in text:
            time.sleep(600)
        if "DIE" in text:
            os._exit(7)
        if "ONCE" in text and not (flag := self.root / "once").exists():
            flag.touch()
            os._exit(7)
        return super()._parse(row, convert)

    def _key(self, stream: Any, mark: bytes) -> bytes:
        # where many rows are worked on at once
        if "CRAWL" in str(stream):
            time.sleep(600)
        return super()._key(stream, mark)


if __name__ == "__main__":
    folder, workers = Path(sys.argv[1]), int(sys.argv[2])
    prepare(plan(folder.parent), folder, workers=workers)
