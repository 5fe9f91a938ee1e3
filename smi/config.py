"""The schema that every composed config must fit: its settings, their defaults, choices and least values."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class ModelConfig:
    """RWKV-7's shape, or the checkpoint to start from.

    `kind`: rwkv7, or hf for any causal language model of transformers, from its checkpoint. `pretrained` is a file, a
    directory or a hub id; the shape is then read from the weights, and what is given of it here is what they are
    expected to have.
    """

    name: str = MISSING
    kind: str = "rwkv7"
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    head_dim: int = 64
    decay_low_rank_dim: int | None = None
    a_low_rank_dim: int | None = None
    v_low_rank_dim: int | None = None
    gate_low_rank_dim: int | None = None
    embedding_init: float = 1e-4
    pretrained: str | None = None
    revision: str | None = None


@dataclass
class TuningConfig:
    """What of the model trains.

    `kind`: full, lora (low-rank additions to the linear layers named in `targets`), or state (the initial WKV states
    alone, one a layer and head). Patterns of parameter names, as in ``blocks.0.*``: with full, those in `freeze` stay
    as they are; with lora and state, those in `train` learn as well. `rank`, `alpha` and `dropout` are LoRA's.
    """

    kind: str = "full"
    freeze: list[str] = field(default_factory=list)
    train: list[str] = field(default_factory=list)
    rank: int = 32
    alpha: int = 32
    dropout: float = 0.0
    targets: list[str] = field(
        default_factory=lambda: ["att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value"]
    )


@dataclass
class TokenizerConfig:
    """`source` is a name that `smi.tokenizer.load_tokenizer` knows, or a directory with a tokenizer.json."""

    source: str | None = MISSING


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
    `over_long`: reject documents of more than `max_length` tokens, or split them: one that does not fit into a row of
    `pack_length` is then trained whole, in pieces of at most `max_length` tokens, each from the state that the one
    before it left. `on_change`: refuse a checkpoint of another seed, window, pack length or batch size, or continue
    with exactly what its epoch has left.
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
    over_long: str = "reject"
    pack_length: int = 2048
    window: int = 512
    val_fraction: float = 0.0
    val_batches: int = 16
    on_change: str = "refuse"


def longest_document(data: DataConfig) -> int | None:
    """Tokens that a document may have; None where there is no limit."""
    return data.max_length if data.over_long == "reject" else None


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
    """What to run on, and how an optimizer step is dealt out to it; what is learned does not depend on it.

    `devices` are those of a node, each with a process of its own. `launcher` starts the processes: lightning (this
    command, on one node), torchrun or slurm. `max_micro_batch`: packs that a device takes at a time, at most; the
    largest number that divides its share of `trainer.batch_size` evenly is taken, see `smi.hardware.split_batch`.
    `activation_checkpointing`: blocks keep their inputs alone and are computed again for backward. `workers`: threads
    that read a prepared mixture ahead; `compile_workers`: processes that compile rows that are not prepared, beside
    each device's own; with 0 a thread of that one does so. `memory_gib`: a device's memory in GiB, to hold the
    estimate against.
    `threads`: torch's on the CPU; null leaves them alone. `peak_tflops`: what a device could do
    at best in this precision, for the utilisation that is logged; null takes a known device's.
    """

    accelerator: str = MISSING
    precision: str = MISSING
    strategy: str = "single"
    devices: int = 1
    nodes: int = 1
    launcher: str = "lightning"
    max_micro_batch: int = 1
    activation_checkpointing: bool = False
    workers: int = 2
    compile_workers: int = 0
    memory_gib: float | None = None
    threads: int | None = None
    peak_tflops: float | None = None


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
    """How long, how often, and what is kept. Every count is in optimizer steps.

    `batch_size`: packs of `data.pack_length` tokens an optimizer step, on all devices together.

    For looking into a run (`debug=`): `overfit_batches` trains on so many micro-batches again and again, 0 on all;
    `profiler`: simple, advanced or pytorch, writes where the time went into the run directory; `detect_anomaly`
    stops at the operation whose gradient is not a number, at a price in speed.
    """

    max_steps: int = MISSING
    batch_size: int = 1
    val_every: int = 100
    log_every: int = 10
    checkpoint_every: int = 100
    keep_checkpoints: int = 1
    export: list[str] = field(default_factory=lambda: ["hf", "native"])
    overfit_batches: int = 0
    profiler: str | None = None
    detect_anomaly: bool = False


@dataclass
class WandbConfig:
    """A run of W&B's `project`; `group` gathers runs, such as the jobs of a sweep. `offline` sends nothing."""

    project: str = "smi"
    group: str | None = None
    offline: bool = False


@dataclass
class LoggerConfig:
    """Where figures go, beside the run directory's own `history.jsonl`. Several at once: `logger=[csv,wandb]`."""

    tensorboard: bool = False
    csv: bool = False
    wandb: WandbConfig | None = None


@dataclass
class SamplesConfig:
    """Every so many steps, and after the last, the model continues `count` held-out prompts, greedily."""

    every: int = 200
    count: int = 4
    max_tokens: int = 192


@dataclass
class EarlyStoppingConfig:
    """Training ends when `monitor` was not better by more than `min_delta` in `patience` validations in a row."""

    monitor: str = "val/loss"
    mode: str = "min"
    patience: int = 3
    min_delta: float = 0.0


@dataclass
class LRFinderConfig:
    """Lightning's range test before training: `steps` at rates from `min_lr` to `max_lr`; the run takes the best."""

    min_lr: float = 1e-6
    max_lr: float = 1e-1
    steps: int = 100


@dataclass
class CallbacksConfig:
    """What a run does beside training; null leaves it out."""

    samples: SamplesConfig | None = None
    early_stopping: EarlyStoppingConfig | None = None
    lr_finder: LRFinderConfig | None = None


@dataclass
class SweepConfig:
    """What a sweep compares its jobs by: the figure of a run that `objective` names, see `figures.json`.

    `trials`: how many sweep=optuna makes.
    """

    objective: str = "val/loss"
    direction: str = "minimize"
    trials: int = 20


@dataclass
class PathsConfig:
    """`run_dir` holds everything that a run writes."""

    run_dir: str = MISSING


@dataclass
class Config:
    """A whole run.

    `resume`: none, auto (the newest checkpoint in `paths.run_dir`, if there is one), or a checkpoint file.
    `dry_run`: check everything and say what would be trained on what, and no more. `wait_for`: the manifest of
    `data.mixture`, which is being prepared elsewhere; training begins when it is there.
    """

    name: str = MISSING
    seed: int = 0
    resume: str = "none"
    dry_run: bool = False
    wait_for: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)


def tokenizer_source(config: Config) -> str:
    """Where the tokenizer is. Raises ValueError where it should be that of a checkpoint that is not named."""
    if config.tokenizer.source is None:
        raise ValueError("tokenizer=checkpoint is that of model.pretrained, which is not set: name a checkpoint there")
    return config.tokenizer.source


CHOICES: dict[str, tuple[str, ...]] = {
    "model.kind": ("rwkv7", "hf"),
    "tuning.kind": ("full", "lora", "state"),
    "data.kind": ("synthetic", "files", "mixture"),
    "data.over_long": ("reject", "split"),
    "data.on_change": ("refuse", "continue"),
    "prepare.on_shortfall": ("error", "accept"),
    "prepare.dedupe": ("exact", "normalised", "near"),
    "sweep.direction": ("minimize", "maximize"),
    "callbacks.early_stopping.mode": ("min", "max"),
    "trainer.export": ("hf", "native", "fla"),
    "trainer.profiler": ("simple", "advanced", "pytorch"),
    "hardware.accelerator": ("cpu", "gpu"),
    "hardware.precision": ("32-true", "bf16-mixed"),
    "hardware.strategy": ("single", "ddp", "fsdp"),
    "hardware.launcher": ("lightning", "torchrun", "slurm"),
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
    "tuning.rank": 1,
    "tuning.alpha": 1,
    "tuning.dropout": 0,
    "data.max_questions": 1,
    "data.held_out_tasks": 0,
    "data.val_batches": 1,
    "prepare.workers": 0,
    "prepare.row_timeout": 0.1,
    "prepare.tokens": 1,
    "prepare.seed": 0,
    "prepare.row_group_rows": 1,
    "prepare.shard_rows": 1,
    "hardware.devices": 1,
    "hardware.nodes": 1,
    "hardware.max_micro_batch": 1,
    "hardware.workers": 0,
    "hardware.compile_workers": 0,
    "hardware.memory_gib": 1,
    "hardware.threads": 1,
    "hardware.peak_tflops": 0.001,
    "optim.lr": 0,
    "optim.final_lr_ratio": 0,
    "optim.warmup_steps": 0,
    "optim.weight_decay": 0,
    "optim.eps": 0,
    "optim.clip": 0,
    "optim.z_loss": 0,
    "sweep.trials": 1,
    "trainer.max_steps": 1,
    "trainer.batch_size": 1,
    "trainer.val_every": 1,
    "trainer.log_every": 1,
    "trainer.checkpoint_every": 1,
    "trainer.keep_checkpoints": 1,
    "trainer.overfit_batches": 0,
    "callbacks.samples.every": 1,
    "callbacks.samples.count": 1,
    "callbacks.samples.max_tokens": 8,
    "callbacks.early_stopping.patience": 1,
    "callbacks.early_stopping.min_delta": 0,
    "callbacks.lr_finder.min_lr": 0,
    "callbacks.lr_finder.max_lr": 0,
    "callbacks.lr_finder.steps": 20,
}
