"""A session in a file: its state by value, the ids it has seen, and whose state it is."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from smi.model.modeling import RWKV7State
from smi.protocol.codec import decode
from smi.protocol.stream import Block, Stream
from smi.protocol.tokens import TokenNamespace
from smi.tokenizer import Tokenizer

FORMAT = "smi-session-1"
# value rows, key columns: square for every released head size, so only a word can tell it from its transpose
LAYOUT = "VK"
_TENSORS = ("wkv", "att_shift", "ffn_shift")


@dataclass(frozen=True)
class Saved:
    """What a file holds.

    state: S = 1. ids: all of the session, of which the state has read the first `read`. scores: [R] behind them, where
    they are known. open_blocks: of a runtime transmission at their end that is not handed over yet.
    """

    state: RWKV7State
    scores: torch.Tensor | None
    ids: tuple[int, ...]
    read: int
    open_blocks: int


def save(
    path: Path,
    state: RWKV7State,
    *,
    scores: torch.Tensor | None,
    ids: Sequence[int],
    read: int,
    open_blocks: int,
    model: str,
    tokenizer: str,
) -> None:
    """Write the file whole or not at all. Raises OSError."""
    tensors = {name: getattr(state, name).cpu().contiguous() for name in _TENSORS}
    tensors["ids"] = torch.tensor(list(ids), dtype=torch.int32)
    if scores is not None:
        tensors["scores"] = scores.cpu().contiguous()
    about = {
        "format": FORMAT,
        "layout": LAYOUT,
        "model": model,
        "tokenizer": tokenizer,
        "read": str(read),
        "open_blocks": str(open_blocks),
    }
    draft = path.with_name(f".{path.name}.partial")
    try:
        try:
            save_file(tensors, draft, metadata=about)
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from None
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def load(path: Path, like: RWKV7State, *, rows: int, model: str, tokenizer: str) -> Saved:
    """Read a file that must fit `like` (S = 1) in shapes and dtypes, a head of `rows`, and these fingerprints.

    Raises ValueError that says what does not fit; OSError.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory, no saved session")
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            names = set(file.keys())
            if about.get("format") != FORMAT or names - {"scores"} != {*_TENSORS, "ids"}:
                raise ValueError(f"{path} is no saved session ({FORMAT})")
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no saved session, or a truncated one: {error}") from None
    for key, want, what in (
        ("layout", LAYOUT, "state layout"),
        ("model", model, "model"),
        ("tokenizer", tokenizer, "tokenizer"),
    ):
        if about.get(key) != want:
            raise ValueError(f"{path} was saved with another {what}: {about.get(key)}, this is {want}")
    # logits have the dtype of the layers, as the shifts do
    wanted = {name: (list(x.shape), x.dtype) for name in _TENSORS for x in [getattr(like, name)]}
    wanted["scores"] = [rows], like.att_shift.dtype
    for name in tensors.keys() & wanted.keys():
        found, (shape, dtype) = tensors[name], wanted[name]
        if list(found.shape) != shape or found.dtype != dtype:
            raise ValueError(f"{path}: {name} is {found.dtype} {list(found.shape)}, but this model has {dtype} {shape}")
        if not bool(found.isfinite().all()):
            raise ValueError(f"{path}: {name} holds values that are not finite")
    ids = tensors["ids"]
    if ids.ndim != 1 or ids.dtype != torch.int32:
        raise ValueError(f"{path}: ids are {ids.dtype} {list(ids.shape)}, expected int32 [T]")
    counts = []
    for key in ("read", "open_blocks"):
        text = about.get(key, "")
        if not text.isdecimal() or int(text) > len(ids):
            raise ValueError(f"{path}: {key} is {text!r}, with {len(ids)} ids")
        counts.append(int(text))
    state = RWKV7State(*(tensors[name] for name in _TENSORS))
    return Saved(state, tensors.get("scores"), tuple(ids.tolist()), *counts)


def tree(
    found: Saved, tokenizer: Tokenizer, namespaces: Sequence[TokenNamespace], handover: Sequence[int]
) -> tuple[Stream, list[Block]]:
    """The ids as what was handed over, and the blocks that are not yet. Raises ValueError for ids that are none."""
    ids = [*found.ids, *(handover if found.open_blocks else ())]
    stream = decode(np.asarray(ids, np.int64), tokenizer, namespaces=namespaces)
    if not found.open_blocks:
        return stream, []
    *before, last = stream.transmissions
    if len(last.blocks) != found.open_blocks:
        raise ValueError(f"the saved ids end with {len(last.blocks)} open blocks, not {found.open_blocks}")
    return Stream(tuple(before)), list(last.blocks)
