"""Freezing, LoRA and state tuning: what trains and what stays; runs that resume; exports that load anywhere."""

import logging

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import SHAPE, config, train_and_resume

from smi.config import TuningConfig
from smi.data.recipe import build_tokenizer
from smi.export import export_run
from smi.model import RWKV7Config, RWKV7ForCausalLM
from smi.model.checkpoint import load_pretrained, save_native, save_pretrained
from smi.model.modeling import RWKV7State
from smi.model.time_state import load_time_state, save_time_state
from smi.protocol.stream import Block
from smi.protocol.tokens import BlockType
from smi.runtime.decoding import decoder_for
from smi.runtime.loading import load_runtime
from smi.train import train
from smi.training.loggers import read_lines
from smi.training.models import build_model
from smi.training.samples import SAMPLES_FILE
from smi.training.tuning import InitialState, describe, merge_adapters, merged, plain_weights, tune

MATRICES = ("att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value")


def tiny(vocab_size: int = 96, layers: int = 2) -> RWKV7ForCausalLM:
    """A model in which no path is zero."""
    torch.manual_seed(0)
    model = RWKV7ForCausalLM(RWKV7Config(vocab_size=vocab_size, hidden_size=64, num_hidden_layers=layers, head_dim=32))
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def training(model: torch.nn.Module) -> set[str]:
    return {name.removeprefix("rwkv7.") for name, parameter in model.named_parameters() if parameter.requires_grad}


# --- freezing


def test_what_is_frozen_by_name_stays():
    model = tiny()
    every = training(model)
    tune(model, TuningConfig(freeze=["emb.*", "rwkv7.blocks.0.*"]))
    assert training(model) == {name for name in every if not name.startswith(("emb.", "blocks.0."))}
    total = sum(p.numel() for p in model.parameters())
    left = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert describe(model, TuningConfig(freeze=["emb.*"])) == f"{left:,} of {total:,} parameters; frozen: emb.*"
    assert describe(tiny(), TuningConfig()) == f"all {total:,} parameters"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (TuningConfig(freeze=["emb.*", "bloks.*"]), r"tuning\.freeze: no parameter matches 'bloks\.\*'.* emb\.weight"),
        (TuningConfig(freeze=["*"]), "leaves nothing to train"),
        (
            TuningConfig(train=["emb.*"]),
            r"tuning\.train is not read by tuning\.kind=full: it belongs to lora and state",
        ),
        (TuningConfig(rank=8), r"tuning\.rank is not read by tuning\.kind=full"),
        (TuningConfig(kind="state", rank=8), r"tuning\.rank is not read by tuning\.kind=state"),
        (TuningConfig(kind="lora", freeze=["emb.*"]), r"tuning\.freeze is not read by tuning\.kind=lora"),
        (TuningConfig(kind="lora", train=["hed.*"]), r"tuning\.train: no parameter matches 'hed\.\*'"),
        (TuningConfig(kind="lora", targets=["q_proj"]), r"no linear layer is named 'q_proj'; there are att\.key, att"),
    ],
)
def test_settings_that_mean_nothing_are_refused(how, message):
    with pytest.raises(ValueError, match=message):
        tune(tiny(), how)


@pytest.mark.parametrize("kind", ["lora", "state"])
def test_a_model_from_scratch_is_trained_in_full(kind, tmp_path):
    how = config(tmp_path, f"tuning.kind={kind}")
    with pytest.raises(ValueError, match=f"{kind} is for a model that has been trained: set model.pretrained"):
        build_model(how, build_tokenizer(how))


# --- LoRA


def test_adapters_alone_train_and_merge_into_the_matrices():
    model = tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.arange(20)[None]
    plain = model(ids).logits
    how = TuningConfig(kind="lora", rank=4, alpha=8, train=["head.weight"])
    tune(model, how)
    assert torch.equal(model(ids).logits, plain)
    adapters = {
        f"blocks.{layer}.{matrix}.lora_{side}.default.weight"
        for layer in (0, 1)
        for matrix in MATRICES
        for side in "AB"
    }
    assert training(model) == adapters | {"head.weight"}
    sizes = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert describe(model, how).startswith(f"LoRA of rank 4 and head.weight: {sizes:,} of ")

    products = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_B"):
            torch.nn.init.normal_(module.lora_B["default"].weight)
            # alpha / rank times B A, by hand
            products[name] = 8 / 4 * module.lora_B["default"].weight @ module.lora_A["default"].weight
    adapted = model(ids).logits
    assert not torch.allclose(adapted, plain)
    stored = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
    merge_adapters(model)
    assert set(model.state_dict()) == set(before)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name] + products.get(name.removesuffix(".weight"), 0))
    torch.testing.assert_close(model(ids).logits, adapted, rtol=1e-4, atol=1e-4)
    # and the same from a file
    weights, time_state = plain_weights(stored | {"initial_state.time_state": torch.ones(1)}, how)
    assert time_state is not None
    assert set(weights) == set(before)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> str:
    """A checkpoint with a vocabulary for the compact tokenizer, structural tokens included."""
    directory = tmp_path_factory.mktemp("start") / "model"
    tokenizer = build_tokenizer(config(directory))
    save_pretrained(tiny(-(-tokenizer.vocab_size // 64) * 64), directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def changed(export, start) -> set[str]:
    new, old = load_file(export / "model.safetensors"), load_file(f"{start}/model.safetensors")
    assert set(new) == set(old)
    return {name.removeprefix("rwkv7.") for name in new if not torch.equal(new[name], old[name])}


def test_a_lora_run_resumes_and_exports_a_plain_model(start, tmp_path):
    how = config(
        tmp_path / "run", *SHAPE, "model.head_dim=32", *_free_shape(), f"model.pretrained={start}", "tuning.kind=lora"
    )
    export, again = train_and_resume(how)
    assert changed(export, start) == {f"blocks.{layer}.{matrix}.weight" for layer in (0, 1) for matrix in MATRICES}
    new, resumed = load_file(export / "model.safetensors"), load_file(again / "model.safetensors")
    assert all(torch.equal(new[name], resumed[name]) for name in new)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(load_pretrained(export / "model.pth")(ids).logits, load_pretrained(export)(ids).logits)
    # the same from its last checkpoint
    late = load_file(export_run(tmp_path / "run", ["hf"]) / "model.safetensors")
    torch.testing.assert_close(late, new)


def test_layers_with_a_bias_come_back_from_a_file():
    """As some models of transformers have them."""
    model = torch.nn.ModuleDict({"query": torch.nn.Linear(6, 5), "output": torch.nn.Linear(5, 6)})
    how = TuningConfig(kind="lora", rank=2, alpha=6, targets=["query"])
    tune(model, how)
    torch.nn.init.normal_(model["query"].lora_B["default"].weight)
    stored = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
    merge_adapters(model)
    weights, _ = plain_weights(stored, how)
    assert set(weights) == set(model.state_dict())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value)


def test_a_matrix_is_merged_for_a_while_and_is_then_what_it_was():
    model, ids = tiny(), torch.arange(20)[None]
    tune(model, TuningConfig(kind="lora", rank=4))
    for module in model.modules():
        if hasattr(module, "lora_B"):
            torch.nn.init.normal_(module.lora_B["default"].weight)
    before, want = {name: value.clone() for name, value in model.state_dict().items()}, model(ids).logits
    with torch.no_grad(), merged(model):
        torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-4)
        # what reads the matrices past their layers
        state = RWKV7State.fresh(model.config, 1, model.device)
        decoder = decoder_for(model)
        for token in range(20):
            found = decoder.step(torch.tensor([token]), state)
        torch.testing.assert_close(found, want[:, -1], rtol=1e-3, atol=1e-3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(ids).logits, want)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["lora", "state"])
def test_what_is_tuned_writes_samples_and_learns_the_same(kind, start, tmp_path):
    kept = []
    for name in ("without", "with"):
        samples = ["callbacks=default", "callbacks.samples.every=1", "callbacks.samples.max_tokens=16"]
        how = config(
            tmp_path / name,
            *[*SHAPE, "model.head_dim=32", *_free_shape(), f"model.pretrained={start}", f"tuning.kind={kind}"],
            *["trainer.max_steps=2", "trainer.export=[native]", "optim.lr=0.5"],
            *(samples if name == "with" else ["callbacks=none"]),
        )
        train(how)
        kept.append(torch.load(tmp_path / name / "checkpoints" / "step-2.ckpt", weights_only=True)["state_dict"])
    here, there = kept
    assert all(torch.equal(here[name], there[name]) for name in here)
    rows = read_lines(tmp_path / "with" / SAMPLES_FILE)
    assert {row["step"] for row in rows} == {1, 2}
    # it hears what was learned
    asked = len(rows) // 2
    firsts, lasts = rows[:asked], rows[asked:]
    assert [row["prompt"] for row in firsts] == [row["prompt"] for row in lasts]
    assert [row["reply"] for row in firsts] != [row["reply"] for row in lasts]


def _free_shape() -> list[str]:
    # the low ranks are those of the checkpoint
    return [f"model.{name}_low_rank_dim=null" for name in ("decay", "a", "v", "gate")]


def test_new_rows_that_do_not_train_are_warned_of(tmp_path, caplog):
    tokenizer = build_tokenizer(config(tmp_path))
    save_pretrained(tiny(min(tokenizer.structural.ids)), tmp_path / "base")
    overrides = [*SHAPE, "model.head_dim=32", *_free_shape(), f"model.pretrained={tmp_path / 'base'}"]
    for more, warned in (
        (["tuning.kind=lora"], True),
        (["tuning.kind=lora", "tuning.train=[emb.weight,head.weight]"], False),
        ([], False),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "smi"):
            build_model(config(tmp_path / "run", *overrides, *more), tokenizer)
        assert ("rows are new and do not train in the embedding and the head" in caplog.text) == warned


# --- state tuning


def test_only_the_initial_states_learn_and_every_document_starts_from_them(start, tmp_path):
    how = config(
        tmp_path / "run",
        *SHAPE,
        "model.head_dim=32",
        *_free_shape(),
        f"model.pretrained={start}",
        "tuning.kind=state",
        "trainer.export=[hf,native]",
    )
    export, again = train_and_resume(how)
    assert changed(export, start) == set()
    model = load_pretrained(export)
    state = load_time_state(export / "time_state.pth", model.config)
    assert state.shape == (2, 2, 32, 32)
    assert all(layer.any() for layer in state)
    assert torch.equal(state, load_time_state(again / "time_state.pth", model.config))
    late = export_run(tmp_path / "run", ["hf"])
    assert torch.equal(state, load_time_state(late / "time_state.pth", model.config))

    # the runtime starts from it, and gives the slot back empty
    runtime = load_runtime(str(tmp_path / "run"), capacity=1)
    for _ in range(2):
        with runtime.open() as session:
            assert torch.equal(runtime.state_of(session).wkv[:, 0], state)
            session.send([Block(BlockType.USR, "How warm is it?")])
            session.prefill()
            ids = torch.tensor([session._ids])
            found = session._scores
        assert runtime.pool.is_clear(0)
    initial = InitialState(model.config)
    initial.time_state.data = state
    want = model(ids, state=initial(1)).logits[0, -1]
    assert found is not None
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(want, model(ids).logits[0, -1], atol=1e-3)


def test_the_state_is_broadcast_to_packed_documents_and_its_gradient_is_their_sum():
    model = tiny()
    initial = InitialState(model.config)
    torch.nn.init.normal_(initial.time_state, std=0.1)
    documents = [torch.randint(96, (1, length)) for length in (5, 9, 1)]
    bounds = torch.tensor([0, 5, 14, 15], dtype=torch.int32)
    packed = model(torch.cat(documents, 1), cu_seqlens=bounds, state=initial(3)).logits
    packed.square().sum().backward()
    together = initial.time_state.grad
    initial.time_state.grad = None
    alone = [model(document, state=initial(1)).logits for document in documents]
    torch.testing.assert_close(torch.cat(alone, 1), packed, rtol=1e-4, atol=1e-5)
    sum(part.square().sum() for part in alone).backward()
    torch.testing.assert_close(together, initial.time_state.grad, rtol=1e-3, atol=1e-4)


def test_the_rwkv_package_reads_the_state_as_it_is_written(tmp_path, monkeypatch):
    """It has the states of a layer side by side: shift, WKV, shift. Rows are values, columns keys, as in the file."""
    monkeypatch.setenv("RWKV_V7_ON", "1")
    monkeypatch.setenv("RWKV_JIT_ON", "0")
    monkeypatch.setenv("RWKV_CUDA_ON", "0")
    rwkv = pytest.importorskip("rwkv.model", reason="the rwkv package is not installed")
    torch.manual_seed(0)
    model = RWKV7ForCausalLM(RWKV7Config(vocab_size=96, hidden_size=128, num_hidden_layers=2))
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    initial = InitialState(model.config)
    torch.nn.init.normal_(initial.time_state, std=0.3)
    save_native(model, tmp_path / "model.pth")
    save_time_state(initial.time_state, tmp_path / "state.pth")

    theirs = rwkv.RWKV(str(tmp_path / "model"), "cpu fp32")
    stored = torch.load(tmp_path / "state.pth", weights_only=True)
    state = theirs.generate_zero_state()
    for layer in range(2):
        state[3 * layer + 1] = stored[f"blocks.{layer}.att.time_state"]
    ids = [5, 9, 3, 77]
    found, _ = theirs.forward(ids, state)
    want = model(torch.tensor([ids]), state=initial(1)).logits[0, -1]
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
    transposed = theirs.generate_zero_state()
    for layer in range(2):
        transposed[3 * layer + 1] = stored[f"blocks.{layer}.att.time_state"].mT.contiguous()
    assert not torch.allclose(theirs.forward(ids, transposed)[0], want, atol=1e-2)


# --- recipes


@pytest.mark.parametrize("recipe", ["lora", "state_tuning", "long_context"])
def test_recipes_train_resume_and_export(recipe, start, tmp_path):
    """Each as it is shipped, but for a tiny model and data that are made up; bit for bit the same when resumed."""
    lengths = ["data.max_length=64", "data.pack_length=64"] if recipe == "long_context" else []
    how = config(
        tmp_path / "run",
        f"+recipe={recipe}",
        "model=tiny",
        "tokenizer=compact",
        *SHAPE,
        "model.head_dim=32",
        *_free_shape(),
        "hardware=cpu",
        f"model.pretrained={start}",
        "model.revision=null",
        "trainer.export=[hf]",
        "trainer.batch_size=2",
        *lengths,
    )
    export, again = train_and_resume(how, step=3)
    files = ["model.safetensors", *["time_state.pth"] * (recipe == "state_tuning")]
    for file in files:
        one, other = ((load_file if file.endswith("s") else torch.load)(path / file) for path in (export, again))
        assert set(one) == set(other)
        assert all(torch.equal(one[name], other[name]) for name in one), file
    moved = changed(export, start)
    assert ("emb.weight" in moved, "blocks.1.att.key.weight" in moved, "blocks.1.att.w0" in moved) == {
        "lora": (True, True, False),
        "state_tuning": (False, False, False),
        "long_context": (True, True, True),
    }[recipe]


def test_a_state_of_another_model_is_refused(tmp_path):
    file = save_time_state(torch.zeros(2, 2, 32, 32), tmp_path / "time_state.pth")
    assert sorted(torch.load(file, weights_only=True)) == [f"blocks.{i}.att.time_state" for i in (0, 1)]
    other = RWKV7Config(vocab_size=96, hidden_size=128, num_hidden_layers=2, head_dim=64)
    with pytest.raises(ValueError, match=r"blocks\.0\.att\.time_state has shape \[2, 32, 32\], .* \[2, 64, 64\]"):
        load_time_state(file, other)
    with pytest.raises(ValueError, match=r"should hold blocks\.0\.att\.time_state to blocks\.2\."):
        load_time_state(file, RWKV7Config(vocab_size=96, hidden_size=64, num_hidden_layers=3, head_dim=32))
    save_time_state(torch.full((2, 2, 32, 32), torch.nan), file)
    with pytest.raises(ValueError, match="not finite"):
        load_time_state(file, tiny().config)
    file.write_bytes(b"no state")
    with pytest.raises(ValueError, match="cannot be read"):
        load_time_state(file, tiny().config)


@pytest.mark.parametrize("override", ["tuning.kind=lora", "tuning.kind=state", "data.over_long=split", "model=hf"])
def test_what_fsdp_cannot_share_out_is_refused(override, start, tmp_path):
    how = config(tmp_path, f"model.pretrained={start}", "hardware=cpu_ddp2", "hardware.strategy=fsdp", override)
    with pytest.raises(ValueError, match=rf"fsdp does not go with {override}: choose ddp"):
        build_model(how, build_tokenizer(how))
