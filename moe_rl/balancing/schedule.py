"""Plans from numbers alone: what a driver calls before the step, and what every worker's plan comes from.

Needs neither torch nor Megatron. S sequences, M micro-batches, D data-parallel ranks, L MoE layers, K choices, E
experts, G EP groups of P ranks.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.config import BalancerConfig
from moe_rl.config import load_cluster
from moe_rl.core.cost import BF16_BYTES, LayerCostParams
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.core.reduce import Filler, read_load
from moe_rl.core.sequence_load import SequenceLoad
from moe_rl.core.step_words import Dispatcher
from moe_rl.core.topology import ClusterTopology, HardwareSpec
from moe_rl.core.trace import RoutingTrace, SequenceCounts
from moe_rl.planner.base import COPIES, Levers, PlanProblem
from moe_rl.planner.objective import OBJECTIVES
from moe_rl.planner.registry import POLICIES, make_planner
from moe_rl.replay import count_sequences
from moe_rl.simulators.balanced import micro_batch_cost
from moe_rl.simulators.pricing import TrainingStep
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.step import cost_params_for

logger = logging.getLogger(__name__)

Samples = RoutingTrace | SequenceCounts | Sequence[NDArray[np.integer]]
Schedule = BatchLayout | Sequence[Sequence[Sequence[int]]]


def plan_from_schedule(
    samples: Samples,
    schedule: Schedule,
    *,
    config: BalancerConfig,
    model: MoeModelSpec,
    topology: ClusterTopology,
    placement: ExpertPlacement | None = None,
    filler: Filler | str = Filler.NONE,
    forward_only: bool = False,
    may: Levers = COPIES,
) -> Plan:
    """Return the plan of one `forward_backward_func` call, made by whoever knows all its micro-batches.

    `samples` are the sequences of the call: a trace, their counts, or one [tokens, L, K] integer array each, where
    rows with a negative id have no route; `filler` says what the framework dispatches for those. `schedule` says where
    they run: a layout, or for every data-parallel rank and micro-batch the indices of the samples in their order,
    `schedule[dp_rank][micro_batch]`. It is never changed. `topology` has TP x CP as `slices_per_dp_rank`; a cell's
    tokens are taken as cut into equal consecutive slices, so under zig-zag context parallelism, or with several
    sequences side by side under sequence parallelism, the plan knows exactly what an EP group computes and only about
    from which rank it comes.

    `placement` is where the experts are now (default: Megatron's). With `may=PLACEMENT` the plan may move them and
    choose the copies that stay; then `balancer.reorder(plan)` must come before
    `balancer.begin_pass(PassSource.given(plan))`. Hand the plan to the workers as a file (`Plan.save`) or pickled.

    Raises `InvalidInputError` where samples, schedule, model and topology disagree.
    """
    trace = _as_trace(samples, model)
    layout = schedule if isinstance(schedule, BatchLayout) else layout_of_schedule(schedule, trace.num_sequences)
    return plan_of_load(
        read_load([trace], layout=layout, topology=topology, filler=filler),
        config=config,
        model=model,
        topology=topology,
        placement=placement,
        layout=replace(layout, fixed=True),
        lengths=trace.sequence_lengths.astype(np.int64),
        forward_only=forward_only,
        may=may,
    )


def pack_schedule(
    samples: Samples,
    schedule: Sequence[Sequence[Sequence[int]]],
    *,
    token_budget: int,
    config: BalancerConfig,
    model: MoeModelSpec,
    topology: ClusterTopology,
) -> list[list[list[int]]]:
    """Return the samples of `schedule[dp_rank][micro_batch]` packed anew, so that loads of micro-batches complement.

    The policy's lever `pack`, experts staying where Megatron has them: every micro-batch keeps at least one
    sample and at most `token_budget` tokens, every rank its number of micro-batches, and the whole is predicted no
    worse than what was given. That comes back, with a warning, where a micro-batch is over the budget already, and
    where packing would leave one empty. On one node with replica slots there is nothing to pack for, and nothing
    changes.

    Raises `InvalidInputError` where samples, schedule, model and topology disagree, and for a policy without the lever.
    """
    policy = POLICIES[config.policy]
    packing = ", ".join(policy.name for policy in POLICIES if policy.levers.pack)
    require(policy.levers.pack, f"policy {config.policy!r} does not pack sequences. Policies that do: {packing}.")
    trace = _as_trace(samples, model)
    counts = trace if isinstance(trace, SequenceCounts) else count_sequences(trace)
    layout = layout_of_schedule(schedule, trace.num_sequences)
    batches_of_ranks = [[list(batch) for batch in batches] for batches in schedule]
    most_tokens = int(layout.rank_tokens(trace.sequence_lengths).max(initial=0))
    if most_tokens > token_budget:
        logger.warning(
            "moe_rl: a micro-batch has %d tokens, more than its budget of %d tokens, so moe_rl did not repack the "
            "sequences of this batch.",
            most_tokens,
            token_budget,
        )
        return batches_of_ranks
    packed = plan_of_load(
        read_load([trace], layout=layout, topology=topology),
        config=config,
        model=model,
        topology=topology,
        layout=replace(layout, fixed=False, token_budget=token_budget),
        lengths=trace.sequence_lengths.astype(np.int64),
        sequence_load=SequenceLoad.of_different(counts.tokens_per_expert),
        may=replace(COPIES, pack=True),
    ).layout
    cells: list[list[list[int]]] = [[[] for _ in batches] for batches in schedule]
    for sample in np.argsort(packed.order, kind="stable").tolist():
        cells[packed.dp_rank[sample]][packed.micro_batch[sample]].append(sample)
    pairs = (pair for ranks in zip(batches_of_ranks, cells, strict=True) for pair in zip(*ranks, strict=True))
    emptied = sum(bool(before) and not after for before, after in pairs)
    if emptied:
        logger.warning(
            "moe_rl: packing would leave %d micro-batches empty, so moe_rl did not repack the sequences of this batch.",
            emptied,
        )
        return batches_of_ranks
    return cells


def layout_of_schedule(schedule: Sequence[Sequence[Sequence[int]]], num_sequences: int) -> BatchLayout:
    """Return `schedule[dp_rank][micro_batch]` = sample indices as a layout; raise unless it holds each sample once."""
    counts = {len(micro_batches) for micro_batches in schedule}
    require(
        len(counts) == 1,
        f"every data-parallel rank must run the same number of micro-batches, but the ranks run {sorted(counts)}.",
    )
    places = [
        (sample, micro_batch, dp_rank, order)
        for dp_rank, micro_batches in enumerate(schedule)
        for micro_batch, samples in enumerate(micro_batches)
        for order, sample in enumerate(samples)
    ]
    columns = np.array(places, np.int64).reshape(-1, 4)
    sample_numbers = np.sort(columns[:, 0])
    require(
        np.array_equal(sample_numbers, np.arange(num_sequences)),
        f"the schedule must contain each of the {num_sequences} samples once, got {sample_numbers.tolist()[:20]}.",
    )
    by_sample = columns[np.argsort(columns[:, 0])].astype(np.int32)
    return BatchLayout(
        micro_batch=by_sample[:, 1],
        dp_rank=by_sample[:, 2],
        order=by_sample[:, 3],
        num_micro_batches=counts.pop(),
        num_dp_ranks=len(schedule),
        fixed=True,
    )


def cluster_topology(
    config: BalancerConfig, *, ep_size: int, num_ep_groups: int = 1, slices_per_dp_rank: int = 1
) -> ClusterTopology:
    """Return G EP groups of P ranks on the nodes that the configuration describes."""
    return ClusterTopology(
        hardware=hardware_of(config.pricing.cluster),
        ep_size=ep_size,
        num_ep_groups=num_ep_groups,
        slices_per_dp_rank=slices_per_dp_rank,
        ranks_per_node=min(config.slots.ranks_per_node, ep_size),
    )


@cache
def hardware_of(cluster: str) -> HardwareSpec:
    """Return a cluster's constants, read once: parsing the file takes longer (11 ms) than a small plan."""
    return load_cluster(cluster)


def plan_of_load(
    load: StepLoad,
    *,
    config: BalancerConfig,
    model: MoeModelSpec,
    topology: ClusterTopology,
    setting: StepSetting | None = None,
    placement: ExpertPlacement | None = None,
    layout: BatchLayout | None = None,
    lengths: NDArray[np.int64] | None = None,
    sequence_load: SequenceLoad | None = None,
    forward_only: bool = False,
    may: Levers = COPIES,
    history: StepLoad | None = None,
    updates: int = 1,
) -> Plan:
    """Return the policy's plan; the same on every rank that has the same load.

    What `may` leaves alone stays as `placement` and `layout` have it: by default every expert, so a policy that cannot
    leave experts where they are is refused. Layers are priced as a simulation prices them (`cost_of_load`). `history`
    are the loads of earlier steps, on which homes are learned, too; `updates` optimizer steps run this load.
    """
    require_usable_policy(config, may=may)
    if placement is None:
        placement = ExpertPlacement.contiguous(
            num_layers=load.num_layers, num_experts=load.num_experts, ep_size=load.ep_size
        )
    setting = step_setting(config, setting, forward_only=forward_only)
    whole_step = None
    if layout is not None and lengths is not None:
        step = TrainingStep(load=load, layout=layout, lengths=lengths, model=model, topology=topology, setting=setting)
        whole_step = micro_batch_cost(step)
    moves_over = topology
    if config.homes.reorders and may.move_homes:  # and every export brings the weights home and back
        update_factor = 1 + 2 * BF16_BYTES * model.expert_params / model.expert_state_bytes
        hardware, links = topology.hardware, ("rdma_gb_per_s", "nvlink_p2p_gb_per_s")
        rates = {name: getattr(hardware, name) / update_factor for name in links}
        moves_over = replace(topology, hardware=replace(hardware, **rates))
    slots = config.slots
    problem = PlanProblem(
        load=load,
        layout=worker_layout(load.num_micro_batches, topology.num_ranks) if layout is None else layout,
        model=model,
        topology=moves_over,
        cost=cost_of_load(load, model=model, topology=topology, setting=setting, layout=layout, lengths=lengths),
        objective=OBJECTIVES[config.pricing.objective],
        replica_slots=slots.replica_slots,
        cross_node_slots=slots.cross_node_slots,
        resident_slots=slots.resident_slots,
        current_placement=placement.with_slots(resident_slots=slots.resident_slots, spare_slots=slots.spare),
        steps_served=config.homes.steps_served if may.move_homes else 1,
        updates=updates,
        sequence_load=sequence_load,
        sequence_tokens=None if sequence_load is None else lengths,
        micro_batch_cost=whole_step,
        history=history,
        domain_balance=slots.domain_balance,
    )
    if slots.has_domain_engine:  # what the engine copies is priced, and is not in the plan
        problem, may = replace(problem, replica_slots=1), replace(may, replicate=False)
    parameters = dict(config.parameters)
    if config.kernels.static_rows and may.pack and config.policy == "moe-rl":
        parameters = {"static_buffers": True} | parameters
    return make_planner(config.policy, **parameters).plan(problem, may)


def step_setting(
    config: BalancerConfig, framework_setting: StepSetting | None = None, *, forward_only: bool
) -> StepSetting:
    """Return how the pass is run: as the framework says, where one is asked, and the configuration before it."""
    setting = StepSetting() if framework_setting is None else framework_setting
    dispatcher = setting.dispatcher
    if config.pricing.dispatcher is not None:
        dispatcher = Dispatcher(config.pricing.dispatcher)
    return replace(setting, dispatcher=dispatcher, forward_only=forward_only)


def cost_of_load(
    load: StepLoad,
    *,
    model: MoeModelSpec,
    topology: ClusterTopology,
    setting: StepSetting,
    layout: BatchLayout | None = None,
    lengths: NDArray[np.int64] | None = None,
) -> LayerCostParams:
    """Return the prices of a layer: those by which the simulator prices the same step.

    Ranks that know only their rows do not know where sequences end. Without `lengths` and without the setting's
    `sequence_length` attention counts per token alone, so that copies have less work to hide behind than they will.
    """
    if layout is None or lengths is None:
        layout, lengths = worker_layout(load.num_micro_batches, topology.num_ranks), load.tokens.transpose(1, 0, 2)
        setting = replace(setting, sequence_length=setting.sequence_length or 1)
        topology = replace(topology, slices_per_dp_rank=1)
        # By tokens alone, so that ranks that plan some of the layers each have the prices of one that plans all.
        pairs = np.zeros((*load.tokens.shape[:2], 1, load.ep_size, load.num_experts), np.int32)
        pairs[:, :, 0, :, 0] = load.tokens * load.top_k
        load = replace(load, pairs=pairs, routes=None)
    step = TrainingStep(
        load=load, layout=layout, lengths=lengths.reshape(-1), model=model, topology=topology, setting=setting
    )
    return cost_params_for(step)


def require_usable_policy(config: BalancerConfig, *, may: Levers = COPIES) -> None:
    """Raise where the policy is unknown, has no slot limits, cannot leave experts at home, or leaves slots empty."""
    policy = POLICIES[config.policy]

    usable_policies = ", ".join(policy.name for policy in POLICIES if policy.keeps_homes and policy.slot_limits)
    if not policy.slot_limits:
        raise InvalidInputError(
            f"policy {config.policy!r} may put any number of replicas on a rank, but each rank of this run has buffers "
            f"for only {config.slots.spare} replicas. Use one of {usable_policies}."
        )
    if not may.move_homes and not policy.keeps_homes:
        raise InvalidInputError(
            f"policy {config.policy!r} moves experts to other home ranks in every plan, which does not work "
            f"inside Megatron. Use one of {usable_policies}."
        )
    require_useful_slots(config)


def require_useful_slots(config: BalancerConfig) -> None:
    """Raise where there are slots that the policy never fills, or reorders of one that moves nothing."""
    levers = POLICIES[config.policy].levers
    require(
        not config.homes.reorders or levers.move_homes or (levers.choose_residents and config.slots.resident_slots > 0),
        f"reorders=True has no effect, because the policy {config.policy!r} never moves experts to other home ranks.",
    )
    for slots, lever in (("resident_slots", "choose_residents"), ("cross_node_slots", "cross_node")):
        filling = [policy.name for policy in POLICIES if getattr(policy.levers, lever) and policy.slot_limits]
        require(
            not config.value_of(slots) or config.policy in filling,
            f"{slots} has no effect, because the policy {config.policy!r} leaves these slots empty. Set {slots} to "
            f"0, or choose a policy that fills them: {', '.join(filling)}.",
        )


def home_experts(placement: ExpertPlacement) -> NDArray[np.int32]:
    """Return [L, E]: the expert in each home slot, rank by rank; raise unless homes stand first in every rank."""
    per_rank = placement.num_experts // placement.ep_size
    slots = placement.physical_to_logical_map.reshape(placement.num_layers, placement.ep_size, -1)
    experts = slots[:, :, :per_rank].reshape(placement.num_layers, -1)
    is_complete = np.array_equal(np.sort(experts, axis=1), np.tile(np.arange(placement.num_experts), (len(experts), 1)))
    require(is_complete, f"the first {per_rank} slots of every rank must contain its {per_rank} home experts.")
    return experts


def worker_layout(num_micro_batches: int, num_ranks: int) -> BatchLayout:
    """Return the layout of a worker's plan: one run of rows per (micro-batch, rank), fixed by the framework."""
    cells = np.indices((num_micro_batches, num_ranks)).reshape(2, -1).astype(np.int32)
    return BatchLayout(
        micro_batch=cells[0],
        dp_rank=cells[1],
        order=np.zeros(cells.shape[1], np.int32),
        num_micro_batches=num_micro_batches,
        num_dp_ranks=num_ranks,
        fixed=True,
    )


def _as_trace(samples: Samples, model: MoeModelSpec) -> RoutingTrace | SequenceCounts:
    if isinstance(samples, RoutingTrace | SequenceCounts):
        return samples
    arrays = [np.asarray(ids) for ids in samples]
    for index, ids in enumerate(arrays):
        require(
            ids.ndim == 3 and ids.shape[1] == model.num_moe_layers and np.issubdtype(ids.dtype, np.integer),
            f"the routes of sample {index} must be integers of shape [tokens, {model.num_moe_layers} MoE layers, "
            f"top-k], got {ids.dtype} {list(ids.shape)}.",
        )
    return RoutingTrace.from_sequences(
        arrays,
        num_experts=model.num_experts,
        moe_layer_ids=model.moe_layer_ids,
        valid=[np.all(ids >= 0, axis=(1, 2)) for ids in arrays],
    )
