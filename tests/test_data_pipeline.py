"""The journey of a row, over the whole mirror of public sources and over mixtures made to measure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from mirror import EXPECTED, HUB, REASONS, SOURCES

from smi.data.adapters import adapter_for
from smi.data.epochs import epoch_documents
from smi.data.pipeline import (
    Compiler,
    Document,
    RowAccount,
    check_sources,
    fingerprint,
    share_of,
)
from smi.data.sources import Location, Source, SourceSpec, find_files, list_blocks, read_block, read_rows
from smi.protocol.conversation import Conversation, to_stream
from smi.protocol.stream import ProtocolError
from smi.protocol.tokens import StructuralIds
from smi.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(load_tokenizer("rwkv_world"), 2048)


@pytest.mark.parametrize("name", SOURCES)
def test_every_row_of_the_mirror_has_its_outcome(name: str, compiler: Compiler) -> None:
    adapter = adapter_for(SOURCES[name])
    cases = EXPECTED[name]["cases"]
    seen: set[bytes] = set()
    rows = list(read_rows(SOURCES[name], HUB, adapter.columns))
    assert len(rows) == len(cases) == EXPECTED[name]["rows"]
    for row, case in zip(rows, cases, strict=True):
        assert row.where.row == case["row"]
        try:
            talk = row.value if isinstance(row.value, ProtocolError) else adapter.convert(row.value)
        except ProtocolError as error:
            talk = error
        result = compiler(talk, row.where, lambda mark: "duplicate" if mark in seen else None)
        if isinstance(result, Document):
            assert case["expect"] == "accept", case
            assert 0 < result.targets <= result.tokens <= 2048
            seen.add(result.fingerprint)
        else:
            assert case["expect"] == "reject", (case, result)
            assert result.reason == REASONS[case["why"]], (case, result)


@pytest.mark.parametrize("seed", range(3))
def test_rows_have_their_outcomes_in_any_order(seed: int, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smi.data.readers.BLOCK_BYTES", 1000)
    blocks = [(source, block) for source in SOURCES.values() for file in find_files(source, HUB)
              for block in list_blocks(file)]  # fmt: skip
    rng = Random(seed)
    rng.shuffle(blocks)
    rows = [(source, row) for source, block in blocks for row in read_block(block, source.name, HUB)]
    rng.shuffle(rows)
    adapters = {name: adapter_for(source) for name, source in SOURCES.items()}
    seen: dict[bytes, list[dict[str, Any]]] = {}
    for source, row in rows:
        case = EXPECTED[source.name]["cases"][row.where.row]
        try:
            raw = row.value if isinstance(row.value, ProtocolError) else adapters[source.name].convert(row.value)
        except ProtocolError as error:
            raw = error
        result = compiler(raw, row.where)
        if isinstance(result, Document):
            seen.setdefault(result.fingerprint, []).append(case)
        else:
            assert case["expect"] == "reject", (case, result)
            assert result.reason == REASONS[case["why"]], (case, result)
    # of rows that say the same, whichever comes first is taken: as many as the mirror accepts, and no more
    assert len(rows) == 757
    assert len(seen) == 720
    for cases in seen.values():
        assert sorted(case["why"] == "duplicate" for case in cases) == [False, True][: len(cases)]


@pytest.mark.parametrize("order", ["a", "b"])
def test_an_epoch_of_the_mixture_accounts_for_every_row_in_any_order(order: str, compiler: Compiler) -> None:
    account = RowAccount()
    documents = list(epoch_documents(list(SOURCES.values()), compiler, account, root=HUB, order=order))
    assert len(documents) == account.accepted == sum(case["accept"] for case in EXPECTED.values())
    assert account.rows == account.accepted + account.rejected.total() == 757
    assert account.tokens == sum(document.tokens for document in documents)
    assert account.supervised_tokens == sum(document.targets for document in documents)
    for name, case in EXPECTED.items():
        part = account.sources[name]
        assert (part.rows, part.accepted, part.rejected.total()) == (
            case["rows"],
            case["accept"],
            case["reject"],
        )
        assert part.shortfall == SOURCES[name].quota - part.supervised_tokens  # type: ignore[operator]
    assert set(account.shortfalls) == set(SOURCES)
    assert str(account.sources["opencodeinstruct"].samples["score"][0]).endswith("[score]")
    assert len(account.sources["opencodeinstruct"].samples["score"]) == 3
    text = str(account)
    assert "3,500,000" in text
    assert f"{account.shortfalls['aya']:,}" in text


def test_a_fingerprint_is_of_what_is_said_not_of_how_it_is_written() -> None:
    call = {"name": "find", "arguments": {"q": "x"}}
    tool = {"name": "find", "description": "d", "parameters": {"type": "object"}}
    end: list[Any] = [
        {"role": "tool", "tool_call_id": "a", "content": "r"},
        {"role": "assistant", "content": "ok"},
    ]
    one = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"id": "a", **call}]},
        *end,
    ]
    wrapped = {"id": "a", "type": "function", "function": {"name": "find", "arguments": '{"q": "x"}'}}
    two = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning_content": None, "tool_calls": [wrapped]},
        *end,
    ]
    marks = {
        fingerprint(to_stream(Conversation(one, [tool]))),
        fingerprint(to_stream(Conversation(two, [{"type": "function", "function": tool}]))),
    }
    assert len(marks) == 1
    assert fingerprint(to_stream(Conversation(one[:1] + end[1:]))) not in marks
    assert 0 <= share_of(marks.pop()) < 1


@dataclass
class Counting:
    """Conversations that count, `size` of them; after `repeat_from` the same one for ever."""

    name: str
    size: int
    length: int = 20
    weight: float | None = None
    quota: int | None = None

    def conversations(self, epoch: int, held_out: bool) -> Iterator[Conversation]:
        for number in range(self.size):
            yield talk(f"{self.name} {number} {epoch}", self.length)


def talk(text: str, length: int = 20) -> Conversation:
    return Conversation([{"role": "user", "content": text}, {"role": "assistant", "content": "x " * length}])


def epoch(sources: list[Source], compiler: Compiler, **options: Any) -> tuple[list[Document], RowAccount]:
    account = RowAccount()
    return list(epoch_documents(sources, compiler, account, order="o", **options)), account


def test_sources_are_mixed_by_their_weights_in_supervised_tokens(compiler: Compiler) -> None:
    # documents of b are three times as long, and still it gets a third of the tokens while both last
    sources: list[Source] = [
        Counting("a", 1000, 20, weight=2, quota=20_000),
        Counting("b", 400, 60, weight=1, quota=10_000),
    ]
    documents, account = epoch(sources, compiler)
    poured: Counter[str] = Counter()
    for document in documents:
        poured[document.where.source] += document.targets
        if poured["a"] < 19_900:
            # never further apart than the longest document
            assert abs(poured["a"] / 2 - poured["b"]) <= 70
    for name in "ab":
        part = account.sources[name]
        assert part.supervised_tokens >= (part.quota or 0) > part.supervised_tokens - 200
        assert not part.shortfall
    assert not account.shortfalls


def test_a_source_that_runs_dry_is_a_stated_shortfall_and_the_others_go_on(compiler: Compiler) -> None:
    sources: list[Source] = [Counting("dry", 3, quota=5_000), Counting("full", 400, quota=5_000)]
    _, account = epoch(sources, compiler)
    assert account.sources["dry"].accepted == 3
    assert account.shortfalls == {"dry": 5_000 - account.sources["dry"].supervised_tokens}
    assert account.sources["full"].supervised_tokens >= 5_000


def test_an_endless_source_that_repeats_itself_ends_the_epoch(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smi.data.epochs.DRY_AFTER", 50)

    class Parrot:
        name = "parrot"

        def conversations(self, epoch: int, held_out: bool) -> Iterator[Conversation]:
            while True:
                yield talk("again")

    documents, account = epoch([Parrot()], compiler)
    assert len(documents) == 1
    assert account.rejected == {"duplicate": 50}


def test_a_limit_bounds_the_rows_that_are_read(compiler: Compiler) -> None:
    _, account = epoch([Counting("a", 100)], compiler, limit=7)
    assert account.rows == 7


def test_refused_content_is_counted_under_the_reason_given(compiler: Compiler) -> None:
    documents, account = epoch(
        [Counting("a", 40)],
        compiler,
        refuse=lambda source, mark: "held_out" if share_of(mark) < 0.5 else None,
    )
    assert account.rejected == {"held_out": 40 - len(documents)}
    assert all(share_of(document.fingerprint) >= 0.5 for document in documents)


def test_text_that_a_tokenizer_refuses_is_one_rejection() -> None:
    class Picky:
        structural = StructuralIds(tuple(range(10)))
        eos_id = 10
        vocab_size = 11

        def encode(self, text: str) -> list[int]:
            raise ValueError("lower-cases text")

        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            return [self.encode(text) for text in texts]

        def decode(self, ids: Sequence[int]) -> str:
            raise NotImplementedError

        def token_bytes(self, id: int) -> bytes | None:
            raise NotImplementedError

    result = Compiler(Picky(), 100)(talk("A"), Location("s", "f", None, 3))
    assert str(result) == "s: f row 3: lower-cases text [text]"


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "there are no sources"),
        ([SourceSpec("a", "x", "aya"), SourceSpec("a", "y", "aya")], "two sources are named 'a'"),
        (
            [SourceSpec("a", "x", "aya", quota=5), SourceSpec("b", "y", "aya")],
            "only a have a weight or quota",
        ),
        ([SourceSpec("a", "x", "aya", weight=0.0)], "must be above 0, not 0.0"),
        ([SourceSpec("a", "x", "aya", quota=5), Counting("b", 1)], "'b' may be endless"),
    ],
)
def test_sources_that_cannot_be_mixed_are_refused(sources: list[Source], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_sources(sources)


def test_a_parquet_file_without_the_columns_an_adapter_needs_is_an_error(compiler: Compiler) -> None:
    wrong = replace(SOURCES["aya"], adapter="openr1")
    with pytest.raises(ValueError, match=r"has no column problem, generations, .*; it has inputs, targets"):
        epoch([wrong], compiler, root=HUB)
