"""The hub, played by a directory: files read in place at a revision, and the mirror made of them."""

import hashlib
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from mirror import HUB
from mirror import SOURCES as PILOT

from smi.data import hub
from smi.data.adapters import adapter_for
from smi.data.hub import HubFile, download
from smi.data.mixture import prepare
from smi.data.plan import Plan
from smi.data.sources import SourceSpec, find_files, list_blocks, missing_columns, read_block, read_rows
from smi.tokenizer import load_tokenizer

SOURCES = list(PILOT.values())
COMPACT = load_tokenizer("compact")


class PlayedHub(DirFileSystem):
    """A directory as the hub's file system shows datasets; counts the bytes it gives, and breaks off where told."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), LocalFileSystem(), skip_instance_cache=True)
        self.root = root
        self.given: Counter[str] = Counter()
        self.breaks_after: int | None = None
        self.opened: list[str] = []

    def glob(self, path: str, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = super().glob(path, **kwargs)  # pyright: ignore[reportAssignmentType]
        for name, info in found.items():
            data = (self.root / name).read_bytes()
            # large files are kept in LFS, small ones in git
            lfs = {"sha256": hashlib.sha256(data).hexdigest()} if name.endswith((".parquet", ".json")) else None
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            found[name] = {"type": info["type"], "size": len(data), "lfs": lfs, "blob_id": blob}
        return found

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        self.opened.append(path)
        file = super().open(path, mode)
        read = file.read

        def counted(size: int = -1) -> bytes:
            if self.breaks_after is not None:
                size = min(size, self.breaks_after)
                self.breaks_after -= size
                if not size:
                    raise ConnectionError("the line went dead")
            data = read(size)
            self.given[path] += len(data)
            return data

        class File:
            read = staticmethod(counted)
            seek, tell, close = file.seek, file.tell, file.close

            def __enter__(self) -> "File":
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

        return File()


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlayedHub:
    """The hub with the six datasets of the pilot at their revisions."""
    root = tmp_path / "hub"
    for source in SOURCES:
        assert source.dataset
        shutil.copytree(HUB / source.dataset, root / "datasets" / f"{source.dataset}@{source.revision}")
    fs = PlayedHub(root)
    monkeypatch.setattr(hub, "filesystem", lambda: fs)
    return fs


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_the_hub_gives_the_rows_that_a_mirror_gives(source: SourceSpec, played: PlayedHub) -> None:
    columns = adapter_for(source).columns
    there = list(read_rows(source, "hf://", columns))
    here = list(read_rows(source, HUB, columns))
    assert len(there) == len(here) > 100
    for one, other in zip(there, here, strict=True):
        assert repr(one.value) == repr(other.value)
        assert one.where.row == other.where.row
    assert there[0].where.file == f"hf://datasets/{source.dataset}@{source.revision}/" + str(
        here[0].where.file
    ).removeprefix(f"{source.dataset}/")


def test_files_on_the_hub_are_read_as_far_as_they_are_asked_for(played: PlayedHub) -> None:
    (source,) = (source for source in SOURCES if source.name == "nemotron_agentic")
    (file,) = find_files(source, Path("hf://"))
    assert isinstance(file, HubFile)
    assert not played.opened
    assert (file.name, file.suffix, file.stat().st_size) == ("tool_calling.jsonl", ".jsonl", file.size)
    assert not missing_columns(file, adapter_for(source).needs)
    list_blocks(file)
    # a size is known without opening
    assert not played.opened
    (block,) = list_blocks(file)
    rows = read_block(block, "x")
    next(rows)
    assert played.given.total() <= hub.CHUNK_BYTES


def test_a_pattern_without_a_file_names_dataset_and_revision(played: PlayedHub) -> None:
    source = SourceSpec("a", "data/*.csv", "aya", dataset="CohereLabs/aya_dataset", revision="0" * 40)
    with pytest.raises(ValueError, match=rf"no file of CohereLabs/aya_dataset matches .* at revision {'0' * 40}"):
        find_files(source, "hf://")


def test_without_a_network_a_mirror_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nowhere:
        def glob(self, *_: Any, **__: Any) -> None:
            raise OSError("no route")

    monkeypatch.setattr(hub, "filesystem", Nowhere)
    with pytest.raises(
        ValueError, match=r"the hub cannot be asked for .*: no route\. Without a network, read from a mir"
    ):
        find_files(SOURCES[0], "hf://")


def test_local_sources_stand_beside_those_of_the_hub(tmp_path: Path, played: PlayedHub) -> None:
    (tmp_path / "mine.jsonl").write_text('{"inputs": "q", "targets": "a"}')
    source = SourceSpec("mine", str(tmp_path / "mine.jsonl"), "aya")
    assert find_files(source, "hf://") == [tmp_path / "mine.jsonl"]
    assert download([source], tmp_path / "mirror") == []


def test_a_mirror_holds_what_the_hub_has_with_hashes(tmp_path: Path, played: PlayedHub) -> None:
    mirror = tmp_path / "mirror"
    told: dict[str, int] = {}
    paths = download(SOURCES, mirror, lambda file, done: told.update({str(file): done}))
    assert len(paths) == 6
    for path in paths:
        assert path.read_bytes() == (HUB / path.relative_to(mirror)).read_bytes()
    assert sorted(told.values()) == sorted(path.stat().st_size for path in paths)
    record = json.loads((mirror / "mirror.json").read_text())
    for source in SOURCES:
        assert source.dataset
        assert record[source.dataset]["revision"] == source.revision
        ((name, digest),) = record[source.dataset]["files"].items()
        kind = digest.partition(":")[0]
        assert kind == ("git" if name.endswith("jsonl") else "sha256")
        assert digest == hub.digest_of(mirror / source.dataset / name, kind)
    assert not list(mirror.rglob("*.part"))
    # a second time nothing is fetched, and the mirror is read like any other
    played.opened.clear()
    assert download(SOURCES, mirror) == paths
    assert not played.opened
    assert len(list(read_rows(SOURCES[0], mirror))) == len(list(read_rows(SOURCES[0], HUB)))


def test_a_download_that_broke_off_goes_on_where_it_was(tmp_path: Path, played: PlayedHub) -> None:
    (source,) = (source for source in SOURCES if source.name == "hermes_func_calling")
    for attempt in range(3):
        played.breaks_after = 40_000
        with pytest.raises(ConnectionError):
            download([source], tmp_path / "mirror")
        (part,) = (tmp_path / "mirror").rglob("*.part")
        assert part.stat().st_size == 40_000 * (attempt + 1)
        assert source.dataset
        # nothing half there has the name of the file
        with pytest.raises(ValueError, match="no file matches"):
            find_files(source, tmp_path / "mirror")
    played.breaks_after = None
    (path,) = download([source], tmp_path / "mirror")
    assert played.given.total() == path.stat().st_size
    assert path.read_bytes() == (HUB / path.relative_to(tmp_path / "mirror")).read_bytes()


def test_a_file_that_was_changed_or_came_wrong_is_noticed(tmp_path: Path, played: PlayedHub) -> None:
    source = SOURCES[0]
    (path,) = download([source], tmp_path)
    good = path.read_bytes()
    path.write_bytes(bytes(len(good)))
    played.opened.clear()
    assert download([source], tmp_path) == [path]
    assert len(played.opened) == 1
    assert path.read_bytes() == good
    path.unlink()
    # a partial file with other bytes than the file's: its hash tells, and it is not kept
    part = path.with_name(f"{path.name}.{hashlib.sha256(good).hexdigest()[-12:]}.part")
    part.write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=r"came with the hash sha256:.* where the hub gives sha256:"):
        download([source], tmp_path)
    assert not part.exists()
    assert not path.exists()
    assert download([source], tmp_path)[0].read_bytes() == good


def test_a_dataset_of_a_new_revision_is_fetched_again(tmp_path: Path, played: PlayedHub) -> None:
    old = SOURCES[0]
    (path,) = download([old], tmp_path / "mirror")
    new = SourceSpec("new", old.files, old.adapter, dataset=old.dataset, revision="1" * 40)
    folder = played.root / "datasets" / f"{new.dataset}@{new.revision}"
    shutil.copytree(played.root / "datasets" / f"{old.dataset}@{old.revision}", folder)
    changed = folder / path.relative_to(tmp_path / "mirror" / str(old.dataset))
    changed.write_bytes(changed.read_bytes() + b" ")
    with pytest.raises(ValueError, match=f"at revision {old.revision}, not at {new.revision}"):
        find_files(new, tmp_path / "mirror")
    download([new], tmp_path / "mirror")
    assert path.read_bytes() == changed.read_bytes()
    assert find_files(new, tmp_path / "mirror") == [path]
    with pytest.raises(ValueError, match="not at"):
        find_files(old, tmp_path / "mirror")


def test_a_mixture_prepared_from_the_hub_holds_what_one_from_a_mirror_holds(tmp_path: Path, played: PlayedHub) -> None:
    made = Plan([source for source in SOURCES if source.name in ("aya", "nemotron_agentic")], COMPACT, HUB, 4096)
    here = prepare(made, tmp_path / "here", accept_shortfall=True)
    there = prepare(replace(made, root="hf://"), tmp_path / "there", accept_shortfall=True)
    assert there.shards == here.shards
    kinds = {name: file.keys() - {"file", "bytes"} for name, source in there.settings["sources"].items()
             for file in source["files"]}  # fmt: skip
    assert kinds == {"aya": {"sha256"}, "nemotron_agentic": {"git"}}
    # what the hub says of its files is compared as what is on the disk is
    changed = played.root / "datasets" / f"CohereLabs/aya_dataset@{made.sources[0].revision}" / "data"
    (file,) = changed.iterdir()
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(ValueError, match=r"sha256 was .* and is"):
        prepare(replace(made, root="hf://"), tmp_path / "there", accept_shortfall=True)
