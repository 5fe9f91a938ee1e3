"""The configuration of an RWKV-7 model, with the keys of the public Hugging Face layout."""

import warnings

from transformers import PreTrainedConfig


class RWKV7Config(PreTrainedConfig):
    """Shapes of an RWKV-7 ("x070") model.

    Args:
        vocab_size: rows of the embedding and of the head.
        hidden_size: C, a multiple of head_dim.
        num_hidden_layers: L.
        head_dim: N, key and value size of a head.
        num_heads: H; hidden_size / head_dim when absent. Some published configs carry a wrong count
            (32 for any size): it is put right with a warning.
        intermediate_size: inner width of the channel mix; 4 C when absent.
        decay_low_rank_dim, a_low_rank_dim, v_low_rank_dim, gate_low_rank_dim: ranks of the four low-rank maps.
            Released models follow no formula: checkpoints are read with the ranks of their weights.
        embedding_init: the embedding starts uniform in (-embedding_init, embedding_init). 1e-4 is official, for long
            training; ln0 hides the scale, but a small start lets the first steps push rare tokens together.
        norm_eps: of every LayerNorm. The GroupNorm over heads always uses 64e-5.
        wkv_implementation: which kernel the publisher's own code uses. Carried along, not used here: the kernel
            is chosen where the model runs (`RWKV7ForCausalLM.wkv_backend`).
    """

    model_type = "rwkv7"
    keys_to_ignore_at_inference = ["state"]

    def __init__(
        self,
        vocab_size: int = 65536,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        head_dim: int = 64,
        num_heads: int | None = None,
        intermediate_size: int | None = None,
        decay_low_rank_dim: int = 64,
        a_low_rank_dim: int = 64,
        v_low_rank_dim: int = 32,
        gate_low_rank_dim: int = 128,
        embedding_init: float = 1e-4,
        norm_eps: float = 1e-5,
        norm_bias: bool = True,
        use_cache: bool = True,
        wkv_state_dtype: str = "float32",
        wkv_implementation: str = "chunked",
        bos_token_id: int | None = 0,
        eos_token_id: int | None = 0,
        pad_token_id: int | None = 0,
        tie_word_embeddings: bool = False,
        **kwargs,
    ):
        if hidden_size % head_dim:
            raise ValueError(f"hidden_size {hidden_size} is not a multiple of head_dim {head_dim}")
        heads = hidden_size // head_dim
        if num_heads not in (None, heads):
            warnings.warn(
                f"num_heads {num_heads} does not fit hidden_size {hidden_size} and head_dim {head_dim}; using {heads}",
                stacklevel=2,
            )
        if not norm_bias:
            raise ValueError("RWKV-7's LayerNorms have a bias: norm_bias=False is not supported")
        if tie_word_embeddings:
            raise ValueError("RWKV-7's head is a matrix of its own: tie_word_embeddings=True is not supported")
        if wkv_state_dtype != "float32":
            raise ValueError(f"the recurrent state is float32, not {wkv_state_dtype}")
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.head_dim = head_dim
        self.num_heads = heads
        self.intermediate_size = 4 * hidden_size if intermediate_size is None else intermediate_size
        self.decay_low_rank_dim = decay_low_rank_dim
        self.a_low_rank_dim = a_low_rank_dim
        self.v_low_rank_dim = v_low_rank_dim
        self.gate_low_rank_dim = gate_low_rank_dim
        self.embedding_init = embedding_init
        self.norm_eps = norm_eps
        self.norm_bias = norm_bias
        self.use_cache = use_cache
        self.wkv_state_dtype = wkv_state_dtype
        self.wkv_implementation = wkv_implementation
        kwargs |= {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)  # pyright: ignore[reportCallIssue]
