"""A checkpoint saved inside canonical() is Megatron's own."""

from typing import Any

import pytest
from curves import FP32_LIMIT, relative_difference


@pytest.mark.multi_rank(world_size=4, case="checkpoint_cases.saved_while_reordered")
def test_plain_megatron_resumes_from_it_at_the_same_and_another_ep_size(outcome: list[Any]) -> None:
    for rank in outcome:
        plain = rank.pop("plain")
        assert set(rank) == {"still_reordered", "resumed_ep2", "resumed_ep4"}
        for name, curve in rank.items():
            assert relative_difference(plain, curve) <= FP32_LIMIT, name
