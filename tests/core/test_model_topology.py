"""Model shapes and rank arithmetic."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.core.errors import InvalidInputError, nearest_name
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.topology import ClusterTopology, HardwareSpec

QWEN3_30B = {
    "name": "qwen3-30b-a3b",
    "num_layers": 48,
    "moe_layer_ids": tuple(range(48)),
    "num_experts": 128,
    "top_k": 8,
    "hidden_size": 2048,
    "moe_ffn_hidden_size": 768,
    "num_attention_heads": 32,
    "num_query_groups": 4,
    "kv_channels": 128,
    "vocab_size": 151936,
}


def hardware(**changes: object) -> HardwareSpec:
    values: dict[str, object] = {
        "name": "test",
        "ranks_per_node": 8,
        "gemm_tflops": 800.0,
        "attention_linear_tflops": 600.0,
        "attention_forward_tflops": 556.0,
        "attention_backward_tflops": 455.0,
        "hbm_gb_per_s": 2680.0,
        "hbm_gib": 80.0,
        "nvlink_gb_per_s": 320.0,
        "nvlink_p2p_gb_per_s": 300.0,
        "rdma_gb_per_s": 43.0,
        "intra_node_latency_us": 25.0,
        "inter_node_latency_us": 60.0,
        "gemm_fixed_us": 40.0,
        "layer_fixed_forward_ms": 1.0,
        "layer_fixed_backward_ms": 1.5,
    }
    return HardwareSpec(**(values | changes))


def test_expert_sizes_of_qwen3_30b_are_the_published_ones() -> None:
    """3 matrices of 2048 x 768 = 4.72 M parameters: 9.4 MB in bf16, 66 MB with master weights and Adam moments."""
    model = MoeModelSpec(**QWEN3_30B)
    assert model.expert_params == 4_718_592
    assert model.expert_bytes == 9_437_184
    assert model.expert_state_bytes == 66_060_288


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"top_k": 129}, "top_k (129) exceeds num_experts (128)"),
        ({"moe_layer_ids": (0, 0, 1)}, "moe_layer_ids must be ascending"),
        ({"moe_layer_ids": (48,)}, "moe_layer_ids must be ascending"),
        ({"moe_layer_ids": ()}, "moe_layer_ids must be ascending"),
        ({"num_query_groups": 5}, "num_query_groups (5) does not divide"),
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"activation": "relu"}, "'relu' is unknown"),
        ({"num_expert_groups": 3}, "does not divide num_experts"),
        ({"sliding_window": 128}, "sliding_window is 128 and num_sliding_window_layers is 0. Set both to 0"),
        ({"sliding_window": 128, "num_sliding_window_layers": 49}, "num_sliding_window_layers is 49"),
    ],
)
def test_a_wrong_model_is_refused_with_its_value(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        MoeModelSpec(**(QWEN3_30B | change))


def test_hardware_rates_must_be_positive() -> None:
    with pytest.raises(InvalidInputError, match="nvlink_gb_per_s must be positive"):
        hardware(nvlink_gb_per_s=0.0)
    with pytest.raises(InvalidInputError, match="a2a_mixing must lie in"):
        hardware(a2a_mixing=1.5)
    with pytest.raises(InvalidInputError, match="pooled_nics must be 1"):
        hardware(pooled_nics=2)
    assert hardware().perturbed(rdma_gb_per_s=1.3).rdma_gb_per_s == pytest.approx(43 * 1.3)


def test_an_ep_group_fills_whole_nodes() -> None:
    with pytest.raises(InvalidInputError, match="fill whole nodes"):
        ClusterTopology(hardware=hardware(), ep_size=12)


@given(
    ep_size=st.sampled_from([1, 2, 4, 8, 16, 32]),
    num_ep_groups=st.integers(1, 4),
    slices=st.sampled_from([1, 2, 4, 8]),
)
def test_slices_of_all_dp_ranks_are_all_ranks_once(ep_size: int, num_ep_groups: int, slices: int) -> None:
    if (ep_size * num_ep_groups) % slices:
        with pytest.raises(InvalidInputError, match="does not divide"):
            ClusterTopology(
                hardware=hardware(), ep_size=ep_size, num_ep_groups=num_ep_groups, slices_per_dp_rank=slices
            )
        return
    topology = ClusterTopology(
        hardware=hardware(), ep_size=ep_size, num_ep_groups=num_ep_groups, slices_per_dp_rank=slices
    )
    dp_rank, slice_index = np.divmod(np.arange(topology.num_ranks), slices)
    group, rank = topology.source_rank(dp_rank, slice_index)
    assert sorted(zip(group.tolist(), rank.tolist(), strict=True)) == [
        (g, r) for g in range(num_ep_groups) for r in range(ep_size)
    ]
    assert topology.num_dp_ranks * slices == topology.num_ranks
    assert np.bincount(topology.node_of_rank).tolist() == [topology.ranks_per_domain] * topology.num_nodes


def test_ep_must_divide_experts() -> None:
    with pytest.raises(InvalidInputError, match=r"size \(16\) does not divide the number of experts \(40\)"):
        ClusterTopology(hardware=hardware(), ep_size=16).experts_per_rank(40)


def test_the_nearest_name_is_offered() -> None:
    assert nearest_name("epbl", ["eplb", "static"]) == " Did you mean 'eplb'?"
    assert nearest_name("zzz", ["eplb", "static"]) == " Known: eplb, static."
