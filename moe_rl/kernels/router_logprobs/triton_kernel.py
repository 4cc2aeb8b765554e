"""Triton kernels of router log-probabilities: logits are read once, nothing of size [T, E] is written forward."""

import torch
import triton
import triton.language as tl

# Logits per program: 2 per thread. With 4 or 8 the gradient spills on sm_100a, for numbers of experts that differ
# between releases of Triton.
ELEMENTS, NUM_WARPS = 512, 8

SOFTMAX, SIGMOID = tl.constexpr("softmax"), tl.constexpr("sigmoid")


@triton.jit
def _log_sigmoid(x):
    # Neither exponential nor product overflows, whatever the sign of x.
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _log_sum_exp(scores):
    """Return [T]: log of the sum of exp over each row; -inf entries count nothing."""
    largest = tl.max(scores, axis=1)
    return largest + tl.log(tl.sum(tl.exp(scores - largest[:, None]), axis=1))


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_logprobs_kernel(
    logits_ptr, ids_ptr, out_ptr, num_tokens, num_experts, stride_logits, stride_ids_token, stride_ids_k,
    TOP_K: tl.constexpr, SCORE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """out[t, k] = score of ids[t, k], less the log-sum of all scores where they are normalized."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    experts = tl.arange(0, EXPERTS)
    in_tokens = tokens < num_tokens
    if SCORE != SIGMOID:
        inside = in_tokens[:, None] & (experts < num_experts)[None, :]
        x = tl.load(logits_ptr + tokens[:, None] * stride_logits + experts[None, :], mask=inside, other=0.0)
        scores = x.to(tl.float32)
        if SCORE != SOFTMAX:
            scores = _log_sigmoid(scores)
        total = _log_sum_exp(tl.where((experts < num_experts)[None, :], scores, float("-inf")))
    for k in range(0, TOP_K):
        expert = tl.load(ids_ptr + tokens * stride_ids_token + k * stride_ids_k, mask=in_tokens, other=0).to(tl.int64)
        is_known = in_tokens & (expert >= 0) & (expert < num_experts)
        chosen = tl.load(logits_ptr + tokens * stride_logits + expert, mask=is_known, other=0.0).to(tl.float32)
        if SCORE != SOFTMAX:
            chosen = _log_sigmoid(chosen)
        if SCORE != SIGMOID:
            chosen -= total
        tl.store(out_ptr + tokens * TOP_K + k, tl.where(is_known, chosen, 0.0), mask=in_tokens)


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_logprobs_backward_kernel(
    grad_out_ptr, logits_ptr, ids_ptr, grad_ptr, num_tokens, num_experts, stride_logits, stride_ids_token, stride_ids_k,
    TOP_K: tl.constexpr, SCORE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Write whole rows of the gradient; see `reference.gather_logprobs_backward` for the formula."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    experts = tl.arange(0, EXPERTS)
    in_tokens = tokens < num_tokens
    inside = in_tokens[:, None] & (experts < num_experts)[None, :]
    x = tl.load(logits_ptr + tokens[:, None] * stride_logits + experts[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)

    grad = tl.zeros((TOKENS, EXPERTS), tl.float32)
    grad_sum = tl.zeros((TOKENS,), tl.float32)
    for k in range(0, TOP_K):
        expert = tl.load(ids_ptr + tokens * stride_ids_token + k * stride_ids_k, mask=in_tokens, other=0).to(tl.int64)
        is_known = in_tokens & (expert >= 0) & (expert < num_experts)
        grad_k = tl.load(grad_out_ptr + tokens * TOP_K + k, mask=is_known, other=0.0)
        grad += tl.where(expert.to(tl.int32)[:, None] == experts[None, :], grad_k[:, None], 0.0)
        grad_sum += grad_k
    if SCORE != SIGMOID:
        scores = x
        if SCORE != SOFTMAX:
            scores = _log_sigmoid(x)
        scores = tl.where((experts < num_experts)[None, :], scores, float("-inf"))
        grad -= tl.exp(scores - _log_sum_exp(scores)[:, None]) * grad_sum[:, None]
    if SCORE != SOFTMAX:
        grad *= tl.exp(_log_sigmoid(-x))
    at = tokens[:, None] * num_experts + experts[None, :]
    tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=inside)


def tile_of(num_experts: int) -> dict[str, int]:
    """Return a tile that holds whole rows of logits, so that a token's bits depend on nothing else."""
    padded = max(16, triton.next_power_of_2(num_experts))
    return {"TOKENS": max(1, ELEMENTS // padded), "EXPERTS": padded, "num_warps": NUM_WARPS}


def gather_logprobs(logits: torch.Tensor, expert_ids: torch.Tensor, score_function: str) -> torch.Tensor:
    """Launch the forward kernel; see `reference.gather_logprobs`."""
    num_tokens, num_experts = logits.shape
    out = torch.empty(expert_ids.shape, dtype=torch.float32, device=logits.device)
    if out.numel():
        tile = tile_of(num_experts)
        _gather_logprobs_kernel[(triton.cdiv(num_tokens, tile["TOKENS"]),)](
            logits, expert_ids, out, num_tokens, num_experts, logits.stride(0), *expert_ids.stride(),
            TOP_K=expert_ids.shape[1], SCORE=score_function, **tile,
        )  # fmt: skip
    return out


def gather_logprobs_backward(
    grad_out: torch.Tensor, logits: torch.Tensor, expert_ids: torch.Tensor, score_function: str
) -> torch.Tensor:
    """Launch the backward kernel; see `reference.gather_logprobs_backward`."""
    num_tokens, num_experts = logits.shape
    grad = torch.empty((num_tokens, num_experts), dtype=logits.dtype, device=logits.device)
    if grad.numel():
        tile = tile_of(num_experts)
        _gather_logprobs_backward_kernel[(triton.cdiv(num_tokens, tile["TOKENS"]),)](
            grad_out.contiguous(), logits, expert_ids, grad, num_tokens, num_experts, logits.stride(0),
            *expert_ids.stride(), TOP_K=expert_ids.shape[1], SCORE=score_function, **tile,
        )  # fmt: skip
    return grad
