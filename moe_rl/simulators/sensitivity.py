"""Whether the ranking of policies survives wrong constants: every constant 30 % lower and higher, plans kept.

Planners and simulator share one cost model, so a policy could win by knowing its judge; a ranking that turns with a
constant is a statement about the constant.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from moe_rl.simulators.result import SimulationResult
from moe_rl.simulators.setting import StepSetting

# Constants of one group are moved together: the same measurement would be wrong about all of them.
PERTURBED_CONSTANTS: Mapping[str, Sequence[str]] = {
    "expert GEMM": ("gemm_tflops",),
    "attention": ("attention_linear_tflops", "attention_forward_tflops", "attention_backward_tflops"),
    "HBM": ("hbm_gb_per_s",),
    "NVLink": ("nvlink_gb_per_s", "nvlink_p2p_gb_per_s"),
    "RDMA": ("rdma_gb_per_s", "flat_rdma_gb_per_s"),
    "latencies": ("intra_node_latency_us", "inter_node_latency_us"),
    "fixed costs": ("gemm_fixed_us", "layer_fixed_forward_ms", "layer_fixed_backward_ms", "step_fixed_s"),
    "host": ("host_layer_ms", "host_expert_ms"),
}
FACTORS = (0.7, 1.3)
# Policies whose step times differ by less count as equal: the model cannot tell them apart.
TIE = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class PerturbedRanking:
    """The policies with one group of constants multiplied."""

    constants: str
    factor: float
    speedup_vs_static: Mapping[str, float]
    turned: tuple[tuple[str, str], ...]
    """(faster, slower) pairs of the unperturbed ranking that change places."""

    @property
    def holds(self) -> bool:
        """True where no pair changes places."""
        return not self.turned


def perturbed_rankings(
    simulate: Callable[[StepSetting], SimulationResult], setting: StepSetting
) -> list[PerturbedRanking]:
    """Return the policies' speed-ups under every perturbation; `simulate` runs the same plans under a setting."""
    base = _times(simulate(setting))
    rankings = []
    for name, constants in PERTURBED_CONSTANTS.items():
        for factor in FACTORS:
            factors = {constant: setting.perturbation.get(constant, 1.0) * factor for constant in constants}
            result = simulate(replace(setting, perturbation={**setting.perturbation, **factors}))
            times = _times(result)
            speedups = dict.fromkeys(times, 1.0)
            for policy, time in times.items():
                if time:
                    speedups[policy] = result.static.step_time_s / time
            turned_pairs = tuple(_turned(base, times))
            rankings.append(
                PerturbedRanking(constants=name, factor=factor, speedup_vs_static=speedups, turned=turned_pairs)
            )
    return rankings


def _times(result: SimulationResult) -> dict[str, float]:
    return {name: policy.step_time_s for name, policy in result.policies.items()}


def _turned(base: Mapping[str, float], times: Mapping[str, float]) -> list[tuple[str, str]]:
    turned_pairs = []
    for policy, other in combinations(base, 2):
        faster, slower = (policy, other) if base[policy] <= base[other] else (other, policy)
        told_apart = base[slower] > base[faster] * (1 + TIE)
        if told_apart and times[faster] > times[slower] * (1 + TIE):
            turned_pairs.append((faster, slower))
    return turned_pairs
