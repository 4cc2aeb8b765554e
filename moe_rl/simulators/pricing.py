"""Seconds of every micro-batch of a step, by part. G EP groups, M micro-batches, L MoE layers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from moe_rl.core.cost import Floats, LayerCostParams, LayerRows, exposed_time, layer_time
from moe_rl.core.load import StepLoad
from moe_rl.core.micro_batch_cost import SMOOTH
from moe_rl.core.plan import Plan
from moe_rl.core.plan_rows import GroupLimit, rows_of_plan
from moe_rl.core.visits import count_rows
from moe_rl.simulators.all_to_all import Destinations, count_visits
from moe_rl.simulators.base_time import LinearTime, SourceWork, head_parts, host_seconds, layer_parts, slowest_rank
from moe_rl.simulators.pipeline import steady_share
from moe_rl.simulators.result import BREAKDOWN_PARTS
from moe_rl.simulators.rows import uniform_rows
from moe_rl.simulators.setting import TrainingRun
from moe_rl.simulators.setting import TrainingStep as TrainingStep

ROUTED_PARTS = ("expert_gemm", "all_to_all", "replicate", "prefetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPricing(TrainingRun):
    """Prices a step of a run, for any destination of its rows; its topology has the setting's perturbation applied."""

    passes: tuple[LayerCostParams, ...]
    """The main pass, then the log-probability passes."""

    @classmethod
    def without_windows(cls, run: TrainingRun) -> Self:
        """Return the pricing of a run as if no other work hid the transfer of replicas."""
        setting, topology = run.setting, run.topology
        settings = [setting, *[replace(setting, forward_only=True, log_prob_passes=0)] * setting.log_prob_passes]
        passes = tuple(setting.layer_cost_params(run.model, topology) for setting in settings)
        return cls(model=run.model, topology=setting.perturbed(topology), setting=setting, passes=passes)

    @classmethod
    def of(cls, step: TrainingStep) -> Self:
        """Return the pricing of this step.

        A cross-node replica travels while the NIC rests, so `prefetch_hidden_s` is a balanced layer's time without
        its all-to-all, averaged over the micro-batches of the load; one inside a node before its layer's experts run,
        so `replica_hidden_s` leaves out their products, too.
        """
        blind, work = cls.without_windows(step), SourceWork.of(step)
        rows = uniform_rows(step.load, blind.topology, tile_rows=blind.tile_rows)  # for its products alone
        has_tokens = step.load.tokens.sum(axis=2) > 0

        def with_windows(params: LayerCostParams) -> LayerCostParams:
            if not has_tokens.any():
                return replace(params, prefetch_hidden_s=0.0, replica_hidden_s=0.0)
            attention_s = whole(blind._layer_base(params, work, moe_layer=True))[has_tokens].mean()
            products = layer_time(params, rows).expert_gemm_s.mean(axis=2)[has_tokens].mean()
            return replace(params, prefetch_hidden_s=float(attention_s + products), replica_hidden_s=float(attention_s))

        return replace(blind, passes=tuple(map(with_windows, blind.passes)))

    @property
    def tile_rows(self) -> float:
        """Rows of a grouped-GEMM tile."""
        return self.passes[0].gemm_tile_rows

    @property
    def deduplicates(self) -> bool:
        """True where a token goes to a node once; False where it goes once per expert there."""
        return bool(self.passes[0].a2a_hierarchical)

    @property
    def group_limit(self) -> GroupLimit | None:
        """The router's restriction to groups of experts."""
        return GroupLimit.of(self.model)

    def uniform(self, load: StepLoad, *, distinct: bool = False) -> LayerRows:
        """Return where the rows of `load` go under forced balance (`rows.uniform_rows`)."""
        return uniform_rows(
            load,
            self.topology,
            tile_rows=self.tile_rows,
            limit=self.group_limit,
            distinct=distinct,
            deduplicated=self.deduplicates,
        )

    def destinations(self, plan: Plan, load: StepLoad) -> Destinations:
        """Return where the rows of `load` go under `plan` by the step's dispatcher.

        Rows that are sent for every expert are counted in the load, tokens that are sent once in its routes, if known.
        """
        rows = rows_of_plan(plan, load, self.topology, tile_rows=self.tile_rows, limit=self.group_limit)
        if not self.deduplicates:
            counts = count_rows(plan, load, self.topology)
            return Destinations(rows=counts.put_into(rows), between_nodes=counts.between_nodes.sum(axis=(0, 1, 2)))
        if load.routes is not None:
            return count_visits(rows, plan, load, self.topology)
        return Destinations.of_alike_sources(rows, self.topology)

    def seconds(self, rows: LayerRows, work: SourceWork, *, micro_batches: int | None = None) -> dict[str, Floats]:
        """Return [G, M] seconds of all passes through all layers by part, for every key of `BREAKDOWN_PARTS`.

        `micro_batches` are those of the step where `work` holds one that stands for all.
        """
        num_running = (work.tokens.sum(axis=2) > 0).sum(axis=1, keepdims=True)[..., None]
        steady_part = steady_share(self.setting, num_running if micro_batches is None else micro_batches)
        parts = {name: np.zeros(work.tokens.shape[:2]) for name in BREAKDOWN_PARTS}
        for params in self.passes:
            for name, seconds in self._pass_seconds(params, rows, work, steady_part).items():
                parts[name] = parts[name] + seconds
        return parts

    def _pass_seconds(
        self, params: LayerCostParams, rows: LayerRows, work: SourceWork, steady_part: Floats
    ) -> dict[str, Floats]:
        has_tokens = (work.tokens.sum(axis=2) > 0)[:, :, None]
        time = layer_time(params, rows)
        routed_s = {name: np.where(has_tokens, getattr(time, f"{name}_s"), 0.0) for name in ROUTED_PARTS}
        moe_base = self._layer_base(params, work, moe_layer=True)
        dense_base = self._layer_base(params, work, moe_layer=False)
        hidden = self._hidden(params, routed_s, moe_base, steady_part)
        launches = self._waits_for_host(params, whole(moe_base)[:, :, None] + whole(routed_s) - hidden, moe_layer=True)
        moe_layers, dense_layers = self.model.num_moe_layers, self.model.num_layers - self.model.num_moe_layers
        # A layer of multi-token prediction is priced as the mean MoE layer.
        prediction = self._prediction_layers(params)
        layer_factor = 1.0 + prediction / moe_layers
        parts: dict[str, Floats] = {name: layer_factor * seconds.sum(axis=2) for name, seconds in routed_s.items()}
        for base, layers in ((moe_base, moe_layers + prediction), (dense_base, dense_layers)):
            for name, seconds in base.items():
                parts[name] = parts.get(name, 0.0) + layers * seconds
        heads = []
        for backward, _ in self._phases(params):
            head = head_parts(self.model, self.topology.hardware, backward=backward)
            heads.append(slowest_rank(head, work)["head"])
        parts["head"] = (1 + prediction) * np.sum(heads, axis=0)
        parts["overlap"] = -layer_factor * hidden.sum(axis=2)
        dense_launches = self._waits_for_host(params, whole(dense_base), moe_layer=False)
        parts["host"] = layer_factor * launches.sum(axis=2) + dense_layers * dense_launches
        return parts

    def _waits_for_host(self, params: LayerCostParams, device: Floats, *, moe_layer: bool) -> Floats:
        """Return the seconds of a layer beyond its `device` seconds because the host launches no faster.

        Launches and kernels run side by side, so a layer takes about the larger of the two: a smooth maximum, since
        some of a layer's kernels wait for a launch although the layer as a whole does not.
        """
        host = host_seconds(self, backward_passes=params.backward_passes, moe_layer=moe_layer)
        layer_s = (device**SMOOTH + host**SMOOTH) ** (1.0 / SMOOTH)
        waits_s: Floats = np.where((device > 0) & (host > 0), layer_s - device, 0.0)
        return waits_s

    def _layer_base(self, params: LayerCostParams, work: SourceWork, *, moe_layer: bool) -> dict[str, Floats]:
        """Return [G, M] seconds of one layer outside its routed experts, by part, all phases of a pass."""
        total: dict[str, Floats] = {}
        for backward, times in self._phases(params):
            parts = self._layer_parts(backward=backward, moe_layer=moe_layer)
            for name, seconds in slowest_rank(parts, work).items():
                total[name] = total.get(name, 0.0) + times * seconds
        return total

    def _hidden(
        self, params: LayerCostParams, routed_s: Mapping[str, Floats], base: Mapping[str, Floats], steady_part: Floats
    ) -> Floats:
        """Return [G, M, L] seconds that overlap hides.

        Forward beside backward (updates only, in the `steady_part` share of a step) hides all but `overlap_left` of the
        shorter of computation and all-to-all. Shared experts run beside one of a pass's two all-to-alls, where the
        first does not apply.
        """
        all_to_all = routed_s["all_to_all"]
        if self.setting.overlap_all_to_all and params.backward_passes > 0:
            computation = (
                whole(base)[:, :, None] + routed_s["expert_gemm"] + routed_s["replicate"] + routed_s["prefetch"]
            )
            exposed_s = exposed_time(all_to_all, computation, self.setting.software.overlap_left)
            overlapped_s: Floats = steady_part * (all_to_all - exposed_s)
            return overlapped_s
        if self.setting.overlap_shared_experts:
            return np.minimum(base["shared_experts"][:, :, None], 0.5 * all_to_all)
        return np.zeros(all_to_all.shape)

    def waits(self, squares_per_token: float) -> tuple[LinearTime, ...]:
        """Return the time of a micro-batch's slowest rank beside its routed experts, over all layers and passes.

        In three parts: forward, backward, the output layer. A transfer that hides beside attention is taken to have the
        window that sequences with so many attention squares per token leave it.
        """
        dense = self.model.num_layers - self.model.num_moe_layers
        of_passes = [LinearTime()] * 3
        for params in self.passes:
            prediction = self._prediction_layers(params)
            for backward, num_runs in self._phases(params):
                for moe_layer, layers in ((True, self.model.num_moe_layers + prediction), (False, dense)):
                    linear = self._layer_parts(backward=backward, moe_layer=moe_layer)
                    parts = {name: part.exposed(squares_per_token) for name, part in linear.items()}
                    of_passes[backward] = of_passes[backward].plus(parts, num_runs * layers)
                # The output layer is never computed again, however often a layer's forward runs.
                head = head_parts(self.model, self.topology.hardware, backward=backward)
                of_passes[2] = of_passes[2].plus(head, 1 + prediction)
        return tuple(of_passes)

    def _phases(self, params: LayerCostParams) -> list[tuple[bool, int]]:
        """Return (backward, how often) of every phase of a pass: full recomputation runs forward twice."""
        if params.backward_passes > 0:
            return [(False, self.setting.forward_passes), (True, 1)]
        return [(False, 1)]

    def _prediction_layers(self, params: LayerCostParams) -> int:
        """Return the layers of multi-token prediction: only an update has them."""
        if params.backward_passes <= 0:
            return 0
        return self.setting.mtp_num_layers

    def _layer_parts(self, *, backward: bool, moe_layer: bool) -> Mapping[str, LinearTime]:
        hardware = self.topology.hardware
        return layer_parts(self.model, hardware, self.setting, backward=backward, moe_layer=moe_layer)


def whole(parts: Mapping[str, Floats]) -> Floats:
    """Return the sum of the parts."""
    total: Floats = np.sum(list(parts.values()), axis=0)
    return total
