"""Training rows that repeat held-out text, told by the long runs of words they share."""

import json
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smi.data.contamination import HeldOut
from smi.data.words import ngram_hashes, ngram_text
from smi.protocol.conversation import Conversation, to_stream

QUESTION = "A farmer has seventeen sheep; all but nine of them run away one night. How many are left?"
CHINESE = "小明有十七只羊,除了九只以外都跑了,还剩下几只羊?请说明理由。"


@pytest.fixture
def held_out(tmp_path: Path) -> HeldOut:
    rows = [{"question": QUESTION, "choices": ["8", "9"]}, {"question": "short one", "choices": []}]
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    pq.write_table(pa.table({"turns": [[{"text": CHINESE}]]}), tmp_path / "val.parquet")
    (tmp_path / "notes.txt").write_text("one two three four five six seven eight nine ten eleven twelve thirteen")
    return HeldOut.from_files([tmp_path / "test.jsonl", tmp_path / "val.parquet", tmp_path / "notes.txt"])


def asks(text: str) -> Conversation:
    return Conversation([{"role": "user", "content": text}, {"role": "assistant", "content": "Nine."}])


def test_a_copy_is_found_whatever_stands_around_it_and_however_it_is_written(held_out: HeldOut) -> None:
    found = held_out.overlap(asks(f"Please answer.\n\n{QUESTION.upper().replace(';', ' --')} Think."))
    assert found is not None
    assert found.startswith("shares 'A FARMER HAS SEVENTEEN SHEEP -- ALL BUT NINE OF THEM RUN AWAY ONE' with ")
    assert found.endswith("test.jsonl")
    chinese = held_out.overlap(asks(f"问题:{CHINESE}"))
    assert chinese is not None
    assert chinese.endswith("val.parquet")
    assert "小明有十七只羊" in chinese


def test_what_shares_less_than_the_run_is_left_alone(held_out: HeldOut) -> None:
    twelve = " ".join(QUESTION.split()[:12])
    assert held_out.overlap(asks(f"{twelve} and come back")) is None
    assert held_out.overlap(asks("short one")) is None
    assert held_out.overlap(asks("one two three")) is None
    # runs do not go on from one text to the next
    halves = Conversation([{"role": "user", "content": twelve}, {"role": "assistant", "content": "run away one night"}])
    assert held_out.overlap(halves) is None


def test_streams_and_conversations_are_told_alike_wherever_the_text_stands(held_out: HeldOut) -> None:
    tools = [{"name": "ask", "parameters": {"type": "object"}}]
    call = {"id": "x", "name": "ask", "arguments": {"deep": [{"text": QUESTION}]}}
    text_call = {"id": "x", "type": "function", "function": {"name": "ask", "arguments": json.dumps({"q": QUESTION})}}
    start = {"role": "user", "content": "?"}
    for messages in (
        [start, {"role": "assistant", "content": QUESTION}],
        [start, {"role": "assistant", "content": "!", "reasoning_content": QUESTION}],
        [start, {"role": "assistant", "tool_calls": [call]}],
        [start, {"role": "assistant", "tool_calls": [text_call]}],
        [start, {"role": "assistant", "tool_calls": [call | {"arguments": {}}]},
         {"role": "tool", "tool_call_id": "x", "content": QUESTION}],
        [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}, {"role": "assistant", "content": "9"}],
    ):  # fmt: skip
        talk = Conversation(messages, tools)
        assert held_out.overlap(talk) == held_out.overlap(to_stream(talk)) is not None
    # instructions and declarations are shared by rights
    quiet = Conversation(
        [{"role": "system", "content": QUESTION}, {"role": "developer", "content": QUESTION}, *asks("?").messages],
        [tools[0] | {"description": QUESTION}],
    )
    assert held_out.overlap(quiet) is held_out.overlap(to_stream(quiet)) is None


def test_it_counts_what_it_read_and_travels(held_out: HeldOut) -> None:
    # question, two choices, short one; the turn; the notes
    assert (held_out.texts, held_out.short) == (6, 3)
    assert [Path(file).name for file in held_out.files] == ["test.jsonl", "val.parquet", "notes.txt"]
    again = pickle.loads(pickle.dumps(held_out))
    assert again.overlap(asks(QUESTION)) == held_out.overlap(asks(QUESTION)) is not None


def test_a_run_in_two_files_is_named_after_the_first(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(QUESTION)
    found = HeldOut.from_files([tmp_path / "b.txt", tmp_path / "a.txt"], n=8).overlap(asks(QUESTION))
    assert found is not None
    assert found.endswith("b.txt")


def test_files_that_cannot_serve_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"a": "b"}\n{"a": ')
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    (tmp_path / "bad.csv").write_text("")
    (tmp_path / "empty.jsonl").write_text("")
    for name, message in {
        "gone.jsonl": r"no held-out file .*gone\.jsonl",
        "bad.jsonl": r"bad\.jsonl cannot be read whole: row 1: not valid JSON",
        "bad.txt": r"bad\.txt is not UTF-8",
        "bad.csv": r"bad\.csv is of no known format; known are \.txt, \.parquet",
    }.items():
        with pytest.raises(ValueError, match=message):
            HeldOut.from_files([tmp_path / name])
    with pytest.raises(ValueError, match="no held-out files are named"):
        HeldOut.from_files([])
    with pytest.raises(ValueError, match="runs of 2 words are shared by chance"):
        HeldOut.from_files([tmp_path / "bad.txt"], n=2)
    assert HeldOut.from_files([tmp_path / "empty.jsonl"]).overlap(asks(QUESTION)) is None


def test_words_are_letters_digits_and_marks_of_any_script() -> None:
    def words(text: str) -> int:
        return len(ngram_hashes(text, 1))

    assert words("It's 3.5 km -- naïve, कमल का फूल") == 9
    assert words("我喜欢ramen和ラーメン") == 9
    assert words("👍👍") == 2
    assert words(" \n-- ") == 0
    # composed and case-folded text of another length is still shown
    assert ngram_text("STRASSE und Maße, so und so", 3, 1) == "und masse, so"
    assert (ngram_hashes("a b c", 3) == ngram_hashes("A, b-C", 3)).all()
    assert (ngram_hashes("ab c", 2) != ngram_hashes("a bc", 2)).all()
