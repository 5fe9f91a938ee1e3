"""The README's example of a new source and a new format, with its own files."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from smi import preview
from smi.composing import config_dir, judge, register
from smi.config import source_options
from smi.data.epochs import raw_rows
from smi.data.sources import SourceSpec
from smi.protocol.stream import ProtocolError

README = Path(__file__).parent.parent / "README.md"
SECTION = "### A new source is one file, a new format one function"
ROWS = [
    {"subject": "Where is my parcel?", "reply": "On its way.", "language": "en", "rating": 5},
    {"subject": "Ou est mon colis ?", "reply": "En route.", "language": "fr", "rating": "4"},
    {"subject": "Wo ist mein Paket?", "reply": "Unterwegs.", "language": "de", "rating": 5},
    {"subject": "Late again", "reply": "Sorry.", "language": "en", "rating": 2},
    {"subject": "No reply", "language": "en", "rating": 5},
    {"subject": "Buy now", "reply": "No.", "language": "en", "rating": 5, "spam": True},
]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The section's files, written where it says, and its commands."""
    section = README.read_text().partition(SECTION)[2].partition("\n## ")[0]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    found = []
    for kind, text in blocks:
        if kind:
            file = tmp_path / text.splitlines()[0].removeprefix("# ")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        else:
            found += [shlex.split(line) for line in text.splitlines()]
    rows = tmp_path / "data/support/tickets-1.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text("\n".join(map(json.dumps, ROWS)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ticket_format", raising=False)
    return found


def test_the_source_of_the_readme_joins_a_recipe(commands: list[list[str]], tmp_path: Path) -> None:
    (train,) = (command for command in commands if "smi.train" in command)
    folder = train[train.index("--config-dir") + 1]
    overrides = [word for word in train[3:] if word not in ("--config-dir", folder)]
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        searched = f"hydra.searchpath=[file://{tmp_path / folder}]"
        config = judge(compose("train", overrides=[searched, "paths.run_dir=x", *overrides]))
    assert len(config.data.source) == 7
    source = SourceSpec("tickets", **source_options(config.data.source["tickets"]))
    assert (source.quota, source.licence) == (500_000, "CC-BY-4.0")

    outcomes = []
    for talk, where in raw_rows(source, str(config.data.mirror), 0, "any"):
        assert where.file == "support/tickets-1.jsonl"
        outcomes.append(talk.reason if isinstance(talk, ProtocolError) else talk.messages[1]["content"])
    assert outcomes == ["On its way.", "En route.", "filtered", "filtered", None, "spam"]


def test_the_format_of_the_readme_can_be_looked_at(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (look,) = (command for command in commands if "smi.preview" in command)
    renamed = [row | {"question": row["subject"], "answer": row.get("reply")} for row in ROWS]
    Path("data/support/tickets-1.jsonl").write_text("\n".join(map(json.dumps, renamed)))
    monkeypatch.setattr(sys, "argv", look[2:])
    preview.main()
    assert "Where is my parcel?" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*look[2:], "--row", "5"])
    with pytest.raises(SystemExit):
        preview.main()
    assert "marked as spam [spam]" in capsys.readouterr().err
