"""Early stopping and the learning-rate finder, as Lightning has them, with this project's data and module."""

import pytest
import torch
from small_run import fit, small_config

from smi.training.checkpoint import list_checkpoints
from smi.training.loggers import read_history


def test_a_run_that_gets_no_better_stops_early_and_keeps_its_last_step(tmp_path):
    config = small_config(
        tmp_path,
        "callbacks=early_stopping",
        "callbacks.samples=null",
        "callbacks.early_stopping.patience=2",
        "callbacks.early_stopping.min_delta=100",
        "trainer.max_steps=50",
        "trainer.val_every=1",
    )
    trainer, _ = fit(config)
    # the first is the best so far, and the two after it are no better
    assert trainer.global_step == 3
    assert [file.name for file in list_checkpoints(tmp_path / "checkpoints")] == ["step-3.ckpt"]
    assert "stopped early" in (tmp_path / "report.html").read_text()


def test_the_rate_that_is_found_is_the_one_that_the_schedule_follows(tmp_path):
    settings = ("trainer.max_steps=3", "trainer.val_every=9", "optim.warmup_steps=0")
    finder = ("callbacks=lr_finder", "callbacks.samples=null", "callbacks.lr_finder.steps=20")
    trainer, module = fit(small_config(tmp_path / "found", *settings, *finder))
    found = read_history(tmp_path / "found")["train/lr"][1]
    assert 1e-6 < found < 1e-1
    assert found != 1e-3
    # as though that had been in the config: weights and data were put back, and nothing else is left of the search
    _, want = fit(small_config(tmp_path / "given", *settings, f"optim.lr={found!r}"))
    assert module.consumed == want.consumed
    for name, points in read_history(tmp_path / "given").items():
        if name.startswith(("train/", "data/")):
            assert read_history(tmp_path / "found")[name] == pytest.approx(points, rel=1e-4), name
    for here, there in zip(module.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-5)
    assert not list(tmp_path.rglob(".lr_find*"))
    assert trainer.global_step == 3
