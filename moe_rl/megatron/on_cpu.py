"""Run real megatron-core on CPU over gloo, so that its MoE layers, DDP and optimizer can be tested without a GPU.

Written for megatron-core 0.16.1. Nothing is emulated: the only changes are where Megatron names a CUDA device, stream,
generator or tensor type although the operation itself has a CPU form. Everything is undone on exit.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_all_gather = dist.all_gather


class _Event:
    """A CUDA event that has always happened: CPU work is done when the call returns."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, stream: object = None) -> Self:
        return self

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 0.0


class _Stream:
    """A CUDA stream. All are equal, because the dispatcher takes its side-stream path where two streams differ."""

    device = CPU

    def __init__(self, *_: object, **__: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = object.__hash__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: object = None) -> _Event:
        return _Event()


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites a literal `device="cuda"` in calls of torch functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": CPU}
        return func(*args, **kwargs)


def _uneven_all_gather(parts: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, **more: Any) -> Any:
    """all_gather of parts of different lengths, as NCCL does it: under expert tensor parallelism."""
    if len({len(part) for part in parts}) == 1:
        return _all_gather(parts, tensor, group=group, **more)
    for rank, part in enumerate(parts):
        if rank == dist.get_rank(group):
            part.copy_(tensor)
        dist.broadcast(part, group=group, group_src=rank)
    return None


def _uneven_reduce_scatter(output: torch.Tensor, parts: list[torch.Tensor], group: Any = None) -> None:
    """reduce_scatter of a list, which gloo lacks."""
    for rank, part in enumerate(parts):
        total = part.clone()
        dist.reduce(total, group=group, group_dst=rank)
        if rank == dist.get_rank(group):
            output.copy_(total)


@contextlib.contextmanager
def cpu_megatron() -> Iterator[None]:
    """Let megatron-core run on CPU inside the context.

    Enter it before `initialize_model_parallel` and keep it open over construction, training and checkpointing. The
    device rewrite holds for the entering thread only. Compilation is off inside: `torch.compile` would take seconds.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, value in [*_torch_patches(), *_megatron_patches()]:
            stack.enter_context(patch.object(owner, name, value, create=True))
        stack.enter_context(patch.object(torch._dynamo.config, "disable", True))
        stack.enter_context(_CudaMeansCpu())
        yield


def _torch_patches() -> list[tuple[Any, str, Any]]:
    cuda, stream = torch.cuda, _Stream()
    tensor_type = torch.Tensor.type

    def cuda_type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The distributed optimizer knows only the torch.cuda.*Tensor names.
        result = tensor_type(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return [
        (torch.distributed, "all_gather", _uneven_all_gather),
        (torch.distributed, "reduce_scatter", _uneven_reduce_scatter),
        (cuda, "current_device", lambda: CPU),
        (cuda, "synchronize", lambda *_: None),
        (cuda, "Stream", _Stream),
        (cuda, "Event", _Event),
        (cuda, "current_stream", lambda *_: stream),
        (cuda, "default_stream", lambda *_: stream),
        (cuda, "stream", lambda _: contextlib.nullcontext()),
        (cuda, "get_rng_state", lambda *_: torch.get_rng_state()),
        (cuda, "set_rng_state", lambda state, *_: torch.set_rng_state(state)),
        (cuda, "manual_seed", torch.manual_seed),
        (cuda.nvtx, "range_push", lambda *_: None),
        (cuda.nvtx, "range_pop", lambda: None),
        (cuda.nvtx, "range", lambda *_, **__: contextlib.nullcontext()),
        (torch.Tensor, "record_stream", lambda *_: None),
        (torch.Tensor, "cuda", lambda self, *_, **__: self),
        (torch.Tensor, "type", cuda_type_name),
    ]


def _megatron_patches() -> list[tuple[Any, str, Any]]:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    to_cpu = token_dispatcher.maybe_move_tensor_to_cpu

    def splits_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # Megatron converts the all-to-all splits only when they are on a GPU.
        if as_numpy and isinstance(tensor, torch.Tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return to_cpu(tensor, as_numpy, record_stream)

    patches: list[tuple[Any, str, Any]] = [
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        (token_dispatcher, "maybe_move_tensor_to_cpu", splits_to_cpu),
    ]
    if not hasattr(moe_utils, "te_general_gemm"):
        # Without TransformerEngine the name is missing; None makes the router take its plain torch branch.
        patches.append((moe_utils, "te_general_gemm", None))
    return patches
