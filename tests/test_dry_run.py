"""Looking before training, waiting for data, and looking into a run: all in this process, with a tiny model."""

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from preparing import plan, write_sources
from rich.console import Console

from smi.composing import config_dir, judge, recipes, register
from smi.data.mixture import prepare
from smi.model import RWKV7Config, RWKV7ForCausalLM
from smi.model.checkpoint import save_native
from smi.train import main, train
from smi.training import waiting
from smi.training.dry_run import check_run
from smi.training.module import SMIModule

SMALL = [
    "model.hidden_size=64",
    "model.num_hidden_layers=2",
    "model.head_dim=32",
    "data.max_length=700",
    "data.pack_length=700",
    "data.window=16",
    "data.val_batches=2",
    "optim.warmup_steps=2",
    "logger=none",
    "trainer.export=[native]",
]


def composed(*overrides):
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return judge(compose("train", overrides=["paths.run_dir=run", *overrides]))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    write_sources(folder)
    prepare(plan(folder), folder / "mixture")
    return folder / "mixture"


def prepared(mixture, *overrides):
    own = [f"data.mixture={mixture}", "tokenizer.source=compact", "data.max_length=400", "data.val_fraction=0.1"]
    return composed("data=prepared", *SMALL, *own, *overrides)


def dry(config) -> str:
    console = Console(width=200, record=True)
    check_run(config, console)
    return console.export_text()


class TestDryRun:
    def test_it_says_what_would_be_trained_and_writes_nothing(self, tmp_path):
        text = dry(composed("+recipe=quickstart"))
        for part in ("tiny, 1.2M parameters", "compact, 880 tokens", "640 steps", "memory", "optimizer", "WKV backend"):
            assert part in text, part
        assert not list(tmp_path.iterdir())

    def test_train_does_no_more(self, tmp_path):
        assert train(composed("+recipe=quickstart", *SMALL, "dry_run=true")) == {}
        assert not list(tmp_path.iterdir())

    def test_parameters_are_counted_without_memory_for_them(self):
        config = composed("+recipe=quickstart", "model=rwkv7_2b9", "tokenizer=rwkv_world")
        # as published with 65,536 rows; 64 more in embedding and head, and layer 0's value residual does not train
        published, more, residual = 2_948_065_280, 2 * 64 * 2560, (2 * 64 + 1) * 2560
        assert f"{(published + more - residual) / 1e6:,.1f}M parameters" in dry(config)

    def test_a_card_that_is_too_small_is_said(self):
        small = ["hardware.memory_gib=4", "tokenizer=rwkv_world"]
        assert " of 4.0 GiB a device" in dry(composed("+recipe=quickstart", *small))
        with pytest.raises(ValueError, match=r"needs about .* GiB a device, .* and the device has 4: try"):
            dry(composed("+recipe=quickstart", *small, "model=rwkv7_0b4"))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
    def test_every_reason_is_listed(self):
        with pytest.raises(ValueError, match="this run cannot start") as error:
            dry(composed("+recipe=rwkv7_pilot"))
        assert "needs an NVIDIA GPU" in str(error.value)
        assert "mixtures/pilot_2048 is no mixture" in str(error.value)

    def test_a_prepared_mixture_is_checked(self, mixture, tmp_path):
        assert str(mixture) in dry(prepared(mixture))
        shutil.copytree(mixture, tmp_path / "damaged")
        next((tmp_path / "damaged").rglob("*.parquet")).unlink()
        with pytest.raises(ValueError, match="is damaged"):
            dry(prepared(tmp_path / "damaged"))

    def test_a_checkpoint_is_held_against_the_config(self, tmp_path):
        torch.manual_seed(0)
        save_native(
            RWKV7ForCausalLM(RWKV7Config(vocab_size=896, hidden_size=64, num_hidden_layers=2)), Path("base.pth")
        )
        with pytest.raises(ValueError, match=r"base\.pth has head_dim 64"):
            dry(composed("+recipe=quickstart", *SMALL, "model.pretrained=base.pth"))
        with pytest.raises(ValueError, match="no checkpoint at nowhere"):
            dry(composed("+recipe=quickstart", *SMALL, "model.pretrained=nowhere"))

    def test_a_run_directory_in_use_is_said(self, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "x").touch()
        with pytest.raises(ValueError, match="exists and is not empty"):
            dry(composed("+recipe=quickstart", *SMALL))

    @pytest.mark.parametrize("name", recipes())
    def test_every_recipe_can_be_tried_dry(self, name):
        """It starts, or says what this machine lacks, and nothing else."""
        given = {
            "agent_sft": ["data.train_files=[tools.jsonl]"],
            "state_tuning": ["model.pretrained=somebody/a-model"],
        }
        try:
            dry(composed(f"+recipe={name}", *given.get(name, [])))
        except ValueError as error:
            lacks = ["needs an NVIDIA GPU", "is no mixture", "no file matches", "not installed"]
            reasons = str(error).splitlines()[1:]
            assert reasons
            assert [reason for reason in reasons if not any(lack in reason for lack in lacks)] == []


class TestWaiting:
    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch):
        monkeypatch.setattr(waiting, "LOOK_EVERY", 0.05)
        monkeypatch.setattr(waiting, "SAY_EVERY", 0.1)

    @pytest.mark.parametrize("name", ["later", "later/manifest.json"])
    def test_training_begins_when_the_mixture_is_there(self, mixture, tmp_path, capsys, name):
        config = prepared("later", f"wait_for={name}", "trainer.max_steps=2")

        def arrive():
            time.sleep(0.5)
            shutil.copytree(mixture, tmp_path / "draft")
            (tmp_path / "draft").rename(tmp_path / "later")

        thread = threading.Thread(target=arrive)
        thread.start()
        train(config)
        thread.join()
        output = capsys.readouterr().out
        assert "waiting for later" in output
        assert "still waiting for later" in output
        assert json.loads(Path("run/figures.json").read_text())["steps"] == 2

    @pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_a_signal_ends_the_wait_at_once(self, monkeypatch, capsys, tmp_path, sent, code):
        """By the command's own main, in this process; the next look would be in a minute."""
        monkeypatch.setattr(waiting, "LOOK_EVERY", 60.0)
        arguments = ["data=prepared", *SMALL, "data.mixture=later", "tokenizer.source=compact", "paths.run_dir=run"]
        monkeypatch.setattr(sys, "argv", ["smi.train", *arguments, "wait_for=later"])
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def send():
            deadline = time.monotonic() + 60
            while "waiting for later" not in capsys.readouterr().out and time.monotonic() < deadline:
                time.sleep(0.05)
            os.kill(os.getpid(), sent)

        thread = threading.Thread(target=send)
        thread.start()
        start = time.monotonic()
        try:
            with pytest.raises(SystemExit) as stopped:
                main()
        finally:
            thread.join()
            for number, handler in before.items():
                signal.signal(number, handler)
        assert stopped.value.code == code
        assert time.monotonic() - start < 30
        assert not (tmp_path / "run" / "config.yaml").exists()

    @pytest.mark.parametrize(
        ("name", "mixture_name", "message"),
        [
            ("other", "later", "wait_for=other is not what this run trains on"),
            ("later/manifest.yaml", "later", "wait_for=later/manifest.yaml is not what this run trains on"),
            ("file/later", "file/later", "wait_for=file/later cannot become a manifest: file is a file"),
            ("full", "full", "wait_for=full cannot become a manifest: full/manifest.json is a directory"),
        ],
    )
    def test_what_cannot_become_a_manifest_is_refused(self, tmp_path, name, mixture_name, message):
        (tmp_path / "file").touch()
        (tmp_path / "full" / "manifest.json").mkdir(parents=True)
        with pytest.raises(ValueError, match=re.escape(message)):
            train(prepared(mixture_name, f"wait_for={name}"))

    def test_only_a_mixture_is_waited_for(self):
        with pytest.raises(ValueError, match=r"data\.mixture, which is None"):
            train(composed("+recipe=quickstart", *SMALL, "wait_for=x"))

    def test_a_dry_run_does_not_wait(self):
        assert "is waited for" in dry(prepared("later", "wait_for=later"))


class TestDebug:
    """Each option does what it says, with a recipe that knows nothing of it."""

    def test_fast_dev_run(self, capsys):
        """In a directory whose name is neither markup nor an override."""
        folder = Path("a=1,b [c] 50%")
        figures = train(composed("+recipe=quickstart", *SMALL, "debug=fast_dev_run", f"paths.run_dir='{folder}'"))
        assert figures["val/loss"] > 0
        assert [file.name for file in (folder / "checkpoints").iterdir()] == ["step-2.ckpt"]
        assert (folder / "export" / "model.pth").is_file()
        assert f"{folder}/export" in capsys.readouterr().out

    def test_overfit(self, monkeypatch):
        seen = []
        for name in ("training_step", "validation_step"):
            monkeypatch.setattr(SMIModule, name, recording(getattr(SMIModule, name), seen.append))
        short = ["trainer.max_steps=12", "trainer.val_every=12", "trainer.batch_size=2"]
        train(composed("+recipe=quickstart", *SMALL, "debug=overfit", *short))
        assert len(seen) == 12 * 2 + 1
        assert all(torch.equal(batch.input_ids, seen[0].input_ids) for batch in seen)

    def test_profiler(self):
        train(composed("+recipe=quickstart", *SMALL, "debug=profiler", "trainer.max_steps=2"))
        (file,) = Path("run").glob("*profile*")
        assert "run_training_batch" in file.read_text() or "training_step" in file.read_text()

    def test_anomaly(self, monkeypatch):
        seen = []
        step = recording(SMIModule.training_step, lambda batch: seen.append(torch.is_anomaly_enabled()))
        monkeypatch.setattr(SMIModule, "training_step", step)
        train(composed("+recipe=quickstart", *SMALL, "debug=anomaly", "trainer.max_steps=1"))
        assert seen == [True]


def recording(step, look):
    """The step, with a look at its batch."""
    return lambda module, batch, index: look(batch) or step(module, batch, index)
