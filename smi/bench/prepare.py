"""From conversations to tokens, against `pyrwkv-tokenizer`."""

from __future__ import annotations

from collections.abc import Callable
from pydoc_data.topics import topics
from random import Random

import numpy as np

from smi.bench.measure import Figure, alternate
from smi.protocol.codec import Example, encode_many
from smi.protocol.conversation import Conversation, to_stream
from smi.protocol.stream import Stream
from smi.protocol.tokens import BlockType, Side
from smi.tokenizer import Tokenizer, load_tokenizer

CONVERSATIONS = 1000
# conversations that are compiled with one call
BATCH = 250

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_order",
            "description": "Look up an order by its number.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "string"}, "fields": {"type": "array", "items": {"type": "string"}}},
                "required": ["number"],
            },
        },
    }
]


def run() -> dict[str, Figure]:
    """All figures of the suite. ValueError names a peer that is not installed."""
    # imported here, since it asks this module for its conversations
    from smi.bench._prepare_run import figures

    return compiling(load_tokenizer("rwkv_world"), conversations(CONVERSATIONS)) | figures()


def conversations(count: int) -> list[Conversation]:
    """Conversations of about 660 tokens: talk, and in every fourth a call with its result.

    What is said comes from the language reference that Python carries, with a character beyond ASCII now and then.
    """
    numbers = Random(0)
    prose = "".join(topics[name] for name in sorted(topics))

    def text(count: int) -> str:
        start = numbers.randrange(len(prose) - count)
        said = prose[start : start + count]
        return f"{said} é 漢字 😀" if numbers.random() < 0.2 else said

    def talk(number: int) -> Conversation:
        if number % 4:
            turns = [("user", 250), ("assistant", 1000)] * 2
            return Conversation([{"role": role, "content": text(count)} for role, count in turns])
        call = {"name": "find_order", "arguments": f'{{"number": "{number}"}}'}
        return Conversation(
            [
                {"role": "system", "content": text(250)},
                {"role": "user", "content": text(250)},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": text(500)},
                {"role": "assistant", "content": text(1000)},
            ],
            tools=_TOOLS,
        )

    return [talk(number) for number in range(count)]


def compiling(tokenizer: Tokenizer, talks: list[Conversation]) -> dict[str, Figure]:
    """The encoder, and compiling: alone, against the encoder, and against plain Python around the peer."""
    peer = _peer()
    streams = [to_stream(talk) for talk in talks]
    payloads = [block.text for stream in streams for part in stream.transmissions for block in part.blocks]
    prose = "\n\n".join(payloads)
    texts = [prose[start : start + 2048] for start in range(0, len(prose) - 2048, 2048)]
    by_peer = _PlainAssembly(tokenizer, peer)
    for ours, theirs in zip(encode_many(streams[:20], tokenizer), map(by_peer, streams), strict=False):
        assert isinstance(ours, Example)
        assert np.array_equal(ours.input_ids, theirs.input_ids)
        assert np.array_equal(ours.loss_mask, theirs.loss_mask)

    framed = [f"\n{payload}\n" for payload in payloads]
    per_batch = len(framed) * BATCH // len(talks)
    tokens = sum(example.input_ids.size for example in encode_many(streams, tokenizer) if isinstance(example, Example))
    times = alternate(
        {
            "encoder": lambda: tokenizer.encode_flat(texts),
            "peer": lambda: [peer(text) for text in texts],
            "bare": lambda: [tokenizer.encode_flat(chunk) for chunk in _chunks(framed, per_batch)],
            "streams": lambda: [encode_many(chunk, tokenizer) for chunk in _chunks(streams, BATCH)],
            "conversations": lambda: [
                encode_many([to_stream(talk) for talk in chunk], tokenizer) for chunk in _chunks(talks, BATCH)
            ],
            "peer_streams": lambda: [by_peer(stream) for stream in streams],
            "peer_conversations": lambda: [by_peer(to_stream(talk)) for talk in talks],
        },
        rounds=5,
    )
    size = sum(len(text.encode()) for text in texts) / 1e6
    speed = {name: tokens / seconds / 1e6 for name, seconds in times.items()}
    return {
        "encoder_vs_pyrwkv": Figure(
            times["peer"] / times["encoder"],
            f"{size / times['encoder']:.0f} MB/s, pyrwkv-tokenizer {size / times['peer']:.0f}, texts of 2 KB",
            at_least=3,
        ),
        "compile_vs_encoder": Figure(
            times["bare"] / times["conversations"],
            f"{speed['conversations']:.2f} M tokens/s from conversations to ids and masks, the bare encoder "
            f"{speed['bare']:.2f} ({tokens / len(talks):.0f} tokens each; from streams {speed['streams']:.2f})",
            at_least=0.25,
        ),
        "compile_vs_pyrwkv_python": Figure(
            times["peer_conversations"] / times["conversations"],
            f"{speed['conversations']:.2f} M tokens/s from conversations, with pyrwkv-tokenizer and Python lists "
            f"{speed['peer_conversations']:.2f} (from streams {speed['streams']:.2f} and "
            f"{speed['peer_streams']:.2f})",
            at_least=2.5,
        ),
    }


def _chunks(items: list, size: int) -> list[list]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _peer() -> Callable[[str], list[int]]:
    try:
        from pyrwkv_tokenizer import RWKVTokenizer
    except ImportError as error:
        raise ValueError(f"the peer is missing; pip install 'smi[bench]' ({error})") from None
    return RWKVTokenizer().encode


class _PlainAssembly:
    """A stream compiled the plain way: lists that grow block by block, turned into arrays at the end."""

    def __init__(self, tokenizer: Tokenizer, encode: Callable[[str], list[int]]) -> None:
        self.encode = encode
        self.id_of = {block: tokenizer.structural.id(block) for block in BlockType if block <= BlockType.EOT}
        self.eot = [tokenizer.structural.eot, *encode("\n")]
        self.eos_id = tokenizer.eos_id

    def __call__(self, stream: Stream) -> Example:
        ids: list[int] = []
        mask: list[bool] = []
        types: list[int] = []
        target = False
        for transmission in stream.transmissions:
            target = transmission.side is Side.MODEL
            for block in transmission.blocks:
                part = [self.id_of[block.type], *self.encode(f"\n{block.text}\n")]
                ids += part
                mask += [target] * len(part)
                types += [block.type] * len(part)
            ids += self.eot
            mask += [target] * len(self.eot)
            types += [BlockType.EOT] * len(self.eot)
        return Example(
            np.array([*ids, self.eos_id], dtype=np.int32),
            np.array([*mask, target], dtype=np.bool_),
            np.array([*types, BlockType.EOS], dtype=np.uint8),
        )
