"""Worker processes that keep order: results come back as though one process had made them all, one after another.

A worker marks the row that it is at. One that stays at a row for too long is killed, and the row is refused; one that
dies at a row is followed by another, and the row at which that one dies as well is refused. Where many rows were being
worked on at once, they are done again one by one to find the one to blame. Its neighbours come out as if nothing had
been. No worker outlives its parent, however that one dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa

Task = TypeVar("Task")
TaskIn = TypeVar("TaskIn", contravariant=True)

# tasks a worker holds: the one it does, and the next, so that it need not wait for the parent
TASKS_HELD = 2
# chunks of one worker that wait in the parent for their turn; beyond them the worker waits in its pipe
CHUNKS_HELD = 8
# deaths between two chunks that no row explains, before the run gives up
DEATHS = 3
PIPE_BYTES = 1 << 20

_IDLE, _BATCH = -1, -2


@dataclass
class Attempt:
    """How a task is to be done.

    first: rows before this one have been done.
    refused: rows not to be touched, with the reason.
    singly: row by row, so that a failure has one row to blame.
    suspect: the row at which a worker died.
    """

    first: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    singly: bool = False
    suspect: int | None = None


class Mark(Protocol):
    """Tells the parent which row is being worked on; None for several at once."""

    def __call__(self, row: int | None) -> None: ...


class Work(Protocol[TaskIn]):
    """What workers do: a task, from the given row on, as (rows done so far, chunk) in order. Must pickle."""

    @property
    def schema(self) -> pa.Schema:
        """Of the chunks."""
        ...

    def warm_up(self) -> None:
        """Load and compile what the first row would otherwise be charged for."""
        ...

    def __call__(self, task: TaskIn, attempt: Attempt, mark: Mark) -> Iterator[tuple[int, pa.RecordBatch]]: ...


class Inline(Generic[Task]):
    """The same without processes: nothing to start and easy to debug, but a row that hangs hangs the run."""

    def __init__(self, work: Work[Task]) -> None:
        self._work = work

    def run(
        self, tasks: Iterable[tuple[Task, int]], wanted: Callable[[Task], bool]
    ) -> Iterator[tuple[Task, pa.RecordBatch | None]]:
        """See `Workers.run`."""
        for task, first in tasks:
            if not wanted(task):
                continue
            for _, chunk in self._work(task, Attempt(first), lambda row: None):
                yield task, chunk
                if not wanted(task):
                    break
            else:
                yield task, None

    def close(self) -> None:
        """Nothing to do."""


@dataclass
class _Job(Generic[Task]):
    task: Task
    attempt: Attempt
    chunks: deque[pa.RecordBatch | Exception] = field(default_factory=deque)
    done: bool = False


class _Worker(Generic[Task]):
    """The parent's side of one process."""

    def __init__(self, context: Any, work: Work[Task]) -> None:
        receive_task, self.tasks = context.Pipe(duplex=False)
        self.results, send_result = context.Pipe(duplex=False)
        _widen(send_result)
        self.at = context.RawArray(ctypes.c_int64, (_IDLE, 0))
        self.jobs: deque[_Job[Task]] = deque()
        self.cause = "crash"
        self.seen = (0, time.monotonic())
        self.process = context.Process(
            target=_serve, args=(receive_task, send_result, self.at, work, os.getpid()), daemon=True, name="smi-worker"
        )
        self.process.start()
        # with the parent's copies closed, the end of the process is the end of its pipe
        receive_task.close()
        send_result.close()

    def assign(self, job: _Job[Task]) -> None:
        self.jobs.append(job)
        # where it is dead, the end of its results will show that
        with contextlib.suppress(OSError):
            self.tasks.send((job.task, job.attempt))

    @property
    def held(self) -> int:
        return sum(len(job.chunks) for job in self.jobs)

    def overdue(self, limit: float) -> bool:
        """Whether it has been at one row, or at one batch, for longer than `limit` seconds."""
        row, tick = self.at[0], self.at[1]
        if row == _IDLE or tick != self.seen[0]:
            self.seen = (tick, time.monotonic())
        return time.monotonic() - self.seen[1] > limit

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.tasks.close()
        self.results.close()


class Workers(Generic[Task]):
    """`count` processes that do tasks side by side.

    Args:
        work: pickled into each process at its start.
        count: how many.
        row_timeout: seconds a row may take.

    A worker starts in a fresh interpreter ("spawn"), so nothing of the parent's threads or locks comes along.
    """

    def __init__(self, work: Work[Task], count: int, row_timeout: float) -> None:
        self._work = work
        self._timeout = row_timeout
        self._context = mp.get_context("spawn")
        self._deaths = 0
        self._workers: list[_Worker[Task]] = []
        try:
            for _ in range(count):
                self._workers.append(_Worker(self._context, work))
        except BaseException:
            self.close()
            raise

    def run(
        self, tasks: Iterable[tuple[Task, int]], wanted: Callable[[Task], bool]
    ) -> Iterator[tuple[Task, pa.RecordBatch | None]]:
        """Do the tasks, each from its first row on; every chunk comes out in order, then (task, None) as its end.

        wanted: asked again and again; a task that is no longer wanted is passed over, its chunks are dropped, and
            it has no end.

        Raises what the work raises, in its turn, and RuntimeError where workers die without a row to blame.
        """
        waiting = iter(tasks)
        order: deque[_Job[Task]] = deque()
        while True:
            fed = self._feed(waiting, order, wanted)
            if not order:
                if fed:
                    return
                # all hands are full of what is no longer wanted
                self._collect(None, wanted)
                continue
            job = order[0]
            while job.chunks and wanted(job.task):
                chunk = job.chunks.popleft()
                if isinstance(chunk, Exception):
                    raise chunk
                yield job.task, chunk
            if job.done or not wanted(job.task):
                order.popleft()
                if wanted(job.task):
                    yield job.task, None
                continue
            self._collect(job, wanted)

    def _feed(
        self, waiting: Iterator[tuple[Task, int]], order: deque[_Job[Task]], wanted: Callable[[Task], bool]
    ) -> bool:
        """Give out tasks as far as there is room; whether there are no more."""
        # one more each in turn, so that the first tasks are in different hands
        for level in range(TASKS_HELD):
            for worker in self._workers:
                if len(worker.jobs) > level:
                    continue
                entry = next((entry for entry in waiting if wanted(entry[0])), None)
                if entry is None:
                    return True
                job = _Job(entry[0], Attempt(entry[1]))
                order.append(job)
                worker.assign(job)
        return False

    def _collect(self, current: _Job[Task] | None, wanted: Callable[[Task], bool]) -> None:
        """Take in what workers have ready, and look after those that are stuck or dead."""
        for worker in self._workers:
            # of a job that nobody waits for any more, nothing is kept
            for job in worker.jobs:
                if not wanted(job.task):
                    job.chunks.clear()
        open_pipes = {w.results: w for w in self._workers if w.held < CHUNKS_HELD or current in w.jobs}
        ready = wait(list(open_pipes), timeout=min(0.2, self._timeout / 4))
        for pipe in ready:
            self._receive(open_pipes[pipe])  # type: ignore[index]
        for worker in self._workers:
            if worker.overdue(self._timeout) and worker.jobs:
                worker.cause = "time_out"
                worker.process.kill()

    def _receive(self, worker: _Worker[Task]) -> None:
        try:
            rows, error = worker.results.recv()
            chunk = None if rows is None else pa.py_buffer(worker.results.recv_bytes())
        except (EOFError, OSError, pickle.UnpicklingError):
            self._replace(worker)
            return
        job = worker.jobs[0]
        if error is not None:
            job.chunks.append(error)
            rows = None
        if rows is None:
            job.done = True
            worker.jobs.popleft()
            return
        self._deaths = 0
        job.attempt.first = rows
        job.chunks.append(pa.ipc.read_record_batch(chunk, self._work.schema))

    def _replace(self, worker: _Worker[Task]) -> None:
        """Put a new worker in the place of a dead one, and let it do what that one left."""
        row = worker.at[0]
        worker.end()
        jobs = list(worker.jobs)
        if jobs and row >= 0:
            attempt = jobs[0].attempt
            if row in attempt.refused:
                raise RuntimeError(f"{jobs[0].task}: a worker fails at row {row} even without working on it")
            # what kills a worker once may have come from outside
            if worker.cause == "time_out" or attempt.suspect == row:
                attempt.refused[row] = worker.cause
            attempt.suspect = row
        elif jobs and row == _BATCH and not jobs[0].attempt.singly:
            jobs[0].attempt.singly = True
        else:
            self._deaths += 1
            if self._deaths >= DEATHS:
                code = worker.process.exitcode
                hint = "; -9 is how a system short of memory ends processes: try fewer workers" if code == -9 else ""
                raise RuntimeError(f"workers keep dying, the last one with exit code {code}{hint}")
        new = _Worker(self._context, self._work)
        self._workers[self._workers.index(worker)] = new
        for job in jobs:
            new.assign(job)

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.end()
        self._workers.clear()


def _widen(pipe: Connection) -> None:
    """Room for a whole chunk, so that a worker rarely waits for the parent. Linux alone has it."""
    if sys.platform == "linux":
        import fcntl

        # the user's share of pipe memory may be used up: the usual size will do
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def _serve(tasks: Connection, results: Connection, at: Any, work: Work[Any], parent: int) -> None:
    _die_with(parent)
    # Ctrl-C goes to every process of the terminal; the parent decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def mark(row: int | None) -> None:
        at[0] = _BATCH if row is None else row
        at[1] += 1

    work.warm_up()
    while True:
        try:
            task, attempt = tasks.recv()
        except EOFError:
            return
        try:
            mark(None)
            for rows, chunk in work(task, attempt, mark):
                at[0] = _IDLE
                results.send((rows, None))
                results.send_bytes(chunk.serialize())
                mark(None)
            at[0] = _IDLE
            results.send((None, None))
        except BrokenPipeError:
            return
        except Exception as error:
            at[0] = _IDLE
            results.send((None, _portable(error)))


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _die_with(parent: int) -> None:
    """End this process with its parent, even one that was killed and a row that never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    elif (process := mp.parent_process()) is not None:

        def follow() -> None:
            process.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()
    # it may have died before it was being watched
    if os.getppid() != parent:
        os._exit(1)
