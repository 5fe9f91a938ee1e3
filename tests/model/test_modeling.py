import math

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from transformers import GenerationConfig

from smi.data import SMIDataModule
from smi.data.synthetic import SyntheticTools
from smi.model import RWKV7Config, RWKV7ForCausalLM, RWKV7State, modeling
from smi.tokenizer import load_tokenizer


def tiny(seed=0, **changes) -> RWKV7ForCausalLM:
    """A random model in which no path is zero."""
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 32,
        "decay_low_rank_dim": 8,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
    }
    torch.manual_seed(seed)
    model = RWKV7ForCausalLM(RWKV7Config(**(sizes | changes))).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def ids_of(*shape, seed=1):
    # not 0: transformers takes the padding token for padding where no mask is given
    return torch.randint(1, 96, shape, generator=torch.Generator().manual_seed(seed))


def states_of(state: RWKV7State):
    return (state.wkv, state.att_shift, state.ffn_shift)


def assert_same_state(got: RWKV7State, want: RWKV7State):
    for x, y in zip(states_of(got), states_of(want), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pieces", [[30], [13, 17], [1] * 30], ids=["30", "13+17", "30x1"])
def test_state_carries_on_and_is_not_modified(pieces):
    model, ids = tiny(), ids_of(2, 30)
    whole = model(ids, use_cache=True)
    state = RWKV7State.fresh(model.config, 2, dtype=torch.float64)
    logits, at = [], 0
    for n in pieces:
        before = [x.clone() for x in states_of(state)]
        out = model(ids[:, at : at + n], state=state, use_cache=True)
        assert all(torch.equal(x, y) for x, y in zip(states_of(state), before, strict=True))
        logits.append(out.logits)
        state, at = out.state, at + n
    torch.testing.assert_close(torch.cat(logits, 1), whole.logits, rtol=1e-10, atol=1e-10)
    assert_same_state(state, whole.state)


def test_packed_row_goes_on_from_states_of_its_segments():
    model, cut = tiny(), torch.tensor([0, 4, 11], dtype=torch.int32)
    first, second = ids_of(1, 11, seed=1), ids_of(1, 11, seed=2)
    state = model(first, cu_seqlens=cut, use_cache=True).state
    out = model(second, cu_seqlens=cut, state=state, use_cache=True)
    for i, (start, end) in enumerate([(0, 4), (4, 11)]):
        alone = model(torch.cat([first[:, start:end], second[:, start:end]], 1), use_cache=True)
        torch.testing.assert_close(out.logits[:, start:end], alone.logits[:, end - start :])
        assert_same_state(out.state.select([i]), alone.state)


def test_changing_a_document_changes_no_other_bit_for_bit():
    model, cut = tiny().float(), torch.tensor([0, 9, 20, 40], dtype=torch.int32)
    ids = ids_of(1, 40)
    other = ids.clone()
    other[:, 9:20] = ids_of(1, 11, seed=5)
    a, b = (model(x, cu_seqlens=cut).logits for x in (ids, other))
    assert torch.equal(a[:, :9], b[:, :9])
    assert torch.equal(a[:, 20:], b[:, 20:])
    assert not torch.equal(a[:, 9:20], b[:, 9:20])


def test_a_pack_of_the_data_module_keeps_its_documents_apart():
    """From rows to logits: other tokens in one document leave the logits of all others as they were, bit for bit."""
    data = SMIDataModule(load_tokenizer("compact"), SyntheticTools(0), steps=1, max_length=400, pack_length=640)
    batch = next(iter(data.train_dataloader()))
    data.teardown()
    assert batch.documents > 1
    model = tiny(vocab_size=load_tokenizer("compact").vocab_size).float()
    model.wkv_backend = "recurrent"
    logits = model(batch.input_ids, cu_seqlens=batch.cu_seqlens).logits[0]
    changed = batch.document_ids[0] == 1
    ids = torch.where(changed, (batch.input_ids + 1) % model.config.vocab_size, batch.input_ids)
    others = model(ids, cu_seqlens=batch.cu_seqlens).logits[0]
    assert torch.equal(logits[~changed], others[~changed])
    assert not (logits[changed] == others[changed]).all(-1).any()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_rows_alone(side):
    model, lengths = tiny(), [3, 10, 7]
    rows = [ids_of(1, n, seed=n) for n in lengths]
    pads = [(10 - n, 0) if side == "left" else (0, 10 - n) for n in lengths]
    batch = torch.cat([F.pad(row, pad, value=5) for row, pad in zip(rows, pads, strict=True)])
    mask = torch.cat([F.pad(torch.ones_like(row), pad) for row, pad in zip(rows, pads, strict=True)])
    out = model(batch, attention_mask=mask, labels=batch, use_cache=True)
    losses = []
    for i, (row, pad) in enumerate(zip(rows, pads, strict=True)):
        alone = model(row, use_cache=True)
        torch.testing.assert_close(out.logits[i, pad[0] : pad[0] + row.shape[1]], alone.logits[0])
        assert_same_state(out.state.select([i]), alone.state)
        losses.append(F.cross_entropy(alone.logits[0, :-1], row[0, 1:], reduction="sum"))
    # padding is neither predicted nor predicts
    targets = sum(lengths) - len(lengths)
    if side == "right":
        torch.testing.assert_close(out.loss, sum(losses) / targets)


class TestGenerate:
    def test_it_carries_the_state(self):
        """Each step reads one token, and gives what a loop by hand gives."""
        model, ids = tiny(), ids_of(2, 9)
        read = []
        handle = model.rwkv7.emb.register_forward_hook(lambda m, args, out: read.append(args[0].shape[1]))
        out = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
        handle.remove()
        assert read == [9] + [1] * 7

        step, state, tokens = ids, None, []
        for _ in range(8):
            result = model(step, state=state, use_cache=True)
            step, state = result.logits[:, -1:].argmax(-1), result.state
            tokens.append(step)
        assert torch.equal(out[:, 9:], torch.cat(tokens, 1))

    def test_without_cache_the_tokens_are_the_same(self):
        model, ids = tiny(), ids_of(1, 9)
        a, b = (
            model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, use_cache=cache)
            for cache in (True, False)
        )
        assert torch.equal(a, b)

    def test_it_goes_on_from_a_state(self):
        model, ids = tiny(), ids_of(1, 12)
        state = model(ids[:, :7], use_cache=True).state
        whole = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
        rest = model.generate(ids[:, 7:], state=state, max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert torch.equal(whole[:, 12:], rest[:, 5:])

    def test_a_padded_batch_is_a_manual_loop_over_each_row(self):
        """The prompt is read once, then a token a step; the end of one row does not move the other."""
        model = tiny()
        rows = [ids_of(1, 4, seed=2), ids_of(1, 9, seed=3)]
        batch = torch.cat([F.pad(rows[0], (5, 0)), rows[1]])
        mask = torch.cat([F.pad(torch.ones_like(rows[0]), (5, 0)), torch.ones_like(rows[1])])
        want = []
        for row in rows:
            step, state, tokens = row, None, []
            for _ in range(8):
                result = model(step, state=state, use_cache=True)
                step, state = result.logits[:, -1:].argmax(-1), result.state
                tokens.append(int(step))
            want.append(tokens)
        read = []
        handle = model.rwkv7.emb.register_forward_hook(lambda m, args, out: read.append(tuple(args[0].shape)))
        out = model.generate(batch, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
        handle.remove()
        assert out[:, 9:].tolist() == want
        assert read == [(2, 9)] + [(2, 1)] * 7

        end = want[0][3]
        out = model.generate(
            batch, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=end, pad_token_id=0
        )[:, 9:].tolist()
        for got, tokens in zip(out, want, strict=True):
            stop = tokens.index(end) + 1 if end in tokens else 8
            assert got[:stop] == tokens[:stop]
            assert set(got[stop:]) <= {0}

    def test_left_padded_prompts(self):
        model = tiny()
        rows = [ids_of(1, 4, seed=2), ids_of(1, 9, seed=3)]
        batch = torch.cat([F.pad(rows[0], (5, 0)), rows[1]])
        mask = torch.cat([F.pad(torch.ones_like(rows[0]), (5, 0)), torch.ones_like(rows[1])])
        settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        out = model.generate(batch, attention_mask=mask, **settings)
        for i, row in enumerate(rows):
            assert torch.equal(out[i, 9:], model.generate(row, **settings)[0, row.shape[1] :])

    def test_several_sampled_sequences_of_one_prompt(self):
        model, ids = tiny(), ids_of(1, 5)
        torch.manual_seed(0)
        out = model.generate(ids, max_new_tokens=5, do_sample=True, num_return_sequences=3, eos_token_id=None, top_k=0)
        assert out.shape == (3, 10)
        assert len({tuple(row) for row in out.tolist()}) > 1

    @pytest.mark.parametrize("how", [{"num_beams": 3}, {"generation_config": GenerationConfig(num_beams=2)}])
    def test_beam_search_is_refused(self, how):
        with pytest.raises(ValueError, match="beam search"):
            tiny().generate(ids_of(1, 4), max_new_tokens=2, **how)


def random_state(model, sequences) -> RWKV7State:
    state = RWKV7State.fresh(model.config, sequences, dtype=torch.float64)
    generator = torch.Generator().manual_seed(7)
    return RWKV7State(*(torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in states_of(state)))


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("carried", [False, True], ids=["fresh", "carried"])
def test_activation_checkpointing_changes_no_gradient(layers, packed, carried):
    """Those of the state that came in included, when that of the end counts too."""
    model, ids = tiny(num_hidden_layers=layers).train(), ids_of(1 if packed else 2, 40)
    cut = torch.tensor([0, 12, 40], dtype=torch.int32) if packed else None
    gradients, kept = [], []
    for checkpointing in (False, True):
        model.rwkv7.gradient_checkpointing = checkpointing
        model.zero_grad()
        state = random_state(model, 2) if carried else None
        leaves = [x.requires_grad_() for x in states_of(state)] if state else []
        saved = 0

        def count(x):
            nonlocal saved
            saved += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            out = model(ids, labels=ids, cu_seqlens=cut, state=state, use_cache=True)
        (out.loss + sum(x.square().sum() for x in states_of(out.state))).backward()
        gradients.append([x.grad.clone() for x in (*model.parameters(), *leaves)])
        kept.append(saved)
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)
    assert kept[1] < kept[0] / 2


def test_pieces_back_propagate_as_the_whole_until_the_state_is_detached():
    model, ids = tiny().train(), ids_of(2, 24)

    def parts(state_between):
        """Logits of the second half, and the embeddings of the first, which they may depend on."""
        early = model.rwkv7.emb(ids[:, :10]).detach().requires_grad_()
        state = model(inputs_embeds=early, use_cache=True).state
        return early, model(ids[:, 10:], state=state_between(state)).logits

    whole = model(ids).logits[:, 10:]
    weight = torch.randn_like(whole)
    early, logits = parts(lambda state: state)
    torch.testing.assert_close(logits, whole)
    model.zero_grad()
    (logits * weight).sum().backward()
    assert float(early.grad.abs().min(dim=-1).values.max()) > 0
    through = [p.grad.clone() for p in model.rwkv7.blocks.parameters()]
    whole_gradients = torch.autograd.grad((whole * weight).sum(), list(model.rwkv7.blocks.parameters()))
    torch.testing.assert_close(through, list(whole_gradients))

    early, logits = parts(RWKV7State.detach)
    torch.testing.assert_close(logits, whole)
    (logits * weight).sum().backward()
    assert early.grad is None


def test_nothing_that_comes_in_is_written_to():
    model, ids = tiny().train(), ids_of(1, 20)
    cut = torch.tensor([0, 1, 9, 20], dtype=torch.int32)
    embeds = model.rwkv7.emb(ids).detach()
    state = random_state(model, 3)
    inputs = (ids, cut, embeds, *states_of(state))
    before = [x.clone() for x in inputs]
    for given in ({"input_ids": ids, "labels": ids}, {"inputs_embeds": embeds, "labels": ids}):
        out = model(**given, cu_seqlens=cut, state=state, use_cache=True)
        out.loss.backward()
        for x, y in zip(states_of(out.state), states_of(state), strict=True):
            assert x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_bfloat16_autocast_keeps_decay_and_state_in_float32(monkeypatch):
    """bfloat16 has 8 bits; in units of the largest logit, gradients in those of their norm."""
    model, ids = tiny().float().train(), ids_of(1, 200)
    want = model(ids, labels=ids, use_cache=True)
    want.loss.backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    seen, kernel = [], modeling._wkv7
    monkeypatch.setattr(modeling, "_wkv7", lambda *xs, **kw: seen.append([x.dtype for x in xs]) or kernel(*xs, **kw))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, labels=ids, use_cache=True)
    out.loss.backward()
    low, full = torch.bfloat16, torch.float32
    assert seen == [[low, full, low, low, low, low]] * 2
    assert out.state.wkv.dtype == full
    assert (out.logits.float() - want.logits).abs().max() < 0.03 * want.logits.abs().max()
    assert (out.state.wkv - want.state.wkv).norm() < 0.02 * want.state.wkv.norm()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == full
        assert (parameter.grad - exact[name]).norm() < 0.1 * exact[name].norm(), name


class TestCompile:
    def test_the_kernel_is_the_only_graph_break(self):
        """And nothing changes; layers of one kind and rows of any length share their graphs."""
        model = tiny(num_hidden_layers=3).train()
        bounds = ([0, 5, 16], [0, 3, 9, 21], [0, 11, 19, 26])
        cases = [(ids_of(1, cut[-1]), torch.tensor(cut, dtype=torch.int32)) for cut in bounds]

        def run(ids, cu_seqlens):
            model.zero_grad()
            out = model(ids, labels=ids, cu_seqlens=cu_seqlens, use_cache=True)
            out.loss.backward()
            return [out.logits.detach(), *states_of(out.state.detach()), *(p.grad.clone() for p in model.parameters())]

        want = [run(*case) for case in cases]
        dynamo.reset()
        dynamo.utils.counters.clear()
        model.rwkv7.compile_blocks("eager")
        graphs = []
        for case, expected in zip(cases, want, strict=True):
            torch.testing.assert_close(run(*case), expected)
            graphs.append(dynamo.utils.counters["stats"]["unique_graphs"])
        breaks = dynamo.utils.counters["graph_break"]
        dynamo.reset()
        assert breaks
        # the third length needs nothing new, and the third layer needed nothing that the second had not
        assert graphs[1] == graphs[2] <= 2 * graphs[0]
        assert graphs[0] < 3 * 3
        assert all("torch.compiler.disable" in reason and "wkv7" in reason for reason in breaks), breaks

    def test_the_channel_mix_is_one_graph(self):
        ffn, x = tiny().rwkv7.blocks[1].ffn, torch.randn(1, 12, 64, dtype=torch.float64)
        segments = modeling.Segments.of(torch.tensor([0, 5, 12], dtype=torch.int32), 12, x.device)
        dynamo.reset()
        compiled = torch.compile(ffn, fullgraph=True, backend="eager")
        for given in (None, segments):
            torch.testing.assert_close(compiled(x, None, given), ffn(x, None, given))
        dynamo.reset()

    def test_without_a_compiler_it_says_so(self, monkeypatch):
        def broken(graph, inputs):
            raise RuntimeError("no working C++ compiler found")

        dynamo.reset()
        with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler for the CPU.*no working C\+\+ compiler"):
            tiny().rwkv7.compile_blocks(broken)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "either input_ids or inputs_embeds"),
        ({"input_ids": ids_of(1, 4), "inputs_embeds": torch.zeros(1, 4, 64)}, "either input_ids"),
        ({"input_ids": ids_of(1, 4), "cu_seqlens": torch.tensor([0, 3], dtype=torch.int32)}, "ends at 3"),
        (
            {"input_ids": ids_of(2, 4), "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])},
            "without any token",
        ),
        ({"input_ids": ids_of(1, 4), "labels": ids_of(1, 4), "logits_to_keep": 1}, "logits_to_keep"),
    ],
)
def test_contradicting_inputs_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        tiny()(**arguments)


def test_a_state_of_another_batch_is_refused():
    model = tiny()
    state = RWKV7State.fresh(model.config, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="3 sequences, the input 2"):
        model(ids_of(2, 4), state=state)


class TestConfig:
    def test_a_wrong_head_count_is_put_right_with_a_warning(self):
        with pytest.warns(UserWarning, match="num_heads 32 does not fit"):
            assert RWKV7Config(hidden_size=768, num_heads=32).num_heads == 12

    @pytest.mark.parametrize(
        "changes",
        [
            {"hidden_size": 100},
            {"norm_bias": False},
            {"tie_word_embeddings": True},
            {"wkv_state_dtype": "bfloat16"},
        ],
    )
    def test_what_rwkv7_is_not_is_refused(self, changes):
        with pytest.raises(ValueError, match="|".join(("multiple", "bias", "matrix", "float32"))):
            RWKV7Config(**changes)

    @pytest.mark.parametrize(
        ("name", "parameters"),
        [
            ("rwkv7_0b1", 191_084_544),
            ("rwkv7_0b4", 450_834_432),
            ("rwkv7_1b5", 1_527_668_736),
            ("rwkv7_2b9", 2_948_065_280),
        ],
    )
    def test_shipped_sizes_have_the_released_parameter_counts(self, name, parameters):
        import yaml

        from smi.composing import config_dir

        shape = yaml.safe_load((config_dir() / "model" / f"{name}.yaml").read_text())
        fields = {k: v for k, v in shape.items() if k not in ("name", "gradient_checkpointing")}
        with torch.device("meta"):
            model = RWKV7ForCausalLM(RWKV7Config(**fields))
        counted = sum(p.numel() for p in model.parameters())
        first = sum(getattr(model.rwkv7.blocks[0].att, n).numel() for n in ("v0", "v1", "v2"))
        assert counted in (parameters, parameters - first)


class TestInitialisation:
    """By formula, for a model of 4 layers, 128 channels, 2 heads."""

    @pytest.fixture(scope="class")
    def model(self):
        torch.manual_seed(0)
        return RWKV7ForCausalLM(RWKV7Config(vocab_size=300, hidden_size=128, num_hidden_layers=4, gate_low_rank_dim=32))

    @pytest.mark.parametrize("layer", [0, 1, 3])
    def test_mixing_vectors(self, model, layer):
        block, rest = model.rwkv7.blocks[layer], 1 - layer / 4
        for name, power in {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}.items():
            want = torch.tensor([1 - (i / 128) ** (power * rest) for i in range(128)])
            torch.testing.assert_close(getattr(block.att, f"x_{name}").flatten(), want)
        want = torch.tensor([1 - (i / 128) ** (rest**4) for i in range(128)])
        torch.testing.assert_close(block.ffn.x_k.flatten(), want)

    @pytest.mark.parametrize("layer", [0, 1, 3])
    def test_biases(self, model, layer):
        att = model.rwkv7.blocks[layer].att
        for i in (0, 1, 63, 64, 100, 127):
            place = (i % 64) / 63 * 2 - 1
            zigzag, linear = math.copysign(place**2, place), i / 127 - 0.5
            decay = -6 + 6 * (i / 127) ** (1 + (layer / 3) ** 0.3) + 0.5 + 2.5 * zigzag
            assert float(att.w0[0, 0, i]) == pytest.approx(decay, abs=1e-5)
            assert float(att.a0[0, 0, i]) == pytest.approx(-0.19 + 0.3 * zigzag + 0.4 * linear, abs=1e-6)
            assert float(att.v0[0, 0, i]) == pytest.approx(0.73 - 0.4 * linear, abs=1e-6)
            assert float(att.k_k[0, 0, i]) == pytest.approx(0.71 - 0.1 * linear, abs=1e-6)

    def test_constants_and_zeros(self, model):
        for layer, block in enumerate(model.rwkv7.blocks):
            att = block.att
            assert torch.all(att.k_a == torch.tensor(1.02))
            assert torch.all(att.r_k == torch.tensor(-0.04))
            for zero in (
                att.w1,
                att.a1,
                att.v1,
                att.g1,
                att.output.weight,
                block.ffn.value.weight,
                att.ln_x.bias,
            ):
                assert torch.count_nonzero(zero) == 0
            torch.testing.assert_close(att.ln_x.weight, torch.full((128,), ((layer + 1) / 4) ** 0.7))
            for norm in (block.ln1, block.ln2):
                assert torch.all(norm.weight == 1)
                assert torch.count_nonzero(norm.bias) == 0

    def test_orthogonal_matrices(self, model):
        att, ffn = model.rwkv7.blocks[2].att, model.rwkv7.blocks[2].ffn

        def gain(matrix):
            small = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
            gram = small @ small.T
            scale = float(gram.diagonal().mean())
            torch.testing.assert_close(gram, scale * torch.eye(len(gram)), rtol=1e-4, atol=1e-4)
            return math.sqrt(scale)

        assert gain(att.receptance.weight) == pytest.approx(1, rel=1e-4)
        assert gain(att.value.weight) == pytest.approx(1, rel=1e-4)
        assert gain(att.key.weight) == pytest.approx(0.1, rel=1e-4)
        assert gain(ffn.key.weight) == pytest.approx(2, rel=1e-4)
        assert gain(model.head.weight) == pytest.approx(0.5 * math.sqrt(300 / 128), rel=1e-4)
        for factor in (att.w2, att.a2, att.v2, att.g2):
            assert gain(factor) == pytest.approx(0.1, rel=1e-4)

    def test_a_single_layer_is_the_first_and_not_divided_by_zero(self):
        torch.manual_seed(0)
        model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=128, num_hidden_layers=1))
        block = model.rwkv7.blocks[0]
        for i in (0, 63, 64, 100):
            place = (i % 64) / 63 * 2 - 1
            decay = -6 + 6 * (i / 127) + 0.5 + 2.5 * math.copysign(place**2, place)
            assert float(block.att.w0[0, 0, i]) == pytest.approx(decay, abs=1e-5)
            assert float(block.att.x_r[0, 0, i]) == pytest.approx(1 - (i / 128) ** 0.2, abs=1e-6)
            assert float(block.ffn.x_k[0, 0, i]) == pytest.approx(1 - i / 128, abs=1e-6)
        assert torch.all(block.att.ln_x.weight == 1)
        # a head that is narrower than the model has no wider gain
        gram = model.head.weight @ model.head.weight.T
        torch.testing.assert_close(gram, 0.25 * torch.eye(100), rtol=1e-4, atol=1e-4)

    def test_every_parameter_has_a_formula(self, model):
        """What the tests of this class look at is all there is."""
        att = {f"x_{n}" for n in "rwkvag"} | {"w0", "a0", "v0", "k_k", "k_a", "r_k", "ln_x.weight", "ln_x.bias"}
        att |= {f"{n}{i}" for n in "wavg" for i in (1, 2)}
        att |= {f"{n}.weight" for n in ("receptance", "key", "value", "output")}
        names = {name for name, _ in model.rwkv7.blocks[1].named_parameters()}
        norms = {f"{n}.{kind}" for n in ("ln1", "ln2") for kind in ("weight", "bias")}
        assert names == {f"att.{n}" for n in att} | {"ffn.x_k", "ffn.key.weight", "ffn.value.weight"} | norms
        first = {name for name, _ in model.rwkv7.blocks[0].named_parameters()}
        assert first == names - {"att.v0", "att.v1", "att.v2"} | {"ln0.weight", "ln0.bias"}
        for norm in (model.rwkv7.blocks[0].ln0, model.rwkv7.ln_out):
            assert torch.all(norm.weight == 1)
            assert torch.count_nonzero(norm.bias) == 0

    def test_embedding(self, model):
        weight = model.rwkv7.emb.weight
        assert 0.9e-4 < float(weight.abs().max()) <= 1e-4
        assert torch.count_nonzero(weight[0])
