"""The command line of preparation, and training on what it made: subprocesses, offline."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from preparing import content

from smi.composing import config_dir, judge, register
from smi.config import Config
from smi.data.manifest import read_manifest
from smi.prepare import make_plan, prepare_mixture

HUB = Path(__file__).parent / "data" / "hub"
SOURCES = ("ultrachat", "aya", "nemotron_agentic", "hermes_func_calling", "openr1_math", "opencodeinstruct")
PILOT = ["+recipe=rwkv7_pilot", f"data.mirror={HUB}", "prepare.tokens=6000"]


def start(*arguments: str, cwd: Path, module: str = "smi.prepare") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )


def run(*arguments: str, cwd: Path, code: int = 0, module: str = "smi.prepare") -> str:
    process = start(*arguments, cwd=cwd, module=module)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    assert "Traceback" not in output
    return output


def test_the_pilot_is_prepared_and_trained_on(tmp_path: Path) -> None:
    """One command each, by the recipe."""
    output = run(*PILOT, "prepare.workers=2", cwd=tmp_path)
    for source in SOURCES:
        assert source in output
    mixture = tmp_path / "mixtures" / "pilot_2048"
    manifest = read_manifest(mixture)
    assert not manifest.shortfalls
    assert sum(a["supervised_tokens"] for a in manifest.sources.values()) >= 6000
    assert manifest.settings["sources"]["aya"]["licence"] == "Apache-2.0"
    before = content(mixture)
    assert "report.html" in before
    assert "is complete already" in run(*PILOT, "prepare.workers=0", cwd=tmp_path)
    assert content(mixture) == before
    output = run(*PILOT[:2], "prepare.tokens=7000", cwd=tmp_path, code=2)
    assert re.search(r"holds another mixture: .*sources.ultrachat.quota was 2100 and is 2450", output)

    train = [
        "+recipe=rwkv7_pilot",
        "model=tiny",
        "model.pretrained=null",
        "model.revision=null",
        "model.hidden_size=64",
        "model.num_hidden_layers=2",
        "model.head_dim=32",
        "hardware=cpu",
        "logger=none",
        "optim.warmup_steps=1",
        "trainer.max_steps=2",
        "trainer.batch_size=1",
        "trainer.val_every=2",
        "data.val_fraction=0.05",
        "data.window=32",
    ]
    output = run(*train, "paths.run_dir=run", cwd=tmp_path, module="smi.train")
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
    for source in SOURCES:
        assert source in output

    shorter = [f"data.mixture={mixture}", "data.max_length=1024"]
    output = run(*train, "paths.run_dir=a", *shorter, cwd=tmp_path, module="smi.train", code=2)
    assert "compile.max_length was 2048 and is 1024" in output
    output = run(*train, "paths.run_dir=b", "tokenizer=compact", cwd=tmp_path, module="smi.train", code=2)
    assert "tokenizer.vocabulary_sha256 was" in output
    (mixture / "manifest.json").unlink()
    output = run(*train, "paths.run_dir=c", cwd=tmp_path, module="smi.train", code=2)
    assert "is no mixture" in output
    assert "python -m smi.prepare makes one" in output


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_says_so_and_goes_on(tmp_path: Path, sent: int, code: int) -> None:
    lines = [json.dumps({"inputs": f"{i}?", "targets": f"{i}!"}) for i in range(60_000)]
    folder = tmp_path / "CohereLabs" / "aya_dataset" / "data"
    folder.mkdir(parents=True)
    (folder / "train-0.jsonl").write_text("\n".join(lines))
    arguments = [
        "data=pilot",
        "tokenizer=compact",
        "data.mirror=.",
        "data.mixture=out",
        "prepare.only=[aya]",
        "data.source.aya.files=[data/train-0.jsonl]",
        "data.source.aya.quota=150000",
        "prepare.workers=1",
        "prepare.row_group_rows=500",
    ]
    process = start(*arguments, cwd=tmp_path)
    deadline = time.monotonic() + 100
    progress = tmp_path / "out" / "progress.keys"
    while not (progress.exists() and progress.stat().st_size):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(sent)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert "stopped; the same command goes on from here" in output
    assert "Traceback" not in output
    assert not (tmp_path / "out" / "manifest.json").exists()
    output = run(*arguments, cwd=tmp_path)
    assert re.search(r"going on after [\d,]+ rows", output)
    account = read_manifest(tmp_path / "out").sources["aya"]
    assert account["rows"] == account["accepted"]
    assert account["supervised_tokens"] >= 150_000


def test_two_jobs_of_a_sweep_are_merged_into_one_mixture(tmp_path: Path) -> None:
    common = ["+recipe=rwkv7_pilot", f"data.mirror={HUB}", "prepare.only=[aya,openr1_math]", "prepare.tokens=60000"]
    parts = ["prepare.part=0/2,1/2", "data.mixture=part_${hydra:job.num}", "prepare.workers=0"]
    accept = "prepare.on_shortfall=accept"
    run("-m", *common, *parts, accept, cwd=tmp_path)
    merged = [*common, "data.mixture=whole", "merge=[part_0,part_1]"]
    assert "ran dry" in run(*merged, cwd=tmp_path, code=2)
    run(*merged, accept, cwd=tmp_path)
    manifest = read_manifest(tmp_path / "whole")
    parts_rows = [read_manifest(tmp_path / f"part_{i}").sources["aya"]["rows"] for i in range(2)]
    assert manifest.sources["aya"]["rows"] == sum(parts_rows)
    assert (tmp_path / "whole" / "report.html").is_file()
    assert manifest.shortfalls


def configured(*overrides: str) -> Config:
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return judge(compose("prepare", list(overrides)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+recipe=quickstart"], "there are no sources to prepare: choose data=pilot"),
        (["data=pilot", "prepare.part=2/2"], "it should be i/n, such as 0/4"),
        (["data=pilot", "prepare.only=[mars]"], "prepare.only names mars; there are ultrachat"),
        (["data=pilot", "data.source.aya.weight=2"], "aya has a weight: say with prepare.tokens"),
        (["data=pilot", "data.source.aya.quota=null", "prepare.tokens=9"], "and aya has neither"),
        (["data=pilot", "data.source.aya.epochs=0"], "data.source.aya.epochs should be above 0"),
        (["data=pilot", "data.mixture=null"], "data.mixture is not set"),
        (["data=pilot", "prepare.merge=[nowhere]"], "nowhere is no mixture"),
    ],
)
def test_what_is_wrong_is_named(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare_mixture(configured("tokenizer=compact", f"data.mixture={tmp_path / 'out'}", *overrides))


def test_quotas_are_what_an_epoch_gets_and_shares_where_tokens_are_given() -> None:
    only = "prepare.only=[aya,openr1_math]"
    plan = make_plan(configured("data=pilot", "tokenizer=compact", only, "data.source.aya.epochs=4"))
    assert {source.name: source.quota for source in plan.sources} == {"aya": 250_000, "openr1_math": 1_000_000}
    assert plan.epochs["aya"] == 4
    shares = ["prepare.tokens=1000", *(f"data.source.{name}.weight=1" for name in SOURCES), "data.source.aya.weight=3"]
    plan = make_plan(configured("data=pilot", "tokenizer=compact", *shares))
    assert [source.quota for source in plan.sources] == [125, 375, 125, 125, 125, 125]


def test_an_error_of_the_command_line_is_one_line(tmp_path: Path) -> None:
    assert run("download=true", cwd=tmp_path, code=2).startswith("error: data.mirror is not set")
