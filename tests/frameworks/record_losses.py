"""Record what frameworks' own loss functions give on one small batch: `losses.json`.

    python tests/frameworks/record_losses.py            # needs verl, trl, areal (pip install --no-deps is enough)
    python -m tests.frameworks.record_losses skyrl      # of a checkout in the folder FRAMEWORK_SOURCES

Writes loss and gradient of every case into `losses.json`, beside the cases that are there already. slime, miles,
NeMo-RL, prime-rl and SkyRL are in no package index: `own_losses.py` runs their functions out of a checkout, whose
commit stands in the file.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

FILE = Path(__file__).with_name("losses.json")
LENGTHS = (6, 4, 5, 1)


def recorded_batch() -> dict[str, Tensor]:
    """Four sequences in float64 with ratios on both sides of every clip; values in the padding would be seen."""
    generator = torch.Generator().manual_seed(17)
    rows, width = len(LENGTHS), max(LENGTHS)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)

    old = -0.3 - normal(1.0).abs()
    return {
        "old_log_prob": old,
        "log_prob": (old + normal(0.25)).clamp(max=-1e-3),
        "rollout_log_prob": (old + normal(0.2)).clamp(max=-1e-3),
        "reference_log_prob": old + normal(0.3),
        "advantages": torch.tensor([1.0, -0.5, -1.5, 0.7], dtype=torch.float64)[:, None].repeat(1, width),
        "response_mask": torch.arange(width) < torch.tensor(LENGTHS)[:, None],
    }


def case(framework: str, setting: str, loss: Tensor, log_prob: Tensor) -> dict[str, Any]:
    """One entry of the file."""
    (grad,) = torch.autograd.grad(loss, log_prob)
    return {"framework": framework, "setting": setting, "loss": loss.item(), "grad": grad.tolist()}


def verl_cases() -> list[dict[str, Any]]:
    """verl 0.9.1, `get_policy_loss_fn(mode)` with its actor config."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    b, found = recorded_batch(), []
    for mode, settings in VERL.items():
        for agg in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
            given = {k: v for k, v in settings.items() if not hasattr(PolicyLossConfig, k)}
            policy = PolicyLossConfig(loss_mode=mode, **{k: v for k, v in settings.items() if k not in given})
            base = {"strategy": "megatron", "rollout_n": 1, "use_dynamic_bsz": True}
            config = ActorConfig(policy_loss=policy, **(base | given))
            log_prob = b["log_prob"].clone().requires_grad_()
            loss, _ = get_policy_loss_fn(mode)(
                old_log_prob=b["old_log_prob"],
                log_prob=log_prob,
                advantages=b["advantages"],
                response_mask=b["response_mask"].double(),
                loss_agg_mode=agg,
                config=config,
                rollout_is_weights=(b["old_log_prob"] - b["rollout_log_prob"]).exp().clamp(max=1.5),
            )
            found.append(case("verl", f"{mode}/{agg}", loss, log_prob))
    return found + [verl_default(mode) for mode in VERL]


def verl_default(mode: str) -> dict[str, Any]:
    """Loss, gradient and logged numbers of a loss mode with nothing else set, but for what it requires."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    b = recorded_batch()
    log_prob = b["log_prob"].clone().requires_grad_()
    call = {name: b[name] for name in ("old_log_prob", "advantages")} | {"response_mask": b["response_mask"].double()}
    config = verl_config(mode)
    loss, logged = get_policy_loss_fn(mode)(
        log_prob=log_prob, config=config, loss_agg_mode=config.loss_agg_mode, **call
    )
    return case("verl", f"{mode}/default", loss, log_prob) | {"logged": logged}


def verl_config(mode: str) -> Any:
    """verl's actor config of a loss mode, all other settings verl's defaults; dro has none for its beta."""
    from verl.workers.config import ActorConfig, PolicyLossConfig

    policy = PolicyLossConfig(loss_mode=mode, **({"dro_beta": 0.3} if mode.endswith("dro") else {}))
    return ActorConfig(policy_loss=policy, strategy="megatron", rollout_n=1, use_dynamic_bsz=True)


VERL: dict[str, dict[str, Any]] = {
    "vanilla": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.25, "clip_ratio_c": 1.5},
    "gspo": {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03},
    "geo_mean": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2},
    "cispo": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "dppo_tv": {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 1.2},
    "dppo_kl": {"clip_ratio_low": 0.005, "clip_ratio_high": 0.004, "clip_ratio_c": 1.2},
    "dro": {"dro_beta": 0.3},
    # Up to 11 of the 16 tokens may go, and 9 are candidates: they all go, whatever is drawn.
    "clip_cov": {"clip_ratio": 0.2, "clip_cov_ratio": 0.7, "clip_cov_lb": 0.05, "clip_cov_ub": 1.0},
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7},
}
"""By verl's loss mode: what its actor config, or `policy_loss` in it, is set to."""


TRL: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"epsilon_high": 0.25},
    "bnpo": {},
    "dr_grpo": {"delta": 1.3},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03},
    "luspo": {"importance_sampling_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03},
    "cispo": {"epsilon_high": 1.2},
    "sapo": {},
    "vespo": {},
    "kl": {"loss_type": "grpo", "beta": 0.1},
    "unbiased_kl": {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
    "vllm": {"loss_type": "grpo", "use_vllm": True},
    "moe": {"loss_type": "grpo", "aux": 0.7},
    "dapo/default": {"loss_type": "dapo"},
    "dr_grpo/default": {"loss_type": "dr_grpo"},
}
"""By setting: what of TRL's is set; `loss_type` is the setting's name unless given."""


def trl_stand_in(setting: str) -> tuple[SimpleNamespace, dict[str, Any], Tensor]:
    """A trainer's attributes that TRL 1.16.0's `_compute_loss` reads, its inputs, and the leaf log-probabilities."""
    from collections import defaultdict

    b = recorded_batch()
    options = {"loss_type": setting} | TRL[setting]
    log_prob = b["log_prob"].clone().requires_grad_()
    args = SimpleNamespace(
        delta=options.get("delta"),
        use_bias_correction_kl=options.get("use_bias_correction_kl", False),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        steps_per_generation=4,
    )
    trainer = SimpleNamespace(
        args=args,
        loss_type=options["loss_type"],
        importance_sampling_level=options.get("importance_sampling_level", "token"),
        epsilon_low=options.get("epsilon_low", 0.2),
        epsilon_high=options.get("epsilon_high", 0.2),
        beta=options.get("beta", 0.0),
        use_vllm=options.get("use_vllm", False),
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate",
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        aux_loss_enabled="aux" in options,
        router_aux_loss_coef=0.001,
        _entropy_bonus_enabled=False,
        max_completion_length=8,
        current_gradient_accumulation_steps=2,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x
        ),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (
            log_prob,
            torch.zeros_like(log_prob).detach(),
            torch.tensor(options["aux"]) if "aux" in options else None,
        ),
    )
    rows, width = b["response_mask"].shape
    inputs = {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(rows, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(rows, width, dtype=torch.int64),
        "completion_mask": b["response_mask"].long(),
        "advantages": b["advantages"][:, 0],
        "old_per_token_logps": b["old_log_prob"],
        "ref_per_token_logps": b["reference_log_prob"],
        "importance_sampling_ratio": (b["old_log_prob"] - b["rollout_log_prob"]).exp().clamp(max=1.5),
        "num_items_in_batch": torch.tensor(40),
    }
    if not trainer.use_vllm:
        del inputs["importance_sampling_ratio"]
    return trainer, inputs, log_prob


def trl_cases() -> list[dict[str, Any]]:
    """TRL 1.16.0, `GRPOTrainer._compute_loss` on a trainer's attributes."""
    from trl import GRPOTrainer

    found = []
    for setting in TRL:
        trainer, inputs, log_prob = trl_stand_in(setting)
        trainer.get_gamma_weights = GRPOTrainer.get_gamma_weights
        loss = GRPOTrainer._compute_loss(trainer, None, inputs)
        logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
        found.append(case("trl", setting, loss, log_prob) | {"logged": logged})
    return found


AREAL: dict[str, dict[str, Any]] = {
    "ppo": {"eps_clip": 0.1, "eps_clip_higher": 0.2, "c_clip": 1.5},
    "gspo": {"eps_clip": 0.02, "eps_clip_higher": 0.03, "importance_sampling_level": "sequence"},
    "sapo": {"eps_clip": 0.2, "use_sapo_loss": True},
    "decoupled_ppo": {"eps_clip": 0.1, "upper": 1.2},
    "default": {"eps_clip": 0.2},
}
"""By objective: AReaL's settings; `upper` is the cap of its rejection sampling with the action clamp."""


def areal_cases() -> list[dict[str, Any]]:
    """AReaL 1.0.4, `ppo_actor_loss_fn` and `sapo_loss_fn` of areal/utils/functional."""
    from areal.utils.functional import functional

    b, found = recorded_batch(), []
    for setting, options in AREAL.items():
        log_prob = b["log_prob"].clone().requires_grad_()
        given = dict(options)
        shared = {"advantages": b["advantages"].clone(), "loss_mask": b["response_mask"]}
        if given.pop("use_sapo_loss", False):
            loss, _ = functional.sapo_loss_fn(
                logprobs=log_prob, old_logprobs=b["old_log_prob"], tau_pos=1.0, tau_neg=1.05, **shared
            )
        else:
            upper = given.pop("upper", None)
            rejection = None
            if upper is not None:
                from areal.api.cli_args import RejectionSamplingConfig

                rejection = RejectionSamplingConfig(level="token", action="clamp", metric="ratio", upper=upper)
            loss, _ = functional.ppo_actor_loss_fn(
                logprobs=log_prob,
                proximal_logprobs=b["old_log_prob"],
                old_logprobs=b["rollout_log_prob"] if rejection else b["old_log_prob"],
                rejection_sampling=rejection,
                **given,
                **shared,
            )
        found.append(case("areal", setting, loss, log_prob))
    return found


def main() -> None:
    """Replace the cases of the frameworks that are asked for (all installed ones)."""
    known = {"verl": verl_cases, "trl": trl_cases, "areal": areal_cases}
    document = json.loads(FILE.read_text()) if FILE.exists() else {"cases": []}
    for framework in sys.argv[1:] or known:
        if framework in known:
            found = known[framework]()
        else:
            from tests.frameworks import own_losses  # a package of verl's environment is called tests, too

            found = own_losses.cases(framework, Path(os.environ["FRAMEWORK_SOURCES"]))
            document["how"][f"{framework}, defaults"] = own_losses.COMMITS[framework]
        again = {(each["framework"], each["setting"]) for each in found}
        document["cases"] = [c for c in document["cases"] if (c["framework"], c["setting"]) not in again] + found
    FILE.write_text(json.dumps(document, indent=None, separators=(",", ":")).replace('{"framework"', '\n{"framework"'))


if __name__ == "__main__":
    main()
