"""Plans from what every worker counts of its own rows, and what ranks must have in common: ranks are threads."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from strategies import model_spec

pytest.importorskip("torch")

import torch.distributed as dist
from thread_ranks import GridExchange, GridHub, ThreadRanks

from moe_rl.balancing import common_facts, local
from moe_rl.balancing.common_facts import require_in_common
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.local import plan_from_local
from moe_rl.balancing.schedule import cluster_topology, plan_of_load
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.load import StepLoad

GRID = np.array([[1, 0], [2, 3]])
"""[EP group, EP rank] -> rank of the run."""
MICRO_BATCHES, LAYERS, EXPERTS, TOP_K = 2, 2, 8, 2
MODEL = model_spec(num_experts=EXPERTS, num_layers=LAYERS, top_k=TOP_K)
CONFIG = BalancerConfig(objective="imbalance", replica_slots=2)


def counts_of(rank: int, most: int = 40) -> np.ndarray:
    """Return [M, L, E] pairs of whole tokens, low experts first; rank 1 has no token in micro-batch 0."""
    rng = np.random.default_rng(rank)
    counts = np.sort(rng.integers(0, most, (MICRO_BATCHES, LAYERS, EXPERTS)), axis=2)[..., ::-1].copy()
    counts[..., 0] += counts.sum(axis=2) % TOP_K
    if rank == 1:
        counts[0] = 0
    return counts


def on_grid(step: Any) -> list[Any]:
    """Return what `step(rank, gathered, ep, expert_dp)` returns or raises on all ranks."""
    ranks, hub = ThreadRanks(GRID.size), GridHub(GRID.shape)  # type: ignore[arg-type]
    exchanges = {int(rank): GridExchange(hub, place) for place, rank in np.ndenumerate(GRID)}  # type: ignore[arg-type]

    def gathered(message: Any, group: Any) -> list[Any]:
        exchange = exchanges[ranks.rank()]
        return {"ep": exchange.gather, "expert dp": exchange.gather_over_groups}[group](message)

    with patch.object(local, "gathered", gathered):
        return ranks.run(step)


@pytest.mark.parametrize("most", [40, 2**17])
@pytest.mark.parametrize("all_groups", [True, False])
def test_every_rank_makes_the_plan_of_all_counts(all_groups: bool, most: int) -> None:
    def step(rank: int) -> Any:
        expert_dp = {"expert_dp_group": "expert dp"} if all_groups else {}
        return plan_from_local(counts_of(rank, most), "ep", config=CONFIG, model=MODEL, **expert_dp)  # type: ignore[arg-type]

    plans = on_grid(step)
    for ranks in GRID.tolist():
        of_groups = GRID.tolist() if all_groups else [ranks]
        pairs = np.array([[counts_of(rank, most) for rank in of_group] for of_group in of_groups])
        load = StepLoad(
            pairs=np.ascontiguousarray(pairs.transpose(0, 2, 3, 1, 4), np.int32),
            # A token has top_k pairs in every layer; where a layer misses some, the fullest one says how many came.
            tokens=-(-pairs.sum(axis=4).max(axis=3).transpose(0, 2, 1) // TOP_K),
            top_k=TOP_K,
        )
        expected = plan_of_load(
            load,
            config=CONFIG,
            model=MODEL,
            topology=cluster_topology(CONFIG, ep_size=GRID.shape[1], num_ep_groups=len(of_groups)),
        )
        for rank in ranks:
            plan = plans[rank]
            assert not isinstance(plan, BaseException), plan
            assert plan.replicas.num_ep_groups == len(of_groups)
            assert plan.replicas.copies == expected.replicas.copies > 0
            np.testing.assert_array_equal(plan.replicas.source_quota, expected.replicas.source_quota)
            np.testing.assert_array_equal(plan.replicas.expert, expected.replicas.expert)
            np.testing.assert_array_equal(plan.placement.home_rank, expected.placement.home_rank)


@pytest.mark.parametrize(
    "counts",
    [
        np.zeros((1, LAYERS, EXPERTS + 1), int),
        np.zeros((1, LAYERS + 1, EXPERTS), int),
        np.zeros((LAYERS, EXPERTS), int),
        np.full((1, LAYERS, EXPERTS), -1),
    ],
)
def test_counts_of_another_shape_or_below_zero_are_refused(counts: np.ndarray) -> None:
    with pytest.raises(
        InvalidInputError,
        match=r"counts must be at least 0 and have shape \[micro-batches, 2 MoE layers, 8 experts\]",
    ):
        plan_from_local(counts, None, config=CONFIG, model=MODEL)  # type: ignore[arg-type]


def test_no_tokens_at_all_is_a_plan_without_copies() -> None:
    nothing = np.zeros((1, LAYERS, EXPERTS), int)
    found = on_grid(lambda rank: plan_from_local(nothing, "ep", config=CONFIG, model=MODEL))  # type: ignore[arg-type]
    assert [plan.replicas.copies for plan in found] == [0] * GRID.size


@pytest.mark.parametrize("rank_apart", [1, 3])
def test_another_number_of_micro_batches_on_one_rank_is_refused_where_it_is_heard(rank_apart: int) -> None:
    def step(rank: int) -> Any:
        counts = counts_of(rank)[: 1 if rank == rank_apart else 2]
        return plan_from_local(counts, "ep", expert_dp_group="expert dp", config=CONFIG, model=MODEL)  # type: ignore[arg-type]

    for error in on_grid(step):
        assert isinstance(error, InvalidInputError)
        assert str(error) == "all ranks must have the same number of micro-batches, but they have [1, 2]."


def in_common(facts: Any) -> list[Any]:
    """Return what `require_in_common` says on three ranks, of which each has `facts(rank)`."""
    ranks = ThreadRanks(3)

    def of_software() -> dict[str, str]:
        return facts(ranks.rank())[2]

    def step(rank: int) -> None:
        config, other, _ = facts(rank)
        require_in_common(config, other, whose="test: ")

    with (
        patch.object(dist, "is_initialized", lambda: True),
        patch.object(common_facts, "gathered", ranks.gathered),
        patch.object(common_facts, "agreed", lambda step: step()),
        patch.object(common_facts, "_software", of_software),
    ):
        return ranks.run(step)


def test_ranks_with_everything_in_common_go_on() -> None:
    assert in_common(lambda rank: (CONFIG, {"rows": 3}, {"the C++ core": "none"})) == [None] * 3
    require_in_common(CONFIG, {"rows": 3})  # without other ranks nobody is asked


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (
            lambda rank: (CONFIG, {"rows": 3 + (rank == 2)}, {}),
            "test: rows must be the same on all ranks, but rank 2 has 4 and rank 0 has 3.",
        ),
        (
            lambda rank: (CONFIG, None, {"the C++ core": "none" if rank == 1 else "sources 12"}),
            "test: the C++ core must be the same on all ranks, but rank 1 has none and rank 0 has sources 12.",
        ),
        (
            lambda rank: (BalancerConfig(replica_slots=1 + (rank == 1)), None, {}),
            "test: replica_slots must be the same on all ranks, but rank 1 has 2 and rank 0 has 1.",
        ),
        (
            lambda rank: (CONFIG, {"a name of a later version": 1} if rank == 1 else {}, {}),
            "test: a name of a later version must be the same on all ranks, but rank 1 has 1 and rank 0 has nothing.",
        ),
    ],
)
def test_what_differs_is_named_on_every_rank(facts: Any, sentence: str) -> None:
    for error in in_common(facts):
        assert isinstance(error, InvalidInputError)
        assert str(error) == sentence


def test_software_is_told_by_its_versions_and_the_core_by_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = {
        "none (because)": None,
        "an older build": SimpleNamespace(),
        "sources 0123456789ab": SimpleNamespace(sources_digest=lambda: "0123456789abcdef"),
    }
    monkeypatch.setattr(common_facts, "why_not_native", lambda: "because")
    for told, core in cores.items():
        monkeypatch.setattr(common_facts, "native_core", lambda core=core: core)
        assert common_facts._software()["the C++ core"] == told
    assert common_facts._software()["the version of numpy"] == np.__version__
    assert common_facts._version("no-such-package-is-there") == "none"
