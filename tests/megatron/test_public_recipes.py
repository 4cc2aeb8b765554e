"""Public recipes attach, and the doctor says of each what `attach` says of a model with its options."""

from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.public_recipes import Recipe, diagnosed, recipes

RECIPES = recipes()
LEAST_RECIPES, LEAST_ATTACHED = 24, 22
FLAG_OF = {"moe_enable_deepep": "moe_flex_dispatcher_backend"}
"""Options that the doctor reads as another one."""
OF_ANY_VALUE = ("expert_tensor_parallel_size", "moe_router_dtype", "recompute_method", "recompute_num_layers")
"""What a framework sets by itself and no verdict hangs on; where a recipe writes it, the doctor reads it."""

case = pytest.mark.multi_rank(world_size=2, launch="standins", case="recipe_cases.verdicts")


@case
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_doctor_says_what_attach_says(recipe: Recipe, outcome: list[Any]) -> None:
    sentence = outcome[0][recipe.name]
    _, verdict = diagnosed(recipe)
    if sentence:
        assert verdict.word == "does not attach"
        assert any(reason.startswith(sentence) for reason in verdict.reasons)
    else:
        assert verdict.word in ("attaches", "attaches, but")


@case
def test_most_public_recipes_attach(outcome: list[Any]) -> None:
    assert len(RECIPES) >= LEAST_RECIPES
    refused = {name: sentence for name, sentence in outcome[0].items() if sentence}
    assert len(RECIPES) - len(refused) >= LEAST_ATTACHED, refused


@pytest.mark.multi_rank(world_size=2, launch="standins", case="recipe_cases.hybrid")
def test_of_a_hybrid_model_the_layers_that_have_experts_are_planned(outcome: list[Any]) -> None:
    """`moe_layer_freq` of such a model says that all have some."""
    assert outcome == [[1, 3, 2]] * 2


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_doctor_reads_what_megatron_gets(recipe: Recipe) -> None:
    """From the shape that the framework's users write, its own values included."""
    settings, _ = diagnosed(recipe)
    written = {name for part in recipe.written.values() for name in part}
    wanted: Mapping[str, Any] = {name: value for part in recipe.effective.values() for name, value in part.items()}
    for name, value in wanted.items():
        read = settings.option(FLAG_OF.get(name, name))
        if name in FLAG_OF:
            assert (read is not None and read.value == "deepep") == value
        elif read is None:
            assert not value or (name in OF_ANY_VALUE and name not in written), name
        else:
            assert read.value == value, name
