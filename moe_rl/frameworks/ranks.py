"""What an adapter asks and says of all ranks before a run starts."""

import math
import socket
from collections.abc import Sequence
from itertools import groupby

import torch.distributed as dist

from moe_rl.balancing.exchange import gathered
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.frameworks.contract import logger


def require_distributed(what: str) -> None:
    """Raise unless torch's process group is there."""
    require(
        dist.is_available() and dist.is_initialized(),
        f"{what} needs torch.distributed, which is not initialized. Start the run with torchrun or the framework's "
        "launcher.",
    )


def ranks_per_host(ep_group: dist.ProcessGroup) -> int:
    """Return how many consecutive EP ranks share a host, in every EP group; a collective of all ranks."""
    everyone = gathered((dist.get_process_group_ranks(ep_group), socket.gethostname()))
    # All EP groups get one size of node, the largest that divides every run of ranks on a host.
    hosts = [host for _, host in everyone]
    return math.gcd(*(largest_common_node([hosts[rank] for rank in ranks]) for ranks, _ in everyone))


def largest_common_node(hosts: Sequence[str]) -> int:
    """Return the largest size of nodes such that EP ranks 0 .. size - 1, and so on, share a host each.

    >>> largest_common_node(["a"] * 6 + ["b"] * 2)
    2
    """
    return math.gcd(*(len(list(ranks)) for _, ranks in groupby(hosts)))


def announce(framework: str, version: str, *, num_layers: int, policy: str) -> None:
    """Say once, on rank 0, that the run is balanced."""
    if dist.get_rank() == 0:
        logger.info("moe_rl: %s %s, %d MoE layers balanced by policy %r.", framework, version, num_layers, policy)


def unbalanced(framework: str, error: InvalidInputError, *, strict: bool) -> None:
    """Raise `error` where that was asked for, else say that the run goes on without balance."""
    if strict:
        raise error
    logger.warning(
        "moe_rl: this %s run continues without balancing (set MOE_RL_STRICT=1 to stop instead): %s", framework, error
    )
