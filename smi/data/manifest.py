"""What a prepared mixture is, as JSON: written last, checked at every open. A directory without it is no mixture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smi.data.shards import identities
from smi.tokenizer import Tokenizer

FILE = "manifest.json"
FORMAT = "smi-mixture"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """The content of a `manifest.json`; plain JSON values throughout.

    settings: everything that the mixture depends on: tokenizer, compile options, seed, sources with the hashes of
        their files, versions of the software. Equal settings give equal bytes.
    sources: what became of each source's rows (`Account.to_dict`), its quota and what was short of it.
    shards: file (relative to the manifest), source, rows, tokens, supervised_tokens, bytes and sha256 of each.
    """

    settings: dict[str, Any]
    sources: dict[str, dict[str, Any]]
    shards: list[dict[str, Any]]

    def text(self) -> str:
        """The file's content; the same for equal manifests."""
        totals = {name: sum(s[name] for s in self.shards) for name in ("rows", "tokens", "supervised_tokens", "bytes")}
        content = {
            "format": FORMAT,
            "version": VERSION,
            "totals": totals,
            "settings": self.settings,
            "sources": self.sources,
            "shards": self.shards,
        }
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

    @property
    def shortfalls(self) -> dict[str, int]:
        """Supervised tokens that sources are short of their quota."""
        return {name: account["shortfall"] for name, account in self.sources.items() if account["shortfall"]}


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a mixture, without a look at the shards.

    Raises ValueError where there is none, or none that this version reads.
    """
    path = directory / FILE
    if not path.is_file():
        state = "its preparation is not finished" if (directory / "progress.json").is_file() else "nothing is prepared"
        raise ValueError(f"{directory} is no mixture: it has no {FILE}, {state}; python -m smi.prepare makes one")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content["format"], content["version"]
        if found != (FORMAT, VERSION):
            raise ValueError(f"it is of format {found[0]} {found[1]}, and this version reads {FORMAT} {VERSION}")
        return Manifest(content["settings"], content["sources"], content["shards"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def tokenizer_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """What is recorded of a tokenizer, and compared when a mixture is opened."""
    return {
        "name": tokenizer.name,
        "vocabulary_sha256": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "structural_ids": tokenizer.structural.to_dict(),
    }


def differences(then: Any, now: Any, place: str = "") -> Iterator[str]:
    """What differs between two settings, with both values."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*then, *now)):
            yield from differences(then.get(key), now.get(key), f"{place}.{key}" if place else key)
    elif _is_list(then) and _is_list(now) and len(then) == len(now) and any(isinstance(item, Mapping) for item in then):
        for index, (old, new) in enumerate(zip(then, now, strict=True)):
            name = new.get("file", index) if isinstance(new, Mapping) else index
            yield from differences(old, new, f"{place}[{name}]")
    elif then != now:
        yield f"{place} was {_short(then)} and is {_short(now)}"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:97]}..."


def check_shards(manifest: Manifest, directory: Path) -> None:
    """Hash every shard. Raises ValueError that names each one that is not what the manifest says."""
    problems: list[str] = []
    present: list[dict[str, Any]] = []
    for shard in manifest.shards:
        path = directory / shard["file"]
        if path.is_file():
            present.append(shard)
        else:
            problems.append(f"{path} is not there")
    for shard, found in zip(present, identities([directory / shard["file"] for shard in present]), strict=True):
        for what, value in found.items():
            if shard[what] != value:
                problems.append(f"{shard['file']} has {what} {value}, and the manifest says {shard[what]}")
                break
    if problems:
        raise ValueError(
            f"the mixture in {directory} is damaged: {'; '.join(problems)}. Restore it, or prepare it anew elsewhere"
        )


def check_fit(manifest: Manifest, directory: Path, tokenizer: Tokenizer, compile_options: Mapping[str, Any]) -> None:
    """Refuse a mixture that was not compiled as this run would. Raises ValueError with both values."""
    then = {key: manifest.settings[key] for key in ("tokenizer", "compile")}
    now = {"tokenizer": tokenizer_settings(tokenizer), "compile": dict(compile_options)}
    # directories are called what people like; the vocabulary is compared by its hash
    then["tokenizer"] = {key: value for key, value in then["tokenizer"].items() if key != "name"}
    del now["tokenizer"]["name"]
    if found := list(differences(then, now)):
        raise ValueError(
            f"the mixture in {directory} was not compiled for this run: {'; '.join(found)}. "
            "Use the settings it was prepared with, or prepare another one"
        )
