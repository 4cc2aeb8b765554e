"""What a broken sync leaves behind: one sentence on every rank, engines that refuse to generate; the next one heals."""

import json
import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moe_rl.sync.errors import SyncError
from moe_rl.sync.ranks import Address, SyncGroup

pytestmark = pytest.mark.multi_rank

HERE = Path(__file__).parent
TRAINERS, ENGINES = range(4), range(4, 6)


@cache
def run(case: str, mutant: str = "") -> list[Any]:
    environment = dict(os.environ, PYTHONPATH=str(HERE.parents[1]), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    command = [sys.executable, str(HERE / "rank_runs.py"), case, *([mutant] if mutant else [])]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=HERE, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    if ran.stderr and not mutant:
        sys.stderr.write(ran.stderr[-3000:])  # pytest shows it where the case does not end as it should
    return json.loads(ran.stdout)


def test_two_syncs_the_second_with_another_map() -> None:
    results = run("well")
    assert [result["said"] for result in results] == [["", ""]] * 6
    assert [results[rank]["wrong"] for rank in ENGINES] == [0, 0]
    assert [results[rank]["refusal"] for rank in ENGINES] == ["", ""]


def test_an_engine_that_joins_gets_everything() -> None:
    results = run("joins")
    assert [result["said"] for result in results] == [["", ""]] * 7
    assert [result["wrong"] for result in results] == [0] * 7


SENTENCES = {
    "cut": "the message of rank 1 did not arrive",
    "flipped": "differs from what its trainer sent",
    "stale_twin": "trainer ranks 0, 2 should hold the same experts",
    "other_step": "rank 5 wants to sync step 1, but rank 0 wants to sync step 2",
    "other_plan": "rank 1 and rank 0 have different plans for step 2",
    "other_map": "and rank 0 have different plans for step 2",
}


@pytest.mark.parametrize("case", SENTENCES)
def test_every_rank_hears_the_same_sentence_and_the_next_sync_heals(case: str) -> None:
    results = run(case)
    assert len({result["said"] for result in results}) == 1
    assert SENTENCES[case] in results[0]["said"]
    for rank in ENGINES:
        assert "do not hold the weights of step 2" in results[rank]["refusal"]
        assert results[rank]["after"]["refusal"] == ""
    assert {result["healed"] for result in results} == {""}
    assert {result["after"]["wrong"] for result in results} == {0}


@pytest.mark.parametrize(("case", "culprit", "sentence"), [
    ("killed", 2, "connection"), ("store_killed", 0, "the sync's key-value store cannot be reached"),
    ("stopped", 3, "rank 3"),
])  # fmt: skip
def test_a_rank_that_dies_or_hangs_ends_the_sync_everywhere(case: str, culprit: int, sentence: str) -> None:
    results = run(case)
    assert results[culprit] is None
    for rank, result in enumerate(results):
        if rank != culprit:
            assert sentence in result["said"]
    if case != "store_killed":  # without the store nobody can agree on a sentence
        assert len({result["said"] for result in results if result is not None}) == 1
    for rank in ENGINES:
        assert "do not hold the weights of step 2" in results[rank]["refusal"]


def test_an_engine_that_rebalanced_itself_gets_nothing() -> None:
    results = run("rebalanced")
    assert {result["said"] for result in results} == {
        "nothing was sent: rank 5: the engine's expert map is not the plan's: the engine rebalanced itself, or "
        "received another map."
    }
    assert "do not hold the weights of step 2" in results[5]["refusal"]


def test_a_late_loader_spoils_no_other_engine_and_refuses_itself() -> None:
    """What engine 0 passes on comes from staging, not from its slots."""
    results = run("late_loader")
    assert results[5]["wrong"] == 0
    assert results[5]["refusal"] == ""
    assert "32 of 32 expert slots do not hold the weights of step 2" in results[4]["refusal"]


@pytest.mark.parametrize(("mutant", "case"), [
    ("without sums", "flipped"), ("without vote", "other_step"), ("without twins' sums", "stale_twin"),
    ("without heartbeat", "cut"),
])  # fmt: skip
def test_a_mutant_without_the_check_is_noticed(mutant: str, case: str) -> None:
    """The same case without its check ends otherwise: weights are wrong, or ranks wait, or the sentence is another."""
    results = run(case, mutant)
    told = [result is not None and SENTENCES[case] in result["said"] for result in results]
    assert not all(told)


def test_a_meeting_point_that_is_taken_is_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SyncError, match=rf"rank 0 cannot serve the rendezvous at 127\.0\.0\.1:{port}"):
            SyncGroup(rank=0, size=1, address=Address(host="127.0.0.1", port=port), serves=True)
