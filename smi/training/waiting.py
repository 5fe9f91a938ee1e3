"""Waiting for a mixture that is being prepared elsewhere, on this machine or on one that shares the disk."""

import time
from functools import partial
from pathlib import Path

from rich.console import Console

from smi.config import Config
from smi.data import manifest

# seconds between two looks, and between two messages
LOOK_EVERY = 5.0
SAY_EVERY = 600.0


def is_prepared(config: Config) -> bool:
    """Whether the manifest of `wait_for` is there.

    Raises:
        ValueError: it is not the manifest of `data.mixture`, or can never be one.
    """
    assert config.wait_for is not None
    file = Path(config.wait_for)
    if file.name != manifest.FILE:
        file = file / manifest.FILE
    if config.data.mixture is None or Path(config.data.mixture).absolute() != file.parent.absolute():
        raise ValueError(
            f"wait_for={config.wait_for} is not what this run trains on: it should be the {manifest.FILE} of "
            f"data.mixture, which is {config.data.mixture}"
        )
    if file.exists() and not file.is_file():
        raise ValueError(f"wait_for={config.wait_for} cannot become a manifest: {file} is a directory")
    for folder in file.parents:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"wait_for={config.wait_for} cannot become a manifest: {folder} is a file")
    return file.is_file()


def wait_for_mixture(config: Config, console: Console) -> None:
    """Returns once the mixture is there, at once where nothing is waited for. Raises ValueError as `is_prepared`."""
    if config.wait_for is None or is_prepared(config):
        return
    since = said = time.monotonic()
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(f"waiting for {config.wait_for}; Ctrl-C stops")
    while not is_prepared(config):
        time.sleep(LOOK_EVERY)
        if (now := time.monotonic()) - said >= SAY_EVERY:
            said = now
            minutes = (now - since) / 60
            console.print(
                f"still waiting for {config.wait_for}, {minutes:.0f} minutes", highlight=False, soft_wrap=True
            )
    console.print(f"{config.wait_for} is there", highlight=False, soft_wrap=True)
