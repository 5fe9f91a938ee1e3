"""The mirror of public sources, prepared: every row of it has its outcome, for any number of workers, in any order."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from mirror import EXPECTED, HUB, REASONS, SOURCES

from smi.data.adapters import adapter_for
from smi.data.dedupe import fingerprint
from smi.data.manifest import read_manifest
from smi.data.mixture import prepare
from smi.data.plan import Plan
from smi.data.prepared import open_mixture
from smi.data.sources import SourceSpec, read_rows
from smi.protocol.conversation import to_stream
from smi.protocol.stream import ProtocolError
from smi.tokenizer import load_tokenizer


def whole(source: SourceSpec) -> SourceSpec:
    return SourceSpec(source.name, source.files, source.adapter, dataset=source.dataset, revision=source.revision)


def twins(source: SourceSpec) -> Iterator[list[int]]:
    """The rows of each conversation that is there more than once and is accepted once."""
    adapter = adapter_for(source)
    rows: dict[bytes, list[int]] = defaultdict(list)
    for row in read_rows(source, HUB, adapter.columns):
        if isinstance(row.value, dict):
            try:
                rows[fingerprint(to_stream(adapter.convert(row.value)))].append(row.where.row)
            except ProtocolError:
                continue
    cases = EXPECTED[source.name]["cases"]
    for same in rows.values():
        if len(same) > 1 and "accept" in {cases[row]["expect"] for row in same}:
            yield same


@pytest.mark.parametrize(("workers", "seed"), [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2)])
def test_every_row_has_its_outcome(workers: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smi.data.plan.SAMPLES", 10_000)
    if seed:
        # JSONL in many blocks, which the seed puts into an order of its own
        monkeypatch.setattr("smi.data.readers.BLOCK_BYTES", 1000)
    sources = [whole(source) for source in SOURCES.values()]
    tokenizer = load_tokenizer("rwkv_world")
    prepare(Plan(sources, tokenizer, HUB, 2048, seed=seed), tmp_path, workers=workers)
    manifest = read_manifest(tmp_path)
    for source in sources:
        account, cases = manifest.sources[source.name], EXPECTED[source.name]["cases"]
        assert account["rows"] == len(cases)
        assert account["accepted"] == EXPECTED[source.name]["accept"]
        wanted = {case["row"]: REASONS[case["why"]] for case in cases if case["expect"] == "reject"}
        found = {kept["row"]: reason for reason, rows in account["samples"].items() for kept in rows}
        assert len(found) == sum(account["rejected"].values())
        for same in twins(source):
            # which of them comes first is up to the order
            kept = [row for row in same if row not in found]
            assert len(kept) == 1
            for row in same:
                assert found.pop(row, "duplicate") == "duplicate"
                wanted.pop(row, None)
        assert found == wanted
    opened = open_mixture(tmp_path, tokenizer, 2048)
    documents = sum(1 for source in opened for _ in source.documents("any"))
    assert documents == sum(case["accept"] for case in EXPECTED.values())
