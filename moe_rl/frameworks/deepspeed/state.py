"""The experts of AutoEP layers and what ZeRO 1 and 2 keep for them: fp32 masters and moments, in shards.

ZeRO lays the expert parameters of a rank flat, one after the other, and gives every expert-DP rank an equal part,
wherever the cuts fall. Sources: deepspeed.runtime.zero.stage_1_and_2, deepspeed.utils.tensor_fragment.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.balancing.schedule import home_experts
from moe_rl.core.errors import require
from moe_rl.core.placement import ExpertPlacement
from moe_rl.frameworks.ep_balancer import EpGroups
from moe_rl.frameworks.ep_exchange import parameters_of
from moe_rl.frameworks.ep_layer import LayerRun


def why_fixed(engine: Any) -> str:
    """Return why the experts of this engine cannot move; empty where they can."""
    stage, optimizer = engine.zero_optimization_stage(), type(engine.optimizer).__name__
    if stage not in (1, 2) or optimizer != "DeepSpeedZeroOptimizer":
        return (
            f"moving experts needs DeepSpeedZeroOptimizer at ZeRO stage 1 or 2, but this engine has {optimizer} at "
            f"stage {stage}."
        )
    if engine.optimizer.cpu_offload:
        return "zero_optimization.offload_optimizer is on, and moving experts has never been tested with it."
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotViews:
    """The experts of one layer on this rank, as views of its parameters [E/P, ...]."""

    num_local_experts: int
    views: Sequence[Sequence[torch.Tensor]]
    """By slot, then by parameter."""

    def parameters_of(self, slot: int) -> Sequence[torch.Tensor]:
        """Return the views of the expert in home slot `slot`."""
        return self.views[slot]


# What the optimizer keeps of one expert's parameter: the shards of all expert-DP ranks, this rank's tensors.
Part = tuple[list[tuple[int, int]], list[list[torch.Tensor]]]


class ZeroState(dict[int, Part]):
    """The optimizer's tensors of every view, by the view's id."""

    def shards(self, parameter: torch.Tensor) -> list[tuple[int, int]]:
        """Return, per expert-DP rank, the elements start .. stop - 1 whose state it holds."""
        return self[id(parameter)][0]

    def tensors(self, parameter: torch.Tensor) -> list[list[torch.Tensor]]:
        """Return this rank's moments, by name, and the fp32 master; empty where it holds no shard."""
        return self[id(parameter)][1]


class AutoEpExperts:
    """The experts of all layers of this rank, ready to move."""

    def __init__(self, optimizer: Any, modules: Sequence[Any], runs: Sequence[LayerRun], groups: EpGroups) -> None:
        self.layers = range(len(modules))
        self._optimizer, self._modules, self._runs, self._groups = optimizer, list(modules), list(runs), groups

    def ready(self) -> tuple[list[SlotViews], ZeroState]:
        """Return the experts and their state; a collective of all ranks, for the cuts of the shards."""
        parameters = [parameters_of(module.experts) for module in self._modules]
        cuts = self._cuts(list(itertools.chain.from_iterable(parameters)))
        state, experts, number = ZeroState(), [], 0
        for of_layer in parameters:
            by_parameter = []
            for parameter in of_layer:
                views = list(parameter.detach())
                for slot, view in enumerate(views):
                    state[id(view)] = self._part(parameter, slot, cuts[:, number])
                by_parameter.append(views)
                number += 1
            views_by_slot = list(zip(*by_parameter, strict=True))
            experts.append(SlotViews(num_local_experts=len(views_by_slot), views=views_by_slot))
        return experts, state

    def gradients_wait(self) -> bool:
        """Return whether a gradient other than zero waits for ZeRO's step, which drops what it has used.

        A backward takes it out of the parameters into lists of the optimizer: `all_grad_tensors` in an accumulation
        cycle, `averaged_gradients` at its end.
        """
        by_group = [*self._optimizer.all_grad_tensors.values(), *self._optimizer.averaged_gradients.values()]
        gradients: list[Any] = []
        for group in by_group:
            gradients += group or ()
        for module in self._modules:
            for parameter in parameters_of(module.experts):
                gradients += [parameter.grad, getattr(parameter, "grad_accum", None)]
        nonzero = [gradient.ne(0).any() for gradient in gradients if gradient is not None]
        if not nonzero:
            return False
        return bool(torch.stack(nonzero).any())

    def follow(self, placement: ExpertPlacement) -> None:
        """Let the layers route to the homes of `placement`."""
        for run, experts in zip(self._runs, home_experts(placement), strict=True):
            at_home = np.array_equal(experts, np.arange(len(experts)))
            run.homes = None
            if not at_home:
                run.homes = torch.from_numpy(np.argsort(experts)).to(self._groups.device)

    def _cuts(self, parameters: Sequence[torch.Tensor]) -> NDArray[np.int64]:
        """Return [G, parameters, 2]: the elements start .. stop - 1 that every expert-DP rank has the state of."""
        own_cuts = np.zeros((len(parameters), 2), np.int64)
        for number, parameter in enumerate(parameters):
            mapping: Any = getattr(parameter, "_hp_mapping", None)  # frozen parameters have none
            if mapping is not None:
                start = mapping.lp_fragment_address.start
                own_cuts[number] = start, start + mapping.lp_fragment_address.numel
        everyone = self._groups.gather_in_run(own_cuts)[self._groups.grid]
        require(
            bool((everyone == everyone[:, :1]).all()),
            "ZeRO splits the experts of different EP ranks at different offsets.",
        )
        cuts: NDArray[np.int64] = everyone[:, 0]
        return cuts

    def _part(self, parameter: Any, slot: int, cuts: NDArray[np.int64]) -> Part:
        """Return the state of the expert in `slot` of a parameter whose state is cut at `cuts` [G, 2]."""
        size = parameter.numel() // len(parameter)
        # A shard that ends before this expert, or starts behind it, is cut to nothing: start = stop.
        starts, stops = np.clip(cuts - slot * size, 0, size).T
        shards = list(zip(starts.tolist(), np.maximum(starts, stops).tolist(), strict=True))
        start, stop = shards[self._groups.place[0]]
        if start == stop:
            return shards, []
        mapping = parameter._hp_mapping
        master = self._optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        offset = mapping.hp_fragment_address.start - mapping.lp_fragment_address.start + slot * size
        state = self._optimizer.optimizer.state.get(master, {})
        # Not by DeepSpeed's own links: these are made once, when only the first parameter group has stepped.
        states = (value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor))
        # What has another shape counts steps, and is the same for all experts.
        values = [*(value for value in states if value.shape == master.shape), master]
        return shards, [[value.detach()[offset + start : offset + stop]] for value in values]
