"""Hypothesis strategies for the core types; experts without load, layers and micro-batches without tokens are drawn.

Sizes are small on purpose: every branch of a planner shows at 2 nodes of 2 ranks.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from moe_rl.core.cost import layer_cost_params
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.native import native_core
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.topology import ClusterTopology, HardwareSpec
from moe_rl.core.trace import RoutingTrace
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.objective import OBJECTIVES
from moe_rl.profiling import Measurement

HARDWARE = HardwareSpec(
    name="test",
    ranks_per_node=8,
    gemm_tflops=800.0,
    attention_linear_tflops=600.0,
    attention_forward_tflops=550.0,
    attention_backward_tflops=450.0,
    hbm_gb_per_s=2680.0,
    hbm_gib=80.0,
    nvlink_gb_per_s=320.0,
    nvlink_p2p_gb_per_s=300.0,
    rdma_gb_per_s=43.0,
    intra_node_latency_us=25.0,
    inter_node_latency_us=60.0,
    gemm_fixed_us=40.0,
    layer_fixed_forward_ms=1.0,
    layer_fixed_backward_ms=1.5,
)

STUDY_HARDWARE = replace(HARDWARE, attention_forward_tflops=556.0, attention_backward_tflops=455.0)
"""Constants of the reference study, before any whole run was looked at: no host time, no roll-off of narrow GEMMs."""

seeds = st.integers(0, 2**32 - 1)


def model_spec(*, num_experts: int, num_layers: int, top_k: int, **changes: Any) -> MoeModelSpec:
    """A model of the given MoE shape and small fixed widths; every layer is an MoE layer, but for the changes."""
    values: dict[str, Any] = {
        "name": "test",
        "num_layers": num_layers,
        "moe_layer_ids": tuple(range(num_layers)),
        "num_experts": num_experts,
        "top_k": top_k,
        "hidden_size": 2048,
        "moe_ffn_hidden_size": 768,
        "num_attention_heads": 32,
        "num_query_groups": 4,
        "kv_channels": 128,
        "vocab_size": 1000,
    }
    return MoeModelSpec(**(values | changes))


def measurement(**changes: object) -> Measurement:
    """A measurement of one expert GEMM on one node, but for the changes."""
    values: dict[str, object] = {
        "kind": "expert_gemm",
        "phase": "forward",
        "dispatcher": "deepep",
        "hidden_size": 2048,
        "moe_ffn_hidden_size": 768,
        "num_experts": 128,
        "top_k": 8,
        "ep_size": 8,
        "ranks_per_node": 8,
        "tokens_per_rank": 8192,
        "time_ms": 1.0,
        "group": "small",
    }
    return Measurement(**(values | changes))  # type: ignore[arg-type]


@st.composite
def topologies(
    draw: st.DrawFn, max_nodes: int = 3, max_ranks_per_node: int = 4, max_ep_groups: int = 2
) -> ClusterTopology:
    """EP groups that fill part of a node, one node or several; one slice per DP rank, or the whole group."""
    nodes = draw(st.integers(1, max_nodes))
    ranks_per_node = draw(st.integers(1, max_ranks_per_node))
    ep_size = nodes * ranks_per_node if nodes > 1 else draw(st.integers(1, ranks_per_node))
    groups = draw(st.integers(1, max_ep_groups))
    return ClusterTopology(
        hardware=HARDWARE,
        ep_size=ep_size,
        num_ep_groups=groups,
        slices_per_dp_rank=draw(st.sampled_from([1, ep_size])),
        ranks_per_node=ranks_per_node,
    )


def random_pairs(rng: np.random.Generator, shape: tuple[int, int, int, int, int], *, most: int) -> np.ndarray:
    """Skewed pairs [G, M, L, P, E]: about one expert in six is empty in a layer, one layer in eight is empty,
    one micro-batch in eight is empty, and one layer in eight sends everything to one expert."""
    groups, micro_batches, layers, _, experts = shape
    popularity = np.exp(rng.normal(0.0, 1.5, (groups, micro_batches, layers, 1, experts)))
    popularity[rng.random(popularity.shape) < 1 / 6] = 0.0
    lone = rng.random((groups, micro_batches, layers)) < 1 / 8
    popularity[lone] = 0.0
    popularity[*np.nonzero(lone), 0, rng.integers(0, experts, int(lone.sum()))] = 1.0
    scale = most / np.maximum(popularity.max(axis=-1, keepdims=True), 1e-9)
    pairs = rng.poisson(popularity * scale * rng.random(shape))
    pairs[rng.random((groups, micro_batches, layers)) < 1 / 8] = 0
    pairs[rng.random((groups, micro_batches)) < 1 / 8] = 0
    return pairs.astype(np.int32)


def load_of(pairs: np.ndarray, top_k: int) -> StepLoad:
    """The load of `pairs`; each source rank holds as many tokens as its busiest layer needs."""
    tokens = -(-pairs.sum(axis=4, dtype=np.int64).max(axis=2) // top_k)
    return StepLoad(pairs=pairs, tokens=tokens, top_k=top_k)


@st.composite
def loads(
    draw: st.DrawFn, topology: ClusterTopology | None = None, experts_per_rank: int | None = None, top_k: int = 2
) -> StepLoad:
    """Loads of a few layers and micro-batches for `topology` (drawn when None), with empty experts among them."""
    topology = draw(topologies()) if topology is None else topology
    per_rank = draw(st.integers(1, 4)) if experts_per_rank is None else experts_per_rank
    experts = per_rank * topology.ep_size
    shape = (topology.num_ep_groups, draw(st.integers(1, 3)), draw(st.integers(1, 3)), topology.ep_size, experts)
    pairs = random_pairs(np.random.default_rng(draw(seeds)), shape, most=draw(st.sampled_from([2, 30, 1000])))
    return load_of(pairs, min(top_k, experts))


@st.composite
def placements(
    draw: st.DrawFn, *, num_layers: int, num_experts: int, ep_size: int, spare_slots: int = 0, resident_slots: int = 0
) -> ExpertPlacement:
    """Random homes, E/P on every rank, spare slots empty; in some resident slots random experts of other ranks."""
    rng = np.random.default_rng(draw(seeds))
    contiguous = np.repeat(np.arange(ep_size), num_experts // ep_size)
    home = rng.permuted(np.broadcast_to(contiguous, (num_layers, num_experts)), axis=1)
    residents = np.full((num_layers, ep_size, resident_slots), -1)
    for layer, rank in np.ndindex(num_layers, ep_size):
        foreign = rng.permutation(np.flatnonzero(home[layer] != rank))[:resident_slots]
        residents[layer, rank, : len(foreign)] = np.where(rng.random(len(foreign)) < 0.7, foreign, -1)
    return ExpertPlacement.from_home_rank(home, ep_size=ep_size, spare_slots=spare_slots, resident_experts=residents)


def traced_routes(rng: np.random.Generator, num_tokens: int, num_layers: int, num_experts: int, top_k: int):
    """[T, L, K] distinct ids per row; the last expert is never chosen when K < E."""
    available = num_experts - 1 if top_k < num_experts else num_experts
    return np.argsort(rng.random((num_tokens, num_layers, available)), axis=2)[:, :, :top_k]


@st.composite
def traces(draw: st.DrawFn, max_experts: int = 8, max_sequences: int = 6) -> RoutingTrace:
    """A few short sequences, some of them empty, with an expert that no token chooses and rows without a route."""
    experts = draw(st.integers(3, max_experts))
    top_k = draw(st.integers(1, experts - 1))
    num_layers = draw(st.integers(1, 3))
    lengths = [*draw(st.lists(st.integers(0, 20), max_size=max_sequences - 1)), draw(st.integers(8, 20))]
    rng = np.random.default_rng(draw(seeds))
    sequences = [traced_routes(rng, length, num_layers, experts, top_k) for length in lengths]
    # A layer that names no expert but 0 would be refused as not captured.
    sequences[-1][0] = np.arange(1, 2) if top_k == 1 else np.arange(top_k)
    valid = [rng.random(length) < 0.9 for length in lengths]
    valid[-1][0] = True
    return RoutingTrace.from_sequences(sequences, num_experts=experts, valid=valid)


def layout_for(load: StepLoad, topology: ClusterTopology) -> BatchLayout:
    """One sequence per cell that holds tokens, in order."""
    cells = [
        (micro_batch, rank) for micro_batch in range(load.num_micro_batches) for rank in range(topology.num_dp_ranks)
    ]
    return BatchLayout(
        micro_batch=np.array([cell[0] for cell in cells], np.int32),
        dp_rank=np.array([cell[1] for cell in cells], np.int32),
        order=np.arange(len(cells), dtype=np.int32),
        num_micro_batches=load.num_micro_batches,
        num_dp_ranks=topology.num_dp_ranks,
    )


def problem_of(
    load: StepLoad, topology: ClusterTopology, *, num_expert_groups: int = 1, **options: object
) -> PlanProblem:
    """The planning problem of `load`, with its own loads as history unless `options` says otherwise."""
    model = model_spec(
        num_experts=load.num_experts,
        num_layers=load.num_layers,
        top_k=load.top_k,
        num_expert_groups=num_expert_groups,
    )
    given = {"history": load, "layout": layout_for(load, topology), **options}
    return PlanProblem(load=load, model=model, topology=topology, cost=layer_cost_params(model, topology), **given)


@st.composite
def problems(draw: st.DrawFn, objective: str | None = None) -> PlanProblem:
    """Problems of every small shape: R from 0 to 2, C from 0 to 1, with or without another placement in force."""
    topology = draw(topologies())
    load = draw(loads(topology))
    current = None
    if draw(st.booleans()):
        current = draw(placements(num_layers=load.num_layers, num_experts=load.num_experts, ep_size=load.ep_size))
    return problem_of(
        load,
        topology,
        objective=draw(st.sampled_from(OBJECTIVES.names)) if objective is None else objective,
        replica_slots=draw(st.integers(0, 2)),
        cross_node_slots=draw(st.integers(0, 1)),
        current_placement=current,
        seed=draw(st.integers(0, 3)),
    )


def replicated(arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    """What the C++ core's `replicate` finds, for the arguments of its `Load` and its own in one."""
    core: Any = native_core()
    of_load = ("pairs", "tokens", "routes", "ranks_per_domain")
    load = core.Load(**{name: arguments[name] for name in of_load})
    return core.replicate(load, **{name: value for name, value in arguments.items() if name not in of_load})
