"""Generation of model transmissions: only what the protocol lets a model write can be sampled.

After the runtime's EOT a model opens THINK, OUT or ACT; inside a block it writes text, opens another block, or ends
with EOT. Runtime-side ids, reserved slots, EOS and rows without text are never produced.

Protocol sections: "Core Stream Model", "Runtime and Model Transmissions".
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from smi.model.modeling import RWKV7ForCausalLM, RWKV7State
from smi.protocol.tokens import BlockType
from smi.tokenizer import Tokenizer

# prompt tokens that are read in one go
PREFILL_TOKENS = 8192


@dataclass(frozen=True)
class Generation:
    """One generated transmission: `ids` without its EOT, and whether it came to its EOT within the limit."""

    ids: list[int]
    finished: bool


def grammar_masks(tokenizer: Tokenizer, rows: int) -> tuple[Tensor, Tensor]:
    """Additive float32 masks [rows] for the first token of a transmission, and for every later one.

    rows: of the model's head; those past the vocabulary are never sampled.
    """
    structural = tokenizer.structural
    opening = [structural.id(kind) for kind in (BlockType.THINK, BlockType.OUT, BlockType.ACT)]
    text = [id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) is not None]
    first = torch.full((rows,), float("-inf"))
    first[opening] = 0
    later = first.clone()
    later[[*text, structural.eot]] = 0
    return first, later


@torch.inference_mode()
def generate(
    model: RWKV7ForCausalLM,
    tokenizer: Tokenizer,
    prompts: Sequence[np.ndarray],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Generation]:
    """Continues each prompt with one model transmission.

    Args:
        prompts: ids (int32 [T]) that end with a runtime EOT (`smi.protocol.codec.encode_prompt`). Each starts from
            a fresh state of its own.
        max_tokens: limit on each transmission.
        temperature: 0 takes the likeliest token.
        seed: of the sampling.
    """
    was_training = model.training
    model.eval()
    try:
        return _generate(model, tokenizer, prompts, max_tokens, temperature, seed)
    finally:
        model.train(was_training)


def _generate(model, tokenizer, prompts, max_tokens, temperature, seed) -> list[Generation]:
    device = model.head.weight.device
    first, later = (mask.to(device) for mask in grammar_masks(tokenizer, model.head.weight.shape[0]))
    generator = torch.Generator(device).manual_seed(seed)

    logits, state = _prefill(model, prompts)
    mask = first
    active = torch.arange(len(prompts), device=device)
    ids: list[list[int]] = [[] for _ in prompts]
    finished = [False] * len(prompts)
    for _ in range(max_tokens + 1):
        scores = logits.float() + mask
        if temperature > 0:
            chances = torch.softmax(scores / temperature, dim=-1)
            chosen = torch.multinomial(chances, 1, generator=generator).squeeze(1)
        else:
            chosen = scores.argmax(-1)
        going = []
        for lane, (row, token) in enumerate(zip(active.tolist(), chosen.tolist(), strict=True)):
            if token == tokenizer.structural.eot:
                finished[row] = True
            elif len(ids[row]) < max_tokens:
                ids[row].append(token)
                going.append(lane)
        if not going:
            break
        if len(going) < len(active):
            lanes = torch.tensor(going, device=device)
            active, chosen, state = active[lanes], chosen[lanes], state.select(lanes)
        out = model(input_ids=chosen.unsqueeze(1), state=state, use_cache=True)
        logits, state, mask = out.logits[:, -1], out.state, later
    return [Generation(row, done) for row, done in zip(ids, finished, strict=True)]


def _prefill(model: RWKV7ForCausalLM, prompts: Sequence[np.ndarray]) -> tuple[Tensor, RWKV7State]:
    """Reads the prompts, packed; returns the next token's logits [P, V] and the states of P sequences."""
    device = model.head.weight.device
    groups: list[list[np.ndarray]] = [[]]
    for prompt in prompts:
        if groups[-1] and sum(map(len, groups[-1])) + len(prompt) > PREFILL_TOKENS:
            groups.append([])
        groups[-1].append(prompt)
    logits, states = [], []
    for group in groups:
        cu_seqlens = torch.from_numpy(np.cumsum([0, *map(len, group)]).astype(np.int32)).to(device)
        row = torch.from_numpy(np.concatenate(group).astype(np.int64)).to(device).unsqueeze(0)
        out = model.rwkv7(input_ids=row, cu_seqlens=cu_seqlens, use_cache=True)
        logits.append(model.head(out.last_hidden_state[0, cu_seqlens[1:].long() - 1]))
        states.append(out.state)
    parts = zip(*((s.wkv, s.att_shift, s.ffn_shift) for s in states), strict=True)
    return torch.cat(logits), RWKV7State(*(torch.cat(part, dim=1) for part in parts))
