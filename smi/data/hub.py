"""Datasets on the Hugging Face hub: files read in place at a pinned revision, and a mirror of them on disk.

A mirror holds DIR/OWNER/NAME/..., the files as the hub has them, and `mirror.json`, which says for each dataset of
which revision they are, with the hash of every file.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from smi.data.sources import SourceSpec

RECORD = "mirror.json"
# what one request asks for: large enough that waiting for the answer does not count
CHUNK_BYTES = 8 << 20


def is_hub(root: str | Path) -> bool:
    """Whether a root is the hub itself, `hf://`; also where `Path` has taken a slash from it."""
    return str(root).rstrip("/") == "hf:"


def filesystem() -> AbstractFileSystem:
    """The hub's file system; paths in it are `datasets/OWNER/NAME@REVISION/FILE`."""
    # imported here: it takes longer than everything else in this package
    from huggingface_hub import HfFileSystem

    return HfFileSystem()


@dataclass(frozen=True, order=True)
class HubFile:
    """A file of a dataset at a pinned revision, read as far as it is asked for.

    It answers the questions that are asked of a `Path` here, so that readers need not tell them apart.

    Args:
        dataset: OWNER/NAME.
        revision: the full hash of a commit.
        path: within the dataset.
        size: in bytes.
        digest: `sha256:...`, or `git:...` for the small files that the hub keeps in git itself.
    """

    dataset: str
    revision: str
    path: str
    size: int = field(compare=False)
    digest: str = field(compare=False)

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.path).suffix

    @property
    def parent(self) -> PurePosixPath:
        return PurePosixPath(self.path).parent

    def as_posix(self) -> str:
        return f"hf://datasets/{self.dataset}@{self.revision}/{self.path}"

    def __str__(self) -> str:
        return self.as_posix()

    def is_relative_to(self, root: str | Path) -> bool:
        return False

    def stat(self) -> SimpleNamespace:
        return SimpleNamespace(st_size=self.size)

    def open(self, mode: str = "rb") -> BinaryIO:
        """The file, to read and seek in.

        Raises:
            ValueError: it cannot be reached; named.
        """
        assert mode == "rb"
        return io.BufferedReader(_Raw(self._reach()), CHUNK_BYTES)  # pyright: ignore[reportArgumentType]

    def _reach(self) -> BinaryIO:
        try:
            place = self.as_posix().removeprefix("hf://")
            return filesystem().open(place, "rb", block_size=CHUNK_BYTES)  # pyright: ignore[reportReturnType]
        except OSError as error:
            raise ValueError(f"{self} cannot be read: {error}") from error


class _Raw(io.RawIOBase):
    """A file of fsspec as what Python's own buffering expects: lines are cut there, in C."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def close(self) -> None:
        if not self.closed:
            self.file.close()
        super().close()


def list_files(dataset: str, revision: str, pattern: str) -> list[HubFile]:
    """The files of a dataset at a revision that match a glob pattern, sorted.

    Raises:
        ValueError: the hub cannot be reached, or has no such dataset or revision.
    """
    top = f"datasets/{dataset}@{revision}/"
    try:
        found: dict[str, dict[str, Any]] = filesystem().glob(top + pattern, detail=True)  # pyright: ignore
    except FileNotFoundError:
        found = {}
    except OSError as error:
        raise ValueError(
            f"the hub cannot be asked for {dataset} at {revision}: {error}. Without a network, read from a mirror"
        ) from error
    return sorted(
        HubFile(dataset, revision, name.lstrip("/").removeprefix(top), info["size"], _digest(info))
        for name, info in found.items()
        if info["type"] == "file"
    )


def _digest(info: dict[str, Any]) -> str:
    lfs = info.get("lfs")
    return f"sha256:{lfs['sha256']}" if lfs else f"git:{info['blob_id']}"


def digest_of(path: Path, kind: str = "sha256") -> str:
    """The digest of a file on disk: `sha256:...`, or `git:...` as git names a blob."""
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
    return f"{kind}:{digest.hexdigest()}"


def download(
    sources: Iterable[SourceSpec],
    mirror: str | Path,
    progress: Callable[[HubFile, int], None] = lambda file, done: None,
) -> list[Path]:
    """Bring the files of hub sources into a mirror, each once.

    A file that is here with the hash that the hub gives for it is not fetched again; one that was interrupted goes
    on where it was. A file gets its name when its bytes have their hash, and is recorded then.

    Args:
        sources: those without a dataset are passed over.
        mirror: directory of the mirror; made if it is not there.
        progress: told of each file and how many of its bytes are here.

    Returns:
        The files, in the order of the sources.

    Raises:
        ValueError: no file matches a pattern, the hub cannot be reached, a file has not the hash it should have.
        OSError: the disk is full, or the like; the same call goes on afterwards.
    """
    from smi.data.sources import find_files

    here: list[Path] = []
    for source in sources:
        if source.dataset is None:
            continue
        folder = Path(mirror, source.dataset)
        record = read_record(mirror).get(source.dataset, {})
        files: dict[str, str] = record.get("files", {}) if record.get("revision") == source.revision else {}
        for file in find_files(source, "hf://"):
            assert isinstance(file, HubFile)
            target = folder / file.path
            if not (target.is_file() and target.stat().st_size == file.size and _hash(target, file) == file.digest):
                _fetch(file, target, progress)
            progress(file, file.size)
            if files.get(file.path) != file.digest:
                files[file.path] = file.digest
                _write_record(mirror, source.dataset, source.revision, files)
            here.append(target)
    return here


def read_record(mirror: str | Path) -> dict[str, Any]:
    """What `mirror.json` says: dataset -> {"revision", "files": {path: digest}}; empty where there is none.

    Raises:
        ValueError: it cannot be read.
    """
    path = Path(mirror, RECORD)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; delete it to have the files checked again") from error


def _hash(path: Path, file: HubFile) -> str:
    """The digest of what is on the disk, of the kind that the hub gives."""
    return digest_of(path, file.digest.partition(":")[0])


def _fetch(file: HubFile, target: Path, progress: Callable[[HubFile, int], None]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # the hash in its name: what is left of another version is never gone on with
    part = target.with_name(f"{target.name}.{file.digest[-12:]}.part")
    done = part.stat().st_size if part.exists() else 0
    with file._reach() as remote, part.open("ab") as local:
        if done > file.size:
            local.truncate(done := 0)
        remote.seek(done)
        while done < file.size and (piece := remote.read(min(CHUNK_BYTES, file.size - done))):
            local.write(piece)
            done += len(piece)
            progress(file, done)
        local.flush()
        os.fsync(local.fileno())
    if done < file.size:
        raise ValueError(f"{file} ended after {done:,} of {file.size:,} bytes; the same command goes on from there")
    if (found := _hash(part, file)) != file.digest:
        part.unlink()
        raise ValueError(f"{file} came with the hash {found} where the hub gives {file.digest}; fetch it again")
    part.replace(target)


def _write_record(mirror: str | Path, dataset: str, revision: str | None, files: dict[str, str]) -> None:
    path = Path(mirror, RECORD)
    record = read_record(mirror) | {dataset: {"revision": revision, "files": dict(sorted(files.items()))}}
    partial = path.with_name(f".{RECORD}.part")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(record, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
