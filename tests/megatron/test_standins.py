"""The stand-ins of TransformerEngine and DeepEP in tests/standins keep the contracts of the pages that they name."""

from typing import Any

import pytest

CASES = (
    "megatron_finds_them",
    "rows_stand_expert_by_expert_and_come_back_weighted",
    "chunks_are_sorted_with_their_probabilities",
    "a_map_that_would_leave_garbage_is_refused",
    "a_grouped_linear_is_one_linear_per_split",
    "fused_gradients_go_to_main_grad_and_megatron_is_told",
    "gradients_can_wait_for_backward_dw",
    "fp8_codes_of_weights_last_from_the_first_micro_batch_on",
    "fp8_errors_are_those_of_the_mantissa",
    "deepep_sends_every_token_once_to_a_rank_and_sums_what_comes_back",
    "hybridep_permutes_and_says_when_its_buffer_was_too_small",
    "fused_adam_steps_as_torchs_adam",
    "a_bf16_parameter_and_its_remainder_are_the_float32_master",
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=pytest.mark.multi_rank(world_size=2, case=f"standin_cases.{c}", launch="standins"), id=c)
        for c in CASES
    ],
)
def test_stand_ins_keep_their_contracts(case: str, outcome: list[Any]) -> None:
    """Their cases assert on every rank."""
    assert outcome == [None, None]
