"""Loaders: a training stream that Lightning can resume exactly, and fixed validation batches.

There is no cursor that could disagree with the weights: under a Trainer the position *is* the optimizer
step. Lightning restores `global_step` before it asks for the iterator, and the loader has a length, which keeps
Lightning from fetching a batch ahead of the one it trains on. A checkpoint from the middle of a step holds no
gradients, so that step is made again from its first micro-batch. The stream of packs is one for all ranks, and so
is the position: the `state_dict` that Lightning saves on rank 0 alone is that of every rank. It says at which
`Place` of the stream the step began, and what the order depends on; a checkpoint of other data is refused, one of
other settings as well unless the data module was told to go on. Without a Trainer the same `state_dict` carries
the position. A prepared mixture finds its place without reading what came before; rows that are compiled on the
way are compiled again.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from smi.data.order import Place, Shuffle

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from smi.data.batch import PackedBatch
    from smi.data.datamodule import SMIDataModule

# how the stream is dealt out, which changes nothing of its order; their product is the packs of a step
SHARING = ("accumulate", "micro_batch", "world_size")
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
        self._handed_out = 0
        # batches before those of this iterator: of an earlier run, where a state was loaded
        self._first = 0
        self._saved: dict[str, Any] | None = None
        self._place: Place | None = None
        # of the epochs of this iterator: how many packs came before each, from the beginning of the first one
        self._epochs: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self._data.steps * self._data.accumulate

    def __iter__(self) -> Iterator[PackedBatch]:
        """Begin to stream; returns when the first batch is there, so that errors show before training."""
        data = self._data
        trainer = data.running()
        saved = self._saved
        if trainer is None:
            rank, world_size, pin = 0, 1, False
            first = 0 if saved is None else self._handed_out
        elif getattr(trainer.fit_loop, "_combined_loader_states_to_load", None):
            # lightning only tries whether this can be iterated over, and loads the state after that
            return iter(())
        else:
            rank, world_size = trainer.global_rank, trainer.world_size
            pin = trainer.strategy.root_device.type == "cuda"
            then = data.accumulate if saved is None else saved["settings"]["accumulate"]
            first = _consumed(trainer, data.accumulate, then)
        # the state is of this very step, unless the trainer has gone on and asks for another iterator
        since = 0
        if saved is not None and trainer is not None:
            since = first - saved["batches"] // saved["settings"]["accumulate"] * data.accumulate
        place = self._begin(first, world_size)
        place = replace(place, packs=place.packs + since * world_size * data.micro_batch)
        # a trainer counts its steps itself; alone, a loaded state is used once
        if trainer is None:
            self._saved = None
        self._place, self._epochs = place, []
        self._first = self._handed_out = first
        batches = data.batches(place, rank, world_size, lambda epoch, packs: self._epochs.append((epoch, packs)))
        if trainer is None:
            batches = itertools.islice(batches, max(0, len(self) - first))
        if pin:
            batches = (batch.pin_memory() for batch in batches)
        prefetch = Prefetch(batches, PREFETCH, self._count, data.clock)
        data.live.add(prefetch)
        return prefetch

    def _begin(self, first: int, world_size: int) -> Place:
        """The place that was loaded, under today's settings; without one, that after `first` batches a rank."""
        data, saved = self._data, self._saved
        if saved is None:
            return Place(0, (data.start + first) * world_size * data.micro_batch)
        place, settings = Place.from_dict(saved["place"]), saved["settings"]
        before = Shuffle(*(settings[name] for name in ("seed", "window", "pack_length")))
        if before != data.shuffle:
            place = place.under_other_settings(before)
        return place

    def _count(self) -> None:
        self._handed_out += 1

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order depends on; plain values, the same on every rank."""
        data = self._data
        trainer, world_size = data.running(), self._world_size()
        batches = self._handed_out if trainer is None else trainer.global_step * data.accumulate
        if self._place is None:
            place = self._begin(batches, world_size)
        else:
            packs = self._place.packs + (batches - self._first) * world_size * data.micro_batch
            epoch, before = max((entry for entry in self._epochs if entry[1] <= packs), default=(self._place.epoch, 0))
            place = Place(epoch, packs - before, self._place.legs if epoch == self._place.epoch else ())
        return {"batches": batches, "place": place.to_dict(), "settings": data.settings(world_size)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved position. Raises ValueError where data or settings have changed, naming both."""
        data = self._data
        now, then = data.settings(self._world_size()), state_dict["settings"]
        changed = {key: (then.get(key), now.get(key)) for key in (*then, *now) if then.get(key) != now.get(key)}
        if math.prod(now[name] for name in SHARING) == math.prod(then[name] for name in SHARING):
            # the same packs make a step, whoever takes them
            changed = {key: values for key, values in changed.items() if key not in SHARING}
        # the order of a stream that is not prepared is known by going through it only
        free = SHARING if not data.prepared else (*SHARING, *vars(data.shuffle))
        fixed = [key for key in changed if key not in free]
        if changed and (fixed or data.on_change == "refuse"):
            named = "; ".join(f"{key} was {old!r} and is {new!r}" for key, (old, new) in changed.items())
            hint = (
                f"Set {', '.join(fixed)} back to resume, or start a new run from the weights"
                if fixed
                else "Set them back to resume, or add data.on_change=continue (on_change='continue') to go on with "
                "exactly the documents that this epoch has left"
            )
            raise ValueError(f"the checkpoint belongs to another order of batches: {named}. {hint}")
        self._saved = state_dict
        self._handed_out = state_dict["batches"] * data.accumulate // then["accumulate"]
        self._place = None

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


def _consumed(trainer: Trainer, accumulate: int, then: int) -> int:
    """Micro-batches that went into the weights the trainer holds, on each rank, in units of today's steps.

    `then`: micro-batches of a step in the run that wrote the trainer's counters.
    """
    automatic = trainer.lightning_module.automatic_optimization
    if automatic and trainer.accumulate_grad_batches != accumulate:
        raise ValueError(
            f"the trainer accumulates {trainer.accumulate_grad_batches} batches a step, "
            f"the data module was told {accumulate}; give both the same number"
        )
    # its annotations promise less than the counters have
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    surplus = progress.total.processed - trainer.global_step * then
    if not -1 <= surplus < then and progress.total.processed != trainer.global_step * accumulate:
        raise ValueError(
            f"the trainer made {trainer.global_step} steps from {progress.total.processed} batches, which is "
            f"not {then} a step; limit_train_batches must be a multiple of accumulate"
        )
    consumed = trainer.global_step * accumulate
    if progress.total.processed != consumed:
        # saved in the middle of a step, or with steps of another size: let Lightning count from where the step begins
        moved = consumed - progress.total.processed
        for count in (progress.total, progress.current):
            count.ready = count.started = count.completed = count.processed = count.processed + moved
    return consumed


@dataclass
class Clock:
    """What a stream took so far.

    items: made by the thread. working: seconds that it was at them. waited: seconds that its reader waited for it.
    """

    items: int = 0
    working: float = 0.0
    waited: float = 0.0


class Prefetch(Generic[T]):
    """Runs an iterator in a thread, a few items ahead. What it raises is raised here, in its turn.

    The thread ends with the iterator, on `close`, or when this object is no longer used. The first item is
    waited for at once.
    """

    def __init__(self, items: Iterator[T], depth: int, on_item: Callable[[], None], clock: Clock | None = None) -> None:
        ready: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
        stop = threading.Event()
        # the thread knows the queue and the event, not this object, which could not be collected otherwise
        self._clock = clock or Clock()
        arguments = (items, ready, stop, self._clock)
        thread = threading.Thread(target=_run, args=arguments, name="smi-prefetch", daemon=True)
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
        since = time.perf_counter()
        kind, value = self._ready.get() if self._head is None else self._head
        self._clock.waited += time.perf_counter() - since
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


def _run(items: Iterator[Any], ready: queue.Queue[tuple[str, Any]], stop: threading.Event, clock: Clock) -> None:
    try:
        since = time.perf_counter()
        for item in items:
            clock.items += 1
            clock.working += time.perf_counter() - since
            if stop.is_set():
                return
            ready.put(("item", item))
            since = time.perf_counter()
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
