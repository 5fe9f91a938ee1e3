import pytest
import torch
from scripted import tiny

from smi.model.modeling import RWKV7State
from smi.runtime.decoding import Decoder
from smi.runtime.loading import for_decoding


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("laid_out", [False, True])
def test_a_step_is_the_model_at_one_token(dtype, tolerance, laid_out):
    """Over some steps, for sequences in company: logits and all of the state."""
    model = tiny(50).to(dtype).eval()
    ids = torch.randint(0, 50, (3, 6), generator=torch.Generator().manual_seed(1))
    moved = RWKV7State.fresh(model.config, 3, dtype=dtype)
    state = RWKV7State.fresh(model.config, 3, dtype=dtype)
    model.wkv_backend = "recurrent"
    wanted = []
    with torch.no_grad():
        for column in ids.T:
            out = model(input_ids=column[:, None], state=state, use_cache=True)
            state = out.state
            wanted.append(out.logits[:, 0])
    decoder = Decoder(for_decoding(model) if laid_out else model)
    for column, logits in zip(ids.T, wanted, strict=True):
        found = decoder.step(column, moved)
        assert found.dtype == logits.dtype
        torch.testing.assert_close(found, logits, rtol=tolerance, atol=tolerance * float(logits.abs().max()))
    for name in ("wkv", "att_shift", "ffn_shift"):
        ours, theirs = getattr(moved, name), getattr(state, name)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))
