"""The parallel shapes of a number of GPUs, and in which order `moe-rl tune` prices them.

A shape is estimated first (0.01 CPU s), as if sequences could be cut, which as a rule makes it faster than it is. Then
those are priced in full whose estimate is not slower than the best priced setting.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.step_words import Dispatcher
from moe_rl.core.topology import HardwareSpec
from moe_rl.report.tuned_settings import ALIKE, ParallelLayout, TunedSetting
from moe_rl.study.executors import Executor
from moe_rl.study.ranks import check_ep_size
from moe_rl.study.scenario import Progress
from moe_rl.study.shape_task import ShapeTask

VIRTUAL_STAGES = (1, 2, 4)
POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
EXPERT_TENSOR = (1, 2, 4, 8)

SHAPES_AT_ONCE = 16  # Estimated by one call of a worker: 0.2 CPU s.
ROUND = 32  # Shapes that are laid out before the fastest is looked at again.
OF_EVERY_SIZE = 4  # Shapes of an EP size that are laid out although others are faster: the report compares sizes.


def shapes_of(
    model: MoeModelSpec, hardware: HardwareSpec, gpus: int, ranks_per_node: int, expert_tensor: int | None = None
) -> Iterator[ParallelLayout]:
    """Yield every way to share out the GPUs that Megatron could start and that fills whole nodes.

    Without a given `expert_tensor` size experts are cut only where no larger EP divides them.
    """
    for tp, cp, pp, ep, parts in itertools.product(POWERS, POWERS, POWERS, POWERS, EXPERT_TENSOR):
        ranks = gpus // pp
        if gpus % pp or ranks % (tp * cp) or ranks % (ep * parts) or pp > model.num_layers or tp > ranks_per_node:
            continue
        if model.num_attention_heads % tp or model.num_query_groups % min(tp, model.num_query_groups):
            continue
        if model.moe_ffn_hidden_size % parts or parts != (expert_tensor or parts):
            continue
        # EP16 holds what EP8 x expert TP 2 does, multiplies wider matrices, and sends a token to fewer ranks.
        if expert_tensor is None and parts > 1 and model.num_experts % (ep * parts) == 0:
            continue
        try:
            check_ep_size(ep * parts, model.num_experts * parts, ranks_per_node)
        except InvalidInputError:
            continue
        dispatchers = [Dispatcher.ALLTOALL]
        if ep * parts > 1:
            dispatchers = [Dispatcher.DEEPEP, Dispatcher.ALLTOALL]
        for virtual in VIRTUAL_STAGES if pp > 1 else (1,):
            if virtual == 1 or model.num_layers % (pp * virtual) == 0:
                for dispatcher in dispatchers:
                    yield ParallelLayout(
                        expert_model_parallel_size=ep, tensor_model_parallel_size=tp, context_parallel_size=cp,
                        pipeline_model_parallel_size=pp, num_virtual_stages=virtual, dispatcher=dispatcher,
                        expert_tensor_parallel_size=parts,
                    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateTask:
    """Estimates shapes in portions of `SHAPES_AT_ONCE`; can be pickled."""

    task: ShapeTask

    def __call__(self, index: int) -> list[float]:
        """Return `ShapeTask.estimated` of a portion."""
        first = index * SHAPES_AT_ONCE
        return [self.task.estimated(shape) for shape in range(len(self.task.shapes))[first : first + SHAPES_AT_ONCE]]


def estimated_speeds(task: ShapeTask, executor: Executor, progress: Progress) -> NDArray[np.float64]:
    """Return [shapes] estimated tokens/s/GPU of all shapes, 0 where none of a shape's settings fits."""
    portions = range(-(-len(task.shapes) // SHAPES_AT_ONCE))
    speeds = dict[int, list[float]]()
    with closing(executor(EstimateTask(task=task), portions)) as results:
        for index, portion in results:
            speeds[index] = portion
            progress("estimating layouts", min(len(speeds) * SHAPES_AT_ONCE, len(task.shapes)), len(task.shapes))
    return np.array([speed for index in sorted(speeds) for speed in speeds[index]])


def next_shapes(
    shapes: Sequence[ParallelLayout], estimates: NDArray[np.float64], laid_out: Mapping[int, Sequence[TunedSetting]]
) -> list[int]:
    """Return the shapes to lay out next, at most `ROUND`; none are left: the search is done.

    These are the `OF_EVERY_SIZE` that promise most of every EP size, then all whose estimate is no worse than the best
    setting that is laid out.
    An estimate takes sequences as divisible, so a shape is as a rule slower than its estimate.
    """
    order = [index for index in np.argsort(-estimates, kind="stable").tolist() if estimates[index] > 0]
    of_size = Counter[int]()
    priced_tokens_per_s = [row.tokens_per_s_per_gpu for rows in laid_out.values() for row in rows]
    least_tokens_per_s = (1 - ALIKE) * max(priced_tokens_per_s, default=0.0)
    chosen_shapes = []
    for index in order:
        size = shapes[index].expert_ranks
        of_size[size] += 1
        is_wanted = of_size[size] <= OF_EVERY_SIZE or (
            bool(priced_tokens_per_s) and estimates[index] >= least_tokens_per_s
        )
        if is_wanted and index not in laid_out:
            chosen_shapes.append(index)
    return chosen_shapes[:ROUND]
