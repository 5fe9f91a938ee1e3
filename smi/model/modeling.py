"""RWKV-7 ("Goose", x070) in one file.

A stack of blocks, each ``x + time_mix(ln1(x))`` and ``x + channel_mix(ln2(x))``. What a block remembers of a
sequence is its state: the WKV matrix of every head and the last input of both sub-layers. The state goes in and
comes out as a value (`RWKV7State`); the model never keeps or changes one.

Shapes: B rows, T tokens, C channels, H heads of N = K = V channels, S independent sequences (B, or the number of
segments of a packed row). Parameter names are those of the public Hugging Face layout: ``rwkv7.`` and BlinkDL's
native name.

Source: "RWKV-7 Goose with Expressive Dynamic State Evolution" (arXiv:2503.14456); section and equation names in the
comments are that paper's.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.utils.generic import ModelOutput

from smi.model.configuration import RWKV7Config
from smi.model.elementwise import mix, squared_relu
from smi_kernels import wkv7
from smi_kernels.inputs import segment_bounds, state_dtype

# the log decay is -exp(-1/2) sigmoid(.), so that a channel keeps at least exp(-0.6065) of itself a step
DECAY_SCALE = math.exp(-0.5)
GROUP_NORM_EPS = 64e-5

# in a compiled block the kernel stays outside of the graphs: its registry chooses what runs
_wkv7: Any = torch.compiler.disable(wkv7)


@dataclass(frozen=True)
class RWKV7State:
    """What a model remembers of S sequences.

    wkv: [L, S, H, V, K] float32 (value rows, key columns: the layout of native and public HF states).
    att_shift: [L, S, C], the last input of each time mix (after ln1), in the model's activation dtype.
    ffn_shift: [L, S, C], the same for each channel mix (after ln2).

    Protocol section "Stateful Inference": a fresh state is the only sequence boundary.
    """

    wkv: Tensor
    att_shift: Tensor
    ffn_shift: Tensor

    @classmethod
    def fresh(
        cls,
        config: RWKV7Config,
        sequences: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "RWKV7State":
        """Zero state for `sequences` new sequences; `dtype` is that of the activations."""
        layers, heads, size = config.num_hidden_layers, config.num_heads, config.head_dim
        shift = torch.zeros(layers, sequences, config.hidden_size, dtype=dtype, device=device)
        wkv = torch.zeros(layers, sequences, heads, size, size, dtype=state_dtype(dtype), device=device)
        return cls(wkv, shift, shift.clone())

    @classmethod
    def tuned(cls, time_state: Tensor, sequences: int) -> "RWKV7State":
        """The state of new sequences that begin with the WKV state [L, H, V, K] that was tuned for them, differentiable
        in it. Shifts are zero: no token came before."""
        layers, heads, size, _ = time_state.shape
        shift = time_state.new_zeros(layers, sequences, heads * size)
        return cls(time_state.unsqueeze(1).expand(-1, sequences, -1, -1, -1), shift, shift)

    @property
    def sequences(self) -> int:
        return self.wkv.shape[1]

    def select(self, sequences: Tensor | list[int]) -> "RWKV7State":
        """A copy of the states of some sequences, in the order given (int64 indices into S)."""
        index = torch.as_tensor(sequences, device=self.wkv.device)
        return RWKV7State(*(x.index_select(1, index) for x in (self.wkv, self.att_shift, self.ffn_shift)))

    def detach(self) -> "RWKV7State":
        """The same values, cut off from the graph (truncated back-propagation)."""
        return RWKV7State(self.wkv.detach(), self.att_shift.detach(), self.ffn_shift.detach())


@dataclass
class RWKV7Output(ModelOutput):
    """last_hidden_state [B, T, C]; state after the last token of each sequence, if asked for."""

    last_hidden_state: Tensor | None = None
    state: RWKV7State | None = None


@dataclass
class RWKV7CausalLMOutput(ModelOutput):
    """loss [] if labels were given; logits [B, T', V]; state after the last token, if asked for."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    state: RWKV7State | None = None


@dataclass(frozen=True)
class Segments:
    """Where the S sequences of a packed row begin and end (int64 [S] token positions)."""

    cu_seqlens: Tensor
    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, length: int, device: torch.device) -> "Segments":
        bounds = segment_bounds(cu_seqlens)
        if bounds[-1] != length:
            raise ValueError(f"cu_seqlens ends at {bounds[-1]}, but the row has {length} tokens")
        cut = torch.tensor(bounds, device=device)
        return cls(cu_seqlens, cut[:-1], cut[1:] - 1)


def token_shift(x: Tensor, before: Tensor | None, segments: Segments | None) -> tuple[Tensor, Tensor]:
    """Each token's predecessor in its own sequence.

    Args:
        x: [B, T, C].
        before: [S, C] the tokens before the first ones; zeros when absent.
        segments: of a packed row.

    Returns:
        shifted [B, T, C], and the last tokens [S, C].
    """
    if segments is None:
        first = torch.zeros_like(x[:, :1]) if before is None else before.unsqueeze(1)
        return torch.cat([first.to(x.dtype), x[:, :-1]], dim=1), x[:, -1]
    shifted = F.pad(x, (0, 0, 1, -1))
    first = x.new_zeros(len(segments.first), x.shape[-1]) if before is None else before.to(x.dtype)
    return shifted.index_copy(1, segments.first, first.unsqueeze(0)), x[0].index_select(0, segments.last)


class RWKV7TimeMix(nn.Module):
    """The recurrent sub-layer (paper: Time Mixing)."""

    def __init__(self, config: RWKV7Config, layer_id: int):
        super().__init__()
        self.layer_id = layer_id
        self.num_layers = config.num_hidden_layers
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        width = config.hidden_size

        def vector() -> nn.Parameter:
            return nn.Parameter(torch.empty(1, 1, width))

        def low_rank(rank: int) -> tuple[nn.Parameter, nn.Parameter]:
            return nn.Parameter(torch.empty(width, rank)), nn.Parameter(torch.empty(rank, width))

        self.x_r, self.x_w, self.x_k = vector(), vector(), vector()
        self.x_v, self.x_a, self.x_g = vector(), vector(), vector()
        self.w0, self.a0 = vector(), vector()
        self.w1, self.w2 = low_rank(config.decay_low_rank_dim)
        self.a1, self.a2 = low_rank(config.a_low_rank_dim)
        self.g1, self.g2 = low_rank(config.gate_low_rank_dim)
        if layer_id == 0:
            # layer 0 makes v_first and mixes nothing in, but checkpoints carry these: kept, never trained
            self.register_buffer("v0", torch.empty(1, 1, width))
            self.register_buffer("v1", torch.empty(width, config.v_low_rank_dim))
            self.register_buffer("v2", torch.empty(config.v_low_rank_dim, width))
        else:
            self.v0 = vector()
            self.v1, self.v2 = low_rank(config.v_low_rank_dim)
        self.k_k, self.k_a = vector(), vector()
        self.r_k = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
        self.receptance = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.ln_x = nn.GroupNorm(self.num_heads, width, eps=GROUP_NORM_EPS)

    def forward(
        self,
        x: Tensor,
        v_first: Tensor | None,
        shift: Tensor | None,
        wkv: Tensor | None,
        segments: Segments | None,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [B, T, C], v_first [B, T, C] (None in layer 0), shift [S, C], wkv [S, H, V, K].

        Returns the output [B, T, C], v_first, and the new shift and WKV states.
        """
        batch, length, width = x.shape
        by_head = (batch, length, self.num_heads, self.head_dim)
        shifted, last = token_shift(x, shift, segments)
        x_r, x_w, x_k, x_v, x_a, x_g = mix(x, shifted, self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g)

        r = self.receptance(x_r)
        k = self.key(x_k)
        v: Tensor = self.value(x_v)
        # the decay leaves the activations' precision: over a long sequence its errors would multiply
        decay = self.w0 + torch.tanh(x_w @ self.w1) @ self.w2
        w = -DECAY_SCALE * torch.sigmoid(decay.to(state_dtype(decay.dtype)))
        if v_first is None:
            v_first = v
        else:
            v = torch.addcmul(v, v_first - v, torch.sigmoid(self.v0 + (x_v @ self.v1) @ self.v2))
        a = torch.sigmoid(self.a0 + (x_a @ self.a1) @ self.a2)
        g = torch.sigmoid(x_g @ self.g1) @ self.g2

        # the removal key is normalised before the replacement rate touches the key
        kk = F.normalize((k * self.k_k).view(by_head), dim=-1, eps=1e-12)
        k = k * (1 + (a - 1) * self.k_a)

        r, k, v, a = r.view(by_head), k.view(by_head), v.view(by_head), a.view(by_head)
        dtype = r.dtype
        o, wkv = _wkv7(
            r,
            w.view(by_head),
            k.to(dtype),
            v.to(dtype),
            -kk.to(dtype),
            (kk * a).to(dtype),
            initial_state=wkv,
            cu_seqlens=None if segments is None else segments.cu_seqlens,
            backend=backend,
        )
        o = self.ln_x(o.reshape(batch * length, width)).view(batch, length, width)
        bonus = (r * k * self.r_k).sum(dim=-1, keepdim=True) * v
        o = o + bonus.view(batch, length, width)
        assert wkv is not None
        return self.output(o * g), v_first, last, wkv

    def init_weights(self) -> None:
        """The official initialisation (RWKV-LM, x070)."""
        width, size, layer = self.w0.shape[-1], self.head_dim, self.layer_id
        depth = layer / max(self.num_layers - 1, 1)
        rest = 1 - layer / self.num_layers
        i = torch.arange(width, device=self.w0.device, dtype=torch.float32)
        share = i / width
        ramp = i / max(width - 1, 1)
        linear = ramp - 0.5
        inside = (i % size) / max(size - 1, 1) * 2 - 1
        zigzag = inside * inside.abs()

        for name, power in (("r", 0.2), ("w", 0.9), ("k", 0.7), ("v", 0.7), ("a", 0.9), ("g", 0.2)):
            _fill(getattr(self, f"x_{name}"), 1 - share ** (power * rest))
        _fill(self.w0, -6 + 6 * ramp ** (1 + depth**0.3) + 0.5 + 2.5 * zigzag)
        _fill(self.a0, -0.19 + 0.3 * zigzag + 0.4 * linear)
        _fill(self.v0, 0.73 - 0.4 * linear)
        _fill(self.k_k, 0.71 - 0.1 * linear)
        init.constant_(self.k_a, 1.02)
        init.constant_(self.r_k, -0.04)
        for name in "wavg":
            init.zeros_(getattr(self, f"{name}1"))
            init.orthogonal_(getattr(self, f"{name}2"), gain=0.1)
        init.orthogonal_(self.receptance.weight, gain=1.0)
        init.orthogonal_(self.key.weight, gain=0.1)
        init.orthogonal_(self.value.weight, gain=1.0)
        init.zeros_(self.output.weight)
        init.constant_(self.ln_x.weight, ((1 + layer) / self.num_layers) ** 0.7)
        init.zeros_(self.ln_x.bias)


class RWKV7ChannelMix(nn.Module):
    """The feed-forward sub-layer (paper: MLP): a squared ReLU between two matrices."""

    def __init__(self, config: RWKV7Config, layer_id: int):
        super().__init__()
        self.layer_id, self.num_layers = layer_id, config.num_hidden_layers
        self.x_k = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.key = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.value = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, shift: Tensor | None, segments: Segments | None) -> tuple[Tensor, Tensor]:
        """x [B, T, C], shift [S, C]; returns the output [B, T, C] and the new shift."""
        shifted, last = token_shift(x, shift, segments)
        (x_k,) = mix(x, shifted, self.x_k)
        return self.value(squared_relu(self.key(x_k))), last

    def init_weights(self) -> None:
        width, inner = self.key.in_features, self.key.out_features
        share = torch.arange(width, device=self.x_k.device, dtype=torch.float32) / width
        _fill(self.x_k, 1 - share ** ((1 - self.layer_id / self.num_layers) ** 4))
        init.orthogonal_(self.key.weight, gain=math.sqrt(max(inner / width, 1.0)))
        init.zeros_(self.value.weight)


class RWKV7Block(nn.Module):
    def __init__(self, config: RWKV7Config, layer_id: int):
        super().__init__()
        width, eps = config.hidden_size, config.norm_eps
        self.ln0 = nn.LayerNorm(width, eps=eps) if layer_id == 0 else nn.Identity()
        self.ln1 = nn.LayerNorm(width, eps=eps)
        self.ln2 = nn.LayerNorm(width, eps=eps)
        self.att = RWKV7TimeMix(config, layer_id)
        self.ffn = RWKV7ChannelMix(config, layer_id)

    def forward(
        self,
        x: Tensor,
        v_first: Tensor | None,
        att_shift: Tensor | None,
        ffn_shift: Tensor | None,
        wkv: Tensor | None,
        segments: Segments | None,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns x, v_first, and the layer's new att_shift, ffn_shift and wkv."""
        x = self.ln0(x)
        mixed, v_first, last_att, wkv = self.att(self.ln1(x), v_first, att_shift, wkv, segments, backend)
        x = x + mixed
        mixed, last_ffn = self.ffn(self.ln2(x), ffn_shift, segments)
        assert v_first is not None
        assert wkv is not None
        return x + mixed, v_first, last_att, last_ffn, wkv


def _fill(parameter: Tensor, values: Tensor) -> None:
    init.copy_(parameter, values.to(parameter.dtype).view(parameter.shape))


class RWKV7PreTrainedModel(PreTrainedModel):
    config_class = RWKV7Config
    base_model_prefix = "rwkv7"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RWKV7Block"]
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        vocab, width = self.config.vocab_size, self.config.hidden_size
        if isinstance(module, RWKV7TimeMix | RWKV7ChannelMix):
            module.init_weights()
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.uniform_(module.weight, -self.config.embedding_init, self.config.embedding_init)
        elif isinstance(module, nn.Linear) and module is getattr(self, "head", None):
            init.orthogonal_(module.weight, gain=0.5 * math.sqrt(max(vocab / width, 1.0)))


class RWKV7Model(RWKV7PreTrainedModel):
    """The stack without the head."""

    def __init__(self, config: RWKV7Config):
        super().__init__(config)
        # no padding_idx: token 0 is an ordinary token and learns like any other
        self.emb = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(RWKV7Block(config, i) for i in range(config.num_hidden_layers))
        self.ln_out = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.wkv_backend = "auto"
        self.gradient_checkpointing = False
        self.post_init()

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Has `torch.compile` fuse what surrounds the WKV kernel in every block.

        The kernel itself, which is chosen and run by its registry, stays outside: a deliberate graph break, and the
        only one, so that a block is a graph before it and a graph after it.

        Raises:
            RuntimeError: torch cannot compile here, as on a CPU without a C++ compiler.
        """
        probe = torch.zeros(64, device=self.emb.weight.device)
        try:
            torch.compile(lambda x: x * 2 + 1, backend=backend)(probe)
        except Exception as error:
            cause = " ".join(str(error).split("\n\n")[0].split())
            raise RuntimeError(
                f"torch.compile needs a C++ compiler for the CPU, and Triton for a GPU: {cause}"
            ) from error
        for block in self.blocks:
            block.compile(backend=backend)

    def get_input_embeddings(self) -> nn.Module:
        return self.emb

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.emb = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        state: RWKV7State | None = None,
        cu_seqlens: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> RWKV7Output:
        """Runs B rows of T tokens, or one packed row.

        Args:
            input_ids: int64 [B, T]; or inputs_embeds [B, T, C].
            attention_mask: [B, T], zero where a row holds padding, left or right. Padding is left out of the
                computation: a padded row gives what it gives alone.
            state: of the S sequences before the first token; fresh when absent. Not modified.
            cu_seqlens: int32 [S + 1] boundaries of a packed row (B = 1).
            use_cache: whether to return the state; as in the config when absent, and off in training.

        Raises:
            ValueError: inputs that contradict each other, or that the WKV backend refuses.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.emb(input_ids) if inputs_embeds is None else inputs_embeds
        batch, length = x.shape[:2]
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training

        padding = None
        if attention_mask is not None and not bool(attention_mask.all()):
            if cu_seqlens is not None:
                raise ValueError("give either attention_mask or cu_seqlens: a packed row holds no padding")
            padding = attention_mask.bool()
            lengths = padding.sum(1)
            if not bool(lengths.all()):
                raise ValueError("attention_mask leaves a row without any token")
            cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
            x = x[padding].unsqueeze(0)

        segments = None if cu_seqlens is None else Segments.of(cu_seqlens, x.shape[1], x.device)
        sequences = batch if segments is None else len(segments.first)
        if state is not None and state.sequences != sequences:
            raise ValueError(f"the state holds {state.sequences} sequences, the input {sequences}")

        v_first = None
        states: list[tuple[Tensor, Tensor, Tensor]] = []
        for i, block in enumerate(self.blocks):
            before = (None, None, None) if state is None else (state.att_shift[i], state.ffn_shift[i], state.wkv[i])
            arguments = (x, v_first, *before, segments, self.wkv_backend)
            if self.gradient_checkpointing and self.training:
                out = checkpoint(block, *arguments, use_reentrant=False)
            else:
                out = block(*arguments)
            x, v_first = out[0], out[1]
            if use_cache:
                states.append(out[2:])
        x = self.ln_out(x)
        if padding is not None:
            x = x.new_zeros(batch, length, x.shape[-1]).masked_scatter(padding.unsqueeze(-1), x)

        new_state = None
        if use_cache:
            att_shift, ffn_shift, wkv = (torch.stack(parts) for parts in zip(*states, strict=True))
            new_state = RWKV7State(wkv=wkv, att_shift=att_shift, ffn_shift=ffn_shift)
        return RWKV7Output(last_hidden_state=x, state=new_state)


class RWKV7ForCausalLM(RWKV7PreTrainedModel, GenerationMixin):
    """RWKV-7 with its language-model head."""

    def __init__(self, config: RWKV7Config):
        super().__init__(config)
        self.rwkv7 = RWKV7Model(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def wkv_backend(self) -> str:
        """Name of the WKV kernel to run (`smi_kernels.available`), or "auto"."""
        return self.rwkv7.wkv_backend

    @wkv_backend.setter
    def wkv_backend(self, name: str) -> None:
        self.rwkv7.wkv_backend = name

    def get_input_embeddings(self) -> nn.Module:
        return self.rwkv7.emb

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.rwkv7.emb = value

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        state: RWKV7State | None = None,
        cu_seqlens: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs,
    ) -> RWKV7CausalLMOutput:
        """As `RWKV7Model.forward`, and the logits.

        Args:
            labels: int64 [B, T] in transformers' convention: the ids themselves, shifted here, -100 where not
                supervised. The last token of a segment predicts nothing. The loss is the mean over the rest.
            logits_to_keep: compute the logits of the last so many positions alone; 0 for all.
        """
        out = self.rwkv7(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            state=state,
            cu_seqlens=cu_seqlens,
            use_cache=use_cache,
        )
        hidden = out.last_hidden_state
        if labels is not None and logits_to_keep:
            raise ValueError("labels need the logits of every position: leave logits_to_keep at 0")
        logits = self.head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        loss = None
        if labels is not None:
            if attention_mask is not None:
                labels = labels.masked_fill(attention_mask == 0, -100)
            targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
            if attention_mask is not None:
                targets = targets.masked_fill(attention_mask == 0, -100)
            if cu_seqlens is not None:
                last = torch.tensor(segment_bounds(cu_seqlens)[1:], device=targets.device) - 1
                targets = targets.index_fill(1, last, -100)
            flat = logits.flatten(0, 1)
            loss = F.cross_entropy(flat.to(state_dtype(flat.dtype)), targets.flatten())
        return RWKV7CausalLMOutput(loss=loss, logits=logits, state=out.state)

    # transformers hands a cache of its own kind from step to step, under a name that changed between
    # releases; the recurrent state travels under ours, through these two hooks, in all of them.

    def prepare_inputs_for_generation(self, input_ids, state=None, unread=None, attention_mask=None, **kwargs):
        inputs = {"input_ids": input_ids, "state": state, "use_cache": kwargs.get("use_cache", True)}
        if unread is None:
            inputs["attention_mask"] = attention_mask
            if kwargs.get("inputs_embeds") is not None and input_ids.shape[1] == 0:
                inputs["inputs_embeds"] = kwargs["inputs_embeds"]
                del inputs["input_ids"]
        elif state is not None:
            inputs["input_ids"] = input_ids[:, -unread:]
        inputs["logits_to_keep"] = kwargs.get("logits_to_keep") or 0
        return inputs

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, is_encoder_decoder=False, num_new_tokens=1):
        model_kwargs = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, is_encoder_decoder, num_new_tokens
        )
        if model_kwargs.get("use_cache", True):
            model_kwargs["state"] = outputs["state"]
            model_kwargs["unread"] = num_new_tokens
        return model_kwargs

    def generate(self, *args, **kwargs):
        """transformers' `generate`, greedy or sampled; ``state=`` continues from an earlier state.

        Raises:
            ValueError: for beam search and assisted decoding, which reorder or rewind a key-value cache.
        """
        config = kwargs.get("generation_config") or self.generation_config
        beams = kwargs.get("num_beams") or getattr(config, "num_beams", None) or 1
        if beams > 1 or kwargs.get("assistant_model") is not None:
            raise ValueError(
                "beam search and assisted decoding reorder or rewind a key-value cache, which a recurrent model "
                "does not have: use greedy decoding or sampling (num_beams=1, no assistant_model)"
            )
        return super().generate(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
