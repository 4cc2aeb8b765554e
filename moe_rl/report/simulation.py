"""The result of one simulation, ready to be shown: trace, setting, and the prediction of each policy.

L MoE layers, P EP ranks, M micro-batches, G EP groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.mappings import not_none
from moe_rl.core.metrics import StepPrediction
from moe_rl.core.plan import Plan
from moe_rl.report.whole_step import MemoryMisfit, RlGain
from moe_rl.simulators.memory import MemoryForecast
from moe_rl.simulators.sensitivity import PerturbedRanking

BASELINE = "static"
UNPACKED = "moe-rl-unpacked"
# These policies only tell the gain of packing from the gain of balancing.
PARTS = ("static+pack", UNPACKED)

# A speed-up without these means nothing, so a report that lacks one is refused.
TRACE_KEYS = ("name", "num_sequences", "num_tokens", "num_moe_layers", "num_experts", "top_k", "provenance")
SETTING_KEYS = (
    "model", "cluster", "ep_size", "ranks_per_node", "num_micro_batches", "tokens_per_rank", "sequence_length",
    "slots", "objective", "dispatcher", "recompute", "scaled", "num_gpus",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoads:
    """Loads of ranks under one policy, reduced to the figures that are drawn."""

    rank_share: NDArray[np.float32]
    """[L, P] rows of each rank in the whole step, relative to the mean rank of the layer; 1 is balanced."""
    imbalance_by_layer: NDArray[np.float32]
    """[L] sum over micro-batches of the max rank load / the same sum of the mean; its mean is the step's imbalance."""
    imbalance_map: NDArray[np.float32]
    """[L, M] max / mean rank load of every layer in every micro-batch."""

    @property
    def imbalance_by_micro_batch(self) -> NDArray[np.float32]:
        """[M] max / mean rank load of every micro-batch, mean over layers."""
        curve: NDArray[np.float32] = self.imbalance_map.mean(axis=0)
        return curve

    @classmethod
    def from_rank_loads(cls, loads: NDArray[np.integer] | NDArray[np.floating]) -> Self:
        """Reduce rank loads [G, M, L, P]."""
        total = loads.sum(axis=(0, 1), dtype=np.float64)
        mean = np.maximum(total.mean(axis=1, keepdims=True), 1e-300)
        # A layer without rows counts as balanced.
        share = np.where(total.sum(axis=1, keepdims=True) > 0, total / mean, 1.0)
        # Sums first, then the ratio: a small micro-batch that is uneven costs little and must count for little.
        largest, level = loads.max(axis=3).sum(axis=0), loads.mean(axis=3).sum(axis=0)  # [M, L]
        return cls(
            rank_share=share.astype(np.float32),
            imbalance_by_layer=_ratio(largest.sum(axis=0), level.sum(axis=0)),
            imbalance_map=_ratio(largest, level).T,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBounds:
    """Imbalances that a plan's busiest rank cannot go below; each is a mean over layers, like a plan's imbalance."""

    lb0: float
    """Of every plan: the mean load, rounded up to whole pairs."""
    node: float | None
    """Of every plan with this plan's homes whose replicas stay inside nodes; None for a plan whose do not."""
    placement: float
    """Of every split of tokens over this plan's own instances."""

    def excess(self, prediction: StepPrediction) -> dict[str, float]:
        """Return the plan's imbalance above 1 by its cause: node, placement, split; they add up.

        Where instances cross nodes, nodes are charged with no more than they hold under the plan's own split.
        """
        if self.node is None:
            nodes = prediction.node_imbalance
        else:
            nodes = self.node
        # The bounds are nested: a bound of every plan with these homes is a bound of this plan's instances, too.
        floor = max(1.0, min(nodes, self.placement))
        reached = max(floor, self.placement)
        return {"node": floor - 1.0, "placement": reached - floor, "split": max(0.0, prediction.imbalance - reached)}

    def as_json(self) -> dict[str, float]:
        """Return the bounds that apply."""
        return not_none(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """The figures of a simulation. The modules beside this one show them; `SimulationReport` joins both."""

    trace: Mapping[str, object]
    """Facts of the trace; JSON values."""
    setting: Mapping[str, object]
    """Under which conditions; JSON values."""
    policies: tuple[StepPrediction, ...]
    yardsticks: tuple[StepPrediction, ...] = ()
    """Bounds that no plan has to reach: forced balance and ideal."""
    loads: Mapping[str, PolicyLoads]
    """By policy."""
    bounds: Mapping[str, LoadBounds] = field(default_factory=dict)
    """By policy."""
    memory: Mapping[str, MemoryForecast] = field(default_factory=dict)
    """By policy and yardstick."""
    sensitivity: tuple[PerturbedRanking, ...] = ()
    """The policies under constants that are off; empty where it was not asked for."""
    engines: tuple[str, ...] = ()
    """Policies that are a flag of the dispatcher."""
    above_engine: str = ""
    """The row of what remains to be planned above the run's own engine, which leads the table; empty without one."""
    plans: Mapping[str, Plan] = field(default_factory=dict, repr=False)
    """By policy, ready to be saved for a trainer."""
    balancing_alone: StepPrediction | None = None
    """`moe-rl` with the sequences where the framework has them, where it packs."""
    speedups: tuple[float, ...] = ()
    """Of the best policy over static placement, then the ends of the interval that the trace leaves open: of traces of
    as many sequences at least 95 of 100 lead there."""
    rl: RlGain | None = None
    """A whole step of RL, as far as it is known; None: the report is of another pass, or of loads without samples."""
    misfit: MemoryMisfit | None = None
    """Set where the best policy's peak exceeds the GPU's memory."""
    model_caution: str = ""
    """Says that sizes of the model are assumed, which moves every time; stands above the numbers."""
    small_batch_caution: str = ""
    """Says that micro-batches are mostly empty, as their launches then take most of the time; the first sentence."""
    cautions: tuple[str, ...] = ()
    """Sentences without which the numbers mislead."""
    notes: tuple[str, ...] = ()
    """Sentences about assumptions."""
    command: str = ""
    """The command line that made the report."""
    version: str = ""

    def __post_init__(self) -> None:
        for what, keys, values in (("trace", TRACE_KEYS, self.trace), ("setting", SETTING_KEYS, self.setting)):
            missing = [key for key in keys if key not in values]
            require(not missing, f"the {what} of a report lacks {', '.join(missing)}.")
        names = self.policy_names
        require(len(names) > 0, "a report needs at least one policy.")
        require(len(set(names)) == len(names), f"a policy occurs twice: {', '.join(names)}.")
        require(set(names) <= set(self.loads), "a report needs the loads of every policy.")

    @property
    def policy_names(self) -> list[str]:
        """Names of the policies, in the order of the table."""
        return [prediction.policy for prediction in self.policies]

    @property
    def all_cautions(self) -> tuple[str, ...]:
        """The cautions of the model and of a small batch, if there are any, and the others."""
        return (*filter(None, [self.model_caution, self.small_batch_caution]), *self.cautions)

    @property
    def scaled(self) -> bool:
        """True when the trace's shares were scaled to another number of tokens per rank."""
        return bool(self.setting.get("scaled"))

    @property
    def rl_speedup(self) -> float | None:
        """Of the best policy over static placement in a whole step of RL; None where it is not known."""
        if self.rl is None:
            return None
        return self.rl.speedup

    @property
    def timed(self) -> bool:
        """True when step times were computed."""
        return all(prediction.step_time_s is not None for prediction in self.policies)

    @property
    def baseline(self) -> StepPrediction | None:
        """The static policy, if it was simulated."""
        return _of_policy(self.policies, BASELINE)

    @property
    def best_engine(self) -> StepPrediction | None:
        """The fastest policy that is a flag of the dispatcher; None where none was simulated, or no times."""
        rows = [row for row in self.policies if row.policy in self.engines and row.step_time_s]
        return min(rows, key=self._figure, default=None)

    def speedup_vs_best_engine(self, prediction: StepPrediction) -> float | None:
        """Return how many times as fast as the best engine a policy is; None for static and without an engine."""
        engine = self.best_engine
        if engine is None or prediction.policy == BASELINE or not prediction.step_time_s:
            return None
        return (engine.step_time_s or 0.0) / prediction.step_time_s

    @property
    def phi(self) -> float | None:
        """Share of the balanced step that grows with imbalance; the same for every policy."""
        return next((prediction.phi for prediction in self.policies if prediction.phi is not None), None)

    @property
    def best(self) -> StepPrediction:
        """The fastest policy, or the most balanced one where times were not computed; the first of equals."""
        return min(self.policies, key=self._figure)

    @property
    def runner_up(self) -> StepPrediction | None:
        """The best policy beside `best` that is neither static nor a part of `moe-rl`; None where there is none."""
        rivals = [row for row in self.policies if row is not self.best and row.policy not in (BASELINE, *PARTS)]
        return min(rivals, key=self._figure, default=None)

    def _figure(self, prediction: StepPrediction) -> float:
        """Return the figure that ranks policies, the lower the better: step time, or imbalance without times."""
        if self.timed:
            return prediction.step_time_s or 0.0
        return prediction.imbalance

    @property
    def layer_ids(self) -> list[int]:
        """[L] decoder layers of the MoE layers; counted from 0 where the trace does not say."""
        layer_ids = self.trace.get("moe_layer_ids")
        layers = len(self.loads[self.policies[0].policy].imbalance_by_layer)
        if isinstance(layer_ids, list | tuple):
            return [int(layer) for layer in layer_ids]
        return list(range(layers))

    @property
    def before_and_after(self) -> tuple[StepPrediction, ...]:
        """Static placement and the best policy; without it the first one, and the second where the first is best."""
        baseline, best = self.baseline or self.policies[0], self.best
        if baseline is best:
            others = [row for row in self.policies if row is not best]
            return (best, *others[:1])
        return (baseline, best)

    def yardstick(self, name: str) -> StepPrediction | None:
        """Return the yardstick of that name, if it was computed."""
        return _of_policy(self.yardsticks, name)


def _of_policy(rows: Sequence[StepPrediction], name: str) -> StepPrediction | None:
    for prediction in rows:
        if prediction.policy == name:
            return prediction
    return None


def _ratio(largest: NDArray[np.floating], mean: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return largest / mean; 1 where there is no load."""
    return np.where(mean > 0, largest / np.maximum(mean, 1e-300), 1.0).astype(np.float32)
