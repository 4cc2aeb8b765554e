"""Apex's extension, which Megatron's own linears (the output layer) need under `gradient_accumulation_fusion`.

Follows what `megatron.core.tensor_parallel.layers` calls: add the weight gradient of rows to `main_grad`.
"""

import torch


def wgrad_gemm_accum_fp32(rows: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add grad^T rows."""
    main_grad.add_((grad.t() @ rows).to(main_grad.dtype))


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
