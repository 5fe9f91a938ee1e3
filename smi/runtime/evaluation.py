"""What a model's actions and answers are worth, on conversations whose right ones are known."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from smi.model.modeling import RWKV7ForCausalLM
from smi.protocol.conversation import Conversation, to_stream
from smi.protocol.payloads import parse_act
from smi.protocol.stream import Block, ProtocolError, Stream
from smi.protocol.tokens import BlockType, Side
from smi.runtime.grammar import Limits
from smi.runtime.session import Runtime, Session
from smi.runtime.turn import Reply, TurnEnded
from smi.tokenizer import Tokenizer


@dataclass
class ActionScores:
    """Counts over the model transmissions of some conversations, each generated after the true prefix.

    expected: ACT blocks in the conversations. generated: ACT blocks that the model wrote instead; of these
    parsed: JSON in the protocol's envelope; declared: also name a tool of CAPS; valid: also with arguments that fit
    its schema; exact: also equal to the expected block in the same place.
    answers: transmissions expected to be an OUT without an ACT; answers_exact: those whose OUT came out word for word.
    unfinished: transmissions that the limit ended.
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


def replies(runtime: Runtime, prompts: Sequence[Stream], limits: Limits) -> list[Reply]:
    """The model's greedy continuation of each prompt, as many at a time as the runtime has slots."""
    found: list[Reply | None] = [None] * len(prompts)
    waiting = list(reversed(range(len(prompts))))
    playing: dict[Session, int] = {}
    while waiting or playing:
        while waiting and runtime.pool.free_slots:
            session = runtime.open()
            playing[session] = waiting.pop()
            session.replay(prompts[playing[session]])
            session.begin(limits)
        for session, event in runtime.step(list(playing)):
            if isinstance(event, TurnEnded):
                found[playing.pop(session)] = event.reply
                session.close()
    return [reply for reply in found if reply is not None]


def score_actions(
    model: RWKV7ForCausalLM,
    tokenizer: Tokenizer,
    conversations: Iterable[Conversation],
    *,
    max_tokens: int = 256,
    batch: int = 64,
) -> ActionScores:
    """Generates every model transmission of `conversations` greedily and compares it with the true one.

    max_tokens: of each transmission. batch: conversations at a time.
    """
    prompts, truths, tools = [], [], []
    for conversation in conversations:
        stream = to_stream(conversation)
        for i, transmission in enumerate(stream.transmissions):
            if transmission.side is Side.MODEL:
                prompts.append(Stream(stream.transmissions[:i]))
                truths.append(transmission.blocks)
                tools.append(conversation.tools or [])
    scores = ActionScores()
    was_training = model.training
    try:
        written = replies(Runtime(model, tokenizer, capacity=batch), prompts, Limits(max_tokens))
    finally:
        model.train(was_training)
    for reply, truth, declared in zip(written, truths, tools, strict=True):
        _score(scores, reply, truth, declared)
    return scores


def _score(scores: ActionScores, reply: Reply, truth: tuple[Block, ...], tools: list) -> None:
    expected = [block.payload for block in truth if block.type is BlockType.ACT]
    # an action that was cut counts as written, and as nothing more
    acts = [
        None if number in reply.cut else block.payload
        for number, block in enumerate(reply.transmission.blocks)
        if block.type is BlockType.ACT
    ]
    scores.unfinished += reply.reason != "eot"
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
        said = [block.payload for block in reply.transmission.blocks if block.type is BlockType.OUT]
        right = not acts and not reply.cut and said == [b.payload for b in truth if b.type is BlockType.OUT]
        scores.answers += 1
        scores.answers_exact += right
