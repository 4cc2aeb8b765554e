"""Where replicas live while their micro-batch runs: plain buffers, shared by all layers of a rank.

R slots per rank for replicas from the rank's own node, C for those from other nodes; the latter exist twice, so that
one layer's weights can arrive while another's are in use. W elements in one expert. A *row* is one of the R + 2C
places, a *bank* a set of rows that one push fills: bank 0 the R rows in the node, banks 1 and 2 the two halves of C.
Replicas are never Parameters, so that DDP, optimizer and checkpoint do not see them.
"""

import itertools
from collections.abc import Collection, Sequence

import torch

from moe_rl.balancing.streams import LastUse, streams_of
from moe_rl.core.errors import require
from moe_rl.megatron.experts import Experts, home_parameters

# Bank of the replicas from the rank's own node; bank 1 + half holds those from other nodes.
IN_NODE = 0
BANKS = 3


class ReplicaBuffers:
    """[R + 2C, W] weights in the experts' dtype and [R + 2C, V] fp32 gradients of the V elements that train."""

    def __init__(self, layers: Sequence[Experts], *, replica_slots: int, cross_node_slots: int) -> None:
        sample = layers[0].parameters_of(0)
        self.shapes = [parameter.shape for parameter in sample]
        self.trained = _trained(sample)
        """Which of an expert's parameters train; of the others nothing comes home."""
        self.replica_slots, self.cross_node_slots = replica_slots, cross_node_slots
        dtypes = set()
        for experts in layers:
            for parameter in experts.parameters_of(0):
                dtypes.add(parameter.dtype)
        require(
            len(dtypes) == 1,
            f"replicas need the same dtype for all expert parameters, but the dtypes are {dtypes}.",
        )
        for experts in layers:
            shapes = [parameter.shape for parameter in experts.parameters_of(0)]
            require(
                shapes == self.shapes,
                f"replicas need experts with the same shapes in all layers, but two layers have {shapes} and "
                f"{self.shapes}.",
            )
            for parameters in home_parameters(experts):
                require(
                    _trained(parameters) == self.trained,
                    "replicas need the same frozen parameters in every expert, but the frozen parameters "
                    "differ between experts.",
                )
        self._sizes = [shape.numel() for shape in self.shapes]
        self._trained_sizes = list(itertools.compress(self._sizes, self.trained))
        self.numel, self.gradient_numel = sum(self._sizes), sum(self._trained_sizes)
        """V; 0 where experts are frozen, with LoRA the elements of the adapters."""
        self._dtype, self._device = dtypes.pop(), sample[0].device
        self.held: list[tuple[int, int] | None] = [None] * BANKS
        """Per bank the (micro-batch, layer) whose weights it holds; the same on every rank of the EP group."""
        self.streams = streams_of(self._device)
        self.last_use = LastUse(self.streams)
        """Of weights and gradients by kernels; what writes either from elsewhere waits for it."""
        self.allocate()

    def allocate(self) -> None:
        """Take the memory, and hold nobody's weights."""
        self._take(self.replica_slots + 2 * self.cross_node_slots)

    def release(self) -> None:
        """Give the memory back; `allocate` before use."""
        self._take(0)

    def _take(self, rows: int) -> None:
        self.weights = torch.zeros((rows, self.numel), dtype=self._dtype, device=self._device)
        self.gradients = torch.zeros((rows, self.gradient_numel), dtype=torch.float32, device=self._device)
        self.forget()

    @property
    def num_slots(self) -> int:
        """R + C, the replicas that a rank may hold of one layer."""
        return self.replica_slots + self.cross_node_slots

    @property
    def num_bytes(self) -> int:
        """Bytes of both buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in (self.weights, self.gradients))

    def row(self, host_slot: int, half: int) -> int:
        """Return the row of replica slot `host_slot` (0 .. R + C - 1) of a layer that uses this half."""
        if host_slot < self.replica_slots:
            return host_slot
        return host_slot + half * self.cross_node_slots

    def bank(self, host_slot: int, half: int) -> int:
        """Return the bank that this row belongs to."""
        if host_slot < self.replica_slots:
            return IN_NODE
        return 1 + half

    def forget(self) -> None:
        """Say that no bank holds anyone's weights."""
        self.held = [None] * BANKS

    def weights_of(self, row: int) -> list[torch.Tensor]:
        """Return views of the weights in `row`, one per parameter."""
        pieces = torch.split(self.weights[row], self._sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def gradients_of(self, row: int) -> list[torch.Tensor | None]:
        """Return fp32 views of the gradient in `row`, one per parameter, None for a frozen one."""
        pieces = iter(torch.split(self.gradients[row], self._trained_sizes))
        return [
            next(pieces).view(shape) if trains else None
            for shape, trains in zip(self.shapes, self.trained, strict=True)
        ]

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a view of the weight buffer."""
        return tensor.untyped_storage().data_ptr() == self.weights.untyped_storage().data_ptr()

    @property
    def message_numel(self) -> int:
        """Most fp32 elements of a gradient that travel in one message: what fits where one expert's weights were."""
        return max(1, min(self.gradient_numel, self.numel * self.weights.element_size() // torch.float32.itemsize))

    @property
    def messages(self) -> int:
        """Messages of one expert's gradient."""
        return -(-self.gradient_numel // self.message_numel)

    def staging_capacity(self, *, hosted: int, across: bool) -> int:
        """Return how many messages `staging` holds on a rank that hosts this many replicas of the layer."""
        own_slots = self.replica_slots + across * self.cross_node_slots
        rows = self.replica_slots + 2 * self.cross_node_slots  # also while the memory is given back
        return own_slots + (rows - hosted) * (self.gradient_numel // self.message_numel)

    def staging(self, hosted_rows: Collection[int], *, half: int, across: bool) -> list[torch.Tensor]:
        """Return fp32 scratch tensors of `message_numel` elements for gradients that come home.

        They lie where nothing is needed between a layer's expert backward and its end: the weights of the layer's own
        rows, those of its half only if it uses them (`across`), and the gradients of all rows that this rank does not
        host.
        """
        size, slots = self.message_numel, self.replica_slots + across * self.cross_node_slots
        weight_bytes = self.weights.view(-1).view(torch.uint8)
        row_bytes = self.numel * self.weights.element_size()
        places = []
        for slot in range(slots):
            row = self.row(slot, half)
            start = -(-row * row_bytes // torch.float32.itemsize) * torch.float32.itemsize
            places.append(weight_bytes[start : start + size * torch.float32.itemsize].view(torch.float32))
        for row in range(len(self.gradients)):
            if row not in hosted_rows:
                places += [self.gradients[row, i * size : (i + 1) * size] for i in range(self.gradient_numel // size)]
        return places


def _trained(parameters: Sequence[torch.nn.Parameter]) -> list[bool]:
    return [parameter.requires_grad for parameter in parameters]
