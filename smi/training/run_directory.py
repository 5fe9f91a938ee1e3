"""The directory of a run: whether a run may begin or go on in it, what it was configured with, and what came of it.

config.yaml: the resolved config. recipe/rerun.yaml: the same as a recipe, so that the directory alone is enough to run
it again: ``python -m smi.train --config-dir RUN_DIR +recipe=rerun``. starts.yaml: one document for each time that the
run was started, with the command, its overrides, and the code and packages that ran. figures.json: written last.
"""

import json
import logging
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from smi.config import Config
from smi.files import write_whole
from smi.hardware import process_rank
from smi.provenance import FIGURES_FILE, describe_start
from smi.training.checkpoint import check_checkpoint, list_checkpoints, newest_sound, read_checkpoint, step_of

log = logging.getLogger("smi")

CONFIG_FILE = "config.yaml"
RERUN_FILE = "recipe/rerun.yaml"
STARTS_FILE = "starts.yaml"

# what a run of the same makes anew
_NOT_AGAIN = ("paths", "resume", "dry_run", "wait_for")

# what a resumed run may change; everything else decides what is learned, and in which order
_FREE_TO_CHANGE = (
    "name",
    "resume",
    "dry_run",
    "wait_for",
    "paths",
    "logger",
    "callbacks",
    "kernel",
    "hardware",
    "trainer",
    "sweep",
)
_FREE_IN_DATA = ("on_change",)
# what a run may go on with where data.on_change=continue; the loader judges what the data allows
_ORDER = ("seed", "data.window", "data.pack_length", "batch_size")


def find_checkpoint(config: Config) -> Path | None:
    """The checkpoint to go on from, None for a new run. Nothing is written.

    Raises:
        ValueError: the run directory holds another run, the checkpoint is not there or cannot be read, or the
            settings are not those that it was made with.
    """
    folder = Path(config.paths.run_dir)
    if config.resume == "none":
        # the first process alone looks: it may have begun to write when the others come by
        if process_rank() == 0 and folder.is_dir() and any(folder.iterdir()):
            raise ValueError(
                f"the run directory {folder} exists and is not empty: choose another paths.run_dir, "
                "or add resume=auto to go on with the run in it"
            )
        return None
    _check_unfinished(config)
    if config.resume == "auto":
        found = list_checkpoints(folder / "checkpoints")
        if not found:
            log.info("resume=auto: no checkpoint in %s yet, starting from the beginning", folder / "checkpoints")
            return None
        checkpoint = newest_sound(found)
    else:
        checkpoint = Path(config.resume)
        own = checkpoint.parent.resolve() == (folder / "checkpoints").resolve()
        if folder.is_dir() and any(folder.iterdir()) and not own:
            raise ValueError(f"{checkpoint} is not of the run in {folder}: choose another paths.run_dir")
        check_checkpoint(checkpoint)
        step = read_checkpoint(checkpoint)["global_step"]
        newer = [file.name for file in list_checkpoints(checkpoint.parent) if step_of(file) > step]
        if own and newer:
            raise ValueError(
                f"the run in {folder} has come further than {checkpoint.name}: to {', '.join(newer)}. Choose another "
                "paths.run_dir to branch off, or move those away"
            )
    _check_same_settings(config, checkpoint.parent.parent / CONFIG_FILE)
    log.info("going on from %s", checkpoint)
    return checkpoint


def _check_unfinished(config: Config) -> None:
    file = Path(config.paths.run_dir, FIGURES_FILE)
    steps = json.loads(file.read_text(encoding="utf-8"))["steps"] if file.is_file() else -1
    if steps >= config.trainer.max_steps:
        raise ValueError(
            f"the run in {file.parent} is finished, after {steps} steps: choose another paths.run_dir, "
            "or a larger trainer.max_steps to go on with it"
        )


def _check_same_settings(config: Config, file: Path) -> None:
    if not file.is_file():
        raise ValueError(f"{file} is not there, so it cannot be told which settings the checkpoint belongs to")
    now, then = asdict(config), OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    assert isinstance(then, dict)
    for settings in (now, then):
        settings["batch_size"] = settings["trainer"]["batch_size"]
        settings["data"] = {key: value for key, value in settings["data"].items() if key not in _FREE_IN_DATA}
    changed = [
        f"{place} was {old} and is {new}"
        for section in now
        if section not in _FREE_TO_CHANGE
        for place, old, new in _differences(section, then.get(section), now[section])
        if not (place in _ORDER and config.data.on_change == "continue")
    ]
    if changed:
        raise ValueError(
            "the run to resume has other settings: " + "; ".join(changed) + ". Give the command that started it; "
            f"{', '.join(_ORDER)} may be changed with data.on_change=continue"
        )


def _differences(place: str, then: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(now, dict) and isinstance(then, dict):
        for key in dict.fromkeys((*then, *now)):
            yield from _differences(f"{place}.{key}", then.get(key), now.get(key))
    elif then != now:
        yield place, then, now


def write_config(config: Config, overrides: Sequence[str] = ()) -> str:
    """Writes the resolved config into the run directory, which it makes, and how the run came to be started; returns
    the text of the config. `overrides` are those of the command line."""
    folder = Path(config.paths.run_dir)
    settings = asdict(config)
    text = _yaml(settings)
    again = _yaml({key: value for key, value in settings.items() if key not in _NOT_AGAIN})
    hint = f"# the run in {folder}: python -m smi.train --config-dir {shlex.quote(str(folder))} +recipe=rerun"
    write_whole(folder / CONFIG_FILE, text)
    write_whole(folder / RERUN_FILE, f"# @package _global_\n{hint}\n{again}")
    with (folder / STARTS_FILE).open("a", encoding="utf-8") as file:
        file.write("---\n" + yaml.safe_dump(describe_start(overrides), sort_keys=False, allow_unicode=True))
    return text


def finish(config: Config, figures: dict[str, float], steps: int) -> None:
    """Writes what came of the run, null for what is not finite; its directory is a finished one from now on."""
    finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    write_whole(Path(config.paths.run_dir, FIGURES_FILE), json.dumps({"steps": steps} | finite, indent=2) + "\n")


def _yaml(settings: dict[str, Any]) -> str:
    # OmegaConf reads more words as numbers than YAML does, and puts those in quotes
    return OmegaConf.to_yaml(OmegaConf.create(_literal(settings)))


def _literal(value: Any) -> Any:
    """The value with text that would be an interpolation escaped: it is resolved already."""
    if isinstance(value, dict):
        return {key: _literal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_literal(inner) for inner in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
