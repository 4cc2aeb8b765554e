"""What a run forecasts of its memory before a pass, by the simulator's own function.

M micro-batches, l MoE layers of this pipeline stage, P ranks of the EP group.
"""

from dataclasses import dataclass

from moe_rl.balancing.pass_planner import PlannedPass
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.memory import MemoryForecast, forecast_memory
from moe_rl.simulators.setting import StepSetting


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAhead:
    """The run, as the forecast takes it."""

    model: MoeModelSpec
    """With its vocabulary, and what beside routed experts takes memory."""
    topology: ClusterTopology
    setting: StepSetting
    stage: int
    """This rank's pipeline stage."""
    buffers: int
    """Experts that the buffers of replicas hold: R + 2 C."""
    hbm_bytes: int | None = None
    """Of this rank's GPU; None: as the cluster's file says."""

    def forecast(self, planned: PlannedPass, placement: ExpertPlacement) -> MemoryForecast | None:
        """Return the peak of the update for certified rows, else for expected ones; None where no loads are known."""
        rows = planned.predicted_rows if planned.most_rows is None else planned.most_rows
        if rows is None or planned.held is None or planned.misfit or not rows.size:
            return None
        return forecast_memory(
            rows[None].astype(float), planned.held[None].astype(float), placement, model=self.model,
            topology=self.topology, setting=self.setting, buffers=self.buffers, stage=self.stage,
            hbm_bytes=self.hbm_bytes,
        )  # fmt: skip
