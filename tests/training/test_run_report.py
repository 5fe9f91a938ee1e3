"""report.html of a run: whole in one file, also of a run that was stopped or failed."""

import json
import re
import signal
from html.parser import HTMLParser

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from small_run import fit, small_config

from smi.training.checkpoint import list_checkpoints
from smi.training.loggers import HISTORY_FILE, append_lines
from smi.training.report import REPORT, write_report
from smi.training.samples import SAMPLES_FILE


class Page(HTMLParser):
    """The tags with their attributes, and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def read(folder):
    text = (folder / REPORT).read_text()
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe"), "nothing from elsewhere, and no code"
        for name, value in attributes.items():
            assert name not in ("src", "href") or value.startswith("data:image/png;base64,")
    assert "url(" not in text
    assert "@import" not in text
    return page


def images(page):
    return [attributes["alt"] for tag, attributes in page.tags if tag == "img"]


def test_a_finished_run(tmp_path):
    samples = ["callbacks=default", "callbacks.samples.max_tokens=24"]
    fit(small_config(tmp_path, *samples, "trainer.max_steps=2"), drawn=True)
    page = read(tmp_path)
    assert "Finished after 2 steps." in page.text
    assert len(images(page)) == 5
    for part in (
        "Loss",
        "By block type",
        "ACT",
        "Samples",
        "ctrl",
        "tokens a second",
        "max_steps: 2",
        "train/loss_act",
    ):
        assert part in page.text, part


class At(L.Callback):
    """Does something before a micro-batch."""

    def __init__(self, batch, what):
        self.batch, self.what = batch, what

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch:
            self.what(pl_module)


def test_sigterm_saves_the_step_just_finished_and_the_run_goes_on_from_it_bit_by_bit(tmp_path):
    """In the second of three micro-batches of step 3, with no checkpoint due."""
    settings = ("trainer.batch_size=3", "trainer.max_steps=5", "trainer.val_every=100")
    _, whole = fit(small_config(tmp_path / "whole", *settings))
    config = small_config(tmp_path / "run", *settings)
    stop = At(7, lambda module: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException):
        fit(config, callbacks=[stop])
    assert signal.getsignal(signal.SIGTERM) == before
    assert [file.name for file in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-2.ckpt"]
    assert "Stopped in step 3." in read(tmp_path / "run").text
    _, resumed = fit(config, tmp_path / "run" / "checkpoints" / "step-2.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))
    assert resumed.consumed == whole.consumed
    assert "Finished after 5 steps." in read(tmp_path / "run").text


def test_a_failed_run_says_why(tmp_path):
    def fail(module):
        with torch.no_grad():
            module.model.rwkv7.blocks[1].ffn.key.weight.fill_(torch.nan)

    with pytest.raises(FloatingPointError):
        fit(small_config(tmp_path), callbacks=[At(2, fail)], drawn=True)
    page = read(tmp_path)
    assert "Failed in step 3: FloatingPointError: the loss of step 3 is nan: first in the output of" in page.text
    assert "documents from synthetic: row" in page.text
    assert "loss, accuracy and entropy over the steps" in images(page)


def test_nothing_that_was_said_becomes_markup(tmp_path):
    evil = "<script>alert(1)</script>\x1b[31m\u202e"
    append_lines(tmp_path / HISTORY_FILE, [{"step": 1, "train/loss": 1.0, evil: 2.0}])
    row = {"prompt": [["usr", evil]], "expected": [["out", "x"]], "reply": [["act", evil]]}
    append_lines(tmp_path / SAMPLES_FILE, [{"step": 1, "verdicts": ["unreadable"], "reason": "max_tokens"} | row])
    write_report(tmp_path, evil, results={evil: 1.0})
    page = read(tmp_path)
    assert page.text.count("<script>") >= 4
    assert "⟨U+001B⟩" in page.text
    assert "[unreadable]" in page.text
    assert "ended by the limit" in page.text


def test_a_run_without_a_step_has_a_page(tmp_path):
    write_report(tmp_path, "Failed.", failed=True)
    assert "No step was logged." in read(tmp_path).text


def test_long_runs_stay_readable(tmp_path):
    rows = [{"step": step, "train/loss": 10 / (step + 1), "speed/tokens_per_s": 1e6 + step} for step in range(3000)]
    (tmp_path / HISTORY_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report(tmp_path, "Finished.")
    page = read(tmp_path)
    assert len(images(page)) == 2
    assert re.search(r"tokens a second\s*1,002,999", page.text)
