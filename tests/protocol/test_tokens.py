import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smi.protocol import STRUCTURAL_TOKENS, BlockType, Side, StructuralIds, install_structural_tokens

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
