"""`FusedAdam` of the page "pytorch.html" (optimizers), and the multi-tensor functions that Megatron imports beside it.

State that is scaled tensor by tensor (float16, FP8) is left out.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay; moments and master of a parameter in `state`, `step` in its group.

    A bf16 parameter holds the upper half of its fp32 master, rounded; `store_param_remainders` keeps the lower half as
    int16. 1 + 2^-8 + 2^-9 is 0x3F80C000: bf16 rounds it up to 0x3F81, the remainder is 0xC000, negative as int16, which
    says that the upper half is one less.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        capturable: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        if not (adam_w_mode and bias_correction and master_weight_dtype == torch.float32) or capturable:
            raise NotImplementedError("adam_w_mode=False, bias_correction=False, float16 masters, capturable=True")
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights

    def initialize_state(self, param: torch.Tensor) -> None:
        """Give a parameter zero moments, and the master that it stands for."""
        state = self.state[param]
        state.update({name: torch.zeros_like(param, dtype=dtype) for name, dtype in self.dtypes.items()})
        if self.master_weights:
            remainders = self.store_param_remainders and param.dtype == torch.bfloat16
            state["master_param"] = (
                torch.zeros_like(param, dtype=torch.int16) if remainders else param.detach().clone().float()
            )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Change the parameters that have gradients."""
        for group, param, grad in self._with_gradients():
            if not self.state[param]:
                self.initialize_state(param)
            state, (beta1, beta2), step = self.state[param], group["betas"], group["step"]
            average, square = state["exp_avg"].float(), state["exp_avg_sq"].float()
            average.lerp_(grad.float(), 1 - beta1)
            square.mul_(beta2).addcmul_(grad.float(), grad.float(), value=1 - beta2)
            master = self._master(param)
            master.mul_(1 - group["lr"] * group["weight_decay"])
            root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
            master.addcdiv_(average, root, value=-group["lr"] / (1 - beta1**step))
            state["exp_avg"].copy_(average)
            state["exp_avg_sq"].copy_(square)
            self._set_master(param, master)

    def _with_gradients(self) -> Iterator[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
                if grad is not None:
                    yield group, param, grad

    def _master(self, param: torch.Tensor) -> torch.Tensor:
        kept = self.state[param].get("master_param")
        if kept is None:
            return param.detach().float()
        if kept.dtype != torch.int16:
            return kept.clone()
        upper = param.detach().view(torch.int16).to(torch.int32) - (kept < 0).to(torch.int32)
        return ((upper << 16) | (kept.to(torch.int32) & 0xFFFF)).view(torch.float32)

    def _set_master(self, param: torch.Tensor, master: torch.Tensor) -> None:
        kept = self.state[param].get("master_param")
        if kept is None or kept.dtype != torch.int16:
            param.copy_(master)
            if kept is not None:
                kept.copy_(master)
            return
        bits = master.view(torch.int32)
        kept.copy_(((bits & 0xFFFF) ^ 0x8000) - 0x8000)
        upper = (bits >> 16) + (kept < 0).to(torch.int32)
        param.view(torch.int16).copy_(upper)


FusedSGD = torch.optim.SGD


def multi_tensor_applier(op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
    """Apply `op` to lists of tensors."""
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_l2norm(chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Any], per_tensor: bool) -> Any:
    """Return the norm of all tensors together."""
    if per_tensor:
        raise NotImplementedError("per_tensor")
    norms = [torch.linalg.vector_norm(each.float()) for each in tensor_lists[0]]
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def multi_tensor_scale(chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Any], scale: Any) -> None:
    """Scale the first list into the second."""
    for source, target in zip(tensor_lists[0], tensor_lists[1], strict=True):
        target.copy_(source * scale)
