"""The one that takes the workers' chunks in order, and makes a mixture of them that survives being killed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from smi.data.compiling import DIGEST_BYTES, Stretch, stretches
from smi.data.dedupe import PERMUTATIONS, NearDuplicates
from smi.data.manifest import Manifest, check_same
from smi.data.plan import Account, Plan, share
from smi.data.shards import SCHEMA, ShardFile, Spool, write_text
from smi.data.sources import Location, file_name
from smi.data.workers import Inline, Workers

PROGRESS = "progress.json"
KEYS = "progress.keys"
SPOOL = "progress.rows"


class Progress(Protocol):
    """Told of every chunk: what became of the source that is being taken."""

    def __call__(self, source: str, account: Account) -> None: ...


def _signature(key: bytes) -> np.ndarray:
    return np.frombuffer(key, np.uint32, offset=DIGEST_BYTES)


class Writer:
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
        # the rows of the spool as a shard; made of the spool by a run that goes on
        self.shard: ShardFile | None = None
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
            check_same(then, self.settings, self.directory, "holds an unfinished mixture with other settings")
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
            rows = pa.concat_batches(self.pending)
            shard = self._open_shard()
            self.spool.append(rows)
            self.spooled += self.collected
            self.pending, self.collected = [], 0
            shard.append(rows)
        self._save()

    def _open_shard(self) -> ShardFile:
        """The shard that is being made, with all that the spool holds."""
        if self.shard is None:
            name = self.plan.sources[self.source].name
            number = sum(shard["source"] == name for shard in self.shards)
            self.shard = ShardFile(self.directory / f"{name}-{number:05d}.parquet")
            for rows in self.spool.row_groups():
                self.shard.append(rows)
        return self.shard

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
        shard = self._open_shard().close()
        self.shard = None
        source = self.plan.sources[self.source].name
        self.shards.append({"file": shard.pop("file"), "source": source, **shard})
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
        if self.shard is not None:
            self.shard.abandon()
        self.spool.close()
        self.keys_file.close()
