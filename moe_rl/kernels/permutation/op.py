"""Permute and unpermute: the contract, the checks, and the registration with torch.

    rows = build_row_map(slot_map, num_slots)
    x_rows, row_probs = permute(x, probs, rows)      # dispatch within a rank: rows in slot order
    out = unpermute(y_rows, None, rows)              # combine; row_probs already went into the experts
    out = unpermute(y_rows, probs, rows)             # combine; or the probabilities weight the sum here

T tokens, K experts per token, H hidden size, S slots, M = T * K rows of the buffers. How many of them are filled,
`m_offsets[-1]`, is known on the device only: nothing here waits for it.
"""

from dataclasses import dataclass
from typing import Any

import torch

from moe_rl.core.errors import require
from moe_rl.kernels.operands import FLOATING, require_form, unit_columns
from moe_rl.kernels.registry import Operator

BUILD_ROW_MAP = Operator(name="build_row_map", package=__package__)
PERMUTE = Operator(name="permute", package=__package__)
UNPERMUTE = Operator(name="unpermute", package=__package__)
UNPERMUTE_BACKWARD = Operator(name="unpermute_backward", package=__package__)
GATHER_ROW_VALUES = Operator(name="gather_row_values", package=__package__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMap:
    """Which row each (token, k) pair has: rows stand in slot order, within a slot in token order (stable).

    Example: slots of two tokens [[1, 0], [1, -1]] -> m_offsets [0, 1, 3], row_to_token [0, 0, 1, -1],
    token_k_to_row [[1, 0], [2, -1]].
    """

    m_offsets: torch.Tensor
    """int32 [S + 1]: slot s has rows m_offsets[s] .. m_offsets[s + 1] - 1."""
    row_to_token: torch.Tensor
    """int32 [M]: -1 from row m_offsets[-1] on."""
    token_k_to_row: torch.Tensor
    """int32 [T, K]: -1 for a pair without a row here (dropped, or of another rank)."""

    def __post_init__(self) -> None:
        for name, dims in (("m_offsets", 1), ("row_to_token", 1), ("token_k_to_row", 2)):
            value = getattr(self, name)
            require(
                value.dtype == torch.int32 and value.dim() == dims and value.is_contiguous(),
                f"{name} must be contiguous int32 with {dims} axes, got {value.dtype} {tuple(value.shape)}.",
            )
        require(
            len(self.row_to_token) == self.token_k_to_row.numel(),
            f"row_to_token must have T * K = {self.token_k_to_row.numel()} entries, got {len(self.row_to_token)}.",
        )

    @property
    def num_slots(self) -> int:
        """Slots of this rank, S."""
        return len(self.m_offsets) - 1


@BUILD_ROW_MAP.declare()
def _build_row_map(
    slot_map: torch.Tensor, num_slots: int, first_slot: int, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        slot_map.new_empty(num_slots + 1),
        slot_map.new_empty(slot_map.numel()),
        torch.empty(slot_map.shape, dtype=torch.int32, device=slot_map.device),
    )


@GATHER_ROW_VALUES.declare()
def _gather_row_values(values: torch.Tensor, token_k_to_row: torch.Tensor, backend: str) -> torch.Tensor:
    return torch.empty(token_k_to_row.shape, dtype=values.dtype, device=values.device)


def _keep_for_permute(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, probs, row_to_token, token_k_to_row, backend = inputs
    ctx.save_for_backward(row_to_token, token_k_to_row)
    ctx.has_probs, ctx.backend = probs is not None, backend


def _backward_of_permute(ctx: Any, grad_rows: torch.Tensor, grad_row_probs: torch.Tensor) -> tuple[Any, ...]:
    row_to_token, token_k_to_row = ctx.saved_tensors
    grad_x = _unpermute(unit_columns(grad_rows), None, row_to_token, token_k_to_row, ctx.backend)
    grad_probs = _gather_row_values(grad_row_probs, token_k_to_row, ctx.backend) if ctx.has_probs else None
    return grad_x, grad_probs, None, None, None


@PERMUTE.declare(keep=_keep_for_permute, backward=_backward_of_permute)
def _permute(
    x: torch.Tensor, probs: torch.Tensor | None, row_to_token: torch.Tensor, token_k_to_row: torch.Tensor, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows = row_to_token.shape[0]
    row_probs = x.new_empty(0 if probs is None else num_rows, dtype=torch.float32)
    return x.new_empty(num_rows, x.shape[1]), row_probs


@UNPERMUTE_BACKWARD.declare()
def _unpermute_backward(
    grad_out: torch.Tensor, rows: torch.Tensor, probs: torch.Tensor, row_to_token: torch.Tensor,
    token_k_to_row: torch.Tensor, backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return rows.new_empty(rows.shape), torch.empty(probs.shape, dtype=torch.float32, device=rows.device)


def _keep_for_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows, probs, row_to_token, token_k_to_row, ctx.backend = inputs
    # Without probabilities the gradient needs no rows: M x H bytes that autograd need not keep.
    ctx.save_for_backward(row_to_token, token_k_to_row, *([] if probs is None else [rows, probs]))


def _backward_of_unpermute(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
    row_to_token, token_k_to_row, *weighted = ctx.saved_tensors
    grad_out, grad_probs = unit_columns(grad_out), None
    if weighted:
        rows, probs = weighted
        grad_rows, grad_probs = _unpermute_backward(grad_out, rows, probs, row_to_token, token_k_to_row, ctx.backend)
    else:
        grad_rows, _ = _permute(grad_out, None, row_to_token, token_k_to_row, ctx.backend)
    return grad_rows, grad_probs, None, None, None


# row_to_token is for the gradient only.
@UNPERMUTE.declare(
    packed=lambda rows, probs, _, token_k_to_row: (rows, probs, token_k_to_row), keep=_keep_for_unpermute,
    backward=_backward_of_unpermute,
)  # fmt: skip
def _unpermute(
    rows: torch.Tensor, probs: torch.Tensor | None, row_to_token: torch.Tensor, token_k_to_row: torch.Tensor,
    backend: str,
) -> torch.Tensor:  # fmt: skip
    return rows.new_empty(token_k_to_row.shape[0], rows.shape[1])


def build_row_map(slot_map: torch.Tensor, num_slots: int, *, first_slot: int = 0, backend: str = "auto") -> RowMap:
    """Sort the pairs of slot_map [T, K] (int32 physical ids) by slot, stable in token order.

    A rank holds the slots first_slot .. first_slot + num_slots - 1; pairs of other slots, -1 (dropped) among them, get
    no row. Deterministic; runs on the device without a sync.
    """
    require_form("build_row_map: slot_map", slot_map, ("T", "K"), (torch.int32,))
    require(num_slots >= 1, f"build_row_map: num_slots must be at least 1, got {num_slots}.")
    require(slot_map.numel() <= 2**30, f"build_row_map: T * K must be at most 2^30, got {slot_map.numel()}.")
    m_offsets, row_to_token, token_k_to_row = _build_row_map(slot_map, num_slots, first_slot, backend)
    return RowMap(m_offsets=m_offsets, row_to_token=row_to_token, token_k_to_row=token_k_to_row)


def permute(
    x: torch.Tensor, probs: torch.Tensor | None, row_map: RowMap, *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copy tokens x [T, H] and probs [T, K] (fp32 or None) in slot order; return (rows [M, H], row_probs [M]).

    Rows from m_offsets[-1] on are zero. The gradient of a token sums its rows in the order of its top-k.
    """
    _check("permute: x", x, row_map.token_k_to_row.shape[0], probs, row_map)
    rows, row_probs = _permute(x, probs, row_map.row_to_token, row_map.token_k_to_row, backend)
    return rows, None if probs is None else row_probs


def unpermute(
    rows: torch.Tensor, probs: torch.Tensor | None, row_map: RowMap, *, backend: str = "auto"
) -> torch.Tensor:
    """Return out [T, H]: the sum of each token's rows in `rows` [M, H], weighted by probs[t, k] if given.

    Sums run in fp32 in the order k = 0, 1, ... of the router's top-k, whatever slots the experts have, and round once
    to the dtype of `rows`. Rows from m_offsets[-1] on are never read. Gradients go to `rows` and `probs`.
    """
    _check("unpermute: rows", rows, len(row_map.row_to_token), probs, row_map)
    return _unpermute(rows, probs, row_map.row_to_token, row_map.token_k_to_row, backend)


def _check(what: str, rows: torch.Tensor, num_rows: int, probs: torch.Tensor | None, row_map: RowMap) -> None:
    require_form(what, rows, (num_rows, "H"), FLOATING, beside=row_map.row_to_token, is_dense=True)
    require_form(
        f"{what.partition(':')[0]}: probs", probs, tuple(row_map.token_k_to_row.shape), (torch.float32,), beside=rows
    )
