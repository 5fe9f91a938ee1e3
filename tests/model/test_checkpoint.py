import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from smi.model import RWKV7ForCausalLM
from smi.model.checkpoint import CheckpointError, load_pretrained, save_native


@pytest.fixture
def folder(data_dir):
    return data_dir / "rwkv7"


@pytest.fixture
def native(folder):
    return torch.load(folder / "T1.pth", weights_only=True)


@pytest.mark.parametrize("source", ["T1.pth", "publisher", "fla", "fla/model.safetensors"])
def test_every_layout_gives_the_same_model(folder, goldens, source):
    model = load_pretrained(folder / source, dtype=torch.float32)
    logits = model(goldens["ids.37"].long()[None]).logits[0]
    assert (logits - goldens["logits.37"]).abs().max() < 1e-5 * goldens["logits.37"].abs().max()


def test_shapes_come_from_the_weights(folder):
    config = load_pretrained(folder / "T1.pth").config
    ranks = (
        config.decay_low_rank_dim,
        config.a_low_rank_dim,
        config.v_low_rank_dim,
        config.gate_low_rank_dim,
    )
    assert ranks == (32, 32, 16, 32)
    assert (config.hidden_size, config.num_hidden_layers, config.num_heads, config.vocab_size) == (
        128,
        2,
        2,
        512,
    )


def test_tensors_are_kept_in_their_dtype_and_bit_for_bit(folder, native, tmp_path):
    model = load_pretrained(folder / "T1.pth")
    assert model.head.weight.dtype == torch.bfloat16
    for name in ("again.pth", "again.safetensors"):
        file = save_native(model, tmp_path / name)
        again = torch.load(file, weights_only=True) if file.suffix == ".pth" else load_file(file)
        assert again.keys() == native.keys()
        for key, tensor in native.items():
            assert torch.equal(again[key], tensor), key
            assert again[key].dtype == tensor.dtype


def test_public_hf_layout_is_what_transformers_saves(folder, tmp_path):
    load_pretrained(folder / "publisher").save_pretrained(tmp_path)
    ours, theirs = (
        load_file(tmp_path / "model.safetensors"),
        load_file(folder / "publisher" / "model.safetensors"),
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    again = RWKV7ForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(x, ours[name]) for name, x in again.state_dict().items())


def test_sharded_safetensors(folder, goldens, tmp_path):
    model = load_pretrained(folder / "publisher", dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="500KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    logits = load_pretrained(tmp_path)(goldens["ids.37"].long()[None]).logits[0]
    assert (logits - goldens["logits.37"]).abs().max() < 1e-5 * goldens["logits.37"].abs().max()


def test_layer_0_value_residual_may_be_absent_and_has_no_effect(native, goldens, tmp_path):
    for name in ("v0", "v1", "v2"):
        del native[f"blocks.0.att.{name}"]
    torch.save(native, tmp_path / "lean.pth")
    model = load_pretrained(tmp_path / "lean.pth", dtype=torch.float32)
    logits = model(goldens["ids.37"].long()[None]).logits[0]
    assert (logits - goldens["logits.37"]).abs().max() < 1e-5 * goldens["logits.37"].abs().max()


def test_native_export_runs_in_the_rwkv_package(folder, goldens, tmp_path, monkeypatch):
    monkeypatch.setenv("RWKV_V7_ON", "1")
    monkeypatch.setenv("RWKV_JIT_ON", "0")
    monkeypatch.setenv("RWKV_CUDA_ON", "0")
    from rwkv.model import RWKV

    save_native(load_pretrained(folder / "publisher"), tmp_path / "model.pth")
    peer = RWKV(model=str(tmp_path / "model"), strategy="cpu fp32")
    logits, _ = peer.forward(goldens["ids.37"].tolist(), None)
    want = goldens["logits.37"][-1]
    assert (logits.float() - want).abs().max() < 1e-5 * want.abs().max()


class TestBadCheckpoints:
    def test_all_names_that_do_not_fit_are_listed(self, native, tmp_path):
        del native["blocks.1.att.w2"]
        native["blocks.1.att.extra"] = torch.zeros(3)
        native["blocks.0.ffn.value.weight"] = torch.zeros(128, 5)
        native["ln_out.bias"] = torch.zeros(7)
        torch.save(native, tmp_path / "bad.pth")
        with pytest.raises(CheckpointError) as error:
            load_pretrained(tmp_path / "bad.pth")
        for part in (
            "bad.pth does not fit RWKV-7 (read as the native layout)",
            "missing blocks.1.att.w2",
            "unexpected blocks.1.att.extra",
            "\n  blocks.0.ffn.value.weight has shape [128, 5], not [128, 512]",
            "\n  ln_out.bias has shape [7], not [128]",
        ):
            assert part in str(error.value)

    @pytest.mark.parametrize(
        ("content", "match"),
        [(b"", "cannot be read"), (b"not a checkpoint", "cannot be read")],
        ids=["empty", "text"],
    )
    @pytest.mark.parametrize("name", ["x.pth", "x.safetensors"])
    def test_unreadable_files(self, tmp_path, name, content, match):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=match):
            load_pretrained(tmp_path / name)

    def test_a_truncated_file(self, folder, tmp_path):
        whole = (folder / "publisher" / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_pretrained(tmp_path)

    def test_a_pickle_that_would_run_code_is_not_run(self, tmp_path):
        class Trap:
            def __reduce__(self):
                return (open, (str(tmp_path / "sprung"), "w"))

        torch.save({"emb.weight": Trap()}, tmp_path / "trap.pth")
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_pretrained(tmp_path / "trap.pth")
        assert not (tmp_path / "sprung").exists()

    def test_another_model(self, tmp_path):
        save_file({"model.embed_tokens.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="holds no RWKV-7 model"):
            load_pretrained(tmp_path)

    def test_nothing_there(self, tmp_path):
        with pytest.raises(CheckpointError, match="no checkpoint at"):
            load_pretrained(tmp_path / "nowhere.pth")
        with pytest.raises(CheckpointError, match=r"found: none"):
            load_pretrained(tmp_path)

    def test_two_candidates(self, tmp_path):
        for name in ("a.pth", "b.pth"):
            (tmp_path / name).touch()
        with pytest.raises(CheckpointError, match=r"found: a\.pth, b\.pth"):
            load_pretrained(tmp_path)

    def test_missing_shards(self, tmp_path):
        index = {"weight_map": {"head.weight": "model-1.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"model-1\.safetensors"):
            load_pretrained(tmp_path)
