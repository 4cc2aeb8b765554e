"""The result of a simulation: a prediction per policy, the arrays behind it, and the conditions that it holds under.

G EP groups, M micro-batches, L MoE layers, P ranks.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from moe_rl.core.cost import Floats
from moe_rl.core.metrics import StepPrediction
from moe_rl.core.step_words import Dispatcher, Recompute
from moe_rl.simulators.all_to_all import VisitDifference
from moe_rl.simulators.memory import MemoryForecast

# Keys of `StepPrediction.breakdown_s`. `overlap` is negative: time of other parts that overlap hides. In `host`
# layers wait for launches; `pipeline_imbalance` is the time of the slowest stage beyond the mean one.
BREAKDOWN_PARTS = (
    "attention", "tensor_parallel", "context_parallel", "shared_experts", "dense_mlp", "fixed", "expert_gemm",
    "all_to_all", "replicate", "prefetch", "head", "host", "overlap", "pipeline_imbalance", "pipeline_p2p",
    "pipeline_bubble", "grad_reduce", "param_gather", "step_fixed", "optimizer", "reorder",
)  # fmt: skip
# Parts of a balanced step that grow with imbalance: their share is phi.
IMBALANCE_PARTS = ("expert_gemm", "all_to_all", "overlap")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConditions:
    """Without these a speed-up means nothing; every output carries them."""

    phi: float | None
    """Share of forced-balance micro-batches in expert GEMM and all-to-all; None for a step without tokens."""
    imbalance_static: float
    num_micro_batches: int
    tokens_per_rank: float
    """Mean tokens of a source rank in a micro-batch that has any."""
    sequence_length: float
    """Effective length that attention sees: sum(length^2) / sum(length), or the override."""
    ep_size: int
    ranks_per_node: int
    dispatcher: Dispatcher
    recompute: Recompute
    scaled: bool
    """True: the loads were scaled to another number of tokens per rank."""

    def as_json(self) -> dict[str, object]:
        """Return the conditions by name, without those that were not computed."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """One policy, or one yardstick, simulated."""

    prediction: StepPrediction
    rank_load: Floats
    """[G, M, L, P] rows of every rank; the bound `ideal` has P = 1, the mean."""
    micro_batch_s: Floats
    """[G, M] time of every micro-batch through all layers, before pipelining."""
    group: int
    """EP group that is slowest and whose parts the breakdown shows."""
    memory: MemoryForecast
    visit_difference: VisitDifference | None
    """The error of taking a token's experts as independent; None where visits were not counted."""
    tokens: int
    """Tokens of the step, all EP groups together."""

    @property
    def step_time_s(self) -> float:
        """Seconds of the step."""
        return float(self.prediction.step_time_s or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """All policies on one step, with the yardsticks that they are compared with."""

    policies: Mapping[str, PolicyResult]
    static: PolicyResult
    """Megatron's placement and the given layout, whether or not it is among the policies."""
    forced_balance: PolicyResult
    """Uniform routing with the given layout: the published "ideal", which a policy that gains locality may beat."""
    ideal: PolicyResult
    """A lower bound of every policy: mean rows everywhere, fewest possible visits, attention spread evenly."""
    conditions: SimulationConditions

    def yardsticks(self) -> dict[str, PolicyResult]:
        """Return the results that are no policies, by name."""
        return {"forced_balance": self.forced_balance, "ideal": self.ideal}
