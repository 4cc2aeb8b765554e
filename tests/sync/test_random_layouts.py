"""Random trainer layouts against random engines, all ranks in one process: slots right to the bit, bytes as planned."""

from collections import Counter

import numpy as np
import pytest
from layout_cases import Drawn, draw, engine_ranks, sync, weights_of

from moe_rl.sync import SyncPlan, plan_sync
from moe_rl.sync.rank_plan import RankPlan, parts_of_atom

SEEDS = range(40)


def check_exact(drawn: Drawn, plan: SyncPlan) -> None:
    problem, engines = plan.problem, engine_ranks(plan.problem, drawn.shape)
    ran = sync(plan, drawn, engines)
    weights = weights_of(drawn.shape, 7)
    assert sum(each.wrong_slots(weights) for each in engines.values()) == 0
    for each in engines.values():
        each.versions.require(7)
        # Every slot is written once: what is loaded twice was sent twice.
        assert each.loads == each.local.size
    once = Counter(
        zip(plan.deliveries.atom.tolist(), np.array(problem.node_of)[plan.deliveries.ingress].tolist(), strict=True)
    )
    assert max(once.values()) == 1
    by_nic = Counter({rank: int(count) * problem.atom_bytes for rank, count in enumerate(plan.atoms_out)})
    for rank in range(problem.trainer.size):
        inner = int(np.sum((plan.deliveries.source == rank) & ~plan.by_nic)) * problem.atom_bytes
        assert ran.traffic[rank].sent_bytes == by_nic[rank] + inner


@pytest.mark.parametrize("seed", SEEDS)
def test_every_slot_of_every_engine_is_right_to_the_bit(seed: int) -> None:
    drawn = draw(seed)
    check_exact(drawn, plan_sync(drawn.problem, message_bytes=1))


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_messages_of_several_atoms_bring_the_same(seed: int) -> None:
    drawn = draw(seed)
    check_exact(drawn, plan_sync(drawn.problem, message_bytes=3 * drawn.problem.atom_bytes))


@pytest.mark.parametrize("seed", range(1000, 1006))
def test_without_relays_trainers_send_everything(seed: int) -> None:
    drawn = draw(seed)
    plan = plan_sync(drawn.problem, message_bytes=1, relays=False)
    assert plan.deliveries.source.max() < drawn.problem.trainer.size
    check_exact(drawn, plan)


def largest_even_share(drawn: Drawn) -> int:
    """Atoms that the busiest trainer sends where every atom leaves its trainers once, and twins share."""
    shares = Counter(map(tuple, drawn.problem.holders_of_atoms().tolist()))
    return max(-(-count // len(twins)) for twins, count in shares.items())


def test_schedules_are_near_the_bound() -> None:
    """Order alone costs little. The bound lets trainers send over their neighbors' NICs, which ours never do."""
    ratios = {}
    for seed in range(200):
        drawn = draw(seed)
        plan = plan_sync(drawn.problem, message_bytes=1)
        assert plan.num_steps >= plan.least_steps
        own_bound = max(plan.least_steps, largest_even_share(drawn))
        if plan.least_steps:
            ratios[seed] = plan.num_steps / own_bound, own_bound
    # A handful of steps is mostly the time until the first atom has passed all nodes: larger ones say more.
    assert np.mean([ratio for ratio, bound in ratios.values() if bound >= 24]) <= 1.1
    assert max(ratio for ratio, _ in ratios.values()) <= 2.5


@pytest.mark.parametrize("seed", SEEDS)
def test_the_busiest_trainer_sends_what_even_shares_make_it_send(seed: int) -> None:
    """Each atom leaves its trainers once, and twins share: the largest even share is the flow's bound."""
    drawn = draw(seed)
    plan = plan_sync(drawn.problem, message_bytes=1)
    assert plan.atoms_out[: drawn.problem.trainer.size].max() <= largest_even_share(drawn)


@pytest.mark.parametrize("seed", range(12))
def test_staging_is_what_the_plan_says_and_small(seed: int) -> None:
    """A rank gets an atom of every other rank of its node and one by its NIC, sends as much, and relays leave soon."""
    drawn = draw(seed)
    problem = drawn.problem
    plan = plan_sync(problem, message_bytes=1)
    ran = sync(plan, drawn, engine_ranks(problem, drawn.shape))
    peaks = {rank: own.peak_parts() for rank, own in RankPlan.of_ranks(plan, range(problem.size)).items()}
    for rank, parts in peaks.items():
        # Beside these: headers, and parts that wait for the others of their expert.
        assert ran.traffic[rank].peak_staging_bytes >= parts * problem.part_bytes
    ranks_per_node = max(Counter(problem.node_of).values())
    assert max(peaks.values()) <= 4 * ranks_per_node * problem.parts_per_expert


def test_parts_of_atoms_cover_every_expert_once() -> None:
    problem = draw(3).problem
    covered = Counter()
    for atom in range(problem.num_atoms):
        parts = parts_of_atom(problem, atom)
        covered.update((parts.layer, parts.expert, part) for part in range(parts.first, parts.stop))
    assert set(covered.values()) == {1}
    assert len(covered) == problem.num_layers * problem.num_experts * problem.parts_per_expert
