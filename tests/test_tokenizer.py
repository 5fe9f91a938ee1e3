import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import (
    CORPUS,
    FAMILIES,
    byte_bpe,
    byte_wordpiece,
    hostile,
    stripping_bpe,
    unigram,
    write,
)
from hypothesis import given
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from smi.protocol import STRUCTURAL_TOKENS, BlockType
from smi.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parent / "data"
T1 = DATA / "t1_tokenizer"
# the tokenizer.json that public checkpoints carry for the World vocabulary
WORLD_HF_SHA256 = "1c0bc8e5f355de60a4587a1e9abb9aa4ef65508ff59641344e7f9f10f76feacf"


@pytest.fixture(scope="module")
def world_saved(world: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("world")
    world.save_pretrained(directory)
    return directory


def goldens() -> list[dict[str, Any]]:
    lines = (DATA / "tokenizer_world.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def test_world_goldens(world: Tokenizer) -> None:
    rows = goldens()
    assert len(rows) == 400
    for row in rows:
        assert world.encode(row["text"]) == row["ids"]
        assert world.decode(row["ids"]) == row["text"]
    assert world.encode_batch([row["text"] for row in rows]) == [row["ids"] for row in rows]


def test_world_ids(world: Tokenizer) -> None:
    assert world.structural.ids == tuple(range(65536, 65546))
    assert (world.eos_id, world.vocab_size, world.name) == (0, 65546, "rwkv_world")
    assert len(world.encode("<|endoftext|>")) == 7


def test_world_decoding_is_total(world: Tokenizer) -> None:
    ids = [0, 34550, 65530, 65535, 65540, 65546, -1, 243]
    assert world.decode(ids, errors="replace") == "\ufffdhello" + "\ufffd" * 6
    for id in range(65546):
        assert isinstance(world.decode([id], errors="replace"), str)
    for id in (0, 65530, 65540, 65546, -1, 243):
        with pytest.raises(ValueError, match=r"no text|utf-8"):
            world.decode([34550, id])
    assert world.token_bytes(243) == b"\xf2"
    assert world.token_bytes(65540) is None
    # a character cut over tokens comes back whole
    split = world.encode("\U000f0000")
    assert len(split) > 1
    assert world.decode(split) == "\U000f0000"


def test_world_is_written_as_public_checkpoints_carry_it(world_saved: Path) -> None:
    document = json.loads((world_saved / "tokenizer.json").read_text(encoding="utf-8"))
    assert [token["id"] for token in document["added_tokens"]] == [0, *range(65536, 65546)]
    document["added_tokens"] = document["added_tokens"][:1]
    text = json.dumps(document, ensure_ascii=False, indent=2)
    assert hashlib.sha256(text.encode()).hexdigest() == WORLD_HF_SHA256
    config = json.loads((world_saved / "tokenizer_config.json").read_text())
    assert config["added_tokens_decoder"]["65545"]["content"] == "<|eot|>"
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_world_comes_back_from_its_files(world: Tokenizer, world_saved: Path) -> None:
    again = load_tokenizer(str(world_saved))
    assert again.fingerprint == world.fingerprint
    assert again.structural == world.structural
    # linear time, where the form in the file would take seconds
    text = "<|endoftext|> some text that goes on and on; " * 2000
    assert again.encode(text) == world.encode(text)


def check_transformers(tokenizer: Tokenizer, directory: Path) -> None:
    from transformers import AutoTokenizer

    library = AutoTokenizer.from_pretrained(directory)
    assert len(library) == tokenizer.vocab_size
    assert library.eos_token_id == tokenizer.eos_id
    assert library.convert_tokens_to_ids(list(STRUCTURAL_TOKENS)) == list(tokenizer.structural.ids[:10])
    assert set(STRUCTURAL_TOKENS) <= set(library.all_special_tokens)
    assert library.chat_template
    text = "\nhello  hi\n"
    framed = library(f"<|usr|>{text}<|eot|>", add_special_tokens=False).input_ids
    assert framed == [tokenizer.structural.ids[4], *tokenizer.encode(text), tokenizer.structural.eot]


def test_world_in_transformers(world: Tokenizer, world_saved: Path) -> None:
    check_transformers(world, world_saved)


@pytest.mark.parametrize("slots", [10, 32])
def test_t1(slots: int, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(T1), slots=slots)
    assert tokenizer.structural.ids == tuple(range(512, 512 + slots))
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (0, 512 + slots)
    library = Library.from_file(str(T1 / "tokenizer.json"))
    for text in ("Hello there, reminding victims", " \n\t x", "漢字 😀"):
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert 0 not in tokenizer.encode("a<|endoftext|>b")
    tokenizer.save_pretrained(tmp_path)
    ids = json.loads((tmp_path / "smi_token_ids.json").read_text())
    assert ids == tokenizer.structural.to_dict()
    for more in (10, slots):
        again = load_tokenizer(str(tmp_path), slots=more)
        assert (again.fingerprint, again.structural) == (tokenizer.fingerprint, tokenizer.structural)
    check_transformers(tokenizer, tmp_path)


def test_reserved_slots_can_follow_the_ten(tmp_path: Path) -> None:
    ten = load_tokenizer(str(T1))
    ten.save_pretrained(tmp_path)
    (tmp_path / "smi_token_ids.json").unlink()
    both = load_tokenizer(str(tmp_path), slots=32)
    assert both.structural.ids[:10] == ten.structural.ids
    assert both.fingerprint != ten.fingerprint


def test_fingerprints_differ(family: dict[str, Tokenizer]) -> None:
    prints = {name: one.fingerprint for name, one in family.items()}
    # the same ids, said in two ways
    assert prints.pop("unigram_named") == prints["unigram"]
    assert len(set(prints.values())) == len(prints)
    assert load_tokenizer(str(T1)).fingerprint == family["t1"].fingerprint


def test_pickling() -> None:
    tokenizer = load_tokenizer(str(T1))
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode("Hello") == tokenizer.encode("Hello")


@pytest.mark.parametrize("name", FAMILIES)
def test_families_save_and_load(name: str, family: dict[str, Tokenizer], tmp_path: Path) -> None:
    tokenizer = family[name]
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert (again.fingerprint, again.structural) == (tokenizer.fingerprint, tokenizer.structural)
    check_transformers(tokenizer, tmp_path)


@given(text=hostile())
def test_text_stays_text(text: str, family: dict[str, Tokenizer], special: dict[str, set[int]]) -> None:
    for name, tokenizer in family.items():
        ids = tokenizer.encode(text)
        assert not (special[name] | tokenizer.structural.all | {tokenizer.eos_id}) & set(ids)
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode_batch([text, "", text]) == [ids, [], ids]
        assert isinstance(tokenizer.decode(ids[1:-1], errors="replace"), str)


def test_special_ids_are_found(family: dict[str, Tokenizer], special: dict[str, set[int]]) -> None:
    """The oracle of the test above sees what it should."""
    assert {name: len(ids - family[name].structural.all) for name, ids in special.items()} == {
        "world": 1,
        "t1": 1,
        "byte_bpe": 1,
        "byte_bpe_prefix": 1,
        "byte_bpe_strip": 4,
        "llama_bpe": 3,
        "metaspace_first": 3,
        "metaspace_always": 3,
        "unigram": 3,
        "unigram_named": 3,
        "wordpiece": 1,
    }
    for name, ids in special.items():
        assert family[name].structural.all <= ids
        for id in ids:
            assert family[name].token_bytes(id) is None


def test_ordinary_added_tokens_keep_their_ids(tmp_path: Path) -> None:
    library = stripping_bpe()
    tokenizer = load_tokenizer(write(tmp_path, library))
    # the special token before them is gone from the copy that encodes, and must not move them
    for piece in ("        ", "<tool>"):
        assert tokenizer.encode(piece) == [library.token_to_id(piece)]
    text = "a <mask> b"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert library.token_to_id("<mask>") not in tokenizer.encode(text)


def lower_case() -> Library:
    library = byte_bpe()
    library.normalizer = normalizers.Lowercase()
    return library


def composing() -> Library:
    library = byte_bpe()
    library.normalizer = normalizers.NFC()
    return library


def folding() -> Library:
    library = byte_bpe()
    library.normalizer = normalizers.Replace(Regex(r"\s+"), " ")
    return library


def bert() -> Library:
    library = Library(models.WordPiece(unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    library.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(special_tokens=["[UNK]", "</s>"], show_progress=False)
    )
    return library


def words() -> Library:
    library = Library(models.WordLevel(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.train_from_iterator(
        CORPUS, trainers.WordLevelTrainer(special_tokens=["<unk>", "</s>"], show_progress=False)
    )
    return library


def unknown_bytes() -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator(CORPUS, trainers.BpeTrainer(special_tokens=["</s>"], show_progress=False))
    return library


def no_fallback() -> Library:
    document = json.loads(unigram().to_str())
    document["model"]["byte_fallback"] = False
    document["decoder"]["decoders"] = [
        part for part in document["decoder"]["decoders"] if part["type"] != "ByteFallback"
    ]
    return Library.from_str(json.dumps(document))


def short_words() -> Library:
    document = json.loads(byte_wordpiece().to_str())
    document["model"]["max_input_chars_per_word"] = 100
    return Library.from_str(json.dumps(document))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lower_case, r"changes text: .*'MiXeD UPPER lower' comes back as 'mixed upper lower'"),
        (composing, r"changes text: 'e\u0301"),
        (folding, r"changes text: '\\n' comes back as ' '"),
        (bert, "model WordPiece, decoder WordPiece"),
        (words, "model WordLevel, decoder none"),
        (unknown_bytes, "no text token for the byte 0x00"),
        (no_fallback, "model Unigram, decoder Fuse, Replace"),
        (short_words, r"changes text: 'a{80}' comes back as '\ufffd'"),
    ],
)
def test_refused_with_an_example(make: Callable[[], Library], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        load_tokenizer(write(tmp_path, make()))


def test_eos_is_found_or_asked_for(tmp_path: Path) -> None:
    source = write(tmp_path, byte_bpe())
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"eos_token": {"content": "</s>", "special": true}}')
    assert load_tokenizer(source).eos_id == 0
    config.write_text("{}")
    with pytest.raises(ValueError, match=r"set eos_token in tokenizer_config\.json"):
        load_tokenizer(source)
    (tmp_path / "config.json").write_text('{"eos_token_id": [0, 5]}')
    assert load_tokenizer(source).eos_id == 0
    config.write_text('{"eos_token": "<|end|>"}')
    with pytest.raises(ValueError, match="not in its vocabulary"):
        load_tokenizer(source)
    # a token that text is made of cannot end it
    config.write_text('{"eos_token": "a"}')
    with pytest.raises(ValueError, match="0x61"):
        load_tokenizer(source)


def test_sources_refused(tmp_path: Path) -> None:
    for source in ("rwkv_wrold", str(tmp_path)):
        with pytest.raises(ValueError, match="expected 'rwkv_world', 'compact' or a directory"):
            load_tokenizer(source)
    with pytest.raises(ValueError, match="slots"):
        load_tokenizer("rwkv_world", slots=12)
    path = tmp_path / "tokenizer.json"
    for text in ("{", "[]", "{}", '{"model": {"type": "BPE", "vocab": {"a": 0}}}'):
        path.write_text(text)
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
        with pytest.raises(ValueError, match="cannot be used"):
            load_tokenizer(str(tmp_path))


def test_ids_beside_the_tokenizer_must_agree(tmp_path: Path) -> None:
    load_tokenizer(str(T1)).save_pretrained(tmp_path)
    path = tmp_path / "smi_token_ids.json"
    path.write_text(path.read_text().replace("512", "513"))
    with pytest.raises(ValueError, match="disagree"):
        load_tokenizer(str(tmp_path))


def test_structural_spelling_as_an_ordinary_piece(tmp_path: Path) -> None:
    document = json.loads(byte_bpe().to_str())
    document["model"]["vocab"]["<|sys|>"] = max(document["model"]["vocab"].values()) + 1
    with pytest.raises(ValueError, match="ordinary piece"):
        load_tokenizer(write(tmp_path, Library.from_str(json.dumps(document))))


def test_lone_surrogates_are_refused(world: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogates"):
        world.encode("a\ud800b")
    with pytest.raises(ValueError, match="surrogates"):
        load_tokenizer(str(T1)).encode("\udfff")


@pytest.mark.parametrize("source", ["rwkv_world", str(T1)])
def test_reserved_rows_exist_and_are_never_used(source: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(source, slots=32)
    rows = tokenizer.structural.to_dict()
    reserved = [rows[name] for name in list(rows)[10:]]
    assert len(reserved) == 22
    assert set(reserved) < set(range(tokenizer.vocab_size))
    text = " ".join(rows)
    assert not set(tokenizer.encode(text)) & tokenizer.structural.all
    assert tokenizer.decode(tokenizer.encode(text)) == text
    for id in reserved:
        assert tokenizer.structural.type_of(id) is None
        assert tokenizer.token_bytes(id) is None


def test_reserved_rows_are_never_sampled() -> None:
    torch = pytest.importorskip("torch")
    from smi.runtime.grammar import Grammar, Limits, Payload, Writer

    for more in ({}, {"sequence_tokens": True}):
        tokenizer = load_tokenizer(str(T1), slots=32, **more)
        grammar = Grammar(tokenizer, tokenizer.vocab_size + 8)
        inside = grammar.mask(Payload(grammar, framed=True), [tokenizer.structural.eot], text=True)
        for mask in (Writer(grammar, Limits()).allowed(), inside):
            assert torch.count_nonzero(mask)
            assert not mask[list(tokenizer.structural.ids[10:])].any()
            assert not mask[[tokenizer.eos_id, tokenizer.structural.id(BlockType.USR)]].any()
            assert not mask[tokenizer.vocab_size :].any()


def test_sequence_tokens(tmp_path: Path) -> None:
    source = write(tmp_path / "bare", byte_bpe(special=()), eos_token=None)
    with pytest.raises(ValueError, match="sequence_tokens=True"):
        load_tokenizer(source)
    with pytest.raises(ValueError, match="need slots=32"):
        load_tokenizer(source, sequence_tokens=True)
    tokenizer = load_tokenizer(source, slots=32, sequence_tokens=True)
    rows = tokenizer.structural.to_dict()
    assert list(rows)[9:13] == ["<|eot|>", "<|bos|>", "<|eos|>", "<|smi_reserved_12|>"]
    assert tokenizer.eos_id == rows["<|eos|>"] == tokenizer.structural.ids[11]
    assert pickle.loads(pickle.dumps(tokenizer)).fingerprint == tokenizer.fingerprint
    tokenizer.save_pretrained(tmp_path / "saved")
    # the files say what was allotted, whatever is asked for later
    for more in ({}, {"slots": 32}, {"slots": 32, "sequence_tokens": True}):
        again = load_tokenizer(str(tmp_path / "saved"), **more)
        assert (again.fingerprint, again.eos_id) == (tokenizer.fingerprint, tokenizer.eos_id)
        assert again.structural == tokenizer.structural
    check_transformers(tokenizer, tmp_path / "saved")
    load_tokenizer(str(T1), slots=32).save_pretrained(tmp_path / "reserved")
    with pytest.raises(ValueError, match="never renamed"):
        load_tokenizer(str(tmp_path / "reserved"), slots=32, sequence_tokens=True)
