"""Rows of files that other processes compile: the same documents, in the same order, with the same account."""

import itertools
import json
import multiprocessing as mp
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mirror import HUB, SOURCES

from smi.data.datamodule import SMIDataModule
from smi.data.sources import SourceSpec
from smi.tokenizer import load_tokenizer

# a JSON array, lines of JSON, and Parquet
MIRROR = [replace(SOURCES[name], quota=None, weight=1.0) for name in ("hermes_func_calling", "nemotron_agentic", "aya")]
BATCHES = 12


def module(train: list[SourceSpec], root: Path = HUB, **options: Any) -> SMIDataModule:
    settings: dict[str, Any] = {"steps": BATCHES, "root": root, "window": 64, "val_fraction": 0.05, "val_batches": 2}
    return SMIDataModule(load_tokenizer("rwkv_world"), train, **settings | options)


def stream(data: SMIDataModule) -> list[tuple[torch.Tensor, ...]]:
    data.setup()
    batches = [(b.input_ids, b.labels, b.cu_seqlens, b.block_types) for b in data.train_dataloader()]
    data.teardown()
    assert not mp.active_children()
    return batches


def same(left: list[tuple[torch.Tensor, ...]], right: list[tuple[torch.Tensor, ...]]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("sources", "steps"), [(MIRROR[2:], 40), pytest.param(MIRROR, 50, marks=pytest.mark.full, id="all")]
)
def test_the_stream_does_not_depend_on_processes(sources: list[SourceSpec], steps: int) -> None:
    """Faulty rows, duplicates and held-out ones included, into the second epoch."""
    alone, together = module(sources, steps=steps), module(sources, steps=steps, compile_workers=2)
    assert same(stream(alone), stream(together))
    assert alone.account.epochs == together.account.epochs >= 2, alone.account
    for account in (alone.account, together.account):
        assert account.rejected["held_out"]
        assert account.rejected["duplicate"]
        assert account.rows == account.accepted + account.rejected.total()


@pytest.mark.full
def test_accounts_are_the_same() -> None:
    """At the end of an epoch, where the threads have run equally far ahead."""
    accounts = []
    for count in (0, 1):
        data = module(MIRROR, compile_workers=count)
        for _ in data.packs(count):
            if data.account.epochs == 2:
                break
        accounts.append({name: vars(source) for name, source in data.account.sources.items()})
    assert accounts[0] == accounts[1]


@pytest.mark.full
def test_a_stream_that_was_left_goes_on_where_it_was() -> None:
    whole = stream(module(MIRROR, compile_workers=1))
    data = module(MIRROR, compile_workers=2)
    data.setup()
    loader = data.train_dataloader()
    for _ in itertools.islice(loader, 5):
        pass
    state = loader.state_dict()
    data.teardown()
    data = module(MIRROR, compile_workers=1)
    data.setup()
    loader = data.train_dataloader()
    loader.load_state_dict(state)
    rest = [(b.input_ids, b.labels, b.cu_seqlens, b.block_types) for b in loader]
    data.teardown()
    assert same(whole[5:], rest)


def hang_up(row: dict[str, Any]) -> Any:
    if row["text"] == "17":
        os.kill(os.getpid(), signal.SIGKILL)
    from smi.protocol.conversation import Conversation

    words = row["text"]
    return Conversation([{"role": "user", "content": words}, {"role": "assistant", "content": words}])


@pytest.mark.full
def test_a_row_that_kills_processes_ends_the_stream(tmp_path: Path) -> None:
    """To leave it out would make the order depend on what may have come from outside."""
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": str(i)}) for i in range(40)))
    source = SourceSpec("deadly", ["rows.jsonl"], f"custom: {__name__}:hang_up")
    data = module([source], tmp_path, val_fraction=0.0, compile_workers=1)
    data.setup()
    with pytest.raises(RuntimeError, match=r"deadly: rows\.jsonl row 17: .*died"):
        list(data.train_dataloader())
    assert not mp.active_children()
