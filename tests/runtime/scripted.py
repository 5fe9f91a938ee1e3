"""A runtime whose model says what a script wants, token by token, as far as grammar and budgets let it."""

import torch

from smi.model import RWKV7Config, RWKV7ForCausalLM
from smi.protocol.codec import encode
from smi.protocol.stream import Stream, Transmission
from smi.runtime.session import Runtime


def tiny(rows, **config):
    """A model of random weights that say nothing in particular."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": rows} | config
    model = RWKV7ForCausalLM(RWKV7Config(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


class ScriptedRuntime(Runtime):
    """`script`: transmissions (lists of blocks) that the model wants, one for each turn of any session; or a function
    from the session to its next."""

    def __init__(self, tokenizer, script, **settings):
        rows = max([tokenizer.vocab_size, *(n.ids.stop for n in settings.get("namespaces", ()))])
        super().__init__(tiny(rows), tokenizer, **settings)
        turns = iter(()) if callable(script) else iter(script)
        self._script = script if callable(script) else lambda session: next(turns)
        self._wanted = {}

    def _step(self, sessions):
        for session in sessions:
            if session._undo is None:
                stream = Stream((Transmission(tuple(self._script(session))),))
                ids = encode(stream, self.tokenizer, complete=False, namespaces=self.namespaces).input_ids
                self._wanted[session] = ids.tolist()
        self.read(sessions)
        for session in sessions:
            self._want(session)
        return super()._step(sessions)

    def _want(self, session):
        wanted, written = self._wanted[session], len(session._turn.ids)
        scores = torch.zeros(self.grammar.rows)
        scores[wanted[min(written, len(wanted) - 1)]] = 1e4
        session._scores = scores
