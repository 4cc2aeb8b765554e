"""A whole step of RL: rollout, reward, log-probabilities, reference, update, weight sync, on one pool of GPUs or two.

What balancing brings to an update is diluted by everything else that a step waits for. Nothing here was fitted. Held
against what is published (`tests/simulators/test_rl_step.py`): passes and updates of one MoE run part by part, its
rollout without graphs, times of two weight syncs, four totals. A measured rate is worth more than the forecast.

S samples of a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import BF16_BYTES
from moe_rl.core.errors import require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.topology import HardwareSpec
from moe_rl.simulators.memory import GIB, dense_params

POSITIONS = 128
"""Stretches of the decoding at whose middle a token is priced."""
DECODE_KERNELS_S = 20e-6
"""Kernels of one layer that decoding waits for, whatever the batch; assumed. Two all-reduces come to it."""
CACHE_SHARE = 0.85
"""Share of a GPU's memory that an engine gives to weights and cache; assumed, vLLM's default is 0.9."""
DECODE_EFFICIENCY = 0.7
"""Share of the achievable memory bandwidth and GEMM rate that decoding reaches; assumed."""
SYNC_EFFICIENCY = 0.5
"""Share of a NIC's rate at which weights reach the rollout engines, resharding included; assumed."""
FORWARD_LAUNCHES = 1.0 / 3.0
"""Share of a layer's host time that is its forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlStepSetting:
    """How the parts of an RL step are run."""

    train_gpus: int
    rollout_gpus: int | None = None
    """None: rollout and training take turns on the same GPUs."""
    engine_size: int = 1
    """GPUs of one rollout engine (its tensor-parallel size)."""
    rollout_cuda_graph: bool = True
    """False: the engine's host launches every kernel of every token (vLLM's `enforce_eager`)."""
    rollout_tokens_per_s: float | None = None
    """Measured response tokens per second and rollout GPU; None: the forecast."""
    staleness: int = 0
    """Updates by which the policy of a rollout may be behind; from 1 on rollouts run beside training."""
    finished_share: float = 1.0
    """The rollout ends when this share of the samples is done; the others go on in the next step (partial rollout)."""
    reward_s: float = 0.0
    """What the step waits for rewards after its last sample."""
    reference_passes: int = 1
    """Forward passes of a reference model."""
    log_prob_passes: int = 1
    """Forward passes that recompute the policy's own log-probabilities."""
    update_epochs: int = 1
    """How often every sample is trained on."""
    weight_sync_s: float | None = None
    """Measured; None: the forecast."""

    def __post_init__(self) -> None:
        for name in ("train_gpus", "engine_size", "update_epochs"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("staleness", "reward_s", "reference_passes", "log_prob_passes"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}.")
        require(0 < self.finished_share <= 1, f"finished_share must lie in (0, 1], got {self.finished_share}.")
        gpus = self.rollout_gpus
        require(gpus is None or gpus >= 1, f"rollout_gpus must be at least 1, got {gpus}.")
        require(
            self.staleness == 0 or gpus is not None,
            f"staleness {self.staleness} lets rollouts run beside training: that needs rollout_gpus of their own.",
        )
        require(
            self.decoding_gpus % self.engine_size == 0,
            f"engine_size {self.engine_size} does not divide the {self.decoding_gpus} rollout GPUs.",
        )
        for name in ("rollout_tokens_per_s", "weight_sync_s"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name} must be positive, got {value}.")

    @property
    def decoding_gpus(self) -> int:
        """GPUs that decode."""
        return self.train_gpus if self.rollout_gpus is None else self.rollout_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class RlStep:
    """Seconds of one RL step by part, in their order."""

    parts_s: Mapping[str, float]
    beside: bool
    """True: rollout and reward run beside the other parts but the weight sync."""

    @property
    def rollout_s(self) -> float:
        """Seconds of rollout and reward."""
        return self.parts_s["rollout"] + self.parts_s["reward"]

    @property
    def training_s(self) -> float:
        """Seconds of the trainer's parts."""
        return sum(seconds for name, seconds in self.parts_s.items() if name in TRAINING_PARTS)

    @property
    def step_time_s(self) -> float:
        """Seconds from one weight sync to the next."""
        both = max(self.rollout_s, self.training_s) if self.beside else self.rollout_s + self.training_s
        return both + self.parts_s["weight_sync"]


TRAINING_PARTS = ("log_prob", "reference", "update")


def rl_step(
    model: MoeModelSpec,
    hardware: HardwareSpec,
    setting: RlStepSetting,
    *,
    response_lengths: NDArray[np.int64],
    prompt_tokens: float,
    forward_s: float,
    update_s: float,
) -> RlStep:
    """Return the RL step over samples of `response_lengths` [S] tokens.

    `forward_s` and `update_s` are one forward pass and one update over all of them, as `simulate_policies` says.
    """
    if setting.rollout_tokens_per_s is not None:
        finished = _finished_tokens(response_lengths, setting.finished_share)
        rollout = finished / (setting.rollout_tokens_per_s * setting.decoding_gpus)
    else:
        rollout = rollout_seconds(model, hardware, setting, response_lengths, prompt_tokens)
    sync = setting.weight_sync_s
    if sync is None:
        # Whole tensors are sent to every rank, which keeps its part of each.
        sync = BF16_BYTES * _all_params(model) / (SYNC_EFFICIENCY * hardware.rdma_gb_per_s * 1e9)
    parts = {
        "rollout": rollout,
        "reward": setting.reward_s,
        "log_prob": setting.log_prob_passes * forward_s,
        "reference": setting.reference_passes * forward_s,
        "update": setting.update_epochs * update_s,
        "weight_sync": sync,
    }
    return RlStep(parts_s=parts, beside=setting.staleness > 0)


def rollout_seconds(
    model: MoeModelSpec,
    hardware: HardwareSpec,
    setting: RlStepSetting,
    response_lengths: NDArray[np.int64],
    prompt_tokens: float,
) -> float:
    """Return the seconds until the asked share of the samples is decoded, all of them begun at once.

    A token of every running sample costs reading the weights that any of them needs and the cache of all, or the
    products; samples that do not fit the cache take turns. The longest samples decode in ever smaller batches: that
    tail is what partial rollouts cut.
    """
    lengths = np.sort(np.asarray(response_lengths, np.float64))
    if not len(lengths):
        return 0.0
    engines, size = setting.decoding_gpus // setting.engine_size, setting.engine_size
    last = lengths[max(1, round(setting.finished_share * len(lengths))) - 1]
    edges = np.linspace(0.0, last, POSITIONS + 1)
    middle, width = (edges[1:] + edges[:-1]) / 2, last / POSITIONS
    running = (len(lengths) - np.searchsorted(lengths, middle, side="right")) / engines
    cached = BF16_BYTES * 2.0 * model.num_query_groups * model.kv_channels * model.num_layers
    weights = BF16_BYTES * _all_params(model)
    room = CACHE_SHARE * size * hardware.hbm_gib * GIB - weights
    require(
        room > 0, f"an engine of {size} GPUs of {hardware.name} does not hold the weights of {model.name}: engine_size."
    )
    context = prompt_tokens + middle
    at_once = np.minimum(running, np.maximum(1.0, room / (cached * context)))
    turns = running / np.maximum(at_once, 1e-300)
    touched = 1.0 - (1.0 - model.top_k / model.num_experts) ** at_once
    experts = model.num_moe_layers * model.num_experts * model.expert_params
    read = BF16_BYTES * (_all_params(model) - experts + touched * experts) + at_once * context * cached
    active = _all_params(model) - experts * (1.0 - model.top_k / model.num_experts)
    bandwidth = DECODE_EFFICIENCY * size * hardware.hbm_gb_per_s * 1e9
    rate = DECODE_EFFICIENCY * size * hardware.gemm_tflops * 1e12
    latency_us = hardware.inter_node_latency_us if size > hardware.ranks_per_node else hardware.intra_node_latency_us
    layer = DECODE_KERNELS_S + 2e-6 * latency_us * (size > 1)
    token = np.maximum(read / bandwidth, 2.0 * active * at_once / rate) + model.num_layers * layer
    if not setting.rollout_cuda_graph:
        token = np.maximum(token, model.num_layers * FORWARD_LAUNCHES * 1e-3 * hardware.host_layer_ms)
    prefill = len(lengths) / engines * prompt_tokens * 2.0 * active / rate
    return float((turns * token).sum() * width + prefill)


def _finished_tokens(lengths: NDArray[np.int64], share: float) -> float:
    """Return the tokens decoded until that share of the samples is done."""
    if not len(lengths):
        return 0.0
    ordered = np.sort(lengths)
    last = ordered[max(1, round(share * len(ordered))) - 1]
    return float(np.minimum(ordered, last).sum())


def _all_params(model: MoeModelSpec) -> float:
    experts = model.num_moe_layers * model.num_experts * model.expert_params
    return dense_params(model) + experts + 2.0 * model.hidden_size * model.vocab_size
