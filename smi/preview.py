"""Shows one conversation as the model gets it: blocks by kind, supervised tokens marked, tokens counted.

python -m smi.preview synthetic --row 3
python -m smi.preview talk.parquet --row 3 --adapter messages --tokenizer rwkv_world
python -m smi.preview talk.jsonl --ids
python -m smi.preview talk.jsonl --html talk.html
echo '{"messages": [...]}' | python -m smi.preview -

Exits 1 where the row is rejected, and 2 where arguments or files are wrong.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from bisect import bisect_right
from html import escape
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.text import Text

from smi.data.adapters import ADAPTERS, Adapter, get_adapter
from smi.data.budget import MAX_ROW_BYTES
from smi.data.pipeline import Compiler, Rejection
from smi.data.sources import (
    Block,
    Location,
    SourceSpec,
    find_files,
    list_blocks,
    missing_columns,
    parse_row,
    read_block,
)
from smi.data.synthetic import SyntheticTools
from smi.protocol.codec import Example, PlainTokenizer
from smi.protocol.conversation import Conversation
from smi.protocol.render import Preview, render_html, render_text, visible
from smi.protocol.stream import ProtocolError
from smi.tokenizer import load_tokenizer

SYNTHETIC = "synthetic"
STDIN = "-"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(message)


def _fail(message: object) -> NoReturn:
    print(f"error: {visible(' '.join(str(message).split()))}", file=sys.stderr)
    sys.exit(2)


def _arguments() -> argparse.Namespace:
    parser = _Parser(prog="python -m smi.preview", description="Show one conversation as the model gets it.")
    parser.add_argument(
        "source",
        help=f"a .parquet, .jsonl or .json file; {STDIN} for one JSON object on standard input; "
        f"{SYNTHETIC} for the quickstart's world",
    )
    parser.add_argument("--row", type=int, default=0, help="which row, from 0 (default: 0)")
    parser.add_argument("--adapter", default="messages", help=f"format of the rows: {', '.join(ADAPTERS)}")
    parser.add_argument(
        "--tokenizer", help="rwkv_world, compact or a directory (default: rwkv_world; compact for synthetic)"
    )
    parser.add_argument("--ids", action="store_true", help="show the id of each token")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page instead")
    return parser.parse_args()


def _row(source: str, row: int, adapter: Adapter) -> tuple[Conversation | ProtocolError, str]:
    """The conversation, or why it is none, and what to call its place. ValueError where there is no such row."""
    if row < 0:
        raise ValueError(f"--row counts from 0, got {row}")
    if source == SYNTHETIC:
        return next(itertools.islice(SyntheticTools().conversations(), row, None)), f"{SYNTHETIC} row {row}"
    if source == STDIN:
        if row:
            raise ValueError("standard input holds one conversation; --row is for files")
        value, place = parse_row(sys.stdin.buffer.read(MAX_ROW_BYTES + 1)), "standard input"
    else:
        value, place = _file_row(Path(source), row, adapter), f"{source} row {row}"
    if isinstance(value, ProtocolError):
        return value, place
    try:
        return adapter.convert(value), place
    except ProtocolError as error:
        return error, place


def _file_row(path: Path, row: int, adapter: Adapter) -> dict | ProtocolError:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    # to look at rows is not to train on them
    find_files(SourceSpec(path.name, str(path), adapter.name), held_out=True)
    if missing := missing_columns(path, adapter.needs):
        raise ValueError(
            f"{path} has no column {missing[0]}, which the adapter {adapter.name!r} needs; "
            f"it has {', '.join(missing[1])}"
        )
    blocks = list_blocks(path)
    count = 0
    if path.suffix == ".parquet" and blocks:
        # its footer knows where rows are; elsewhere they have to be counted
        index = bisect_right(blocks, row, key=Block.first_row) - 1
        blocks, count = blocks[index:], blocks[index].first_row()
    for block in blocks:
        for found in read_block(block, path.name, columns=adapter.columns):
            if count == row:
                return found.value
            count += 1
    raise ValueError(f"{path} has no row {row}: " + (f"the last one is {count - 1}" if count else "it is empty"))


def _page(example: Example, tokenizer: PlainTokenizer, title: str, ids: bool) -> str:
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{escape(title)}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ max-width: 1000px; margin: 24px auto; padding: 0 16px; font: 13px system-ui, sans-serif }}
</style>
<h3>{escape(title)}</h3>
{render_html(example, tokenizer, ids=ids)}
</html>
"""


def main() -> None:
    """The command line."""
    arguments = _arguments()
    # a terminal of another encoding is no reason to fail
    sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        page: Path | None = arguments.html
        if page and page.suffix not in (".html", ".htm"):
            raise ValueError(f"--html writes a page: name it .html, not {page}")
        adapter = get_adapter(arguments.adapter)
        talk, place = _row(arguments.source, arguments.row, adapter)
        name = arguments.tokenizer or ("compact" if arguments.source == SYNTHETIC else "rwkv_world")
        tokenizer = load_tokenizer(name)
        outcome = Compiler(tokenizer, sys.maxsize)(talk, Location(place, "", None, 0))
        if isinstance(outcome, Rejection):
            print(f"rejected: {visible(f'{place}: {outcome.detail} [{outcome.reason}]')}", file=sys.stderr)
            sys.exit(1)
        title = visible(f"{place}, tokenizer {name}")
        if page:
            page.write_text(_page(outcome.example, tokenizer, title, arguments.ids), encoding="utf-8")
            print(f"page: {page}")
            return
        console = Console(highlight=False)
        console.print(Text(title, "bold"), soft_wrap=True)
        if console.is_terminal:
            console.print(Preview(outcome.example, tokenizer, arguments.ids))
        else:
            # a file or a pager gets lines as they are
            console.print(render_text(outcome.example, tokenizer, ids=arguments.ids), soft_wrap=True)
    except (ValueError, OSError) as error:
        _fail(error)


if __name__ == "__main__":
    main()
