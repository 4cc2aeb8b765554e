"""Plan in an actor while rollouts finish: for frameworks whose driver runs on Ray.

planner = start_planner(config, model=model, topology=topology)
taken = [planner.take.remote(routes, num_tokens) for ...]      # as every rollout ends; a reference each
plan = planner.plan.remote(taken, schedule)                    # hand the reference to the workers

The actor keeps nothing between calls, because Ray starts it anew, empty, when its process is lost: every call says all
it needs, and a call that was under way is made again and returns the same.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.schedule import plan_from_schedule
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.plan import Plan
from moe_rl.core.topology import ClusterTopology
from moe_rl.frameworks.routes import of_moe_layers, with_missing_last_rows
from moe_rl.version import install_line

# How often a lost process is replaced, and how often a call of it is made again.
RESTARTS = 3


class PlannerActor:
    """What `start_planner` runs as a Ray actor; every method is pure in its arguments."""

    def __init__(self, config: BalancerConfig, model: MoeModelSpec, topology: ClusterTopology) -> None:
        self.config, self.model, self.topology = config, model, topology

    def take(self, routes: Any, num_tokens: int | None = None) -> NDArray[np.int16]:
        """Return [tokens, L, K] of one sequence, checked and small: MoE layers only, -1 where there is no route.

        `routes` may have a row less than `num_tokens`, for the last token. Raises `InvalidInputError` where they are
        of another model.
        """
        ids = of_moe_layers(routes, self.model)
        outside = ids.size and (int(ids.min()) < -1 or int(ids.max()) >= self.model.num_experts)
        require(not outside, f"the routes have expert ids outside 0 to {self.model.num_experts - 1}.")
        return with_missing_last_rows(ids, len(ids) if num_tokens is None else num_tokens).astype(np.int16)

    def plan(self, references: Sequence[Any], schedule: Any, **how: Any) -> Plan:
        """Return the plan of one `forward_backward_func` call; see `moe_rl.balancing.plan_from_schedule`.

        `references` are what `take` returned, or references to it, in the order that `schedule` numbers them.
        """
        import ray

        # Ray resolves references that are arguments themselves, not those inside a list.
        samples = [ray.get(sample) if isinstance(sample, ray.ObjectRef) else sample for sample in references]
        return plan_from_schedule(
            samples, schedule, config=self.config, model=self.model, topology=self.topology, **how
        )


def start_planner(config: BalancerConfig, *, model: MoeModelSpec, topology: ClusterTopology, **options: Any) -> Any:
    """Return the handle of a `PlannerActor`; `options` are those of Ray's `.options()`, such as `num_cpus`."""
    try:
        import ray
    except ImportError:
        raise InvalidInputError(f"a planner actor needs Ray: {install_line('ray')}.") from None
    require(ray.is_initialized(), "Ray is not initialized in this process: call ray.init() first.")
    actor = ray.remote(max_restarts=RESTARTS, max_task_retries=RESTARTS)(PlannerActor)
    return actor.options(**options).remote(config, model, topology)
