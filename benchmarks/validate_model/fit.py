"""Fit the constants that no data sheet gives on published whole runs, all at once, and say how well they carry over.

    python benchmarks/fit_simulator.py --held-out      # constants before and after, errors in sample and held out

Every constant is global: it holds for all runs (of a GPU architecture, where it says so), none is fitted per run. Each
starts from a value that was there before any run was looked at, and pays for leaving it, so that what the runs do not
determine stays where it is. Errors are on the logarithm and flattened beyond 5 %, so that a few runs of another kind do
not pull all constants along.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from moe_rl.config import cluster_file, cluster_names
from moe_rl.core.cost import Floats, SoftwareCosts
from moe_rl.core.topology import HardwareSpec
from moe_rl.simulators.whole_runs import ClusterNamed, WholeRun

_FILES = {name: cluster_file(name) for name in cluster_names()}
ULTRA, BLACKWELL = (
    tuple(name for name, file in _FILES.items() if str(file.architecture).startswith(architecture))
    for architecture in ("blackwell ultra", "blackwell")
)
HGX_BLACKWELL = tuple(name for name in BLACKWELL if _FILES[name].hardware().ranks_per_node == 8)
NOISE = 0.05
"""Residual (of a logarithm) from which on errors count less than quadratically."""
CAUTION = 0.15
"""Weight of a constant's way from its first value, per unit of its logarithm."""
FOLDS = 3
ROUNDS = 12
SETTLED = 2e-3
"""Share of the sum of squares below which a round's gain ends the search."""
DAMPING = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstant:
    """One global constant."""

    first: float
    """Value before any whole run was looked at."""
    fields: tuple[str, ...]
    """Of `HardwareSpec` or `SoftwareCosts`; further ones keep their ratio to the first."""
    clusters: tuple[str, ...] = ()
    """Where it holds. Empty: everywhere."""
    at: str = "h100"
    """The cluster whose value is meant."""
    caution: float = 1.0
    """Times `CAUTION`."""


# Seven more that take less than half of their value from the runs are at their first values: GEMM and FP8 on Hopper,
# small kernels, host per TP rank, partial graphs, fused MLP, flat all-to-all.
CONSTANTS: Mapping[str, FittedConstant] = {
    "GEMM on Blackwell": FittedConstant(
        first=2100.0, fields=("gemm_tflops", "attention_linear_tflops"), clusters=BLACKWELL, at="gb200"
    ),
    "projections": FittedConstant(first=600.0, fields=("attention_linear_tflops",)),
    "core attention": FittedConstant(
        first=616.0, fields=("attention_forward_tflops", "attention_backward_tflops"), caution=4.0
    ),
    "GEMM half width": FittedConstant(first=900.0, fields=("gemm_half_width",)),
    "unaligned GEMM": FittedConstant(first=0.8, fields=("gemm_unaligned",)),
    "FP8 on Blackwell": FittedConstant(first=1.6, fields=("fp8_speedup",), clusters=BLACKWELL, at="gb200"),
    "Blackwell Ultra": FittedConstant(
        first=2200.0,
        fields=("gemm_tflops", "attention_linear_tflops"),
        clusters=ULTRA,
        at="gb300",
        caution=3.0,
    ),
    "host per layer": FittedConstant(first=3.0, fields=("host_layer_ms",)),
    "host per expert": FittedConstant(first=0.2, fields=("host_expert_ms",)),
    "host of HGX B200": FittedConstant(
        first=2.7, fields=("host_layer_ms", "host_expert_ms"), clusters=HGX_BLACKWELL, at="b200"
    ),
    "step": FittedConstant(first=0.2, fields=("step_fixed_s",)),
    "host in FP8": FittedConstant(first=1.0, fields=("host_fp8",)),
    "left by overlap": FittedConstant(first=0.4, fields=("overlap_left",)),
    "clamped activation": FittedConstant(first=62.0, fields=("clamped_activation_bytes",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Factors on shipped constants."""

    factors: Mapping[str, float]
    """By name of `CONSTANTS`."""

    def hardware(self, shipped: HardwareSpec) -> HardwareSpec:
        """Return the cluster with its constants multiplied."""
        changed: dict[str, float] = {}
        for name, constant in CONSTANTS.items():
            if not constant.clusters or shipped.name in constant.clusters:
                for field in constant.fields:
                    if field in HardwareSpec.__slots__:
                        changed[field] = changed.get(field, getattr(shipped, field)) * self.factors[name]
        return replace(shipped, **changed)  # type: ignore[arg-type]

    def software(self, shipped: SoftwareCosts) -> SoftwareCosts:
        """Return the software's constants multiplied."""
        fields = {
            field: getattr(shipped, field) * self.factors[name]
            for name, constant in CONSTANTS.items()
            for field in constant.fields
            if field in SoftwareCosts.__slots__
        }
        return replace(shipped, **fields)

    def errors(self, runs: Sequence[WholeRun]) -> Floats:
        """Return predicted / published - 1 of every run."""
        return np.exp(self.log_errors(runs)) - 1.0

    def log_errors(self, runs: Sequence[WholeRun]) -> Floats:
        """Return the logarithms of predicted / published."""
        software = self.software(SoftwareCosts())
        clusters = {run.cluster: run.batch.topology.hardware for run in runs}
        hardware = {name: self.hardware(shipped) for name, shipped in clusters.items()}
        distinct = {run.facts: run for run in runs}
        predicted = {
            facts: run.predicted(hardware[run.cluster], software).tokens_per_s_per_gpu
            for facts, run in distinct.items()
        }
        return np.log([predicted[run.facts] / run.tokens_per_s for run in runs])


SHIPPED = Fit(factors=dict.fromkeys(CONSTANTS, 1.0))


def first_fit(cluster_named: ClusterNamed) -> Fit:
    """Return the factors that lead from the shipped constants back to the first ones.

    Where several constants scale one field of a cluster, each has its first value with the earlier ones at theirs.
    """
    factors = dict.fromkeys(CONSTANTS, 1.0)
    for name, constant in CONSTANTS.items():
        field, cluster = constant.fields[0], constant.at
        found = Fit(factors=factors)
        in_software = field in SoftwareCosts.__slots__
        holder = found.software(SoftwareCosts()) if in_software else found.hardware(cluster_named(cluster))
        factors = {**factors, name: constant.first / getattr(holder, field)}
    return Fit(factors=factors)


def fit(runs: Sequence[WholeRun], first: Fit, *, start: Fit | None = None) -> Fit:
    """Return the factors that fit `runs` best: damped Gauss-Newton on logarithms.

    Leaving `first` costs; `start` is only where the search begins.
    """
    names = list(CONSTANTS)
    center = np.log([first.factors[name] for name in names])
    caution = CAUTION * np.array([CONSTANTS[name].caution for name in names])

    def residuals(logs: Floats) -> Floats:
        tried = Fit(factors=dict(zip(names, np.exp(logs).tolist(), strict=True)))
        return np.concatenate([_flattened(tried.log_errors(runs)), caution * (logs - center)])

    logs, damping = np.log([(start or first).factors[name] for name in names]), DAMPING
    current = residuals(logs)
    for _ in range(ROUNDS):
        nudge = 1e-4 * np.eye(len(names))
        jacobian = np.stack([(residuals(logs + one) - current) / 1e-4 for one in nudge], axis=1)
        step = np.linalg.solve(jacobian.T @ jacobian + damping * np.eye(len(names)), -jacobian.T @ current)
        tried = residuals(logs + step)
        if tried @ tried < current @ current:
            gained = 1.0 - float(tried @ tried) / float(current @ current)
            logs, current, damping = logs + step, tried, damping / 3
            if gained < SETTLED:
                break
        else:
            damping *= 30
    return Fit(factors=dict(zip(names, np.exp(logs).tolist(), strict=True)))


def held_out_errors(
    runs: Sequence[WholeRun], first: Fit, by: str, *, seed: int = 0
) -> dict[str, tuple[list[WholeRun], Floats]]:
    """Return the runs of every `by` and their errors, as a fit on all others predicts them.

    By "cluster", "model" or "setting"; `seed` deals settings to three parts, releases of one setting to the same.
    """
    errors = {}
    settings = np.random.default_rng(seed).permutation(sorted({run.facts for run in runs})).tolist()

    def part(run: WholeRun) -> str:
        return f"part {settings.index(run.facts) % FOLDS}" if by == "setting" else str(getattr(run, by))

    for value in sorted({part(run) for run in runs}):
        left_out = [run for run in runs if part(run) == value]
        others = [run for run in runs if part(run) != value]
        errors[value] = left_out, fit(others, first, start=SHIPPED).errors(left_out)
    return errors


def ratio_errors(runs: Sequence[WholeRun], errors: Floats) -> dict[tuple[str, str], tuple[float, float]]:
    """Return published and predicted ratios of throughput of every two settings of a model on a cluster.

    Releases of one setting count as their mean, on logarithms.
    """
    by_setting: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for run, error in zip(runs, errors, strict=True):
        logs = np.log(run.tokens_per_s), np.log1p(error)
        by_setting.setdefault((run.model, run.cluster, run.facts), []).append(logs)
    mean = {key: np.mean(logs, axis=0) for key, logs in by_setting.items()}
    names = {run.facts: run.name for run in runs}
    return {
        (names[one[2]], names[other[2]]): (float(np.exp(published)), float(np.exp(published + off)))
        for one, other in combinations(mean, 2)
        if one[:2] == other[:2]
        for published, off in [mean[one] - mean[other]]
    }


def _flattened(residuals: Floats) -> Floats:
    """Return residuals whose squares hardly grow beyond `NOISE` (Cauchy's loss)."""
    flattened: Floats = NOISE * np.sign(residuals) * np.sqrt(np.log1p((residuals / NOISE) ** 2))
    return flattened
