"""Preparing a mixture: rows -> accepted examples in shards, the same bytes whatever happens on the way.

Workers compile stretches of rows; one writer takes their chunks in the order of the rows, leaves out duplicates,
counts, and ends each source at its quota. After every row group the progress is written down, so that a run that was
killed goes on from there. Rows in = accepted + rejected, by source, at every moment.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from smi.data.compiling import DIGEST_BYTES, RowCompiler, Stretch, stretches
from smi.data.contamination import HeldOut
from smi.data.dedupe import PERMUTATIONS, NearDuplicates
from smi.data.manifest import (
    FILE,
    Manifest,
    adapter_settings,
    check_shards,
    differences,
    merge,
    read_manifest,
    tokenizer_settings,
)
from smi.data.pipeline import SAMPLES
from smi.data.shards import SCHEMA, Spool, identities, write_shard, write_text
from smi.data.sources import Location, SourceSpec, file_name, find_files
from smi.data.workers import Inline, Workers
from smi.tokenizer import Tokenizer

PROGRESS = "progress.json"
KEYS = "progress.keys"
SPOOL = "progress.rows"


@dataclass
class Account:
    """What became of one source's rows; every count but `quota` and `shortfall` is of rows read so far."""

    quota: int | None = None
    """Supervised tokens wanted; None takes every row."""
    shortfall: int = 0
    """Supervised tokens that were missing to the quota when there were no more rows."""
    rows: int = 0
    accepted: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """The first rejections of each reason: file, row and detail."""

    def reject(self, reason: str, where: Location, detail: str) -> None:
        self.rejected[reason] += 1
        kept = self.samples.setdefault(reason, [])
        if len(kept) < SAMPLES:
            kept.append({"file": where.file, "row": where.row, "detail": detail})

    @property
    def full(self) -> bool:
        return self.quota is not None and self.supervised_tokens >= self.quota

    def to_dict(self) -> dict[str, Any]:
        """As plain values, in an order that does not depend on how the run went."""
        plain = {name: getattr(self, name) for name in ("quota", "shortfall", "rows", "accepted", "tokens")}
        return plain | {
            "supervised_tokens": self.supervised_tokens,
            "rejected": {reason: self.rejected[reason] for reason in sorted(self.rejected)},
            "samples": {reason: self.samples[reason] for reason in sorted(self.samples)},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Account:
        account = cls(**values)
        account.rejected = Counter(values["rejected"])
        return account


@dataclass(frozen=True)
class Plan:
    """A mixture to be made.

    Args:
        sources: in the order in which they are taken; the quota of each is what all parts together take from it.
        tokenizer: of the mixture.
        root: what file patterns are relative to; see `find_files`.
        max_length: tokens of a document; longer ones are rejected.
        dedupe: exact, normalised or near; near ones from `near_threshold` on, up to a share of `near_limit`.
        held_out: files with text that no row may repeat.
        seed: of the order of each source's blocks.
        part: (i, n): the i-th of n jobs that share the work, each with its share of rows and quotas.
        row_group_rows: rows of a row group, and of the work that a kill can cost.
        shard_rows: rows of a full shard.
        epochs: by source, how often an epoch of training goes through its rows; once where it is not named.
        compiler_type: makes the work of the workers.
    """

    sources: Sequence[SourceSpec]
    tokenizer: Tokenizer
    root: str | Path
    max_length: int
    dedupe: str = "exact"
    near_threshold: float = 0.8
    near_limit: float = 0.5
    held_out: Sequence[str] = ()
    seed: int = 0
    part: tuple[int, int] = (0, 1)
    row_group_rows: int = 1024
    shard_rows: int = 16384
    epochs: dict[str, int] = field(default_factory=dict)
    compiler_type: type[RowCompiler] = RowCompiler

    def compiler(self) -> RowCompiler:
        by_name = {source.name: source for source in self.sources}
        held_out = HeldOut.from_files(self.held_out) if self.held_out else None
        return self.compiler_type(by_name, self.root, self.tokenizer, self.max_length, self.dedupe, held_out)

    def settings(self) -> dict[str, Any]:
        """Everything that the result depends on, with the hash of every source file."""
        import smi

        sources: dict[str, Any] = {}
        held_out = identities([Path(file) for file in self.held_out])
        for source in self.sources:
            files = find_files(source, self.root)
            names = [file_name(file, self.root) for file in files]
            sources[source.name] = {
                "dataset": source.dataset,
                "revision": source.revision,
                "licence": source.licence,
                "columns": dict(source.columns),
                "filters": list(source.filters),
                "epochs": self.epochs.get(source.name, 1),
                "adapter": adapter_settings(source.adapter),
                "part": f"{self.part[0]}/{self.part[1]}",
                "quota": source.quota,
                "files": [{"file": name} | what for name, what in zip(names, identities(files), strict=True)],
            }
        return {
            "tokenizer": tokenizer_settings(self.tokenizer),
            "compile": {"max_length": self.max_length},
            "seed": self.seed,
            "row_group_rows": self.row_group_rows,
            "shard_rows": self.shard_rows,
            "duplicates": self._duplicates(),
            "held_out": [{"file": file} | what for file, what in zip(self.held_out, held_out, strict=True)],
            "versions": {"smi": smi.__version__, "pyarrow": pa.__version__, "numpy": np.__version__},
            "sources": sources,
        }

    def _duplicates(self) -> dict[str, Any]:
        near = {"threshold": self.near_threshold, "limit": self.near_limit} if self.dedupe == "near" else {}
        return {"by": self.dedupe} | near


def share(quota: int | None, part: tuple[int, int]) -> int | None:
    """What the i-th of n jobs takes of a quota; all of them together take it all."""
    i, n = part
    return None if quota is None else quota * (i + 1) // n - quota * i // n


class Progress(Protocol):
    """Told of every chunk: what became of the source that is being taken."""

    def __call__(self, source: str, account: Account) -> None: ...


class Shortfall(ValueError):
    """Sources ran dry before their quota, and that was not accepted."""


def prepare(
    plan: Plan,
    directory: Path,
    *,
    workers: int = 0,
    row_timeout: float = 30.0,
    accept_shortfall: bool = False,
    progress: Progress = lambda source, account: None,
    say: Callable[[str], None] = lambda text: None,
) -> Manifest:
    """Make the mixture of `plan` in `directory`, or go on making it.

    Args:
        workers: processes that compile; 0 compiles in this one, where a row that hangs hangs the run.
        row_timeout: seconds after which a worker is taken from a row.
        accept_shortfall: let sources run dry before their quota.
        progress, say: told how far things are.

    Raises:
        ValueError: settings that do not fit, and a directory that holds another mixture or something else.
        Shortfall: a source ran dry; nothing has to be done again once that is accepted.
        OSError: the disk is full, or the like; the same call goes on afterwards.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        say("reading and hashing the source files")
        settings = json.loads(json.dumps(plan.settings()))
        if (directory / FILE).exists():
            manifest = read_manifest(directory)
            _check_same(manifest.settings, settings, directory, "holds another mixture")
            check_shards(manifest, directory)
            _clean(directory)
            say(f"{directory} is complete already")
            return _accept(manifest, directory, accept_shortfall)
        writer = _Writer(plan, directory, settings, progress)
        try:
            if writer.started:
                say(f"going on after {writer.rows:,} rows")
            manifest = writer.run(workers, row_timeout)
        finally:
            writer.close()
        _accept(manifest, directory, accept_shortfall)
        write_text(directory / FILE, manifest.text())
        _clean(directory)
        return manifest


def join(parts: Sequence[Path], directory: Path, *, accept_shortfall: bool = False) -> Manifest:
    """Make one mixture in `directory` of those that several jobs made; see `merge`.

    Raises ValueError as `merge`, for shards that are not what their manifests say, and for a directory that holds
    another mixture; Shortfall as `prepare`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    manifest = merge(parts, directory)
    check_shards(manifest, directory)
    if (directory / FILE).exists():
        _check_same(read_manifest(directory).settings, manifest.settings, directory, "holds another mixture")
    _accept(manifest, directory, accept_shortfall)
    write_text(directory / FILE, manifest.text())
    return manifest


def _accept(manifest: Manifest, directory: Path, accepted: bool) -> Manifest:
    if manifest.shortfalls and not accepted:
        short = ", ".join(
            f"{name} has {manifest.sources[name]['supervised_tokens']:,} of {manifest.sources[name]['quota']:,}"
            for name in manifest.shortfalls
        )
        raise Shortfall(
            f"sources ran dry before their quota of supervised tokens: {short}. Lower the quotas in a new directory, "
            "or accept what there is with prepare.on_shortfall=accept: nothing in "
            f"{directory} has to be done again for that"
        )
    return manifest


def _check_same(then: dict[str, Any], now: dict[str, Any], directory: Path, what: str) -> None:
    if found := list(differences(then, now)):
        more = f"; and {len(found) - 10} more" if len(found) > 10 else ""
        raise ValueError(
            f"{directory} {what}: {'; '.join(found[:10])}{more}. "
            "Choose another directory with data.mixture=DIR, or go back to those settings"
        )


def _clean(directory: Path) -> None:
    for name in (PROGRESS, KEYS, SPOOL):
        (directory / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keeps a second run out of the directory while this one lives."""
    try:
        import fcntl
    except ImportError:  # no such thing on this system
        yield
        return
    folder = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise ValueError(f"another run is preparing a mixture in {directory}: wait for it, or stop it") from None
    try:
        yield
    finally:
        os.close(folder)


def _signature(key: bytes) -> np.ndarray:
    return np.frombuffer(key, np.uint32, offset=DIGEST_BYTES)


class _Writer:
    """The one that takes chunks in order. Everything it knows is on the disk after each row group."""

    def __init__(self, plan: Plan, directory: Path, settings: dict[str, Any], progress: Progress) -> None:
        self.plan = plan
        self.directory = directory
        self.settings = settings
        self.progress = progress
        state = self._load()
        self.started = bool(state)
        # where the next row is: source, stretch of it, row of that stretch's block
        self.source: int = state.get("source", 0)
        self.stretch: int = state.get("stretch", 0)
        self.row: int = state.get("row", 0)
        self.spooled: int = state.get("spooled", 0)
        self.shards: list[dict[str, Any]] = state.get("shards", [])
        self.accounts = {name: Account.from_dict(values) for name, values in state.get("accounts", {}).items()}
        for source in plan.sources:
            self.accounts.setdefault(source.name, Account(share(source.quota, plan.part)))
        self.spool = Spool(directory / SPOOL, state.get("spool_bytes", 0))
        self.keys_file = (directory / KEYS).open("ab")
        self.key_bytes = DIGEST_BYTES
        self.near: NearDuplicates | None = None
        if plan.dedupe == "near":
            self.near = NearDuplicates(plan.near_threshold, plan.near_limit)
            self.key_bytes += PERMUTATIONS * 4
        self.keys: set[bytes] = set()
        self._load_keys(state.get("keys", 0))
        self.new_keys: list[bytes] = []
        self.pending: list[pa.RecordBatch] = []
        self.collected = 0

    @property
    def rows(self) -> int:
        return sum(account.rows for account in self.accounts.values())

    def _load(self) -> dict[str, Any]:
        path = self.directory / PROGRESS
        if path.exists():
            try:
                written = json.loads(path.read_text(encoding="utf-8"))
                then, state = written["settings"], written["state"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} cannot be read: {error}") from error
            _check_same(then, self.settings, self.directory, "holds an unfinished mixture with other settings")
            return state
        ours = {PROGRESS, KEYS, SPOOL, f".{PROGRESS}.partial"}
        if others := sorted(file.name for file in self.directory.iterdir() if file.name not in ours):
            raise ValueError(
                f"{self.directory} holds {', '.join(others[:3])} and no mixture: choose an empty directory with "
                "data.mixture=DIR"
            )
        return {}

    def _load_keys(self, count: int) -> None:
        """Remember the accepted rows that a run before this one had."""
        self.keys_file.truncate(count * self.key_bytes)
        data = (self.directory / KEYS).read_bytes()
        if len(data) < count * self.key_bytes:
            raise ValueError(f"{self.directory / KEYS} is too short: it was changed by something else")
        for start in range(0, count * self.key_bytes, self.key_bytes):
            self._remember(data[start : start + self.key_bytes])
        if self.near is not None:
            self.near.removed = sum(account.rejected["near_duplicate"] for account in self.accounts.values())
            self.near.asked = count + self.near.removed

    def _twin(self, key: bytes) -> tuple[str, str] | None:
        """Why a row says nothing new: the reason, and the detail of it."""
        if key[:DIGEST_BYTES] in self.keys:
            return "duplicate", "the same conversation came before"
        if self.near is not None and (like := self.near.first_like(_signature(key))) is not None:
            return "near_duplicate", f"nearly the conversation of accepted row {like}"
        return None

    def _remember(self, key: bytes) -> None:
        if self.near is not None:
            self.near.add(_signature(key), len(self.keys))
        self.keys.add(key[:DIGEST_BYTES])

    def run(self, workers: int, row_timeout: float) -> Manifest:
        """Take everything that is left."""
        plan = self.plan
        if not self.started:
            self._save()
        # a run that was killed between a row group and what follows from it
        self._close_full_shard()
        left = list(plan.sources[self.source :])
        todo = {source.name: stretches(source, plan.root, plan.seed, plan.part) for source in left}

        def tasks() -> Iterator[tuple[Stretch, int]]:
            begun, stretch, row = self.source, self.stretch, self.row
            for index, source in enumerate(left, begun):
                for task in todo[source.name][stretch if index == begun else 0 :]:
                    here = index == begun and task.number == stretch
                    yield task, row if here else 0

        work = plan.compiler()
        pool = Workers(work, workers, row_timeout) if workers and any(todo.values()) else Inline(work)
        try:
            for task, chunk in pool.run(tasks(), self._wanted):
                while plan.sources[self.source].name != task.source:
                    self._end_source()
                if chunk is None:
                    self.stretch, self.row = task.number + 1, 0
                else:
                    self._take(task, chunk)
        finally:
            pool.close()
        while self.source < len(plan.sources):
            self._end_source()
        if self.near is not None:
            self.near.finish()
        return self._manifest()

    def _wanted(self, task: Stretch) -> bool:
        return not self.accounts[task.source].full

    def _take(self, task: Stretch, chunk: pa.RecordBatch) -> None:
        """Take the rows of a chunk, as far as the quota wants them."""
        account = self.accounts[task.source]
        file = file_name(task.block.path, self.plan.root)
        rows, reasons, keys, tokens, supervised = (
            chunk.column(name).to_pylist() for name in ("row", "reason", "key", "tokens", "supervised_tokens")
        )
        taken: list[int] = []
        for i, reason in enumerate(reasons):
            account.rows += 1
            self.stretch, self.row = task.number, rows[i] + 1
            if reason is not None:
                detail = chunk.column("detail")[i].as_py()
                account.reject(reason, Location(task.source, file, task.block, rows[i]), detail)
                continue
            if (twin := self._twin(keys[i])) is not None:
                account.reject(twin[0], Location(task.source, file, task.block, rows[i]), twin[1])
                continue
            self._remember(keys[i])
            self.new_keys.append(keys[i])
            account.accepted += 1
            account.tokens += tokens[i]
            account.supervised_tokens += supervised[i]
            taken.append(i)
            self.collected += 1
            if self.collected == self.plan.row_group_rows:
                self._collect(chunk, taken)
                taken = []
                self._commit()
                self._close_full_shard()
            if account.full:
                break
        self._collect(chunk, taken)
        self.progress(task.source, account)

    def _collect(self, chunk: pa.RecordBatch, taken: list[int]) -> None:
        if not taken:
            return
        whole = taken[-1] - taken[0] + 1 == len(taken)
        rows = chunk.slice(taken[0], len(taken)) if whole else chunk.take(pa.array(taken))
        source = pa.array([self.plan.sources[self.source].name] * len(taken))
        columns = [source if name == "source" else rows.column(name) for name in SCHEMA.names]
        self.pending.append(pa.record_batch(columns, schema=SCHEMA))

    def _commit(self) -> None:
        """Make the collected rows a row group, on the disk, and write down where we are."""
        if self.pending:
            # one piece, so that its bytes do not tell how the rows came
            self.spool.append(pa.concat_batches(self.pending))
            self.spooled += self.collected
            self.pending, self.collected = [], 0
        self._save()

    def _save(self) -> None:
        self.keys_file.write(b"".join(self.new_keys))
        self.keys_file.flush()
        os.fsync(self.keys_file.fileno())
        self.new_keys = []
        state = {
            "source": self.source,
            "stretch": self.stretch,
            "row": self.row,
            "spooled": self.spooled,
            "spool_bytes": self.spool.size,
            "keys": self.keys_file.tell() // self.key_bytes,
            "shards": self.shards,
            "accounts": {name: account.to_dict() for name, account in self.accounts.items()},
        }
        text = json.dumps({"settings": self.settings, "state": state}, ensure_ascii=False)
        write_text(self.directory / PROGRESS, text)

    def _close_full_shard(self) -> None:
        if self.spooled >= self.plan.shard_rows:
            self._close_shard()

    def _close_shard(self) -> None:
        name = self.plan.sources[self.source].name
        number = sum(shard["source"] == name for shard in self.shards)
        shard = write_shard(self.directory / f"{name}-{number:05d}.parquet", self.spool.row_groups())
        self.shards.append({"file": shard.pop("file"), "source": name, **shard})
        # the spool is cut back when the progress says so, not before: until then a rerun makes this shard again
        self.spooled = self.spool.size = 0
        self._save()
        self.spool.clear()

    def _end_source(self) -> None:
        account = self.accounts[self.plan.sources[self.source].name]
        if self.pending:
            self._commit()
        if self.spooled:
            self._close_shard()
        account.shortfall = 0 if account.quota is None else max(0, account.quota - account.supervised_tokens)
        self.source, self.stretch, self.row = self.source + 1, 0, 0
        self._save()

    def _manifest(self) -> Manifest:
        accounts = {name: self.accounts[name].to_dict() for name in self.settings["sources"]}
        return Manifest(self.settings, accounts, self.shards)

    def close(self) -> None:
        self.spool.close()
        self.keys_file.close()
