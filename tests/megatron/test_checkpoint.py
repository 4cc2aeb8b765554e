"""A checkpoint saved inside canonical() is Megatron's own, and the placement beside it finds its way back."""

from typing import Any

import numpy as np
import pytest
from curves import FP32_LIMIT, relative_difference
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.placement import ExpertPlacement

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron warns when it is imported


def checkpoint_case(case: str, world_size: int = 2) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=world_size, case=f"checkpoint_cases.{case}")


@checkpoint_case("saved_while_reordered", world_size=4)
def test_megatron_resumes_from_it_in_every_format_at_the_same_and_another_ep_size_and_back(outcome: list[Any]) -> None:
    for rank in outcome:
        assert set(rank["curves"]) == {
            "still_reordered",
            "fully_reshardable_at_ep2",
            "dp_reshardable_at_ep2",
            "torch_at_ep2",
            "fully_reshardable_at_ep4",
            "reordered_from_its_own",
            "reordered_from_plain",
            "reordered_at_ep4",
        }
        for name, curve in rank["curves"].items():
            assert relative_difference(rank["plain"], curve) <= FP32_LIMIT, name
        assert rank["loss_at_ep1"][1] == pytest.approx(rank["loss_at_ep1"][0], rel=FP32_LIMIT)
        assert rank["homes_kept"]
        assert rank["homes_resized"]


@checkpoint_case("outside_canonical")
def test_saving_and_loading_outside_canonical_is_an_error_on_every_path(outcome: list[Any]) -> None:
    ways = [
        *("state_dict", "wrapped", "sharded_state_dict", "distributed", "torch", "load"),
        *("experts", "one_expert", "one_linear", "load_expert"),
        *("optimizer", "one_optimizer", "load_optimizer"),
        *("bridge", "bridge_adapters", "bridge_save", "bridge_load", "slime", "miles"),
    ]
    for rank in outcome:
        assert rank["works"] == [ways, ways, ways], "before a move, inside canonical(), after detach()"
        assert [name for name, sentence in rank["said"].items() if "balancer.canonical()" in sentence] == ways
        of_optimizer = ["distributed", "torch", "optimizer", "one_optimizer", "load_optimizer"]
        assert rank["state_away"] == of_optimizer, "an export brings weights home, and leaves the optimizer's state"
        assert rank["exported"] == rank["names"] > 0, "an iterator made outside and walked inside"
        assert rank["open"][0] == rank["names"], "Megatron walks the parameters in every step, so that door stays open"
        assert rank["trains"] == ""


@checkpoint_case("weight_export")
def test_exported_weights_are_those_of_the_run_that_never_reordered_bit_for_bit(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["reordered"] == rank["plain"]
        assert all(len(set(step.values())) == 16 for step in rank["plain"]), "two experts are alike: the test is blind"
        assert all(moved != plain for moved, plain in zip(rank["moved"], rank["plain"], strict=True))
        assert rank["state_moved"] == 0.0 < rank["weights_moved"], "an export moves weights alone"
        assert rank["left_behind"] == 0.0


@checkpoint_case("failed_way_back")
def test_weights_that_could_not_come_back_from_an_export_come_back_with_the_next_reorder(outcome: list[Any]) -> None:
    for rank in outcome:
        assert "no expert was moved" in rank["message"]
        assert rank["apart"] > 0.1
        assert rank["repaired"] == 0.0


@checkpoint_case("placement_files")
def test_a_placement_that_cannot_be_used_changes_nothing_and_every_rank_says_why(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["missing"] is False
        assert rank["own"] is True
        assert "cannot be written" in rank["unwritable"]
        assert "does not match its checksum" in rank["damaged"]
        assert "the model has [2, 8]" in rank["other_model"]
        assert rank["untouched"]


def placement_of(seed: int, *, num_experts: int, ep_size: int) -> ExpertPlacement:
    rng = np.random.default_rng(seed)
    home = np.arange(num_experts) // (num_experts // ep_size)
    return ExpertPlacement.from_home_rank(np.stack([rng.permutation(home) for _ in range(3)]), ep_size=ep_size)


@given(seed=st.integers(0, 2**16), old=st.sampled_from([1, 2, 3, 4, 6, 12]), new=st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_a_placement_for_another_ep_size_keeps_together_what_it_can(seed: int, old: int, new: int) -> None:
    from moe_rl.megatron.checkpoint import resized

    before = placement_of(seed, num_experts=12, ep_size=old).home_rank
    after = resized(placement_of(seed, num_experts=12, ep_size=old), ep_size=new).home_rank
    if new == old:
        assert np.array_equal(before, after)
    elif old % new == 0:
        assert np.array_equal(before // (old // new), after), "neighbors become one rank"
    elif new % old == 0:
        assert np.array_equal(before, after // (new // old)), "a rank's experts stay within its successors"
    assert all((np.bincount(layer, minlength=new) == 12 // new).all() for layer in after)


def test_a_placement_for_an_ep_size_that_does_not_divide_the_experts_is_refused() -> None:
    from moe_rl.megatron.checkpoint import resized

    with pytest.raises(InvalidInputError, match=r"EP size 5 does not divide the number of experts \(12\)"):
        resized(placement_of(0, num_experts=12, ep_size=3), ep_size=5)
