"""What an engine and `moe-rl`'s levers bring at a shape that `tune` found: its step under routes, not under balance.

A shape's balanced step is priced for the whole batch. Routes change it by a ratio, which a sample tells: `LAYERS` of
the layers, one EP group, a few micro-batches of the setting's size. Every plan of the sample is simulated beside forced
balance. The ratio holds for all of the step but the output layer, the optimizer and the waits for uneven sequences.
Packing is priced by lengths, over all ranks: the part that a run of verl has.

Example: the balanced step takes 10 s, 1 s of it the output layer. If the sample's static placement takes 1.2 times as
long as its forced balance, the step takes 1 + 9 x 1.2 = 11.8 s.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.config import LoadedModel, load_model, override_model
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.mappings import subset
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.plan import Plan
from moe_rl.core.software import SoftwareCosts
from moe_rl.core.topology import HardwareSpec
from moe_rl.core.trace import RoutingTrace
from moe_rl.planner.base import OURS
from moe_rl.planner.registry import make_planner
from moe_rl.report.tuned_settings import ALIKE, LEVERS, ShapeLevers, TunedSetting
from moe_rl.simulators.coactivation import like
from moe_rl.simulators.movement import STEP_PARTS
from moe_rl.simulators.result import PolicyResult
from moe_rl.simulators.synthetic import PRESET_B, SequenceModel, synthetic_trace
from moe_rl.study.options import DRAWN
from moe_rl.study.plan_and_price import pricing_of
from moe_rl.study.rl_options import TuneOptions
from moe_rl.study.scenario import Scenario, Simulate, state_scenario
from moe_rl.yaml_files import FROM_TRACE

LAYERS = 4
"""Layers of a sample, evenly spread over those of the trace; ratios of single layers differ by some per cent."""
MICRO_BATCHES = 2, 8
"""Micro-batches of a sample, at least and at most."""
SAMPLE_TOKENS = 4 << 20
"""Tokens of a sample: EP64 with 16,384 tokens a rank has four micro-batches."""
SYNTHETIC_SEQUENCES = 96
"""Sequences of a synthetic recording; batches are drawn from them with replacement."""
SLOTS_TRIED = 2
"""Resident slots, unless a number is given: on the development trace a third saves little."""
SLOWEST = 1.4
"""Shapes whose balanced step is longer than this many times the shortest are left out: locality brings up to 1.3."""
UNROUTED = ("head", "uneven_sequences", *STEP_PARTS)
"""Parts of a step that routes do not change, and of which a sample of a few layers has too much."""
ENGINES = {"deepep": "engine:moonep", "hybridep": "engine:hybridep"}
"""Engine that balances a node beside each dispatcher; alltoall has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRoutes:
    """A few layers of routes, with the model that has only these."""

    trace: RoutingTrace
    model: LoadedModel

    @classmethod
    def of(cls, trace: RoutingTrace, spec: MoeModelSpec) -> "SampledRoutes":
        """Return evenly spread layers of a trace, and the model with its share of dense layers and one output token."""
        layers = np.unique(np.linspace(0, trace.num_layers - 1, LAYERS).round().astype(int))
        count = len(layers)
        dense = round((spec.num_layers - spec.num_moe_layers) * count / spec.num_moe_layers)
        total = count + dense
        windowed = -(-spec.num_sliding_window_layers * total // spec.num_layers)
        few = replace(
            spec, num_layers=total, moe_layer_ids=tuple(range(dense, total)), num_sliding_window_layers=windowed,
            vocab_size=1,
        )  # fmt: skip
        routes = replace(
            trace,
            routed_experts=trace.routed_experts[:, layers],
            moe_layer_ids=few.moe_layer_ids,
            router_logprobs=None,
        )
        return cls(trace=routes, model=LoadedModel(spec=few, origin="", assumptions=()))


def routes_like(trace: RoutingTrace, spec: MoeModelSpec, lengths: NDArray[np.int64], *, seed: int) -> RoutingTrace:
    """Return synthetic routes of a model, whose experts meet in tokens as often as in `trace` (of any model).

    Sequences are about as long as `lengths`; none is longer than the longest.
    """
    logarithms = np.log(np.maximum(lengths, 1))
    of_model = replace(
        PRESET_B,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        num_expert_groups=spec.num_expert_groups,
        expert_group_top_k=spec.expert_group_top_k,
        num_layers=LAYERS,
        seed=seed,
    )
    fitted: SequenceModel = replace(
        like(of_model, trace),
        num_sequences=SYNTHETIC_SEQUENCES,
        mean_length=float(np.exp(logarithms.mean())),
        length_sigma=float(logarithms.std()),
    )
    drawn = synthetic_trace(fitted)
    return drawn.select(np.flatnonzero(drawn.sequence_lengths <= lengths.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeSample:
    """The sample of a setting with the plan of every lever, ready to be priced."""

    row: TunedSetting
    scenario: Scenario
    engine: str | None
    resident_slots: int
    share: float
    """Of a step's micro-batches: the sample bears so much of what moves once per step."""
    plans: Mapping[str, Plan]
    """By lever; packing, which is priced by lengths, has none."""
    simulate: Simulate
    """Prices the plans."""

    @classmethod
    def of(
        cls, row: TunedSetting, sampled: SampledRoutes, options: TuneOptions, *, lengths: NDArray[np.int64], room: int
    ) -> "ShapeSample":
        """Plan static placement, an engine, homes and resident copies of a setting.

        `room`: resident slots for which the setting leaves memory.
        """
        engine = ENGINES.get(row.dispatcher)
        if options.slots.has_domain_engine:
            engine = options.slots.domain_balance
        scenario = state_scenario(
            sampled.trace, _sample_options(row, options, lengths), lambda *_: None, model=sampled.model
        )
        several = scenario.topology.num_nodes > 1
        if several and options.slots.resident_slots == 0:
            slots = min(room, SLOTS_TRIED)
        else:
            slots = row.resident_slots
        share = min(1.0, scenario.problem.load.num_micro_batches / row.num_micro_batches)
        plans = _plans(scenario, engine, slots, share)
        simulate, _ = pricing_of(scenario, plans)
        return cls(
            row=row, scenario=scenario, engine=engine, resident_slots=slots, share=share, plans=plans,
            simulate=simulate,
        )  # fmt: skip

    def slowdowns(
        self, hardware: HardwareSpec | None = None, software: SoftwareCosts | None = None
    ) -> dict[str, float]:
        """Return the step by lever over the balanced, packed step; under other constants where they are given."""
        setting = self.scenario.training_step.setting
        if software is not None:
            setting = replace(setting, software=software)
        result = self.simulate(setting, hardware)
        balanced_s = _routed_s(result.forced_balance, self.share)
        unrouted = sum(self.row.parts.get(name, 0.0) for name in UNROUTED)

        def slowdown(plan: str, *, packed: bool) -> float:
            step = unrouted + (1.0 - unrouted) * _routed_s(result.policies[plan], self.share) / balanced_s
            if packed:
                return step
            return step * self.row.packing_gain

        slowdowns = dict[str, float]()
        for lever in LEVERS:
            plan = self.plan_of(lever)
            if plan in self.plans:
                slowdowns[lever] = slowdown(plan, packed=lever not in ("static", "engine"))
        return slowdowns

    def plan_of(self, lever: str) -> str:
        """Return the name of the plan under which a lever is priced: packing has that of the lever before it."""
        if lever != "packing":
            return lever
        return "static" if self.engine is None else "engine"

    def with_levers_only(self, *levers: str) -> "ShapeSample":
        """Return the sample with the plans of these levers alone, which are priced sooner."""
        plans = subset(self.plans, {self.plan_of(lever) for lever in levers})
        simulate, _ = pricing_of(self.scenario, plans)
        return replace(self, plans=plans, simulate=simulate)

    def levers(self) -> ShapeLevers:
        """Return tokens/s/GPU of the setting by lever."""
        batch = self.scenario.batch
        # `simulate` counts tokens that have a route: of 21 tokens of a short sequence, the last has none.
        balanced = self.row.tokens_per_s_per_gpu * float(batch.load.tokens.sum()) / batch.num_tokens
        speeds = {lever: balanced / slowdown for lever, slowdown in self.slowdowns().items()}
        return ShapeLevers(setting=self.row, engine=self.engine, resident_slots=self.resident_slots, speeds=speeds)


def _sample_options(row: TunedSetting, options: TuneOptions, lengths: NDArray[np.int64]) -> TuneOptions:
    """Return the options of a sample: the setting's sizes in one EP group, without a pipeline."""
    ranks = math.lcm(row.expert_ranks, row.slices)
    cells = ranks // row.slices
    stages = row.pipeline_model_parallel_size
    of_rank = float(lengths.sum()) * row.slices * stages / options.parallel.gpus / row.num_micro_batches
    together = min(of_rank, row.micro_batch_tokens) * cells
    least, most = MICRO_BATCHES
    count = min(row.num_micro_batches, max(least, min(most, int(SAMPLE_TOKENS / together))))
    changed: dict[str, Any] = {
        "batch": DRAWN,
        "packing": "none",
        "micro_batch_tokens": row.micro_batch_tokens,
        "global_batch_tokens": max(1, round(together * count)),
        "global_batch_size": None,
        "gpus": None,
        "num_ep_groups": None,
        "pipeline_model_parallel_size": 1,
        "num_virtual_stages_per_pipeline_rank": 1,
        "expert_model_parallel_size": row.expert_model_parallel_size,
        "expert_tensor_parallel_size": row.expert_tensor_parallel_size,
        "tensor_model_parallel_size": row.tensor_model_parallel_size,
        "context_parallel_size": row.context_parallel_size,
        **row.recompute.as_options,
        "resident_slots": 0,
        "policy": ["static"],
        "step": None,
        "num_layers": None,
        "num_nodes": None,
        **row.dispatcher.as_options,
    }
    return options.with_words(**changed)


def _plans(scenario: Scenario, engine: str | None, slots: int, share: float) -> dict[str, Plan]:
    """Return the plan of every lever in the sample."""
    problem = replace(scenario.problem, steps_served=max(1, round(1 / share)), updates=share)
    over = replace(problem, domain_balance=engine or OURS)
    ours = make_planner("moe-rl", pack=False)
    plans: dict[str, Plan] = {"static": make_planner("static").plan(problem), "homes": ours.plan(over)}
    if slots:
        plans["resident copies"] = ours.plan(replace(over, resident_slots=slots))
    if engine is not None:
        plans["engine"] = make_planner("ultraep" if engine == "engine:ultraep" else "moonep").plan(problem)
        plans["moe-rl replicas"] = ours.plan(replace(problem, domain_balance=OURS, resident_slots=slots))
    return plans


def _routed_s(policy: PolicyResult, share: float) -> float:
    """Return the seconds of a step without the parts in `UNROUTED`, and with a share of what moves once per step."""
    parts = policy.prediction.breakdown_s or {}
    unrouted = sum(parts.get(name, 0.0) for name in UNROUTED)
    return policy.step_time_s - unrouted - (1.0 - share) * parts.get("reorder", 0.0)


def model_of_routes(options: TuneOptions) -> MoeModelSpec:
    """Return the model whose routes are made; raise where it has no name."""
    require(options.shape.model != FROM_TRACE, "--routes-like generates routes for a model: set --model.")
    return override_model(load_model(options.shape.model), options.model_overrides()).spec


def compared_shapes(rows: list[TunedSetting]) -> list[TunedSetting]:
    """Return the fastest setting of every EP size and dispatcher that levers may bring in front.

    Of a shape's token budgets that differ by less than `ALIKE`, it has the one that is fastest without packing: another
    one would make packing look good. Example: of micro-batches of 4,136 tokens moe-rl packs one, but verl's rule needs
    two; of micro-batches of 8,192 tokens both make one.
    """
    fastest, most = dict[tuple[int, str], TunedSetting](), max(row.tokens_per_s_per_gpu for row in rows)
    for row in sorted(rows, key=lambda row: -row.tokens_per_s_per_gpu):
        if row.tokens_per_s_per_gpu * SLOWEST >= most:
            fastest.setdefault((row.expert_ranks, row.dispatcher), row)
    return [_least_packed(best, rows) for best in fastest.values()]


def _least_packed(best: TunedSetting, rows: list[TunedSetting]) -> TunedSetting:
    """Return the setting of the shape of `best`, and about as fast, that is fastest on the framework's layout."""
    least_tokens_per_s = (1.0 - ALIKE) * best.tokens_per_s_per_gpu
    alike = [row for row in rows if row.shape == best.shape and row.tokens_per_s_per_gpu >= least_tokens_per_s]
    return max(alike, key=lambda row: row.tokens_per_s_per_gpu / row.packing_gain)


def require_routes(trace: object) -> RoutingTrace:
    """Return the trace; raise where it holds counts alone."""
    if not isinstance(trace, RoutingTrace):
        raise InvalidInputError(
            "the trace contains only counts, but this command needs the routes of individual tokens."
        )
    return trace
