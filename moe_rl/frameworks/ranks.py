"""What an adapter asks and says of all ranks before a run starts."""

import math
import socket
from collections.abc import Sequence
from itertools import groupby

import torch.distributed as dist

from moe_rl.balancing.exchange import agreed, gathered
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.frameworks.contract import logger
from moe_rl.frameworks.run_settings import OBSERVE, PREFIX, SWITCH, Settings, settings_from_environment


def require_distributed(what: str) -> None:
    """Raise unless torch's process group is there."""
    require(
        dist.is_available() and dist.is_initialized(),
        f"{what} needs torch.distributed, which is not initialized. Start the run with torchrun or the framework's "
        "launcher.",
    )


def settings_of_all_ranks(framework: str) -> Settings | None:
    """Return this rank's settings of the environment; raise on every rank if ranks disagree on what moe_rl does.

    A collective of all ranks once torch.distributed is initialized. A rank without `MOE_RL` would later miss from the
    collectives of the others, which would then wait for it without a word.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return settings_from_environment()
    settings = agreed(settings_from_environment)
    switches = gathered((socket.gethostname(), _switches(settings)))
    first_host, first_switches = switches[0]
    for rank, (host, switches_of_rank) in enumerate(switches):
        for name, text in switches_of_rank.items():
            require(
                text == first_switches[name],
                f"{framework}: {name} must be the same on all ranks, but rank {rank} (host {host}) has {text} and rank "
                f"0 (host {first_host}) has {first_switches[name]}. Set MOE_RL in the runtime environment of the Ray "
                "job, which reaches all workers, and not by `export` on one node.",
            )
    return settings


def _switches(settings: Settings | None) -> dict[str, str]:
    """Return what decides whether a rank takes part in moe_rl's collectives, by the name of the variable that says it.

    The rest is compared before the first step (`MegatronRun.attach`).
    """
    if settings is None:
        return {SWITCH: "none", f"{PREFIX}ROUTER_SHIFT": "0.0"}
    policy = settings.balancer.policy if settings.balances else "none"
    return {
        SWITCH: OBSERVE if settings.balances and settings.balancer.observe else policy,
        f"{PREFIX}ROUTER_SHIFT": str(settings.router_shift),
    }


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
