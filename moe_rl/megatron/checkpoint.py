"""Keeps the placement of the experts beside a checkpoint, which itself is Megatron's own.

with balancer.canonical():
    save_checkpoint(...)                      # Megatron's
save_placement(balancer, checkpoint_folder)

load_checkpoint(...)                          # Megatron's; plain Megatron can do the same
restore_placement(balancer, checkpoint_folder)

Without the second file a run goes on as well, with every expert where Megatron puts it. A placement says where load
goes, not what is computed, so it holds for another EP size too: see `resized`.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.placement_file import read_placement, write_placement
from moe_rl.megatron.balancer import Balancer

logger = logging.getLogger(__name__)

FILE_NAME = "moe_rl_placement.json"


def save_placement(balancer: Balancer, folder: Path | str) -> None:
    """Write the placement of the experts to `folder`/moe_rl_placement.json, in one rename; a collective of all ranks.

    Rank 0 writes. Raises `InvalidInputError` on all ranks where it cannot.
    """
    problem = [""]
    if dist.get_rank() == 0:
        try:
            write_placement(balancer.placement, Path(folder) / FILE_NAME)
        except InvalidInputError as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem, src=0)
    require(not problem[0], problem[0])


def restore_placement(balancer: Balancer, folder: Path | str) -> bool:
    """Reorder the experts as they were when the checkpoint in `folder` was saved; a collective of all ranks.

    Call it when the checkpoint has been loaded. Rank 0 reads. Returns False, and says so in a warning, where there is
    no placement beside the checkpoint, as with one of plain Megatron. Raises `InvalidInputError` on all ranks for a
    damaged file and for one of another model.
    """
    path = Path(folder) / FILE_NAME
    broadcast: list[Any] = [None, ""]
    if dist.get_rank() == 0 and path.exists():
        try:
            broadcast[0] = read_placement(path)
        except InvalidInputError as error:
            broadcast[1] = str(error)
    dist.broadcast_object_list(broadcast, src=0)
    saved_placement, problem = broadcast
    require(not problem, problem)
    if saved_placement is None:
        logger.warning(
            "moe_rl: the file %s does not exist, so experts stay on the ranks where Megatron puts them.", path
        )
        return False
    own_placement = balancer.placement
    require(
        saved_placement.home_rank.shape == own_placement.home_rank.shape,
        f"{path} does not match this model: it has [MoE layers, experts] = {list(saved_placement.home_rank.shape)}, "
        f"but the model has {list(own_placement.home_rank.shape)}.",
    )
    if saved_placement.resident_slots > own_placement.resident_slots or (
        saved_placement.resident_slots and saved_placement.ep_size != own_placement.ep_size
    ):
        logger.warning(
            "moe_rl: the resident copies saved in %s do not fit this run, so the run starts without them.",
            path,
        )
        saved_placement = ExpertPlacement.from_home_rank(saved_placement.home_rank, ep_size=saved_placement.ep_size)
    if saved_placement.ep_size != own_placement.ep_size:
        logger.warning(
            "moe_rl: %s was saved with EP size %d. With EP size %d, experts that shared a rank stay together as "
            "far as possible.",
            path,
            saved_placement.ep_size,
            own_placement.ep_size,
        )
    balancer.reorder(
        saved_placement
        if saved_placement.ep_size == own_placement.ep_size
        else resized(saved_placement, ep_size=own_placement.ep_size)
    )
    return True


def resized(placement: ExpertPlacement, *, ep_size: int) -> ExpertPlacement:
    """Return the homes of `placement` on another number of ranks: the experts in the order of their ranks, cut anew.

    Half as many ranks: two neighbors become one. Twice as many: the lower half of a rank's experts and the upper half
    part. Otherwise a rank gets experts of neighbors. Raises `InvalidInputError` where `ep_size` does not divide E.
    """
    order = np.argsort(placement.home_rank, axis=1, kind="stable")
    num_experts = placement.num_experts
    require(num_experts % ep_size == 0, f"the EP size {ep_size} does not divide the number of experts ({num_experts}).")
    home = np.empty_like(placement.home_rank)
    np.put_along_axis(home, order, np.arange(num_experts, dtype=home.dtype)[None] // (num_experts // ep_size), axis=1)
    return ExpertPlacement.from_home_rank(home, ep_size=ep_size)
