"""Process groups of a run: all are connected before messages between some ranks, and made anew when others are."""

import warnings
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_rl.core.errors import InvalidInputError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says of what it does without TransformerEngine and Apex
    from moe_rl.megatron import groups
    from moe_rl.megatron.groups import ExpertGroups, check_groups, plan_exchange


class Group(SimpleNamespace):
    """Stands in for a process group."""

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return int(self.ranks.index(3))


EP, EXPERT_DP, ALONE = Group(ranks=[2, 3]), Group(ranks=[1, 3]), Group(ranks=[3])


def groups_of(**words: Any) -> ExpertGroups:
    facts = {
        "ep": EP,
        "expert_dp": EXPERT_DP,
        "expert_tp": ALONE,
        "replicas": "replicas",
        "grid_group": "the grid",
        "grid": np.array([[0, 1], [2, 3]]),
        "device": torch.device("cpu"),
    }
    return ExpertGroups(**(facts | words))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of torch.distributed, as (name, group)."""
    found: list[Any] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: found.append(("connect", group)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda group=None: found.append(("destroy", group)))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group.ranks)
    return found


def test_every_group_is_connected_by_a_call_of_all_its_ranks(calls: list[Any]) -> None:
    groups_of().warm()
    connected = [group for name, group in calls if name == "connect"]
    assert len(connected) == 4
    for group in (EP, EXPERT_DP, "replicas", "the grid"):
        assert group in connected


def test_groups_that_a_framework_has_filled_anew_are_connected_and_others_are_made_anew(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, anew = groups_of(), groups_of()
    monkeypatch.setattr(ExpertGroups, "current", classmethod(lambda cls: anew))
    monkeypatch.setattr(groups.parallel_state, "get_expert_data_parallel_group", lambda: EXPERT_DP)
    monkeypatch.setattr(groups.parallel_state, "get_expert_model_parallel_group", lambda: EP)
    assert ours.rebuilt() is ours
    assert {name for name, _ in calls} == {"connect"}
    calls.clear()
    monkeypatch.setattr(groups.parallel_state, "get_expert_model_parallel_group", lambda: Group(ranks=[2, 3]))
    assert ours.rebuilt() is anew
    assert calls == [("destroy", "replicas"), ("destroy", "the grid")], "Megatron's own are Megatron's"


def test_groups_that_are_gone_already_can_be_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(group: Any) -> None:
        raise ValueError("invalid process group")

    monkeypatch.setattr(dist, "destroy_process_group", gone)
    groups_of().destroy()


def test_own_groups_are_of_the_ranks_of_the_ep_group_and_of_the_grid(calls: list[Any]) -> None:
    grid = np.array([[0, 1], [2, 3]])
    made: list[Any] = []

    def own_group(places: Any, **words: Any) -> Any:
        made.append((tuple(places), words))
        return f"own {len(made)}"

    def gather(ranks: np.ndarray, group: Any) -> np.ndarray:
        assert (ranks.tolist(), group) == ([2, 3], EXPERT_DP)
        return grid

    places = [((0, 1), (0, 1, 2, 3))] * 2 + [((2, 3), (0, 1, 2, 3))] * 2
    state = groups.parallel_state
    with (
        patch.object(groups, "own_group", own_group),
        patch.object(groups, "gather", gather),
        patch.object(groups, "gathered", lambda own: places),
        patch.object(groups, "_timeout", lambda group: ("the time limit of", group)),
        patch.object(groups, "_device", lambda: torch.device("cpu")),
        patch.object(state, "get_expert_model_parallel_group", lambda: EP),
        patch.object(state, "get_expert_data_parallel_group", lambda: EXPERT_DP),
        patch.object(state, "get_expert_tensor_parallel_group", lambda: ALONE),
    ):
        found = ExpertGroups.current()
    limit = {"timeout": ("the time limit of", EP)}
    assert made == [(((0, 1), (0, 1), (2, 3), (2, 3)), limit), (((0, 1, 2, 3),) * 4, limit)]
    assert (found.ep, found.expert_dp, found.expert_tp) == (EP, EXPERT_DP, ALONE)
    assert (found.replicas, found.grid_group) == ("own 1", "own 2")
    assert (found.ep_size, found.num_ep_groups) == (2, 2)
    assert {group for name, group in calls if isinstance(group, str)} == {"own 1", "own 2"}
    assert found.part == (0, 1)


@pytest.mark.parametrize("parts", [1, 2])
def test_planning_has_host_groups_of_its_own_for_every_kind(parts: int, calls: list[Any]) -> None:
    expert_tp = Group(ranks=[3, 7][:parts])
    kinds = [EP, EXPERT_DP, expert_tp][: 1 + parts]

    def own_group(places: Any, **words: Any) -> Any:
        assert words == {"backend": "gloo", "timeout": "its own"}
        return f"of {next(iter(places))}"

    with (
        patch.object(groups, "own_group", own_group),
        patch.object(groups, "gathered", lambda own: [own, own]),
        patch.object(groups, "_timeout", lambda group: "its own" if group is EP else "another"),
    ):
        exchange: Any = plan_exchange(groups_of(expert_tp=expert_tp))
    names = [f"of {tuple(kind.ranks)}" for kind in kinds]
    assert [exchange.ep, exchange.expert_dp] == names[:2]
    assert exchange.expert_tp == (names[2] if parts == 2 else None)


def test_a_vote_is_one_of_all_ranks_with_parts_copies_and_experts() -> None:
    asked: list[Any] = []

    def gather(own: np.ndarray, *of: Any) -> np.ndarray:
        asked.append(of)
        return np.array([own[0], *others])

    with patch.object(groups, "gather", gather):
        for others in ([1, 1], [1, 0]):
            assert groups_of().all_true(True) == all(others)
        others = [1, 1]
        assert not groups_of().all_true(False)
    assert asked == [(EP, EXPERT_DP, ALONE)] * 3


def test_groups_of_another_size_or_none_are_refused() -> None:
    state = groups.parallel_state
    not_there = patch.object(state, "model_parallel_is_initialized", lambda: False)
    with not_there, pytest.raises(InvalidInputError, match="groups are not initialized"):
        check_groups(2)
    with (
        patch.object(state, "model_parallel_is_initialized", lambda: True),
        patch.object(state, "get_expert_model_parallel_world_size", lambda: 4),
    ):
        check_groups(4)
        with pytest.raises(InvalidInputError, match="expert_model_parallel_size 2, but Megatron's groups have 4"):
            check_groups(2)
