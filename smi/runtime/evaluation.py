"""What a model's actions, answers and predictions are worth, on conversations whose right ones are known."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from smi.model.modeling import RWKV7ForCausalLM, RWKV7State
from smi.protocol.codec import Example
from smi.protocol.conversation import Conversation, to_stream
from smi.protocol.json_text import loads
from smi.protocol.payloads import parse_act
from smi.protocol.stream import Block, Payload, ProtocolError, Stream
from smi.protocol.tokens import BlockType, Side
from smi.runtime.grammar import Limits
from smi.runtime.session import Runtime, Session
from smi.runtime.turn import Reply, TurnEnded
from smi.tokenizer import Tokenizer

# tokens that the model reads in one go, and positions whose scores over the vocabulary are held at a time
ROW_TOKENS = 8192
HEAD_ROWS = 512


@dataclass
class ActionScores:
    """Counts over the model transmissions of some conversations, each generated after the true prefix.

    expected: ACT blocks in the conversations. generated: ACT blocks that the model wrote instead; of these
    parsed: JSON in the protocol's envelope; declared: also name a tool of CAPS; valid: also with arguments that fit
    its schema; exact: also equal to the expected block in the same place.
    answers: transmissions expected to be an OUT without an ACT; answers_exact: those whose OUT came out word for word.
    unfinished: transmissions that the limit ended.
    transmissions: of the model, generated. think_tokens: ids within their THINK payloads.
    budget_violations: transmissions that think although CTRL disables it, or past its max_tokens; counted from the
        ids that were written. The runtime keeps it at 0.
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
    transmissions: int = 0
    think_tokens: int = 0
    budget_violations: int = 0

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


@dataclass(frozen=True)
class Played:
    """A model transmission of a conversation: what came before it, what it should be, and what the model wrote."""

    conversation: Conversation
    prompt: Stream
    truth: tuple[Block, ...]
    reply: Reply


def play(
    model: RWKV7ForCausalLM,
    tokenizer: Tokenizer,
    conversations: Iterable[Conversation],
    *,
    max_tokens: int = 256,
    batch: int = 64,
    time_state: Tensor | None = None,
) -> list[Played]:
    """Generates every model transmission of `conversations` greedily, each after the true prefix.

    max_tokens: of each transmission. batch: transmissions at a time. time_state: as for `StatePool`.
    """
    turns = [
        (conversation, Stream(stream.transmissions[:i]), transmission.blocks)
        for conversation in conversations
        for stream in [to_stream(conversation)]
        for i, transmission in enumerate(stream.transmissions)
        if transmission.side is Side.MODEL
    ]
    was_training = model.training
    try:
        runtime = Runtime(model, tokenizer, capacity=batch, time_state=time_state)
        written = replies(runtime, [prompt for _, prompt, _ in turns], Limits(max_tokens))
    finally:
        model.train(was_training)
    return [Played(*turn, reply) for turn, reply in zip(turns, written, strict=True)]


def score(played: Iterable[Played], tokenizer: Tokenizer) -> ActionScores:
    """Counts what came out right."""
    scores = ActionScores()
    for turn in played:
        caps = turn.conversation.caps or {}
        tools = turn.conversation.tools or caps.get("tools") or []
        _score(scores, turn.reply, turn.truth, tools, caps.get("actions"))
        budget = _budget(turn.prompt)
        thought = _think_tokens(turn.reply.ids, tokenizer)
        scores.budget_violations += thought is not None and budget is not None and thought > budget
    return scores


def score_actions(
    model: RWKV7ForCausalLM,
    tokenizer: Tokenizer,
    conversations: Iterable[Conversation],
    *,
    max_tokens: int = 256,
    batch: int = 64,
    time_state: Tensor | None = None,
) -> ActionScores:
    """`play` and `score` together."""
    played = play(model, tokenizer, conversations, max_tokens=max_tokens, batch=batch, time_state=time_state)
    return score(played, tokenizer)


def _budget(prompt: Stream) -> int | None:
    """The THINK tokens that the latest CTRL grants; -1 where it grants no block, None where it says nothing."""
    ctrl = [b.text for t in prompt.transmissions for b in t.blocks if b.type is BlockType.CTRL]
    reasoning = loads(ctrl[-1]).get("reasoning", {}) if ctrl else {}
    return -1 if reasoning.get("mode") == "disabled" else reasoning.get("max_tokens")


def _think_tokens(ids: Iterable[int], tokenizer: Tokenizer) -> int | None:
    """Ids within THINK payloads; None without a THINK block."""
    kind, counts = None, Counter()
    for id in ids:
        opened = tokenizer.structural.type_of(id)
        kind = opened if opened is not None else kind
        counts[kind] += opened is None
    return counts.get(BlockType.THINK)


@dataclass(frozen=True)
class BlockLoss:
    """Teacher-forced loss on the supervised tokens of one block type.

    tokens: predicted. nll: the sum of their negative log-likelihoods, in nats.
    """

    tokens: int
    nll: float

    @property
    def perplexity(self) -> float:
        """exp of the mean over tokens."""
        return math.exp(self.nll / self.tokens)


@torch.inference_mode()
def block_losses(
    model: RWKV7ForCausalLM, examples: Iterable[Example], time_state: Tensor | None = None
) -> dict[BlockType, BlockLoss]:
    """The loss of the true tokens by the type of the block they stand in, as training counts them: supervised ones,
    type tokens included. The first token of an example is predicted by nothing. Types that have none are left out.
    time_state: as for `StatePool`.

    Raises RuntimeError as torch does where the model fails.
    """
    was_training = model.training
    model.eval()
    tokens, nll = torch.zeros(len(BlockType), dtype=torch.int64), torch.zeros(len(BlockType), dtype=torch.float64)
    try:
        for row in _rows(examples):
            hidden = _hidden(model, row, time_state)
            ids = torch.from_numpy(np.concatenate([e.input_ids for e in row]).astype(np.int64))
            kinds = torch.from_numpy(np.concatenate([e.block_types for e in row]).astype(np.int64))
            # a target's score stands one position before it
            targets = torch.from_numpy(np.concatenate([np.append(False, e.loss_mask[1:]) for e in row])).nonzero()[:, 0]
            for part in targets.split(HEAD_ROWS):
                logits = model.head(hidden[part.to(hidden.device) - 1]).float()
                losses = F.cross_entropy(logits, ids[part].to(logits.device), reduction="none").double().cpu()
                nll.index_add_(0, kinds[part], losses)
                tokens.index_add_(0, kinds[part], torch.ones_like(part))
    finally:
        model.train(was_training)
    return {kind: BlockLoss(int(tokens[kind]), float(nll[kind])) for kind in BlockType if tokens[kind]}


def _rows(examples: Iterable[Example]) -> Iterable[list[Example]]:
    """Examples in rows of at most ROW_TOKENS; a longer one has its own."""
    row: list[Example] = []
    room = ROW_TOKENS
    for example in examples:
        if row and len(example.input_ids) > room:
            yield row
            row, room = [], ROW_TOKENS
        row.append(example)
        room -= len(example.input_ids)
    if row:
        yield row


def _hidden(model: RWKV7ForCausalLM, row: list[Example], time_state: Tensor | None) -> Tensor:
    """What the head reads, [T, C], for examples that do not see each other."""
    device = model.head.weight.device
    ids = torch.from_numpy(np.concatenate([e.input_ids for e in row]).astype(np.int64)).to(device)
    state = None if time_state is None else RWKV7State.tuned(time_state.to(device), len(row))
    if len(row) > 1:
        bounds = np.cumsum([0, *(len(e.input_ids) for e in row)]).astype(np.int32)
        cu_seqlens = torch.from_numpy(bounds).to(device)
        out = model.rwkv7(input_ids=ids[None], state=state, cu_seqlens=cu_seqlens, use_cache=False)
        return out.last_hidden_state[0]
    parts = []
    for part in ids.split(ROW_TOKENS):
        out = model.rwkv7(input_ids=part[None], state=state, use_cache=True)
        parts.append(out.last_hidden_state[0])
        state = out.state
    return torch.cat(parts)


VERDICTS = ("unreadable", "undeclared", "invalid arguments", "valid")
"""How far an action gets: no JSON in the protocol's envelope, no declared tool, arguments that do not fit, or all."""


def judge_action(payload: Payload, tools: list, actions: list | None = None) -> str:
    """One of VERDICTS for the payload of an ACT block; `tools` and `actions` as for `parse_act`."""
    try:
        parse_act(payload, tools, actions)
    except ProtocolError as error:
        return VERDICTS[{"arguments": 2, "undeclared_tool": 1, "undeclared_action": 1}.get(error.reason, 0)]
    return VERDICTS[3]


def _score(
    scores: ActionScores, reply: Reply, truth: tuple[Block, ...], tools: list, actions: list | None = None
) -> None:
    expected = [block.payload for block in truth if block.type is BlockType.ACT]
    # an action that was cut counts as written, and as nothing more
    acts = [
        None if number in reply.cut else block.payload
        for number, block in enumerate(reply.transmission.blocks)
        if block.type is BlockType.ACT
    ]
    scores.transmissions += 1
    scores.think_tokens += reply.think_tokens
    scores.unfinished += reply.reason != "eot"
    scores.expected += len(expected)
    scores.generated += len(acts)
    for i, payload in enumerate(acts):
        if payload is None:
            continue
        reached = VERDICTS.index(judge_action(payload, tools, actions))
        scores.parsed += reached >= 1
        scores.declared += reached >= 2
        scores.valid += reached >= 3
        scores.exact += i < len(expected) and payload == expected[i]
    if not expected:
        said = [block.payload for block in reply.transmission.blocks if block.type is BlockType.OUT]
        right = not acts and not reply.cut and said == [b.payload for b in truth if b.type is BlockType.OUT]
        scores.answers += 1
        scores.answers_exact += right
