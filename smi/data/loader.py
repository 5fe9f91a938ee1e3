"""Loaders: a training stream that Lightning can resume exactly, and fixed validation batches.

There is no cursor that could disagree with the weights: under a Trainer the position *is* the optimizer
step. `iter(loader)` makes the stream again from its beginning and leaves out the first
`global_step * accumulate` micro-batches. Lightning restores `global_step` before it asks for the iterator,
and the loader has a length, which keeps Lightning from fetching a batch ahead of the one it trains on. A
checkpoint from the middle of a step holds no gradients, so that step is made again from its first
micro-batch. The `state_dict` of the loader carries what the order depends on, and a checkpoint of other data
or settings is refused. Without a Trainer the same `state_dict` carries the position.
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from smi.data.batch import PackedBatch
    from smi.data.datamodule import SMIDataModule

# batches that the thread runs ahead
PREFETCH = 4

T = TypeVar("T")


class TrainLoader:
    """The training stream as a loader: `steps * accumulate` batches long, resumable, prefetched by a thread.

    Under a Trainer it begins where the optimizer step says and goes on until the Trainer stops. Alone it
    begins at the head of the stream, or once where a loaded state says, and ends after its length.
    """

    def __init__(self, data: SMIDataModule) -> None:
        self._data = data
        self._next = 0
        self._handed_out = 0

    def __len__(self) -> int:
        return self._data.steps * self._data.accumulate

    def __iter__(self) -> Iterator[PackedBatch]:
        """Begin to stream; returns when the first batch is there, so that errors show before training."""
        data = self._data
        trainer = data.running()
        if trainer is None:
            rank, world_size, pin = 0, 1, False
            first, last = self._next, max(self._next, len(self))
        else:
            rank, world_size = trainer.global_rank, trainer.world_size
            pin = trainer.strategy.root_device.type == "cuda"
            first, last = _consumed(trainer, data.accumulate), None
        self._next = 0
        self._handed_out = first
        packs = itertools.islice(
            data.packs(),
            (data.start + first) * world_size + rank,
            None if last is None else (data.start + last) * world_size,
            world_size,
        )
        batches = (data.batch(members) for members in packs)
        if pin:
            batches = (batch.pin_memory() for batch in batches)
        prefetch = Prefetch(batches, PREFETCH, self._count)
        data.live.add(prefetch)
        return prefetch

    def _count(self) -> None:
        self._handed_out += 1

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order depends on; plain values, the same on every rank."""
        return {"batches": self._handed_out, "settings": self._data.settings(self._world_size())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved position. Raises ValueError where data or settings have changed, naming both."""
        now = self._data.settings(self._world_size())
        then = state_dict["settings"]
        changed = [
            f"{key} was {then.get(key)!r} and is {now.get(key)!r}"
            for key in dict.fromkeys((*then, *now))
            if then.get(key) != now.get(key)
        ]
        if changed:
            raise ValueError(
                f"the checkpoint belongs to another order of batches: {'; '.join(changed)}. "
                "Set them back to resume, or start a new run from the weights"
            )
        self._next = state_dict["batches"]

    def _world_size(self) -> int:
        trainer = self._data.running()
        return 1 if trainer is None else trainer.world_size


class FixedBatches(Sequence["PackedBatch"]):
    """A list of batches in a class of its own: Lightning takes a plain list for a list of loaders."""

    def __init__(self, batches: list[PackedBatch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return self._batches[index]


def _consumed(trainer: Trainer, accumulate: int) -> int:
    """Micro-batches that went into the weights the trainer holds, on each rank."""
    automatic = trainer.lightning_module.automatic_optimization
    if automatic and trainer.accumulate_grad_batches != accumulate:
        raise ValueError(
            f"the trainer accumulates {trainer.accumulate_grad_batches} batches a step, "
            f"the data module was told {accumulate}; give both the same number"
        )
    consumed = trainer.global_step * accumulate
    # its annotations promise less than the counters have
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    surplus = progress.total.processed - consumed
    if not -1 <= surplus < accumulate:
        raise ValueError(
            f"the trainer made {trainer.global_step} steps from {progress.total.processed} batches, which is "
            f"not {accumulate} a step; limit_train_batches must be a multiple of accumulate"
        )
    if surplus:
        # saved in the middle of a step: let Lightning count from where that step begins
        for count in (progress.total, progress.current):
            count.ready = count.started = count.completed = count.processed = count.processed - surplus
    return consumed


class Prefetch(Generic[T]):
    """Runs an iterator in a thread, a few items ahead. What it raises is raised here, in its turn.

    The thread ends with the iterator, on `close`, or when this object is no longer used. The first item is
    waited for at once.
    """

    def __init__(self, items: Iterator[T], depth: int, on_item: Callable[[], None]) -> None:
        ready: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
        stop = threading.Event()
        # the thread knows the queue and the event, not this object, which could not be collected otherwise
        thread = threading.Thread(target=_run, args=(items, ready, stop), name="smi-prefetch", daemon=True)
        self._ready = ready
        self._on_item = on_item
        self._finish = weakref.finalize(self, _stop, thread, ready, stop)
        thread.start()
        self._head: tuple[str, Any] | None = ready.get()
        if self._head[0] == "error":
            self._raise(self._head[1])

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._finish.alive:
            raise StopIteration
        kind, value = self._ready.get() if self._head is None else self._head
        self._head = None
        if kind == "item":
            self._on_item()
            return value
        if kind == "error":
            self._raise(value)
        self.close()
        raise StopIteration

    def _raise(self, error: BaseException) -> None:
        self.close()
        raise error

    def close(self) -> None:
        """Stop the thread and wait for it. Safe to call twice."""
        self._finish()


def _run(items: Iterator[Any], ready: queue.Queue[tuple[str, Any]], stop: threading.Event) -> None:
    try:
        for item in items:
            if stop.is_set():
                return
            ready.put(("item", item))
        ready.put(("end", None))
    except BaseException as error:
        ready.put(("error", error))


def _stop(thread: threading.Thread, ready: queue.Queue[tuple[str, Any]], stop: threading.Event) -> None:
    stop.set()
    while thread.is_alive() and thread is not threading.current_thread():
        # room for what the thread may be waiting to put
        try:
            ready.get_nowait()
        except queue.Empty:
            thread.join(timeout=0.01)
