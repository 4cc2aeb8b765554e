"""Record the routing of a Megatron run as `*.moetrace/` directories: what its routers choose, live or replayed.

recorder = RoutingRecorder(model_chunks, "run1")
with recorder.step(7):
    forward_backward_func(...)
recorder.close()                         # run1/dp00000.moetrace, run1/dp00001.moetrace, ...
merge_recordings("run1", "run1.moetrace")

One writer per data-parallel rank: the ranks that share its sequences (tensor, context and pipeline parallel) send it
their rows and layers when a step ends. A killed run leaves every step that was complete before. Recording copies ids to
the host in every micro-batch, which waits for the device.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from numpy.typing import NDArray

from moe_rl.balancing.exchange import gathered, own_group
from moe_rl.core.errors import require
from moe_rl.core.mappings import subset
from moe_rl.core.trace import RoutingTrace
from moe_rl.megatron.model_spec import model_spec, unwrapped
from moe_rl.megatron.routed_rows import RowSlice, held_positions
from moe_rl.replay.writer import TraceWriter

# Ids [N, L, K] of some layers, and [N, L] whether the row went to K experts.
Rows = tuple[NDArray[np.int32], NDArray[np.bool_]]


@dataclass(slots=True)
class _Chunk:
    """One model chunk of this rank while a step is recorded."""

    layer_ids: list[int]
    """Indices of its MoE layers among the model's."""
    boundaries: list[NDArray[np.int64]]
    """Per micro-batch, where its sequences begin in the data-parallel rank's tokens, then their number."""
    micro_batches: list[Rows]
    side_by_side: list[bool]
    """Per micro-batch, whether rows are [S, B]; else one sequence follows the other."""
    running: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None
    """Ids and validity by layer, of the forward that is under way."""


class RoutingRecorder:
    """Hooks on the routers of built models; every method is called on all ranks alike."""

    def __init__(
        self,
        model_chunks: torch.nn.Module | Sequence[torch.nn.Module],
        path: Path | str,
        *,
        model: str = "megatron",
        provenance: str = "live",
        origin: Mapping[str, str | int | float | bool] | None = None,
        append: bool = False,
    ) -> None:
        """Record into `path`/dp<rank>.moetrace; `append` continues what is there.

        `provenance` is "live" where the routers choose, "R2" or "R3" where they replay. Raises `InvalidInputError`
        where the model has no MoE layer or the directory is taken.
        """
        chunks = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)
        layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)]
        require(bool(layers), "there is nothing to record, because the model has no MoELayer.")
        spec = model_spec(layers[0].config)
        self._num_experts, self._top_k, self._layer_ids = spec.num_experts, spec.top_k, spec.moe_layer_ids
        self._model, self._provenance = model, provenance
        self._row_slice = RowSlice.current()
        require(
            self._row_slice.tp_size == 1 or layers[0].config.sequence_parallel,
            "recording needs sequence parallelism, because without it every tensor-parallel rank has all tokens.",
        )
        self._dp_rank = parallel_state.get_data_parallel_rank()
        self._dp_size = parallel_state.get_data_parallel_world_size()
        self._group = _sharing_group(self._dp_rank)
        self._recording = False
        self._num_sequences = 0
        self._handles: list[Any] = []
        self._chunks = [self._hooked(chunk) for chunk in chunks]
        self._writer: TraceWriter | None = None
        if dist.get_rank(self._group) == 0:
            about = {"data_parallel_size": self._dp_size, **(origin or {})}
            self._writer = TraceWriter(
                Path(path) / f"dp{self._dp_rank:05d}.moetrace",
                num_experts=spec.num_experts,
                moe_layer_ids=spec.moe_layer_ids,
                top_k=spec.top_k,
                model=model,
                provenance=provenance,
                origin=None if append else about,
                append=append,
            )

    @contextmanager
    def step(self, step: int, **columns: NDArray[np.integer]) -> Iterator[None]:
        """Record the forwards inside, and append them as training step `step` at the end.

        `columns` are any of sample_id and group_id, one entry per sequence of this data-parallel rank, in the order of
        the micro-batches. Recomputation is not recorded. Where the step fails, nothing of it is kept.
        """
        require(not self._recording, "a step is already being recorded: end it first.")
        self._recording = True
        try:
            yield
            self._append(step, columns)
        finally:
            self._recording = False
            for chunk in self._chunks:
                chunk.boundaries, chunk.side_by_side, chunk.micro_batches, chunk.running = [], [], [], None

    def close(self) -> None:
        """Remove the hooks and the process group; afterwards the recordings of all ranks are whole on disk."""
        for handle in self._handles:
            handle.remove()
        if self._writer is not None:
            self._writer.close()
        dist.barrier()
        dist.destroy_process_group(self._group)

    def _hooked(self, wrapped_chunk: torch.nn.Module) -> _Chunk:
        module = unwrapped(wrapped_chunk)
        chunk = _Chunk(layer_ids=[], boundaries=[], micro_batches=[], side_by_side=[])
        for layer in module.modules():
            if not isinstance(layer, MoELayer):
                continue
            index = self._layer_ids.index(layer.layer_number - 1)
            chunk.layer_ids.append(index)
            self._handles.append(layer.router.register_forward_hook(self._router_hook(chunk, index)))
        self._handles.append(module.register_forward_pre_hook(self._begin_hook(chunk), with_kwargs=True))
        self._handles.append(module.register_forward_hook(self._end_hook(chunk)))
        return chunk

    def _begin_hook(self, chunk: _Chunk) -> Any:
        def begin(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if not self._recording:
                return
            chunk.running = {}
            packed_params = kwargs.get("packed_seq_params")
            if packed_params is not None:
                padded_ends = getattr(packed_params, "cu_seqlens_q_padded", None)
                ends = packed_params.cu_seqlens_q if padded_ends is None else padded_ends
                chunk.boundaries.append(ends.detach().cpu().numpy().astype(np.int64))
            else:
                batch, length = (args[0] if args else kwargs["input_ids"]).shape
                chunk.boundaries.append(np.arange(batch + 1) * length * self._row_slice.cp_size)
            chunk.side_by_side.append(packed_params is None)

        return begin

    def _router_hook(self, chunk: _Chunk, layer: int) -> Any:
        def record(_: Any, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            if chunk.running is None:  # not recording, or recomputing
                return
            probs, routing_map = output
            scores = probs.detach().float().masked_fill(~routing_map, -1.0)
            # By falling probability; the routing map alone has no order.
            ids = scores.topk(self._top_k, dim=1).indices
            chunk.running[layer] = ids, routing_map.sum(dim=1) == self._top_k

        return record

    def _end_hook(self, chunk: _Chunk) -> Any:
        def end(*_: Any) -> None:
            routes_of_layers, chunk.running = chunk.running, None
            if routes_of_layers is None:
                return
            ids_of_layers, valid_of_layers = zip(*subset(routes_of_layers, chunk.layer_ids).values(), strict=True)
            ids = torch.stack(ids_of_layers, dim=1).int().cpu().numpy()
            valid = torch.stack(valid_of_layers, dim=1).cpu().numpy()
            chunk.micro_batches.append((ids, valid))

        return end

    def _append(self, step: int, columns: Mapping[str, NDArray[np.integer]]) -> None:
        own_record = (self._row_slice, [(chunk.layer_ids, chunk.micro_batches) for chunk in self._chunks])
        records_of_ranks: list[Any] | None = (
            [None] * dist.get_world_size(self._group) if self._writer is not None else None
        )
        dist.gather_object(own_record, records_of_ranks, dst=dist.get_global_rank(self._group, 0), group=self._group)
        if self._writer is None or records_of_ranks is None:
            return
        chunk_of_ids = self._chunks[0]
        require(
            bool(chunk_of_ids.boundaries),
            "nothing was recorded in this step, because the recorded model ran no forward pass.",
        )
        routes_of_sequences, valid_of_sequences, micro_batch = [], [], []
        for index, (ends, side_by_side) in enumerate(
            zip(chunk_of_ids.boundaries, chunk_of_ids.side_by_side, strict=True)
        ):
            ids, valid_rows = _whole_micro_batch(
                records_of_ranks, index, ends, side_by_side=side_by_side, num_layers=len(self._layer_ids)
            )
            for start, stop in pairwise(ends.tolist()):
                routes_of_sequences.append(ids[start:stop])
                valid_of_sequences.append(np.all(valid_rows[start:stop], axis=1))
                micro_batch.append(index)
        count = len(routes_of_sequences)
        numbers = (self._num_sequences + np.arange(count)) * self._dp_size + self._dp_rank
        self._num_sequences += count
        columns_given = {"sample_id": numbers, "group_id": columns.get("sample_id", numbers), **columns}
        self._writer.append(
            RoutingTrace.from_sequences(
                routes_of_sequences,
                num_experts=self._num_experts,
                moe_layer_ids=self._layer_ids,
                valid=valid_of_sequences,
                model=self._model,
                provenance=self._provenance,
                step=np.full(count, step),
                micro_batch=np.array(micro_batch),
                dp_rank=np.full(count, self._dp_rank),
                **columns_given,
            )
        )


def _whole_micro_batch(
    parts: Sequence[Any], index: int, boundaries: NDArray[np.int64], *, side_by_side: bool, num_layers: int
) -> Rows:
    """Put the rows and layers of all ranks of a data-parallel rank together: ([T, L, K] ids, [T, L] validity)."""
    top_k = parts[0][1][0][1][index][0].shape[2]
    num_tokens = int(boundaries[-1])
    ids = np.zeros((num_tokens, num_layers, top_k), np.int32)
    is_valid = np.zeros((num_tokens, num_layers), np.bool_)
    for row_slice, chunks in parts:
        rows = held_positions(boundaries, row_slice, side_by_side=side_by_side)
        for layer_ids, micro_batches in chunks:
            part_ids, part_valid = micro_batches[index]
            ids[rows[:, None], layer_ids] = part_ids
            is_valid[rows[:, None], layer_ids] = part_valid
    return ids, is_valid


def _sharing_group(dp_rank: int) -> dist.ProcessGroup:
    """Return the group of the ranks that share the sequences of a data-parallel rank.

    Its first rank is one of the first pipeline stage: Megatron numbers stages slowest.
    """
    dp_ranks = gathered(dp_rank)
    sharing = [tuple(rank for rank, index in enumerate(dp_ranks) if index == dp_index) for dp_index in dp_ranks]
    return own_group(sharing, backend="gloo")
