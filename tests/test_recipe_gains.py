"""The table of published recipes: balancing never costs, and brings nothing to a step that waits for its rollout."""

import pytest

from benchmarks.recipe_gains import IN_README, RecipeGain, gains, short_table


@pytest.fixture(scope="module")
def found() -> list[RecipeGain]:
    return gains()


def test_perfect_balance_never_costs_and_brings_more_where_more_is_uneven(found: list[RecipeGain]) -> None:
    assert len(found) == 8
    for gain in found:
        assert 1.0 <= gain.speedups[0] <= gain.speedups[1]
        assert 0 <= gain.hours_a_day < 24 * gain.gpus


def test_a_step_that_waits_for_its_rollout_gains_nothing(found: list[RecipeGain]) -> None:
    waiting = [gain for gain in found if gain.limit == "waits for the rollout"]
    assert waiting
    assert all(gain.speedups == (1.0, 1.0) for gain in waiting)


def test_the_readme_has_the_recipes_that_it_names() -> None:
    assert sum(name in short_table() for name in IN_README) == len(IN_README)
