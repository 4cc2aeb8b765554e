"""The proof of speed reads machine code rightly, and reports a kernel that was made worse on purpose."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.kernels.peers import PUBLISHED, MissingPeerError, fitted_share, unpacked
from benchmarks.kernels.prediction import Shares
from benchmarks.kernels.proof_page import page
from benchmarks.kernels.roofs import SM_SHARED_BYTES, TileShape, blackwell_row, counted_row, product_row
from benchmarks.kernels.sass import Program, issue_cycles
from moe_rl.kernels import quantize_columns
from moe_rl.kernels.devices import has_gluon
from moe_rl.kernels.quantization import triton_kernel as quantizing

SQUARE = TileShape(rows=128, columns=128, step=128, element_bytes=1, num_warps=8)


def code(*lines: str) -> Program:
    """A program of these instructions, each issued for two cycles, as the disassembler writes it."""
    text = []
    for address, line in enumerate(lines):
        if line.endswith(":"):
            text.append(line)
        else:
            text.append(f"/*{16 * address:04x}*/ {line} ; /* 0x0000000000000000 */")
            text.append(f"/* 0x{2 << 41:016x} */")
    return Program.of("\n".join(text))


PRODUCT = "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR20], R24"
LOOP = (".L_x_1:", *[PRODUCT] * 4, "WARPGROUP.DEPBAR.LE gsb0, 0x0", *["FFMA R1, R2, R3, R4"] * 10)
BARRIER, BACK, END = "BAR.SYNC.DEFER_BLOCKING 0x0", "@!P0 BRA `(.L_x_1)", "EXIT"


def test_what_lies_between_two_products_and_a_barrier_of_all_is_exposed() -> None:
    loop = code(*LOOP, BARRIER, BACK, END).main_loop()
    assert loop is not None
    assert (loop.cta_barriers, len(loop.body), len(loop.exposed)) == (1, 17, 13)
    assert issue_cycles(loop.exposed, 8) == 26
    assert issue_cycles(loop.exposed, 4) == 26, "two cycles each, whoever else is there"
    row = product_row("made", code(*LOOP, BARRIER, BACK, END), SQUARE, registers=200, shared_bytes=SM_SHARED_BYTES)
    assert (row.tensor_cycles, row.exposed_cycles, row.instructions_per_step) == (512, 26, 17)
    assert row.lockstep_tflops == pytest.approx(1979 * 512 / 538)
    assert row.ceiling_tflops == row.l2_tflops == 1024


@pytest.mark.parametrize(
    "other",
    [
        (*LOOP, "BAR.SYNC 0x2, 0x80", BACK, END),
        (*[line.replace("gsb0, 0x0", "gsb0, 0x1") for line in LOOP], BARRIER, BACK, END),
    ],
    ids=["a barrier of one warpgroup", "products stay in flight"],
)
def test_what_another_product_covers_is_not_exposed(other: tuple[str, ...]) -> None:
    row = product_row("made", code(*other), SQUARE, registers=200, shared_bytes=SM_SHARED_BYTES)
    assert row.exposed_cycles == 0
    assert row.lockstep_tflops == 1979


def test_two_programs_of_an_sm_cover_each_other() -> None:
    small = TileShape(rows=64, columns=128, step=128, element_bytes=1, num_warps=4)
    rows = [
        product_row("made", code(*LOOP, BARRIER, BACK, END), small, registers=160, shared_bytes=shared)
        for shared in (SM_SHARED_BYTES, SM_SHARED_BYTES // 2)
    ]
    assert [row.programs_per_sm for row in rows] == [1, 2]
    assert rows[0].exposed_cycles > rows[1].exposed_cycles == 0


def test_both_sides_of_a_branch_are_issued_and_a_rare_call_is_not() -> None:
    """Programs share the parts of a tile: what one of them jumps over, another one issues."""
    parts = ("@P0 BRA `(.L_x_2)", "FADD R1, R2, R3", "FADD R1, R1, R3", "BRA `(.L_x_3)", ".L_x_2:", "FMUL R1, R2, R3",
             ".L_x_3:", END)  # fmt: skip
    assert code(*parts).executed() == 6
    assert code(*[END if line.startswith("BRA") else line for line in parts]).executed() == 6
    division = ("@!P0 BRA `(.L_x_2)", "MOV R4, 0x40", "CALL.REL.NOINC `(.L_x_3)", ".L_x_2:", "FMUL R1, R2, R3", END,
                ".L_x_3:", "FADD R1, R2, R3", "RET.REL.NODEC R4")  # fmt: skip
    assert code(*division).executed() == 3


def test_a_tile_costs_what_lies_outside_its_main_loop_in_the_loop_over_tiles() -> None:
    """Of one kind of warps: neither the loop in which all kinds wait for work counts, nor code that only goes back."""
    second_try = (".L_x_7:", "@!P2 BRA `(.L_x_7)", "BRA `(.L_x_4)")
    tiles = (".L_x_9:", "IMAD R1, R2, R3, R4", "@!P1 BRA `(.L_x_7)", ".L_x_4:", *LOOP, BACK, "STG.E [R2], R1",
             "@P0 BRA `(.L_x_9)")  # fmt: skip
    dispatch = (".L_x_8:", "USETMAXREG.DEALLOC.CTAPOOL 0x78", *tiles, "@P0 BRA `(.L_x_8)", END, *second_try)
    program = code(*dispatch)
    main = program.main_loop()
    assert main is not None
    assert [instruction.word for instruction in program.of_tile(main)] == ["IMAD", "BRA", "STG", "BRA"]
    assert len(program.loops()) == 4, "the second try ends no loop but its own"
    unrolled = code(
        ".L_x_9:", "IMAD R1, R2, R3, R4", *LOOP, BACK, ".L_x_6:", *LOOP[1:], "@!P0 BRA `(.L_x_6)", "STG.E [R2], R1",
        "@P0 BRA `(.L_x_9)", END,
    )  # fmt: skip
    main = unrolled.main_loop()
    assert main is not None
    assert len(unrolled.of_tile(main)) == 3
    assert code(*LOOP, BACK, END).of_tile(main) == ()


def test_what_a_tile_costs_is_hidden_by_warpgroups_that_go_at_their_own_pace() -> None:
    """Eight instructions per tile: after a barrier of all they are time, else the other warpgroup multiplies."""
    tail = (*["STG.E [R2], R1"] * 7, "@P0 BRA `(.L_x_9)", END)
    together = code(".L_x_9:", "IMAD R1, R2, R3, R4", *LOOP, BARRIER, BACK, *tail)
    apart = code(".L_x_9:", "IMAD R1, R2, R3, R4", *LOOP, "BAR.SYNC 0x2, 0x80", BACK, *tail)
    of_row = {
        name: product_row("made", program, SQUARE, registers=200, shared_bytes=SM_SHARED_BYTES).fixed_shares
        for name, program in {"together": together, "apart": apart}.items()
    }
    # Nine instructions of two cycles each; a step is 512 cycles of products, and 13 instructions alone.
    assert of_row["together"] == pytest.approx([18 / (steps * (512 + 26) + 18) for steps in (6, 16, 32)])
    assert of_row["apart"] == (0.0, 0.0, 0.0)
    assert product_row("made", code(*LOOP, BACK, END), SQUARE, registers=200, shared_bytes=1).fixed_shares == ()


def test_what_registers_exchange_takes_its_time_of_shared_memory() -> None:
    """Eight warps store a word and load four: 40 cycles more than the 640 of TMA and products."""
    moved = ("STS [R2], R1", "LDS.128 R4, [R2]", "@!P0 BRA `(.L_x_1)", END)
    row = product_row("made", code(*LOOP, *moved), SQUARE, registers=200, shared_bytes=SM_SHARED_BYTES)
    assert row.shared_tflops == pytest.approx(1979 * 512 / 680)


ON_BLACKWELL = (
    ".L_x_1:", *["UTCQMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UP0"] * 8, BARRIER, BACK, END
)  # fmt: skip


def test_a_step_of_blackwell_is_as_many_products_as_its_bytes_need() -> None:
    """A product of sm_100 is 32 bytes deep and at most 128 x 256; its text names no shape."""
    for columns, steps in ((128, 2), (256, 2), (512, 1)):
        row = counted_row("made", code(*ON_BLACKWELL), replace(SQUARE, columns=columns), registers=100, shared_bytes=0)
        assert (row.instructions_per_step, row.cta_barriers_per_step) == (10 / steps, 1 / steps)
    assert counted_row("made", code("LDL R1, [R2]", *ON_BLACKWELL), SQUARE, registers=1, shared_bytes=0).spills == 1


def test_on_blackwell_the_page_says_what_memory_has_to_give() -> None:
    """A tile of 128 x 128 in FP8 does 128 operations per byte: 4,500 TFLOPS want 35 TB/s of L2."""
    row = blackwell_row("gemm tma", code(*ON_BLACKWELL), SQUARE, registers=1, shared_bytes=0)
    assert row.needed_l2_tb_per_s == pytest.approx(4500 / 128)
    # 64 rows fill half of a tile, but HBM gives less: two operations per weight and row, rows and results beside it.
    for few, rows in ((row.few_rows_tflops[0], 64), (row.few_rows_tflops[-1], 512)):
        assert few == pytest.approx(2 * rows * 1536 * 2048 / ((1536 + rows) * 2048 + 2 * rows * 1536) * 8)
    assert blackwell_row("gemm fp8", code(*ON_BLACKWELL), SQUARE, registers=1, shared_bytes=0).few_rows_tflops == ()


def test_published_timings_are_in_the_order_of_their_roofs_and_one_dense_one_is_above() -> None:
    for grouped in (True, False):
        kind = [timing for timing in PUBLISHED if timing.is_grouped == grouped]
        assert len(kind) >= 6
        for higher, lower in itertools.permutations(kind, 2):
            assert higher.roof_tflops <= lower.roof_tflops or higher.tflops > lower.tflops
    assert [(timing.tflops, timing.is_grouped) for timing in PUBLISHED if timing.share > 1] == [(1404, False)]


def test_the_share_of_a_roof_that_predictions_take_is_that_of_the_published_timings() -> None:
    """Of grouped products alone; dense ones are left out and predicted with it, on the page."""
    assert Shares().product == round(fitted_share(), 2)
    left_out = [timing for timing in PUBLISHED if not timing.is_grouped]
    shown = page([], []).split("## What others measured")[1]
    assert shown.count("in the fit") == len(PUBLISHED) - len(left_out)
    for timing in left_out:
        assert f"| {fitted_share() * timing.roof_tflops:.0f} (" in shown


def test_a_wheel_gives_its_modules_without_what_their_packages_import(tmp_path: Path) -> None:
    with pytest.raises(MissingPeerError, match="there is no wheel of other in"):
        unpacked(tmp_path, "other", tmp_path / "into", "")
    with zipfile.ZipFile(tmp_path / "other-1.0-py3-none-any.whl", "w") as wheel:
        for name in ("other/__init__.py", "other/ops/__init__.py", "other/ops/moe.py", "other/models/moe.py"):
            wheel.writestr(name, "")
    unpacked(tmp_path, "other", tmp_path / "into", "other/ops/")
    files = [path for path in (tmp_path / "into").rglob("*") if path.is_file()]
    assert files == [tmp_path / "into" / "other" / "ops" / "moe.py"]


def test_the_page_names_every_problem() -> None:
    row = product_row(
        "made", code(*LOOP, BARRIER, BACK, END), SQUARE, registers=255, shared_bytes=0, problems=("spills: 8 B",)
    )  # fmt: skip
    assert "- sm_90a, made: spills: 8 B" in page([row], [])
    assert "## Problems" not in page([], [])


WORSE = """
import importlib.util, json, sys
import torch
from moe_rl.kernels.gemm import triton_kernel
from moe_rl.kernels.gemm.tiling import GemmConfig
from benchmarks.kernels import proof, roofs
from benchmarks.kernels.aot import bundled, verdict
from benchmarks.kernels.cases import GemmCase, make_operands, rows_gemm
from benchmarks.kernels.recording import recorded
from benchmarks.kernels.launches import known_bad_launches
from benchmarks.kernels.sass import disassemble

def module(path):
    spec = importlib.util.spec_from_file_location("moe_rl.kernels.gemm.worse", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made

def row(launch):
    found = verdict(launch)
    program = disassemble(launch.compile().asm["cubin"], bundled("nvdisasm"))
    tile = proof.tile_of(launch.constants, launch.options, launch.name)
    return roofs.product_row(
        launch.name, program, tile, registers=found.registers, shared_bytes=found.shared_bytes, problems=found.problems
    )

def gemm(scaling):
    operands = make_operands(GemmCase(sizes=(64,), n=256, k=256, scaling=scaling), "cpu")
    return rows_gemm(operands.x, operands.weights, operands.m_offsets, out_dtype=torch.bfloat16)

plain = GemmConfig(kernel="tma", block_m=128, block_n=128, block_k=128, num_warps=8, num_stages=4)
wide = GemmConfig(kernel="gluon", block_m=256, block_n=256, block_k=64, num_warps=4, num_stages=4, specialized=True)
with recorded(90) as launches:
    triton_kernel.forward(gemm("block"), chosen=plain)
    triton_kernel.forward(gemm("none"), chosen=wide)
    module(sys.argv[1]).forward(gemm("block"), chosen=plain)
spilled = next(launch for launch in known_bad_launches() if "row" in launch.name)
rows = [row(launch) for launch in (*(launch for launch in launches if launch.name.startswith("gemm")), spilled)]
print(json.dumps([
    [r.cta_barriers_per_step, r.exposed_cycles, r.instructions_per_step, r.ceiling_tflops, r.problems] for r in rows
]))
"""


def changed(module: ModuleType, tmp_path: Path, old: str, new: str) -> Path:
    """The source of a module of kernels with one thing changed, as a file: Triton reads the source again."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1, old
    path = tmp_path / "worse.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


@pytest.mark.lengthy
@pytest.mark.skipif(not has_gluon(), reason="Triton before 3.9 has no Gluon loops to compile")
def test_an_added_barrier_and_a_forced_spill_are_reported_and_specialization_has_no_barrier(tmp_path: Path) -> None:
    from moe_rl.kernels.gemm import triton_kernel

    loop = "            a = a_desc.load([first, start])\n"
    path = changed(triton_kernel, tmp_path, loop, f"            tl.debug_barrier()\n{loop}")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", WORSE, str(path)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    plain, special, barrier, spilled = json.loads(done.stdout)
    assert barrier[0] > plain[0]
    assert barrier[1] > plain[1] > 0
    assert any("spills" in problem for problem in spilled[4])
    assert plain[4] == special[4] == barrier[4] == []
    assert special[:2] == [0, 0], "what warp specialization is for: nothing waits for all warps"
    assert special[2] <= 60
    assert special[3] == pytest.approx(990, abs=1), "the tensor cores'"


def test_a_broken_mask_is_reported(device: str, tmp_path: Path) -> None:
    """Without the end of its group, a block of tokens takes the next group's rows for its padding."""
    path = changed(
        quantizing, tmp_path,
        "inside = is_used[:, None] & (cols < num_columns)[None, :]",
        "inside = (rows < 300 - first)[:, None] & (cols < num_columns)[None, :]",
    )  # fmt: skip
    spec = importlib.util.spec_from_file_location("moe_rl.kernels.quantization.worse", path)
    assert spec is not None
    assert spec.loader is not None
    worse = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worse)
    x = torch.randn(300, 32, generator=torch.Generator().manual_seed(0)).to(device)
    offsets = torch.tensor([0, 130, 300], dtype=torch.int32, device=device)
    want = quantize_columns(x, offsets, backend="reference")
    for module, is_right in ((quantizing, True), (worse, False)):
        codes, scale = module.quantize_columns(x, offsets, None, rounding="division")
        same = torch.equal(codes.view(torch.uint8), want[0].view(torch.uint8)) and torch.equal(scale, want[1])
        assert same == is_right
