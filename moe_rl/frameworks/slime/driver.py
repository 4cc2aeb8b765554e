"""slime's driver: plans of its own schedule, and micro-batches that are packed anew.

from moe_rl.frameworks.slime import driver

steps = driver.schedules_of_steps(partitions, micro_batch_indices, num_microbatches)
plans = driver.plans_of_rollout(routed_experts, total_lengths, steps, config=config, model=model, topology=topology)
driver.write_plans(plans, "/shared/plans", rollout_id=rollout_id)        # workers have MOE_RL_PLANS=/shared/plans
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.driver_packing import DriverPacking
from moe_rl.balancing.schedule import pack_schedule, plan_from_schedule
from moe_rl.core.errors import require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.plan import Plan
from moe_rl.core.schedules import layout_of_cells
from moe_rl.core.topology import ClusterTopology
from moe_rl.frameworks.routes import of_moe_layers, with_missing_last_rows

# Of an optimizer step: [dp_rank][micro_batch] = samples.
Schedule = list[list[list[int]]]


def schedules_of_steps(
    partitions: Sequence[Sequence[int]],
    micro_batch_indices: Sequence[Sequence[Sequence[int]]],
    num_microbatches: Sequence[int],
) -> list[list[list[list[int]]]]:
    """Return `[step][dp_rank][micro_batch]` = global sample ids, from what slime's `build_dp_schedule` returned.

    Its micro-batches name samples by their place in the rank's partition, and those of an optimizer step are one slice
    of the rank's list.
    """
    total = sum(num_microbatches)
    for rank, batches in enumerate(micro_batch_indices):
        require(
            len(batches) == total,
            f"rank {rank} has {len(batches)} micro-batches, but its optimizer steps need {total}.",
        )
    by_rank: Schedule = []
    for partition, batches in zip(partitions, micro_batch_indices, strict=True):
        by_rank += _renamed([batches], partition)
    ends = np.cumsum([0, *num_microbatches]).tolist()
    return [[batches[start:stop] for batches in by_rank] for start, stop in pairwise(ends)]


def schedule_from_steps(
    steps: Sequence[Sequence[Sequence[Sequence[int]]]],
) -> tuple[list[list[int]], list[list[list[int]]], list[int]]:
    """Return (partitions, micro_batch_indices, num_microbatches) as slime's driver packages them, of such steps."""
    partitions: list[list[int]] = [[] for _ in steps[0]] if steps else []
    indices: list[list[list[int]]] = [[] for _ in partitions]
    for schedule in steps:
        for partition, places, batches in zip(partitions, indices, schedule, strict=True):
            for batch in batches:
                places.append(list(range(len(partition), len(partition) + len(batch))))
                partition.extend(batch)
    return partitions, indices, [len(schedule[0]) for schedule in steps]


def packed_steps(
    routed_experts: Sequence[Any],
    total_lengths: Sequence[int],
    steps: Sequence[Sequence[Sequence[Sequence[int]]]],
    *,
    token_budget: int,
    config: BalancerConfig,
    model: MoeModelSpec,
    topology: ClusterTopology,
) -> list[list[list[list[int]]]]:
    """Return `steps` with the samples of every optimizer step packed anew by their routes, on the driver.

    Arguments are those of `plans_of_rollout`; `token_budget` is slime's `max_tokens_per_gpu` times the context-parallel
    size. See `moe_rl.balancing.schedule.pack_schedule` for what stays as it is.
    """
    packed = []
    for ids, samples, schedule in _by_step(routed_experts, total_lengths, steps, model):
        packed_schedule = pack_schedule(
            samples, schedule, token_budget=token_budget, config=config, model=model, topology=topology
        )
        packed.append(_renamed(packed_schedule, ids))
    return packed


def packed_by_lengths(
    total_lengths: Sequence[int],
    steps: Sequence[Sequence[Sequence[Sequence[int]]]],
    packing: DriverPacking,
    *,
    multiple_of: int = 1,
) -> list[list[list[list[int]]]]:
    """Return `steps` with the samples of every optimizer step packed over all ranks by their lengths alone.

    No routes are needed, so this works with replay and without. Ranks get as many micro-batches each, a multiple of
    `multiple_of`, and any number of samples. A step that cannot be packed (one sample above the budget) stays.
    """
    packed = []
    for schedule in steps:
        ids, numbered = _numbered(schedule)
        stated = layout_of_cells(numbered, len(ids), packing.token_budget)
        layout = packing.layout(np.array([total_lengths[index] for index in ids], np.int64), stated)
        if layout is None or layout.num_micro_batches % multiple_of:
            packed.append([[list(batch) for batch in batches] for batches in schedule])
            continue
        filled: list[list[list[int]]] = [[[] for _ in range(layout.num_micro_batches)] for _ in schedule]
        for index in np.argsort(layout.order, kind="stable").tolist():
            filled[layout.dp_rank[index]][layout.micro_batch[index]].append(ids[index])
        packed.append(filled)
    return packed


def plans_of_rollout(
    routed_experts: Sequence[Any],
    total_lengths: Sequence[int],
    steps: Sequence[Sequence[Sequence[Sequence[int]]]],
    *,
    config: BalancerConfig,
    model: MoeModelSpec,
    topology: ClusterTopology,
) -> list[Plan]:
    """Return the plan of every optimizer step of a rollout, on the driver.

    `routed_experts` are slime's `rollout_routed_experts`, one [tokens - 1, layers, K] array per sample, of the MoE
    layers or of all; `steps` comes from `schedules_of_steps`. Samples that no step runs are left out.
    """
    return [
        plan_from_schedule(samples, schedule, config=config, model=model, topology=topology)
        for _, samples, schedule in _by_step(routed_experts, total_lengths, steps, model)
    ]


def _by_step(
    routes: Sequence[Any],
    lengths: Sequence[int],
    steps: Sequence[Sequence[Sequence[Sequence[int]]]],
    model: MoeModelSpec,
) -> Iterator[tuple[list[int], list[NDArray[np.signedinteger]], list[list[list[int]]]]]:
    """Yield, by step, the global ids of its samples, their routes, the schedule with samples numbered from 0 on."""
    require(
        len(routes) == len(lengths),
        f"there are routes for {len(routes)} samples, but lengths for {len(lengths)} samples.",
    )
    for schedule in steps:
        ids, numbered = _numbered(schedule)
        samples = [with_missing_last_rows(of_moe_layers(routes[index], model), lengths[index]) for index in ids]
        yield ids, samples, numbered


def _numbered(schedule: Sequence[Sequence[Sequence[int]]]) -> tuple[list[int], Schedule]:
    """Return the global ids of a step's samples, and the schedule with its samples numbered from 0 on.

    Ids ascend, so that the plan of a step does not depend on how the driver ordered its samples.
    """
    samples: set[int] = set()
    for batches in schedule:
        samples.update(*batches)
    ids = sorted(samples)
    number = {sample: index for index, sample in enumerate(ids)}
    return ids, _renamed(schedule, number)


def _renamed(schedule: Sequence[Sequence[Sequence[int]]], names: Mapping[int, int] | Sequence[int]) -> Schedule:
    """Return a schedule with `names[s]` instead of every sample s."""
    return [[[names[sample] for sample in batch] for batch in batches] for batches in schedule]


def write_plans(plans: Sequence[Plan], folder: Path | str, *, rollout_id: int) -> list[Path]:
    """Write the plans of a rollout's optimizer steps where workers with MOE_RL_PLANS=`folder` look for them."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = [plan_path(Path(folder), rollout_id, step) for step in range(len(plans))]
    for plan, path in zip(plans, paths, strict=True):
        plan.save(path)
    return paths


def plan_path(folder: Path, rollout_id: int, step_id: int) -> Path:
    """Return where the plan of one optimizer step lies."""
    return folder / f"rollout{rollout_id:06d}-step{step_id:04d}.plan.npz"
