"""Trains RWKV-7 on SMI streams: compose a config, fit, export.

python -m smi.train +recipe=quickstart
python -m smi.train +recipe=quickstart optim.lr=1e-3 trainer.max_steps=50
python -m smi.train +recipe=quickstart dry_run=true                   # is everything there? trains nothing
python -m smi.train --config-dir RUN_DIR +recipe=rerun                # the run in RUN_DIR once more
python -m smi.train -m +recipe=quickstart seed=1,2
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from smi.composing import config_dir, judge, recipes, register
from smi.config import Config
from smi.hardware import check_launch, process_rank, say_error
from smi.origins import trace
from smi.overrides import check_arguments
from smi.sweeps import DIVERGED, check_installed, conclude, run_job


def train(config: Config, overrides: Sequence[str] = ()) -> dict[str, float]:
    """One run, from a judged config to an export directory. Returns its figures by name; none after a dry run.

    `overrides` are those of the command line, to be kept with the run.

    Raises:
        ValueError: whatever is wrong with config, files, checkpoint, data or kernel, before training starts.
    """
    import lightning as L
    import torch
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from rich.console import Console

    from smi.data.recipe import build_data, build_tokenizer
    from smi.training.debugging import feed
    from smi.training.dry_run import check_run
    from smi.training.export import export_trained, write_card
    from smi.training.models import build_model, build_module
    from smi.training.origin import keep_origin
    from smi.training.report import finished, write_report
    from smi.training.run_directory import find_checkpoint, finish, write_config
    from smi.training.setup import evaluate_tasks, optimization, quiet_libraries, summary
    from smi.training.sharding import whole_model
    from smi.training.trainer import build_trainer, fit
    from smi.training.waiting import wait_for_mixture

    quiet_libraries()
    first = process_rank() == 0
    # a log file is no narrower than a terminal
    console = Console(width=None if sys.stdout.isatty() else 120, quiet=not first)
    if config.dry_run:
        check_run(config, console)
        return {}
    check_launch(config)
    run_dir = Path(config.paths.run_dir)
    checkpoint = find_checkpoint(config)
    wait_for_mixture(config, console)
    L.seed_everything(config.seed, workers=True, verbose=False)
    if config.hardware.threads is not None:
        torch.set_num_threads(config.hardware.threads)

    tokenizer = build_tokenizer(config)
    data = build_data(config, tokenizer)
    model = build_model(config, tokenizer)
    data.setup()
    module = build_module(config, model, optimization(config))
    config_yaml = write_config(config, overrides) if first else ""
    origin = keep_origin(config, tokenizer) if first else None
    console.print(summary(config, model, tokenizer))
    trainer = build_trainer(config, console)
    try:
        fit(trainer, module, feed(config, data), checkpoint)
    except SIGTERMException:
        _terminated()  # lightning alone would leave with 0, as though all were well
    model = module.model = whole_model(trainer, model)
    if not first:
        return {}
    data.report(console)

    figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
    export = export_trained(
        module,
        tokenizer,
        run_dir / "export",
        formats=config.trainer.export,
        config_yaml=config_yaml,
        figures={"steps": trainer.global_step} | figures,
        origin=origin,
    )
    report = run_dir / "report.html"
    console.print(
        f"\nrun directory   {run_dir}\nreport          {report}\nexported model  {export}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if config.data.held_out_tasks:
        held_out = evaluate_tasks(config, module, tokenizer, console)
        figures |= held_out
        write_report(run_dir, finished(trainer), results=held_out)
        write_card(export, model, tokenizer, config.trainer.export, {"steps": trainer.global_step} | figures)
    finish(config, figures, trainer.global_step)
    return figures


def _terminated(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


def _usage() -> str:
    lines = ["python -m smi.train +recipe=NAME [group=option] [key=value] ...", "", "recipes:"]
    for name, file in recipes().items():
        title = file.read_text(encoding="utf-8").splitlines()[1].removeprefix("# ")
        lines.append(f"  {name:<18} {title}")
    lines += ["", "start here: python -m smi.train +recipe=quickstart", "all settings: add --cfg job"]
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    if len(sys.argv) == 1:
        print(_usage())
        sys.exit(2)
    try:
        sys.argv[1:] = check_arguments(sys.argv[1:])
        check_installed(sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    register()
    # so that what is in progress is ended in order; while it trains, a run saves first
    signal.signal(signal.SIGTERM, _terminated)

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")
    def run(composed: DictConfig) -> Any:
        job = HydraConfig.get()
        if job.mode == RunMode.MULTIRUN:
            return run_job(composed)
        try:
            if not composed.dry_run:
                composed.paths.run_dir = job.runtime.output_dir
            return train(judge(composed, trace()), list(job.overrides.task))
        except (ValueError, OSError, FloatingPointError) as error:
            say_error(error)
            sys.exit(DIVERGED if isinstance(error, FloatingPointError) else 2)
        except KeyboardInterrupt:
            if process_rank() == 0:
                print("stopped", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)

    sys.exit(conclude(run))


if __name__ == "__main__":
    main()
