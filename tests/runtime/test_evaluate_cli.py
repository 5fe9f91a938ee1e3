import json
from html.parser import HTMLParser

import pytest
from scripted import tiny

from smi import evaluate
from smi.tokenizer import load_tokenizer

TALK = {"messages": [{"role": "user", "content": "<b>hi</b>"}, {"role": "assistant", "content": "hello"}]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "export"
    tokenizer = load_tokenizer("compact")
    tiny(tokenizer.vocab_size).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder.parent)


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []
        self.cells = []
        self.inside = False

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag in ("th", "td"):
            self.cells.append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "table"

    def handle_data(self, data):
        if self.inside:
            self.cells[-1] += data.strip()


def test_a_file_with_bad_rows(checkpoint, tmp_path, capsys):
    rows = [TALK, {"messages": [{"role": "robot", "content": "x"}]}, {"messages": TALK["messages"][:1]}]
    file = tmp_path / "talk.jsonl"
    file.write_text("\n".join([*map(json.dumps, rows), "{broken"]) + "\n")
    command = [checkpoint, "--data", str(file), "--max-tokens", "20", "--batch", "2"]
    command += ["--json", str(tmp_path / "it.json"), "--html", str(tmp_path / "it.html")]
    assert evaluate.main(command) == 0
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "it.json").read_text())
    assert (found["rows"], found["accepted"], found["max_tokens"]) == (4, 1, 20)
    assert found["rejected"] == {"role": 1, "no_target": 1, "json": 1}
    for reason in found["rejected"]:
        assert reason in shown
    assert found["scores"]["transmissions"] == found["scores"]["answers"] == 1
    assert found["scores"]["budget_violations"] == 0
    # "hello" with its type token and frame, EOT with its newline, EOS
    assert {name: loss["tokens"] for name, loss in found["perplexity"].items()} == {
        "out": 1 + len(load_tokenizer("compact").encode("\nhello\n")),
        "eot": 2,
        "eos": 1,
        "all": 4 + len(load_tokenizer("compact").encode("\nhello\n")),
    }
    html = (tmp_path / "it.html").read_text()
    tags = Tags()
    tags.feed(html)
    assert not [tag for tag, attrs in tags.found if tag in ("script", "link", "img") or "src" in attrs]
    assert "<b>hi" not in html
    # figures stand under their names, and shares beside what they are shares of
    assert tags.cells[:4] == ["what", "count", "share", "of"]
    figures = {tags.cells[i]: tags.cells[i + 1 : i + 4] for i in range(4, 44, 4)}
    assert figures["actions expected"] == ["0", "", ""]
    assert figures["actions that parse"] == ["0", "-", "0 actions written"]
    assert figures["answers right word for word"] == ["0", "0.0%", "1 transmissions that should only answer"]
    assert figures["unfinished transmissions"][2] == "1 transmissions"
    assert "with at most 20 tokens" in html
    # as in the JSON, and no 1e+04
    whole = found["perplexity"]["all"]["perplexity"]
    at = tags.cells.index("all")
    assert tags.cells[at + 1] == str(found["perplexity"]["all"]["tokens"])
    assert float(tags.cells[at + 2].replace(",", "")) == pytest.approx(whole, rel=1e-3)
    assert "e+" not in tags.cells[at + 2]
    for reason in found["rejected"]:
        where = tags.cells.index(reason)
        assert tags.cells[where + 1] == "1"
        assert f"[{reason}]" in tags.cells[where + 2]


def test_the_quickstarts_world(checkpoint, tmp_path):
    file = tmp_path / "it.json"
    command = [checkpoint, "--data", "synthetic", "--limit", "3", "--max-tokens", "8", "--json", str(file)]
    assert evaluate.main(command) == 0
    found = json.loads(file.read_text())
    assert found["accepted"] == 3
    assert {"think", "out", "act"} < found["perplexity"].keys()
    assert found["scores"]["unfinished"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--data", "./nowhere.jsonl"], "no file matches"),
        (["--data", "synthetic", "--limit", "0"], "--limit must be 1 or more"),
    ],
)
def test_mistakes(checkpoint, capsys, arguments, says):
    assert evaluate.main([checkpoint, *arguments]) == 2
    assert says in capsys.readouterr().err
    assert evaluate.main(["./nowhere", "--data", "synthetic"]) == 2


def test_a_file_without_conversations(checkpoint, tmp_path, capsys):
    file = tmp_path / "none.jsonl"
    file.write_text('{"messages": []}\n')
    assert evaluate.main([checkpoint, "--data", str(file)]) == 2
    assert "no conversation that can be played" in capsys.readouterr().err
