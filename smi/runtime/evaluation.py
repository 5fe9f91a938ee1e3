"""What a model's actions and answers are worth, on conversations whose right ones are known."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from smi.model.modeling import RWKV7ForCausalLM
from smi.protocol.codec import encode_prompt
from smi.protocol.conversation import Conversation, to_stream
from smi.protocol.payloads import parse_act
from smi.protocol.stream import Block, ProtocolError, Stream
from smi.protocol.tokens import BlockType, Side
from smi.runtime.sampler import Generation, generate
from smi.tokenizer import Tokenizer


@dataclass
class ActionScores:
    """Counts over the model transmissions of some conversations, each generated after the true prefix.

    expected: ACT blocks in the conversations. generated: ACT blocks that the model wrote instead; of these
    parsed: JSON in the protocol's envelope; declared: also name a tool of CAPS; valid: also with arguments that fit
    its schema; exact: also equal to the expected block in the same place.
    answers: transmissions expected to be an OUT without an ACT; answers_exact: those whose OUT came out word for word.
    unfinished: transmissions without an EOT within the limit.
    """

    expected: int = 0
    generated: int = 0
    parsed: int = 0
    declared: int = 0
    valid: int = 0
    exact: int = 0
    answers: int = 0
    answers_exact: int = 0
    unfinished: int = 0

    @property
    def valid_share(self) -> float:
        """Of the ACT blocks written, those that a runtime could run."""
        return self.valid / max(self.generated, 1)

    @property
    def exact_share(self) -> float:
        """Of the ACT blocks expected or written, whichever are more, those exactly right."""
        return self.exact / max(self.expected, self.generated, 1)

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "valid_share": self.valid_share, "exact_share": self.exact_share}


def score_actions(
    model: RWKV7ForCausalLM,
    tokenizer: Tokenizer,
    conversations: Iterable[Conversation],
    *,
    max_tokens: int = 256,
) -> ActionScores:
    """Generates every model transmission of `conversations` greedily and compares it with the true one."""
    prompts, truths, tools = [], [], []
    for conversation in conversations:
        stream = to_stream(conversation)
        for i, transmission in enumerate(stream.transmissions):
            if transmission.side is Side.MODEL:
                prompts.append(encode_prompt(Stream(stream.transmissions[:i]), tokenizer))
                truths.append(transmission.blocks)
                tools.append(conversation.tools or [])
    scores = ActionScores()
    generations = generate(model, tokenizer, prompts, max_tokens=max_tokens)
    for generation, truth, declared in zip(generations, truths, tools, strict=True):
        _score(scores, generation, truth, declared, tokenizer)
    return scores


def _score(
    scores: ActionScores,
    generation: Generation,
    truth: tuple[Block, ...],
    tools: list,
    tokenizer: Tokenizer,
) -> None:
    written = _payloads(generation, tokenizer)
    expected = [block.payload for block in truth if block.type is BlockType.ACT]
    acts = [payload for kind, payload in written if kind is BlockType.ACT]
    scores.unfinished += not generation.finished
    scores.expected += len(expected)
    scores.generated += len(acts)
    for i, payload in enumerate(acts):
        if payload is None:
            continue
        reached = 3
        try:
            parse_act(payload, tools)
        except ProtocolError as error:
            reached = {"arguments": 2, "undeclared_tool": 1}.get(error.reason, 0)
        scores.parsed += reached >= 1
        scores.declared += reached >= 2
        scores.valid += reached >= 3
        scores.exact += i < len(expected) and payload == expected[i]
    if not expected:
        said = [payload for kind, payload in written if kind is BlockType.OUT]
        scores.answers += 1
        scores.answers_exact += not acts and said == [b.payload for b in truth if b.type is BlockType.OUT]


def _payloads(generation: Generation, tokenizer: Tokenizer) -> list[tuple[BlockType, str | None]]:
    """The blocks that were written; None for a payload that is no text, not framed, or cut off by the limit."""
    blocks: list[tuple[BlockType, list[int]]] = []
    for id in generation.ids:
        kind = tokenizer.structural.type_of(id)
        if kind is None:
            blocks[-1][1].append(id)
        else:
            blocks.append((kind, []))
    payloads: list[tuple[BlockType, str | None]] = []
    for number, (kind, ids) in enumerate(blocks, start=1):
        payload = None
        if generation.finished or number < len(blocks):
            try:
                text = tokenizer.decode(ids)
            except ValueError:
                text = ""
            if len(text) >= 2 and text[0] == text[-1] == "\n":
                payload = text[1:-1]
        payloads.append((kind, payload))
    return payloads
