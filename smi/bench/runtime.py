"""Reading and writing with the runtime, against the `rwkv` package on the same weights.

A model of random weights in the shape of the smallest public one (0.1B) runs in float32 on the CPU. The runtime
does all that it does for a conversation: grammar, budgets, decoding of text. The package runs its model and takes the
likeliest id; it has no batches, so it writes for 8 sequences one after the other.
"""

import contextlib
import importlib.util
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from smi.bench.measure import Figure, alternate, duration
from smi.model.checkpoint import save_native
from smi.model.configuration import RWKV7Config
from smi.model.modeling import RWKV7ForCausalLM
from smi.protocol.stream import Block
from smi.protocol.tokens import BlockType
from smi.runtime.session import Runtime
from smi.tokenizer import load_tokenizer

WORDS = 200
STEPS = 12
SESSIONS = 8
ROUNDS = 5
# float32 sums in another order
TOLERANCE = 1e-2


def run() -> dict[str, Figure]:
    if importlib.util.find_spec("rwkv") is None:
        raise ImportError("this suite compares with the rwkv package: pip install rwkv")
    tokenizer = load_tokenizer("rwkv_world")
    model = _model(-(-tokenizer.vocab_size // 64) * 64)
    said = [Block(BlockType.USR, "river " * WORDS)]
    with tempfile.TemporaryDirectory() as folder:
        peer = _peer(save_native(model, Path(folder) / "model.pth"))
        runtime = Runtime(model, tokenizer, capacity=SESSIONS)
        with runtime.open() as session:
            session.send(said)
            prompt = list(session._ids)
            _check(runtime, peer, prompt)

        def read() -> None:
            with runtime.open() as session:
                session.send(said)
                session.prefill()

        read_times = alternate({"smi": read, "rwkv": lambda: peer.forward(prompt, None)}, rounds=ROUNDS)
        figures = {"prefill_vs_rwkv": _figure(read_times, len(prompt), f"a prompt of {len(prompt)} tokens")}
        for count in (1, SESSIONS):
            with contextlib.ExitStack() as stack:
                ours = _writer(runtime, said, count, stack)
                times = alternate({"smi": ours, "rwkv": _peer_writer(peer, prompt, count)}, rounds=ROUNDS)
            what = "one session" if count == 1 else f"{count} sessions"
            figures[f"decode_{count}_vs_rwkv"] = _figure(times, STEPS * count, what)
    return figures


def _model(rows: int) -> RWKV7ForCausalLM:
    torch.manual_seed(0)
    model = RWKV7ForCausalLM(RWKV7Config(vocab_size=rows, hidden_size=768, num_hidden_layers=12)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # a fresh model has matrices of zeros, which say nothing
            parameter += 0.02 * torch.randn_like(parameter)
    return model


def _peer(file: Path) -> Any:
    """The package's model of a native checkpoint."""
    # read when it is imported
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "1", "RWKV_CUDA_ON": "0"}
    with contextlib.redirect_stdout(io.StringIO()):
        from rwkv.model import RWKV

        return RWKV(model=str(file.with_suffix("")), strategy="cpu fp32")


def _check(runtime: Runtime, peer: Any, prompt: list[int]) -> None:
    """Both have to say the same before it matters which is faster."""
    with torch.inference_mode():
        ours = runtime.model(input_ids=torch.tensor([prompt]), logits_to_keep=1).logits[0, -1]
    theirs = peer.forward(prompt, None)[0]
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    if difference > TOLERANCE:
        raise RuntimeError(f"the runtime and the rwkv package differ by {difference:.2g} on the same weights")


def _writer(runtime: Runtime, said: list[Block], count: int, stack: contextlib.ExitStack) -> Callable[[], None]:
    """Writes STEPS ids in each of `count` sessions, and takes them back."""
    sessions = [stack.enter_context(runtime.open()) for _ in range(count)]
    for session in sessions:
        session.send(said)
        session.begin()
    runtime.read(sessions)

    def write() -> None:
        for _ in range(STEPS):
            runtime.step(sessions)
        for session in sessions:
            assert session._turn is not None, "the model ended its turn"
            session.cancel()
            session.begin()

    return write


def _peer_writer(peer: Any, prompt: list[int], count: int) -> Callable[[], None]:
    first, read = peer.forward(prompt, None)

    def write() -> None:
        for _ in range(count):
            scores, state = first, [part.clone() for part in read]
            for _ in range(STEPS):
                scores, state = peer.forward(int(scores.argmax()), state)

    return write


def _figure(times: dict[str, float], tokens: int, what: str) -> Figure:
    ours, theirs = (tokens / times[name] for name in ("smi", "rwkv"))
    detail = f"{what}, tokens/s: {ours:.4g} against {theirs:.4g} (a call {duration(times['smi'])})"
    return Figure(ours / theirs, detail, at_least=1.0)
