"""The emulator's memory, barriers, TMA and tensor cores: layouts built here by loops over the ISA's tables.

And what it must refuse: races, use before arrival, barriers used wrongly, deadlock, addresses outside tensors.
"""

from typing import Any

import numpy as np
import pytest
from emulator.bare import kernel, run
from emulator.faults import Deadlock, Fault, Misuse, OutOfBounds, Race
from emulator.formats import E4M3_VALUES
from emulator.schedules import Schedule, schedules

LATE, EARLY = Schedule(name="late"), Schedule(name="early", late_copies=False, late_products=False)
BOTH = pytest.mark.parametrize("schedule", [LATE, EARLY], ids=["late", "early"])

MAKE_MAP = """
    mov.b32 %r300, global_smem; add.s32 %r301, %r300, {at}; cvt.u64.u32 %rd50, %r301;
    setp.eq.b32 %p30, %r0, 0; setp.lt.u32 %p31, %r0, 32;
    shl.b32 %r302, %r0, 2; add.s32 %r303, %r301, %r302; mov.b32 %r304, 0;
    @%p31 st.shared.b32 [%r303], %r304;
    bar.warp.sync -1;
    @%p30 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%rd50], {tensor};
    @%p30 tensormap.replace.tile.rank.shared::cta.b1024.b32 [%rd50], {rank};
    {axes}
    @%p30 tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%rd50], 0;
    @%p30 tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [%rd50], 0;
    @%p30 tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%rd50], {swizzle};
    @%p30 tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%rd50], 0;
    @%p31 tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
        [{where}], [%rd50], 0x80;
    @%p31 fence.proxy.tensormap::generic.acquire.gpu [{where}], 0x80;
    bar.sync 0;
"""


def make_map(*, tensor: str, where: str, size: list[int], box: list[int], swizzle: int = 3, at: int = 60416) -> str:
    axes, stride = [], 1
    for k, (extent, side) in enumerate(zip(size, box, strict=True)):
        replace = "@%p30 tensormap.replace.tile"
        axes.append(f"mov.b32 %r310, {side}; {replace}.box_dim.shared::cta.b1024.b32 [%rd50], {k}, %r310;")
        axes.append(f"mov.b32 %r310, {extent}; {replace}.global_dim.shared::cta.b1024.b32 [%rd50], {k}, %r310;")
        axes.append(f"mov.b32 %r310, 1; {replace}.element_stride.shared::cta.b1024.b32 [%rd50], {k}, %r310;")
        if k:
            axes.append(
                f"mov.b64 %rd51, {stride}; {replace}.global_stride.shared::cta.b1024.b64 [%rd50], {k - 1}, %rd51;"
            )
        stride *= extent
    return MAKE_MAP.format(at=at, tensor=tensor, where=where, rank=len(size) - 1, axes="\n".join(axes), swizzle=swizzle)


WAIT = """
{{
    .reg .pred complete;
waitLoop:
    mbarrier.try_wait.parity.shared.b64 complete, [{barrier}], {parity};
    @!complete bra.uni waitLoop;
}}
"""
COPY_OUT = """
    mov.b32 %r200, 0;
$L_out:
    shl.b32 %r201, %r200, 7; shl.b32 %r202, %r0, 2; add.s32 %r201, %r201, %r202;
    add.s32 %r203, %r300, %r201; ld.shared.b32 %r204, [%r203];
    cvt.u64.u32 %rd55, %r201; add.s64 %rd56, %rd1, %rd55; st.global.b32 [%rd56], %r204;
    add.s32 %r200, %r200, 1; setp.lt.u32 %p20, %r200, {rounds}; @%p20 bra $L_out;
"""


def tma_program(
    size: list[int], box: list[int], coordinates: list[int], *, wait: bool = True, expect: int | None = None,
    swizzle: int = 3,
) -> Any:  # fmt: skip
    num_bytes = int(np.prod(box))
    where = ", ".join(f"%r{100 + k}" for k in range(len(box)))
    body = make_map(tensor="%rd0", where="%rd2", size=size, box=box, swizzle=swizzle)
    body += "\n".join(f"mov.b32 %r{100 + k}, {c};" for k, c in enumerate(coordinates))
    body += f"""
    add.s32 %r10, %r300, 61440;
    @%p30 mbarrier.init.shared::cta.b64 [%r10], 1;
    bar.sync 0;
    @%p30 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], {num_bytes if expect is None else expect};
    @%p30 cp.async.bulk.tensor.{len(box)}d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r300], [%rd2, {{{where}}}], [%r10];
    """
    body += WAIT.format(barrier="%r10", parity=0) if wait else ""
    return kernel(body + COPY_OUT.format(rounds=num_bytes // 128), num_arrays=3)


def tile_in_shared(tensor: np.ndarray, box: list[int], coordinates: list[int], mode: int) -> np.ndarray:
    """Element by element: row by row, the 16-byte chunk of each 128 bytes mixed with the row within the pattern."""
    found = np.zeros(int(np.prod(box)), np.uint8)
    rows = {0: 0, 1: 1, 2: 3, 3: 7}[mode]
    for linear in range(len(found)):
        rest, index = linear, []
        for side in box:
            index.append(rest % side)
            rest //= side
        at = [i + c for i, c in zip(index, coordinates, strict=True)]
        inside = all(0 <= a < n for a, n in zip(at, tensor.shape[::-1], strict=True))
        target = linear ^ ((linear // 128 & rows) << 4)
        found[target] = tensor[tuple(at[::-1])] if inside else 0
    return found


@BOTH
@pytest.mark.parametrize(
    ("shape", "box", "coordinates", "mode"),
    [
        ((20, 256), [128, 16], [0, 0], 3),
        ((20, 256), [128, 16], [128, 9], 3),  # rows 20.. are zeros
        ((20, 256), [128, 16], [-16, -3], 3),
        ((20, 256), [64, 16], [192, 2], 2),
        ((20, 256), [32, 16], [224, 2], 1),
        ((20, 256), [64, 4], [32, 2], 0),
        ((3, 20, 128), [128, 8, 1], [0, 16, 2], 3),
        ((2, 3, 8, 128), [128, 4, 2, 1], [0, 2, 2, 1], 3),
        ((2, 2, 3, 2, 128), [128, 2, 2, 1, 1], [0, 0, 1, 1, 1], 3),
        ((512,), [256], [384], 0),
    ],
)
def test_tma_brings_tiles_of_one_to_five_axes(shape: Any, box: Any, coordinates: Any, mode: int, schedule: Any) -> None:
    tensor = np.random.default_rng(0).integers(1, 255, shape, np.uint8)
    out, scratch = np.zeros(int(np.prod(box)), np.uint8), np.zeros(64, np.uint64)
    place = scratch[-(scratch.ctypes.data // 8) % 16 :][:16]
    run(tma_program(list(shape[::-1]), box, coordinates, swizzle=mode), tensor, out, place, schedule=schedule)
    assert (out == tile_in_shared(tensor, box, coordinates, mode)).all()


def run_tma(**settings: Any) -> None:
    schedule = settings.pop("schedule", EARLY)
    tensor = np.ones((16, 128), np.uint8)
    scratch = np.zeros(64, np.uint64)
    place = scratch[-(scratch.ctypes.data // 8) % 16 :][:16]
    code = tma_program([128, 16], [128, 16], [0, 0], **settings)
    run(code, tensor, np.zeros(2048, np.uint8), place, schedule=schedule)


@BOTH
def test_reading_before_the_wait_is_a_race_even_if_the_data_is_there(schedule: Schedule) -> None:
    with pytest.raises(Race, match="TMA"):
        run_tma(wait=False, schedule=schedule)


def test_expecting_too_many_bytes_waits_for_ever_and_too_few_end_a_phase_early() -> None:
    with pytest.raises(Deadlock, match="try_wait"):
        run_tma(expect=4096)
    with pytest.raises(Fault):
        run_tma(expect=1024)


TWO_WARPS = """
    mov.b32 %r1, global_smem; shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2;
    add.s32 %r4, %r0, 7; st.shared.b32 [%r3], %r4;
    {sync}
    xor.b32 %r5, %r2, 128; add.s32 %r6, %r1, %r5; ld.shared.b32 %r7, [%r6];
    mul.wide.u32 %rd5, %r0, 4; add.s64 %rd6, %rd0, %rd5; st.global.b32 [%rd6], %r7;
"""


@pytest.mark.parametrize("schedule", schedules([], 8), ids=lambda s: s.name)
def test_warps_exchange_through_a_barrier_and_race_without(schedule: Schedule) -> None:
    out = np.zeros(64, np.uint32)
    run(kernel(TWO_WARPS.format(sync="bar.sync 0;"), num_arrays=1, threads=64), out, schedule=schedule)
    assert out.tolist() == [(n ^ 32) + 7 for n in range(64)]
    with pytest.raises(Race, match="warp"):
        run(kernel(TWO_WARPS.format(sync=""), num_arrays=1, threads=64), out, schedule=schedule)


@pytest.mark.parametrize(
    ("sync", "fault"),
    [
        ("bar.sync 1, 96;", Deadlock),
        ("bar.sync 1, 32;", Race),  # each warp meets itself alone
        ("setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 1, 64; @!%p1 bar.sync 1, 32;", Misuse),
        ("setp.lt.u32 %p1, %r0, 5; @%p1 bar.sync 1, 64;", Misuse),
        ("setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 1, 64; @!%p1 bar.sync 2, 64;", Deadlock),
    ],
)
def test_named_barriers_used_wrongly(sync: str, fault: type[Fault]) -> None:
    schedule = Schedule(name="single warps", grain=1)
    with pytest.raises(fault):
        run(kernel(TWO_WARPS.format(sync=sync), num_arrays=1, threads=64), np.zeros(64, np.uint32), schedule=schedule)


def test_who_only_arrives_goes_on_and_gives_what_it_wrote() -> None:
    body = """
    mov.b32 %r1, global_smem; setp.lt.u32 %p1, %r0, 32; shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2;
    @%p1 bra $L_first;
    bar.sync 3, 64; ld.shared.b32 %r7, [%r3+-128];
    mul.wide.u32 %rd5, %r0, 4; add.s64 %rd6, %rd0, %rd5; st.global.b32 [%rd6], %r7; bra.uni $L_end;
$L_first:
    st.shared.b32 [%r3], %r0; bar.arrive 3, 64;
$L_end:
    """
    out = np.zeros(64, np.uint32)
    run(kernel(body, num_arrays=1, threads=64), out)
    assert out[32:].tolist() == list(range(32))


MBARRIER = """
    mov.b32 %r1, global_smem; add.s32 %r2, %r1, 1024; setp.eq.b32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r2], {count}; bar.sync 0;
    setp.ge.u32 %p2, %r0, 32; shl.b32 %r3, %r0, 2; add.s32 %r4, %r1, %r3;
    @%p2 bra $L_consumer;
    st.shared.b32 [%r4], %r0; bar.warp.sync -1;
    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r2]{arrivals};
    bra.uni $L_end;
$L_consumer:
    {wait}
    ld.shared.b32 %r5, [%r4+-128];
    mul.wide.u32 %rd5, %r0, 4; add.s64 %rd6, %rd0, %rd5; st.global.b32 [%rd6], %r5;
$L_end:
"""


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"count": 2, "arrivals": ", 2"}, None),
        ({"count": 2}, Deadlock),
        ({"arrivals": ", 2"}, Misuse),
        ({"wait": ""}, Race),
        ({"wait": WAIT.format(barrier="%r2", parity=1)}, Fault),  # the phase before the first, or the next
    ],
)
@pytest.mark.parametrize("schedule", schedules([], 7), ids=lambda s: s.name)
def test_mbarriers_between_warps(changes: dict[str, Any], fault: Any, schedule: Schedule) -> None:
    text = MBARRIER.format(**{"count": 1, "arrivals": "", "wait": WAIT.format(barrier="%r2", parity=0), **changes})
    out = np.zeros(64, np.uint32)
    code = kernel(text, num_arrays=1, threads=64)
    if fault is None:
        run(code, out, schedule=schedule)
        assert out[32:].tolist() == list(range(32))
    else:
        with pytest.raises(fault):
            run(code, out, schedule=schedule)


def test_addresses_outside_tensors_and_shared_memory() -> None:
    out = np.zeros(32, np.uint32)
    with pytest.raises(OutOfBounds, match="no tensor"):
        run(kernel("add.s64 %rd5, %rd0, 65536; st.global.b32 [%rd5], %r0;", num_arrays=1), out)
    with pytest.raises(OutOfBounds, match="not at 8"):
        run(kernel("add.s64 %rd5, %rd0, 4; ld.global.v2.b32 {%r1, %r2}, [%rd5];", num_arrays=1), out)
    with pytest.raises(OutOfBounds, match="shared"):
        run(kernel("mov.b32 %r1, 900000; st.shared.b32 [%r1], %r0;", num_arrays=1), out)


def test_a_copy_by_threads_is_there_after_its_group_was_waited_for() -> None:
    body = """
    mov.b32 %r1, global_smem; shl.b32 %r2, %r0, 4; add.s32 %r3, %r1, %r2; cvt.u64.u32 %rd5, %r2;
    add.s64 %rd6, %rd0, %rd5; add.s64 %rd7, %rd1, %rd5;
    setp.lt.u32 %p1, %r0, 30; selp.b32 %r9, 16, 0, %p1;
    cp.async.cg.shared.global [%r3], [%rd6], 16, %r9; cp.async.commit_group; {wait}
    ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r3]; st.global.v4.b32 [%rd7], {{%r4, %r5, %r6, %r7}};
    """
    x, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    run(kernel(body.format(wait="cp.async.wait_group 0;"), num_arrays=2), x, out)
    assert out.tolist() == [*range(120), *[0] * 8]
    for schedule in (LATE, EARLY):
        with pytest.raises(Race):
            run(kernel(body.format(wait="cp.async.wait_group 1;"), num_arrays=2), x, out, schedule=schedule)


def k_major(matrix: np.ndarray, mode: int, stride: int) -> np.ndarray:
    """Lay a [rows, 32 B] operand out: cores of 8 rows, `stride` bytes apart, rows of the swizzle's width."""
    rows, width = matrix.shape
    pitch = {0: 16, 1: 128, 2: 64, 3: 32}[mode]
    found = np.zeros(8192, np.uint8)
    for r in range(rows):
        for b in range(width):
            if mode == 0:  # 16-byte columns lie 4,096 B apart
                linear = r // 8 * stride + r % 8 * 16 + b // 16 * 4096 + b % 16
            else:
                linear = r // 8 * stride + r % 8 * pitch + b
            mask = {0: 0, 1: 7, 2: 3, 3: 1}[mode]
            found[linear ^ ((linear >> 7 & mask) << 4)] = matrix[r, b]
    return found


PRODUCT = """
    mov.b32 %r1, global_smem; mov.b32 %r2, 0;
$L_in:
    shl.b32 %r3, %r2, 9; shl.b32 %r4, %r0, 2; add.s32 %r3, %r3, %r4; add.s32 %r5, %r1, %r3;
    cvt.u64.u32 %rd5, %r3; add.s64 %rd6, %rd0, %rd5; ld.global.b32 %r6, [%rd6]; st.shared.b32 [%r5], %r6;
    add.s32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 32; @%p1 bra $L_in;
    {fence}
    bar.sync 0;
    {zeros}
    mov.b64 %rd10, {a}; mov.b64 %rd11, {b}; mov.pred %p2, {adds};
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {{{registers}}}, %rd10, %rd11, %p2, 1, 1;
    wgmma.commit_group.sync.aligned;
    {wait}
    {store}
"""


def product_program(mode: int, stride: int, **changes: str) -> Any:
    leading = 4096 if mode == 0 else 16
    low = leading >> 4 << 16 | stride >> 4 << 32 | mode << 62
    names = [f"%r{20 + k}" for k in range(16)]
    store = "mul.wide.u32 %rd20, %r0, 64; add.s64 %rd21, %rd1, %rd20;" + "".join(
        f"st.global.b32 [%rd21+{4 * k}], {name};" for k, name in enumerate(names)
    )
    settings = {
        "fence": "fence.proxy.async.shared::cta;", "zeros": "".join(f"mov.b32 {name}, 0f3F800000;" for name in names),
        "a": f"{low}", "b": f"{low | 8192 >> 4}", "adds": "1", "registers": ", ".join(names),
        "wait": "wgmma.wait_group.sync.aligned 0;", "store": store, **changes,
    }  # fmt: skip
    return kernel(PRODUCT.format(**settings), num_arrays=2, threads=128)


@BOTH
@pytest.mark.parametrize(("mode", "stride"), [(1, 1024), (2, 512), (3, 256), (0, 128)])
def test_products_of_hopper(mode: int, stride: int, schedule: Schedule) -> None:
    """Lane 4 r + c has columns 8 j + 2 c, + 1 of rows r and r + 8 of its warp's 16, in registers 4 j .. 4 j + 3."""
    rng = np.random.default_rng(1)
    a, b = (
        rng.integers(0, 0x7F, (rows, 32), np.uint8) | rng.integers(0, 2, (rows, 32), np.uint8) << 7 for rows in (64, 32)
    )
    a, b = (np.where(x & 0x7F == 0x7F, 0, x) & 0xBF for x in (a, b))  # exponents small enough for exact sums
    if mode == 0:
        both = np.concatenate([k_major(a, 0, stride), k_major(b, 0, stride)])
    else:
        both = np.concatenate([k_major(a, mode, stride), k_major(b, mode, stride)])
    out = np.zeros((128, 16), np.float32)
    run(product_program(mode, stride), both, out, schedule=schedule)
    exact = 1 + E4M3_VALUES[a].astype(np.float64) @ E4M3_VALUES[b].astype(np.float64).T
    for thread in range(128):
        warp, r, c = thread // 32, thread % 32 // 4, thread % 4
        for k in range(16):
            row, column = 16 * warp + r + 8 * (k // 2 % 2), 8 * (k // 4) + 2 * c + k % 2
            assert out[thread, k] == np.float32(exact[row, column])


@BOTH
@pytest.mark.parametrize(
    ("changes", "fault"),
    [({"fence": ""}, Race), ({"wait": ""}, Misuse), ({"wait": "wgmma.wait_group.sync.aligned 1;"}, Misuse)],
)
def test_products_without_their_fence_or_wait(changes: dict[str, str], fault: Any, schedule: Schedule) -> None:
    both, out = np.zeros(16384, np.uint8), np.zeros((128, 16), np.float32)
    with pytest.raises(fault):
        run(product_program(1, 1024, **changes), both, out, schedule=schedule)


def test_overwriting_what_a_product_still_reads_is_a_race() -> None:
    both, out = np.zeros(16384, np.uint8), np.zeros((128, 16), np.float32)
    again = "st.shared.b32 [%r1], 1; wgmma.wait_group.sync.aligned 0;"
    for schedule in (LATE, EARLY):
        with pytest.raises(Race, match="overwritten"):
            run(product_program(1, 1024, wait=f"setp.eq.b32 %p9, %r0, 0; @%p9 {again}"), both, out, schedule=schedule)


CLUSTER = """
    mov.b32 %r1, global_smem; mov.u32 %r2, %cluster_ctarank; xor.b32 %r3, %r2, 1;
    shl.b32 %r4, %r0, 2; add.s32 %r5, %r1, %r4; add.s32 %r6, %r0, 100; mad.lo.s32 %r6, %r2, 1000, %r6;
    mapa.shared::cluster.u32 %r7, %r5, %r3;
    {begin}
    st.shared::cluster.b32 [%r7], %r6;
    {middle}
    ld.shared.b32 %r8, [%r5];
    mov.u32 %r9, %ctaid.x; mad.lo.s32 %r9, %r9, 32, %r0; mul.wide.u32 %rd5, %r9, 4; add.s64 %rd6, %rd0, %rd5;
    st.global.b32 [%rd6], %r8;
"""
MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


PAIR = ".reqntid 32 .reqnctapercluster 2"


@pytest.mark.parametrize("schedule", schedules([PAIR], 8), ids=lambda s: s.name)
def test_ctas_of_a_cluster_write_to_each_other(schedule: Schedule) -> None:
    out = np.zeros(128, np.uint32)
    run(kernel(CLUSTER.format(begin=MEET, middle=MEET), num_arrays=1, cluster=2), out, schedule=schedule, grid=2)
    one = [*range(1100, 1132), *range(100, 132)]
    assert out.tolist() == one + one
    with pytest.raises(Fault):
        run(kernel(CLUSTER.format(begin=MEET, middle=""), num_arrays=1, cluster=2), out, schedule=schedule, grid=1)


MULTICAST = """
    add.s32 %r10, %r300, 61440; mov.u32 %r11, %cluster_ctarank;
    @%p30 mbarrier.init.shared::cta.b64 [%r10], 1;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @%p30 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], {expected};
    setp.eq.b32 %p1, %r11, 0; and.pred %p1, %p1, %p30; mov.b32 %r100, 0; mov.b32 %r101, 0; mov.b16 %rs1, {mask};
    @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r300], [%rd2, {{%r100, %r101}}], [%r10], %rs1;
"""


@pytest.mark.parametrize("schedule", schedules([PAIR], 10), ids=lambda s: s.name)
def test_multicast_arrives_in_every_cta_of_its_mask(schedule: Schedule) -> None:
    tensor = np.random.default_rng(2).integers(0, 255, (16, 128), np.uint8)
    scratch = np.zeros(64, np.uint64)
    place = scratch[-(scratch.ctypes.data // 8) % 16 :][:16]

    def program(mask: int) -> Any:
        body = make_map(tensor="%rd0", where="%rd2", size=[128, 16], box=[128, 16])
        body += MULTICAST.format(expected=2048, mask=mask) + WAIT.format(barrier="%r10", parity=0)
        body += "mov.u32 %r210, %ctaid.x; mul.wide.u32 %rd30, %r210, 2048; add.s64 %rd1, %rd1, %rd30;"
        return kernel(body + COPY_OUT.format(rounds=16) + MEET, num_arrays=3, cluster=2)

    out = np.zeros((2, 2048), np.uint8)
    run(program(3), tensor, out, place, schedule=schedule)
    assert (out == tile_in_shared(tensor, [128, 16], [0, 0], 3)).all()
    with pytest.raises(Fault):
        run(program(1), tensor, out, place, schedule=schedule)


def overwritten(between: str) -> None:
    """TMA brings a tile, every thread loads of it, and TMA brings another one to the same place."""
    program = make_map(tensor="%rd0", where="%rd2", size=[128, 16], box=[128, 16])
    again = """
        @%p30 mbarrier.arrive.expect_tx.shared.b64 _, [%r321], 2048;
        @%p30 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
            [%r320], [%rd2, {%r330, %r330}], [%r321];
    """
    program += f"""
        mov.b32 %r300, global_smem; add.s32 %r320, %r300, 0; add.s32 %r321, %r300, 32768; mov.b32 %r330, 0;
        @%p30 mbarrier.init.shared.b64 [%r321], 1;
        bar.sync 0;
        {again} {WAIT.format(barrier="%r321", parity=0)}
        shl.b32 %r331, %r0, 4; add.s32 %r332, %r320, %r331; ld.shared.b32 %r333, [%r332];
        bar.sync 0;
        {between}
        {again} {WAIT.format(barrier="%r321", parity=1)}
    """
    scratch = np.zeros(64, np.uint64)
    place = scratch[-(scratch.ctypes.data // 8) % 16 :][:16]
    run(
        kernel(program, num_arrays=3, threads=64),
        np.ones((16, 128), np.uint8),
        np.zeros(1, np.uint8),
        place,
        schedule=LATE,
    )


def test_what_threads_have_loaded_tma_overwrites_behind_a_fence_of_proxies_alone() -> None:
    overwritten("fence.proxy.async.shared::cta;")
    with pytest.raises(Race, match="TMA overwrites what threads have loaded"):
        overwritten("")
