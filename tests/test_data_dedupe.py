"""What counts as the same conversation, exactly, in its normalised form, and nearly."""

import pickle
import random
from typing import Any

import numpy as np
import pytest

from smi.data import dedupe
from smi.data.dedupe import PERMUTATIONS, NearDuplicates, fingerprint, fingerprint_key
from smi.protocol.conversation import Conversation, to_stream
from smi.protocol.stream import Block, Span, Stream, Transmission
from smi.protocol.tokens import BlockType

TOOLS = [{"name": "find", "description": "Finds  it.", "parameters": {"type": "object"}}]


def talk(*texts: str) -> Stream:
    roles = ("user", "assistant")
    return to_stream(Conversation([{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]))


def calls(
    first: str, second: str, *, answers: tuple[str, str] | None = None, q: str = "a b", indent: str = ""
) -> Stream:
    def call(id: str) -> dict[str, Any]:
        return {"id": id, "name": "find", "arguments": {"q": q}}

    def answer(id: str, text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": id, "content": text}

    one, two = answers or (first, second)
    messages = [
        {"role": "user", "content": f"{indent}both?"},
        {"role": "assistant", "tool_calls": [call(first), call(second)]},
        answer(one, "1"),
        answer(two, "2"),
        {"role": "assistant", "content": "done"},
    ]
    return to_stream(Conversation(messages, TOOLS))


def same(one: Stream, other: Stream) -> tuple[bool, bool]:
    """Whether two are duplicates exactly, and in their normalised form."""
    exact, normalised = (fingerprint_key(one, mode) == fingerprint_key(other, mode) for mode in ("exact", "normalised"))
    return exact, normalised


def test_the_exact_key_is_the_fingerprint() -> None:
    assert fingerprint_key(talk("a", "b"), "exact") == fingerprint(talk("a", "b"))
    assert len(fingerprint_key(talk("a", "b"), "normalised")) == 32
    with pytest.raises(ValueError, match="exact or normalised form, not by 'fuzzy'"):
        fingerprint_key(talk("a", "b"), "fuzzy")


def test_white_space_does_not_count_in_the_normalised_form() -> None:
    assert same(talk("How  are\nyou?", "fine"), talk(" How are you? ", "fine\n")) == (False, True)
    assert same(talk("a\u00a0b", "c"), talk("a b", "c")) == (False, True)
    # where there is some and where there is none are two things
    assert same(talk("ab", "c"), talk("a b", "c")) == (False, False)
    assert same(calls("x", "y", q="a b"), calls("x", "y", q="a \n b")) == (False, True)
    assert same(calls("x", "y", q="a b"), calls("x", "y", q="a\\nb")) == (False, False)


def test_letters_keep_their_case() -> None:
    assert same(talk("Polish it", "ok"), talk("polish it", "ok")) == (False, False)


def test_ids_of_calls_do_not_count_but_what_they_link_does() -> None:
    assert same(calls("x", "y"), calls("call_1", "call_2")) == (False, True)
    assert same(calls("x", "y"), calls("y", "x")) == (False, True)
    # the answers change places with their ids: another conversation
    assert same(calls("x", "y"), calls("x", "y", answers=("y", "x"))) == (False, False)


def test_what_is_said_by_whom_and_when_counts() -> None:
    one = Stream((Transmission((Block(BlockType.USR, "a"),)), Transmission((Block(BlockType.OUT, "b"),))))
    obs = Stream((Transmission((Block(BlockType.OBS, "a"),)), Transmission((Block(BlockType.OUT, "b"),))))
    split = Stream(
        (
            Transmission((Block(BlockType.USR, "a"),)),
            Transmission((Block(BlockType.OUT, "b"),)),
            Transmission((Block(BlockType.OUT, ""),)),
        )
    )
    for other in (obs, split):
        assert same(one, other) == (False, False)


def test_spans_count_by_namespace_and_ids() -> None:
    def shown(*parts: Any) -> Stream:
        return Stream((Transmission((Block(BlockType.USR, tuple(parts)),)), Transmission((Block(BlockType.OUT, "b"),))))

    image = Span("image", (1, 2))
    different = [
        shown("a ", image),
        shown("a ", Span("image", (12,))),
        shown("a ", Span("audio", (1, 2))),
        shown(image, "a "),
        shown("a image:1,2"),
        shown("a ", image, "b"),
    ]
    for mode in ("exact", "normalised"):
        assert len({fingerprint_key(stream, mode) for stream in different}) == len(different)
    assert same(shown("a ", image), shown("a", image)) == (False, True)


WORDS = [f"word{n}" for n in range(3000)]


def story(seed: int, changed: float = 0.0, length: int = 300) -> Stream:
    """A story of random words, of which a share is replaced by others."""
    rng = random.Random(seed)
    words = [rng.choice(WORDS) for _ in range(length)]
    other = random.Random(f"{seed}/{changed}")
    words = [other.choice(WORDS) if other.random() < changed else word for word in words]
    return talk("Tell me a story about it.", " ".join(words))


def overlap(one: Stream, other: Stream) -> float:
    """The exact share of runs of five words in common, by sets."""

    def runs(stream: Stream) -> set[tuple[str, ...]]:
        found = set()
        for transmission in stream.transmissions:
            for block in transmission.blocks:
                words = block.text.replace(".", "").lower().split()
                found |= {tuple(words[i : i + 5]) for i in range(len(words) - 4)}
        return found

    a, b = runs(one), runs(other)
    return len(a & b) / len(a | b)


def test_signatures_estimate_the_share_of_runs_in_common() -> None:
    errors = []
    for seed in range(30):
        for changed in (0.005, 0.02, 0.05, 0.2):
            pair = story(seed), story(seed, changed)
            one, other = map(NearDuplicates.signature, pair)
            assert (one.dtype, one.shape) == (np.uint32, (PERMUTATIONS,))
            errors.append(float(np.mean(one == other)) - overlap(*pair))
    # the estimate's own spread is at most 0.5 / sqrt(128) = 0.044, and it is not off to one side
    assert np.std(errors) < 0.05
    assert abs(np.mean(errors)) < 0.015


def test_near_duplicates_are_found_and_others_left_alone() -> None:
    near = NearDuplicates(threshold=0.8)
    for index in range(200):
        signature = NearDuplicates.signature(story(index))
        assert near.first_like(signature) is None
        near.add(signature, 1000 + index)
    hits = []
    for index in range(200):
        found = near.first_like(NearDuplicates.signature(story(index, 0.008)))
        assert found in (None, 1000 + index)
        hits.append(found is not None)
        assert near.first_like(NearDuplicates.signature(story(index, 0.3))) is None
    assert np.mean(hits) > 0.9
    assert near.removed == sum(hits)
    assert near.share == sum(hits) / 600


def test_the_first_of_several_is_named_and_a_copy_is_always_found() -> None:
    near = NearDuplicates(threshold=1.0)
    signature = NearDuplicates.signature(story(1))
    for index in (9, 3):
        near.add(signature, index)
    assert near.first_like(signature) == 9
    assert pickle.loads(pickle.dumps(near)).first_like(signature) == 9


def test_instructions_and_tools_do_not_make_conversations_alike() -> None:
    tools = [{"name": "find", "description": " ".join(WORDS[:500]), "parameters": {"type": "object"}}]

    def with_tools(text: str) -> Stream:
        messages = [
            {"role": "system", "content": " ".join(WORDS[500:900])},
            {"role": "user", "content": text},
            {"role": "assistant", "tool_calls": [{"id": "x", "name": "find", "arguments": {"q": text}}]},
        ]
        return to_stream(Conversation(messages, tools))

    one, other = (
        NearDuplicates.signature(with_tools(text)) for text in ("where is the red lamp", "who sells milk here")
    )
    assert np.mean(one == other) < 0.2


def test_short_and_wordless_conversations_are_told_apart() -> None:
    signatures = [NearDuplicates.signature(talk(*texts)) for texts in (("hi", "yes"), ("hi", "no"), ("你好", "再见"))]
    near = NearDuplicates()
    for index, signature in enumerate(signatures):
        assert near.first_like(signature) is None
        near.add(signature, index)


def test_too_large_a_share_of_near_duplicates_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedupe, "JUDGED_ROWS", 10)
    near = NearDuplicates(limit=0.5)
    signature = NearDuplicates.signature(story(0))
    near.first_like(signature)
    near.add(signature, 0)
    for _ in range(8):
        near.first_like(signature)
    with pytest.raises(ValueError, match=r"8 of 9 conversations \(89%\) are near-duplicates, above the limit of 50%"):
        near.finish()
    with pytest.raises(ValueError, match=r"9 of 10 conversations \(90%\)"):
        near.first_like(signature)
    NearDuplicates(limit=1.0).finish()
    for settings in ({"threshold": 0.5}, {"threshold": 1.1}, {"limit": 0}, {"limit": 2}):
        with pytest.raises(ValueError, match="of near-duplicates is"):
            NearDuplicates(**settings)
