"""Recomputation and the tracker of random states (page: API documentation / PyTorch, `checkpoint`)."""

import contextlib
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint


class CudaRNGStatesTracker:
    """Base of Megatron's tracker for CUDA graphs and inference, neither of which runs here."""

    def reset(self) -> None:
        """Nothing is tracked."""


def checkpoint(
    function: Any,
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Any = None,
    tp_group: Any = None,
    **kwargs: Any,
) -> Any:
    """Recompute `function` in backward; its random numbers are torch's own, as all are on a CPU."""
    if distribute_saved_activations:
        raise NotImplementedError("distribute_saved_activations")
    return torch_checkpoint(function, *args, use_reentrant=True, **kwargs)


def set_tensor_model_parallel_attributes(tensor: torch.Tensor, *, dim: int) -> None:
    """Set what TransformerEngine sets on weights, and Megatron's gradient norm and checkpoints read."""
    tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = True, dim, 1


class activation_recompute_forward(contextlib.AbstractContextManager):
    """Around a recomputed forward: only delayed scaling keeps state for it."""

    def __init__(self, **_: Any) -> None: ...

    def __exit__(self, *_: Any) -> None: ...
