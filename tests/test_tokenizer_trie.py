"""The World encoder against its definition and against an independent implementation."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from families import hostile
from hypothesis import given
from hypothesis import strategies as st

from smi.tokenizer import Tokenizer, load_tokenizer
from smi.tokenizer_trie import LongestMatch

DATA = Path(__file__).parent / "data"
BYTES = [bytes([byte]) for byte in range(256)]


def table_of(pieces: list[bytes | None]) -> dict[bytes, int]:
    return {piece: id for id, piece in reversed(list(enumerate(pieces))) if piece}


def by_definition(table: dict[bytes, int], text: str) -> list[int]:
    """At each byte the longest piece that fits."""
    longest = max(map(len, table))
    data, found, start = text.encode(), [], 0
    while start < len(data):
        piece = next(data[start:end] for end in range(start + longest, start, -1) if data[start:end] in table)
        found.append(table[piece])
        start += len(piece)
    return found


@pytest.fixture(scope="module")
def peer() -> Callable[[str], list[int]]:
    from pyrwkv_tokenizer import RWKVTokenizer

    return RWKVTokenizer().encode


@pytest.fixture(scope="module")
def pieces(world: Tokenizer) -> dict[int, bytes]:
    every = {id: world.token_bytes(id) for id in range(world.vocab_size)}
    return {id: piece for id, piece in every.items() if piece}


@pytest.fixture(scope="module")
def table(pieces: dict[int, bytes]) -> dict[bytes, int]:
    return {piece: id for id, piece in pieces.items()}


@given(st.lists(st.binary(max_size=6), max_size=40), st.lists(st.text("ab\0\x7fé😀", max_size=30), max_size=5))
def test_any_vocabulary_is_matched_greedily(more: list[bytes], texts: list[str]) -> None:
    pieces = [None, b"", *BYTES, *more, b"ab", b"abab", b"\0\0", "é".encode(), "😀".encode()[:3]]
    ids, bounds = LongestMatch(pieces)(texts)
    table = table_of(pieces)
    assert (ids.dtype, bounds.dtype) == (np.int32, np.int64)
    assert [ids[start:end].tolist() for start, end in pairwise(bounds)] == [
        by_definition(table, text) for text in texts
    ]


def test_a_vocabulary_without_some_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="no token for the byte 0x0A"):
        LongestMatch([piece for piece in BYTES if piece != b"\n"])


def test_vocabularies_without_any_longer_token_and_with_long_ones() -> None:
    assert LongestMatch(BYTES)(["aé"])[0].tolist() == [97, 0xC3, 0xA9]
    every_pair = [*BYTES, *(bytes([one, other]) for one in range(256) for other in range(256))]
    text = "".join(map(chr, range(0x500)))
    assert LongestMatch(every_pair)([text])[0].tolist() == by_definition(table_of([*every_pair]), text)
    assert LongestMatch([*BYTES, b"x" * 5000])(["x" * 10_001])[0].tolist() == [256, 256, 120]


@given(text=hostile())
def test_world_agrees_with_its_peer(text: str, world: Tokenizer, peer: Callable[[str], list[int]]) -> None:
    assert world.encode(text) == peer(text)


@given(ids=st.lists(st.integers(1, 65_529), max_size=40))
def test_world_on_its_own_tokens(
    ids: list[int], world: Tokenizer, pieces: dict[int, bytes], table: dict[bytes, int]
) -> None:
    # tokens side by side, where a longer one may begin in one and end in the next
    text = b"".join(pieces[id] for id in ids).decode("utf-8", "replace")
    assert world.encode(text) == by_definition(table, text)
    # every cut of the ids has a text
    for cut in range(len(ids)):
        assert isinstance(world.decode(ids[:cut], errors="replace"), str)


def test_every_token_of_world_is_itself(world: Tokenizer, pieces: dict[int, bytes]) -> None:
    texts = {id: piece.decode() for id, piece in pieces.items() if _is_text(piece)}
    assert len(texts) > 64_000
    assert world.encode_batch(list(texts.values())) == [[id] for id in texts]


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(texts=st.lists(hostile(), max_size=5), name=st.sampled_from(["world", "t1", "unigram", "byte_bpe_prefix"]))
def test_flat_equals_batch(texts: list[str], name: str, family: dict[str, Tokenizer]) -> None:
    ids, bounds = family[name].encode_flat(texts)
    assert (ids.dtype, bounds.dtype, bounds[0], bounds[-1]) == (np.int32, np.int64, 0, ids.size)
    rows = [ids[start:end].tolist() for start, end in pairwise(bounds)]
    assert rows == family[name].encode_batch(texts)


def test_a_checkpoint_with_the_world_vocabulary_gets_the_exact_encoder(world: Tokenizer, tmp_path: Path) -> None:
    world.save_pretrained(tmp_path / "saved")
    # as public checkpoints have it: no structural tokens yet, the end of sequence named by id alone
    document = json.loads((tmp_path / "saved" / "tokenizer.json").read_text())
    document["added_tokens"] = document["added_tokens"][:1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    shutil.rmtree(tmp_path / "saved")
    loaded = load_tokenizer(str(tmp_path))
    rows = [json.loads(line) for line in (DATA / "tokenizer_world.jsonl").read_text("utf-8").split("\n") if line]
    assert loaded.encode_batch([row["text"] for row in rows]) == [row["ids"] for row in rows]
    assert 0 not in loaded.encode("a <|endoftext|> b" + "<|endoftext|>" * 5)
    assert loaded.structural.ids == world.structural.ids


@pytest.mark.parametrize(
    "pattern",
    [
        "It was the best of times, it was the worst of times; ",
        " ",
        "a",
        "=",
        "nospaces",
        "\x00\xff\x81é\u0800",
        "😀👩\u200d🚀",
    ],
    ids=["prose", "blanks", "a", "equals", "no spaces", "bytes", "emoji"],
)
def test_time_is_linear(pattern: str, world: Tokenizer) -> None:
    def fastest(size: int) -> float:
        text = (pattern * (size // len(pattern.encode()) + 1))[:size]
        times = []
        for _ in range(5):
            start = time.process_time()
            world.encode_flat([text])
            times.append(time.process_time() - start)
        return min(times) / len(text.encode())

    # 1.2 on a quiet machine; what is quadratic comes out at 10
    assert fastest(1_000_000) < 2.5 * fastest(100_000)


def test_threads_share_an_encoder(world: Tokenizer) -> None:
    texts = [f"thread {number} " * 2000 for number in range(8)]
    alone = [world.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(world.encode, texts)) == alone


def test_importing_the_tokenizer_stays_light() -> None:
    code = "import sys, smi.tokenizer, smi.data.packing; print({'numba', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
