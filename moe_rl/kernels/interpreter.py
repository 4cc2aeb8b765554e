"""Make Triton's interpreter compute bf16 and fp8 as Hopper does, so that kernels can be proved on a CPU.

The interpreter of Triton 3.6 to 3.9 keeps bf16 as raw 16-bit patterns: sums and dots act on the patterns, casts to bf16
truncate, casts to fp8 round ties away from zero, lose carries and do not saturate. `install` replaces the few functions
that kernels meet; tests compare every one of their casts with torch over all bit patterns. Reported upstream:
triton-lang/triton#8322, #11897, #11667. When the unpatched interpreter passes those tests, delete this module.

What stays wrong: `tl.sum`, `tl.fma`, unary minus and cumsum *on bf16 tensors*, and int -> bf16 casts. The kernels here
do not need them: they widen to fp32 right after every load and narrow only at the store.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from numpy.typing import NDArray

Array = NDArray[Any]

FP8_MAX = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
_TORCH_TYPE = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
_ORIGINAL: dict[str, Any] = {}


def cast_bits(bits: Array, source: str, target: str) -> Array:
    """Return the bit patterns of `bits` after a cast between two of Triton's float types, in the shape given.

    Rounds to nearest even. Narrowing to fp8 saturates finite values and infinities at the largest finite code, as PTX
    `cvt.rn.satfinite` does; NaN stays NaN.
    """
    from_type, to_type = _TORCH_TYPE[source], _TORCH_TYPE[target]
    # As bytes, since numpy has neither bf16 nor fp8; a copy, since the interpreter's arrays may be read-only.
    values = torch.from_numpy(np.array(bits).reshape(-1).view(np.uint8)).view(from_type)
    if target in FP8_MAX and to_type.itemsize < from_type.itemsize:
        values = values.to(torch.float32).clamp(-FP8_MAX[target], FP8_MAX[target])
    elif source in FP8_MAX and target in FP8_MAX:
        values = values.to(torch.float32)
    cast = values.to(to_type).view(torch.uint8).numpy().view(f"u{to_type.itemsize}")
    return cast.reshape(np.shape(bits))


def _convert_float(input: Array, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Array:
    toward_zero = rounding_mode is not None and rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ
    if toward_zero or str(input_dtype) not in _TORCH_TYPE or str(output_dtype) not in _TORCH_TYPE:
        original: Array = _ORIGINAL["_convert_float"](input, input_dtype, output_dtype, rounding_mode)
        return original
    return cast_bits(input, str(input_dtype), str(output_dtype))


def _as_float32(handle: Any) -> Any:
    """Return the handle's values as an fp32 handle; bf16 and fp8 are stored as bit patterns, the rest as floats."""
    name = str(handle.dtype.scalar)
    if name in ("bf16", *FP8_MAX):
        return interpreter.TensorHandle(cast_bits(handle.data, name, "fp32").view(np.float32), tl.float32)
    return interpreter.TensorHandle(handle.data.astype(np.float32), tl.float32)


def _binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    if lhs.dtype.scalar != tl.bfloat16 or rhs.dtype.scalar != tl.bfloat16:
        return _ORIGINAL["binary_op"](self, lhs, rhs, op)
    result = _ORIGINAL["binary_op"](self, _as_float32(lhs), _as_float32(rhs), op)
    if result.data.dtype != np.float32:
        return result
    return interpreter.TensorHandle(cast_bits(result.data, "fp32", "bf16"), tl.bfloat16)


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    # fp16 products are exact in fp32 too, and numpy multiplies fp16 matrices twenty times slower.
    narrow = {"bf16", *FP8_MAX} | ({"fp16"} if d.data.dtype == np.float32 else set())
    a, b = (_as_float32(x) if str(x.dtype.scalar) in narrow else x for x in (a, b))
    return _ORIGINAL["create_dot"](self, a, b, d, input_precision, max_num_imprecise_acc)


def _bool_mask(mask: Any) -> Any:
    # Triton 3.9 builds `block & scalar` masks as integers and then refuses them.
    # Descriptor loads pass a bare array of bools.
    if mask is None or isinstance(mask, np.ndarray) or mask.data.dtype == np.bool_:
        return mask
    return interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)


def _create_masked_load(self: Any, ptrs: Any, mask: Any, *arguments: Any, **named: Any) -> Any:
    return _ORIGINAL["create_masked_load"](self, ptrs, _bool_mask(mask), *arguments, **named)


def _create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *arguments: Any, **named: Any) -> Any:
    return _ORIGINAL["create_masked_store"](self, ptrs, value, _bool_mask(mask), *arguments, **named)


def _create_exp2(self: Any, arg: Any) -> Any:
    # A GPU overflows to infinity and says nothing.
    with np.errstate(over="ignore"):
        return _ORIGINAL["create_exp2"](self, arg)


def _create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    # The product of two fp32 is exact in fp64, so the sum is rounded once more there and once here: fused, but for
    # sums that fp64 rounds onto the middle of two fp32.
    if x.data.dtype != np.float32:
        return _ORIGINAL["create_fma"](self, x, y, z)
    with np.errstate(over="ignore", invalid="ignore"):
        total = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(total.astype(np.float32), x.dtype)


_BUILDER_METHODS = {
    "create_exp2": _create_exp2,
    "create_fma": _create_fma,
    "binary_op": _binary_op,
    "create_dot": _create_dot,
    "create_masked_load": _create_masked_load,
    "create_masked_store": _create_masked_store,
}


def install() -> None:
    """Patch the interpreter of this process; a second call changes nothing."""
    if _ORIGINAL:
        return
    _ORIGINAL["_convert_float"], interpreter._convert_float = interpreter._convert_float, _convert_float
    for name, method in _BUILDER_METHODS.items():
        _ORIGINAL[name] = getattr(interpreter.InterpreterBuilder, name)
        setattr(interpreter.InterpreterBuilder, name, method)
