"""Best-fit-decreasing against its definition, and the windows of a stream."""

from random import Random

import numpy as np
import pytest

from smi.data.packing import best_fit_decreasing, pack_windows


def rooms_by_definition(lengths: list[int], capacity: int) -> list[int]:
    """What each pack has left when every document, longest first, goes where it fits tightest."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - length)
    return sorted(rooms)


def test_packs_are_best_fit_decreasing() -> None:
    numbers = np.random.default_rng(0)
    for _ in range(300):
        capacity = int(numbers.integers(1, 50))
        lengths = numbers.integers(1, capacity + 1, size=int(numbers.integers(0, 60)))
        packs = best_fit_decreasing(lengths, capacity)
        assert sorted(index for pack in packs for index in pack) == list(range(lengths.size))
        rooms = sorted(capacity - int(lengths[pack].sum()) for pack in packs)
        assert rooms == rooms_by_definition(lengths.tolist(), capacity)


def test_large_capacities_and_many_documents_pack_tightly() -> None:
    lengths = np.clip(np.random.default_rng(1).lognormal(6.1, 0.8, 50_000), 1, 100_000).astype(int)
    packs = best_fit_decreasing(lengths, 100_000)
    assert len(packs) == -(-lengths.sum() // 100_000)


@pytest.mark.parametrize("lengths", [[3, 0], [3, 11], [3, -1]])
def test_lengths_that_do_not_fit_are_named(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"document 1 has -?\d+ tokens; a pack takes 1 to 10"):
        best_fit_decreasing(lengths, 10)


def test_lengths_must_be_whole_numbers() -> None:
    with pytest.raises(ValueError, match="whole numbers"):
        best_fit_decreasing([1.5, 2.0], 10)
    assert best_fit_decreasing([], 10) == []


def windows(lengths: list[int], window: int, seed: str = "a") -> list[list[int]]:
    return list(pack_windows(enumerate(lengths), window=window, capacity=2048, rng=Random(seed)))


def test_windows_hand_out_every_document_once_and_fill_packs() -> None:
    lengths = np.clip(np.random.default_rng(2).lognormal(6.1, 0.8, 5_000), 1, 2048).astype(int).tolist()
    packs = windows(lengths, 512)
    assert sorted(index for pack in packs for index in pack) == list(range(5_000))
    assert all(sum(lengths[index] for index in pack) <= 2048 for pack in packs)
    assert sum(lengths) / (len(packs) * 2048) > 0.99
    # the first pack needs one window of documents, no more
    assert max(packs[0]) < 512


@pytest.mark.parametrize("window", [1, 2, 3, 7, 100])
def test_any_window_works(window: int) -> None:
    lengths = [int(n) for n in np.random.default_rng(window).integers(1, 2049, 50)]
    assert sorted(index for pack in windows(lengths, window) for index in pack) == list(range(50))


def test_order_is_a_function_of_the_seed() -> None:
    lengths = [int(n) for n in np.random.default_rng(3).integers(1, 500, 300)]
    assert windows(lengths, 64) == windows(lengths, 64)
    assert windows(lengths, 64) != windows(lengths, 64, seed="b")
