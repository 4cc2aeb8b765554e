"""A step with forced balance and equal sequences, as published benchmarks run it. It needs no trace."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import Floats, LayerRows
from moe_rl.core.load import StepLoad
from moe_rl.core.micro_batch_cost import MicroBatchCost
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.base_time import SourceWork, attends_to_rows, attention_squares, host_seconds
from moe_rl.simulators.memory import MemoryForecast, forecast_memory, in_flight
from moe_rl.simulators.movement import once_per_step
from moe_rl.simulators.pipeline import pipelined
from moe_rl.simulators.pricing import ROUTED_PARTS, StepPricing
from moe_rl.simulators.result import IMBALANCE_PARTS
from moe_rl.simulators.setting import TrainingRun, TrainingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancedStep:
    """A forced-balance step as predicted."""

    breakdown_s: Mapping[str, float]
    """Seconds by part; they add up to the step."""
    tokens_per_s_per_gpu: float
    tflops_per_s_per_gpu: float
    phi: float
    """Share of a micro-batch's way through all layers that grows with imbalance."""

    @property
    def step_time_s(self) -> float:
        """Seconds of the step."""
        return sum(self.breakdown_s.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancedBatch(TrainingRun):
    """One balanced micro-batch of a run. Constants may be replaced: where its rows go does not depend on them."""

    rows: LayerRows
    work: SourceWork
    sequence_length: int

    @classmethod
    def of(cls, run: TrainingRun, *, tokens_per_rank: int, sequence_length: int) -> Self:
        """Return a micro-batch of `tokens_per_rank` tokens on every rank, experts drawn uniformly.

        Tokens per rank are local ones: a sequence's tokens divided by TP x CP.
        """
        model, group = run.model, replace(run.topology, num_ep_groups=1, slices_per_dp_rank=1)
        load = uniform_load(replace(model, moe_layer_ids=(0,)), group, tokens_per_rank=tokens_per_rank)
        layer = StepPricing.without_windows(replace(run, topology=group)).uniform(load)

        def alike(values: Floats) -> Floats:
            # All layers, ranks and nodes are alike: one rank and one node stand for all.
            of_rank = values[..., :1] if values.ndim == 4 else values
            return np.broadcast_to(of_rank, (1, 1, model.num_moe_layers, *of_rank.shape[3:]))

        rows = LayerRows(**{item.name: alike(getattr(layer, item.name)) for item in fields(layer)})
        work = SourceWork.alike(np.full((1, 1, 1), float(tokens_per_rank)), sequence_length, run)
        return cls(
            model=model,
            topology=run.topology,
            setting=run.setting,
            rows=rows,
            work=work,
            sequence_length=sequence_length,
        )

    def memory(self, *, buffers: int = 0, with_remedies: bool = True) -> MemoryForecast:
        """Return the peak as forecast, with as many micro-batches as a pipeline's first stage holds.

        Without `with_remedies` it is the peak alone, in a third of the time where it does not fit.
        """
        # 1F1B lets the first of S stages hold most: S micro-batches against one of the last.
        batches_in_flight = ceil(in_flight(self.setting, 0))

        def in_flight_at_once(of_micro_batch: Floats) -> Floats:
            return np.broadcast_to(of_micro_batch, (1, batches_in_flight, *of_micro_batch.shape[2:]))

        return forecast_memory(
            in_flight_at_once(self.rows.rows),
            in_flight_at_once(self.work.tokens),
            None,
            run=self,
            visits=in_flight_at_once(self.rows.rank_visits),
            buffers=buffers,
            with_remedies=with_remedies,
        )

    def step(self, num_micro_batches: int) -> BalancedStep:
        """Return the step of that many such micro-batches."""
        pricing = StepPricing.without_windows(self)
        pricing = replace(pricing, passes=pricing.passes[:1])
        seconds = pricing.seconds(self.rows, self.work, micro_batches=num_micro_batches)
        once_s = {name: float(part[0, 0]) for name, part in seconds.items()}
        tokens = float(self.work.tokens.mean())
        parts = {name: seconds * num_micro_batches for name, seconds in once_s.items()}
        breakdown = pipelined(pricing, parts, tokens=tokens, micro_batches=num_micro_batches)
        breakdown |= once_per_step(pricing, breakdown, micro_batches=num_micro_batches)
        breakdown = {name: self.setting.software.everything * seconds for name, seconds in breakdown.items()}
        # All S stages work on the same tokens: a GPU is credited with 1 / S of them.
        tokens_of_step = tokens * num_micro_batches / self.setting.pipeline_model_parallel_size
        tokens_per_s = tokens_of_step / sum(breakdown.values())
        flops_per_s = tokens_per_s * flops_per_token(self.model, self.sequence_length)
        imbalance_s = sum(once_s[name] for name in IMBALANCE_PARTS)
        return BalancedStep(
            breakdown_s=breakdown,
            tokens_per_s_per_gpu=tokens_per_s,
            tflops_per_s_per_gpu=flops_per_s / 1e12,
            phi=imbalance_s / sum(once_s.values()),
        )


def length_of_equal_sequences(run: TrainingRun, lengths: NDArray[np.int64], *, row_tokens: int) -> int:
    """Return the length of equal sequences with as much attention per token as sequences of `lengths` [S].

    If attention computes whole packed rows, it is `row_tokens`, the tokens of a data-parallel rank in a micro-batch.
    Otherwise it is sum(length^2) / sum(length). Example: of 100 and 300 tokens it is 250.
    """
    if attends_to_rows(run.model, run.setting):
        return max(1, row_tokens)
    return max(1, round(float((lengths.astype(np.float64) ** 2).sum()) / max(1.0, float(lengths.sum()))))


def micro_batch_cost(step: TrainingStep) -> MicroBatchCost:
    """Return the cost of a step's micro-batches by their lengths alone, priced as the step is."""
    running_tokens = step.load.tokens[step.load.tokens.sum(axis=2) > 0]
    mean = float(running_tokens.mean()) if running_tokens.size else 2.0
    cost = cost_of_lengths(step, step.lengths, tokens_per_rank=mean)
    if step.load.scaled:
        return replace(cost, scaled_tokens=round(mean))
    return cost


def cost_of_lengths(run: TrainingRun, sequence_lengths: NDArray[np.int64], *, tokens_per_rank: float) -> MicroBatchCost:
    """Return the cost of micro-batches of about `tokens_per_rank` tokens by the lengths [S] of sequences alone.

    Routed experts and their all-to-all are affine in a rank's tokens, so two balanced micro-batches give the constants.
    Overlap of all-to-all and computation is taken at the mean.
    """
    lengths = sequence_lengths.astype(np.float64)
    mean = max(2, round(tokens_per_rank) // 2 * 2)  # even, so that the half batch is whole as well
    model, setting, pricing = run.model, run.setting, StepPricing.without_windows(run)

    def routed_s(tokens: int) -> float:
        batch = BalancedBatch.of(run, tokens_per_rank=tokens, sequence_length=1)
        # Of 8 micro-batches seven have a backward beside their forward, and overlap hides under that.
        parts = pricing.seconds(batch.rows, batch.work, micro_batches=8)
        return sum(float(parts[name][0, 0]) for name in (*ROUTED_PARTS, "overlap"))

    half, mean_s = routed_s(mean // 2), routed_s(mean)
    one_length = setting.sequence_length
    attended = attention_squares(sequence_lengths if one_length is None else np.array([one_length], np.int64), model)
    if one_length is not None:
        attended = lengths * attended / one_length
    if attends_to_rows(model, setting):
        # A row of the mean micro-batch, whose tokens are all attended to.
        attended = lengths * float(one_length or mean * run.topology.slices_per_dp_rank)
    waits_s = pricing.waits(float(attended.sum()) / max(1.0, float(lengths.sum())))

    def host_s(*, moe_layer: bool) -> float:
        return sum(
            host_seconds(pricing, backward_passes=params.backward_passes, moe_layer=moe_layer)
            for params in pricing.passes
        )

    stages, virtual = setting.pipeline_model_parallel_size, setting.num_virtual_stages
    return MicroBatchCost(
        sequence_s=np.stack([part.per_token * lengths + part.per_square * attended for part in waits_s])
        / run.topology.slices_per_dp_rank,
        sequence_tokens=lengths,
        routed_token_s=2.0 * (mean_s - half) / mean,
        fixed_s=sum(part.fixed_s for part in waits_s),
        # A line through T / 2 and T meets zero tokens at twice the first less the second.
        routed_fixed_s=max(0.0, 2.0 * half - mean_s),
        num_layers=model.num_layers,
        num_moe_layers=model.num_moe_layers,
        host_moe_layer_s=host_s(moe_layer=True),
        host_dense_layer_s=host_s(moe_layer=False),
        bubble=(stages - 1) / virtual,
        # Megatron refuses an interleaved schedule whose micro-batches are no multiple of the stages.
        multiple_of=stages if virtual > 1 else 1,
    )


def uniform_load(model: MoeModelSpec, topology: ClusterTopology, *, tokens_per_rank: int) -> StepLoad:
    """Return one micro-batch in which every expert takes the same share, up to rounding."""
    experts = model.num_experts
    # Differences of rounded sums: 10 pairs over 4 experts are 2, 3, 2, 3, and none is lost.
    ends = np.arange(1, experts + 1) * (tokens_per_rank * model.top_k) // experts
    pairs = np.diff(ends, prepend=0).astype(np.int32)
    shape = (topology.num_ep_groups, 1, model.num_moe_layers, topology.ep_size, experts)
    return StepLoad(
        pairs=np.broadcast_to(pairs, shape).copy(),
        tokens=np.full((topology.num_ep_groups, 1, topology.ep_size), tokens_per_rank, np.int64),
        top_k=model.top_k,
    )


def flops_per_token(model: MoeModelSpec, sequence_length: float) -> float:
    """Return floating-point operations of forward and backward per token; causal attention counts half.

    Layers with a window of w tokens count 2 w - w^2 / n instead of the n of a sequence of n tokens, w < n.

    Recomputation does not count (model FLOPs, as in NVIDIA/Megatron-LM:megatron/training/training.py).
    """
    core = model.query_channels + model.num_attention_heads * model.kv_channels
    # As much as full attention over a sequence of this length.
    attended = float(attention_squares(np.array([round(sequence_length)], np.int64), model)[0]) / round(sequence_length)
    attention = 2.0 * model.attention_params + attended * core
    per_width = 2.0 * model.num_expert_matrices * model.hidden_size
    moe = model.top_k * model.moe_ffn_hidden_size + model.shared_expert_ffn_hidden_size
    dense_layers = model.num_layers - model.num_moe_layers
    ffn = per_width * (model.num_moe_layers * moe + dense_layers * model.dense_ffn_hidden_size)
    head = 2.0 * model.hidden_size * model.vocab_size
    # Backward computes two products for every one of forward.
    return 3.0 * (model.num_layers * attention + ffn + head)
