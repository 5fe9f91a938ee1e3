"""What a model may write next: the protocol's grammar, the framing of payloads, UTF-8 and budgets, over ids.

Every token that these rules let through keeps the transmission decodable: a block opens with THINK, OUT or ACT, its
payload stands between newlines of its own, its bytes are whole characters when it ends, and there is always a way to
end within the budgets. So nothing that is generated has to be repaired afterwards.

Protocol sections: "Core Stream Model", "Runtime and Model Transmissions", "Reasoning Budget".
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from smi.protocol.tokens import BlockType, TokenNamespace, check_namespaces
from smi.tokenizer import Tokenizer

MODEL_BLOCKS = (BlockType.THINK, BlockType.OUT, BlockType.ACT)
_NEVER = 127
# the state behind bytes that are no UTF-8
_DEAD = 8


def _utf8_table() -> np.ndarray:
    """uint8 [9, 256]: the state after a byte. 0 is between characters, 8 is dead; Unicode 16, table 3-7.

    States 1, 2, 3 wait for so many continuation bytes; 4 to 7 are behind E0, ED, F0 and F4, whose second byte is
    restricted, so that no overlong form, surrogate or number past U+10FFFF passes.
    """
    table = np.full((9, 256), _DEAD, np.uint8)
    table[0, :0x80] = 0
    table[0, 0xC2:0xE0] = 1
    table[0, 0xE0:0xF0] = 2
    table[0, 0xF0:0xF4] = 3
    table[0, [0xE0, 0xED, 0xF0, 0xF4]] = 4, 5, 6, 7
    table[0, 0xF0], table[0, 0xF4] = 6, 7
    for state in (1, 2, 3):
        table[state, 0x80:0xC0] = state - 1
    table[4, 0xA0:0xC0] = 1
    table[5, 0x80:0xA0] = 1
    table[6, 0x90:0xC0] = 2
    table[7, 0x80:0x90] = 2
    return table


class Grammar:
    """The rules for one tokenizer and one model, as tables over the R rows of the model's head.

    Args:
        tokenizer: of the streams.
        rows: R; rows past the vocabulary are never written.
        namespaces: of the spans that model blocks may hold.
        device: of the masks.

    Raises ValueError for a tokenizer without a token for a single newline.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rows: int,
        namespaces: Sequence[TokenNamespace] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.tokenizer = tokenizer
        self.rows = rows
        self.device = torch.device(device)
        pieces = [tokenizer.token_bytes(id) if id < tokenizer.vocab_size else None for id in range(rows)]
        self._pieces = pieces
        if b"\n" not in pieces:
            raise ValueError(f"the tokenizer {tokenizer.name} has no token for a single newline, so no block can end")
        # some tokenizers put a blank before every text; a frame may start with or without it
        newline = b"".join(pieces[id] or b"" for id in tokenizer.encode("\n"))
        self.blank = newline.removesuffix(b"\n")
        self.after, self.distance = _transitions(pieces)
        self._spans = np.zeros(rows, bool)
        for namespace in check_namespaces(namespaces, tokenizer).values():
            if namespace.ids.stop > rows:
                raise ValueError(f"the token namespace {namespace.name!r} ends past the {rows} rows of the head")
            self._spans[namespace.first_id : namespace.ids.stop] = True
        newlines = np.array([piece is not None and piece.endswith(b"\n") for piece in pieces])
        # tokens that still have to follow before the block may end
        self.cost = self.distance[self.after] + ~((self.after == 0) & newlines)
        self.cost[0, self._spans] = 1
        self._dearest = int(self.cost[self.after != _DEAD].max())
        # the newline that opens a frame does not close it
        self.first_cost = self.cost[0].copy()
        self.first_cost[[id for id, piece in enumerate(pieces) if piece in (b"\n", self.blank + b"\n")]] = 1
        if self.blank:
            self.first_cost[[id for id, piece in enumerate(pieces) if piece == self.blank]] = 2
        self.frame_tokens = 3 if self.blank else 2
        """What an empty payload costs at most: its two newlines, and the blank that some tokenizers put first."""
        self._masks: dict[tuple, Tensor] = {}

    @cached_property
    def openings(self) -> dict[BlockType, int]:
        return {kind: self.tokenizer.structural.id(kind) for kind in MODEL_BLOCKS}

    def piece(self, id: int) -> bytes | None:
        """The bytes of a text id; None for the ids of spans."""
        return self._pieces[id]

    def mask(self, payload: "Payload | None", structural: Sequence[int], text: bool, at_most: int = _NEVER) -> Tensor:
        """bool [R]: the structural ids given, and the text and spans that may continue a payload.

        text: whether any may. at_most: tokens that may have to follow the chosen one before the block may end.
        """
        at_most = min(at_most, self._dearest)
        key = (payload.key if payload and text else None, tuple(structural), at_most if text else 0)
        known = self._masks.get(key)
        if known is None:
            allowed = np.zeros(self.rows, bool)
            if payload and text:
                allowed |= self._continuations(payload) & (self.costs(payload) <= at_most)
            allowed[list(structural)] = True
            known = self._masks[key] = torch.from_numpy(allowed).to(self.device)
        return known

    def costs(self, payload: "Payload") -> np.ndarray:
        """int8 [R]: tokens that have to follow each one that may continue the payload, before the block may end."""
        return self.cost[payload.utf8] if payload.framed else self.first_cost

    def _continuations(self, payload: "Payload") -> np.ndarray:
        valid = self.after[payload.utf8] != _DEAD
        if payload.framed:
            return valid | self._spans if payload.utf8 == 0 else valid
        heads = (b"\n",) if payload.lead else (b"\n", self.blank + b"\n")
        alone = None if payload.lead or not self.blank else self.blank
        return valid & np.array([p is not None and (p.startswith(heads) or p == alone) for p in self._pieces])


@dataclass
class Payload:
    """How far the payload of an open block has come."""

    grammar: Grammar
    lead: bool = False
    framed: bool = False
    utf8: int = 0
    closable: bool = False

    @property
    def key(self) -> tuple[bool, bool, int]:
        """What decides about the next token."""
        return (self.lead, self.framed, self.utf8)

    @property
    def remaining(self) -> int:
        """The fewest tokens after which the block may end."""
        if self.closable:
            return 0
        return int(self.grammar.distance[self.utf8]) + (
            1 if self.framed else 2 if self.lead else self.grammar.frame_tokens
        )

    def take(self, id: int) -> None:
        """Read one more id, which `Grammar.mask` has allowed."""
        piece = self.grammar.piece(id)
        if piece is None:
            self.closable = False
            return
        self.utf8 = int(self.grammar.after[self.utf8, id])
        self.closable = self.utf8 == 0 and piece.endswith(b"\n")
        if self.framed:
            return
        rest = piece.removeprefix(self.grammar.blank)
        if not rest:
            self.lead, self.closable = True, False
            return
        self.framed = True
        self.closable = self.closable and len(rest) > 1


def _transitions(pieces: Sequence[bytes | None]) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [8, R], the UTF-8 state after each token from each state, 8 where it cannot come, and int8 [9] tokens
    from each state to the end of the character."""
    table = _utf8_table()
    rows = len(pieces)
    lengths = np.array([len(piece) if piece else 0 for piece in pieces])
    longest = int(lengths.max())
    data = np.zeros((rows, longest), np.uint8)
    for id, piece in enumerate(pieces):
        if piece:
            data[id, : len(piece)] = np.frombuffer(piece, np.uint8)
    after = np.repeat(np.arange(8, dtype=np.uint8)[:, None], rows, 1)
    after[:, lengths == 0] = _DEAD
    for position in range(longest):
        live = np.flatnonzero(lengths > position)
        after[:, live] = table[after[:, live], data[live, position]]

    distance = np.full(9, _NEVER, np.int8)
    distance[0] = 0
    for _ in range(4):
        for state in range(1, 8):
            reached = distance[after[state]]
            if (least := int(reached.min(initial=_NEVER))) < _NEVER:
                distance[state] = min(distance[state], least + 1)
    # a character that no token can finish is not begun
    after[distance[after] == _NEVER] = _DEAD
    return after, np.where(distance == _NEVER, _NEVER - 1, distance).astype(np.int8)


@dataclass(frozen=True)
class Limits:
    """How much one turn may write.

    max_tokens: ids of the transmission without its EOT; there must be room for the smallest block.
    max_think_tokens: ids within THINK payloads, over all THINK blocks of the turn; None for no limit of its own.
        The type tokens do not count. Where they leave no room for a frame (0 and 1), no block is opened. A block
        that is cut for them is followed by an answer: where neither OUT nor ACT was opened before and there is room
        for one, the transmission cannot end without.
    least: blocks of a type that must be opened before the transmission may end; until then only these and THINK
        are. The budgets come before it: a transmission that is out of room ends without them.
    most: blocks of a type that may be opened; a type not named has no such limit.
    """

    max_tokens: int = 1024
    max_think_tokens: int | None = None
    least: Mapping[BlockType, int] = field(default_factory=dict)
    most: Mapping[BlockType, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind in MODEL_BLOCKS:
            if self.least.get(kind, 0) > self.most.get(kind, self.max_tokens):
                raise ValueError(f"at least {self.least[kind]} {kind.name} blocks and at most {self.most[kind]}")
        if all(self.most.get(kind) == 0 for kind in (BlockType.OUT, BlockType.ACT)):
            raise ValueError("a transmission needs OUT or ACT: do not forbid both")
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be a whole number from 1 up, not {self.max_tokens!r}")
        most = self.max_think_tokens
        if most is not None and (type(most) is not int or most < 0):
            raise ValueError(f"max_think_tokens must be a whole number from 0 up or None, not {most!r}")


class Writer:
    """One transmission of the model as it is written: what may come next, and what the budgets have cut.

    The model first chooses freely among what the grammar allows. Only where the budgets do not bear its choice
    (`fits`), it is refused (`refuse`): the open block counts as cut, and the next choice is among what ends it.

    kind, payload: of the open block. tokens, think_tokens, blocks: written so far. cut: numbers of the blocks that
    did not end by the model's own choice. full: whether the limit on all tokens ended the transmission.
    """

    def __init__(self, grammar: Grammar, limits: Limits) -> None:
        self._grammar = grammar
        self._limits = limits
        # after a cut: the blocks that may still be opened
        self._ending: tuple[BlockType, ...] | None = None
        self._thinking = True
        if limits.max_tokens <= grammar.frame_tokens:
            raise ValueError(f"max_tokens is {limits.max_tokens}, but an empty block takes {grammar.frame_tokens + 1}")
        self.kind: BlockType | None = None
        self.payload: Payload | None = None
        self.tokens = self.think_tokens = self.blocks = 0
        self._opened: Counter[BlockType] = Counter()
        self.cut: set[int] = set()
        self.full = False

    @property
    def ending(self) -> bool:
        """Whether something was cut and has not ended yet."""
        return self._ending is not None

    @property
    def _left(self) -> int:
        return self._limits.max_tokens - self.tokens

    @property
    def _think_left(self) -> int:
        most = self._limits.max_think_tokens
        return self._left if most is None else most - self.think_tokens

    def _closers(self, affordable: bool) -> list[int]:
        """Structural ids that may come now."""
        if self.payload is not None and not self.payload.closable:
            return []
        most, opened = self._limits.most, self._opened
        owed = [kind for kind, least in self._limits.least.items() if opened[kind] < least]
        kinds = [kind for kind in MODEL_BLOCKS if kind not in most or opened[kind] < most[kind]]
        if owed:
            kinds = [kind for kind in kinds if kind in owed or kind is BlockType.THINK]
        if self._ending is not None:
            kinds = [kind for kind in kinds if kind in self._ending]
        if affordable and self._left <= self._grammar.frame_tokens:
            kinds = []
        if not self._thinking or self._think_left < self._grammar.frame_tokens:
            kinds = [kind for kind in kinds if kind is not BlockType.THINK]
        ids = [self._grammar.openings[kind] for kind in kinds]
        # thoughts were cut short so that the model comes to the point
        unanswered = self._ending and not (opened[BlockType.OUT] or opened[BlockType.ACT])
        may_end = self.payload is not None and not ((owed or unanswered) and ids)
        return [*ids, self._grammar.tokenizer.structural.eot] if may_end else ids

    def allowed(self) -> Tensor:
        """bool [R]: what the grammar lets through; once a block was cut, only what ends it."""
        if self._ending is not None:
            return self.affordable()
        return self._grammar.mask(self.payload, self._closers(affordable=False), text=self.payload is not None)

    def affordable(self) -> Tensor:
        """bool [R]: of these, what leaves enough of the budgets to end properly. Never empty."""
        closers = self._closers(affordable=True)
        if self.payload is None or (self._ending is not None and closers):
            return self._grammar.mask(None, closers, text=False)
        room = min(self._left, self._think_left) if self.kind is BlockType.THINK else self._left
        if self._ending is not None:
            # every step comes closer to the end
            room = min(room, self.payload.remaining)
        return self._grammar.mask(self.payload, closers, text=True, at_most=room - 1)

    def fits(self, id: int) -> bool:
        """Whether the budgets bear an id that `allowed` lets through."""
        return bool(self.affordable()[id])

    def refuse(self, id: int) -> None:
        """The budgets do not bear `id`: what is open counts as cut, and what must end, ends."""
        if self._grammar.tokenizer.structural.type_of(id) is not None:
            # the open block is whole; there is no room for another
            self._ending, self.full = (), True
            return
        assert self.payload is not None
        self.full = int(self._grammar.costs(self.payload)[id]) >= self._left
        self.cut.add(self.blocks - 1)
        self._ending = () if self.full else (BlockType.OUT, BlockType.ACT)
        self._thinking = False

    def end(self) -> None:
        """End the transmission as soon as it can: the host has seen enough."""
        self._ending = ()
        if self.payload is not None:
            self.cut.add(self.blocks - 1)

    def take(self, id: int) -> None:
        """Write an id other than EOT that one of the masks lets through."""
        self.tokens += 1
        kind = self._grammar.tokenizer.structural.type_of(id)
        if kind is not None:
            self.kind, self.payload = kind, Payload(self._grammar)
            self._ending = None if self._ending else self._ending
            self.blocks += 1
            self._opened[kind] += 1
            return
        assert self.payload is not None
        self.think_tokens += self.kind is BlockType.THINK
        self.payload.take(id)
