"""The schema that every composed config must fit, and the places where configs and recipes are found.

Hydra composes; `judge` decides. An unknown key is an error that names the nearest valid one, whichever way it came
in, and a number that arrives as text is refused rather than converted.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


class ConfigError(ValueError):
    """A config that does not fit the schema."""


@dataclass
class ModelConfig:
    """RWKV-7's shape, or the checkpoint to start from.

    `pretrained` is a file, a directory or a hub id; the shape is then read from the weights, and the one given
    here is what they are expected to have.
    """

    name: str = MISSING
    hidden_size: int = MISSING
    num_hidden_layers: int = MISSING
    head_dim: int = 64
    decay_low_rank_dim: int = MISSING
    a_low_rank_dim: int = MISSING
    v_low_rank_dim: int = MISSING
    gate_low_rank_dim: int = MISSING
    embedding_init: float = 1e-4
    pretrained: str | None = None
    revision: str | None = None
    gradient_checkpointing: bool = False


@dataclass
class TokenizerConfig:
    """`source` is a name that `smi.tokenizer.load_tokenizer` knows, or a directory with a tokenizer.json."""

    source: str = MISSING


@dataclass
class SourceConfig:
    """Rows of one kind: files, and the adapter that reads them; see `smi.data.sources.SourceSpec`.

    `quota` is in supervised tokens an epoch of training; with `prepare.tokens` it is a share, as `weight` is, which
    stands for it there. An epoch goes through the prepared rows of a source `epochs` times. With a `dataset`, files
    are those of its `revision`. `columns` are the adapter's names of columns and the files' names for them, `filters`
    conditions such as `score >= 0.8`.
    """

    files: list[str] = MISSING
    adapter: str = MISSING
    quota: int | None = None
    weight: float | None = None
    epochs: int = 1
    dataset: str | None = None
    revision: str | None = None
    licence: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    filters: list[str] = field(default_factory=list)


def source_options(source: SourceConfig) -> dict[str, Any]:
    """The arguments of `smi.data.sources.SourceSpec`, but its name."""
    return {key: value for key, value in vars(source).items() if key != "epochs"}


@dataclass
class DataConfig:
    """What to train on: `kind` says which of the fields below it are read.

    synthetic: `max_questions` a conversation, and `held_out_tasks` conversations to play after training; files:
    `train_files`, `val_files` and their `adapter`; mixture: what was prepared in the directory `mixture` (or is in
    that file, compiled by others), or, where that is null, `source`, each with files below `mirror`, as they are.
    `workers`: threads that read a prepared mixture ahead. `on_change`: refuse a checkpoint of another seed, window,
    pack length or accumulation, or continue with exactly what its epoch has left.
    """

    kind: str = MISSING
    max_questions: int = 4
    held_out_tasks: int = 0
    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    adapter: str = "messages"
    mixture: str | None = None
    mirror: str | None = None
    source: dict[str, SourceConfig] = field(default_factory=dict)
    max_length: int = 2048
    pack_length: int = 2048
    window: int = 512
    val_fraction: float = 0.0
    val_batches: int = 16
    workers: int = 2
    on_change: str = "refuse"


@dataclass
class PrepareConfig:
    """How `python -m smi.prepare` makes the mixture in `data.mixture` from `data.source`.

    `workers`: processes that compile, null for one a core and at most 8, 0 for none but the command's own, in which a
    row that hangs hangs the run; `row_timeout`: seconds that a worker may spend at one row. `tokens`: supervised
    tokens an epoch, shared out by quotas or weights. `seed`: of the order in which files are read. `on_shortfall`:
    error or accept, where a source runs dry before its quota. `only`: these sources; `part`: i/n, the i-th (from 0)
    of n jobs that share every source; `merge`: directories of such jobs, to be made one mixture. `download`: bring the
    files of hub sources to `data.mirror`, and no more. `dedupe`: exact, normalised (but for white space and ids), or
    near, from a likeness of `near_threshold` on, and at most a share of `near_limit`. `held_out_files`: what is to be
    measured with; a row that shares a long run of words with it is left out.
    """

    workers: int | None = None
    row_timeout: float = 30.0
    tokens: int | None = None
    seed: int = 0
    on_shortfall: str = "error"
    row_group_rows: int = 1024
    shard_rows: int = 16384
    only: list[str] = field(default_factory=list)
    part: str = "0/1"
    merge: list[str] = field(default_factory=list)
    download: bool = False
    dedupe: str = "exact"
    near_threshold: float = 0.8
    near_limit: float = 0.5
    held_out_files: list[str] = field(default_factory=list)


@dataclass
class KernelConfig:
    """`backend` is a WKV backend's name, or auto. `compile` runs the blocks, but for the kernel, through inductor."""

    backend: str = "auto"
    compile: bool = False


@dataclass
class HardwareConfig:
    """What to run on, in Lightning's terms. `threads` are torch's on the CPU; null leaves them alone."""

    accelerator: str = MISSING
    precision: str = MISSING
    threads: int | None = None


@dataclass
class OptimConfig:
    """AdamW and its schedule; see `smi.training.module.Optimization`."""

    lr: float = MISSING
    final_lr_ratio: float = 0.1
    warmup_steps: int = 0
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    eps: float = 1e-18
    clip: float = 1.0
    z_loss: float = 0.0
    l2wrap: bool = False


@dataclass
class TrainerConfig:
    """How long, how often, and what is kept. Every count is in optimizer steps."""

    max_steps: int = MISSING
    accumulate: int = 1
    val_every: int = 100
    log_every: int = 10
    checkpoint_every: int = 100
    keep_checkpoints: int = 1
    export: list[str] = field(default_factory=lambda: ["hf", "native"])


@dataclass
class LoggerConfig:
    """`kind`: tensorboard, csv, wandb or none. `project` is W&B's."""

    kind: str = MISSING
    project: str = "smi"


@dataclass
class PathsConfig:
    """`run_dir` holds everything that a run writes."""

    run_dir: str = MISSING


@dataclass
class Config:
    """A whole run.

    `resume`: none, auto (the newest checkpoint in `paths.run_dir`, if there is one), or a checkpoint file.
    """

    name: str = MISSING
    seed: int = 0
    resume: str = "none"
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)


CHOICES: dict[str, tuple[str, ...]] = {
    "data.kind": ("synthetic", "files", "mixture"),
    "data.on_change": ("refuse", "continue"),
    "prepare.on_shortfall": ("error", "accept"),
    "prepare.dedupe": ("exact", "normalised", "near"),
    "logger.kind": ("tensorboard", "csv", "wandb", "none"),
    "trainer.export": ("hf", "native", "fla"),
    "hardware.accelerator": ("cpu", "gpu"),
    "hardware.precision": ("32-true", "bf16-mixed"),
}

# least values; optim.lr and eps must be above theirs
LEAST: dict[str, float] = {
    "seed": 0,
    "model.hidden_size": 1,
    "model.num_hidden_layers": 1,
    "model.head_dim": 1,
    "model.decay_low_rank_dim": 1,
    "model.a_low_rank_dim": 1,
    "model.v_low_rank_dim": 1,
    "model.gate_low_rank_dim": 1,
    "model.embedding_init": 0,
    "data.max_questions": 1,
    "data.held_out_tasks": 0,
    "data.val_batches": 1,
    "data.workers": 0,
    "prepare.workers": 0,
    "prepare.row_timeout": 0.1,
    "prepare.tokens": 1,
    "prepare.seed": 0,
    "prepare.row_group_rows": 1,
    "prepare.shard_rows": 1,
    "hardware.threads": 1,
    "optim.lr": 0,
    "optim.final_lr_ratio": 0,
    "optim.warmup_steps": 0,
    "optim.weight_decay": 0,
    "optim.eps": 0,
    "optim.clip": 0,
    "optim.z_loss": 0,
    "trainer.max_steps": 1,
    "trainer.accumulate": 1,
    "trainer.val_every": 1,
    "trainer.log_every": 1,
    "trainer.checkpoint_every": 1,
    "trainer.keep_checkpoints": 1,
}


def judge(composed: DictConfig) -> Config:
    """The composed config as objects.

    Raises:
        ConfigError: unknown or missing keys, values of the wrong type, unknown choices; all of them listed.
    """
    problems: list[str] = []
    plain = OmegaConf.to_container(composed, resolve=True)
    _check(plain, Config, "", problems)
    if not problems:
        problems += [f"{key} is missing: give it a value" for key in sorted(OmegaConf.missing_keys(composed))]
    if problems:
        raise ConfigError("this config does not fit:\n  " + "\n  ".join(problems))
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), composed))
    except OmegaConfBaseException as error:
        raise ConfigError(f"this config does not fit: {str(error).splitlines()[0]}") from error
    assert isinstance(config, Config)
    if len(config.optim.betas) != 2 or not all(0 <= beta < 1 for beta in config.optim.betas):
        raise ConfigError(f"optim.betas should be two numbers from 0 up to 1, not {config.optim.betas}")
    if not config.trainer.export:
        raise ConfigError("trainer.export is empty: name one or more of hf, native, fla")
    return config


def check_override(override: str) -> None:
    """Refuses a command-line override of a setting that does not exist, naming the nearest one that does.

    Hydra refuses most of these itself, but names no alternative.

    Raises:
        ConfigError: as said; groups, Hydra's own settings and flags pass.
    """
    key, equals, _ = override.partition("=")
    key = key.lstrip("+~")
    if not equals or override.startswith("-") or "/" in key or "@" in key:
        return
    top, *rest = key.split(".")
    wanted: Any = Config
    if top == "hydra":
        return
    if top == "recipe":
        if not override.startswith("+"):
            raise ConfigError(f"a recipe is added, not changed: write +{override}")
        return
    for i, part in enumerate([top, *rest]):
        if typing.get_origin(wanted) is dict:
            wanted = typing.get_args(wanted)[1]
            continue
        if not dataclasses.is_dataclass(wanted):
            return  # judged by its value
        known = {f.name: f.type for f in dataclasses.fields(wanted)}
        if part not in known:
            raise ConfigError(_unknown(".".join([top, *rest][: i + 1]), part, known))
        wanted = known[part]


def _unknown(path: str, key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(known), n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
    return f"{path} is no setting; {hint}"


def _check(value: Any, wanted: Any, where: str, problems: list[str]) -> None:
    if typing.get_origin(wanted) in (typing.Union, types.UnionType):
        if value is None:
            return
        (wanted,) = (option for option in typing.get_args(wanted) if option is not type(None))
    if value == "???":
        return
    origin = typing.get_origin(wanted)
    if dataclasses.is_dataclass(wanted):
        if not isinstance(value, dict):
            problems.append(f"{where or 'the config'} should be a group of settings, not {value!r}")
            return
        known = {f.name: f.type for f in dataclasses.fields(wanted)}
        for key, inner in value.items():
            path = f"{where}.{key}" if where else str(key)
            if key in known:
                _check(inner, known[key], path, problems)
            else:
                problems.append(_unknown(path, str(key), known))
    elif origin is dict:
        if not isinstance(value, dict):
            problems.append(f"{where} should be a group of settings, not {value!r}")
            return
        for key, inner in value.items():
            _check(inner, typing.get_args(wanted)[1], f"{where}.{key}", problems)
    elif origin is list:
        if not isinstance(value, list):
            problems.append(f"{where} should be a list, like [{value}], not {value!r}")
            return
        for i, inner in enumerate(value):
            _check(inner, typing.get_args(wanted)[0], f"{where}[{i}]", problems)
        _check_choice(value, where, problems)
    elif wanted is bool:
        if not isinstance(value, bool):
            problems.append(f"{where} should be true or false, not {value!r}")
    elif wanted is int:
        if isinstance(value, bool) or not isinstance(value, int):
            problems.append(f"{where} should be a whole number, not {value!r}")
        else:
            _check_range(value, where, problems)
    elif wanted is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            problems.append(f"{where} should be a number, not {value!r}")
        else:
            _check_range(value, where, problems)
    elif wanted is str:
        if not isinstance(value, str):
            problems.append(f"{where} should be text, not {value!r}: put it in quotes")
        _check_choice([value], where, problems)


def _check_range(value: float, where: str, problems: list[str]) -> None:
    least = LEAST.get(where)
    if not math.isfinite(value):
        problems.append(f"{where} should be a finite number, not {value}")
    elif where in ("optim.lr", "optim.eps") and value <= 0:
        problems.append(f"{where} should be above 0, not {value}")
    elif least is not None and value < least:
        problems.append(f"{where} should be at least {least:g}, not {value}")


def _check_choice(values: list[Any], where: str, problems: list[str]) -> None:
    choices = CHOICES.get(where)
    problems += [
        f"{where} should be one of {', '.join(choices or ())}, not {value!r}"
        for value in values
        if choices and value not in choices
    ]


def _shipped(name: str) -> Path:
    """`configs` or `recipes`: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def config_dir() -> Path:
    """The directory of Hydra's groups."""
    return _shipped("configs")


def recipes() -> dict[str, Path]:
    """The shipped recipes by name ("quickstart", "debug/overfit", ...)."""
    root = _shipped("recipes")
    return {file.relative_to(root).with_suffix("").as_posix(): file for file in sorted(root.rglob("*.yaml"))}


def register() -> None:
    """Gives Hydra what it needs beside the directory of groups; call before it composes.

    - ``schema``: every setting with its default, so that each can be overridden by name. Plain values, without
      types: typed ones would turn the text "1" into a number in silence.
    - every shipped recipe as an option of the group ``recipe``. Hydra names a group after its directory and takes a
      ``+group=name`` that it does not know for a plain value; so stored, a wrong name is an error that lists the
      right ones.
    """
    store = ConfigStore.instance()
    store.store(name="schema", node=OmegaConf.to_container(OmegaConf.structured(Config)), provider="smi")
    for name, file in recipes().items():
        folder, _, stem = name.rpartition("/")
        group = f"recipe/{folder}" if folder else "recipe"
        store.store(group=group, name=stem, node=OmegaConf.load(file), package="_global_", provider="smi")
