"""What a run needs of a device's memory, by arithmetic alone: nothing is allocated."""

from dataclasses import dataclass

import torch

from smi.config import Config
from smi.model.configuration import RWKV7Config
from smi.model.modeling import RWKV7ForCausalLM
from smi.training.loss import LOGITS


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device.

    weights, gradients: float32, and with bfloat16 arithmetic the copies that autocast keeps for a step.
    optimizer: both moments of AdamW.
    activations: what backward needs of one packed row, and the logits that exist at a time.
    card: memory of the device, None where there is none to ask.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    card: int | None

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate_memory(config: Config, model_config: RWKV7Config) -> MemoryEstimate:
    """The estimate for training `model_config` as `config` says, one packed row a micro-batch."""
    half = config.hardware.precision.startswith("bf16")
    parameters = count_parameters(model_config)
    return MemoryEstimate(
        weights=parameters * (6 if half else 4),
        gradients=parameters * 4,
        optimizer=parameters * 8,
        activations=_activations(config, model_config, 2 if half else 4),
        card=torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None,
    )


def count_parameters(model_config: RWKV7Config) -> int:
    """Parameters of the model, which is built without memory for them."""
    with torch.device("meta"):
        return RWKV7ForCausalLM(model_config).num_parameters()


def _activations(config: Config, shape: RWKV7Config, bytes_each: int) -> int:
    # rows of the hidden size that a block keeps a token: norms, six mixtures, their projections, the kernel's inputs
    # and output; and those of the inner size
    block = (28 * shape.hidden_size + 2 * shape.intermediate_size) * bytes_each
    # the kernels keep a float32 state every 16 tokens
    block += shape.hidden_size * shape.head_dim * 4 // 16
    if config.model.gradient_checkpointing:
        kept = shape.num_hidden_layers * shape.hidden_size * bytes_each + block
    else:
        kept = shape.num_hidden_layers * block
    # logits, their exponentials and their gradient
    return config.data.pack_length * kept + 3 * LOGITS * 4
