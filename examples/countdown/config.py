"""What a user sets in a run's YAML file; every value is checked before anything is written or started."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from examples.countdown.problems import CountdownSpec
from examples.countdown.warm_start import WarmStart, WrongAnswers
from moe_rl.balancing.config import BalancerConfig
from moe_rl.config import load_cluster
from moe_rl.core.errors import InvalidInputError, nearest_name, require
from moe_rl.importance.aggregate import LOSS_AGG_MODES
from moe_rl.importance.objectives import make_objective
from moe_rl.importance.rollout_config import RolloutCorrectionConfig
from moe_rl.importance.router_shift import DEFAULT_FLOOR, RouterShiftUse
from moe_rl.planner.registry import POLICIES, make_planner
from moe_rl.yaml_files import checked, read_yaml

# YAML 1.1 reads 1e-4 as a word: a word that is a number is taken as one.
Number = Annotated[float, Field(strict=False)]
Positive = Annotated[int, Field(ge=1)]
Scalar = int | float | str | bool


def _off(given: object) -> object:
    """YAML 1.1 reads the word off as false."""
    return "off" if given is False else given


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSection(_Section):
    """Shape of the Qwen3-MoE; its vocabulary is the task's."""

    num_layers: Positive = 4
    hidden_size: Positive = 64
    num_attention_heads: Positive = 4
    num_query_groups: Positive = 2
    kv_channels: Positive = 16
    num_experts: Annotated[int, Field(ge=2, le=256)] = 16
    top_k: Positive = 4
    moe_ffn_hidden_size: Positive = 64
    max_position_embeddings: Positive = 128

    @model_validator(mode="after")
    def _check(self) -> Self:
        heads, groups = self.num_attention_heads, self.num_query_groups
        require(heads % groups == 0, f"num_attention_heads ({heads}) must be a multiple of num_query_groups ({groups})")
        require(self.top_k <= self.num_experts, f"top_k ({self.top_k}) exceeds num_experts ({self.num_experts})")
        require(self.kv_channels % 2 == 0, f"kv_channels must be even for rotary embeddings, got {self.kv_channels}")
        return self


class ProblemsSection(_Section):
    """Which problems there are, and what answers earn; see `CountdownSpec`."""

    num_numbers: int = 3
    extra_numbers: int = 0
    num_scripts: int = 1
    max_number: int = 9
    max_target: int = 99
    operators: str = "+-"
    format_reward: Annotated[float, Field(strict=False, ge=0, le=1)] = 0.1
    """Reward of an expression of the right numbers with another value."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.spec()
        return self

    def spec(self) -> CountdownSpec:
        """Return the task."""
        return CountdownSpec(
            num_numbers=self.num_numbers,
            extra_numbers=self.extra_numbers,
            num_scripts=self.num_scripts,
            max_number=self.max_number,
            max_target=self.max_target,
            operators=self.operators,
        )


class WarmStartSection(_Section):
    """The supervised start; see `WarmStart`."""

    num_updates: int = 200
    batch_problems: int = 64
    learning_rate: Number = 3e-3
    router_aux_loss_coef: Number = 0.01
    wrong_demonstrations: Number = 0.6
    wrong_answers: WrongAnswers = "random"

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.settings()
        return self

    def settings(self) -> WarmStart:
        """Return what `warm_start` takes."""
        return WarmStart(**self.model_dump())


class RolloutSection(_Section):
    """Sampling of one step, over all ranks."""

    problems_per_step: Positive = 16
    group_size: Annotated[int, Field(ge=2)] = 8
    """Samples of each problem."""
    temperature: Annotated[float, Field(strict=False, gt=0)] = 1.0
    precision: Literal["float32", "bfloat16", "fp8-block", "fp8-block-pow2"] = "float32"
    """What the rollout engine computes in; the last two: experts in FP8, all else in `train.precision`."""


class RouterShiftSection(_Section):
    """RSPO's weight for router drift."""

    floor: Annotated[float, Field(strict=False, ge=0, le=1)] = DEFAULT_FLOOR
    order: Literal["before-clip", "after-clip"] | None = None
    """None: as the objective has it, after the clip for `gspo`, whose clip is narrower than the router's noise."""

    def use(self) -> RouterShiftUse:
        """Return where gamma enters the objective."""
        return RouterShiftUse(order=self.order)


class TrainSection(_Section):
    """Megatron's optimizer step and the policy loss."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """What Megatron's model computes in. Below float32 its optimizer keeps float32 weights, and sums gradients in
    float32; see `balancer.recipe` for experts in FP8."""
    learning_rate: Annotated[float, Field(strict=False, gt=0)] = 3e-4
    weight_decay: Annotated[float, Field(strict=False, ge=0)] = 0.0
    clip_grad: Annotated[float, Field(strict=False, gt=0)] = 1.0
    num_mini_batches: Positive = 2
    """Optimizer updates per step: the step's sequences are split over them."""
    micro_batch_size: Positive = 16
    """Sequences of a rank that run at once."""
    objective: str = "grpo"
    objective_options: dict[str, Scalar] = {}
    loss_agg_mode: str | None = None
    """None takes the objective's own."""
    replay: Annotated[Literal["R3", "R2", "off"], BeforeValidator(_off)] = "R3"
    """R3: the rollout engine's experts are replayed; R2: those of the trainer's own old-policy pass; off: none."""
    compare_replay: bool = False
    """Run the old-policy pass a second time, with replay where it is off and without where it is on, and log the
    mismatch of both."""
    router_shift: RouterShiftSection | None = None
    rollout_correction: dict[str, Scalar | None] | None = None
    """Fields of `RolloutCorrectionConfig`; null for none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        make_objective(self.objective, dict(self.objective_options))
        mode = self.loss_agg_mode
        if mode is not None and mode not in LOSS_AGG_MODES:
            raise InvalidInputError(f"unknown loss_agg_mode {mode!r}.{nearest_name(mode, LOSS_AGG_MODES)}")
        self.correction()
        return self

    def correction(self) -> RolloutCorrectionConfig | None:
        """Return the rollout correction, or None."""
        if self.rollout_correction is None:
            return None
        known = list(RolloutCorrectionConfig.__dataclass_fields__)
        for name in self.rollout_correction:
            if name not in known:
                raise InvalidInputError(f"rollout_correction has no field {name!r}.{nearest_name(name, known)}")
        config = RolloutCorrectionConfig(**self.rollout_correction)  # type: ignore[arg-type]
        require(
            not config.bypass_mode,
            "rollout_correction: bypass_mode cannot be set, because the run has an old-policy pass.",
        )
        return config


class BalancerSection(_Section):
    """How experts are replicated and moved; see `moe_rl.megatron.BalancerConfig`."""

    enabled: bool = True
    policy: str = "ultraep"
    """Plans the replicas of every pass and, where it can, the homes of a reorder."""
    parameters: dict[str, Scalar] = {}
    objective: Literal["time", "imbalance"] = "imbalance"
    """"imbalance" counts rows alone: on a model this small "time" would find that no replica pays."""
    cluster: str = "h100"
    replica_slots: Annotated[int, Field(ge=0)] = 1
    cross_node_slots: Annotated[int, Field(ge=0)] = 0
    ranks_per_node: Positive = 8
    reorder_every: Annotated[int, Field(ge=0)] = 0
    """Steps from one reorder of the experts' homes to the next; 0: never."""
    experts: Literal["megatron", "grouped"] = "megatron"
    """Who computes the experts, balanced or not; "grouped": `moe_rl.kernels`, needed for FP8."""
    recipe: Literal["bf16", "fp8-block", "fp8-block-pow2"] = "bf16"
    """Of experts "grouped": "bf16" multiplies in the parameters' own type, "fp8-block" in E4M3."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        make_planner(self.policy, **self.parameters)
        load_cluster(self.cluster)
        require(
            self.experts == "grouped" or self.recipe == "bf16",
            f"recipe {self.recipe!r} needs `experts: grouped`, because Megatron's own experts do not compute in FP8",
        )
        require(self.enabled or self.reorder_every == 0, "reorder_every needs the balancer: set enabled to true")
        staying = {policy.name: policy for policy in POLICIES if policy.keeps_homes and policy.slot_limits}
        require(
            POLICIES[self.policy].slot_limits,
            f"policy {self.policy!r} may copy any number of experts to a rank: choose one of {', '.join(staying)}",
        )
        require(
            self.policy in staying,
            f"policy {self.policy!r} moves homes in every pass: choose one of {', '.join(staying)}",
        )
        moving = [name for name, policy in staying.items() if policy.levers.move_homes]
        require(
            self.reorder_every == 0 or self.policy in moving,
            f"policy {self.policy!r} never moves homes: with reorder_every, choose one of {', '.join(moving)}",
        )
        return self

    def config(self) -> BalancerConfig:
        """Return what `attach` takes."""
        return BalancerConfig(
            policy=self.policy,
            parameters=self.parameters,
            objective=self.objective,
            cluster=self.cluster,
            replica_slots=self.replica_slots,
            cross_node_slots=self.cross_node_slots,
            ranks_per_node=self.ranks_per_node,
            experts=self.experts,
            recipe=self.recipe,
            # The Triton kernels are for GPUs; interpreted on a CPU they compute the same, slowly.
            backend="reference" if self.experts == "grouped" else "auto",
        )


class EvaluationSection(_Section):
    """Accuracy on problems that are never trained on."""

    every: Positive = 5
    """Steps from one evaluation to the next; the first weights and the last ones are always evaluated."""
    num_problems: Positive = 64
    group_size: Positive = 4
    """Samples of each problem, at the temperature of the rollouts; greedy answers are counted beside them."""


class ChecksSection(_Section):
    """Limits beyond which the run stops with a sentence."""

    export_kl_limit: Annotated[float, Field(strict=False, gt=0)] | None = None
    """Largest k3 divergence of one token between the trainer and an engine with the weights that it has just exported,
    both in float32; None: see `export_check.default_limit`."""
    num_probe_sequences: Positive = 4
    """Sequences per rank on which they are compared."""


class CountdownGrpoConfig(_Section):
    """Everything that a run depends on: runs of the same config differ in wall-clock figures alone."""

    seed: Annotated[int, Field(ge=0)] = 0
    num_steps: Positive = 40
    world_size: Positive = 2
    """Processes; each is one expert-parallel rank, and samples its share of the problems."""
    out: str = "out/countdown_grpo"
    """Folder of the run: metrics.jsonl, tensorboard/, trace.moetrace/, checkpoints/, config.yaml."""
    checkpoint_every: Positive = 1
    """Steps from one checkpoint to the next; a killed run resumes at the last one."""
    rank_timeout_s: Annotated[float, Field(strict=False, gt=0)] = 120.0
    """Longest wait of a rank for the others."""
    model: ModelSection = ModelSection()
    problems: ProblemsSection = ProblemsSection()
    warm_start: WarmStartSection = WarmStartSection()
    rollout: RolloutSection = RolloutSection()
    train: TrainSection = TrainSection()
    balancer: BalancerSection = BalancerSection()
    evaluation: EvaluationSection = EvaluationSection()
    checks: ChecksSection = ChecksSection()

    @model_validator(mode="after")
    def _check(self) -> Self:
        world, model, rollout, train = self.world_size, self.model, self.rollout, self.train
        require(
            self.evaluation.num_problems >= world,
            f"evaluation.num_problems ({self.evaluation.num_problems}) must be at least world_size ({world})",
        )
        longest = self.problems.spec().prompt_tokens + self.problems.spec().max_response_tokens
        require(
            longest <= model.max_position_embeddings,
            f"sequences can have {longest} tokens, but model.max_position_embeddings is "
            f"{model.max_position_embeddings}",
        )
        require(
            model.num_experts % world == 0,
            f"model.num_experts ({model.num_experts}) must be a multiple of world_size ({world})",
        )
        require(
            rollout.problems_per_step % world == 0,
            f"rollout.problems_per_step ({rollout.problems_per_step}) must be a multiple of world_size ({world})",
        )
        groups, updates = rollout.problems_per_step, train.num_mini_batches
        require(
            groups % updates == 0,
            f"rollout.problems_per_step ({groups}) must be a multiple of train.num_mini_batches ({updates})",
        )
        sequences, cell = groups // updates * rollout.group_size, world * train.micro_batch_size
        require(
            sequences % cell == 0,
            f"a mini-batch has {sequences} sequences (problems_per_step / num_mini_batches x group_size), which is not "
            f"a multiple of world_size x train.micro_batch_size ({cell})",
        )
        return self

    def yaml(self) -> str:
        """Return the YAML that `load_config` reads back as this config."""
        return str(yaml.safe_dump(self.model_dump(), sort_keys=False))


def load_config(path: Path, overrides: Sequence[str] = ()) -> CountdownGrpoConfig:
    """Return the config of a YAML file with `key.key=value` overrides; raise a sentence about a wrong one."""
    content = read_yaml(path)
    for override in overrides:
        _set(content, override)
    return checked(content, CountdownGrpoConfig, where=str(path))


def _set(content: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    is_path = re.fullmatch(r"\w+(\.\w+)*", key) is not None
    require(bool(equals) and is_path, f"override {override!r} is not of the form key=value or section.key=value.")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        raise InvalidInputError(f"override {override!r}: {value!r} is not a YAML value.") from None
    *sections, last = key.split(".")
    for section in sections:
        inner = content.setdefault(section, {})
        require(isinstance(inner, dict), f"override {override!r}: {section!r} is not a section.")
        content = inner
    content[last] = parsed
