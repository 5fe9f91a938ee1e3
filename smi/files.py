"""Files that are there whole or not at all, whenever the process is killed."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Has what a file holds, or what is renamed within a directory, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(file: Path, text: str) -> None:
    """The file has its old content or the new one; folders above it are made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.partial")
    draft.write_text(text, encoding="utf-8")
    draft.replace(file)
