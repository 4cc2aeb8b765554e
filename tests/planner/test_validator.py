"""The validator finds what it is there to find: every promise is broken once, and named."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plan_recount import validate_plan
from strategies import HARDWARE, load_of, problem_of, random_pairs

from moe_rl.core.layout import BatchLayout
from moe_rl.core.placement import ExpertMigration, ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.registry import make_planner

TOPOLOGY = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)


@pytest.fixture
def problem() -> PlanProblem:
    return problem_of(load_of(random_pairs(np.random.default_rng(1), (1, 2, 2, 4, 8), most=400), 2), TOPOLOGY)


@pytest.fixture
def plan(problem: PlanProblem) -> Plan:
    plan = make_planner("ultraep").plan(problem)
    assert validate_plan(problem, plan) == []
    assert plan.replicas.copies >= 2
    return plan


def with_replicas(plan: Plan, **columns: Any) -> Plan:
    return replace(plan, replicas=replace(plan.replicas, **columns))


def changed(column: np.ndarray, index: int, value: int) -> np.ndarray:
    column = column.copy()
    column[index] = value
    return column


def test_an_overdrawn_source_is_found(problem: PlanProblem, plan: Plan) -> None:
    quota, planned = plan.replicas.source_quota + 1000, plan.replicas.source_pairs + 1000
    broken = with_replicas(plan, source_quota=quota, source_pairs=planned)
    found = validate_plan(problem, broken)
    assert any("pairs from source 0, which has" in sentence for sentence in found)
    assert any("was planned for other pairs than the load's" in sentence for sentence in found)


def test_a_copy_for_no_token_is_found(problem: PlanProblem, plan: Plan) -> None:
    broken = with_replicas(plan, source_quota=np.zeros_like(plan.replicas.source_quota))
    assert "is copied for no token" in validate_plan(problem, broken)[0]


def test_a_copy_in_a_home_slot_is_found(problem: PlanProblem, plan: Plan) -> None:
    broken = with_replicas(plan, physical_id=changed(plan.replicas.physical_id, 0, 0))
    assert any("slot 0 is to take a copy" in sentence for sentence in validate_plan(problem, broken))


def test_a_copy_on_its_own_home_rank_is_found(problem: PlanProblem, plan: Plan) -> None:
    layer = int(plan.replicas.index_of_replica()[0]) % 2
    home = int(plan.placement.home_rank[layer, plan.replicas.expert[0]])
    spare = home * plan.placement.slots_per_rank + 2
    broken = with_replicas(plan, physical_id=changed(plan.replicas.physical_id, 0, spare))
    assert any("onto its own home rank" in sentence for sentence in validate_plan(problem, broken))


def test_a_copy_from_another_node_is_found(problem: PlanProblem, plan: Plan) -> None:
    slot = int(plan.replicas.physical_id[0])
    other_node = (slot + 2 * plan.placement.slots_per_rank) % 12
    broken = with_replicas(plan, physical_id=changed(plan.replicas.physical_id, 0, other_node))
    found = validate_plan(problem, broken)
    assert any("copies from other nodes" in sentence and sentence.endswith(" at most 0)") for sentence in found)


def test_an_engine_copies_on_what_came_from_another_node() -> None:
    """Expert 0 of node 0 has copies on both ranks of node 1: one came across, and the engine made the other of it."""
    stated = problem_of(load_of(np.full((1, 2, 2, 4, 8), 5, np.int32), 2), TOPOLOGY, cross_node_slots=1)
    over_engine = replace(stated, domain_balance="engine:ultraep")
    static = make_planner("static").plan(over_engine)

    def copies(experts: list[int], slots: list[int]) -> Plan:
        """One row of every source goes to each copy in the first cell."""
        count = len(experts)
        return with_replicas(
            static,
            offsets=np.array([0, *[count] * 4]),
            expert=np.array(experts, np.int32),
            physical_id=np.array(slots, np.int32),
            source_quota=np.ones((count, 4), np.int32),
            source_pairs=np.full((count, 4), 5, np.int32),
            resident=np.zeros(count, np.bool_),
        )

    first, second = (10, 11), (14, 15)  # of ranks 2 and 3: four slots a rank, two of them for copies
    passed_on = copies([0, 0], [first[0], second[0]])
    assert validate_plan(over_engine, passed_on) == []
    # One of rank 2's two copies from node 0 is the engine's, of what rank 3 got across nodes.
    shared = copies([0, 0, 1], [first[0], second[0], first[1]])
    assert validate_plan(over_engine, shared) == []
    assert validate_plan(stated, shared)[0].endswith("too many copies from other nodes (2 instead of at most 1)")
    crowded = copies([0, 1, 2, 3], [*first, *second])
    assert validate_plan(over_engine, crowded)[0].endswith("node 1 gets 4 experts from other nodes, 2 are allowed")


def test_two_copies_in_one_slot_are_found(problem: PlanProblem, plan: Plan) -> None:
    cell = plan.replicas.index_of_replica()
    second = int(np.flatnonzero(np.diff(cell) == 0)[0]) + 1
    slots = changed(plan.replicas.physical_id, second, int(plan.replicas.physical_id[second - 1]))
    assert any("serves two replicas" in s for s in validate_plan(problem, with_replicas(plan, physical_id=slots)))


def test_a_false_claim_of_residence_is_found(problem: PlanProblem, plan: Plan) -> None:
    broken = with_replicas(plan, resident=np.ones_like(plan.replicas.resident))
    assert any("is said to hold expert" in sentence for sentence in validate_plan(problem, broken))


def test_a_resident_copy_passed_off_as_new_is_found(problem: PlanProblem) -> None:
    plan = make_planner("eplb-oracle").plan(problem)
    broken = with_replicas(plan, resident=np.zeros_like(plan.replicas.resident))
    assert any("is to take a copy of expert" in sentence for sentence in validate_plan(problem, broken))


def test_more_copies_than_slots_are_found() -> None:
    """Rank 0 must give 40 of its experts' 40 + 40 pairs and keep one of each, so rank 1 needs copies of both."""
    pairs = np.zeros((1, 1, 2, 4, 8), np.int32)
    pairs[..., :2] = 10
    one_slot = problem_of(load_of(pairs, 2), TOPOLOGY)
    plan = make_planner("ultraep", tolerance=0.0).plan(replace(one_slot, replica_slots=2))
    found = validate_plan(one_slot, plan)
    assert any("rank 1 has too many copies from its node (2 instead of at most 1)" in sentence for sentence in found)
    assert any("4 slots per rank instead of 3" in sentence for sentence in found)


def test_a_migration_that_leads_elsewhere_is_found(problem: PlanProblem, plan: Plan) -> None:
    elsewhere = ExpertPlacement.from_home_rank(np.tile(np.arange(8) % 4, (2, 1)), ep_size=4, spare_slots=1)
    wrong = ExpertMigration.between(plan.placement, elsewhere, expert_bytes=1)
    found = validate_plan(problem, replace(plan, migration=wrong))
    assert "layer 0: the migration does not lead to the placement" in found
    assert "the migration leads to other homes than the placement's" in found


def test_a_migration_that_reads_the_wrong_slot_is_found(problem: PlanProblem) -> None:
    plan = make_planner("relibra").plan(replace(problem, objective="imbalance"))
    assert len(plan.migration.layer)
    wrong = replace(plan.migration, source_slot=(plan.migration.source_slot + 1) % 12)
    assert any("which does not hold it" in s for s in validate_plan(problem, replace(plan, migration=wrong)))


def test_a_changed_layout_is_found(problem: PlanProblem, plan: Plan) -> None:
    swapped = replace(problem.layout, micro_batch=problem.layout.micro_batch[::-1].copy())
    owned = replace(problem, layout=replace(problem.layout, fixed=True))
    assert validate_plan(owned, replace(plan, layout=swapped)) == [
        "the layout was changed although the framework owns it"
    ]
    assert validate_plan(problem, replace(plan, layout=swapped)) == [
        "the layout was changed: its loads are needed to check the plan"
    ]
    assert validate_plan(problem, replace(plan, layout=swapped), load=problem.load) == []


def test_a_cell_over_its_budget_is_found(problem: PlanProblem, plan: Plan) -> None:
    budgeted = replace(problem, layout=replace(problem.layout, token_budget=9))
    lengths = np.full(problem.layout.num_sequences, 10)
    assert len(validate_plan(budgeted, plan, sequence_lengths=lengths)) == problem.layout.num_sequences
    assert validate_plan(budgeted, plan, sequence_lengths=lengths - 1) == []


def test_a_lost_sequence_is_found(problem: PlanProblem, plan: Plan) -> None:
    fewer = BatchLayout(
        micro_batch=problem.layout.micro_batch[:-1],
        dp_rank=problem.layout.dp_rank[:-1],
        order=problem.layout.order[:-1],
        num_micro_batches=2,
        num_dp_ranks=4,
    )
    assert validate_plan(problem, replace(plan, layout=fewer)) == ["the layout has 7 sequences, the step 8"]


def test_loads_that_ran_out_are_found(problem: PlanProblem, plan: Plan) -> None:
    """The plan is right for its own loads and wrong for others."""
    other = load_of(np.zeros_like(problem.load.pairs), 2)
    assert any("which has 0" in sentence for sentence in validate_plan(problem, plan, load=other))


def test_resident_slots_that_the_problem_does_not_have_are_found(problem: PlanProblem, plan: Plan) -> None:
    foreign = np.array([[[7], [0], [0], [0]]] * 2)
    with_one = ExpertPlacement.from_home_rank(
        plan.placement.home_rank, ep_size=4, spare_slots=plan.placement.spare_slots, resident_experts=foreign
    )
    found = validate_plan(problem, replace(plan, placement=with_one))
    assert any("1 resident slots per rank, 0 are allowed" in sentence for sentence in found)
    allowed = replace(problem, resident_slots=1)
    assert not any(
        "slots per rank" in sentence for sentence in validate_plan(allowed, replace(plan, placement=with_one))
    )
