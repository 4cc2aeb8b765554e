"""Permute and unpermute in plain torch: slow, obviously right, on any device.

Sums over a token's top-k run in the order k = 0, 1, ..., each product and each sum rounded on its own, so that the
kernels can be compared bit for bit.
"""

import torch


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type sums are kept in: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def build_row_map(
    slot_map: torch.Tensor, num_slots: int, first_slot: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (m_offsets [S + 1], row_to_token [T * K], token_k_to_row [T, K]), int32; see `RowMap`."""
    num_tokens, top_k = slot_map.shape
    slot = slot_map.reshape(-1).to(torch.int64) - first_slot
    slot = torch.where((slot >= 0) & (slot < num_slots), slot, num_slots)
    pair_of_row = torch.argsort(slot, stable=True)
    sizes = torch.bincount(slot, minlength=num_slots + 1)
    m_offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:num_slots]]).to(torch.int32)

    row = torch.empty_like(pair_of_row)
    row[pair_of_row] = torch.arange(len(slot), device=slot.device)
    token_k_to_row = torch.where(slot < num_slots, row, -1).to(torch.int32)
    row_to_token = torch.where(slot[pair_of_row] < num_slots, pair_of_row // max(1, top_k), -1).to(torch.int32)
    return m_offsets, row_to_token, token_k_to_row.view(num_tokens, top_k)


def permute(
    x: torch.Tensor, probs: torch.Tensor | None, row_to_token: torch.Tensor, token_k_to_row: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows [M, H], row_probs [M] or [0]): rows[r] = x[row_to_token[r]], zero where that is -1."""
    has_token = row_to_token >= 0
    if x.shape[0] == 0:
        rows = x.new_zeros((len(row_to_token), x.shape[1]))
    else:
        rows = x[row_to_token.clamp_min(0)] * has_token[:, None]
        rows = torch.where(has_token[:, None], rows, torch.zeros_like(rows))
    if probs is None:
        return rows, x.new_zeros(0, dtype=torch.float32)
    has_row = (token_k_to_row >= 0).reshape(-1)
    row_probs = probs.new_zeros(len(row_to_token))
    pairs = torch.nonzero(has_row)[:, 0]
    return rows, row_probs.index_copy(0, token_k_to_row.reshape(-1)[pairs].to(torch.int64), probs.reshape(-1)[pairs])


def unpermute(rows: torch.Tensor, probs: torch.Tensor | None, token_k_to_row: torch.Tensor) -> torch.Tensor:
    """Return out [T, H]: the sum over k of probs[t, k] * rows[token_k_to_row[t, k]], skipping -1."""
    num_tokens, top_k = token_k_to_row.shape
    out = rows.new_zeros((num_tokens, rows.shape[1]), dtype=working_dtype(rows.dtype))
    if rows.shape[0] == 0:
        return out.to(rows.dtype)
    for k in range(top_k):
        row = token_k_to_row[:, k]
        term = rows[row.clamp_min(0)].to(out.dtype)
        if probs is not None:
            term = term * probs[:, k, None].to(out.dtype)
        out = out + torch.where((row >= 0)[:, None], term, torch.zeros_like(term))
    return out.to(rows.dtype)


def unpermute_backward(
    grad_out: torch.Tensor,
    rows: torch.Tensor,
    probs: torch.Tensor,
    row_to_token: torch.Tensor,
    token_k_to_row: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (grad_rows [M, H], grad_probs [T, K] of fp32) of `unpermute` with probabilities."""
    grad_tokens, row_probs = permute(grad_out, probs, row_to_token, token_k_to_row)
    working = working_dtype(rows.dtype)
    grad_rows = (grad_tokens.to(working) * row_probs[:, None].to(working)).to(rows.dtype)
    dots = torch.where(row_to_token >= 0, (grad_tokens.to(working) * rows.to(working)).sum(1), 0.0)
    return grad_rows, gather_row_values(dots, token_k_to_row)


def gather_row_values(values: torch.Tensor, token_k_to_row: torch.Tensor) -> torch.Tensor:
    """Return [T, K]: the value of each pair's row, 0 for pairs without row."""
    if values.shape[0] == 0:
        return values.new_zeros(token_k_to_row.shape)
    row_values = values[token_k_to_row.clamp_min(0)]
    return torch.where(token_k_to_row >= 0, row_values, torch.zeros_like(row_values))
