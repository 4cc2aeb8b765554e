"""Where replicas live while their micro-batch runs: plain buffers, shared by all layers of a rank.

R replica slots per rank; W elements in one expert. Replicas are never Parameters, so that DDP, optimizer and checkpoint
do not see them.
"""

from collections.abc import Hashable, Sequence

import torch

from moe_rl.core.errors import require
from moe_rl.megatron.experts import Experts


class ReplicaBuffers:
    """[R, W] weights in the experts' dtype and [R, W] fp32 gradients: R x (one expert + its fp32 gradient) bytes."""

    def __init__(self, layers: Sequence[Experts], *, num_slots: int) -> None:
        first = layers[0].parameters_of(0)
        self.shapes = [parameter.shape for parameter in first]
        self.num_slots = num_slots
        dtypes = {p.dtype for experts in layers for p in experts.parameters_of(0)}
        require(len(dtypes) == 1, f"the experts hold parameters of several dtypes ({dtypes}): replicas need one.")
        for experts in layers:
            shapes = [parameter.shape for parameter in experts.parameters_of(0)]
            require(shapes == self.shapes, f"experts differ in shape between layers: {shapes} and {self.shapes}.")
        self.numel = sum(shape.numel() for shape in self.shapes)
        self.weights = torch.zeros((num_slots, self.numel), dtype=dtypes.pop(), device=first[0].device)
        self.gradients = torch.zeros((num_slots, self.numel), dtype=torch.float32, device=first[0].device)
        self.held: Hashable | None = None
        """Whose weights the buffers hold; the same on every rank of the EP group."""

    @property
    def num_bytes(self) -> int:
        """Bytes of both buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in (self.weights, self.gradients))

    def weights_of(self, slot: int) -> list[torch.Tensor]:
        """Return views of replica slot `slot`, one per parameter."""
        return self._views(self.weights[slot])

    def gradients_of(self, slot: int) -> list[torch.Tensor]:
        """Return fp32 views of the gradient of replica slot `slot`, one per parameter."""
        return self._views(self.gradients[slot])

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pieces = torch.split(flat, [shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def staging(self) -> torch.Tensor:
        """Return the weight buffer as fp32 scratch: after an expert backward its weights are not needed any more."""
        elements = self.weights.numel() * self.weights.element_size() // torch.float32.itemsize
        flat = self.weights.view(-1).view(torch.uint8)
        return flat[: elements * torch.float32.itemsize].view(torch.float32)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a view of the weight buffer."""
        return tensor.untyped_storage().data_ptr() == self.weights.untyped_storage().data_ptr()
