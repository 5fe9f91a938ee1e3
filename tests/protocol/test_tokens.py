import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smi.protocol import (
    STRUCTURAL_TOKENS,
    BlockType,
    Side,
    StructuralIds,
    TokenNamespace,
    install_structural_tokens,
)
from smi.protocol.tokens import check_namespaces, grow_embeddings
from smi.tokenizer import Tokenizer

T1 = Path(__file__).parents[1] / "data/t1_tokenizer"


def test_the_ten() -> None:
    assert " ".join(STRUCTURAL_TOKENS) == (
        "<|ctrl|> <|sys|> <|dev|> <|caps|> <|usr|> <|obs|> <|think|> <|out|> <|act|> <|eot|>"
    )
    assert [kind.token for kind in BlockType if kind < BlockType.EOS] == list(STRUCTURAL_TOKENS)
    assert [kind.name for kind in BlockType if kind < BlockType.EOT and kind.side is Side.MODEL] == [
        "THINK",
        "OUT",
        "ACT",
    ]
    with pytest.raises(ValueError, match="EOS"):
        _ = BlockType.EOS.token
    with pytest.raises(ValueError, match="EOT"):
        _ = BlockType.EOT.side


@pytest.mark.parametrize("slots", [10, 32])
def test_ids(slots: int) -> None:
    ids = StructuralIds(tuple(range(100, 100 + slots)))
    assert StructuralIds.from_dict(ids.to_dict()) == ids
    assert (ids.eot, ids.id(BlockType.SYS), ids.slots) == (109, 101, slots)
    assert ids.type_of(108) is BlockType.ACT
    assert ids.type_of(110) is None
    assert len(ids.all) == slots


@pytest.mark.parametrize("ids", [(1, 2), (1,) * 10, tuple(range(-1, 9)), tuple("0123456789"), tuple(range(11))])
def test_ids_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"slots|structural ids"):
        StructuralIds(ids)


def test_ids_from_dict_refused() -> None:
    good = StructuralIds(tuple(range(10))).to_dict()
    with pytest.raises(ValueError, match=r"missing \['<\|eot\|>'\]"):
        StructuralIds.from_dict({key: value for key, value in good.items() if key != "<|eot|>"})
    with pytest.raises(ValueError, match="bos"):
        StructuralIds.from_dict({**good, "<|bos|>": 10})


def test_protocol_needs_no_torch_and_smi_nothing() -> None:
    code = (
        "import sys, smi; assert not {'numpy', 'torch'} & set(sys.modules)\n"
        "import smi.protocol; heavy = {'torch', 'transformers', 'tokenizers', 'jsonschema'}\n"
        "assert not heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("slots", "tied"), [(10, False), (32, True)])
def test_installing_into_transformers(slots: int, tied: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    def fresh() -> tuple[Any, Any]:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=tied,
        )
        return AutoTokenizer.from_pretrained(T1), LlamaForCausalLM(config)

    tokenizer, model = fresh()
    before = model.get_input_embeddings().weight.detach().clone()
    ids = install_structural_tokens(tokenizer, model, slots=slots)
    assert ids.ids == tuple(range(512, 512 + slots))
    weight = model.get_input_embeddings().weight.detach().clone()
    head = model.get_output_embeddings().weight.detach().clone()
    assert weight.shape == (512 + slots, 8) == head.shape
    assert torch.equal(weight[:512], before)
    assert torch.equal(weight, head) == tied
    assert (weight[512:] - before.mean(0)).abs().max() < before.std()
    assert len(torch.unique(weight[512:], dim=0)) == slots

    # again: nothing changes; from the start: the same rows
    assert install_structural_tokens(tokenizer, model, slots=slots) == ids
    assert torch.equal(model.get_input_embeddings().weight, weight)
    tokenizer, model = fresh()
    install_structural_tokens(tokenizer, model, slots=slots)
    assert torch.equal(model.get_input_embeddings().weight, weight)

    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert install_structural_tokens(again, slots=slots) == ids
    assert again("<|usr|>\nx<|eot|>").input_ids[0] == ids.id(BlockType.USR)


def test_rows_that_were_padding_are_started_too() -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer

    class Padded:
        def __init__(self) -> None:
            self.table = torch.nn.Embedding(640, 8)
            self.table.weight.data[512:] = 0

        def get_input_embeddings(self):
            return self.table

        def get_output_embeddings(self):
            return None

    model = Padded()
    install_structural_tokens(AutoTokenizer.from_pretrained(T1), model)
    weight = model.table.weight
    assert (weight[512:522] != 0).all()
    assert (weight[522:] == 0).all()


@pytest.mark.parametrize("init", ["mean", "normal", "zeros"])
def test_initialisations(init: Any) -> None:
    torch = pytest.importorskip("torch")

    class Model:
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.tables = [torch.nn.Embedding(2010, 16), torch.nn.Embedding(2010, 16)]
            for table in self.tables:
                table.weight.data = 3 + 0.5 * table.weight.data

        def get_input_embeddings(self):
            return self.tables[0]

        def get_output_embeddings(self):
            return self.tables[1]

    model, again = Model(), Model()
    old = [table.weight.detach().clone() for table in model.tables]
    for one in (model, again):
        grow_embeddings(one, 2010, list(range(1010, 2010)), 1010, seed=3, init=init)
    mean, spread = {"mean": (3, 0.05), "normal": (0, 0.5), "zeros": (0, 0)}[init]
    for table, other, before in zip(model.tables, again.tables, old, strict=True):
        assert torch.equal(table.weight, other.weight)
        assert torch.equal(table.weight[:1010], before[:1010])
        new = table.weight.detach()[1010:]
        assert new.mean().item() == pytest.approx(mean, abs=0.05)
        assert new.std().item() == pytest.approx(spread, rel=0.1)
    assert torch.equal(model.tables[0].weight[1010:], model.tables[1].weight[1010:]) == (init == "zeros")
    with pytest.raises(ValueError, match="'media'; it must be one of mean, normal, zeros"):
        grow_embeddings(model, 2010, [0], 1010, init="media")  # pyright: ignore[reportArgumentType]


def test_sequence_tokens_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(T1)
    with pytest.raises(ValueError, match="need slots=32"):
        install_structural_tokens(tokenizer, sequence_tokens=True)
    ids = install_structural_tokens(tokenizer, slots=32, sequence_tokens=True)
    assert ids.ids == tuple(range(512, 544))
    assert StructuralIds.from_dict(ids.to_dict()) == ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == ids.ids[10:12]
    # what was allotted stays, whatever is asked for later
    for more in ({}, {"slots": 32}, {"slots": 32, "sequence_tokens": True}):
        assert install_structural_tokens(tokenizer, **more) == ids
        assert len(tokenizer) == 544
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert install_structural_tokens(again) == ids
    assert again.eos_token == "<|eos|>"

    reserved = AutoTokenizer.from_pretrained(T1)
    plain = install_structural_tokens(reserved, slots=32)
    assert plain != ids
    with pytest.raises(ValueError, match="never renamed"):
        install_structural_tokens(reserved, slots=32, sequence_tokens=True)
    with pytest.raises(ValueError, match="missing"):
        StructuralIds.from_dict({**plain.to_dict(), "<|bos|>": 7})


def test_a_token_that_ate_the_blanks_beside_it_is_put_right() -> None:
    from transformers import AddedToken, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(T1)
    tokenizer.add_tokens([AddedToken("<|usr|>", lstrip=True, rstrip=True, normalized=True, special=False)])
    ids = install_structural_tokens(tokenizer)
    assert ids.id(BlockType.USR) == 512
    text = "a  <|usr|>\n\n b"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("name", "first_id", "size"), [("", 0, 1), ("a", -1, 1), ("a", 0, 0), ("a", 1.0, 1), (3, 0, 1)]
)
def test_namespaces_that_cannot_be(name: Any, first_id: Any, size: Any) -> None:
    with pytest.raises(ValueError, match="namespace"):
        TokenNamespace(name, first_id, size)


def test_an_id_means_one_thing(world: Tokenizer) -> None:
    good = [TokenNamespace("b", 70_010, 10), TokenNamespace("a", 70_000, 10), TokenNamespace("unused rows", 65_530, 6)]
    assert set(check_namespaces(good, world)) == {"a", "b", "unused rows"}
    for wrong, message in [
        (TokenNamespace("a", 80_000, 1), "two token namespaces are named 'a'"),
        (TokenNamespace("c", 70_019, 1), "'b' and 'c' share the id 70019"),
        (TokenNamespace("c", 69_000, 1_001), "'c' and 'a' share the id 70000"),
        (TokenNamespace("c", 65_535, 1), "'unused rows' and 'c' share the id 65535"),
        (TokenNamespace("c", 65_545, 1), r"'c' holds 65545, the id of <\|eot\|>"),
        (TokenNamespace("c", 65_536, 100), r"'c' holds 65536, the id of <\|ctrl\|>"),
        (TokenNamespace("c", 0, 1), "'c' holds the end-of-sequence id 0"),
        (TokenNamespace("c", 65_529, 1), "'c' holds 65529, which stands for the text"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_namespaces([*good, wrong], world)
