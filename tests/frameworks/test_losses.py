"""Every framework's entry against the framework's own function on equal settings: recorded, and live where installed.

`record_losses.py` beside this file made `losses.json` and holds the batch.
"""

import importlib.util
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks.areal import losses as areal
from moe_rl.frameworks.router_shift import READING
from moe_rl.frameworks.slime import losses as slime
from moe_rl.frameworks.trl import losses as trl
from moe_rl.frameworks.verl import losses as verl
from moe_rl.importance import PolicyLossInputs, RouterShiftUse, policy_loss
from moe_rl.importance.objectives import OBJECTIVES
from tests.frameworks import record_losses as record

DOCUMENT = json.loads(record.FILE.read_text())
RECORDED = {(each["framework"], each["setting"]): each for each in DOCUMENT["cases"]}
TOLERANCE = 1e-7
EXAMPLE = Path(__file__).parents[2] / "examples" / "verl" / "run_qwen3_30b_a3b.sh"


def settings(framework: str) -> list[str]:
    """All but the default configurations, which test_contracts.py compares."""
    return [setting for name, setting in RECORDED if name == framework and not setting.endswith("default")]


def batch() -> tuple[dict[str, Tensor], Tensor]:
    tensors = record.recorded_batch()
    return tensors, tensors["log_prob"].clone().requires_grad_()


def holds(framework: str, setting: str, loss: Tensor, log_prob: Tensor) -> None:
    """Loss and gradient are those of the framework's own function."""
    expected = RECORDED[framework, setting]
    (grad,) = torch.autograd.grad(loss, log_prob)
    assert loss.item() == pytest.approx(expected["loss"], abs=TOLERANCE)
    torch.testing.assert_close(grad, torch.tensor(expected["grad"], dtype=grad.dtype), rtol=0.0, atol=TOLERANCE)


def test_the_file_says_how_each_was_recorded() -> None:
    assert {how.partition(",")[0] for how in DOCUMENT["how"]} == {framework for framework, _ in RECORDED}


# verl

OURS = {"vanilla": "ppo", "geo_mean": "gmpo"}
OWN_MODE = {"geo_mean", "sapo"}  # verl aggregates these in one way whatever it is asked for


@pytest.mark.parametrize("setting", settings("verl"))
def test_verl(setting: str) -> None:
    mode, agg = setting.split("/")
    b, log_prob = batch()
    set_to = {"clip_ratio": 0.2} | record.VERL[mode]
    config = SimpleNamespace(**set_to, policy_loss=SimpleNamespace(**set_to), global_batch_info={})
    loss, metrics = verl.policy_losses()[f"moe_rl_{OURS.get(mode, mode)}"](
        old_log_prob=b["old_log_prob"],
        log_prob=log_prob,
        advantages=b["advantages"],
        response_mask=b["response_mask"],
        loss_agg_mode="seq-mean-token-mean" if mode in OWN_MODE else agg,
        config=config,
        rollout_is_weights=(b["old_log_prob"] - b["rollout_log_prob"]).exp().clamp(max=1.5),
    )
    holds("verl", setting, loss, log_prob)
    assert all(isinstance(value, float) for value in metrics.values())


GENERIC = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
GENERIC |= {"tau_pos": 1.0, "tau_neg": 1.05, "global_batch_info": {}}
OF_LOSS = {"clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "kl_cov_ratio": 2e-4, "ppo_kl_coef": 0.1}
"""verl 0.9.1's actor config where nothing is set."""


@pytest.mark.parametrize("mode", record.VERL)
def test_verls_default_config_gives_verls_loss_gradient_and_numbers(mode: str) -> None:
    """Where verl's own mode would mislead, ours differs, and the page says by how much."""
    b, log_prob = batch()
    ours = OURS.get(mode, mode)
    config = SimpleNamespace(**GENERIC, policy_loss=SimpleNamespace(**OF_LOSS, dro_beta=0.3))
    call = {name: b[name] for name in ("old_log_prob", "advantages", "response_mask")}
    loss, logged = verl.policy_losses()[f"moe_rl_{ours}"](log_prob=log_prob, config=config, **call)
    if mode == "gspo":
        expected = torch.tensor(RECORDED["verl", "gspo/default"]["grad"], dtype=torch.float64)
        (grad,) = torch.autograd.grad(loss, log_prob)
        assert float((grad - expected).norm() / expected.norm()) == pytest.approx(GSPO_DIFFERS_BY, abs=5e-3)
        return
    holds("verl", f"{mode}/default", loss, log_prob)
    for name, value in RECORDED["verl", f"{mode}/default"]["logged"].items():
        if (mode, name) != ("kl_cov", "actor/ppo_kl"):  # verl's is the mean of |d| there
            assert logged[name] == pytest.approx(value, abs=TOLERANCE), name


class VerlsActorConfig(SimpleNamespace):
    """A configuration that counts as verl's own, so that the entry asks verl how it aggregates."""

    __module__ = "verl.workers.config"


@pytest.mark.parametrize(("always_by_sequence", "recorded"), [(True, "seq-mean-token-mean"), (False, "token-mean")])
def test_verls_gspo_is_aggregated_as_the_installed_verl_does(
    always_by_sequence: bool, recorded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's gspo is a mean over sequences up to 0.9.0, whatever it is asked for, and as it is asked for from 0.9.1 on.

    Recorded is 0.9.1: what it gives if it is asked for means over sequences is what 0.9.0 always gives.
    """

    def verls_gspo(**call: Any) -> tuple[Tensor, dict[str, float]]:
        mask, mode = call["response_mask"], "seq-mean-token-mean" if always_by_sequence else call["loss_agg_mode"]
        by_token = -call["advantages"] * (call["log_prob"] - call["old_log_prob"]).exp() * mask
        by_sequence = by_token.sum(dim=1) / mask.sum(dim=1)
        return (by_token.sum() / mask.sum() if mode == "token-mean" else by_sequence.mean()), {}

    core_algos = ModuleType("verl.trainer.ppo.core_algos")
    core_algos.get_policy_loss_fn = {"gspo": verls_gspo}.__getitem__  # type: ignore[attr-defined]
    for parent in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", core_algos)
    monkeypatch.setattr(verl, "_PROBED", {})
    b, log_prob = batch()
    set_to = record.VERL["gspo"]
    loss, _ = verl.policy_losses()["moe_rl_gspo"](
        **{name: b[name] for name in ("old_log_prob", "advantages", "response_mask")},
        log_prob=log_prob,
        config=VerlsActorConfig(**set_to, clip_ratio=0.2, policy_loss=SimpleNamespace(), global_batch_info={}),
        loss_agg_mode="token-mean",
        rollout_is_weights=(b["old_log_prob"] - b["rollout_log_prob"]).exp().clamp(max=1.5),
    )
    holds("verl", f"gspo/{recorded}", loss, log_prob)


@pytest.mark.framework
@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("mode", ["vanilla", "gspo", "geo_mean", "sapo", "cispo"])
def test_the_installed_verls_loss_is_ours_under_every_aggregation(mode: str, agg: str) -> None:
    """Lengths of 1 to 6 tokens, so that means over tokens and over sequences differ."""
    algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs verl")
    from verl.workers.config import ActorConfig, PolicyLossConfig

    widths = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4} if mode == "gspo" else {}
    base = {"strategy": "megatron", "rollout_n": 1, "use_dynamic_bsz": True, "loss_agg_mode": agg}
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=mode), **base, **widths)
    b, _ = batch()
    call = {name: b[name] for name in ("old_log_prob", "advantages")} | {"response_mask": b["response_mask"].double()}
    found = []
    for function in (algos.get_policy_loss_fn(mode), verl.policy_losses()[f"moe_rl_{OURS.get(mode, mode)}"]):
        log_prob = b["log_prob"].clone().requires_grad_()
        loss, _ = function(log_prob=log_prob, config=config, loss_agg_mode=agg, **call)
        found.append((loss.detach(), torch.autograd.grad(loss, log_prob)[0]))
    (theirs, their_grad), (ours, our_grad) = found
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=TOLERANCE)
    torch.testing.assert_close(our_grad, their_grad, rtol=0.0, atol=TOLERANCE)


GSPO_DIFFERS_BY = 0.288
"""Norm of the difference of the gradients over that of verl's, on the recorded batch."""


def test_every_registered_loss_runs_with_verls_defaults_and_refuses_what_it_cannot_do() -> None:
    config = SimpleNamespace(**GENERIC, policy_loss=SimpleNamespace(**OF_LOSS, dro_beta=0.3))
    b, _ = batch()
    call = {name: b[name] for name in ("old_log_prob", "advantages", "response_mask")}
    for name, loss in verl.policy_losses().items():
        log_prob = b["log_prob"].clone().requires_grad_()
        value, _ = loss(log_prob=log_prob, config=config, **call)
        (grad,) = torch.autograd.grad(value, log_prob)
        assert grad.isfinite().all()
        assert grad.abs().sum() > 0, name
        config.policy_loss.loss_mode = name
        verl.checked_settings(config)
    config.clip_ratio_high = 0.3
    config.policy_loss.loss_mode = "moe_rl_gspo"
    with pytest.raises(
        InvalidInputError, match=r"clip_ratio_high 0.3 is a clip width for token ratios, but 'gspo' clips"
    ):
        verl.checked_settings(config)
    config.policy_loss.loss_mode = "moe_rl_decoupled_ppo"
    with pytest.raises(InvalidInputError, match=r"verl cannot run moe_rl_decoupled_ppo"):
        verl.checked_settings(config)


def test_verl_takes_the_global_batch_the_router_shift_and_options() -> None:
    b, log_prob = batch()
    call = {name: b[name] for name in ("old_log_prob", "advantages", "response_mask")}
    config = SimpleNamespace(
        clip_ratio_low=None, clip_ratio_high=0.3, clip_ratio=0.1, clip_ratio_c=3.0, global_batch_info={}
    )
    seen = []

    def gamma(current: Tensor) -> Tensor:
        seen.append(current.requires_grad)
        return torch.full_like(current, 0.9)

    after = RouterShiftUse(order="after-clip")
    plain = verl.policy_losses()["moe_rl_ppo"](log_prob=log_prob, config=config, **call)[0]
    damped = verl.policy_losses(gamma=gamma, router_shift=after)["moe_rl_ppo"](log_prob=log_prob, config=config, **call)
    assert damped[0].item() == pytest.approx(0.9 * plain.item())
    assert seen == [False]
    config.global_batch_info = {"dp_size": 4, "batch_num_tokens": 32, "global_batch_size": None}
    assert verl.policy_losses()["moe_rl_ppo"](log_prob=log_prob, config=config, **call)[0].item() == pytest.approx(
        plain.item() * 16 / 32 * 4
    )
    with pytest.raises(InvalidInputError, match=r"seq-mean-token-mean with dp_size 4 needs global_batch_size"):
        verl.policy_losses()["moe_rl_ppo"](
            log_prob=log_prob, config=config, loss_agg_mode="seq-mean-token-mean", **call
        )
    with pytest.raises(
        InvalidInputError, match=r"clip_ratio_low 0.1 is a clip width for token ratios, but 'gspo' clips"
    ):
        verl.policy_losses()["moe_rl_gspo"](log_prob=log_prob, config=config, **call)
    narrow = {"gspo": {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}}
    assert verl.policy_losses(options=narrow)["moe_rl_gspo"](log_prob=log_prob, config=config, **call)[0].isfinite()
    known = verl.policy_losses()
    assert "moe_rl_gspo" in known
    assert "moe_rl_decoupled_ppo" not in known
    with pytest.raises(InvalidInputError, match="unknown objective 'gspoo'"):
        verl.policy_losses(options={"gspoo": {}})


@pytest.mark.parametrize("name", ["grpo", "luspo", "prime_rl", "topr"])
def test_what_verl_does_not_have_is_aggregated_in_its_own_way_unless_asked_for_another(name: str) -> None:
    b, log_prob = batch()
    call = {name: b[name] for name in ("old_log_prob", "advantages", "response_mask")} | {"log_prob": log_prob}
    own, loss = OBJECTIVES[name].default_loss_agg_mode, verl.policy_losses()[f"moe_rl_{name}"]
    for asked, mode in (("token-mean", own), *((each, each) for each in ("seq-mean-token-sum", "seq-mean-token-mean"))):
        expected = policy_loss(PolicyLossInputs(**call), objective=name, loss_agg_mode=mode)
        assert loss(loss_agg_mode=asked, **call)[0].item() == pytest.approx(expected.loss.item()), asked


def test_verls_constant_divides_without_the_sizes_of_a_global_batch() -> None:
    b, log_prob = batch()
    call = {name: b[name] for name in ("old_log_prob", "advantages", "response_mask")} | {"log_prob": log_prob}
    loss = verl.policy_losses()["moe_rl_ppo"]
    undivided = loss(loss_agg_mode="seq-mean-token-sum", config=SimpleNamespace(clip_ratio=0.2), **call)[0].item()
    for info, divisor in (({}, max(record.LENGTHS)), ({"loss_scale_factor": 32}, 32)):
        config = SimpleNamespace(clip_ratio=0.2, global_batch_info=info)
        divided = loss(loss_agg_mode="seq-mean-token-sum-norm", config=config, **call)[0].item()
        assert divided == pytest.approx(undivided / divisor), info


# TRL


@pytest.fixture
def with_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL, or a stand-in whose trainer has nothing of its own."""
    if "trl" not in sys.modules and importlib.util.find_spec("trl") is None:
        module = ModuleType("trl")
        module.GRPOTrainer = object  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "trl", module)


def test_trl(with_trl: None) -> None:
    """The subclass on the attributes of a trainer that the recorder gave TRL's own method."""
    ours: dict[str, dict[str, Any]] = {
        **{name: {"objective": "ppo"} for name in ("grpo", "dapo", "bnpo", "dr_grpo")},  # TRL's own widths
        **{name: {"objective": "gspo"} for name in ("gspo", "luspo")},
        "cispo": {"objective": "cispo"},
        "sapo": {"objective": "sapo"},
        "vespo": {"objective": "vespo"},
        **{name: {"objective": "ppo"} for name in ("kl", "unbiased_kl", "vllm", "moe")},
    }
    assert set(ours) == set(settings("trl"))
    for setting, options in ours.items():
        trainer, inputs, log_prob = record.trl_stand_in(setting)
        loss = trl.policy_loss_trainer(**options)._compute_loss(trainer, None, inputs)
        holds("trl", setting, loss, log_prob)
        for name, value in RECORDED["trl", setting]["logged"].items():
            if name != "vespo/phi_seq_mean":
                assert trainer._metrics["train"][name] == [pytest.approx(value, abs=TOLERANCE)], (setting, name)
    trainer, inputs, _ = record.trl_stand_in("grpo")
    trainer.off_policy_mask_threshold = 0.1
    with pytest.raises(InvalidInputError, match=r"off_policy_mask_threshold has no effect, .*The objective `opsm`"):
        trl.policy_loss_trainer("ppo")._compute_loss(trainer, None, inputs)


def test_trls_evaluation_counts_no_accumulation_steps_and_logs_by_itself(with_trl: None) -> None:
    trainer, inputs, log_prob = record.trl_stand_in("grpo")
    entropy = torch.arange(1.0, log_prob.numel() + 1).view_as(log_prob)
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (log_prob, entropy, None)
    trainer._metrics["eval"] = defaultdict(list)
    compute = trl.policy_loss_trainer("ppo")._compute_loss
    trained = compute(trainer, None, inputs)
    trainer.model.training = False
    evaluated = compute(trainer, None, inputs)
    assert evaluated.item() == pytest.approx(trainer.current_gradient_accumulation_steps * trained.item())
    mean = entropy[record.recorded_batch()["response_mask"]].mean().item()
    for mode in ("train", "eval"):
        assert trainer._metrics[mode]["entropy"] == [pytest.approx(mean)], mode
    trainer.loss_type = "grpoo"
    with pytest.raises(InvalidInputError, match="TRL's loss_type 'grpoo' is not supported"):
        compute(trainer, None, inputs)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_trls_clip_ratios_tell_losses_from_gains_and_neither(level: str) -> None:
    """A sequence whose advantage is 0 is in the share of all that was clipped, and in neither of the others."""
    advantages = torch.tensor([-1.5, 0.0, 2.0, -0.5])[:, None]
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    clipped = mask & torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
    tokens: Any = SimpleNamespace(clipped=clipped, mask=mask, loss=torch.zeros(4, 4))
    rule: Any = SimpleNamespace(name="ppo", widths="trainer", ratio_level=level)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(reduce=lambda sums, reduction: sums, gather=lambda values: values)
    )
    found = trl._clip_ratios(trainer, rule, tokens, advantages)
    shares = {
        "token": {"low_mean": 1 / 9, "high_mean": 2 / 9, "region_mean": 5 / 9},
        "sequence": {"low_mean": 0.25 / 4, "high_mean": (2 / 3) / 4, "region_mean": (0.25 + 1 + 2 / 3) / 4},
    }[level]
    expected = shares | {"low_min": 0.0, "high_max": 2 / 3}
    assert found == pytest.approx({f"clip_ratio/{name}": value for name, value in expected.items()})
    rule.name = "cispo"
    assert trl._clip_ratios(trainer, rule, tokens, advantages) == {"cispo_clip_ratio": found["clip_ratio/high_mean"]}
    rule.widths = "none"
    assert trl._clip_ratios(trainer, rule, tokens, advantages) == {}


# AReaL


@pytest.mark.parametrize("setting", settings("areal"))
def test_areal(setting: str) -> None:
    b, log_prob = batch()
    given = dict(record.AREAL[setting])
    upper = given.pop("upper", None)
    data = {name: b[name] for name in ("advantages",)} | {"loss_mask": b["response_mask"].long()}
    data |= {"logprobs": b["rollout_log_prob"] if upper else b["old_log_prob"], "prox_logp": b["old_log_prob"]}
    options: dict[str, Any] = {}
    if upper:
        from moe_rl.importance import BehaviorFilter

        options["behavior_filter"] = BehaviorFilter(level="token", action="clamp", metric="ratio", upper=upper)
    level = given.pop("importance_sampling_level", None)  # the objective says it
    refused = {"importance_sampling_level": level} if level else {"use_sapo_loss": given.pop("use_sapo_loss", False)}
    if any(refused.values()):
        with pytest.raises(InvalidInputError, match=rf"{next(iter(refused))}=.* has no effect on this loss"):
            areal.grpo_loss_fn(log_prob, torch.zeros(()), data, objective=setting, **given, **refused)
    logged: list[dict[str, float]] = []
    loss = areal.grpo_loss_fn(
        log_prob, torch.zeros(()), data, objective=setting, options=options, log=logged.append, **given
    )
    holds("areal", setting, loss, log_prob)
    assert "actor/ppo_kl" in logged[0]
    packed, mask = {k: v[b["response_mask"]] for k, v in data.items()}, b["response_mask"]
    packed["cu_seqlens"] = torch.tensor([0, *record.LENGTHS]).cumsum(0)
    again = areal.grpo_loss_fn(log_prob[mask], torch.zeros(()), packed, objective=setting, options=options, **given)
    assert again.item() == pytest.approx(loss.item(), abs=1e-12)


def test_areal_without_c_clip_has_no_dual_clip() -> None:
    b, log_prob = batch()
    data = {"advantages": b["advantages"], "loss_mask": b["response_mask"], "logprobs": b["old_log_prob"] - 2.0}
    loss = areal.grpo_loss_fn(log_prob, torch.zeros(()), data, eps_clip=0.2, objective="ppo")
    ratio = (b["log_prob"] - data["logprobs"]).exp()
    plain = torch.maximum(-b["advantages"] * ratio, -b["advantages"] * ratio.clamp(0.8, 1.2))
    assert loss.item() == pytest.approx(plain[b["response_mask"]].mean().item())


def areals_module(**changes: Any) -> tuple[Any, Any]:
    """A stand-in of areal.trainer.ppo.actor, and AReaL 1.0.4's defaults of what its `PPOActorConfig` hands the loss."""

    class PPOActor:
        def __init__(self, config: Any, engine: Any) -> None:
            self.config, self.engine = config, engine

    defaults = {"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": None, "rejection_sampling": None}
    defaults |= {"m2_threshold": None, "importance_sampling_level": "token", "prox_logp_method": "recompute"}
    defaults |= {"use_sapo_loss": False, "sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05, "use_decoupled_loss": False}
    module = ModuleType("areal.trainer.ppo.actor")
    vars(module).update(PPOActor=PPOActor, grpo_loss_fn=None)
    return module, SimpleNamespace(**(defaults | changes))


@pytest.mark.parametrize(
    ("objective", "settings", "sentence"),
    [
        (
            "ppo",
            {"importance_sampling_level": "sequence"},
            r"importance_sampling_level='sequence' has no effect on this loss",
        ),
        ("ppo", {"use_sapo_loss": True}, r"use_sapo_loss=True has no effect on this loss"),
        ("ppo", {"m2_threshold": 0.04}, r"m2_threshold=0.04 has no effect on this loss"),
        (
            "decoupled_ppo",
            {"prox_logp_method": "loglinear"},
            r"prox_logp_method='loglinear' has no effect on this loss",
        ),
        ("ppo", {"rejection_sampling": object()}, r"rejection_sampling=.* has no effect on this loss"),
        ("gspo", {"eps_clip": 0.3}, r"clip_ratio_low 0.3 is a clip width for token ratios"),
        ("sapo", {"eps_clip": 0.1}, r"eps_clip\* 0.1 has no effect on 'sapo'"),
    ],
)
def test_areal_makes_no_actor_whose_settings_would_not_act(
    objective: str, settings: dict[str, Any], sentence: str
) -> None:
    module, config = areals_module(**settings)
    areal.install(module, objective=objective)
    with pytest.raises(InvalidInputError, match=sentence):
        module.PPOActor(config, None)
    with pytest.raises(InvalidInputError, match="unknown objective 'gsp'"):
        areal.install(module, objective="gsp")


@pytest.mark.parametrize("objective", ["ppo", "gspo", "sapo", "cispo"])
def test_areals_default_actor_is_made_and_its_call_of_the_loss_is_taken(objective: str) -> None:
    module, config = areals_module()
    areal.install(module, objective=objective)
    assert module.PPOActor(config, "engine").engine == "engine"
    b, log_prob = batch()
    data = {"advantages": b["advantages"], "loss_mask": b["response_mask"].long(), "logprobs": b["old_log_prob"]}
    # areal/engine/megatron_engine.py hands these two over for AReaL's own statistics.
    extremes = {"vocab_min_logits": log_prob.detach(), "vocab_max_logits": log_prob.detach()}
    loss = module.grpo_loss_fn(log_prob, torch.zeros(()), data, **vars(config), current_version=3, **extremes)
    (grad,) = torch.autograd.grad(loss, log_prob)
    assert grad.isfinite().all()
    assert grad.abs().sum() > 0
    with pytest.raises(InvalidInputError, match="distillation from a teacher"):
        module.grpo_loss_fn(log_prob, torch.zeros(()), data | {"teacher_logp": log_prob.detach()})


# slime: a stand-in of its two modules, whose functions need process groups


@pytest.fixture
def with_slime(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    state: dict[str, Any] = {}

    def log_probs_and_entropy(logits: Tensor, **kwargs: Any) -> tuple[None, dict[str, list[Tensor]]]:
        state["asked"] = kwargs
        return None, {"log_probs": state["log_probs"], "entropy": [torch.ones_like(x) for x in state["log_probs"]]}

    loss = SimpleNamespace(get_log_probs_and_entropy=log_probs_and_entropy)
    context = SimpleNamespace(all_gather_with_cp=None, slice_log_prob_with_cp=None)
    for name, module in (("loss", loss), ("cp_utils", context)):
        monkeypatch.setitem(sys.modules, f"slime.backends.megatron_utils.{name}", module)
    for parent in ("slime", "slime.backends", "slime.backends.megatron_utils"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    return state


def samples(values: Tensor) -> list[Tensor]:
    return [values[row, :length] for row, length in enumerate(record.LENGTHS)]


def slime_call(**changes: Any) -> tuple[SimpleNamespace, dict[str, Any], Any]:
    """(args, batch, reducers by name) as slime calls a custom loss with."""
    b = record.recorded_batch()
    args = SimpleNamespace(
        **({"use_rollout_logprobs": False, "entropy_coef": 0.0, "use_kl_loss": False, "kl_loss_coef": 0.0} | changes)
    )
    data = {
        "unconcat_tokens": [],
        "total_lengths": [length + 2 for length in record.LENGTHS],
        "response_lengths": list(record.LENGTHS),
        "loss_masks": samples(b["response_mask"].long()),
        "log_probs": samples(b["old_log_prob"]),
        "rollout_log_probs": samples(b["rollout_log_prob"]),
        "ref_log_probs": samples(b["reference_log_prob"]),
        "advantages": samples(b["advantages"]),
    }

    def parts(values: Tensor) -> Any:
        return zip(values.split(list(record.LENGTHS)), data["loss_masks"], strict=True)

    reducers = {
        "sample-mean": lambda x: sum((each * mask).sum() / mask.sum().clamp(min=1) for each, mask in parts(x)),
        "token-sum": lambda x: sum((each * mask).sum() for each, mask in parts(x)),
    }
    return args, data, reducers


@pytest.mark.parametrize("setting", settings("slime"))
def test_slime(setting: str, with_slime: dict[str, Any]) -> None:
    name, reduced = setting.split("/")
    options = {
        "grpo": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2, "clip_ratio_c": 1.5},
        "gspo": {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03},
        "cispo": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2},
    }
    objective = name.removesuffix("_tis")
    correction = {"rollout_is": "token", "rollout_is_threshold": 1.1} if name.endswith("_tis") else None
    args, data, reducers = slime_call(
        moe_rl_objective=objective,
        moe_rl_objective_options=options[objective],
        moe_rl_rollout_correction=correction,
    )
    _, log_prob = batch()
    with_slime["log_probs"] = samples(log_prob)
    args.calculate_per_token_loss = reduced == "token-sum"
    loss, reported = slime.policy_loss_function(args, data, torch.zeros(1, 1, 1), reducers[reduced])
    reduce = reducers[reduced]
    moved = torch.cat(data["log_probs"]) - torch.cat(with_slime["log_probs"]).detach()
    assert reported["ppo_kl"].item() == pytest.approx(reduce(moved).item())
    if name == "grpo" and correction is None:
        ratio, signal = moved.neg().exp(), torch.cat(data["advantages"])
        took = -signal * ratio.clamp(0.9, 1.2) > -signal * ratio
        assert reported["pg_clipfrac"].item() == pytest.approx(reduce(took.double()).item())
    # slime divides the means by samples or by tokens: a number that is logged is itself again.
    count = sum(int(each.sum()) for each in data["loss_masks"]) if reduced == "token-sum" else len(record.LENGTHS)
    assert 0.0 <= reported["actor/pg_clipfrac"].item() / count <= 1.0
    holds("slime", setting, loss, log_prob)
    assert with_slime["asked"]["response_lengths"] == list(record.LENGTHS)
    assert reported["loss"].item() == loss.item()
    assert not any(value.requires_grad for value in reported.values())
    if correction is not None:  # the same correction as a TIS function, on the loss that slime has by then
        args, data, _ = slime_call(moe_rl_rollout_correction=correction)
        ones = torch.ones(sum(record.LENGTHS), dtype=torch.float64)
        weighted, masks, metrics = slime.tis_function(
            args,
            pg_loss=ones,
            train_log_probs=data["log_probs"],
            rollout_log_probs=data["rollout_log_probs"],
            loss_masks=data["loss_masks"],
            total_lengths=data["total_lengths"],
            response_lengths=data["response_lengths"],
        )
        ratio = (torch.cat(data["log_probs"]) - torch.cat(data["rollout_log_probs"])).exp()
        torch.testing.assert_close(weighted, ratio.clamp(max=1.1))
        assert all(torch.equal(a, b) for a, b in zip(masks, data["loss_masks"], strict=True))
        assert all(value.shape == ones.shape for value in metrics.values())


def test_slime_adds_entropy_kl_and_the_router_shift_and_names_what_is_missing(with_slime: dict[str, Any]) -> None:
    b, log_prob = batch()
    with_slime["log_probs"] = samples(log_prob)
    args, data, reducers = slime_call(
        moe_rl_objective="reinforce", entropy_coef=0.5, use_kl_loss=True, kl_loss_coef=0.25, kl_loss_type="k2"
    )
    data["router_shift_ratio"] = [torch.full_like(each, 0.5) for each in data["advantages"]]
    loss, reported = slime.policy_loss_function(args, data, torch.zeros(1, 1, 1), reducers["token-sum"])
    mask = b["response_mask"]
    policy = (-0.5 * b["advantages"] * b["log_prob"])[mask].sum()
    kl = (0.5 * (b["log_prob"] - b["reference_log_prob"]).square())[mask].sum()
    assert loss.item() == pytest.approx((policy - 0.5 * mask.sum() + 0.25 * kl).item())
    assert reported["kl_loss"].item() == pytest.approx(kl.item())
    del data["rollout_log_probs"]
    args.moe_rl_rollout_correction = "decoupled_token_is"
    with pytest.raises(InvalidInputError, match="needs the rollout's log-probabilities"):
        slime.policy_loss_function(args, data, torch.zeros(1, 1, 1), reducers["token-sum"])
    args.moe_rl_rollout_correction = {"rollout_iss": "token"}
    data["rollout_log_probs"] = data["log_probs"]
    with pytest.raises(InvalidInputError, match="no field 'rollout_iss'"):
        slime.policy_loss_function(args, data, torch.zeros(1, 1, 1), reducers["token-sum"])


def test_slime_reads_gamma_of_a_token_at_the_row_of_the_token_before(with_slime: dict[str, Any]) -> None:
    """Of a run with MOE_RL_ROUTER_SHIFT; each key of this stand-in is another gamma."""
    b, log_prob = batch()
    with_slime["log_probs"] = samples(log_prob)
    args, data, reducers = slime_call(moe_rl_objective="reinforce")
    gamma = torch.linspace(0.2, 1.0, sum(data["total_lengths"]), dtype=torch.float64)
    keys = torch.arange(len(gamma)).split(data["total_lengths"])
    shift: Any = SimpleNamespace(coming=lambda: keys, of=lambda asked: SimpleNamespace(ratio=gamma[asked]))
    token = READING.set(shift)
    try:
        loss, _ = slime.policy_loss_function(args, data, torch.zeros(1, 1, 1), reducers["token-sum"])
    finally:
        READING.reset(token)
    expected = 0.0
    for row, (first, total, length) in enumerate(
        zip((int(each[0]) for each in keys), data["total_lengths"], data["response_lengths"], strict=True)
    ):
        for place in range(length):
            before = first + total - length + place - 1
            expected -= float(gamma[before] * b["advantages"][row, place] * b["log_prob"][row, place])
    assert loss.item() == pytest.approx(expected)


def test_slimes_unbiased_kl_weighs_a_token_by_the_current_over_the_old_policy(with_slime: dict[str, Any]) -> None:
    b, log_prob = batch()
    with_slime["log_probs"] = samples(log_prob)
    args, data, reducers = slime_call(use_kl_loss=True, kl_loss_type="low_var_kl", use_unbiased_kl=True)
    _, reported = slime.policy_loss_function(args, data, torch.zeros(1, 1, 1), reducers["token-sum"])
    above = b["reference_log_prob"] - b["log_prob"]
    kl = (b["log_prob"] - b["old_log_prob"]).exp() * (above.exp() - 1.0 - above)
    assert reported["kl_loss"].item() == pytest.approx(kl[b["response_mask"]].sum().item())


@pytest.mark.parametrize("against", ["old", "rollout"])
def test_slimes_share_of_sequences_that_opsm_drops_is_logged_where_it_is_slimes(
    against: str, with_slime: dict[str, Any]
) -> None:
    """`opsm_clipfrac` is slime's number, of the drift from the old policy; of that from the rollout slime has none."""
    b, log_prob = batch()
    with_slime["log_probs"] = samples(log_prob)
    options = {"opsm_delta": 0.01, "against": against}
    args, data, reducers = slime_call(moe_rl_objective="opsm", moe_rl_objective_options=options)
    _, reported = slime.policy_loss_function(args, data, torch.zeros(1, 1, 1), reducers["token-sum"])
    if against == "rollout":
        assert "opsm_clipfrac" not in reported
        return
    drifts = [
        float((b["old_log_prob"] - b["log_prob"])[row, :length].mean()) for row, length in enumerate(record.LENGTHS)
    ]
    dropped = [drift > 0.01 and b["advantages"][row, 0] < 0 for row, drift in enumerate(drifts)]
    assert any(dropped), "of the recorded sequences"
    assert reported["opsm_clipfrac"].item() == pytest.approx(sum(dropped))


def test_slimes_replay_of_top_p_sets_is_asked_with_its_arguments_and_batch(with_slime: dict[str, Any]) -> None:
    _, log_prob = batch()
    with_slime["log_probs"] = samples(log_prob)
    args, data, reducers = slime_call(rollout_top_p=0.9)
    data["token_sets"] = "those of the rollout"
    sys.modules["slime.backends.megatron_utils.loss"].get_rollout_top_p_logprob_kwargs = lambda args, batch: {  # type: ignore[attr-defined]
        "top_p": args.rollout_top_p,
        "sets": batch["token_sets"],
    }
    slime.policy_loss_function(args, data, torch.zeros(1, 1, 1), reducers["token-sum"])
    assert (with_slime["asked"]["top_p"], with_slime["asked"]["sets"]) == (0.9, "those of the rollout")


def test_a_rank_of_slime_without_a_token_still_reaches_the_model_backward(with_slime: dict[str, Any]) -> None:
    """Under context parallelism a rank may hold no token of a micro-batch; the others wait for its gradients."""
    with_slime["log_probs"] = [torch.zeros(0)]
    args, data, _ = slime_call()
    for name in ("loss_masks", "log_probs", "rollout_log_probs", "ref_log_probs", "advantages"):
        data[name] = [torch.zeros(0)]
    data |= {"total_lengths": [2], "response_lengths": [0]}
    logits = torch.ones(1, 2, 3, requires_grad=True)
    loss, _ = slime.policy_loss_function(args, data, logits, torch.sum)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert (loss.item(), gradient.abs().sum().item()) == (0.0, 0.0)


def test_slimes_masks_lose_the_tokens_that_are_rejected(with_slime: dict[str, Any]) -> None:
    correction = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.9_1.1"}
    args, data, _ = slime_call(moe_rl_rollout_correction=correction)
    words = ("log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")
    given = {f"train_{name}" if name == "log_probs" else name: data[name] for name in words}
    _, masks, _ = slime.tis_function(args, pg_loss=torch.ones(sum(record.LENGTHS)), **given)
    ratio = [(b - a).exp() for a, b in zip(data["log_probs"], data["rollout_log_probs"], strict=True)]
    assert [mask.tolist() for mask in masks] == [((each >= 0.9) & (each <= 1.1)).long().tolist() for each in ratio]
    assert any(not mask.all() for mask in masks)
    assert all(mask.dtype == torch.long for mask in masks)


def test_slimes_parts_under_context_parallelism_add_up(
    with_slime: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks in turn, each with the odd or the even tokens of a response; gathering gives the whole one back."""
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    context = sys.modules["slime.backends.megatron_utils.cp_utils"]
    options = {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03}
    correction = {"rollout_is": "sequence", "rollout_is_threshold": 1.1}
    given = {"moe_rl_objective": "gspo", "moe_rl_objective_options": options, "moe_rl_rollout_correction": correction}
    total, gradient = 0.0, torch.zeros(())
    for rank in (0, 1, None):
        args, data, reducers = slime_call(**given)
        _, log_prob = batch()
        with_slime["log_probs"] = samples(log_prob)
        if rank is None:
            monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 1)
            loss, _ = slime.policy_loss_function(args, data, torch.zeros(1, 1, 1), reducers["token-sum"])
            assert total == pytest.approx(loss.item())
            torch.testing.assert_close(gradient, torch.autograd.grad(loss, log_prob)[0])
            return
        whole: dict[int, Tensor] = {}
        for where in (data, with_slime):
            for name in ("log_probs", "rollout_log_probs", "advantages"):
                if name in where:
                    parts = [each[rank::2] for each in where[name]]
                    whole |= {id(part): each for part, each in zip(parts, where[name], strict=True)}
                    where[name] = parts
        monkeypatch.setattr(context, "all_gather_with_cp", lambda part, *lengths, whole=whole: whole[id(part)])
        monkeypatch.setattr(context, "slice_log_prob_with_cp", lambda each, *lengths, rank=rank: each[rank::2])
        loss, _ = slime.policy_loss_function(args, data, torch.zeros(1, 1, 1), torch.sum)
        total += loss.item()
        gradient = gradient + torch.autograd.grad(loss, log_prob)[0]


def test_slime_is_named_where_it_is_missing() -> None:
    if importlib.util.find_spec("slime") or importlib.util.find_spec("miles"):
        pytest.skip("slime or miles is installed")
    args, data, reducers = slime_call()
    with pytest.raises(InvalidInputError, match="neither slime nor miles"):
        slime.policy_loss_function(args, data, torch.zeros(1, 1, 1), reducers["token-sum"])


# live, where the real packages are installed


@pytest.mark.parametrize("framework", ["verl", "trl", "areal"])
def test_the_recorded_numbers_are_those_of_the_installed_package(framework: str) -> None:
    pytest.importorskip(framework, reason=f"needs {framework}")
    for each in getattr(record, f"{framework}_cases")():
        expected = RECORDED[framework, each["setting"]]
        assert each["loss"] == pytest.approx(expected["loss"], abs=1e-12)
        torch.testing.assert_close(torch.tensor(each["grad"]), torch.tensor(expected["grad"]))


def test_clip_cov_drops_the_tokens_that_verl_draws() -> None:
    """verl permutes the candidates; the same order as uniform numbers makes the same choice."""
    algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs verl")
    from verl.workers.config import ActorConfig, PolicyLossConfig

    b, log_prob = batch()
    options = {"clip_cov_ratio": 0.15, "clip_cov_lb": 0.05, "clip_cov_ub": 1.0}  # 2 of 16 tokens
    policy = PolicyLossConfig(loss_mode="clip_cov", **options)
    config = ActorConfig(policy_loss=policy, strategy="megatron", rollout_n=1, use_dynamic_bsz=True, clip_ratio=0.2)
    call = {name: b[name] for name in ("old_log_prob", "advantages")} | {"response_mask": b["response_mask"].double()}
    torch.manual_seed(3)
    loss, metrics = algos.get_policy_loss_fn("clip_cov")(log_prob=log_prob, config=config, **call)

    mask, moved = b["response_mask"], b["log_prob"] - b["old_log_prob"]
    centered = [b[name] - b[name][mask].mean() for name in ("advantages", "log_prob")]
    covariance, clipped = centered[0] * centered[1], moved.exp().clamp(0.8, 1.2) != moved.exp()
    worse = clipped & (b["advantages"] * moved > 0)
    candidates = (covariance > 0.05) & (covariance < 1.0) & mask & ~worse
    torch.manual_seed(3)
    order = torch.randperm(int(candidates.sum()))
    draw = torch.zeros_like(moved)
    draw[candidates] = draw[candidates].index_copy(0, order, torch.linspace(1.0, 0.5, len(order), dtype=draw.dtype))
    inputs = PolicyLossInputs(log_prob=log_prob, draw=draw, **call)
    ours = policy_loss(inputs, objective="clip_cov", **options)
    assert len(order) > 2
    assert float(ours.metrics["actor/pg_clipfrac"]) == pytest.approx(metrics["actor/pg_clipfrac"]) == 2 / 16
    assert ours.loss.item() == pytest.approx(loss.item())
    torch.testing.assert_close(*(torch.autograd.grad(each, log_prob)[0] for each in (ours.loss, loss)))


def test_the_example_trains_two_steps_in_verls_own_loss() -> None:
    """The loss mode of examples/verl, through verl's registry and config, with nothing set but what the script sets."""
    algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs verl")
    for name, loss in verl.policy_losses().items():
        algos.register_policy_loss(name)(loss)
    mode = re.search(r"loss_mode=(moe_rl_\w+)", EXAMPLE.read_text())[1]  # type: ignore[index]
    config, b = record.verl_config(mode), record.recorded_batch()
    verl.checked_settings(config)
    log_prob = torch.nn.Parameter(b["old_log_prob"].clone())
    optimizer = torch.optim.SGD([log_prob], lr=1e-3)
    call = {name: b[name] for name in ("old_log_prob", "advantages", "response_mask")}
    losses = []
    for _ in range(2):
        loss, logged = algos.get_policy_loss_fn(mode)(log_prob=log_prob, config=config, **call)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert logged["actor/pg_clipfrac"] < 1.0
    assert losses[1] < losses[0]


def test_verl_finds_a_registered_loss() -> None:
    algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs verl")
    for name, loss in verl.policy_losses().items():
        algos.register_policy_loss(name)(loss)
    assert callable(algos.get_policy_loss_fn("moe_rl_gspo"))
