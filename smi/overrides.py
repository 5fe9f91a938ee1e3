"""What is typed on the command line, before Hydra reads it.

Hydra guesses a type for every value and refuses few names helpfully. Here a setting that does not exist is an error
with the nearest one that does, and text stays text: ``name=1e5`` is the name 1e5, and what Hydra would read as
something else (``a=b``, ``a,b``, ``[a]``, blanks at an end) is refused with the quoting to use.
"""

import re
import shlex
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Quote, QuotedString
from hydra.errors import HydraException

from smi.composing import ConfigError, config_dir, options_of, recipes, wanted_type

# Hydra's flags that take the next word
_WITH_VALUE = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--package", "-p", "--cfg", "-c")


def check_arguments(arguments: Sequence[str]) -> list[str]:
    """The command line as Hydra should get it. Raises ConfigError for what is wrong with one of its words."""
    sweep = any(word in ("-m", "--multirun", "hydra.mode=MULTIRUN") or word.startswith("sweep=") for word in arguments)
    checked: list[str] = []
    before = ""
    for word in arguments:
        flag = word.startswith("-") or before in _WITH_VALUE
        checked.append(word if flag else check_override(word, sweep=sweep))
        before = word
    if any(word.lower().lstrip("+") == "dry_run=true" for word in checked):
        if sweep:
            raise ConfigError("dry_run=true looks at one run: leave out -m and sweep=")
        # hydra makes a directory, and a dry run writes nothing
        checked.append("hydra.run.dir=.")
    chosen = [word for word in checked if word.startswith("+recipe=")]
    if len(chosen) > 1:
        raise ConfigError(f"{' '.join(chosen)}: a run has one recipe; one that lists the other as its parent has both")
    return checked


def check_override(override: str, *, sweep: bool = False) -> str:
    """One override as Hydra should get it; `sweep` where several values are allowed.

    Raises:
        ConfigError: a setting that does not exist, or that cannot be added or removed; text that Hydra would read
            as something else.
    """
    prefix, key, equals, text = _split(override)
    top = key.partition(".")[0]
    if top == "hydra" or key.startswith("hydra/"):
        return override
    if not equals and prefix != "~":
        hint = f"+recipe={key}" if key in recipes() else f"{key}=..."
        raise ConfigError(f"{override} says nothing: write {hint}")
    if key == "recipe" or key.startswith("recipe/"):
        if prefix != "+":
            raise ConfigError(f"a recipe is added, not changed: write +{key}={text}")
        return override
    if "/" in key or "@" in key:
        return override
    if (config_dir() / key).is_dir():
        if prefix in ("+", "++") and not text.startswith("{"):
            raise ConfigError(f"{key} is chosen already: write {key}={text}")
        return override
    wanted = wanted_type(key)
    if prefix == "~":
        if not _is_entry(key):
            raise ConfigError(f"~{key}: a setting cannot be removed, only given another value")
        return override
    return _checked(prefix + key, text, options_of(wanted), sweep)


def _split(override: str) -> tuple[str, str, str, str]:
    match = re.match(r"(\+\+|\+|~)?([^=]*)(=?)(.*)", override, re.DOTALL)
    assert match is not None
    return match[1] or "", match[2], match[3], match[4]


def _is_entry(key: str) -> bool:
    """Whether it is an entry that somebody named, such as a source."""
    above = key.rpartition(".")[0]
    return bool(above) and getattr(wanted_type(above), "__origin__", None) is dict


def _checked(key: str, text: str, wanted: tuple[Any, ...], sweep: bool) -> str:
    """The override of a setting whose value may have the types `wanted`."""
    override = f"{key}={text}"
    is_text, is_list = wanted[0] is str, wanted[0] == list[str]
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        advice = _advice(key, text, is_list) if is_text or is_list else str(error).splitlines()[0]
        raise ConfigError(f"{override} cannot be read: {advice}") from error
    # the parsed value, which unlike value() knows what was in quotes
    value = parsed._value
    if is_list and isinstance(value, list):
        if not all(isinstance(item, str | QuotedString) for item in value):
            raise ConfigError(f"{override} is not text throughout: {_advice(key, text, is_list)}")
    elif is_text and isinstance(value, ChoiceSweep):
        if not sweep:
            raise ConfigError(f"{override} is several values: {_advice(key, text, is_list)}")
        if not all(isinstance(item, str | QuotedString) for item in value.list):
            items = ",".join(map(_quoted, text.split(",")))
            raise ConfigError(f"{override} is not text throughout: write {shlex.quote(f'{key}={items}')}")
    elif is_text and isinstance(value, bool | int | float):
        return f"{key}={_quoted(text)}"
    elif is_text and (
        isinstance(value, list | dict)
        or (value is None and type(None) not in wanted)
        or (isinstance(value, str) and value != text and "\\" not in text)
    ):
        raise ConfigError(f"{override} is not read as it is written: {_advice(key, text, is_list)}")
    return override


def _quoted(text: str) -> str:
    """The text in Hydra's quotes, unless it has some."""
    return text if text[:1] in ("'", '"') else QuotedString(text, Quote.double).with_quotes()


def _advice(key: str, text: str, is_list: bool) -> str:
    if is_list:
        items = text.strip().removeprefix("[").removesuffix("]").split(",")
        value = f"[{','.join(map(_quoted, items))}]"
    else:
        value = QuotedString(text, Quote.double).with_quotes()
    return f"write {shlex.quote(f'{key}={value}')}"
