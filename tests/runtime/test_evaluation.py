from itertools import islice

import pytest
import torch
from scripted import ScriptedRuntime, tiny

from smi.data.synthetic import SyntheticTools
from smi.protocol.codec import encode
from smi.protocol.conversation import Conversation, to_stream
from smi.protocol.stream import Block, Stream, Transmission
from smi.protocol.tokens import BlockType, Side
from smi.runtime import evaluation
from smi.runtime.turn import Reply
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


def written(*blocks, finished=True):
    transmission = Transmission(tuple(Block(kind, payload) for kind, payload in blocks))
    cut = frozenset() if finished else frozenset({len(blocks) - 1})
    return Reply(transmission, (), cut, "eot" if finished else "max_tokens", 0, "")


def score(reply, *truth):
    scores = evaluation.ActionScores()
    evaluation._score(scores, reply, tuple(Block(kind, p) for kind, p in truth), TOOLS)
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
def test_steps_that_an_action_reaches(payload, parsed, declared, valid, exact):
    scores = score(written((BlockType.ACT, payload)), (BlockType.ACT, CALL))
    assert (scores.parsed, scores.declared, scores.valid, scores.exact) == (parsed, declared, valid, exact)
    assert (scores.expected, scores.generated) == (1, 1)


def test_an_action_cut_by_the_limit_counts_as_unparsed():
    reply = written((BlockType.ACT, CALL), finished=False)
    scores = score(reply, (BlockType.ACT, CALL))
    assert (scores.generated, scores.parsed, scores.unfinished) == (1, 0, 1)


def test_missing_and_surplus_actions_lower_the_share():
    act = (BlockType.ACT, CALL)
    assert score(written(act), act, act).exact_share == 0.5
    assert score(written(act, act), act).exact_share == 0.5
    assert score(written((BlockType.OUT, "no")), act).exact_share == 0


def test_answers_are_compared_word_for_word():
    out = (BlockType.OUT, "The lamp costs 4 euros.")
    think = (BlockType.THINK, "Done.")
    assert score(written(think, out), think, out).answers_exact == 1
    assert score(written(out), think, out).answers_exact == 1
    assert score(written((BlockType.OUT, "It costs 4.")), out).answers_exact == 0
    scores = score(written(out, (BlockType.ACT, CALL)), out)
    assert (scores.answers, scores.answers_exact) == (1, 0)


def test_a_model_that_knows_every_answer_scores_full_marks(tokenizer, monkeypatch):
    conversations = list(islice(SyntheticTools(seed=1).conversations(held_out=True), 20))
    truths = [
        written(*((b.type, b.payload) for b in t.blocks))
        for c in conversations
        for t in to_stream(c).transmissions
        if t.side is Side.MODEL
    ]
    script = [reply.transmission.blocks for reply in truths]
    monkeypatch.setattr(evaluation, "Runtime", lambda model, tokenizer, **how: ScriptedRuntime(tokenizer, script))
    scores = evaluation.score_actions(tiny(1).train(), tokenizer, conversations)
    assert scores.exact == scores.generated == scores.expected > 20
    assert scores.answers == scores.answers_exact > 10
    assert scores.valid_share == scores.exact_share == 1


def test_batches_change_nothing_and_training_goes_on(tokenizer):
    conversations = list(islice(SyntheticTools(seed=1).conversations(held_out=True), 4))
    model = tiny(tokenizer.vocab_size).double().train()
    one, many = (evaluation.score_actions(model, tokenizer, conversations, max_tokens=8, batch=n) for n in (1, 5))
    assert one == many
    assert one.generated + one.answers > 0
    assert model.training


def test_losses_are_those_of_each_example_alone(tokenizer, monkeypatch):
    """Packed or in pieces: the sums by block type are those of plain cross-entropy, example by example."""
    conversations = list(islice(SyntheticTools(seed=2).conversations(held_out=True), 5))
    examples = [encode(to_stream(c), tokenizer) for c in conversations]
    model = tiny(tokenizer.vocab_size).double().train()
    wanted = {}
    for example in examples:
        ids = torch.from_numpy(example.input_ids).long()
        with torch.no_grad():
            logits = model.eval()(input_ids=ids[None]).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits.float(), ids[1:], reduction="none")
        for loss, kind, target in zip(losses, example.block_types[1:], example.loss_mask[1:], strict=True):
            if target:
                tokens, nll = wanted.get(BlockType(kind), (0, 0.0))
                wanted[BlockType(kind)] = tokens + 1, nll + float(loss)
    model.train()
    for row_tokens in (evaluation.ROW_TOKENS, 100):
        monkeypatch.setattr(evaluation, "ROW_TOKENS", row_tokens)
        found = evaluation.block_losses(model, examples)
        assert found.keys() == wanted.keys() >= {BlockType.OUT, BlockType.ACT, BlockType.EOT, BlockType.EOS}
        for kind, loss in found.items():
            assert (loss.tokens, loss.nll) == (wanted[kind][0], pytest.approx(wanted[kind][1], rel=1e-5))
    assert model.training


@pytest.mark.parametrize(
    ("reasoning", "thought", "violations"),
    [
        (None, "a long thought", 0),
        ({"mode": "disabled"}, "", 1),
        ({"max_tokens": 5}, "abcdefgh", 1),
        ({"max_tokens": 64}, "abc", 0),
    ],
)
def test_budgets_are_counted_from_what_was_written(tokenizer, reasoning, thought, violations):
    """Not from what the runtime says of itself: its count here is 0."""
    transmission = Transmission((Block(BlockType.THINK, thought), Block(BlockType.OUT, "x")))
    ids = encode(Stream((transmission,)), tokenizer, complete=False).input_ids.tolist()
    reply = Reply(transmission, tuple(ids), frozenset(), "eot", 0, "x")
    talk = Conversation([{"role": "user", "content": "hi"}], ctrl=reasoning and {"reasoning": reasoning})
    prompt = to_stream(talk, require_target=False)
    played = evaluation.Played(talk, prompt, transmission.blocks, reply)
    assert evaluation.score([played], tokenizer).budget_violations == violations
