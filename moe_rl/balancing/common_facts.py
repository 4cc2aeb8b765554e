"""What all ranks of a run must have in common, compared before anything depends on it.

Ranks plan by themselves from the same counts, so whatever changes a plan must be the same everywhere: versions, the C++
core, settings, the rates of the cluster. One rank without the core would pack its sequences otherwise than the ranks
that run the same sequences beside it, and train on other micro-batches without an error.
"""

from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.exchange import agreed, gathered
from moe_rl.balancing.schedule import hardware_of
from moe_rl.core.errors import require
from moe_rl.core.native import native_core, why_not_native
from moe_rl.version import __version__

PACKAGES = ("numpy", "torch", "triton", "megatron-core")
DIGEST_CHARACTERS = 12


def require_in_common(config: BalancerConfig, other_facts: Mapping[str, Any] | None = None, *, whose: str = "") -> None:
    """Raise, on every rank, unless all ranks have the same software, `config` and `other_facts`. A collective.

    `other_facts` are further facts by name. The error names the first rank that differs from rank 0, the first fact in
    which it does, and both values; `whose` stands before it.

    Example: with MOE_RL_NATIVE=0 on rank 3 alone, "the C++ core must be the same on all ranks, but rank 3 has
    none (MOE_RL_NATIVE=0) and rank 0 has sources 1ef0cc2e9853."
    """
    facts = agreed(lambda: {**_software(), **_settings(config), **_texts(other_facts or {})})
    if not dist.is_initialized():
        return
    facts_of_ranks = gathered(facts)
    of_first_rank = facts_of_ranks[0]
    for rank, of_rank in enumerate(facts_of_ranks):
        # Two versions of moe_rl may have other names of facts; the versions stand first and are compared first.
        for name in [*of_first_rank, *of_rank]:
            value_here, value_there = of_first_rank.get(name, "nothing"), of_rank.get(name, "nothing")
            require(
                value_here == value_there,
                f"{whose}{name} must be the same on all ranks, but rank {rank} has {value_there} and rank 0 has "
                f"{value_here}.",
            )


def _software() -> dict[str, str]:
    versions = {f"the version of {package}": _version(package) for package in PACKAGES}
    return {"the version of moe_rl": __version__, "the C++ core": _core(), **versions}


def _core() -> str:
    core = native_core()
    if core is None:
        return f"none ({why_not_native()})"
    if not hasattr(core, "sources_digest"):
        return "an older build"
    return f"sources {core.sources_digest()[:DIGEST_CHARACTERS]}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _settings(config: BalancerConfig) -> dict[str, str]:
    values = config.words()
    values["parameters"] = dict(sorted(config.parameters.items()))
    # `cluster` may be a file, with other rates on another host.
    rates = hardware_of(config.pricing.cluster)
    constants = {f"the cluster's {field.name}": getattr(rates, field.name) for field in fields(rates)}
    del constants["the cluster's sources"]
    return _texts({**values, **constants})


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    # As text: objects of two versions may not unpickle in each other.
    return {name: repr(value) for name, value in values.items()}
