"""Whole runs of tiny models within this process: composed, trained, resumed and exported as the command line does."""

import shutil
from dataclasses import replace
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from small_run import undrawn

from smi.composing import config_dir, judge, register
from smi.config import Config
from smi.train import train

SMALL = [
    "data=synthetic",
    "data.max_questions=1",
    "data.held_out_tasks=0",
    "data.max_length=512",
    "data.pack_length=512",
    "data.window=8",
    "data.val_batches=1",
    "logger=none",
    "trainer.max_steps=4",
    "trainer.val_every=4",
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=9",
    "optim.lr=1e-2",
    "optim.warmup_steps=0",
]
SHAPE = ["model.hidden_size=64", "model.num_hidden_layers=2"]


def config(run_dir: Path, *overrides: str, small: list[str] = SMALL) -> Config:
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return judge(compose("train", overrides=[*small, *overrides, f"paths.run_dir={run_dir}"]))


def train_and_resume(how: Config, step: int = 2) -> tuple[Path, Path]:
    """The exports of a run, and of the same run gone on with from its checkpoint of `step`."""
    whole = Path(how.paths.run_dir)
    with undrawn():
        train(how)
    again = whole.with_name(f"{whole.name}_again")
    (again / "checkpoints").mkdir(parents=True)
    shutil.copy(whole / "checkpoints" / f"step-{step}.ckpt", again / "checkpoints")
    written = yaml.safe_load((whole / "config.yaml").read_text())
    (again / "config.yaml").write_text(yaml.safe_dump(written))
    with undrawn():
        train(replace(how, resume="auto", paths=replace(how.paths, run_dir=str(again))))
    return whole / "export", again / "export"
