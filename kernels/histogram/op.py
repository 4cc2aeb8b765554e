"""Load per expert: the contract, the checks, and the registration with torch. No gradient: counts are integers."""

import torch

from moe_rl.core.errors import require
from moe_rl.kernels.devices import require_same_device
from moe_rl.kernels.registry import Operator

ID_DTYPES = (torch.int32, torch.int64, torch.int16, torch.uint8)

EXPERT_HISTOGRAM = Operator(name="expert_histogram", package=__package__)


@torch.library.custom_op("moe_rl::expert_histogram", mutates_args=())
def _expert_histogram(
    expert_ids: torch.Tensor,
    num_experts: int,
    valid: torch.Tensor | None,
    bins: torch.Tensor | None,
    num_bins: int,
    backend: str,
) -> torch.Tensor:
    launch = EXPERT_HISTOGRAM.resolve(backend, expert_ids.device.type)
    counts: torch.Tensor = launch(expert_ids, num_experts, valid, bins, num_bins)
    return counts


@_expert_histogram.register_fake
def _(
    expert_ids: torch.Tensor, num_experts: int, _valid: object, _bins: object, num_bins: int, _backend: str
) -> torch.Tensor:
    return torch.empty((num_bins, num_experts), dtype=torch.int32, device=expert_ids.device)


def expert_histogram(
    expert_ids: torch.Tensor,
    num_experts: int,
    *,
    valid: torch.Tensor | None = None,
    bins: torch.Tensor | None = None,
    num_bins: int = 1,
    backend: str = "auto",
) -> torch.Tensor:
    """Return int32 [B, E]: how many pairs of expert_ids [T, K] each expert gets in each bin. Deterministic, no sync.

    `bins` int32 [T] names a token's bin, such as its micro-batch or source rank (none: all in bin 0); `valid` bool [T]
    leaves tokens out. Pairs with an id outside 0 .. E - 1 (-1: dropped) or a bin outside 0 .. B - 1 are not counted.
    uint16 ids come as int32.
    """
    require(
        expert_ids.dtype in ID_DTYPES and expert_ids.dim() == 2,
        f"expert_histogram: ids must be [T, K] of {', '.join(map(str, ID_DTYPES))}, "
        f"got {expert_ids.dtype} {tuple(expert_ids.shape)}.",
    )
    require(num_experts >= 1, f"expert_histogram: num_experts must be at least 1, got {num_experts}.")
    require(num_bins >= 1, f"expert_histogram: num_bins must be at least 1, got {num_bins}.")
    require(
        num_bins * num_experts < 2**31,
        f"expert_histogram: bins * experts must be below 2^31, got {num_bins} * {num_experts}.",
    )
    require(expert_ids.numel() <= 2**30, f"expert_histogram: T * K must be at most 2^30, got {expert_ids.numel()}.")
    for name, value, dtype in (("valid", valid, torch.bool), ("bins", bins, torch.int32)):
        if value is not None:
            require(
                value.dtype == dtype and tuple(value.shape) == (expert_ids.shape[0],),
                f"expert_histogram: {name} must be {dtype} ({expert_ids.shape[0]},), "
                f"got {value.dtype} {tuple(value.shape)}.",
            )
    require_same_device("expert_histogram", expert_ids, valid=valid, bins=bins)
    require(num_bins == 1 or bins is not None, f"expert_histogram: {num_bins} bins need `bins`, one per token.")
    counts: torch.Tensor = _expert_histogram(expert_ids, num_experts, valid, bins, num_bins, backend)
    return counts
