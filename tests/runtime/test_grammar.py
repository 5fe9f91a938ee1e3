import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smi.protocol.codec import decode
from smi.protocol.incremental import PayloadText
from smi.protocol.tokens import BlockType, TokenNamespace
from smi.runtime.grammar import Grammar, Limits, Payload
from smi.runtime.sampling import Sampling
from smi.runtime.turn import BlockCut, Turn, TurnEnded

SPARE = 40
VISION = TokenNamespace("vision", 10_000_000, 8)


@pytest.fixture(scope="module")
def grammars(family):
    made = {}
    for name, tokenizer in family.items():
        if name != "world":
            vision = TokenNamespace("vision", tokenizer.vocab_size, 8)
            made[name] = Grammar(tokenizer, tokenizer.vocab_size + SPARE, [vision]), vision
    return made


def write(grammar, limits, scores, namespaces=(), **settings):
    """A turn driven by made-up scores; the events, and the reply."""
    turn = Turn(grammar, limits, Sampling(temperature=1.0, seed=3), namespaces=namespaces, **settings)
    events = []
    for step in range(limits.max_tokens + 2):
        events += turn.choose(scores(step))
        if turn.reply is not None:
            return events, turn.reply
    raise AssertionError("the turn outlives its limit")


@given(seed=st.integers(0, 2**32), limit=st.integers(4, 60), think=st.sampled_from([None, 0, 1, 2, 3, 5, 20]))
def test_whatever_a_model_wants_can_be_decoded_and_keeps_its_budgets(grammars, seed, limit, think):
    rng = np.random.default_rng(seed)
    name = rng.choice(sorted(grammars))
    grammar, vision = grammars[name]
    tokenizer = grammar.tokenizer
    # tokens that hold part of a character or a newline come up often enough to matter
    weight = rng.choice([0.0, 3.0, 6.0])
    favoured = torch.zeros(grammar.rows)
    partial = [
        i for i in range(tokenizer.vocab_size) if (p := tokenizer.token_bytes(i)) and (p[0] >= 0x80 or p[-1] == 10)
    ]
    favoured[partial] = weight
    favoured[list(tokenizer.structural.ids)] = weight

    def scores(step):
        return favoured + torch.from_numpy(rng.standard_normal(grammar.rows)).float()

    events, reply = write(grammar, Limits(limit, think), scores, [vision])
    ids = [*reply.ids, tokenizer.structural.eot, *tokenizer.encode("\n")]
    (transmission,) = decode(ids, tokenizer, namespaces=[vision]).transmissions
    assert transmission == reply.transmission
    assert len(reply.ids) <= limit
    kinds = [block.type for block in transmission.blocks]
    assert set(kinds) <= {BlockType.THINK, BlockType.OUT, BlockType.ACT}
    thought = _think_tokens(tokenizer, reply.ids)
    assert thought == reply.think_tokens
    if think is not None:
        assert thought <= think
        assert BlockType.THINK not in kinds or think >= 2
    cut = [
        i
        for i, e in enumerate(e for e in events if type(e).__name__ in ("BlockClosed", "BlockCut"))
        if isinstance(e, BlockCut)
    ]
    assert reply.cut == set(cut)
    assert isinstance(events[-1], TurnEnded)


def _think_tokens(tokenizer, ids):
    kind, count = None, 0
    for id in ids:
        opened = tokenizer.structural.type_of(id)
        kind = opened or kind
        count += opened is None and kind is BlockType.THINK
    return count


class Script:
    """Scores of a model that wants one token after the other, and says `fallback` for ever after."""

    def __init__(self, grammar, ids, fallback):
        self.grammar, self.ids, self.fallback = grammar, ids, fallback

    def __call__(self, step):
        scores = torch.zeros(self.grammar.rows)
        scores[self.ids[step] if step < len(self.ids) else self.fallback] = 1e4
        return scores


def ids_of(tokenizer, *blocks):
    ids = []
    for kind, payload in blocks:
        ids += [tokenizer.structural.id(kind), *tokenizer.encode(payload)]
    return ids


@pytest.fixture(scope="module")
def t1(grammars):
    return grammars["t1"][0]


@pytest.mark.parametrize("budget", [0, 1, 2, 20])
@pytest.mark.parametrize(
    "blocks",
    [
        [(BlockType.THINK, "\n" + "very long thoughts, " * 50)],
        [(BlockType.THINK, "\na\n"), (BlockType.THINK, "\nb\n"), *[(BlockType.THINK, "\nmore and more\n")] * 9],
        [(BlockType.THINK, '\n{"id":"a1","type":"tool","name":"f","arguments":{}}' * 5 + "\n")],
        [(BlockType.THINK, "\n漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字")],
        [(BlockType.OUT, "\nfirst\n"), (BlockType.THINK, "\nthen " * 30)],
    ],
    ids=["never closes", "reopens", "a call inside", "wide characters", "after OUT"],
)
def test_a_thinking_budget_holds_against_any_model(t1, budget, blocks):
    tokenizer = t1.tokenizer
    script = Script(t1, ids_of(tokenizer, *blocks), tokenizer.structural.id(BlockType.THINK))
    _, reply = write(t1, Limits(120, budget), script)
    assert _think_tokens(tokenizer, reply.ids) == reply.think_tokens <= budget
    thinking = [i for i, b in enumerate(reply.transmission.blocks) if b.type is BlockType.THINK]
    if budget < 2:
        assert not thinking
    # nothing thinks again once a block was cut for the budget
    cut = [i for i in thinking if i in reply.cut]
    assert len(cut) <= 1
    assert not cut or cut == thinking[-1:]


@pytest.mark.parametrize("budget", [0, 1, 20])
@pytest.mark.parametrize("forbidden", [None, BlockType.OUT, BlockType.ACT])
def test_a_model_that_was_cut_short_still_answers(t1, budget, forbidden):
    """One that would rather think, and else hand over."""
    structural = t1.tokenizer.structural
    scores = torch.zeros(t1.rows)
    scores[structural.id(BlockType.THINK)] = 100
    scores[t1.tokenizer.encode("a")[0]] = 80
    scores[structural.eot] = 90
    limits = Limits(120, budget, most={} if forbidden is None else {forbidden: 0})

    def wants(step):
        made = scores.clone()
        # a thought that goes on is not handed over
        made[structural.eot] = 0 if 0 < step < budget else 90
        return made

    _, reply = write(t1, limits, wants)
    kinds = [block.type for block in reply.transmission.blocks]
    assert kinds[:-1] == ([BlockType.THINK] if budget > 1 else [])
    assert kinds[-1] in {BlockType.OUT, BlockType.ACT} - {forbidden}
    assert reply.think_tokens == (budget if budget > 1 else 0)


@pytest.mark.parametrize(
    ("blocks", "room", "answered"),
    [
        # without room for an empty block behind the thought, the model hands over
        ([], 1 + 20 + 2, False),
        ([], 1 + 20 + 3, True),
        # it has answered before
        ([(BlockType.OUT, "\nyes\n")], 120, False),
    ],
)
def test_an_answer_is_asked_for_once_and_where_it_fits(t1, blocks, room, answered):
    tokenizer = t1.tokenizer
    ids = ids_of(tokenizer, *blocks, (BlockType.THINK, "\n" + "very long thoughts, " * 50))
    cut_at = len(ids_of(tokenizer, *blocks)) + 1 + 20
    _, reply = write(t1, Limits(room, 20), Script(t1, ids[:cut_at], tokenizer.structural.eot))
    assert reply.think_tokens == 20
    assert reply.cut & {len(blocks)}
    kinds = [block.type for block in reply.transmission.blocks]
    assert (len(kinds) > len(blocks) + 1) == answered


def test_a_block_that_just_fits_is_not_cut(t1):
    tokenizer = t1.tokenizer
    ids = ids_of(tokenizer, (BlockType.ACT, "\n{}\n"))
    script = Script(t1, ids, tokenizer.structural.eot)
    _, reply = write(t1, Limits(len(ids)), script)
    assert (reply.cut, reply.reason, len(reply.actions)) == (frozenset(), "eot", 1)
    _, reply = write(t1, Limits(len(ids) - 1), script)
    assert (reply.cut, reply.reason, reply.actions) == ({0}, "max_tokens", ())


def test_an_action_cut_anywhere_is_no_action(t1):
    tokenizer = t1.tokenizer
    call = '{"id":"a1","type":"tool","name":"f","arguments":{"x":"é"}}'
    ids = ids_of(tokenizer, (BlockType.ACT, f"\n{call}\n"))
    for limit in range(4, len(ids)):
        _, reply = write(t1, Limits(limit), Script(t1, ids, tokenizer.structural.eot))
        assert reply.actions == ()
        assert 0 in reply.cut


def test_a_new_block_without_room_ends_the_turn_but_cuts_nothing(t1):
    tokenizer = t1.tokenizer
    ids = ids_of(tokenizer, (BlockType.OUT, "\nyes\n"))
    _, reply = write(t1, Limits(len(ids) + 1), Script(t1, ids, tokenizer.structural.id(BlockType.ACT)))
    assert (reply.cut, reply.reason) == (frozenset(), "max_tokens")
    assert [b.payload for b in reply.transmission.blocks] == ["yes"]


def test_masks_of_every_family(grammars):
    for grammar, vision in grammars.values():
        tokenizer = grammar.tokenizer
        forbidden = set(tokenizer.structural.all) | {tokenizer.eos_id} | set(range(vision.ids.stop, grammar.rows))
        inside = Payload(grammar, framed=True)
        open_text = set(torch.nonzero(grammar.mask(inside, [], text=True)).flatten().tolist())
        assert not open_text & forbidden
        # what an encoder writes may be written
        for text in ("\n", "\nhello", "\n漢é😀", "\n\n\t x"):
            payload = Payload(grammar)
            for id in tokenizer.encode(text):
                assert grammar.mask(payload, [], text=True)[id], (text, id)
                payload.take(id)
        # bytes that cannot begin a character never come first
        assert not any(
            grammar.piece(id) and 0x80 <= grammar.piece(id)[0] < 0xC2 for id in open_text if grammar.piece(id)
        )


def test_spans_stand_inside_a_frame_and_between_characters(grammars):
    grammar, vision = grammars["t1"]
    payload = Payload(grammar)
    assert not grammar.mask(payload, [], text=True)[vision.first_id]
    payload.take(grammar.tokenizer.encode("\n")[0])
    assert grammar.mask(payload, [], text=True)[vision.first_id]
    payload.take(vision.first_id)
    assert not payload.closable
    half = next(i for i in range(grammar.rows) if grammar.piece(i) == "é".encode()[:1])
    payload.take(half)
    assert not grammar.mask(payload, [], text=True)[vision.first_id]


@pytest.mark.parametrize("stop", ["END", "\n", "é"])
def test_text_stops_are_found_across_tokens_and_left_out(t1, stop):
    tokenizer = t1.tokenizer
    said = f"\nbefore {stop} after"
    script = Script(t1, ids_of(tokenizer, (BlockType.OUT, said)), tokenizer.structural.eot)
    events, reply = write(t1, Limits(60), script, stops=[stop, "never"])
    assert reply.text == "before "
    assert "".join(e.text for e in events if isinstance(e, PayloadText)) == "before "
    assert (reply.reason, reply.cut) == ("stop", {0})


def test_text_that_only_begins_like_a_stop_is_given_back(t1):
    tokenizer = t1.tokenizer
    script = Script(t1, ids_of(tokenizer, (BlockType.OUT, "\nEN EN\n")), tokenizer.structural.eot)
    _, reply = write(t1, Limits(60), script, stops=["END"])
    assert (reply.text, reply.reason, reply.cut) == ("EN EN", "eot", frozenset())


def test_stops_do_not_depend_on_how_tokens_cut_the_text(t1):
    """Against a search in the whole text for the stop that is complete first."""
    stops, text = ["abcd", "bc", "é!"], "é aabcd b"
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        pieces, start = [], 0
        for end in [i + 1 for i, cut in enumerate(cuts) if cut] + [len(text)]:
            pieces.append(text[start:end])
            start = end
        turn = Turn(t1, Limits(), Sampling(), stops)
        said = "".join(event.text for piece in pieces for event in turn._out(piece))
        assert said == "é aa"


def test_settings_that_cannot_be_are_refused(t1):
    for wrong in ({"max_tokens": 0}, {"max_tokens": 1.5}, {"max_think_tokens": -1}, {"max_think_tokens": True}):
        with pytest.raises(ValueError, match="must be a whole number"):
            Limits(**wrong)
    with pytest.raises(ValueError, match="an empty block takes"):
        Turn(t1, Limits(2), Sampling())
    with pytest.raises(ValueError, match="at least one character"):
        Turn(t1, Limits(), Sampling(), stops=[""])


@given(
    seed=st.integers(0, 2**32),
    limit=st.integers(12, 60),
    least=st.sampled_from([{}, {BlockType.ACT: 1}, {BlockType.OUT: 1, BlockType.ACT: 2}]),
    most=st.sampled_from([{}, {BlockType.OUT: 1, BlockType.ACT: 2}, {BlockType.THINK: 0}, {BlockType.THINK: 1}]),
)
def test_blocks_that_must_and_must_not_come(grammars, seed, limit, least, most):
    """However the model tries; only a transmission that is out of room ends without what it owes."""
    rng = np.random.default_rng(seed)
    grammar, vision = grammars[rng.choice(sorted(grammars))]
    favoured = torch.zeros(grammar.rows)
    favoured[list(grammar.tokenizer.structural.ids)] = 4.0
    favoured[grammar.tokenizer.encode("\n")] = 6.0

    def scores(step):
        return favoured + torch.from_numpy(rng.standard_normal(grammar.rows)).float()

    _, reply = write(grammar, Limits(limit, least=least, most=most), scores, [vision])
    kinds = [block.type for block in reply.transmission.blocks]
    assert all(kinds.count(kind) <= count for kind, count in most.items())
    assert reply.reason == "max_tokens" or all(kinds.count(kind) >= count for kind, count in least.items())


def test_limits_that_cannot_be_kept():
    with pytest.raises(ValueError, match="at least 2 ACT blocks and at most 1"):
        Limits(least={BlockType.ACT: 2}, most={BlockType.ACT: 1})
    with pytest.raises(ValueError, match="OUT or ACT"):
        Limits(most={BlockType.OUT: 0, BlockType.ACT: 0})
