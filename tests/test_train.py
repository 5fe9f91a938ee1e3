"""The real command line in subprocesses, from conversations to an export that loads elsewhere."""

import csv
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from killed_run import assert_identical
from preparing import plan, write_sources

from smi.composing import config_dir, judge, register
from smi.data.mixture import prepare
from smi.model import RWKV7Config, RWKV7ForCausalLM
from smi.model.checkpoint import load_pretrained, save_native
from smi.tokenizer import load_tokenizer
from smi.train import train
from smi_kernels import resolve

DATA = Path(__file__).parent / "data"
# a model of a few thousand parameters: what is tested here is everything around it
SMALL = [
    "model.hidden_size=64",
    "model.num_hidden_layers=2",
    "model.head_dim=32",
    "optim.warmup_steps=2",
    "trainer.log_every=1",
    "logger=csv",
]
QUICK = [
    "+recipe=quickstart",
    *SMALL,
    "trainer.max_steps=6",
    "trainer.val_every=3",
    "trainer.checkpoint_every=2",
    "data.max_length=700",
    "data.pack_length=700",
    "data.window=16",
    "data.val_batches=2",
    "data.held_out_tasks=2",
]


def start(*arguments, cwd, **how):
    return subprocess.Popen(
        [sys.executable, "-m", "smi.train", *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        **how,
    )


def run(*arguments, cwd, code=0):
    process = start(*arguments, cwd=cwd)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def state(run_dir, step):
    """Weights, optimizer state and schedule after a step."""
    checkpoint = torch.load(run_dir / "checkpoints" / f"step-{step}.ckpt", weights_only=True)
    return {name: checkpoint[name] for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}


def losses(run_dir):
    """Training loss by step, as logged."""
    logged = {}
    for version in sorted(run_dir.glob("csv/version_*/metrics.csv")):
        with version.open() as file:
            logged |= {int(row["step"]): row["train/loss"] for row in csv.DictReader(file) if row["train/loss"]}
    return logged


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    output = run(*QUICK, "paths.run_dir=run", cwd=folder)
    return folder / "run", output


class TestQuickstart:
    def test_it_says_what_it_does_and_where_things_are(self, quickstart):
        run_dir, output = quickstart
        for part in (
            # the one this processor gets
            f"WKV backend: {resolve('auto', torch.device('cpu'), torch.float32, 32).name}",
            "step 6/6",
            "tokens/s",
            "left",
            "validation loss",
            "Training rows",
            "actions written",
            "exactly right",
            "exported model",
            str(run_dir / "export"),
        ):
            assert part in output, part
        assert "Traceback" not in output
        assert "Warning" not in output

    def test_the_run_directory_holds_everything(self, quickstart):
        run_dir, _ = quickstart
        export = {file.name for file in (run_dir / "export").iterdir()}
        assert export == {
            "README.md",
            "chat_template.jinja",
            "config.json",
            "config.yaml",
            "export.json",
            "generation_config.json",
            "model.pth",
            "model.safetensors",
            "smi_token_ids.json",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        assert [file.name for file in (run_dir / "checkpoints").iterdir()] == ["step-6.ckpt"]
        card = (run_dir / "export" / "README.md").read_text()
        assert "held_out/exact_share" in card
        assert "val/loss" in card

    def test_the_export_loads_elsewhere_with_the_same_logits(self, quickstart, tmp_path):
        """In a fresh process, from both layouts, and in the rwkv package."""
        run_dir, _ = quickstart
        model, tokenizer = load_pretrained(run_dir / "export"), load_tokenizer(str(run_dir / "export"))
        ids = torch.tensor([tokenizer.encode("\nHow much is the lamp?\n")])
        want = model(ids).logits[0]
        trained = torch.load(run_dir / "checkpoints" / "step-6.ckpt", weights_only=True)["state_dict"]
        for name, tensor in model.state_dict().items():
            assert torch.equal(trained[f"model.{name}"], tensor), name
        torch.save({"ids": ids, "want": want}, tmp_path / "want.pt")
        code = """
import os, sys, torch
os.environ["RWKV_V7_ON"], os.environ["RWKV_JIT_ON"], os.environ["RWKV_CUDA_ON"] = "1", "0", "0"
from smi.model.checkpoint import load_pretrained
export, want = sys.argv[1], torch.load(sys.argv[2], weights_only=True)
for source in (export, export + "/model.pth"):
    assert torch.equal(load_pretrained(source)(want["ids"]).logits[0], want["want"]), source
from rwkv.model import RWKV
logits, _ = RWKV(model=export + "/model", strategy="cpu fp32").forward(want["ids"][0].tolist(), None)
error = (logits - want["want"][-1]).abs().max() / want["want"].abs().max()
assert error < 1e-5, error
"""
        subprocess.run([sys.executable, "-c", code, str(run_dir / "export"), str(tmp_path / "want.pt")], check=True)

    def test_structural_ids_are_where_the_file_says(self, quickstart):
        run_dir, _ = quickstart
        ids = json.loads((run_dir / "export" / "smi_token_ids.json").read_text())
        assert load_tokenizer(str(run_dir / "export")).structural.to_dict() == ids

    def test_a_second_run_with_the_seed_has_identical_losses_and_another_seed_has_not(self, quickstart, tmp_path):
        run_dir, _ = quickstart
        run(*QUICK, "paths.run_dir=again", cwd=tmp_path)
        run(*QUICK, "seed=1", "paths.run_dir=other", cwd=tmp_path)
        first = losses(run_dir)
        assert len(first) == 6
        assert losses(tmp_path / "again") == first
        assert losses(tmp_path / "other") != first

    def test_an_existing_run_directory_is_refused(self, quickstart):
        run_dir, _ = quickstart
        output = run(*QUICK, "paths.run_dir=run", cwd=run_dir.parent, code=2)
        assert "exists and is not empty" in output
        assert "resume=auto" in output


def wait_for_checkpoint(process, run_dir):
    deadline = time.monotonic() + 120
    while not list(run_dir.glob("checkpoints/step-*.ckpt")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no checkpoint came"
        time.sleep(0.01)


def wait_for_step(process, run_dir):
    deadline = time.monotonic() + 120
    while not (run_dir / "history.jsonl").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no step was made"
        time.sleep(0.01)


def test_a_killed_run_goes_on_from_its_last_checkpoint(quickstart, tmp_path):
    undisturbed, _ = quickstart
    process = start(*QUICK, "paths.run_dir=run", cwd=tmp_path)
    wait_for_checkpoint(process, tmp_path / "run")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "run" / "export").exists()

    output = run(*QUICK, "paths.run_dir=run", "resume=auto", cwd=tmp_path)
    assert "going on from" in output
    # every step is logged, those before the kill too unless they were still in memory
    resumed, whole = losses(tmp_path / "run"), losses(undisturbed)
    assert max(resumed) == max(whole)
    assert resumed == {step: whole[step] for step in resumed}
    assert_identical(state(tmp_path / "run", 6), state(undisturbed, 6))


@pytest.mark.full
def test_a_run_that_is_killed_five_times_equals_one_that_is_not(tmp_path):
    """On a prepared mixture, several epochs of it, at random moments: between checkpoints and within them."""
    write_sources(tmp_path)
    prepare(plan(tmp_path), tmp_path / "mixture")
    arguments = [
        "data=prepared",
        f"data.mixture={tmp_path / 'mixture'}",
        "data.max_length=400",
        "data.pack_length=512",
        "data.window=64",
        "data.val_fraction=0.1",
        "data.val_batches=2",
        "tokenizer.source=compact",
        *SMALL,
        "trainer.max_steps=60",
        "trainer.batch_size=2",
        "trainer.val_every=20",
        "trainer.checkpoint_every=3",
    ]
    run(*arguments, "paths.run_dir=whole", cwd=tmp_path)
    rng = random.Random(1)
    killed = tmp_path / "killed"
    for step in sorted(rng.sample(range(3, 58, 3), 5)):
        resume = ["resume=auto"] if killed.exists() else []
        process = start(*arguments, "paths.run_dir=killed", *resume, cwd=tmp_path)
        deadline = time.monotonic() + 240
        while not any((killed / "checkpoints" / f"step-{n}.ckpt").exists() for n in range(step, 61)):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    run(*arguments, "paths.run_dir=killed", "resume=auto", cwd=tmp_path)
    assert_identical(state(killed, 60), state(tmp_path / "whole", 60))
    resumed, whole = losses(killed), losses(tmp_path / "whole")
    assert max(resumed) == max(whole)
    assert resumed == {step: whole[step] for step in resumed}


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_saves_and_says_how_to_go_on(tmp_path, sent, code):
    long = ["trainer.max_steps=100000", "trainer.checkpoint_every=100000"]
    process = start(*QUICK, "paths.run_dir=run", *long, cwd=tmp_path)
    wait_for_step(process, tmp_path / "run")
    process.send_signal(sent)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    [saved] = (tmp_path / "run" / "checkpoints").iterdir()
    assert f"resume=auto goes on from {saved.name}" in output
    assert "Traceback" not in output


class TestResume:
    """In a copy of a run that was killed after its last step."""

    @pytest.fixture
    def copy(self, quickstart, tmp_path):
        shutil.copytree(quickstart[0], tmp_path / "run", ignore=shutil.ignore_patterns("figures.json"))
        return tmp_path / "run"

    def refused(self, run_dir, *arguments):
        before = (run_dir / "config.yaml").read_text()
        register()
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            composed = compose("train", overrides=[*QUICK, f"paths.run_dir={run_dir}", *arguments])
        with pytest.raises(ValueError) as error:  # noqa: PT011 (each caller looks at the message)
            train(judge(composed))
        assert (run_dir / "config.yaml").read_text() == before
        return str(error.value)

    def test_other_settings_are_refused_with_both_values(self, copy):
        message = self.refused(copy, "resume=auto", "optim.lr=1e-9", "seed=5", "model.hidden_size=32")
        assert "optim.lr was 0.005 and is 1e-09" in message
        assert "seed was 0 and is 5" in message
        assert "model.hidden_size was 64 and is 32" in message

    @pytest.mark.parametrize("damage", ["truncated", "empty", "junk"])
    def test_a_damaged_checkpoint_is_named(self, copy, damage):
        file = copy / "checkpoints" / "step-6.ckpt"
        content = {"truncated": file.read_bytes()[:5000], "empty": b"", "junk": b"x" * 1000}[damage]
        file.write_bytes(content)
        assert f"the checkpoint {file} cannot be read" in self.refused(copy, "resume=auto")

    def test_weights_are_no_training_checkpoint(self, copy):
        torch.save({"emb.weight": torch.zeros(2)}, copy / "checkpoints" / "step-7.ckpt")
        assert "is no training checkpoint" in self.refused(copy, "resume=auto")

    def test_a_checkpoint_of_another_run_does_not_go_into_this_one(self, copy, tmp_path):
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "config.yaml").write_text("mine")
        message = self.refused(tmp_path / "other", f"resume={copy}/checkpoints/step-6.ckpt")
        assert "is not of the run in" in message


def test_a_sweep_runs_every_job_in_a_folder_of_its_own(tmp_path):
    quick = ["trainer.max_steps=1", "data.held_out_tasks=0", "callbacks=none"]
    run("-m", *QUICK, *quick, "seed=1,2", "hydra.sweep.dir=sweep", cwd=tmp_path)
    exports = sorted(file.parent.parent.name for file in tmp_path.glob("sweep/*/export/config.yaml"))
    assert exports == ["0", "1"]
    assert losses(tmp_path / "sweep" / "0") != losses(tmp_path / "sweep" / "1")


WORLD = [
    *SMALL,
    "trainer.max_steps=2",
    "data.pack_length=2048",
    "trainer.export=[hf]",
]


def test_rows_in_a_real_format_with_the_world_vocabulary(tmp_path):
    rows = DATA / "hub/HuggingFaceH4/ultrachat_200k/data/train_sft-00000-of-00001.parquet"
    output = run(
        "+recipe=quickstart",
        "data=messages",
        f"data.train_files=[{rows}]",
        *WORLD,
        "paths.run_dir=run",
        cwd=tmp_path,
    )
    assert "rwkv_world" in output
    assert "Training rows" in output
    for reason in ("no_target", "role", "empty", "messages", "too_long", "duplicate"):
        assert reason in output, reason


def world_checkpoint():
    """A tiny model with the World vocabulary, and the ranks of the 1.5B model."""
    torch.manual_seed(0)
    ranks = {"decay_low_rank_dim": 96, "a_low_rank_dim": 96, "v_low_rank_dim": 64, "gate_low_rank_dim": 256}
    return RWKV7ForCausalLM(RWKV7Config(hidden_size=64, num_hidden_layers=2, head_dim=32, **ranks)).bfloat16()


def test_the_pilot_from_local_files(tmp_path):
    """A checkpoint in the native layout, six sources from a mirror, a vocabulary that grows."""
    base = world_checkpoint()
    save_native(base, tmp_path / "base.pth")
    output = run(
        "+recipe=rwkv7_pilot",
        "hardware=cpu",
        *WORLD,
        "trainer.batch_size=2",
        "model.pretrained=base.pth",
        "model.revision=null",
        f"data.mirror={DATA / 'hub'}",
        "data.mixture=null",
        "paths.run_dir=run",
        cwd=tmp_path,
    )
    assert "grew from 65536 to 65600 rows" in output
    for source in (
        "ultrachat",
        "aya",
        "nemotron_agentic",
        "hermes_func_calling",
        "openr1_math",
        "opencodeinstruct",
    ):
        assert source in output
    assert "eval mode" not in output
    model = load_pretrained(tmp_path / "run" / "export")
    assert model.config.vocab_size == 65600
    # two steps at this rate move nothing far: the old rows are still the old rows
    old = model.head.weight[:65530].detach()
    assert (old - base.head.weight[:65530].float()).abs().max() < 1e-3


def tmp_name(arguments):
    return "run_" + re.sub(r"\W+", "_", "_".join(arguments))[-100:]


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["data.train_files=[nope.jsonl]"], "nope.jsonl"),
            ([], "data.train_files is empty"),
            (["data=pilot"], "mixtures/pilot_2048 is no mixture"),
            (["data=pilot", "data.mixture=null"], "data.mirror is not set"),
            (["data.train_files=[good.jsonl]", "data.val_fraction=0", "logger=wandb"], "smi[wandb]"),
            (["data.train_files=[bad.jsonl]"], "no training row was accepted"),
            (["data.train_files=[good.jsonl]", "tokenizer.source=no_eos"], "end-of-sequence token"),
            (["data.train_files=[good.jsonl]", "tokenizer.source=nowhere"], "no tokenizer at 'nowhere'"),
            (["data.train_files=[good.jsonl]", "kernel.backend=warp"], "no WKV backend named 'warp'"),
            (["data.train_files=[good.jsonl]", "hardware=gpu_32g"], "needs an NVIDIA GPU"),
            (["data.train_files=[good.jsonl]", "model.pretrained=nowhere"], "no checkpoint at nowhere"),
            (["data.train_files=[good.jsonl]", "model.pretrained=torn.pth"], "missing blocks.1.att.w2"),
            (
                ["data.train_files=[good.jsonl]", f"model.pretrained={DATA / 'rwkv7' / 'T1.pth'}"],
                "hidden_size 128",
            ),
            (
                [
                    "data.train_files=[good.jsonl]",
                    f"model.pretrained={DATA / 'rwkv7' / 'T1.pth'}",
                    "model.hidden_size=128",
                    "model.head_dim=64",
                    "model.v_low_rank_dim=16",
                    "model.gate_low_rank_dim=32",
                ],
                "512 rows: they do not belong together",
            ),
            (["data.train_files=[good.jsonl]", "resume=nowhere.ckpt"], "no such checkpoint file"),
            (
                ["data=synthetic", "data.train_files=[good.jsonl]"],
                "data.train_files is not read by data.kind=synthetic",
            ),
            (["data.train_files=[good.jsonl]", "data.mirror=x"], "choose data=pilot"),
            (["data.train_files=[good.jsonl]", "model.revision=x"], "model.revision is of model.pretrained"),
            (
                [
                    "data.train_files=[good.jsonl]",
                    "model.pretrained=world.pth",
                    "model.decay_low_rank_dim=96",
                    "model.a_low_rank_dim=96",
                    "model.v_low_rank_dim=64",
                    "model.gate_low_rank_dim=256",
                    "tokenizer.source=compact",
                ],
                "65,536 rows: they do not belong together",
            ),
        ],
    )
    def test_one_clear_error_before_training(self, folder, monkeypatch, capsys, arguments, message):
        if "logger=wandb" in arguments and importlib.util.find_spec("wandb"):
            pytest.skip("wandb is installed")
        if arguments and "hardware=gpu_32g" in arguments and torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
        monkeypatch.chdir(folder)
        register()
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            overrides = [
                "data=messages",
                *SMALL,
                f"paths.run_dir={tmp_name(arguments)}",
                *arguments,
            ]
            composed = compose("train", overrides=overrides)
        with pytest.raises(ValueError, match=re.escape(message)):
            train(judge(composed))
        assert "step 1" not in capsys.readouterr().out

    def test_the_command_line_shows_the_error_alone(self, folder):
        output = run("data=messages", "data.train_files=[nope.jsonl]", *SMALL, cwd=folder, code=2)
        assert output.splitlines()[-1].startswith("error: source 'train': no file matches 'nope.jsonl'")
        assert "Traceback" not in output

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("bad")
        good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
        (folder / "good.jsonl").write_text(json.dumps(good) + "\n")
        bad = {"messages": [{"role": "wizard", "content": "hi"}]}
        (folder / "bad.jsonl").write_text(json.dumps(bad) + "\nnot json\n")
        (folder / "no_eos").mkdir()
        source = json.loads((DATA / "t1_tokenizer" / "tokenizer.json").read_text())
        (folder / "no_eos" / "tokenizer.json").write_text(json.dumps(source))
        tensors = torch.load(DATA / "rwkv7" / "T1.pth", weights_only=True)
        del tensors["blocks.1.att.w2"]
        torch.save(tensors, folder / "torn.pth")
        save_native(world_checkpoint(), folder / "world.pth")
        return folder


def test_bad_rows_are_counted_and_skipped_while_good_ones_train(tmp_path):
    good = [
        {
            "messages": [
                {"role": "user", "content": f"say {i}"},
                {"role": "assistant", "content": f"{i} it is"},
            ]
        }
        for i in range(40)
    ]
    lines = [json.dumps(row) for row in good]
    lines[3:3] = ["not json", '{"messages": [{"role": "wizard", "content": "x"}]}', '{"other": 1}']
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    output = run(
        "data=messages",
        "data.train_files=[rows.jsonl]",
        "data.val_fraction=0.1",
        "tokenizer.source=compact",
        *SMALL,
        "trainer.max_steps=1",
        "paths.run_dir=run",
        cwd=tmp_path,
    )
    for reason in ("json 1", "role 1", "messages 1"):
        assert reason in output.replace("\n", " "), output
