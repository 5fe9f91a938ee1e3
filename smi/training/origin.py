"""What a model that is trained here comes from, kept in the run directory from the start, so that an export needs
nothing else: its tokenizer, the licences of its data and of its base, and the code that the base's publisher ships.

origin/origin.json: an id of the run, the base checkpoint, the sources of the data. origin/tokenizer: what
`smi.tokenizer.load_tokenizer` reads. origin/base: config.json, code and licence texts of the base checkpoint.
"""

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import yaml

from smi.config import Config
from smi.data.manifest import read_manifest
from smi.model.checkpoint import locate, publish
from smi.tokenizer import Tokenizer

FOLDER = "origin"
FILE = "origin.json"
# of a base checkpoint; *.py is never run here, only handed on
_COMPANIONS = ("config.json", "*.py", "LICENSE*", "LICENCE*", "NOTICE*")


def keep_origin(config: Config, tokenizer: Tokenizer) -> Path:
    """Writes the run directory's ``origin/``, whole or not at all, unless it is there; returns it.

    Raises ValueError where the base checkpoint or the mixture is not to be had.
    """
    folder = Path(config.paths.run_dir, FOLDER)
    if folder.is_dir():
        return folder
    draft = folder.with_name(f".{FOLDER}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    base = None
    if config.model.pretrained is not None:
        base = {"name": config.model.pretrained, "revision": config.model.revision, "licence": None}
        place = locate(config.model.pretrained, config.model.revision)
        if place.is_dir():
            base["licence"] = _stated_licence(place / "README.md")
            (draft / "base").mkdir()
            for pattern in _COMPANIONS:
                for file in place.glob(pattern):
                    shutil.copyfile(file, draft / "base" / file.name)
    tokenizer.save_pretrained(draft / "tokenizer")
    content = {"run": uuid.uuid4().hex, "base": base, "sources": _sources(config)}
    (draft / FILE).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    publish(draft, folder)
    return folder


def read_origin(folder: Path) -> dict[str, Any]:
    """The content of a run's origin.json. Raises ValueError where there is none."""
    file = folder / FILE
    if not file.is_file():
        raise ValueError(f"{file} is not there: {folder.parent} is no run directory, or its run has not begun to train")
    return json.loads(file.read_text(encoding="utf-8"))


def attribution(origin: dict[str, Any]) -> str:
    """What has to be said about where a model comes from, as a section of its card."""
    rows = [("base", origin["base"])] if origin["base"] else []
    rows += [("data", source) for source in origin["sources"]]
    lines = [
        f"| {what} | {item['name']} | {item['revision'] or ''} | {item['licence'] or 'none stated'} |"
        for what, item in rows
    ]
    if not lines:
        return ""
    return "\n".join(
        ["## Licences and attribution", "", "| | name | revision | licence |", "|---|---|---|---|", *lines]
    )


def _sources(config: Config) -> list[dict[str, Any]]:
    """Name, revision and licence of whatever was trained on."""
    data = config.data
    if data.kind == "synthetic":
        return [{"name": "conversations made up by smi.data.synthetic", "revision": None, "licence": "Apache-2.0"}]
    if data.kind == "files":
        return [{"name": pattern, "revision": None, "licence": None} for pattern in data.train_files]
    if data.mixture is None:
        stated = {name: vars(source) for name, source in data.source.items()}
    elif Path(data.mixture).is_dir():
        stated = read_manifest(Path(data.mixture)).settings["sources"]
    else:
        stated = {data.mixture: {}}
    return [
        {
            "name": f"{name} ({source['dataset']})" if source.get("dataset") else name,
            "revision": source.get("revision"),
            "licence": source.get("licence"),
        }
        for name, source in stated.items()
    ]


def _stated_licence(card: Path) -> str | None:
    """The licence in the head of a model card."""
    if not card.is_file():
        return None
    _, _, rest = card.read_text(encoding="utf-8", errors="replace").partition("---\n")
    head, found, _ = rest.partition("\n---")
    try:
        stated = yaml.safe_load(head) if found else None
    except yaml.YAMLError:
        return None
    return str(stated["license"]) if isinstance(stated, dict) and "license" in stated else None
