"""Choosing one token from scores: greedy, or sampled from what temperature, top-k, top-p, min-p and penalties leave."""

import math
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

# of a penalised score; a float32 holds it
_LARGEST = 1e30


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a turn are chosen.

    temperature: 0 takes the likeliest token; the filters below then change nothing.
    top_k: keep the k likeliest; 0 keeps all.
    top_p: keep the likeliest that together reach this probability, at least one.
    min_p: keep those at least this share as likely as the likeliest.
    repetition_penalty: divides the positive logits of ids that the turn has written already and multiplies the
        negative ones (CTRL, arXiv:1909.05858).
    presence_penalty, frequency_penalty: subtracted once, and once for each time, from the logits of such ids.
    seed: of the turn's own random numbers, so that no other session moves them; None takes a fresh one.

    Structural tokens pay no penalty: the grammar decides about them. Temperature comes before the filters, and
    top-k before top-p before min-p, as in transformers.
    Raises ValueError for a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = 0

    def __post_init__(self) -> None:
        for name, good, what in (
            ("temperature", 0 <= self.temperature < float("inf"), "from 0 up"),
            ("top_k", type(self.top_k) is int and self.top_k >= 0, "a whole number from 0 up"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "from 0 to below 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0"),
            ("presence_penalty", abs(self.presence_penalty) < float("inf"), "finite"),
            ("frequency_penalty", abs(self.frequency_penalty) < float("inf"), "finite"),
            ("seed", self.seed is None or type(self.seed) is int, "a whole number or None"),
        ):
            if not good:
                raise ValueError(f"sampling: {name} must be {what}, not {getattr(self, name)!r}")


class Sampler:
    """Draws the tokens of one turn; remembers what it has written."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = Random(sampling.seed)
        self._counts: dict[int, int] = {}

    def choose(self, scores: Tensor, allowed: Tensor) -> int:
        """One allowed id.

        Args:
            scores: float [V], the logits.
            allowed: bool [V], at least one True.

        Raises RuntimeError where no allowed id has a finite score: chance would then choose among all ids.
        """
        how = self.sampling
        scores = scores.float()
        if self._counts:
            scores = self._penalised(scores)
        scores = scores.masked_fill(~allowed, float("-inf"))
        likeliest = int(scores.argmax())
        # argmax finds a nan before anything else
        if not math.isfinite(best := float(scores[likeliest])):
            raise RuntimeError(f"the best score of an allowed id is {best}: the model's logits are not finite")
        if how.temperature == 0:
            return likeliest
        # the likeliest has 0, so that no temperature makes it infinite
        return self._draw((scores.double() - best) / how.temperature)

    def count(self, id: int) -> None:
        """Note that `id` was written as payload."""
        self._counts[id] = self._counts.get(id, 0) + 1

    def _penalised(self, scores: Tensor) -> Tensor:
        how = self.sampling
        if (how.repetition_penalty, how.presence_penalty, how.frequency_penalty) == (1, 0, 0):
            return scores
        ids = torch.tensor(list(self._counts), device=scores.device)
        times = torch.tensor(list(self._counts.values()), device=scores.device, dtype=scores.dtype)
        old = scores[ids].double()
        new = torch.where(old > 0, old / how.repetition_penalty, old * how.repetition_penalty)
        new = new - how.presence_penalty - how.frequency_penalty * times
        # a penalty of any size leaves an id that may be the only one allowed
        return scores.index_copy(0, ids, new.clamp(-_LARGEST, _LARGEST).to(scores.dtype))

    def _draw(self, scores: Tensor) -> int:
        how = self.sampling
        chances, ids = scores.softmax(-1).sort(descending=True)
        keep = torch.ones_like(chances, dtype=torch.bool)
        if how.top_k:
            keep[how.top_k :] = False
        if how.top_p < 1:
            rest = chances * keep
            rest = rest / rest.sum()
            # an id stays while those before it have not reached top_p
            keep &= rest.cumsum(0) - rest < how.top_p
        if how.min_p:
            keep &= chances >= how.min_p * chances[0]
        total = (chances * keep).cumsum(0)
        place = torch.searchsorted(total, self._random.random() * total[-1], right=True)
        return int(ids[min(int(place), int(keep.sum()) - 1)])
