"""Between Hydra and the schema: where configs and recipes are found, and whether what was composed fits.

Hydra composes; `judge` decides. An unknown key is an error that names the nearest valid one, whichever way it came
in, and a number that arrives as text is refused rather than converted.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from smi.config import CHOICES, LEAST, Config


class ConfigError(ValueError):
    """A config that does not fit the schema."""


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
