"""The ten structural tokens, the block of 32 slots they live in, and how a tokenizer gets them.

Protocol sections: "Core Tokens", "Token Semantics", "Recommended Token Allocation".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Any

import numpy as np

SLOTS = 32


class Side(StrEnum):
    """Who writes a transmission: the runtime (the world around the model) or the model."""

    RUNTIME = "runtime"
    MODEL = "model"


class BlockType(IntEnum):
    """What a block means; the value is its slot. EOT and EOS label tokens and never open a block."""

    CTRL = 0
    SYS = 1
    DEV = 2
    CAPS = 3
    USR = 4
    OBS = 5
    THINK = 6
    OUT = 7
    ACT = 8
    EOT = 9
    EOS = 10

    @property
    def token(self) -> str:
        """The spelling of the structural token, such as `<|usr|>`; ValueError for EOS, which has none."""
        if self is BlockType.EOS:
            raise ValueError("EOS has no structural token: it is the tokenizer's own end-of-sequence token")
        return f"<|{self.name.lower()}|>"

    @property
    def side(self) -> Side:
        """The side that may write a block of this type; EOT and EOS belong to whoever ends."""
        if self >= BlockType.EOT:
            raise ValueError(f"{self.name} ends a transmission of either side and has no side of its own")
        return Side.MODEL if self >= BlockType.THINK else Side.RUNTIME


STRUCTURAL_TOKENS: tuple[str, ...] = tuple(block.token for block in BlockType if block <= BlockType.EOT)
"""The ten spellings in slot order, `<|ctrl|>` to `<|eot|>`."""


def slot_tokens(slots: int) -> tuple[str, ...]:
    """The spellings of the first `slots` slots: the ten, and with 32 the reserved ones after them.

    Raises ValueError unless `slots` is 10 or 32.
    """
    if slots not in (len(STRUCTURAL_TOKENS), SLOTS):
        raise ValueError(f"slots is {slots!r}; it must be 10 (the structural tokens) or 32 (with the reserved rows)")
    reserved = (f"<|smi_reserved_{slot}|>" for slot in range(len(STRUCTURAL_TOKENS), slots))
    return STRUCTURAL_TOKENS + tuple(reserved)


@dataclass(frozen=True)
class StructuralIds:
    """The token id of every slot, 10 or 32 of them, in slot order.

    Raises ValueError when the count is wrong or an id is negative or used twice.
    """

    ids: tuple[int, ...]

    def __post_init__(self) -> None:
        slot_tokens(len(self.ids))
        if any(type(i) is not int or i < 0 for i in self.ids):
            raise ValueError(f"structural ids must be whole numbers from 0 up, got {self.ids}")
        if len(set(self.ids)) != len(self.ids):
            raise ValueError(f"structural ids must differ from each other, got {self.ids}")

    @cached_property
    def _types(self) -> dict[int, BlockType]:
        return {self.ids[block]: block for block in BlockType if block <= BlockType.EOT}

    @cached_property
    def all(self) -> frozenset[int]:
        """Every id of the block, reserved slots included."""
        return frozenset(self.ids)

    @property
    def slots(self) -> int:
        """10, or 32 when the reserved rows exist."""
        return len(self.ids)

    @property
    def eot(self) -> int:
        """The id of `<|eot|>`."""
        return self.ids[BlockType.EOT]

    def id(self, block: BlockType) -> int:
        """The id of a structural token; ValueError for EOS, which belongs to the tokenizer."""
        if block > BlockType.EOT:
            raise ValueError("EOS is not a structural token; ask the tokenizer for eos_id")
        return self.ids[block]

    def type_of(self, token_id: int) -> BlockType | None:
        """The type a token id stands for; None for text, reserved slots and everything else."""
        return self._types.get(token_id)

    def to_dict(self) -> dict[str, int]:
        """`{"<|ctrl|>": id, ...}` in slot order, as written to `smi_token_ids.json`."""
        return dict(zip(slot_tokens(self.slots), self.ids, strict=True))

    @classmethod
    def from_dict(cls, ids: Mapping[str, int]) -> StructuralIds:
        """The inverse of `to_dict`; ValueError names spellings that are missing or unknown."""
        names = slot_tokens(SLOTS if len(ids) > len(STRUCTURAL_TOKENS) else len(STRUCTURAL_TOKENS))
        missing = [name for name in names if name not in ids]
        unknown = [name for name in ids if name not in names]
        if missing or unknown:
            raise ValueError(f"structural ids: missing {missing or 'none'}, unknown {unknown or 'none'}")
        return cls(tuple(ids[name] for name in names))


def install_structural_tokens(tokenizer: Any, model: Any = None, slots: int = 10, *, seed: int = 0) -> StructuralIds:
    """Append the structural tokens to a transformers fast tokenizer, and rows for them to a model.

    tokenizer: a `PreTrainedTokenizerFast`; changed in place. Tokens it already has keep their ids, so a
    second call changes nothing.
    model: anything with transformers' embedding accessors. Its input embedding and untied head grow if they
    are too short; each new row is the mean of the old ones plus noise of a tenth of their deviation.
    slots: 10, or 32 for the reserved rows as well. seed: of the noise.

    Raises ValueError when `slots` is neither, or when the tokenizer does not keep a token in one piece.
    """
    from transformers import AddedToken

    names = slot_tokens(slots)
    known = len(tokenizer)
    fresh = [name for name in names if name not in tokenizer.get_vocab()]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names], special_tokens=True)
    ids = StructuralIds(tuple(tokenizer.convert_tokens_to_ids(list(names))))
    for name, token_id in zip(names, ids.ids, strict=True):
        if tokenizer.encode(name, add_special_tokens=False) != [token_id]:
            raise ValueError(f"the tokenizer does not keep {name} in one piece; it cannot carry the protocol")
    if model is not None:
        new = [token_id for name, token_id in zip(names, ids.ids, strict=True) if name in fresh]
        grow_embeddings(model, max(ids.ids) + 1, new, known, seed)
    return ids


def grow_embeddings(model: Any, rows: int, new: Sequence[int], known: int, seed: int = 0) -> None:
    """Give a model at least `rows` embedding rows; start those in `new`, and any added, near the old mean.

    model: as for `install_structural_tokens`; input embedding and untied head are treated alike.
    known: how many of the first rows were trained; they make the mean. Each new row is that mean plus noise,
    drawn from `seed`, of a tenth of their deviation. All other rows stay as they are.
    """
    before = model.get_input_embeddings().weight.shape[0]
    if before < rows:
        model.resize_token_embeddings(rows, mean_resizing=False)
    start = sorted({*new, *range(before, rows)})
    if not start:
        return
    tables = [model.get_input_embeddings().weight]
    head = model.get_output_embeddings()
    if head is not None and head.weight.data_ptr() != tables[0].data_ptr():
        tables.append(head.weight)
    for index, weight in enumerate(tables):
        old = weight.data[: min(known, before)].float()
        noise = np.random.default_rng((seed, index)).standard_normal((len(start), old.shape[1]))
        near = old.mean(0) + 0.1 * old.std(0) * old.new_tensor(noise)
        weight.data[start] = near.to(weight.dtype)
