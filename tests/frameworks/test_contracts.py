"""Every framework's loss modes under its defaults and its recipes: recorded from its code, equal or explained."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks.make_tables import BLOCK, renewed
from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks.slime.attach import WORKER
from moe_rl.frameworks.slime.losses import objective_of
from moe_rl.frameworks.slime.micro_batches import CallData
from moe_rl.frameworks.slime.worker import Worker
from moe_rl.frameworks.trl.losses import policy_loss_trainer
from moe_rl.frameworks.verl import losses as verl
from moe_rl.importance import OBJECTIVES
from tests.frameworks import own_losses as own
from tests.frameworks import recipe_losses
from tests.frameworks import record_losses as record

DOCUMENT = json.loads(record.FILE.read_text())
RECORDED = {(each["framework"], each["setting"]): each for each in DOCUMENT["cases"]}
PAGE = Path(__file__).parents[2] / "docs" / "importance-reference.md"


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], own.Contract]:
    pytest.importorskip("megatron.core", reason="slime's entry asks Megatron for its groups")
    return dict(zip(own.OURS, own.contracts(DOCUMENT, own.OURS), strict=True))


@pytest.mark.parametrize("case", own.OURS, ids=str)
def test_loss_and_gradient_are_the_frameworks_or_differ_by_what_is_said(
    case: tuple[str, str], found: dict[tuple[str, str], own.Contract]
) -> None:
    assert found[case].equal == (case not in own.EXPLAINED)
    if case in own.EXPLAINED:
        cause, without_it = own.EXPLAINED[case]
        (contract,) = own.contracts(DOCUMENT, {case: ("", without_it)})
        assert contract.equal, f"not the whole difference: {cause}"
        if not own.OURS[case][0].startswith("objective"):
            assert {kind for _, kind in contract.logged} <= ({"equal", "absent"} if case in own.NAMES else {"equal"})


@pytest.mark.parametrize("case", own.OURS, ids=str)
def test_logged_numbers_have_the_frameworks_names_and_values(
    case: tuple[str, str], found: dict[tuple[str, str], own.Contract]
) -> None:
    if own.OURS[case][0].startswith("objective"):
        return  # the framework's own code logs around it
    off = {name for name, kind in found[case].logged if kind != "equal"}
    assert not off or case in own.EXPLAINED or case in own.NAMES


def test_verls_kl_of_kl_cov_is_the_mean_of_absolute_values() -> None:
    """What `NAMES` says of the one number that has another meaning; what is absent is computed by nobody here."""
    b = record.recorded_batch()
    moved = (b["log_prob"] - b["old_log_prob"])[b["response_mask"]]
    logged = RECORDED["verl", "kl_cov/default"]["logged"]["actor/ppo_kl"]
    assert logged == pytest.approx(moved.abs().mean().item(), abs=own.TOLERANCE)


# public recipes

RECIPES = recipe_losses.records()


@pytest.mark.parametrize("recipe", recipe_losses.RECIPES, ids=str)
def test_loss_and_gradient_are_the_frameworks_under_the_settings_of_its_recipes(recipe: recipe_losses.Recipe) -> None:
    pytest.importorskip("megatron.core", reason="slime's entry asks Megatron for its groups")
    loss, gradient = recipe_losses.differences(recipe, RECIPES[recipe.key])
    assert max(abs(loss), gradient) <= own.TOLERANCE


def test_a_recipe_with_a_tokens_width_for_a_sequence_is_refused() -> None:
    """The one cause of `recipe_losses`: such rows are compared without a clip, in which 0.2 clips nothing either."""
    refused = [recipe for recipe in recipe_losses.RECIPES if recipe.cause]
    assert {recipe.mode for recipe in refused} == {"gspo"}
    with pytest.raises(InvalidInputError, match=r"clip_ratio_low 0.2 is a clip width for token ratios"):
        OBJECTIVES["gspo"](clip_ratio_low=0.2, clip_ratio_high=0.2)


VERLS = [recipe for recipe in recipe_losses.RECIPES if recipe.framework == "verl"]


@pytest.mark.framework
@pytest.mark.parametrize("recipe", VERLS, ids=str)
def test_the_installed_verls_loss_is_ours_under_its_recipes(recipe: recipe_losses.Recipe) -> None:
    """Both with verl's own actor config of the recipe, its loss mode and ours."""
    pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs verl")
    b, found = record.recorded_batch(), []
    ours = f"moe_rl_{ {'vanilla': 'ppo', 'geo_mean': 'gmpo'}.get(recipe.mode, recipe.mode) }"
    config = recipe_losses.verl_config(recipe, ours)
    call = {name: b[name] for name in ("old_log_prob", "advantages")} | {"response_mask": b["response_mask"].double()}
    entry = verl.policy_losses()[ours]
    for loss in (
        recipe_losses.theirs(recipe, None),
        lambda log_prob: entry(log_prob=log_prob, config=config, loss_agg_mode=config.loss_agg_mode, **call),
    ):
        log_prob = b["log_prob"].clone().requires_grad_()
        value, _ = loss(log_prob)
        found.append((value.item(), torch.autograd.grad(value, log_prob)[0]))
    (theirs, their_gradient), (value, gradient) = found
    assert value == pytest.approx(theirs, abs=own.TOLERANCE)
    assert float((gradient - their_gradient).norm() / their_gradient.norm()) <= own.TOLERANCE


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"moe_rl_objective": "sapo", "eps_clip": 0.1}, r"--eps-clip\* 0.1 has no effect on 'sapo'"),
        ({"moe_rl_objective": "gspo", "eps_clip": 0.3}, r"clip_ratio_low 0.3 is a clip width for token ratios"),
        ({"use_tis": True}, r"use_tis has no effect in this loss"),
        ({"use_opsm": True}, r"use_opsm has no effect in this loss"),
        ({"moe_rl_objective": "grp"}, r"unknown objective 'grp'"),
    ],
)
def test_slime_refuses_before_rollouts_what_would_not_act(settings: dict[str, object], sentence: str) -> None:
    args, _, _ = own.slime_batch()
    vars(args).update(settings, custom_loss_function_path="moe_rl.frameworks.slime.losses.policy_loss_function")
    with pytest.raises(InvalidInputError, match=sentence):
        WORKER.init(args)


@pytest.mark.parametrize("layout", [{"qkv_format": "bshd"}, {"allgather_cp": True}, {"use_rollout_logprobs": True}])
def test_slime_refuses_before_rollouts_where_the_router_shift_would_not_act(
    layout: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    args, _, _ = own.slime_batch()
    vars(args).update(layout, custom_loss_function_path="moe_rl.frameworks.slime.losses.policy_loss_function")
    monkeypatch.setenv("MOE_RL_ROUTER_SHIFT", "0.8")
    worker = Worker(framework=WORKER.framework, stage=lambda: None)
    with pytest.raises(InvalidInputError, match="the router shift needs"):
        worker.init(args)


@pytest.mark.parametrize("offset", [0, 4])
def test_miles_micro_batches_of_one_size_are_looked_ahead_at_as_it_takes_them(offset: int) -> None:
    """`DataIterator.get_next` of miles takes `micro_batch_size` samples from `offset`, which counts samples."""
    args = SimpleNamespace(qkv_format="thd")
    tokens = [[sample, 7] for sample in range(8)]
    data = SimpleNamespace(micro_batch_indices=None, micro_batch_size=2, offset=offset, rollout_data={"tokens": tokens})
    assert CallData(args, data, 2).tokens() == [tokens[offset : offset + 2], tokens[offset + 2 : offset + 4]]
    data.micro_batch_size = None
    assert CallData(args, data, 2).tokens() is None


def test_slimes_widths_act_on_its_own_objectives() -> None:
    args, _, _ = own.slime_batch()
    vars(args).update(moe_rl_objective="grpo", eps_clip=0.1, eps_clip_high=0.28, eps_clip_c=4.0)
    assert objective_of(args).options == {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 4.0}
    vars(args).update(moe_rl_objective="gspo", eps_clip=2e-4, eps_clip_high=3e-4, eps_clip_c=None)
    assert objective_of(args).options == {"clip_ratio_low": 2e-4, "clip_ratio_high": 3e-4, "gradient": "sequence"}


@pytest.mark.parametrize(
    ("settings", "objective", "sentence"),
    [
        ({"importance_sampling_level": "sequence"}, "ppo", r"'sequence' has no effect on the objective 'ppo'"),
        ({"epsilon_high": 0.28}, "sapo", r"epsilon_high or delta 0.28 has no effect on 'sapo'"),
        ({"_entropy_bonus_enabled": True}, "ppo", r"this trainer does not support the entropy bonus"),
        (
            {"top_entropy_quantile": 0.2},
            "ppo",
            r"top_entropy_quantile has no effect, because moe_rl replaces TRL's own policy loss",
        ),
    ],
)
def test_trl_makes_no_trainer_whose_settings_would_not_act(
    settings: dict[str, object], objective: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trainer:
        """TRL's own constructor reads its configuration into these attributes."""

        def __init__(self) -> None:
            vars(self).update(vars(record.trl_stand_in("grpo")[0]) | settings)

    module = ModuleType("trl")
    module.GRPOTrainer = Trainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trl", module)
    with pytest.raises(InvalidInputError, match=sentence):
        policy_loss_trainer(objective)()


def test_every_recorded_default_is_compared() -> None:
    defaults = {case for case in RECORDED if case[1].endswith("default")}
    assert defaults <= set(own.OURS)


def test_the_table_of_the_page_is_what_the_comparison_says() -> None:
    pytest.importorskip("megatron.core", reason="slime's entry asks Megatron for its groups")
    text = PAGE.read_text()
    assert BLOCK.sub(renewed, text) == text, "run: make tables"


@pytest.mark.parametrize("framework", own.OWN)
def test_the_recorded_numbers_are_those_of_the_checkout(framework: str) -> None:
    root = Path(os.environ.get("FRAMEWORK_SOURCES", ""))
    if not os.environ.get("FRAMEWORK_SOURCES") or not (root / framework).is_dir():
        pytest.skip(f"FRAMEWORK_SOURCES names no folder with a checkout of {framework} (it is on no registry)")
    for each in own.cases(framework, root):
        expected = RECORDED[framework, each["setting"]]
        assert each["loss"] == pytest.approx(expected["loss"], abs=1e-12)
        assert each["grad"] == [pytest.approx(row, abs=1e-12) for row in expected["grad"]]
        assert each["logged"] == pytest.approx(expected["logged"], abs=1e-12)
    for recipe in recipe_losses.RECIPES:
        if recipe.framework == framework:
            assert recipe_losses.recorded_of(recipe, root) == RECIPES[recipe.key]
