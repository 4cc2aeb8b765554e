"""A kernel backend: log-probabilities of the routed experts through torch's `log_softmax`."""

import torch

from moe_rl.kernels.registry import BackendUnavailableError, KernelBackend


def gather_logprobs(logits: torch.Tensor, expert_ids: torch.Tensor, score_function: str) -> torch.Tensor:
    """Return [T, K]: what `moe_rl.kernels.router_logprobs.reference` computes, for softmax scores."""
    if score_function != "softmax":
        raise BackendUnavailableError(f"backend 'log-softmax' has softmax scores alone, not {score_function}.")
    ids = expert_ids.to(torch.int64)
    known = (ids >= 0) & (ids < logits.shape[1])
    chosen = logits.float().log_softmax(dim=1).gather(1, ids.where(known, 0))
    return chosen.where(known, 0.0)


BACKEND = KernelBackend(
    name="log-softmax",
    summary="log-probabilities of routed experts by torch's log_softmax",
    operators=("gather_logprobs",),
    devices=("cuda", "cpu"),
    load=lambda operator: gather_logprobs,
)
