"""From a judged config to the objects of a run. Everything that can be wrong shows here, before training starts."""

import logging
import warnings
from itertools import islice

import transformers
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from smi.config import Config
from smi.data.synthetic import SyntheticTools
from smi.hardware import process_rank, split_batch
from smi.model.modeling import RWKV7ForCausalLM
from smi.runtime.evaluation import score_actions
from smi.tokenizer import Tokenizer
from smi.training.module import Optimization, SMIModule
from smi.training.tuning import describe


def quiet_libraries() -> None:
    """Leaves the console to what a person training a model wants to read."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if process_rank():
        for name in ("smi", "smi_kernels"):
            logging.getLogger(name).setLevel(logging.WARNING)  # the first process has said it
    transformers.utils.logging.disable_progress_bar()
    for message in (
        ".*isinstance\\(treespec, LeafSpec\\).*",  # lightning's own use of torch
        ".*smaller than the logging interval.*",  # short runs are fine
        ".*does not have many workers.*",  # the data module prefetches in a thread
        ".*It is recommended to use `self.log.*sync_dist=True.*",  # figures are summed over processes before that
        ".*Total length of `list` across ranks is zero.*",  # no validation was asked for
    ):
        warnings.filterwarnings("ignore", message=message)


def summary(config: Config, model: RWKV7ForCausalLM, tokenizer: Tokenizer) -> Table:
    """What is about to be trained, on what, and where the results will be."""
    shape, data, run = model.config, config.data, config.trainer
    source = {
        "synthetic": "synthetic tool-use conversations",
        "files": ", ".join(data.train_files),
        "mixture": data.mixture or ", ".join(data.source),
    }[data.kind]
    start = config.model.pretrained or "from scratch"
    kernel = f", kernel {config.kernel.backend}" if config.model.kind == "rwkv7" else ""
    part = "conversation" if data.over_long == "reject" else "piece of a conversation"
    rows = {
        "model": f"{config.model.name}, {model.num_parameters() / 1e6:,.1f}M parameters, "
        f"{shape.num_hidden_layers} layers of {shape.hidden_size}, {start}",
        "trains": describe(model, config.tuning),
        "tokenizer": f"{config.tokenizer.source}, {tokenizer.vocab_size:,} tokens",
        "data": f"{source}; at most {data.max_length:,} tokens a {part}",
        "training": f"{run.max_steps:,} steps of {run.batch_size * data.pack_length:,} tokens, "
        f"peak learning rate {config.optim.lr:g}",
        "hardware": f"{_hardware(config)}, {config.hardware.precision}{kernel}",
        "run directory": str(config.paths.run_dir),
    }
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    return table


def _hardware(config: Config) -> str:
    hardware, split = config.hardware, split_batch(config)
    name = hardware.accelerator
    if split.world_size > 1:
        name = f"{split.world_size} {name} processes ({hardware.strategy})"
    if config.trainer.batch_size > 1:
        name += f", each {split.accumulate} x {split.micro_batch} packs a step"
    return name


def optimization(config: Config) -> Optimization:
    how = config.optim
    return Optimization(
        lr=how.lr,
        max_steps=config.trainer.max_steps,
        final_lr_ratio=how.final_lr_ratio,
        warmup_steps=how.warmup_steps,
        weight_decay=how.weight_decay,
        betas=(how.betas[0], how.betas[1]),
        eps=how.eps,
        z_loss=how.z_loss,
        l2wrap=how.l2wrap,
    )


def evaluate_tasks(config: Config, module: SMIModule, tokenizer: Tokenizer, console: Console) -> dict[str, float]:
    """Plays held-out tasks of the synthetic world with the trained model and prints how it did."""
    source = SyntheticTools(config.seed, config.data.max_questions)
    conversations = list(islice(source.conversations(held_out=True), config.data.held_out_tasks))
    scores = score_actions(module.model, tokenizer, conversations, time_state=module.time_state)
    of = f"of {scores.generated}"
    console.print(
        f"\nconversations about tasks held out of training: {len(conversations)}\n"
        f"  {scores.generated} actions written, {scores.expected} expected\n"
        f"  {scores.parsed} {of} parse, {scores.declared} {of} name a declared tool, "
        f"{scores.valid} {of} have valid arguments ({scores.valid_share:.1%})\n"
        f"  {scores.exact} are exactly right ({scores.exact_share:.1%})\n"
        f"  {scores.answers_exact} of {scores.answers} answers are right word for word",
        highlight=False,
        soft_wrap=True,
    )
    return {f"held_out/{name}": value for name, value in scores.to_dict().items()}
