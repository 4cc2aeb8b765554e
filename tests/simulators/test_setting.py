"""Every option of a setting changes what it says, in the direction that it says."""

import numpy as np
import pytest
from step_cases import case_of
from strategies import HARDWARE, load_of

from moe_rl.core.cost import SoftwareCosts
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.base_time import TENSOR_PARALLEL_COLLECTIVES
from moe_rl.simulators.movement import STEP_PARTS
from moe_rl.simulators.result import SimulationResult
from moe_rl.simulators.setting import StepSetting

TOKENS, HIDDEN, WIDTH = 3000, 2048, 768


def simulated(micro_batches: int = 1, **setting: object) -> SimulationResult:
    """2 nodes of 2 ranks, 3 layers, micro-batches of 3000 tokens per rank that all experts share alike."""
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    load = load_of(np.full((1, micro_batches, 3, 4, 8), 750, np.int32), 2)
    return case_of(load, topology, np.random.default_rng(0), policies=()).simulate(setting=StepSetting(**setting))


def parts(micro_batches: int = 1, **setting: object) -> dict[str, float]:
    breakdown = simulated(micro_batches, **setting).static.prediction.breakdown_s
    assert breakdown is not None
    return breakdown


def test_fp8_multiplies_faster_and_pays_for_its_casts() -> None:
    bf16, fp8 = parts(), parts(precision="fp8")
    rows = 2 * TOKENS
    flops = 3 * rows * 6 * HIDDEN * WIDTH / 800e12
    padded = np.ceil(TOKENS / 128) * 128 / TOKENS
    casts = 2.7 * rows * 4 * (HIDDEN + WIDTH) / 2680e9
    saved = 3 * (flops * padded * (1 - 1 / HARDWARE.fp8_speedup) - casts)
    assert bf16["expert_gemm"] - fp8["expert_gemm"] == pytest.approx(saved)
    assert fp8["attention"] < bf16["attention"]
    assert fp8["all_to_all"] == bf16["all_to_all"]


def test_hybridep_is_priced_as_deepep_and_flat_all_to_all_is_not() -> None:
    assert parts(dispatcher="hybridep") == parts(dispatcher="deepep")
    assert parts(dispatcher="alltoall")["all_to_all"] != parts(dispatcher="deepep")["all_to_all"]


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_overlap_hides_all_but_its_share_of_the_shorter_side(micro_batches: int) -> None:
    """The first forward of a step has no backward beside it."""
    plain = parts(micro_batches)
    for left in (0.0, 0.5, 1.0):
        software = SoftwareCosts(overlap_left=left)
        hidden = parts(micro_batches, overlap_all_to_all=True, software=software)["overlap"]
        computation = sum(plain[name] for name in ("attention", "fixed", "expert_gemm"))
        beside = (1 - 1 / micro_batches) * min(computation, plain["all_to_all"])
        assert -hidden == pytest.approx((1 - left) * beside)


def test_a_forward_pass_has_no_backward_to_overlap_with() -> None:
    assert parts(forward_only=True, overlap_all_to_all=True)["overlap"] == 0.0


def test_tensor_parallelism_adds_its_collectives() -> None:
    per_pass = TOKENS * 2 * HIDDEN / 320e9
    assert parts()["tensor_parallel"] == 0.0
    expected = 3 * sum(TENSOR_PARALLEL_COLLECTIVES) * 3 * per_pass
    assert parts(tensor_model_parallel_size=4)["tensor_parallel"] == pytest.approx(expected)


def test_a_pipeline_waits_less_with_virtual_stages() -> None:
    for virtual in (1, 3):
        found = parts(pipeline_model_parallel_size=4, num_virtual_stages=virtual)
        apart = ("pipeline_bubble", "pipeline_imbalance", *STEP_PARTS)
        mean = sum(seconds for name, seconds in found.items() if name not in apart)
        assert found["pipeline_bubble"] == pytest.approx(mean * 3 / virtual)


def test_exposed_share_and_perturbation_reach_the_cost() -> None:
    slow = simulated(perturbation={"rdma_gb_per_s": 0.7}).static
    assert slow.step_time_s > simulated().static.step_time_s
    setting = StepSetting(replica_exposed=1.0)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    load = load_of(np.full((1, 1, 3, 4, 8), 750, np.int32), 2)
    case = case_of(load, topology, np.random.default_rng(0), policies=("replicas",))
    exposed = case.simulate(setting=setting).policies["replicas"].prediction.breakdown_s["replicate"]
    hidden = case.simulate(setting=StepSetting(replica_exposed=0.0)).policies["replicas"].prediction.breakdown_s
    assert exposed > hidden["replicate"] > 0.0
