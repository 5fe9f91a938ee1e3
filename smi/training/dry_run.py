"""A dry run: everything that can be wrong is looked for, nothing is trained, nothing is written."""

from collections.abc import Callable
from typing import TypeVar

from rich.console import Console
from rich.markup import escape

from smi.config import Config
from smi.data.recipe import build_data, build_tokenizer
from smi.model.configuration import RWKV7Config
from smi.training.memory_estimate import GIB, MemoryEstimate, check_fits, estimate_memory
from smi.training.models import check_device, outline_model
from smi.training.run_directory import find_checkpoint
from smi.training.setup import summary
from smi.training.tuning import count_trained
from smi.training.waiting import is_prepared

T = TypeVar("T")


def check_run(config: Config, console: Console) -> None:
    """Prints what would be trained, on what, and what it needs.

    Raises:
        ValueError: the run could not start; every reason is listed.
    """
    reasons: list[str] = []

    def attempt(check: Callable[..., T], *arguments: object) -> T | None:
        try:
            return check(*arguments)
        except (ValueError, OSError) as error:
            reasons.append(str(error))
            return None

    backend = attempt(check_device, config)
    checkpoint = attempt(find_checkpoint, config)
    tokenizer = attempt(build_tokenizer, config)
    model = None
    if tokenizer is not None:
        model = attempt(outline_model, config, tokenizer)
        if config.wait_for is None or attempt(is_prepared, config):
            attempt(lambda: build_data(config, tokenizer).setup())
        elif not reasons:
            console.print(f"{config.wait_for} is waited for: what it will say cannot be checked yet", soft_wrap=True)
    if tokenizer is not None and model is not None:
        table = summary(config, model, tokenizer)
        if isinstance(model.config, RWKV7Config):
            needs = estimate_memory(config, model.config, count_trained(model, config.tuning))
            attempt(check_fits, config, needs)
            table.add_row("[bold]memory[/bold]", _memory(needs))
        if backend is not None:
            table.add_row("[bold]WKV backend[/bold]", escape(backend))
        if checkpoint is not None:
            table.add_row("[bold]goes on from[/bold]", escape(str(checkpoint)))
        console.print(table)
    if reasons:
        raise ValueError("this run cannot start:\n  " + "\n  ".join(reasons))
    console.print("dry run: everything is there, nothing was trained")


def _memory(needs: MemoryEstimate) -> str:
    parts = ", ".join(f"{_size(size)} {part}" for part, size in vars(needs).items() if part != "card")
    of_card = "" if needs.card is None else f" of {_size(needs.card)}"
    return f"about {_size(needs.total)}{of_card} a device: {parts}"


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"
