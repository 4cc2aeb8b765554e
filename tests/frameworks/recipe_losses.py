"""Public recipes' loss settings, a framework's own loss under them and ours: `recipes.json` and a table of the docs.

    python -m tests.frameworks.recipe_losses slime      # of a checkout in the folder FRAMEWORK_SOURCES
    python -m tests.frameworks.recipe_losses verl       # with verl installed, and no other package called tests

A recipe is a script or a configuration that the framework's repository ships, read at the commit in `SOURCES`; what it
does not set is the framework's default. prime-rl's, TRL's and AReaL's recipes set nothing of the loss, so that the
default configurations of `own_losses.py` are theirs.
"""

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.frameworks import own_losses as own
from tests.frameworks import record_losses as record

FILE = Path(__file__).with_name("recipes.json")
SOURCES = {
    "verl": "verl-project/verl 1dda039b9, loss of verl 0.9.1",
    "slime": "THUDM/slime 045310b2b",
    "miles": "radixark/miles 23ec9e534",
    "nemo_rl": "NVIDIA-NeMo/RL ced083a96",
    "skyrl": "NovaSky-AI/SkyRL 7fee019da",
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe's settings of the loss, under the framework's names."""

    framework: str
    files: str
    """What the repository calls it; several with the same settings behind each other."""
    mode: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    cause: str = ""
    """Why ours differs, "" where it does not."""

    @property
    def key(self) -> str:
        """Its name in the file of records."""
        return f"{self.framework} {self.mode} {self.files}"

    def __str__(self) -> str:
        return self.key


_GSPO = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "clip_ratio_c": 10.0}
_DAPO = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0, "loss_agg_mode": "token-mean"}
_WIDTH = (
    "if clipping is off; moe_rl refuses the framework's clip width of 0.2, "
    "which is meant for token ratios and clips no sequence ratio"
)
RECIPES = (
    *(
        Recipe(framework="verl", files=f"examples/{name}", mode="gspo", settings=_GSPO)
        for name in (
            "grpo_trainer/run_deepseek_v4_veomni.sh", "grpo_trainer/run_qwen3_5-122b-a10b_veomni.sh",
            "grpo_trainer/run_qwen3_5_35b_a3b_veomni.sh", "router_replay/run_qwen3_5_35b_a3b_veomni.sh",
        )
    ),
    Recipe(
        framework="verl", files="examples/gspo_trainer/run_qwen3_30b_a3b_megatron.sh", mode="gspo",
        settings=_GSPO | {"loss_agg_mode": "seq-mean-token-mean"},
    ),
    Recipe(
        framework="verl", files="examples/grpo_trainer/run_qwen3_30b_a3b_megatron.sh", mode="vanilla", settings=_DAPO
    ),
    *(
        Recipe(
            framework="verl", files="examples/dppo_trainer/run_qwen3_30b_a3b_megatron.sh", mode=mode,
            settings={"clip_ratio_low": width, "clip_ratio_high": width, "clip_ratio_c": 1e4}
            | {"loss_agg_mode": "seq-mean-token-sum-norm"},
        )
        for mode, width in (("dppo_tv", 0.15), ("dppo_kl", 0.05))
    ),
    Recipe(
        framework="verl", files="examples/cispo_trainer/run_qwen3_8b_fsdp.sh", mode="cispo",
        settings={"clip_ratio_low": 10.0, "clip_ratio_high": 0.2},
    ),
    Recipe(
        framework="verl", files="examples/gmpo_trainer/run_qwen3_8b_fsdp.sh", mode="geo_mean",
        settings={"clip_ratio_low": 0.4, "clip_ratio_high": 0.4},
    ),
    Recipe(framework="verl", files="examples/sapo_trainer/run_qwen3_30b_a3b_fsdp.sh", mode="sapo"),
    Recipe(
        framework="slime", files="scripts/run-glm4.7-355B-A32B.sh", mode="gspo",
        settings={"eps_clip": 1e-4, "eps_clip_high": 2e-4, "use_tis": True},
    ),
    Recipe(
        framework="slime", files="scripts/run-qwen3-235B-A22B.sh, run-qwen3-next-80B-A3B.sh", mode="gspo",
        settings={"eps_clip": 4e-4, "eps_clip_high": 4e-4},
    ),
    Recipe(
        framework="slime", files="scripts/run-qwen3-30B-A3B.sh, run-glm5-744B-A40B.sh, run-moonlight-16B-A3B.sh",
        mode="grpo", settings={"eps_clip": 0.2, "eps_clip_high": 0.28},
    ),
    Recipe(
        framework="slime", files="scripts/low_precision/run-qwen3-30b-a3b-fp8.sh", mode="grpo",
        settings={"eps_clip": 0.2, "eps_clip_high": 0.28, "use_tis": True},
    ),
    Recipe(
        framework="miles", files="scripts/run_glm45_355b_a32b_8node.py", mode="gspo",
        settings={"eps_clip": 1e-4, "eps_clip_high": 2e-4, "use_tis": True},
    ),
    Recipe(
        framework="miles", files="scripts/run_qwen3_235b_a22b.py, run_qwen3_next_80b_a3b.py", mode="gspo",
        settings={"eps_clip": 4e-4, "eps_clip_high": 4e-4},
    ),
    Recipe(
        framework="nemo_rl", files="grpo-cispo-mm1-async-lag1-highoffpolicy-qwen3-30ba3b-3n8g-megatron-cispo.yaml",
        mode="cispo",
        settings={"ratio_clip_min": 1.0, "ratio_clip_max": 5.0, "use_importance_sampling_correction": True},
    ),
    Recipe(
        framework="nemo_rl",
        files="grpo-qwen3.5-35ba3b-dapo-4n8g-automodel.yaml, grpo-minimax-m27-dapo-8n8g-automodel.yaml",
        mode="ppo",
        settings={"ratio_clip_max": 0.28, "ratio_clip_c": 10.0, "use_importance_sampling_correction": True}
        | {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0},
    ),
    Recipe(framework="nemo_rl", files="grpo-gspo-deepscaler-1.5b-8K.yaml", mode="gspo", cause=_WIDTH),
    Recipe(
        framework="skyrl", files="megatron/run_megatron_dapo_qwen3_30b_a3b.sh, run_megatron_dapo_qwen3.5_35b_a3b.sh",
        mode="dual_clip",
        settings={"eps_clip_high": 0.28, "clip_ratio_c": 10.0, "loss_reduction": "token_mean"}
        | {"tis_ratio_type": "token"},
    ),
    Recipe(
        framework="skyrl", files="algorithms/gspo/run_gspo_gsm8k.sh", mode="gspo",
        settings={"loss_reduction": "sequence_mean"}, cause=_WIDTH,
    ),
    Recipe(
        framework="skyrl", files="algorithms/sapo/run_sapo_qwen3_4b_aime.sh", mode="sapo",
        settings={"loss_reduction": "sequence_mean"},
    ),
    Recipe(
        framework="skyrl", files="algorithms/cispo/run_cispo_gsm8k.sh", mode="cispo",
        settings={"loss_reduction": "token_mean"},
    ),
)  # fmt: skip


def rollout_weights(cap: float | None) -> Tensor:
    """pi_old / pi_rollout of the recorded batch, cut at `cap`."""
    b = record.recorded_batch()
    return (b["old_log_prob"] - b["rollout_log_prob"]).exp().clamp(max=math.inf if cap is None else cap)


# theirs


def _verls(recipe: Recipe) -> own.Loss:
    def loss(log_prob: Tensor) -> tuple[Tensor, own.Numbers]:
        from verl.trainer.ppo.core_algos import get_policy_loss_fn

        config, b = verl_config(recipe, recipe.mode), record.recorded_batch()
        call = {name: b[name] for name in ("old_log_prob", "advantages")}
        call |= {"response_mask": b["response_mask"].double(), "loss_agg_mode": config.loss_agg_mode}
        return get_policy_loss_fn(recipe.mode)(log_prob=log_prob, config=config, **call)

    return loss


def verl_config(recipe: Recipe, mode: str) -> Any:
    """verl's actor config of a recipe, with a loss mode."""
    from verl.workers.config import ActorConfig, PolicyLossConfig

    return ActorConfig(
        policy_loss=PolicyLossConfig(loss_mode=mode), strategy="megatron", rollout_n=1, use_dynamic_bsz=True,
        **recipe.settings,
    )  # fmt: skip


def _slimes(recipe: Recipe, root: Path) -> own.Loss:
    function = own.slimes_loss(root) if recipe.framework == "slime" else own.miles_loss(root)

    def loss(log_prob: Tensor) -> tuple[Tensor, own.Numbers]:
        args, data, mean = own.slime_batch()
        vars(args).update({"advantage_estimator": recipe.mode, "tis_clip": 2.0, "tis_clip_low": 0.0, **recipe.settings})
        args.custom_tis_function_path = None
        data["rollout_mask_sums"] = None
        own.REDUCERS[recipe.framework] = mean  # vanilla TIS changes no mask, and so no denominator
        value, _ = function(args, data, log_prob, mean)
        return value, {}

    return loss


def _nemo_rls(recipe: Recipe, root: Path) -> own.Loss:
    modes = {
        "gspo": {"sequence_level_importance_ratios": True, "token_level_loss": False},
        "cispo": {"use_cispo": True},
    }
    return own.nemo_rl_loss(own.nemo_rls_loss(root), modes.get(recipe.mode, {}) | recipe.settings)


def _skyrls(recipe: Recipe, root: Path) -> own.Loss:
    folder = root / "skyrl/skyrl/backends/skyrl_train/utils"
    helpers = own.functions(folder / "torch_utils.py", "masked_mean", "safe_exp_delta", Optional=Any)
    correction = own.functions(
        folder / "off_policy_correction_utils.py",
        *("off_policy_correction_enabled", "compute_tis_ratio", "compute_off_policy_correction"),
        "apply_off_policy_correction", masked_mean=helpers.masked_mean, safe_exp_delta=helpers.safe_exp_delta,
    )  # fmt: skip
    name = {"dual_clip": "ppo_policy_loss", "cispo": "compute_policy_loss_cispo"}.get(
        recipe.mode, f"{recipe.mode}_policy_loss"
    )
    given = vars(helpers) | {"apply_off_policy_correction": correction.apply_off_policy_correction}
    module = own.functions(
        folder / "ppo_utils.py", name, "reduce_loss", "apply_loss_reduction_to_advantages_minibatch", **given
    )
    off = dict.fromkeys(("sequence_mask_metric", "outlier_token_is_threshold_low", "outlier_token_is_threshold_high"))
    off |= dict.fromkeys(("token_mask_is_threshold_low", "token_mask_is_threshold_high"))
    settings = dict(recipe.settings)
    tis = settings.pop("tis_ratio_type", None)

    def loss(log_prob: Tensor) -> tuple[Tensor, own.Numbers]:
        b = record.recorded_batch()
        mask = b["response_mask"].double()
        config = SimpleNamespace(
            policy_loss_type=recipe.mode,
            **{"eps_clip_low": 0.2, "eps_clip_high": 0.2, "clip_ratio_c": 3.0, **settings},
            off_policy_correction=SimpleNamespace(tis_ratio_type=tis, token_tis_ratio_clip_high=2.0, **off),
            sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
            cispo=SimpleNamespace(cispo_anchor="old", cispo_eps_clip_low=1.0, cispo_eps_clip_high=4.0),
        )
        advantages = module.apply_loss_reduction_to_advantages_minibatch(
            b["advantages"], mask, config.loss_reduction, len(record.LENGTHS), max(record.LENGTHS)
        )
        rollout = b["rollout_log_prob"] if tis else None
        value, _ = getattr(module, name)(log_prob, b["old_log_prob"], advantages, config, mask, rollout)
        return value, {}

    return loss


def theirs(recipe: Recipe, root: Path | None) -> own.Loss:
    """Return the framework's own loss under the recipe, of the installed package or a folder of checkouts."""
    if recipe.framework == "verl":
        return _verls(recipe)
    assert root is not None
    runs = {"slime": _slimes, "miles": _slimes, "nemo_rl": _nemo_rls, "skyrl": _skyrls}
    return runs[recipe.framework](recipe, root)


# ours


def ours(recipe: Recipe) -> own.Loss:
    """Return our entry of the framework, or our objective, under the recipe's settings; without the cause it has."""
    settings = dict(recipe.settings)
    if recipe.framework == "verl":
        return own.our_verl(recipe.mode, **settings)
    if recipe.framework in ("slime", "miles"):
        correction = {"rollout_is": "token", "rollout_is_threshold": 2.0} if settings.pop("use_tis", False) else None
        return own.our_slime(recipe.framework, recipe.mode, correction, settings)
    if recipe.framework == "nemo_rl":
        weights = None
        if settings.get("use_importance_sampling_correction"):
            weights = rollout_weights(settings.get("truncated_importance_sampling_ratio"))
        options = {
            "gspo": own.WIDE,
            "cispo": {"clip_ratio_low": 1.0, "clip_ratio_high": 5.0},
            "ppo": {"clip_ratio_high": 0.28, "clip_ratio_c": 10.0},
        }[recipe.mode]
        mode = "seq-mean-token-mean" if recipe.mode == "gspo" else "token-mean"
        return own.objective(recipe.mode, loss_agg_mode=mode, weights=weights, **options)
    name, options = {
        "dual_clip": ("ppo", {"clip_ratio_high": 0.28, "clip_ratio_c": 10.0}),
        "gspo": ("gspo", own.WIDE),
        "sapo": ("sapo", {}),
        "cispo": ("scale_rl", {}),
    }[recipe.mode]
    mode = {"token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean"}[settings["loss_reduction"]]
    weights = rollout_weights(2.0) if "tis_ratio_type" in settings else None
    return own.objective(name, loss_agg_mode=mode, weights=weights, **options)


def differences(recipe: Recipe, recorded: Mapping[str, Any]) -> tuple[float, float]:
    """Return by how much ours differs from what is recorded: the loss, and the gradient relative to theirs."""
    log_prob = record.recorded_batch()["log_prob"].clone().requires_grad_()
    value, _ = ours(recipe)(log_prob)
    (grad,) = torch.autograd.grad(value, log_prob)
    expected = torch.tensor(recorded["grad"], dtype=torch.float64)
    return value.item() - recorded["loss"], float((grad - expected).norm() / expected.norm())


def records() -> dict[str, dict[str, Any]]:
    """Return what is recorded, by `Recipe.key`."""
    document: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return document


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else f"`{value}`"


def table() -> str:
    """Return the table of the reference page."""
    recorded = records()
    lines = ["| framework | recipe | the recipe's loss | our loss |", "|---|---|---|---|"]
    for recipe in RECIPES:
        loss, gradient = differences(recipe, recorded[recipe.key])
        is_equal = max(abs(loss), gradient) <= own.TOLERANCE
        found = "equal" if is_equal else f"loss differs by {loss:+.1e}, gradient by {gradient:.0%}"
        if recipe.cause:
            found += f" {recipe.cause}"
        settings = "".join(f", {name} {_shown(value)}" for name, value in recipe.settings.items())
        lines.append(f"| {recipe.framework} | `{recipe.files}` | `{recipe.mode}`{settings} | {found} |")
    return "\n".join(lines) + "\n"


def recorded_of(recipe: Recipe, root: Path | None) -> dict[str, Any]:
    """Return loss and gradient of the framework's own loss under the recipe."""
    log_prob = record.recorded_batch()["log_prob"].clone().requires_grad_()
    value, _ = theirs(recipe, root)(log_prob)
    (grad,) = torch.autograd.grad(value, log_prob)
    return {"loss": value.item(), "grad": grad.tolist(), "source": SOURCES[recipe.framework]}


def main() -> None:
    """Record the frameworks that are named."""
    root = Path(os.environ["FRAMEWORK_SOURCES"]) if "FRAMEWORK_SOURCES" in os.environ else None
    found = records() | {r.key: recorded_of(r, root) for r in RECIPES if r.framework in sys.argv[1:]}
    kept = {recipe.key: found[recipe.key] for recipe in RECIPES if recipe.key in found}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in kept.items())
    FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
