"""Models of transformers through our data, loss and trainer: a tiny Llama, a tiny Mamba, and some that cannot be."""

from itertools import islice

import pytest
import torch
from families import CONFIG, byte_bpe, write
from safetensors.torch import load_file
from tiny_runs import config, train_and_resume
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    PhiConfig,
)

from smi.data.batch import pack
from smi.data.recipe import build_tokenizer
from smi.data.synthetic import SyntheticTools
from smi.export import export_run
from smi.protocol.codec import encode
from smi.protocol.conversation import to_stream
from smi.protocol.tokens import BlockType
from smi.tokenizer import load_tokenizer
from smi.training.hf import HFModule, keeps_apart
from smi.training.models import build_model, build_module
from smi.training.module import Optimization
from smi.training.setup import optimization

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4}
HEADS = SMALL | {"num_key_value_heads": 2, "head_dim": 16}


def llama(rows: int, **more) -> LlamaConfig:
    return LlamaConfig(vocab_size=rows, **(HEADS | more))


def mamba(rows: int, **more) -> MambaConfig:
    return MambaConfig(vocab_size=rows, hidden_size=64, num_hidden_layers=2, state_size=8, **more)


def made(how):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(how)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("compact")


@pytest.fixture(scope="module")
def examples(tokenizer):
    source = SyntheticTools(seed=0, max_questions=1)
    return [encode(to_stream(c), tokenizer) for c in islice(source.conversations(), 4)]


@pytest.fixture
def checkpoint(tokenizer, tmp_path):
    """A checkpoint without rows for the structural tokens."""

    def save(make, **more) -> str:
        made(make(min(tokenizer.structural.ids), **more)).save_pretrained(tmp_path / "base")
        return str(tmp_path / "base")

    return save


# --- whether documents are kept apart


@pytest.mark.parametrize(("make", "packed"), [(llama, True), (mamba, False)])
def test_documents_are_packed_only_where_they_are_kept_apart(make, packed):
    assert keeps_apart(made(make(300))) == packed


def test_an_attention_that_ignores_positions_is_found_out(monkeypatch):
    """A Llama whose packed documents see each other is padded."""
    from smi.training import hf

    def careless(model, input_ids, position_ids):
        everything = torch.ones_like(input_ids)
        return model.base_model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=everything, use_cache=False
        ).last_hidden_state

    monkeypatch.setattr(hf, "packed_hidden", careless)
    assert not keeps_apart(made(llama(300)))


def test_a_model_that_padding_changes_is_refused(monkeypatch):
    from smi.training import hf

    right = hf.padded_hidden

    def backwards(model, input_ids, attention_mask):
        hidden = right(model, input_ids, attention_mask)
        return hidden + hidden.mean(1, keepdim=True)

    monkeypatch.setattr(hf, "padded_hidden", backwards)
    with pytest.raises(ValueError, match="MambaForCausalLM reads a document differently when others, or padding"):
        keeps_apart(made(mamba(300)))


@pytest.mark.parametrize("make", [llama, mamba])
def test_the_loss_is_that_of_each_document_alone(make, examples, tokenizer):
    model = made(make(tokenizer.vocab_size)).eval()
    module = HFModule(model, Optimization(lr=1e-3, max_steps=1), packed=keeps_apart(model))
    with torch.no_grad():
        sums = module._loss(pack(examples))
        want = 0.0
        for example in examples:
            alone = pack([example])
            logits = model(alone.input_ids).logits[0]
            want += float(torch.nn.functional.cross_entropy(logits, alone.labels[0], reduction="sum"))
    assert float(sums.loss) == pytest.approx(want, rel=1e-5)
    assert int(sums.tokens.sum()) == pack(examples).supervised_tokens


# --- models whose logits are more than a product


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rows: Gemma2Config(vocab_size=rows, **HEADS), "Gemma2ForCausalLM.* changes its logits after"),
        (lambda rows: GraniteConfig(vocab_size=rows, logits_scaling=8.0, **HEADS), "changes its logits after"),
        (lambda rows: PhiConfig(vocab_size=rows, **SMALL), "an output embedding without a bias"),
    ],
)
def test_logits_that_the_loss_would_miss_are_refused(make, message, tokenizer, checkpoint, tmp_path):
    how = config(tmp_path / "run", "model=hf", f"model.pretrained={checkpoint(make)}")
    with pytest.raises(ValueError, match=message):
        build_model(how, tokenizer)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.pretrained=null", r"set model\.pretrained"),
        ("tuning.kind=state", "tunes the state of RWKV-7"),
        ("data.over_long=split", "carries the state of RWKV-7"),
        ("data.held_out_tasks=3", "RWKV-7's runtime"),
        ("trainer.export=[native]", "transformers' layout"),
        ("kernel.compile=true", "compiles the blocks of RWKV-7"),
        ("model.pretrained=nowhere", "transformers cannot load a causal language model from nowhere"),
    ],
)
def test_what_rwkv_alone_can_do_is_refused(override, message, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=message):
        build_model(config(tmp_path, "model=hf", "model.pretrained=unused", override), tokenizer)


# --- runs


@pytest.mark.parametrize(
    ("make", "more"),
    [(llama, {}), (llama, {"tie_word_embeddings": True}), (mamba, {})],
    ids=["llama", "llama_tied", "mamba_tied"],
)
def test_train_resume_export_reload(make, more, tokenizer, checkpoint, tmp_path):
    start = checkpoint(make, **more)
    how = config(tmp_path / "run", "model=hf", f"model.pretrained={start}", "optim.lr=1e-3")
    export, again = train_and_resume(how)
    model, resumed = AutoModelForCausalLM.from_pretrained(export), load_file(again / "model.safetensors")
    weights = load_file(export / "model.safetensors")
    assert set(weights) == set(resumed)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    before = load_file(f"{start}/model.safetensors")
    assert set(weights) == set(before)
    moved = [name for name in weights if not torch.equal(weights[name][: before[name].shape[0]], before[name])]
    assert len(moved) > len(weights) / 2
    assert model.get_input_embeddings().weight.shape[0] == tokenizer.vocab_size
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == (
        make is mamba or bool(more)
    )
    assert model.generation_config.eos_token_id == [tokenizer.eos_id, tokenizer.structural.eot]
    # transformers' own tokenizer has the structural tokens where the model has them
    theirs = AutoTokenizer.from_pretrained(export)
    assert theirs.convert_tokens_to_ids("<|usr|>") == tokenizer.structural.id(BlockType.USR)
    # any checkpoint of it becomes the same by the command
    late = export_run(tmp_path / "run", ["hf"])
    assert late.name == "export-hf"
    assert {file.name for file in late.iterdir()} == {file.name for file in export.iterdir()}
    assert (late / "config.json").read_text() == (export / "config.json").read_text()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(late)(ids).logits, model(ids).logits)
    early = load_file(export_run(tmp_path / "run" / "checkpoints" / "step-2.ckpt", ["hf"]) / "model.safetensors")
    assert set(early) == set(weights)
    assert any(not torch.equal(early[name], weights[name]) for name in weights)
    for other in (["native"], ["hf", "fla"]):
        with pytest.raises(ValueError, match="trains a model of transformers: --to hf; native and fla are layouts"):
            export_run(tmp_path / "run", other)
    # what was exported is a checkpoint to start from, whose structural rows are kept
    rows = model.get_input_embeddings().weight[tokenizer.structural.ids[0] :]
    further = build_model(config(tmp_path / "next", "model=hf", f"model.pretrained={export}"), tokenizer)
    assert torch.equal(further.get_input_embeddings().weight[tokenizer.structural.ids[0] :], rows)


def test_lora_for_a_llama(checkpoint, tmp_path):
    start = checkpoint(llama)
    how = config(
        tmp_path / "run",
        "model=hf",
        f"model.pretrained={start}",
        "tuning.kind=lora",
        "tuning.targets=[q_proj,v_proj]",
        "tuning.train=[embed_tokens.weight,lm_head.weight]",
    )
    export, again = train_and_resume(how)
    weights, before = load_file(export / "model.safetensors"), load_file(f"{start}/model.safetensors")
    resumed = load_file(again / "model.safetensors")
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    late = load_file(export_run(tmp_path / "run", ["hf"]) / "model.safetensors")
    assert set(late) == set(weights)
    for name, value in weights.items():
        torch.testing.assert_close(late[name], value)
    moved = {name for name in before if not torch.equal(weights[name][: len(before[name])], before[name])}
    layers = {f"model.layers.{i}.self_attn.{name}_proj.weight" for i in (0, 1) for name in "qv"}
    assert moved == layers | {"model.embed_tokens.weight", "lm_head.weight"}


def test_the_tokenizer_is_the_checkpoints_own(tmp_path):
    base = tmp_path / "base"
    write(base, byte_bpe(), **CONFIG)
    own = load_tokenizer(str(base))
    made(llama(min(own.structural.ids))).save_pretrained(base)
    how = config(
        tmp_path / "run", "model=hf", f"model.pretrained={base}", f"data.train_files=[{base}/talk.jsonl]", small=[]
    )
    tokenizer = build_tokenizer(how)
    assert tokenizer.fingerprint == own.fingerprint
    model = build_model(how, tokenizer)
    assert model.get_input_embeddings().weight.shape[0] == own.vocab_size
    assert build_module(how, model, optimization(how)).packed


def test_a_foreign_tokenizer_is_refused(checkpoint, tmp_path):
    start = checkpoint(lambda rows: llama(rows - 1))
    how = config(tmp_path / "run", "model=hf", f"model.pretrained={start}")
    with pytest.raises(ValueError, match="do not belong together"):
        build_model(how, build_tokenizer(how))
