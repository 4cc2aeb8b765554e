"""Shipped kernels compile for Hopper and Blackwell without spills, on tensor cores; what is known to be bad still is.

Compilation needs a process in which triton was imported without TRITON_INTERPRET, so each architecture is one.
"""

import json
import os
import subprocess
import sys

import pytest

from moe_rl.testing.kernels.aot import box_mismatches


def verdicts(arch: int) -> dict[str, dict[str, object]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "moe_rl.testing.kernels.aot", "--arch", str(arch)],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {verdict["name"]: verdict for verdict in found}


ROW_KERNELS = ("permute", "unpermute", "swiglu", "expert_bias", "gather_logprobs", "histogram", "sum_tiles")


@pytest.fixture(scope="module")
def hopper() -> dict[str, dict[str, object]]:
    return verdicts(90)


def problems(found: dict[str, dict[str, object]]) -> dict[str, object]:
    return {name: verdict["problems"] for name, verdict in found.items() if verdict["problems"]}


def test_every_shipped_kernel_passes_on_hopper(hopper: dict[str, dict[str, object]]) -> None:
    shipped = {name: verdict for name, verdict in hopper.items() if not name.startswith("bad-")}
    assert problems(shipped) == {}
    for kind in ("forward-none", "forward-block", "forward-row", "dgrad-none", "dgrad-block", "wgrad-none",
                 "wgrad-block", "quantize-1x128", "quantize-columns", "tile_map", *ROW_KERNELS):  # fmt: skip
        assert any(name.startswith(kind) for name in shipped), kind


def test_known_bad_tiles_are_still_bad(hopper: dict[str, dict[str, object]]) -> None:
    """When this fails, the compiler has learned to hold these tiles in registers: ship them if they are faster."""
    bad = {name: verdict for name, verdict in hopper.items() if name.startswith("bad-")}
    assert len(bad) >= 3
    assert problems(bad).keys() == bad.keys()


def test_a_pointer_table_costs_no_vector_loads(hopper: dict[str, dict[str, object]]) -> None:
    """The compiler knows nothing of a bare address; asynchronous copies survive only if it is told the alignment."""
    pairs = [(hopper[name], hopper[f"{name}-table"]) for name in hopper if f"{name}-table" in hopper]
    assert pairs
    for dense, table in pairs:
        for instruction in ("LDGSTS", "UTMALDG"):
            assert dense["instructions"][instruction] == table["instructions"][instruction], table["name"]  # type: ignore[index]


def test_forward_and_every_row_kernel_pass_on_blackwell() -> None:
    found = verdicts(100)
    for kind in ("forward-none", "forward-block", "forward-row", "tile_map", *ROW_KERNELS):
        assert any(name.startswith(kind) for name in found), kind
    assert problems(found) == {}


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
