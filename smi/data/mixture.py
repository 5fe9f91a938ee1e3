"""Preparing a mixture: rows -> accepted examples in shards, the same bytes whatever happens on the way.

Workers compile stretches of rows; one writer takes their chunks in the order of the rows, leaves out duplicates,
counts, and ends each source at its quota. After every row group the progress is written down, so that a run that was
killed goes on from there. Rows in = accepted + rejected, by source, at every moment.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from smi.data.manifest import FILE, Manifest, check_same, check_shards, merge, read_manifest
from smi.data.plan import Plan
from smi.data.shards import write_text
from smi.data.writer import KEYS, PROGRESS, SPOOL, Progress, Writer


class Shortfall(ValueError):
    """Sources ran dry before their quota, and that was not accepted."""


def prepare(
    plan: Plan,
    directory: Path,
    *,
    workers: int = 0,
    row_timeout: float = 30.0,
    accept_shortfall: bool = False,
    progress: Progress = lambda source, account: None,
    say: Callable[[str], None] = lambda text: None,
) -> Manifest:
    """Make the mixture of `plan` in `directory`, or go on making it.

    Args:
        workers: processes that compile; 0 compiles in this one, where a row that hangs hangs the run.
        row_timeout: seconds after which a worker is taken from a row.
        accept_shortfall: let sources run dry before their quota.
        progress, say: told how far things are.

    Raises:
        ValueError: settings that do not fit, and a directory that holds another mixture or something else.
        Shortfall: a source ran dry; nothing has to be done again once that is accepted.
        OSError: the disk is full, or the like; the same call goes on afterwards.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        say("reading and hashing the source files")
        settings = json.loads(json.dumps(plan.settings()))
        if (directory / FILE).exists():
            manifest = read_manifest(directory)
            check_same(manifest.settings, settings, directory, "holds another mixture")
            check_shards(manifest, directory)
            _clean(directory)
            say(f"{directory} is complete already")
            return _accept(manifest, directory, accept_shortfall)
        writer = Writer(plan, directory, settings, progress)
        try:
            if writer.started:
                say(f"going on after {writer.rows:,} rows")
            manifest = writer.run(workers, row_timeout)
        finally:
            writer.close()
        _accept(manifest, directory, accept_shortfall)
        write_text(directory / FILE, manifest.text())
        _clean(directory)
        return manifest


def join(parts: Sequence[Path], directory: Path, *, accept_shortfall: bool = False) -> Manifest:
    """Make one mixture in `directory` of those that several jobs made; see `merge`.

    Raises ValueError as `merge`, for shards that are not what their manifests say, and for a directory that holds
    another mixture; Shortfall as `prepare`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    manifest = merge(parts, directory)
    check_shards(manifest, directory)
    if (directory / FILE).exists():
        check_same(read_manifest(directory).settings, manifest.settings, directory, "holds another mixture")
    _accept(manifest, directory, accept_shortfall)
    write_text(directory / FILE, manifest.text())
    return manifest


def _accept(manifest: Manifest, directory: Path, accepted: bool) -> Manifest:
    if manifest.shortfalls and not accepted:
        short = ", ".join(
            f"{name} has {manifest.sources[name]['supervised_tokens']:,} of {manifest.sources[name]['quota']:,}"
            for name in manifest.shortfalls
        )
        raise Shortfall(
            f"sources ran dry before their quota of supervised tokens: {short}. Lower the quotas in a new directory, "
            "or accept what there is with prepare.on_shortfall=accept: nothing in "
            f"{directory} has to be done again for that"
        )
    return manifest


def _clean(directory: Path) -> None:
    for name in (PROGRESS, KEYS, SPOOL):
        (directory / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keeps a second run out of the directory while this one lives."""
    try:
        import fcntl
    except ImportError:  # no such thing on this system
        yield
        return
    folder = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise ValueError(f"another run is preparing a mixture in {directory}: wait for it, or stop it") from None
    try:
        yield
    finally:
        os.close(folder)
