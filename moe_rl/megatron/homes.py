"""What moves when experts get other homes in a Megatron run."""

from collections.abc import Sequence
from typing import Any

import torch

from moe_rl.core.errors import require
from moe_rl.core.placement import ExpertPlacement
from moe_rl.megatron.activate import home_table
from moe_rl.megatron.expert_state import ExpertOptimizerState
from moe_rl.megatron.experts import Experts
from moe_rl.megatron.layer import LayerState


class MegatronExperts:
    """The experts of this rank's layers, and the distributed optimizer's state of them."""

    def __init__(self, states: Sequence[LayerState], *, optimizer: Any, device: torch.device) -> None:
        self.layers = [state.layer for state in states]
        self._states, self._optimizer, self._device = list(states), optimizer, device

    def ready(self) -> tuple[list[Experts], ExpertOptimizerState]:
        """Return the experts, after what is still being gathered of them, and their state; raise without optimizer."""
        require(self._optimizer is not None, "attach was given no optimizer: a reorder would leave its state behind.")
        state = ExpertOptimizerState(self._optimizer)
        for each in self._states:
            if each.gather is not None:
                each.gather.complete()
        return [each.experts for each in self._states], state

    def follow(self, placement: ExpertPlacement) -> None:
        """Let the layers route to the homes of `placement`."""
        for state in self._states:
            state.home_table = home_table(placement, state.layer, self._device)
