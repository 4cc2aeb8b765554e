"""The plan of a pass, made by the ranks that will run it: a share of the work each, and the result on all.

Of the routes of its own rows a rank counts the layers of its pipeline stage, and draws some rows. The P ranks of an EP
group divide these layers; each is sent what the others counted and drew for its share, plans it, and sends the plan to
all. EP groups plan their copies for themselves and tell each other only where they have some; homes and copies that
stay are planned for all layers and for the loads of all EP groups, which share them. Everything travels on the host
(`PlanExchange`), so that a thread may do it while the pass before runs. All methods are collectives, called by all
ranks in one order.

G EP groups, M micro-batches, L MoE layers of the model, l of them of this pipeline stage, E experts.
"""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.exchange import PlanExchange, attempted, told
from moe_rl.balancing.loads import EarlierLoads, RankRows, narrow
from moe_rl.balancing.pass_metrics import Misfit, PassOutcome
from moe_rl.balancing.pass_source import ReadOnce, RowReader
from moe_rl.balancing.schedule import (
    cluster_topology,
    cost_of_load,
    home_experts,
    plan_of_load,
    step_setting,
    worker_layout,
)
from moe_rl.core.certificate import certify
from moe_rl.core.errors import require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertMigration, ExpertPlacement
from moe_rl.core.plan import Plan, ReplicaPlan
from moe_rl.core.routes import RouteSample, drawn_rows
from moe_rl.planner.base import COPIES, Levers, PlanProblem
from moe_rl.planner.predict import predicted_cost
from moe_rl.simulators.memory import MemoryForecast
from moe_rl.simulators.setting import StepSetting

Ints = NDArray[np.int64]
# Fields of `PlannedPass`, by micro-batch, layer and rank.
ROWS = ("predicted_rows", "static_rows", "most_rows")
# Fields of `Plan` that a policy fills beside placement, layout and replicas.
FACTS = ("policy", "objective", "parameters", "predicted_cost_s", "solve_time_s", "notes")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRequest:
    """What a pass is asked to be; the same on all ranks."""

    config: BalancerConfig
    placement: ExpertPlacement
    """Where the experts are."""
    plan: Plan | None = None
    """Made elsewhere: for all G EP groups, or for this rank's alone."""
    layout: BatchLayout | None = None
    forward_only: bool = False
    may: Levers = COPIES
    """Which levers are free, where no plan is given."""
    num_micro_batches: int | None = None
    """M of the whole pass, where these are some of its micro-batches."""
    updates: int = 1
    """Optimizer steps in which what was counted will run."""
    of_stage: bool = False
    """Whether ranks know the layers of their own pipeline stage alone, though experts may move."""

    @property
    def of_all_groups(self) -> bool:
        """Whether all EP groups share what is planned: homes, and copies that stay."""
        return self.may.move_homes or self.may.choose_residents

    def check(self, num_ep_groups: int) -> None:
        """Raise where the given plan is for another model, or another number of ranks, slots or EP groups."""
        if self.plan is None:
            return
        in_force, stated = self.placement, self.plan.placement
        for name in ("ep_size", "num_layers", "num_experts", "slots_per_rank", "resident_slots"):
            stated_value, needed = getattr(stated, name), getattr(in_force, name)
            require(stated_value == needed, f"the plan has {name} {stated_value}, this run has {needed}.")
        groups = self.plan.replicas.num_ep_groups
        require(groups in (1, num_ep_groups), f"the plan is for {groups} EP groups, this run has {num_ep_groups}.")

    @property
    def digest(self) -> str:
        """Hex digest by which the ranks of an EP group know that they ask for the same."""
        digest = hashlib.sha256(repr((self.config, self.forward_only, self.may, self.plan and self.plan.hash)).encode())
        arrays = [self.placement.physical_to_logical_map, self.placement.home_rank]
        if self.layout is not None:
            arrays += [self.layout.micro_batch, self.layout.dp_rank, self.layout.order]
        for array in arrays:
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def misfit(self, num_micro_batches: int | None) -> Misfit | None:
        """Return why the given plan is not for this batch (None: not known) or placement; None when it is."""
        plan, layout = self.plan, self.layout
        if plan is None:
            return None
        if not same_places(plan.placement, self.placement):
            sentence = "the plan is for another placement of the experts: call reorder() with it first"
            return Misfit(kind="placement", sentence=sentence)
        count = plan.replicas.num_micro_batches
        if num_micro_batches not in (None, count):
            sentence = f"the plan is for {count} micro-batches, the routes are of {num_micro_batches}"
            return Misfit(kind="micro-batches", sentence=sentence)
        same = layout is None or all(
            np.array_equal(getattr(plan.layout, name), getattr(layout, name))
            for name in ("micro_batch", "dp_rank", "order")
        )
        return None if same else Misfit(kind="layout", sentence="the plan is for another batch layout")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPass:
    """A plan, and what is known of the pass that will follow it."""

    plan: Plan
    """As it was given, or made here: for the EP group and the pipeline stage of this rank alone, for all of them where
    homes may move."""
    here: Plan
    """Its replicas in this EP group and the layers of this stage: one EP group, L layers, of other stages empty."""
    anywhere: NDArray[np.bool_]
    """[M, L] whether some EP group has replicas."""
    misfit: Misfit | None = None
    """Why the pass must do without the plan; the same on all ranks."""
    predicted_rows: Ints | None = None
    """[M, l, P] rows that the plan expects of every rank; None where the loads are not known."""
    static_rows: Ints | None = None
    """[M, l, P] the same where Megatron puts the experts."""
    most_rows: Ints | None = None
    """[M, l, P] what every rank gets at most, but for `BalancerConfig.capacity_risk`; None: no such bound is known."""
    held: Ints | None = None
    """[M, P] tokens of every rank of the EP group; None where the loads are not known."""
    counted: RankRows | None = None
    """What this rank told of its rows; None where it told nothing."""
    memory: MemoryForecast | None = None
    """Of these micro-batches; None where nobody asks or the loads are not known."""
    plan_time_s: float = 0.0
    plan_cpu_s: float = 0.0
    """What of it this rank computed, tables included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What all ranks must know of each other's request."""

    digest: str = ""
    misfit: Misfit | None = None
    num_micro_batches: int | None
    """M of the routes; None without routes."""
    most: int
    """Largest count."""
    in_all: int | None = None
    """M of the whole pass."""
    rows: Ints
    """[M]"""
    drawable: Ints
    """[M] rows from which the rank can draw."""
    held: Ints
    """[2, M] `RankRows.held`."""

    @classmethod
    def of(cls, rows: RankRows | None) -> "_Facts":
        """Return what a rank's rows say; nothing where a plan is given without routes."""
        nothing = np.zeros(0, np.int64)
        return cls(
            num_micro_batches=None if rows is None else len(rows.rows),
            most=0 if rows is None else int(rows.pairs.max(initial=0)),
            rows=nothing if rows is None else rows.rows,
            drawable=nothing if rows is None else rows.drawable,
            held=nothing.reshape(2, 0) if rows is None else rows.held,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What one rank planned: some layers."""

    layers: Sequence[int]
    placement: ExpertPlacement | None = None
    """Of these layers alone, like `replicas`; None where there are no layers, or the plan was given."""
    replicas: ReplicaPlan | None = None
    facts: dict[str, Any]
    """Other fields of the `Plan`."""
    predicted_rows: Ints
    """[M, layers, P], of this EP group."""
    static_rows: Ints
    most_rows: Ints | None = None


class PassPlanner:
    """Plans the passes of one pipeline stage, together with the other ranks of the stage."""

    def __init__(
        self, exchange: PlanExchange, *, layers: Sequence[int], model: MoeModelSpec, setting: StepSetting | None = None
    ) -> None:
        self.exchange, self.model = exchange, model
        self.layers = list(layers)
        """The l layers of this stage, as indices among the model's MoE layers."""
        self.setting = setting
        """How the framework runs a step, by which plans are priced; None where nobody asked it."""
        self._earlier: EarlierLoads | None = None
        """This rank's share of the loads for which homes were planned before."""

    def layers_of(self, may: Levers) -> list[int]:
        """Return the layers that ranks count for such a plan: of the whole model where homes may move."""
        return list(range(self.model.num_moe_layers)) if may.move_homes else self.layers

    def plan_pass(self, request: PassRequest, reader: RowReader | None) -> PlannedPass:
        """Return the plan of a pass from the rows that are read, or the given one, with what the rows say of it.

        They are rows of the layers `layers_of(request.may)`; without a reader the request must have a plan.

        Where ranks ask for different things, or for a plan that does not fit, there is a misfit on all of them; an
        error on any rank is raised on all.
        """
        started = time.perf_counter()
        reader = None if reader is None else ReadOnce(reader)
        # Four exchanges in turn: facts and errors, which say what may be sent; loads; plans of shares; tables.
        rows, told_by = self.exchange.together(
            lambda: self._counted(reader, request), lambda rows: self._facts(request, rows)
        )
        counted = None if reader is None else reader.read()  # of this rank alone: by its own rows it learns the drift
        num_micro_batches = _same_number(told_by)
        misfit = next((facts.misfit for of_group in told_by for facts in of_group if facts.misfit), None)
        if misfit is None and any(len({facts.digest for facts in of_group}) > 1 for of_group in told_by):
            misfit = Misfit(kind="ranks", sentence="the ranks hold different plans")
        if request.plan is not None:
            num_micro_batches = request.plan.replicas.num_micro_batches
        nothing = self._nothing(num_micro_batches or 0, request.placement.ep_size)
        if misfit is not None:
            empty = self._plan(request, request.placement, nothing, {})
            return PlannedPass(
                plan=request.plan or empty,
                here=empty,
                anywhere=_filled(nothing),
                misfit=misfit,
                counted=counted,
                plan_time_s=time.perf_counter() - started,
            )
        shares, stated_plan = [], None if request.plan is None else self._given_here(request.plan)
        if rows is not None:
            layers = self.layers if request.of_stage else self.layers_of(request.may)
            # A rank plans some layers, which do not depend on each other, for all micro-batches, which may.
            parts = [part.tolist() for part in np.array_split(np.arange(len(layers)), self.exchange.size)]
            load = self._load_of_share(rows, told_by, parts, of_all_groups=request.of_all_groups)
            own_layers = [layers[index] for index in parts[self.exchange.rank]]
            tokens_of_ranks = np.stack([facts.held for facts in told_by[self.exchange.group_index]], axis=2)
            shares = self._shares(lambda: self._share(request, load, own_layers, stated_plan, tokens_of_ranks))
        joined_plan = stated_plan or self._joined(request, shares, nothing)
        local_plan = stated_plan or self._given_here(joined_plan)
        filled = self.exchange.gather_over_groups(np.packbits(_filled(local_plan.replicas)))
        anywhere = np.bitwise_or.reduce(filled)
        predicted, static, most = (
            np.concatenate([getattr(share, name) for share in shares], axis=1)[:, self._of_stage(request)]
            if shares and all(getattr(share, name) is not None for share in shares)
            else None
            for name in ROWS
        )
        return PlannedPass(
            plan=request.plan or joined_plan,
            here=local_plan,
            anywhere=np.unpackbits(anywhere, count=local_plan.replicas.offsets.size - 1)
            .astype(np.bool_)
            .reshape(nothing.num_micro_batches, -1),
            predicted_rows=predicted,
            static_rows=static,
            most_rows=most,
            held=tokens_of_ranks[0] if shares else None,
            counted=counted,
            plan_time_s=time.perf_counter() - started,
        )

    def load_of(self, reader: RowReader) -> StepLoad:
        """Return the loads of all ranks and EP groups, drawn routes among them, in all layers of the model."""
        rows, told_by = self.exchange.together(lambda: self._counted(reader), lambda rows: _Facts.of(rows))
        _same_number(told_by)
        assert rows is not None
        everything = [list(range(self.model.num_moe_layers))] * self.exchange.size
        return self._load_of_share(rows, told_by, everything, of_all_groups=True)

    def outcome(self, request: PassRequest, planned: PlannedPass, reader: RowReader) -> PassOutcome | None:
        """Return what the plan makes of the tokens that came in the pass; a collective of the EP group.

        None if the pass had another number of micro-batches than its plan.
        """
        rows, told_by = self.exchange.together(lambda: self._counted(reader), lambda rows: _Facts.of(rows))
        assert rows is not None
        if _same_number(told_by) != planned.here.replicas.num_micro_batches:
            return None
        parts = [part.tolist() for part in np.array_split(np.arange(len(self.layers)), self.exchange.size)]
        load = self._load_of_share(rows, told_by, parts, of_all_groups=False)
        layers = [self.layers[index] for index in parts[self.exchange.rank]]
        share = self._outcome_of_share(request, planned.here, load, layers)
        shares = self.exchange.gather(share)
        return PassOutcome(
            rows=np.concatenate([share.rows for share in shares], axis=1),
            moe_layer_s=sum(share.moe_layer_s for share in shares),
            moe_layer_s_at_home=sum(share.moe_layer_s_at_home for share in shares),
        )

    def _outcome_of_share(self, request: PassRequest, plan: Plan, load: StepLoad, layers: list[int]) -> PassOutcome:
        """Return what the plan makes of the loads [1, M, layers, P, E] of some layers."""
        if not layers:
            no_rows = np.zeros((load.num_micro_batches, 0, load.ep_size), np.int64)
            return PassOutcome(rows=no_rows, moe_layer_s=0.0, moe_layer_s_at_home=0.0)
        config = request.config
        model = replace(self.model, moe_layer_ids=tuple(self.model.moe_layer_ids[layer] for layer in layers))
        topology = cluster_topology(config, ep_size=load.ep_size)
        setting = step_setting(config, self.setting, forward_only=request.forward_only)
        placement = plan.placement.of_layers(layers)
        problem = PlanProblem(
            load=load,
            layout=worker_layout(load.num_micro_batches, topology.num_ranks),
            model=model,
            topology=topology,
            cost=cost_of_load(load, model=model, topology=topology, setting=setting),
            current_placement=placement,
            replica_slots=config.replica_slots,
            cross_node_slots=config.cross_node_slots,
            resident_slots=config.resident_slots,
        )
        of_layers = replace(plan, placement=placement, replicas=plan.replicas.of_layers(layers, group=0))
        contiguous = ExpertPlacement.contiguous(
            num_layers=len(layers), num_experts=load.num_experts, ep_size=load.ep_size
        )
        at_home = replace(of_layers, placement=contiguous, replicas=ReplicaPlan.empty(*load.pairs.shape[:4]))
        return PassOutcome(
            rows=rank_load(of_layers, load)[0],
            moe_layer_s=predicted_cost(of_layers, problem),
            moe_layer_s_at_home=predicted_cost(at_home, problem),
        )

    def _of_stage(self, request: PassRequest) -> list[int]:
        """Return where the layers of this stage stand among those that were planned."""
        planned = self.layers if request.of_stage else self.layers_of(request.may)
        return [planned.index(layer) for layer in self.layers]

    def _counted(self, reader: RowReader | None, request: PassRequest | None = None) -> RankRows | None:
        """Return what is counted, on all ranks with parts of the same experts together; None where nobody counts.

        What fails on one of them fails on all.
        """
        rows, error = attempted(lambda: None if reader is None else reader.read())
        own_counts = None if rows is None else replace(rows, routes=(), among=(rows.drawable, rows.drawable))
        parts = self.exchange.gather_parts((own_counts, request and request.digest, told(error)))
        if error is not None:
            raise error
        error_message = next((error_message for *_, error_message in parts if error_message), "")
        require(not error_message, f"a rank with another part of the same experts: {error_message}")
        require(
            len({digest for _, digest, _ in parts}) == 1, "ranks with parts of the same experts ask for other plans."
        )
        everyone = [rows_of_rank for rows_of_rank, *_ in parts if rows_of_rank is not None]
        _require_one_number(
            [len(rows_of_rank.rows) for rows_of_rank in everyone] + [None] * (len(parts) - len(everyone))
        )
        return rows if rows is None or len(parts) == 1 else rows.of_all_parts(everyone, self.exchange.part)

    def _facts(self, request: PassRequest, rows: RankRows | None) -> _Facts:
        request.check(self.exchange.num_groups)
        size = None if rows is None else len(rows.rows)
        in_all = size if request.num_micro_batches is None else request.num_micro_batches
        return replace(_Facts.of(rows), digest=request.digest, misfit=request.misfit(size), in_all=in_all)

    def _load_of_share(
        self, rows: RankRows, told_by: list[list[_Facts]], parts: Sequence[Sequence[int]], *, of_all_groups: bool
    ) -> StepLoad:
        """Return [G', M, my layers, P, E] from what every rank counted and drew for this rank's share of the layers.

        `parts` are the shares of all ranks, as indices among the layers that were counted. G' is 1, or all G groups:
        whoever has the same share there passes its loads on.
        """
        exchange, facts, top_k = self.exchange, told_by[self.exchange.group_index], self.model.top_k
        # One type on all ranks, or a receiver would read other numbers of the same bytes.
        narrowed = narrow(rows.pairs, max(facts_of_rank.most for of_group in told_by for facts_of_rank in of_group))
        num_own_layers, num_micro_batches = len(parts[exchange.rank]), len(rows.rows)
        shape = (num_micro_batches, num_own_layers, self.model.num_experts)
        drawable = np.stack([facts_of_rank.drawable for facts_of_rank in facts])
        of_parts = exchange.gather_parts(rows.drawn(drawable, exchange.rank))
        drawn = np.concatenate(
            [np.zeros((0, rows.pairs.shape[1], top_k), np.uint16), *chain(*zip(*of_parts, strict=True))]
        )
        drawn_counts = np.array([[len(part) for part in drawn_rows(of_all)] for of_all in drawable.T]).reshape(
            -1, exchange.size
        )
        # Counts and drawn rows travel in one message.
        begin = math.prod(shape) * narrowed.itemsize // 2  # of drawn rows, among the uint16 of a rank
        drawn_by = drawn_counts.sum(axis=0).tolist()
        received = exchange.scatter(
            [
                np.concatenate(
                    [np.ascontiguousarray(narrowed[:, part]).view(np.uint16).ravel(), drawn[:, part].ravel()]
                )
                for part in parts
            ],
            shapes=[(begin + count * num_own_layers * top_k,) for count in drawn_by],
        )
        counted = [message[:begin].view(narrowed.dtype).reshape(shape) for message in received]
        sent = [
            message[begin:].reshape(count, num_own_layers, top_k)
            for message, count in zip(received, drawn_by, strict=True)
        ]
        by_source = [np.split(routes, np.cumsum(drawn_counts[:, source])[:-1]) for source, routes in enumerate(sent)]
        of_cells = [[of_source[cell] for of_source in by_source] for cell in range(num_micro_batches)]
        loads = np.stack(counted, axis=2), np.stack([facts_of_rank.rows for facts_of_rank in facts], axis=1), of_cells
        groups = exchange.gather_over_groups(loads) if of_all_groups else [loads]
        return StepLoad(
            pairs=np.ascontiguousarray(np.stack([pairs for pairs, _, _ in groups]), np.int32),
            tokens=np.stack([tokens for _, tokens, _ in groups]),
            top_k=top_k,
            routes=RouteSample.of_rows([cell for _, _, cells in groups for cell in cells]) if num_own_layers else None,
        )

    def _shares(self, plan: Callable[[], _Share]) -> list[_Share]:
        """Return what the ranks of the EP group planned; where one fails, all do."""
        # One part's rank plans for the ranks of the others: a policy with a time limit may find another plan there.
        share, error = attempted(plan) if self.exchange.part == 0 else (None, None)
        shares = self.exchange.gather(self.exchange.gather_parts((share, told(error)))[0])
        if error is not None:
            raise error
        for rank, (_, error_message) in enumerate(shares):
            require(not error_message, f"EP rank {rank} cannot plan its layers: {error_message}")
        return [share for share, _ in shares if share is not None]

    def _share(
        self, request: PassRequest, load: StepLoad, layers: list[int], stated_plan: Plan | None, tokens_of_ranks: Ints
    ) -> _Share:
        """Plan this rank's share of the layers, or say what a given plan makes of their load.

        `tokens_of_ranks` [2, M, P] are all tokens of the EP group's ranks, and those of which every choice is known.
        """
        if not layers:
            no_rows = np.zeros((load.num_micro_batches, 0, load.ep_size), np.int64)
            return _Share(layers=[], facts={}, predicted_rows=no_rows, static_rows=no_rows, most_rows=no_rows)
        group = self.exchange.group_index if load.num_ep_groups > 1 else 0
        if stated_plan is not None:
            placement, replicas = request.placement.of_layers(layers), stated_plan.replicas.of_layers(layers, group=0)
            plan = replace(stated_plan, placement=placement, replicas=replicas)
        else:
            plan = self._planned(request, load, layers)
        most, predicted = int(load.pairs.max(initial=0)), rank_load(plan, load)[group]
        columns: dict[str, Any] = {
            name: narrow(getattr(plan.replicas, name), most) for name in ("source_quota", "source_pairs")
        }
        return _Share(
            layers=layers,
            placement=plan.placement,
            replicas=replace(plan.replicas, **columns) if stated_plan is None else None,
            facts={name: getattr(plan, name) for name in FACTS},
            predicted_rows=predicted,
            static_rows=rows_of_contiguous_homes(load)[group],
            most_rows=predicted
            if (tokens_of_ranks[0] == tokens_of_ranks[1]).all()
            else self._certified(request, plan, load, tokens_of_ranks),
        )

    def _certified(self, request: PassRequest, plan: Plan, load: StepLoad, tokens_of_ranks: Ints) -> Ints | None:
        """Return [M, layers, P] rows at most where some tokens have no route; None where nobody states a risk.

        Nor where all are foretold and none replayed: such loads drift in common, and no certificate holds for them.
        """
        (tokens, complete_tokens), risk = tokens_of_ranks, request.config.capacity_risk
        if risk is None or load.num_ep_groups > 1 or not complete_tokens.any():
            return None
        num_cells = self.model.num_moe_layers * (request.num_micro_batches or len(tokens)) * self.exchange.num_groups
        part = risk * load.num_layers * len(tokens) / num_cells  # places share the risk of the step
        of_known = replace(load, tokens=complete_tokens[None], routes=None)
        return np.asarray(certify(plan, of_known, tokens[None], risk=part).rows[0])

    def _planned(self, request: PassRequest, load: StepLoad, layers: list[int]) -> Plan:
        """Return the policy's plan of some layers; homes that serve several steps learn from earlier loads, too."""
        history = None
        if request.may.move_homes and request.config.steps_served > 1:
            self._earlier = self._earlier or EarlierLoads(request.config.history_steps)
            history = self._earlier.then(load)
        return plan_of_load(
            load,
            config=request.config,
            model=replace(self.model, moe_layer_ids=tuple(self.model.moe_layer_ids[layer] for layer in layers)),
            topology=cluster_topology(request.config, ep_size=load.ep_size, num_ep_groups=load.num_ep_groups),
            setting=self.setting,
            placement=request.placement.of_layers(layers),
            forward_only=request.forward_only,
            may=request.may,
            history=history,
            updates=request.updates,
        )

    def _joined(self, request: PassRequest, shares: Sequence[_Share], nothing: ReplicaPlan) -> Plan:
        """Return the plan of all shares, for one EP group, or for all where homes may move."""
        planned = [share for share in shares if share.replicas is not None]
        groups = self.exchange.num_groups if request.of_all_groups else 1
        like = ReplicaPlan.empty(
            num_ep_groups=groups,
            num_micro_batches=nothing.num_micro_batches,
            num_layers=nothing.num_layers,
            ep_size=request.placement.ep_size,
        )
        replicas = ReplicaPlan.joined(
            [(share.layers, share.replicas) for share in planned if share.replicas is not None],
            num_layers=nothing.num_layers,
            like=like,
        )
        placement = request.placement
        if request.of_all_groups:
            slots, home_rank = placement.physical_to_logical_map.copy(), placement.home_rank.copy()
            for share in planned:
                assert share.placement is not None
                slots[share.layers] = share.placement.physical_to_logical_map
                home_rank[share.layers] = share.placement.home_rank
            placement = replace(placement, physical_to_logical_map=slots, home_rank=home_rank)
        return self._plan(request, placement, replicas, _joined_facts([share.facts for share in planned]))

    def _plan(
        self, request: PassRequest, placement: ExpertPlacement, replicas: ReplicaPlan, facts: dict[str, Any]
    ) -> Plan:
        num_ranks = self.exchange.size * replicas.num_ep_groups
        migration = ExpertMigration.between(request.placement, placement, expert_bytes=self.model.expert_state_bytes)
        return Plan(
            **{"policy": request.config.policy, "objective": request.config.objective, **facts},
            layout=request.layout or worker_layout(replicas.num_micro_batches, num_ranks),
            placement=placement,
            replicas=replicas,
            migration=migration,
        )

    def _given_here(self, plan: Plan) -> Plan:
        """Return what a plan has for this EP group and the layers of this stage."""
        group = 0 if plan.replicas.num_ep_groups == 1 else self.exchange.group_index
        part = plan.replicas.of_layers(self.layers, group=group)
        like = self._nothing(part.num_micro_batches, part.source_quota.shape[1])
        joined = ReplicaPlan.joined([(self.layers, part)], num_layers=like.num_layers, like=like)
        return replace(plan, replicas=joined)

    def _nothing(self, num_micro_batches: int, ep_size: int) -> ReplicaPlan:
        return ReplicaPlan.empty(
            num_ep_groups=1,
            num_micro_batches=num_micro_batches,
            num_layers=self.model.num_moe_layers,
            ep_size=ep_size,
        )


def _same_number(told_by: list[list[_Facts]]) -> int | None:
    """Return of how many micro-batches all ranks gave routes; raise where they disagree."""
    everyone = [facts for of_group in told_by for facts in of_group]
    _require_one_number([facts.num_micro_batches if facts.in_all is None else facts.in_all for facts in everyone])
    return everyone[0].num_micro_batches


def _require_one_number(sizes: Sequence[int | None]) -> None:
    listed = ", ".join(sorted(map(str, set(sizes))))
    require(len(set(sizes)) == 1, f"the ranks gave routes of different numbers of micro-batches: {listed}.")


def _joined_facts(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a policy said of a plan whose layers several ranks planned.

    A note stands where all say it, whatever its figures: a lever that is idle in some layers is not idle.
    """
    if not facts:
        return {}
    together = dict(facts[0])
    if together["predicted_cost_s"] is not None:
        together["predicted_cost_s"] = sum(facts_of_share["predicted_cost_s"] for facts_of_share in facts)
    together["solve_time_s"] = max(facts_of_share["solve_time_s"] for facts_of_share in facts)
    kinds_of_notes = [{note.partition(":")[0] for note in facts_of_share["notes"]} for facts_of_share in facts]
    together["notes"] = tuple(
        note for note in together["notes"] if all(note.partition(":")[0] in beginnings for beginnings in kinds_of_notes)
    )
    return together


def _filled(replicas: ReplicaPlan) -> NDArray[np.bool_]:
    """Return [M, L] where one EP group has replicas."""
    return (np.diff(replicas.offsets) > 0).reshape(replicas.num_micro_batches, -1)


def joined(parts: Sequence[PlannedPass]) -> PlannedPass:
    """Return what is known of consecutive micro-batches as one; plans are those of the first part."""
    if len(parts) == 1:
        return parts[0]
    counted = [part.counted for part in parts if part.counted is not None]
    rows = [
        None
        if any(getattr(part, name) is None for part in parts)
        else np.concatenate([getattr(part, name) for part in parts])
        for name in (*ROWS, "held")
    ]
    return replace(
        parts[0],
        predicted_rows=rows[0],
        static_rows=rows[1],
        most_rows=rows[2],
        held=rows[3],
        counted=replace(counted[0], pairs=np.concatenate([part.pairs for part in counted])) if counted else None,
        memory=max(
            (part.memory for part in parts if part.memory), key=lambda forecast: forecast.peak_bytes, default=None
        ),
        plan_time_s=sum(part.plan_time_s for part in parts),
    )


def moved_since(planned: PlannedPass, placement: ExpertPlacement, layers: Sequence[int]) -> Misfit | None:
    """Return a misfit where experts of these layers are elsewhere than where the pass was planned for."""
    if same_places(planned.here.placement.of_layers(layers), placement.of_layers(layers)):
        return None
    return Misfit(kind="placement", sentence="experts have moved since the pass was prepared")


def same_places(placement: ExpertPlacement, other: ExpertPlacement) -> bool:
    """Return whether two placements have the same experts in home and resident slots."""
    return np.array_equal(home_experts(placement), home_experts(other)) and np.array_equal(
        placement.resident_experts, other.resident_experts
    )


def rows_of_contiguous_homes(load: StepLoad) -> Ints:
    """Return [G, M, L, P] rows where Megatron puts the experts: rank p has the p-th equal share of their ids."""
    per_expert = load.per_expert()
    rows: Ints = per_expert.reshape(*per_expert.shape[:3], load.ep_size, -1).sum(axis=4)
    return rows
