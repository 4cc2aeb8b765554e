"""Cases of test_countdown_trainer.py: the trainer against Hugging Face's model, and balanced against unbalanced."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from examples.countdown import weights
from examples.countdown.config import CountdownGrpoConfig
from examples.countdown.export_check import ExportError, check_export, probed_precision
from examples.countdown.huggingface import hugging_face_config
from examples.countdown.problems import draw_problems
from examples.countdown.rollout_engine import RolloutEngine
from examples.countdown.rollouts import Rollouts
from examples.countdown.trainer import Trainer
from moe_rl.core.errors import InvalidInputError
from moe_rl.megatron.on_cpu import cpu_megatron

SMALL: dict[str, Any] = {
    "model": {"num_layers": 2, "hidden_size": 32, "kv_channels": 8, "num_experts": 8, "moe_ffn_hidden_size": 32},
    "rollout": {"problems_per_step": 4, "group_size": 4},
    "train": {"num_mini_batches": 2, "micro_batch_size": 2, "learning_rate": 1e-3},
    "checks": {"num_probe_sequences": 4},
}
PROBLEMS = 4
GROUP = 4


def config_of(**sections: dict[str, Any]) -> CountdownGrpoConfig:
    """The small config with keys of some sections changed."""
    content: dict[str, Any] = {"world_size": dist.get_world_size()}
    for name in SMALL.keys() | sections.keys():
        content[name] = {**SMALL.get(name, {}), **sections.get(name, {})}
    return CountdownGrpoConfig.model_validate(content)


OFF = {"enabled": False}
BF16 = {"precision": "bfloat16"}
GROUPED = {"experts": "grouped"}
FP8 = {**GROUPED, "recipe": "fp8-block"}
REORDERING = {"policy": "relibra", "parameters": {"iterations": 200}, "reorder_every": 1}


@contextlib.contextmanager
def parallel() -> Iterator[None]:
    with cpu_megatron():
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
        )
        try:
            yield
        finally:
            RouterReplay.clear_global_router_replay_instances()
            parallel_state.destroy_model_parallel()


def wild_weights(config: CountdownGrpoConfig) -> dict[str, Tensor]:
    """Weights in which a wrong mapping shows: norms differ from 1, gates from each other."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(hugging_face_config(config.model, config.problems.spec().vocabulary_size)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1.0 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(10.0 if name.endswith("mlp.gate.weight") else 3.0)
    return {name: value.clone() for name, value in model.state_dict().items()}


def engine_of(config: CountdownGrpoConfig, **precision: Any) -> RolloutEngine:
    engine = RolloutEngine(
        hugging_face_config(config.model, config.problems.spec().vocabulary_size),
        max_response_tokens=config.problems.spec().max_response_tokens,
        format_reward=config.problems.format_reward,
        **precision,
    )
    engine.load(wild_weights(config), policy_version=0)
    return engine


def sampled(engine: RolloutEngine, config: CountdownGrpoConfig, step: int) -> Rollouts:
    """Rollouts of a step with rewards that vary; the model has learned nothing that would earn any."""
    problems = draw_problems(config.problems.spec(), "train", 0, range(step * PROBLEMS, (step + 1) * PROBLEMS))
    rollouts = engine.generate(problems, GROUP, 0.9, seed=step)
    rewards = torch.rand(rollouts.num_sequences, generator=torch.Generator().manual_seed(step))
    return dataclasses.replace(rollouts, rewards=rewards)


def worst(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def weights_there_and_back() -> dict[str, Any]:
    config = config_of()
    given = wild_weights(config)
    with parallel():
        trainer = Trainer(config, given)
        exported = trainer.export()
        refusals = []
        for wrong in (
            {name: value for name, value in given.items() if "layers.1.mlp.gate" not in name},
            given | {"model.extra": torch.zeros(1)},
            given | {"model.norm.weight": torch.zeros(3)},
        ):
            try:
                weights.import_weights(trainer.gpt, wrong)
            except InvalidInputError as error:
                refusals.append(str(error))
    return {"difference": worst(given, exported), "refusals": refusals}


def train_and_export(sections: dict[str, dict[str, Any]], steps: int = 2) -> dict[str, list[float]]:
    """Per step: train/rollout mismatch on fresh rollouts, and of the export check after the update."""
    config = config_of(**sections)
    engine = engine_of(config, precision=config.rollout.precision, beside_fp8=config.train.precision)
    checked = engine_of(config, precision=probed_precision(config))
    found: dict[str, list[float]] = {"k3": [], "difference": [], "export": [], "moved": [], "fallback": []}
    with parallel():
        trainer = Trainer(config, wild_weights(config))
        for step in range(1, steps + 1):
            rollouts = sampled(engine, config, step)
            metrics = trainer.step(rollouts, step)
            for each in (engine, checked):
                each.load(trainer.export(), policy_version=step)
            found["k3"].append(metrics["mismatch/k3_kl"])
            found["difference"].append(metrics["mismatch/max_logprob_diff"])
            found["export"].append(check_export(trainer, checked, rollouts, config)["export/max_token_k3"])
            found["moved"].append(metrics.get("moe_rl/moved_experts", 0.0))
            found["fallback"].append(metrics.get("moe_rl/fallback", 0.0))
    return found


def mismatch() -> dict[str, Any]:
    cases = {"off": OFF, "replicas": {}, "reorder": REORDERING, "reorder_only": {**REORDERING, "replica_slots": 0}}
    return {name: train_and_export({"balancer": balancer}) for name, balancer in cases.items()}


def in_bfloat16(cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The same in bfloat16, for pairs of `rollout.precision` and the balancer's section."""
    return {
        name: train_and_export({"train": BF16, "rollout": {"precision": precision}, "balancer": balancer})
        for name, (precision, balancer) in cases.items()
    }


def precisions() -> dict[str, Any]:
    """Experts in FP8 on both sides, moved in every step, and not balanced."""
    return in_bfloat16({"fp8": ("fp8-block", {**REORDERING, **FP8}), "fp8_not_balanced": ("fp8-block", {**OFF, **FP8})})


def other_precisions() -> dict[str, Any]:
    return in_bfloat16(
        {
            "plain": ("bfloat16", OFF),
            "balanced": ("bfloat16", REORDERING),
            "grouped": ("bfloat16", {**REORDERING, **GROUPED}),
            "fp8_rollout": ("fp8-block", REORDERING),
            "pow2": ("fp8-block-pow2", {**REORDERING, **GROUPED, "recipe": "fp8-block-pow2"}),
        }
    )


TRAINERS: dict[str, dict[str, Any]] = {
    "float32": {"balancer": REORDERING},
    "bfloat16": {"train": BF16, "balancer": REORDERING},
    "bfloat16_fp8": {"train": BF16, "balancer": {**REORDERING, **FP8}},
}
"""Precisions a trainer may have, its experts moved in every step."""


def two_swapped(local: Tensor, right: Any = weights.gathered_experts) -> Tensor:
    experts = right(local)
    experts[[0, 1]] = experts[[1, 0]]
    return experts


def wrong_expert_order() -> dict[str, Any]:
    """Exports with experts in each other's place: two of one layer, and those of a reorder that was not undone."""
    found = {}
    for name, sections in TRAINERS.items():
        config = config_of(**sections)
        engine = engine_of(config, precision=probed_precision(config))
        with parallel():
            trainer = Trainer(config, wild_weights(config))
            rollouts = sampled(engine, config, 1)
            one = {"moved": trainer.step(rollouts, 1)["moe_rl/moved_experts"]}
            engine.load(trainer.export(), policy_version=1)
            one["right"] = check_export(trainer, engine, rollouts, config)["export/max_token_k3"]
            with patch.object(weights, "gathered_experts", two_swapped):
                one["two_swapped"] = refusal_of(trainer, engine, rollouts, config)
            with patch.object(trainer.balancer, "canonical", lambda **_: contextlib.nullcontext()):
                one["not_canonical"] = refusal_of(trainer, engine, rollouts, config)
        found[name] = one
    return found


def refusal_of(trainer: Trainer, engine: RolloutEngine, rollouts: Rollouts, config: CountdownGrpoConfig) -> str:
    engine.load(trainer.export(), policy_version=1)
    try:
        check_export(trainer, engine, rollouts, config)
    except ExportError as error:
        return str(error)
    return ""


def teacher_forced(steps: int, **train: Any) -> dict[str, Any]:
    """Losses on rollouts that a run without balancing recorded: without, with replicas, with replicas and reorders."""
    config = config_of(balancer=OFF, train=train)
    engine = engine_of(config)
    recorded, found = [], {}
    with parallel():
        trainer = Trainer(config, wild_weights(config))
        metrics = []
        for step in range(1, steps + 1):
            recorded.append(sampled(engine, config, step))
            metrics.append(trainer.step(recorded[-1], step))
            engine.load(trainer.export(), policy_version=step)
        found["off"] = [[each["train/loss"], each["train/grad_norm"]] for each in metrics]
        for name, balancer in {"replicas": {}, "reorder": {**REORDERING, "reorder_every": 2}}.items():
            changed = config_of(balancer=balancer, train=train)
            trainer = Trainer(changed, wild_weights(changed))
            metrics = [trainer.step(rollouts, step) for step, rollouts in enumerate(recorded, 1)]
            found[name] = [[each["train/loss"], each["train/grad_norm"]] for each in metrics]
            found[name + "_replicas"] = sum(each["moe_rl/replicas"] for each in metrics)
            found[name + "_misplaced"] = max(each["moe_rl/misplaced_share"] for each in metrics)
            found[name + "_moved"] = sum(each.get("moe_rl/moved_experts", 0.0) for each in metrics)
    return found


def teacher_forced_short() -> dict[str, Any]:
    return teacher_forced(4)


def teacher_forced_bf16() -> dict[str, Any]:
    return teacher_forced(3, **BF16)


def teacher_forced_20() -> dict[str, Any]:
    return teacher_forced(20)


def replay_modes() -> dict[str, Any]:
    """One step under every replay mode, from rollouts of the same weights and of others."""
    found = {}
    for mode in ("R3", "R2", "off"):
        config = config_of(train={"replay": mode})
        engine = engine_of(config)
        with parallel():
            trainer = Trainer(config, wild_weights(config))
            rollouts = sampled(engine, config, 1)
            fresh = trainer.step(rollouts, 1)
            stale = trainer.step(rollouts, 2)
        found[mode] = {"fresh": fresh, "stale": stale}
    return found


def objectives() -> dict[str, Any]:
    """A step with two updates per objective, each with router shift and with rollout correction, on one rollout."""
    found = {}
    correction = {"rollout_is": "token", "rollout_is_threshold": 2.0}
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "shift": {"router_shift": {"floor": 0.5}},
        "corrected": {"rollout_correction": correction},
    }
    with parallel():
        rollouts = sampled(engine_of(config_of()), config_of(), 1)
        for objective in ("grpo", "gspo", "gmpo", "cispo", "dapo"):
            for name, extra in variants.items():
                config = config_of(train={"objective": objective, "learning_rate": 1e-2, **extra})
                found[f"{objective}_{name}"] = Trainer(config, wild_weights(config)).step(rollouts, 1)
    return found


def state_is_restored() -> dict[str, Any]:
    """In every precision of parameters, what `restored` finds."""
    return {precision: restored(precision) for precision in ("float32", "bfloat16")}


def restored(precision: str) -> dict[str, Any]:
    """Two steps, a checkpoint in memory, two more steps; a new trainer that takes the state does the same two."""
    config = config_of(balancer={**REORDERING, "reorder_every": 3}, train={"precision": precision})
    engine = engine_of(config)
    rollouts = [sampled(engine, config, step) for step in range(1, 5)]
    with parallel():
        trainer = Trainer(config, wild_weights(config))
        for step in (1, 2):
            trainer.step(rollouts[step - 1], step)
        state = trainer.state()
        going_on = [trainer.step(rollouts[step - 1], step) for step in (3, 4)]
        after = trainer.export()
        other = Trainer(config, {name: torch.zeros_like(value) for name, value in after.items()})
        other.load_state(state)
        resumed = [other.step(rollouts[step - 1], step) for step in (3, 4)]
        weights_differ = worst(after, other.export())
        fresh = Trainer(config, wild_weights(config))
        fresh.load_state({**state, "optimizers": fresh.state()["optimizers"]})
        without_state = [fresh.step(rollouts[step - 1], step) for step in (3, 4)]
        fresh.load_state({**state, "main_weights": [value.to(torch.bfloat16) for value in state["main_weights"]]})
        from_rounded = [fresh.step(rollouts[step - 1], step) for step in (3, 4)]
    timed = lambda metrics: {k: v for k, v in metrics.items() if not k.startswith("time/")}  # noqa: E731
    return {
        "going_on": [timed(each) for each in going_on],
        "resumed": [timed(each) for each in resumed],
        "without_state": [timed(each) for each in without_state],
        "from_rounded": [timed(each) for each in from_rounded],
        "weights_differ": weights_differ,
    }
