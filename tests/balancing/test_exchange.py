"""Objects of any size come as they were given, in one exchange where they are small."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from moe_rl.balancing import exchange
from moe_rl.core.errors import InvalidInputError


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Three threads in place of ranks; the bytes of every rank in each exchange that they have made."""
    barrier, told, of_thread, made = threading.Barrier(3, timeout=20.0), {}, threading.local(), list[int]()
    numbers = iter(range(3))

    def gather(local: np.ndarray, _: Any) -> np.ndarray:
        if not hasattr(of_thread, "rank"):
            of_thread.rank = next(numbers)
        told[of_thread.rank] = np.array(local)
        if barrier.wait() == 0:
            made.append(len(local))
        everyone = np.stack([told[rank] for rank in range(3)])
        barrier.wait()
        return everyone

    monkeypatch.setattr(exchange, "gather", gather)
    monkeypatch.setattr(exchange.dist, "get_world_size", lambda _: 3)
    return made


@pytest.mark.parametrize("size", [0, 3, exchange.SMALL_BYTES - 40, exchange.SMALL_BYTES, 5 * exchange.SMALL_BYTES])
def test_objects_of_any_size_are_gathered(rounds: list[int], size: int) -> None:
    given = ["", "x" * size, {"rows": np.arange(7)}]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(exchange.gathered, given))
    for each in found:
        assert sorted(map(str, each)) == sorted(map(str, given))
    assert rounds[0] == exchange.SMALL_BYTES
    assert len(rounds) == (1 if size < exchange.SMALL_BYTES - 30 else 2)


def test_one_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange.dist, "get_world_size", lambda _: 1)
    assert exchange.gathered("alone") == ["alone"]


class Group:
    """Threads in the place of a process group's ranks."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks, self._said = ranks, dict[int, Any]()
        self._barrier = threading.Barrier(len(ranks), timeout=300.0)

    def gathered(self, message: Any, rank: int) -> list[Any]:
        self._said[rank] = message
        self._barrier.wait()
        everyone = [self._said[each] for each in self.ranks]
        self._barrier.wait()
        return everyone

    def rank(self) -> int:
        return self.ranks.index(OF_THREAD.rank)

    def size(self) -> int:
        return len(self.ranks)


OF_THREAD = threading.local()
GRID = np.arange(12).reshape(2, 3, 2)
"""[part of an expert, EP group, EP rank] -> rank of the run."""


def on_the_grid(monkeypatch: pytest.MonkeyPatch, call: Any) -> dict[tuple[int, ...], Any]:
    """Return what `call(exchange)` returns or raises on every rank, by its place in GRID."""
    groups_by_axis = []
    for axis in range(3):
        lines = np.moveaxis(GRID, axis, -1).reshape(-1, GRID.shape[axis])
        groups_by_axis.append({int(rank): group for line in lines for group in [Group(line.tolist())] for rank in line})

    def on_rank(rank: int) -> Any:
        OF_THREAD.rank = rank
        tp, dp, ep = (groups[rank] for groups in groups_by_axis)
        try:
            return call(exchange.PlanExchange(ep=ep, expert_dp=dp, expert_tp=tp))  # type: ignore[arg-type]
        except Exception as error:
            return error

    monkeypatch.setattr(exchange, "gathered", lambda message, group: group.gathered(message, OF_THREAD.rank))
    with ThreadPoolExecutor(GRID.size) as pool:
        found = list(pool.map(on_rank, range(GRID.size)))
    return {place: found[rank] for place, rank in np.ndenumerate(GRID)}


def test_what_ranks_say_is_heard_by_those_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def heard(exchange: Any) -> list[Any]:
        own = (exchange.part, exchange.group_index, exchange.rank)
        assert (exchange.size, exchange.num_groups) == (2, 3)
        value, everyone = exchange.together(lambda: own, lambda value: ("told", value))
        assert value == own
        gathers = (exchange.gather, exchange.gather_over_groups, exchange.gather_parts, exchange.gather_in_grid)
        return [everyone, *(gather(own) for gather in gathers)]

    for (part, group, rank), found in on_the_grid(monkeypatch, heard).items():
        assert found == [
            [[("told", (part, g, r)) for r in range(2)] for g in range(3)],
            [(part, group, r) for r in range(2)],
            [(part, g, rank) for g in range(3)],
            [(p, group, rank) for p in range(2)],
            [[(part, g, r) for r in range(2)] for g in range(3)],
        ]


@pytest.mark.parametrize("failing", [(0, 0, 1), (1, 2, 0)])
def test_an_error_of_one_rank_is_raised_on_all(failing: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all parts and of all EP groups: else one would wait for collectives that the others do not call."""

    def step(exchange: Any) -> Any:
        def read() -> str:
            if (exchange.part, exchange.group_index, exchange.rank) == failing:
                raise ZeroDivisionError("no rows")
            return "read"

        return exchange.together(read, str.upper)

    for place, error in on_the_grid(monkeypatch, step).items():
        if place == failing:
            assert isinstance(error, ZeroDivisionError)
        else:
            assert isinstance(error, InvalidInputError)
            assert str(error) == f"EP rank {failing[2]} of EP group {failing[1]} cannot plan this pass: no rows"


def test_an_error_without_words_says_its_kind() -> None:
    assert [exchange.told(error) for error in (None, ValueError("7"), ValueError())] == ["", "7", "ValueError"]
