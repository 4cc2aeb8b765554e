"""Named ranges around the backward of a layer's parts: they open when the gradient of a part's results arrives and
close when that of its inputs is complete.

Made of hooks on tensors, set only while ranges are on: the graph has no node for them, and off they cost one read.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from moe_rl.profiling import ranges


class BackwardRanges:
    """What is open of one layer: at most one range, since the parts follow each other in backward too."""

    def __init__(self) -> None:
        self._open: AbstractContextManager[None] | None = None
        self._owner: object | None = None

    def mark(
        self,
        category: str,
        inputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        *,
        layer: int,
        micro_batch: int,
    ) -> None:
        """Mark the backward that leads from the gradients of `results` to those of `inputs`."""
        if not (ranges.is_enabled() and torch.is_grad_enabled()):
            return
        owner = object()
        num_open = sum(tensor.requires_grad for tensor in inputs)

        def enter(_: torch.Tensor) -> None:
            if self._owner is not owner:
                self._close()
                self._open = ranges.range(category, layer=layer, micro_batch=micro_batch, phase="backward")
                self._open.__enter__()
                self._owner = owner

        def leave(_: torch.Tensor) -> None:
            nonlocal num_open
            num_open -= 1
            if not num_open and self._owner is owner:
                self._close()

        for tensors, hook in ((results, enter), (inputs, leave)):
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(hook)

    def _close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = self._owner = None
