"""Gradients of one optimizer step on two ranks.

The same documents are split into packs, micro-batches and ranks in many ways, under DDP and FSDP; writes, for each
way, how far the gradient that the optimizer gets is from that of one packed row in a single process, and whether the
norm that is logged is its norm.
"""

import json
import os
import random
from itertools import islice, pairwise
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

from smi.data.batch import PackedBatch, pack
from smi.data.loader import FixedBatches
from smi.data.synthetic import SyntheticTools
from smi.model import RWKV7Config, RWKV7ForCausalLM
from smi.protocol.codec import encode
from smi.protocol.conversation import to_stream
from smi.tokenizer import load_tokenizer
from smi.training.module import Optimization, SMIModule
from smi.training.sharding import ShardedStrategy, whole

WAYS = 5


def model():
    torch.manual_seed(0)
    # an embedding as wide as the quickstart's: a narrow one amplifies float32's rounding ten thousand times
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32, "embedding_init": 1.0}
    model = RWKV7ForCausalLM(RWKV7Config(vocab_size=1024, **shape))
    # off the start, at which half of the weights are zero and have no gradient
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model


class Gradients(L.Callback):
    """The whole gradients that the optimizer gets."""

    def on_train_start(self, trainer, pl_module):
        def keep(*_):
            self.seen = [whole(p.grad).clone() for p in pl_module.parameters()]

        trainer.optimizers[0].register_step_post_hook(keep)


def split(examples, rng, ranks=2):
    """The documents in some order, as micro-batches of packs for each rank, the same number for each."""
    documents = rng.sample(examples, len(examples))
    accumulate, packs = rng.randint(1, 3), rng.randint(1, 2)
    count = ranks * accumulate * packs
    cuts = [0, *sorted(rng.sample(range(1, len(documents)), count - 1)), len(documents)]
    rows = [pack(documents[a:b]) for a, b in pairwise(cuts)]
    batches = [PackedBatch.join(rows[i : i + packs]) for i in range(0, count, packs)]
    return [batches[rank::ranks] for rank in range(ranks)]


def main(file: Path) -> None:
    rank = int(os.environ["RANK"])
    tokenizer = load_tokenizer("compact")
    examples = [encode(to_stream(c), tokenizer) for c in islice(SyntheticTools(0, 1).conversations(), 14)]
    reference, row = model(), pack(examples)
    logits = reference(row.input_ids, cu_seqlens=row.cu_seqlens).logits[0]
    torch.nn.functional.cross_entropy(logits, row.labels[0]).backward()
    want = torch.cat([p.grad.flatten() for p in reference.parameters()])

    found = []
    rng = random.Random(1)
    for way in range(2 * WAYS):
        shares = split(examples, rng)
        kept = Gradients()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=ShardedStrategy(2, "gloo") if way % 2 else DDPStrategy(process_group_backend="gloo"),
            accumulate_grad_batches=len(shares[0]),
            max_epochs=1,
            callbacks=[kept],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = SMIModule(model(), Optimization(lr=1e-3, max_steps=10))
        trainer.fit(module, FixedBatches(shares[rank]))
        got = torch.cat([gradient.flatten() for gradient in kept.seen])
        found.append(
            {
                "strategy": type(trainer.strategy).__name__,
                "batches": [[batch.documents for batch in share] for share in shares],
                "error": float((got - want).norm() / want.norm()),
                "norm": float(module.figures["train/grad_norm"] / want.double().norm()),
            }
        )
    if rank == 0:
        file.write_text(json.dumps(found))
