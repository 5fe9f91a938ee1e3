"""Prepares a mixture in children that are killed, again and again, until one finishes; prints how many died.

``python killing.py DIRECTORY SEED WAY``, where WAY is
  step: at a random one of the next few operations that make something last, the n-th fsync or rename of the child
  time: after a random time
  full: not killed, but no file may grow beyond a size that grows from child to child
"""

import errno
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path

from preparing import plan

from smi.data.manifest import check_shards, read_manifest
from smi.data.mixture import prepare


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

    os.fsync, os.replace = counted(os.fsync), counted(os.replace)


def attempt(directory: Path, way: str, rng: random.Random, number: int) -> int:
    """What became of one child: its exit status."""
    # later children are given more, so that one comes to the end
    draw = rng.randint(1, 16 + number), rng.uniform(0.0, 0.5 + number / 10)
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    code = 1
    try:
        if way == "step":
            die_at(draw[0])
        elif way == "time":
            threading.Timer(draw[1], os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            size = 20_000 * (number + 1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        prepare(PLAN, directory)
        code = 0
    except OSError as error:
        code = 2 if error.errno in (errno.EFBIG, errno.ENOSPC) else 1
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


if __name__ == "__main__":
    target, seed, way = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    PLAN = plan(target.parent)
    deaths = 0
    started = time.monotonic()
    while status := attempt(target, way, random.Random(f"{seed}/{deaths}"), deaths):
        expected = 2 << 8 if way == "full" else signal.SIGKILL
        assert status == expected, status
        if (target / "manifest.json").exists():
            # it was killed between that and what it has to tidy up: the mixture is whole
            check_shards(read_manifest(target), target)
        deaths += 1
        assert time.monotonic() - started < 300, "it does not get on"
    print(deaths)
