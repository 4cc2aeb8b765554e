"""The rows of a router tap under sequence parallelism, and its sums on their way between pipeline stages."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_rl.core.errors import require

# Called when a chunk has run, with its number and the keys of its rows: the token's index, or -1 for a row of padding.
AfterChunk = Callable[[int, Tensor], None]


def part_of_rank(keys: Tensor, num_rows: int) -> Tensor:
    """Return the keys of a router's rows: all of the forward's, or under sequence parallelism this rank's part.

    Example: 8 keys and 4 rows under TP 2 are keys 0 .. 3 on the first rank and 4 .. 7 on the second.
    """
    if keys.shape[0] == num_rows:
        return keys
    megatron: Any = sys.modules.get("megatron.core.parallel_state")
    is_parallel = megatron is not None and megatron.model_parallel_is_initialized()
    parts = 1
    if is_parallel:
        parts = megatron.get_tensor_model_parallel_world_size()
    require(
        keys.shape[0] == parts * num_rows,
        f"a router ran on {num_rows} rows, but tap.rows has {keys.shape[0]} keys.",
    )
    # Sequence parallelism cuts the first dimension: a rank has consecutive rows.
    part: Tensor = keys.view(parts, num_rows)[megatron.get_tensor_model_parallel_rank()]
    return part


@contextmanager
def between_stages(sums: Tensor, group: "dist.ProcessGroup | None", *, num_chunks: int) -> Iterator[AfterChunk]:
    """Yield what hands the sums of each forward on from stage to stage, behind its activations.

    Sums are [2, T + 1]: padding, then T tokens.

    `group` has the pipeline's stages in order; without one, or alone in it, nothing is handed on. After its forward a
    chunk adds what came before it, without what it has sent itself (interleaved pipelines come by more than once), and
    sends the sum on. The receiver's activations were sent after the message, and the group is its own, so that nobody
    waits for a later forward.
    """
    if group is None or dist.get_world_size(group) == 1:
        yield lambda chunk, keys: None
        return
    ranks, own_stage = dist.get_process_group_ranks(group), dist.get_rank(group)
    sent_sums = torch.zeros_like(sums)
    sending: list[tuple[Any, Tensor]] = []  # with the tensor, which must live until it has left

    @torch.no_grad()
    def pass_on(chunk: int, keys: Tensor) -> None:
        is_first = chunk == 0 and own_stage == 0
        is_last = chunk == num_chunks - 1 and own_stage == len(ranks) - 1
        rows = keys.to(sums.device) + 1
        if not is_first:
            sums_before = torch.empty_like(sums[:, rows])
            dist.recv(sums_before, src=ranks[own_stage - 1], group=group)
            sums[:, rows] += sums_before - sent_sums[:, rows]
        if not is_last:
            running_sums = sums[:, rows].contiguous()
            sent_sums[:, rows] = running_sums
            next_rank = ranks[(own_stage + 1) % len(ranks)]
            sending.append((dist.isend(running_sums, dst=next_rank, group=group), running_sums))

    try:
        yield pass_on
    finally:
        for work, _ in sending:
            work.wait()
