"""Perturbed constants: every constant is covered, and a ranking that turns is named."""

from dataclasses import fields, replace

import numpy as np
import pytest
from step_cases import StepCase, case_of
from strategies import HARDWARE, load_of, random_pairs

from moe_rl.core.topology import ClusterTopology, HardwareSpec
from moe_rl.simulators.sensitivity import FACTORS, PERTURBED_CONSTANTS, perturbed_rankings
from moe_rl.simulators.setting import StepSetting

NO_RATES = {
    "fabric",
    "spreads",
    "name",
    "ranks_per_node",
    "hbm_gib",
    "a2a_mixing",
    "pooled_nics",
    "gemm_tile_rows",
    "sources",
}
NO_RATES |= {"fabric_left_open", "gemm_half_width", "gemm_unaligned", "fp8_speedup"}
HOSTED = replace(HARDWARE, host_layer_ms=3.0, step_fixed_s=0.05)


def skewed_case() -> StepCase:
    topology = ClusterTopology(hardware=HOSTED, ep_size=4, ranks_per_node=2)
    rng = np.random.default_rng(7)
    load = load_of(random_pairs(rng, (1, 3, 2, 4, 8), most=4000), 2)
    return case_of(load, topology, rng)


def test_every_rate_and_fixed_cost_is_perturbed() -> None:
    covered = {constant for constants in PERTURBED_CONSTANTS.values() for constant in constants}
    assert covered == {field.name for field in fields(HardwareSpec)} - NO_RATES


def test_speed_ups_move_and_the_factors_multiply_what_was_there() -> None:
    case = skewed_case()
    seen: list[StepSetting] = []

    def simulate(setting: StepSetting):
        seen.append(setting)
        return case.simulate(setting=setting)

    rankings = perturbed_rankings(simulate, replace(case.setting, perturbation={"rdma_gb_per_s": 0.5}))
    assert len(rankings) == len(PERTURBED_CONSTANTS) * len(FACTORS) == len(seen) - 1
    rdma = [one.perturbation["rdma_gb_per_s"] for one in seen]
    assert sorted(set(rdma)) == pytest.approx([0.35, 0.5, 0.65])
    speedups = {ranking.speedup_vs_static["resident"] for ranking in rankings}
    assert len(speedups) == len(rankings)


def test_a_ranking_that_turns_with_a_constant_is_named() -> None:
    """Copies that pay on a fast link and not on a slow one."""
    case = skewed_case()
    fast = case.simulate()
    order = sorted(fast.policies, key=lambda name: fast.policies[name].step_time_s)
    swapped = {order[0]: case.plans[order[-1]], order[-1]: case.plans[order[0]]}

    def turns_with_rdma(setting: StepSetting):
        turned = setting.perturbation.get("rdma_gb_per_s", 1.0) < 1.0
        return case.simulate(setting=StepSetting(), plans={**case.plans, **swapped} if turned else case.plans)

    rankings = perturbed_rankings(turns_with_rdma, StepSetting())
    broken = [ranking for ranking in rankings if not ranking.holds]
    assert [(ranking.constants, ranking.factor) for ranking in broken] == [("RDMA", 0.7)]
    assert (order[0], order[-1]) in broken[0].turned
