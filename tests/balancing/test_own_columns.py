"""What a rank keeps of a plan that all ranks make together: enough to carry it out, and no more for more ranks."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from strategies import model_spec

from benchmarks.in_memory_exchange import InMemory, on_all_ranks
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.loads import RankRows
from moe_rl.balancing.pass_planner import PassPlanner
from moe_rl.balancing.pass_request import PassRequest, PlannedPass
from moe_rl.balancing.pass_source import CountedRows
from moe_rl.balancing.slots import SlotTables
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.metrics import rank_load
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import REPLICA_COLUMNS
from moe_rl.planner.base import COPIES, PLACEMENT, Levers

MICRO_BATCHES, LAYERS, EXPERTS_PER_RANK = 3, 5, 2
CONFIG = BalancerConfig(policy="moe-rl", objective="imbalance", parameters={"num_threads": 1})


@dataclass(frozen=True)
class Group:
    """The ranks of one EP group; each has other tokens, and a few experts take most of them."""

    ep_size: int
    config: BalancerConfig = CONFIG

    def rows(self, rank: int) -> RankRows:
        rng = np.random.default_rng([self.ep_size, rank])
        shares = np.exp(np.random.default_rng(7).normal(0.0, 1.0, (LAYERS, EXPERTS_PER_RANK * self.ep_size)))
        mean = 40.0 * EXPERTS_PER_RANK * self.ep_size * shares / shares.sum(axis=1, keepdims=True)
        pairs = rng.poisson(mean, (MICRO_BATCHES, *mean.shape)).astype(np.int32)
        return RankRows(pairs=pairs, rows=pairs.sum(axis=(1, 2)) // (2 * LAYERS))

    def planned(self, *, whole: bool, may: Levers = COPIES) -> list[PlannedPass]:
        experts = EXPERTS_PER_RANK * self.ep_size
        model = model_spec(num_experts=experts, num_layers=LAYERS, top_k=2)
        placement = ExpertPlacement.contiguous(
            num_layers=LAYERS, num_experts=experts, ep_size=self.ep_size, spare_slots=self.config.slots.spare
        )
        request = PassRequest(config=self.config, placement=placement, may=may, whole_plan=whole)

        def of_rank(exchange: InMemory) -> PlannedPass:
            planner = PassPlanner(exchange, layers=range(LAYERS), model=model)
            return planner.plan_pass(request, CountedRows(self.rows(exchange.rank)))

        return on_all_ranks(self.ep_size, of_rank)


@pytest.mark.parametrize("may", [COPIES, PLACEMENT], ids=["copies", "placement"])
@pytest.mark.parametrize("ep_size", [2, 4])
def test_own_columns_carry_out_the_whole_plan(ep_size: int, may: Levers) -> None:
    """Slot tables are equal to the bit, and so is all that does not depend on the source."""
    group = Group(ep_size)
    whole, kept = group.planned(whole=True, may=may), group.planned(whole=False, may=may)
    assert whole[0].plan.replicas.copies > 0
    for rank, (of_all, own) in enumerate(zip(whole, kept, strict=True)):
        assert own.plan.replicas.own_source == rank
        tables = [
            SlotTables.of_plan(plan, group=0, source_rank=rank) for plan in (of_all.plan, of_all.local_plan, own.plan)
        ]
        for table in tables[1:]:
            assert np.array_equal(table.row, tables[0].row)
            assert table.terms.equal(tables[0].terms)
        for name in ("offsets", "expert", "physical_id", "resident", "quota"):
            assert np.array_equal(getattr(own.plan.replicas, name), getattr(of_all.plan.replicas, name))
        assert np.array_equal(own.plan.placement.home_rank, of_all.plan.placement.home_rank)
        assert np.array_equal(own.predicted_rows, of_all.predicted_rows)
        assert np.array_equal(own.replicated_ML, of_all.replicated_ML)


def test_bytes_of_a_replica_do_not_grow_with_the_ranks() -> None:
    """A whole plan has 8 bytes for every replica and source rank; a rank keeps 25 for a replica."""
    per_replica = {}
    for ep_size in (4, 16):
        kept = Group(ep_size).planned(whole=False)[0]
        assert kept.local_plan is kept.plan
        replicas = kept.plan.replicas
        per_replica[ep_size] = (replicas.num_bytes - replicas.offsets.nbytes) / len(replicas.expert)
    assert per_replica == {4: 25, 16: 25}
    whole = Group(16).planned(whole=True)[0].plan.replicas
    assert (whole.num_bytes - whole.offsets.nbytes) / len(whole.expert) == 9 + 8 * 16


def test_an_observed_pass_keeps_the_share_that_this_rank_planned() -> None:
    """5 layers on 4 ranks: the first plans two of them."""
    group = Group(4)
    observing = replace(group, config=group.config.with_words(observe=True))
    whole = group.planned(whole=True)[0].plan.replicas
    shares = [planned.own_share for planned in observing.planned(whole=False)]
    assert all(planned.own_share is None for planned in group.planned(whole=False))
    for layers, share in zip(([0, 1], [2], [3], [4]), shares, strict=True):
        assert share is not None
        for name in ("offsets", *REPLICA_COLUMNS):
            assert np.array_equal(getattr(share, name), getattr(whole.of_layers(layers, group=0), name))


def test_the_part_of_one_rank_is_not_taken_for_a_whole_plan(tmp_path: object) -> None:
    group = Group(2)
    kept = group.planned(whole=False)[1].plan
    with pytest.raises(InvalidInputError, match="has only the part of EP rank 1"):
        kept.save(f"{tmp_path}/plan.npz")
    with pytest.raises(InvalidInputError, match="only the part of EP rank 1, not that of EP rank 0"):
        SlotTables.of_plan(kept, group=0, source_rank=0)
    with pytest.raises(InvalidInputError, match="has only the part of EP rank 1"):
        PassRequest(config=group.config, placement=kept.placement, plan=kept).check(1)
    pairs = np.stack([group.rows(rank).pairs for rank in range(2)], axis=2)[None]
    load = type("Load", (), {"pairs": pairs, "ep_size": 2, "num_experts": 4})
    with pytest.raises(InvalidInputError, match="has only the part of EP rank 1"):
        rank_load(kept, load)  # type: ignore[arg-type]
