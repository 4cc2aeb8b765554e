"""Tuning takes the fastest tile it was shown, and only where it was asked for."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.gemm.tiling import GemmConfig, GemmProblem, candidates, config
from moe_rl.kernels.gemm.tuning import TunedTiles, chosen_tile, problem_key, tune, use_tuned_tiles
from moe_rl.kernels.gemm.weights import ExpertWeights
from moe_rl.testing.kernels.cases import rows_gemm

PROBLEM = GemmProblem(
    op="forward", scaling="block", num_rows=4096, num_groups=8, n=1536, k=2048, capability=(9, 0)
)  # fmt: skip


@pytest.fixture(autouse=True)
def untuned() -> Iterator[None]:
    yield
    use_tuned_tiles(None)


def prefer(wanted: GemmConfig) -> TunedTiles:
    return tune([PROBLEM], lambda problem, tile: 1.0 if tile == wanted else 2.0)


def test_the_fastest_candidate_is_taken_and_kept(tmp_path: Path) -> None:
    for wanted in candidates(PROBLEM):
        tiles = prefer(wanted)
        tiles.save(tmp_path / "tiles.json")
        again = TunedTiles.load(tmp_path / "tiles.json")
        assert again == tiles
        use_tuned_tiles(again)
        assert chosen_tile(PROBLEM) == wanted
        assert again.times_us[problem_key(PROBLEM)][str(wanted)] == 1.0


def test_without_tuning_and_for_other_problems_the_heuristic_rules() -> None:
    other = GemmProblem(
        op="forward", scaling="block", num_rows=4096, num_groups=8, n=1536, k=4096, capability=(9, 0)
    )  # fmt: skip
    assert chosen_tile(PROBLEM) == config(PROBLEM)
    use_tuned_tiles(prefer(candidates(PROBLEM)[-1]))
    assert chosen_tile(PROBLEM) != config(PROBLEM)
    assert chosen_tile(other) == config(other)


def test_equal_times_leave_the_heuristics_tile() -> None:
    assert tune([PROBLEM], lambda problem, tile: 1.0).tile(PROBLEM) == config(PROBLEM)


def test_every_candidate_sums_the_steps_in_the_same_order(device: str) -> None:
    """So that tuning never changes a result, whatever the tile's rows.

    Integers, times another power of two in every step of 64: the products of a step sum up exactly in any order, so
    the bits tell the order of the steps and nothing of how a CPU's library multiplies.
    """
    from moe_rl.kernels.gemm import triton_kernel

    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-8, 9, (*shape, 4, 64), generator=generator) for shape in ((103,), (3, 144)))
    x = x * 2.0 ** torch.tensor([0.0, 19.0, -7.0, 13.0])[:, None]
    offsets = torch.tensor([0, 70, 70, 103], dtype=torch.int32, device=device)
    problem = GemmProblem(op="forward", scaling="none", num_rows=103, num_groups=3, n=144, k=256, capability=(9, 0))

    def forward(order: list[int]) -> list[torch.Tensor]:
        rows, weights = (side[..., order, :].flatten(-2).bfloat16().to(device) for side in (x, w))
        gemm = rows_gemm(rows, ExpertWeights.of(weights), offsets)
        return [triton_kernel.forward(gemm, chosen=tile) for tile in candidates(problem)]

    results = forward([0, 1, 2, 3])
    assert len(results) == 4
    assert all(torch.equal(result, results[0]) for result in results)
    assert not torch.equal(forward([3, 2, 1, 0])[0], results[0]), "another order gives other bits"


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    for text in ("[]", "{}", "no json", '{"tiles": {"a": {"kernel": "tma"}}, "times_us": {}}'):
        path.write_text(text)
        with pytest.raises(InvalidInputError, match="does not hold tuned tiles"):
            TunedTiles.load(path)
