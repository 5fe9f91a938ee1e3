"""Command line over recipe, recipe over its parent, parent over base: for groups as for values.

Hydra merges the file of a group where the base lists the group, whoever chose it. So what a parent recipe sets would
win over the group that its fork chooses, and a recipe over `hardware=h200` on the command line. Here the file that
was chosen is merged right before the content of the file that chose it, and last where the command line did. What
still could not take effect is an error.
"""

from collections.abc import Iterator
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal import hydra as main
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra.core.default_element import GroupDefault, ResultDefault
from hydra.errors import ConfigCompositionException
from yaml import YAMLError

# the base of every config of this project; others are left alone
BASE = "schema"


class Loader(ConfigLoaderImpl):
    """Hydra's loader, in the order described above. A job of a sweep that runs in another process brings it along."""

    def _parse_overrides_and_create_caching_repo(self, config_name: str | None, overrides: list[str]) -> Any:
        config_loader_impl.create_defaults_list = create_defaults  # type: ignore[assignment]
        return super()._parse_overrides_and_create_caching_repo(config_name, overrides)


def install() -> None:
    """From now on Hydra composes this project's configs in the order described above."""
    main.ConfigLoaderImpl = Loader  # type: ignore[attr-defined]


def create_defaults(repo: Any, **how: Any) -> DefaultsList:
    """Hydra's function of nearly this name, which says what a config is merged from: for ours, in the right order.

    Raises ConfigCompositionException for what is not there, and what cannot take effect.
    """
    try:
        found = create_defaults_list(repo, **how)
    except YAMLError as error:
        raise ConfigCompositionException(f"this is no YAML: {error}") from None
    except (ConfigCompositionException, RecursionError) as error:
        reason = "a recipe is its own parent" if isinstance(error, RecursionError) else str(error)
        raise ConfigCompositionException("\n".join([reason, *_advice(repo)])) from None
    if any(entry.config_path == BASE for entry in found.defaults):
        found.defaults = _ordered(found)
        _check(found, repo)
    return found


def _ordered(found: DefaultsList) -> list[ResultDefault]:
    entries = found.defaults
    parents = {entry.config_path: entry.parent for entry in entries}
    choosers = _chosen(found)

    def root(path: str | None) -> str | None:
        """The chosen file that this one is, or is a part of."""
        while path is not None and path not in choosers:
            path = parents.get(path)
        return path

    blocks: dict[str | None, list[ResultDefault]] = {path: [] for path in choosers}
    rest: list[ResultDefault] = []
    for entry in entries:
        chosen = root(entry.config_path)
        (rest if chosen is None else blocks[chosen]).append(entry)

    def placed(part: list[ResultDefault]) -> Iterator[ResultDefault]:
        for entry in part:
            for path in [path for path, chooser in choosers.items() if chooser == entry.config_path]:
                yield from placed(blocks.pop(path, []))
            yield entry

    ordered = list(placed(rest))
    for path in [path for path, chooser in choosers.items() if chooser is None]:
        ordered += placed(blocks.pop(path, []))
    assert len(ordered) == len(entries)
    return ordered


def _chosen(found: DefaultsList) -> dict[str | None, str | None]:
    """The files of groups that were chosen instead of others, in the order of the base, and the files that chose
    them; None for the command line."""
    choosers: dict[str | None, str | None] = {}
    for key, choice in found.overrides.override_choices.items():
        group = key.partition("@")[0]
        for option in choice if isinstance(choice, list) else [choice]:
            if not group.startswith("hydra"):
                choosers[f"{group}/{option}"] = found.overrides.override_metadata[key].containing_config_path
    paths = dict.fromkeys(entry.config_path for entry in found.defaults)
    return {path: choosers[path] for path in paths if path in choosers}


def _check(found: DefaultsList, repo: Any) -> None:
    """Raises ConfigCompositionException for what cannot take effect."""
    # of two files, the later one is the stronger
    rank = {entry.config_path: i for i, entry in enumerate(found.defaults)}
    for entry in found.defaults:
        path = entry.config_path
        if path is None or path.startswith("hydra"):
            continue
        sources = [source for source in repo.get_sources() if source.is_config(path)]
        own = [source for source in sources if source.provider not in ("main", "schema")]
        if own and len(sources) > 1:
            raise ConfigCompositionException(f"{own[0].path}/{path}.yaml has the name of another {path}: rename it")
        if path.startswith("recipe/") and entry.package:
            raise ConfigCompositionException(
                f"{sources[0].path}/{path}.yaml would only set {entry.package}.*: "
                "a recipe begins with the line '# @package _global_'"
            )
        child = entry.parent or ""
        if path.startswith("recipe/") and child.startswith("recipe/") and rank[child] < rank[path]:
            raise ConfigCompositionException(f"in {child}: {path} stands after _self_ and would win over it")
        _check_overrides(found, path, repo, rank)


def _check_overrides(found: DefaultsList, path: str, repo: Any, rank: dict[str | None, int]) -> None:
    seen: dict[str, Any] = {}
    for default in repo.load_config(path).defaults_list or []:
        if not isinstance(default, GroupDefault) or not default.override:
            continue
        key, value = _key(default, path), default.value
        said = f"in {path}: 'override /{key}: {value}'"
        if key in seen:
            raise ConfigCompositionException(f"{said} does not take effect: the same list says {seen[key]} before it")
        seen[key] = value
        choice = found.overrides.override_metadata.get(key)
        if choice is None or found.overrides.override_choices[key] == value or choice.external_override:
            continue
        winner = choice.containing_config_path
        if rank.get(winner, -1) < rank[path]:
            raise ConfigCompositionException(
                f"{said} does not take effect: {winner} says {found.overrides.override_choices[key]}. "
                f"Say which it is to be in the recipe that you run, or with {key}=... on the command line"
            )


def _advice(repo: Any) -> Iterator[str]:
    """What is wrong with the defaults lists of the recipes that were read."""
    for place, loaded in repo.cache.items():
        path = place.removeprefix("config_path=")
        for default in loaded.defaults_list or [] if loaded and path.startswith("recipe/") else []:
            if isinstance(default, GroupDefault) and not (default.override and str(default.group).startswith("/")):
                group = str(default.group).removeprefix("/")
                yield f"in {path}: write 'override /{group}: {default.value}', at the end of the list"


def _key(default: GroupDefault, path: str) -> str:
    """What Hydra calls the group of an override in the file `path`."""
    assert default.group is not None
    group = default.group
    folder = path.rpartition("/")[0]
    group = group[1:] if group.startswith("/") else f"{folder}/{group}".lstrip("/")
    package = (default.package or "").removeprefix("_global_.")
    return group if package in ("", group.replace("/", ".")) else f"{group}@{package}"
