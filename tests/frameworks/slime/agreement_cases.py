"""Cases of test_agreement.py: two ranks over gloo whose environments differ when slime calls the hook of its start."""

import os
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks.ranks import settings_of_all_ranks
from moe_rl.frameworks.slime.worker import Worker


def _sentence(*variables_of_ranks: dict[str, str]) -> str:
    """Return what the hook raises on this rank, whose variables are those of its place; empty if nothing."""
    for name in [name for name in os.environ if name.startswith("MOE_RL")]:
        del os.environ[name]
    os.environ.update(variables_of_ranks[dist.get_rank()])
    worker = Worker(framework=SimpleNamespace(name="slimelike"), stage=lambda: None)  # type: ignore[arg-type]
    try:
        worker.init(SimpleNamespace())
    except InvalidInputError as error:
        return str(error)
    return ""


def on_the_head_node_alone() -> str:
    return _sentence({"MOE_RL": "observe"}, {})


def on_another_node_alone() -> str:
    return _sentence({}, {"MOE_RL": "moe-rl"})


def to_two_values() -> str:
    return _sentence({"MOE_RL": "moe-rl"}, {"MOE_RL": "static"})


def for_the_router_shift_alone() -> str:
    return _sentence({"MOE_RL_ROUTER_SHIFT": "0.8"}, {})


def to_a_value_that_is_wrong() -> str:
    return _sentence({"MOE_RL": "moe-rl"}, {"MOE_RL": "no-such-policy"})


def on_no_rank() -> str:
    return _sentence({}, {})


def on_both_ranks() -> Any:
    os.environ["MOE_RL"] = "observe"
    settings = settings_of_all_ranks("slimelike")
    return settings is not None and settings.balancer.observe
