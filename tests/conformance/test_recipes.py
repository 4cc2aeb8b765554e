"""Every recipe computes the expert MLP, forward and backward, within what its rounding allows."""

import pytest

pytest.importorskip("torch", reason="kernels need torch")

import torch

from benchmarks.operators.cases import TINY, Case
from benchmarks.operators.gemm_suites import expert_problems
from benchmarks.operators.harness import run_problem
from benchmarks.operators.run import device_here, with_providers
from moe_rl.kernels import BLOCK, RECIPES, Recipe, prepare
from moe_rl.kernels.types import MX_BLOCK

pytestmark = pytest.mark.triton
REGISTRY = RECIPES
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


@every_recipe
def test_operands_have_the_blocks_that_the_recipe_names(recipe: Recipe) -> None:
    weights = torch.randn(2, 144, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    matrix = prepare(weights, recipe)
    assert matrix.weights.block_shape == recipe.weight_block_shape
    assert recipe.is_fp8 == (matrix.weights.scale is not None)
    if recipe.is_fp8:
        assert recipe.row_block_shape[0] == 1
        assert recipe.row_block_shape[1] in (BLOCK, MX_BLOCK, -1)


@pytest.mark.slow
def test_the_expert_mlp_is_right_under_every_recipe() -> None:
    torch.set_num_threads(1)
    rows = [
        row
        for made in expert_problems(Case(model=TINY, tokens=6), device_here())
        for row in run_problem(with_providers(made, ("triton", "reference")), None)
    ]
    assert [row for row in rows if row["passed"] is False] == []
    passed = {str(row["variant"]).removeprefix("forward+backward ") for row in rows if row["passed"]}
    assert passed == set(RECIPES.names)
