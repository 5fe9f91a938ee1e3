"""What only the real command line can show of configs: exit codes, what is printed, what is written."""

import os
import subprocess
import sys

import pytest
import yaml

FORK = """# @package _global_
# the quickstart, wider
defaults:
  - quickstart

name: mine
model:
  hidden_size: 256
optim:
  lr: 3e-3
"""


@pytest.fixture
def run(tmp_path):
    def run(*arguments, code=0):
        ran = subprocess.run(
            [sys.executable, "-m", "smi.train", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=os.environ | {"COLUMNS": "200"},
            check=False,
        )
        assert ran.returncode == code, ran.stdout + ran.stderr
        assert "Traceback" not in ran.stderr
        return ran.stdout + ran.stderr

    private = tmp_path / "my configs=1"
    (private / "recipe").mkdir(parents=True)
    (private / "recipe" / "mine.yaml").write_text(FORK)
    (private / "recipe" / "bad.yaml").write_text(FORK.replace("lr:", "lrr:"))
    return run


def test_a_fork_is_shown_resolved(run, tmp_path):
    output = run("--config-dir", "my configs=1", "+recipe=mine", "name=1e5", "seed=3", "--cfg", "job", "--resolve")
    shown = yaml.safe_load(output)
    assert shown["model"]["hidden_size"] == 256
    assert (shown["seed"], shown["trainer"]["max_steps"]) == (3, 640)
    assert shown["paths"]["run_dir"].startswith("runs/1e5/")
    assert [file.name for file in tmp_path.iterdir()] == ["my configs=1"]


def test_a_line_of_a_file_is_named(run, tmp_path):
    output = run("--config-dir", "my configs=1", "+recipe=bad", code=2)
    line = f"({tmp_path}/my configs=1/recipe/bad.yaml, line 10)"
    assert output == f"error: this config does not fit:\n  optim.lrr is no setting; did you mean lr? {line}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["+recipe=quickstart", "optim.lrr=1"], 2, "error: optim.lrr is no setting; did you mean lr?\n"),
        (["+recipe=quickstart", "name=a=b"], 2, "error: name=a=b cannot be read: write 'name=\"a=b\"'\n"),
        (["+recipe=quickstrat"], 1, "Available options in 'recipe':\n\tagent_sft"),
    ],
)
def test_errors_are_short(run, arguments, code, message):
    assert message in run(*arguments, code=code)


def test_a_dry_run_writes_nothing(run, tmp_path):
    output = run("+recipe=quickstart", "dry_run=true")
    assert "nothing was trained" in output
    assert [file.name for file in tmp_path.iterdir()] == ["my configs=1"]
