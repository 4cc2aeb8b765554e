"""Expert maps for rollout engines, made from recorded rollouts and scored by the engine's own choice of copies.

M decode batches, L MoE layers, E experts, P ranks, W slots of a layer.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_rl.config import load_cluster
from moe_rl.core.decode import DecodeBatches
from moe_rl.core.errors import require
from moe_rl.core.expert_map import ExpertMap
from moe_rl.core.metrics import imbalance
from moe_rl.core.topology import ClusterTopology
from moe_rl.core.trace import RoutingTrace
from moe_rl.planner.others.eplb import rebalance_experts
from moe_rl.planner.rollout_map import spread_copies
from moe_rl.replay import TraceSource
from moe_rl.rollout_engines import ROLLOUT_ENGINES, RolloutEngine, read_expert_map
from moe_rl.rollout_engines.base import RunShape
from moe_rl.study.options import SimulationOptions
from moe_rl.study.ranks import check_ep_size
from moe_rl.study.scenario import Progress, open_trace_of_model
from moe_rl.study.traces import TraceLike, routes_of_step
from moe_rl.version import __version__
from moe_rl.yaml_files import FROM_TRACE

SCHEMA = "moe_rl.rollout-map/1"
REQUESTS_PER_RANK = 32  # Decoded at once where `--ep-group-tokens` says nothing.
MAX_BATCHES = 64  # Decode batches that are looked at, of those planned on and of those scored on.
POLICY = "moe-rl"
START, EPLB = "start", "eplb"  # The map of an engine that is given none, and its own balancer's for the same loads.


@dataclass(frozen=True, slots=True, kw_only=True)
class MapScore:
    """Balance of the scored batches under a map and one way to choose copies."""

    imbalance: float
    """Largest over mean rank load, over batches and layers as in `core.metrics.imbalance`."""
    active_slots: float
    """Mean over batches and layers of the experts whose weights the rank reads that reads most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutMap:
    """An expert map, and how it and others do on rollouts that it was not made of."""

    engine: RolloutEngine
    expert_map: ExpertMap
    scores: Mapping[str, Mapping[str, MapScore]]
    """By map (`start`, `eplb` and the map's own name), then by the engine's choice of copies."""
    twins: Mapping[str, int]
    """By map: slots that hold an expert a second time on a rank."""
    facts: Mapping[str, object]
    """Trace, sizes, and the steps that were planned and scored on, as JSON values."""
    notes: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, object]:
        """Return scores and facts as JSON values."""
        maps: dict[str, object] = {}
        for name, scores in self.scores.items():
            choices = {choice: asdict(score) for choice, score in scores.items()}
            maps[name] = {"twins": self.twins[name], "choices": choices}
        return {
            "schema": SCHEMA,
            "version": __version__,
            "engine": self.engine.name,
            **self.facts,
            "maps": maps,
            "notes": list(self.notes),
        }


def plan_rollout_map(
    trace: TraceLike, engine_name: str, options: SimulationOptions, progress: Progress = lambda what, done, total: None
) -> RolloutMap:
    """Return the map for an engine of `expert_model_parallel_size` ranks with `resident_slots` copies on each.

    It is planned on the step before the one that it is scored on (`step`, by default the last), or of a trace of one
    step on every other prompt group, and scored on the others. Raises `InvalidInputError` for an engine, a shape or a
    trace for which there is no map.
    """
    engine = ROLLOUT_ENGINES[engine_name]
    require(
        not options.states("policy") or options.planning.policy == [POLICY],
        f"moe-rl always compares its own map for {engine.name} with that of {engine.name}'s EPLB: leave --policy out.",
    )
    copies = options.slots.number_of("resident_slots", "an expert map")
    rollouts = _Rollouts.read(trace, options, progress)
    start = rollouts.start(copies=copies * options.parallel.expert_model_parallel_size)
    progress("placing experts", 0, 1)
    expert_map = spread_copies(rollouts.planned.load(), start, seed=options.planning.seed)
    return rollouts.scored_with(engine, POLICY, expert_map, progress)


def score_expert_map(
    trace: TraceLike, path: Path | str, options: SimulationOptions, progress: Progress = lambda what, done, total: None
) -> RolloutMap:
    """Return how the map in a file of an engine does on the trace, beside the engine's start map and its EPLB."""
    rollouts = _Rollouts.read(trace, options, progress)
    engine, read = read_expert_map(path, rollouts.shape)
    return rollouts.scored_with(engine, Path(path).name, read, progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rollouts:
    """Decode batches to plan on, others to score on, and the model that they are of."""

    shape: RunShape
    num_expert_groups: int
    ranks_per_node: int
    planned: DecodeBatches
    scored: DecodeBatches
    facts: Mapping[str, object]
    notes: tuple[str, ...]

    @classmethod
    def read(cls, trace: TraceLike, options: SimulationOptions, progress: Progress) -> "_Rollouts":
        for name in ("batch", "micro_batch_tokens", "tokens_per_rank"):
            flag = "--" + name.replace("_", "-")
            require(
                options.value_of(name) is None,
                f"{flag} applies to training only: set the decode batch with --ep-group-tokens.",
            )
        progress("reading the trace", 0, 1)
        source, model = open_trace_of_model(trace, options)
        spec, ranks = model.spec, options.parallel.expert_model_parallel_size
        hardware = load_cluster(options.pricing.cluster)
        per_node = options.parallel.ranks_per_node or hardware.ranks_per_node
        check_ep_size(ranks, spec.num_experts, per_node)
        topology = ClusterTopology(hardware=hardware, ep_size=ranks, ranks_per_node=per_node)
        copies = options.slots.number_of("resident_slots", "an expert map")
        per_rank = topology.experts_per_rank(spec.num_experts) + copies
        require(
            copies >= 0 and per_rank <= spec.num_experts,
            f"--resident-slots {copies} gives each rank {per_rank} slots, but the model has only "
            f"{spec.num_experts} experts.",
        )
        requests = options.sequences.ep_group_tokens or REQUESTS_PER_RANK * ranks
        planned, scored, sentences = _planned_and_scored(source, options.sequences.step)
        progress("following the decoding", 0, 1)

        def batches(of: RoutingTrace) -> DecodeBatches:
            decode_batches = DecodeBatches.of(of, num_requests=requests, ep_size=ranks, max_batches=MAX_BATCHES)
            require(len(decode_batches.batch) > 0, "the rollouts of the trace have no routes.")
            return decode_batches

        notes = []
        if planned is scored:
            notes.append(
                "the trace has only one prompt group, so the map is scored on the sequences that it was planned for."
            )
        if options.shape.model == FROM_TRACE and spec.assumed_fields:
            notes.append(
                f"the model is assumed to have {spec.num_layers} hidden layers, as many as the trace. If it has "
                "more, set --model."
            )
        if min(planned.num_sequences, scored.num_sequences) < requests:
            notes.append(
                f"the decode batch should have {requests} requests, but there are only {planned.num_sequences} "
                f"sequences to plan with and {scored.num_sequences} to score with."
            )
        return cls(
            shape=RunShape(
                num_layers=spec.num_layers,
                moe_layer_ids=spec.moe_layer_ids,
                num_experts=spec.num_experts,
                ep_size=ranks,
            ),
            num_expert_groups=spec.num_expert_groups,
            ranks_per_node=topology.ranks_per_domain,
            planned=batches(planned),
            scored=batches(scored),
            facts={"trace": str(source.path), "ep_size": ranks, "requests_at_once": requests, **sentences},
            notes=tuple(notes),
        )

    def start(self, *, copies: int) -> ExpertMap:
        """Return the map that an engine starts with."""
        return ExpertMap.start(**asdict(self.shape), copies=copies)

    def scored_with(self, engine: RolloutEngine, name: str, planned_map: ExpertMap, progress: Progress) -> RolloutMap:
        """Return the map and its scores beside those of the start map and of EPLB."""
        start = self.start(copies=planned_map.num_copies)
        maps = {START: start, EPLB: self._eplb(start), name: planned_map}
        scores: dict[str, dict[str, MapScore]] = {}
        twins: dict[str, int] = {}
        for index, (of, expert_map) in enumerate(maps.items()):
            progress(f"scoring {of}", index, len(maps))
            twins[of], scores[of] = expert_map.num_twins(), {}
            for choice in engine.choices:
                slots = choice.serve(expert_map, self.scored, self.ranks_per_node)
                scores[of][choice.name] = score_map(expert_map, self.scored, slots)
        notes = [*self.notes]
        if twins[EPLB]:
            notes.append(
                f"EPLB puts {twins[EPLB]} replicas on ranks that already have the same expert. They are not exported, "
                "but EPLB's score counts them as if they helped."
            )
        return RolloutMap(
            engine=engine,
            expert_map=planned_map,
            scores=scores,
            twins=twins,
            facts={**self.facts, "slots_per_rank": planned_map.slots_per_rank},
            notes=tuple(notes),
        )

    def _eplb(self, start: ExpertMap) -> ExpertMap:
        """Return the map that the engines' own EPLB makes from the loads planned on."""
        nodes, groups = start.ep_size // self.ranks_per_node, self.num_expert_groups
        # EPLB's own rule: it works node by node where expert groups, and slots, fill the nodes.
        by_nodes = groups > 1 and groups % nodes == 0 and start.num_slots % nodes == 0
        slots = rebalance_experts(
            self.planned.load().sum(axis=0),
            num_physical_experts=start.num_slots,
            num_groups=groups if by_nodes else 1,
            num_nodes=nodes if by_nodes else 1,
            num_ranks=start.ep_size,
        )
        return replace(start, slots=slots)


def score_map(expert_map: ExpertMap, batches: DecodeBatches, served: NDArray[np.int64]) -> MapScore:
    """Return the score of batches whose pairs are served by the slots [n, L, K]."""
    shape = (batches.num_layers, batches.num_batches, expert_map.ep_size, expert_map.slots_per_rank)
    pairs = np.empty(shape, np.int64)
    # Layer by layer: int64 keys of all layers at once would be 8 times the routes of up to 256 experts.
    for layer in range(batches.num_layers):
        key = batches.batch[:, None] * expert_map.num_slots + served[:, layer]
        counts = np.bincount(key.ravel(), minlength=pairs[layer].size)
        pairs[layer] = counts.reshape(shape[1:])
    rank_load = pairs.sum(axis=3).swapaxes(0, 1)[None]
    active_of_fullest = (pairs > 0).sum(axis=3).max(axis=2)
    return MapScore(imbalance=imbalance(rank_load), active_slots=float(active_of_fullest.mean()))


def _planned_and_scored(source: TraceSource, step: int | None) -> tuple[RoutingTrace, RoutingTrace, dict[str, object]]:
    """Return the sequences to plan on, the ones to score on (the same object if there is no other), and their names."""
    if step is None:
        step = source.steps[-1]
    source.require_step(step)
    scored = routes_of_step(source, step)
    index = source.steps.index(step)
    if index > 0:
        earlier = source.steps[index - 1]
        return routes_of_step(source, earlier), scored, {"planned_on": f"step {earlier}", "scored_on": f"step {step}"}
    # Prompt groups, not sequences: samples of one prompt choose alike, and a map would be scored on what it has seen.
    _, group = np.unique(scored.group_id, return_inverse=True)
    even, odd = np.flatnonzero(group % 2 == 0), np.flatnonzero(group % 2 == 1)
    if not len(odd):
        return scored, scored, {"planned_on": f"step {step}", "scored_on": f"step {step}"}
    named = {"planned_on": f"every other prompt group of step {step}"}
    return scored.select(even), scored.select(odd), {**named, "scored_on": f"the other prompt groups of step {step}"}
