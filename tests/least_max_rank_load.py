"""The least greatest rank load by mixed-integer programming: an oracle for tests on small instances, never a planner.

P ranks, E experts, R spare slots per rank; loads are token-expert pairs. Needs scipy (HiGHS).
"""

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError


def least_max_rank_load(
    loads: NDArray[np.integer], home_rank: NDArray[np.integer], *, ep_size: int, slots: int, time_limit_s: float = 8.0
) -> float:
    """Return the optimum over replica placement and (fractional) split, to a relative gap of 1e-4.

    `loads` and `home_rank` are [E]. Every rank may hold at most `slots` experts that are at home elsewhere. An integer
    plan cannot be below it by more than the gap. Raises `InvalidInputError` when the time limit passes first.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    experts = len(loads)
    # Columns: x[e, p] pairs, then y[e, p] = 1 where expert e may have pairs on rank p, then the target.
    cells = experts * ep_size
    weight = np.asarray(loads, np.float64)
    at_home = np.zeros((experts, ep_size))
    at_home[np.arange(experts), home_rank] = 1.0
    eye, ones = np.eye(cells), np.ones((1, ep_size))
    split = np.hstack([np.kron(np.eye(experts), ones), np.zeros((experts, cells + 1))])
    columns_of_rank = np.kron(np.ones((1, experts)), np.eye(ep_size))
    below_target = np.hstack([columns_of_rank, np.zeros((ep_size, cells)), -np.ones((ep_size, 1))])
    only_where_held = np.hstack([eye, -np.diag(np.repeat(weight, ep_size)), np.zeros((cells, 1))])
    slot_limit = np.hstack([np.zeros((ep_size, cells)), columns_of_rank, np.zeros((ep_size, 1))])
    allowed = slots + at_home.sum(axis=0)
    held = at_home.ravel()
    result = milp(
        np.concatenate([np.zeros(2 * cells), [1.0]]),
        constraints=[
            LinearConstraint(split, weight, weight),
            LinearConstraint(below_target, -np.inf, 0.0),
            LinearConstraint(only_where_held, -np.inf, 0.0),
            LinearConstraint(slot_limit, -np.inf, allowed),
        ],
        integrality=np.concatenate([np.zeros(cells), np.ones(cells), [0.0]]),
        bounds=Bounds(
            np.concatenate([np.zeros(cells), held, [0.0]]),
            np.concatenate([np.full(cells, np.inf), np.ones(cells), [np.inf]]),
        ),
        options={"mip_rel_gap": 1e-4, "time_limit": time_limit_s},
    )
    if result.status != 0:
        raise InvalidInputError(f"the mixed-integer program was not solved in {time_limit_s} s: {result.message}")
    return float(result.fun)
