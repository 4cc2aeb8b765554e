"""Every stress workload has the property its name claims, and not the one of its neighbor."""

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.workloads import HEAT, Workload, workload_steps
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.reduce import reduce_load
from moe_rl.core.topology import ClusterTopology, HardwareSpec


def step_loads(workload: Workload) -> list[StepLoad]:
    rates = [
        name
        for name in HardwareSpec.__slots__
        if name not in ("name", "ranks_per_node", "a2a_mixing", "pooled_nics", "sources")
    ]
    hardware = HardwareSpec(name="any", ranks_per_node=8, **dict.fromkeys(rates, 1))  # type: ignore[arg-type]
    topology = ClusterTopology(hardware=hardware, ep_size=workload.ep_size)
    return [
        reduce_load(
            [trace],
            layout=BatchLayout.recorded(trace.micro_batch, trace.dp_rank, num_dp_ranks=workload.num_dp_ranks),
            topology=topology,
        )
        for trace in workload_steps(workload)
    ]


def experts(load: StepLoad) -> NDArray[np.int64]:
    """[M, L, E]"""
    return load.per_expert()[0]


def ranks(load: StepLoad) -> NDArray[np.int64]:
    """[M, L, P] rows of contiguous experts."""
    per_expert = experts(load)
    return per_expert.reshape(*per_expert.shape[:2], load.ep_size, -1).sum(axis=3)


def max_over_mean(load: NDArray[np.int64]) -> NDArray[np.float64]:
    ratio: NDArray[np.float64] = load.max(axis=-1) / load.mean(axis=-1)
    return ratio


def workload(name: str, **options: int) -> Workload:
    return Workload(name=name, **({"num_layers": 3, "tokens_per_cell": 512, "num_micro_batches": 4} | options))


EVEN = 1.21
"""Bound on max / mean where all experts are equal: 4096 tokens x top-8 over 64 experts give each 512 pairs with a
standard deviation of sqrt(512 x 7 / 8), 4.1 %; five of these are passed by one entry in three million."""


def test_w0_gives_every_expert_the_same() -> None:
    (load,) = step_loads(workload("W0_balanced"))
    assert (experts(load) == experts(load)[0, 0, 0]).all()
    (uneven,) = step_loads(workload("W0_balanced", num_experts=24, top_k=7, tokens_per_cell=101))
    assert np.ptp(experts(uneven), axis=2).max() <= 1


def test_w1_keeps_a_scattered_set_of_experts_hot() -> None:
    first, second = step_loads(workload("W1_hot_expert_set", num_steps=2))
    assert max_over_mean(experts(first)).min() > 2
    hot = np.sort(np.argsort(experts(first), axis=2)[:, :, -8:], axis=2)
    later = np.sort(np.argsort(experts(second), axis=2)[:, :, -8:], axis=2)
    assert (hot == hot[0]).all()
    assert (later == hot).all()
    assert not (hot[0] == hot[0, 0]).all(), "layers are independent"
    assert all(len(np.unique(layer // 8)) > 2 for layer in hot[0]), "not on one rank"


def test_w2_puts_the_heat_of_w1_on_one_rank() -> None:
    (hot_rank,) = step_loads(workload("W2_hot_rank"))
    (hot_set,) = step_loads(workload("W1_hot_expert_set"))
    # the same number of hot experts of the same weight: equal heat per expert, another place
    assert max_over_mean(experts(hot_rank)).mean() == pytest.approx(max_over_mean(experts(hot_set)).mean(), rel=0.05)
    assert max_over_mean(ranks(hot_rank)).min() > 2.5
    assert max_over_mean(ranks(hot_rank)).mean() > 1.3 * max_over_mean(ranks(hot_set)).mean()


def test_w3_is_uneven_over_experts_and_even_over_ranks() -> None:
    (load,) = step_loads(workload("W3_spread_hot_experts"))
    assert max_over_mean(experts(load)).min() > 2
    assert max_over_mean(ranks(load)).max() < EVEN


def test_w4_is_ragged_at_the_source_only() -> None:
    (load,) = step_loads(workload("W4_source_ragged"))
    tokens = load.tokens[0]
    assert (tokens.sum(axis=1) == 512 * 8).all()
    np.testing.assert_allclose(tokens[0] / tokens[0, 0], np.arange(1, 9), rtol=0.01)
    assert max_over_mean(experts(load)).max() < EVEN


def test_w5_leaves_half_the_ranks_without_a_token() -> None:
    (load,) = step_loads(workload("W5_zero_expert_rank"))
    assert (ranks(load)[:, :, :4] == 0).all()
    assert max_over_mean(ranks(load)[:, :, 4:]).max() < EVEN
    assert max_over_mean(ranks(load)).min() == pytest.approx(2, rel=0.1)


def test_w6_is_hot_in_every_micro_batch_and_even_in_total() -> None:
    (load,) = step_loads(workload("W6_rotating_hotspot", num_micro_batches=8))
    assert max_over_mean(experts(load)).min() > 2
    assert max_over_mean(experts(load).sum(axis=0)).max() < EVEN
    hottest = np.argsort(experts(load), axis=2)[:, :, -8:]
    assert all(not set(hottest[m, 0]) & set(hottest[m + 1, 0]) for m in range(7))


def test_w7_bursts_in_every_fourth_micro_batch() -> None:
    first, second = step_loads(workload("W7_burst", num_micro_batches=6, num_steps=2))
    imbalance = max_over_mean(np.concatenate([ranks(first), ranks(second)])).min(axis=1)
    burst = np.arange(12) % 4 == 3
    assert imbalance[burst].min() > 4
    assert max_over_mean(np.concatenate([ranks(first), ranks(second)]))[~burst].max() < EVEN


def test_the_weight_of_an_expert_is_its_odds_of_being_chosen_first() -> None:
    (load,) = step_loads(workload("W2_hot_rank", top_k=1, num_layers=1))
    hot = ranks(load)[:, 0].max(axis=1).sum()
    total = experts(load)[:, 0].sum()
    share = 8 * HEAT / (8 * HEAT + 56)
    assert abs(hot / total - share) < 4 * np.sqrt(share * (1 - share) / total)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("W8_more", {}, "unknown workload 'W8_more'"),
        ("W5_zero_expert_rank", {"ep_size": 1}, "two EP ranks"),
        ("W5_zero_expert_rank", {"num_experts": 8, "top_k": 5, "ep_size": 2}, "half of them"),
        ("W3_spread_hot_experts", {"ep_size": 64}, "two experts per EP rank"),
        ("W4_source_ragged", {"num_dp_ranks": 1}, "two data-parallel ranks"),
        ("W0_balanced", {"ep_size": 7}, "does not divide"),
        ("W0_balanced", {"top_k": 65}, "exceeds num_experts"),
        ("W0_balanced", {"num_layers": 0}, "num_layers must be at least 1"),
        ("W0_balanced", {"tokens_per_cell": 3}, "less than sequences_per_cell"),
    ],
)
def test_workloads_that_cannot_be_are_refused(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        workload(name, **options)
