"""Trains in children that are killed, again and again, and at last in one that is not; prints how many died.

``python killing_runs.py DIRECTORY SEED KILLS STEPS EVERY``: the run that was not disturbed is in DIRECTORY/whole, the
other one in DIRECTORY/killed. A third of the children die at a random one of the next few operations that make
something last (fsync, rename, removal), a third at a random moment of their beginning, and a third soon after a save.
"""

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from killed_run import data, fit
from shards import prepared

from smi.training.checkpoint import check_checkpoint, list_checkpoints

# whether a process has ended, which stays to be waited for
LEFT = os.WEXITED | os.WNOHANG | os.WNOWAIT


def die_at(count: int) -> None:
    """SIGKILL this process before its `count`-th lasting operation."""
    left = count

    def counted(function):
        def call(*arguments, **named):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return call

    os.fsync, os.replace, Path.unlink = counted(os.fsync), counted(os.replace), counted(Path.unlink)


def child(run_dir: Path, count: int | None = None) -> int:
    """The process of a run, which dies by itself where there is a `count`."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if count is not None:
            die_at(count)
        fit(run_dir, SOURCE, steps=STEPS, every=EVERY)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    root, seed, kills, STEPS, EVERY = Path(sys.argv[1]), *map(int, sys.argv[2:])
    SOURCE = prepared(root, 150)
    # what is compiled here need not be compiled in each child
    for _ in data(SOURCE, 2, 1).train_dataloader():
        pass
    assert status_of(child(root / "whole")) == 0
    rng = random.Random(seed)
    deaths = 0
    folder = root / "killed" / "checkpoints"
    while deaths < kills:
        before = list_checkpoints(folder)
        if deaths % 3 == 1:
            pid = child(root / "killed", rng.randint(1, 12))
        else:
            pid = child(root / "killed")
            while deaths % 3 and list_checkpoints(folder) == before and os.waitid(os.P_PID, pid, LEFT) is None:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.03 if deaths % 3 else 0.3))
            os.kill(pid, signal.SIGKILL)
        status = status_of(pid)
        if status == 0:
            break
        assert status == -signal.SIGKILL, status
        deaths += 1
        found = list_checkpoints(folder)
        assert len(found) <= 2, found
        for file in found:
            check_checkpoint(file)
    assert status_of(child(root / "killed")) == 0
    print(deaths)
