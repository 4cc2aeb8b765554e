"""Carried machine code: which launch it serves, that it is of these kernels, and that it gives the reference's bits."""

import ctypes
import inspect
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from emulator.libcuda import INVALID_IMAGE, EmulatedCuda

from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels import carried
from moe_rl.kernels.carried import (
    MACHINE_CODE,
    Archive,
    carried_for,
    digest_of_kernels,
    launch_key,
    sources_digest,
    text_digest,
)
from moe_rl.kernels.carried_driver import HOPPER, CudaError, Driver, launch_config, packed
from moe_rl.kernels.gemm.proven import record_path

ROOT = Path(__file__).resolve().parents[2]
PATH = MACHINE_CODE / "sm_90a.zip"
MOST_BYTES = 4 * 2**20


def archive() -> Archive:
    found = carried_for(HOPPER)
    assert found is not None, "kernels have changed: `make gpu-pack` compiles them anew"
    return found


def test_what_is_carried_is_of_these_kernels_and_small() -> None:
    found = archive()
    assert PATH.stat().st_size <= MOST_BYTES
    assert {len(codes) for codes in found.codes_of_tiles.values()} <= {4, 8, 20}
    assert sorted(name.partition(" gluon")[0] for name in found.codes_of_tiles) == [
        "dgrad none", "forward block", "forward none", "wgrad block"
    ]  # fmt: skip
    for kernel in found.kernels.values():
        assert text_digest(found.cubin(kernel)) == kernel.code
        assert f".reqntid {kernel.threads}" in found.ptx(kernel)
        # And scratch memory, and a profiler's. Two kernels of one code may differ in what they are handed.
        taken = found.ptx(kernel).partition(".entry")[2].partition(")")[0].count(".param ")
        assert taken == len(kernel.parameters) + 2, kernel.name
        assert "/" not in found.ptx(kernel).partition(".entry")[2].partition("{")[0], "a path of whoever compiled it"


def test_an_archive_is_read_as_it_was_written_and_the_same_bytes_again(tmp_path: Path) -> None:
    archive().write(tmp_path / "a.zip")
    assert (tmp_path / "a.zip").read_bytes() == PATH.read_bytes()
    assert Archive.read(tmp_path / "a.zip") == archive()
    (tmp_path / "a.zip").write_bytes(b"no zip")
    with pytest.raises(InvalidInputError, match="not a readable file of precompiled kernels"):
        Archive.read(tmp_path / "a.zip")


def test_code_of_other_kernels_is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried, "sources_digest", lambda: "others")
    carried_for.cache_clear()
    assert carried_for(HOPPER) is None
    carried_for.cache_clear()
    assert carried_for((8, 0)) is None


KERNEL = '''
"""A module."""
_SIDE = tl.constexpr(128)

@triton.jit
def kernel(x):
    """Say something."""
    return x + {more}  # because

def host():
    return {host}
'''


def test_what_is_compiled_counts_and_what_is_said_of_it_does_not() -> None:
    before = digest_of_kernels(KERNEL.format(more=1, host=2))
    same = KERNEL.format(more=1, host=3).replace("Say something.", "Say more.").replace("# because", "# for")
    assert digest_of_kernels(same) == before
    assert digest_of_kernels(KERNEL.format(more=2, host=2)) != before
    assert digest_of_kernels(KERNEL.format(more=1, host=2).replace("128", "64")) != before
    assert digest_of_kernels("import triton.jit\n") == ""
    assert sources_digest() == archive().sources


def elf(*sections: tuple[str, bytes]) -> bytes:
    """An ELF file of sections, as far as a digest looks."""
    names = b"\0.shstrtab\0" + b"".join(name.encode() + b"\0" for name, _ in sections)
    every = [(".shstrtab", names), *sections]
    body, entries = b"\0" * 64, []
    for name, content in every:
        entries.append((names.index(name.encode() + b"\0"), len(body), len(content)))
        body += content
    table = b"".join(struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, offset, size, 0, 0, 1, 0) for at, offset, size in entries)
    head = bytearray(body)
    struct.pack_into("<Q", head, 40, len(body))
    struct.pack_into("<HHH", head, 58, 64, len(every), 0)
    return bytes(head) + table


def test_a_digest_is_of_instructions_and_not_of_names() -> None:
    code = elf((".text.kernel", b"instructions"), (".nv.info", b"1"))
    assert text_digest(elf((".text.renamed", b"instructions"), (".nv.info", b"2"))) == text_digest(code)
    assert text_digest(elf((".text.kernel", b"Instructions"), (".nv.info", b"1"))) != text_digest(code)
    with pytest.raises(InvalidInputError, match="no machine code"):
        text_digest(elf((".nv.info", b"1")))


def kernel_of(*parameters: SimpleNamespace) -> SimpleNamespace:
    """A kernel as Triton describes it: parameters, and a function with a signature."""
    names = [inspect.Parameter(p.name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in parameters]

    def function() -> None:
        pass

    function.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    return SimpleNamespace(fn=function, params=list(parameters))


def parameter(name: str, *, constant: bool = False, plain: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, is_constexpr=constant, do_not_specialize=plain, do_not_specialize_on_alignment=False
    )


def test_a_key_tells_apart_what_the_compiler_does() -> None:
    kernel = kernel_of(
        parameter("x_ptr"), parameter("rows"), parameter("groups", plain=True), parameter("SIDE", constant=True)
    )
    x = torch.empty(64, dtype=torch.bfloat16)

    def key(x: torch.Tensor = x, rows: int = 32, groups: int = 8, side: int = 128, warps: int = 4) -> str:
        return launch_key(kernel, (x, rows, groups), {"SIDE": side, "num_warps": warps})[0]

    assert key(rows=48, groups=1) == key() == key(groups=16)
    others = [
        key(x.float()), key(x[1:]), key(rows=33), key(rows=1), key(rows=2**31), key(side=64), key(warps=8)
    ]  # fmt: skip
    assert len({key(), *others}) == 1 + len(others)


def test_arguments_are_packed_as_kernels_take_them() -> None:
    x = torch.empty(1)
    kinds = {type(packed(value)) for value in (7, -7)}
    assert kinds == {ctypes.c_int32}
    assert (packed(x).value, packed(2**31).value, packed(1.5).value) == (x.data_ptr(), 2**31, 1.5)
    kernel = next(kernel for kernel in archive().kernels.values() if kernel.num_ctas == 2)
    config = launch_config(kernel, (3, 1, 1), 77)
    assert (tuple(config.grid), tuple(config.block), config.stream) == ((6, 1, 1), (kernel.threads, 1, 1), 77)
    assert tuple(config.attributes[0].value[:3]) == (2, 1, 1)
    assert launch_config(replace(kernel, num_ctas=1), (3, 1, 1), 0).num_attributes == 0


def test_a_call_that_fails_is_named() -> None:
    driver = Driver(EmulatedCuda(archive()))
    module = ctypes.c_void_p()
    with pytest.raises(CudaError, match="cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE"):
        driver.call("cuModuleLoadData", ctypes.byref(module), elf((".text.other", b"")))
    assert INVALID_IMAGE == 200


@pytest.mark.lengthy
def test_six_carried_launches_have_the_reference_s_bits_on_the_emulator() -> None:
    environment = {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-m", "emulator.carried", "--quick", "--processes", "1"], capture_output=True, text=True,
        env=environment, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 of 6 checks right" in done.stdout


def test_records_lie_in_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_RL_PROVEN_TILES", raising=False)
    from moe_rl.kernels.gemm.proven import Chip

    assert record_path(Chip(capability=(9, 0), num_sms=132)) == MACHINE_CODE / "proven-sm_90-132.json"


MEMBAR, FENCE, NAMED, DESCRIPTOR = range(4)


@pytest.mark.lengthy
def test_loops_wait_nowhere_but_where_they_must() -> None:
    """Of each form of each specialized loop, in its machine code: what no roof counts."""
    from benchmarks.kernels.aot import SPILL_OF_A_TILE, bundled
    from benchmarks.kernels.roofs import SPILL_WORDS
    from benchmarks.kernels.sass import disassemble, waits_of

    found = archive()
    special = {kernel.code: kernel for kernel in found.kernels.values() if kernel.tiles}
    chosen = {kernel.tiles[0] + str(" table " in kernel.name): kernel for kernel in special.values()}
    assert len(chosen) == 8
    for kernel in chosen.values():
        program = disassemble(found.cubin(kernel), bundled("nvdisasm"))
        step, loader = program.main_loop(), program.loading_loop()
        assert step is not None
        assert loader is not None
        in_step, in_loader = waits_of(step.body), waits_of(loader.body)
        assert (in_step[MEMBAR], in_step[FENCE], in_step[DESCRIPTOR]) == (0, 0, 0), kernel.name
        assert in_step[NAMED] <= 1, kernel.name
        # Threads load the scales of weight gradients from what TMA overwrites: there one fence stays.
        most = 1 if kernel.tiles[0].startswith("wgrad") else 0
        assert max(in_loader[MEMBAR], in_loader[FENCE]) <= most, kernel.name
        of_tile = waits_of(program.of_loaded_tile(loader))
        assert of_tile[DESCRIPTOR] == 0 or " table " in kernel.name, kernel.name
        is_crowded = re.match(SPILL_OF_A_TILE, kernel.name)
        assert is_crowded or sum(program.words[word] for word in SPILL_WORDS) == 0, kernel.name
        assert not any(word in str(line) for line in step.body for word in SPILL_WORDS), kernel.name


def test_what_is_taken_out_of_a_loop() -> None:
    from benchmarks.kernels.lean_ptx import lean

    meeting = [
        "bar.sync \t0, 128;", "// begin", "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];", "add.s32 %r2, %r1, 8;",
        "bar.sync \t0, 128;", "@%p1 mbarrier.arrive.shared::cluster.b64 _, [%r2];",
    ]  # fmt: skip
    text = [".visible .entry _gluon_kernel(", "fence.proxy.async.shared::cta;", "wgmma.fence.sync.aligned;", *meeting,
            "fence.proxy.async.shared::cta;", "cp.async.bulk.tensor.2d"]  # fmt: skip
    kept = [line for line in lean("\n".join(text)).splitlines() if not line.startswith("//")]
    assert kept == [line for at, line in enumerate(text) if at not in (1, 4, 7, 9)]
    assert len(lean("\n".join(text)).splitlines()) == len(text), "lines keep their numbers"
    wgrad = lean("\n".join(text).replace("_gluon_kernel", "_gluon_wgrad_kernel")).splitlines()
    assert wgrad[9] == text[9], "scales are loaded by threads: the loading warp keeps its fence"
    between = [*meeting[:3], "st.shared.b32 [%r9], %r8;", *meeting[3:]]
    assert lean("\n".join(between)).splitlines() == between, "something is written between the two"


def test_the_promise_is_the_simulator_s_own() -> None:
    """`python -m benchmarks.gpu.rank_loads --predict` refreshes it, from the rows in the file."""
    import numpy as np

    from benchmarks.gpu.rank_loads import RankLoads, layer_params, predictions

    loads = RankLoads.read()
    rows = {name: [np.array(cell) for cell in cells] for name, cells in loads.rows.items()}
    assert len({np.sum(cell) for cell in rows["static"]}) == 1, "every layer has as many rows"
    for kind, params in layer_params(len(rows["static"][0])).items():
        for name, cells in predictions(rows, params).items():
            np.testing.assert_allclose(cells, loads.predicted_s[kind][name], rtol=1e-9)
