"""Paired timing: peers take turns, medians are compared.

Shared machines drift, and the state of the allocator alone can double a time. Peers that alternate see the same
drift, and the ratio of their medians survives it.
"""

import gc
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Figure:
    """One number of a suite.

    value: the ratio, time or size itself.
    detail: for people: what was divided by what, with the medians.
    at_least, at_most: the figure that the project holds itself to, where there is one.
    """

    value: float
    detail: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.at_least is None and self.at_most is None:
            return None
        return self.value >= (self.at_least or float("-inf")) and (self.at_most is None or self.value <= self.at_most)


def alternate(peers: Mapping[str, Callable[[], object]], *, rounds: int = 7, warmup: int = 1) -> dict[str, float]:
    """Median wall time of a call, in seconds, by peer.

    Each round calls every peer once, in an order that turns by one from round to round; `warmup` calls of each
    come first and do not count. Collections of garbage happen between the calls.
    """
    names = list(peers)
    for name in names:
        for _ in range(warmup):
            peers[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        turn %= len(names)
        for name in names[turn:] + names[:turn]:
            gc.collect()
            gc.disable()
            try:
                start = time.perf_counter()
                peers[name]()
                times[name].append(time.perf_counter() - start)
            finally:
                gc.enable()
    return {name: statistics.median(values) for name, values in times.items()}


def resident(field: Literal["VmRSS", "VmHWM"]) -> int:
    """Bytes that this process holds, or its peak; ValueError where there is no Linux' /proc to ask.

    `getrusage` would tell the peak of whoever started this process where that was higher.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError as error:
        raise ValueError(f"the memory of a process is read from Linux' /proc: {error}") from None
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def duration(seconds: float) -> str:
    """A time for people: ``812 us``, ``75.3 ms``, ``2.41 s``."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"
