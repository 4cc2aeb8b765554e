"""Prices of weight syncs by transport beside published ones, and what imbalance costs while an engine decodes."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.weight_syncs import FITTED, HELD_OUT, fits, published, within
from moe_rl.config import load_cluster, load_model
from moe_rl.core.errors import InvalidInputError
from moe_rl.simulators.expert_skew import expert_shares, placed_evenly, slowest_rank_s
from moe_rl.simulators.rl_step import RlStepSetting, rl_step
from moe_rl.simulators.weight_sync import FITTED as CONSTANTS
from moe_rl.simulators.weight_sync import TRANSPORTS, SyncSetting, SyncTimeline, price_sync, timeline_seconds

H100 = load_cluster("h100")
MODEL = load_model("qwen3-30b-a3b").spec


def test_published_syncs_are_met() -> None:
    """Four fifths within a factor of 1.5 and half within 25 %, by constants from the fitted rows alone."""
    for part in (FITTED, HELD_OUT):
        ratios = [row.ratio for row in published(part)]
        assert within(ratios, 1.5) >= 0.8
        assert within(ratios, 1.25) >= 0.5


def test_the_constants_in_force_are_those_that_fit_their_rows() -> None:
    rows = list(published(FITTED))
    for fit in fits(rows):
        assert CONSTANTS[fit.name] == pytest.approx(fit.value, rel=0.015)  # the grid and two digits
        users = [transport for transport in TRANSPORTS if transport.constant == fit.name]
        assert users
        for transport in users:
            assert transport.num_fitted == sum(row.constant == fit.name for row in rows)


def test_rows_that_are_left_out_in_turn_are_met_as_well() -> None:
    ratios = [ratio for fit in fits(list(published(FITTED))) for ratio in fit.left_out]
    assert within(ratios, 1.5) >= 0.8
    assert within(ratios, 1.25) >= 0.5


SHARE = CONSTANTS["collective_share"]


def test_a_broadcast_over_all_nics_of_a_node_gathers_and_sends_as_fast() -> None:
    """At 8 NICs of 1 GB/s, 16 GB at a share take 2 s in and 2 s out; by one NIC alone they take 16."""
    hardware = replace(H100, rdma_gb_per_s=1.0)
    setting = SyncSetting(weights_bytes=16e9 * SHARE, num_tensors=0, train_gpus=16, engine_gpus=8, engine_size=4)
    parts = price_sync("packed-broadcast", setting, hardware).parts_s
    assert (parts["gather"], parts["transfer"]) == pytest.approx((2, 2))
    assert price_sync("broadcast", setting, hardware).parts_s["transfer"] == pytest.approx(16)
    # A quarter of the weights by an engine GPU's own NIC.
    assert price_sync("paired-rdma", setting, hardware).parts_s["transfer"] == pytest.approx(4 * SHARE)


def test_stages_gather_side_by_side_and_send_in_turn() -> None:
    sizes = {"weights_bytes": 43e9, "num_tensors": 0, "train_gpus": 16, "engine_gpus": 16}
    one, four = (SyncSetting(trainer_pp_size=stages, **sizes) for stages in (1, 4))  # type: ignore[arg-type]
    # By one stage it is the broadcast of one sender.
    assert price_sync("stage-broadcast", one, H100).seconds == pytest.approx(price_sync("broadcast", one, H100).seconds)
    parts = [price_sync("stage-broadcast", setting, H100).parts_s for setting in (one, four)]
    assert parts[0]["gather"] == pytest.approx(4 * parts[1]["gather"])
    assert parts[0]["transfer"] == parts[1]["transfer"] == pytest.approx(43 / H100.rdma_gb_per_s)
    # Trainers that quantize before they send gather in BF16.
    halved = replace(four, gathered_bytes=2 * four.weights_bytes)
    assert price_sync("stage-broadcast", halved, H100).parts_s["gather"] == pytest.approx(2 * parts[1]["gather"])


def test_a_reshard_pays_for_calls_by_the_ranks_of_their_group() -> None:
    """48 layers: 144 stacks of experts and 384 other tensors; 8 trainers of a stage and 16 engine ranks."""
    setting = SyncSetting.of_model(MODEL, train_gpus=16, trainer_pp_size=2, engine_gpus=16, engine_size=2)
    every, experts = (price_sync(name, setting, H100) for name in ("reshard-all", "reshard"))
    assert every.parts_s["calls"] == pytest.approx(CONSTANTS["reshard_rank_s"] * (144 + 384) * 24)
    assert experts.parts_s["calls"] == pytest.approx(CONSTANTS["reshard_rank_s"] * 144 * 24)
    assert every.parts_s["transfer"] == every.bound_s
    # In Python a call costs the same for any ranks, and a GPU of TP 2 takes in half of all experts.
    python = price_sync("reshard-python", setting, H100)
    assert python.parts_s["calls"] == pytest.approx(CONSTANTS["python_call_s"] * 144)
    rest = setting.packed_s(H100, setting.dense_bytes)
    halves = (setting.weights_bytes - setting.dense_bytes) / 2
    assert python.parts_s["transfer"] == pytest.approx(halves / (H100.rdma_gb_per_s * 1e9) + rest)


def test_p2p_takes_a_stage_per_trainer_or_what_enters_an_engine_gpu() -> None:
    sizes = {"weights_bytes": 120e9, "num_tensors": 0, "train_gpus": 16, "engine_gpus": 16}
    by_stage = SyncSetting(trainer_pp_size=4, engine_size=8, **sizes)  # type: ignore[arg-type]
    assert price_sync("rdma", by_stage, H100).seconds == pytest.approx(30 / CONSTANTS["staged_gb_per_s"])
    by_nic = SyncSetting(trainer_pp_size=4, engine_size=1, **sizes)  # type: ignore[arg-type]
    assert price_sync("rdma", by_nic, H100).seconds == pytest.approx(120 / H100.rdma_gb_per_s)


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
    with pytest.raises(InvalidInputError, match="set rollout_gpus"):
        RlStepSetting(train_gpus=16, weight_sync_transport="planned")
    with pytest.raises(InvalidInputError, match="do not set rollout_gpus"):
        sync_s(weight_sync_transport="gathered-ipc")
    with pytest.raises(InvalidInputError, match="also set weight_sync_transport"):
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
    with pytest.raises(InvalidInputError, match="impossible with 2 ranks"):
        expert_shares(8, ep_size=2, imbalance=2.5)
