"""Holds the plan of the pass that is under way; made by `moe_rl.megatron.attach`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from numpy.typing import NDArray

from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.exchange import PlanExchange
from moe_rl.balancing.pass_metrics import PassMetrics
from moe_rl.balancing.pass_planner import PassPlanner
from moe_rl.balancing.passes import PassCycle
from moe_rl.balancing.schedule import cluster_topology
from moe_rl.core.errors import require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement
from moe_rl.megatron import flex
from moe_rl.megatron.activate import PassTables
from moe_rl.megatron.expert_state import MegatronExperts
from moe_rl.megatron.experts import Experts
from moe_rl.megatron.groups import ExpertGroups, plan_exchange
from moe_rl.megatron.guards import NameGuards
from moe_rl.megatron.layer import (
    ElasticMoELayer,
    LayerState,
    dispatcher_over_slots,
    experts_by_layer,
    hook_entry,
    layers_of,
)
from moe_rl.megatron.model_spec import step_setting_of, unwrapped
from moe_rl.megatron.residents import ResidentCopies
from moe_rl.megatron.routed_rows import replayed_rows
from moe_rl.megatron.run_layers import MegatronLayers
from moe_rl.megatron.transport import Transport
from moe_rl.simulators.memory import MemoryForecast, forecast_memory
from moe_rl.simulators.setting import TrainingRun


class Balancer(PassCycle[PassTables]):
    """Makes a plan for every pass, and makes Megatron's layers follow it. Call every method on all ranks."""

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
        run_layers = MegatronLayers(
            layers=layers,
            states=states,
            clocks=clocks,
            optimizer=optimizer,
            model=model,
            groups=groups,
            transport=transport,
            residents=residents,
        )
        experts = MegatronExperts(states, optimizer=optimizer, device=groups.device)
        stage_layers, setting = layers_of(states), step_setting_of(layers[0].config)
        super().__init__(
            PassPlanner(exchange, layers=stage_layers, model=model, setting=setting),
            run_layers,
            config=config,
            clocks=clocks,
            groups=groups,
            movable=experts,
        )
        run_layers.placement = lambda: self.placement
        self._run_layers, self._experts = run_layers, experts
        # Every EP rank holds rows of its own, so it counts as a data-parallel rank.
        self.topology = cluster_topology(config, ep_size=groups.ep_size, num_ep_groups=groups.num_ep_groups)
        self.transport, self.residents, self._optimizer = transport, residents, optimizer
        self.layers = list(layers)
        self._states = run_layers.states
        self._guards: NameGuards | None = None
        """None before `install`."""
        self._offloaded = False

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
        return experts_by_layer(self._states)

    def replayed_routes(self) -> list[NDArray[np.int64]]:
        """Return the routes [N, L, K] of every micro-batch that the model's `RouterReplay`s hold, for `begin_pass`.

        See `routed_rows.replayed_rows`.
        """
        return replayed_rows(self.layers, layer_ids=layers_of(self._states), num_layers=self.model.num_moe_layers)

    def _forecast_of(self, chunks: Sequence[torch.nn.Module]) -> Callable[..., MemoryForecast]:
        options, ddp = self.layers[0].config, getattr(chunks[0], "ddp_config", None)
        model = replace(
            self.model,
            vocab_size=max(1, *(getattr(unwrapped(chunk), "vocab_size", 1) for chunk in chunks)),
            shared_expert_ffn_hidden_size=options.moe_shared_expert_intermediate_size or 0,
            dense_ffn_hidden_size=options.ffn_hidden_size,
        )
        setting = replace(
            step_setting_of(options),
            pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
            num_virtual_stages=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
            grad_reduce_in_fp32=getattr(ddp, "grad_reduce_in_fp32", True),
        )
        device = self._run_layers.device
        hbm_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        return partial(
            forecast_memory,
            run=TrainingRun(model=model, topology=self.topology, setting=setting),
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            buffers=self.config.slots.replica_slots + 2 * self.config.slots.cross_node_slots,
            hbm_bytes=hbm_bytes,
        )

    def end_pass(self) -> PassMetrics:
        """End the pass and return what it did; a collective of the EP group.

        Raises `InvalidInputError` on all ranks, with the fullest cell, if one got more rows than static buffers
        hold: the gradients lack rows then, so no optimizer step may follow.
        """
        metrics = super().end_pass()
        self._run_layers.static_rows.end_pass(metrics.actual_rows)
        return metrics

    def offload(self) -> None:
        """Give all memory of the balancer back while the parameters are away, for a rollout on the same device.

        Where experts are stays as it is. `onload` comes before the next pass.
        """
        self._require_no_pass("offload()")
        self.run.finish_planning()  # what it exchanges with other ranks wants all process groups
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
        self.run.finish_planning()  # planning uses the groups that are replaced
        groups, planner = self._run_layers.groups.rebuilt(), self.run.planner
        if groups is not self._run_layers.groups:
            planner.exchange.destroy()
            planner.exchange = plan_exchange(groups)
        self._run_layers.use(groups)
        if self.run.homes is not None:
            self.run.homes.groups = groups
        for layer, state in zip(self.layers, self._states, strict=True):
            num_slots = state.experts.num_local_experts + self.config.slots.foreign
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
        homes = self.run.homes
        self._guards = NameGuards(
            self.layers, self._optimizer, state_is_home=lambda: homes is None or homes.state_is_home
        )
        self.run.memory = self._forecast_of(chunks)
        if self.config.observe:  # nothing is ever copied
            self.transport.buffers.release()
            self.residents.release()

    def detach(self) -> None:
        """Give the layers back to Megatron as they were, with the balancer's memory and connections; a collective.

        Experts must be where Megatron expects them.
        """
        at_home = all(state.home_table is None for state in self._states)
        require(
            at_home,
            "experts are not on the ranks where Megatron puts them: call reorder(balancer.megatron_placement) before "
            "detach().",
        )
        self._require_no_pass("detach()")
        self.offload()
        self._experts.release()
        if self._guards is not None:
            self._guards.remove()
        self.run.thread.shutdown()
        self.run.planner.exchange.destroy()
        self._run_layers.groups.destroy()
        for layer, state in zip(self.layers, self._states, strict=True):
            if state.entry is not None:
                state.entry.remove()
            del layer._elastic
            layer.__class__ = state.original_class
            flex.limit_rows(layer.token_dispatcher, None, factor=self._run_layers.static_rows.fixed_factor)
        for clock in self._clocks:
            clock.remove()

    def _require_ready(self) -> None:
        super()._require_ready()
        require(not self._offloaded, "the replica buffers are offloaded: call onload() before begin_pass().")
