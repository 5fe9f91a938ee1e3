"""From a recipe, or a judged config, to the data of a run: the same for the trainer and for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from hydra import compose, initialize_config_dir

from smi.composing import config_dir, judge, register
from smi.config import Config, DataConfig, longest_document, source_options, tokenizer_source
from smi.data.datamodule import SMIDataModule
from smi.data.pipeline import AnySource
from smi.data.prepared import PrecompiledSource, open_mixture
from smi.data.sources import SourceSpec
from smi.data.synthetic import SyntheticTools
from smi.hardware import split_batch
from smi.origins import trace
from smi.overrides import check_override
from smi.tokenizer import Tokenizer, load_tokenizer

# settings of `data` that only one kind of data reads, and the group that chooses it
_READ_BY = {
    "max_questions": "synthetic",
    "held_out_tasks": "synthetic",
    "train_files": "files",
    "val_files": "files",
    "mixture": "mixture",
    "mirror": "mixture",
    "source": "mixture",
}
_GROUP = {"synthetic": "data=synthetic", "files": "data=messages", "mixture": "data=pilot"}


def read_recipe(name: str, overrides: Sequence[str] = ()) -> Config:
    """The config of a shipped recipe, composed outside of a Hydra application.

    Raises ValueError for a recipe or a setting that does not exist, and whatever else does not fit.
    """
    register()
    overrides = [f"+recipe={name}", "paths.run_dir=.", *map(check_override, overrides)]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return judge(compose("train", overrides=overrides), trace("train", overrides))


def build_tokenizer(config: Config) -> Tokenizer:
    return load_tokenizer(tokenizer_source(config))


def build_data(config: Config, tokenizer: Tokenizer) -> SMIDataModule:
    """The data module of `config.data`. Raises ValueError for settings that its kind does not read."""
    data = config.data
    for setting in fields(DataConfig):
        kind = _READ_BY.get(setting.name, data.kind)
        if kind != data.kind and getattr(data, setting.name) != getattr(DataConfig(), setting.name):
            raise ValueError(f"data.{setting.name} is not read by data.kind={data.kind}: choose {_GROUP[kind]} for it")
    train: list[AnySource]
    if data.kind == "synthetic":
        train = [SyntheticTools(config.seed, data.max_questions)]
    elif data.kind == "files":
        if not data.train_files:
            raise ValueError("data.train_files is empty: name your files, as in data.train_files=[talk.jsonl]")
        train = [SourceSpec("train", data.train_files, data.adapter)]
    elif data.mixture is not None:
        train = list(open_mixture(data.mixture, tokenizer, longest_document(data), mirror=data.mirror))
        _check_origin(config, train)
    else:
        if data.mirror is None:
            raise ValueError("data.mirror is not set: name the directory that holds the sources' files")
        if several := [name for name, source in data.source.items() if source.epochs != 1]:
            raise ValueError(f"data.source.{several[0]}.epochs is read by python -m smi.prepare: prepare the mixture")
        train = [SourceSpec(name, **source_options(source)) for name, source in data.source.items()]
    split = split_batch(config)
    return SMIDataModule(
        tokenizer,
        train,
        val=[SourceSpec("val", data.val_files, data.adapter)] if data.val_files else None,
        val_fraction=0.0 if data.val_files else data.val_fraction,
        val_batches=data.val_batches,
        root=data.mirror or ".",
        max_length=data.max_length,
        over_long=data.over_long,
        pack_length=data.pack_length,
        window=data.window,
        seed=config.seed,
        steps=config.trainer.max_steps,
        accumulate=split.accumulate,
        micro_batch=split.micro_batch,
        workers=config.hardware.workers,
        compile_workers=config.hardware.compile_workers,
        on_change=data.on_change,
    )


def _check_origin(config: Config, sources: list[AnySource]) -> None:
    """Rows compiled by others name their tokenizer after a checkpoint: it must be the one that is trained."""
    model = config.model
    for source in sources:
        if not isinstance(source, PrecompiledSource) or model.pretrained is None:
            continue
        for what, run in (("tokenizer", model.pretrained), ("tokenizer_revision", model.revision)):
            if source.origin[what] != run:
                raise ValueError(
                    f"{source.path} was compiled with {what} {source.origin[what]!r}, and this run starts from {run!r}"
                )
