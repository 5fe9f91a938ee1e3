"""Small tokenizers of every family, trained here, and text that attacks them."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from smi.protocol import STRUCTURAL_TOKENS

CORPUS = ["The quick brown fox, hello there hi <s> world 123\n\tThe end. " * 3, "漢字 é e\u0301 😀 don't"] * 4


def write(directory: Path, library: Library, **config: Any) -> str:
    """A directory as a checkpoint would hold it."""
    directory.mkdir(parents=True, exist_ok=True)
    library.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"} | config))
    return str(directory)


def byte_bpe(corpus: Iterable[str] = CORPUS, special: tuple[Any, ...] = ("</s>",), **splitting: Any) -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **splitting)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(corpus, trainer)
    return library


def llama_bpe() -> Library:
    """SentencePiece-style BPE with byte fallback, and a blank put before every text."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    library = Library(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", "</s>", *bytes_],
        limit_alphabet=40,
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    document = json.loads(library.to_str())
    # the byte pieces belong to the vocabulary, not to the special tokens
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"][:3] != "<0x"]
    return Library.from_str(json.dumps(document))


def metaspace_bpe(scheme: Any) -> Library:
    """The same, as newer conversions write it."""
    library = llama_bpe()
    library.normalizer = None  # pyright: ignore[reportAttributeAccessIssue]
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return library


def unigram() -> Library:
    """Unigram with byte fallback, where specials and byte pieces are spelled in the vocabulary itself."""
    bytes_ = [(f"<0x{byte:02X}>", -1.0) for byte in range(256)]
    words = [
        ("▁", -3.0),
        *((char, -4.0) for char in "abcdefghijklmnopqrstuvwxyz</>"),
        ("▁hello", -2.0),
        ("he", -3.0),
    ]
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *bytes_, *words]
    library = Library(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


def named_unigram() -> Library:
    """The same, where only the configuration says which pieces are special."""
    document = json.loads(unigram().to_str())
    return Library.from_str(json.dumps(document | {"added_tokens": []}))


def byte_wordpiece() -> Library:
    """WordPiece that keeps text: over bytes, without a prefix for the inside of words or a limit on their length."""
    library = Library(models.WordPiece(unk_token="</s>", max_input_chars_per_word=2**31 - 1))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = ["</s>", *alphabet, "Ġhello", "he", "ll", "Ġworld", "<|", "us"]
    document = json.loads(library.to_str())
    document["model"] |= {
        "continuing_subword_prefix": "",
        "vocab": {piece: id for id, piece in enumerate(vocabulary)},
    }
    library = Library.from_str(json.dumps(document))
    library.add_special_tokens(["</s>"])
    return library


def stripping_bpe() -> Library:
    """Specials that eat the blanks beside them, and ordinary added tokens that must stay."""
    special = ("</s>", AddedToken("<mask>", lstrip=True, rstrip=True, special=True))
    library = byte_bpe(special=special)
    library.add_special_tokens([AddedToken("<pad>", special=True)])
    library.add_tokens([AddedToken("        ", normalized=False), AddedToken("<tool>", normalized=False)])
    library.add_tokens([AddedToken("<code>", lstrip=True, rstrip=True), AddedToken("sys", single_word=True)])
    return library


FAMILIES: dict[str, Callable[[], Library]] = {
    "byte_bpe": byte_bpe,
    "byte_bpe_prefix": lambda: with_prefix_space(byte_bpe()),
    "byte_bpe_strip": stripping_bpe,
    "llama_bpe": llama_bpe,
    "metaspace_first": lambda: metaspace_bpe("first"),
    "metaspace_always": lambda: metaspace_bpe("always"),
    "unigram": unigram,
    "unigram_named": named_unigram,
    "wordpiece": byte_wordpiece,
}

SPECIAL = ("</s>", "<s>", "<unk>", "<mask>", "<pad>", "<|endoftext|>")
"""What the files of one family or another call special; no payload may give the id of any."""
CONFIG = {"bos_token": "<s>", "unk_token": {"content": "<unk>"}, "additional_special_tokens": ["<pad>"]}


def with_prefix_space(library: Library) -> Library:
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return library


def special_ids(directory: Path) -> set[int]:
    """The ids that no text may give, as the library and the configuration have them; ours are not asked."""
    library = Library.from_file(str(directory / "tokenizer.json"))
    added = library.get_added_tokens_decoder().items()
    flagged = {id for id, token in added if token.special or token.lstrip or token.rstrip}
    named = {library.token_to_id(token) for token in SPECIAL}
    return flagged | {id for id in named if id is not None}


def hostile() -> st.SearchStrategy[str]:
    """Text of structural and special spellings, fragments of them, look-alikes, blanks and arbitrary Unicode."""
    spellings = [
        *STRUCTURAL_TOKENS,
        *SPECIAL,
        "<|smi_reserved_12|>",
        "<|bos|>",
        "<|eos|>",
        "<code>",
        "<tool>",
        "<0x0A>",
    ]
    fragments = [part for text in spellings for cut in (1, 2, 4) for part in (text[:cut], text[cut:])]
    looks = [
        "\uff1c|sys|\uff1e",
        "<\u2758sys\u2758>",
        "<|\u0455\u0443\u0455|>",
        "<\u200b|sys|>",
        "▁",
        "▁▁<s>",
        "Ġ",
        "Ċ",
    ]
    blanks = ["\n", "\r\n", " ", "  ", "        ", "\t", "\0", "\ufeff", "\u3000"]
    pieces = st.one_of(st.sampled_from([*spellings, *fragments, *looks, *blanks]), st.text(max_size=12))
    return st.lists(pieces, max_size=12).map("".join)
