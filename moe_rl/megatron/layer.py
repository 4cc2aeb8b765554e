"""The MoE layer that follows a plan: Megatron's `MoELayer` with a slot remap before dispatch and replicas in between.

Router, auxiliary losses, shared experts, parameters and checkpoint keys are Megatron's. Without a plan the layer is
exactly `MoELayer`.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from torch.utils.hooks import RemovableHandle

from moe_rl.balancing.clock import OUTSIDE, MicroBatchClock
from moe_rl.balancing.route_counter import RouteCounter
from moe_rl.balancing.slots import SlotTable
from moe_rl.core.errors import require
from moe_rl.megatron import flex
from moe_rl.megatron.backward_ranges import BackwardRanges
from moe_rl.megatron.exchange import ReplicatedExperts
from moe_rl.megatron.experts import Experts
from moe_rl.megatron.model_spec import built_as
from moe_rl.megatron.param_gather import ParameterGather
from moe_rl.profiling import ranges


@dataclass(slots=True, kw_only=True)
class LayerPlan:
    """What one layer does in one micro-batch for which some EP group has replicas."""

    table: SlotTable | None
    """Over home and replica slots; None where this EP group has none, and home slots do."""
    replicated: ReplicatedExperts


class PlannedRuns(Protocol):
    """What one layer does in every micro-batch of a pass."""

    def plan(self, micro_batch: int) -> LayerPlan | None:
        """Return the plan of a run; None is home slots alone."""

    def begin(self, micro_batch: int, *, recomputing: bool) -> LayerPlan | None:
        """Return the plan of a run that starts now, its push under way."""

    def end(self, micro_batch: int, output: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, prepared for backward."""


@dataclass(slots=True, kw_only=True)
class LayerState:
    """What `attach` adds to a layer; nothing of it is a Module or Parameter."""

    layer: int
    """Index among the model's MoE layers."""
    experts: Experts
    clock: MicroBatchClock
    original_class: type[MoELayer]
    entry: RemovableHandle | None = None
    """Calls `enter`; None where no transformer layer is around the module."""
    home_dispatcher: MoETokenDispatcher
    """Megatron's own, over E columns."""
    slot_dispatcher: MoETokenDispatcher
    """Over home and replica slots."""
    home_table: SlotTable | None = None
    """How homes are permuted; None while they are where Megatron put them."""
    plans: PlannedRuns | None = None
    """None outside a pass and in one without replicas: home slots alone."""
    rows: dict[int, int] = field(default_factory=dict)
    """Micro-batch -> token-expert pairs that this rank computed."""
    capacity_rows: int | None = None
    """Rows of the experts' buffer in this pass; None: as many as come."""
    most_tokens: int = 0
    """Tokens that a rank of the EP group dispatches at most, as far as passes foretold."""
    sent: dict[int, torch.Tensor] = field(default_factory=dict)
    """Micro-batch -> [P] token-expert pairs that this rank sends to each rank, on the device, in such a pass."""
    index: int = 0
    """Among the MoE layers of this rank."""
    counter: RouteCounter | None = None
    """Hears what the router chooses; None where nobody asks."""
    current: LayerPlan | None = None
    """Of the forward or recomputation that is under way."""
    begun: bool = False
    """Whether `enter` has begun the run that `route` is about to continue."""
    micro_batch: int = 0
    """Of the pass; `clock.OUTSIDE` in a forward that is none of its micro-batches."""
    recomputing: bool = False
    """Whether the run that is under way is a recomputation."""
    backward_ranges: BackwardRanges = field(default_factory=BackwardRanges)
    gather: ParameterGather | None = None
    """What the run must wait for before weights are read; None where parameters are always whole."""
    overlapped: bool = False
    """Whether backward of another micro-batch runs between this run's routes and its dispatch, as Megatron's
    overlap_moe_expert_parallel_comm has it: replicas' buffers are that one's until then."""
    placement_bitwise: bool = False
    """Whether combined rows are summed in the order of the logical experts; else in that of the slots."""
    combined_experts: tuple[torch.Tensor, torch.Tensor] | None = None
    """([S] expert of every slot, [S] rows that this rank sent there) in a run that sums in logical order."""

    @property
    def counts(self) -> bool:
        """Whether the run that is under way is one of the pass, and not a recomputation of one."""
        return not self.recomputing and self.micro_batch != OUTSIDE

    @property
    def buffer_rows(self) -> int | None:
        """Rows of the experts' buffer in the run that is under way; None: as many as come."""
        if self.micro_batch == OUTSIDE:
            return None
        return self.capacity_rows

    @property
    def replica_table(self) -> SlotTable | None:
        """How the run that is under way uses replica slots; None where it uses home slots alone."""
        if self.current is None:
            return None
        return self.current.table


class ElasticMoELayer(MoELayer):
    """A `MoELayer` whose experts can sit in other slots and be replicated for one micro-batch."""

    _elastic: LayerState | None = None

    def enter(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Begin at the input of the transformer layer: pushes then run beside attention. Returns that input."""
        state = self._elastic
        if state is None:
            return hidden_states
        self._begin(state)
        state.begun = True
        # Where this module alone is recomputed, its graph does not reach the transformer layer's input.
        if state.current is None or self.moe_layer_recompute:
            return hidden_states
        return state.current.replicated.enter(hidden_states)

    def route(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Route as Megatron does; what `enter` has not begun begins here."""
        state = self._elastic
        if state is not None:
            if not state.begun:
                self._begin(state)
            state.begun = False
        with self._range("router"):
            return super().route(hidden_states, *args, **kwargs)

    def preprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> Any:
        """Turn expert columns into slot columns, then prepare the dispatch."""
        state = self._elastic
        table = None if state is None else state.replica_table or state.home_table
        if state is not None:
            state.combined_experts = None
            if state.counter is not None and state.counts:
                state.counter.count_map(state.micro_batch, state.index, routing_map)
        if state is not None and table is not None:
            probs, routing_map = table.to_slots(probs, routing_map)
            if state.placement_bitwise:
                state.combined_experts = table.expert, routing_map.sum(dim=0)
        prepared = super().preprocess(hidden_states, probs, routing_map)
        if state is not None and state.buffer_rows is not None:
            if state.counts:
                state.sent[state.micro_batch] = (
                    routing_map.sum(dim=0).view(self.token_dispatcher.ep_size, -1).sum(dim=1)
                )
            flex.limit_rows(self.token_dispatcher, state.buffer_rows)
        return prepared

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        """Dispatch as Megatron does, under a named range."""
        if self._elastic is not None:
            flex.make_room(self._elastic.slot_dispatcher, hidden_states, self._elastic.most_tokens)
            if self._elastic.overlapped and self._elastic.current is not None:
                self._elastic.current.replicated.start_push()
        with self._range("dispatch"):
            dispatched = super().dispatch(hidden_states, probs)
        flex.limit_rows(self.token_dispatcher, None)
        self._mark_backward("dispatch", (hidden_states, probs), dispatched)
        return dispatched

    def combine(self, output: torch.Tensor) -> torch.Tensor:
        """Combine as Megatron does, under a named range."""
        with self._range("combine"):
            combined: torch.Tensor = super().combine(output)
        self._mark_backward("combine", (output,), (combined,))
        return combined

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Run home slots and replicas on the dispatched tokens."""
        state = self._elastic
        if state is None:
            return super().routed_experts_compute(hidden_states, probs)
        rows, rows_per_slot, row_probs = self.token_dispatcher.dispatch_postprocess(hidden_states, probs)
        num_arrived, counts, buffer_rows = len(rows), rows_per_slot, state.buffer_rows
        if buffer_rows is None:
            counts = rows_per_slot.tolist()
            if state.counts:
                state.rows[state.micro_batch] = sum(counts)
        elif num_arrived < buffer_rows:  # more of them run as they are, and end_pass() raises
            missing_rows = buffer_rows - num_arrived
            rows, row_probs = F.pad(rows, (0, 0, 0, missing_rows)), F.pad(row_probs, (0, missing_rows))
        with self._range("expert_gemm"):
            if state.current is not None:
                output = state.current.replicated.compute(rows, counts, row_probs)
            elif buffer_rows is None:
                output = state.experts.forward_homes(rows, rows_per_slot, row_probs)
            else:
                no_replicas = [None] * state.experts.num_local_experts
                output = state.experts.forward(rows, counts, row_probs, no_replicas, no_replicas)
        if len(output) > num_arrived:
            output = output[:num_arrived]
        self._mark_backward("expert_gemm", (rows, row_probs), (output,))
        return self.token_dispatcher.combine_preprocess(output), None

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Combine as Megatron does; backward starts here by pushing the replicas again."""
        state = self._elastic
        if state is not None and state.combined_experts is not None:
            dispatcher = self.token_dispatcher
            token_of_row = dispatcher.reversed_local_input_permutation_mapping
            order = _expert_order(*state.combined_experts, token_of_row)
            output = output.index_select(0, order)
            dispatcher.reversed_local_input_permutation_mapping = token_of_row.index_select(0, order)
        output = super().postprocess(output, shared_expert_output)
        if state is not None and state.plans is not None and state.micro_batch != OUTSIDE:
            output = state.plans.end(state.micro_batch, output)
        return output

    def _range(self, category: str) -> AbstractContextManager[None]:
        """Mark the enclosed forward work of this layer and micro-batch."""
        state = self._elastic
        if state is None:
            return nullcontext()
        phase = "recompute" if state.recomputing else "forward"
        return ranges.range(category, layer=state.layer, micro_batch=max(0, state.micro_batch), phase=phase)

    def _mark_backward(self, category: str, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Mark the backward work between the gradients of `results` and those of `inputs`."""
        state = self._elastic
        if state is not None:
            state.backward_ranges.mark(category, inputs, results, layer=state.layer, micro_batch=state.micro_batch)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return Megatron's; raise while experts are elsewhere than their names say, and so do the next two."""
        self.require_home("saved")
        return super().state_dict(*args, **kwargs)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return what a distributed checkpoint holds."""
        self.require_home("saved")
        return super().sharded_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.require_home("loaded")
        super()._load_from_state_dict(*args, **kwargs)

    def require_home(self, what: str) -> None:
        """Raise if experts are not where Megatron puts them; `what` nobody can do with them then: saved, loaded."""
        homes_have_moved = self._elastic is not None and self._elastic.home_table is not None
        require(
            not homes_have_moved,
            f"nothing can be {what} now, because the experts of layer {self.layer_number} are not on the ranks "
            "where Megatron puts them: make this call inside `with balancer.canonical():`.",
        )

    def _begin(self, state: LayerState) -> None:
        """Look up what this run of the layer is to do, and start the pushes."""
        state.recomputing = state.clock.recomputing
        state.micro_batch = state.clock.micro_batch(state.layer)
        state.current = None
        if state.gather is not None:
            state.gather.wait()
        state.experts.begin(state.clock.current_pass)
        plans = None if state.micro_batch == OUTSIDE else state.plans
        if plans is not None and state.overlapped:
            state.current = plans.plan(state.micro_batch)
        elif plans is not None:
            with self._range("replicate"):
                state.current = plans.begin(state.micro_batch, recomputing=state.recomputing)
        self.token_dispatcher = state.home_dispatcher if state.replica_table is None else state.slot_dispatcher


def hook_entry(chunk: torch.nn.Module, layer: ElasticMoELayer) -> RemovableHandle | None:
    """Let the layer begin when the transformer layer around it does; None where there is none around it.

    A replica's weights can then travel while attention runs. A transformer layer is a module of the chunk that holds
    the MoE layer as `mlp` and takes `hidden_states` first.
    """
    for module in chunk.modules():
        if getattr(module, "mlp", None) is layer:
            return module.register_forward_pre_hook(_enter, with_kwargs=True)
    return None


def _enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    layer: Any = module.mlp
    if args:
        return (layer.enter(args[0]), *args[1:]), dict(kwargs)
    return args, {**kwargs, "hidden_states": layer.enter(kwargs["hidden_states"])}


def _expert_order(expert_of_slot: torch.Tensor, rows_of_slot: torch.Tensor, token_of_row: torch.Tensor) -> torch.Tensor:
    """Return [R] the rows, which stand slot by slot, in the order of their logical experts, then of their tokens.

    A sum of more than two terms depends on its order. R is known on the host, so that nothing here waits for a device.
    """
    num_rows = len(token_of_row)
    row = torch.arange(num_rows, device=token_of_row.device)
    expert_of_row = expert_of_slot[torch.searchsorted(rows_of_slot.cumsum(0), row, right=True)]
    return torch.argsort(expert_of_row * num_rows + token_of_row)


def elastic_spec(spec: ModuleSpec) -> ModuleSpec:
    """Return a transformer-layer spec whose MoE layer is an `ElasticMoELayer`; raise if it has none."""
    elastic = copy.deepcopy(spec)
    moe = getattr(elastic.submodules, "mlp", None)
    elastic.submodules.mlp = built_as(moe, MoELayer, ElasticMoELayer)
    if elastic.submodules.mlp is None:
        raise ValueError(f"the layer spec must have MoELayer at submodules.mlp, but has {moe!r}.")
    return elastic


def dispatcher_over_slots(layer: MoELayer, *, num_slots: int) -> MoETokenDispatcher:
    """Return a dispatcher of the layer's kind for `num_slots` slots per rank instead of its experts."""
    dispatcher = layer.token_dispatcher
    config = copy.copy(layer.config)
    config.num_moe_experts = dispatcher.ep_size * num_slots
    groups = ProcessGroupCollection()
    groups.ep, groups.expt_tp, groups.tp_ep = dispatcher.ep_group, dispatcher.tp_group, dispatcher.tp_ep_group
    start = dispatcher.ep_group.rank() * num_slots
    over_slots = type(dispatcher)(num_slots, list(range(start, start + num_slots)), config=config, pg_collection=groups)
    flex.over_slots(over_slots)
    if layer.shared_expert_overlap:
        over_slots.set_shared_experts(layer.shared_experts)
    return over_slots


def layers_of(states: Sequence[LayerState]) -> list[int]:
    """Return the layers' indices among the model's MoE layers."""
    return [state.layer for state in states]


def experts_by_layer(states: Sequence[LayerState]) -> dict[int, Experts]:
    """Return the experts of every layer by its index among the model's MoE layers."""
    return {state.layer: state.experts for state in states}
