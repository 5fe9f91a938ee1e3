"""The ten structural tokens, the block of 32 slots they live in, what a tokenizer must keep, and token namespaces.

Protocol sections: "Core Tokens", "Token Semantics", "Modalities", "BOS and EOS", "Recommended Token Allocation".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np

SLOTS = 32
SEQUENCE_TOKENS = ("<|bos|>", "<|eos|>")
"""What slots 10 and 11 are called where an implementation allots them to the ends of a sequence."""

Init: TypeAlias = Literal["mean", "normal", "zeros"]
"""How a new embedding row starts: near the mean of the old rows, with their spread around zero, or at zero."""


class Side(StrEnum):
    """Who writes a transmission: the runtime (the world around the model) or the model."""

    RUNTIME = "runtime"
    MODEL = "model"


_RUNTIME, _MODEL = Side


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
        return STRUCTURAL_TOKENS[self]

    @property
    def side(self) -> Side:
        """The side that may write a block of this type; EOT and EOS belong to whoever ends."""
        if self >= BlockType.EOT:
            raise ValueError(f"{self.name} ends a transmission of either side and has no side of its own")
        return _MODEL if self >= BlockType.THINK else _RUNTIME


STRUCTURAL_TOKENS: tuple[str, ...] = tuple(f"<|{block.name.lower()}|>" for block in BlockType if block <= BlockType.EOT)
"""The ten spellings in slot order, `<|ctrl|>` to `<|eot|>`."""


def slot_tokens(slots: int, sequence_tokens: bool = False) -> tuple[str, ...]:
    """The spellings of the first `slots` slots: the ten, and with 32 the reserved ones after them.

    sequence_tokens: slots 10 and 11 are `<|bos|>` and `<|eos|>`.
    Raises ValueError unless `slots` is 10 or 32, and 32 where there are sequence tokens.
    """
    if slots not in (len(STRUCTURAL_TOKENS), SLOTS):
        raise ValueError(f"slots is {slots!r}; it must be 10 (the structural tokens) or 32 (with the reserved rows)")
    if sequence_tokens and slots != SLOTS:
        raise ValueError("<|bos|> and <|eos|> are allotted from the reserved slots; they need slots=32")
    named = STRUCTURAL_TOKENS + (SEQUENCE_TOKENS if sequence_tokens else ())
    return named + tuple(f"<|smi_reserved_{slot}|>" for slot in range(len(named), slots))


@dataclass(frozen=True)
class StructuralIds:
    """The token id of every slot, 10 or 32 of them, in slot order.

    sequence_tokens: slots 10 and 11 are `<|bos|>` and `<|eos|>`. Neither is structural: `<|eos|>` is then the
    end-of-sequence token of the tokenizer, and `<|bos|>` a row like the reserved ones, which nothing here writes,
    since a fresh state is what begins a sequence.

    Raises ValueError when the count is wrong or an id is negative or used twice.
    """

    ids: tuple[int, ...]
    sequence_tokens: bool = False

    def __post_init__(self) -> None:
        slot_tokens(len(self.ids), self.sequence_tokens)
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
        return dict(zip(slot_tokens(self.slots, self.sequence_tokens), self.ids, strict=True))

    @classmethod
    def from_dict(cls, ids: Mapping[str, int]) -> StructuralIds:
        """The inverse of `to_dict`; ValueError names spellings that are missing or unknown."""
        slots = SLOTS if len(ids) > len(STRUCTURAL_TOKENS) else len(STRUCTURAL_TOKENS)
        sequence_tokens = slots == SLOTS and all(name in ids for name in SEQUENCE_TOKENS)
        names = slot_tokens(slots, sequence_tokens)
        missing = [name for name in names if name not in ids]
        unknown = [name for name in ids if name not in names]
        if missing or unknown:
            raise ValueError(f"structural ids: missing {missing or 'none'}, unknown {unknown or 'none'}")
        return cls(tuple(ids[name] for name in names), sequence_tokens)


class PlainTokenizer(Protocol):
    """What the codec asks of a tokenizer: text in, text ids out, losslessly, and never a special id.

    One that also has `encode_flat(texts) -> (ids int32 [T], bounds int64 [texts + 1])`, the same ids in one row, is
    compiled with faster: the codec then makes no object per token.
    """

    @property
    def structural(self) -> StructuralIds:
        """The ids of the structural slots."""
        ...

    @property
    def eos_id(self) -> int:
        """The tokenizer's own end-of-sequence id."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the vocabulary, structural rows included."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; never a structural or other special id. ValueError where text could not be kept."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts, the same as one by one."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The strict inverse of `encode` on text ids; ValueError where there is none."""
        ...

    def token_bytes(self, id: int) -> bytes | None:
        """The bytes of UTF-8 an id stands for within a text; None where it stands for no text."""
        ...


@dataclass(frozen=True)
class TokenNamespace:
    """A named range of ids for one modality, beside the vocabulary of text: `first_id` to `first_id + size - 1`.

    Spans hold ids relative to it. Raises ValueError for an empty name, a negative first id or a size below 1.
    Protocol section: "Modalities".
    """

    name: str
    first_id: int
    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a token namespace needs a name, got {self.name!r}")
        if type(self.first_id) is not int or self.first_id < 0 or type(self.size) is not int or self.size < 1:
            raise ValueError(
                f"namespace {self.name!r}: first_id must be a whole number from 0 up and size one from 1 up, "
                f"got {self.first_id!r} and {self.size!r}"
            )

    @property
    def ids(self) -> range:
        """The absolute ids."""
        return range(self.first_id, self.first_id + self.size)


def check_namespaces(namespaces: Sequence[TokenNamespace], tokenizer: PlainTokenizer) -> dict[str, TokenNamespace]:
    """The namespaces by name, where every id means one thing only.

    Raises ValueError where two share a name or an id, or where one holds an id that is structural, the
    tokenizer's EOS, or text; the message names both sides.
    """
    named: dict[str, TokenNamespace] = {}
    last: TokenNamespace | None = None
    spellings = {id: name for name, id in tokenizer.structural.to_dict().items()}
    for one in sorted(namespaces, key=lambda one: one.first_id):
        if one.name in named:
            raise ValueError(f"two token namespaces are named {one.name!r}")
        if last is not None and one.first_id in last.ids:
            raise ValueError(f"the token namespaces {last.name!r} and {one.name!r} share the id {one.first_id}")
        if tokenizer.eos_id in one.ids:
            raise ValueError(f"the token namespace {one.name!r} holds the end-of-sequence id {tokenizer.eos_id}")
        for id in tokenizer.structural.ids:
            if id in one.ids:
                raise ValueError(f"the token namespace {one.name!r} holds {id}, the id of {spellings[id]}")
        for id in range(one.first_id, min(one.ids.stop, tokenizer.vocab_size)):
            if (piece := tokenizer.token_bytes(id)) is not None:
                raise ValueError(f"the token namespace {one.name!r} holds {id}, which stands for the text {piece!r}")
        named[one.name] = last = one
    return named


def install_structural_tokens(
    tokenizer: Any,
    model: Any = None,
    slots: int = 10,
    *,
    sequence_tokens: bool = False,
    init: Init = "mean",
    seed: int = 0,
) -> StructuralIds:
    """Append the structural tokens to a transformers fast tokenizer, and rows for them to a model.

    tokenizer: a `PreTrainedTokenizerFast`; changed in place. Tokens it already has keep their ids, so a
    second call changes nothing.
    model: anything with transformers' embedding accessors. Its input embedding and untied head grow if they
    are too short, and the new rows start as `grow_embeddings` says.
    slots: 10, or 32 for the reserved rows as well, which no payload, sampler or loss of this package ever uses.
    A tokenizer that has reserved rows keeps the slots it has.
    sequence_tokens: with 32 slots, call slots 10 and 11 `<|bos|>` and `<|eos|>` and make them the tokenizer's
    own, for one that has no end of sequence.
    init, seed: of the new rows.

    Raises ValueError when `slots` is neither, when sequence tokens would rename reserved rows, or when the
    tokenizer does not keep a token in one piece.
    """
    from transformers import AddedToken

    known = len(tokenizer)
    vocabulary = tokenizer.get_vocab()
    slots, sequence_tokens = settled_slots(vocabulary, slots, sequence_tokens)
    names = slot_tokens(slots, sequence_tokens)
    fresh = [name for name in names if name not in vocabulary]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names], special_tokens=True)
    if sequence_tokens:
        tokenizer.bos_token, tokenizer.eos_token = SEQUENCE_TOKENS
    ids = StructuralIds(tuple(tokenizer.convert_tokens_to_ids(list(names))), sequence_tokens)
    for name, token_id in zip(names, ids.ids, strict=True):
        if tokenizer.encode(name, add_special_tokens=False) != [token_id]:
            raise ValueError(f"the tokenizer does not keep {name} in one piece; it cannot carry the protocol")
    if model is not None:
        new = [token_id for name, token_id in zip(names, ids.ids, strict=True) if name in fresh]
        grow_embeddings(model, max(ids.ids) + 1, new, known, seed, init)
    return ids


def settled_slots(present: Collection[str], slots: int, sequence_tokens: bool) -> tuple[int, bool]:
    """The slots and sequence tokens asked for, or those of a tokenizer whose vocabulary has reserved rows already.

    Raises ValueError where the sequence tokens would rename rows that are reserved.
    """
    reserved = slot_tokens(SLOTS)[len(STRUCTURAL_TOKENS) :]
    first, others = reserved[: len(SEQUENCE_TOKENS)], reserved[len(SEQUENCE_TOKENS) :]
    if sequence_tokens and any(name in present for name in first):
        raise ValueError("slots 10 and 11 are reserved in this tokenizer already, and rows are never renamed")
    if all(name in present for name in first):
        return SLOTS, False
    if all(name in present for name in (*SEQUENCE_TOKENS, *others)):
        return SLOTS, True
    return slots, sequence_tokens


def grow_embeddings(model: Any, rows: int, new: Sequence[int], known: int, seed: int = 0, init: Init = "mean") -> None:
    """Give a model at least `rows` embedding rows; start those in `new`, and any added, as `init` says.

    model: as for `install_structural_tokens`; input embedding and untied head are treated alike.
    known: how many of the first rows were trained; they give the mean and the deviation of each column.
    init: "mean" is that mean plus noise of a tenth of the deviation; "normal" noise of the whole deviation around
    zero; "zeros" nothing at all, so that a new row of a head scores every state the same at first.
    seed: of the noise. All other rows stay as they are.

    Raises ValueError for an unknown `init`.
    """
    if init not in get_args(Init):
        raise ValueError(f"init is {init!r}; it must be one of {', '.join(get_args(Init))}")
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
        spread = old.std(0) * old.new_tensor(noise)
        made = {"mean": old.mean(0) + 0.1 * spread, "normal": spread, "zeros": 0 * spread}[init]
        weight.data[start] = made.to(weight.dtype)
