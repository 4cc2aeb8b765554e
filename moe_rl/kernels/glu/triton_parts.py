"""Parts that the activation kernels share: the rows of a tile, the layout of gates and ups, the arithmetic."""

import torch
import triton
import triton.language as tl

from moe_rl.kernels.quantization.triton_words import of_word, reciprocal, widened, word_of
from moe_rl.kernels.tiles.triton_kernel import in_runs


def known(m_offsets: torch.Tensor | None) -> torch.Tensor:
    """Return offsets that `op.py` asks for, with a bias and for codes along tokens."""
    assert m_offsets is not None, "op.py asks for m_offsets"
    return m_offsets


@triton.jit
def tile_rows(
    tile, tile_map_ptr, used_ptr, num_rows, num_slots,
    MAPPED: tl.constexpr, COUNTED: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Return (slot, first row, rows from there, in_tile, is_used): which rows to write, which of them hold values.

    Mapped tiles come from a tile map whose last group (num_slots) is the unused tail; entries beyond it are empty.
    Example: m_offsets = [0, 3, 5], 6 rows, ROWS = 2, two slots. Entry (0, 2, 3, 1) gives first = 2, rows [0, 1],
    in_tile [1, 0]; entry (2, 5, 6, 0) is the tail: first = 5, in_tile [1, 0] (zeros are written), is_used [0, 0]
    (nothing is read). Pointers move to the first row, and rows are counted from there in 32 bits: every address of a
    row takes half of the instructions.
    """
    if MAPPED:
        slot = tl.load(tile_map_ptr + tile * 4)
        first = tl.load(tile_map_ptr + tile * 4 + 1)
        end = tl.load(tile_map_ptr + tile * 4 + 2)
        end = tl.where(slot < 0, first, end)
        used_end = tl.where(slot < num_slots, end, first)
    else:
        slot = tile * 0
        first = tile * ROWS
        end = first * 0 + num_rows
        used_end = end
        if COUNTED:
            used_end = tl.load(used_ptr)
    rows = in_runs(ROWS, RUN)
    in_tile = rows < end - first
    return slot, first.to(tl.int64), rows, in_tile, in_tile & (rows < used_end - first)


@triton.jit
def load_pair(
    ptr, rows, is_used, stride_row, start, width, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Return fp32 (gate, up) of columns start .. start + COLS - 1; zero outside."""
    if INTERLEAVED == "words" and ptr.dtype.element_ty == tl.bfloat16:
        # Gate and up lie side by side: one load of 32 bits, gate in the lower half (0x3F80_4000 is gate 2, up 1). The
        # upper 16 bits of an fp32 are its bf16, so a shift and a mask are exact conversions. Splitting a tile of 16-bit
        # values instead goes through shared memory.
        cols = start + tl.arange(0, COLS)
        inside = is_used[:, None] & (cols < width)[None, :]
        words = ptr.to(tl.pointer_type(tl.int32)) + rows[:, None] * (stride_row // 2) + cols[None, :]
        word = tl.load(words, mask=inside, other=0)
        gate, up = of_word(word)
    elif INTERLEAVED != "no":
        cols = 2 * start + tl.arange(0, 2 * COLS)
        inside = is_used[:, None] & (cols < 2 * width)[None, :]
        pair = tl.load(ptr + rows[:, None] * stride_row + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(pair, (ROWS, COLS, 2)))
    else:
        cols = start + tl.arange(0, COLS)
        inside = is_used[:, None] & (cols < width)[None, :]
        at = rows[:, None] * stride_row + cols[None, :]
        gate = widened(tl.load(ptr + at, mask=inside, other=0.0))
        up = widened(tl.load(ptr + at + width, mask=inside, other=0.0))
    return gate, up


@triton.jit
def store_pair(ptr, gate, up, rows, in_tile, stride_row, start, width, INTERLEAVED: tl.constexpr, COLS: tl.constexpr):
    """Store (gate, up) of columns start .. start + COLS - 1 in the layout of `load_pair`."""
    if INTERLEAVED == "words" and ptr.dtype.element_ty == tl.bfloat16:
        cols = start + tl.arange(0, COLS)
        inside = in_tile[:, None] & (cols < width)[None, :]
        words = ptr.to(tl.pointer_type(tl.int32)) + rows[:, None] * (stride_row // 2) + cols[None, :]
        tl.store(words, word_of(gate, up), mask=inside)
    elif INTERLEAVED != "no":
        cols = 2 * start + tl.arange(0, 2 * COLS)
        inside = in_tile[:, None] & (cols < 2 * width)[None, :]
        pair = tl.interleave(gate, up).to(ptr.dtype.element_ty)
        tl.store(ptr + rows[:, None] * stride_row + cols[None, :], pair, mask=inside)
    else:
        cols = start + tl.arange(0, COLS)
        inside = in_tile[:, None] & (cols < width)[None, :]
        at = rows[:, None] * stride_row + cols[None, :]
        tl.store(ptr + at, gate.to(ptr.dtype.element_ty), mask=inside)
        tl.store(ptr + at + width, up.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def bias_of(bias_ptr, slot, is_used, start, width, up_shift, INTERLEAVED: tl.constexpr, COLS: tl.constexpr):
    """Return (1 for rows that are used, biases of gate and of up + up_shift), one row of which serves a tile.

    A tile without used rows loads none, and rows that are not used keep 0: a fused multiply-add costs no more than a
    sum.
    """
    one_row = slot.to(tl.int64) + tl.zeros((1,), tl.int64)
    has_slot = tl.max(is_used.to(tl.int32), axis=0) + tl.zeros((1,), tl.int32) > 0
    gate_bias, up_bias = load_pair(bias_ptr, one_row, has_slot, 2 * width, start, width, INTERLEAVED, 1, COLS)
    return tl.where(is_used, 1.0, 0.0)[:, None], gate_bias, up_bias + up_shift


@triton.jit
def load_shifted(
    h_ptr, bias_ptr, slot, rows, is_used, stride_row, start, width, up_shift,
    HAS_BIAS: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Return fp32 (gate, up + up_shift), with their biases; the latter may be 0 in rows that are not used."""
    gate, shifted = load_pair(h_ptr, rows, is_used, stride_row, start, width, INTERLEAVED, ROWS, COLS)
    if HAS_BIAS:
        is_one, gate_bias, up_bias = bias_of(bias_ptr, slot, is_used, start, width, up_shift, INTERLEAVED, COLS)
        gate += is_one * gate_bias
        shifted += is_one * up_bias
    else:
        shifted += up_shift
    return gate, shifted


@triton.jit
def numbers(ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_SHIFT: tl.constexpr):
    """Return them in fp32, known to the compiler: gpt-oss's take no registers, and those of SwiGLU nothing at all."""
    return tl.full((1, 1), ALPHA, tl.float32), tl.full((1, 1), LIMIT, tl.float32), tl.full((1, 1), UP_SHIFT, tl.float32)


@triton.jit
def sigmoid_of(gate, alpha):
    """Return the sigmoid of alpha gate."""
    # One product instead of the three of exp(-(alpha gate)), with as many roundings. Where the exponential overflows,
    # 1 / inf is the 0 that it should be: no case to tell apart.
    return reciprocal(1.0 + tl.exp2(gate * (alpha * -1.4426950408889634)))


@triton.jit
def clamped(gate, shifted, limit, up_shift, CLAMP: tl.constexpr):
    """Return gate at most limit, and shifted = up + up_shift with an up of at most that magnitude."""
    if CLAMP:
        # Said of NaN because min and max would drop it.
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        shifted = tl.minimum(shifted, up_shift + limit, propagate_nan=tl.PropagateNan.ALL)
        shifted = tl.maximum(shifted, up_shift - limit, propagate_nan=tl.PropagateNan.ALL)
    return gate, shifted


@triton.jit
def gradients_of(gate, shifted, grad, prob, alpha):
    """Return fp32 (grad_gate, grad_up, act, dots): act without its probability, dots = act * grad."""
    sigmoid = sigmoid_of(gate, alpha)
    gated = gate * sigmoid
    act = gated * shifted
    dots = grad * act
    grad *= prob
    return grad * shifted * (sigmoid + alpha * (gated - sigmoid * gated)), grad * gated, act, dots


@triton.jit
def clamped_gradients_of(raw_gate, raw_shifted, grad, prob, alpha, limit, up_shift):
    """Return `gradients_of` what `clamped` makes of both, 0 for what it changes."""
    gate, shifted = clamped(raw_gate, raw_shifted, limit, up_shift, True)
    grad_gate, grad_up, act, dots = gradients_of(gate, shifted, grad, prob, alpha)
    return tl.where(raw_gate > limit, 0.0, grad_gate), tl.where(raw_shifted != shifted, 0.0, grad_up), act, dots
