"""Plan a pass together: every rank plans some layers, and all ranks get what they need of the whole plan.

A plan needs the loads of all ranks of an EP group, and a rank knows the routes of its own tokens only. So a pass is
planned in four exchanges:

    1. notices    every rank tells all others what it asks for, how many rows it has, and whether something failed
    2. loads      every rank is sent the counts and sampled routes of the layers that it is to plan
    3. shares     every rank plans its layers and sends each rank of its EP group what that one needs of them
    4. replicas   EP groups tell each other in which (micro-batch, layer) they have replicas

Example: with 4 ranks and 6 layers, rank 0 plans layers 0 and 1, rank 1 layers 2 and 3, rank 2 layer 4, rank 3 layer 5.

A rank keeps its own column of the quotas and the sums over all (`ReplicaPlan.of_source`), which is a constant number of
bytes per replica. A plan that is handed out (`PassRequest.whole_plan`) has the columns of all ranks.

Replicas belong to one EP group, which plans them alone. Homes and resident copies are shared by all EP groups, so they
are planned for all layers of the model, from the loads of all EP groups.

All of it runs on the host (`PlanExchange`), so that a thread can plan the next pass while this one runs. All methods
are collectives: all ranks call them in one order.

Axes: G EP groups, P ranks of one, M micro-batches, L MoE layers, E experts.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.exchange import PlanExchange, attempted, told
from moe_rl.balancing.load_exchange import (
    Notices,
    RankNotice,
    TokensOfRanks,
    common_num_micro_batches,
    exchange_loads,
    first_misfit,
    require_one_number,
)
from moe_rl.balancing.loads import EarlierLoads, RankRows, narrow
from moe_rl.balancing.pass_metrics import PassOutcome
from moe_rl.balancing.pass_outcome import joined_outcomes, outcome_of_layers
from moe_rl.balancing.pass_request import PassRequest, PlannedPass
from moe_rl.balancing.pass_source import ReadOnce, RowReader
from moe_rl.balancing.plan_assembly import LayerShare, PlanAssembly, PolicyReport
from moe_rl.balancing.schedule import cluster_topology, plan_of_load
from moe_rl.core.certificate import certify
from moe_rl.core.errors import require
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.plan import Plan, ReplicaPlan
from moe_rl.planner.base import Levers
from moe_rl.simulators.setting import StepSetting

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartMessage:
    """What the ranks with parts of the same experts tell each other (expert tensor parallelism)."""

    rows: RankRows | None
    """Without routes."""
    digest: str | None
    """Of the request; None if nothing is requested."""
    error: str
    """Empty if counting succeeded."""


class PassPlanner:
    """Plans the passes of one pipeline stage, together with the other ranks of the stage."""

    def __init__(
        self, exchange: PlanExchange, *, layers: Sequence[int], model: MoeModelSpec, setting: StepSetting | None = None
    ) -> None:
        """`layers` are those of this stage, as indices among the model's MoE layers.

        `setting` says how the framework runs a step, which decides prices; None if it is not known.
        """
        self.exchange, self.model, self.setting = exchange, model, setting
        self.layers = list(layers)
        self._earlier_loads: EarlierLoads | None = None  # of the layers that this rank planned homes for

    def layers_of(self, may: Levers) -> list[int]:
        """Return the layers that ranks count for a plan: those of the whole model if homes may move."""
        return list(range(self.model.num_moe_layers)) if may.move_homes else self.layers

    def plan_pass(self, request: PassRequest, reader: RowReader | None) -> PlannedPass:
        """Return the request's plan, or one made from the rows that are read, and what is known of the pass.

        The rows are those of the layers `layers_of(request.may)`. Without a reader nothing is known of the loads, and
        the request must have a plan. If ranks ask for different passes, or for a plan that does not fit, the result has
        a misfit on all ranks. An error on any rank is raised on all of them.
        """
        start_time = time.perf_counter()
        if reader is not None:
            reader = ReadOnce(reader)
        rows, notices = self.exchange.together(
            lambda: self._read_rows(reader, request), lambda rows: self._notice(request, rows)
        )
        num_micro_batches = common_num_micro_batches(notices) or 0
        if request.plan is not None:
            num_micro_batches = request.plan.replicas.num_micro_batches
        misfit = first_misfit(notices)
        if misfit is not None:
            planned_pass = self._assembly.without_replicas(request, num_micro_batches, misfit)
        else:
            planned_pass = self._with_plan(request, rows, notices, num_micro_batches)
        # `rows` are summed over ranks with parts of the same experts; the drift of routers is learned from one's own.
        own_rows = None if reader is None else reader.read()
        return replace(planned_pass, counted=own_rows, plan_time_s=time.perf_counter() - start_time)

    def load_of(self, reader: RowReader) -> StepLoad:
        """Return the loads of all ranks and EP groups, sampled routes included, in all layers of the model."""
        rows, notices = self.exchange.together(lambda: self._read_rows(reader), RankNotice.of)
        common_num_micro_batches(notices)
        assert rows is not None
        all_layers = list(range(self.model.num_moe_layers))
        all_layers_P = [all_layers] * self.exchange.size
        return exchange_loads(self.exchange, rows, notices, all_layers_P, top_k=self.model.top_k, of_all_groups=True)

    def outcome(self, request: PassRequest, planned: PlannedPass, reader: RowReader) -> PassOutcome | None:
        """Return what the plan makes of the tokens that came in the pass; a collective of the EP group.

        None if the pass had another number of micro-batches than its plan.
        """
        exchange = self.exchange
        rows, notices = exchange.together(lambda: self._read_rows(reader), RankNotice.of)
        assert rows is not None
        if common_num_micro_batches(notices) != planned.local_plan.replicas.num_micro_batches:
            return None
        layer_indices_P = layers_of_ranks(self.layers, exchange.size)
        load = exchange_loads(exchange, rows, notices, layer_indices_P, top_k=self.model.top_k, of_all_groups=False)
        own_layers = [self.layers[index] for index in layer_indices_P[exchange.rank]]
        replicas = planned.own_share or self._assembly.replicas_of(planned.plan, own_layers)
        own_outcome = outcome_of_layers(
            planned.plan, replicas, load, own_layers, request=request, model=self.model, setting=self.setting
        )
        return joined_outcomes(exchange.gather(own_outcome))

    # Exchange 1: rows and notices

    def _read_rows(self, reader: RowReader | None, request: PassRequest | None = None) -> RankRows | None:
        """Return this rank's rows, None without a reader. What fails on one rank fails on all of the same experts.

        Under expert tensor parallelism, ranks with parts of the same experts run each other's tokens too, so their
        counts are summed: two parts with 100 rows each both return 200. The routes stay this rank's own.
        """
        rows, error, without_routes, digest = None, None, None, None
        if reader is not None:
            rows, error = attempted(reader.read)
        if rows is not None:
            without_routes = replace(rows, routes=(), among=(rows.drawable, rows.drawable))
        if request is not None:
            digest = request.digest
        messages = self.exchange.gather_parts(_PartMessage(rows=without_routes, digest=digest, error=told(error)))
        if error is not None:
            raise error
        for message in messages:
            require(not message.error, f"another rank of the expert tensor-parallel group failed: {message.error}")
        same_request = len({message.digest for message in messages}) == 1
        require(same_request, "all ranks of an expert tensor-parallel group must request the same plan.")
        require_one_number([None if message.rows is None else len(message.rows.rows) for message in messages])
        if rows is None or len(messages) == 1:
            return rows
        rows_of_parts = [message.rows for message in messages if message.rows is not None]
        return rows.of_all_parts(rows_of_parts, self.exchange.part)

    def _notice(self, request: PassRequest, rows: RankRows | None) -> RankNotice:
        request.check(self.exchange.num_groups)
        notice = RankNotice.of(rows)
        of_pass = request.num_micro_batches
        return replace(
            notice,
            digest=request.digest,
            misfit=request.misfit(notice.num_micro_batches),
            num_micro_batches_of_pass=notice.num_micro_batches if of_pass is None else of_pass,
        )

    # The two outcomes

    def _with_plan(
        self, request: PassRequest, rows: RankRows | None, notices: Notices, num_micro_batches: int
    ) -> PlannedPass:
        layer_shares: list[LayerShare] = []
        own_share = None
        if rows is not None:
            exchanged_share, layer_shares = self._exchange_shares(request, rows, notices)
            if request.config.observe:
                own_share = exchanged_share.replicas
        plan = request.plan
        if plan is None:
            plan = self._assembly.join_shares(request, layer_shares, num_micro_batches)
        local_plan = self._assembly.local_part(plan)
        planned_pass = PlannedPass(
            plan=plan,
            local_plan=local_plan,
            own_share=own_share,
            replicated_ML=self._assembly.replicated_in_any_group(local_plan.replicas),
        )
        return self._with_rows(planned_pass, request, layer_shares, notices) if layer_shares else planned_pass

    # Exchanges 2 and 3: loads and shares

    def _exchange_shares(
        self, request: PassRequest, rows: RankRows, notices: Notices
    ) -> tuple[LayerShare, list[LayerShare]]:
        """Plan this rank's layers; return its own share, and what it needs of the shares of all ranks of the EP group.

        If one rank fails, all do.
        """
        exchange = self.exchange
        layers = self._counted_layers(request)
        layer_indices_P = layers_of_ranks(layers, exchange.size)
        load = exchange_loads(
            exchange,
            rows,
            notices,
            layer_indices_P,
            top_k=self.model.top_k,
            of_all_groups=request.of_all_groups,
        )
        own_layers = [layers[index] for index in layer_indices_P[exchange.rank]]
        # Of ranks with parts of the same experts one plans for all: a policy with a time limit may find another plan on
        # each of them.
        share, error = None, None
        if exchange.part == 0:
            share, error = attempted(lambda: self._plan_share(request, load, own_layers, notices))
        own_share, failure = exchange.gather_parts((share, told(error)))[0]
        messages = [(own_share, failure)] * exchange.size
        if own_share is not None and not request.whole_plan:
            messages = [(self._assembly.share_for(own_share, rank), failure) for rank in range(exchange.size)]
        shares_and_errors = exchange.scatter_messages(messages)
        if error is not None:
            raise error
        for rank, (_, message) in enumerate(shares_and_errors):
            require(not message, f"EP rank {rank} cannot plan its layers: {message}")
        assert own_share is not None
        # no rank failed, so every share is set
        return own_share, [share for share, _ in shares_and_errors if share is not None]

    def _plan_share(self, request: PassRequest, load: StepLoad, layers: list[int], notices: Notices) -> LayerShare:
        """Plan these layers; if the request has a plan, say what it makes of their load."""
        if not layers:
            no_rows = np.zeros((load.num_micro_batches, 0, load.ep_size), np.int64)
            return LayerShare(layers=[], plan_rows_MLP=no_rows, static_rows_MLP=no_rows, max_rows_MLP=no_rows)
        group = self.exchange.group_index if load.num_ep_groups > 1 else 0
        placement, replicas, report = None, None, None
        if request.plan is None:
            plan = self._run_policy(request, load, layers)
            placement, report = plan.placement, PolicyReport.of(plan)
            replicas = _with_narrow_counts(plan.replicas, largest_count=int(load.pairs.max(initial=0)))
        else:
            plan = self._assembly.part_of_given_plan(request.plan, request.placement, layers)
        plan_rows_MLP = rank_load(plan, load)[group]
        tokens = TokensOfRanks.of(notices[self.exchange.group_index])
        num_micro_batches = request.num_micro_batches or len(tokens.all_MP)
        num_cells = self.model.num_moe_layers * num_micro_batches * self.exchange.num_groups
        max_rows_MLP = row_bound(request, plan, load, plan_rows_MLP, tokens, num_cells=num_cells)
        return LayerShare(
            layers=layers,
            plan_rows_MLP=plan_rows_MLP,
            static_rows_MLP=rows_of_contiguous_homes(load)[group],
            max_rows_MLP=max_rows_MLP,
            placement=placement,
            replicas=replicas,
            report=report,
        )

    def _run_policy(self, request: PassRequest, load: StepLoad, layers: list[int]) -> Plan:
        """Return the policy's plan of these layers; homes that serve several steps learn from earlier loads, too."""
        history = None
        if request.may.move_homes and request.config.homes.steps_served > 1:
            if self._earlier_loads is None:
                self._earlier_loads = EarlierLoads(request.config.homes.history_steps)
            history = self._earlier_loads.then(load)
        layer_ids = tuple(self.model.moe_layer_ids[layer] for layer in layers)
        return plan_of_load(
            load,
            config=request.config,
            model=replace(self.model, moe_layer_ids=layer_ids),
            topology=cluster_topology(request.config, ep_size=load.ep_size, num_ep_groups=load.num_ep_groups),
            setting=self.setting,
            placement=request.placement.of_layers(layers),
            forward_only=request.forward_only,
            may=request.may,
            history=history,
            updates=request.updates,
        )

    # Exchange 4 and the whole plan

    def _with_rows(
        self, planned_pass: PlannedPass, request: PassRequest, layer_shares: Sequence[LayerShare], notices: Notices
    ) -> PlannedPass:
        """Return the pass with its rows in the layers of this stage, from the shares of all counted layers."""
        counted_layers = self._counted_layers(request)
        stage = [counted_layers.index(layer) for layer in self.layers]
        bounds = [share.max_rows_MLP for share in layer_shares if share.max_rows_MLP is not None]
        most_rows = None
        if len(bounds) == len(layer_shares):
            most_rows = np.concatenate(bounds, axis=1)[:, stage]
        return replace(
            planned_pass,
            predicted_rows=np.concatenate([share.plan_rows_MLP for share in layer_shares], axis=1)[:, stage],
            static_rows=np.concatenate([share.static_rows_MLP for share in layer_shares], axis=1)[:, stage],
            most_rows=most_rows,
            tokens=TokensOfRanks.of(notices[self.exchange.group_index]).all_MP,
        )

    # Small answers

    @property
    def _assembly(self) -> PlanAssembly:
        return PlanAssembly(self.exchange, layers=self.layers, model=self.model)

    def _counted_layers(self, request: PassRequest) -> list[int]:
        return self.layers if request.of_stage else self.layers_of(request.may)


def layers_of_ranks(layers: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Return which of these layers every rank plans, as indices among them.

    Layers do not depend on each other, the micro-batches of a layer may: so ranks get whole layers.
    """
    return [part.tolist() for part in np.array_split(np.arange(len(layers)), num_ranks)]


def row_bound(
    request: PassRequest, plan: Plan, load: StepLoad, plan_rows_MLP: Ints, tokens: TokensOfRanks, *, num_cells: int
) -> Ints | None:
    """Return [M, L, P] the most rows that a rank can get, None if no bound is known.

    If all choices of all tokens are known, that is what is planned. Tokens without a route need a certificate, for
    which somebody has to state a risk. Predicted loads have none: they drift together, and a certificate takes unknown
    tokens to choose independently. `num_cells` are the (micro-batch, layer, EP group) of the whole step, each of which
    takes an equal part of the risk.
    """
    if (tokens.all_MP == tokens.complete_MP).all():
        return plan_rows_MLP
    risk = request.config.kernels.capacity_risk
    if risk is None or load.num_ep_groups > 1 or not tokens.complete_MP.any():
        return None
    num_own_cells = load.num_layers * len(tokens.all_MP)
    known_load = replace(load, tokens=tokens.complete_MP[None], routes=None)
    certificate = certify(plan, known_load, tokens.all_MP[None], risk=risk * num_own_cells / num_cells)
    return np.asarray(certificate.rows[0])


def _with_narrow_counts(replicas: ReplicaPlan, largest_count: int) -> ReplicaPlan:
    """Return the replicas with their two large arrays in the narrowest type, in which they travel."""
    # A field is int32 by its annotation; uint16 is read the same way, and `ReplicaPlan.joined` widens it again.
    narrow_columns: dict[str, Any] = {
        "source_quota": narrow(replicas.source_quota, largest_count),
        "source_pairs": narrow(replicas.source_pairs, largest_count),
    }
    return replace(replicas, **narrow_columns)


def rows_of_contiguous_homes(load: StepLoad) -> Ints:
    """Return [G, M, L, P] rows under Megatron's placement: with 8 experts on 4 ranks, rank 1 has experts 2 and 3."""
    pairs_GMLE = load.per_expert()
    pairs_by_rank = pairs_GMLE.reshape(*pairs_GMLE.shape[:3], load.ep_size, -1)
    rows_GMLP: Ints = pairs_by_rank.sum(axis=4)
    return rows_GMLP
