"""Figures, guards and SIGTERM on two ranks over gloo."""

import pytest
import ranks_figures
from small_run import fit, small_config
from two_ranks import run_on_two_ranks

from smi.training.checkpoint import list_checkpoints
from smi.training.loggers import read_history


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_on_two_ranks(ranks_figures.main, folder)
    return folder


def test_figures_are_those_of_one_process(ranks, tmp_path):
    """The same documents make a step: two ranks with a micro-batch each, or one with both."""
    _, module = fit(small_config(tmp_path, "trainer.batch_size=2"))
    got, want = read_history(ranks / "run"), read_history(tmp_path)
    for name, points in want.items():
        if name.startswith(("train/", "val/", "data/")):
            assert got[name] == pytest.approx(points, rel=1e-4), name
    for name in ("data/tokens", "data/supervised_tokens", "train/supervised_tokens"):
        assert got[name] == want[name]
    assert got["data/tokens"][4] == module.consumed.tokens
    # rank 0 alone writes, and its samples are there
    assert list(got["train/loss"]) == [1, 2, 3, 4]
    assert got["samples/actions"].keys() == {4}
    assert got["speed/tokens_per_s"].keys() == want["speed/tokens_per_s"].keys()


def test_what_breaks_on_one_rank_stops_both_and_is_named_on_both(ranks):
    first, second = ((ranks / f"nan-{rank}.txt").read_text() for rank in (0, 1))
    assert first == second
    assert first.startswith("the loss of step 3 is nan: on rank 1 first in the output of rwkv7.emb")
    assert "documents from synthetic: row" in first


def test_what_breaks_in_a_shard_is_named(ranks):
    message = (ranks / "fsdp-0.txt").read_text()
    assert "on rank 1 first in the output of rwkv7.emb (the weight rwkv7.emb.weight is not finite already)" in message
    assert "micro-batch 1 of 1, documents from synthetic: row" in message


def test_sigterm_to_one_rank_stops_both_after_the_same_step(ranks):
    assert all((ranks / f"term-{rank}.txt").exists() for rank in (0, 1))
    [saved] = list_checkpoints(ranks / "term" / "checkpoints")
    # the signal came before the second micro-batch of step 2
    assert saved.name == "step-1.ckpt"
