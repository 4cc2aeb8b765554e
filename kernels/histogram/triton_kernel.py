"""Triton kernel of the expert histogram. Integer atomics: any order gives the same counts."""

import torch
import triton
import triton.language as tl

from moe_rl.kernels.permutation.triton_kernel import PAIRS_PER_BLOCK, RANK_WARPS, rank_in_block


@triton.jit(do_not_specialize=["num_pairs"])
def _expert_histogram_kernel(
    ids_ptr, valid_ptr, bins_ptr, counts_ptr, num_pairs, stride_token, stride_k, top_k, num_experts, num_bins,
    HAS_VALID: tl.constexpr, HAS_BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b: count BLOCK pairs among themselves, then add each key's total once.

    The last pair of a key in the block adds for all of them: when every token chooses one expert, a block adds once.
    """
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = (pair // top_k).to(tl.int64)
    expert = tl.load(ids_ptr + token * stride_token + (pair % top_k) * stride_k, mask=pair < num_pairs, other=0)
    expert = expert.to(tl.int64)
    is_counted = (pair < num_pairs) & (expert >= 0) & (expert < num_experts)
    if HAS_VALID:
        is_counted &= tl.load(valid_ptr + token, mask=pair < num_pairs, other=0) != 0
    key = tl.where(is_counted, expert, 0).to(tl.int32)
    if HAS_BINS:
        bin_of_token = tl.load(bins_ptr + token, mask=pair < num_pairs, other=-1)
        is_counted &= (bin_of_token >= 0) & (bin_of_token < num_bins)
        key += bin_of_token * num_experts
    earlier, is_last = rank_in_block(key, is_counted, BLOCK)
    tl.atomic_add(counts_ptr + key, earlier + 1, mask=is_counted & is_last, sem="relaxed")


def expert_histogram(
    expert_ids: torch.Tensor, num_experts: int, valid: torch.Tensor | None, bins: torch.Tensor | None, num_bins: int
) -> torch.Tensor:
    """Launch the histogram; see `reference.expert_histogram`."""
    counts = torch.zeros((num_bins, num_experts), dtype=torch.int32, device=expert_ids.device)
    if expert_ids.numel():
        _expert_histogram_kernel[(triton.cdiv(expert_ids.numel(), PAIRS_PER_BLOCK),)](
            expert_ids, None if valid is None else valid.contiguous().view(torch.uint8),
            None if bins is None else bins.contiguous(), counts, expert_ids.numel(), *expert_ids.stride(),
            expert_ids.shape[1], num_experts, num_bins,
            HAS_VALID=valid is not None, HAS_BINS=bins is not None, BLOCK=PAIRS_PER_BLOCK, num_warps=RANK_WARPS,
        )  # fmt: skip
    return counts
