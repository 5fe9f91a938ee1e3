"""Speed, measured against named peers in one process: ``python -m smi.bench SUITE [--json FILE]``.

A suite is a module of this package with ``run() -> dict[str, Figure]``.
"""
