"""Every tile that may be chosen sums in the same order; a specialized one is chosen only where a GPU proved it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels.cases import rows_gemm
from benchmarks.operators.numerics import assert_close
from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels import BLOCK, FP8_DTYPE, ExpertWeights, QuantizedTensor
from moe_rl.kernels.carried import Archive, CarriedKernel, tile_name
from moe_rl.kernels.gemm import proven, reference
from moe_rl.kernels.gemm.problem import RowsGemm
from moe_rl.kernels.gemm.proven import Chip, ProvenTile, ProvenTiles, proven_on, proven_tile, record_path
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


CHIP = Chip(capability=(9, 0), num_sms=132)
SPECIAL = tuple(tile for tile in candidates(PROBLEM) if tile.specialized)
WITH_SPECIAL = pytest.mark.skipif(not SPECIAL, reason="no specialized tile is carried, and Triton is older than 3.9")
CODES = ("0123456789abcdef", "fedcba9876543210")


def carried(*codes: str, tile: GemmConfig | None = None) -> Archive:
    """Return an archive that holds these codes as the forms of a tile."""
    name = tile_name("forward", "none", tile or SPECIAL[0])
    kernels = {
        code: CarriedKernel(code=code, name="", function="", parameters=(), shared_bytes=0, threads=384, num_ctas=2,
                            scratch_bytes=0, scratch_align=128, tiles=(name,)) for code in codes
    }  # fmt: skip
    return Archive(kernels, "", {})


def record(*tiles: GemmConfig, chip: str = str(CHIP)) -> ProvenTiles:
    tiles_of = (
        ProvenTile(op="forward", scaling="none", tile=tile, speedup=1.0 + i, code=CODES) for i, tile in enumerate(tiles)
    )
    return ProvenTiles(chip=chip, measured_on="NVIDIA H100", tiles=tuple(tiles_of))


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MOE_RL_PROVEN_TILES", str(tmp_path))
    monkeypatch.setattr(proven, "carried_for", lambda _capability: carried(*CODES))
    monkeypatch.setattr(proven, "fits", lambda _problem, _tile, _device: True)
    for cached in (proven_on, proven._proven_here):
        cached.cache_clear()
    yield tmp_path
    for cached in (proven_on, proven._proven_here):
        cached.cache_clear()


@WITH_SPECIAL
def test_a_proven_tile_is_taken_where_as_many_rows_are_and_the_plain_loop_elsewhere() -> None:
    found = record(*SPECIAL)
    assert found.tile(PROBLEM) == SPECIAL[-1], "the fastest"
    few, half = replace(PROBLEM, num_rows=512), replace(PROBLEM, num_rows=8 * 255)
    assert (config(few).block_m, config(half).block_m) == (64, 128)
    for problem in (few, half):
        assert found.tile(problem) == config(problem)
    for changed in ({"op": "dgrad"}, {"scaling": "block"}, {"capability": (10, 0)}):
        other = replace(PROBLEM, **changed)
        assert found.tile(other) == config(other)


@WITH_SPECIAL
def test_a_launch_takes_a_specialized_tile_on_the_chip_that_proved_it_and_on_no_cpu(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(SPECIAL[0]).save(record_path(CHIP))
    monkeypatch.setattr(Chip, "of", lambda _device: CHIP)
    gpu = torch.device("cuda", 0)
    assert proven_tile(PROBLEM, CPU) == config(PROBLEM)
    assert proven_tile(PROBLEM, gpu) == SPECIAL[0]
    monkeypatch.setattr(proven, "fits", lambda _problem, _tile, _device: False)
    assert proven_tile(PROBLEM, gpu) == config(PROBLEM), "its clusters do not fit"


@WITH_SPECIAL
def test_a_record_is_read_once_and_holds_for_its_chip_and_its_machine_code_alone(
    records: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record_path(CHIP)
    assert path == records / "proven-sm_90-132.json"
    for _ in range(3):
        assert proven_on(CHIP).tiles == ()
    assert [line.getMessage() for line in caplog.records] == [
        "grouped GEMM on sm_90-132 uses the plain loop, because no faster tile is verified on this GPU "
        f"({path} is missing)"
    ]
    record(*SPECIAL).save(path)
    proven_on.cache_clear()
    assert proven_on(CHIP) == record(*SPECIAL)
    record(*SPECIAL, chip="sm_90-114").save(path)
    proven_on.cache_clear()
    assert proven_on(CHIP).tiles == ()
    assert caplog.messages[-1].endswith("is for GPU sm_90-114")
    path.write_text("{}")
    proven_on.cache_clear()
    with pytest.raises(InvalidInputError, match="not a readable file of verified tiles"):
        proven_on(CHIP)


@WITH_SPECIAL
def test_a_proof_is_of_all_code_that_a_tile_may_launch_and_survives_what_is_dropped() -> None:
    found = record(SPECIAL[0])
    assert found.of_code(carried(*CODES)) == found
    assert found.of_code(carried(CODES[0])) == found
    assert found.of_code(carried(*CODES, "a form that nobody has run")).tiles == ()
    assert found.of_code(carried()).tiles == found.of_code(None).tiles == ()
