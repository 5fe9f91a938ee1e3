"""A compiled example for people: blocks coloured by kind, supervised tokens marked, tokens counted.

Drawn from ids, mask and block types, which is what a model gets, and never from the conversation they came from.
Whatever is not plain text stands in ⟨⟩: ids without text as ⟨70001⟩, bytes that are no character as ⟨0xE6⟩, and
characters that are invisible or would steer a terminal as ⟨U+001B⟩, so does a ⟨ that a payload holds. A payload
that spells a structural token stays text: it stands further in than a real one, without its colour.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby

from rich.console import Console, ConsoleOptions
from rich.style import Style
from rich.text import Text

from smi.protocol.codec import Example
from smi.protocol.tokens import BlockType, PlainTokenizer

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
_SPLIT = re.compile(
    "([\n\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff"
    "\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff⟨])"
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
    """Blocks, tokens and supervised tokens of one kind; of all kinds together where `kind` is None."""

    kind: BlockType | None
    blocks: int
    tokens: int
    supervised: int

    @property
    def name(self) -> str:
        return "all" if self.kind is None else self.kind.name.lower()

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
    # some tokenizers put a blank before every text; it is no part of it
    newline = b"".join(tokenizer.token_bytes(id) or b"" for id in tokenizer.encode("\n"))
    blank = newline.removesuffix(b"\n")
    held: list[int] = []
    data = b""
    head = True
    for index, (id, kind, supervised) in enumerate(tokens):
        part = tokenizer.token_bytes(id)
        if part is None:
            opened = tokenizer.structural.type_of(id)
            token = "⟨eos⟩" if id == tokenizer.eos_id else "" if opened is None else opened.token
            yield Piece((id,), kind, supervised, None, token)
            head = True
            continue
        held.append(id)
        data += part.removeprefix(blank) if head else part
        head = False
        following = tokens[index + 1] if index + 1 < len(tokens) else None
        ends = following is None or following[1:] != (kind, supervised) or tokenizer.token_bytes(following[0]) is None
        if ends or not _is_cut(data):
            yield Piece(tuple(held), kind, supervised, data.decode("utf-8", "surrogateescape"))
            held, data = [], b""


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
    rows = [Count(kind, blocks[kind], tokens[kind], supervised[kind]) for kind in sorted(tokens)]
    return [*rows, Count(None, blocks.total(), tokens.total(), supervised.total())]


def visible(text: str) -> str:
    """Text that no terminal obeys and that hides nothing; line breaks and tabs stay."""
    return "".join(part for part, _ in _parts(text))


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """Text cut into (what to show, whether it stands for itself); line breaks come by themselves."""
    for number, part in enumerate(_SPLIT.split(text)):
        if number % 2 and part != "\n":
            code = ord(part)
            # "surrogateescape" puts bytes there
            yield (f"⟨0x{code - 0xDC00:02X}⟩" if 0xDC80 <= code <= 0xDCFF else f"⟨U+{code:04X}⟩"), False
        elif part:
            yield part, True


# --- text ---------------------------------------------------------------------------------------------------------

_DIM = Style(dim=True)
_SPACES = str.maketrans(
    {" ": "␣", "\t": "⇥", "\n": "⏎", "\N{ZERO WIDTH NON-JOINER}": "⟨U+200C⟩", "\N{ZERO WIDTH JOINER}": "⟨U+200D⟩"}
)


class _Line:
    """A line of the display, and whether all, some or none of its tokens are supervised."""

    def __init__(self, kind: BlockType, header: bool = False) -> None:
        self.kind = kind
        self.header = header
        self.marks: set[bool] = set()
        self.strokes: list[tuple[str, Style]] = []

    @property
    def body(self) -> Text:
        """What the line says; neighbours of one style are set as one."""
        runs = groupby(self.strokes, key=lambda stroke: stroke[1])
        return Text.assemble(*(("".join(text for text, _ in run), style) for style, run in runs))

    @property
    def gutter(self) -> Text:
        """What stands before each row of the line; a payload stands further in than a structural token."""
        bar = "│" if True not in self.marks else "┃" if False not in self.marks else "╏"
        style = Style(color=COLOURS[self.kind], bold=True) if True in self.marks else _DIM
        return Text.assemble((bar, style), " " if self.header else "   ")


def render_text(example: Example, tokenizer: PlainTokenizer, *, ids: bool = False) -> Text:
    """The example for a terminal: one line a line of text, a heavy bar beside supervised ones, then the counts.

    Supervised text is bold too, which tells what is supervised where a line is only in part (a broken bar).
    ids: show each token as id:text, with its blanks, tabs, line breaks and joiners made visible.
    """
    return Text("\n").join(gutter + body for gutter, body in _rows(example, tokenizer, ids))


def _rows(example: Example, tokenizer: PlainTokenizer, ids: bool) -> Iterator[tuple[Text, Text]]:
    """The lines of the whole display as (gutter, body)."""
    for line in _lines(example, tokenizer, ids):
        yield line.gutter, line.body
    yield Text(), Text()
    yield Text(), Text(f"{'block':<6}{'blocks':>8}{'tokens':>9}{'┃ supervised':>14}{'share':>9}", _DIM)
    for row in counts(example, tokenizer):
        style = Style(bold=True) if row.kind is None else Style(color=COLOURS[row.kind])
        figures = f"{row.blocks:>8,}{row.tokens:>9,}{row.supervised:>14,}{row.share:>9}"
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
        if ids and line.strokes:
            line.strokes.append(("  ", _DIM))
        for text, style in _strokes(piece, ids):
            line.kind = piece.kind
            line.marks.add(piece.supervised)
            if text != "\n":
                line.strokes.append((text, style))
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

_CSS = """
.smi-preview{--paper:#fff;--ink:#22262e;--soft:#69707d;--line:#e3e6eb;--tint:15%;background:var(--paper);
  color:var(--ink);padding:16px 20px;border:1px solid var(--line);border-radius:8px;font:13px/1.5 system-ui,sans-serif}
@media (prefers-color-scheme:dark){.smi-preview{--paper:#16181d;--ink:#dfe3ea;--soft:#949cab;--line:#2d323b;--tint:26%}}
.smi-preview .sum{display:flex;flex-wrap:wrap;gap:4px 18px;align-items:baseline;color:var(--soft)}
.smi-preview .sum strong{font-size:16px;color:var(--ink)}
.smi-preview label{margin-left:auto;cursor:pointer}
.smi-preview input{vertical-align:-2px;margin:0 4px 0 0}
.smi-preview .bar{display:flex;gap:2px;height:8px;margin:8px 0 6px;border-radius:4px;overflow:hidden}
.smi-preview .bar i{background:var(--c);min-width:2px}
.smi-preview .bar i.ctx{opacity:.4}
.smi-preview table{border-collapse:collapse;margin:0 0 14px;font-size:12px;font-variant-numeric:tabular-nums}
.smi-preview tr{background:none!important}
.smi-preview th,.smi-preview td{padding:0 0 0 20px;border:0;background:none;color:var(--ink);text-align:right}
.smi-preview th{color:var(--c,var(--soft))}
.smi-preview th:first-child{padding:0;font-weight:400;text-align:left}
.smi-preview th:last-child,.smi-preview td:last-child{color:var(--ink);font-weight:600}
.smi-preview .b{position:relative;margin:0;padding:3px 90px 3px 12px;border-left:3px solid var(--line);
  font:12.5px/1.75 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
  white-space:pre-wrap;overflow-wrap:anywhere;tab-size:4}
.smi-preview .b.all{border-left-color:var(--c)}
.smi-preview .b::after{content:attr(data-n);position:absolute;right:8px;top:3px;font-size:11px;color:var(--soft)}
.smi-preview .b.eot{margin-bottom:12px}
.smi-preview .b b{padding:1px 6px;border-radius:4px;background:var(--c);color:#fff;font-weight:600}
.smi-preview .b .s{background:color-mix(in srgb,var(--c) var(--tint),transparent);
  box-shadow:0 2px 0 color-mix(in srgb,var(--c) 70%,transparent)}
.smi-preview .b b.s{background:var(--c)}
.smi-preview .b i{font-size:11px;font-style:normal;border:1px solid var(--soft);border-radius:3px;color:var(--soft)}
.smi-preview:has(input:checked) .b [title]{unicode-bidi:isolate}
.smi-preview:has(input:checked) .b [title]::before{content:attr(title);margin:0 2px 0 3px;padding:0 3px;
  border-radius:3px;background:var(--line);color:var(--soft);font-size:9px;font-weight:400}
"""


def render_html(example: Example, tokenizer: PlainTokenizer, *, ids: bool = False) -> str:
    """The example as one HTML element, self-contained: no script, no remote resource, every payload escaped.

    Supervised tokens are tinted and underlined. An id shows at the pointer, and all of them with the box ticked.
    ids: ticked from the start. The text of the stream can be copied from the page as it is.
    """
    *rows, total = counts(example, tokenizer)
    bar = [
        f'<i class="{row.name}{name}" style="flex:{tokens}" title="{row.name}: {tokens:,} tokens"></i>'
        for row in rows
        for name, tokens in (("", row.supervised), (" ctx", row.tokens - row.supervised))
        if tokens
    ]
    columns = [
        (f'<th class="{row.name}">{row.name}', f"{row.blocks:,}", f"{row.tokens:,}", f"{row.supervised:,}", row.share)
        for row in (*rows, total)
    ]
    names, *figures = zip(*columns, strict=True)
    table = [f"<tr><th>{''.join(names)}"]
    for title, cells in zip(("blocks", "tokens", "supervised", "share"), figures, strict=True):
        table.append(f"<tr><th>{title}<td>{'<td>'.join(cells)}")
    colours = [f".smi-preview .{kind.name.lower()}{{--c:{colour}}}\n" for kind, colour in COLOURS.items()]
    return "".join(
        (
            f'<div class="smi-preview"><style>{_CSS}{"".join(colours)}</style>',
            f'<div class="sum"><strong>{total.tokens:,} tokens</strong>',
            f"<span>{total.supervised:,} supervised ({total.share}): tinted and underlined</span>",
            f'<label><input type="checkbox"{" checked" if ids else ""}>token ids</label></div>',
            f'<div class="bar">{"".join(bar)}</div>',
            f"<table>{''.join(table)}</table>",
            *map(_section, _sections(pieces(example, tokenizer))),
            "</div>",
        )
    )


def _sections(stream: Iterable[Piece]) -> list[list[Piece]]:
    """The pieces block by block."""
    sections: list[list[Piece]] = []
    for piece in stream:
        if not sections or piece.token or piece.kind is not sections[-1][-1].kind:
            sections.append([])
        sections[-1].append(piece)
    return sections


def _section(section: list[Piece]) -> str:
    tokens = sum(len(piece.ids) for piece in section)
    name = section[0].kind.name.lower() + (" all" if all(piece.supervised for piece in section) else "")
    opening = f'<div class="b {name}" data-n="{tokens:,} token{"s"[: tokens != 1]}">'
    return "".join((opening, *map(_element, section), "</div>\n"))


def _element(piece: Piece) -> str:
    tag = "b" if piece.token else "span"
    supervised = ' class="s"' if piece.supervised else ""
    if piece.token:
        text = escape(piece.token)
    elif piece.text is None:
        text = f"<i>⟨{piece.ids[0]}⟩</i>"
    else:
        text = "".join(escape(part) if plain else f"<i>{part}</i>" for part, plain in _parts(piece.text))
    return f'<{tag}{supervised} title="{" ".join(map(str, piece.ids))}">{text}</{tag}>'


@dataclass(frozen=True, eq=False, repr=False)
class Preview:
    """A compiled example that shows itself: in a notebook, and with rich's `print` in a terminal.

    ids: show token ids.
    """

    example: Example
    tokenizer: PlainTokenizer
    ids: bool = False

    def __repr__(self) -> str:
        return f"Preview({self.example.input_ids.size:,} tokens, {self.example.supervised_tokens:,} supervised)"

    def _repr_html_(self) -> str:
        return render_html(self.example, self.tokenizer, ids=self.ids)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for gutter, body in _rows(self.example, self.tokenizer, self.ids):
            # each row of a long line gets the gutter, so that a payload cannot reach the first columns
            for row in body.wrap(console, max(options.max_width - gutter.cell_len, 1), tab_size=4, overflow="fold"):
                yield gutter + row
