from itertools import islice

import pytest

from smi.data.synthetic import SyntheticTools
from smi.protocol.codec import encode
from smi.protocol.conversation import to_stream
from smi.protocol.stream import Block, Stream, Transmission
from smi.protocol.tokens import BlockType, Side
from smi.runtime import evaluation
from smi.runtime.sampler import Generation
from smi.tokenizer import load_tokenizer

CALL = '{"id":"a1","type":"tool","name":"lookup","arguments":{"item":"lamp","field":"price"}}'
TOOLS = [
    {
        "name": "lookup",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}, "field": {"enum": ["price"]}},
            "required": ["item", "field"],
        },
    }
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("compact")


def written(tokenizer, *blocks, finished=True):
    stream = Stream((Transmission(tuple(Block(kind, payload) for kind, payload in blocks)),))
    ids = encode(stream, tokenizer, complete=False).input_ids.tolist()
    end = ids.index(tokenizer.structural.eot)
    return Generation(ids[:end], finished)


def score(tokenizer, generation, *truth):
    scores = evaluation.ActionScores()
    evaluation._score(scores, generation, tuple(Block(kind, p) for kind, p in truth), TOOLS, tokenizer)
    return scores


@pytest.mark.parametrize(
    ("payload", "parsed", "declared", "valid", "exact"),
    [
        (CALL, 1, 1, 1, 1),
        (CALL.replace("lamp", "rope"), 1, 1, 1, 0),
        (CALL.replace('"price"', '"weight"'), 1, 1, 0, 0),
        (CALL.replace('"lookup"', '"order"'), 1, 0, 0, 0),
        (CALL.replace('"type":"tool",', ""), 0, 0, 0, 0),
        (CALL[:-1], 0, 0, 0, 0),
    ],
)
def test_steps_that_an_action_reaches(tokenizer, payload, parsed, declared, valid, exact):
    scores = score(tokenizer, written(tokenizer, (BlockType.ACT, payload)), (BlockType.ACT, CALL))
    assert (scores.parsed, scores.declared, scores.valid, scores.exact) == (parsed, declared, valid, exact)
    assert (scores.expected, scores.generated) == (1, 1)


def test_an_action_cut_by_the_limit_counts_as_unparsed(tokenizer):
    generation = written(tokenizer, (BlockType.ACT, CALL), finished=False)
    scores = score(tokenizer, generation, (BlockType.ACT, CALL))
    assert (scores.generated, scores.parsed, scores.unfinished) == (1, 0, 1)


def test_missing_and_surplus_actions_lower_the_share(tokenizer):
    act = (BlockType.ACT, CALL)
    assert score(tokenizer, written(tokenizer, act), act, act).exact_share == 0.5
    assert score(tokenizer, written(tokenizer, act, act), act).exact_share == 0.5
    assert score(tokenizer, written(tokenizer, (BlockType.OUT, "no")), act).exact_share == 0


def test_answers_are_compared_word_for_word(tokenizer):
    out = (BlockType.OUT, "The lamp costs 4 euros.")
    think = (BlockType.THINK, "Done.")
    assert score(tokenizer, written(tokenizer, think, out), think, out).answers_exact == 1
    assert score(tokenizer, written(tokenizer, out), think, out).answers_exact == 1
    assert score(tokenizer, written(tokenizer, (BlockType.OUT, "It costs 4.")), out).answers_exact == 0
    scores = score(tokenizer, written(tokenizer, out, (BlockType.ACT, CALL)), out)
    assert (scores.answers, scores.answers_exact) == (1, 0)


def test_a_model_that_knows_every_answer_scores_full_marks(tokenizer, monkeypatch):
    conversations = list(islice(SyntheticTools(seed=1).conversations(held_out=True), 20))
    truths = [
        written(tokenizer, *((b.type, b.payload) for b in t.blocks))
        for c in conversations
        for t in to_stream(c).transmissions
        if t.side is Side.MODEL
    ]
    monkeypatch.setattr(evaluation, "generate", lambda *args, **kwargs: truths)
    scores = evaluation.score_actions(None, tokenizer, conversations)  # type: ignore[arg-type]
    assert scores.exact == scores.generated == scores.expected > 20
    assert scores.answers == scores.answers_exact > 10
    assert scores.valid_share == scores.exact_share == 1
