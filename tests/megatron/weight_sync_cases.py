"""Cases of test_weight_sync.py: what a trainer reads for a sync, between an optimizer step and the next forward."""

from typing import Any
from unittest.mock import patch

import collective_cases
import grouped_cases
import numpy as np
import tiny_gpt
import torch
from megatron.core import parallel_state

from moe_rl.megatron import attach
from moe_rl.megatron.expert_state import MegatronExperts
from moe_rl.megatron.weight_sync import MegatronExpertReader
from moe_rl.sync import EngineLayout, SyncProblem
from moe_rl.sync.rank_plan import Parts


def problem_of(reader: MegatronExpertReader, *, tp_size: int = 1) -> SyncProblem:
    """A sync to one engine that holds every expert, cut into `tp_size` parts."""
    layout = reader.trainer_layout()
    num_layers, num_experts = layout.home_rank.shape
    slots = np.tile(np.arange(num_experts, dtype=np.int32), (num_layers, 1))
    return SyncProblem(
        trainer=layout,
        engines=(EngineLayout(slots=slots, ep_size=1, tp_size=tp_size),),
        node_of=(0,) * layout.size + (1,) * tp_size,
        expert_bytes=reader.shape(1).expert_bytes,
    )


def sum_of_experts(balancer: Any) -> int:
    """What this trainer votes with: the sum of the experts that it would send to one engine."""
    reader = MegatronExpertReader(balancer)
    return reader.side(problem_of(reader)).weights_sum


def parts_of_experts() -> bool:
    """Whether each trainer of two that share an expert reads its two of four parts: rows of its own matrices."""
    with tiny_gpt.parallel(2, expert_tensor=2):
        run = tiny_gpt.build()
        reader = MegatronExpertReader(attach(run.models, run.optimizer, collective_cases.OWN))
        side, shape = reader.side(problem_of(reader, tp_size=4)), reader.shape(4)
        first_part = 2 * parallel_state.get_expert_tensor_parallel_rank()
        num_experts, ep_rank = run.config.num_moe_experts // 2, parallel_state.get_expert_model_parallel_rank()
        same = []
        for layer in run.gpt.decoder.layers:
            for number, expert in enumerate(layer.mlp.experts.local_experts):
                gate, up = expert.linear_fc1.weight.chunk(2)
                for index in range(2):
                    part = first_part + index
                    where = Parts(layer.layer_number - 1, ep_rank * num_experts + number, part, part + 1)
                    rows = slice(index * shape.rows_per_part, (index + 1) * shape.rows_per_part)
                    expected = gate[rows], up[rows], expert.linear_fc2.weight[:, rows]
                    same += map(torch.equal, shape.unpack(side.read(where), 1), expected)
        return bool(same) and all(same)


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
