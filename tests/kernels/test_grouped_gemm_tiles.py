"""Every tile that may be chosen sums in the same order; a specialized one is chosen only where a GPU proved it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from benchmarks.kernels.cases import rows_gemm
from benchmarks.operators.numerics import assert_close
from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels import BLOCK, FP8_DTYPE, ExpertWeights, QuantizedTensor
from moe_rl.kernels.devices import has_gluon
from moe_rl.kernels.gemm import reference
from moe_rl.kernels.gemm.problem import RowsGemm
from moe_rl.kernels.gemm.proven import ProvenTile, ProvenTiles, kernels_digest, proven_on, proven_tile, record_path
from moe_rl.kernels.gemm.tiling import GemmConfig, GemmProblem, Scaling, candidates, config

PROBLEM = GemmProblem(
    op="forward", scaling="none", num_rows=4096, num_groups=8, n=1536, k=2048, capability=(9, 0)
)  # fmt: skip


CPU = torch.device("cpu")

STEPS: dict[Scaling, int] = {"none": 64, "block": 128}


@pytest.mark.parametrize("scaling", STEPS)
@pytest.mark.parametrize("extra", ["", "table", "bias"])
def test_every_candidate_sums_the_steps_in_the_same_order(device: str, scaling: Scaling, extra: str) -> None:
    """So that the choice of a tile never changes a result, whatever the tile's rows and columns.

    Integers, times another power of two in every step: the products of a step sum up exactly in any order, so the bits
    tell the order of the steps and nothing of how a CPU's library multiplies. Loops in Gluon have
    no interpreter; the emulator holds them to the reference.
    """
    from moe_rl.kernels.gemm import triton_kernel

    generator, step, blocks = torch.Generator().manual_seed(0), STEPS[scaling], -(-400 // 128)
    x, w = (torch.randint(-8, 9, (*shape, 4, step), generator=generator) for shape in ((103,), (3, 400)))
    exponents = torch.tensor([0, 19, -7, 13])
    row_scale = 2.0 ** (exponents + torch.randint(-2, 3, (103, 4), generator=generator))
    w_scale = 2.0 ** torch.randint(-3, 4, (3, blocks, 4), generator=generator)
    offsets = torch.tensor([0, 70, 70, 103], dtype=torch.int32, device=device)
    bias = torch.randn(3, 400, generator=generator).to(device) if extra == "bias" else None
    factor = torch.rand(103, generator=generator).to(device) if extra == "bias" else None
    problem = GemmProblem(
        op="forward", scaling=scaling, num_rows=103, num_groups=3, n=400, k=4 * step, capability=(9, 0)
    )  # fmt: skip

    def gemm(order: list[int]) -> RowsGemm:
        rows, weights = (side[..., order, :].flatten(-2).float().to(device) for side in (x, w))
        if scaling == "none":
            scaled = rows * row_scale[:, order].repeat_interleave(step, 1).to(device)
            parts: list[Any] = list(weights.bfloat16())
            quantized: Any = scaled.bfloat16()
        else:
            # Beyond an expert's scales lies infinity, of which 0 times would raise: nobody may read it.
            scales = torch.full((3, blocks + 2, 4), float("inf"))
            scales[:, :blocks] = w_scale[..., order]
            scales = scales.to(device)
            parts = [
                QuantizedTensor(data=part.to(FP8_DTYPE), scale=scale[:blocks], block_shape=(BLOCK, BLOCK))
                for part, scale in zip(weights, scales, strict=True)
            ]
            quantized = QuantizedTensor(
                data=rows.to(FP8_DTYPE), scale=row_scale[:, order].contiguous().to(device), block_shape=(1, BLOCK)
            )
        table = ExpertWeights.of_parts(parts)
        if extra != "table":
            table = replace(
                table, data=torch.stack([table.part(group) for group in range(3)]), owners=(),
                scale=None if scaling == "none" else torch.stack([table.part_scale(group) for group in range(3)]),
            )  # fmt: skip
        return rows_gemm(quantized, table, offsets, bias=bias, bias_factor=factor)

    tiles = [tile for tile in candidates(problem) if tile.kernel != "gluon"]
    results = {str(tile): triton_kernel.forward(gemm([0, 1, 2, 3]), chosen=tile) for tile in tiles}
    assert len(results) == 4
    first = next(iter(results.values()))
    assert_close(first, reference.forward(gemm([0, 1, 2, 3])), m_offsets=offsets)
    assert [name for name, result in results.items() if not torch.equal(result, first)] == []
    assert not torch.equal(triton_kernel.forward(gemm([3, 2, 1, 0])), first), "another order gives other bits"


WITH_GLUON = pytest.mark.skipif(not has_gluon(), reason="Triton before 3.9 has no specialized tiles")
SPECIAL = tuple(tile for tile in candidates(PROBLEM) if tile.specialized)


def record(*tiles: GemmConfig, **changed: str) -> ProvenTiles:
    here = {"gpu": "NVIDIA H100", "triton": triton.__version__, "kernels": kernels_digest(), **changed}
    proven = (ProvenTile(op="forward", scaling="none", tile=tile, speedup=1.0 + i) for i, tile in enumerate(tiles))
    return ProvenTiles(**here, tiles=tuple(proven))


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MOE_RL_PROVEN_TILES", str(tmp_path))
    proven_on.cache_clear()
    yield tmp_path
    proven_on.cache_clear()


@WITH_GLUON
def test_a_proven_tile_is_taken_where_as_many_rows_are_and_the_plain_loop_elsewhere() -> None:
    proven = record(*SPECIAL)
    assert proven.tile(PROBLEM) == SPECIAL[-1], "the fastest"
    few, half = replace(PROBLEM, num_rows=512), replace(PROBLEM, num_rows=8 * 255)
    assert (config(few).block_m, config(half).block_m) == (64, 128)
    for problem in (few, half):
        assert proven.tile(problem) == config(problem)
    for changed in ({"op": "dgrad"}, {"scaling": "block"}, {"capability": (10, 0)}):
        other = replace(PROBLEM, **changed)
        assert proven.tile(other) == config(other)


@WITH_GLUON
def test_a_launch_takes_a_specialized_tile_on_the_gpu_that_proved_it_and_on_no_cpu(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved = SPECIAL[0]
    record(proved).save(record_path("NVIDIA H100"))
    proven_on.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H100")
    assert proven_tile(PROBLEM, CPU) == config(PROBLEM)
    assert proven_tile(PROBLEM, torch.device("cuda")) == proved


def test_a_record_is_read_once_and_holds_for_this_gpu_triton_and_kernels_alone(
    records: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = record_path("NVIDIA H100")
    assert path.parent == records
    for _ in range(3):
        assert proven_on("NVIDIA H100").tiles == ()
    assert [line.getMessage() for line in caplog.records] == [
        f"grouped GEMM on NVIDIA H100: plain loop; `make gpu-check` proves faster tiles (no {path})"
    ]
    record(*SPECIAL).save(path)
    proven_on.cache_clear()
    assert proven_on("NVIDIA H100") == record(*SPECIAL)
    for changed in ({"triton": "0.0"}, {"kernels": "other"}, {"gpu": "NVIDIA H200"}):
        record(*SPECIAL, **changed).save(path)
        proven_on.cache_clear()
        assert proven_on("NVIDIA H100").tiles == ()
        (name,) = changed
        assert f"is of {name} {changed[name]}, not" in caplog.messages[-1]
    path.write_text("{}")
    proven_on.cache_clear()
    with pytest.raises(InvalidInputError, match="does not hold proven tiles"):
        proven_on("NVIDIA H100")
