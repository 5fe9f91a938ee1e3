"""What a run needs of a device's memory, by arithmetic alone: nothing is allocated.

Of a parameter: 4 bytes for its float32 weight, 4 for its gradient, 8 for AdamW's two moments; with bfloat16 arithmetic
2 more for the copy that autocast keeps from the forward pass to backward. Under FSDP a device holds its share of each,
and in whole what it computes with at the moment: one block, and all that is in no block.

Of a token, the rows that backward finds: see `_block_bytes`. With activation checkpointing one row a block, and one
block in whole.
"""

from dataclasses import dataclass

from smi.config import Config
from smi.hardware import split_batch
from smi.model.configuration import RWKV7Config
from smi.training.loss import LOGITS

GIB = 1 << 30
# tokens between the float32 states that the kernels keep for backward
CHUNK = 16


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device.

    weights: float32, and the copies that autocast keeps.
    gradients, optimizer: float32; both moments of AdamW.
    activations: what backward needs of a micro-batch, and the logits that exist at a time.
    card: memory of the device, None where the hardware profile names none.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    card: int | None

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def fits(self) -> bool:
        """Whether the card holds it; true where there is none to hold it against."""
        return self.card is None or self.total <= self.card


def estimate_memory(config: Config, model_config: RWKV7Config, trained: int | None = None) -> MemoryEstimate:
    """The estimate for training `model_config` as `config` says.

    trained: numbers that the optimizer moves; all parameters when absent.
    """
    hardware, split = config.hardware, split_batch(config)
    half = hardware.precision.startswith("bf16")
    every, block = count_parameters(model_config), _block_parameters(model_config, 1)
    held, moved = every, every if trained is None else trained
    weights = every * 4
    if hardware.strategy == "fsdp":
        held, moved = (-(-count // split.world_size) for count in (held, moved))
        # shared out, and in whole what is in no block, and the block at work and the next one
        gathered = every - model_config.num_hidden_layers * block + 2 * block
        weights = held * 4 + gathered * 4
    return MemoryEstimate(
        weights=weights + every * 2 * half,
        gradients=moved * 4,
        optimizer=moved * 8,
        activations=_activations(config, model_config, split.micro_batch * config.data.pack_length),
        card=None if hardware.memory_gib is None else int(hardware.memory_gib * GIB),
    )


def check_fits(config: Config, estimate: MemoryEstimate) -> None:
    """Raises ValueError where the card does not hold the estimate, saying what would."""
    if estimate.fits:
        return
    assert estimate.card is not None
    states = estimate.total - estimate.activations
    ways = []
    if states < estimate.card and not config.hardware.activation_checkpointing:
        ways.append("hardware.activation_checkpointing=true")
    if states < estimate.card and config.hardware.max_micro_batch > 1:
        ways.append("hardware.max_micro_batch=1")
    ways += ["a smaller model", "LoRA", "a hardware profile with more memory"]
    raise ValueError(
        f"this run needs about {estimate.total / GIB:.1f} GiB a device, {states / GIB:.1f} of them for weights, "
        f"gradients and optimizer, and the device has {estimate.card / GIB:g}: try {', '.join(ways[:-1])} or {ways[-1]}"
    )


def count_parameters(shape: RWKV7Config) -> int:
    """Parameters that train."""
    layers = sum(_block_parameters(shape, layer) for layer in range(shape.num_hidden_layers))
    # embedding and head, and the norms before the first block and after the last
    return 2 * shape.vocab_size * shape.hidden_size + 4 * shape.hidden_size + layers


def _block_parameters(shape: RWKV7Config, layer: int) -> int:
    width, inner = shape.hidden_size, shape.intermediate_size
    ranks = shape.decay_low_rank_dim + shape.a_low_rank_dim + shape.gate_low_rank_dim
    # six mixtures, w0, a0, k_k, k_a, r_k, ln_x; the channel mix's mixture; ln1, ln2
    vectors = 6 + 5 + 2 + 1 + 4
    if layer:
        # layer 0 mixes no earlier value in
        ranks, vectors = ranks + shape.v_low_rank_dim, vectors + 1
    return 4 * width**2 + 2 * width * inner + 2 * width * ranks + vectors * width


def _block_bytes(shape: RWKV7Config, half: bool) -> int:
    """Bytes that a block keeps of a token.

    Rows of the hidden size: inputs and outputs of the norms (4), the shifted inputs and their seven mixtures (9), the
    projections r, k and v, decay, rate and gate with what they are made of (11), what the kernel takes (6) and gives
    (2). Of the inner size: the channel mix's product and its square. Under autocast norms and mixtures stay in
    float32, 26 rows of the 40. And the kernel keeps a float32 state a chunk.
    """
    wide, narrow = 26 * shape.hidden_size, 6 * shape.hidden_size + 2 * shape.intermediate_size
    return wide * 4 + narrow * (2 if half else 4) + 4 * shape.hidden_size * shape.head_dim // CHUNK


def _activations(config: Config, shape: RWKV7Config, tokens: int) -> int:
    block = _block_bytes(shape, config.hardware.precision.startswith("bf16"))
    if config.hardware.activation_checkpointing:
        # the input of each block, the first layer's values that all of them mix in, and that of the last norm
        kept = (shape.num_hidden_layers + 2) * shape.hidden_size * 4 + block
    else:
        kept = shape.num_hidden_layers * block
    # a slice of the logits and its softmax
    return tokens * kept + 2 * LOGITS * 4
