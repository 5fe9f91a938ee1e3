import pytest
import torch
from scripted import tiny

from smi.model.modeling import RWKV7State
from smi.runtime.decoding import TorchDecoder, decoder_for
from smi_kernels import cpu

ANSWER = cpu.verify(torch.device("cpu"), torch.float32, 64)
compiled = pytest.mark.skipif(not ANSWER.ok, reason=f"cpu: {ANSWER.reason}")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


def ids_of(sequences, length, rows=50):
    return torch.randint(0, rows, (sequences, length), generator=torch.Generator().manual_seed(1))


def steps(decoder, model, ids):
    """Logits [T, B, V] and the state after them."""
    state = RWKV7State.fresh(model.config, len(ids), dtype=model.dtype)
    return torch.stack([decoder.step(column, state) for column in ids.T]), state


def assert_close(found, wanted, tolerance):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("make", [TorchDecoder, decoder_for])
@pytest.mark.parametrize("sequences", [1, 3, 6])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        # ranks that fill no vector, several heads, a layer
        {"decay_low_rank_dim": 9, "a_low_rank_dim": 20, "v_low_rank_dim": 1, "gate_low_rank_dim": 33},
        {"hidden_size": 192, "head_dim": 64, "num_hidden_layers": 1, "intermediate_size": 96},
        # sizes that the compiled form does not take
        {"hidden_size": 48, "head_dim": 16, "intermediate_size": 70},
    ],
    ids=["plain", "ranks", "heads", "odd"],
)
def test_a_step_is_the_model_at_one_token(dtype, make, sequences, shape):
    """Over some steps, for sequences in company: logits and all of the state."""
    model = tiny(50, **shape).to(dtype).eval()
    model.wkv_backend = "recurrent"
    ids = ids_of(sequences, 5)
    found, moved = steps(make(model), model, ids)
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True)
    assert found.dtype == out.logits.dtype
    assert_close(found, out.logits.transpose(0, 1), TOLERANCE[dtype])
    for name in ("wkv", "att_shift", "ffn_shift"):
        assert_close(getattr(moved, name), getattr(out.state, name), TOLERANCE[dtype])


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_company_and_threads_change_no_bit(dtype):
    model = tiny(3_000, intermediate_size=8192, num_hidden_layers=3).to(dtype)
    decoder, ids = decoder_for(model), ids_of(9, 4, 3_000)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted, states = steps(decoder, model, ids)
        torch.set_num_threads(4)
        for some in ([0], [1, 8], [2, 3, 4, 5], list(range(9))):
            found, moved = steps(decoder, model, ids[some])
            assert torch.equal(found, wanted[:, some])
            apart = states.select(some)
            assert torch.equal(moved.wkv, apart.wkv)
            assert torch.equal(moved.att_shift, apart.att_shift)
            assert torch.equal(moved.ffn_shift, apart.ffn_shift)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("make", [TorchDecoder, decoder_for])
@pytest.mark.parametrize("wrong", [50, -1])
def test_an_id_without_an_embedding_is_refused(make, wrong):
    model = tiny(50)
    with pytest.raises(IndexError):
        steps(make(model), model, torch.tensor([[3], [wrong]]))


@compiled
def test_the_compiled_form_is_taken_where_it_can_be():
    def taken(model):
        return type(decoder_for(model)).__name__

    assert taken(tiny(50)) == taken(tiny(50).bfloat16()) == "CPUDecoder"
    assert taken(tiny(50).double()) == taken(tiny(50, intermediate_size=70)) == "TorchDecoder"
    mixed = tiny(50).bfloat16()
    mixed.head.float()
    assert taken(mixed) == "TorchDecoder"
