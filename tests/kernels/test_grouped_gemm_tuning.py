"""Tuning takes the fastest tile it was shown, and only where it was asked for."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.gemm.tiling import GemmConfig, GemmProblem, candidates, config
from moe_rl.kernels.gemm.tuning import TunedTiles, chosen_tile, problem_key, tune, use_tuned_tiles
from moe_rl.testing.kernels.cases import GemmCase, make_operands, rows_gemm

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


def test_every_candidate_gives_the_same_bits(device: str) -> None:
    """So that tuning never changes a result: they sum in the same order, whatever the tile's rows."""
    from moe_rl.kernels.gemm import triton_kernel

    operands = make_operands(GemmCase(sizes=(70, 0, 33), n=144, k=272), device)
    results = [
        triton_kernel.forward(rows_gemm(operands.x, operands.weights, operands.m_offsets), chosen=tile)
        for tile in candidates(
            GemmProblem(op="forward", scaling="none", num_rows=103, num_groups=3, n=144, k=272, capability=(9, 0))
        )
    ]
    assert len(results) == 4
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    for text in ("[]", "{}", "no json", '{"tiles": {"a": {"kernel": "tma"}}, "times_us": {}}'):
        path.write_text(text)
        with pytest.raises(InvalidInputError, match="does not hold tuned tiles"):
            TunedTiles.load(path)
