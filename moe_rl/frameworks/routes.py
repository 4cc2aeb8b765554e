"""What frameworks put where a route is missing, and which layers their routes have.

T rows, L layers, K choices. Sources: the frameworks' own code, as listed in docs/frameworks.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.loads import as_array
from moe_rl.core.errors import require
from moe_rl.core.model import MoeModelSpec


def of_moe_layers(routes: Any, model: MoeModelSpec) -> NDArray[np.signedinteger]:
    """Return [..., L, K] of the MoE layers from routes of these or of all layers, dense ones included.

    Engines return one row per decoder layer, and what stands in those of dense layers means nothing. Raises
    `InvalidInputError` where the routes are of another model.
    """
    ids = as_array(routes)
    require(ids.ndim >= 2, f"the routes must have shape [..., layers, top-k], got {list(ids.shape)}.")
    layers, choices = ids.shape[-2:]
    require(
        layers in (model.num_moe_layers, model.num_layers) and choices == model.top_k,
        f"the routes come from another model: they have {layers} layers and top-{choices}, but this model has "
        f"{model.num_moe_layers} MoE layers ({model.num_layers} layers in all) and top-{model.top_k}.",
    )
    # Rows of dense layers hold zeros or what memory held before: counted, they would be a hot expert 0.
    ids = signed(ids)
    if layers == model.num_moe_layers:
        return ids
    return ids[..., list(model.moe_layer_ids), :]


def signed(ids: NDArray[Any]) -> NDArray[np.signedinteger]:
    """Return the ids in a type that holds -1 too; as they lie where theirs does, since copies cost more than counting.

    65,536 rows of 48 layers and 8 choices are 201 MB in int64.
    """
    if np.issubdtype(ids.dtype, np.signedinteger):
        return ids
    return ids.astype(np.int32)


def with_missing_last_rows(routes: Any, num_rows: int) -> NDArray[np.signedinteger]:
    """Return [T, L, K] of `num_rows` rows: engines return no route for the last token, which they never feed."""
    ids = signed(as_array(routes))
    require(len(ids) <= num_rows, f"there are routes for {len(ids)} tokens, but the batch has only {num_rows}.")
    if len(ids) == num_rows:
        return ids
    rows = np.full((num_rows, *ids.shape[1:]), -1, ids.dtype)
    rows[: len(ids)] = ids
    return rows
