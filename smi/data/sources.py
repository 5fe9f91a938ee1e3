"""Where rows come from: files on disk, in a mirror or on the hub, and generators of conversations."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Protocol, TypeAlias, runtime_checkable

from smi.data import hub
from smi.data.readers import READERS, Block, File, column_names, list_blocks, parse_row, read_values
from smi.protocol.conversation import Conversation
from smi.protocol.stream import ProtocolError

__all__ = [
    "Block",
    "ConversationSource",
    "File",
    "Location",
    "Row",
    "Source",
    "SourceSpec",
    "file_name",
    "find_files",
    "list_blocks",
    "missing_columns",
    "parse_row",
    "read_block",
    "read_rows",
]


@dataclass(frozen=True)
class SourceSpec:
    """A source of rows in files.

    Args:
        name: what accounts and reports call it.
        files: a path or glob pattern (`**` allowed) or several; the suffix decides the format: .parquet, .jsonl,
            .json (one array), .arrow; or a directory that `datasets` saved. Absolute, or relative to the dataset
            where there is one, or to the root given to the reader.
        adapter: name of the format in `smi.data.adapters`, or `custom:package.module:function`.
        weight: share of the mixture, by supervised tokens, relative to the other sources' weights.
        quota: supervised tokens that an epoch takes from this source; its weight too where none is given.
        dataset: OWNER/NAME on the hub, and below the root of a mirror.
        revision: the full hash of the dataset's commit.
        licence: of the rows, for whoever uses what is made of them.
        columns: the adapter's name of a column -> its name in the files, where they differ.
        filters: conditions that a row must meet, such as `score >= 0.8`; see `smi.data.filters`.

    Raises:
        ValueError: a dataset without the full hash of a revision.
    """

    name: str
    files: str | Sequence[str]
    adapter: str
    weight: float | None = None
    quota: int | None = None
    dataset: str | None = None
    revision: str | None = None
    licence: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    filters: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.dataset is None:
            return
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", self.dataset) or ".." in self.dataset:
            raise ValueError(f"source {self.name!r}: a dataset is named OWNER/NAME, not {self.dataset!r}")
        if not re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            raise ValueError(
                f"source {self.name!r}: {self.dataset} needs a revision, the full hash of a commit (40 hex digits), "
                f"not {self.revision!r}: a branch or tag may hold other rows tomorrow"
            )
        for pattern in self.patterns:
            if PurePath(pattern).is_absolute() or ".." in PurePath(pattern).parts:
                raise ValueError(f"source {self.name!r}: {pattern!r} leads out of the dataset {self.dataset}")

    @property
    def patterns(self) -> Sequence[str]:
        return [self.files] if isinstance(self.files, str) else self.files


@runtime_checkable
class ConversationSource(Protocol):
    """A source that makes conversations itself, such as a synthetic world; it may be endless.

    Optional attributes `weight` and `quota` mean what they mean in `SourceSpec`.
    """

    @property
    def name(self) -> str:
        """What accounts and reports call it."""
        ...

    def conversations(self, epoch: int, held_out: bool) -> Iterable[Conversation]:
        """The conversations of one epoch, always the same ones; `held_out` ones are not among the others."""
        ...


Source: TypeAlias = SourceSpec | ConversationSource


@dataclass(frozen=True, slots=True)
class Location:
    """Where a row was found. `file` is empty for a source that makes its rows itself."""

    source: str
    file: str
    block: Block | None
    offset: int

    @property
    def row(self) -> int:
        """Number of the row in its file, from 0; blank lines are not rows."""
        return self.offset + (self.block.first_row() if self.block else 0)

    def __str__(self) -> str:
        return f"{self.source}: {self.file} row {self.row}" if self.file else f"{self.source}: row {self.row}"


@dataclass(frozen=True, slots=True)
class Row:
    """One raw row, or why it could not be read."""

    where: Location
    value: dict[str, Any] | ProtocolError


def find_files(spec: SourceSpec, root: str | Path = ".", *, held_out: bool = False) -> list[File]:
    """The files of a source: patterns in the order given, their matches sorted, each file once.

    Args:
        spec: the source.
        root: directory that patterns are relative to, a mirror where the source has a dataset; or `hf://`, where
            datasets are read on the hub itself, and other patterns are relative to the working directory.
        held_out: the rows are to measure with. To train on, evaluation and test splits are refused by their names.

    Raises:
        ValueError: a pattern that matches nothing, a file of unknown format, an evaluation or test split, a mirror
            of another revision; each named.
    """
    found: dict[File, None] = {}
    for pattern in spec.patterns:
        if not held_out:
            _refuse_split(spec, PurePath(pattern), root)
        for file in _matches(spec, pattern, root):
            if file.suffix not in READERS:
                known = ", ".join(READERS)
                raise ValueError(f"source {spec.name!r}: {file} is of no known format; known are {known}")
            if not held_out:
                _refuse_split(spec, PurePath(file.path) if isinstance(file, hub.HubFile) else file, root)
            found[file] = None
    if not found:
        raise ValueError(f"source {spec.name!r} names no files")
    return list(found)


def _matches(spec: SourceSpec, pattern: str, root: str | Path) -> list[File]:
    if hub.is_hub(root) and spec.dataset is not None:
        assert spec.revision is not None
        found: list[File] = [*hub.list_files(spec.dataset, spec.revision, pattern)]
        if not found:
            raise ValueError(
                f"source {spec.name!r}: no file of {spec.dataset} matches {pattern!r} at revision {spec.revision}"
            )
        return found
    folder = Path("." if hub.is_hub(root) else root, spec.dataset or "")
    if spec.dataset is not None:
        _check_revision(spec, root)
    path = folder / pattern
    # a plain path may hold characters that glob would read as a pattern
    matches = [path] if path.exists() else [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    files = [file for match in matches for file in (_saved_files(match) if match.is_dir() else [match])]
    if not files:
        raise ValueError(
            f"source {spec.name!r}: no file matches {pattern!r} under {folder.absolute()}; "
            "check the spelling, and the root that patterns are relative to"
        )
    return [*files]


def _check_revision(spec: SourceSpec, root: str | Path) -> None:
    """A mirror says of which revision its files are, where it was made by `hub.download`."""
    assert spec.dataset is not None
    there = hub.read_record(root).get(spec.dataset, {}).get("revision", spec.revision)
    if there != spec.revision:
        raise ValueError(
            f"source {spec.name!r}: the mirror {root} holds {spec.dataset} at revision {there}, not at "
            f"{spec.revision}; download it again"
        )


def _saved_files(folder: Path) -> list[Path]:
    """The files of a directory that `datasets` saved, in their order; none for any other directory."""
    if (folder / "dataset_dict.json").is_file():
        raise ValueError(f"{folder} holds several splits: name the one to read, as in {folder / 'train'}")
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / file["filename"] for file in state["_data_files"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is not a directory that datasets saved: state.json: {error}") from error


_HELD_OUT = frozenset(("dev", "eval", "evals", "evaluation", "test", "testing", "val", "valid", "validation"))


def _refuse_split(spec: SourceSpec, path: PurePath, root: str | Path) -> None:
    """Refuse a path that is named after an evaluation or test split.

    A name is split into its words, runs of letters: "latest" and "contest" pass, "test_sft-00000" does not. Of a
    folder above the root nothing is asked; of an absolute path, the file and the folder that holds it.
    """
    top = Path("." if hub.is_hub(root) else root, spec.dataset or "")
    if path.is_relative_to(top) and not hub.is_hub(root):
        path = path.relative_to(top)
    if path.is_absolute():
        *folders, name = path.parts[-2:]
        words = {folder.lower() for folder in folders}
    else:
        *folders, name = path.parts or ("",)
        words = {word for folder in folders for word in _words(folder)}
    stem = name.removesuffix(path.suffix)
    found = (words | set(_words(stem))) & _HELD_OUT
    if found or re.search(r"(held|hold)[^a-z]?out", stem.lower()):
        raise ValueError(
            f"source {spec.name!r}: {str(path)!r} is named like an evaluation or test split "
            f"({', '.join(sorted(found)) or 'held out'}); these are not trained on. If it is training data, rename it"
        )


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+", name.lower())


def missing_columns(path: File, needs: Sequence[Sequence[str]]) -> tuple[str, list[str]] | None:
    """Check the columns of a Parquet or Arrow file without reading rows; other formats name theirs row by row.

    Args:
        path: the file.
        needs: groups of columns, of which the file must have at least one each.

    Returns:
        None where all is well, else (what is missing, the columns there are).
    """
    names = column_names(path)
    if names is None:
        return None
    lacking = [" or ".join(group) for group in needs if not set(group) & set(names)]
    return (", ".join(lacking), names) if lacking else None


def file_name(path: File, root: str | Path = ".") -> str:
    """What accounts and reports call a file: relative to the root where it lies under it."""
    if isinstance(path, Path) and path.is_relative_to(root):
        return path.relative_to(root).as_posix()
    return path.as_posix()


def read_block(
    block: Block, source: str, root: str | Path = ".", columns: Sequence[str] | None = None
) -> Iterator[Row]:
    """The rows of a block, in file order.

    A row that cannot be read (not JSON, invalid UTF-8, not an object, too large) comes out as its error, and
    the rows after it are read on.

    Args:
        block: from `list_blocks`.
        source: name that each row carries.
        root: file names are given relative to it, where they lie under it.
        columns: read only these columns of Parquet and Arrow, as far as the file has them; None reads all.

    Raises:
        ValueError: the file as a whole is damaged; it is named, and the row group.
    """
    file = file_name(block.path, root)
    for offset, value in enumerate(read_values(block, columns)):
        yield Row(Location(source, file, block, offset), value)


def read_rows(spec: SourceSpec, root: str | Path = ".", columns: Sequence[str] | None = None) -> Iterator[Row]:
    """All rows of a source, file by file, in file order. Arguments and errors as in `read_block`."""
    for path in find_files(spec, root):
        for block in list_blocks(path):
            yield from read_block(block, spec.name, root, columns)
