"""A whole step of RL: rollout, reward, weight sync, log-probabilities, reference, update, on one pool of GPUs or two.

Balancing makes the update faster; everything else that a step waits for dilutes the gain. The parts:

- *Rollout*: continuous batching in a steady state. All running samples advance by one token per iteration, so a step is
  a schedule in iterations first, and every iteration is priced afterwards by its batch and its cache. Samples that a
  step leaves unfinished go on in the next one: every token is decoded once, whatever the staleness.
- *Offload*: where rollout and training share GPUs, the trainer's state leaves the GPU and comes back.
- *Weight sync*: trainers gather whole tensors and send them to the engines.
- *Framework*: RL trainers take longer for the same passes than pre-training benchmarks: data, host, logging. Balanced
  experts do not shorten that, so it has one size, whatever the policy.

Five constants were fitted (`python benchmarks/fit_rl_step.py`); the others are assumed and say so. A measured rate or
time (`rollout_tokens_per_s`, `weight_sync_s`, `offload_s`) is worth more than the forecast.

N samples of a step, F samples in flight.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import BF16_BYTES
from moe_rl.core.errors import require, require_known, require_least, require_positive, require_words
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.topology import HardwareSpec
from moe_rl.simulators.expert_skew import expert_shares, placed_evenly, slowest_rank_s
from moe_rl.simulators.memory import GIB, dense_params
from moe_rl.simulators.weight_sync import TRANSPORTS, SyncPrice, SyncSetting, SyncTransport, price_sync

Floats = NDArray[np.float64]

# A step's iterations are cut into so many stretches, each priced at its middle.
BINS = 256
# Where samples carry over, 8 steps are simulated and the last 4 count.
STEPS = 8
PRECISIONS = {"bf16": 2.0, "fp8": 1.0}  # Bytes of a weight in the rollout engine.
TRAINING_PARTS = ("log_prob", "reference", "update", "framework")

# Fitted on 14 published steps of three models on H100 (NVIDIA-NeMo/RL:docs/about/performance-summary.md, v0.5, v0.6).
#
# decode_layer_s: kernels of one layer that decoding waits for, whatever the batch.
# framework_share: time that an RL trainer adds to its passes, as a share of what `simulate` predicts for them under
#   static placement, which the published runs have.
# sender_share: share of one NIC at which weights reach engines on other GPUs; one trainer sends.
# gather_share: share of a link at which colocated trainers gather whole tensors for their engines.
# host_link_gb_per_s: rate of one GPU to pageable host memory, there and back.
FITTED = {"decode_layer_s": 16e-6, "framework_share": 0.63, "sender_share": 0.9, "gather_share": 0.41,
          "host_link_gb_per_s": 2.6}  # fmt: skip
# Share of a GPU's memory that an engine gives to weights and cache, with a trainer on the same GPU and without;
# assumed: recipes set 0.5 to 0.7 and 0.8 to 0.9.
CACHE_SHARE = {True: 0.6, False: 0.85}
# Share of the achievable memory bandwidth and GEMM rate that decoding reaches; assumed.
DECODE_EFFICIENCY = 0.7
# Host work of an engine between two iterations; assumed.
SCHEDULER_S = 2e-3
# Forward is a third of a layer's host time: backward launches twice as much.
FORWARD_LAUNCHES = 1.0 / 3.0
# Bytes of a parameter on the training GPUs: bf16 weight and gradient; fp32 master weight and two fp32 moments.
STATE_BYTES = {"parameters": 2.0, "gradients": 2.0, "optimizer": 12.0}
# From where a plan gets the routes of the pass that it is for. Passes whose routes are not known before they run follow
# no plan of their own, and are priced as under static placement. A reference model's never are.
ROUTES_FROM = (
    "rollout",  # replayed in every pass of the trained model (R3): log-prob passes and update are balanced
    "log_prob",  # counted in the first log-prob pass, or recorded there and replayed (R2): what comes after it is
    "previous_pass",  # only mean loads of another batch: no gain is credited to any pass
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RlStepSetting:
    """How the parts of an RL step are run."""

    train_gpus: int
    rollout_gpus: int | None = None
    """None: rollout and training take turns on the same GPUs."""
    engine_size: int = 1
    """GPUs of one rollout engine, which share out its weights."""
    attention_size: int | None = None
    """GPUs of an engine that attend for the same requests; a cache with fewer heads than these is replicated. None: all
    GPUs (the engine is tensor-parallel). 1: each for requests of its own (SGLang's `enable_dp_attention`)."""
    rollout_precision: str = "bf16"
    """Of the engine's weights and products, one of `PRECISIONS`."""
    max_running_samples: int = 256
    """Samples that an engine decodes at once at most (vLLM's `max_num_seqs`)."""
    rollout_cuda_graph: bool = True
    """False: the engine's host launches every kernel of every token (vLLM's `enforce_eager`)."""
    rollout_imbalance: float = 1.0
    """Largest over mean load of an engine's ranks, where experts are spread over them. It costs where products bind;
    engines that cut every expert over their ranks have none."""
    rollout_map: bool = False
    """True: the experts behind `rollout_imbalance` are placed on the engine's ranks by a map of their own loads."""
    rollout_tokens_per_s: float | None = None
    """Measured response tokens per second and rollout GPU; None: the forecast."""
    samples_per_prompt: int = 1
    """Samples that share a prompt: it is prefilled once for them."""
    draft_tokens: int = 0
    """Tokens that a speculative draft proposes per iteration; each costs one more layer."""
    accepted_tokens: float = 1.0
    """Mean tokens that a sample gains per iteration, 1 to `draft_tokens` + 1."""
    environment_s: float = 0.0
    """Seconds that a sample waits for its environment in all its turns; it keeps its cache meanwhile."""
    staleness: int = 0
    """Batches of samples in flight beside training; 0: rollout and training take turns, 1: one step off."""
    finished_share: float = 1.0
    """Partial rollout: N / share samples are in flight, and a step ends when N are done; the others go on."""
    reward_s: float = 0.0
    """Seconds that the step waits for rewards after its last sample."""
    reference_passes: int = 1
    """Forward passes of a reference model."""
    log_prob_passes: int = 1
    """Forward passes that recompute the policy's own log-probabilities."""
    routes_from: str = "log_prob"
    """One of `ROUTES_FROM`."""
    update_epochs: int = 1
    """How often every sample is trained on."""
    framework_share: float = FITTED["framework_share"]
    """Time that the framework adds to the trainer's passes, as a share of them under static placement."""
    weight_sync_s: float | None = None
    """Measured; None: the forecast, or the price of `weight_sync_transport`."""
    weight_sync_transport: str = ""
    """How weights reach the engines, one of `weight_sync.TRANSPORTS`; "": what the fit on 14 published steps left for
    it. For DeepSeek-V3 that is more than later releases publish (34.7 s between different GPUs against 14 to 15)."""
    weight_sync_control_s: float = 0.0
    """Seconds of pause, drain and metadata beside a transport's own."""
    trainer_ep_size: int = 1
    """Ranks that share out the trainer's experts; some transports take longer the more a trainer holds."""
    trainer_pp_size: int = 1
    """Stages of the trainer's pipeline; in some transports they gather and send side by side."""
    offload_s: float | None = None
    """Measured time in which colocated state leaves and comes back; None: the forecast."""
    offloaded_state: tuple[str, ...] = tuple(STATE_BYTES)
    """What leaves the GPUs while a colocated engine decodes, of `STATE_BYTES`."""

    def __post_init__(self) -> None:
        require_least(
            self, train_gpus=1, rollout_gpus=1, engine_size=1, attention_size=1, update_epochs=1, max_running_samples=1,
            samples_per_prompt=1, rollout_imbalance=1, staleness=0, reward_s=0, reference_passes=0, log_prob_passes=0,
            environment_s=0, draft_tokens=0, framework_share=0, weight_sync_control_s=0,
        )  # fmt: skip
        require_positive(self, "rollout_tokens_per_s", "weight_sync_s", "offload_s")
        require(
            1 <= self.accepted_tokens <= self.draft_tokens + 1,
            f"accepted_tokens must be 1 to {self.draft_tokens + 1} (draft_tokens + 1), got {self.accepted_tokens}.",
        )
        require_words(self, rollout_precision=PRECISIONS, routes_from=ROUTES_FROM)
        for name in self.offloaded_state:
            require_known(name, STATE_BYTES, f"offloaded_state {name!r} is unknown.")
        require(
            not self.weight_sync_control_s or bool(self.weight_sync_transport),
            f"weight_sync_control_s ({self.weight_sync_control_s:g}) is added to the predicted transfer time: also set "
            "weight_sync_transport, which predicts this time.",
        )
        if self.weight_sync_transport:
            require_words(self, weight_sync_transport=TRANSPORTS.names)
            self._require_same_gpus(TRANSPORTS[self.weight_sync_transport])
        require(
            not self.rollout_map or self.rollout_imbalance > 1,
            "rollout_map removes the imbalance set by rollout_imbalance, so rollout_imbalance must be above 1, got "
            f"{self.rollout_imbalance}.",
        )
        require(
            0 < self.finished_share <= 1,
            f"finished_share must be greater than 0 and at most 1, got {self.finished_share}.",
        )
        require(
            self.staleness == 0 or not self.colocated,
            f"with staleness {self.staleness}, rollouts run during training, so they need GPUs of their own: set "
            "rollout_gpus.",
        )
        require(
            self.decoding_gpus % self.engine_size == 0,
            f"--rollout-engine-size ({self.engine_size}) does not divide the number of rollout GPUs "
            f"({self.decoding_gpus}).",
        )
        require(
            self.engine_size % self.attending_gpus == 0,
            f"--rollout-attention-size ({self.attention_size}) does not divide --rollout-engine-size "
            f"({self.engine_size}).",
        )

    def _require_same_gpus(self, transport: SyncTransport) -> None:
        """Raise for a transport between GPUs of another kind than the setting's."""
        require(
            transport.colocated or not self.colocated,
            f"weight_sync_transport {transport.name!r} sends weights to GPUs other than the training GPUs: set "
            "rollout_gpus.",
        )
        require(
            self.colocated or not transport.colocated,
            f"weight_sync_transport {transport.name!r} works only if training and rollout share the same GPUs: do not "
            "set rollout_gpus.",
        )

    @property
    def balanced_log_prob_passes(self) -> int:
        """Log-prob passes whose routes are known before they run."""
        if self.routes_from == "rollout":
            return self.log_prob_passes
        # The first one is where the routes of the others are counted.
        return max(0, self.log_prob_passes - 1) if self.routes_from == "log_prob" else 0

    @property
    def balances_update(self) -> bool:
        """Whether the routes of an update are known before it runs."""
        return self.routes_from == "rollout" or (self.routes_from == "log_prob" and self.log_prob_passes > 0)

    @property
    def colocated(self) -> bool:
        """Whether rollout and training take turns on the same GPUs."""
        return self.rollout_gpus is None

    @property
    def decoding_gpus(self) -> int:
        """GPUs that decode."""
        if self.rollout_gpus is None:
            return self.train_gpus
        return self.rollout_gpus

    @property
    def attending_gpus(self) -> int:
        """GPUs that share one request's attention, and with it the weights outside the routed experts."""
        return self.attention_size or self.engine_size

    @property
    def num_engines(self) -> int:
        """Rollout engines."""
        return self.decoding_gpus // self.engine_size

    def in_flight(self, samples: int) -> int:
        """Return F, the samples that are decoded at once or wait for it, when a step trains on `samples`."""
        return int(np.ceil(samples * max(1, self.staleness) / self.finished_share))


@dataclass(frozen=True, slots=True, kw_only=True)
class RlStep:
    """Seconds of one RL step by part, in their order."""

    parts_s: Mapping[str, float]
    beside: bool
    """True: rollout and reward run beside the training parts."""

    @property
    def rollout_s(self) -> float:
        """Seconds of rollout and reward."""
        return self.parts_s["rollout"] + self.parts_s["reward"]

    @property
    def training_s(self) -> float:
        """Seconds of the trainer's parts."""
        return sum(self.parts_s[name] for name in TRAINING_PARTS)

    @property
    def step_time_s(self) -> float:
        """Seconds from one weight sync to the next."""
        if self.beside:
            rollout_and_training_s = max(self.rollout_s, self.training_s)
        else:
            rollout_and_training_s = self.rollout_s + self.training_s
        return rollout_and_training_s + self.parts_s["offload"] + self.parts_s["weight_sync"]


def rl_step(
    model: MoeModelSpec,
    hardware: HardwareSpec,
    setting: RlStepSetting,
    *,
    response_lengths: NDArray[np.int64],
    prompt_tokens: float,
    forward_s: float,
    update_s: float,
    static_s: tuple[float, float] | None = None,
) -> RlStep:
    """Return the RL step over samples of `response_lengths` [N] tokens.

    `forward_s` and `update_s` are seconds of one forward pass and one update (all its mini-batches) over all samples,
    as `simulate_policies` says. `static_s` are both under static placement: of passes that are not balanced, and what
    the framework's time is a share of. None: the passes are static placement's.
    """
    if setting.rollout_tokens_per_s is not None:
        rollout = float(response_lengths.sum()) / (setting.rollout_tokens_per_s * setting.decoding_gpus)
    else:
        rollout = rollout_of(model, hardware, setting, response_lengths, prompt_tokens).seconds
    static_forward_s, static_update_s = static_s or (forward_s, update_s)
    balanced_log_probs = setting.balanced_log_prob_passes
    parts = {
        "rollout": rollout,
        "reward": setting.reward_s,
        "log_prob": balanced_log_probs * forward_s + (setting.log_prob_passes - balanced_log_probs) * static_forward_s,
        "reference": setting.reference_passes * static_forward_s,
        "update": setting.update_epochs * (update_s if setting.balances_update else static_update_s),
        "framework": framework_seconds(setting, forward_s=static_forward_s, update_s=static_update_s),
        "offload": _offload_seconds(model, setting),
        "weight_sync": _sync_seconds(model, hardware, setting),
    }
    return RlStep(parts_s=parts, beside=setting.staleness > 0)


def framework_seconds(setting: RlStepSetting, *, forward_s: float, update_s: float) -> float:
    """Return what the framework adds to a step whose passes take so long under static placement.

    Example: a forward pass of 1 s and an update of 3 s, log-probabilities and reference once each, share 0.63: 3.15 s,
    and 3.15 s as well under a policy whose update takes 2 s.
    """
    forward_passes = setting.log_prob_passes + setting.reference_passes
    return setting.framework_share * (forward_passes * forward_s + setting.update_epochs * update_s)


def _offload_seconds(model: MoeModelSpec, setting: RlStepSetting) -> float:
    if not setting.colocated:
        return 0.0
    if setting.offload_s is not None:
        return setting.offload_s
    bytes_of_parameter = sum(STATE_BYTES[name] for name in setting.offloaded_state)
    per_gpu = bytes_of_parameter * all_params(model) / setting.train_gpus
    return per_gpu / (FITTED["host_link_gb_per_s"] * 1e9)


def _sync_seconds(model: MoeModelSpec, hardware: HardwareSpec, setting: RlStepSetting) -> float:
    """Return seconds until all engines hold the new weights.

    Every tensor is whole somewhere on its way: gathered from the trainer's ranks, then sent. Apart, one trainer's NIC
    sends (engines receive at once); colocated, an engine on the same GPU takes what was gathered, and the gathering
    counts. It stays on NVLink where the trainer fits one domain. More GPUs make neither faster.
    """
    if setting.weight_sync_s is not None:
        return setting.weight_sync_s
    if setting.weight_sync_transport:
        return sync_price(model, hardware, setting).seconds
    weights = BF16_BYTES * all_params(model)
    if not setting.colocated:
        return weights / (FITTED["sender_share"] * hardware.rdma_gb_per_s * 1e9)
    in_domain = setting.train_gpus <= hardware.ranks_per_node
    if in_domain:
        link = hardware.nvlink_p2p_gb_per_s
    else:
        link = hardware.rdma_gb_per_s
    return weights / (FITTED["gather_share"] * link * 1e9)


def sync_price(model: MoeModelSpec, hardware: HardwareSpec, setting: RlStepSetting) -> SyncPrice:
    """Return the seconds of a named transport, line by line."""
    return price_sync(
        setting.weight_sync_transport, sync_setting(model, setting), hardware, control_s=setting.weight_sync_control_s
    )


def sync_setting(model: MoeModelSpec, setting: RlStepSetting) -> SyncSetting:
    """Return the bytes and GPUs of a step's weight sync."""
    return SyncSetting.of_model(
        model,
        train_gpus=setting.train_gpus,
        engine_gpus=setting.decoding_gpus,
        engine_size=setting.engine_size,
        trainer_ep_size=setting.trainer_ep_size,
        trainer_pp_size=setting.trainer_pp_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The rollout of one step in the steady state, a mean over steps."""

    seconds: float
    decoded_tokens: float
    """Tokens decoded in those seconds, by samples that finish and by others."""


def rollout_of(
    model: MoeModelSpec,
    hardware: HardwareSpec,
    setting: RlStepSetting,
    response_lengths: NDArray[np.int64],
    prompt_tokens: float,
) -> Rollout:
    """Return the rollout of N = len(response_lengths) samples per step.

    Raises `InvalidInputError` where an engine does not hold the model's weights.
    """
    lengths = np.asarray(response_lengths, np.float64)
    if not len(lengths) or not lengths.any():
        return Rollout(seconds=0.0, decoded_tokens=0.0)
    engine = _Engine(model, hardware, setting)
    slots = setting.num_engines * engine.most_samples(prompt_tokens + float(lengths.mean()) / 2)
    wait = 0.0
    if setting.environment_s:
        # A wait is as many iterations as a sample misses in it.
        wait = setting.environment_s / float(engine.seconds(np.array([len(lengths) / setting.num_engines]), 0.0)[0])
    # Samples that wait behind a full batch of waiting ones change nothing.
    in_flight = min(setting.in_flight(len(lengths)), len(lengths) + slots)
    waves = _waves(lengths / setting.accepted_tokens + wait, in_flight, slots)
    counted_waves = waves[len(waves) // 2 :]
    seconds = sum(engine.wave_seconds(wave, prompt_tokens) for wave in counted_waves) / len(counted_waves)
    tokens = sum(float((wave.end - wave.start).sum()) for wave in counted_waves) / len(counted_waves)
    return Rollout(seconds=seconds, decoded_tokens=tokens * setting.accepted_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wave:
    """The iterations of one step: who runs when. [F] each; samples that never ran have start = end."""

    start: Floats
    end: Floats
    done: Floats
    """Iterations that a sample had behind it at its start."""
    iterations: float
    new: int
    """Samples whose prompts are prefilled for the first time."""


def _waves(lengths: Floats, in_flight: int, slots: int) -> list[_Wave]:
    """Return the steps of an endless stream of samples, N finished in each; where all finish, one step says it all."""
    count = len(lengths)
    steps = 1 if in_flight == count else STEPS
    rng = np.random.default_rng(0)
    # Steps train on the same lengths in another order, with as many more as are in flight at the end.
    stream = np.concatenate([rng.permutation(lengths) for _ in range(steps + -(-in_flight // count))])
    remaining_tokens, decoded_tokens, waves, num_started = stream[:in_flight], np.zeros(in_flight), [], in_flight
    num_new = in_flight
    for _ in range(steps):
        start, end = _scheduled(remaining_tokens, slots)
        order = np.argsort(end, kind="stable")
        last_end = float(end[order[count - 1]])
        start, end = np.minimum(start, last_end), np.minimum(end, last_end)
        waves.append(_Wave(start=start, end=end, done=decoded_tokens, iterations=last_end, new=num_new))
        remaining_tokens, decoded_tokens = remaining_tokens - (end - start), decoded_tokens + (end - start)
        # Exactly N samples end. Where more end at once, the others are done when the next step begins.
        carried_samples = np.sort(order[count:])
        remaining_tokens = np.concatenate(
            [remaining_tokens[carried_samples], stream[num_started : num_started + count]]
        )
        decoded_tokens = np.concatenate([decoded_tokens[carried_samples], np.zeros(count)])
        num_started, num_new = num_started + count, count
    return waves


def _scheduled(remaining_tokens: Floats, slots: int) -> tuple[Floats, Floats]:
    """Return when each sample starts and ends, [F] each, when a waiting one takes the first slot that is free."""
    start = np.zeros(len(remaining_tokens))
    if slots < len(remaining_tokens):
        slot_ends = remaining_tokens[:slots].tolist()
        heapq.heapify(slot_ends)
        for sample in range(slots, len(remaining_tokens)):
            start[sample] = slot_ends[0]
            heapq.heapreplace(slot_ends, slot_ends[0] + float(remaining_tokens[sample]))
    return start, start + remaining_tokens


class _Engine:
    """Bytes that one rollout engine reads per iteration (of one GPU), operations, and waits."""

    def __init__(self, model: MoeModelSpec, hardware: HardwareSpec, setting: RlStepSetting) -> None:
        size, weight = setting.engine_size, PRECISIONS[setting.rollout_precision]
        self.setting = setting
        self.attending = setting.attending_gpus
        experts = float(model.num_moe_layers * model.num_experts * model.expert_params)
        self.fixed_bytes = weight * (all_params(model) - experts) / self.attending
        self.expert_bytes = weight * experts / size
        weight_bytes = self.fixed_bytes + self.expert_bytes
        self.room_bytes = CACHE_SHARE[setting.colocated] * hardware.hbm_gib * GIB - weight_bytes
        require(
            self.room_bytes > 0,
            f"the weights of {model.name} do not fit on {size} GPUs of {hardware.name}: set a larger "
            "--rollout-engine-size.",
        )
        self.cache_bytes = BF16_BYTES * _cached_layers(model) * _cache_width(model, self.attending)  # per token
        # Probability that a token does not choose a given expert.
        self.experts_missed = 1.0 - model.top_k / model.num_experts
        self.active_params = all_params(model) - experts * self.experts_missed
        self.routed_params = experts * (1.0 - self.experts_missed)
        self.top_k = model.top_k
        # None where all ranks have the same load: engines that cut every expert over their ranks always have.
        self.expert_shares: Floats | None = None
        if setting.rollout_imbalance > 1 and size > 1:
            self.expert_shares = expert_shares(model.num_experts, ep_size=size, imbalance=setting.rollout_imbalance)
            if setting.rollout_map:
                self.expert_shares = placed_evenly(self.expert_shares, ep_size=size)
        self.bytes_per_s = DECODE_EFFICIENCY * hardware.hbm_gb_per_s * 1e9
        if setting.rollout_precision == "fp8":
            speed = hardware.fp8_speedup
        else:
            speed = 1.0
        self.flops_per_s = DECODE_EFFICIENCY * hardware.gemm_tflops * 1e12 * speed * size  # of all its GPUs
        latency_us = 0.0
        if size > 1:
            crosses_nodes = size > hardware.ranks_per_node
            if crosses_nodes:
                latency_us = hardware.inter_node_latency_us
            else:
                latency_us = hardware.intra_node_latency_us
        # A layer of a tensor-parallel engine waits for two all-reduces: after attention and after the experts.
        layer_s = FITTED["decode_layer_s"] + 2e-6 * latency_us
        layers = model.num_layers + setting.draft_tokens
        # Of an iteration whatever the batch: 94 layers of Qwen3-235B wait 1.5 ms, the scheduler adds 2.
        self.iteration_s = layers * layer_s + SCHEDULER_S
        host_s = 0.0
        if not setting.rollout_cuda_graph:
            host_s = FORWARD_LAUNCHES * 1e-3 * hardware.host_layer_ms
        self.launches_s = layers * host_s  # the least time of an iteration

    def most_samples(self, context: float) -> int:
        """Return how many samples of so many tokens of context the engine decodes at once."""
        per_gpu = self.room_bytes / (self.cache_bytes * max(context, 1.0))
        samples = int(per_gpu * self.setting.engine_size / self.attending)
        return max(1, min(self.setting.max_running_samples, samples))

    def seconds(self, batch: Floats, context: Floats | float) -> Floats:
        """Return seconds of an iteration with `batch` samples that hold `context` tokens in all; [...] each."""
        # An iteration computes every token that was drafted, and the one that follows.
        verified = self.setting.draft_tokens + 1
        if self.expert_shares is not None:
            return self._skewed_seconds(self.expert_shares, batch, context)
        touched_share = 1.0 - self.experts_missed ** (batch * verified)
        cache = context * self.cache_bytes * self.attending / self.setting.engine_size
        read = self.fixed_bytes + touched_share * self.expert_bytes + cache
        compute_s = 2.0 * self.active_params * batch * verified / self.flops_per_s
        kernels: Floats = np.maximum(read / self.bytes_per_s, compute_s) + self.iteration_s
        return np.maximum(kernels, self.launches_s)

    def _skewed_seconds(self, shares: Floats, batch: Floats, context: Floats | float) -> Floats:
        """Return `seconds` where experts are spread over ranks and some are hot: a rank waits for its own memory or for
        its own products, and all for the slowest rank. A hot expert is read once, however many tokens it has."""
        size, verified = self.setting.engine_size, self.setting.draft_tokens + 1
        cache = context * self.cache_bytes * self.attending / size
        compute_s = 2.0 * self.active_params * batch * verified / self.flops_per_s
        evenly = 2.0 * self.routed_params * batch * verified / self.flops_per_s
        kernels: Floats = slowest_rank_s(
            shares,
            ep_size=size,
            pairs=batch * verified * self.top_k,
            read_s=(self.fixed_bytes + cache) / self.bytes_per_s,
            experts_read_s=self.expert_bytes / self.bytes_per_s,
            computed_s=compute_s - evenly,
            experts_computed_s=evenly,
        )
        return np.maximum(kernels + self.iteration_s, self.launches_s)

    def wave_seconds(self, wave: _Wave, prompt_tokens: float) -> float:
        """Return the seconds of a step's iterations and prefills."""
        setting = self.setting
        edges = np.linspace(0.0, wave.iterations, BINS + 1)
        middle_of_bin = (edges[1:] + edges[:-1]) / 2
        start_order, end_order = np.argsort(wave.start), np.argsort(wave.end)
        num_begun = np.searchsorted(wave.start[start_order], middle_of_bin, side="right")
        num_ended = np.searchsorted(wave.end[end_order], middle_of_bin, side="right")
        # A running sample has decoded done + (now - start) iterations.
        decoded_offset = wave.done - wave.start
        behind_begun = np.cumsum([0.0, *decoded_offset[start_order]])
        behind_ended = np.cumsum([0.0, *decoded_offset[end_order]])
        offset = behind_begun[num_begun] - behind_ended[num_ended]
        num_running = (num_begun - num_ended).astype(np.float64)
        context = num_running * prompt_tokens + setting.accepted_tokens * (offset + num_running * middle_of_bin)
        batch = np.maximum(num_running / setting.num_engines, np.minimum(num_running, 1.0))
        context_held = context / np.maximum(num_running, 1.0) * batch
        decoding = float(self.seconds(batch, context_held).sum()) * wave.iterations / BINS
        # New weights make the cache of carried samples stale: they are prefilled again.
        prompt_tokens_of_step = wave.new * prompt_tokens / setting.samples_per_prompt
        repeated_tokens = float((prompt_tokens + setting.accepted_tokens * wave.done)[wave.done > 0].sum())
        prefill = (
            (prompt_tokens_of_step + repeated_tokens)
            * 2.0
            * self.active_params
            / (self.flops_per_s * setting.num_engines)
        )
        return decoding + prefill


def _cache_width(model: MoeModelSpec, attending: int) -> float:
    """Return the elements of one token's cache in a layer on each of so many tensor-parallel GPUs.

    Keys and values of the GPU's heads, of one at least; a latent is the same for all heads, so every GPU has it whole.
    """
    if model.latent_cache_width:
        return float(model.latent_cache_width)
    return 2.0 * model.kv_channels * max(1.0, model.num_query_groups / attending)


def _cached_layers(model: MoeModelSpec) -> int:
    """Return the layers whose cache grows with the context; a window of a few hundred tokens is not counted."""
    return model.num_layers - model.num_sliding_window_layers or model.num_layers


def all_params(model: MoeModelSpec) -> float:
    """Return all parameters of the model, embedding and output matrix included."""
    experts = model.num_moe_layers * model.num_experts * model.expert_params
    return dense_params(model) + experts + 2.0 * model.hidden_size * model.vocab_size
