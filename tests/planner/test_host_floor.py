"""What a plan saves on GPUs counts only as far as their hosts keep up, whatever the layout."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import HARDWARE

from moe_rl.core.layout import BatchLayout
from moe_rl.core.micro_batch_cost import MicroBatchCost
from moe_rl.core.topology import ClusterTopology

TOPOLOGY = ClusterTopology(hardware=HARDWARE, ep_size=4)
LENGTHS = np.array([100, 200, 300, 400], np.int64)
LAYOUT = BatchLayout.recorded(np.zeros(4, np.int32), np.arange(4, dtype=np.int32), num_dp_ranks=4)


def cost_of(**changes: float) -> MicroBatchCost:
    values = {"fixed_s": 1e-3, "num_layers": 4, "num_moe_layers": 3, "routed_token_s": 1e-6} | changes
    return MicroBatchCost(
        sequence_s=np.stack([1e-6 * LENGTHS, 2e-6 * LENGTHS, 5e-7 * LENGTHS]), sequence_tokens=LENGTHS.astype(float),
        **values,  # type: ignore[arg-type]
    )  # fmt: skip


def test_without_a_host_a_step_is_the_sum_of_its_waits() -> None:
    routed = np.full((1, 1, 3), 2e-3)
    # The longest sequence keeps its rank busy for 0.4 + 0.8 + 0.2 ms.
    assert cost_of().step_s(routed, LAYOUT, TOPOLOGY) == pytest.approx(1.4e-3 + 1e-3 + 6e-3)


@given(st.floats(0, 0.1), st.floats(0.0, 1.0))
def test_a_slower_host_leaves_less_of_what_experts_save(host_s: float, saved: float) -> None:
    """The saving never exceeds the GPU's, and shrinks with the host's time."""
    before, after = np.full((1, 1, 3), 2e-3), np.full((1, 1, 3), (1 - saved) * 2e-3)

    def saving(cost: MicroBatchCost) -> float:
        return cost.step_s(before, LAYOUT, TOPOLOGY) - cost.step_s(after, LAYOUT, TOPOLOGY)

    with_host = saving(cost_of(host_moe_layer_s=host_s))
    assert -1e-12 <= with_host <= saving(cost_of()) + 1e-12
    assert saving(cost_of(host_moe_layer_s=2 * host_s)) <= with_host + 1e-12


def test_scaled_loads_take_as_long_as_sequences_of_their_size() -> None:
    """Ranks of a scaled step hold as many tokens each; what a token of their sequences costs is kept."""
    scaled = replace(cost_of(), scaled_tokens=400)
    longest = BatchLayout.recorded(np.zeros(4, np.int32), np.arange(4, dtype=np.int32), num_dp_ranks=4)
    routed = np.zeros((1, 1, 3))
    assert scaled.step_s(routed, longest, TOPOLOGY) == pytest.approx(cost_of().step_s(routed, longest, TOPOLOGY))
    doubled = replace(scaled, scaled_tokens=800).step_s(routed, longest, TOPOLOGY)
    assert doubled == pytest.approx(2 * scaled.step_s(routed, longest, TOPOLOGY) - 1e-3)  # but for the fixed time


def test_even_micro_batches_are_those_of_equal_sequences() -> None:
    even = replace(cost_of(host_moe_layer_s=1e-3), sequence_s=np.full((3, 4), 1e-4), sequence_tokens=np.full(4, 100.0))
    assert even.even_s(1, TOPOLOGY) == pytest.approx(even.balanced_s(LAYOUT, TOPOLOGY))
