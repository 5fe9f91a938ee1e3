"""Preparing a mixture: the same bytes for any number of workers, every row accounted for, what has changed noticed."""

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preparing import TroubledCompiler, content, plan, talk, write_sources

from smi.data.manifest import Manifest, merge, read_manifest
from smi.data.mixture import Shortfall, join, prepare
from smi.data.prepared import open_mixture
from smi.data.shards import examples
from smi.data.sources import SourceSpec
from smi.protocol.codec import encode
from smi.protocol.conversation import Conversation, to_stream
from smi.tokenizer import load_tokenizer

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    write_sources(folder)
    return folder


@pytest.fixture(scope="module")
def mixture(root: Path) -> Path:
    prepare(plan(root), root / "mixture")
    return root / "mixture"


def accepted_and_rejected(manifest: Manifest) -> bool:
    """Whether rows in = accepted + rejected = what the shards hold + rejected, for every source."""
    return all(
        account["rows"] == account["accepted"] + sum(account["rejected"].values())
        and account["accepted"] == sum(shard["rows"] for shard in manifest.shards if shard["source"] == name)
        for name, account in manifest.sources.items()
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(root: Path, mixture: Path, workers: int) -> None:
    target = root / f"workers_{workers}"
    prepare(plan(root), target, workers=workers)
    assert content(target) == content(mixture)


def test_every_row_is_accounted_for_with_its_reason(mixture: Path) -> None:
    manifest = read_manifest(mixture)
    assert accepted_and_rejected(manifest)
    talk, books = manifest.sources["talk"], manifest.sources["books"]
    assert (talk["rows"], talk["accepted"]) == (156, 150)
    assert talk["rejected"] == {"duplicate": 2, "empty": 1, "json": 1, "no_target": 1, "schema": 1}
    (broken,) = talk["samples"]["json"]
    line = (mixture.parent / "talk.jsonl").read_bytes().split(b"\n")[broken["row"]]
    assert line == b"{"
    # the row that reaches the quota is the last one
    assert 2500 <= books["supervised_tokens"] < 2600
    assert books["rows"] < 120
    assert not manifest.shortfalls


def test_a_shard_holds_what_the_compiler_makes_of_its_conversation(mixture: Path) -> None:
    tokenizer = load_tokenizer("compact")
    rows = 0
    for shard in read_manifest(mixture).shards:
        file = pq.ParquetFile(mixture / shard["file"])
        assert all(file.metadata.row_group(g).num_rows == 50 for g in range(file.num_row_groups - 1))
        for batch in file.iter_batches(33):
            for example, row in zip(examples(batch), batch.to_pylist(), strict=True):
                stream = to_stream(Conversation(json.loads(row["messages_json"])))
                wanted = encode(stream, tokenizer)
                for name in ("input_ids", "loss_mask", "block_types"):
                    assert np.array_equal(getattr(example, name), getattr(wanted, name)), name
                assert row["tokens"] == wanted.input_ids.size
                assert row["supervised_tokens"] == np.count_nonzero(wanted.loss_mask[1:])
                assert row["source"] == shard["source"]
                rows += 1
    assert rows == sum(shard["rows"] for shard in read_manifest(mixture).shards)


def test_a_mixture_is_a_source_of_the_messages_that_it_was_made_of(root: Path, mixture: Path) -> None:
    again = plan(root, sources=[SourceSpec("again", "mixture/*.parquet", "messages")])
    manifest = prepare(again, root / "again")
    assert manifest.sources["again"]["accepted"] == sum(s["rows"] for s in read_manifest(mixture).shards)
    assert not manifest.sources["again"]["rejected"]


def test_rows_that_hang_or_kill_are_rejected_and_their_neighbours_are_not(tmp_path: Path) -> None:
    rng = random.Random(1)
    marks = {11: "HANG", 40: "DIE", 41: "ONCE", 77: "CRAWL"}
    rows = [json.dumps({"messages": talk(rng, marks.get(i, ""))}) for i in range(90)]
    (tmp_path / "talk.jsonl").write_text("\n".join(rows))
    made = plan(tmp_path, sources=[SourceSpec("talk", "talk.jsonl", "messages")], compiler_type=TroubledCompiler)
    manifest = prepare(made, tmp_path / "out", workers=1, row_timeout=2.0)
    account = manifest.sources["talk"]
    assert account["rejected"] == {"crash": 1, "time_out": 2}
    assert [sample["row"] for sample in account["samples"]["time_out"]] == [11, 77]
    assert [sample["row"] for sample in account["samples"]["crash"]] == [40]
    assert accepted_and_rejected(manifest)
    said = [json.loads(text) for text in _column(tmp_path / "out", "messages_json")]
    assert said == [json.loads(row)["messages"] for i, row in enumerate(rows) if i not in (11, 40, 77)]


def _column(directory: Path, name: str) -> list[Any]:
    files = [directory / shard["file"] for shard in read_manifest(directory).shards]
    return [value for file in files for value in pq.read_table(file, columns=[name]).column(0).to_pylist()]


class TestChanges:
    """Whatever the mixture depends on is compared, when it is prepared again and when it is opened."""

    def other_vocabulary(self, tmp_path: Path) -> Any:
        load_tokenizer("compact").save_pretrained(tmp_path / "other")
        file = tmp_path / "other" / "tokenizer.json"
        document = json.loads(file.read_text())
        vocabulary = document["model"]["vocab"]
        vocabulary["Ġthe"], vocabulary["Ġis"] = vocabulary["Ġis"], vocabulary["Ġthe"]
        file.write_text(json.dumps(document))
        return load_tokenizer(str(tmp_path / "other"))

    def other_structure(self, tmp_path: Path) -> Any:
        load_tokenizer("compact").save_pretrained(tmp_path / "other")
        for name in ("tokenizer.json", "smi_token_ids.json"):
            file = tmp_path / "other" / name
            text = file.read_text()
            for a, b in (("<|usr|>", "<|?|>"), ("<|obs|>", "<|usr|>"), ("<|?|>", "<|obs|>")):
                text = text.replace(f'"{a}"', f'"{b}"')
            file.write_text(text)
        return load_tokenizer(str(tmp_path / "other"))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ("vocabulary", r"tokenizer.vocabulary_sha256 was .* and is"),
            ("structure", r"structural_ids.<\|usr\|> was 874 and is 875"),
            ("max_length", r"compile.max_length was 400 and is 401"),
            ("seed", r"seed was 0 and is 1"),
            ("quota", r"sources.books.quota was 2500 and is 2600"),
        ],
    )
    def test_another_setting_is_refused_with_both_values(
        self, mixture: Path, tmp_path: Path, change: str, message: str
    ) -> None:
        made = plan(mixture.parent)
        match change:
            case "vocabulary":
                made = replace(made, tokenizer=self.other_vocabulary(tmp_path))
            case "structure":
                made = replace(made, tokenizer=self.other_structure(tmp_path))
            case "max_length":
                made = replace(made, max_length=401)
            case "seed":
                made = replace(made, seed=1)
            case _:
                made = replace(made, sources=[made.sources[0], replace(made.sources[1], quota=2600)])
        before = content(mixture)
        with pytest.raises(ValueError, match=message) as caught:
            prepare(made, mixture)
        assert "Choose another directory with data.mixture=DIR" in str(caught.value)
        assert content(mixture) == before
        if change in ("vocabulary", "structure", "max_length"):
            with pytest.raises(ValueError, match=message):
                open_mixture(mixture, made.tokenizer, made.max_length)

    @pytest.mark.parametrize("finished", [True, False])
    def test_a_source_file_of_equal_size_and_time_is_noticed(self, tmp_path: Path, finished: bool) -> None:
        write_sources(tmp_path)
        made = plan(tmp_path)
        if finished:
            prepare(made, tmp_path / "out")
        else:
            unaccepted = replace(made, sources=[made.sources[0], replace(made.sources[1], quota=10**6)])
            with pytest.raises(Shortfall):
                prepare(unaccepted, tmp_path / "out")
            made = unaccepted
        file = tmp_path / "talk.jsonl"
        times = file.stat()
        file.write_bytes(file.read_bytes().replace(b"kettle", b"Kettle", 1))
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(ValueError, match=r"files\[talk.jsonl\].sha256 was .* and is"):
            prepare(made, tmp_path / "out")
        if finished:
            with pytest.raises(ValueError, match=r"talk.jsonl has the sha256 .* was prepared"):
                open_mixture(tmp_path / "out", made.tokenizer, 400, mirror=tmp_path)
            assert open_mixture(tmp_path / "out", made.tokenizer, 400)

    def test_a_shard_of_equal_size_and_time_is_noticed(self, mixture: Path, tmp_path: Path) -> None:
        shutil.copytree(mixture, tmp_path / "copy")
        shard = tmp_path / "copy" / "talk-00001.parquet"
        times, data = shard.stat(), bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(ValueError, match=r"talk-00001.parquet has sha256 \w+, and the manifest says"):
            open_mixture(tmp_path / "copy", load_tokenizer("compact"), 400)
        shard.unlink()
        with pytest.raises(ValueError, match=r"talk-00001.parquet is not there"):
            open_mixture(tmp_path / "copy", load_tokenizer("compact"), 400)


class Stop(BaseException):
    pass


@pytest.mark.parametrize("mode", ["exact", "normalised", "near"])
def test_duplicates_of_each_kind_are_told_also_by_a_run_that_was_stopped(tmp_path: Path, mode: str) -> None:
    rng = random.Random(2)
    words = [f"word{n}" for n in range(400)]
    texts = [" ".join(rng.choices(words, k=60)) for _ in range(300)]
    # the same, in other white space, and with one word of sixty changed
    texts += [texts[5], texts[6].replace(" ", "  ", 3), texts[7].replace(texts[7].split()[30], "other", 1)]
    rows = [[{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}] for text in texts]
    (tmp_path / "talk.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    held_out = tmp_path / "measured.txt"
    held_out.write_text(texts[100] + "\n")
    made = plan(
        tmp_path,
        sources=[SourceSpec("talk", "talk.jsonl", "messages")],
        dedupe=mode,
        held_out=[str(held_out)],
        max_length=1000,
    )
    manifest = prepare(made, tmp_path / "whole")
    rejected = {
        "exact": {"duplicate": 1},
        "normalised": {"duplicate": 2},
        "near": {"duplicate": 1, "near_duplicate": 2},
    }
    assert manifest.sources["talk"]["rejected"] == rejected[mode] | {"contaminated": 1}

    def stop(source: str, account: Any) -> None:
        if account.rows >= 250:
            raise Stop

    with pytest.raises(Stop):
        prepare(made, tmp_path / "stopped", progress=stop)
    prepare(made, tmp_path / "stopped")
    assert content(tmp_path / "stopped") == content(tmp_path / "whole")
    held_out.write_text("something else")
    with pytest.raises(ValueError, match=r"held_out\[.*\].sha256 was"):
        prepare(made, tmp_path / "whole")


def test_a_finished_mixture_is_left_as_it_is(root: Path, mixture: Path) -> None:
    times = {file.name: file.stat().st_mtime_ns for file in mixture.iterdir()}
    said: list[str] = []
    prepare(plan(root), mixture, say=said.append)
    assert said[-1] == f"{mixture} is complete already"
    assert {file.name: file.stat().st_mtime_ns for file in mixture.iterdir()} == times


def test_a_directory_with_something_else_in_it_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("do not touch")
    with pytest.raises(ValueError, match=r"holds thesis.txt and no mixture: choose an empty directory"):
        prepare(plan(root), tmp_path)


def test_a_shortfall_is_an_error_until_it_is_accepted_and_nothing_is_done_again(root: Path, tmp_path: Path) -> None:
    made = plan(root)
    made = replace(made, sources=[made.sources[0], replace(made.sources[1], quota=10**6)])
    with pytest.raises(Shortfall, match=r"books has [\d,]+ of 1,000,000.*on_shortfall=accept"):
        prepare(made, tmp_path)
    with pytest.raises(ValueError, match="is no mixture"):
        open_mixture(tmp_path, made.tokenizer, 400)
    times = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.parquet")}
    manifest = prepare(made, tmp_path, accept_shortfall=True)
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.parquet")} == times
    books = manifest.sources["books"]
    assert manifest.shortfalls == {"books": 10**6 - books["supervised_tokens"]}
    assert books["rows"] == 120
    with pytest.raises(Shortfall):
        prepare(made, tmp_path)


class TestParts:
    def test_parts_hold_what_the_whole_holds(self, root: Path, tmp_path: Path) -> None:
        made = replace(plan(root), sources=[SourceSpec("books", "books.parquet", "messages")])
        prepare(made, tmp_path / "whole")
        for i in range(2):
            prepare(replace(made, part=(i, 2)), tmp_path / f"part{i}")
        merged = join([tmp_path / "part0", tmp_path / "part1"], tmp_path / "all")
        assert accepted_and_rejected(merged)
        assert merged.sources["books"]["rows"] == 120
        (source,) = open_mixture(tmp_path / "all", made.tokenizer, 400)
        (whole,) = open_mixture(tmp_path / "whole", made.tokenizer, 400)
        assert {d.fingerprint for d in source.documents("a")} == {d.fingerprint for d in whole.documents("b")}
        assert source.weight == whole.weight

    def test_what_does_not_belong_together_is_refused(self, root: Path, tmp_path: Path) -> None:
        made = replace(plan(root), sources=[SourceSpec("books", "books.parquet", "messages")], part=(0, 3))
        prepare(made, tmp_path / "a")
        with pytest.raises(ValueError, match=r"books is not complete: part 1/3, 2/3 is in none"):
            merge([tmp_path / "a"], tmp_path)
        with pytest.raises(ValueError, match=r"part 0/3 of books is in .*a and in .*a"):
            merge([tmp_path / "a", tmp_path / "a"], tmp_path)
        prepare(replace(made, part=(1, 3), seed=4), tmp_path / "b")
        with pytest.raises(ValueError, match=r"do not belong together: seed was 0 and is 4"):
            merge([tmp_path / "a", tmp_path / "b"], tmp_path)

    def test_quotas_are_shared_out_whole(self, root: Path, tmp_path: Path) -> None:
        made = replace(plan(root), sources=[SourceSpec("books", "books.parquet", "messages", quota=2501)])
        quotas = [prepare(replace(made, part=(i, 2)), tmp_path / str(i)).sources["books"]["quota"] for i in range(2)]
        assert sorted(quotas) == [1250, 1251]


class TestOpening:
    def test_an_epoch_holds_every_document_as_often_as_it_says(self, root: Path, tmp_path: Path) -> None:
        made = plan(root, epochs={"talk": 2})
        manifest = prepare(made, tmp_path)
        sources = {source.name: source for source in open_mixture(tmp_path, made.tokenizer, 400)}
        assert sources["talk"].weight == 2 * manifest.sources["talk"]["supervised_tokens"]
        marks = [document.fingerprint for document in sources["talk"].documents("o")]
        assert len(marks) == 300
        assert {marks.count(mark) for mark in marks} == {2}
        assert [d.fingerprint for d in sources["talk"].documents("p")] != marks
        assert [d.fingerprint for d in sources["talk"].documents("o")] == marks

    def test_the_data_module_trains_on_a_mixture(self, mixture: Path) -> None:
        from smi.data import SMIDataModule

        tokenizer = load_tokenizer("compact")
        sources = open_mixture(mixture, tokenizer, 400)
        options: dict[str, Any] = {"max_length": 400, "pack_length": 400, "window": 32, "val_fraction": 0.1}
        data = SMIDataModule(tokenizer, sources, steps=6, seed=3, **options)
        batches = list(data.train_dataloader())
        assert len(batches) == 6
        again = SMIDataModule(tokenizer, sources, steps=6, seed=3, **options)
        assert all(
            a.input_ids.equal(b.input_ids) and a.labels.equal(b.labels)
            for a, b in zip(batches, again.train_dataloader(), strict=True)
        )
        data.teardown()
        again.teardown()
        assert data.val_dataloader()
        assert data.settings(1)["data"] == again.settings(1)["data"]


class TestReferenceFormat:
    """Parquet that the reference project compiled: ids and labels beside a manifest."""

    def write(self, folder: Path, change: Any = lambda rows: rows) -> Path:
        tokenizer = load_tokenizer("compact")
        rng = random.Random(5)
        compiled = [encode(to_stream(Conversation(talk(rng))), tokenizer) for _ in range(30)]
        rows = [
            (example.input_ids.tolist(), np.where(example.loss_mask, example.input_ids, -100).tolist())
            for example in compiled
        ]
        ids, labels = zip(*change(rows), strict=True)
        path = folder / "pilot.parquet"
        pq.write_table(pa.table({"input_ids": list(ids), "labels": list(labels)}), path, row_group_size=10)
        from hashlib import sha256

        manifest = {
            "output_sha256": sha256(path.read_bytes()).hexdigest(),
            "tokenizer": "someone/RWKV7",
            "tokenizer_revision": "abc",
        }
        path.with_suffix(".manifest.json").write_text(json.dumps(manifest))
        self.compiled = compiled
        return path

    def test_its_documents_are_those_that_were_compiled(self, tmp_path: Path) -> None:
        path = self.write(tmp_path)
        (source,) = open_mixture(path, load_tokenizer("compact"), 400)
        found = {document.example.input_ids.tobytes(): document.example for document in source.documents("o")}
        assert len(found) == 30
        for example in self.compiled:
            again = found[example.input_ids.tobytes()]
            assert np.array_equal(again.loss_mask, example.loss_mask)
            assert np.array_equal(again.block_types, example.block_types)

    def test_a_changed_file_is_refused_with_both_hashes(self, tmp_path: Path) -> None:
        path = self.write(tmp_path)
        path.write_bytes(path.read_bytes()[:-1] + b"2")
        with pytest.raises(ValueError, match=r"has the sha256 \w{64}, and pilot.manifest.json says \w{64}"):
            open_mixture(path, load_tokenizer("compact"), 400)

    def test_a_file_without_its_manifest_is_refused(self, tmp_path: Path) -> None:
        path = self.write(tmp_path)
        path.with_suffix(".manifest.json").unlink()
        with pytest.raises(ValueError, match=r"pilot.parquet.manifest.json is not there"):
            open_mixture(path, load_tokenizer("compact"), 400)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda rows: [([9999, *ids[1:]], labels) for ids, labels in rows], "is no document of the tokenizer"),
            (lambda rows: [(ids[1:], labels[1:]) for ids, labels in rows], "should begin with a structural token"),
            (lambda rows: [(ids, [*labels[:-1], 3]) for ids, labels in rows], "neither its ids nor -100"),
        ],
    )
    def test_ids_of_another_vocabulary_are_refused(self, tmp_path: Path, change: Any, message: str) -> None:
        (source,) = open_mixture(self.write(tmp_path, change), load_tokenizer("compact"), 400)
        with pytest.raises(ValueError, match=message):
            list(source.documents("o"))
