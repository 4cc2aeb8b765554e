"""From the routes that a rank knows to the loads of all ranks, on which every rank makes the same plan.

Needs no torch; where routes are tensors, they are read as arrays. M micro-batches, L MoE layers of the whole model, K
choices, E experts, G EP groups, P EP ranks.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.load import ExpertLoad

if TYPE_CHECKING:
    import torch

    Routes = torch.Tensor | NDArray[np.integer]


def as_array(values: Any) -> NDArray[Any]:
    """Return a tensor of any device, or anything that numpy reads, as an array."""
    array: NDArray[Any] = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    return array


def count_routes(
    routes: Sequence["Routes"], *, num_layers: int, num_experts: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ([M, L, E] pairs, [M] rows) of one rank from its routes, one [N, L, K] integer array per micro-batch.

    Rows are those that the rank really holds (its slice under tensor or context parallelism), in any order; -1 marks a
    choice that is not known. Raises `InvalidInputError` for another shape and for an id outside -1 .. E - 1.
    """
    pairs = np.zeros((len(routes), num_layers, num_experts), np.int64)
    rows = np.zeros(len(routes), np.int64)
    for micro_batch, given in enumerate(routes):
        ids = as_array(given)
        require(
            ids.ndim == 3 and ids.shape[1] == num_layers and np.issubdtype(ids.dtype, np.integer),
            f"the routes of micro-batch {micro_batch} must be integers [N, L, K] with L = {num_layers} MoE layers, "
            f"got {ids.dtype} {list(ids.shape)}.",
        )
        if ids.size:
            require(
                int(ids.min()) >= -1 and int(ids.max()) < num_experts,
                f"the routes of micro-batch {micro_batch} hold expert ids {int(ids.min())} .. {int(ids.max())}, "
                f"outside -1 .. {num_experts - 1}.",
            )
        for layer in range(num_layers):
            known = ids[:, layer][ids[:, layer] >= 0]
            pairs[micro_batch, layer] = np.bincount(known, minlength=num_experts)
        rows[micro_batch] = int((ids >= 0).any(axis=(1, 2)).sum())
    return pairs, rows


def gather_load(
    pairs: NDArray[np.int64],
    rows: NDArray[np.int64],
    *,
    gather: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    top_k: int,
) -> ExpertLoad:
    """Return the loads of all ranks from this rank's [M, L, E] pairs and [M] rows.

    `gather` is the collective that turns every rank's array [...] into all of them, [G, P, ...].
    """
    shapes = gather(np.array(pairs.shape, np.int64))
    require(
        bool((shapes == shapes[0, 0]).all()),
        f"the ranks gave routes of different [M, L, E]: {np.unique(shapes.reshape(-1, 3), axis=0).tolist()}.",
    )
    everyone = gather(np.concatenate([pairs.ravel(), rows]))
    num_groups, ep_size = everyone.shape[:2]
    all_pairs = everyone[:, :, : pairs.size].reshape(num_groups, ep_size, *pairs.shape)
    return ExpertLoad(
        pairs=np.ascontiguousarray(all_pairs.transpose(0, 2, 3, 1, 4)).astype(np.int32),
        tokens=np.ascontiguousarray(everyone[:, :, pairs.size :].transpose(0, 2, 1)),
        top_k=top_k,
    )


def forecast_load(previous: ExpertLoad, num_micro_batches: int) -> ExpertLoad:
    """Return what M micro-batches will be if each is the mean one of an earlier pass."""
    require(num_micro_batches >= 1, f"num_micro_batches must be at least 1, got {num_micro_batches}.")
    pairs = np.rint(previous.pairs.mean(axis=1, keepdims=True)).astype(np.int32)
    tokens = np.rint(previous.tokens.mean(axis=1, keepdims=True)).astype(np.int64)
    return ExpertLoad(
        pairs=np.repeat(pairs, num_micro_batches, axis=1),
        tokens=np.repeat(tokens, num_micro_batches, axis=1),
        top_k=previous.top_k,
    )
