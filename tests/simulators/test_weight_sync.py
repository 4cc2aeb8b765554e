"""Prices of weight syncs by transport beside published ones, and what imbalance costs while an engine decodes."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.weight_syncs import FITTED, HELD_OUT, published, within
from moe_rl.config import load_cluster, load_model
from moe_rl.core.errors import InvalidInputError
from moe_rl.simulators.expert_skew import expert_shares, placed_evenly, slowest_rank_s
from moe_rl.simulators.rl_step import RlStepSetting, rl_step
from moe_rl.simulators.weight_sync import SyncSetting, SyncTimeline, price_sync, timeline_seconds

H100 = load_cluster("h100")
MODEL = load_model("qwen3-30b-a3b").spec


def test_published_syncs_are_met() -> None:
    rows = list(published(FITTED))
    assert within(rows, 1.5) >= 0.8
    assert within(rows, 1.25) >= 0.5


def test_published_syncs_that_no_constant_saw_are_met_half_of_the_time() -> None:
    """The aim is 80 % within 1.5; what misses, the page names."""
    rows = list(published(HELD_OUT))
    assert within(rows, 1.5) >= 0.6
    assert within(rows, 1.25) >= 0.5


def test_a_broadcast_over_all_nics_of_a_node_gathers_and_sends_as_fast() -> None:
    """At 8 NICs of 1 GB/s, 0.54 of it, 8.64 GB take 2 s in and 2 s out; by one NIC alone they take 16."""
    hardware = replace(H100, rdma_gb_per_s=1.0)
    setting = SyncSetting(weights_bytes=8.64e9, num_tensors=0, train_gpus=16, engine_gpus=8, engine_size=4)
    parts = price_sync("packed-broadcast", setting, hardware).parts_s
    assert (parts["gather"], parts["transfer"]) == pytest.approx((2, 2))
    assert price_sync("broadcast", setting, hardware).parts_s["transfer"] == pytest.approx(16)
    # A quarter of the weights by an engine GPU's own NIC.
    assert price_sync("paired-rdma", setting, hardware).parts_s["transfer"] == pytest.approx(2.16)


def test_on_shared_gpus_dense_weights_alone_are_gathered_where_experts_are_local() -> None:
    sizes = {"weights_bytes": 100e9, "num_tensors": 1000, "train_gpus": 16, "engine_gpus": 16, "engine_size": 8}
    whole, local = (
        price_sync(name, SyncSetting(dense_bytes=10e9, **sizes), H100) for name in ("gathered-ipc", "rank-local-ipc")
    )
    assert whole.parts_s["gather"] == pytest.approx(10 * local.parts_s["gather"])
    assert whole.parts_s["loader"] == pytest.approx(8 * local.parts_s["loader"])
    assert whole.bound_s == local.bound_s == 0


def test_the_bound_counts_what_enters_a_node_and_what_leaves_the_trainer() -> None:
    def bound(**sizes: int) -> float:
        return SyncSetting(weights_bytes=8 * H100.rdma_gb_per_s * 1e9, num_tensors=0, **sizes).bound_s(H100)

    assert bound(train_gpus=8, engine_gpus=8, engine_size=8) == pytest.approx(1)
    # More engines cost nothing: nodes pass weights on.
    assert bound(train_gpus=8, engine_gpus=64, engine_size=8) == pytest.approx(1)
    # An engine over four nodes: each takes a quarter; two trainers send for longest.
    assert bound(train_gpus=64, engine_gpus=32, engine_size=32) == pytest.approx(0.25)
    assert bound(train_gpus=2, engine_gpus=32, engine_size=32) == pytest.approx(4)


def test_a_timeline_is_its_steps_or_what_nvlink_hands_on() -> None:
    step = int(H100.rdma_gb_per_s * 1e9)
    assert timeline_seconds(SyncTimeline(num_steps=3, atom_bytes=step), H100) == pytest.approx(3)
    inside = int(9 * H100.nvlink_p2p_gb_per_s * 1e9)
    assert timeline_seconds(SyncTimeline(num_steps=3, atom_bytes=step, inside_bytes=inside), H100) == pytest.approx(9)


def test_a_step_takes_a_transport_by_name() -> None:
    def sync_s(**more: object) -> float:
        setting = RlStepSetting(train_gpus=16, rollout_gpus=16, engine_size=8, **more)  # type: ignore[arg-type]
        step = rl_step(
            MODEL, H100, setting, response_lengths=np.full(8, 100), prompt_tokens=10, forward_s=1, update_s=3
        )
        return step.parts_s["weight_sync"]

    assert sync_s(weight_sync_transport="planned") < sync_s(weight_sync_transport="reshard") < sync_s()
    with pytest.raises(InvalidInputError, match="Did you mean 'reshard'"):
        sync_s(weight_sync_transport="reshrd")
    paused = sync_s(weight_sync_transport="planned", weight_sync_control_s=2.0)
    assert paused == pytest.approx(2.0 + sync_s(weight_sync_transport="planned"))
    with pytest.raises(InvalidInputError, match="needs rollout_gpus"):
        RlStepSetting(train_gpus=16, weight_sync_transport="planned")
    with pytest.raises(InvalidInputError, match="leave rollout_gpus out"):
        sync_s(weight_sync_transport="gathered-ipc")
    with pytest.raises(InvalidInputError, match="name weight_sync_transport"):
        sync_s(weight_sync_control_s=2.0)


def roofline(experts: int, ep: int, tokens: int, expert_mb: float, imbalance: float) -> float:
    """A layer's experts at top 8 on H100 by hand: the busiest rank reads what it touches, or computes its rows."""
    shares = expert_shares(experts, ep_size=ep, imbalance=imbalance)
    touched = (1 - np.exp(-tokens * 8 * shares)).reshape(ep, -1).sum(axis=1)
    rows = (tokens * 8 * shares).reshape(ep, -1).sum(axis=1)
    return float(np.maximum(touched * expert_mb / (0.7 * 3.35), rows * expert_mb / (0.7 * 600)).max())


@pytest.mark.parametrize(("experts", "ep", "expert_mb"), [(128, 8, 37.75), (128, 32, 37.75), (256, 64, 88.1)])
@pytest.mark.parametrize("tokens", [64, 1024, 16384])
def test_imbalance_costs_where_products_bind(experts: int, ep: int, expert_mb: float, tokens: int) -> None:
    def seconds(imbalance: float) -> float:
        shares = expert_shares(experts, ep_size=ep, imbalance=imbalance)
        assert shares.reshape(ep, -1).sum(axis=1).max() * ep == pytest.approx(imbalance)
        read, computed = expert_mb * experts / ep / (0.7 * 3.35), expert_mb * tokens * 8 / ep / (0.7 * 600)
        slowest = slowest_rank_s(
            shares, ep_size=ep, pairs=np.array([tokens * 8.0]), read_s=0.0, experts_read_s=read, computed_s=0.0,
            experts_computed_s=np.array([computed]),
        )  # fmt: skip
        return float(slowest[0])

    for imbalance in (1.02, 1.3, 1.7):
        assert seconds(imbalance) == pytest.approx(roofline(experts, ep, tokens, expert_mb, imbalance), rel=0.02)
    ratio = seconds(1.7) / seconds(1.3)
    if tokens == 16384:
        assert ratio == pytest.approx(1.7 / 1.3, rel=0.02)
    elif tokens * 8 / experts <= 64:
        assert 0.9 <= ratio <= 1.03


def test_a_map_places_the_same_experts_more_evenly() -> None:
    shares = np.array([0.4, 0.3, 0.2, 0.1])
    assert placed_evenly(shares, ep_size=2).tolist() == [0.4, 0.1, 0.3, 0.2]
    skewed = expert_shares(128, ep_size=8, imbalance=1.7)
    mapped = placed_evenly(skewed, ep_size=8)
    assert sorted(mapped.tolist()) == sorted(skewed.tolist())
    assert mapped.reshape(8, -1).sum(axis=1).max() * 8 < 1.1


def test_an_imbalance_that_ranks_cannot_have_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="more than 2 ranks can have"):
        expert_shares(8, ep_size=2, imbalance=2.5)
