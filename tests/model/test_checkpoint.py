import json
import shutil
from pathlib import Path
from unittest.mock import MagicMock

import huggingface_hub.errors as hub_errors
import pytest
import torch
from safetensors.torch import load_file, save_file

from smi.model import RWKV7ForCausalLM, checkpoint
from smi.model.checkpoint import CheckpointError, load_pretrained, save_native, save_pretrained

DEAD = [f"blocks.0.att.{name}" for name in ("v0", "v1", "v2")]


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


def test_parameters_train_and_the_file_stays(folder, tmp_path):
    """They are private views of it."""
    file = save_native(load_pretrained(folder / "T1.pth"), tmp_path / "model.safetensors")
    before = file.read_bytes()
    model = load_pretrained(file)
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    assert file.read_bytes() == before
    # and the file may be replaced under a living model, by itself for one
    model = load_pretrained(file)
    save_native(model, file)
    file.unlink()
    assert torch.equal(model.head.weight, load_pretrained(folder / "T1.pth").head.weight)


@pytest.mark.parametrize("source", ["T1.pth", "publisher", "fla"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_conversion_is_that_of_torch(folder, native, source, dtype, monkeypatch):
    monkeypatch.setattr(checkpoint, "_MAPPED_AT_ONCE", 10_000)
    state = load_pretrained(folder / source, dtype=dtype).state_dict()
    for name, tensor in native.items():
        if source != "fla" or name not in DEAD:
            ours = state[name if name == "head.weight" else f"rwkv7.{name}"]
            assert ours.dtype == dtype
            assert torch.equal(ours, tensor.to(dtype))


def test_generation_settings_come_along(folder, tmp_path):
    model = load_pretrained(folder / "publisher")
    assert model.generation_config.eos_token_id == 0
    model.generation_config.eos_token_id = [0, 7]
    assert load_pretrained(save_pretrained(model, tmp_path / "x")).generation_config.eos_token_id == [0, 7]


def test_an_index_is_a_source(folder, tmp_path):
    model = load_pretrained(folder / "publisher")
    save_pretrained(model, tmp_path / "x", max_shard_size="200KB")
    again = load_pretrained(tmp_path / "x" / "model.safetensors.index.json")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


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
    logits, _ = peer.forward(goldens["ids.37"].tolist(), None, full_output=True)
    want = goldens["logits.37"]
    assert (logits.float() - want).abs().max() < 1e-5 * want.abs().max()


class TestHub:
    """No network here: what the hub would answer is put in its place."""

    @pytest.fixture
    def answers(self, monkeypatch):
        asked = []

        def answer_with(answer: Path | Exception):
            def snapshot_download(*args, **kwargs):
                asked.append((args, kwargs))
                if isinstance(answer, Exception):
                    raise answer
                return str(answer)

            monkeypatch.setattr(checkpoint, "snapshot_download", snapshot_download)
            return asked

        return answer_with

    def test_an_id_with_a_revision(self, folder, answers):
        asked = answers(folder / "publisher")
        assert load_pretrained("owner/rwkv-7", revision="5904f9d").config.vocab_size == 512
        [(args, kwargs)] = asked
        assert args == ("owner/rwkv-7",)
        assert kwargs["revision"] == "5904f9d"

    def test_only_what_is_needed_is_fetched(self, folder, answers):
        from huggingface_hub.utils import filter_repo_objects

        asked = answers(folder / "publisher")
        load_pretrained("owner/rwkv-7")
        [(_, kwargs)] = asked
        kept = filter_repo_objects(
            [
                "README.md",
                "config.json",
                "generation_config.json",
                "tokenizer.json",
                "modeling_rwkv7.py",
                "model.pth",
                "pytorch_model.bin",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
                checkpoint.DEAD_FILE,
                "fla/config.json",
                "fla/model.safetensors",
            ],
            allow_patterns=kwargs["allow_patterns"],
            ignore_patterns=kwargs["ignore_patterns"],
        )
        # the publisher's code and what the card says are not read, but handed on by exports
        assert list(kept) == [
            "README.md",
            "config.json",
            "generation_config.json",
            "modeling_rwkv7.py",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            checkpoint.DEAD_FILE,
        ]

    @pytest.mark.parametrize(
        ("error", "match"),
        [
            (
                hub_errors.RepositoryNotFoundError,
                "no directory owner/rwkv-7 here, and the hub has no model owner/rwkv-7",
            ),
            (hub_errors.GatedRepoError, "only to those who accepted its terms"),
            (hub_errors.RevisionNotFoundError, "has owner/rwkv-7, but no revision v9"),
        ],
    )
    def test_refusals(self, answers, error, match):
        answers(error("401", response=MagicMock()))
        with pytest.raises(CheckpointError, match=match):
            load_pretrained("owner/rwkv-7", revision="v9")

    def test_an_unreachable_hub(self, answers):
        answers(TimeoutError("timed out\nsecond line"))
        with pytest.raises(CheckpointError, match=r"not in its cache either: timed out$"):
            load_pretrained("owner/rwkv-7")

    def test_offline(self):
        """The hub's client itself, which tests keep offline."""
        with pytest.raises(CheckpointError, match=r"could not be asked for owner/rwkv-7, which is not in its cache"):
            load_pretrained("owner/rwkv-7")

    def test_a_path_has_no_revision(self, folder):
        with pytest.raises(CheckpointError, match="revision v1 means nothing here"):
            load_pretrained(folder / "publisher", revision="v1")


class TestWriting:
    def test_a_directory_with_contents_is_left_alone(self, folder, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(ValueError, match="has contents already"):
            save_pretrained(load_pretrained(folder / "T1.pth"), tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]

    def test_whole_or_not_at_all(self, folder, tmp_path, monkeypatch):
        model = load_pretrained(folder / "T1.pth")
        file = save_native(model, tmp_path / "model.pth")
        before = file.read_bytes()

        def full_disk(*args, **kwargs):
            raise OSError("No space left on device")

        monkeypatch.setattr(checkpoint, "publish", full_disk)
        for save in (
            lambda: save_native(model, file),
            lambda: save_pretrained(model, tmp_path / "hf"),
            lambda: save_pretrained(model, tmp_path / "fla", layout="fla"),
        ):
            with pytest.raises(OSError, match="No space"):
                save()
        assert [each.name for each in tmp_path.iterdir()] == ["model.pth"]
        assert file.read_bytes() == before

    def test_other_forms_are_refused(self, folder, tmp_path):
        model = load_pretrained(folder / "T1.pth")
        with pytest.raises(ValueError, match=r"not model\.bin"):
            save_native(model, tmp_path / "model.bin")
        with pytest.raises(ValueError, match="save_native writes the native one"):
            save_pretrained(model, tmp_path / "x", layout="native")


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

    @pytest.mark.parametrize("name", ["T1.pth", "publisher/model.safetensors"])
    @pytest.mark.parametrize("share", [0.00001, 0.001, 0.5, 0.999])
    def test_a_truncated_file(self, folder, tmp_path, name, share):
        whole = (folder / name).read_bytes()
        file = tmp_path / Path(name).name
        file.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(CheckpointError, match=rf"{file.name} cannot be read"):
            load_pretrained(file)

    def test_an_old_torch_file(self, native, tmp_path):
        torch.save(native, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
        with pytest.raises(
            CheckpointError, match=r"old\.pth cannot be read: neither safetensors nor torch's zip format"
        ):
            load_pretrained(tmp_path / "old.pth")

    def test_a_training_checkpoint(self, native, tmp_path):
        torch.save({"state_dict": native, "step": 3}, tmp_path / "last.pth")
        with pytest.raises(CheckpointError, match="is no flat dictionary of tensors"):
            load_pretrained(tmp_path / "last.pth")

    def test_whole_numbers(self, native, tmp_path):
        native["blocks.1.att.key.weight"] = torch.zeros(128, 128, dtype=torch.int8)
        torch.save(native, tmp_path / "bad.pth")
        with pytest.raises(CheckpointError, match=r"blocks\.1\.att\.key\.weight holds int8, not floating-point"):
            load_pretrained(tmp_path / "bad.pth")

    def test_an_older_rwkv(self, tmp_path):
        names = ("emb.weight", "blocks.0.ln1.weight", "blocks.0.att.time_maa_x", "blocks.0.ffn.key.weight")
        torch.save({name: torch.zeros(4, 4) for name in names}, tmp_path / "v6.pth")
        with pytest.raises(CheckpointError, match=r"not RWKV-7 \(x070\): no layer has blocks\.N\.att\.r_k, "):
            load_pretrained(tmp_path / "v6.pth")

    @pytest.mark.parametrize(
        ("layout", "change", "lines"),
        [
            ("fla", "ln_out.bias", ["missing model.norm.bias", "unexpected model.norm.biases"]),
            ("publisher", "emb.weight", ["missing rwkv7.emb.weight", "unexpected rwkv7.emb.weights"]),
        ],
    )
    def test_names_are_those_of_the_file(self, folder, tmp_path, layout, change, lines):
        tensors = load_file(folder / layout / "model.safetensors")
        name = lines[0].removeprefix("missing ")
        tensors[lines[1].removeprefix("unexpected ")] = tensors.pop(name)
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError) as error:
            load_pretrained(tmp_path)
        assert str(error.value).splitlines()[1:] == [f"  {line}" for line in lines]

    def test_shards_are_named(self, folder, tmp_path):
        save_pretrained(load_pretrained(folder / "publisher"), tmp_path / "x", max_shard_size="200KB")
        first, *_, last = sorted((tmp_path / "x").glob("model-*.safetensors"))
        name = next(iter(load_file(first)))
        save_file(load_file(last) | {name: torch.zeros(3, 3), "more": torch.zeros(1)}, last)
        with pytest.raises(CheckpointError) as error:
            load_pretrained(tmp_path / "x")
        lines = str(error.value).splitlines()
        assert f"  {name} is in {first.name} and in {last.name}" in lines
        assert f"  unexpected more (in {last.name})" in lines

    def test_a_gap_between_layers(self, native, tmp_path):
        moved = {name.replace("blocks.1.", "blocks.2."): tensor for name, tensor in native.items()}
        torch.save(moved, tmp_path / "gap.pth")
        with pytest.raises(CheckpointError, match="blocks 0, 2 are not numbered from 0 without a gap"):
            load_pretrained(tmp_path / "gap.pth")

    def test_a_config_that_is_no_json(self, folder, tmp_path):
        shutil.copytree(folder / "publisher", tmp_path / "x")
        (tmp_path / "x" / "config.json").write_text("{")
        with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
            load_pretrained(tmp_path / "x")

    def test_a_pickle_that_would_run_code_is_not_run(self, tmp_path):
        class Trap:
            def __reduce__(self):
                return (open, (str(tmp_path / "sprung"), "w"))

        torch.save({"emb.weight": Trap()}, tmp_path / "trap.pth")
        with pytest.raises(CheckpointError, match="cannot be read: it holds more than tensors"):
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

    @pytest.mark.parametrize(
        ("content", "match"),
        [
            ({"weight_map": {"head.weight": "../elsewhere.safetensors"}}, "files outside its directory"),
            ({"weight_map": {"head.weight": 3}}, "no weight_map from names to files"),
            ({}, "no weight_map"),
        ],
    )
    def test_a_bad_index(self, tmp_path, content, match):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=match):
            load_pretrained(tmp_path)
