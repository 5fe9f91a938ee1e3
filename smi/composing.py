"""Between Hydra and the schema: where configs and recipes are found, and whether what was composed fits.

Hydra composes; `judge` decides. An unknown key is an error that names the nearest valid one, whichever way it came
in, and the line or override that brought it; a number that arrives as text is refused rather than converted.
"""

import dataclasses
import difflib
import math
import types
import typing
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from smi import precedence
from smi.config import CHOICES, LEAST, Config
from smi.origins import Origins


class ConfigError(ValueError):
    """A config that does not fit the schema."""


def judge(composed: DictConfig, origins: Origins | None = None) -> Config:
    """The composed config as objects; with `origins`, every problem names the line or override that brought it.

    Raises:
        ConfigError: unknown or missing keys, values of the wrong type, unknown choices; all of them listed.
    """
    try:
        plain = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"this config does not fit: {str(error).splitlines()[0]}") from error
    findings = _Findings(origins or Origins([]))
    findings.check(plain, Config, "")
    if not findings.problems:
        for key in sorted(OmegaConf.missing_keys(composed)):
            findings.add(key, f"{key} is missing: give it a value")
    if findings.problems:
        raise ConfigError("this config does not fit:\n  " + "\n  ".join(findings.problems))
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


def wanted_type(key: str) -> Any:
    """The type that the schema gives a setting or a group of settings; `Any` below those that are read as they are.

    Raises ConfigError where there is no such setting, naming the nearest one.
    """
    wanted: Any = Config
    parts = key.split(".")
    for i, part in enumerate(parts):
        if typing.get_origin(wanted) is dict:
            wanted = typing.get_args(wanted)[1]
            continue
        if not dataclasses.is_dataclass(wanted):
            return Any  # judged by its value
        known = {f.name: f.type for f in dataclasses.fields(wanted)}
        if part not in known:
            raise ConfigError(unknown(".".join(parts[: i + 1]), list(known)))
        wanted = known[part]
        # a group that may be null
        groups = [option for option in options_of(wanted) if dataclasses.is_dataclass(option)]
        wanted = groups[0] if groups else wanted
    return wanted


def unknown(path: str, known: list[str]) -> str:
    """Says that there is no setting `path`, and which there is: the nearest of its neighbours, or one that is called
    the same elsewhere."""
    key = path.rpartition(".")[2]
    near = difflib.get_close_matches(key, known, n=1)
    if not near:
        near = [setting for setting in _settings(Config, "") if setting.rpartition(".")[2] == key][:1]
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
    return f"{path} is no setting; {hint}"


def _settings(schema: Any, above: str) -> list[str]:
    names: list[str] = []
    for setting in dataclasses.fields(schema):
        name = f"{above}{setting.name}"
        names.append(name)
        for option in filter(dataclasses.is_dataclass, options_of(setting.type)):
            names += _settings(option, f"{name}.")
    return names


def options_of(wanted: Any) -> tuple[Any, ...]:
    """The types that a field of this type takes, None among them."""
    return typing.get_args(wanted) if typing.get_origin(wanted) in (typing.Union, types.UnionType) else (wanted,)


class _Findings:
    """What does not fit, and where it came from."""

    def __init__(self, origins: Origins):
        self.origins = origins
        self.problems: list[str] = []

    def add(self, where: str, problem: str) -> None:
        origin = self.origins.of(where.partition("[")[0])
        self.problems.append(problem if origin is None else f"{problem} ({origin.source})")

    def check(self, value: Any, wanted: Any, where: str) -> None:
        options = options_of(wanted)
        place = self.origins.of(where)
        if place is not None and (place.key, place.text) == (where, "???"):
            # omegaconf keeps the value from before
            self.add(where, f"{where} is missing: give it a value")
            return
        if value == "???" or wanted is Any or (value is None and type(None) in options):
            return
        options = tuple(option for option in options if option is not type(None))
        if len(options) > 1:
            if not any(type(value) is option for option in options):
                names = " or ".join(option.__name__ for option in options)
                self.add(where, f"{where} should be {names}, not {value!r}")
            return
        wanted = next(iter(options))
        origin = typing.get_origin(wanted)
        if dataclasses.is_dataclass(wanted):
            known: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(wanted)}
            self._check_group(value, known, None, where)
        elif origin is dict:
            self._check_group(value, {}, typing.get_args(wanted)[1], where)
        elif origin is list:
            if not isinstance(value, list):
                self.add(where, f"{where} should be a list, like [{value}], not {value!r}")
                return
            for i, inner in enumerate(value):
                self.check(inner, typing.get_args(wanted)[0], f"{where}[{i}]")
            self._check_choice(value, where)
        elif wanted is bool:
            if not isinstance(value, bool):
                self.add(where, f"{where} should be true or false, not {value!r}")
        elif wanted is int:
            if isinstance(value, bool) or not isinstance(value, int):
                self.add(where, f"{where} should be a whole number, not {value!r}")
            else:
                self._check_number(value, where)
        elif wanted is float:
            if isinstance(value, bool) or not isinstance(value, int | float):
                self.add(where, f"{where} should be a number, not {value!r}")
            else:
                self._check_number(value, where)
        elif wanted is str:
            if not isinstance(value, str):
                self.add(where, f"{where} should be text, not {value!r}: put it in quotes{self._quoted(where)}")
            self._check_choice([value], where)

    def _check_group(self, value: Any, known: dict[str, Any], others: Any, where: str) -> None:
        if not isinstance(value, dict):
            self.add(where, f"{where or 'the config'} should be a group of settings, not {value!r}")
            return
        for key, inner in value.items():
            path = f"{where}.{key}" if where else str(key)
            if key in known or others is not None:
                self.check(inner, known.get(key, others), path)
            else:
                self.add(path, unknown(path, list(known)))

    def _quoted(self, where: str) -> str:
        """The line with the quotes that it needs."""
        place = self.origins.of(where)
        if place is None or not place.line or place.key != where or place.text is None:
            return ""
        return f', {where.rpartition(".")[2]}: "{place.text}"'

    def _check_number(self, value: float, where: str) -> None:
        place, least = self.origins.of(where), LEAST.get(where)
        if place is not None and place.line and place.key == where and not _plain(place.text, value):
            # 010 and 1:30 are 8 and 90 in YAML 1.1
            self.add(where, f"{where} should be written plainly: {place.text} is {value} to YAML")
        elif not math.isfinite(value):
            self.add(where, f"{where} should be a finite number, not {value}")
        elif where in ("optim.lr", "optim.eps") and value <= 0:
            self.add(where, f"{where} should be above 0, not {value}")
        elif least is not None and value < least:
            self.add(where, f"{where} should be at least {least:g}, not {value}")

    def _check_choice(self, values: list[Any], where: str) -> None:
        choices = CHOICES.get(where)
        for value in values:
            if choices and value not in choices:
                self.add(where, f"{where} should be one of {', '.join(choices)}, not {value!r}")


def _plain(text: str | None, value: float) -> bool:
    """Whether a number is what a reader takes the text for. Interpolations are."""
    if text is None or "${" in text or not math.isfinite(value):
        return True
    try:
        return float(text) == value
    except ValueError:
        return False


def _shipped(name: str) -> Path:
    """`configs` or `recipes`: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def config_dir() -> Path:
    """The directory of Hydra's groups."""
    return _shipped("configs")


def recipes() -> dict[str, Path]:
    """The shipped recipes by name ("quickstart", "rwkv7_pilot", ...)."""
    root = _shipped("recipes")
    return {file.relative_to(root).with_suffix("").as_posix(): file for file in sorted(root.rglob("*.yaml"))}


@cache
def register() -> None:
    """Gives Hydra what it needs beside the directory of groups; call before it composes.

    - ``schema``: every setting with its default, so that each can be overridden by name. Plain values, without
      types: typed ones would turn the text "1" into a number in silence.
    - every shipped recipe as an option of the group ``recipe``. Hydra names a group after its directory and takes a
      ``+group=name`` that it does not know for a plain value; so stored, a wrong name is an error that lists the
      right ones.
    - the order of `smi.precedence`.
    """
    precedence.install()
    store = ConfigStore.instance()
    store.store(name="schema", node=OmegaConf.to_container(OmegaConf.structured(Config)), provider="smi")
    for name, file in recipes().items():
        folder, _, stem = name.rpartition("/")
        group = f"recipe/{folder}" if folder else "recipe"
        store.store(group=group, name=stem, node=OmegaConf.load(file), package="_global_", provider="smi")
