"""The class of quantized parameters; no parameter here is one."""

import torch


class QuantizedTensor(torch.Tensor):
    """Megatron asks `isinstance(parameter, QuantizedTensor)` in DDP, the optimizer and checkpoints."""
