"""Seconds of a micro-batch outside its routed experts: attention, shared experts, dense layers, fixed costs, head.

Every part is linear in two numbers of a rank (but for a ring of context parallelism, which hides beside attention): its
tokens and its *attention squares*, the sum over its sequences of length squared (less where layers attend to a window
only), divided by the ranks that share them. A rank's time in a phase is a sum of parts; the phase lasts as long as its
slowest rank, because the dispatch that follows is a barrier.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import BF16_BYTES, Floats
from moe_rl.core.errors import require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.topology import ClusterTopology, HardwareSpec
from moe_rl.simulators.setting import StepSetting, TrainingRun, TrainingStep

# Hidden-size elements read and written by norms and residuals of a layer, forward and backward.
NORM_PASSES = (14.0, 24.0)
# The same for query, key and value elements: rotary embedding, normalization, layout.
QKV_PASSES = (6.0, 10.0)
# Backward core attention recomputes the scores: 5 matrix products against forward's 2.
BACKWARD_ATTENTION_FLOPS = 2.5
# Rate of core attention over packed rows of a model with sinks, as a share of the rate over single sequences: all pairs
# of a row are computed, of every sequence with every other. Fitted on gpt-oss-20b's SFT over rows of 32,768 tokens on 8
# H100 (tests/simulators/data/packed_rows.yaml), where it is the step.
PACKED_SINK_RATE = 0.0237
# Bytes per token and vocabulary entry of the loss: bf16 logits and their fp32 copy written and read; assumed.
LOSS_BYTES = (6.0, 8.0)
# All-gathers and reduce-scatters of a layer's attention part under sequence parallelism, forward and backward.
TENSOR_PARALLEL_COLLECTIVES = (2.0, 3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceWork:
    """Tokens and attention of each source rank in each micro-batch."""

    tokens: Floats
    """[G, M, P] tokens, filler rows included."""
    squares: Floats
    """[G, M, P] the rank's part of the sum over sequences of length squared."""
    attention_squares: Floats
    """[G, M, P] the rank's part of the sum over sequences of `attention_squares`."""

    @classmethod
    def of(cls, step: TrainingStep) -> "SourceWork":
        """Return the work of a step; its setting's `sequence_length` overrides the sequences' own lengths.

        Where the load was scaled to other token counts, the effective sequence length of a cell,
        sum(length^2) / sum(length), is kept; cells that recorded nothing take their micro-batch's.
        """
        load, layout, lengths, topology = step.load, step.layout, step.lengths, step.topology
        layout.check(lengths)
        same_ranks = layout.num_dp_ranks == topology.num_dp_ranks
        require(
            same_ranks and layout.num_micro_batches == load.num_micro_batches,
            "the batch layout does not match the expert loads and the topology: the layout has "
            f"{layout.num_micro_batches} micro-batches on {layout.num_dp_ranks} data-parallel ranks, but the loads "
            f"have {load.num_micro_batches} micro-batches and the topology has {topology.num_dp_ranks} data-parallel "
            "ranks.",
        )
        tokens = load.tokens.astype(np.float64)
        if step.setting.sequence_length is not None:
            return cls.alike(tokens, step.setting.sequence_length, step)
        tokens_of_places = layout.rank_tokens(lengths).astype(np.float64)

        def by_source(per_sequence: Floats) -> Floats:
            cells = np.zeros((layout.num_micro_batches, layout.num_dp_ranks))
            np.add.at(cells, (layout.micro_batch, layout.dp_rank), per_sequence)
            return by_cell(cells)

        def by_cell(cells: Floats) -> Floats:
            if not load.scaled:
                return _by_source(cells / topology.slices_per_dp_rank, topology)
            per_token = cells.sum(axis=1, keepdims=True) / np.maximum(tokens_of_places.sum(axis=1, keepdims=True), 1.0)
            effective = np.where(tokens_of_places > 0, cells / np.maximum(tokens_of_places, 1.0), per_token)
            return tokens * _by_source(effective, topology)

        whole_rows = attends_to_rows(step.model, step.setting)
        squares = by_cell(tokens_of_places**2) if whole_rows else by_source(attention_squares(lengths, step.model))
        return cls(tokens=tokens, squares=by_source(lengths.astype(np.float64) ** 2), attention_squares=squares)

    @classmethod
    def alike(cls, tokens: Floats, sequence_length: int, run: TrainingRun) -> "SourceWork":
        """Return the work of `tokens` [G, M, P] in sequences of one length, or in packed rows of it."""
        per_token = attention_squares(np.array([sequence_length], np.int64), run.model)[0] / sequence_length
        if attends_to_rows(run.model, run.setting):
            per_token = float(sequence_length)
        return cls(tokens=tokens, squares=tokens * sequence_length, attention_squares=tokens * per_token)

    @property
    def effective_sequence_length(self) -> float:
        """Sum of squares over sum of tokens of the step: the length that full attention sees."""
        total = float(self.tokens.sum())
        if not total:
            return 0.0
        return float(self.squares.sum()) / total

    def mean(self) -> "SourceWork":
        """Return the work spread evenly over the ranks, [G, M, 1]."""
        means = {item.name: getattr(self, item.name).mean(axis=2, keepdims=True) for item in fields(self)}
        return SourceWork(**means)


def attention_squares(lengths: NDArray[np.int64], model: MoeModelSpec) -> Floats:
    """Return [S] twice the pairs of a query and a key that causal attention computes, mean over the model's layers.

    n^2 for a sequence of n tokens; 2 n w - w^2 in layers with a window of w < n tokens. All layers of a
    step are priced as the mean layer.
    """
    full_squares = lengths.astype(np.float64) ** 2
    # Every query after the first w sees w keys: pairs are n w - w^2 / 2, twice that is 2 n w - w^2.
    window = np.minimum(lengths, model.sliding_window).astype(np.float64)
    share = model.num_sliding_window_layers / model.num_layers
    mean: Floats = (1.0 - share) * full_squares + share * window * (2.0 * lengths - window)
    return mean


def attends_to_rows(model: MoeModelSpec, setting: StepSetting) -> bool:
    """Return whether core attention computes whole packed rows, slowly, instead of each sequence by itself.

    So published runs of gpt-oss behave: its SFT over packed rows of 2,048 tokens on 8 H100 is 1.6 times slower than its
    layers without packing say, over rows of 32,768 tokens 14 times. FlashAttention does not know sinks, and Transformer
    Engine takes cuDNN for packed sequences with them.
    """
    return model.attention_sinks and setting.packed_sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTime:
    """Seconds = per_token * tokens + per_square * attention_squares + fixed_s."""

    per_token: float = 0.0
    per_square: float = 0.0
    fixed_s: float = 0.0
    hidden_per_token: float = 0.0
    """A transfer beside other work: it adds what is longer than `beside_per_square` times the squares, or nothing."""
    beside_per_square: float = 0.0

    def seconds(self, tokens: Floats, squares: Floats) -> Floats:
        """Return the seconds of so many tokens with so many attention squares, elementwise."""
        linear = self.per_token * tokens + self.per_square * squares + self.fixed_s
        if not self.hidden_per_token:
            return linear
        exposed_s: Floats = linear + np.maximum(self.hidden_per_token * tokens - self.beside_per_square * squares, 0.0)
        return exposed_s

    def exposed(self, squares_per_token: float) -> "LinearTime":
        """Return this part as a linear one, where sequences have so many squares per token."""
        exposed_per_token = max(0.0, self.hidden_per_token - self.beside_per_square * squares_per_token)
        return replace(self, per_token=self.per_token + exposed_per_token, hidden_per_token=0.0, beside_per_square=0.0)

    def plus(self, parts: "Parts", times: float) -> "LinearTime":
        """Return this and all the parts, so many times."""
        coefficients = {}
        for item in fields(LinearTime):
            of_parts = sum(getattr(part, item.name) for part in parts.values())
            coefficients[item.name] = getattr(self, item.name) + times * of_parts
        return LinearTime(**coefficients)


Parts = Mapping[str, LinearTime]


def rank_seconds(parts: Parts, work: SourceWork) -> dict[str, Floats]:
    """Return [G, M, P] seconds of each part; 0 where the EP group has no token."""
    has_tokens = work.tokens.sum(axis=2, keepdims=True) > 0
    return {
        name: np.where(has_tokens, part.seconds(work.tokens, work.attention_squares), 0.0)
        for name, part in parts.items()
    }


def slowest_rank(parts: Parts, work: SourceWork) -> dict[str, Floats]:
    """Return [G, M] seconds of each part on the rank whose parts add up to most."""
    seconds = rank_seconds(parts, work)
    slowest = sum(seconds.values(), np.zeros(work.tokens.shape)).argmax(axis=2)[..., None]
    return {name: np.take_along_axis(value, slowest, axis=2)[..., 0] for name, value in seconds.items()}


def layer_parts(
    model: MoeModelSpec, hardware: HardwareSpec, setting: StepSetting, *, backward: bool, moe_layer: bool
) -> Parts:
    """Return the parts of one layer outside its routed experts, for one forward or backward pass."""
    is_recomputed = backward and not moe_layer and "mlp" in setting.recompute_modules
    times = 2.0 + is_recomputed if backward else 1.0
    if moe_layer:
        ffn_width = model.shared_expert_ffn_hidden_size
    else:
        ffn_width = model.dense_ffn_hidden_size
    if backward:
        fixed_ms = hardware.layer_fixed_backward_ms
    else:
        fixed_ms = hardware.layer_fixed_forward_ms
    projection = times / _linear_flops_per_s(hardware, setting, max(1, ffn_width), model.hidden_size)
    ffn = 2.0 * model.num_expert_matrices * model.hidden_size * ffn_width
    return {
        "attention": _attention(model, hardware, setting, backward=backward),
        "tensor_parallel": LinearTime(
            per_token=TENSOR_PARALLEL_COLLECTIVES[backward]
            * (setting.tensor_model_parallel_size - 1)
            * BF16_BYTES
            * model.hidden_size
            / (hardware.nvlink_gb_per_s * 1e9)
        ),
        "context_parallel": context_parallel_part(model, hardware, setting, backward=backward),
        "shared_experts" if moe_layer else "dense_mlp": LinearTime(per_token=ffn * projection),
        "fixed": LinearTime(fixed_s=fixed_ms * 1e-3),
    }


def context_parallel_part(
    model: MoeModelSpec, hardware: HardwareSpec, setting: StepSetting, *, backward: bool
) -> LinearTime:
    """Return what context parallelism adds to a layer's attention, by `setting.cp_comm_type`.

    - `p2p`: keys and values travel around a ring of CP ranks beside core attention: only what is longer than it costs.
    - `a2a`: queries, keys, values and outputs are exchanged once, so that each rank attends with 1 / CP of the heads.
    - `a2a+p2p`: the first among the ranks of a node, the second across nodes.
    - `allgather`: keys and values are gathered before attention; nothing hides it.

    Where the setting leaves the kind open, the fastest for sequences of the mean length is not known here: the smaller
    transfer counts, an exchange of heads where they suffice. Tokens are local ones, so TP x CP have divided them.
    """
    if setting.context_parallel_size == 1:
        return LinearTime()
    kind = setting.cp_comm_type or default_cp_comm_type(model, hardware, setting)
    node_count, in_node = _context_parallel_ranks(hardware, setting)
    node_rate, nic_rate = 1e9 * hardware.nvlink_gb_per_s, 1e9 * hardware.rdma_gb_per_s
    key_value, heads = BF16_BYTES * model.key_value_channels, BF16_BYTES * _exchanged_channels(model)
    attention_s = core_attention_seconds(model, hardware, setting, backward=backward)
    # Backward sends keys and values and gets their gradients; an exchange of heads is repeated for the gradients.
    ring_trips, trips = (2.0, 1.0) if backward else (1.0, 1.0)
    if kind == "a2a":
        parts = setting.context_parallel_size
        rate = nic_rate if node_count > 1 else node_rate
        return LinearTime(per_token=trips * heads * (parts - 1) / parts / rate)
    if kind == "a2a+p2p":
        exchange = trips * heads * (in_node - 1) / in_node / node_rate
        # A rank's own share of the heads, over the tokens of its node, goes around the nodes.
        ring = ring_trips * (node_count - 1) * key_value / nic_rate
        return LinearTime(per_token=exchange, hidden_per_token=ring, beside_per_square=attention_s)
    if node_count > 1:
        ring_rate = nic_rate
    else:
        ring_rate = 1e9 * hardware.nvlink_p2p_gb_per_s
    ring = ring_trips * (setting.context_parallel_size - 1) * key_value / ring_rate
    return LinearTime(hidden_per_token=ring, beside_per_square=attention_s if kind == "p2p" else 0.0)


def default_cp_comm_type(model: MoeModelSpec, hardware: HardwareSpec, setting: StepSetting) -> str:
    """Return how context parallelism is taken to communicate where nobody says: as a tuned run would choose.

    Heads are exchanged where there are enough of them and the ring would leave a node, or where the ring sends more
    than the exchange does: latent attention's ring carries full keys and values, 82 kB per token and stop of
    DeepSeek-V3, the exchange 164 kB in all. Megatron's own default is p2p.
    """
    parts = setting.context_parallel_size
    # Every rank needs a query head and, as Transformer Engine checks, a key-value head.
    enough = min(model.num_attention_heads, model.num_query_groups) % (parts * setting.tensor_model_parallel_size) == 0
    node_count, _ = _context_parallel_ranks(hardware, setting)
    ring, exchange = (parts - 1) * model.key_value_channels, _exchanged_channels(model) * (parts - 1) / parts
    if enough and (node_count > 1 or exchange < ring):
        return "a2a"
    return "p2p"


def _exchanged_channels(model: MoeModelSpec) -> float:
    """Return the channels per token of queries, keys, values and outputs."""
    outputs = model.num_attention_heads * model.kv_channels
    return float(model.query_channels + model.key_value_channels + outputs)


def _context_parallel_ranks(hardware: HardwareSpec, setting: StepSetting) -> tuple[int, int]:
    """Return over how many nodes the context-parallel ranks lie, and how many of them in each.

    Megatron numbers TP ranks first, then CP: ranks of TP4 CP8 in nodes of 8 lie on four nodes, two in each.
    """
    in_node = max(1, min(setting.context_parallel_size, hardware.ranks_per_node // setting.tensor_model_parallel_size))
    return -(-setting.context_parallel_size // in_node), in_node


def head_parts(model: MoeModelSpec, hardware: HardwareSpec, *, backward: bool) -> Parts:
    """Return the vocabulary projection of a micro-batch; backward includes its weight gradient."""
    flops = (4.0 if backward else 2.0) * model.hidden_size * model.vocab_size
    loss = LOSS_BYTES[backward] * model.vocab_size / (hardware.hbm_gb_per_s * 1e9)
    # As large as products get: it reaches the rate of the experts' products, not the projections' mean.
    rate = hardware.gemm_tflops * 1e12 * hardware.gemm_share(model.vocab_size, model.hidden_size)
    return {"head": LinearTime(per_token=flops / rate + loss)}


def _linear_flops_per_s(hardware: HardwareSpec, setting: StepSetting, columns: int, depth: int) -> float:
    share = hardware.gemm_share(columns / setting.tensor_model_parallel_size, depth)
    speedup = hardware.fp8_speedup if setting.precision == "fp8" else 1.0
    return hardware.attention_linear_tflops * 1e12 * share * speedup


def host_seconds(run: TrainingRun, *, backward_passes: float, moe_layer: bool) -> float:
    """Return the host's seconds to launch one layer of one micro-batch: the layer takes no less.

    A third of it for forward. Graphs spare the launches that they hold; a graph of the whole iteration spares all.
    """
    hardware, setting, software = run.topology.hardware, run.setting, run.setting.software
    if setting.cuda_graph.spares_all_launches:
        return 0.0
    launched_share = software.launched(setting.cuda_graph)
    wider = 1.0 + software.host_per_tensor_rank * (setting.tensor_model_parallel_size - 1)
    # A dense layer has neither router nor dispatcher: taken as half of the launches.
    layer = hardware.host_layer_ms * launched_share * wider * (1.0 if moe_layer else 0.5)
    if moe_layer and not setting.fused_grouped_mlp:
        expert_ms = hardware.host_expert_ms * (1.0 + software.host_fp8 * (setting.precision == "fp8"))
        layer += expert_ms * run.model.num_experts / run.topology.ep_size
    recompute_ms = software.host_recompute_ms * launched_share * len(setting.recompute_modules) * backward_passes
    forwards = setting.forward_passes if backward_passes else 1
    in_pieces = 1.0 + software.overlap_host * (setting.overlap_all_to_all and backward_passes > 0)
    return 1e-3 * software.host * in_pieces * (layer * (forwards + 2.0 * backward_passes) / 3.0 + recompute_ms)


def _attention(model: MoeModelSpec, hardware: HardwareSpec, setting: StepSetting, *, backward: bool) -> LinearTime:
    linear_s, flops_per_product = 0.0, 4.0 if backward else 2.0
    for columns, depth in model.attention_products:
        flops_per_s = _linear_flops_per_s(hardware, setting, columns, depth)
        linear_s += flops_per_product * columns * depth / flops_per_s
    handled = model.query_channels + model.key_value_channels
    moved_values = NORM_PASSES[backward] * model.hidden_size + QKV_PASSES[backward] * handled
    core_s = core_attention_seconds(model, hardware, setting, backward=backward)
    if backward and "core_attn" in setting.recompute_modules:
        core_s += core_s / BACKWARD_ATTENTION_FLOPS
    return LinearTime(
        per_token=linear_s + BF16_BYTES * moved_values / (hardware.hbm_gb_per_s * 1e9),
        per_square=core_s,
    )


def core_attention_seconds(
    model: MoeModelSpec, hardware: HardwareSpec, setting: StepSetting, *, backward: bool
) -> float:
    """Return the seconds of core attention per attention square."""
    outputs = model.num_attention_heads * model.kv_channels
    # Half of the n^2 pairs are computed, 2 operations each: n^2 per channel of Q K^T, and of its product with V.
    flops = (model.query_channels + outputs) * (BACKWARD_ATTENTION_FLOPS if backward else 1.0)
    tflops = hardware.attention_backward_tflops if backward else hardware.attention_forward_tflops
    share = PACKED_SINK_RATE if attends_to_rows(model, setting) else 1.0
    return flops / (tflops * 1e12 * share)


def _by_source(per_dp_rank: Floats, topology: ClusterTopology) -> Floats:
    """Return [G, M, P] from [M, D]: every rank that holds a slice of the DP rank gets its value."""
    rank = np.arange(topology.num_ranks)
    values: Floats = per_dp_rank[:, rank // topology.slices_per_dp_rank]
    return values.reshape(-1, topology.num_ep_groups, topology.ep_size).transpose(1, 0, 2)
