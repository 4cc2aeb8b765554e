"""What a weight sync reads of a trainer whose parameters are gathered late."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from moe_rl.core.errors import InvalidInputError


@pytest.mark.multi_rank(world_size=4, case="weight_sync_cases.gathers_overlap", launch="standins")
def test_twins_agree_on_their_experts_only_once_gathers_are_complete(outcome: list[Any]) -> None:
    """Without the wait each twin has its own shard of the step alone, so that the vote before a sync ends it."""
    twins = defaultdict(list)
    for rank in outcome:
        twins[rank["ep"]].append(rank)
    assert all(len(ranks) == 2 for ranks in twins.values())
    for ranks in twins.values():
        assert len({rank["gathered"] for rank in ranks}) == 1
        assert len({rank["stale"] for rank in ranks}) == 2


@pytest.mark.multi_rank(world_size=4, case="weight_sync_cases.parts_of_experts", launch="standins")
def test_trainers_that_share_an_expert_read_their_own_parts(outcome: list[Any]) -> None:
    assert outcome == [True] * 4


@pytest.mark.parametrize("shapes", [[(4, 8), (8, 4)], [(8, 8)], [(8, 8), (8, 4), (8,)]])
def test_experts_that_are_not_gated_or_have_more_than_two_weights_are_refused(shapes: list[tuple[int, ...]]) -> None:
    pytest.importorskip("megatron.core")
    torch = pytest.importorskip("torch")
    from moe_rl.megatron.weight_sync import MegatronExpertReader

    def read(shapes: list[tuple[int, ...]]) -> Any:
        weights = [torch.zeros(shape) for shape in shapes]
        experts: Any = SimpleNamespace(parameters_of=lambda slot: weights)
        return MegatronExpertReader._two_weights(experts, 0)

    assert [tuple(weight.shape) for weight in read([(8, 8), (8, 4)])] == [(8, 8), (8, 4)]
    with pytest.raises(InvalidInputError, match="a planned weight sync needs gated experts with two weight matrices"):
        read(shapes)
