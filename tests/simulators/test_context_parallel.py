"""Context parallelism as it runs: what a ring hides beside attention, and what an exchange of heads moves."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.config import load_cluster, load_model
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.balanced import BalancedBatch, BalancedStep
from moe_rl.simulators.base_time import (
    SourceWork,
    context_parallel_part,
    core_attention_seconds,
    default_cp_comm_type,
    rank_seconds,
)
from moe_rl.simulators.setting import CP_COMM_TYPES, StepSetting, TrainingRun

H100 = load_cluster("h100")
DEEPSEEK, QWEN = load_model("deepseek-v3").spec, load_model("qwen3-235b-a22b").spec
RUN = TrainingRun(model=QWEN, topology=ClusterTopology(hardware=H100, ep_size=8), setting=StepSetting())

settings_of_parts = st.builds(
    StepSetting,
    context_parallel_size=st.sampled_from([2, 4, 8, 16]),
    tensor_model_parallel_size=st.sampled_from([1, 2, 4]),
    cp_comm_type=st.sampled_from([None, *CP_COMM_TYPES]),
)


def seconds(setting: StepSetting, *, length: int, backward: bool = False, model: object = QWEN) -> float:
    """Return what context parallelism adds to one layer for 4,096 local tokens of sequences of that length."""
    part = context_parallel_part(model, H100, setting, backward=backward)  # type: ignore[arg-type]
    work = SourceWork.alike(np.full((1, 1, 1), 4096.0), length, RUN)
    return float(rank_seconds({"cp": part}, work)["cp"][0, 0, 0])


@given(settings_of_parts, st.booleans())
def test_it_costs_no_less_than_nothing_and_nothing_without_it(setting: StepSetting, backward: bool) -> None:
    assert seconds(setting, length=32768, backward=backward) >= 0.0
    assert seconds(replace(setting, context_parallel_size=1), length=32768, backward=backward) == 0.0


@given(st.sampled_from([2, 4, 8]), st.sampled_from([4096, 32768, 131072]))
def test_a_ring_hides_beside_core_attention_and_gathering_does_not(parts: int, length: int) -> None:
    """What is left of a ring is what attention is too short for: nothing of it for long sequences."""
    ring, gathered = (StepSetting(context_parallel_size=parts, cp_comm_type=kind) for kind in ("p2p", "allgather"))
    beside = 4096 * length * core_attention_seconds(QWEN, H100, StepSetting(), backward=False)
    sent = seconds(gathered, length=length)
    assert seconds(ring, length=length) == pytest.approx(max(0.0, sent - beside), abs=1e-12)
    assert seconds(ring, length=1_000_000) == 0.0 < seconds(gathered, length=1_000_000)


def test_an_exchange_of_heads_does_not_grow_with_the_ranks_as_a_ring_does() -> None:
    """At CP8 a rank sends 7/8 of its heads' channels, at CP2 1/2; a ring's stops grow from 1 to 7."""

    def moved(parts: int, kind: str) -> float:
        return seconds(StepSetting(context_parallel_size=parts, cp_comm_type=kind), length=1)

    assert moved(8, "a2a") / moved(2, "a2a") == pytest.approx((7 / 8) / (1 / 2))
    assert moved(8, "allgather") / moved(2, "allgather") == pytest.approx(7.0)
    # By hand: 64 heads of 128 channels for queries and outputs, 2 x 4 for keys and values, 2 bytes, 320 GB/s of NVLink.
    assert moved(2, "a2a") == pytest.approx(4096 * 2 * (2 * 64 + 2 * 4) * 128 * 0.5 / 320e9)


def test_both_kinds_exchange_in_the_node_and_ring_across() -> None:
    both = StepSetting(context_parallel_size=16, cp_comm_type="a2a+p2p")
    inside = StepSetting(context_parallel_size=8, cp_comm_type="a2a")
    assert seconds(both, length=1_000_000) == pytest.approx(seconds(inside, length=1))  # the ring is hidden
    assert seconds(both, length=1) > seconds(inside, length=1)
    assert seconds(replace(both, context_parallel_size=8), length=1) == pytest.approx(seconds(inside, length=1))


def test_where_nobody_says_heads_are_exchanged_if_they_suffice_and_move_less() -> None:
    latent = StepSetting(context_parallel_size=8)
    assert default_cp_comm_type(DEEPSEEK, H100, latent) == "a2a"  # its ring carries 320 channels for each of 128 heads
    grouped = StepSetting(context_parallel_size=8, tensor_model_parallel_size=4)
    assert default_cp_comm_type(QWEN, H100, grouped) == "p2p"  # 4 key-value heads cannot be shared by 32 ranks
    assert seconds(latent, length=32768, model=DEEPSEEK) == seconds(
        replace(latent, cp_comm_type="a2a"), length=32768, model=DEEPSEEK
    )


def step(setting: StepSetting, *, length: int) -> BalancedStep:
    run = TrainingRun(model=QWEN, topology=ClusterTopology(hardware=H100, ep_size=8), setting=setting)
    return BalancedBatch.of(run, tokens_per_rank=4096, sequence_length=length).step(16)


def test_a_step_takes_the_kind_from_its_setting_and_refuses_an_unknown_one() -> None:
    ring, gathered = (
        step(StepSetting(context_parallel_size=4, cp_comm_type=kind), length=65536) for kind in ("p2p", "allgather")
    )
    assert ring.breakdown_s["context_parallel"] < gathered.breakdown_s["context_parallel"]
    with pytest.raises(InvalidInputError, match=r"cp_comm_type 'ring' is unknown\. Known: a2a"):
        StepSetting(context_parallel_size=4, cp_comm_type="ring")
