"""Under `alltoall` every rank has its own NIC, and no other rank's helps it, unless the cluster pools a node's."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import model_spec

from moe_rl.config import load_cluster
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.pricing import TrainingStep
from moe_rl.simulators.result import SimulationResult
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.step import simulate_policies

RANKS, WIDTH, EACH = 16, 8, 2
EXPERTS = RANKS * EACH
TOPOLOGY = ClusterTopology(hardware=load_cluster("h100"), ep_size=RANKS, ranks_per_node=WIDTH)


def simulated(
    pairs: np.ndarray[tuple[int, ...], np.dtype[np.int64]], topology: ClusterTopology = TOPOLOGY
) -> SimulationResult:
    """The step of one layer and one micro-batch with pairs [P, E]."""
    tokens = pairs.sum(axis=1)
    load = StepLoad(pairs=pairs[None, None, None].astype(np.int32), tokens=tokens[None, None], top_k=1)
    layout = BatchLayout(
        micro_batch=np.zeros(RANKS, np.int32),
        dp_rank=np.arange(RANKS, dtype=np.int32),
        order=np.zeros(RANKS, np.int32),
        num_micro_batches=1,
        num_dp_ranks=RANKS,
    )
    model = model_spec(num_experts=EXPERTS, num_layers=1, top_k=1)
    setting = StepSetting(dispatcher="alltoall")
    return simulate_policies(
        {}, TrainingStep(load=load, layout=layout, lengths=tokens, model=model, topology=topology, setting=setting)
    )


def exchanged(pairs: np.ndarray[tuple[int, ...], np.dtype[np.int64]], topology: ClusterTopology = TOPOLOGY) -> float:
    """Seconds of the all-to-all between Megatron's homes."""
    return (simulated(pairs, topology).static.prediction.breakdown_s or {})["all_to_all"]


@pytest.mark.parametrize("share", [0.4, 0.6, 0.95])
def test_a_hot_rank_is_dearer_than_a_node_of_the_same_rows(share: float) -> None:
    """The pairs of one rank of the second node, and as many spread over all of its ranks."""
    tokens = 8192
    hot = np.full((RANKS, EXPERTS), round((1 - share) * tokens / EXPERTS), np.int64)
    spread = hot.copy()
    hot[:, WIDTH * EACH : (WIDTH + 1) * EACH] += round(share * tokens / EACH)
    spread[:, WIDTH * EACH :] += round(share * tokens / EACH / WIDTH)
    assert exchanged(hot) >= 1.3 * exchanged(spread)
    # Of pooled NICs both ask the same. NVLink, seven times as fast, still carries the hot rank's rows by itself.
    pooled = replace(TOPOLOGY, hardware=replace(TOPOLOGY.hardware, pooled_nics=1))
    assert exchanged(hot, pooled) == pytest.approx(exchanged(spread, pooled), rel=0.02)
    assert exchanged(spread, pooled) == pytest.approx(exchanged(spread), rel=1e-12)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**20))
def test_another_ranks_nic_never_helps(seed: int) -> None:
    """Where the rows of idler ranks of its node go is no matter to the busiest rank, which all wait for."""
    rng = np.random.default_rng(seed)
    pairs = rng.integers(0, 50, (RANKS, EXPERTS))
    pairs[:, -EACH:] = rng.integers(2000, 3000, (RANKS, EACH))
    other = pairs.copy()
    first = WIDTH * EACH
    other[:, first:-EACH] = rng.permuted(pairs[:, first:-EACH], axis=1)
    assert exchanged(other) == pytest.approx(exchanged(pairs), rel=1e-12)
