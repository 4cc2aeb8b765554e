"""A step with forced balance and equal sequences, without a trace: what published benchmarks run."""

from dataclasses import dataclass, replace

import numpy as np

from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import ExpertLoad
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.flops import flops_per_token
from moe_rl.simulators.pricing import TrainingStep
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.step import simulate_policies


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancedStep:
    """A forced-balance step as predicted."""

    step_time_s: float
    tokens_per_s_per_gpu: float
    tflops_per_s_per_gpu: float
    phi: float


def balanced_step(
    model: MoeModelSpec,
    topology: ClusterTopology,
    setting: StepSetting,
    *,
    tokens_per_rank: int,
    sequence_length: int,
    num_micro_batches: int,
) -> BalancedStep:
    """Return the step of `num_micro_batches` equal micro-batches of `tokens_per_rank` tokens on every rank.

    Tokens per rank are local ones: a sequence's tokens divided by TP x CP. The optimizer's step is left out: how far
    its state is shared out is not known here, and over many micro-batches it is small.
    """
    one = replace(setting, pipeline_model_parallel_size=1, num_virtual_stages=1, sequence_length=sequence_length)
    group = replace(topology, num_ep_groups=1, slices_per_dp_rank=1)
    load = uniform_load(model, group, tokens_per_rank=tokens_per_rank)
    layout = BatchLayout(
        micro_batch=np.zeros(group.ep_size, np.int32),
        dp_rank=np.arange(group.ep_size, dtype=np.int32),
        order=np.zeros(group.ep_size, np.int32),
        num_micro_batches=1,
        num_dp_ranks=group.ep_size,
    )
    lengths = np.full(group.ep_size, tokens_per_rank)
    step = TrainingStep(load=load, layout=layout, lengths=lengths, model=model, topology=group, setting=one)
    result = simulate_policies({}, step)
    stages, virtual = setting.pipeline_model_parallel_size, setting.num_virtual_stages
    bubble = 1.0 + (stages - 1) / (num_micro_batches * virtual)
    step_time_s = float(result.forced_balance.micro_batch_s.sum()) * num_micro_batches / stages * bubble
    tokens_per_s = tokens_per_rank * num_micro_batches / stages / step_time_s
    return BalancedStep(
        step_time_s=step_time_s,
        tokens_per_s_per_gpu=tokens_per_s,
        tflops_per_s_per_gpu=tokens_per_s * flops_per_token(model, sequence_length) / 1e12,
        phi=float(result.conditions.phi or 0.0),
    )


def uniform_load(model: MoeModelSpec, topology: ClusterTopology, *, tokens_per_rank: int) -> ExpertLoad:
    """Return one micro-batch in which every expert takes the same share, up to rounding."""
    experts = model.num_experts
    ends = np.arange(1, experts + 1) * (tokens_per_rank * model.top_k) // experts
    pairs = np.diff(ends, prepend=0).astype(np.int32)
    shape = (topology.num_ep_groups, 1, model.num_moe_layers, topology.ep_size, experts)
    return ExpertLoad(
        pairs=np.broadcast_to(pairs, shape).copy(),
        tokens=np.full((topology.num_ep_groups, 1, topology.ep_size), tokens_per_rank, np.int64),
        top_k=model.top_k,
    )
