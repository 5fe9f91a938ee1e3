"""The quickstart's tokenizer: byte-level BPE with about a thousand tokens, made for the synthetic world.

The World vocabulary's head would take most of a small model's time. `python -m smi.data.compact DIR` makes the
files that ship in ``smi/tokenizers/compact`` again.
"""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from smi.data.synthetic import SyntheticTools
from smi.protocol.conversation import to_stream

EOS = "<|endoftext|>"
VOCABULARY = 1024
CONVERSATIONS = 3000
# no task of this seed is of any interest: training and held-out tasks draw from other ones
SEED = 999

# pieces that no token may reach across: the protocol's envelopes whole, words with the blank before them (so that
# the token before a word is the word before it), single digits (so that numbers are copied digit by digit), signs
PIECES = (
    r'\{"id":"a',
    r'","type":"tool","name":"',
    r'","arguments":\{"',
    r'\{"caused_by":"a',
    r'","ok":true,"content":"?',
    r'","ok":false,"error":\{"type":"',
    r'","message":"',
    r'\{"tools":\[\{"name":"',
    r'\},\{"name":"',
    r'","parameters":\{"type":"object","properties":\{"',
    r'":\{"type":"(?:string|integer|number)"\}(?:,"|\},"required":\[")',
    r'":\{"enum":\["',
    r'\{"reasoning":\{"mode":"',
    r'","effort":"',
    r'","max_tokens":',
    r" ?[A-Za-z]+",
    r"[0-9]",
    r"[^A-Za-z0-9\s]+",
    r"\s",
)


def train_compact_tokenizer() -> Tokenizer:
    """The tokenizer, trained on seeded synthetic conversations: always the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(PIECES)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_payloads(), trainer)
    return tokenizer


def _payloads() -> Iterator[str]:
    for conversation in islice(SyntheticTools(SEED).conversations(), CONVERSATIONS):
        for transmission in to_stream(conversation).transmissions:
            for block in transmission.blocks:
                yield f"\n{block.payload}\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    train_compact_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
