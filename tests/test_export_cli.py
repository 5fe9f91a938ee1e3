"""python -m smi.export: a checkpoint becomes a model that loads elsewhere, with what it comes from."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from crafted import crafted
from hydra import compose, initialize_config_dir
from transformers import AutoModelForCausalLM

from smi.composing import config_dir, judge, register
from smi.config import Config
from smi.data.recipe import build_tokenizer
from smi.export import main
from smi.model import RWKV7Config, RWKV7ForCausalLM
from smi.model.checkpoint import CheckpointError, load_pretrained, save_native, save_pretrained
from smi.protocol.tokens import grow_embeddings
from smi.runtime.loading import load_runtime
from smi.tokenizer import load_tokenizer
from smi.training.checkpoint import AtomicCheckpointIO
from smi.training.origin import keep_origin
from smi.training.run_directory import write_config

RANKS = {"decay_low_rank_dim": 8, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8}
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 64}
# a publisher's code: as far as transformers can tell, it has nothing to do with this package
CODE = """
from smi.model.configuration import RWKV7Config
from smi.model.modeling import RWKV7ForCausalLM


class PublishedConfig(RWKV7Config):
    def __init__(self, **settings):
        super().__init__(**settings)


class PublishedForCausalLM(RWKV7ForCausalLM):
    config_class = PublishedConfig
"""
AUTO_MAP = {
    "AutoConfig": "modeling_published.PublishedConfig",
    "AutoModelForCausalLM": "modeling_published.PublishedForCausalLM",
}


def settings(*overrides: str) -> Config:
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return judge(compose("train", overrides=["+recipe=quickstart", *overrides]))


def small(rows: int, **shape: Any) -> RWKV7ForCausalLM:
    torch.manual_seed(0)
    return RWKV7ForCausalLM(RWKV7Config(vocab_size=rows, **SHAPE | RANKS | shape))


def save(run_dir: Path, step: int, model: RWKV7ForCausalLM) -> Path:
    """A checkpoint as training writes it, as far as an export looks at it."""
    file = run_dir / "checkpoints" / f"step-{step}.ckpt"
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    content = {"pytorch-lightning_version": "2.6.4", "global_step": step, "state_dict": weights}
    AtomicCheckpointIO().save_checkpoint(content, file)
    return file


def begin(run_dir: Path, *overrides: str) -> Config:
    config = settings(f"paths.run_dir={run_dir}", *overrides)
    write_config(config)
    keep_origin(config, build_tokenizer(config))
    return config


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two checkpoints of a run from scratch."""
    begin(tmp_path / "run")
    model = small(1088)
    save(tmp_path / "run", 1, model)
    with torch.no_grad():
        model.head.weight.mul_(2)
    save(tmp_path / "run", 2, model)
    return tmp_path / "run"


def weights(file: Path) -> dict[str, torch.Tensor]:
    stored = torch.load(file, weights_only=True)["state_dict"]
    return {name.removeprefix("model."): tensor for name, tensor in stored.items()}


def assert_holds(directory: Path, file: Path) -> None:
    state = load_pretrained(directory).state_dict()
    for name, tensor in weights(file).items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("formats", [["hf"], ["native"], ["fla"], ["hf", "native", "fla"]])
def test_the_newest_checkpoint_in_every_format(run_dir: Path, capsys: Any, formats: list[str]) -> None:
    before = {file.name for file in run_dir.iterdir()}
    assert main([str(run_dir), "--to", *formats]) == 0
    out = Path(capsys.readouterr().out.strip())
    assert out == run_dir / f"export-{'-'.join(formats)}"
    newest = run_dir / "checkpoints" / "step-2.ckpt"
    for name in formats:
        assert_holds({"hf": out, "native": out / "model.pth", "fla": out / "fla"}[name], newest)
    tokenizer = load_tokenizer(str(out))
    assert tokenizer.structural.to_dict() == json.loads((out / "smi_token_ids.json").read_text())
    assert (out / "chat_template.jinja").is_file()
    assert (out / "config.yaml").read_text() == (run_dir / "config.yaml").read_text()
    card = (out / "README.md").read_text()
    assert "| steps | 2 |" in card
    assert "| data | conversations made up by smi.data.synthetic |  | Apache-2.0 |" in card
    # nothing else is left behind
    assert {file.name for file in run_dir.iterdir()} == before | {out.name}


def test_the_whole_command_line_on_a_named_checkpoint(run_dir: Path, tmp_path: Path, capsys: Any) -> None:
    file = run_dir / "checkpoints" / "step-1.ckpt"
    assert main([str(file), "--to", "hf", "--out", str(tmp_path / "out")]) == 0
    assert_holds(tmp_path / "out", file)
    # the settings that weights do not show
    runtime = load_runtime(str(tmp_path / "out"))
    assert runtime.tokenizer.vocab_size <= runtime.model.config.vocab_size
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert "python -m smi.export RUN/checkpoints/step-400.ckpt --to hf native --out DIR" in capsys.readouterr().out


def test_an_export_of_the_run_is_replaced_and_nothing_else_is(run_dir: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert main([str(run_dir / "checkpoints" / "step-1.ckpt"), "--to", "hf", "--out", str(out)]) == 0
    assert main([str(run_dir), "--to", "native", "--out", str(out)]) == 0
    assert_holds(out, run_dir / "checkpoints" / "step-2.ckpt")
    assert not (out / "model.safetensors").exists()
    begin(tmp_path / "other")
    save(tmp_path / "other", 1, small(1088))
    assert main([str(tmp_path / "other"), "--to", "hf", "--out", str(out)]) == 2
    assert "is an export of another run" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert main([str(run_dir), "--to", "hf", "--out", str(tmp_path / "mine")]) == 2
    assert "is no export of a run that is known here" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    assert main([str(run_dir), "--to", "hf", "--out", str(tmp_path / "empty")]) == 0


def test_an_export_that_does_not_read_back_leaves_the_earlier_one(run_dir: Path, monkeypatch: Any, capsys: Any) -> None:
    assert main([str(run_dir), "--to", "hf"]) == 0

    def another(path: Path) -> RWKV7ForCausalLM:
        model = load_pretrained(path)
        with torch.no_grad():
            model.head.weight[0, 0] += 1
        return model

    monkeypatch.setattr("smi.training.export.load_pretrained", another)
    assert main([str(run_dir), "--to", "hf"]) == 1
    assert "does not read back" in capsys.readouterr().err
    assert_holds(run_dir / "export-hf", run_dir / "checkpoints" / "step-2.ckpt")


def test_a_damaged_checkpoint_is_passed_over_or_refused(run_dir: Path, capsys: Any, caplog: Any) -> None:
    newest = run_dir / "checkpoints" / "step-2.ckpt"
    newest.write_bytes(newest.read_bytes()[:-100])
    assert main([str(newest), "--to", "hf"]) == 2
    assert f"the checkpoint {newest} cannot be read" in capsys.readouterr().err
    assert main([str(run_dir), "--to", "hf"]) == 0
    assert f"DAMAGED: the checkpoint {newest}" in caplog.text
    assert_holds(run_dir / "export-hf", run_dir / "checkpoints" / "step-1.ckpt")


@pytest.mark.parametrize("form", ["zip", "pickle"])
def test_a_crafted_pickle_is_refused(run_dir: Path, tmp_path: Path, capsys: Any, form: str) -> None:
    mark = tmp_path / "it_ran"
    crafted(run_dir / "checkpoints" / "step-2.ckpt", mark, form)
    assert main([str(run_dir / "checkpoints" / "step-2.ckpt"), "--to", "hf"]) == 2
    assert "step-2.ckpt" in capsys.readouterr().err
    assert not mark.exists()
    # where it is read for inference
    shutil.copytree(run_dir / "origin" / "tokenizer", tmp_path / "model")
    crafted(tmp_path / "model" / "model.pth", mark, form)
    with pytest.raises(CheckpointError):
        load_runtime(str(tmp_path / "model"))
    assert not mark.exists()


def test_bad_arguments(tmp_path: Path, run_dir: Path, capsys: Any) -> None:
    for arguments, message in [
        ([str(tmp_path / "nowhere")], "no such checkpoint file"),
        ([str(tmp_path)], "has no checkpoint"),
    ]:
        assert main([*arguments, "--to", "hf"]) == 2
        assert message in capsys.readouterr().err
    shutil.rmtree(run_dir / "origin")
    assert main([str(run_dir), "--to", "hf"]) == 2
    assert "is no run directory" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main([str(run_dir), "--to", "gguf"])
    assert left.value.code == 2


def test_what_the_base_brings_travels_along(tmp_path: Path, capsys: Any) -> None:
    """Licence, attribution, and the publisher's code, with which plain transformers loads the export."""
    base = tmp_path / "base"
    tokenizer = build_tokenizer(settings())
    first = min(tokenizer.structural.ids)
    save_pretrained(small(first, norm_eps=2e-5), base)
    (base / "modeling_published.py").write_text(CODE)
    (base / "config.json").write_text(
        json.dumps(json.loads((base / "config.json").read_text()) | {"auto_map": AUTO_MAP})
    )
    (base / "LICENSE").write_text("do as you please")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    shape = [f"model.{name}={value}" for name, value in (SHAPE | RANKS).items()]
    run_dir = tmp_path / "run"
    begin(run_dir, f"model.pretrained={base}", *shape)
    model = load_pretrained(base)
    grow_embeddings(model, -(-tokenizer.vocab_size // 64) * 64, list(tokenizer.structural.ids), first, 0)
    file = save(run_dir, 5, model)
    # the run directory is enough
    shutil.rmtree(base)
    assert main([str(run_dir), "--to", "hf"]) == 0
    out = run_dir / "export-hf"
    assert_holds(out, file)
    assert (out / "base" / "LICENSE").read_text() == "do as you please"
    assert f"| base | {base} |  | apache-2.0 |" in (out / "README.md").read_text()
    assert load_pretrained(out).config.norm_eps == 2e-5

    theirs = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=torch.float32)
    assert type(theirs).__name__ == "PublishedForCausalLM"
    ids = torch.arange(20)[None] + first - 10
    with torch.no_grad():
        assert torch.equal(theirs.eval()(ids).logits, load_pretrained(out)(ids).logits)
    # and on from an export, to the next one
    again = tmp_path / "again"
    rows = model.config.vocab_size
    begin(again, f"model.pretrained={out}", f"tokenizer.source={out}", *shape)
    save(again, 1, small(rows))
    assert main([str(again), "--to", "hf"]) == 0
    assert json.loads((again / "export-hf" / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert (again / "export-hf" / "modeling_published.py").is_file()


def test_a_base_in_one_file_brings_nothing(tmp_path: Path) -> None:
    save_native(small(1088), tmp_path / "base.pth")
    config = settings(f"paths.run_dir={tmp_path / 'run'}", f"model.pretrained={tmp_path / 'base.pth'}")
    origin = keep_origin(config, build_tokenizer(config))
    assert not (origin / "base").exists()
    content = (origin / "origin.json").read_text()
    assert json.loads(content)["base"] == {"name": str(tmp_path / "base.pth"), "revision": None, "licence": None}
    # a resumed run stays the same one
    assert (keep_origin(config, build_tokenizer(config)) / "origin.json").read_text() == content


def test_licences_of_a_recipe_s_sources() -> None:
    from smi.training.origin import _sources, attribution

    config = settings("data=pilot", "data.mixture=null", "tokenizer=rwkv_world")
    section = attribution({"base": None, "sources": _sources(config)})
    assert section.count("\n| data | ") == 6
    assert "opencodeinstruct (nvidia/OpenCodeInstruct)" in section
    assert "CC-BY-4.0" in section
