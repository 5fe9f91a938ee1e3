"""What is not finite stops a run before the optimizer moves, and says where it began."""

import dataclasses
import math
import re
from itertools import islice

import lightning as L
import pytest
import torch
from test_hf import llama, mamba
from test_module import module, trainer
from test_pieces import conversation
from transformers import AutoModelForCausalLM

from smi.data.batch import Origin, PackedBatch, pack
from smi.data.loader import FixedBatches
from smi.data.synthetic import SyntheticTools
from smi.protocol.codec import encode
from smi.protocol.conversation import to_stream
from smi.tokenizer import load_tokenizer
from smi.training.guards import explain_gradient, explain_loss
from smi.training.hf import HFModule
from smi.training.module import Optimization


@pytest.fixture(scope="module")
def batches():
    """Two micro-batches of three documents, which have names."""
    tokenizer = load_tokenizer("compact")
    talks = SyntheticTools(seed=0, max_questions=1).conversations()
    examples = [encode(to_stream(talk), tokenizer) for talk in islice(talks, 6)]

    def packed(first):
        counts = torch.tensor([3]).numpy()
        return pack(examples[first : first + 3], origin=Origin(("toys",), counts, lambda s: f"toys: row {first + s}"))

    return [packed(0), packed(3)]


class Poison(torch.autograd.Function):
    """The identity, whose gradient is not finite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.inf


def stopped(subject, batches, **how):
    before = [parameter.detach().clone() for parameter in subject.parameters()]
    with pytest.raises(FloatingPointError) as error:
        trainer(accumulate_grad_batches=len(batches), **how).fit(subject, FixedBatches(batches))
    for now, then in zip(subject.parameters(), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
    return str(error.value)


def test_a_weight_that_is_broken_names_its_layer_and_all_documents(batches):
    subject = module()
    with torch.no_grad():
        subject.model.rwkv7.blocks[1].ffn.key.weight[0, 0] = math.nan
    message = stopped(subject, batches)
    assert message.startswith("the loss of step 1 is nan: first in the output of rwkv7.blocks.1 ")
    assert "the weight rwkv7.blocks.1.ffn.key.weight is not finite already" in message
    assert "micro-batch 1 of 2, documents from toys: row 0; toys: row 1; toys: row 2." in message


def test_a_document_that_breaks_a_layer_is_named_alone(batches):
    subject = module()
    # a row of the embedding past the vocabulary
    token = 1000
    ids = batches[1].input_ids.clone()
    ids[0, batches[1].cu_seqlens[1] + 2] = token
    batches = [batches[0], dataclasses.replace(batches[1], input_ids=ids)]
    with torch.no_grad():
        subject.model.rwkv7.emb.weight[token] = math.inf
    message = stopped(subject, batches)
    assert "first in the output of rwkv7.emb (the weight rwkv7.emb.weight is not finite already)" in message
    assert message.split("; ")[1].startswith("micro-batch 2 of 2, documents from toys: row 4.")


def named(documents, **how):
    counts = torch.tensor([3]).numpy()
    return pack(documents, origin=Origin(("toys",), counts, lambda s: f"toys: row {s}"), **how)


def with_token(batch, document, token):
    """The batch with a token in the middle of a document."""
    ids = batch.input_ids.clone()
    ids[0, int(batch.cu_seqlens[document : document + 2].sum()) // 2] = token
    return dataclasses.replace(batch, input_ids=ids)


@pytest.mark.parametrize("broken", [1, 2])
def test_a_document_beside_a_long_one_is_named_alone(broken):
    """The row is read in pieces, of which document 1 has several."""
    documents = [conversation(9, 12), conversation(60, 40, 30, seed=1), conversation(5, 7, seed=2)]
    joined = PackedBatch.join([pack(documents[:1]), pack([documents[1]], capacity=60, piece=60), pack(documents[2:])])
    assert len(joined.pieces) == 5
    batch = with_token(dataclasses.replace(joined, origin=named(documents).origin), broken, 1000)
    subject = module()
    with torch.no_grad():
        subject.model.rwkv7.emb.weight[1000] = math.inf
    message = stopped(subject, [batch])
    assert message.startswith("the loss of step 1 is nan: first in the output of rwkv7.emb ")
    assert f"micro-batch 1 of 1, documents from toys: row {broken}. No weight" in message


def test_a_gradient_that_breaks_in_an_early_piece_is_found():
    subject, calls = module(), []
    block = subject.model.rwkv7.blocks[0]

    def poison(module, inputs, output):
        calls.append(output)
        # the first of the pieces that are supervised, each time the batch is read
        return (Poison.apply(output[0]), *output[1:]) if len(calls) % 3 == 2 else output

    block.register_forward_hook(poison)
    batch = named([conversation(30, 40, 30, 40)], capacity=75, piece=75)
    batch = dataclasses.replace(batch, pieces=(30, 70, batch.tokens))
    message = stopped(subject, [batch])
    assert re.match(r"the gradient's norm of step 1 is (nan|inf): last in the gradient of rwkv7\.blocks\.0\.", message)
    assert "documents from toys: row 0" in message


@pytest.mark.parametrize(
    ("make", "layer", "first"),
    [(llama, "model.layers.1", "model.embed_tokens"), (mamba, "backbone.layers.1", "backbone.embeddings")],
    ids=["packed", "padded"],
)
def test_a_model_of_transformers_names_its_layers_and_documents(make, layer, first):
    def subject():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(make(1024))
        return HFModule(model, Optimization(lr=1e-3, max_steps=10), packed=make is llama)

    batch = named([conversation(9, 12), conversation(30, 20, seed=1), conversation(5, 7, seed=2)])
    broken = subject()
    with torch.no_grad():
        weight = next(broken.model.get_submodule(layer).parameters())
        weight.fill_(math.nan)
    message = stopped(broken, [batch])
    assert message.startswith(f"the loss of step 1 is nan: first in the output of {layer} (the weight {layer}.")
    assert "documents from toys: row 0; toys: row 1; toys: row 2." in message

    broken = subject()
    with torch.no_grad():
        broken.model.get_input_embeddings().weight[1000] = math.inf
    message = stopped(broken, [with_token(batch, 1, 1000)])
    assert f"first in the output of {first} " in message
    assert "documents from toys: row 1. No weight" in message

    broken = subject()
    broken.model.get_submodule(layer).register_forward_hook(
        lambda module, inputs, output: (
            (Poison.apply(output[0]), *output[1:]) if isinstance(output, tuple) else Poison.apply(output)
        )
    )
    message = stopped(broken, [batch])
    assert re.match(
        rf"the gradient's norm of step 1 is (nan|inf): last in the gradient of {re.escape(layer)}\.", message
    )


def test_a_loss_that_overflows_behind_finite_layers(batches):
    subject = module()
    with torch.no_grad():
        subject.model.head.weight[3, 3] = math.inf
    message = stopped(subject, batches)
    assert "behind the last layer (the weight head.weight is not finite already)" in message


def test_a_gradient_that_is_not_finite_names_where_it_broke(batches):
    subject = module()
    block = subject.model.rwkv7.blocks[0]
    block.register_forward_hook(lambda module, inputs, output: (Poison.apply(output[0]), *output[1:]))
    message = stopped(subject, batches)
    assert re.match(r"the gradient's norm of step 1 is (nan|inf): last in the gradient of rwkv7\.blocks\.0\.", message)
    assert "micro-batch 1 of 2" in message
    # what is behind the block in the order of the forward pass is sound
    assert "rwkv7.blocks.1" not in message


def test_without_a_fault_nothing_is_found(batches):
    subject = module()
    assert explain_loss(subject.model, lambda batch: subject._loss(batch).loss, batches) == ""
    found = explain_gradient(subject.model, lambda batch: subject._loss(batch).loss, batches)
    assert "each gradient of a micro-batch is finite" in found


def test_micro_batches_without_supervision_add_exactly_nothing(batches):
    """To the last bit, wherever they stand among the others."""
    seen = []
    silent = batches[1].unsupervised()
    for order in ([batches[0], silent], [silent, batches[0]], [batches[0]]):

        class Keep(L.Callback):
            def on_train_start(self, trainer, pl_module):
                def keep(*_):
                    seen.append([p.grad.clone() for p in pl_module.parameters() if p.grad is not None])

                trainer.optimizers[0].register_step_post_hook(keep)

        trainer(accumulate_grad_batches=len(order), callbacks=[Keep()], max_steps=1).fit(module(), FixedBatches(order))
    whole = seen[-1]
    assert any(gradient.any() for gradient in whole)
    for gradients in seen:
        assert all(torch.equal(a, b) for a, b in zip(gradients, whole, strict=True))


@pytest.mark.parametrize("clip", [0.0, None])
def test_no_clipping_by_nought(batches, clip):
    subject = module()
    norms = []

    class Watch(L.Callback):
        def on_train_start(self, trainer, pl_module):
            def norm(*_):
                gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
                norms.append(torch.nn.utils.get_total_norm(gradients))

            trainer.optimizers[0].register_step_post_hook(norm)

    trainer(gradient_clip_val=clip, callbacks=[Watch()], max_steps=1).fit(subject, FixedBatches(batches[:1]))
    assert float(norms[0]) == pytest.approx(subject.figures["train/grad_norm"], rel=1e-9) != 0
