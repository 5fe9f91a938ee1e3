import numpy as np
import pytest
import torch

from smi.model import RWKV7Config, RWKV7ForCausalLM
from smi.protocol.tokens import BlockType
from smi.runtime.sampler import PREFILL_TOKENS, generate, grammar_masks
from smi.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("compact", slots=32)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 32,
        "vocab_size": tokenizer.vocab_size + 30,
    }
    model = RWKV7ForCausalLM(RWKV7Config(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def prompts(tokenizer, count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 250, size=rng.integers(1, 40)).astype(np.int32) for _ in range(count)]


def test_masks_let_through_what_a_model_may_write(tokenizer):
    rows = tokenizer.vocab_size + 30
    first, later = grammar_masks(tokenizer, rows)
    ids = tokenizer.structural
    opening = {ids.id(kind) for kind in (BlockType.THINK, BlockType.OUT, BlockType.ACT)}
    assert set(torch.nonzero(first == 0).flatten().tolist()) == opening
    allowed = set(torch.nonzero(later == 0).flatten().tolist())
    assert opening | {ids.eot} <= allowed
    forbidden = set(ids.ids) - opening - {ids.eot} | {tokenizer.eos_id} | set(range(tokenizer.vocab_size, rows))
    assert not forbidden & allowed
    assert len(forbidden) + len(allowed) == rows


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_whatever_the_model_wants_it_writes_model_blocks_alone(model, tokenizer, temperature):
    forbidden = {tokenizer.structural.id(kind) for kind in BlockType if kind < BlockType.THINK}
    forbidden |= {tokenizer.eos_id, *tokenizer.structural.ids[10:]}
    results = generate(model, tokenizer, prompts(tokenizer, 8), max_tokens=50, temperature=temperature, seed=1)
    for result in results:
        kind = tokenizer.structural.type_of(result.ids[0])
        assert kind in (BlockType.THINK, BlockType.OUT, BlockType.ACT)
        assert not forbidden & set(result.ids)
        assert len(result.ids) <= 50
        assert result.finished or len(result.ids) == 50


def test_many_prompts_at_once_give_what_each_gives_alone(model, tokenizer):
    many = prompts(tokenizer, 6)
    together = generate(model.double(), tokenizer, many, max_tokens=30)
    for prompt, result in zip(many, together, strict=True):
        (alone,) = generate(model, tokenizer, [prompt], max_tokens=30)
        assert alone == result
    model.float()


def test_greedy_generation_equals_a_loop_that_rereads_everything(model, tokenizer):
    first, later = grammar_masks(tokenizer, model.head.weight.shape[0])
    (prompt,) = prompts(tokenizer, 1, seed=5)
    (result,) = generate(model.double(), tokenizer, [prompt], max_tokens=20)
    ids, mask, written = prompt.tolist(), first, []
    while len(written) < 20:
        logits = model(torch.tensor([ids])).logits[0, -1]
        token = int((logits + mask).argmax())
        if token == tokenizer.structural.eot:
            break
        written.append(token)
        ids.append(token)
        mask = later
    model.float()
    assert result.ids == written


def test_prompts_longer_than_one_reading(model, tokenizer):
    rng = np.random.default_rng(0)
    many = [rng.integers(1, 250, size=PREFILL_TOKENS // 2 + 1).astype(np.int32) for _ in range(2)]
    together = generate(model, tokenizer, many, max_tokens=3)
    assert [generate(model, tokenizer, [p], max_tokens=3)[0] for p in many] == together


def test_seeds_decide_and_training_mode_is_given_back(model, tokenizer):
    model.train()
    one, two, three = (
        generate(model, tokenizer, prompts(tokenizer, 2), max_tokens=20, temperature=1.0, seed=seed)
        for seed in (0, 0, 1)
    )
    assert model.training
    assert one == two != three
