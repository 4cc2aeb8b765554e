"""Router log-probabilities in plain torch: slow, obviously right, on any device."""

import torch
from torch.nn.functional import logsigmoid


def gather_logprobs(logits: torch.Tensor, expert_ids: torch.Tensor, score_function: str) -> torch.Tensor:
    """Return [T, K] log-probabilities of expert_ids [T, K] under logits [T, E], at least fp32; 0 for ids outside E."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if score_function != "softmax":
        scores = logsigmoid(scores)
    if score_function != "sigmoid":
        scores = scores - scores.logsumexp(dim=1, keepdim=True)
    ids = expert_ids.to(torch.int64)
    is_expert = (ids >= 0) & (ids < logits.shape[1])
    logprobs = scores.gather(1, ids.where(is_expert, 0))
    return torch.where(is_expert, logprobs, torch.zeros_like(logprobs))


def gather_logprobs_backward(
    grad_out: torch.Tensor, logits: torch.Tensor, expert_ids: torch.Tensor, score_function: str
) -> torch.Tensor:
    """Return the gradient [T, E] of `gather_logprobs` in the dtype of logits.

    With one-hot sums c[e] = sum over k of grad_out[k] [id_k = e] and G their sum: c - p G for softmax, c sigmoid(-x)
    for sigmoid, (c - p G) sigmoid(-x) for sigmoid-normalized, where p is the probability of e.
    """
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ids = expert_ids.to(torch.int64)
    is_expert = (ids >= 0) & (ids < logits.shape[1])
    zero = torch.zeros((), dtype=values.dtype, device=ids.device)
    grad_values = torch.where(is_expert, grad_out.to(values.dtype), zero)
    grad = torch.zeros_like(values).scatter_add(1, ids.where(is_expert, 0), grad_values)
    if score_function != "sigmoid":
        scores = values if score_function == "softmax" else logsigmoid(values)
        grad = grad - torch.softmax(scores, dim=1) * grad_values.sum(1, keepdim=True)
    if score_function != "softmax":
        grad = grad * torch.sigmoid(-values)
    return grad.to(logits.dtype)
