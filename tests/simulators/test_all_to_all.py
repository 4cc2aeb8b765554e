"""Counted visits: equal to following every token with `slot_map`, and what independent choices get wrong."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_cases import random_plan
from strategies import HARDWARE, model_spec, seeds, topologies

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.plan import Plan, slot_map
from moe_rl.core.plan_rows import rows_of_plan
from moe_rl.core.reduce import reduce_load
from moe_rl.core.routes import MAX_DRAWN_IDS, RouteSample
from moe_rl.core.topology import ClusterTopology
from moe_rl.core.trace import RoutingTrace
from moe_rl.simulators.all_to_all import count_visits
from moe_rl.simulators.pricing import TrainingStep
from moe_rl.simulators.rows import uniform_rows
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.step import simulate_policies


def load_with_routes(
    trace: RoutingTrace, layout: BatchLayout, topology: ClusterTopology, max_ids: int = MAX_DRAWN_IDS
) -> StepLoad:
    load = reduce_load([trace], layout=layout, topology=topology)
    return replace(load, routes=RouteSample.drawn([trace], layout=layout, topology=topology, max_ids=max_ids))


@st.composite
def traced_steps(draw: st.DrawFn) -> tuple[RoutingTrace, BatchLayout, ClusterTopology, StepLoad, Plan]:
    """A trace with rows without a route, laid out at random over cells, some of them empty, and a random plan."""
    topology = draw(topologies())
    rng = np.random.default_rng(draw(seeds))
    experts, top_k, layers = topology.ep_size * draw(st.integers(1, 3)) + 0, 2, 2
    if experts < 2:
        experts = 2
        topology = ClusterTopology(hardware=HARDWARE, ep_size=1, ranks_per_node=1)
    lengths = [*rng.integers(0, 30, draw(st.integers(0, 6))).tolist(), 9]
    popularity = rng.normal(0.0, 1.0, (layers, experts))
    sequences = [
        np.argsort(-(popularity + rng.gumbel(size=(n, layers, experts))), axis=2)[:, :, :top_k] for n in lengths
    ]
    sequences[-1][0, :] = np.arange(top_k)
    valid = [rng.random(n) < 0.9 for n in lengths]
    valid[-1][0] = True
    trace = RoutingTrace.from_sequences(sequences, num_experts=experts, valid=valid)
    count, micro_batches = len(lengths), 2
    layout = BatchLayout(
        micro_batch=rng.integers(0, micro_batches, count).astype(np.int32),
        dp_rank=rng.integers(0, topology.num_dp_ranks, count).astype(np.int32),
        order=rng.permutation(count).astype(np.int32),
        num_micro_batches=micro_batches,
        num_dp_ranks=topology.num_dp_ranks,
    )
    load = load_with_routes(trace, layout, topology)
    resident = draw(st.booleans())
    return trace, layout, topology, load, random_plan(rng, load, layout, resident=resident)


def tokens_of_source(
    trace: RoutingTrace, layout: BatchLayout, topology: ClusterTopology, micro_batch: int, group: int, source: int
) -> np.ndarray:
    """Rows that one source rank holds, one token at a time."""
    cells: dict[int, list[int]] = {}
    for sequence in np.lexsort((layout.order, layout.micro_batch)):
        if layout.micro_batch[sequence] == micro_batch:
            rows = range(int(trace.cu_seqlens[sequence]), int(trace.cu_seqlens[sequence + 1]))
            cells.setdefault(int(layout.dp_rank[sequence]), []).extend(rows)
    rank = group * topology.ep_size + source
    slices = topology.slices_per_dp_rank
    cell = cells.get(rank // slices, [])
    mine = [row for i, row in enumerate(cell) if i * slices // len(cell) == rank % slices]
    return np.array([row for row in mine if trace.valid[row]], int)


@pytest.mark.lengthy
@settings(max_examples=40)
@given(traced_steps())
def test_counted_visits_are_those_of_every_token(
    step: tuple[RoutingTrace, BatchLayout, ClusterTopology, StepLoad, Plan],
) -> None:
    trace, layout, topology, load, plan = step
    rows = rows_of_plan(plan, load, topology, tile_rows=128.0)
    found = count_visits(rows, plan, load, topology)
    counted, difference = found.rows, found.difference
    assert difference is not None
    assert (difference.tokens, difference.share) == (int(trace.valid.sum()), 1.0)
    node, slots = topology.node_of_rank, plan.placement.slots_per_rank
    for index in np.ndindex(load.pairs.shape[:3]):
        visits = np.zeros(topology.ep_size)
        into, out = np.zeros(topology.num_nodes), np.zeros(topology.num_nodes)
        served = np.zeros(topology.ep_size)
        for source in range(topology.ep_size):
            mine = tokens_of_source(trace, layout, topology, index[1], index[0], source)
            placed = slot_map(
                plan,
                group=index[0],
                micro_batch=index[1],
                layer=index[2],
                source_rank=source,
                routed_experts=trace.routed_experts[mine, index[2]].astype(np.int64),
            )
            np.add.at(served, placed // slots, 1)
            for ranks in placed // slots:
                visits[np.unique(ranks)] += 1
                elsewhere = np.setdiff1d(node[ranks], node[source])
                into[elsewhere] += 1
                out[node[source]] += len(elsewhere)
        assert (counted.rank_visits[index] == visits).all()
        assert counted.nic_ingress[index] == pytest.approx(into / topology.ranks_per_domain)
        assert counted.nic_egress[index] == pytest.approx(out / topology.ranks_per_domain)
        assert (rows.rows[index] == served).all()


@settings(max_examples=20)
@given(traced_steps())
def test_the_lower_bound_holds_for_counted_visits(
    step: tuple[RoutingTrace, BatchLayout, ClusterTopology, StepLoad, Plan],
) -> None:
    trace, layout, topology, load, plan = step
    model = model_spec(num_experts=load.num_experts, num_layers=load.num_layers, top_k=load.top_k)
    step = TrainingStep(
        load=load,
        layout=layout,
        lengths=trace.sequence_lengths,
        model=model,
        topology=topology,
        setting=StepSetting(),
    )
    result = simulate_policies({"random": plan}, step)
    assert result.ideal.step_time_s <= result.policies["random"].step_time_s * (1 + 1e-9)
    assert result.static.visit_difference is not None
    assert result.forced_balance.visit_difference is None


def correlated_step() -> tuple[RoutingTrace, BatchLayout, ClusterTopology]:
    """Every token picks two experts of one rank: half the visits that independent choices suggest."""
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 4, (4000, 1, 1)) * 2
    trace = RoutingTrace.from_sequences([np.concatenate([pairs, pairs + 1], axis=2)], num_experts=8)
    layout = BatchLayout.ep_group(trace.sequence_lengths, token_budget=4000)
    return trace, layout, replace(topology, slices_per_dp_rank=4)


def test_experts_that_meet_on_one_rank_save_visits() -> None:
    trace, layout, topology = correlated_step()
    load = load_with_routes(trace, layout, topology)
    plan = random_plan(np.random.default_rng(0), load, layout, move_homes=False)
    plan = replace(plan, replicas=replace(plan.replicas, source_quota=0 * plan.replicas.source_quota))
    rows = rows_of_plan(plan, load, topology, tile_rows=128.0)
    found = count_visits(rows, plan, load, topology)
    counted, difference = found.rows, found.difference
    assert difference is not None
    assert counted.rank_visits.sum() == trace.num_tokens
    # Independent: 4 ranks x (1 - (1 - 1/4)^2) = 1.75 visits per token.
    assert difference.rank_visits == pytest.approx(0.75, abs=0.05)
    assert counted.nic_ingress.sum() * 2 == pytest.approx(trace.num_tokens / 2, rel=0.05)
    scaled = load.scaled_to(8000)
    again = count_visits(rows_of_plan(plan, scaled, topology, tile_rows=128.0), plan, scaled, topology)
    same = again.difference
    assert same is not None
    assert again.rows.rank_visits == pytest.approx(8 * counted.rank_visits)
    assert again.between_nodes == pytest.approx(8 * found.between_nodes)
    assert same.rank_visits == pytest.approx(difference.rank_visits, abs=1e-3)


def test_forced_balance_beside_counted_visits_draws_distinct_experts() -> None:
    """32 tokens that draw 4 of 8 experts: on average 1 - C(6, 4) / C(8, 4) of them visit each of 4 ranks."""
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    pairs = np.full((1, 1, 1, 4, 8), 4, np.int32)
    load = StepLoad(pairs=pairs, tokens=np.full((1, 1, 4), 8), top_k=4)
    drawn = uniform_rows(load, topology, tile_rows=128.0, distinct=True)
    assert drawn.rank_visits == pytest.approx(np.full((1, 1, 1, 4), 32 * (1 - 15 / 70)))
    # Two nodes of 4 experts: only one of 70 draws misses a node.
    assert drawn.nic_ingress == pytest.approx(np.full((1, 1, 1, 2), 8 * (1 - 1 / 70)))
    free = uniform_rows(load, topology, tile_rows=128.0)
    assert (free.rank_visits < drawn.rank_visits).all()
    certain = uniform_rows(replace(load, pairs=2 * pairs, top_k=8), topology, tile_rows=128.0, distinct=True)
    assert certain.rank_visits == pytest.approx(np.full((1, 1, 1, 4), 32.0))


def test_large_steps_are_estimated_from_some_of_their_tokens() -> None:
    """Every micro-batch visits half as much as independent choices say: a fifth of its tokens show it."""
    trace, _, topology = correlated_step()
    pieces = [trace.routed_experts[i : i + 400].astype(np.int64) for i in range(0, 4000, 400)]
    trace = RoutingTrace.from_sequences(pieces, num_experts=8)
    layout = BatchLayout.ep_group(trace.sequence_lengths, token_budget=400)
    every, some = (load_with_routes(trace, layout, topology, max_ids) for max_ids in (8000, 1600))
    plan = random_plan(np.random.default_rng(0), every, layout)
    rows = rows_of_plan(plan, every, topology, tile_rows=128.0)
    exact, found = (count_visits(rows, plan, load, topology) for load in (every, some))
    assert exact.difference is not None
    assert found.difference is not None
    assert (found.difference.tokens, found.difference.share) == (800, 0.2)
    assert abs(exact.difference.rank_visits) > 0.1
    for name in ("rank_visits", "nic_ingress", "nic_egress"):
        counted, estimated = (getattr(one.rows, name) for one in (exact, found))
        assert estimated.sum() == pytest.approx(counted.sum(), rel=0.05)
        assert (estimated.sum(axis=(0, 2, 3)) > 0).all()
    assert found.between_nodes.sum() == pytest.approx(exact.between_nodes.sum(), rel=0.05)


def test_a_micro_batch_without_a_drawn_token_takes_the_ratio_of_the_others() -> None:
    trace, _, topology = correlated_step()
    halves = [trace.routed_experts[:2000].astype(np.int64), trace.routed_experts[2000:].astype(np.int64)]
    trace = RoutingTrace.from_sequences(halves, num_experts=8)
    layout = BatchLayout.ep_group(trace.sequence_lengths, token_budget=2000)
    load = load_with_routes(trace, layout, topology)
    assert load.routes is not None
    first = slice(0, int(load.routes.cell_start[1]))
    blind = replace(
        load,
        routes=replace(
            load.routes,
            token=load.routes.token[first],
            source=load.routes.source[first],
            cell_start=np.minimum(load.routes.cell_start, first.stop),
            share=0.5,
        ),
    )
    plan = random_plan(np.random.default_rng(0), load, layout)
    rows = rows_of_plan(plan, load, topology, tile_rows=128.0)
    exact, found = (count_visits(rows, plan, one, topology).rows.rank_visits for one in (load, blind))
    assert found[0, 1].sum() == pytest.approx(exact[0, 1].sum(), rel=0.05)


def test_a_load_with_routes_of_another_shape_is_refused() -> None:
    trace, layout, topology = correlated_step()
    ids = np.concatenate([trace.routed_experts] * 2, axis=1).astype(np.int64)
    other = RoutingTrace.from_sequences([ids], num_experts=8)
    routes = RouteSample.drawn([other], layout=layout, topology=topology)
    with pytest.raises(InvalidInputError, match="the routes cover 2 MoE layers, but the expert loads cover 1"):
        replace(load_with_routes(trace, layout, topology), routes=routes)


def test_real_routing_is_near_independent(dev_trace_path: Path) -> None:
    """GPT-OSS-20B at EP16: independent choices understate visits a little, since the K experts of a token differ."""
    with np.load(dev_trace_path) as arrays:
        sequences = [arrays[name] for name in arrays.files if arrays[name].ndim == 3][:60]
    trace = RoutingTrace.from_sequences(sequences, num_experts=32)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=16, slices_per_dp_rank=16)
    layout = BatchLayout.ep_group(trace.sequence_lengths, token_budget=2048)
    load = load_with_routes(trace, layout, topology)
    plan = random_plan(np.random.default_rng(0), load, layout, move_homes=False)
    rows = rows_of_plan(plan, load, topology, tile_rows=128.0)
    difference = count_visits(rows, plan, load, topology).difference
    assert difference is not None
    assert -0.1 < difference.rank_visits < 0.0
    assert -0.15 < difference.nic_rows < 0.0


@pytest.mark.lengthy
@pytest.mark.parametrize("dispatcher", ["deepep", "alltoall"])
@settings(max_examples=30)
@given(case=traced_steps())
def test_copies_between_nodes_are_those_of_every_token(
    dispatcher: str, case: tuple[RoutingTrace, BatchLayout, ClusterTopology, StepLoad, Plan]
) -> None:
    trace, layout, topology, load, plan = case
    node, slots = topology.node_of_rank, plan.placement.slots_per_rank
    sent = np.zeros((topology.num_nodes, topology.num_nodes))
    for group, micro_batch, layer in np.ndindex(load.pairs.shape[:3]):
        for source in range(topology.ep_size):
            mine = tokens_of_source(trace, layout, topology, micro_batch, group, source)
            routes = trace.routed_experts[mine, layer].astype(np.int64)
            placed = slot_map(
                plan,
                group=group,
                micro_batch=micro_batch,
                layer=layer,
                source_rank=source,
                routed_experts=routes,
            )
            for nodes in node[placed // slots]:
                elsewhere = nodes[nodes != node[source]]
                sent[node[source]] += np.bincount(
                    elsewhere if dispatcher == "alltoall" else np.unique(elsewhere), minlength=topology.num_nodes
                )
    step = TrainingStep(
        load=load,
        layout=layout,
        lengths=trace.sequence_lengths,
        model=model_spec(num_experts=load.num_experts, num_layers=load.num_layers, top_k=load.top_k),
        topology=topology,
        setting=StepSetting(dispatcher=dispatcher),
    )
    result = simulate_policies({"plan": plan}, step)
    tokens = int(trace.valid.sum())
    found = result.policies["plan"].prediction
    assert found.inter_node_copies_per_token == pytest.approx(sent.sum() / (tokens * load.num_layers))
    running = int((load.tokens.sum(axis=2) > 0).sum())
    np.testing.assert_allclose(np.array(found.node_to_node_copies), sent / (running * load.num_layers), rtol=1e-9)
    assert result.ideal.prediction.inter_node_copies_per_token <= found.inter_node_copies_per_token + 1e-12
    share = found.breakdown_s["reorder"] / found.step_time_s
    assert found.reorder_share == pytest.approx(share)


@pytest.mark.parametrize(("dispatcher", "expected"), [("deepep", 3 * (1 - 10626 / 35960)), ("alltoall", 3.0)])
def test_forced_balance_sends_what_distinct_draws_send(dispatcher: str, expected: float) -> None:
    """Four of 32 experts on four nodes of 8: C(24, 4) / C(32, 4) of the tokens miss a node."""
    topology = ClusterTopology(hardware=HARDWARE, ep_size=32, ranks_per_node=8)
    rng = np.random.default_rng(0)
    routes = np.argsort(rng.random((640, 1, 32)), axis=2)[:, :, :4]
    trace = RoutingTrace.from_sequences(list(routes.reshape(32, 20, 1, 4)), num_experts=32)
    layout = BatchLayout(
        micro_batch=np.zeros(32, np.int32),
        dp_rank=np.arange(32, dtype=np.int32),
        order=np.zeros(32, np.int32),
        num_micro_batches=1,
        num_dp_ranks=32,
    )
    step = TrainingStep(
        load=load_with_routes(trace, layout, topology),
        layout=layout,
        lengths=trace.sequence_lengths,
        model=model_spec(num_experts=32, num_layers=1, top_k=4),
        topology=topology,
        setting=StepSetting(dispatcher=dispatcher),
    )
    result = simulate_policies({}, step)
    forced = result.forced_balance.prediction
    assert forced.inter_node_copies_per_token == pytest.approx(expected)
    alike = 640 * expected / 12 * (1 - np.eye(4))
    np.testing.assert_allclose(np.array(forced.node_to_node_copies), alike)
