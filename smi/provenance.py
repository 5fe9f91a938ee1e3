"""What ran, and what came of it: the code, the packages, the machine, and the file with the figures."""

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import smi

# in the directory of a finished run: its figures by name, null for what is not finite
FIGURES_FILE = "figures.json"


def describe_start(overrides: Sequence[str]) -> dict[str, Any]:
    """A start of a run, as plain values: when and how, git commit, versions of everything installed."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "overrides": list(overrides),
        "folder": str(Path.cwd()),
        "smi": smi.__version__,
        "git": git_state(Path(smi.__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {
            d.name: d.version for d in sorted(importlib.metadata.distributions(), key=lambda d: d.name.lower())
        },
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit that is checked out, and the files that differ from it; None outside of a checkout or without git."""
    found = []
    for command in (["rev-parse", "HEAD"], ["status", "--porcelain"]):
        try:
            ran = subprocess.run(["git", "-C", folder, *command], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        found.append(ran.stdout)
    changed = [line[3:] for line in found[1].splitlines()]
    return {"commit": found[0].strip(), "dirty": bool(changed), "changed": changed}
