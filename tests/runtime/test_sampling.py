from collections import Counter

import pytest
import torch

from smi.runtime.sampling import Sampler, Sampling

ALL = torch.ones(6, dtype=torch.bool)
SCORES = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0, -3.0])


def draws(scores=SCORES, allowed=ALL, count=4000, **settings):
    sampler = Sampler(Sampling(temperature=1.0, **settings))
    return Counter(sampler.choose(scores, allowed) for _ in range(count))


def test_greedy_takes_the_likeliest_allowed():
    assert Sampler(Sampling()).choose(SCORES, ALL) == 0
    assert Sampler(Sampling()).choose(SCORES, torch.tensor([0, 0, 1, 1, 0, 1], dtype=torch.bool)) == 2


def test_frequencies_follow_the_softmax():
    counts = draws(count=20000)
    for id, chance in enumerate(SCORES.softmax(0).tolist()):
        assert counts[id] / 20000 == pytest.approx(chance, abs=0.012)


def test_filters_keep_what_they_say():
    chances = SCORES.softmax(0)
    assert set(draws(top_k=2)) == {0, 1}
    # 0.64 + 0.23 reach 0.8, and 0.64 alone does not
    assert set(draws(top_p=0.8)) == {0, 1}
    assert set(draws(top_p=0.6)) == {0}
    least = float(chances[2] / chances[0])
    assert set(draws(min_p=least - 1e-3)) == {0, 1, 2}
    assert set(draws(min_p=least + 1e-3)) == {0, 1}
    assert set(draws(allowed=torch.arange(6) > 3)) == {4, 5}


def test_penalties_by_formula():
    sampler = Sampler(Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25))
    sampler.count(0)
    sampler.count(0)
    sampler.count(4)
    found = sampler._penalised(SCORES)
    assert found.tolist() == [2.0 / 2 - 0.5 - 0.5, 1.0, 0.0, -1.0, -2.0 * 2 - 0.5 - 0.25, -3.0]
    assert SCORES[0] == 2.0


def test_seeds():
    even = torch.zeros(6)

    def drawn(seed):
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler.choose(even, ALL) for _ in range(30)]

    assert drawn(0) == drawn(0) != drawn(5)
    assert drawn(None) != drawn(None)


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e-40},
        {"temperature": 5e-324},
        {"temperature": 1e300},
        {"presence_penalty": 1e39},
        {"presence_penalty": -1e308},
        {"frequency_penalty": 1e308},
        {"repetition_penalty": 1e-320},
        {"repetition_penalty": 1e308},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_setting_lets_a_forbidden_id_through(extreme, temperature):
    """However far a score is pushed, only allowed ids are drawn, the only one that is left among them."""
    for allowed in (torch.arange(6) > 3, torch.arange(6) == 4):
        sampler = Sampler(Sampling(**{"temperature": temperature, **extreme}))
        for scores in (SCORES, SCORES + 9, SCORES * 0, -SCORES) * 5:
            id = sampler.choose(scores, allowed)
            assert allowed[id]
            sampler.count(id)


def test_a_cold_model_takes_the_likeliest():
    assert {Sampler(Sampling(temperature=1e-40, seed=None)).choose(SCORES + 9, ALL) for _ in range(20)} == {0}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_scores_that_are_not_finite_choose_nothing(temperature, broken):
    sampler = Sampler(Sampling(temperature=temperature))
    with pytest.raises(RuntimeError, match="not finite"):
        sampler.choose(torch.full((6,), broken), ALL)
    with pytest.raises(RuntimeError, match="not finite"):
        sampler.choose(SCORES, ~ALL)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_k": 1.5}, {"min_p": 1}, {"seed": "0"}],
)
def test_refused(wrong):
    with pytest.raises(ValueError, match=f"sampling: {next(iter(wrong))}"):
        Sampling(**wrong)
