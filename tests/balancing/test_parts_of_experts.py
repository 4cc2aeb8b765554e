"""Under expert tensor parallelism, ranks with parts of the same experts plan as one: here two parts of one EP rank."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from strategies import model_spec

from benchmarks.in_memory_exchange import Hub, InMemory
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.loads import RankRows
from moe_rl.balancing.pass_planner import PassPlanner
from moe_rl.balancing.pass_request import PassRequest, PlannedPass
from moe_rl.balancing.pass_source import CountedRows, RowReader
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.load import StepLoad
from moe_rl.core.placement import ExpertPlacement

MODEL = model_spec(num_experts=4, num_layers=2, top_k=2)
CONFIG = BalancerConfig(policy="moe-rl", objective="imbalance")
PLACEMENT = ExpertPlacement.contiguous(num_layers=2, num_experts=4, ep_size=1, spare_slots=CONFIG.slots.spare)


class Part(InMemory):
    """The exchange of one part with the other: threads; the EP group has this rank alone."""

    rank, size = 0, 1  # type: ignore[assignment]
    part = property(lambda self: self.place)

    def gather(self, message: Any) -> list[Any]:
        return [message]

    def gather_parts(self, message: Any) -> list[Any]:
        return InMemory.gather(self, message)

    def scatter(self, parts: Sequence[np.ndarray], *, shapes: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


class Broken(RowReader):
    """A reader whose routes cannot be read."""

    def read(self) -> RankRows:
        raise InvalidInputError("no routes here.")


def on_both(step: Callable[[Part], Any]) -> list[Any]:
    """Return what `step` returns or raises on both parts."""
    hub = Hub(2)

    def on_part(part: int) -> Any:
        try:
            return step(Part(hub, part))
        except InvalidInputError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(on_part, range(2)))


def planner_of(exchange: Part) -> PassPlanner:
    return PassPlanner(exchange, layers=[0, 1], model=MODEL)


def routes_of(part: int, num_micro_batches: int = 2) -> list[np.ndarray]:
    """Part 0 has 3 tokens of experts 0 and 1 in every micro-batch, part 1 has 2 of experts 2 and 3."""
    return [np.tile([2 * part, 2 * part + 1], (3 - part, 2, 1)) for _ in range(num_micro_batches)]


def reader_of(part: int, num_micro_batches: int = 2) -> CountedRows:
    return CountedRows(RankRows.of(routes_of(part, num_micro_batches), model=MODEL, layers=[0, 1]))


def test_the_rows_of_both_parts_are_one_ranks_load_and_tokens_are_drawn_from_both() -> None:
    def load(exchange: Part) -> StepLoad:
        return planner_of(exchange).load_of(reader_of(exchange.part))

    for found in on_both(load):
        assert found.pairs[0, :, :, 0].tolist() == [[[3, 3, 2, 2]] * 2] * 2
        assert found.tokens.tolist() == [[[5], [5]]]
        assert found.routes is not None
        assert found.routes.routes.tolist() == [([[0, 1]] * 3 + [[2, 3]] * 2) * 2] * 2


def test_both_parts_follow_one_plan_and_keep_what_they_counted() -> None:
    def planned(exchange: Part) -> PlannedPass:
        return planner_of(exchange).plan_pass(PassRequest(config=CONFIG, placement=PLACEMENT), reader_of(exchange.part))

    for part, found in enumerate(on_both(planned)):
        assert found.predicted_rows.tolist() == [[[10], [10]]] * 2
        counts = [3, 3, 0, 0] if part == 0 else [0, 0, 2, 2]
        assert found.counted.pairs.tolist() == [[counts] * 2] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_what_fails_on_one_part_fails_on_both(failing: int) -> None:
    def planned(exchange: Part) -> PlannedPass:
        reader = Broken() if exchange.part == failing else reader_of(exchange.part)
        return planner_of(exchange).plan_pass(PassRequest(config=CONFIG, placement=PLACEMENT), reader)

    found = on_both(planned)
    assert found[failing] == "no routes here."
    assert found[1 - failing] == "another rank of the expert tensor-parallel group failed: no routes here."


@pytest.mark.parametrize(
    ("counts", "forward_only", "sentence"),
    [
        ((2, 2), (True, False), "all ranks of an expert tensor-parallel group must request the same plan."),
        ((2, 1), (True, True), "all ranks must have the same number of micro-batches with routes, but they have 1, 2."),
    ],
)
def test_parts_that_ask_for_different_things_are_refused(
    counts: tuple[int, int], forward_only: tuple[bool, bool], sentence: str
) -> None:
    def planned(exchange: Part) -> PlannedPass:
        request = PassRequest(config=CONFIG, placement=PLACEMENT, forward_only=forward_only[exchange.part])
        return planner_of(exchange).plan_pass(request, reader_of(exchange.part, counts[exchange.part]))

    assert on_both(planned) == [sentence] * 2


def test_without_rows_there_is_a_plan_to_follow() -> None:
    def given(exchange: Part) -> PlannedPass:
        planner = planner_of(exchange)
        request = PassRequest(config=CONFIG, placement=PLACEMENT, whole_plan=True)
        plan = planner.plan_pass(request, reader_of(exchange.part)).plan
        return planner.plan_pass(PassRequest(config=CONFIG, placement=PLACEMENT, plan=plan), None)

    for found in on_both(given):
        assert found.misfit is None
        assert (found.counted, found.predicted_rows) == (None, None)
