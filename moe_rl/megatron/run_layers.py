"""Megatron's MoE layers of one rank, as a pass cycle sees them: what they are told and what they did.

L MoE layers of this stage, M micro-batches, P EP ranks.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from numpy.typing import NDArray

from moe_rl.balancing.balanced_run import DataParallelPlace, LaterTables, PassResults, RowGathering, RunLayers
from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.exchange import agreed, attempted
from moe_rl.balancing.loads import RankRows, RouteArray
from moe_rl.balancing.pass_request import PlannedPass
from moe_rl.balancing.pass_source import PassSource, RowReader
from moe_rl.balancing.route_counter import HostCopies, RouteCounter
from moe_rl.core.capacity import Capacity, overflow_sentence
from moe_rl.core.errors import require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement
from moe_rl.megatron import flex
from moe_rl.megatron.activate import PassParts, PassTables, activate, deactivate
from moe_rl.megatron.expert_state import ExpertOptimizerState
from moe_rl.megatron.groups import ExpertGroups
from moe_rl.megatron.layer import LayerState, layers_of
from moe_rl.megatron.residents import ResidentCopies
from moe_rl.megatron.transport import Transport

logger = logging.getLogger(__name__)


class ReplayedRows(RowReader):
    """Rows whose routes [N, L, K] are on the device or on the host."""

    def __init__(self, routes: Sequence[RouteArray], *, model: MoeModelSpec, layers: Sequence[int]) -> None:
        """Start to copy those that are on the device, in the order of its stream."""
        self._routes = HostCopies(routes)
        self._model, self._layers = model, layers

    def read(self) -> RankRows:
        """Return what the routes say in these layers, once they have arrived."""
        return RankRows.of(self._routes.arrays(), model=self._model, layers=self._layers)


class MegatronLayers(RunLayers[PassTables]):
    """The layers of the model chunks of this rank, replicas and resident copies included."""

    in_order = True

    def __init__(
        self,
        *,
        layers: Sequence[MoELayer],
        states: Sequence[LayerState],
        clocks: Sequence[MicroBatchClock],
        optimizer: Any,
        model: MoeModelSpec,
        groups: ExpertGroups,
        transport: Transport,
        residents: ResidentCopies,
    ) -> None:
        self.states, self.groups = list(states), groups
        self._layers, self._clocks, self._optimizer, self._model = list(layers), clocks, optimizer, model
        self._transport, self._residents = transport, residents
        self.placement: Callable[[], ExpertPlacement]
        """Where the experts are now; set by the balancer."""
        self.static_rows = StaticRows(self.states, groups, model, layers[0].config)

    def use(self, groups: ExpertGroups) -> None:
        """Go on with other process groups, which the framework has made anew."""
        self.groups = self.static_rows.groups = groups
        self._transport.group = groups.replicas
        self._residents.use(groups)

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return self.groups.device

    def reader(self, routes: Sequence[RouteArray], layers: Sequence[int]) -> RowReader:
        """Return what counts [N, L, K] routes; see `RunLayers.reader`."""
        return ReplayedRows(routes, model=self._model, layers=layers)

    def tables(self, planned: PlannedPass, source: PassSource) -> PassTables:
        """Return the slot tables and exchanges of the pass, on the host."""
        return PassTables.of_pass(planned, self.states, self._transport, self.groups.part)

    def activate(
        self,
        planned: PlannedPass,
        tables: PassTables,
        later: Sequence[LaterTables[PassTables]],
        *,
        num_micro_batches: int,
    ) -> None:
        """Give every layer its plans; see `RunLayers.activate`."""
        if planned.misfit is None:
            parts = PassParts(
                num_micro_batches=num_micro_batches, device=self.device, ready=[tables], later=list(later)
            )
            activate(parts, self.states, transport=self._transport, residents=self._residents)
            self._residents.begin_pass(self.placement(), num_micro_batches=num_micro_batches)
        else:
            deactivate(self.states)
        self._transport.reset()

    def count_routes(self, counter: RouteCounter | None) -> None:
        """Let the counter count what the layers' routers choose."""
        for state in self.states:
            state.counter = counter

    def sum_counts(self, counts: torch.Tensor) -> None:
        """Sum counts over the tensor-parallel ranks: sequence parallelism cuts sequences anywhere."""
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            dist.all_reduce(counts, group=parallel_state.get_tensor_model_parallel_group())

    def results(self, planned: PlannedPass, gathering: RowGathering[PassTables], *, forward_only: bool) -> PassResults:
        """Return rows and bytes; resident copies return their gradients here."""
        if planned.misfit is None:
            self._residents.end_pass()
        counters = self._transport.counters
        return PassResults(
            actual_rows=self._rows_that_ran(gathering),
            pushed_bytes=counters.pushed_bytes,
            returned_bytes=counters.returned_bytes,
            micro_batches_in_flight=None if forward_only else _micro_batches_in_flight(),
        )

    def stop(self, *, forward_only: bool, complete: bool) -> None:
        """Let every layer be Megatron's until the next pass."""
        deactivate(self.states)
        for layer, state in zip(self._layers, self.states, strict=True):
            layer.token_dispatcher = state.home_dispatcher
            if not complete:  # perhaps between two calls that bracket a dispatch
                flex.limit_rows(layer.token_dispatcher, None)
                state.capacity_rows = None
        for clock in self._clocks:
            clock.stop()
        if not complete:
            self._residents.give_up()

    def set_capacity(self, planned: PlannedPass) -> None:
        """Size the experts' buffers for the whole pass."""
        self.static_rows.set_capacity(planned)

    def why_experts_stay(self) -> str | None:
        """Return why the optimizer's state cannot move; None if it can."""
        _, error = attempted(lambda: ExpertOptimizerState(self._optimizer))
        if self._optimizer is not None and error is None:
            return None
        return str(error or "attach received no optimizer")

    def of_all_stages(self, placement: ExpertPlacement) -> ExpertPlacement:
        """Return the placement with the layers of every stage as that stage has them; a collective of the run."""
        own_layers = layers_of(self.states)
        slots = self._of_all_stages(placement.physical_to_logical_map, own_layers)
        home_rank = self._of_all_stages(placement.home_rank, own_layers)
        return replace(placement, physical_to_logical_map=slots, home_rank=home_rank)

    @property
    def data_parallel_place(self) -> DataParallelPlace:
        """Of this rank; the first of its tensor- and context-parallel ranks speaks."""
        rank_inside = parallel_state.get_tensor_model_parallel_rank() + parallel_state.get_context_parallel_rank()
        return DataParallelPlace(
            dp_rank=parallel_state.get_data_parallel_rank(),
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            speaks=rank_inside == 0,
        )

    def _of_all_stages(self, table: NDArray[np.int32], own_layers: list[int]) -> NDArray[np.int32]:
        own_rows = np.full_like(table, -2)  # below -1, which an empty slot has
        own_rows[own_layers] = table[own_layers]
        merged_rows: NDArray[np.int32] = (
            self.groups.gather_in_run(own_rows.astype(np.int64)).max(axis=0).astype(table.dtype)
        )
        return merged_rows

    def _rows_that_ran(self, gathering: RowGathering[PassTables]) -> NDArray[np.int64]:
        """Return [M, L, P] rows that every rank of the EP group computed, in the micro-batches that ran."""
        if self.static_rows.limits_pass:
            by_sender = gathering.of_all_ranks(self.static_rows.sent)
            received_rows: NDArray[np.int64] = np.sum(by_sender, axis=0)
            return received_rows
        return np.stack(gathering.of_all_ranks(self._own_rows), axis=2)

    def _own_rows(self, micro_batches: range) -> NDArray[np.int64]:
        """Return [M, L] rows that this rank computed."""
        rows = np.zeros((len(micro_batches), len(self.states)), np.int64)
        for index, micro_batch in enumerate(micro_batches):
            for layer, state in enumerate(self.states):
                rows[index, layer] = state.rows.get(micro_batch, 0)
        return rows


class StaticRows:
    """Buffers of one size for all micro-batches of a pass (`config.static_rows`), by what its plan certifies."""

    def __init__(self, states: Sequence[LayerState], groups: ExpertGroups, model: MoeModelSpec, options: Any) -> None:
        """`options` are Megatron's, of an MoE layer."""
        self._states, self._model = states, model
        self.groups = groups
        self._says_dynamic = True
        self.fixed_factor: float | None = getattr(options, "moe_expert_rank_capacity_factor", None)
        """Megatron's own limit, if one is set."""

    @property
    def limits_pass(self) -> bool:
        """Whether the pass that is under way has such buffers."""
        return self._states[0].capacity_rows is not None

    def set_capacity(self, planned: PlannedPass) -> None:
        """Size the experts' buffers for the whole pass, or say why it has no bound."""
        rows = None if planned.misfit else planned.most_rows
        most_tokens = 0 if planned.tokens is None else int(planned.tokens.max(initial=0))
        if rows is None and self._says_dynamic:
            reason = "its routes are not replayed, or some routes are not known and capacity_risk is not set"
            logger.warning(
                "moe_rl: static_rows cannot bound the buffers of this pass (%s), so they are sized dynamically.", reason
            )
        self._says_dynamic &= rows is not None
        buffer_rows = None if rows is None else int(rows.max(initial=0))
        if self.fixed_factor is not None:
            agreed(lambda: self._require_within(planned))
        if most_tokens > self._states[0].most_tokens:
            flex.forget_room(self._states[0].slot_dispatcher)
        for state in self._states:
            state.capacity_rows, state.most_tokens = buffer_rows, max(state.most_tokens, most_tokens)
            state.sent.clear()

    def end_pass(self, actual_rows: NDArray[np.int64]) -> None:
        """Raise `InvalidInputError` on all ranks if one got more rows than its buffers hold; a collective then.

        Asked after the pass: a vote in every layer would make the host wait for the device.
        """
        buffer_rows = self._states[0].capacity_rows
        for state in self._states:
            state.capacity_rows = None
        if buffer_rows is not None:
            agreed(lambda: self._require_fits(actual_rows, buffer_rows))

    def sent(self, micro_batches: range) -> NDArray[np.int64]:
        """Return [M, L, P] rows that this rank sent to every rank."""
        rows = np.zeros((len(micro_batches), len(self._states), self.groups.ep_size), np.int64)
        for index, micro_batch in enumerate(micro_batches):
            for layer, state in enumerate(self._states):
                if micro_batch in state.sent:
                    rows[index, layer] = state.sent[micro_batch].cpu().numpy()
        return rows

    def _require_within(self, planned: PlannedPass) -> None:
        """Raise where the buffer of a pass is larger than Megatron's fixed factor lets it be."""
        rows, tokens, fixed_factor = planned.most_rows, planned.tokens, self.fixed_factor or 0.0
        if planned.misfit or rows is None or tokens is None:
            return
        capacity = Capacity(
            rows=rows[None], worst_rows=rows[None], tokens=tokens[None],
            top_k=self._model.top_k, risk=0.0, unknown_share=0.0,
        )  # fmt: skip
        sentence = (
            f"this pass needs a moe_expert_rank_capacity_factor of at least {capacity.static_factor:.4f} on EP group"
        )
        sentence += (
            f" {self.groups.expert_dp.rank()}, but it is set to {fixed_factor}. Raise it, or allow more replica slots "
            "per rank."
        )
        require(capacity.static_factor <= fixed_factor, sentence)

    def _require_fits(self, rows: NDArray[np.int64], buffer_rows: int) -> None:
        """Raise for the cell of `rows` [M, l, P] that is furthest above `buffer_rows`."""
        micro_batch, layer, rank = (int(i) for i in np.unravel_index(int(rows.argmax()), rows.shape))
        require(
            int(rows.max(initial=0)) <= buffer_rows,
            overflow_sentence(
                group=self.groups.expert_dp.rank(),
                micro_batch=micro_batch,
                layer=self._states[layer].layer,
                rank=rank,
                rows=int(rows.max(initial=0)),
                most=buffer_rows,
            ),
        )


def _micro_batches_in_flight() -> int | None:
    """Return how many micro-batches this pipeline stage holds under 1F1B; None under the interleaved schedule."""
    if parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
        return None
    stages, stage = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    return int(stages - stage)
