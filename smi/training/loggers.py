"""Where the figures of a run are written."""

import importlib.util
import json
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch import loggers
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from smi.config import Config

HISTORY_FILE = "history.jsonl"


def build_loggers(config: Config) -> list[Logger]:
    """Lightning's loggers of `config.logger`, and the run directory's own. Raises ValueError for a missing wandb."""
    folder, chosen = Path(config.paths.run_dir), config.logger
    found: list[Logger] = []
    if chosen.tensorboard:
        found.append(loggers.TensorBoardLogger(folder, name="tensorboard", version="", default_hp_metric=False))
    if chosen.csv:
        # a resumed run writes a version of its own: the logger would empty an existing one
        found.append(loggers.CSVLogger(folder, name="csv"))
    if chosen.wandb is not None:
        if importlib.util.find_spec("wandb") is None:
            raise ValueError("logger=wandb needs wandb: pip install 'smi[wandb]', or choose another logger")
        found.append(
            WandbRun(
                project=chosen.wandb.project,
                group=chosen.wandb.group,
                offline=chosen.wandb.offline,
                name=config.name,
                save_dir=folder,
                config=asdict(config),
                # a resumed run goes on with its curves
                id=_wandb_id(folder),
                resume="allow",
            )
        )
    return [*found, History(folder)]


class History(Logger):
    """``history.jsonl`` in the run directory: a line of JSON a row of figures, which `report.html` is made from.

    Read with `read_history`. A number that is not finite is written as null.
    """

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder

    @property
    def name(self) -> str:
        return "figures"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """The resolved config is in the run directory already."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        values = {name: value if abs(value) < float("inf") else None for name, value in metrics.items()}
        append_lines(self.folder / HISTORY_FILE, [{"step": step} | values])


class WandbRun(loggers.WandbLogger):
    """Ends W&B's run with the training, whichever way that ends: the next job of a sweep then gets its own."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=int(status != "success"))
            self._experiment = None


def _wandb_id(folder: Path) -> str | None:
    """The id of the run that was written into this directory before."""
    runs = sorted((folder / "wandb").glob("*run-*-*"), key=lambda run: run.name.split("-")[-2])
    return runs[-1].name.split("-")[-1] if runs else None


def append_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Adds a line of JSON for each row."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The rows of `append_lines`, without a last one that a killed run did not finish; none without a file."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def cut_lines(file: Path, step: int) -> None:
    """Leaves out what comes after `step`, and a line that a killed run did not finish."""
    kept = [row for row in read_lines(file) if row["step"] <= step]
    if file.is_file():
        draft = file.with_name(f".{file.name}.partial")
        draft.unlink(missing_ok=True)
        append_lines(draft, kept)
        draft.touch()
        draft.replace(file)


def read_history(folder: Path) -> dict[str, dict[int, float]]:
    """The figures in a run directory: name -> step -> value."""
    found: dict[str, dict[int, float]] = {}
    for row in read_lines(folder / HISTORY_FILE):
        for name, value in row.items():
            if name != "step" and value is not None:
                found.setdefault(name, {})[row["step"]] = value
    return found
