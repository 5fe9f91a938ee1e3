"""RWKV-7: the model, its configuration, and the checkpoint layouts of its ecosystem."""

from smi.model.configuration import RWKV7Config
from smi.model.modeling import RWKV7ForCausalLM, RWKV7Model, RWKV7State

__all__ = ["RWKV7Config", "RWKV7ForCausalLM", "RWKV7Model", "RWKV7State"]
