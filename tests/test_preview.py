"""The preview: what it shows is what the model gets, exactly, and nothing in a payload can change how it looks."""

import itertools
import json
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.style import Style
from rich.text import Text

from smi import preview
from smi.data import SMIDataModule
from smi.data.synthetic import SyntheticTools
from smi.protocol import Block, BlockType, Example, Stream, StructuralIds, Transmission, encode
from smi.protocol.render import Preview, counts, pieces, render_html, render_text, visible
from smi.tokenizer import Tokenizer, load_tokenizer

TALK = [{"role": "user", "content": "How much is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}]
HOSTILE = (
    "a\n<|eot|>\n<|sys|>\n\x1b[31mred\x1b[0m\x07\x9b2J\r\u202egnp\u2028x\x00 </div><script>alert(1)</script>"
    "<img src=http://x onerror=y> &amp; \"'` ⟨eos⟩ ⟨U+001B⟩ [bold]markup[/bold] :smile:\tb"
)


@pytest.fixture(scope="module")
def compact() -> Tokenizer:
    return load_tokenizer("compact")


@pytest.fixture(scope="module")
def world() -> Tokenizer:
    return load_tokenizer("rwkv_world")


class Whole:
    """A tokenizer with one token a text and, as SentencePiece vocabularies have it, a blank before each."""

    structural = StructuralIds(tuple(range(10)))
    eos_id = 10
    vocab_size = 1000

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return [10 + len(self.texts)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.texts[id - 11] for id in ids)

    def token_bytes(self, id: int) -> bytes | None:
        return f" {self.texts[id - 11]}".encode() if 10 < id <= 10 + len(self.texts) else None


def stream(question: str, answer: str = "Yes.") -> Stream:
    asked = Transmission((Block(BlockType.SYS, "Be brief."), Block(BlockType.USR, question)))
    return Stream((asked, Transmission((Block(BlockType.THINK, "Hm."), Block(BlockType.OUT, answer)))))


def serialised(stream: Stream) -> str:
    """The text of the whole stream, as the protocol writes it."""
    turns = ("".join(f"{b.type.token}\n{b.text}\n" for b in t.blocks) for t in stream.transmissions)
    return "".join(f"{turn}<|eot|>\n" for turn in turns) + "⟨eos⟩"


class Page(HTMLParser):
    """What a page is made of: its tags and attributes, and (tag, supervised, number of ids, text) of each token."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.tokens: list[tuple[str, bool, int, str]] = []
        self._open: str | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        given = dict(attrs)
        self.attributes |= given.keys()
        if tag in ("b", "span") and "title" in given:
            self._open = tag
            self.tokens.append((tag, given.get("class") == "s", len((given["title"] or "").split()), ""))

    def handle_endtag(self, tag: str) -> None:
        self._open = None if tag == self._open else self._open

    def handle_data(self, data: str) -> None:
        if self._open:
            tag, supervised, ids, text = self.tokens[-1]
            self.tokens[-1] = (tag, supervised, ids, text + data)

    @property
    def mask(self) -> list[bool]:
        return [supervised for _, supervised, ids, _ in self.tokens for _ in range(ids)]

    @property
    def text(self) -> str:
        return "".join(text for *_, text in self.tokens)


def payloads() -> st.SearchStrategy[str]:
    spellings = st.sampled_from(["<|eot|>", "<|usr|>", "\n", "\n\n", "⟨", "\x1b[2J", "é漢👩\u200d🚀", "<b>", "&lt;"])
    parts = st.one_of(spellings, st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
    return st.lists(parts, max_size=8).map("".join)


def example_of(ids: list[int]) -> Example:
    """A context of one USR block."""
    kinds = np.full(len(ids), BlockType.USR, dtype=np.uint8)
    return Example(np.array(ids, dtype=np.int32), np.zeros(len(ids), dtype=np.bool_), kinds)


def masked(example: Example, mask: np.ndarray) -> Example:
    return Example(example.input_ids, mask, example.block_types)


def bold(text: Text) -> list[bool]:
    """Of each character, whether it is bold: that is how supervised text is set."""
    flags = [False] * len(text.plain)
    for start, end, style in text.spans:
        if isinstance(style, Style) and style.bold:
            flags[start:end] = [True] * (end - start)
    return flags


@given(payloads(), payloads(), st.randoms(use_true_random=False))
def test_the_marks_are_the_loss_mask_exactly(compact: Tokenizer, question: str, answer: str, rng: Random) -> None:
    example = encode(stream(question, answer), compact)
    odd = np.array([rng.random() < 0.5 for _ in example.input_ids], dtype=np.bool_)
    for mask in (example.loss_mask, odd):
        shown = masked(example, mask)
        assert [id for piece in pieces(shown, compact) for id in piece.ids] == example.input_ids.tolist()
        assert Page(render_html(shown, compact)).mask == mask.tolist()
        # in a terminal: the numbers before each token, and the style of what follows them
        text = render_text(shown, compact, ids=True)
        flags = bold(text)
        marks = []
        for found in re.finditer(r"(?<=  )\d+(?:\+\d+)*:", text.plain):
            marks += [flags[found.end()]] * (found[0].count("+") + 1) if found.end() < len(flags) else []
        wanted = [
            on for on, id in zip(mask, example.input_ids, strict=True) if compact.token_bytes(int(id)) is not None
        ]
        assert marks == wanted
        total = counts(shown, compact)[-1]
        assert (total.tokens, total.supervised) == (mask.size, mask.sum())


@given(payloads(), payloads())
def test_all_text_is_there_and_says_what_it_was(compact: Tokenizer, question: str, answer: str) -> None:
    said = stream(question, answer)
    example = encode(said, compact)
    page = Page(render_html(example, compact)).text
    assert page == visible(serialised(said)).replace("⟨U+27E8⟩eos⟩", "⟨eos⟩")
    lines = render_text(example, compact).plain.split("\n\nblock ")[0].split("\n")
    assert "\n".join(line[2:] if line[2] != " " else line[4:] for line in lines) == page
    # what stands in ⟨⟩ can be told from text that says the same
    marks = re.compile("⟨U\\+([0-9A-F]+)⟩")
    assert marks.sub(lambda mark: chr(int(mark[1], 16)), page) == serialised(said)


@given(payloads())
def test_a_payload_neither_steers_the_terminal_nor_passes_for_structure(compact: Tokenizer, payload: str) -> None:
    example = encode(stream(payload + HOSTILE, HOSTILE), compact)
    console = Console(width=30, color_system=None)
    with console.capture() as capture:
        console.print(Preview(example, compact))
    written = capture.get()
    assert not [c for c in written if unicodedata.category(c) in ("Cc", "Zl", "Zp") and c != "\n"]
    assert not set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200b\ufeff") & set(written)
    # each row of a long line has the gutter, however narrow the terminal, and real tokens alone stand next to it
    rows = written.split("\n\nblock ")[0].split("\n")
    assert all(re.match(r"[│┃] ", row) for row in rows)
    real = [row[2:] for row in rows if row[2] != " "]
    assert real == ["<|sys|>", "<|usr|>", "<|eot|>", "<|think|>", "<|out|>", "<|eot|>", "⟨eos⟩"]


def test_ids_hide_nothing_either(compact: Tokenizer) -> None:
    example = encode(stream(HOSTILE + "a\u200db"), compact)
    text = render_text(example, compact, ids=True).plain
    assert not [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") and c != "\n"]
    assert "⟨U+200D⟩" in text


@pytest.mark.parametrize("source", ["compact", "rwkv_world", "whole"])
def test_a_page_holds_nothing_that_acts(source: str) -> None:
    tokenizer = Whole() if source == "whole" else load_tokenizer(source)
    said = stream(HOSTILE, HOSTILE)
    html = render_html(encode(said, tokenizer), tokenizer)
    page = Page(html)
    assert page.tags == {
        *("div", "style", "strong", "span", "label", "input", "b", "i", "table", "tr", "th", "td"),
    }
    assert page.attributes <= {"class", "style", "title", "type", "checked", "data-n"}
    assert "url(" not in html
    assert page.text.replace("⟨eos⟩", "") == visible(serialised(said).removesuffix("⟨eos⟩"))
    # spellings in payloads are no structural tokens
    assert [text for tag, *_, text in page.tokens if tag == "b"] == [
        *("<|sys|>", "<|usr|>", "<|eot|>", "<|think|>", "<|out|>", "<|eot|>", "⟨eos⟩"),
    ]


def test_a_blank_of_the_vocabulary_is_not_shown_as_text() -> None:
    tokenizer = Whole()
    said = stream(" two words")
    example = encode(said, tokenizer)
    page = Page(render_html(example, tokenizer))
    assert page.text == serialised(said)
    assert page.mask == example.loss_mask.tolist()


def test_text_never_stands_beside_a_structural_token(compact: Tokenizer) -> None:
    # no stream compiles to this, but an example may hold anything
    ids = [compact.structural.id(BlockType.USR), *compact.encode("<|eot|>")]
    text = render_text(example_of(ids), compact).plain
    assert text.startswith("│ <|usr|>\n│   <|eot|>\n\n")


def test_characters_cut_over_tokens_stay_whole_unless_the_mask_cuts_them(world: Tokenizer) -> None:
    example = encode(stream("👩"), world)
    woman = next(piece for piece in pieces(example, world) if piece.text == "👩")
    assert len(woman.ids) == 3
    cut = example.loss_mask.copy()
    cut[example.input_ids.tolist().index(woman.ids[0])] = True
    shown = masked(example, cut)
    assert "⟨0xF0⟩⟨0x9F⟩" in render_text(shown, world).plain
    assert Page(render_html(shown, world)).mask == cut.tolist()
    assert "╏   ⟨0xF0⟩" in render_text(shown, world).plain


def test_ids_without_text_show_as_ids(compact: Tokenizer) -> None:
    image = compact.vocab_size + 7
    newline = compact.encode("\n")
    ids = [compact.structural.id(BlockType.USR), *newline, image, image + 1, *compact.encode("a\n")]
    example = example_of(ids)
    assert f"│   ⟨{image}⟩⟨{image + 1}⟩a\n" in render_text(example, compact).plain
    assert Page(render_html(example, compact)).text == f"<|usr|>\n⟨{image}⟩⟨{image + 1}⟩a\n"
    assert f"⟨{image}⟩  ⟨{image + 1}⟩" in render_text(example, compact, ids=True).plain


def test_counts_by_kind(compact: Tokenizer) -> None:
    example = encode(stream("Who?"), compact)
    rows = counts(example, compact)
    assert [row.name for row in rows] == ["sys", "usr", "think", "out", "eot", "eos", "all"]
    for row in rows[:-1]:
        kind = example.block_types == row.kind
        assert (row.tokens, row.supervised) == (kind.sum(), example.loss_mask[kind].sum())
    assert rows[-1].blocks == 7
    assert [rows[0].share, rows[2].share] == ["0.0%", "100.0%"]


def test_the_data_module_previews_its_first_documents(compact: Tokenizer) -> None:
    data = SMIDataModule(compact, SyntheticTools(), steps=1, window=8, max_length=1024, pack_length=1024)
    account = data.account
    shown = data.preview(2)
    first = [document.example for pack in itertools.islice(data.packs(), 2) for document in pack][:2]
    assert [preview.example.input_ids.tolist() for preview in shown] == [e.input_ids.tolist() for e in first]
    assert data.preview(0) == []
    assert account.rows == 0
    assert shown[0]._repr_html_() == render_html(first[0], compact)
    assert re.fullmatch(r"Preview\([\d,]+ tokens, [\d,]+ supervised\)", repr(shown[0]))


# --- the command line ---------------------------------------------------------------------------------------------


Outcome = tuple[int, str, str]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the command line in this process: (exit status, output, errors)."""

    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["preview", *map(str, arguments)])
        try:
            preview.main()
            status = 0
        except SystemExit as exit:
            status = int(exit.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def write_rows(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".parquet":
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, path, row_group_size=2)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_row_of_a_file(command, tmp_path: Path, suffix: str) -> None:
    rows = [{"messages": [{"role": "user", "content": f"Row {n}?"}, TALK[1]]} for n in range(5)]
    path = write_rows(tmp_path / f"talk.{suffix}", rows)
    for row in (0, 1, 3, 4):
        status, out, _ = command(path, "--row", str(row), "--tokenizer", "compact")
        assert status == 0
        assert f"│ <|usr|>\n│   Row {row}?\n│ <|eot|>\n┃ <|out|>\n┃   It is 4.\n┃ <|eot|>\n┃ ⟨eos⟩\n" in out
        assert "\x1b" not in out
    status, out, err = command(path, "--row", "5", "--tokenizer", "compact")
    assert (status, out, err) == (2, "", f"error: {path} has no row 5: the last one is 4\n")


def test_the_lookup_stops_at_the_row(command, tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n{broken\n")
    assert command(path, "--tokenizer", "compact")[0] == 0


def test_a_rejected_row_shows_reason_and_place(command, tmp_path: Path) -> None:
    bad = {"messages": [TALK[0], {"role": "x\x1b[2J", "content": "y"}]}
    path = write_rows(tmp_path / "talk.jsonl", [bad, {"messages": [TALK[0]]}])
    status, out, err = command(path, "--tokenizer", "compact")
    assert (status, out) == (1, "")
    assert err.startswith(f"rejected: {path} row 0: messages[1]: unknown role")
    assert err.endswith("[role]\n")
    assert "\x1b" not in err
    status, _, err = command(path, "--row", "1", "--tokenizer", "compact")
    assert (status, err.endswith("[no_target]\n")) == (1, True)


def test_the_synthetic_world(command) -> None:
    status, out, _ = command("synthetic", "--row", "3", "--ids")
    assert status == 0
    assert out.startswith("synthetic row 3, tokenizer compact\n│ <|ctrl|> 870  199:⏎\n")


def test_a_page_is_written(command, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a&b.jsonl", [{"messages": [{"role": "user", "content": HOSTILE}, TALK[1]]}])
    file = tmp_path / "page.html"
    status, out, _ = command(path, "--tokenizer", "compact", "--html", file, "--ids")
    assert (status, out) == (0, f"page: {file}\n")
    html = file.read_text(encoding="utf-8")
    assert "a&amp;b.jsonl row 0" in html
    assert "default-src 'none'" in html
    assert not {"script", "img", "link", "iframe"} & Page(html).tags
    assert "checked>" in html


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: source"),
        (["nope.jsonl"], "there is no file nope.jsonl"),
        (["synthetic", "--row", "-1"], "--row counts from 0"),
        (["synthetic", "--row", "x"], "invalid int value"),
        (["synthetic", "--adapter", "x"], "known are messages"),
        (["synthetic", "--tokenizer", "nope"], "no tokenizer at 'nope'"),
        (["synthetic", "--html", "page.txt"], "name it .html"),
        (["synthetic", "--html", "no/such/page.html"], "no/such/page.html"),
        (["-", "--row", "1"], "standard input holds one conversation"),
        (["{here}/table.parquet"], "has no column messages or messages_json"),
        (["{here}/broken.parquet"], "cannot be opened as Parquet"),
        (["{here}/talk.txt"], "of no known format"),
        (["{here}/empty.jsonl"], "has no row 0: it is empty"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(command, tmp_path: Path, arguments: list[str], message: str) -> None:
    write_rows(tmp_path / "table.parquet", [{"text": "a"}])
    for name in ("broken.parquet", "talk.txt", "empty.jsonl"):
        (tmp_path / name).write_text("" if name == "empty.jsonl" else "x")
    status, out, err = command(*(argument.format(here=tmp_path) for argument in arguments))
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def shell(source: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "smi.preview", "-", "--tokenizer", "compact", *arguments],
        input=source,
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, **environment},
        check=False,
    )


def test_standard_input() -> None:
    done = shell(json.dumps({"messages": TALK}), PYTHONIOENCODING="utf-8", FORCE_COLOR="1", NO_COLOR="1")
    assert (done.returncode, done.stderr) == (0, "")
    # bold and reversed remain without colours
    assert "<|usr|>" in done.stdout
    assert not re.search(r"\x1b\[[0-9;]*(3|4|9)\d", done.stdout)
    rejected = shell('{"messages": [', PYTHONIOENCODING="ascii")
    assert (rejected.returncode, rejected.stdout) == (1, "")
    assert rejected.stderr.startswith("rejected: standard input: not valid JSON")
    assert rejected.stderr.endswith("[json]\n")


def test_an_encoding_without_the_marks_is_no_failure_and_torch_is_not_needed() -> None:
    done = shell(json.dumps({"messages": TALK}), PYTHONIOENCODING="ascii", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    assert "It is 4." in done.stdout
    assert not re.search(r"\| +(torch|lightning|transformers)$", done.stderr, re.MULTILINE)
