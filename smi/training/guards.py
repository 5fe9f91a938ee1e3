"""Where a loss or a gradient stopped being finite: the layer, and the documents that were read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from smi.data.batch import PackedBatch
from smi.training.sharding import local

# documents that are named; the others are counted
NAMED = 5

Loss = Callable[[PackedBatch], Tensor]


def explain_loss(model: nn.Module, loss: Loss, batches: Sequence[PackedBatch]) -> str:
    """The first micro-batch whose loss is not finite, the first layer of it whose output is not, and its documents.

    The forward passes are made again, with the weights that the step began with. Empty where all is finite.
    """
    broken = [name for name, parameter in model.named_parameters() if not bool(local(parameter).isfinite().all())]
    with torch.no_grad():
        for number, batch in enumerate(batches, 1):
            with _outputs(model) as seen:
                value = float(loss(batch))
            name = next((name for name, bad in seen if bad.any()), "")
            # a row in pieces has been through the layer as often as it has pieces
            bad = torch.cat([part for other, part in seen if other == name], -1) if name else None
            if math.isfinite(value) and bad is None:
                continue
            where = f"first in the output of {name}" if bad is not None else "behind the last layer"
            if held := [parameter for parameter in broken if not name or parameter.startswith(f"{name}.")]:
                where += f" (the weight {held[0]} is not finite already)"
            return f"{where}; micro-batch {number} of {len(batches)}, {_documents(batch, bad)}"
    # a loss that was read with weights which are gone
    return f"the weight {broken[0]} is not finite" if broken else ""


def explain_gradient(model: nn.Module, loss: Loss, batches: Sequence[PackedBatch]) -> str:
    """The first micro-batch whose gradient is not finite, the last layer in which it is not, and its documents.

    Gradients flow from the last layer to the first: where they break first is the last in the model's order.
    """
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    if any(local(parameter) is not parameter for parameter in parameters):
        return "the parameters are spread over ranks, so the layer is not looked for"
    for number, batch in enumerate(batches, 1):
        for parameter in parameters:
            parameter.grad = None
        # not through backward(): that is what ranks synchronise in. The pieces of a long document add theirs alone
        gradients = torch.autograd.grad(loss(batch), parameters, allow_unused=True)
        broken = [
            name
            for name, parameter, gradient in zip(names, parameters, gradients, strict=True)
            if any(part is not None and not bool(part.isfinite().all()) for part in (gradient, parameter.grad))
        ]
        if broken:
            return (
                f"last in the gradient of {broken[-1]} ({len(broken)} of {len(names)} parameters); "
                f"micro-batch {number} of {len(batches)}, {_documents(batch, None)}"
            )
    return "each gradient of a micro-batch is finite: their sum, or its norm, overflows"


@contextmanager
def _outputs(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Of each block and of what stands around them, in the order they run: the name, and which positions of the
    first output are not finite, bool [..., T]; [S, L] where documents are padded."""
    seen: list[tuple[str, Tensor]] = []

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: object, output: object) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.is_floating_point():
                seen.append((name, ~first.isfinite().all(-1)))

        return keep

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if _watched(name)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _watched(name: str) -> bool:
    """Layers that a person would name: a numbered block, or a module that is in none."""
    parts = name.split(".")
    return bool(name) and not any(part.isdigit() for part in parts[:-1])


def _documents(batch: PackedBatch, bad: Tensor | None) -> str:
    """The documents with such a position, all where they cannot be told."""
    numbers = list(range(batch.documents))
    if bad is not None and bad.numel() == batch.tokens:
        numbers = batch.document_ids[bad.view(1, -1)].unique().tolist()
    elif bad is not None and bad.shape[0] == batch.documents:
        lengths = batch.cu_seqlens.diff().tolist()
        numbers = [s for s, length in enumerate(lengths) if bad[s, :length].any()]
    names = [str(s) if batch.origin is None else batch.origin.where(s) for s in numbers[:NAMED]]
    more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
    what = "documents" if batch.origin is None else "documents from"
    return f"{what} {'; '.join(names)}{more}"
