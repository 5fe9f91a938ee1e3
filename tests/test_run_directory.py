"""What a run leaves in its directory, and what a directory says to another run."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from smi.composing import config_dir, judge, register
from smi.config import Config
from smi.provenance import git_state
from smi.training.run_directory import (
    CONFIG_FILE,
    FIGURES_FILE,
    RERUN_FILE,
    STARTS_FILE,
    find_checkpoint,
    finish,
    write_config,
)


def composed(*overrides: str, directory: Path | None = None) -> Config:
    register()
    search = [] if directory is None else [f"hydra.searchpath=[file://{directory}]"]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return judge(compose("train", overrides=[*search, *overrides]))


# text that YAML readers take for something else
NAMES = ["run", "1e5", "00123", "off", "1:30", "0x1f", "null", "~", "2026-01-01", "a: b # c", "x=1,[y] %", "1_000", "é"]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_run_again_from_its_directory_alone(tmp_path, name):
    folder = tmp_path / "run"
    text = name.replace('"', '\\"')
    first = composed(
        "+recipe=rwkv7_pilot",
        f'name="{text}"',
        "optim.lr=3e-7",
        "data.mirror=m",
        "data.source.aya.quota=7",
        "~data.source.openr1_math",
        f"paths.run_dir={folder}",
    )
    write_config(first)
    again = composed("+recipe=rerun", "paths.run_dir=elsewhere", directory=folder)
    first.paths.run_dir = again.paths.run_dir
    assert again == first
    assert again.name == name


def test_text_that_looks_like_an_interpolation_stays_text(tmp_path):
    config = composed("+recipe=quickstart", r"model.pretrained=a\${b}", f"paths.run_dir={tmp_path}/run")
    assert config.model.pretrained == "a${b}"
    write_config(config)
    again = composed("+recipe=rerun", f"paths.run_dir={tmp_path}/run", directory=tmp_path / "run")
    assert again == config


def test_only_what_a_run_makes_anew_is_not_run_again(tmp_path):
    write_config(composed("+recipe=quickstart", "resume=auto", f"paths.run_dir={tmp_path}/run"))
    whole, again = (OmegaConf.load(tmp_path / "run" / file) for file in (CONFIG_FILE, RERUN_FILE))
    assert set(whole) - set(again) == {"paths", "resume", "dry_run", "wait_for"}


def test_each_start_is_recorded(tmp_path):
    config = composed("+recipe=quickstart", f"paths.run_dir={tmp_path}/run")
    write_config(config, ["+recipe=quickstart", "seed=1"])
    write_config(config, ["+recipe=quickstart", "seed=1", "resume=auto"])
    starts = list(yaml.safe_load_all((tmp_path / "run" / STARTS_FILE).read_text()))
    assert [start["overrides"][-1] for start in starts] == ["seed=1", "resume=auto"]
    assert starts[0]["packages"]["hydra-core"] == importlib.metadata.version("hydra-core")
    assert starts[0]["packages"]["torch"] == importlib.metadata.version("torch")
    assert starts[0]["python"] == sys.version.split()[0]
    assert starts[0]["command"] == sys.argv


def test_the_commit_and_what_differs_from_it(tmp_path):
    assert git_state(tmp_path) is None

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *identity, "-C", str(tmp_path), *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    (tmp_path / "a.py").write_text("1")
    git("add", "."), git("commit", "-qm", "first")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False, "changed": []}
    (tmp_path / "a.py").write_text("2")
    (tmp_path / "b.py").write_text("")
    state = git_state(tmp_path)
    assert state is not None
    assert (state["dirty"], sorted(state["changed"])) == (True, ["a.py", "b.py"])


class TestFinished:
    @pytest.fixture
    def finished(self, tmp_path):
        config = composed("+recipe=quickstart", "trainer.max_steps=6", f"paths.run_dir={tmp_path}/run")
        write_config(config)
        finish(config, {"val/loss": 0.5}, 6)
        return config

    def test_its_figures_are_there(self, finished):
        figures = json.loads(Path(finished.paths.run_dir, FIGURES_FILE).read_text())
        assert figures == {"steps": 6, "val/loss": 0.5}

    @pytest.mark.parametrize("resume", ["none", "auto", "some.ckpt"])
    def test_another_run_in_it_is_refused(self, finished, resume):
        finished.resume = resume
        with pytest.raises(ValueError, match=r"exists and is not empty|is finished, after 6 steps: choose another"):
            find_checkpoint(finished)

    def test_more_steps_go_on(self, finished):
        finished.resume, finished.trainer.max_steps = "auto", 7
        assert find_checkpoint(finished) is None  # there is no checkpoint in it
