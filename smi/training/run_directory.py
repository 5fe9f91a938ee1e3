"""The directory of a run: whether a run may begin or go on in it, and what it was configured with."""

import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from smi.config import Config
from smi.hardware import process_rank
from smi.training.checkpoint import check_checkpoint, list_checkpoints

log = logging.getLogger("smi")

CONFIG_FILE = "config.yaml"

# what a resumed run may change; everything else decides what is learned, and in which order
_FREE_TO_CHANGE = ("name", "resume", "paths", "logger", "kernel", "hardware", "trainer", "sweep")
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
    if config.resume == "auto":
        found = list_checkpoints(folder / "checkpoints")
        if not found:
            log.info("resume=auto: no checkpoint in %s yet, starting from the beginning", folder / "checkpoints")
            return None
        checkpoint = found[-1]
    else:
        checkpoint = Path(config.resume)
        own = checkpoint.parent.resolve() == (folder / "checkpoints").resolve()
        if folder.is_dir() and any(folder.iterdir()) and not own:
            raise ValueError(f"{checkpoint} is not of the run in {folder}: choose another paths.run_dir")
    check_checkpoint(checkpoint)
    _check_same_settings(config, checkpoint.parent.parent / CONFIG_FILE)
    log.info("going on from %s", checkpoint)
    return checkpoint


def _check_same_settings(config: Config, file: Path) -> None:
    if not file.is_file():
        raise ValueError(f"{file} is not there, so it cannot be told which settings the checkpoint belongs to")
    now, then = asdict(config), yaml.safe_load(file.read_text(encoding="utf-8"))
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


def write_config(config: Config) -> str:
    """Writes the resolved config into the run directory, which it makes; returns the text."""
    folder = Path(config.paths.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(asdict(config), sort_keys=False)
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    return text
