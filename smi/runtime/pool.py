"""Room for the states of a fixed number of sessions, one slot each.

Protocol section "Session Isolation": isolation is architectural. A slot belongs to one owner from `take` to `free`,
is zero whenever it belongs to nobody, and every access names the owner.
"""

import hashlib
import threading
import time
from collections.abc import Sequence

import torch
from torch import nn

from smi.model.configuration import RWKV7Config
from smi.model.modeling import RWKV7ForCausalLM, RWKV7State

# elements of a large tensor that the fingerprint looks at
_SAMPLED = 4096


class PoolFull(RuntimeError):
    """Every slot is taken."""


class StatePool:
    """States of up to `capacity` sessions: wkv [L, capacity, H, V, K] float32 and both shifts [L, capacity, C].

    time_state: float32 [L, H, V, K], the WKV state that a session begins with; zero when absent.
    """

    def __init__(self, model: RWKV7ForCausalLM, capacity: int, time_state: torch.Tensor | None = None) -> None:
        if type(capacity) is not int or capacity < 1:
            raise ValueError(f"capacity must be a whole number from 1 up, not {capacity!r}")
        weight, config = model.head.weight, model.config
        assert isinstance(config, RWKV7Config)
        self._state = RWKV7State.fresh(config, capacity, weight.device, weight.dtype)
        self._time_state = None if time_state is None else time_state.to(weight.device)
        self._owners: list[object | None] = [None] * capacity
        self._freed = threading.Condition()

    @property
    def capacity(self) -> int:
        return len(self._owners)

    @property
    def free_slots(self) -> int:
        return self._owners.count(None)

    def take(self, owner: object, wait: float = 0.0) -> int:
        """A slot for `owner`, in a new session's state. Raises PoolFull when none is free within `wait` seconds."""
        deadline = time.monotonic() + wait
        with self._freed:
            while None not in self._owners:
                left = deadline - time.monotonic()
                if left <= 0 or not self._freed.wait(left):
                    raise PoolFull(
                        f"all {self.capacity} session slots are taken: close a session, wait, or give the runtime a "
                        "larger capacity"
                    )
            slot = self._owners.index(None)
            self._owners[slot] = owner
            self._clear(slot)
            if self._time_state is not None:
                self._state.wkv[:, slot] = self._time_state
            return slot

    def free(self, slot: int, owner: object) -> None:
        """Clear the slot and give it up."""
        with self._freed:
            self._check([slot], [owner])
            self._clear(slot)
            self._owners[slot] = None
            self._freed.notify()

    def read(self, slots: Sequence[int], owners: Sequence[object]) -> RWKV7State:
        """A copy of the states in these slots, in this order."""
        self._check(slots, owners)
        return self._state.select(list(slots))

    def write(self, slots: Sequence[int], owners: Sequence[object], state: RWKV7State) -> None:
        """Put S states into S slots."""
        self._check(slots, owners)
        index = torch.tensor(list(slots), device=self._state.wkv.device)
        for room, value in zip(_tensors(self._state), _tensors(state), strict=True):
            room.index_copy_(1, index, value.to(room.dtype))

    def is_clear(self, slot: int) -> bool:
        """Whether nothing is left in a slot."""
        return not any(bool(x[:, slot].any()) for x in _tensors(self._state))

    def _clear(self, slot: int) -> None:
        for room in _tensors(self._state):
            room[:, slot] = 0

    def _check(self, slots: Sequence[int], owners: Sequence[object]) -> None:
        if len(set(slots)) != len(slots):
            raise RuntimeError(f"slots named twice in one step: {list(slots)}")
        for slot, owner in zip(slots, owners, strict=True):
            if self._owners[slot] is not owner or owner is None:
                raise RuntimeError(f"slot {slot} does not belong to the session that uses it")


def _tensors(state: RWKV7State) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return state.wkv, state.att_shift, state.ffn_shift


def model_fingerprint(model: nn.Module) -> str:
    """sha256 (hex) over names, shapes, dtypes and values: two models that differ in a tensor differ in it.

    Of a tensor of more than 4,096 elements evenly spaced ones are read, so that a model of gigabytes takes
    milliseconds. Training moves all of them; it is no protection against someone who picks which to change.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: -(-flat.numel() // _SAMPLED)] if flat.numel() > _SAMPLED else flat
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(sample.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
