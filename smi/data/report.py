"""What is in a mixture, for people: `report.html` and its plots, written beside the manifest.

Made from the manifest and one pass over the shards, so that the same mixture has the same report; no part of the
mixture, and nothing reads it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from smi.data.manifest import Manifest
from smi.data.packing import pack_lengths
from smi.protocol.tokens import BlockType

REPORT = "report.html"

# what JSON adds to what is said in `messages_json`: escapes, keys, and the roles and types behind some of them
_FRAME = r'\\.|"(role|type)":"[a-z]+"|"[A-Za-z_]+":'
_CODE_POINTS = 0x110000


@dataclass
class Contents:
    """What the rows of one source hold.

    lengths: int64 [longest + 1], how many rows have that many tokens.
    context, supervised: int64 [block types], tokens of each type that are not targets, and that are.
    scripts: letters of the conversations, by script, the most frequent first.
    """

    lengths: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    context: np.ndarray = field(default_factory=lambda: np.zeros(len(BlockType), np.int64))
    supervised: np.ndarray = field(default_factory=lambda: np.zeros(len(BlockType), np.int64))
    scripts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Packing:
    """What packing makes of an epoch: `packs` of `capacity` tokens, and the share of them that is filled."""

    capacity: int
    packs: int
    fill: float


def write_report(manifest: Manifest, directory: Path, pack_length: int) -> Path:
    """Write the report of the mixture in `directory`, and its plots as PNG files beside it.

    Args:
        pack_length: tokens of a pack in training.

    Returns:
        the page, which needs no other file.
    """
    from smi.data.report_page import page
    from smi.data.report_plots import plots
    from smi.data.shards import write_bytes

    contents = {name: _read(manifest, directory, name) for name in manifest.sources}
    packing = epoch_packing(manifest, contents, pack_length)
    images = plots(manifest, contents)
    for name, image in images.items():
        write_bytes(directory / f"{name}.png", image)
    # the page comes last: where it is, the plots are
    write_bytes(directory / REPORT, page(manifest, contents, packing, images).encode())
    return directory / REPORT


def epoch_packing(manifest: Manifest, contents: Mapping[str, Contents], capacity: int) -> Packing | None:
    """How an epoch of a mixture packs; None where it has rows that are longer than a pack, or none at all."""
    longest = max((content.lengths.size for content in contents.values()), default=1)
    counts = np.zeros(longest, np.int64)
    for name, content in contents.items():
        counts[: content.lengths.size] += manifest.settings["sources"][name]["epochs"] * content.lengths
    lengths = np.repeat(np.arange(longest), counts)
    if not lengths.size or lengths[-1] > capacity:
        return None
    packs = len(pack_lengths(lengths, capacity))
    return Packing(capacity, packs, float(lengths.sum() / (packs * capacity)))


def _read(manifest: Manifest, directory: Path, source: str) -> Contents:
    """One pass over the shards of a source, a row group at a time."""
    found = Contents()
    points = np.zeros(_CODE_POINTS, np.int64)
    for rows in _row_groups(manifest, directory, source):
        lengths = np.bincount(rows.column("tokens").to_numpy(), minlength=found.lengths.size)
        lengths[: found.lengths.size] += found.lengths
        found.lengths = lengths
        blocks = rows.column("blocks").flatten()
        types, tokens = (blocks.field(name).to_numpy() for name in ("type", "tokens"))
        target = blocks.field("supervised").to_numpy(zero_copy_only=False)
        for counts, chosen in ((found.supervised, target), (found.context, ~target)):
            np.add.at(counts, types[chosen], tokens[chosen].astype(np.int64))
        points += np.bincount(_code_points(rows.column("messages_json")), minlength=_CODE_POINTS)
    scripts: dict[str, int] = {}
    for point in np.flatnonzero(points).tolist():
        if (name := script(chr(point))) is not None:
            scripts[name] = scripts.get(name, 0) + int(points[point])
    found.scripts = dict(sorted(scripts.items(), key=lambda item: (-item[1], item[0])))
    return found


def _row_groups(manifest: Manifest, directory: Path, source: str) -> Iterator[pa.RecordBatch]:
    for shard in manifest.shards:
        if shard["source"] != source:
            continue
        with pq.ParquetFile(directory / shard["file"]) as file:
            for group in range(file.num_row_groups):
                rows = file.read_row_group(group, columns=["tokens", "blocks", "messages_json"], use_threads=False)
                yield from rows.combine_chunks().to_batches()


def _code_points(talks: pa.Array) -> np.ndarray:
    """The characters of what is said; uint32 [characters]."""
    said = pc.replace_substring_regex(talks, _FRAME, " ")  # pyright: ignore[reportAttributeAccessIssue]
    return np.frombuffer("".join(said.to_pylist()).encode("utf-32-le"), np.uint32)


# scripts whose name is not the first word of their letters' names
_SCRIPTS = {"CJK": "Han", "KANGXI": "Han", "FULLWIDTH": "Latin", "HALFWIDTH": "Katakana", "MICRO": "Greek"}
# letters that belong to no one script: mathematical alphabets, ordinals, modifiers
_COMMON = {
    "MATHEMATICAL",
    "DOUBLE-STRUCK",
    "SCRIPT",
    "BLACK-LETTER",
    "FEMININE",
    "MASCULINE",
    "MODIFIER",
    "INFORMATION",
}


@cache
def script(character: str) -> str | None:
    """The script of a letter, by the name that Unicode gives it; None for what is no letter of one script."""
    if not unicodedata.category(character).startswith("L"):
        return None
    word = unicodedata.name(character, "").partition(" ")[0]
    return None if not word or word in _COMMON else _SCRIPTS.get(word, word.capitalize())


def totals(manifest: Manifest, name: str) -> int:
    """Sum of one figure of all accounts."""
    return sum(account[name] for account in manifest.sources.values())


def rejections(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Rows left out: reason -> source -> how many; the most frequent reason first."""
    found: dict[str, dict[str, int]] = {}
    for source, account in manifest.sources.items():
        for reason, count in account["rejected"].items():
            found.setdefault(reason, {})[source] = count
    return dict(sorted(found.items(), key=lambda item: (-sum(item[1].values()), item[0])))


def samples(manifest: Manifest, reason: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(source, file and row and detail) of the rejections of a reason that were kept."""
    for source, account in manifest.sources.items():
        for sample in account["samples"].get(reason, []):
            yield source, sample
