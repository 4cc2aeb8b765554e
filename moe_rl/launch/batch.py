"""How large a run's batches are, as its files say it: token budgets, samples of an update, responses, GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from moe_rl.launch.sources import RawRun

BatchKeys = Mapping[str, Sequence[str]]
# Facts that are on or off: a factor such as slime's `--kl-coef 0.01` switches them on, unless it is 0.
SWITCHES = ("kl_in_loss", "kl_in_reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """What a run's files say of its batches; None: nothing, or a value that only the machine knows."""

    tokens: int | None = None
    """Token budget of a micro-batch of a data-parallel rank."""
    tokens_per_gpu: int | None = None
    """The same for a GPU: context parallelism cuts a micro-batch over several."""
    budget_is_used: int | None = None
    """0 where the files switch the budget off: micro-batches then have `micro_batch_size` sequences."""
    micro_batch_size: int | None = None
    """Sequences of a micro-batch."""
    sequence_length: int | None = None
    """Longest sequence, prompt and response together."""
    prompt_length: int | None = None
    response_length: int | None = None
    samples_per_update: int | None = None
    """Sequences of an optimizer step."""
    prompts_per_update: int | None = None
    prompts: int | None = None
    """Prompts of a step of RL."""
    samples_per_prompt: int | None = None
    nodes: int | None = None
    """Nodes of the trainer."""
    gpus_per_node: int | None = None
    trainer_gpus: int | None = None
    """GPUs of the trainer, where the files say their number in one; else nodes times GPUs of a node."""
    engine_size: int | None = None
    """GPUs of one rollout engine, where the files say their number in one; else `rollout_engine_size`."""
    engine_tensor_parallel: int | None = None
    """GPUs of a rollout engine that share the attention of one request, in each of its pipeline stages."""
    engine_pipeline_parallel: int | None = None
    engine_data_parallel: int | None = None
    """Groups of GPUs in one engine that attend for requests of their own and share out the experts (vLLM's DP)."""
    engine_expert_parallel: int | None = None
    """GPUs of a rollout engine that share out the experts: in vLLM all of its TP x DP."""
    kl_in_loss: int | None = None
    """1 where the loss has a term of the distance from a reference policy, 0 where it has none."""
    kl_in_reward: int | None = None
    """The same of the reward."""
    shares_gpus: int | None = None
    """1 where the rollout engines run on the trainer's GPUs, 0 where they have their own."""
    rollout_gpus: int | None = None
    """GPUs of all rollout engines, where these have their own."""
    rollout_nodes: int | None = None
    """The same as nodes of `rollout_gpus_per_node`."""
    rollout_gpus_per_node: int | None = None
    attention_data_parallel: int | None = None
    """1 where every GPU of a rollout engine handles requests of its own in attention."""
    enforce_eager: int | None = None
    """1 where the rollout engine runs without CUDA graphs."""
    most_running: int | None = None
    """Samples that a rollout engine decodes at once, at most."""
    uses_rollout_log_probs: int | None = None
    """1 where the rollout's log-probabilities are the old ones: no pass computes them."""
    param_offload: int | None = None
    """1 where the trainer's parameters leave the GPU while the rollout runs, 0 where they stay."""
    grad_offload: int | None = None
    optimizer_offload: int | None = None

    @property
    def offloaded_state(self) -> tuple[str, ...] | None:
        """What of the trainer's state leaves the GPU while the rollout runs; None if the files do not say it.

        Gradient buffers are released with the parameters, too.
        """
        gradients = self.param_offload or self.grad_offload
        leaving = {"parameters": self.param_offload, "gradients": gradients, "optimizer": self.optimizer_offload}
        if None in leaving.values():
            return None
        return tuple(name for name, leaves in leaving.items() if leaves)

    @property
    def engine_attention_size(self) -> int | None:
        """GPUs of a rollout engine that attend for the same requests; None if the files do not say."""
        if self.engine_tensor_parallel is None:
            return None
        return self.engine_tensor_parallel * (self.engine_pipeline_parallel or 1)

    @property
    def rollout_engine_size(self) -> int | None:
        """GPUs of one rollout engine; None if the files do not say.

        Example: TP 8 and DP 8 are 64 GPUs. TP 8 and EP 64 alone, too: vLLM's EP is TP x DP, and NeMo-RL derives DP.
        """
        attention_size = self.engine_attention_size
        if self.engine_size is not None or attention_size is None:
            return self.engine_size
        if self.engine_follows_experts:
            return self.engine_expert_parallel
        return attention_size * (self.engine_data_parallel or 1)

    @property
    def engine_follows_experts(self) -> bool:
        """Whether a rollout engine has more GPUs than TP x PP x DP, because its EP size says so."""
        stated = (self.engine_attention_size or 0) * (self.engine_data_parallel or 1)
        return 0 < stated < (self.engine_expert_parallel or 1)

    @property
    def gpus(self) -> int | None:
        """GPUs of the trainer."""
        return self.trainer_gpus or _product(self.nodes, self.gpus_per_node)

    @property
    def separate_rollout_gpus(self) -> int | None:
        """GPUs that only generate; None where the trainer's do, or where the files do not say."""
        if self.shares_gpus != 0:
            return None
        return self.rollout_gpus or _product(self.rollout_nodes, self.rollout_gpus_per_node)

    @property
    def reference_passes(self) -> int | None:
        """Forward passes of a reference policy in a step of RL: one, if loss or reward needs it."""
        if self.kl_in_loss or self.kl_in_reward:
            return 1
        if self.kl_in_loss is None or self.kl_in_reward is None:
            return None
        return 0

    @property
    def samples(self) -> int | None:
        """Samples of a step of RL."""
        return _product(self.prompts, self.samples_per_prompt)

    @property
    def update_samples(self) -> int | None:
        """Sequences of an optimizer step: those of the whole step of RL where the files cut it into no mini-batches."""
        return self.samples_per_update or _product(self.prompts_per_update, self.samples_per_prompt) or self.samples

    @property
    def longest_sample(self) -> int | None:
        """Tokens of the longest sample; without the prompt where the files say nothing of it."""
        if self.sequence_length is not None or self.response_length is None:
            return self.sequence_length
        return self.response_length + (self.prompt_length or 0)

    def micro_batch_tokens(self, context_parallel_size: int) -> int | None:
        """Return the token budget of a data-parallel rank's micro-batch: given, or of so many longest sequences."""
        stated_tokens = self.tokens or _product(self.tokens_per_gpu, context_parallel_size)
        if stated_tokens is not None and self.budget_is_used != 0:
            return stated_tokens
        return _product(self.micro_batch_size, self.longest_sample)


def _product(factor: int | None, other: int | None) -> int | None:
    if not (factor and other):
        return None
    return factor * other


def read_batch(raw: RawRun, keys: BatchKeys, defaults: Mapping[str, int]) -> BatchFacts:
    """Return what the files say under the keys of a framework (`batch` in its settings.yaml).

    `defaults` hold where the files set none of the keys.
    """
    values = {entry.key: None if entry.missing else entry.value for entry in raw.entries}
    numbers_by_name = {name: number for name, number in defaults.items() if not values.keys() & set(keys.get(name, ()))}
    for item in fields(BatchFacts):
        for key in keys.get(item.name, ()):
            number = _number(values.get(key))
            if number is None and item.name in SWITCHES:
                number = _is_above_zero(values.get(key))
            # Of several keys the first that says a number counts.
            if number is not None:
                numbers_by_name.setdefault(item.name, number)
    return BatchFacts(**numbers_by_name)


def _number(value: object) -> int | None:
    """Return a whole number of at least 0, 1 for a flag that is on; None for anything else, `${mul:2,4}` among it."""
    if isinstance(value, tuple):
        value = True if value == () else value[0]
    if isinstance(value, bool) or str(value).lower() in ("true", "false"):
        return int(str(value).lower() == "true")
    text = str(value).replace("_", "")
    if not (text.isascii() and text.isdigit()):
        return None
    return int(text)


def _is_above_zero(value: object) -> int | None:
    """Return 1 for a factor other than 0, and 0 for 0; None for anything that is no number."""
    if isinstance(value, tuple):
        value = value[0] if value else None
    try:
        return int(float(str(value)) != 0.0)
    except ValueError:
        return None
