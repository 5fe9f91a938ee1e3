"""The command line of `smi.bench`."""

import argparse
import importlib
import json
import os
import pkgutil
import platform
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import smi.bench
from smi.bench.measure import Figure

NOT_SUITES = ("__main__", "_prepare_run", "measure", "portable")
SUITES = sorted(m.name for m in pkgutil.iter_modules(smi.bench.__path__) if m.name not in NOT_SUITES)


def show(console: Console, suite: str, figures: dict[str, Figure]) -> None:
    """Prints the figures as a table."""
    table = Table(title=f"{suite}: {_machine()}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("target", justify="right")
    table.add_column("measured", overflow="fold")
    for name, figure in figures.items():
        target = ""
        if figure.at_least is not None:
            target = f">= {figure.at_least:g}"
        if figure.at_most is not None:
            target = f"{target} <= {figure.at_most:g}".strip()
        style = {None: "default", True: "green", False: "red"}[figure.met]
        table.add_row(name, f"[{style}]{figure.value:.4g}[/]", target, figure.detail)
    console.print(table)


def _machine() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        name = next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores, {name}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m smi.bench", description=smi.bench.__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write {figure: value} to FILE")
    arguments = parser.parse_args(argv)
    figures: dict[str, Figure] = importlib.import_module(f"smi.bench.{arguments.suite}").run()
    show(Console(width=None if sys.stdout.isatty() else 140), arguments.suite, figures)
    if arguments.json:
        values = {name: figure.value for name, figure in figures.items()}
        arguments.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
