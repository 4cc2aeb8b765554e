"""When a rank that hangs is noticed, and how long the rank that keeps the store stays for it, by a clock of our own."""

from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from moe_rl.sync import ranks
from moe_rl.sync.ranks import BEAT_S, LINGER_S, _Waiting, _Watch, wait_for_others

SILENCE_S = 5.0
SLACK_S = 2 * BEAT_S
"""A beat that was just missed on either side."""


class Store:
    """The keys of a store; hearts beat by the clock until they stop."""

    def __init__(self, stops_at: dict[int, float]) -> None:
        self.now = 0.0
        self._stops_at = stops_at
        self._keys: dict[str, bytes] = {}

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def set(self, key: str, value: str) -> None:
        self._keys[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._keys or key.startswith("beat/") for key in keys)

    def get(self, key: str) -> bytes:
        if not key.startswith("beat/"):
            return self._keys[key]
        beats = int(min(self.now, self._stops_at[int(key.removeprefix("beat/"))]) / BEAT_S)
        return f"{beats} 4 0".encode()

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        assert expected == ""
        return self._keys.setdefault(key, value.encode())


@pytest.fixture
def store() -> Iterator[Store]:
    """Rank 1 hangs after a second, rank 2 lives."""
    store = Store({1: 1.0, 2: float("inf")})
    with patch.object(ranks, "time", SimpleNamespace(monotonic=lambda: store.now, sleep=store.sleep)):
        yield store


def noticed_s(store: Store, partner: int) -> float:
    """Seconds until a rank that waits for another from the start sets the flag; infinite after a minute without."""
    with patch("moe_rl.sync.ranks.threading.Thread"):
        watch = _Watch(store, 0, SILENCE_S)
    waiting = _Waiting(partner=partner, round_number=4, receives=False, since=store.now)
    while store.now < 60 and not watch.failure:
        watch._look_after(waiting)
        store.sleep(BEAT_S)
    return store.now if watch.failure else float("inf")


def test_a_rank_that_hangs_is_noticed_when_it_has_been_silent_for_as_long_as_it_may(store: Store) -> None:
    assert 1 + SILENCE_S <= noticed_s(store, 1) <= 1 + SILENCE_S + SLACK_S


def test_a_rank_that_lives_is_waited_for(store: Store) -> None:
    assert noticed_s(store, 2) == float("inf")


def test_the_store_stays_for_the_living_and_for_a_dead_rank_no_longer_than_half_its_silence(store: Store) -> None:
    noticed = noticed_s(store, 1)
    store.set("left/2", "1")
    wait_for_others(store, {1, 2}, silence_s=SILENCE_S)
    assert store.now - noticed <= SILENCE_S / 2 + SLACK_S
    # From the moment in which the rank hangs, on every rank.
    assert store.now - 1 < 10


def test_the_store_does_not_stay_for_ever_for_a_rank_that_does_not_leave(store: Store) -> None:
    wait_for_others(store, {2}, silence_s=SILENCE_S)
    assert LINGER_S <= store.now <= LINGER_S + SLACK_S
