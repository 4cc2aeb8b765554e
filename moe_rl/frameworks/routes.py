"""What frameworks put where a route is missing, and which layers their routes have.

T rows, L layers, K choices. Sources: the frameworks' own code, as listed in docs/frameworks.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.loads import as_array
from moe_rl.core.errors import require
from moe_rl.core.model import MoeModelSpec


def of_moe_layers(routes: Any, model: MoeModelSpec) -> NDArray[np.int64]:
    """Return [..., L, K] of the MoE layers from routes of these or of all layers, dense ones included.

    Engines return one row per decoder layer, and what stands in those of dense layers means nothing. Raises
    `InvalidInputError` where the routes are of another model.
    """
    ids = as_array(routes)
    require(ids.ndim >= 2, f"routes must be [..., layers, choices], got {list(ids.shape)}.")
    layers, choices = ids.shape[-2:]
    require(
        layers in (model.num_moe_layers, model.num_layers) and choices == model.top_k,
        f"the routes are of another model: {layers} layers of {choices} choices, and not {model.num_moe_layers} MoE "
        f"layers (or all {model.num_layers} layers) of {model.top_k}.",
    )
    ids = ids.astype(np.int64)
    return ids if layers == model.num_moe_layers else ids[..., list(model.moe_layer_ids), :]


def with_missing_last_rows(routes: Any, num_rows: int) -> NDArray[np.int64]:
    """Return [T, L, K] of `num_rows` rows: engines return no route for the last token, which they never feed."""
    ids = as_array(routes).astype(np.int64)
    require(len(ids) <= num_rows, f"{len(ids)} rows of routes for {num_rows} tokens.")
    rows = np.full((num_rows, *ids.shape[1:]), -1, np.int64)
    rows[: len(ids)] = ids
    return rows
