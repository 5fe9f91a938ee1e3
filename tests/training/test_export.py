"""Exports: every format of one model, read back by us and by those it is meant for."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from smi.model import RWKV7Config, RWKV7ForCausalLM
from smi.model.checkpoint import load_pretrained
from smi.tokenizer import load_tokenizer
from smi.training import export
from smi.training.export import export_model


@pytest.fixture(scope="module")
def tokenizer(data_dir):
    return load_tokenizer(str(data_dir / "t1_tokenizer"))


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = RWKV7Config(vocab_size=tokenizer.vocab_size, hidden_size=128, num_hidden_layers=2, embedding_init=1.0)
    model = RWKV7ForCausalLM(config)
    for parameter in model.parameters():  # no path is zero, as it is at the start
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model


def write(model, tokenizer, directory, *formats):
    return export_model(model, tokenizer, directory, formats=formats, config_yaml="seed: 1\n", figures={"loss": 1.25})


def test_every_format_holds_the_same_model(model, tokenizer, tmp_path, monkeypatch):
    directory = write(model, tokenizer, tmp_path / "export", "hf", "native", "fla")
    assert not list(tmp_path.glob(".*"))
    ids = torch.tensor([tokenizer.encode("How much is the lamp?")])
    with torch.no_grad():
        want = model(ids).logits
    for source in (directory, directory / "model.pth", directory / "fla"):
        again = load_pretrained(source)
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())
        assert torch.allclose(again(ids).logits, want, atol=1e-5)
        if source.is_dir():
            assert again.generation_config.eos_token_id == [tokenizer.eos_id, tokenizer.structural.eot]
            assert again.config.eos_token_id == again.config.pad_token_id == tokenizer.eos_id
            assert load_tokenizer(str(source)).structural.to_dict() == tokenizer.structural.to_dict()
            assert len(AutoTokenizer.from_pretrained(source)) == tokenizer.vocab_size

    monkeypatch.setenv("RWKV_V7_ON", "1")
    monkeypatch.setenv("RWKV_JIT_ON", "0")
    monkeypatch.setenv("RWKV_CUDA_ON", "0")
    from rwkv.model import RWKV

    peer = RWKV(model=str(directory / "model"), strategy="cpu fp32")
    logits, _ = peer.forward(ids[0].tolist(), None, full_output=True)
    assert (logits - want[0]).abs().max() < 1e-5 * want.abs().max()


def test_a_new_export_takes_the_place_of_an_earlier_one(model, tokenizer, tmp_path):
    write(model, tokenizer, tmp_path / "export", "hf", "fla")
    write(model, tokenizer, tmp_path / "export", "native")
    assert [file.name for file in tmp_path.iterdir()] == ["export"]
    assert not (tmp_path / "export" / "fla").exists()


@pytest.mark.parametrize(
    ("formats", "files", "source"),
    [
        (["hf"], {"model.safetensors", "config.json"}, "."),
        (["native"], {"model.pth", "config.json"}, "."),
        (["fla"], {"fla", "config.json"}, "fla"),
    ],
)
def test_each_alone(model, tokenizer, tmp_path, formats, files, source):
    directory = write(model, tokenizer, tmp_path / "export", *formats)
    assert {file.name for file in directory.iterdir()} == files | {
        "README.md",
        "chat_template.jinja",
        "config.yaml",
        "generation_config.json",
        "smi_token_ids.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    card = (directory / "README.md").read_text()
    assert f'load_pretrained("{source}")' in card
    assert ("flash-linear-attention" in card, "native RWKV layout" in card) == (formats == ["fla"], "native" in formats)
    assert load_pretrained(directory / source).config.vocab_size == tokenizer.vocab_size


def test_a_model_on_another_device_is_compared_on_the_cpu(model, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(RWKV7ForCausalLM, "device", torch.device("cuda"))
    write(model, tokenizer, tmp_path / "export", "hf", "native", "fla")


class TestAnExportThatDoesNotReadBack:
    """It raises, and an earlier export stays."""

    @pytest.fixture
    def earlier(self, model, tokenizer, tmp_path):
        return write(model, tokenizer, tmp_path / "export", "hf")

    def test_other_values(self, model, tokenizer, earlier, monkeypatch):
        def damaged(model, file):
            tensors = {name.removeprefix("rwkv7."): tensor.clone() for name, tensor in model.state_dict().items()}
            tensors["blocks.1.att.w2"][3, 5] += 1e-6
            torch.save(tensors, file)
            return file

        before = (earlier / "model.safetensors").read_bytes()
        monkeypatch.setattr(export, "save_native", damaged)
        with pytest.raises(RuntimeError, match=r"does not read back: .*model\.pth .* in rwkv7\.blocks\.1\.att\.w2"):
            write(model, tokenizer, earlier, "hf", "native")
        assert (earlier / "model.safetensors").read_bytes() == before

    def test_another_function_of_the_same_weights(self, model, tokenizer, earlier, monkeypatch):
        original = export.save_pretrained

        def damaged(model, directory, *, layout):
            original(model, directory, layout=layout)
            config = json.loads((directory / "config.json").read_text())
            (directory / "config.json").write_text(json.dumps(config | {"norm_eps": 1e-3}))
            return directory

        monkeypatch.setattr(export, "save_pretrained", damaged)
        with pytest.raises(RuntimeError, match=r"does not read back: logits of .* are off"):
            write(model, tokenizer, earlier, "hf")

    def test_weights_are_compared_with_those_on_the_disk(self, earlier, model):
        tensors = load_file(earlier / "model.safetensors")
        save_file(tensors | {"head.weight": tensors["head.weight"].flip(0)}, earlier / "model.safetensors")
        with pytest.raises(RuntimeError, match=r"in head\.weight"):
            export.verify(model, [earlier])
