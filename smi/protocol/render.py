"""A compiled example for people: blocks coloured by kind, supervised tokens marked, tokens counted.

Drawn from ids, mask and block types, which is what a model gets, and never from the conversation they came from.
Whatever is not plain text stands in ⟨⟩: ids without text as ⟨70001⟩, bytes that are no character as ⟨0xE6⟩, and
characters that are invisible or would steer a terminal as ⟨U+001B⟩, so does a ⟨ that a payload holds. A payload
that spells a structural token stays text: it stands further in than a real one, without its colour.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rich.console import Console, ConsoleOptions
from rich.style import Style
from rich.text import Text

from smi.protocol.codec import Example, PlainTokenizer
from smi.protocol.tokens import BlockType

# the runtime's blocks are cool, the model's warm; readable on light and on dark
COLOURS: dict[BlockType, str] = {
    BlockType.CTRL: "#7f7fd5",
    BlockType.SYS: "#4a86d8",
    BlockType.DEV: "#3a9ad0",
    BlockType.CAPS: "#6c8ca8",
    BlockType.USR: "#35a06a",
    BlockType.OBS: "#25a0a0",
    BlockType.THINK: "#b074d8",
    BlockType.OUT: "#dd7d2e",
    BlockType.ACT: "#e0566a",
    BlockType.EOT: "#8c929c",
    BlockType.EOS: "#8c929c",
}

# control characters, and what is invisible or changes the direction of writing; a lone surrogate is a byte that is
# no character. The two joiners stay: Persian, Hindi and many emoji are written with them
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff"
    "\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff⟨]"
)


@dataclass(frozen=True, slots=True)
class Piece:
    """The smallest run of tokens that stands for whole characters, or one id without text.

    ids: the tokens, which share `kind` and `supervised`.
    text: their text, with bytes that are no character as lone surrogates; None for an id without text.
    token: the spelling of a structural or end-of-sequence token, empty for other ids.
    """

    ids: tuple[int, ...]
    kind: BlockType
    supervised: bool
    text: str | None = None
    token: str = ""


@dataclass(frozen=True, slots=True)
class Count:
    """Blocks, tokens and supervised tokens of one kind, or of all kinds together."""

    name: str
    blocks: int
    tokens: int
    supervised: int

    @property
    def share(self) -> str:
        """The supervised share in percent."""
        return f"{self.supervised / self.tokens:.1%}" if self.tokens else "0.0%"


def pieces(example: Example, tokenizer: PlainTokenizer) -> Iterator[Piece]:
    """The tokens of an example with their text, in order; each token is in exactly one piece."""
    tokens = list(
        zip(
            map(int, example.input_ids),
            map(BlockType, example.block_types.tolist()),
            map(bool, example.loss_mask),
            strict=True,
        )
    )
    start = 0
    while start < len(tokens):
        id, kind, supervised = tokens[start]
        if tokenizer.token_bytes(id) is None:
            opened = tokenizer.structural.type_of(id)
            token = "⟨eos⟩" if id == tokenizer.eos_id else "" if opened is None else opened.token
            yield Piece((id,), kind, supervised, None, token)
            start += 1
            continue
        end = start
        while end < len(tokens) and tokenizer.token_bytes(tokens[end][0]) is not None:
            end += 1
        yield from _text_pieces(tokens[start:end], tokenizer)
        start = end


def _text_pieces(tokens: Sequence[tuple[int, BlockType, bool]], tokenizer: PlainTokenizer) -> Iterator[Piece]:
    """The pieces of a run of text ids, which was encoded as one string."""
    parts = [tokenizer.token_bytes(id) or b"" for id, _, _ in tokens]
    parts[0] = parts[0][_prefix_length([id for id, _, _ in tokens], b"".join(parts), tokenizer) :]
    held: list[int] = []
    data = b""
    for index, ((id, kind, supervised), part) in enumerate(zip(tokens, parts, strict=True)):
        held.append(id)
        data += part
        last = index + 1 == len(tokens) or tokens[index + 1][1:] != (kind, supervised)
        if last or not _is_cut(data):
            yield Piece(tuple(held), kind, supervised, data.decode("utf-8", "surrogateescape"))
            held, data = [], b""


def _prefix_length(ids: list[int], data: bytes, tokenizer: PlainTokenizer) -> int:
    """Bytes at the head of a run that belong to the vocabulary's way of writing, not to the text."""
    try:
        text = tokenizer.decode(ids).encode("utf-8")
    except ValueError:
        return 0
    return len(data) - len(text) if data.endswith(text) else 0


def _is_cut(data: bytes) -> bool:
    """Whether `data` ends within a character."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def counts(example: Example, tokenizer: PlainTokenizer) -> list[Count]:
    """Tokens by block kind, in the protocol's order, and the sum of all last."""
    tokens: Counter[BlockType] = Counter()
    blocks: Counter[BlockType] = Counter()
    supervised: Counter[BlockType] = Counter()
    for piece in pieces(example, tokenizer):
        tokens[piece.kind] += len(piece.ids)
        blocks[piece.kind] += bool(piece.token)
        supervised[piece.kind] += len(piece.ids) * piece.supervised
    rows = [Count(kind.name.lower(), blocks[kind], tokens[kind], supervised[kind]) for kind in sorted(tokens)]
    return [*rows, Count("all", blocks.total(), tokens.total(), supervised.total())]


def visible(text: str) -> str:
    """Text that no terminal obeys and that hides nothing; line breaks and tabs stay."""
    return _HIDDEN.sub(lambda match: _mark(match[0]), text)


def _mark(character: str) -> str:
    code = ord(character)
    # where "surrogateescape" puts bytes
    return f"⟨0x{code - 0xDC00:02X}⟩" if 0xDC80 <= code <= 0xDCFF else f"⟨U+{code:04X}⟩"


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """Text to show, cut into (part, whether it is plain text); line breaks come by themselves."""
    for number, part in enumerate(_SPLIT.split(text)):
        if part:
            yield (part, True) if number % 2 == 0 or part == "\n" else (_mark(part), False)


# --- text ---------------------------------------------------------------------------------------------------------

_DIM = Style(dim=True)
_SPACES = str.maketrans({" ": "␣", "\t": "⇥", "\n": "⏎"})


class _Line:
    """A line of the display, and whether all, some or none of its tokens are supervised."""

    def __init__(self, kind: BlockType, header: bool = False) -> None:
        self.kind = kind
        self.header = header
        self.marks: set[bool] = set()
        self.body = Text(tab_size=4)

    @property
    def gutter(self) -> Text:
        """What stands before each row of the line; a payload stands further in than a structural token."""
        bar = "│" if True not in self.marks else "┃" if False not in self.marks else "╏"
        style = Style(color=COLOURS[self.kind], bold=True) if True in self.marks else _DIM
        return Text.assemble((bar, style), " " if self.header else "   ")


def render_text(example: Example, tokenizer: PlainTokenizer, *, ids: bool = False) -> Text:
    """The example for a terminal: one line a line of text, a heavy bar beside supervised ones, then the counts.

    Supervised text is bold too, which tells what is supervised where a line is only in part (a broken bar).
    ids: show each token as id:text, with its blanks, tabs and line breaks made visible.
    """
    return Text("\n").join(gutter + body for gutter, body in _rows(example, tokenizer, ids))


def _rows(example: Example, tokenizer: PlainTokenizer, ids: bool) -> Iterator[tuple[Text, Text]]:
    """The lines of the whole display as (gutter, body)."""
    for line in _lines(example, tokenizer, ids):
        yield line.gutter, line.body
    yield Text(), Text()
    yield Text(), Text(f"{'block':<6}{'blocks':>8}{'tokens':>9}{'supervised':>13}{'share':>9}", _DIM)
    for row in counts(example, tokenizer):
        style = Style(bold=True) if row.kind is None else Style(color=COLOURS[row.kind])
        figures = f"{row.blocks:>8,}{row.tokens:>9,}{row.supervised:>13,}{row.share:>9}"
        yield Text(), Text.assemble((f"{row.name:<6}", style), (figures, "bold" if row.kind is None else ""))


def _lines(example: Example, tokenizer: PlainTokenizer, ids: bool) -> Iterator[_Line]:
    line = _Line(BlockType.EOS)
    for piece in pieces(example, tokenizer):
        # text never stands beside a structural token, whatever a payload spells
        beside = line.header and not ids and not (piece.text or "").startswith("\n")
        if piece.token or beside:
            if line.marks:
                yield line
            line = _Line(piece.kind, header=bool(piece.token))
        if ids and line.body:
            line.body.append("  ")
        for text, style in _strokes(piece, ids):
            line.kind = piece.kind
            line.marks.add(piece.supervised)
            if text != "\n":
                line.body.append(text, style)
                continue
            yield line
            line = _Line(piece.kind)
    if line.marks:
        yield line


def _strokes(piece: Piece, ids: bool) -> Iterator[tuple[str, Style]]:
    """What to write for a piece; a line break comes by itself."""
    style = Style(color=COLOURS[piece.kind], bold=piece.supervised)
    numbers = "+".join(map(str, piece.ids))
    if piece.token:
        yield piece.token, style + Style(bold=True, reverse=True)
        if ids:
            yield f" {numbers}", _DIM
    elif piece.text is None:
        yield f"⟨{numbers}⟩", style + Style(dim=True)
    elif ids:
        yield f"{numbers}:", _DIM
        yield visible(piece.text).translate(_SPACES), style
        if "\n" in piece.text:
            yield "\n", style
    else:
        for part, plain in _parts(piece.text):
            yield part, style if plain else style + Style(dim=True)


# --- HTML ---------------------------------------------------------------------------------------------------------


def render_html(example: Example, tokenizer: PlainTokenizer, *, ids: bool = False) -> str:
    """The example as one HTML element, self-contained: no script, no remote resource, every payload escaped.

    Supervised tokens are underlined and tinted. Ids show at the pointer, or at all tokens with the box ticked.
    ids: tick it from the start.
    """
    rows = counts(example, tokenizer)
    total = rows.pop()
    bar = "".join(
        f'<i class="{row.name}" style="flex:{part}" title="{row.name}: {row.tokens:,} tokens"{style}></i>'
        for row in rows
        for part, style in ((row.supervised, ""), (row.tokens - row.supervised, " class"))
        if part
    )
    return bar


@dataclass(frozen=True, eq=False, repr=False)
class Preview:
    """A compiled example that shows itself, in a notebook and with rich's `print`."""

    example: Example
    tokenizer: PlainTokenizer

    def __repr__(self) -> str:
        return f"Preview({self.example.input_ids.size:,} tokens, {self.example.supervised_tokens:,} supervised)"

    def _repr_html_(self) -> str:
        return render_html(self.example, self.tokenizer)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for gutter, body in _rows(self.example, self.tokenizer, self.ids):
            # each row of a long line gets the gutter, so that a payload cannot reach the first columns
            for row in body.wrap(console, max(options.max_width - gutter.cell_len, 1), overflow="fold"):
                yield gutter + row
