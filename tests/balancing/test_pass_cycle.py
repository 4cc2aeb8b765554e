"""Passes from their source to their metrics, without a framework: ranks are threads, and layers compute by the plan.

`PlannedLayers` stands in for a framework's MoE layers: the rows that it reports are those that the plan makes of the
tokens that came, or the homes alone where it was told to run without copies.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from strategies import model_spec

pytest.importorskip("torch")

import torch
from thread_ranks import GridExchange, GridHub, ThreadRanks

from moe_rl.balancing import home_choice, migrate, rank_packing
from moe_rl.balancing.balanced_run import PassResults, RowGathering, RunLayers
from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.loads import RankRows
from moe_rl.balancing.migrate import ExpertGrid
from moe_rl.balancing.pass_metrics import PassMetrics
from moe_rl.balancing.pass_planner import PassPlanner
from moe_rl.balancing.pass_source import PassSource, RowReader
from moe_rl.balancing.passes import PassCycle
from moe_rl.balancing.running_pass import WaitedTables
from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.balancing.slots import SlotTables
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.metrics import imbalance
from moe_rl.core.native import native_core
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import split_point

pytestmark = pytest.mark.skipif(native_core() is None, reason="the C++ core is not built")
GRID = np.array([[2, 0], [3, 1]])
"""[EP group, EP rank] -> rank of the run."""
LAYERS, EXPERTS, TOP_K, TOKENS = 2, 8, 2, 48
MODEL = model_spec(num_experts=EXPERTS, num_layers=LAYERS, top_k=TOP_K)
Routes = list[np.ndarray]


def routes_of(rank: int, count: int, *, seed: int = 0, skew: float = 2.0, tokens: int = TOKENS) -> Routes:
    """Return [N, L, K] of `count` micro-batches: low experts, all at home on EP rank 0, are liked best."""
    rng = np.random.default_rng((seed, rank))
    taste = rng.gumbel(size=(count, tokens, LAYERS, EXPERTS)) - skew * np.arange(EXPERTS) / EXPERTS * 2
    return list(np.argsort(-taste, axis=3)[..., :TOP_K])


def pairs_of(routes: np.ndarray) -> np.ndarray:
    """Return [L, E] pairs of [N, L, K] routes."""
    return np.stack([np.bincount(routes[:, layer].ravel(), minlength=EXPERTS) for layer in range(LAYERS)])


class Chunk(torch.nn.Module):
    """A model chunk of whose forward only the call matters."""

    def forward(self) -> None:
        return None


class Replayed(RowReader):
    """Counts routes."""

    def __init__(self, routes: Sequence[Any], layers: Sequence[int]) -> None:
        self._routes, self._layers = routes, layers

    def read(self) -> RankRows:
        return RankRows.of(self._routes, model=MODEL, layers=self._layers)


@dataclass
class Told:
    """What layers were told of one pass."""

    planned: Any
    tables: list[Any]
    num_micro_batches: int
    counter: Any = None
    ended: str = ""


def rows_sent(planned: Any, rank: int, pairs: np.ndarray) -> np.ndarray:
    """Return [M, L, P] rows that a rank sends to each rank, of its pairs [M, L, E], by its own slot tables."""
    plan, ranks = planned.local_plan, GRID.shape[1]
    by_rank = (plan.placement.home_rank[:, :, None] == np.arange(ranks)).astype(np.int64)
    rows = np.einsum("mle,ler->mlr", pairs, by_rank)
    if planned.misfit is not None or plan.replicas.num_micro_batches != len(pairs):
        return rows
    tables = SlotTables.of_plan(plan, group=0, source_rank=rank)
    for micro_batch, layer in np.ndindex(pairs.shape[:2]):
        table = tables.table(micro_batch, layer)
        if table is None:
            continue
        assert table.split is not None
        split, actual = table.split.numpy(), pairs[micro_batch, layer, table.expert.numpy()]
        start, stop = split_point(
            split[0:2], split[2:4], planned=split[4], total=split[5], actual=actual, source=rank, num_sources=ranks
        )
        rows[micro_batch, layer] = (stop - start).reshape(ranks, -1).sum(axis=1)
    return rows


@dataclass
class PlannedLayers(RunLayers[Any]):
    """Layers that report what the plan makes of the tokens that came."""

    place: tuple[int, int]
    in_order: bool = False
    told: list[Told] = field(default_factory=list)
    came: dict[int, np.ndarray] = field(default_factory=dict)
    fails_in: str = ""

    device = torch.device("cpu")  # type: ignore[assignment]

    def reader(self, routes: Sequence[Any], layers: Sequence[int]) -> RowReader:
        return Replayed(routes, layers)

    def tables(self, planned: Any, source: PassSource) -> Any:
        return planned.local_plan.replicas.num_micro_batches, source

    def activate(self, planned: Any, tables: Any, later: Sequence[Any], *, num_micro_batches: int) -> None:
        if self.fails_in == "activate":
            raise ZeroDivisionError("no memory")
        everything = [tables, *(part.wait() for part in later)]
        self.told.append(Told(planned, everything, num_micro_batches))
        self.came = {}

    def count_routes(self, counter: Any) -> None:
        self.told[-1].counter = counter

    def run(self, micro_batch: int, routes: np.ndarray) -> None:
        """Run one micro-batch with these routes."""
        self.came[micro_batch] = pairs_of(routes)
        counter = self.told[-1].counter
        for layer in range(LAYERS) if counter is not None else ():
            counter.count_ids(micro_batch, layer, torch.from_numpy(routes[:, layer]))

    def results(self, planned: Any, gathering: Any, *, forward_only: bool) -> PassResults:
        if self.fails_in == "results":
            raise ZeroDivisionError("a bad row")

        def own(micro_batches: range) -> np.ndarray:
            nothing = np.zeros((LAYERS, EXPERTS), np.int64)
            of_each = [self.came.get(index, nothing) for index in micro_batches]
            pairs = np.stack(of_each) if of_each else np.zeros((0, LAYERS, EXPERTS), np.int64)
            return rows_sent(planned, self.place[1], pairs)

        rows = np.sum(gathering.of_all_ranks(own), axis=0)
        return PassResults(
            actual_rows=rows, pushed_bytes=3, returned_bytes=5, micro_batches_in_flight=None if forward_only else 1
        )

    def stop(self, *, forward_only: bool, complete: bool) -> None:
        if self.told:
            self.told[-1].ended = f"{'forward' if forward_only else 'update'} {'whole' if complete else 'given up'}"


class Movable:
    """Experts of one number each, and no optimizer state."""

    layers = range(LAYERS)

    def __init__(self, ep_rank: int) -> None:
        per_rank = EXPERTS // GRID.shape[1]
        experts = range(ep_rank * per_rank, (ep_rank + 1) * per_rank)
        self.weights = [[torch.tensor([float(expert)]) for expert in experts] for _ in self.layers]
        self.waits = False

    def ready(self) -> Any:
        count = len(self.weights[0])
        experts = [
            SimpleNamespace(num_local_experts=count, parameters_of=lambda slot, of_layer=of_layer: [of_layer[slot]])
            for of_layer in self.weights
        ]
        return experts, SimpleNamespace(shards=lambda parameter: [], tensors=lambda parameter: [])

    def follow(self, placement: ExpertPlacement) -> None:
        pass

    def gradients_wait(self) -> bool:
        return self.waits

    def homes(self) -> list[list[int]]:
        return [[int(weight) for weight in of_layer] for of_layer in self.weights]


@dataclass
class Rank:
    """One rank of a run, and what a training loop on it does."""

    rank: int
    cycle: PassCycle[Any]
    layers: PlannedLayers
    chunk: Chunk
    clock: MicroBatchClock
    movable: Movable

    def ran(self, routes: Routes, source: PassSource | None = None, *, forward_only: bool = False) -> PassMetrics:
        """Run a pass in which these routes come."""
        self.cycle.begin_pass(source, forward_only=forward_only)
        return self.end(routes, forward_only=forward_only)

    def end(self, routes: Routes, *, forward_only: bool = False) -> PassMetrics:
        """Run the micro-batches of the pass that has begun, and end it."""
        for micro_batch, of_batch in enumerate(routes):
            with torch.set_grad_enabled(not forward_only):
                self.chunk()
            self.layers.run(micro_batch, of_batch)
        return self.cycle.end_pass()


def on_run(step: Callable[[Rank], Any], *, in_order: bool = False, movable: bool = False, **words: Any) -> list[Any]:
    """Return what `step` returns on every rank of a run with these settings; raise what it raises."""
    ranks, hub = ThreadRanks(GRID.size), GridHub(GRID.shape)  # type: ignore[arg-type]
    config = BalancerConfig(**({"objective": "imbalance", "ranks_per_node": 2, "replica_slots": 2} | words))

    def on_rank(rank: int) -> Any:
        group, ep_rank = np.argwhere(rank == GRID)[0].tolist()
        layers, chunk = PlannedLayers((group, ep_rank), in_order=in_order), Chunk()
        clock, experts = MicroBatchClock(chunk), Movable(ep_rank)
        cycle = PassCycle(
            PassPlanner(GridExchange(hub, (group, ep_rank)), layers=range(LAYERS), model=MODEL),
            layers,
            config=config,
            clocks=[clock],
            groups=ExpertGrid(grid=GRID, grid_group=None, device=torch.device("cpu")),
            movable=experts if movable else "nothing moves here",
        )
        try:
            return step(Rank(rank, cycle, layers, chunk, clock, experts))
        finally:
            cycle.run.thread.shutdown()

    with (
        patch.object(migrate, "gather", ranks.gather),
        patch.object(home_choice, "gathered", ranks.gathered),
        patch.object(rank_packing, "gathered", ranks.gathered),
    ):
        found = ranks.run(on_rank)
    errors = [error for error in found if isinstance(error, BaseException)]
    for error in sorted(errors, key=lambda error: "Barrier" in type(error).__name__):
        raise error
    return found


def by_group(found: list[Any]) -> list[list[Any]]:
    """Return what ranks returned, by EP group and EP rank."""
    return [[found[rank] for rank in of_group] for of_group in GRID.tolist()]


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_replayed_pass_does_what_its_plan_says(forward_only: bool) -> None:
    def step(rank: Rank) -> Any:
        routes = routes_of(rank.rank, 3)
        plan = rank.cycle.begin_pass(PassSource.replayed(routes), forward_only=forward_only)
        metrics = rank.end(routes, forward_only=forward_only)
        told = rank.layers.told[-1]
        assert (metrics.source, metrics.known_share, metrics.misfit) == ("routes", 1.0, None)
        assert (metrics.policy, metrics.residents, metrics.would_be, metrics.memory) == ("moe-rl", 0, None, None)
        assert (metrics.pushed_bytes, metrics.returned_bytes) == (3, 5)
        assert (metrics.reordered_bytes, metrics.reorder_s) == (0, 0.0)
        assert metrics.micro_batches_in_flight == (None if forward_only else 1)
        assert metrics.plan_time_s > 0
        assert metrics.plan_wait_s > 0
        assert metrics.plan_cpu_s > 0
        assert metrics.replicas == told.planned.local_plan.replicas.copies == plan.replicas.copies > 0
        assert told.num_micro_batches == 3
        assert told.counter is None, "nobody named these rows"
        assert told.ended == f"{'forward' if forward_only else 'update'} whole"
        np.testing.assert_array_equal(metrics.actual_rows, metrics.predicted_rows)
        return routes, metrics, plan.replicas.physical_id.tobytes()

    for ranks in by_group(on_run(step)):
        assert len({slots_of_copies for _, _, slots_of_copies in ranks}) == 1
        pairs = sum(np.stack([pairs_of(of_batch) for of_batch in routes]) for routes, _, _ in ranks)
        per_rank = pairs.reshape(3, LAYERS, GRID.shape[1], -1).sum(axis=3)
        for _, metrics, _ in ranks:
            np.testing.assert_array_equal(metrics.static_rows, per_rank)
            np.testing.assert_array_equal(metrics.actual_rows.sum(axis=2), pairs.sum(axis=2))
            assert imbalance(metrics.actual_rows[None]) < imbalance(metrics.static_rows[None]) - 0.1


def test_copies_of_either_ep_group_are_known_to_both() -> None:
    """All groups take part in the exchange of an expert's weights and gradients, if any has a copy of it."""

    def step(rank: Rank) -> Any:
        # The experts of one group are balanced in micro-batch 0, those of the other in micro-batch 1.
        group = rank.layers.place[0]
        even = np.arange(TOKENS * TOP_K).reshape(TOKENS, 1, TOP_K).repeat(LAYERS, axis=1) % EXPERTS
        skewed = np.zeros_like(even) + np.arange(TOP_K)
        routes = [skewed, even, even] if group == 0 else [even, skewed, even]
        rank.cycle.begin_pass(PassSource.replayed(routes))
        planned = rank.layers.told[-1].planned
        rank.end(routes)
        return planned.local_plan.replicas.copies, planned.replicated_ML

    found = on_run(step)
    for copies, replicated_ML in found:
        assert copies > 0
        assert replicated_ML.tolist() == [[True] * LAYERS, [True] * LAYERS, [False] * LAYERS]


def test_loads_of_all_ranks_and_groups_are_the_same_on_all() -> None:
    def step(rank: Rank) -> Any:
        return rank.cycle.load_of(routes_of(rank.rank, 2, tokens=TOKENS - rank.rank))

    for load in on_run(step):
        assert load.pairs.shape == (*GRID.shape[:1], 2, LAYERS, GRID.shape[1], EXPERTS)
        for (group, ep_rank), rank in np.ndenumerate(GRID):
            expected = [pairs_of(of_batch) for of_batch in routes_of(rank, 2, tokens=TOKENS - rank)]
            np.testing.assert_array_equal(load.pairs[group, :, :, ep_rank], expected)
            assert load.tokens[group, :, ep_rank].tolist() == [TOKENS - rank] * 2


def test_prepared_passes_run_in_their_order_and_can_be_dropped() -> None:
    def step(rank: Rank) -> None:
        passes = [routes_of(rank.rank, count, seed=count) for count in (1, 2, 3)]
        for routes in passes:
            rank.cycle.prepare(PassSource.replayed(routes))
        with pytest.raises(InvalidInputError, match=r"the prepared pass must begin first"):
            rank.cycle.begin_pass(PassSource.unknown(1))
        for routes in passes[:2]:
            metrics = rank.ran(routes)
            np.testing.assert_array_equal(metrics.actual_rows, metrics.predicted_rows)
        rank.cycle.drop_prepared()
        with pytest.raises(InvalidInputError, match=r"call begin_pass\(\) with a PassSource"):
            rank.cycle.begin_pass()
        assert len(rank.ran(passes[1], PassSource.replayed(passes[1])).actual_rows) == 2

    on_run(step)


def test_what_cannot_be_done_inside_a_pass_or_without_one_is_refused() -> None:
    def step(rank: Rank) -> None:
        cycle, routes = rank.cycle, routes_of(rank.rank, 1)
        with pytest.raises(InvalidInputError, match="no pass has begun"):
            cycle.end_pass()
        cycle.give_up()
        cycle.begin_pass(PassSource.replayed(routes))
        for call in (
            lambda: cycle.begin_pass(PassSource.replayed(routes)),
            lambda: cycle.packed([[0]], [np.arange(3)], token_budget=9),
            lambda: cycle.reorder(cycle.own_placement),
            cycle.canonical,
        ):
            with pytest.raises(InvalidInputError, match="the current pass has not ended"):
                call()
        rank.end(routes)
        with cycle.canonical():
            pass
        assert cycle.reorder(cycle.own_placement) == 0

    on_run(step, movable=True)


def test_experts_that_cannot_move_say_why() -> None:
    def step(rank: Rank) -> None:
        for call in (rank.cycle.canonical, lambda: rank.cycle.reorder(rank.cycle.own_placement)):
            with pytest.raises(
                InvalidInputError, match="experts cannot move to other ranks in this run: nothing moves here"
            ):
                call()

    on_run(step)


@pytest.mark.parametrize("in_order", [False, True])
def test_passes_of_which_nothing_is_known_are_planned_from_the_one_before(in_order: bool) -> None:
    def step(rank: Rank) -> None:
        routes = routes_of(rank.rank, 3)
        first = rank.ran(routes, PassSource.unknown(3))
        assert (first.source, first.replicas) == ("nothing", 0)
        assert first.predicted_rows is None or not first.predicted_rows.any()
        assert rank.layers.told[-1].counter is not None
        second = rank.ran(routes, PassSource.unknown(3))
        assert second.source == "history"
        assert second.replicas > 0
        assert second.predicted_rows is not None
        assert len(second.predicted_rows) == 3
        parts = [count for count, _ in rank.layers.told[-1].tables]
        assert parts == ([1, 2] if in_order else [3])
        assert rank.layers.told[-1].num_micro_batches == 3
        # Every micro-batch is taken to be like their mean.
        mean = np.mean([pairs_of(of_batch) for of_batch in routes], axis=0)
        assert rank.layers.told[-1].planned.counted is not None
        np.testing.assert_allclose(rank.layers.told[-1].planned.counted.pairs, [mean] * (1 if in_order else 3), atol=1)
        short = rank.ran(routes[:1], PassSource.unknown(1))
        assert [count for count, _ in rank.layers.told[-1].tables] == [1]
        assert len(short.actual_rows) == 1

    on_run(step, in_order=in_order)


def sequences_of(rank: int, count: int, seed: int = 0) -> list[np.ndarray]:
    """Return the token ids of `count` sequences."""
    rng = np.random.default_rng((seed, rank, 7))
    return [rng.integers(1000, size=TOKENS) for _ in range(count)]


def test_an_update_is_planned_from_the_log_prob_pass_over_its_sequences() -> None:
    def step(rank: Rank) -> None:
        routes, tokens = routes_of(rank.rank, 4), sequences_of(rank.rank, 4)
        rows = [SequenceRows.of_tokens([sequence]) for sequence in tokens]
        log_probs = rank.ran(routes, PassSource.expected(rows), forward_only=True)
        assert log_probs.source == "nothing"
        order = [2, 0, 3, 1]
        update = rank.ran([routes[index] for index in order], PassSource.expected([rows[index] for index in order]))
        assert (update.source, update.known_share) == ("log-probs", 1.0)
        np.testing.assert_array_equal(update.actual_rows, update.predicted_rows)
        others = routes_of(rank.rank, 2, seed=5)
        strange = rank.ran(
            others, PassSource.expected([SequenceRows.of_tokens([ids]) for ids in sequences_of(rank.rank, 2, seed=5)])
        )
        assert (strange.source, strange.known_share) == ("history", 0.0)

    on_run(step)


def test_the_drift_of_routers_is_measured_over_all_ranks_of_all_groups() -> None:
    def step(rank: Rank) -> Any:
        routes, tokens = routes_of(rank.rank, 2), sequences_of(rank.rank, 2)
        changed = routes_of(rank.rank, 2, seed=5, skew=4.0)
        source = PassSource.expected([SequenceRows.of_tokens([sequence]) for sequence in tokens])
        rank.ran(routes, source, forward_only=True)
        rank.ran(changed, source)
        rank.cycle.run.thread.submit(lambda: None).result()  # what is recorded behind a pass is there
        pairs = [sum(pairs_of(of_batch) for of_batch in each) for each in (changed, routes)]
        return np.array(pairs), rank.cycle.routes.forecast._rollout.drift.factor_LE

    found = on_run(step)
    actual, predicted = sum(pairs for pairs, _ in found)
    for _, factor in found:
        np.testing.assert_allclose(factor, (actual + 1) / (predicted + 1))


def test_replayed_routes_with_gaps_are_filled_by_the_log_prob_pass() -> None:
    def step(rank: Rank) -> None:
        routes, tokens = routes_of(rank.rank, 2), sequences_of(rank.rank, 2)
        rows = [SequenceRows.of_tokens([sequence]) for sequence in tokens]
        rank.ran(routes, PassSource.expected(rows), forward_only=True)
        gaps = [of_batch.copy() for of_batch in routes]
        for of_batch in gaps:
            of_batch[::2] = -1
        assert rank.ran(routes, PassSource.replayed(gaps, rows)).source == "log-probs"
        assert rank.ran(routes, PassSource.replayed(routes, rows)).source == "routes"
        assert rank.ran(routes, PassSource.replayed(gaps)).source == "routes"
        half = rank.ran(routes, PassSource.replayed(gaps, rows), forward_only=True)
        assert half.source == "routes"
        assert half.known_share == 0.5

    on_run(step)


@pytest.mark.parametrize("where", ["activate", "results", "loop"])
def test_a_pass_that_raises_is_given_up_and_the_next_one_is_as_ever(where: str) -> None:
    def step(rank: Rank) -> None:
        routes = routes_of(rank.rank, 2)
        rank.ran(routes, PassSource.replayed(routes))
        if where == "loop":
            rank.cycle.begin_pass(PassSource.replayed(routes))
            rank.cycle.give_up()
            rank.cycle.give_up()
        else:
            rank.layers.fails_in = where
            with pytest.raises(ZeroDivisionError):
                rank.ran(routes, PassSource.replayed(routes))
            rank.layers.fails_in = ""
        assert rank.layers.told[-1].ended == "update given up"
        metrics = rank.ran(routes, PassSource.replayed(routes))
        np.testing.assert_array_equal(metrics.actual_rows, metrics.predicted_rows)
        assert rank.layers.told[-1].ended == "update whole"

    on_run(step)


@pytest.mark.parametrize("ran", [1, 2, 4])
def test_metrics_and_memories_are_of_the_micro_batches_that_ran(ran: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    def step(rank: Rank) -> None:
        # Each micro-batch has its own number of tokens, so that a mean tells of which ones it is.
        routes = [routes_of(rank.rank, 1, seed=index, tokens=8 * (index + 1))[0] for index in range(4)]
        metrics = rank.ran(routes[:ran], PassSource.unknown(3))
        assert len(metrics.actual_rows) == ran
        total = [16 * (index + 1) * GRID.shape[1] for index in range(ran)]
        assert metrics.actual_rows.sum(axis=2).tolist() == [[count] * LAYERS for count in total]
        rank.cycle.begin_pass(PassSource.unknown(2))
        planned = rank.layers.told[-1].planned
        assert planned.counted is not None
        counted = min(ran, 3)  # what came beyond those announced has no counter
        mean = np.mean([pairs_of(of_batch) for of_batch in routes[:counted]], axis=0)
        np.testing.assert_allclose(planned.counted.pairs[0], mean, atol=1)
        rank.end(routes[:2])

    on_run(step)
    said = [record.message for record in caplog.records if "was planned for 3 micro-batches" in record.message]
    assert len(said) == 1
    assert f"but ran {ran}, " in said[0]


@pytest.mark.parametrize(("begun", "exchanges"), [((2, 1), 1), ((2, 2), 1), ((3, 2), 2), ((0, 0), 1)])
def test_micro_batches_that_were_not_announced_take_another_exchange(begun: tuple[int, int], exchanges: int) -> None:
    """Two ranks whose pass was planned for 2 micro-batches; the other rank says what this one says, plus 10."""
    messages: list[int] = []

    def gather(own: np.ndarray) -> list[np.ndarray]:
        messages.append(own.size)
        other = own + 10
        if len(messages) == 1:
            other[-1] = begun[1]
        return [own, other]

    run: Any = SimpleNamespace(gather=gather)
    clocks: Any = [SimpleNamespace(micro_batches=count) for count in (0, begun[0])]
    gathering: RowGathering[Any] = RowGathering(run, clocks, 2)
    found = gathering.of_all_ranks(lambda part: np.array([[index, index + 5] for index in part]))
    ran = max(begun) or 2
    assert [of_rank.tolist() for of_rank in found] == [
        [[index + more, index + 5 + more] for index in range(ran)] for more in (0, 10)
    ]
    assert len(messages) == exchanges


def test_a_forward_beside_the_pass_is_not_of_it() -> None:
    def step(rank: Rank) -> None:
        routes = routes_of(rank.rank, 2)
        rank.cycle.begin_pass(PassSource.replayed(routes))
        with torch.no_grad():
            rank.chunk()
        assert rank.clock.micro_batches == 0
        assert len(rank.end(routes).actual_rows) == 2
        rank.cycle.begin_pass(PassSource.replayed(routes), forward_only=True)
        assert rank.clock.micro_batches == 0, "every pass starts from 0"
        rank.end(routes, forward_only=True)
        assert rank.clock.micro_batches == 2

    on_run(step)


def test_experts_move_to_where_updates_want_them_and_results_say_what_it_cost() -> None:
    def step(rank: Rank) -> Any:
        routes = routes_of(rank.rank, 2, skew=4.0)
        own = rank.movable.homes()
        assert not rank.cycle.searches_homes
        before = rank.ran(routes, PassSource.unknown(2))
        assert before.reordered_bytes == 0
        assert rank.cycle.searches_homes
        after = rank.ran(routes, PassSource.unknown(2))
        placement = rank.cycle.placement
        experts = [np.flatnonzero(home == rank.layers.place[1]).tolist() for home in placement.home_rank]
        assert [sorted(of_layer) for of_layer in rank.movable.homes()] == experts
        assert after.reorder_s > 0
        assert any("homes" in note or "moves" in note for note in after.notes) or after.notes == ()
        changes = imbalance(after.actual_rows[None]), imbalance(before.actual_rows[None])
        assert changes[0] < changes[1] - 0.1
        with rank.cycle.canonical():
            assert rank.movable.homes() == own
        rank.cycle.begin_pass(PassSource.unknown(2), forward_only=True)
        assert rank.cycle.placement is placement, "before an update alone"
        forward = rank.end(routes, forward_only=True)
        assert (forward.reordered_bytes, forward.reorder_s) == (0, 0.0)
        return placement.home_rank, after.reordered_bytes

    found = on_run(step, in_order=True, movable=True, reorders=True, replica_slots=0)
    for home_rank, _ in found:
        np.testing.assert_array_equal(home_rank, found[0][0])
    own = ExpertPlacement.contiguous(num_layers=LAYERS, num_experts=EXPERTS, ep_size=GRID.shape[1]).home_rank
    assert (found[0][0] != own).any()
    assert all(received > 0 for _, received in found)


@pytest.mark.parametrize("update", ["begun", "packed", "prepared"])
def test_homes_are_the_rollouts_though_a_validation_pass_came_behind_it(update: str) -> None:
    """The validation set likes the experts that the rollout does not; an update or its packing settles whose it is."""

    def homes(*, validates: bool) -> np.ndarray:
        def step(rank: Rank) -> Any:
            def log_probs(routes: Routes, tokens: list[np.ndarray]) -> PassSource:
                source = PassSource.expected([SequenceRows.of_tokens([sequence]) for sequence in tokens])
                rank.ran(routes, source, forward_only=True)
                return source

            routes, tokens = routes_of(rank.rank, 2, skew=4.0), sequences_of(rank.rank, 2)
            source = log_probs(routes, tokens)
            if validates:
                others = [EXPERTS - 1 - of_batch for of_batch in routes_of(rank.rank, 2, seed=5, skew=4.0)]
                log_probs(others, sequences_of(rank.rank, 2, seed=5))
            if update == "packed":
                rank.cycle.packed([[0], [1]], tokens, token_budget=TOKENS)
            elif update == "prepared":
                rank.cycle.prepare(source)
                assert rank.ran(routes).misfit is None
            else:
                rank.ran(routes, source)
            return rank.cycle.placement.home_rank

        found: np.ndarray = on_run(step, movable=True, reorders=True, replica_slots=0)[0]
        return found

    own = ExpertPlacement.contiguous(num_layers=LAYERS, num_experts=EXPERTS, ep_size=GRID.shape[1]).home_rank
    rollouts = homes(validates=False)
    assert (rollouts != own).any(), "nothing moves: the test is blind"
    np.testing.assert_array_equal(homes(validates=True), rollouts)


def test_waiting_for_the_tables_of_later_micro_batches_counts_as_waiting_for_the_plan() -> None:
    part: Future[Any] = Future()
    running: Any = SimpleNamespace(plan_wait_s=1.0)
    said: list[Any] = []
    tables: WaitedTables[str] = WaitedTables(
        running=running,
        part=part,
        notices=SimpleNamespace(say_memory=lambda memory, *, ep_rank: said.append((memory, ep_rank))),  # type: ignore[arg-type]
        ep_rank=3,
    )
    timer = threading.Timer(
        0.05, part.set_result, [SimpleNamespace(tables="tables", planned=SimpleNamespace(memory="memory"))]
    )
    timer.start()
    assert tables.wait() == "tables"
    assert said == [("memory", 3)]
    assert running.plan_wait_s > 1.0, "added to what the first part took"


def test_a_pass_that_was_prepared_for_other_homes_is_prepared_again() -> None:
    def step(rank: Rank) -> None:
        routes = routes_of(rank.rank, 2, skew=4.0)
        rank.ran(routes, PassSource.unknown(2))
        rank.cycle.prepare(PassSource.unknown(2))
        rank.cycle.prepare(PassSource.unknown(2), forward_only=True)
        rank.movable.waits = rank.rank == 1
        metrics = rank.ran(routes)
        assert metrics.misfit is None, "it runs where the experts are, gradients waiting"
        np.testing.assert_array_equal(rank.cycle.placement.home_rank, rank.cycle.own_placement.home_rank)
        rank.movable.waits = False
        assert rank.ran(routes, forward_only=True).misfit is None
        assert rank.ran(routes, PassSource.unknown(2)).misfit is None
        assert (rank.cycle.placement.home_rank != rank.cycle.own_placement.home_rank).any()

    on_run(step, movable=True, reorders=True, replica_slots=0)


def test_a_pass_that_was_prepared_before_a_reorder_by_hand_runs_without_copies() -> None:
    target = ExpertPlacement.from_home_rank(
        np.tile(np.arange(EXPERTS) % GRID.shape[1], (LAYERS, 1)), ep_size=GRID.shape[1]
    )

    def step(rank: Rank) -> None:
        routes = routes_of(rank.rank, 2)
        rank.cycle.prepare(PassSource.replayed(routes))
        rank.cycle.run.finish_planning()
        rank.cycle.reorder(target)
        metrics = rank.ran(routes)
        assert metrics.misfit is not None
        assert (metrics.misfit.kind, metrics.replicas, metrics.predicted_rows) == ("placement", 0, None)
        assert metrics.as_dict()["moe_rl/fallback"] == 1.0
        metrics = rank.ran(routes, PassSource.replayed(routes))
        assert metrics.misfit is None
        np.testing.assert_array_equal(metrics.actual_rows, metrics.predicted_rows)

    on_run(step, movable=True)


@pytest.mark.parametrize("observe", [False, True])
def test_metrics_count_the_copies_that_stay_but_none_where_the_run_is_observed(observe: bool) -> None:
    """Expert 0, at home on EP rank 0, has a copy that stays on EP rank 1 in both layers."""

    def step(rank: Rank) -> None:
        routes = routes_of(rank.rank, 1)
        assert rank.ran(routes, PassSource.replayed(routes)).residents == 0
        own = rank.cycle.own_placement
        slots = own.physical_to_logical_map.copy().reshape(LAYERS, GRID.shape[1], -1)
        slots[:, 1, EXPERTS // GRID.shape[1]] = 0
        rank.cycle.reorder(replace(own, physical_to_logical_map=slots.reshape(LAYERS, -1)))
        assert (rank.cycle.placement.resident_experts >= 0).sum() == LAYERS
        assert rank.ran(routes, PassSource.replayed(routes)).residents == (0 if observe else LAYERS)

    on_run(step, movable=True, resident_slots=1, observe=observe)


def test_a_plan_that_was_made_before_is_followed_with_its_rows() -> None:
    def step(rank: Rank) -> None:
        routes = routes_of(rank.rank, 2)
        plan = rank.cycle.plan(routes)
        metrics = rank.ran(routes, PassSource.given(plan))
        assert metrics.misfit is None
        assert metrics.replicas == plan.replicas.copies > 0
        np.testing.assert_array_equal(metrics.actual_rows, metrics.predicted_rows)
        again = rank.ran(routes, PassSource.given(plan, routes))
        np.testing.assert_array_equal(again.predicted_rows, metrics.predicted_rows)
        other = routes_of(rank.rank, 3)
        misfit = rank.ran(other, PassSource.given(plan, other)).misfit
        assert misfit is not None
        assert misfit.kind == "micro-batches"
        another = rank.cycle.plan(routes_of(rank.rank, 2, seed=3))
        misfit = rank.ran(routes, PassSource.given(plan if rank.rank else another)).misfit
        assert misfit is not None
        assert misfit.kind == "ranks"

    on_run(step)


def test_a_run_that_is_observed_changes_nothing_and_says_what_would_be() -> None:
    def step(rank: Rank) -> None:
        routes = routes_of(rank.rank, 3, skew=4.0)
        own = rank.movable.homes()
        for number in range(3):
            metrics = rank.ran(routes, PassSource.unknown(3))
            assert metrics.misfit is None
            assert (metrics.replicas, metrics.residents) == (0, 0)
            assert rank.layers.told[-1].planned.misfit is not None, "layers run without copies"
            assert metrics.would_be is not None
            np.testing.assert_array_equal(metrics.would_be.rows.sum(axis=2), metrics.actual_rows.sum(axis=2))
            if number == 2:
                assert imbalance(metrics.would_be.rows[None]) < imbalance(metrics.actual_rows[None]) - 0.1
        assert rank.movable.homes() == own
        replayed = rank.ran(routes, PassSource.replayed(routes), forward_only=True)
        assert replayed.would_be is not None
        assert imbalance(replayed.would_be.rows[None]) < imbalance(replayed.actual_rows[None]) - 0.1
        short = rank.ran(routes[:2], PassSource.replayed(routes))
        assert short.would_be is None, "the plan was of 3 micro-batches"
        plan = rank.cycle.plan(routes)
        given = rank.ran(routes, PassSource.given(plan, routes), forward_only=True)
        assert given.would_be is not None
        assert imbalance(given.would_be.rows[None]) < imbalance(given.actual_rows[None]) - 0.1
        batches, tokens = [[0, 1]], [np.arange(5), np.arange(7)]
        assert rank.cycle.packed(batches, tokens, token_budget=100) == batches

    on_run(step, movable=True, reorders=True, observe=True)


def test_plans_by_hand_start_from_where_the_experts_are() -> None:
    target = ExpertPlacement.from_home_rank(
        np.tile(np.arange(EXPERTS) % GRID.shape[1], (LAYERS, 1)), ep_size=GRID.shape[1]
    )

    def step(rank: Rank) -> None:
        routes = routes_of(rank.rank, 2, skew=4.0)
        rank.cycle.reorder(target)
        stay, move = rank.cycle.plan(routes), rank.cycle.plan_reorder(routes)
        np.testing.assert_array_equal(stay.placement.home_rank, target.home_rank)
        assert (move.placement.home_rank != target.home_rank).any()
        moved = move.migration.apply(rank.cycle.placement)
        np.testing.assert_array_equal(moved.physical_to_logical_map, move.placement.physical_to_logical_map)
        assert rank.ran(routes, PassSource.given(stay)).misfit is None
        rank.cycle.reorder(move)
        np.testing.assert_array_equal(rank.cycle.placement.home_rank, move.placement.home_rank)

    on_run(step, movable=True, replica_slots=0)


def test_what_a_reorder_cost_is_said_of_the_update_behind_it_alone() -> None:
    """Also if that is given up; and of what updates are planned is said of updates."""

    def step(rank: Rank) -> None:
        said: list[str] = []
        rank.cycle._notices.say_source = said.append  # type: ignore[method-assign, assignment]
        routes = routes_of(rank.rank, 2, skew=4.0)
        rank.ran(routes, PassSource.unknown(2))
        rank.cycle.begin_pass(PassSource.unknown(2))
        assert rank.cycle._home_choice.moves.received_bytes > 0
        rank.cycle.give_up()
        metrics = rank.ran(routes, PassSource.unknown(2))
        assert (metrics.reordered_bytes, metrics.reorder_s) == (0, 0.0)
        assert said == ["nothing", "history"]
        rank.ran(routes, PassSource.replayed(routes), forward_only=True)
        assert said == ["nothing", "history"]

    on_run(step, movable=True, reorders=True, replica_slots=0)


def test_memory_is_forecast_for_updates_and_says_what_would_fit() -> None:
    def step(rank: Rank) -> None:
        asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

        def memory(rows: np.ndarray, tokens: np.ndarray, placement: ExpertPlacement) -> Any:
            asked.append((rows.shape, tokens.shape))
            assert placement is rank.cycle.placement
            return SimpleNamespace(
                peak_bytes=int(rows.max()),
                fits=True,
                fullest_rank=0,
                largest_micro_batch=int(tokens.max()) + len(asked),
            )

        rank.cycle.run.memory = memory
        routes = routes_of(rank.rank, 2)
        assert rank.ran(routes, PassSource.replayed(routes), forward_only=True).memory is None
        fitting = rank.cycle.fitting_tokens
        metrics = rank.ran(routes, PassSource.replayed(routes))
        assert metrics.memory is not None
        assert metrics.predicted_rows is not None
        assert metrics.memory.peak_bytes == metrics.predicted_rows.max()
        assert rank.cycle.fitting_tokens == TOKENS + len(asked)
        assert rank.cycle.fitting_tokens != fitting
        fitting = rank.cycle.fitting_tokens
        rank.ran(routes[:1], PassSource.replayed(routes))
        assert rank.cycle.fitting_tokens == fitting, "of a pass that is not like the last one nothing is learned"
        rank.ran(routes, PassSource.unknown(2))
        foretold = rank.ran(routes, PassSource.unknown(2))
        assert foretold.source == "history"
        assert foretold.memory is not None, "without a bound of the rows it is that of the expected ones"
        assert foretold.predicted_rows is not None
        assert foretold.memory.peak_bytes == foretold.predicted_rows.max()
        shape = (1, 2, LAYERS, GRID.shape[1])
        assert set(asked) == {(shape, (1, 2, GRID.shape[1]))}

    on_run(step)


def test_sequences_are_packed_within_the_budget_and_stay_where_nothing_is_known() -> None:
    def step(rank: Rank) -> None:
        tokens = sequences_of(rank.rank, 6)
        routes = routes_of(rank.rank, 6, skew=4.0)
        batches = [[0, 1, 2], [3, 4, 5]]
        budget = 4 * TOKENS
        assert rank.cycle.packed(batches, tokens, token_budget=budget) == batches, "nothing is known of them"
        for known in (routes, None):
            if known is None:
                rows = [SequenceRows.of_tokens([sequence]) for sequence in tokens]
                rank.ran(routes, PassSource.expected(rows), forward_only=True)
            packed = rank.cycle.packed(batches, tokens, token_budget=budget, routes=known)
            assert sorted(index for batch in packed for index in batch) == list(range(6))
            assert len(packed) == 2
            assert all(0 < len(batch) <= 4 for batch in packed)
        with pytest.raises(InvalidInputError, match="ranks must pack with the same token_budget"):
            rank.cycle.packed(batches, tokens, token_budget=budget + rank.rank, routes=routes)

    on_run(step, replica_slots=0)


def test_buffers_of_one_size_need_layers_that_have_them() -> None:
    def step(rank: Rank) -> None:
        routes = routes_of(rank.rank, 1)
        with pytest.raises(InvalidInputError, match="static_rows needs"):
            rank.cycle.begin_pass(PassSource.replayed(routes))

    on_run(step, experts="grouped", static_rows=True)
