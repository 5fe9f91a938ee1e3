"""Where the settings of a composed config came from, so that an error can name the line or the override."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from smi.precedence import create_defaults


@dataclass(frozen=True)
class Origin:
    """One place that gave a setting a value.

    key: the whole name of the setting. source: for people, as "recipes/mine.yaml, line 7". text: the value as it
    was written there, None where it is no single value. line: whether it stands in a file.
    """

    key: str
    source: str
    text: str | None
    line: bool


class Origins:
    """All places that gave values, the strongest first."""

    def __init__(self, places: Sequence[Origin]):
        self.places = places

    def of(self, key: str) -> Origin | None:
        """The place that had the last word on a setting, or on the group of settings that it is in."""
        while key:
            for place in self.places:
                if place.key == key:
                    return place
            key = key.rpartition(".")[0]
        return None


def trace(config_name: str | None = None, overrides: Sequence[str] | None = None) -> Origins:
    """The origins of what Hydra composes; of the running job where nothing is named. Hydra must be initialised."""
    if config_name is None or overrides is None:
        job = HydraConfig.get()
        config_name, overrides = job.job.config_name, [*job.overrides.hydra, *job.overrides.task]
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    parsed, repo = loader._parse_overrides_and_create_caching_repo(config_name, list(overrides))
    found = create_defaults(
        repo=repo, config_name=config_name, overrides_list=parsed, prepend_hydra=True, skip_missing=False
    )
    places = [
        Origin(override.key_or_group, f"the override {override.input_line}", override.get_value_string(), line=False)
        for override in parsed
    ]
    for entry in found.defaults:
        path = entry.config_path or ""
        if path.startswith("hydra") or path == "schema":
            continue
        source = next(source for source in repo.get_sources() if source.is_config(path))
        places += _read(_file(source, path), (entry.package or "").split(".") if entry.package else [])
    # later files and overrides win; an override over any file
    return Origins([*reversed(places[: len(parsed)]), *reversed(places[len(parsed) :])])


def _file(source: Any, path: str) -> Path:
    from smi.composing import recipes

    if source.scheme() == "file":
        return Path(source.path, f"{path}.yaml")
    return recipes()[path.removeprefix("recipe/")]


def _read(file: Path, package: list[str]) -> Iterator[Origin]:
    node = yaml.compose(file.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if isinstance(node, yaml.MappingNode):
        node.value = [(name, value) for name, value in node.value if name.value != "defaults"]
        yield from _walk(node, package, file)


def _walk(mapping: yaml.MappingNode, above: list[str], file: Path) -> Iterator[Origin]:
    for name, value in mapping.value:
        key = [*above, str(name.value)]
        text = value.value if isinstance(value, yaml.ScalarNode) else None
        quoted = isinstance(value, yaml.ScalarNode) and value.style in ("'", '"')
        yield Origin(".".join(key), f"{file}, line {name.start_mark.line + 1}", None if quoted else text, line=True)
        if isinstance(value, yaml.MappingNode):
            yield from _walk(value, key, file)
