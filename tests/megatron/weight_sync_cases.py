"""Cases of test_weight_sync.py: what a trainer reads for a sync, between an optimizer step and the next forward."""

from typing import Any
from unittest.mock import patch

import collective_cases
import grouped_cases
import numpy as np
import tiny_gpt
from megatron.core import parallel_state

from moe_rl.megatron import attach
from moe_rl.megatron.expert_state import MegatronExperts
from moe_rl.megatron.weight_sync import MegatronExpertReader
from moe_rl.sync import EngineLayout, SyncProblem


def sum_of_experts(balancer: Any) -> int:
    """What this trainer votes with: the sum of the experts that it would send to one engine."""
    reader = MegatronExpertReader(balancer)
    layout = reader.trainer_layout()
    num_layers, num_experts = layout.home_rank.shape
    engine = EngineLayout(slots=np.tile(np.arange(num_experts, dtype=np.int32), (num_layers, 1)), ep_size=1)
    problem = SyncProblem(
        trainer=layout,
        engines=(engine,),
        node_of=(*(0 for _ in range(layout.size)), 1),
        expert_bytes=reader.shape(1).expert_bytes,
    )
    return reader.side(problem).weights_sum


def gathers_overlap() -> dict[str, Any]:
    """Expert-DP twins after a step whose parameters Megatron gathers in the next forward; first without our wait."""
    with tiny_gpt.parallel(2):
        run = grouped_cases.with_distinct_experts(
            tiny_gpt.build(overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=collective_cases.BUCKET)
        )
        balancer = attach(run.models, run.optimizer, collective_cases.OWN)
        collective_cases.train(run, balancer, [], steps=1, shape={})
        with patch.object(MegatronExperts, "complete_gathers", lambda self: None):
            stale = sum_of_experts(balancer)
        gathered = sum_of_experts(balancer)
        return {"ep": parallel_state.get_expert_model_parallel_rank(), "stale": stale, "gathered": gathered}
