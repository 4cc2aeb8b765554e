"""95 % of the tokens to 1, 4 or 16 experts of 64 on 8 GPUs: what spilling to other ranks can bring, and what it costs.

Copies of one hot expert all leave its home's link; copies of experts that are spread over ranks leave all links.
"""

from dataclasses import replace

import numpy as np
import pytest
from strategies import model_spec

from moe_rl.config import load_cluster
from moe_rl.core.cost import LayerCostParams, layer_cost_params
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.plan import Plan
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.registry import make_planner
from moe_rl.simulators.pricing import TrainingStep
from moe_rl.simulators.result import SimulationResult
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.step import simulate_policies

RANKS, EXPERTS, TOKENS = 8, 64, 8192
MODEL = model_spec(num_experts=EXPERTS, num_layers=1, top_k=1)


def topology_with(nvlink_p2p_gb_per_s: float) -> ClusterTopology:
    hardware = replace(load_cluster("h100"), nvlink_p2p_gb_per_s=nvlink_p2p_gb_per_s)
    return ClusterTopology(hardware=hardware, ep_size=RANKS)


def skewed(hot_experts: int, share: float = 0.95) -> StepLoad:
    """Rows of one layer: `share` of each rank's tokens to the first experts, the rest to all others."""
    pairs = np.zeros(EXPERTS, np.int64)
    pairs[:hot_experts] = round(share * TOKENS) // hot_experts
    cold = EXPERTS - hot_experts
    pairs[hot_experts:] = (TOKENS - pairs.sum()) // cold
    pairs[-1] += TOKENS - pairs.sum()
    return StepLoad(
        pairs=np.broadcast_to(pairs.astype(np.int32), (1, 1, 1, RANKS, EXPERTS)).copy(),
        tokens=np.full((1, 1, RANKS), TOKENS),
        top_k=1,
    )


def step_of(load: StepLoad, topology: ClusterTopology, setting: StepSetting) -> TrainingStep:
    one_each = np.arange(RANKS)
    layout = BatchLayout(
        micro_batch=np.zeros(RANKS, np.int32),
        dp_rank=one_each.astype(np.int32),
        order=np.zeros(RANKS, np.int32),
        num_micro_batches=1,
        num_dp_ranks=RANKS,
    )
    lengths = np.full(RANKS, TOKENS)
    return TrainingStep(load=load, layout=layout, lengths=lengths, model=MODEL, topology=topology, setting=setting)


def priced(
    hot_experts: int, *, link: float = 300.0, exposed: float = 1.0, slots: int = 2, policy: str = "ultraep"
) -> tuple[SimulationResult, Plan, LayerCostParams]:
    topology, setting = topology_with(link), StepSetting(replica_exposed=exposed)
    step = step_of(skewed(hot_experts), topology, setting)
    params = setting.layer_cost_params(MODEL, topology)
    problem = PlanProblem(
        load=step.load,
        layout=step.layout,
        model=MODEL,
        topology=topology,
        cost=params,
        objective="imbalance",
        replica_slots=slots,
    )
    plan = make_planner(policy).plan(problem)
    return simulate_policies({policy: plan}, step), plan, params


@pytest.mark.parametrize("hot_experts", [1, 4, 16])
def test_spilling_is_bound_by_the_senders_link(hot_experts: int) -> None:
    """All hot experts live on the first ranks: the busiest home feeds every copy of its experts through one link."""
    result, plan, params = priced(hot_experts)
    replicas = plan.replicas
    home = plan.placement.home_rank[0, replicas.expert]
    held = replicas.physical_id // plan.placement.slots_per_rank
    busiest = max(np.bincount(home).max(), np.bincount(held).max())
    assert np.bincount(home).max() > np.bincount(held).max()  # receivers alone would hide it
    expected = busiest * 4 * params.expert_bytes / 300e9 + params.replica_fixed_s
    breakdown = result.policies["ultraep"].prediction.breakdown_s or {}
    assert breakdown["replicate"] == pytest.approx(expected)


@pytest.mark.parametrize("hot_experts", [1, 4, 16])
def test_a_faster_link_never_hurts_and_a_slow_one_eats_the_gain(hot_experts: int) -> None:
    times = [priced(hot_experts, link=link)[0].policies["ultraep"].step_time_s for link in (0.5, 5.0, 50.0, 300.0)]
    assert times == sorted(times, reverse=True)
    assert times[0] > priced(hot_experts)[0].static.step_time_s


@pytest.mark.parametrize("hot_experts", [1, 4, 16])
def test_no_policy_beats_balanced_compute_or_gains_more_than_the_skew(hot_experts: int) -> None:
    result, _, _ = priced(hot_experts)
    spilled = result.policies["ultraep"]
    assert result.ideal.step_time_s <= spilled.step_time_s < result.static.step_time_s
    speedup = result.static.step_time_s / spilled.step_time_s
    assert speedup < result.static.prediction.imbalance
    gemm = (spilled.prediction.breakdown_s or {})["expert_gemm"]
    assert gemm >= (result.ideal.prediction.breakdown_s or {})["expert_gemm"]


def test_the_more_experts_share_the_heat_the_less_there_is_to_gain() -> None:
    statics = [priced(hot)[0].static.step_time_s for hot in (1, 4, 16, 32)]
    assert statics[0] >= statics[1] >= statics[2] > statics[3]


@pytest.mark.parametrize("dispatcher", ["deepep", "alltoall"])
def test_more_skew_never_takes_less(dispatcher: str) -> None:
    topology = topology_with(300.0)
    times = []
    for share in (0.2, 0.5, 0.8, 0.95, 1.0):
        step = step_of(skewed(4, share), topology, StepSetting(dispatcher=dispatcher))
        times.append(simulate_policies({}, step).static.step_time_s)
    assert times == sorted(times)


def test_hidden_traffic_costs_its_exposed_share() -> None:
    whole, part = (
        (priced(1, exposed=share)[0].policies["ultraep"].prediction.breakdown_s or {})["replicate"]
        for share in (1.0, 0.3)
    )
    fixed = layer_cost_params(MODEL, topology_with(300.0)).replica_fixed_s
    assert part - fixed == pytest.approx(0.3 * (whole - fixed))
