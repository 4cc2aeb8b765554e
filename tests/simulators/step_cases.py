"""Steps to simulate: random loads, layouts, settings, and plans with random homes, replicas and resident copies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from strategies import layout_for, load_of, loads, model_spec, random_pairs, seeds, topologies

from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertMigration, ExpertPlacement
from moe_rl.core.plan import Plan, ReplicaPlan
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.pricing import TrainingStep
from moe_rl.simulators.result import SimulationResult
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.step import simulate_policies

SPARE_SLOTS = 2


@dataclass(frozen=True, kw_only=True)
class StepCase:
    load: StepLoad
    layout: BatchLayout
    lengths: np.ndarray
    topology: ClusterTopology
    model: MoeModelSpec
    plans: dict[str, Plan]
    setting: StepSetting

    def simulate(self, **changes: object) -> SimulationResult:
        case = replace(self, **changes)
        return simulate_policies(case.plans, case.step)

    @property
    def step(self) -> TrainingStep:
        return TrainingStep(
            load=self.load,
            layout=self.layout,
            lengths=self.lengths,
            model=self.model,
            topology=self.topology,
            setting=self.setting,
        )

    def times(self, **changes: object) -> dict[str, float]:
        result = self.simulate(**changes)
        every = {**result.policies, **result.yardsticks(), "static yardstick": result.static}
        return {name: one.step_time_s for name, one in every.items()}


def lengths_for(load: StepLoad, topology: ClusterTopology) -> np.ndarray:
    """Token counts of the one sequence per cell that `strategies.layout_for` lays out."""
    by_rank = load.tokens.transpose(1, 0, 2).reshape(load.num_micro_batches, topology.num_dp_ranks, -1)
    return by_rank.sum(axis=2).ravel()


def random_plan(
    rng: np.random.Generator, load: StepLoad, layout: BatchLayout, *, resident: bool = False, move_homes: bool = True
) -> Plan:
    """Random homes; in every cell and on every rank up to SPARE_SLOTS replicas with random quotas, also of experts
    whose home is on the same rank, and quotas that exceed what occurs. `resident`: the same replicas all step."""
    ranks, layers, experts = load.ep_size, load.num_layers, load.num_experts
    cells = load.num_ep_groups * load.num_micro_batches * layers
    contiguous = ExpertPlacement.contiguous(
        num_layers=layers, num_experts=experts, ep_size=ranks, spare_slots=SPARE_SLOTS
    )
    home = contiguous.home_rank
    if move_homes:
        home = rng.permuted(home, axis=1)
    placement = ExpertPlacement.from_home_rank(home, ep_size=ranks, spare_slots=SPARE_SLOTS)
    slots = placement.slots_per_rank
    spare = (np.arange(ranks)[:, None] * slots + slots - SPARE_SLOTS + np.arange(SPARE_SLOTS)).ravel()
    if resident:
        held = placement.physical_to_logical_map.copy()
        held[:, spare] = rng.integers(0, experts, (layers, len(spare)))
        placement = replace(placement, physical_to_logical_map=held)
    used = rng.random((cells, len(spare))) < rng.random()
    expert = np.zeros((cells, len(spare)), np.int64)
    for cell in range(cells):
        expert[cell] = (
            placement.physical_to_logical_map[cell % layers, spare]
            if resident
            else rng.integers(0, experts, len(spare))
        )
    cell, which = np.nonzero(used)
    most = load.pairs.reshape(cells, ranks, experts)[cell, :, expert[cell, which]]
    _, key, same = np.unique(cell * experts + expert[cell, which], return_inverse=True, return_counts=True)
    quota = (most * rng.random(most.shape) / same[key][:, None]).astype(np.int32)
    return Plan(
        policy="random",
        layout=layout,
        placement=placement,
        replicas=ReplicaPlan(
            offsets=np.concatenate([[0], np.cumsum(used.sum(axis=1))]).astype(np.int64),
            expert=expert[cell, which].astype(np.int32),
            physical_id=spare[which].astype(np.int32),
            source_quota=quota,
            source_pairs=most,
            resident=np.full(len(cell), resident),
            num_ep_groups=load.num_ep_groups,
            num_micro_batches=load.num_micro_batches,
            num_layers=layers,
        ),
        migration=ExpertMigration.between(contiguous, placement, expert_bytes=1000),
    )


@st.composite
def settings_(draw: st.DrawFn) -> StepSetting:
    stages = draw(st.sampled_from([1, 1, 4]))
    return StepSetting(
        dispatcher=draw(st.sampled_from(["deepep", "alltoall"])),
        recompute=draw(st.sampled_from(["none", "moe", "full"])),
        pipeline_model_parallel_size=stages,
        num_virtual_stages=draw(st.sampled_from([1, 2])) if stages > 1 else 1,
        tensor_model_parallel_size=draw(st.sampled_from([1, 2])),
        log_prob_passes=draw(st.integers(0, 1)),
        overlap_all_to_all=draw(st.booleans()),
    )


def case_of(
    load: StepLoad,
    topology: ClusterTopology,
    rng: np.random.Generator,
    setting: StepSetting | None = None,
    policies: Sequence[str] = ("homes", "replicas", "resident"),
) -> StepCase:
    layout = layout_for(load, topology)
    plans = {
        "homes": random_plan(rng, load, layout, move_homes=False),
        "replicas": random_plan(rng, load, layout),
        "resident": random_plan(rng, load, layout, resident=True),
    }
    model = model_spec(num_experts=load.num_experts, num_layers=load.num_layers, top_k=load.top_k)
    return StepCase(
        load=load,
        layout=layout,
        lengths=lengths_for(load, topology),
        topology=topology,
        model=model,
        plans={name: plans[name] for name in policies},
        setting=setting or StepSetting(),
    )


@st.composite
def cases(draw: st.DrawFn) -> StepCase:
    """Steps of every small shape; layers and micro-batches without tokens are among them."""
    topology = draw(topologies())
    load = draw(loads(topology))
    return case_of(load, topology, np.random.default_rng(draw(seeds)), draw(settings_()))


def big_case(
    rng: np.random.Generator, *, topology: ClusterTopology, shape: tuple[int, int, int], **setting: object
) -> StepCase:
    """A step of [M, L, E] = `shape` with some thousand tokens per rank, for effects that small ones round away."""
    micro_batches, layers, experts = shape
    full = (topology.num_ep_groups, micro_batches, layers, topology.ep_size, experts)
    load = load_of(random_pairs(rng, full, most=4000), 2)
    return case_of(load, topology, rng, StepSetting(**setting))
