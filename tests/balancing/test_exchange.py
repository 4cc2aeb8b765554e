"""Objects of any size come as they were given, in one exchange where they are small."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from moe_rl.balancing import exchange


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
