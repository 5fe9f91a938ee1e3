import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smi.model import RWKV7Config, RWKV7ForCausalLM
from smi.model.checkpoint import DEAD_FILE, CheckpointError, load_pretrained, save_native, save_pretrained
from smi.model.layouts import fla_config, from_form, layout_of, place, to_form

DEAD = [f"blocks.0.att.{name}" for name in ("v0", "v1", "v2")]


@pytest.fixture(scope="module")
def folder(data_dir):
    return data_dir / "rwkv7"


@pytest.fixture
def native(folder):
    return torch.load(folder / "T1.pth", weights_only=True)


def everything(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the model files in a directory, whatever their number."""
    return {name: tensor for file in directory.glob("model*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


class TestNames:
    def test_names_and_shapes_are_those_of_the_converters(self, folder, native):
        """A table made with the publisher's and flash-linear-attention's own converters."""
        for row in json.loads((folder / "name_map.json").read_text())["rows"]:
            name, tensor = row["native"], native[row["native"]]
            ours = row["publisher"]
            assert place(ours, "native") == (name, "same")
            assert place(ours, "hf") == (ours, "same")
            assert list(tensor.shape) == row["publisher_shape"]
            if row["fla"] is None:
                assert name in DEAD
                continue
            spot = place(ours, "fla")
            assert spot.name == row["fla"]
            assert spot.form == (
                "transposed" if row["fla_transposed"] else "flat" if row["fla_reshaped"] else "same"
            ), name
            assert list(to_form(tensor, spot.form).shape) == row["fla_shape"]
            assert torch.equal(from_form(to_form(tensor, spot.form), spot.form), tensor)

    def test_a_layout_is_told_by_most_names(self):
        assert layout_of(["rwkv7.blocks.0.att.w1", "rwkv7.blocks.1.att.w1", "blocks.0.att.w1"]) == "hf"
        assert layout_of(["model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"]) is None

    @pytest.mark.parametrize(
        ("container", "name"),
        [("torch", "model.pth"), ("torch", "weights.bin"), ("safetensors", "x.safetensors"), ("safetensors", "x.pth")],
    )
    @pytest.mark.parametrize("layout", ["T1.pth", "publisher", "fla"])
    def test_no_file_name_tells_anything(self, folder, native, tmp_path, name, container, layout):
        tensors = native if layout == "T1.pth" else load_file(folder / layout / "model.safetensors")
        (torch.save if container == "torch" else save_file)(tensors, tmp_path / name)
        state = load_pretrained(tmp_path / name).state_dict()
        assert all(
            torch.equal(state[f"rwkv7.{key}" if key != "head.weight" else key], tensor)
            for key, tensor in native.items()
            if layout != "fla" or key not in DEAD
        )


class TestRoundTrip:
    @pytest.mark.parametrize("residual", ["present", "absent"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("shards", ["5GB", "200KB"])
    def test_native_to_hf_to_fla_to_native_is_the_identity(self, native, tmp_path, dtype, residual, shards):
        generator = torch.Generator().manual_seed(0)
        # float32 with every bit in use: nothing may pass through fewer
        native = {k: (v + 1e-6 * torch.randn(v.shape, generator=generator)).to(dtype) for k, v in native.items()}
        if residual == "absent":
            for name in DEAD:
                del native[name]
        torch.save(native, tmp_path / "in.pth")
        hf = save_pretrained(load_pretrained(tmp_path / "in.pth"), tmp_path / "hf", max_shard_size=shards)
        fla = save_pretrained(load_pretrained(hf), tmp_path / "fla", layout="fla", max_shard_size=shards)
        out = torch.load(save_native(load_pretrained(fla), tmp_path / "out.pth"), weights_only=True)
        if residual == "absent":
            # native files have them, as the official training code expects: zeros, which have no effect
            assert not any(bool(out.pop(name).any()) for name in DEAD)
        assert_same(out, native)
        several = shards == "200KB"
        for directory in (hf, fla):
            assert (len(list(directory.glob("model-*.safetensors"))) > 1) == several
            assert (directory / "model.safetensors.index.json").exists() == several

    @pytest.mark.parametrize("layers", [1, 3])
    def test_other_shapes(self, tmp_path, layers):
        torch.manual_seed(0)
        config = RWKV7Config(
            vocab_size=50,
            hidden_size=128,
            num_hidden_layers=layers,
            intermediate_size=96,
            decay_low_rank_dim=7,
            a_low_rank_dim=5,
            v_low_rank_dim=3,
            gate_low_rank_dim=11,
        )
        model = RWKV7ForCausalLM(config)
        want = model.state_dict()
        for layout in ("hf", "fla"):
            again = load_pretrained(save_pretrained(model, tmp_path / layout, layout=layout))
            assert_same(again.state_dict(), want)
            assert again.config.to_dict() | {"dtype": None, "architectures": None} == config.to_dict() | {
                "dtype": None,
                "architectures": None,
            }


class TestFLA:
    def test_what_is_written_is_what_its_own_converter_writes(self, folder, tmp_path):
        save_pretrained(load_pretrained(folder / "T1.pth"), tmp_path / "fla", layout="fla")
        assert_same(everything(tmp_path / "fla"), load_file(folder / "fla" / "model.safetensors"))

        ours = json.loads((tmp_path / "fla" / "config.json").read_text())
        theirs = json.loads((folder / "fla" / "config.json").read_text())
        assert {name: theirs[name] for name in ours} == ours
        # the rest is how that library trains: its own defaults
        assert theirs.keys() - ours.keys() == {
            "fuse_cross_entropy",
            "fuse_linear_cross_entropy",
            "fuse_norm",
            "hidden_ratio",
            "initializer_range",
            "max_position_embeddings",
            "use_l2warp",
        }

    def test_the_value_residual_of_layer_0_lies_beside_the_model(self, folder, native, goldens, tmp_path):
        directory = save_pretrained(load_pretrained(folder / "T1.pth"), tmp_path / "fla", layout="fla")
        assert len(load_file(directory / DEAD_FILE)) == 3
        (directory / DEAD_FILE).unlink()
        model = load_pretrained(directory, dtype=torch.float32)
        assert not any(bool(model.state_dict()[f"rwkv7.{name}"].any()) for name in DEAD)
        logits = model(goldens["ids.37"].long()[None]).logits[0]
        assert (logits - goldens["logits.37"]).abs().max() < 1e-5 * goldens["logits.37"].abs().max()
        # zeros need no file: reading supplies them
        assert not (save_pretrained(model, tmp_path / "again", layout="fla") / DEAD_FILE).exists()

    def test_models_that_it_would_compute_otherwise_are_refused(self, folder, tmp_path):
        """Its GroupNorm ties the eps to the size of a head."""
        model = RWKV7ForCausalLM(RWKV7Config(vocab_size=50, hidden_size=64, head_dim=32, num_hidden_layers=1))
        with pytest.raises(ValueError, match=r"heads of 32 do not carry over"):
            save_pretrained(model, tmp_path / "fla", layout="fla")
        assert list(tmp_path.iterdir()) == []

        shutil.copytree(folder / "fla", tmp_path / "t1")
        for change, match in (({"norm_eps": 1e-6}, "GroupNorm"), ({"hidden_act": "gelu"}, "hidden_act gelu")):
            stated = json.loads((folder / "fla" / "config.json").read_text())
            (tmp_path / "t1" / "config.json").write_text(json.dumps(stated | change))
            with pytest.raises(CheckpointError, match=match):
                load_pretrained(tmp_path / "t1")

    @pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="flash-linear-attention is not installed")
    def test_its_own_class_loads_it(self, folder, tmp_path):
        from fla.models import RWKV7ForCausalLM as Peer  # pyright: ignore[reportMissingImports]

        save_pretrained(load_pretrained(folder / "T1.pth"), tmp_path / "fla", layout="fla", max_shard_size="300KB")
        peer, info = Peer.from_pretrained(tmp_path / "fla", output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert_same(peer.state_dict(), load_file(folder / "fla" / "model.safetensors"))


@pytest.mark.skipif(
    "RWKV7_REMOTE_CODE" not in os.environ,
    reason="RWKV7_REMOTE_CODE is not set: a folder with the publisher's configuration_rwkv7.py and modeling_rwkv7.py",
)
def test_the_hf_layout_opens_in_plain_transformers_with_remote_code(folder, goldens, tmp_path):
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    directory = save_pretrained(load_pretrained(folder / "T1.pth", dtype=torch.float32), tmp_path / "hf")
    for file in Path(os.environ["RWKV7_REMOTE_CODE"]).glob("*.py"):
        shutil.copy(file, directory)
    # not by way of an Auto class: flash-linear-attention, once imported, answers there for "rwkv7"
    kind = get_class_from_dynamic_module("modeling_rwkv7.Rwkv7ForCausalLM", str(directory))
    peer, info = kind.from_pretrained(directory, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    logits = peer.eval()(goldens["ids.150"].long()[None]).logits[0]
    assert (logits - goldens["logits.150"]).abs().max() < 1e-5 * goldens["logits.150"].abs().max()


class TestStatedSizes:
    def test_a_wrong_head_count_is_warned_of(self, folder, tmp_path):
        """As published: 32 heads for any size."""
        shutil.copytree(folder / "fla", tmp_path / "t1")
        shutil.copy(folder / "fla" / "config.converter_raw.json", tmp_path / "t1" / "config.json")
        with pytest.warns(UserWarning, match=r"num_heads 32 \(the weights have 2\)"):
            model = load_pretrained(tmp_path / "t1")
        assert model.config.num_heads == 2
        with pytest.warns(UserWarning, match="num_heads 32 does not fit"):
            assert RWKV7Config.from_pretrained(tmp_path / "t1").num_heads == 2

    def test_every_wrong_size_is_named(self, folder, tmp_path):
        shutil.copytree(folder / "publisher", tmp_path / "t1")
        stated = json.loads((tmp_path / "t1" / "config.json").read_text())
        (tmp_path / "t1" / "config.json").write_text(json.dumps(stated | {"vocab_size": 65536, "v_low_rank_dim": 32}))
        with pytest.warns(UserWarning, match=r"vocab_size 65536 .*512.*v_low_rank_dim 32 .*16"):
            assert load_pretrained(tmp_path / "t1").config.vocab_size == 512

    def test_right_ones_pass_in_silence(self, folder, recwarn):
        for layout in ("fla", "publisher"):
            load_pretrained(folder / layout)
        assert not recwarn.list

    def test_one_misshaped_tensor_is_not_the_measure_of_the_rest(self, native, tmp_path):
        for layer in (2, 3):
            native |= {k.replace("s.1.", f"s.{layer}."): v for k, v in native.items() if k.startswith("blocks.1.")}
        native["blocks.0.att.w1"] = torch.zeros(128, 5)
        native["blocks.0.att.r_k"] = torch.zeros(4, 32)
        torch.save(native, tmp_path / "bad.pth")
        with pytest.raises(CheckpointError) as error:
            load_pretrained(tmp_path / "bad.pth")
        assert str(error.value).splitlines()[1:] == [
            "  blocks.0.att.r_k has shape [4, 32], not [2, 64]",
            "  blocks.0.att.w1 has shape [128, 5], not [128, 32]",
        ]


def test_the_fla_config_gives_every_size():
    config = RWKV7Config(hidden_size=256, num_hidden_layers=3, bos_token_id=None, eos_token_id=7, pad_token_id=7)
    written = fla_config(config, torch.bfloat16)
    assert (written["dtype"], written["num_heads"], written["value_dim"]) == ("bfloat16", 4, [256] * 3)
    assert (written["bos_token_id"], written["eos_token_id"]) == (None, 7)
