"""Prepares a mixture: rows of public and own sources -> compiled, checked, counted examples in data.mixture.

python -m smi.prepare +recipe=rwkv7_pilot data.mirror=DIR
python -m smi.prepare +recipe=rwkv7_pilot data.mirror=DIR prepare.tokens=100000
python -m smi.prepare +recipe=rwkv7_pilot mirror=DIR download=true       # the files, once; nothing else
python -m smi.prepare +recipe=rwkv7_pilot merge=[PART,PART]

A run that was stopped or killed goes on when the same command is given again.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from smi.config import Config, SourceConfig
    from smi.data.manifest import Manifest
    from smi.data.plan import Account, Plan
    from smi.data.sources import SourceSpec

MOST_WORKERS = 8
# what may be written shorter on the command line
SHORT = {"mirror": "data.mirror"} | {name: f"prepare.{name}" for name in ("download", "merge", "only", "part")}
# seconds between two lines where there is no terminal
LINE_EVERY = 10.0


class Stopped(BaseException):
    """SIGTERM came. Not an Exception, so that nothing takes it for an error of a row."""


def download_sources(config: Config) -> None:
    """Brings the files of the sources on the hub to `data.mirror`. Raises ValueError and OSError as `hub.download`."""
    from smi.data.hub import download

    if config.data.mirror is None:
        raise ValueError("data.mirror is not set: name the directory that the files are to be in")

    def show(file: Any, done: int) -> None:
        print(f"{file.path}  {done / max(file.size, 1):.0%} of {file.size / 1e6:,.1f} MB", flush=True)

    files = download(_specs(config), config.data.mirror, show)
    print(f"{len(files)} files are in {config.data.mirror}")


def prepare_mixture(config: Config) -> Manifest:
    """One run, from a judged config to a finished mixture. Returns its manifest.

    Raises:
        ValueError: whatever is wrong with config, files and directory, and sources that ran dry.
        OSError: a full disk, or the like; the same call goes on afterwards.
    """
    from rich.console import Console

    from smi.data.mixture import join, prepare
    from smi.data.report import REPORT, write_report

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=True)
    if config.data.mixture is None:
        raise ValueError("data.mixture is not set: name the directory for the mixture")
    directory = Path(config.data.mixture)
    accepted = config.prepare.on_shortfall == "accept"
    if config.prepare.merge:
        manifest = join([Path(part) for part in config.prepare.merge], directory, accept_shortfall=accepted)
    else:
        with _display(console) as progress:
            manifest = prepare(
                make_plan(config),
                directory,
                workers=_workers(config.prepare.workers),
                row_timeout=config.prepare.row_timeout,
                accept_shortfall=accepted,
                progress=progress,
                say=console.print,
            )
    console.print(summary(manifest))
    # made anew each time: pack_length, which it foresees the packing for, is free to change
    write_report(manifest, directory, config.data.pack_length)
    console.print(f"mixture  {directory}\nreport   {directory / REPORT}")
    return manifest


def make_plan(config: Config) -> Plan:
    """What the config says is to be prepared. Raises ValueError where it contradicts itself."""
    from smi.config import longest_document, tokenizer_source
    from smi.data.plan import Plan
    from smi.tokenizer import load_tokenizer

    data, how = config.data, config.prepare
    return Plan(
        sources=_specs(config),
        tokenizer=load_tokenizer(tokenizer_source(config)),
        root=data.mirror or "hf://",
        max_length=longest_document(data),
        dedupe=how.dedupe,
        near_threshold=how.near_threshold,
        near_limit=how.near_limit,
        held_out=how.held_out_files,
        seed=how.seed,
        part=_part(how.part),
        row_group_rows=how.row_group_rows,
        shard_rows=how.shard_rows,
        epochs={name: source.epochs for name, source in data.source.items()},
    )


def _specs(config: Config) -> list[SourceSpec]:
    """The sources that are asked for, with what is to be taken from each."""
    from smi.config import source_options
    from smi.data.sources import SourceSpec

    data, how = config.data, config.prepare
    if data.kind != "mixture" or not data.source:
        raise ValueError("there are no sources to prepare: choose data=pilot, or name your own under data.source")
    chosen = how.only or list(data.source)
    if unknown := [name for name in chosen if name not in data.source]:
        raise ValueError(f"prepare.only names {', '.join(unknown)}; there are {', '.join(data.source)}")
    quotas = _quotas(data.source, how.tokens)
    specs = [SourceSpec(name, **source_options(source)) for name, source in data.source.items() if name in chosen]
    return [replace(spec, quota=quotas[spec.name]) for spec in specs]


def _quotas(sources: dict[str, SourceConfig], tokens: int | None) -> dict[str, int | None]:
    """Supervised tokens to take from each source: an epoch goes several times through some of them."""
    for name, source in sources.items():
        for what, value in (("quota", source.quota), ("weight", source.weight), ("epochs", source.epochs)):
            if value is not None and value <= 0:
                raise ValueError(f"data.source.{name}.{what} should be above 0, not {value}")
    wanted: dict[str, float | None] = {name: source.quota for name, source in sources.items()}
    weighted = [name for name, source in sources.items() if source.weight is not None]
    if tokens is not None:
        shares = {name: source.quota if source.weight is None else source.weight for name, source in sources.items()}
        if lacking := [name for name, part in shares.items() if part is None]:
            raise ValueError(f"prepare.tokens is shared out by weight or quota, and {', '.join(lacking)} has neither")
        whole = sum(part for part in shares.values() if part is not None)
        wanted = {name: tokens * part / whole for name, part in shares.items() if part is not None}
    elif weighted:
        raise ValueError(f"{', '.join(weighted)} has a weight: say with prepare.tokens what there is to share out")
    return {name: None if w is None else max(1, round(w / sources[name].epochs)) for name, w in wanted.items()}


def _part(text: str) -> tuple[int, int]:
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ValueError(f"prepare.part is {text!r}; it should be i/n, such as 0/4 for the first of four jobs")
    return int(number), int(count)


def _workers(wanted: int | None) -> int:
    if wanted is not None:
        return wanted
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


def summary(manifest: Manifest) -> Any:
    """What became of the rows: a table with one line a source, and below it why rows were left out."""
    from rich.console import Group
    from rich.table import Table

    table = Table(title="Mixture")
    table.add_column("source", no_wrap=True)
    for column in ("rows in", "accepted", "rejected", "tokens", "supervised", "quota", "short by"):
        table.add_column(column, justify="right")
    reasons: list[str] = []
    for name, account in manifest.sources.items():
        rejected: dict[str, int] = account["rejected"]
        if rejected:
            counts = ", ".join(f"{reason} {count:,}" for reason, count in sorted(rejected.items(), key=lambda r: -r[1]))
            reasons.append(f"rejected of {name}: {counts}")
        quota = "all" if account["quota"] is None else f"{account['quota']:,}"
        figures = (account["rows"], account["accepted"], sum(rejected.values()))
        figures += (account["tokens"], account["supervised_tokens"])
        table.add_row(name, *(f"{figure:,}" for figure in figures), quota, f"{account['shortfall']:,}")
    return Group(table, *reasons)


class _Pace:
    """How fast a source goes, since this run began it."""

    def __init__(self, account: Account) -> None:
        self.began, self.rows, self.tokens = time.monotonic(), account.rows, account.tokens
        self.supervised = account.supervised_tokens

    def text(self, account: Account) -> str:
        took = max(time.monotonic() - self.began, 1e-9)
        text = f"{account.rows:,} rows  {(account.rows - self.rows) / took:,.0f} rows/s"
        text += f"  {(account.tokens - self.tokens) / took:,.0f} tokens/s"
        gained = account.supervised_tokens - self.supervised
        if account.quota is None or not gained:
            return text
        left = max(0.0, (account.quota - account.supervised_tokens) * took / gained)
        done = min(1.0, account.supervised_tokens / account.quota)
        return f"{text}  {done:.0%} of its quota, at most {int(left) // 60}:{int(left) % 60:02d} left"


@contextmanager
def _display(console: Console) -> Iterator[Any]:
    """A bar a source in a terminal, a line from time to time elsewhere."""
    from rich.progress import BarColumn, Progress, TextColumn

    paces: dict[str, _Pace] = {}
    if not console.is_terminal:
        last = time.monotonic()

        def line(source: str, account: Account) -> None:
            nonlocal last
            pace = paces.setdefault(source, _Pace(account))
            if time.monotonic() - last >= LINE_EVERY:
                last = time.monotonic()
                console.print(f"{source}  {pace.text(account)}")

        yield line
        return
    tasks: dict[str, Any] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=console) as bars:

        def bar(source: str, account: Account) -> None:
            pace = paces.setdefault(source, _Pace(account))
            if source not in tasks:
                tasks[source] = bars.add_task(source, total=account.quota, text="")
            bars.update(tasks[source], completed=account.supervised_tokens, text=pace.text(account))

        yield bar


def _usage() -> str:
    from smi.composing import recipes

    names = ", ".join(recipes())
    return f"{__doc__}\nrecipes: {names}; only those with sources can be prepared\nall settings: add --cfg job"


def main() -> None:
    """The command line."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import DictConfig

    from smi.composing import ConfigError, config_dir, judge, register
    from smi.origins import trace
    from smi.overrides import check_arguments

    if len(sys.argv) == 1:
        print(_usage())
        sys.exit(2)
    for i, argument in enumerate(sys.argv[1:], 1):
        key, equals, value = argument.partition("=")
        if equals and key in SHORT:
            sys.argv[i] = f"{SHORT[key]}={value}"
    try:
        sys.argv[1:] = check_arguments(sys.argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if not any(argument.startswith(("+recipe=", "data=", "--")) for argument in sys.argv[1:]):
        sys.argv.append("data=pilot")
    register()

    def stop(number: int, frame: Any) -> None:
        raise Stopped

    signal.signal(signal.SIGTERM, stop)

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="prepare")
    def run(composed: DictConfig) -> None:
        try:
            config = judge(composed, trace())
            (download_sources if config.prepare.download else prepare_mixture)(config)
        except (ValueError, RuntimeError, OSError) as error:
            if HydraConfig.get().mode != RunMode.RUN:  # in a sweep the other jobs go on
                raise
            hint = "; once that is put right, the same command goes on from here" if isinstance(error, OSError) else ""
            print(f"error: {error}{hint}", file=sys.stderr)
            sys.exit(2)
        except (KeyboardInterrupt, Stopped) as error:
            print("stopped; the same command goes on from here", file=sys.stderr)
            sys.exit(128 + (signal.SIGTERM if isinstance(error, Stopped) else signal.SIGINT))

    run()


if __name__ == "__main__":
    main()
