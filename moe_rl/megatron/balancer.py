"""Holds the plan of the pass that is under way; made by `moe_rl.megatron.attach`."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from numpy.typing import NDArray

from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.exchange import PlanExchange, agreed, attempted
from moe_rl.balancing.loads import RankRows, RouteArray
from moe_rl.balancing.pass_metrics import PassMetrics
from moe_rl.balancing.pass_planner import PassPlanner, PlannedPass
from moe_rl.balancing.pass_source import PassSource, RowReader
from moe_rl.balancing.passes import PassCycle, RunningPass
from moe_rl.balancing.route_counter import HostCopies, RouteCounter
from moe_rl.balancing.schedule import cluster_topology
from moe_rl.core.capacity import Capacity, overflow_sentence
from moe_rl.core.errors import require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement
from moe_rl.megatron import flex
from moe_rl.megatron.activate import PassParts, PassTables, activate, deactivate
from moe_rl.megatron.expert_state import ExpertOptimizerState, MegatronExperts
from moe_rl.megatron.experts import Experts
from moe_rl.megatron.groups import ExpertGroups, plan_exchange
from moe_rl.megatron.guards import NameGuards
from moe_rl.megatron.layer import ElasticMoELayer, LayerState, dispatcher_over_slots, hook_entry
from moe_rl.megatron.model_spec import step_setting_of, unwrapped
from moe_rl.megatron.residents import ResidentCopies
from moe_rl.megatron.routed_rows import replayed_rows
from moe_rl.megatron.transport import Transport
from moe_rl.simulators.memory import MemoryForecast, forecast_memory
from moe_rl.simulators.setting import TrainingRun

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


class Balancer(PassCycle[PassTables]):
    """Plans passes and tells Megatron's layers what to do in them. Every method is called on all ranks alike."""

    in_order = True

    def __init__(
        self,
        *,
        layers: Sequence[MoELayer],
        states: Sequence[LayerState],
        clocks: Sequence[MicroBatchClock],
        optimizer: Any,
        config: BalancerConfig,
        model: MoeModelSpec,
        groups: ExpertGroups,
        transport: Transport,
        residents: ResidentCopies,
        exchange: PlanExchange,
    ) -> None:
        ids = [state.layer for state in states]
        setting = step_setting_of(layers[0].config)
        experts = MegatronExperts(states, optimizer=optimizer, device=groups.device)
        super().__init__(
            PassPlanner(exchange, layers=ids, model=model, setting=setting),
            config=config,
            clocks=clocks,
            groups=groups,
            movable=experts,
        )
        self._experts = experts
        # Every EP rank holds rows of its own, so it counts as a data-parallel rank.
        self.topology = cluster_topology(config, ep_size=groups.ep_size, num_ep_groups=groups.num_ep_groups)
        self.transport, self.residents, self._optimizer = transport, residents, optimizer
        self.layers = list(layers)
        self._states = list(states)
        self._groups = groups
        self._guards: NameGuards | None = None
        """None before `install`."""
        self._offloaded = False
        self._says_dynamic = True
        self._fixed_factor: float | None = getattr(layers[0].config, "moe_expert_rank_capacity_factor", None)

    @property
    def megatron_placement(self) -> ExpertPlacement:
        """Homes where Megatron puts experts, and nobody resident."""
        return self.own_placement

    @property
    def buffer_bytes(self) -> int:
        """Bytes of this rank's buffers: (R + 2C + S x its MoE layers) x (one expert + its fp32 gradient)."""
        return self.transport.buffers.num_bytes + self.residents.num_bytes

    def experts_by_layer(self) -> dict[int, Experts]:
        """Return MoE layer -> this rank's experts, after what is still being gathered of them."""
        self._experts.complete_gathers()
        return {state.layer: state.experts for state in self._states}

    def replayed_routes(self) -> list[NDArray[np.int64]]:
        """Return the routes [N, L, K] of every micro-batch that the model's `RouterReplay`s hold, for `begin_pass`.

        See `routed_rows.replayed_rows`.
        """
        ids = [state.layer for state in self._states]
        return replayed_rows(self.layers, layer_ids=ids, num_layers=self.model.num_moe_layers)

    def _reader(self, routes: Sequence[RouteArray], layers: Sequence[int]) -> RowReader:
        return ReplayedRows(routes, model=self.model, layers=layers)

    def _tables(self, planned: PlannedPass, source: PassSource) -> PassTables:
        return PassTables.of_pass(planned, self._states, self.transport, self._groups.part)

    def _activate(
        self,
        planned: PlannedPass,
        tables: PassTables,
        later: Sequence[Callable[[], PassTables]],
        *,
        num_micro_batches: int,
    ) -> None:
        if planned.misfit is None:
            parts = PassParts(
                num_micro_batches=num_micro_batches, device=self._device, made=[tables], later=list(later)
            )
            activate(parts, self._states, transport=self.transport, residents=self.residents)
            self.residents.begin_pass(self.placement, num_micro_batches=num_micro_batches)
        else:
            deactivate(self._states)
        self.transport.reset()

    def _ran(self, running: RunningPass) -> dict[str, Any]:
        if running.planned.misfit is None:
            self.residents.end_pass()
        counters = self.transport.counters
        return {
            "actual_rows": self._rows_that_ran(running.num_micro_batches),
            "pushed_bytes": counters.pushed_bytes,
            "returned_bytes": counters.returned_bytes,
            "micro_batches_in_flight": None if running.forward_only else _micro_batches_in_flight(),
        }

    def _stop(self, running: RunningPass, *, complete: bool = True) -> None:
        """Let every layer be Megatron's until the next pass."""
        deactivate(self._states)
        for layer, state in zip(self.layers, self._states, strict=True):
            layer.token_dispatcher = state.home_dispatcher
            if not complete:  # perhaps between two calls that bracket a dispatch
                flex.limit_rows(layer.token_dispatcher, None)
                state.capacity_rows = None
        for clock in self._clocks:
            clock.stop()
        if not complete:
            self.residents.give_up()

    def _forecast_of(self, chunks: Sequence[torch.nn.Module]) -> Callable[..., MemoryForecast]:
        options, ddp = self.layers[0].config, getattr(chunks[0], "ddp_config", None)
        model = replace(
            self.model, vocab_size=max(1, *(getattr(unwrapped(each), "vocab_size", 1) for each in chunks)),
            shared_expert_ffn_hidden_size=options.moe_shared_expert_intermediate_size or 0,
            dense_ffn_hidden_size=options.ffn_hidden_size,
        )  # fmt: skip
        setting = replace(
            step_setting_of(options),
            pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
            num_virtual_stages=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
            grad_reduce_in_fp32=getattr(ddp, "grad_reduce_in_fp32", True),
        )
        on_gpu = self._device.type == "cuda"
        return partial(
            forecast_memory, run=TrainingRun(model=model, topology=self.topology, setting=setting),
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            buffers=self.config.replica_slots + 2 * self.config.cross_node_slots,
            hbm_bytes=torch.cuda.get_device_properties(self._device).total_memory if on_gpu else None,
        )  # fmt: skip

    @property
    def _device(self) -> torch.device:
        return self._groups.device

    def _set_capacity(self, planned: PlannedPass) -> None:
        rows = None if planned.misfit else planned.most_rows
        most_tokens = 0 if planned.held is None else int(planned.held.max(initial=0))
        if rows is None and self._says_dynamic:
            why = "its routes are not replayed, or some are unknown and capacity_risk is not stated"
            logger.warning("moe_rl: static_rows: this pass has no bound (%s), so it takes rows as they come.", why)
        self._says_dynamic &= rows is not None
        most = None if rows is None else int(rows.max(initial=0))
        if self._fixed_factor is not None:
            agreed(lambda: self._require_within(planned))
        if most_tokens > self._states[0].most_tokens:
            flex.forget_room(self._states[0].slot_dispatcher)
        for state in self._states:
            state.capacity_rows, state.most_tokens = most, max(state.most_tokens, most_tokens)
            state.sent.clear()

    def _require_within(self, planned: PlannedPass) -> None:
        """Raise where the buffer of a pass is larger than Megatron's fixed factor lets it be."""
        rows, held, allowed = planned.most_rows, planned.held, self._fixed_factor or 0.0
        if planned.misfit or rows is None or held is None:
            return
        most = Capacity(
            rows=rows[None], worst_rows=rows[None], tokens=held[None],
            top_k=self.model.top_k, risk=0.0, unknown_share=0.0,
        )  # fmt: skip
        sentence = f"this pass needs moe_expert_rank_capacity_factor {most.static_factor:.4f} on EP group"
        sentence += f" {self._groups.expert_dp.rank()}, and {allowed} is set: raise it, or let ranks hold more copies."
        require(most.static_factor <= allowed, sentence)

    def end_pass(self) -> PassMetrics:
        """End the pass and return what it did; a collective of the EP group.

        Raises `InvalidInputError` on all ranks, with the fullest cell, where one got more rows than static buffers
        hold: the gradients lack rows then, so no optimizer step may follow.
        """
        metrics = super().end_pass()
        # Asked after the pass: a vote in every layer would make the host wait for the device.
        most = self._states[0].capacity_rows
        for state in self._states:
            state.capacity_rows = None
        if most is not None:
            agreed(lambda: self._require_fits(metrics.actual_rows, most))
        return metrics

    def _require_fits(self, rows: NDArray[np.int64], most: int) -> None:
        """Raise for the cell of `rows` [M, l, P] that is furthest above `most`."""
        micro_batch, layer, rank = (int(i) for i in np.unravel_index(int(rows.argmax()), rows.shape))
        require(
            int(rows.max(initial=0)) <= most,
            overflow_sentence(
                group=self._groups.expert_dp.rank(),
                micro_batch=micro_batch,
                layer=self._states[layer].layer,
                rank=rank,
                rows=int(rows.max(initial=0)),
                most=most,
            ),
        )

    def _listen(self, counter: RouteCounter | None) -> None:
        for state in self._states:
            state.counter = counter

    def _add_up(self, counts: torch.Tensor) -> None:
        if parallel_state.get_tensor_model_parallel_world_size() > 1:  # sequence parallelism cuts where it happens to
            dist.all_reduce(counts, group=parallel_state.get_tensor_model_parallel_group())

    def _why_fixed(self) -> str | None:
        if self.homes_stay is not None:
            return self.homes_stay
        _, error = attempted(lambda: ExpertOptimizerState(self._optimizer))
        return None if self._optimizer is not None and error is None else str(error or "attach was given no optimizer")

    @property
    def _data_parallel(self) -> tuple[int, int, bool]:
        inside = parallel_state.get_tensor_model_parallel_rank() + parallel_state.get_context_parallel_rank()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        return parallel_state.get_data_parallel_rank(), stage, inside == 0

    def _of_all_stages(self, placement: ExpertPlacement) -> ExpertPlacement:
        mine = [state.layer for state in self._states]
        merged = {}
        for name in ("physical_to_logical_map", "home_rank"):
            own = np.full_like(getattr(placement, name), -2)  # below -1, which an empty slot has
            own[mine] = getattr(placement, name)[mine]
            merged[name] = self._groups.gather_in_run(own.astype(np.int64)).max(axis=0).astype(own.dtype)
        return replace(placement, **merged)

    def _rows_that_ran(self, num_micro_batches: int) -> NDArray[np.int64]:
        """Return [M, L, P] rows that every rank of the EP group computed; L counts the layers of this stage.

        M are the micro-batches that ran, `num_micro_batches` were announced.
        """
        if self._states[0].capacity_rows is not None:
            rows_to_rank = [state.sent for state in self._states]
            to_nobody = torch.zeros(self._groups.ep_size, dtype=torch.int64)
            by_sender = self._of_all_ranks(
                num_micro_batches,
                lambda part: np.array(
                    [[of_layer.get(m, to_nobody).cpu().numpy() for of_layer in rows_to_rank] for m in part], np.int64
                ).reshape(len(part), len(rows_to_rank), -1),
            )
            received: NDArray[np.int64] = np.sum(by_sender, axis=0)
            return received
        rows = [state.rows for state in self._states]
        by_rank = self._of_all_ranks(
            num_micro_batches,
            lambda part: np.array([[of_layer.get(m, 0) for of_layer in rows] for m in part], np.int64).reshape(
                len(part), len(rows)
            ),
        )
        return np.stack(by_rank, axis=2)

    def offload(self) -> None:
        """Give all memory of the balancer back while the parameters are away, for a rollout on the same device.

        Where experts are stays as it is. `onload` comes before the next pass.
        """
        self._require_no_pass("offload()")
        self._thread.submit(lambda: None).result()  # what it exchanges with other ranks wants all process groups
        self._offloaded = True
        self.transport.buffers.release()
        self.residents.release()
        for state in self._states:
            state.experts.release()

    def onload(self) -> None:
        """Take the memory again that `offload` gave back."""
        if not self.config.observe:
            self.transport.buffers.allocate()
            self.residents.allocate()
        self._offloaded = False

    def rebuild_groups(self) -> None:
        """Go on after the framework has destroyed Megatron's process groups and made them anew; a collective.

        The layers' own dispatchers must hold the new groups by then. Every group that the balancer uses is connected
        by a call of all its ranks before it returns.
        """
        self._require_no_pass("rebuild_groups()")
        self._thread.submit(lambda: None).result()  # planning uses the groups that are replaced
        before = self._groups
        self._groups = before.rebuilt()
        if self._homes is not None:
            self._homes.groups = self._groups
        if self._groups is not before:
            self._planner.exchange.destroy()
            self._planner.exchange = plan_exchange(self._groups)
        self.transport.group = self._groups.replicas
        self.residents.use(self._groups)
        for layer, state in zip(self.layers, self._states, strict=True):
            num_slots = state.experts.num_local_experts + self.config.foreign_slots
            state.slot_dispatcher = dispatcher_over_slots(layer, num_slots=num_slots)

    def install(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Make the layers, each in its own of `chunks`, ask this balancer.

        `attach` does it once every rank has a balancer: only assignments and hooks, none of which fails.
        """
        for chunk, layer, state in zip(chunks, self.layers, self._states, strict=True):
            layer.__class__ = ElasticMoELayer
            layer._elastic = state
            flex.limit_rows(layer.token_dispatcher, None)  # Megatron's fixed factor drops; ours is asked beforehand
            if layer.config.cuda_graph_impl == "none":  # a transformer layer with hooks cannot be captured
                state.entry = hook_entry(chunk, layer)
        homes = self._homes
        self._guards = NameGuards(
            self.layers, self._optimizer, state_is_home=lambda: homes is None or homes.state_is_home
        )
        self.memory = self._forecast_of(chunks)
        if self.config.observe:  # nothing is ever copied
            self.transport.buffers.release()
            self.residents.release()

    def detach(self) -> None:
        """Give the layers back to Megatron as they were, with the balancer's memory and connections; a collective.

        Experts must be where Megatron expects them.
        """
        at_home = all(state.home_table is None for state in self._states)
        require(at_home, "the experts are reordered: call reorder(balancer.megatron_placement) before detach().")
        self._require_no_pass("detach()")
        self.offload()
        self._experts.release()
        if self._guards is not None:
            self._guards.remove()
        self._thread.shutdown()
        self._planner.exchange.destroy()
        self._groups.destroy()
        for layer, state in zip(self.layers, self._states, strict=True):
            if state.entry is not None:
                state.entry.remove()
            del layer._elastic
            layer.__class__ = state.original_class
            flex.limit_rows(layer.token_dispatcher, None, factor=self._fixed_factor)
        for clock in self._clocks:
            clock.remove()

    def _require_ready(self) -> None:
        super()._require_ready()
        require(not self._offloaded, "the buffers are given back: call onload() before begin_pass().")


def _micro_batches_in_flight() -> int | None:
    """Return how many micro-batches this pipeline stage holds under 1F1B; None under the interleaved schedule."""
    if parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
        return None
    stages, stage = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    return int(stages - stage)
