"""What ranks must have agreed on before a pass or a reorder: where homes are, who is resident, how counts travel."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from strategies import model_spec

from benchmarks.in_memory_exchange import InMemory, on_all_ranks
from moe_rl.balancing import pass_planner
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.homes import ExpertHomes
from moe_rl.balancing.load_exchange import RankNotice, first_misfit
from moe_rl.balancing.loads import RankRows
from moe_rl.balancing.pass_metrics import Misfit
from moe_rl.balancing.pass_planner import PassPlanner
from moe_rl.balancing.pass_request import PassRequest, PlannedPass, moved_since
from moe_rl.balancing.pass_source import CountedRows
from moe_rl.balancing.plan_assembly import PolicyReport, merge_reports
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.layout import BatchLayout
from moe_rl.core.placement import ExpertPlacement
from moe_rl.planner.base import PLACEMENT

MODEL = model_spec(num_experts=4, num_layers=2, top_k=2)
CONFIG = BalancerConfig(policy="moe-rl", objective="imbalance", resident_slots=1)


def placement_with(resident: int) -> ExpertPlacement:
    """Experts 0 and 1 at home on rank 0, 2 and 3 on rank 1, and one of these resident on rank 0 in both layers."""
    residents = np.tile([[[resident], [-1]]], (2, 1, 1))
    home = np.tile([0, 0, 1, 1], (2, 1))
    placement = ExpertPlacement.from_home_rank(home, ep_size=2, resident_experts=residents)
    return placement.with_slots(resident_slots=1, spare_slots=1)


def rows_of(pairs: int) -> RankRows:
    """One micro-batch in which every expert has this many pairs of this rank, in both layers."""
    return RankRows(pairs=np.full((1, 2, 4), pairs, np.int32), rows=np.array([2 * pairs]))


def planned(exchange: InMemory, placement: ExpertPlacement, pairs: int = 8, **asked: Any) -> PlannedPass:
    planner = PassPlanner(exchange, layers=[0, 1], model=MODEL)
    request = PassRequest(config=CONFIG, placement=placement, **asked)
    return planner.plan_pass(request, CountedRows(rows_of(pairs)))


def test_a_plan_for_other_residents_on_the_same_homes_is_not_carried_out() -> None:
    given = on_all_ranks(2, lambda exchange: planned(exchange, placement_with(2), whole_plan=True))[0]
    assert given.misfit is None
    for one in on_all_ranks(2, lambda exchange: planned(exchange, placement_with(3), plan=given.plan)):
        assert one.misfit is not None
        assert one.misfit.kind == "placement"
        assert one.local_plan.replicas.num_micro_batches == 1
        assert one.local_plan.replicas.source_quota.shape == (0, 2)
    assert moved_since(given, placement_with(2), [0, 1]) is None
    assert moved_since(given, placement_with(3), [0, 1]) is not None


def test_ranks_ask_for_the_same_only_if_all_of_it_is_the_same() -> None:
    def layout_of(**words: Any) -> BatchLayout:
        own = {name: np.arange(2, dtype=np.int32) for name in ("micro_batch", "dp_rank", "order")}
        return BatchLayout(**(own | words), num_micro_batches=2, num_dp_ranks=2)

    turned = np.array([1, 0], np.int32)
    first: dict[str, Any] = {"config": CONFIG, "placement": placement_with(2)}
    changes: list[dict[str, Any]] = [
        {},
        {"config": BalancerConfig(policy="moe-rl", objective="time", resident_slots=1)},
        {"placement": placement_with(3)},
        {"forward_only": True},
        {"may": PLACEMENT},
        {"whole_plan": True},
        {"layout": layout_of()},
        {"layout": layout_of(micro_batch=turned)},
        {"layout": layout_of(dp_rank=turned)},
        {"layout": layout_of(order=turned)},
    ]
    digests = [PassRequest(**(first | change)).digest for change in changes]
    assert len(set(digests)) == len(changes)
    assert digests == [PassRequest(**(first | change)).digest for change in changes]
    assert PassRequest(**first, num_micro_batches=3).digest == digests[0], "a part of the pass"


def test_ranks_that_hold_other_residents_do_without_a_plan() -> None:
    for one in on_all_ranks(2, lambda exchange: planned(exchange, placement_with(2 + exchange.rank))):
        assert one.misfit is not None
        assert one.misfit.kind == "ranks"


def test_parts_of_passes_of_different_lengths_are_refused() -> None:
    """Both ranks plan the first micro-batch, of a pass of two and of one of three."""

    def said(exchange: InMemory) -> str:
        with pytest.raises(InvalidInputError) as error:
            planned(exchange, placement_with(2), num_micro_batches=2 + exchange.rank)
        return str(error.value)

    for sentence in on_all_ranks(2, said):
        assert sentence.endswith("the same number of micro-batches with routes, but they have 2, 3.")


def test_a_rank_that_cannot_plan_its_layers_says_so_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 plans layer 0, rank 1 layer 1, for which there is no plan."""
    plan_of_load = pass_planner.plan_of_load

    def failing(load: Any, **words: Any) -> Any:
        if words["model"].moe_layer_ids == (1,):
            raise InvalidInputError("no plan.")
        return plan_of_load(load, **words)

    def said(exchange: InMemory) -> str:
        with pytest.raises(InvalidInputError) as error:
            planned(exchange, placement_with(2))
        return str(error.value)

    monkeypatch.setattr(pass_planner, "plan_of_load", failing)
    assert on_all_ranks(2, said) == ["EP rank 1 cannot plan its layers: no plan.", "no plan."]


@pytest.mark.parametrize("group", [0, 1])
def test_what_does_not_fit_one_ep_group_is_heard_in_all(group: int) -> None:
    """Of two EP groups of two ranks: else one would go through collectives that the other does not."""
    notices = [[RankNotice(digest="same") for _ in range(2)] for _ in range(2)]
    assert first_misfit(notices) is None
    notices[group][1] = RankNotice(digest="another")
    said = first_misfit(notices)
    assert said is not None
    assert said.kind == "ranks"
    misfit = Misfit(kind="placement", sentence="experts are elsewhere")
    notices[group][1] = RankNotice(digest="same", misfit=misfit)
    assert first_misfit(notices) == misfit


@pytest.mark.parametrize("largest", [2**16 - 1, 2**16])
def test_counts_of_all_ranks_travel_in_one_type(largest: int) -> None:
    """Rank 0 has as many pairs of an expert as uint16 holds, or one more; rank 1 has three."""
    pairs = (largest, 3)
    for one in on_all_ranks(2, lambda exchange: planned(exchange, placement_with(-1), pairs[exchange.rank])):
        assert one.misfit is None
        assert one.static_rows is not None
        assert one.predicted_rows is not None
        assert (one.static_rows == 2 * sum(pairs)).all()
        assert (one.predicted_rows.sum(axis=2) == 4 * sum(pairs)).all()


@dataclass
class Still:
    """Stands in for experts that have nothing to move, and for the grid of their ranks."""

    exchange: InMemory
    layers: tuple[int, ...] = (0, 1)

    def gather_in_run(self, local: np.ndarray) -> np.ndarray:
        return np.stack(self.exchange.gather(local))


def reordered(exchange: InMemory, resident_by_rank: tuple[int, int]) -> str:
    """Return why the ranks would not follow, and else nothing."""
    still = Still(exchange)
    homes = ExpertHomes(placement_with(-1), still, groups=still, max_scratch_bytes=0)  # type: ignore[arg-type]
    try:
        homes.reorder(placement_with(resident_by_rank[exchange.rank]))
    except InvalidInputError as error:
        return str(error)
    return "" if np.array_equal(homes.placement.resident_experts[0], [[resident_by_rank[0]], [-1]]) else "not followed"


def test_ranks_follow_one_choice_of_residents_or_none() -> None:
    assert on_all_ranks(2, lambda exchange: reordered(exchange, (2, 2))) == ["", ""]
    for said in on_all_ranks(2, lambda exchange: reordered(exchange, (2, 3))):
        assert said == "all ranks must be given the same expert placement, but the placements differ."


def test_the_report_of_layers_that_several_ranks_planned_is_one_of_all_layers() -> None:
    def report(cost: float | None, seconds: float, *notes: str) -> PolicyReport:
        return PolicyReport(policy="moe-rl", objective="time", predicted_cost_s=cost, solve_time_s=seconds, notes=notes)

    first = report(1.0, 0.25, "no replicas: at 1.30", "no moves: none pays")
    joined = merge_reports([first, report(2.0, 0.5, "no replicas: at 1.12"), report(0.5, 0.125, "no replicas: at 2")])
    assert (joined.predicted_cost_s, joined.solve_time_s) == (3.5, 0.5), "layers follow each other, ranks do not"
    assert joined.notes == ("no replicas: at 1.30",), "a lever that some layer uses is not idle"
    assert merge_reports([first]) == first
    assert merge_reports([report(None, 0.0), report(1.0, 0.0)]).predicted_cost_s is None
    assert merge_reports([report(1.0, 0.0), report(None, 0.0)]).predicted_cost_s == 1.0
