"""Router log-probabilities at chosen experts: the contract, the checks, and the registration with torch."""

from typing import Any

import torch

from moe_rl.core.errors import require, require_known
from moe_rl.kernels.operands import FLOATING, require_form
from moe_rl.kernels.registry import Operator

ID_DTYPES = (torch.int32, torch.int64, torch.int16, torch.uint8)
SCORE_FUNCTIONS = ("softmax", "sigmoid", "sigmoid-normalized")
MAX_EXPERTS = 4096

GATHER_LOGPROBS = Operator(name="gather_logprobs", package=__package__)
GATHER_LOGPROBS_BACKWARD = Operator(name="gather_logprobs_backward", package=__package__)


@GATHER_LOGPROBS_BACKWARD.declare()
def _gather_logprobs_backward(
    grad_out: torch.Tensor, logits: torch.Tensor, expert_ids: torch.Tensor, score_function: str, backend: str
) -> torch.Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits, expert_ids, ctx.score_function, ctx.backend = inputs
    ctx.save_for_backward(logits, expert_ids)


def _backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
    logits, expert_ids = ctx.saved_tensors
    grad = _gather_logprobs_backward(grad_out, logits, expert_ids, ctx.score_function, ctx.backend)
    return grad, None, None, None


@GATHER_LOGPROBS.declare(keep=_keep, backward=_backward)
def _gather_logprobs(logits: torch.Tensor, expert_ids: torch.Tensor, score_function: str, backend: str) -> torch.Tensor:
    return torch.empty(expert_ids.shape, dtype=torch.float32, device=logits.device)


def gather_logprobs(
    logits: torch.Tensor, expert_ids: torch.Tensor, *, score_function: str = "softmax", backend: str = "auto"
) -> torch.Tensor:
    """Return fp32 [T, K]: log-probability of expert_ids [T, K] under router logits [T, E]. Gradients flow to logits.

    `softmax`: log softmax over all E. `sigmoid`: log sigmoid of the expert's own logit. `sigmoid-normalized`: that
    score divided by its sum over all E. Ids outside 0 .. E - 1 (-1: no route) give 0 and no gradient. fp32 inside, and
    a token's values depend on its own logits only. The same definitions as `moe_rl.importance.router_shift`.
    """
    require_known(score_function, SCORE_FUNCTIONS, f"gather_logprobs: unknown score_function {score_function!r}.")
    require_form("gather_logprobs: logits", logits, ("T", "E"), FLOATING, is_dense=True)
    require_form("gather_logprobs: expert_ids", expert_ids, (logits.shape[0], "K"), ID_DTYPES, beside=logits)
    require(
        1 <= logits.shape[1] <= MAX_EXPERTS,
        f"gather_logprobs: E must be between 1 and {MAX_EXPERTS}, got {logits.shape[1]}.",
    )
    return _gather_logprobs(logits, expert_ids, score_function, backend)
