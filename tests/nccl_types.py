"""Refuse, over gloo, the tensor types that NCCL refuses: gloo moves bytes of any type, so no other test sees them."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

NCCL_TYPES = frozenset(
    {
        torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    }
)  # fmt: skip
"""Those that ProcessGroupNCCL of torch 2.13 has an NCCL type for; of 16 bits these are the floats alone."""
CALLS = (
    "send", "recv", "recv_anysource", "broadcast", "reduce", "gather", "scatter", "alltoall",
    "allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "reduce_scatter",
    "_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced", "alltoall_base", "all_to_all_single",
)  # fmt: skip
"""What torch.distributed calls on a process group, with the names of torch 2.11 and 2.13."""
_host_groups: set[str] = set()
"""Names of the groups that a run with NCCL has over gloo, too."""


def require_nccl_types(tensors: Iterable[torch.Tensor]) -> None:
    """Raise the TypeError that an NCCL process group raises unless it takes all these tensors."""
    for tensor in tensors:
        if tensor.dtype not in NCCL_TYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")


def tensors_in(arguments: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists and tuples."""
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, list | tuple):
        for argument in arguments:
            yield from tensors_in(argument)


def install() -> None:
    """Let every group of this process, but those that are made for gloo by name, refuse what NCCL refuses."""
    for name in CALLS:
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _checked(getattr(dist.ProcessGroup, name)))
    new_group = dist.new_group

    @functools.wraps(new_group)
    def noted(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        group = new_group(*args, backend=backend, **kwargs)
        if backend == "gloo" and isinstance(group, dist.ProcessGroup):
            _host_groups.add(group.group_name)
        return group

    dist.new_group = noted


def _checked(call: Callable[..., Any]) -> Callable[..., Any]:
    def checked(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if group.group_name not in _host_groups:
            require_nccl_types(tensors_in([*args, *kwargs.values()]))
        return call(group, *args, **kwargs)

    return checked
