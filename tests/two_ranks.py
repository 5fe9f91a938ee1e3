"""Two ranks over gloo, without what starting them by torchrun costs: libraries are imported once, not by each."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["lightning.pytorch", "smi.data.packing_kernel", "smi.data.recipe", "smi.training.models", "smi.training.trainer"]
)


def run_on_two_ranks(work: Callable[..., None], *arguments: Any, seconds: float = 300) -> None:
    """Calls a function of a module, in two processes that find each other as those of torchrun do. Both must end well,
    and are ended where one does not, or not in time."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [_context.Process(target=_run, args=(rank, port, work, arguments)) for rank in (0, 1)]
    deadline = time.monotonic() + seconds
    try:
        for process in ranks:
            process.start()
        # where one fails the other waits for it
        while any(process.is_alive() for process in ranks) and not any(process.exitcode for process in ranks):
            assert time.monotonic() < deadline, "two ranks are not at an end"
            time.sleep(0.02)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert [process.exitcode for process in ranks] == [0, 0]


def _run(rank: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {name: str(value) for name, value in (known | found).items()}
    work(*arguments)
