"""What moves when an expert gets another home: beside its weights fp32 masters and Adam moments in Megatron's
distributed optimizer.

The optimizer lays all expert parameters of a rank into flat buffers and cuts every bucket into equal shards, one per
expert-DP rank, wherever the cuts fall. The layout is the same on every EP rank, so that each rank knows the shards of
all others without asking.

Where the master of a bf16 weight is depends on the optimizer:

    Megatron's default                  its own fp32 tensor
    precision-aware (FusedAdam)         in the moments' dict, whole or as the 16 bits that bf16 lacks
    offloaded (HybridDeviceOptimizer)   a copy on the host; unless precision-aware, Megatron's tensor mirrors it
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.placement import ExpertPlacement
from moe_rl.megatron.activate import home_table
from moe_rl.megatron.experts import Experts
from moe_rl.megatron.layer import LayerState, layers_of

# Of precision-aware state: in others TransformerEngine keeps one scale per tensor, which parts of two cannot share.
MOVABLE_DTYPES = (torch.float32, torch.bfloat16)


class ExpertOptimizerState:
    """Finds the optimizer's tensors of an expert parameter on this rank, and the shard of every expert-DP rank."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizers: list[DistributedOptimizer] = []
        for chained in getattr(optimizer, "chained_optimizers", [optimizer]):
            if not isinstance(chained, DistributedOptimizer):
                raise InvalidInputError(
                    "reorder() needs Megatron's DistributedOptimizer (use_distributed_optimizer=True), but the "
                    f"optimizer is a {type(chained).__name__}."
                )
            for option in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
                dtype = getattr(chained.config, option, torch.float32)
                require(
                    not chained.config.use_precision_aware_optimizer or dtype in MOVABLE_DTYPES,
                    f"reorder() does not support {option} {dtype}: the optimizer then has one scale per tensor, but "
                    "the state of a moved expert may be in two tensors.",
                )
            instances = getattr(chained.ddp_config, "num_distributed_optimizer_instances", 1)
            require(instances == 1, f"reorder() needs exactly one distributed-optimizer instance, got {instances}.")
            if not getattr(
                chained, "is_stub_optimizer", False
            ):  # it has no parameter: with LoRA only experts may train
                self._optimizers.append(chained)

    def shards(self, parameter: torch.nn.Parameter) -> list[tuple[int, int]]:
        """Return, per expert-DP rank, the elements start .. stop - 1 of `parameter` whose state it holds.

        Empty where it is frozen: the base weights under an adapter have no state.
        """
        if not parameter.requires_grad:
            return []
        owner, buffer = self._owner(parameter)
        first_element, end_element, bucket_index = buffer.param_index_map[parameter]
        bucket = buffer.buckets[bucket_index]
        size = owner.data_parallel_group.size()
        per_shard = bucket.grad_data.numel() // size
        shards = []
        for rank in range(size):  # shards are cut without regard to parameters: one may lie in several
            start = max(first_element, bucket.offset + rank * per_shard) - first_element
            stop = min(end_element, bucket.offset + (rank + 1) * per_shard) - first_element
            shards.append((start, max(start, stop)))
        return shards

    def tensors(self, parameter: torch.nn.Parameter) -> list[list[torch.Tensor]]:
        """Return this rank's state of `parameter`: moments by name, then the fp32 master if it is not the parameter.

        Each is flat and stands first in a list of the places where it is kept; the others mirror it. Empty where this
        rank holds no shard of `parameter`, and before the first step of an fp32 model.
        """
        owner, _ = self._owner(parameter)
        if parameter not in owner.model_param_group_index_map:
            return []
        group, index = owner.model_param_group_index_map[parameter]
        main = owner.optimizer.param_groups[group]["params"][index]
        offloads = isinstance(owner.optimizer, HybridDeviceOptimizer)
        master = owner.optimizer.param_to_inner_param[main] if offloads else main
        state = owner.optimizer.state.get(main, {})
        states = []
        for name, value in sorted(state.items()):
            is_master = offloads and name == "master_param"
            # A step count is a tensor, too, of no dimension: no share of it belongs to one expert.
            is_of_elements = isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == main.numel()
            if is_of_elements and not is_master:
                states.append([value.view(-1)])
        own_storage = parameter.untyped_storage().data_ptr()
        places = [place for place in (master, main) if place.untyped_storage().data_ptr() != own_storage]
        if master is main:
            places = places[:1]
        if places:
            return [*states, [place.detach().view(-1) for place in places]]
        return states

    def _owner(self, parameter: torch.nn.Parameter) -> tuple[DistributedOptimizer, Any]:
        for optimizer in self._optimizers:
            for buffer in optimizer.buffers:
                if parameter in buffer.param_index_map:
                    return optimizer, buffer
        raise InvalidInputError("the optimizer that attach received lacks parameters of at least one expert.")


class MegatronExperts:
    """The experts of this rank's layers, and the distributed optimizer's state of them."""

    def __init__(self, states: Sequence[LayerState], *, optimizer: Any, device: torch.device) -> None:
        self.layers = layers_of(states)
        self._states, self._optimizer, self._device = list(states), optimizer, device
        self._hooks = []
        for chained in getattr(optimizer, "chained_optimizers", [optimizer]):
            inner = getattr(chained, "optimizer", None)
            # A step that Megatron skips for an infinity does not reach them.
            if isinstance(inner, torch.optim.Optimizer):
                self._hooks.append(inner.register_step_post_hook(self._note_step))

    def release(self) -> None:
        """Take the hooks off the optimizers."""
        for hook in self._hooks:
            hook.remove()

    def gradients_wait(self) -> bool:
        """Return whether an expert has a gradient other than zero that no optimizer step has used; waits for it."""
        if not any(state.clock.trained for state in self._states):
            return False
        nonzero_gradients = []
        for state in self._states:
            for slot in range(state.experts.num_local_experts):
                for parameter in state.experts.parameters_of(slot):
                    nonzero_gradients += [gradient.ne(0).any() for gradient in _gradients_of(parameter)]
        # One wait of the host for all of them.
        if not nonzero_gradients:
            return False
        return bool(torch.stack(nonzero_gradients).any())

    def _note_step(self, *_: Any) -> None:
        for state in self._states:
            state.clock.trained = False

    def ready(self) -> tuple[list[Experts], ExpertOptimizerState]:
        """Return the experts, after what is still being gathered of them, and their state; raise without optimizer."""
        require(
            self._optimizer is not None,
            "experts cannot move to other ranks without their optimizer state, but attach received no optimizer.",
        )
        state = ExpertOptimizerState(self._optimizer)
        self.complete_gathers()
        return [layer_state.experts for layer_state in self._states], state

    def complete_gathers(self) -> None:
        """Return once this rank's weights are those of the last optimizer step."""
        for layer_state in self._states:
            if layer_state.gather is not None:
                layer_state.gather.complete()

    def follow(self, placement: ExpertPlacement) -> None:
        """Let the layers route to the homes of `placement`."""
        for state in self._states:
            state.home_table = home_table(placement, state.layer, self._device)


def _gradients_of(parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    """Return where gradients of a parameter gather: Megatron's DDP keeps `main_grad`, without it they are `grad`."""
    places = [getattr(parameter, "main_grad", None), parameter.grad]
    # A framework that puts gradients away frees their storage and leaves the tensors.
    return [gradient for gradient in places if gradient is not None and gradient.untyped_storage().size()]
