"""Peak memory of every rank under a policy, and whether it fits the GPU.

Balance decides the activations of routed rows: without recomputation the rows of all layers in flight add up,
and layers average out; with recomputation the largest single layer counts, and it does not. The rest (parameters,
gradients, optimizer, attention, logits) is the same for every policy and estimated from the model's shape.

G EP groups, M micro-batches, L MoE layers, P ranks, S pipeline stages; bytes throughout.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import BF16_BYTES, FP8_ROW_BYTES, Floats
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.step_words import Recompute
from moe_rl.simulators.setting import StepSetting, TrainingRun

GIB = 1 << 30
# A parameter has a bf16 weight and an fp32 master.
WEIGHT_BYTES, MASTER_BYTES = 2, 4
# Bytes per expert width kept for backward: first product and activation in bf16 (a gated first product is twice as
# wide and its activation half).
FIRST_PRODUCT_SAVED, ACTIVATION_SAVED = 4, 2
# Bytes per expert width that backward of one layer adds: gradients, and for unfused GELU its fp32 temporaries.
ACTIVATION_TRANSIENT = {"swiglu": 6, "swiglu_oai": 6, "gelu": 13, "relu2": 4}
# Copies of every row that a flat all-to-all holds while its layer runs: before sending and before sorting.
FLAT_COPIES = 2
# Of a token and vocabulary entry: 2 bytes of bf16 logits, 4 of the fp32 copy that the loss makes.
LOGIT_BYTES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """Peak of the worst rank of the worst pipeline stage, and its parts."""

    parts_bytes: dict[str, int]
    """Parts of that peak; they add up to `peak_bytes`."""
    rank_peak_bytes: NDArray[np.int64]
    """[P] peak of every EP rank in its worst group, micro-batch and stage."""
    hbm_bytes: int
    tokens: int = 0
    """Tokens of the fullest rank in a micro-batch."""
    remedies: tuple[str, ...] = ()
    """Changes of which each alone would make it fit, where it does not."""

    @property
    def peak_bytes(self) -> int:
        """Peak of the worst rank."""
        return int(self.rank_peak_bytes.max())

    @property
    def fullest_rank(self) -> int:
        """The rank with that peak."""
        return int(self.rank_peak_bytes.argmax())

    @property
    def tokens_that_fit(self) -> float:
        """Share of the micro-batches' tokens with which the peak would be the GPU's memory; 0 where none would."""
        by_tokens = sum(self.parts_bytes[name] for name in ("attention_activations", "logits", "routed_rows"))
        return max(0.0, (self.hbm_bytes - self.peak_bytes + by_tokens) / max(1, by_tokens))

    @property
    def largest_micro_batch(self) -> int:
        """Tokens per rank, at most, of micro-batches like these whose forecast peak fits."""
        return int(self.tokens_that_fit * self.tokens)

    def __str__(self) -> str:
        """Return the sentence about a pass that is printed before it runs."""
        sentence = f"rank {self.fullest_rank} has the highest predicted peak memory, {self.peak_bytes / GIB:.1f} GiB"
        if self.fits:
            limit_sentence = f"Micro-batches of up to {self.largest_micro_batch:,} tokens per rank would fit"
            return f"{sentence} of {self.hbm_bytes / GIB:.1f} GiB. {limit_sentence}"
        gpu = f"but the GPU has only {self.hbm_bytes / GIB:.1f} GiB"
        return f"predicted out of memory: {sentence}, {gpu}. Any of these would fit: {'; '.join(self.remedies)}"

    @property
    def fits(self) -> bool:
        """False forecasts an out-of-memory error; allocator fragmentation needs room beside the peak."""
        return self.peak_bytes <= self.hbm_bytes


def saved_row_bytes(model: MoeModelSpec, setting: StepSetting) -> float:
    """Return bytes that a routed row keeps on the GPU from forward to backward.

    Inputs of matrix products are kept as they are multiplied, in FP8 as FP8; the first product in bf16.
    """
    if setting.precision == "fp8":
        bytes_per_value = FP8_ROW_BYTES
    else:
        bytes_per_value = BF16_BYTES
    row = 0.0
    if "expert_fc1" not in setting.offload_modules:
        row = bytes_per_value * model.hidden_size
    if "moe_act" not in setting.offload_modules:
        row += FIRST_PRODUCT_SAVED * model.moe_ffn_hidden_size
    if "moe_act" not in setting.recompute_modules:
        row += ACTIVATION_SAVED / BF16_BYTES * bytes_per_value * model.moe_ffn_hidden_size
    return row


def transient_row_bytes(model: MoeModelSpec, setting: StepSetting) -> float:
    """Return bytes that a routed row adds while its layer runs backward."""
    copies = FLAT_COPIES if setting.dispatcher.sends_rows else 0
    return ACTIVATION_TRANSIENT[model.activation] * model.moe_ffn_hidden_size + copies * BF16_BYTES * model.hidden_size


def gradient_bytes(setting: StepSetting) -> int:
    """Return bytes of one parameter's gradient."""
    if setting.grad_reduce_in_fp32:
        return 4
    return BF16_BYTES


def held_expert_bytes(model: MoeModelSpec, setting: StepSetting) -> int:
    """Return bytes of a copy of another rank's expert: its weight, and the gradient that goes home."""
    return model.expert_bytes + gradient_bytes(setting) * model.expert_params


def forecast_memory(
    rows: Floats,
    tokens: Floats,
    placement: ExpertPlacement | None,
    *,
    run: TrainingRun,
    visits: Floats | None = None,
    buffers: float = 0.0,
    stage: int | None = None,
    hbm_bytes: int | None = None,
    with_remedies: bool = True,
) -> MemoryForecast:
    """Return the peaks for `rows` [G, M, L, P] and source ranks' `tokens` [G, M, P]; `placement` None: homes only.

    A hierarchical dispatcher sends `visits` [G, M, L, P] tokens to each rank, by default a row for each token at
    most. `buffers` of one expert each are shared by all layers for replicas of single micro-batches. With a `stage`
    the rows are of that pipeline stage's layers, and the peak is its own. `hbm_bytes` is the cluster's by default.
    Without `with_remedies` it does not look for what would make a run fit, which costs three more forecasts.
    """
    if visits is None:
        visits = np.minimum(rows, tokens.sum(axis=2)[:, :, None, None])
    topology, setting = run.topology, run.setting
    stages = setting.pipeline_model_parallel_size
    layers = rows.shape[2]
    # With more stages than layers, layers share theirs.
    if stage is None:
        of_layers = np.arange(layers) * stages // layers
    else:
        of_layers = np.full(layers, stage)
    most_tokens = float(tokens.max(initial=0.0))

    num_resident = _resident_slots(placement)

    def forecast(
        *,
        recompute: Recompute = setting.recompute,
        width: int = 1,
        slots: float = buffers,
        resident: int = num_resident,
    ) -> MemoryForecast:
        """Return the forecast where every `width` ranks share their rows."""
        run_of_forecast = replace(run, setting=replace(setting, recompute=recompute))
        common = [_common_parts(run_of_forecast, resident, slots, most_tokens, stage) for stage in range(stages)]
        leveled_rows, received_rows = (
            _leveled(values, width) for values in (rows, rows if setting.dispatcher.sends_rows else visits)
        )
        routed_bytes = _routed_bytes(leveled_rows, received_rows, of_layers, run_of_forecast)
        per_rank = routed_bytes + np.array([sum(parts.values()) for parts in common])[:, None]
        if stage is None:
            worst_stage = int(per_rank.max(axis=1).argmax())
        else:
            worst_stage = stage
        parts = {name: round(value) for name, value in common[worst_stage].items()}
        of_peak = per_rank.max(axis=0) if stage is None else per_rank[stage]
        # Rows that stand for all ranks (P = 1) give every rank the same peak.
        peaks: NDArray[np.int64] = np.broadcast_to(np.rint(of_peak).astype(np.int64), topology.ep_size)
        parts["routed_rows"] = int(peaks.max()) - sum(parts.values())
        return MemoryForecast(
            parts_bytes=parts,
            rank_peak_bytes=peaks,
            hbm_bytes=hbm_bytes or round(topology.hardware.hbm_gib * GIB),
            tokens=int(most_tokens),
        )

    stated_forecast, domain, ranks = forecast(), topology.ranks_per_domain, topology.ep_size
    if stated_forecast.fits or not with_remedies:
        return stated_forecast
    alternatives = {
        "full recomputation (--recompute-granularity full)": forecast(recompute=Recompute.FULL),
        "replicas that balance the ranks of each node": forecast(width=domain, slots=max(buffers, 1.0)),
    }
    if ranks > domain:
        alternatives["replicas for the whole step that balance all ranks"] = forecast(
            width=ranks, resident=max(num_resident, 1)
        )
    fitting = [name for name, alternative in alternatives.items() if alternative.fits]
    return replace(
        stated_forecast, remedies=(f"micro-batches with {stated_forecast.tokens_that_fit:.0%} of the tokens", *fitting)
    )


def _leveled(values: Floats, width: int) -> Floats:
    """Return [..., P] with every `width` ranks at their mean."""
    if width == 1 or values.shape[3] == 1:
        return values
    return np.repeat(values.reshape(*values.shape[:3], -1, width).mean(axis=4), width, axis=3)


def _routed_bytes(rows: Floats, received_rows: Floats, of_layers: NDArray[np.int64], run: TrainingRun) -> Floats:
    """Return [stages, P] bytes of routed rows in every rank's worst group and micro-batch."""
    model, setting = run.model, run.setting
    stages = setting.pipeline_model_parallel_size
    saved_bytes, transient_bytes = saved_row_bytes(model, setting), transient_row_bytes(model, setting)
    # The inputs of one layer are on their way to the host.
    transient_bytes += saved_row_bytes(model, replace(setting, offload_modules=())) - saved_bytes
    updates = not setting.forward_only
    most_rows = np.stack([rows[:, :, of_layers == stage].max(axis=2, initial=0.0) for stage in range(stages)], axis=2)
    rows_in_flight = most_rows
    if not setting.recompute.repeats_experts and updates:
        in_stage = np.stack([rows[:, :, of_layers == stage].sum(axis=2) for stage in range(stages)], axis=2)
        rows_in_flight = np.stack(
            [_window_sum(in_stage[:, :, stage], in_flight(setting, stage)) for stage in range(stages)], axis=2
        )
    most_received = np.stack(
        [received_rows[:, :, of_layers == stage].max(axis=2, initial=0.0) for stage in range(stages)], axis=2
    )
    bytes_of_rows = (
        rows_in_flight * saved_bytes
        + (most_rows * transient_bytes if updates else 0)
        + most_received * BF16_BYTES * model.hidden_size
    )
    by_stage: Floats = bytes_of_rows.max(axis=(0, 1))
    return by_stage


def _common_parts(run: TrainingRun, resident: int, buffers: float, tokens: float, stage: int) -> dict[str, float]:
    """Return the bytes that ranks of a stage hold whatever the routing; `tokens` is the fullest rank's micro-batch."""
    model, setting = run.model, run.setting
    stages = setting.pipeline_model_parallel_size
    updates = not setting.forward_only
    layers, moe_layers = model.num_layers / stages, model.num_moe_layers / stages
    sharded = optimizer_params(run, stage)
    params = sum(stage_params(run, stage))
    if setting.use_megatron_fsdp:
        # Its own share, and the layer that is gathered for use.
        params = sharded + params / layers
    micro_batches = in_flight(setting, stage) if updates else 1
    if not setting.recompute.repeats_layer and updates:
        saved_bytes = _attention_bytes(model, setting)
    else:
        saved_bytes = BF16_BYTES * model.hidden_size
    bytes_before_offload = _attention_bytes(model, replace(setting, offload_modules=()))
    is_last = stage == stages - 1
    held_bytes = held_expert_bytes(model, setting)
    return {
        "weights": WEIGHT_BYTES * params,
        "gradients": gradient_bytes(setting) * params * updates,
        "optimizer": (1.0 - setting.optimizer_offload_fraction)
        * (MASTER_BYTES + 2 * (BF16_BYTES if setting.bf16_moments else 4))
        * sharded
        * updates,
        "attention_activations": tokens * (layers * micro_batches * saved_bytes + bytes_before_offload),
        "logits": LOGIT_BYTES * tokens * model.vocab_size * is_last,
        "replica_slots": held_bytes * buffers,
        "resident_slots": held_bytes * moe_layers * resident,
    }


def stage_params(run: TrainingRun, stage: int) -> tuple[float, float]:
    """Return parameters of one rank of a pipeline stage: outside the routed experts, and of its routed experts.

    The first and the last stage hold an embedding and an output matrix.
    """
    model, stages = run.model, run.setting.pipeline_model_parallel_size
    tensor_parallel = run.setting.tensor_model_parallel_size
    ends = (stage == 0) + (stage == stages - 1)
    dense = (dense_params(model) / stages + ends * model.hidden_size * model.vocab_size) / tensor_parallel
    experts = model.num_moe_layers / stages * model.num_experts / run.topology.ep_size * model.expert_params
    return dense, experts


def optimizer_params(run: TrainingRun, stage: int) -> float:
    """Return parameters whose optimizer state one rank holds: the distributed optimizer shares them out.

    Dense ones over all data-parallel ranks of the topology (context-parallel ones included), experts over EP groups.
    """
    dense, experts = stage_params(run, stage)
    shards = max(1.0, run.topology.num_ranks / run.setting.tensor_model_parallel_size)
    return dense / shards + experts / run.topology.num_ep_groups


def _resident_slots(placement: ExpertPlacement | None) -> int:
    """Return the experts that the fullest rank holds for the whole step beside its homes, in every layer."""
    if placement is None:
        return 0
    is_filled = (placement.physical_to_logical_map >= 0).reshape(-1, placement.ep_size, placement.slots_per_rank)
    num_resident = int(is_filled.sum(axis=2).max()) - placement.num_experts // placement.ep_size
    return max(num_resident, placement.resident_slots)  # their buffers are there, filled or not


def dense_params(model: MoeModelSpec) -> float:
    """Return parameters of all layers outside routed experts and embeddings."""
    per_width = model.num_expert_matrices * model.hidden_size
    moe = per_width * model.shared_expert_ffn_hidden_size + model.hidden_size * model.num_experts
    dense_layers = model.num_layers - model.num_moe_layers
    return float(
        model.num_layers * model.attention_params
        + model.num_moe_layers * moe
        + dense_layers * per_width * model.dense_ffn_hidden_size
    )


def _attention_bytes(model: MoeModelSpec, setting: StepSetting) -> float:
    """Return activations that a token keeps in one layer outside its routed experts (flash attention).

    The residual, inputs and outputs of two norms, queries, keys, values and attention's output; under recomputation of
    the MoE layer its shared experts are computed again as well. In FP8 the inputs of the projections take one byte.
    """
    hidden, outputs = model.hidden_size, model.num_attention_heads * model.kv_channels
    bytes_per_input = 1 if setting.precision == "fp8" else BF16_BYTES
    offloaded_modules, recomputed_modules = setting.offload_modules, setting.recompute_modules
    shared_width = model.shared_expert_ffn_hidden_size
    if setting.recompute.repeats_experts:
        shared_width = 0
    saved_bytes = BF16_BYTES * hidden + (FIRST_PRODUCT_SAVED + ACTIVATION_SAVED) * shared_width
    saved_bytes += (
        BF16_BYTES * hidden * (("attn_norm" not in offloaded_modules) + ("mlp_norm" not in offloaded_modules))
    )
    if "layernorm" not in recomputed_modules:
        saved_bytes += BF16_BYTES * hidden + ("qkv_linear" not in offloaded_modules) * bytes_per_input * hidden
    if "mla_up_proj" not in recomputed_modules and "core_attn" not in offloaded_modules:
        saved_bytes += BF16_BYTES * (model.query_channels + model.key_value_channels)
    return saved_bytes + ("attn_proj" not in offloaded_modules) * bytes_per_input * outputs


def in_flight(setting: StepSetting, stage: int) -> float:
    """Return how many micro-batches' worth of the stage's layers 1F1B holds at once.

    Interleaved schedules warm up with 2 (S - stage - 1) + (V - 1) S chunks of 1 / V of the stage
    (NVIDIA/Megatron-LM:megatron/core/pipeline_parallel/schedules.py).
    """
    stages, virtual = setting.pipeline_model_parallel_size, setting.num_virtual_stages
    if virtual == 1:
        return float(stages - stage)
    return (2 * (stages - stage - 1) + (virtual - 1) * stages + 1) / virtual


def _window_sum(rows: Floats, width: float) -> Floats:
    """Return [G, M, P] sums over each micro-batch and the `width` - 1 before it, the earliest by its share."""
    num_whole = int(width)
    total = np.cumsum(rows, axis=1)
    sums: Floats = total.copy()
    sums[:, num_whole:] -= total[:, :-num_whole]
    sums[:, num_whole:] += (width - num_whole) * rows[:, :-num_whole]
    return sums
