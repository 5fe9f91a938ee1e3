"""Best-fit-decreasing against its definition, and the windows of a stream."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smi.data.packing import CARRIED, best_fit_decreasing, cut_points, pack_lengths, pack_windows


def by_definition(lengths: list[int], capacity: int) -> list[list[int]]:
    """Every document, longest first, goes where it fits tightest; of equal packs into the one filled last."""
    packs: list[list[int]] = []
    # (pack, room), the one filled last at the end
    rooms: list[tuple[int, int]] = []
    for document in sorted(range(len(lengths)), key=lambda document: -lengths[document]):
        fitting = [entry for entry in rooms if entry[1] >= lengths[document]]
        if fitting:
            tightest = min(room for _, room in fitting)
            pack, room = next(entry for entry in reversed(fitting) if entry[1] == tightest)
            rooms.remove((pack, room))
        else:
            pack, room = len(packs), capacity
            packs.append([])
        packs[pack].append(document)
        rooms.append((pack, room - lengths[document]))
    return packs


@given(st.data())
def test_packs_are_best_fit_decreasing(data: st.DataObject) -> None:
    # 63, 64 and 4096 are where the tree of words gains a level
    capacity = data.draw(st.sampled_from([1, 2, 7, 50, 62, 63, 64, 65, 2048, 4095, 4096, 300_000]))
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    packs = pack_lengths(np.array(lengths, dtype=np.int32), capacity)
    assert packs.lists() == best_fit_decreasing(lengths, capacity) == by_definition(lengths, capacity)
    assert sorted(packs.members.tolist()) == list(range(len(lengths)))
    assert packs.rooms.tolist() == [capacity - sum(lengths[i] for i in pack) for pack in packs.lists()]
    assert (packs.rooms >= 0).all()


def test_many_documents_of_few_lengths() -> None:
    numbers = np.random.default_rng(0)
    for choice in ([3, 5, 7], [1], [10], [4, 6, 10], range(1, 11)):
        lengths = numbers.choice(list(choice), size=400).tolist()
        assert best_fit_decreasing(lengths, 10) == by_definition(lengths, 10)


def test_large_capacities_and_many_documents_pack_tightly() -> None:
    lengths = np.clip(np.random.default_rng(1).lognormal(6.1, 0.8, 50_000), 1, 100_000).astype(int)
    packs = pack_lengths(lengths, 100_000)
    assert len(packs) == -(-lengths.sum() // 100_000)
    assert np.array_equal(np.sort(packs.members), np.arange(50_000))


@pytest.mark.parametrize("lengths", [[3, 0], [3, 11], [3, -1]])
def test_lengths_that_do_not_fit_are_named(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"document 1 has -?\d+ tokens; a pack takes 1 to 10"):
        best_fit_decreasing(lengths, 10)


def test_lengths_must_be_whole_numbers() -> None:
    with pytest.raises(ValueError, match="whole numbers"):
        best_fit_decreasing([1.5, 2.0], 10)
    with pytest.raises(ValueError, match="one row"):
        best_fit_decreasing([[1, 2]], 10)
    assert best_fit_decreasing([], 10) == []


def windows(lengths: list[int], window: int, seed: str = "a") -> list[list[int]]:
    return list(pack_windows(enumerate(lengths), window=window, capacity=2048, rng=Random(seed)))


def fill(lengths: list[int], packs: int) -> float:
    return 100 * sum(lengths) / (packs * 2048)


@pytest.mark.parametrize(("window", "points"), [(512, 0.5), (4096, 0.15), (16_384, 0.05)])
@pytest.mark.parametrize("spread", [0.6, 1.0])
def test_windows_fill_packs_nearly_as_offline(window: int, points: float, spread: float) -> None:
    mean = np.log(630) - spread**2 / 2
    lengths = np.clip(np.random.default_rng(2).lognormal(mean, spread, 60_000), 1, 2048).astype(int).tolist()
    packs = windows(lengths, window)
    assert sorted(index for pack in packs for index in pack) == list(range(60_000))
    assert all(sum(lengths[index] for index in pack) <= 2048 for pack in packs)
    assert fill(lengths, len(pack_lengths(lengths, 2048))) - fill(lengths, len(packs)) < points


def test_a_document_waits_for_one_window_at_most() -> None:
    # nothing fits beside the long ones, so their packs are the emptiest of every window
    lengths = [1100 if index % 7 == 0 else 1024 for index in range(5_000)]
    window = 256
    packs = windows(lengths, window)
    done, late = 0, 0
    for pack in packs:
        # when a pack comes out, its documents have been read for two windows at most
        late = max(late, done - min(pack))
        done += len(pack)
    assert late <= (2 + 2 * CARRIED) * window
    # the first pack needs one window of documents, no more
    assert max(packs[0]) < window


@pytest.mark.parametrize("window", [1, 2, 3, 7, 100])
def test_any_window_works(window: int) -> None:
    lengths = [int(n) for n in np.random.default_rng(window).integers(1, 2049, 50)]
    assert sorted(index for pack in windows(lengths, window) for index in pack) == list(range(50))
    assert windows([], window) == []


def test_order_is_a_function_of_the_seed() -> None:
    lengths = [int(n) for n in np.random.default_rng(3).integers(1, 500, 300)]
    assert windows(lengths, 64) == windows(lengths, 64)
    assert windows(lengths, 64) != windows(lengths, 64, seed="b")


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(1, 40))
def test_long_documents_are_cut_between_transmissions_or_not_at_all(sizes: list[int], capacity: int) -> None:
    ends = np.cumsum(sizes).tolist()
    points = cut_points(ends, capacity)
    if max(sizes) > capacity:
        # a cut inside a transmission is one that no other could have been made instead of
        for start, point in pairwise([0, *points]):
            if point not in ends:
                assert point == start + capacity
                assert not any(start < end <= point for end in ends)
        assert all(0 < piece <= capacity for piece in np.diff([0, *points]))
        assert points[-1] == ends[-1]
        return
    assert set(points) <= set(ends)
    assert points[-1] == ends[-1]
    pieces = np.diff([0, *points])
    assert ((pieces >= 1) & (pieces <= capacity)).all()
    # no fewer would do: each piece is as long as it can be
    following = [sizes[ends.index(point) + 1] for point in points[:-1]]
    assert all(piece + more > capacity for piece, more in zip(pieces, following, strict=False))


@pytest.mark.parametrize("ends", [[], [3, 3], [0, 2], [5, 4], [[1]]])
def test_ends_ascend(ends: list[int]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        cut_points(ends, 10)
