"""Reading rows: blocks, bad rows, damaged files, and what Arrow does to nested columns."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smi.data import budget, readers
from smi.data.sources import Row, SourceSpec, find_files, list_blocks, read_block, read_rows
from smi.protocol.stream import ProtocolError


def spec(*files: str) -> SourceSpec:
    return SourceSpec("test", files, "messages")


def outcome(row: Row) -> Any:
    """The row, or the reason it could not be read."""
    return row.value.reason if isinstance(row.value, ProtocolError) else row.value


def test_jsonl_is_split_at_newline_bytes_alone(tmp_path: Path) -> None:
    texts = ["a\u2028b\u2029c", "d\x85e", "vertical\\u000btab", "carriage\\rreturn"]
    lines = [f'{{"text":"{text}"}}' for text in texts]
    (tmp_path / "rows.jsonl").write_bytes(("\r\n".join(lines) + "\n\n  \n" + '{"last":1}').encode())
    rows = list(read_rows(spec("rows.jsonl"), tmp_path))
    assert [row.where.row for row in rows] == [0, 1, 2, 3, 4]
    assert rows[0].value == {"text": texts[0]}
    assert rows[4].value == {"last": 1}


def test_a_bad_line_is_one_rejection(tmp_path: Path) -> None:
    lines = [
        b'{"n":0}',
        b'{"n":',
        b'{"n":"\xff"}',
        b"[1]",
        b'{"n":NaN}',
        b'{"n":1,"n":2}',
        b'{"n":"\\ud800"}',
        b'{"n":' + b"7" * 5000 + b"}",
        b'{"n":' + b"[" * 2000 + b"]" * 2000 + b"}",
        b'{"n":9}',
    ]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    rows = list(read_rows(spec("*.jsonl"), tmp_path))
    reasons = ["json", "undecodable", "schema", "number", "duplicate_key", "text", "number", "nesting"]
    assert [outcome(row) for row in rows] == [{"n": 0}, *reasons, {"n": 9}]
    assert str(rows[2].where) == "test: rows.jsonl row 2"


def test_blocks_of_a_jsonl_file_hold_each_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"n":{n},"pad":"{"x" * (n * 7 % 40)}"}}\n\n' for n in range(50)))
    for size in (1, 13, 64, 100_000):
        monkeypatch.setattr(readers, "BLOCK_BYTES", size)
        seen = []
        # any order of blocks gives every row its own number in the file
        for block in reversed(list_blocks(path)):
            for row in read_block(block, "test", tmp_path):
                assert isinstance(row.value, dict)
                assert row.where.row == row.value["n"]
                seen.append(row.value["n"])
        assert sorted(seen) == list(range(50))


def test_oversized_rows_are_rejected_and_the_next_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_ROW_BYTES", 100)
    rows = ['{"n":0}', json.dumps({"n": "x" * 200_000}), '{"n":2}']
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "rows.json").write_text("[" + ",".join(rows) + "]")
    for name in ("rows.jsonl", "rows.json"):
        assert [outcome(row) for row in read_rows(spec(name), tmp_path)] == [
            {"n": 0},
            "over_budget",
            {"n": 2},
        ]


def test_json_array_elements_are_judged_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_bytes(
        b' [ {"a": "]},[\\" \\\\"}, {"b": NaN}, {"c": [1, {"d": 2}]}, 5, {"e": "\xff"}, {"f": 1} ] \n'
    )
    rows = list(read_rows(spec("rows.json"), tmp_path))
    assert [outcome(row) for row in rows] == [
        {"a": ']},[" \\'},
        "number",
        {"c": [1, {"d": 2}]},
        "schema",
        "undecodable",
        {"f": 1},
    ]
    assert [row.where.row for row in rows] == list(range(6))


@pytest.mark.parametrize("text", [b"", b'{"a":1}\n{"a":2}', b'[{"a":1},{"a":', b'[{"a":1}] [', b'{"a":[1]}'])
def test_a_file_that_is_no_json_array_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "rows.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"rows\.json is not one complete JSON array"):
        list(read_rows(spec("rows.json"), tmp_path))


def test_an_empty_array_has_no_rows_and_a_trailing_comma_a_bad_one(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text(" [ ] ")
    (tmp_path / "comma.json").write_text('[{"a":1},]')
    assert list(read_rows(spec("empty.json"), tmp_path)) == []
    assert [outcome(row) for row in read_rows(spec("comma.json"), tmp_path)] == [{"a": 1}, "json"]


def test_parquet_reads_the_columns_asked_for_and_numbers_rows_over_groups(tmp_path: Path) -> None:
    table = pa.table({"n": list(range(10)), "other": ["x"] * 10, "more": [1.5] * 10})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=3)
    rows = list(read_rows(spec("rows.parquet"), tmp_path, ("n", "other", "absent")))
    assert [row.value for row in rows] == [{"n": n, "other": "x"} for n in range(10)]
    for block in reversed(list_blocks(tmp_path / "rows.parquet")):
        for row in read_block(block, "test", tmp_path, ("n",)):
            assert row.value == {"n": row.where.row}


def test_nulls_that_arrow_invents_do_not_reach_a_schema(tmp_path: Path) -> None:
    tools = [
        [{"name": "a", "parameters": {"properties": {"city": {"type": "string"}}}}],
        [{"name": "b", "parameters": {"properties": {"count": {"type": "integer", "minimum": 1}}}}],
    ]
    table = pa.table({"tools": tools, "note": ["x", None]})
    pq.write_table(table, tmp_path / "rows.parquet")
    rows = list(read_rows(spec("rows.parquet"), tmp_path))
    assert [row.value for row in rows] == [
        {"tools": tools[0], "note": "x"},
        {"tools": tools[1], "note": None},
    ]


def test_text_that_is_not_utf8_costs_its_row_alone(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": raw}), tmp_path / "rows.parquet")
    rows = list(read_rows(spec("rows.parquet"), tmp_path))
    assert [outcome(row) for row in rows] == [{"text": "good"}, "undecodable", {"text": "fine"}]


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(ValueError, match=r"rows\.parquet cannot be opened as Parquet"):
        list(read_rows(spec("rows.parquet"), tmp_path))


def test_patterns_find_files_once_and_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "odd[1].jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    found = find_files(spec("odd[1].jsonl", "**/*.jsonl", str(tmp_path / "a.jsonl")), tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "odd[1].jsonl",
        "a.jsonl",
        "b.jsonl",
        "deep/c.jsonl",
    ]
    assert find_files(SourceSpec("test", "a.jsonl", "messages"), tmp_path) == [tmp_path / "a.jsonl"]


def test_missing_and_unknown_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"no file matches 'none-\*\.jsonl' under"):
        find_files(spec("none-*.jsonl"), tmp_path)
    with pytest.raises(ValueError, match=r"rows\.csv is of no known format; known are \.parquet"):
        find_files(spec("rows.csv"), tmp_path)
