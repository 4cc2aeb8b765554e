"""Shipped kernels compile for Hopper and Blackwell without spills, on tensor cores; what is known to be bad still is.

Compiling all of them takes minutes: `make kernel-compile` runs the slow tests of this module, in CI too.

Compilation needs a process in which triton was imported without TRITON_INTERPRET, so each architecture is one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kernels.aot import box_mismatches
from moe_rl.kernels import operators
from moe_rl.kernels.devices import has_gluon


def compiled(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def verdicts(arch: int) -> dict[str, dict[str, object]]:
    lines = compiled("-m", "benchmarks.kernels.aot", "--arch", str(arch)).splitlines()
    return {verdict["name"]: verdict for verdict in map(json.loads, lines)}


@pytest.fixture(scope="module")
def hopper() -> dict[str, dict[str, object]]:
    return verdicts(90)


def problems(found: dict[str, dict[str, object]]) -> dict[str, object]:
    return {name: verdict["problems"] for name, verdict in found.items() if verdict["problems"]}


ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {operator.package.rpartition(".")[2] for operator in operators()}


@pytest.mark.slow
def test_every_launch_passes_on_hopper(hopper: dict[str, dict[str, object]]) -> None:
    shipped = {name: verdict for name, verdict in hopper.items() if not name.startswith("bad ")}
    assert problems(shipped) == {}
    assert {name.split()[0] for name in shipped} == FOLDERS
    for both in ("table", "weighted"):
        assert any(name.startswith("gemm tma 128x") and both in name for name in shipped), both
    special = [name for name in shipped if "specialized" in name]
    assert all(name.startswith("gemm gluon") for name in special), "the compiler itself specializes wrongly"
    assert len(special) >= (12 if has_gluon() else 0)


@pytest.mark.slow
@pytest.mark.skipif(not has_gluon(), reason="Triton before 3.9 has no Gluon loops to compile")
def test_the_static_proof_is_of_the_launches_that_are_shipped(hopper: dict[str, dict[str, object]]) -> None:
    """Every product has its row in the files that `make kernel-proof` left, and no row is of a launch that is gone."""
    shipped = {name for name in hopper if not name.startswith("bad ")}
    proof = json.loads((ROOT / "benchmarks" / "results" / "static" / "kernel_proof.json").read_text())
    rows = {row["name"] for row in proof["products"] + proof["elements"] if row["name"].split()[0] in FOLDERS}
    assert rows <= shipped
    assert {name for name in shipped if name.startswith("gemm ")} <= rows


@pytest.mark.slow
def test_known_bad_tiles_are_still_bad(hopper: dict[str, dict[str, object]]) -> None:
    """When this fails, the compiler has learned to hold these tiles in registers: ship them if they are faster."""
    bad = {name: verdict for name, verdict in hopper.items() if name.startswith("bad ")}
    assert len(bad) >= 3
    assert problems(bad).keys() == bad.keys()


@pytest.mark.slow
def test_a_pointer_table_costs_no_vector_loads(hopper: dict[str, dict[str, object]]) -> None:
    """The compiler knows nothing of a bare address; asynchronous copies survive only if it is told the alignment."""
    dense_of = {name: name.replace(" table", "").replace(" i64", "") for name in hopper if " table" in name}
    pairs = [(hopper[dense], hopper[name]) for name, dense in dense_of.items() if dense in hopper]
    assert len(pairs) >= 8
    for dense, table in pairs:
        for instruction in ("LDGSTS", "UTMALDG"):
            assert dense["instructions"][instruction] == table["instructions"][instruction], table["name"]  # type: ignore[index]


@pytest.mark.slow
def test_every_launch_passes_on_blackwell() -> None:
    found = verdicts(100)
    assert {name.split()[0] for name in found} == FOLDERS
    assert problems(found) == {}
    # Block-scaled products: what has none in its PTX has a problem.
    for kind, least in (("gemm tma", 8), ("gemm fp8", 4), ("gemm gluon_mx", 4 if has_gluon() else 0)):
        scaled = [found[name] for name in found if name.startswith(kind) and (" mx " in name or "_mx " in name)]
        assert len(scaled) >= least, kind
        assert all(verdict["block_scaled_in_ptx"] for verdict in scaled), kind


CHANGING_BATCHES = """
from benchmarks.operators.cases import Case
from benchmarks.operators.gemm_suites import ALL_SUITES
from benchmarks.kernels.recording import recorded
from benchmarks.kernels.launches import WIDE
for arch in (90, 100):
    with recorded(arch) as launches:
        for tokens in (30, 32, 33, 64):
            for build in ALL_SUITES.values():
                for problem in build(Case(model=WIDE, tokens=tokens), "cpu"):
                    problem.calls["triton"]()
            print(len({launch.key for launch in launches}))
"""


@pytest.mark.lengthy
def test_a_batch_of_another_size_compiles_nothing_again() -> None:
    """Triton compiles anew when an integer becomes 1 or a multiple of 16, unless it is told that this says nothing."""
    kernels = [int(count) for count in compiled("-c", CHANGING_BATCHES).split()]
    assert len(kernels) == 8
    for of_arch in (kernels[:4], kernels[4:]):
        assert of_arch[0] > 30
        assert set(of_arch) == {of_arch[0]}


MOVED_BY_ROWS = """
import torch
from moe_rl.kernels import FP8_BLOCK, GroupedExperts, prepare
from benchmarks.kernels.recording import recorded
M, H, I = 8192, 1024, 512
w1 = torch.empty(2, 2 * I, H, dtype=torch.bfloat16, requires_grad=True)
w2 = torch.empty(2, H, I, dtype=torch.bfloat16, requires_grad=True)
offsets = torch.tensor([0, M // 2, M], dtype=torch.int32)
x, y = (torch.empty(M, H, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
probs = torch.empty(M, requires_grad=True)
with recorded(90) as launches:
    matrices = [prepare(w.detach(), FP8_BLOCK) for w in (w1, w2)]
    del launches[:]
    out = GroupedExperts(recipe=FP8_BLOCK)(x, probs, *matrices, offsets, masters=(w1, w2))
    torch.autograd.grad(out, (x, probs, w1, w2), y.detach())
rows = [launch for launch in launches if not launch.name.startswith("gemm")]
print(sum(tensor.nbytes for launch in rows for tensor in launch.tensors.values()) / M)
"""


def test_all_but_the_gemms_move_8_h_and_16_i_bytes_per_row() -> None:
    """Counted over the tensors of every launch. Beside codes and values: a scale per 128 codes, the padding of a group,
    and per row the probability, its gradient and that gradient's parts."""
    of_rows = float(compiled("-c", MOVED_BY_ROWS))
    hidden, intermediate = 1024, 512
    codes = 4 * hidden + 6 * intermediate
    beside = codes * 4 / 128 + codes * 2 * 128 / 8192 + 4 * (2 + 2 + 2 * intermediate / 128) + 16
    stated = 8 * hidden + 16 * intermediate
    assert stated < of_rows <= stated + beside


def test_a_box_that_differs_from_its_buffer_is_found() -> None:
    line = (
        "ttng.async_tma_copy_global_to_local %d[%a, %b] %m, %bar, %p : "
        "!tt.tensordesc<tensor<128x128xf8E4M3FN, #shared>>, !ttg.memdesc<1xi64, #s>"
        " -> !ttg.memdesc<{}x128xf8E4M3FN, #shared, #smem, mutable>"
    )
    assert box_mismatches(line.format(128)) == ()
    assert box_mismatches(line.format("4x128")) == ()
    assert box_mismatches(line.format(64)) == ("box 128x128x into buffer 64x128x",)
    newer = line.replace("tensor<128x128xf8E4M3FN, #shared>", "128x128xf8E4M3FN, #shared")
    assert newer != line, "as Triton 3.9 writes it"
    assert box_mismatches(newer.format(128)) == ()
    assert box_mismatches(newer.format(64)) == ("box 128x128x into buffer 64x128x",)


HALVED = """
import json
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from benchmarks.kernels.aot import doubled_offsets

@triton.jit
def kernel(a_ptr, scale_ptr, w_ptr, out_ptr, num_rows, FROM_SCALAR: tl.constexpr):
    a_desc = tl.make_tensor_descriptor(a_ptr, [num_rows, 512], [512, 1], [128, 128])
    w_desc = tl.make_tensor_descriptor(w_ptr, [128, 512], [512, 1], [128, 128])
    for tile in tl.range(tl.program_id(0), num_rows // 128, tl.num_programs(0)):
        first = tile * 128
        if FROM_SCALAR:
            scale_ptrs = scale_ptr + first + tl.arange(0, 128)
        else:
            rows = first + tl.arange(0, 128)
            scale_ptrs = scale_ptr + rows
        acc = tl.zeros((128, 128), tl.float32)
        for start in tl.range(0, 512, 128, warp_specialize=True):
            product = tl.dot(a_desc.load([first, start]), w_desc.load([0, start]).T)
            acc += product * tl.load(scale_ptrs + start // 128 * num_rows)[:, None]
        at = tl.arange(0, 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
        tl.store(out_ptr + first * 128 + at, acc)

types = {"a_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "w_ptr": "*fp8e4nv", "out_ptr": "*fp32", "num_rows": "i32"}
for from_scalar in (True, False):
    source = ASTSource(kernel, {**types, "FROM_SCALAR": "constexpr"}, {"FROM_SCALAR": from_scalar})
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 3})
    print(json.dumps(["partition1(" in made.asm["ttgir"], len(doubled_offsets(made.asm["ttgir"]))]))
"""


def test_an_offset_that_the_compiler_counts_twice_is_found(tmp_path: Path) -> None:
    """The loop as all FP8 tiles had it, and as they have it now. If the second finds nothing, Triton is cured."""
    script = tmp_path / "halved.py"  # Triton reads a kernel's source from its file
    script.write_text(HALVED)
    assert [json.loads(line) for line in compiled(str(script)).splitlines()] == [[True, 0], [True, 1]]
