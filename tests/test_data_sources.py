"""Reading rows: blocks, bad rows, damaged files, and what Arrow does to nested columns."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smi.data import budget, readers
from smi.data.sources import Block, Row, SourceSpec, find_files, list_blocks, read_block, read_rows
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


def test_a_row_of_too_many_values_is_rejected_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "MAX_NODES", 50)
    prose = json.dumps({"text": "one, two, " * 40})
    rows = ['{"n":0}', json.dumps({"n": [0] * 100}), json.dumps({"n": [[]] * 100}), prose, '{"n":4}']
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    found = [outcome(row) for row in read_rows(spec("rows.jsonl"), tmp_path)]
    assert found == [{"n": 0}, "over_budget", "over_budget", json.loads(prose), {"n": 4}]


NESTED = pa.list_(pa.struct([("text", pa.string()), ("more", pa.list_(pa.string()))]))


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_heavy_rows_of_columns_are_rejected_and_the_others_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    heavy = [{"text": "x" * 2000, "more": ["y"]}]
    values = [[{"text": "a", "more": ["b", None]}], heavy, None, [], [{"text": "c", "more": None}] * 60, heavy[:0]]
    table = pa.table({"rows": pa.array(values, NESTED), "n": list(range(6))})
    if form == "parquet":
        pq.write_table(table, tmp_path / "rows.parquet")
    else:
        with pa.ipc.new_stream(tmp_path / "rows.arrow", table.schema) as writer:
            writer.write_table(table)
    monkeypatch.setattr(budget, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(budget, "MAX_NODES", 100)
    rows = list(read_rows(spec(f"rows.{form}"), tmp_path))
    assert [outcome(row) for row in rows] == [
        {"rows": [{"text": "a", "more": ["b", None]}], "n": 0},
        "over_budget",
        {"rows": None, "n": 2},
        {"rows": [], "n": 3},
        "over_budget",
        {"rows": [], "n": 5},
    ]
    assert isinstance(rows[1].value, ProtocolError)
    assert isinstance(rows[4].value, ProtocolError)
    assert "bytes" in rows[1].value.message
    assert "values" in rows[4].value.message


def test_maps_become_objects_with_their_own_nulls(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.string())
    values = pa.array([[("a", "1"), ("b", None)], [("a", "1"), ("a", "2")], None], kind)
    pq.write_table(pa.table({"map": values}), tmp_path / "rows.parquet")
    found = [outcome(row) for row in read_rows(spec("rows.parquet"), tmp_path)]
    assert found == [{"map": {"a": "1", "b": None}}, "duplicate_key", {"map": None}]


def test_a_damaged_row_group_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pa.table({"text": [f"row {n} " * 50 for n in range(200)]})
    pq.write_table(table, path, row_group_size=100, use_dictionary=False, write_page_checksum=True)
    second = pq.read_metadata(path).row_group(1).column(0)
    data = bytearray(path.read_bytes())
    middle = second.data_page_offset + second.total_compressed_size // 2
    data[middle] ^= 0xFF
    path.write_bytes(data)
    first, bad = list_blocks(path)
    assert len(list(read_block(first, "test"))) == first.rows == 100
    with pytest.raises(ValueError, match=r"rows\.parquet: cannot read row group 1: .*damaged"):
        list(read_block(bad, "test"))


def test_directories_that_datasets_saved_are_read_as_they_are(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"inputs": f"q{n}", "talk": [{"role": "user", "content": str(n)}]} for n in range(2500)]
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(tmp_path / "talk", num_shards=2)
    data.select([7, 3]).save_to_disk(tmp_path / "few")
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "both")
    assert [row.value for row in read_rows(spec("talk"), tmp_path)] == rows
    assert [row.value for row in read_rows(spec("few"), tmp_path)] == [rows[7], rows[3]]
    assert [row.value for row in read_rows(spec("both/train"), tmp_path, ("inputs",))][5] == {"inputs": "q5"}
    with pytest.raises(ValueError, match="both holds several splits: name the one to read"):
        find_files(spec("both"), tmp_path)
    with pytest.raises(ValueError, match="named like an evaluation or test split"):
        find_files(spec("both/test"), tmp_path)
    blocks = [block for file in find_files(spec("talk"), tmp_path) for block in list_blocks(file)]
    assert sum(block.rows or 0 for block in blocks) == 2500
    assert len(blocks) > 2
    for block in reversed(blocks):
        base = 0 if "00000" in block.path.name else 1250
        for row in read_block(block, "test", tmp_path):
            assert isinstance(row.value, dict)
            assert row.value["inputs"] == f"q{base + row.where.row}"


def test_an_arrow_file_of_another_form_is_named(tmp_path: Path) -> None:
    table = pa.table({"n": [1]})
    with pa.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ValueError, match=r"file\.arrow cannot be opened as an Arrow stream"):
        list_blocks(tmp_path / "file.arrow")
    coded = pa.table({"n": pa.array(["a", "b"]).dictionary_encode()})
    with pa.ipc.new_stream(tmp_path / "coded.arrow", coded.schema) as writer:
        writer.write_table(coded)
    with pytest.raises(ValueError, match=r"coded\.arrow holds dictionary-encoded columns"):
        list_blocks(tmp_path / "coded.arrow")


@pytest.mark.parametrize(
    "name",
    [
        "test.jsonl",
        "data/test-00000-of-00002.jsonl",
        "data/test_sft-0.jsonl",
        "mmlu_Dev.jsonl",
        "validation/rows.jsonl",
        "eval.rows.jsonl",
        "gsm8k/val-1.jsonl",
        "held-out.jsonl",
        "holdout2.jsonl",
    ],
)
def test_evaluation_and_test_splits_are_not_trained_on(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    # by the pattern, by what a pattern without a word finds, and with no such file
    for pattern, root in ((name, tmp_path), ("**/*.jsonl", tmp_path), (name, tmp_path / "none"), (str(path), ".")):
        with pytest.raises(ValueError, match="named like an evaluation or test split"):
            find_files(spec(pattern), root)
    assert find_files(spec(name), tmp_path, held_out=True) == [path]


def test_names_that_only_contain_such_a_word_pass(tmp_path: Path) -> None:
    root = tmp_path / "test" / "dev"
    names = ["contest.jsonl", "devops.jsonl", "evaluate_me.jsonl", "latest.jsonl", "medieval.jsonl", "validated.jsonl"]
    root.mkdir(parents=True)
    for name in names:
        (root / name).write_text("{}")
    # what stands above the root is the user's own affair
    assert [file.name for file in find_files(spec("*.jsonl"), root)] == names


SHA = "0123456789abcdef0123456789abcdef01234567"


def test_a_dataset_needs_the_full_hash_of_its_revision() -> None:
    for revision in (None, "main", SHA[:12], SHA.upper()):
        with pytest.raises(ValueError, match=r"'a': owner/name needs a revision, the full hash .* not "):
            SourceSpec("a", "*.jsonl", "aya", dataset="owner/name", revision=revision)
    with pytest.raises(ValueError, match=r"named OWNER/NAME, not 'name'"):
        SourceSpec("a", "*.jsonl", "aya", dataset="name", revision=SHA)
    for pattern in ("../other/x.jsonl", "/etc/x.jsonl"):
        with pytest.raises(ValueError, match="leads out of the dataset"):
            SourceSpec("a", pattern, "aya", dataset="owner/name", revision=SHA)


def test_a_mirror_holds_datasets_by_their_names(tmp_path: Path) -> None:
    source = SourceSpec("a", "data/*.jsonl", "aya", dataset="owner/name", revision=SHA)
    (tmp_path / "owner/name/data").mkdir(parents=True)
    (tmp_path / "owner/name/data/x.jsonl").write_text('{"n":1}')
    (row,) = read_rows(source, tmp_path)
    assert row.where.file == "owner/name/data/x.jsonl"
    (tmp_path / "mirror.json").write_text(json.dumps({"owner/name": {"revision": "f" * 40, "files": {}}}))
    with pytest.raises(ValueError, match=f"at revision {'f' * 40}, not at {SHA}"):
        find_files(source, tmp_path)


def test_blocks_say_how_many_rows_they_hold_where_the_file_does(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": range(7)}), tmp_path / "rows.parquet", row_group_size=3)
    assert [block.rows for block in list_blocks(tmp_path / "rows.parquet")] == [3, 3, 1]
    (tmp_path / "rows.jsonl").write_text('{"n":1}')
    assert list_blocks(tmp_path / "rows.jsonl") == [Block(tmp_path / "rows.jsonl", 0, 7)]
