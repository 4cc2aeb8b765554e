"""The settings of one parallel shape that fit into memory, and what a step of each takes.

`moe-rl tune` runs these tasks in worker processes: a task can be pickled, and its results are JSON values.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.layout import BatchLayout
from moe_rl.core.mappings import attributes
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.native import native_core
from moe_rl.core.schedules import framework_layout, with_rule
from moe_rl.core.software import SoftwareCosts
from moe_rl.core.step_words import Recompute
from moe_rl.core.topology import ClusterTopology, HardwareSpec
from moe_rl.planner.packing import best_start
from moe_rl.report.tuned_settings import ALIKE, ParallelLayout, TunedSetting
from moe_rl.report.units import GIB
from moe_rl.simulators.balanced import BalancedBatch, BalancedStep, cost_of_lengths, length_of_equal_sequences
from moe_rl.simulators.base_time import default_cp_comm_type
from moe_rl.simulators.memory import held_expert_bytes
from moe_rl.simulators.pipeline import stage_layers
from moe_rl.simulators.setting import StepSetting, TrainingRun
from moe_rl.study.expert_parts import model_in_parts
from moe_rl.study.resident_slots import SPARE_MEMORY

# Tokens of a rank in a micro-batch: slime's and verl's MoE scripts have 8,192 to 32,768; one step more on either side.
BUDGETS = (4096, 8192, 16384, 32768, 65536)
# From the fastest to the smallest: more is recomputed only where less does not fit.
RECOMPUTE = (Recompute.NONE, Recompute.MOE, Recompute.FULL)
MOST_RESIDENT = 4  # Resident slots that `auto` makes room for: on the development trace a third saves nothing.

# Fields of a shape that a `StepSetting` has.
PARALLEL = (
    "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size", "num_virtual_stages",
    "dispatcher",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeTask:
    """Prices the settings of one shape; can be pickled."""

    shapes: tuple[ParallelLayout, ...]
    model: MoeModelSpec
    hardware: HardwareSpec
    base: StepSetting
    lengths: NDArray[np.int64]
    gpus: int
    ranks_per_node: int
    recompute: tuple[Recompute, ...] = RECOMPUTE
    layout: str = "verl"
    """Framework whose rule forms micro-batches, as in `--layout`."""
    packing: str = "run"
    """What moe_rl may do with these micro-batches, as in `--packing`."""
    micro_batch_tokens: int | None = None
    """Of a data-parallel rank; None: `BUDGETS`."""
    is_recorded: bool = False
    """The lengths are those of a recorded batch: a setting fits if this batch does, however large its budget."""
    buffers: int = 0
    """Experts of other ranks for which a rank keeps room."""
    resident_slots: int | None = 0
    """The same in every layer; None: as many as fit, where an EP group has several nodes."""

    def __call__(self, index: int) -> dict[str, object]:
        """Return the settings of a shape that fit into memory, as JSON values."""
        return {"found": [asdict(row) for row in self.settings_of(index)]}

    def settings_of(self, index: int) -> list[TunedSetting]:
        """Return the settings of a shape that fit into memory, by ascending token budget."""
        shape = self.shapes[index]
        if self.is_recorded:
            return list(self._fitting_batch(shape))
        return [self.priced(shape, setting, budget) for budget, setting in self._fitting(shape)]

    def estimated(self, index: int) -> float:
        """Return about the most tokens/s/GPU of a shape, 0 where no setting fits: micro-batches as if sequences could
        be cut, as few as the budget allows."""
        shape, best = self.shapes[index], 0.0
        num_tokens = float(self.lengths.sum())
        for budget, setting in self._fitting(shape):
            run = self._run(shape, setting)
            together = 1
            if shape.num_virtual_stages > 1:
                together = shape.pipeline_model_parallel_size
            rounds = math.ceil(num_tokens / (budget * run.topology.num_dp_ranks * together))
            seconds = self._even_step(run, rounds * together).step_time_s
            best = max(best, num_tokens / seconds / self.gpus)
        return best

    def _budgets(self, shape: ParallelLayout) -> list[int]:
        """Return the token budgets of a data-parallel rank that are tried, ascending."""
        if self.micro_batch_tokens:
            return [self.micro_batch_tokens]
        return sorted({max(budget * shape.slices, int(self.lengths.max())) for budget in BUDGETS})

    def _even_step(self, run: TrainingRun, count: int) -> BalancedStep:
        """Return the step of `count` equal micro-batches of sequences with as much attention per token as these."""
        tokens_per_rank = max(1, round(float(self.lengths.sum()) / run.topology.num_ranks / count))
        length = length_of_equal_sequences(
            run, self.lengths, row_tokens=tokens_per_rank * run.topology.slices_per_dp_rank
        )
        return BalancedBatch.of(run, tokens_per_rank=tokens_per_rank, sequence_length=length).step(count)

    def _framework_layout(self, run: TrainingRun, budget: int, multiple_of: int) -> BatchLayout:
        """Return the micro-batches that the framework forms by itself."""
        ranks = run.topology.num_dp_ranks
        return _layout_of_bytes(
            self.layout, self.lengths.tobytes(), run.model, ranks=ranks, budget=budget, multiple_of=multiple_of
        )

    def _run(self, shape: ParallelLayout, setting: StepSetting) -> TrainingRun:
        ranks = self.gpus // shape.pipeline_model_parallel_size
        topology = ClusterTopology(
            hardware=self.hardware,
            ep_size=shape.expert_ranks,
            num_ep_groups=ranks // shape.expert_ranks,
            slices_per_dp_rank=shape.slices,
            ranks_per_node=min(self.ranks_per_node, shape.expert_ranks),
        )
        return TrainingRun(
            model=model_in_parts(self.model, shape.expert_tensor_parallel_size), topology=topology, setting=setting
        )

    def _fitting(self, shape: ParallelLayout) -> Iterator[tuple[int, StepSetting]]:
        """Yield every token budget that fits, ascending, with the setting of least recomputation that makes it fit.

        More tokens need more memory: a setting that does not fit is not tried again for a larger budget.
        """
        settings = self._settings(shape)
        for budget in self._budgets(shape):
            while settings and not self._fits(shape, settings[0], budget):
                del settings[0]
            if not settings:
                return
            yield budget, settings[0]

    def _fits(self, shape: ParallelLayout, setting: StepSetting, budget: int) -> bool:
        """Return whether full micro-batches fit; of a recorded batch, those that it has if its ranks are even."""
        run, num_tokens = self._run(shape, setting), int(self.lengths.sum())
        tokens = min(budget, num_tokens)
        if self.is_recorded:
            of_rank = math.ceil(num_tokens / run.topology.num_dp_ranks)
            tokens = max(int(self.lengths.max()), math.ceil(of_rank / math.ceil(of_rank / budget)))
        return self._room(run, tokens // shape.slices) >= (self.resident_slots or 0)

    def _fitting_batch(self, shape: ParallelLayout) -> Iterator[TunedSetting]:
        """Yield every token budget with which the recorded batch fits, priced with the least recomputation it needs.

        Budgets end at the first with which the batch is one micro-batch, packed or not: more change nothing.
        """
        for budget in self._budgets(shape):
            for setting in self._settings(shape):
                row = self.priced(shape, setting, budget)
                if row.peak_gib <= self._most_gib:
                    yield row
                    if row.num_micro_batches == 1 and row.packing_gain < 1.0 + ALIKE:
                        return
                    break

    def _settings(self, shape: ParallelLayout) -> list[StepSetting]:
        """Return the settings of a shape, from the fastest to the smallest."""
        named = {name: value for name, value in asdict(shape).items() if not name.startswith("expert_")}
        return [replace(self.base, **named, recompute=recompute) for recompute in self.recompute]

    @property
    def _most_gib(self) -> float:
        """GiB that a peak may have."""
        return (1 - SPARE_MEMORY) * self.hardware.hbm_gib

    def _peak(self, run: TrainingRun, tokens: int) -> int:
        """Return the peak without resident slots."""
        batch = BalancedBatch.of(run, tokens_per_rank=max(1, tokens), sequence_length=1)
        return batch.memory(buffers=self.buffers, with_remedies=False).peak_bytes

    def _room(self, run: TrainingRun, tokens: int) -> float:
        """Return the resident slots for which memory is left; negative where the rest does not fit."""
        return (self._most_gib * GIB - self._peak(run, tokens)) / _slot_bytes(run)

    def free_slots(self, row: TunedSetting) -> int:
        """Return the resident slots for which a setting leaves memory, at least those that it has."""
        limit = self._most_gib - row.peak_gib
        setting = replace(self.base, **attributes(row, PARALLEL), recompute=row.recompute)
        return row.resident_slots + max(0, int(limit * GIB / _slot_bytes(self._run(row, setting))))

    def repriced(self, row: TunedSetting, hardware: HardwareSpec, costs: SoftwareCosts) -> float:
        """Return the seconds of a priced setting's balanced micro-batches under other constants."""
        parallel = attributes(row, PARALLEL)
        setting = replace(self.base, **parallel, recompute=row.recompute, software=costs)
        run = replace(self, hardware=hardware)._run(row, setting)
        return self._even_step(run, row.num_micro_batches).step_time_s

    def under(self, row: TunedSetting, costs: SoftwareCosts) -> TunedSetting:
        """Return a priced setting as other software runs it."""
        task = replace(self, base=replace(self.base, software=costs))
        setting = replace(task.base, **attributes(row, PARALLEL), recompute=row.recompute)
        return task.priced(row.shape, setting, row.micro_batch_tokens)

    def priced(self, shape: ParallelLayout, setting: StepSetting, budget: int) -> TunedSetting:
        """Return the setting with its step: balanced micro-batches, plus the time that uneven lengths add."""
        run, lengths, slots = self._run(shape, setting), self.lengths, self.resident_slots
        topology, stages = run.topology, setting.pipeline_model_parallel_size
        core = native_core()
        per_rank = float(lengths.sum()) / topology.num_ranks
        most_tokens = min(budget / shape.slices, per_rank)
        cost = cost_of_lengths(run, lengths, tokens_per_rank=most_tokens)
        own_layout = self._framework_layout(run, budget, cost.multiple_of)
        if core is None or with_rule(own_layout, self.layout, self.packing).fixed:
            layout = own_layout
        else:
            layout = best_start(own_layout, cost, lengths, topology, core, searched=False)
        count = len(np.unique(layout.micro_batch))
        even_step = self._even_step(run, count)
        # Sequences cannot be cut, so the busiest rank of a micro-batch has more than the mean.
        uneven_s = cost.balanced_s(layout, topology) - cost.even_s(count, topology)
        # Micro-batches follow each other through the stage with most layers.
        slowest = max(stage_layers(self.model, setting)) / sum(stage_layers(self.model, setting))
        parts = {**even_step.breakdown_s, "uneven_sequences": max(0.0, uneven_s) * (slowest if stages > 1 else 1.0)}
        seconds = sum(parts.values())
        fullest_tokens = int(layout.rank_tokens(lengths).max())
        if self.is_recorded:  # A run without packing has the framework's micro-batches, and must fit as well.
            fullest_tokens = max(fullest_tokens, int(own_layout.rank_tokens(lengths).max()))
        fullest_tokens //= shape.slices
        # Inside one node no copy of a token crosses the network, and a resident copy has nothing to save.
        if slots is None:
            slots = 0
            if topology.num_nodes > 1:
                slots = min(MOST_RESIDENT, max(0, int(self._room(run, fullest_tokens))))
        return TunedSetting(
            **asdict(shape),
            micro_batch_tokens=budget,
            num_micro_batches=count,
            recompute=setting.recompute,
            tokens_per_s_per_gpu=float(lengths.sum()) / seconds / self.gpus,
            packing_gain=cost.balanced_s(own_layout, topology) / cost.balanced_s(layout, topology),
            resident_slots=slots,
            cp_comm_type=_exchange(run),
            peak_gib=(self._peak(run, fullest_tokens) + slots * _slot_bytes(run)) / GIB,
            parts={name: value / seconds for name, value in parts.items()},
        )


def _exchange(run: TrainingRun) -> str | None:
    """Return how the CP ranks of a run exchange keys and values; None without context parallelism."""
    if run.setting.context_parallel_size == 1:
        return None
    return run.setting.cp_comm_type or default_cp_comm_type(run.model, run.topology.hardware, run.setting)


def _slot_bytes(run: TrainingRun) -> float:
    """Return the bytes of one resident slot in every layer of a stage."""
    model, setting = run.model, run.setting
    return held_expert_bytes(model, setting) * model.num_moe_layers / setting.pipeline_model_parallel_size


# Shapes with as many data-parallel ranks share a layout: the lengths as bytes, which can be a key.
@lru_cache(maxsize=256)
def _layout_of_bytes(
    name: str, lengths: bytes, model: MoeModelSpec, *, ranks: int, budget: int, multiple_of: int
) -> BatchLayout:
    """Return a framework's layout of int64 lengths."""
    of_bytes = np.frombuffer(lengths, np.int64)
    return framework_layout(
        name, of_bytes, num_dp_ranks=ranks, token_budget=budget, multiple_of=multiple_of, model=model
    )
