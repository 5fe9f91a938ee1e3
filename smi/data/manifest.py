"""What a prepared mixture is, as JSON: written last, checked at every open. A directory without it is no mixture."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smi.data.adapters import get_adapter
from smi.data.pipeline import SAMPLES
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


def adapter_settings(name: str) -> dict[str, Any]:
    """What is recorded of an adapter: its name, and the hash of the file that it is written in."""
    convert = get_adapter(name).convert
    file = inspect.getsourcefile(getattr(convert, "function", convert))
    return {"name": name, "source_sha256": identities([Path(file)])[0]["sha256"] if file else None}


def differences(then: Any, now: Any, place: str = "") -> Iterator[str]:
    """What differs between two settings, with both values. The vocabulary is compared by its hash, not by its name."""
    if place == "tokenizer.name":
        return
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


def check_same(then: dict[str, Any], now: dict[str, Any], directory: Path, what: str) -> None:
    """Refuse to go on with other settings. Raises ValueError that says what `directory` has, and both values."""
    if found := list(differences(then, now)):
        more = f"; and {len(found) - 10} more" if len(found) > 10 else ""
        raise ValueError(
            f"{directory} {what}: {'; '.join(found[:10])}{more}. "
            "Choose another directory with data.mixture=DIR, or go back to those settings"
        )


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
    if found := list(differences(then, now)):
        raise ValueError(
            f"the mixture in {directory} was not compiled for this run: {'; '.join(found)}. "
            "Use the settings it was prepared with, or prepare another one"
        )


def check_files(manifest: Manifest, root: Path) -> None:
    """Hold the source files below `root` against those that were prepared; ones that are not there are passed over.

    Raises ValueError that names each one whose content has changed.
    """
    recorded = [file for source in manifest.settings["sources"].values() for file in source["files"]]
    present = [file for file in recorded if (root / file["file"]).is_file()]
    changed = [
        f"{file['file']} has the sha256 {found['sha256']}, and {file['sha256']} was prepared"
        for file, found in zip(present, identities([root / file["file"] for file in present]), strict=True)
        if found["sha256"] != file["sha256"]
    ]
    if changed:
        raise ValueError(
            f"source files in {root} are not those of the mixture: {'; '.join(changed)}. "
            "Prepare a new mixture, or set data.mirror=null to train on what was prepared"
        )


def merge(directories: Sequence[Path], target: Path) -> Manifest:
    """The mixture that several jobs made together, as a manifest for `target`; reads nothing but manifests.

    Shards stay where they are. Sources may come from a job each, or from the parts of one; a duplicate that two parts
    of a source, or two sources, have in common stays in both.

    Raises ValueError for mixtures that were not made alike, a source that is there twice, and parts that are missing.
    """
    manifests = [(directory, read_manifest(directory)) for directory in directories]
    if not manifests:
        raise ValueError("there is nothing to merge: name the directories of finished mixtures")
    head = _common(manifests[0][1])
    parts: dict[str, dict[str, tuple[Path, dict[str, Any]]]] = {}
    sources: dict[str, Any] = {}
    accounts: dict[str, Any] = {}
    shards: list[dict[str, Any]] = []
    for directory, manifest in manifests:
        if found := list(differences(head, _common(manifest))):
            raise ValueError(f"{manifests[0][0]} and {directory} do not belong together: {'; '.join(found)}")
        for name, source in manifest.settings["sources"].items():
            known = parts.setdefault(name, {})
            if source["part"] in known:
                raise ValueError(f"part {source['part']} of {name} is in {known[source['part']][0]} and in {directory}")
            known[source["part"]] = (directory, manifest.sources[name])
            whole = {key: value for key, value in source.items() if key != "part"}
            if found := list(differences(sources.setdefault(name, whole), whole)):
                raise ValueError(f"{name} in {directory} is not like its other parts: {'; '.join(found)}")
        for shard in manifest.shards:
            file = Path(os.path.relpath(directory / shard["file"], target)).as_posix()
            shards.append(shard | {"file": file})
    for name, known in parts.items():
        count = int(next(iter(known)).split("/")[1])
        if missing := [part for i in range(count) if (part := f"{i}/{count}") not in known]:
            raise ValueError(f"{name} is not complete: part {', '.join(missing)} is in none of the directories")
        sources[name] = sources[name] | {"part": f"0/1 in {count} parts"}
        accounts[name] = _sum([account for _, account in known.values()], sources[name]["quota"])
    return Manifest(head | {"sources": sources}, accounts, shards)


def _common(manifest: Manifest) -> dict[str, Any]:
    return {key: value for key, value in manifest.settings.items() if key != "sources"}


def _sum(accounts: list[dict[str, Any]], quota: int | None) -> dict[str, Any]:
    whole = {name: sum(a[name] for a in accounts) for name in ("rows", "accepted", "tokens", "supervised_tokens")}
    reasons = sorted({reason for account in accounts for reason in account["rejected"]})
    samples = {r: [s for account in accounts for s in account["samples"].get(r, [])][:SAMPLES] for r in reasons}
    shortfall = 0 if quota is None else max(0, quota - whole["supervised_tokens"])
    rejected = {reason: sum(account["rejected"].get(reason, 0) for account in accounts) for reason in reasons}
    return {"quota": quota, "shortfall": shortfall} | whole | {"rejected": rejected, "samples": samples}
