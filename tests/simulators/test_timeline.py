"""Timelines: they end when the step says, ranks never do two things at once, and Chrome reads the file."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from step_cases import StepCase, case_of, cases
from strategies import HARDWARE, layout_for, load_of, model_spec, random_pairs

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.timeline import TimelineEvent, chrome_json, step_timeline


def timeline(case: StepCase, policy: str = "replicas", **options: object) -> list[TimelineEvent]:
    return step_timeline(
        case.plans[policy],
        case.step,
        **options,
    )


def plain(case: StepCase) -> StepCase:
    """The case without what timelines leave out, and with a dense layer before the MoE layers."""
    model = case.model
    ids = tuple(layer + 1 for layer in model.moe_layer_ids)
    return replace(
        case,
        setting=replace(case.setting, overlap_all_to_all=False, log_prob_passes=0),
        model=replace(model, num_layers=model.num_layers + 1, moe_layer_ids=ids, dense_ffn_hidden_size=4096),
    )


@pytest.mark.lengthy
@given(cases())
def test_the_timeline_ends_when_the_simulator_says(case: StepCase) -> None:
    case = plain(case)
    result = case.simulate()
    for policy in case.plans:
        for group in range(case.load.num_ep_groups):
            events = timeline(case, policy, group=group)
            end = max((event.start_s + event.duration_s for event in events), default=0.0)
            assert end == pytest.approx(result.policies[policy].micro_batch_s[group].sum(), rel=1e-9)


@pytest.mark.lengthy
@given(cases())
def test_a_rank_does_one_thing_at_a_time_and_never_rests_unseen(case: StepCase) -> None:
    case = plain(case)
    events = timeline(case)
    for rank in range(case.topology.ep_size):
        mine = sorted((event for event in events if event.rank == rank), key=lambda event: event.start_s)
        ends = [event.start_s + event.duration_s for event in mine]
        assert np.allclose([event.start_s for event in mine], [0.0, *ends][: len(mine)], rtol=1e-9, atol=1e-12)


def test_the_slowest_rank_waits_for_nobody_and_the_others_for_it() -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    pairs = random_pairs(np.random.default_rng(0), (1, 2, 2, 4, 8), most=10) * 0 + 200
    pairs[..., 6:] = 4000  # rank 3 is home of experts 6 and 7
    load = load_of(pairs.astype(np.int32), 2)
    layout = layout_for(load, topology)
    lengths = load.tokens.transpose(1, 0, 2).reshape(-1)
    model = model_spec(num_experts=8, num_layers=2, top_k=2)
    case = replace(case_of(load, topology, np.random.default_rng(0)), model=model, layout=layout, lengths=lengths)
    events = timeline(case, "homes", micro_batches=[1])
    waits = [sum(event.duration_s for event in events if event.name == "wait" and event.rank == r) for r in range(4)]
    assert waits[3] < 0.1 * min(waits[:3])
    assert {event.micro_batch for event in events} == {1}
    gemm = [event for event in events if event.name == "expert_gemm"]
    assert {event.rows for event in gemm if event.rank == 3} >= {2 * 4 * 4000}

    trace = json.loads(chrome_json({"static": events, "other": events[:10]}, ranks_per_node=2))["traceEvents"]
    names = {event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert names >= {"static, node 0", "static, node 1"}
    threads = {event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert threads >= {"rank 0", "rank 1", "rank 2", "rank 3"}
    drawn = [event for event in trace if event["ph"] == "X"]
    assert len(drawn) == len(events) + 10
    assert {"dispatch", "expert_gemm", "combine", "wait"} <= {event["cat"] for event in drawn}
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in drawn)


def test_a_micro_batch_or_group_that_is_not_there_is_refused() -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, ranks_per_node=2)
    load = load_of(np.full((1, 2, 1, 2, 4), 10, np.int32), 2)
    case = case_of(load, topology, np.random.default_rng(0))
    with pytest.raises(InvalidInputError, match=r"micro-batch 2 does not exist: micro-batches are numbered 0 to 1"):
        timeline(case, micro_batches=[2])
    with pytest.raises(InvalidInputError, match=r"EP group 1 does not exist: EP groups are numbered 0 to 0"):
        timeline(case, group=1)
