"""A specialized loop as this project's once was, which Triton 3.6.0 to 3.9.0 compile to wrong code; and its cure.

The compiler halves a tile between two warpgroups and moves `first`, a coordinate of TMA, by 64 rows for the second.
Where `first` is also the start of a range of rows, these move twice: rows 64 .. 127 take the scales of rows 64 further
down.
"""

import json
import sys

import torch
import triton
import triton.language as tl

from emulator.faults import Fault
from emulator.launch import emulated
from emulator.schedules import Schedule


@triton.jit
def scaled_product(a_ptr, scale_ptr, w_ptr, out_ptr, num_rows, num_sum, IS_CURED: tl.constexpr):
    a_desc = tl.make_tensor_descriptor(a_ptr, [num_rows, num_sum], [num_sum, 1], [128, 128])
    w_desc = tl.make_tensor_descriptor(w_ptr, [128, num_sum], [num_sum, 1], [128, 128])
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, 128), tl.num_programs(0)):
        first = tile * 128
        rows = tl.arange(0, 128)
        if IS_CURED:
            scales = scale_ptr + first.to(tl.int64) + tl.minimum(rows, num_rows - 1 - first)
        else:
            scales = scale_ptr + tl.minimum(first + rows, num_rows - 1)
        acc = tl.zeros((128, 128), tl.float32)
        for start in tl.range(0, num_sum, 128, warp_specialize=True):
            a = a_desc.load([first, start])
            w = w_desc.load([0, start])
            scale = tl.load(scales + start // 128 * num_rows)
            acc += tl.dot(a, w.T) * scale[:, None]
        out_ptrs = out_ptr + first.to(tl.int64) * 128 + rows[:, None] * 128 + rows[None, :]
        tl.store(out_ptrs, acc, mask=(rows < num_rows - first)[:, None])


def wrong_rows(*, is_cured: bool, schedule: Schedule) -> list[int]:
    """Return the rows that the kernel computes wrongly."""
    generator = torch.Generator().manual_seed(0)
    a, w = (torch.randint(-4, 5, (n, 384), generator=generator).float() for n in (200, 128))
    scale = 2.0 ** torch.randint(0, 4, (3, 200), generator=generator)
    out = torch.zeros(200, 128)
    codes = [x.to(torch.float8_e4m3fn) for x in (a, w)]
    triton.set_allocator(lambda size, _align, _stream: torch.empty(size, dtype=torch.int8))
    with emulated(90, schedule):
        scaled_product[(2,)](codes[0], scale, codes[1], out, 200, 384, IS_CURED=is_cured, num_warps=4, num_stages=3)
    parts = [(a[:, k : k + 128] @ w[:, k : k + 128].T) * scale[k // 128][:, None] for k in (0, 128, 256)]
    return (out != sum(parts)).any(1).nonzero().flatten().tolist()  # type: ignore[union-attr]  # not 0: three parts


if __name__ == "__main__":
    found = {}
    for cured in (False, True):
        try:
            found[str(cured)] = wrong_rows(is_cured=cured, schedule=Schedule(name="late"))
        except Fault as fault:
            found[str(cured)] = [str(fault)]  # type: ignore[list-item]
    sys.stdout.write(json.dumps(found))
