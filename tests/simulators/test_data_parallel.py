"""Gradients reduced and weights gathered: what of it other work hides, and over which links it goes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import HARDWARE

from moe_rl.config import load_model
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.data_parallel import dense_shards, expert_shards, exposed_seconds
from moe_rl.simulators.memory import stage_params
from moe_rl.simulators.setting import StepSetting, TrainingRun

QWEN = load_model("qwen3-30b-a3b").spec


def ranks(ep_size: int, groups: int, *, domain: int = 8) -> ClusterTopology:
    hardware = replace(HARDWARE, ranks_per_node=domain, flat_rdma_gb_per_s=50.0)
    return ClusterTopology(
        hardware=hardware, ep_size=ep_size, num_ep_groups=groups, ranks_per_node=min(domain, ep_size)
    )


def exposed(topology: ClusterTopology, window_s: float, **setting: object) -> dict[str, float]:
    run = TrainingRun(model=QWEN, topology=topology, setting=StepSetting(**setting))
    return exposed_seconds(run, micro_batch_s=window_s, micro_batches=8)


def test_experts_of_several_nodes_meet_over_one_nic_each_and_dense_weights_over_all_of_a_node() -> None:
    topology = ranks(8, 4)
    experts, dense = expert_shards(topology), dense_shards(topology, StepSetting())
    assert experts == (4, 50.0)
    assert dense == (32, min(8 * 50.0, HARDWARE.nvlink_gb_per_s))
    assert expert_shards(ranks(8, 4, domain=64)) == (4, HARDWARE.nvlink_gb_per_s)
    assert dense_shards(topology, StepSetting(tensor_model_parallel_size=2))[0] == 16


def test_without_a_window_both_take_their_transfers_in_full() -> None:
    topology = ranks(8, 4)
    dense, experts = stage_params(TrainingRun(model=QWEN, topology=topology, setting=StepSetting()), 0)
    gathered = 2 * (dense * 31 / 32 / HARDWARE.nvlink_gb_per_s + experts * 3 / 4 / 50.0) / 1e9
    found = exposed(topology, 0.0)
    assert found == pytest.approx({"param_gather": gathered, "grad_reduce": 2 * gathered})  # fp32 against bf16
    assert exposed(topology, 0.0, grad_reduce_in_fp32=False)["grad_reduce"] == pytest.approx(gathered)
    apart = exposed(topology, 1e3, overlap_grad_reduce=False, overlap_param_gather=False)
    assert apart == pytest.approx(found)


@given(st.floats(0.0, 20.0), st.booleans(), st.sampled_from([1, 2, 4]))
def test_a_wider_window_never_makes_a_step_shorter_than_a_narrower_one(
    window_s: float, fsdp: bool, groups: int
) -> None:
    """What is exposed shrinks by no more than the window grows, so slower layers never make a faster step."""
    topology = ranks(8, groups)
    narrow, wide = (sum(exposed(topology, w, use_megatron_fsdp=fsdp).values()) for w in (window_s, 1.5 * window_s))
    assert wide <= narrow * (1 + 1e-12)
    assert narrow - wide <= 8 * 0.5 * window_s * (1 + 1e-12)


def test_a_long_micro_batch_hides_all_of_it_and_a_single_rank_has_none() -> None:
    nothing = {"grad_reduce": 0.0, "param_gather": 0.0}
    assert exposed(ranks(8, 4), 1e3) == nothing
    assert exposed(ranks(8, 4), 0.0, forward_only=True) == nothing
    alone = ClusterTopology(hardware=HARDWARE, ep_size=1, num_ep_groups=1, ranks_per_node=1)
    assert exposed(alone, 0.0) == nothing


def test_fsdp_pays_in_every_micro_batch_and_gathers_twice() -> None:
    once, every = exposed(ranks(8, 4), 0.0), exposed(ranks(8, 4), 0.0, use_megatron_fsdp=True)
    assert every["grad_reduce"] == pytest.approx(8 * once["grad_reduce"])
    assert every["param_gather"] == pytest.approx(8 * 2 * once["param_gather"])


def test_what_backward_computes_again_leaves_gradients_more_time_and_weights_less() -> None:
    """Of four passes three are backward's under full recomputation, of three else two."""
    topology = ranks(8, 4)
    full, none = (exposed(topology, 0.1, recompute=recompute) for recompute in ("full", "none"))
    assert none["grad_reduce"] - full["grad_reduce"] == pytest.approx(0.1 * (3 / 4 - 2 / 3))
    assert full["param_gather"] - none["param_gather"] == pytest.approx(0.1 * (1 / 3 - 1 / 4))
