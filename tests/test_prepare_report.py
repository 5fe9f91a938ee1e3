"""The report of a mixture: its figures are those of the shards, and the same mixture has the same report."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import numpy as np
import pyarrow.parquet as pq
import pytest
from preparing import content, plan, talk, write_sources

from smi.data.manifest import read_manifest
from smi.data.mixture import join, prepare
from smi.data.packing import pack_lengths
from smi.data.report import REPORT, script, write_report
from smi.data.report_page import page
from smi.data.sources import SourceSpec

PLOTS = ("composition", "lengths", "rejections", "quotas")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    write_sources(root)
    prepare(plan(root), root / "mixture")
    write_report(read_manifest(root / "mixture"), root / "mixture", 512)
    return root / "mixture"


class _Cells(HTMLParser):
    """The text of every table's cells, and what a page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script"
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_data(self, data: str) -> None:
        if self.tables and self.tables[-1] and self.tables[-1][-1]:
            self.tables[-1][-1][-1] += data


def read(text: str) -> _Cells:
    cells = _Cells()
    cells.feed(text)
    return cells


def test_the_page_says_what_the_shards_hold(mixture: Path) -> None:
    manifest = read_manifest(mixture)
    text = (mixture / REPORT).read_text(encoding="utf-8")
    cells = read(text)
    tables = {table[0][0] + "/" + table[0][1]: table[1:] for table in cells.tables}
    for row in tables["source/rows in"]:
        account = manifest.sources[row[0]]
        assert row[1:6] == [
            f"{value:,}"
            for value in (
                account["rows"],
                account["accepted"],
                sum(account["rejected"].values()),
                account["tokens"],
                account["supervised_tokens"],
            )
        ]
    reasons = {row[0]: int(row[2]) for row in tables["reason/what it means"]}
    assert reasons == {"duplicate": 2, "empty": 1, "json": 1, "no_target": 1, "schema": 1}
    assert len(tables["reason/source"]) == 6
    tokens = [n for s in manifest.shards for n in pq.read_table(mixture / s["file"])["tokens"].to_pylist()]
    packs = len(pack_lengths(tokens, 512))
    assert f"{packs:,} packs of 512 tokens, {sum(tokens) / packs / 512:.2%} full" in text
    # nothing is loaded from anywhere
    assert len(cells.links) == len(PLOTS)
    assert all(link.startswith("data:image/png;base64,") for link in cells.links)
    for name in PLOTS:
        assert (mixture / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_mixture_has_the_same_report(mixture: Path, tmp_path: Path) -> None:
    before = content(mixture)
    write_report(read_manifest(mixture), mixture, 512)
    assert content(mixture) == before
    join([mixture], tmp_path)
    write_report(read_manifest(tmp_path), tmp_path, 512)
    # the shards are where they were; all the rest is as it was
    assert (tmp_path / REPORT).read_bytes() == before[REPORT]


def test_tokens_and_letters_are_counted_by_block_and_script(tmp_path: Path) -> None:
    from smi.data.report import _read

    turns = [
        {"role": "user", "content": 'abc "role":"x"\n\u00e9 \u4e16\u754c \U0001f600 1'},
        {"role": "assistant", "content": "\u043f\u0440 \u0995 \\n \u3042"},
    ]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": turns}))
    made = plan(tmp_path, sources=[SourceSpec("talk", "talk.jsonl", "messages")])
    manifest = prepare(made, tmp_path / "out")
    found = _read(manifest, tmp_path / "out", "talk")
    # of the JSON around what is said, no letter is counted
    assert found.scripts == {"Latin": 10, "Cyrillic": 2, "Han": 2, "Bengali": 1, "Hiragana": 1}
    (shard,) = manifest.shards
    # the first token is never predicted; no target stands there
    assert found.supervised.sum() == shard["supervised_tokens"]
    assert found.supervised.sum() + found.context.sum() == shard["tokens"]
    assert np.flatnonzero(found.lengths).tolist() == [shard["tokens"]]


@pytest.mark.parametrize(("letter", "name"), [("a", "Latin"), ("\u00aa", None), ("1", None), ("\u05d0", "Hebrew")])
def test_scripts_are_those_of_letters(letter: str, name: str | None) -> None:
    assert script(letter) == name


def test_what_rows_say_is_text_on_the_page(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "<script>alert(1)</script>", "content": "x"}]}, {"messages": talk(Random(1))}]
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = plan(tmp_path, sources=[SourceSpec("talk", "talk.jsonl", "messages", licence="<b>MIT</b>")])
    manifest = prepare(made, tmp_path / "out")
    text = page(manifest, {}, None, {})
    read(text)
    assert re.search(r"unknown role .{1,6}&lt;script&gt;", text)
    assert "&lt;b&gt;MIT&lt;/b&gt;" in text


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "No packing is foreseen"),
        ('{"messages":[{"role":"user","content":"1"},{"role":"assistant","content":"2"}]}', "1 packs of 512 tokens"),
    ],
)
def test_a_mixture_without_rows_or_letters_has_a_report_too(row: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").write_text(row)
    manifest = prepare(plan(tmp_path, sources=[SourceSpec("talk", "talk.jsonl", "messages")]), tmp_path / "out")
    assert says in write_report(manifest, tmp_path / "out", 512).read_text()
