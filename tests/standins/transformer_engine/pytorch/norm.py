"""`LayerNorm` and `RMSNorm` (page: API documentation / PyTorch)."""

from typing import Any

import torch
import torch.nn.functional as F


class RMSNorm(torch.nn.Module):
    """Divide rows by their root mean square; `hidden_size` is the old name of `normalized_shape`."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        hidden_size: int | None = None,
    ) -> None:
        super().__init__()
        if zero_centered_gamma:
            raise NotImplementedError("zero_centered_gamma")
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(normalized_shape or hidden_size, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel  # Megatron sums such gradients over the TP ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows of the same shape."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class LayerNorm(RMSNorm):
    """Subtract the mean of rows, and divide by their standard deviation."""

    def __init__(self, normalized_shape: int | None = None, **options: Any) -> None:
        super().__init__(normalized_shape, **options)
        self.bias = torch.nn.Parameter(torch.zeros_like(self.weight))
        self.bias.sequence_parallel = self.weight.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows of the same shape."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)
