"""SMIModule under the real Trainer, on real synthetic data."""

import math
from itertools import islice

import lightning as L
import pytest
import torch

from smi.data.batch import pack
from smi.data.loader import FixedBatches
from smi.data.synthetic import SyntheticTools
from smi.model import RWKV7Config, RWKV7ForCausalLM
from smi.protocol.codec import encode
from smi.protocol.conversation import to_stream
from smi.tokenizer import load_tokenizer
from smi.training.module import Optimization, SMIModule


@pytest.fixture(scope="module")
def examples():
    tokenizer = load_tokenizer("compact")
    source = SyntheticTools(seed=0, max_questions=1)
    return [encode(to_stream(c), tokenizer) for c in islice(source.conversations(), 12)]


def module(seed=0, **how):
    torch.manual_seed(seed)
    model = RWKV7ForCausalLM(RWKV7Config(vocab_size=1024, hidden_size=64, num_hidden_layers=2, head_dim=32))
    # float64: a fresh embedding is so small that its gradient amplifies float32's rounding ten thousand times
    return SMIModule(model.double(), Optimization(**({"lr": 1e-3, "max_steps": 10} | how)))


def trainer(**how):
    settings = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "gradient_clip_val": 1.0,
        "max_epochs": 1,
        "log_every_n_steps": 1,
    }
    return L.Trainer(**(settings | how))


class Gradients(L.Callback):
    """Keeps the gradients that the optimizer got, after scaling and clipping."""

    def on_train_start(self, trainer, pl_module):
        def keep(*_):
            self.seen = [p.grad.clone() for p in pl_module.parameters()]

        trainer.optimizers[0].register_step_post_hook(keep)


@pytest.mark.parametrize("split", [[12], [6, 6], [1, 11], [3, 4, 2, 3], [1] * 12], ids=str)
def test_gradient_is_the_same_however_documents_are_split(examples, split):
    """Every supervised token weighs the same, in whichever micro-batch it is."""
    batches, at = [], 0
    for n in split:
        batches.append(pack(examples[at : at + n]))
        at += n
    gradients = Gradients()
    subject = module()
    trainer(accumulate_grad_batches=len(split), gradient_clip_val=None, callbacks=[gradients]).fit(
        subject, FixedBatches(batches)
    )

    reference = module().model
    whole = pack(examples)
    logits = reference(whole.input_ids, cu_seqlens=whole.cu_seqlens).logits[0]
    torch.nn.functional.cross_entropy(logits, whole.labels[0]).backward()
    for got, parameter in zip(gradients.seen, reference.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, rtol=1e-9, atol=1e-12)


def test_a_micro_batch_without_supervision_changes_nothing(examples):
    batch = pack(examples[:4])
    silent = pack(examples[4:6])
    silent.labels.fill_(-100)
    seen = []
    for batches in ([batch], [batch, silent]):
        gradients = Gradients()
        trainer(accumulate_grad_batches=len(batches), callbacks=[gradients]).fit(module(), FixedBatches(batches))
        seen.append(gradients.seen)
    torch.testing.assert_close(*seen, rtol=1e-9, atol=1e-12)


def test_a_step_without_any_supervision_is_finite_and_zero(examples):
    silent = pack(examples[:2])
    silent.labels.fill_(-100)
    gradients = Gradients()
    fit = trainer(callbacks=[gradients])
    fit.fit(module(), FixedBatches([silent]))
    assert all(torch.count_nonzero(g) == 0 for g in gradients.seen)
    assert float(fit.callback_metrics["train/loss"]) == 0


def test_logged_figures(examples):
    fit = trainer(max_steps=3, max_epochs=-1)
    fit.fit(module(), FixedBatches([pack(examples[:6])]), FixedBatches([pack(examples[6:])]))
    metrics = fit.callback_metrics
    for name in ("train/loss", "train/accuracy", "train/grad_norm", "train/lr", "val/loss", "val/accuracy"):
        assert torch.isfinite(metrics[name]), name
    assert float(metrics["train/supervised_tokens"]) == pack(examples[:6]).supervised_tokens
    for stage in ("train", "val"):
        for figure in ("loss", "accuracy", "entropy"):
            assert f"{stage}/{figure}_act" in metrics
            assert f"{stage}/{figure}_usr" not in metrics
    assert 0 < float(metrics["train/entropy"]) <= math.log(1024)


def test_validation_loss_is_the_mean_over_all_tokens(examples):
    subject, batches = module(), [pack(examples[:1]), pack(examples[1:])]
    (metrics,) = trainer().validate(subject, FixedBatches(batches), verbose=False)
    with torch.no_grad():
        sums = [subject._loss(batch) for batch in batches]
    want = sum(float(s.loss) for s in sums) / sum(int(s.tokens.sum()) for s in sums)
    assert metrics["val/loss"] == pytest.approx(want, rel=1e-6)


def test_z_loss_and_l2wrap_reach_the_gradients(examples):
    """And leave the reported loss alone."""
    seen, losses = [], []
    for how in ({}, {"z_loss": 1e-2}, {"l2wrap": True}):
        gradients = Gradients()
        fit = trainer(gradient_clip_val=None, callbacks=[gradients])
        fit.fit(module(**how), FixedBatches([pack(examples[:4])]))
        seen.append(torch.cat([g.flatten() for g in gradients.seen]))
        losses.append(float(fit.callback_metrics["train/loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12) == pytest.approx(losses[2], rel=1e-12)
    assert not torch.allclose(seen[0], seen[1], rtol=1e-6)
    assert not torch.allclose(seen[0], seen[2], rtol=1e-6)


def test_gradients_are_clipped_after_scaling(examples):
    gradients = Gradients()
    trainer(gradient_clip_val=1e-3, callbacks=[gradients]).fit(module(), FixedBatches([pack(examples)]))
    norm = torch.stack([g.norm() for g in gradients.seen]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


def test_a_loss_that_is_not_finite_stops_before_the_step(examples):
    subject = module()
    with torch.no_grad():
        subject.model.head.weight[3, 3] = float("nan")
    before = [p.clone() for p in subject.model.rwkv7.parameters()]
    with pytest.raises(FloatingPointError, match="step 1 is nan"):
        trainer().fit(subject, FixedBatches([pack(examples)]))
    assert all(torch.equal(x, y) for x, y in zip(before, subject.model.rwkv7.parameters(), strict=True))


def test_learning_rate_follows_the_schedule(examples):
    subject = module(warmup_steps=4, lr=1e-2, max_steps=8)
    rates = []

    class Watch(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            rates.append([group["lr"] for group in optimizer.param_groups])

    trainer(max_steps=6, max_epochs=-1, callbacks=[Watch()]).fit(subject, FixedBatches([pack(examples[:2])]))
    assert [rate for rate, _, _ in rates[:4]] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert all(fast == pytest.approx(2 * rate) for rate, _, fast in rates)
    assert rates[5][0] < rates[4][0] <= 1e-2
