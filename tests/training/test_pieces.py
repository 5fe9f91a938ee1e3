"""Documents that are longer than a row: read in pieces that hand the state on."""

from itertools import pairwise

import lightning as L
import numpy as np
import pytest
import torch
from shards import example as document
from test_module import Gradients, module, trainer
from two_ranks import run_on_two_ranks

from smi.data.batch import PackedBatch, pack, piece_ends, pieces
from smi.data.loader import FixedBatches
from smi.model.modeling import RWKV7State
from smi.protocol.codec import Example
from smi.protocol.tokens import BlockType
from smi.training.loss import supervised_loss
from smi.training.tuning import InitialState

EOT = 9


def conversation(*lengths: int, seed: int = 0) -> Example:
    """Transmissions of so many tokens, the user's and the model's by turns, each with an EOT and a newline; an EOS."""
    generator = np.random.default_rng(seed)
    ids, types, mask = [], [], []
    for turn, length in enumerate(lengths):
        kind = BlockType.OUT if turn % 2 else BlockType.USR
        ids += generator.integers(10, 200, length).tolist()
        types += [kind] * (length - 2) + [BlockType.EOT] * 2
        mask += [bool(turn % 2)] * length
    return Example(
        np.array([*ids, 3], np.int32), np.array([*mask, mask[-1]]), np.array([*types, BlockType.EOS], np.uint8)
    )


def in_pieces(example: Example, most: int) -> PackedBatch:
    return pack([example], capacity=most, piece=most)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tuned", [False, True])
def test_the_loss_is_that_of_the_whole_document(dtype, tuned):
    """Both shifts and the WKV state go on; nothing is lost at a cut, the label across it included."""
    subject = noisy(module()).to(dtype)
    if tuned:
        subject.initial_state = InitialState(subject.model.config).to(dtype)
        torch.nn.init.normal_(subject.initial_state.time_state, std=0.2)
    example = conversation(20, 30, 9, 41, 12, 25)
    batch = in_pieces(example, 50)
    # the EOS goes with the last transmission
    assert batch.pieces == (50, 100, 138)
    with torch.no_grad():
        whole, cut = subject._loss(pack([example])), subject._loss(batch)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(cut.loss, whole.loss, rtol=tolerance, atol=0)
    torch.testing.assert_close(cut.by_type, whole.by_type, rtol=10 * tolerance, atol=0)
    assert torch.equal(cut.tokens, whole.tokens)
    assert torch.equal(cut.correct, whole.correct)


def noisy(subject, std: float = 0.05):
    torch.manual_seed(1)
    for parameter in subject.model.parameters():
        parameter.data += std * torch.randn_like(parameter)
    return subject


def test_the_gradient_is_the_truncated_one():
    """Two documents in a step of two micro-batches: each piece's own gradient, states taken as given."""
    long, short = conversation(20, 30, 9, 41), conversation(10, 12, seed=1)
    batches = [in_pieces(long, 50), pack([short])]
    gradients, subject = Gradients(), noisy(module())
    subject.initial_state = InitialState(subject.model.config).double()
    trainer(accumulate_grad_batches=2, gradient_clip_val=None, callbacks=[gradients]).fit(
        subject, FixedBatches(batches)
    )

    model = noisy(module()).model
    initial = InitialState(model.config).double()
    loss, start, state = 0, 0, initial(1)
    whole = pack([long])
    for end in batches[0].pieces:
        at = slice(start, end)
        out = model.rwkv7(whole.input_ids[:, at], state=state, use_cache=True)
        part = supervised_loss(out.last_hidden_state, model.head.weight, whole.labels[:, at], whole.block_types[:, at])
        loss, start = loss + part.loss, end
        state = RWKV7State(*(x.detach() for x in (out.state.wkv, out.state.att_shift, out.state.ffn_shift)))
    other = pack([short])
    hidden = model.rwkv7(other.input_ids, state=initial(1), use_cache=False).last_hidden_state
    loss = loss + supervised_loss(hidden, model.head.weight, other.labels, other.block_types).loss
    (loss / sum(batch.supervised_tokens for batch in batches)).backward()
    wanted = [*model.parameters(), *initial.parameters()]
    assert len(wanted) == len(gradients.seen)
    for found, parameter in zip(gradients.seen, wanted, strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-9, atol=1e-12)


def test_gradients_are_gone_after_each_step():
    """Each of the steps has the gradient of its own document alone."""
    batch = in_pieces(conversation(20, 30, 9, 41), 50)
    norms = []

    class Watch(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in pl_module.parameters()])))

    subject = noisy(module(lr=1e-12))
    trainer(max_steps=3, max_epochs=-1, callbacks=[Watch()]).fit(subject, FixedBatches([batch]))
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-6)
    assert all(parameter.grad is None for parameter in subject.parameters())


def test_a_long_prompt_is_read_without_a_gradient():
    """Pieces that hold nothing supervised leave no graph, and what follows them learns all the same."""
    gradients, subject = Gradients(), noisy(module())
    batch = in_pieces(conversation(160, 60), 50)
    assert batch.pieces == (50, 100, 150, 160, 210, 221)
    assert [bool((piece.labels != -100).any()) for piece in pieces(batch)] == [False] * 3 + [True] * 3
    modes = []
    subject.model.rwkv7.register_forward_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    trainer(callbacks=[gradients]).fit(subject, FixedBatches([batch]))
    assert modes == [False] * 3 + [True] * 3
    assert any(bool(gradient.any()) for gradient in gradients.seen)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_autocast_and_checkpointing_leave_the_gradient_alone(checkpointing):
    """Under autocast, weights that were cast for one piece's graph must not be used in the next one's."""
    seen = []
    for precision in ("32-true", "bf16-mixed"):
        gradients, subject = Gradients(), noisy(module()).float()
        subject.model.rwkv7.gradient_checkpointing = checkpointing
        batch = in_pieces(conversation(60, 30, 60, 30), 50)
        trainer(callbacks=[gradients], precision=precision, gradient_clip_val=None).fit(subject, FixedBatches([batch]))
        seen.append(torch.cat([gradient.flatten() for gradient in gradients.seen]))
    cosine = torch.nn.functional.cosine_similarity(*seen, dim=0)
    assert cosine > 0.99
    assert float(seen[1].norm() / seen[0].norm()) == pytest.approx(1, abs=0.05)


def test_cuts_are_where_somebody_has_finished():
    example = conversation(20, 30, 9, 41, 12, 25)
    ends = set(np.cumsum([20, 30, 9, 41, 12, 25]).tolist())
    for most in (45, 50, 60, 137):
        found = piece_ends(pack([example]).block_types[0].numpy(), most)
        assert found[-1] == example.input_ids.size
        assert set(found[:-1]) <= ends
        assert max(b - a for a, b in pairwise((0, *found))) <= most
    # a transmission that is longer than a piece is cut where the piece is full
    assert piece_ends(pack([conversation(100, 7)]).block_types[0].numpy(), 30) == (30, 60, 90, 108)


@pytest.mark.parametrize("ends", [(10, 30), (20, 20, 40), (30, 40), (10, 39)])
def test_ends_that_cannot_be_are_refused(ends):
    batch = pack([document(0, 20), document(1, 20)])
    fields = {name: getattr(batch, name) for name in ("input_ids", "labels", "cu_seqlens", "block_types", "capacity")}
    assert PackedBatch(**fields, pieces=(10, 20, 40)).pieces == (10, 20, 40)
    with pytest.raises(ValueError, match="rise strictly to 40, each of whole documents or within one, not"):
        PackedBatch(**fields, pieces=ends)


def test_a_long_document_beside_others_in_a_micro_batch():
    """Some pieces are whole documents, others parts of one: each document still starts anew, or where it was."""
    documents = [conversation(9, 12), conversation(60, 40, 30, seed=1), conversation(5, 7, seed=2), conversation(8, 9)]
    row = pack(documents)
    batch = PackedBatch.join([pack(documents[:1]), pack([documents[1]], capacity=60, piece=60), pack(documents[2:])])
    assert torch.equal(batch.input_ids, row.input_ids)
    assert torch.equal(batch.cu_seqlens, row.cu_seqlens)
    assert batch.pieces == (22, 82, 122, 153, row.tokens)
    assert [(piece.documents, piece.continues) for piece in pieces(batch)] == [
        (1, False),
        (1, False),
        (1, True),
        (1, True),
        (2, False),
    ]
    subject = noisy(module())
    subject.initial_state = InitialState(subject.model.config).double()
    torch.nn.init.normal_(subject.initial_state.time_state, std=0.2)
    with torch.no_grad():
        cut, whole = subject._loss(batch), subject._loss(row)
    torch.testing.assert_close(cut.loss, whole.loss, rtol=1e-12, atol=0)
    assert torch.equal(cut.tokens, whole.tokens)


def test_ranks_with_different_numbers_of_pieces(tmp_path):
    """Two ranks come to the weights of one process that had all their micro-batches."""
    import pieces_ranks

    (first, second), alone = pieces_ranks.batches(), pieces_ranks.subject()
    together = [*first[:2], *second[:2], *first[2:], *second[2:]]
    trainer(accumulate_grad_batches=4).fit(alone, FixedBatches(together))
    run_on_two_ranks(pieces_ranks.main, tmp_path)
    want = alone.state_dict()
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert set(found) == set(want)
        for name, value in found.items():
            torch.testing.assert_close(value, want[name], rtol=1e-9, atol=1e-12)
