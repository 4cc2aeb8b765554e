"""Puts a plan together from the shares of the ranks, and takes what one rank needs of it.

Axes: M micro-batches, L MoE layers, P EP ranks.

Example: ranks 0 and 1 planned a layer each, with one replica whose quotas of the sources are [3, 4]. If the plan is
handed out, both ranks get both shares as they are. Else rank 0 gets [3, 4] of both layers and rank 1 [4, 3]: its own
column, and the sum of the other P - 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.exchange import PlanExchange
from moe_rl.balancing.pass_metrics import Misfit
from moe_rl.balancing.pass_request import PassRequest, PlannedPass
from moe_rl.balancing.schedule import worker_layout
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertMigration, ExpertPlacement
from moe_rl.core.plan import Plan, ReplicaPlan

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReport:
    """What a policy says of its plan."""

    policy: str
    objective: str
    parameters: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    predicted_cost_s: float | None = None
    solve_time_s: float = 0.0
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: Plan) -> "PolicyReport":
        """Return the report that a plan carries."""
        return cls(
            policy=plan.policy,
            objective=plan.objective,
            parameters=plan.parameters,
            predicted_cost_s=plan.predicted_cost_s,
            solve_time_s=plan.solve_time_s,
            notes=plan.notes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShare:
    """The layers that one rank planned."""

    layers: Sequence[int]
    plan_rows_MLP: Ints
    """Fields of `PlannedPass`, for this EP group."""
    static_rows_MLP: Ints
    max_rows_MLP: Ints | None
    placement: ExpertPlacement | None = None
    """Of these layers. It and the next two are None if the request has a plan, or the rank got no layers."""
    replicas: ReplicaPlan | None = None
    report: PolicyReport | None = None


class PlanAssembly:
    """Makes whole plans of one pass, and parts of them."""

    def __init__(self, exchange: PlanExchange, *, layers: Sequence[int], model: MoeModelSpec) -> None:
        """`layers` are those of this pipeline stage."""
        self._exchange, self._layers, self._model = exchange, layers, model

    def without_replicas(self, request: PassRequest, num_micro_batches: int, misfit: Misfit) -> PlannedPass:
        """Return the pass that runs without replicas, because of a misfit."""
        no_replicas = self._no_replicas(num_micro_batches, request.placement.ep_size)
        empty_plan = self._make_plan(request, request.placement, no_replicas, report=None)
        return PlannedPass(
            plan=request.plan or empty_plan,
            local_plan=empty_plan,
            replicated_ML=_replicated(no_replicas),
            misfit=misfit,
        )

    def share_for(self, share: LayerShare, rank: int) -> LayerShare:
        """Return what `rank` of this EP group needs of a share of this rank."""
        if share.replicas is None:
            return share
        group = 0 if share.replicas.num_ep_groups == 1 else self._exchange.group_index
        of_group = share.replicas.of_layers(range(share.replicas.num_layers), group=group)
        return replace(share, replicas=of_group.of_source(rank))

    def join_shares(self, request: PassRequest, shares: Sequence[LayerShare], num_micro_batches: int) -> Plan:
        """Return the plan of all shares.

        One that is handed out is of this EP group, or of all EP groups if they share what is planned. Any other has
        what this rank needs of it (`share_for`).
        """
        num_layers, num_groups = self._model.num_moe_layers, 1
        if request.of_all_groups:
            num_groups = self._exchange.num_groups
        empty_plan = ReplicaPlan.empty(
            num_ep_groups=num_groups if request.whole_plan else 1,
            num_micro_batches=num_micro_batches,
            num_layers=num_layers,
            ep_size=request.placement.ep_size,
        )
        if not request.whole_plan:
            empty_plan = empty_plan.of_source(self._exchange.rank)
        parts = [(share.layers, share.replicas) for share in shares if share.replicas is not None]
        replicas = ReplicaPlan.joined(parts, num_layers=num_layers, like=empty_plan)
        placement = request.placement
        if request.of_all_groups:
            placement = _with_layers(placement, shares)
        reports = [share.report for share in shares if share.report is not None]
        report = merge_reports(reports) if reports else None
        return self._make_plan(request, placement, replicas, report, num_groups=num_groups)

    def _make_plan(
        self,
        request: PassRequest,
        placement: ExpertPlacement,
        replicas: ReplicaPlan,
        report: PolicyReport | None,
        *,
        num_groups: int = 1,
    ) -> Plan:
        """Return the plan for so many EP groups; without a report it says what was configured."""
        if report is None:
            report = PolicyReport(policy=request.config.policy, objective=request.config.pricing.objective)
        num_ranks = self._exchange.size * num_groups
        migration = ExpertMigration.between(request.placement, placement, expert_bytes=self._model.expert_state_bytes)
        return Plan(
            policy=report.policy,
            objective=report.objective,
            parameters=report.parameters,
            predicted_cost_s=report.predicted_cost_s,
            solve_time_s=report.solve_time_s,
            notes=report.notes,
            layout=request.layout or worker_layout(replicas.num_micro_batches, num_ranks),
            placement=placement,
            replicas=replicas,
            migration=migration,
        )

    def local_part(self, plan: Plan) -> Plan:
        """Return the plan with its replicas in this EP group and the layers of this stage, and this rank's column."""
        if plan.replicas.own_source is not None and not self._is_of_other_stages(plan.replicas):
            return plan
        of_stage = self.replicas_of(plan, self._layers)
        if of_stage.own_source is None:
            of_stage = of_stage.of_source(self._exchange.rank)
        # All layers of the model, so that a layer has the same index on every stage.
        empty_plan = self._no_replicas(of_stage.num_micro_batches, plan.placement.ep_size).of_source(
            self._exchange.rank
        )
        replicas = ReplicaPlan.joined([(self._layers, of_stage)], num_layers=empty_plan.num_layers, like=empty_plan)
        return replace(plan, replicas=replicas)

    def _is_of_other_stages(self, replicas: ReplicaPlan) -> bool:
        is_other = np.ones(replicas.num_layers, np.bool_)
        is_other[self._layers] = False
        return bool(_replicated(replicas)[:, is_other].any())

    def part_of_given_plan(self, plan: Plan, placement: ExpertPlacement, layers: Sequence[int]) -> Plan:
        """Return these layers of a plan, in this EP group, with their placement in force."""
        return replace(plan, placement=placement.of_layers(layers), replicas=self.replicas_of(plan, layers))

    def replicas_of(self, plan: Plan, layers: Sequence[int]) -> ReplicaPlan:
        """Return the replicas of a plan in this EP group and these layers alone."""
        group = 0 if plan.replicas.num_ep_groups == 1 else self._exchange.group_index
        return plan.replicas.of_layers(layers, group=group)

    def replicated_in_any_group(self, replicas: ReplicaPlan) -> NDArray[np.bool_]:
        """Return [M, L] whether any EP group has replicas, from those of this one."""
        replicated_ML = _replicated(replicas)
        # One bit for each: 8 micro-batches of 48 layers are 48 bytes.
        bits_of_groups = self._exchange.gather_over_groups(np.packbits(replicated_ML))
        bits_of_any = np.bitwise_or.reduce(bits_of_groups)
        of_any = np.unpackbits(bits_of_any, count=replicated_ML.size).astype(np.bool_)
        return of_any.reshape(replicated_ML.shape)

    def _no_replicas(self, num_micro_batches: int, ep_size: int) -> ReplicaPlan:
        return ReplicaPlan.empty(
            num_ep_groups=1,
            num_micro_batches=num_micro_batches,
            num_layers=self._model.num_moe_layers,
            ep_size=ep_size,
        )


def merge_reports(reports: Sequence[PolicyReport]) -> PolicyReport:
    """Return the report of a plan whose layers several ranks planned at the same time.

    A note stays if every rank has one that begins with the same words, whatever its figures: a lever that is idle in
    some layers only is not idle. Of "no replicas: at imbalance 1.30 ..." and "no replicas: at imbalance 1.12 ..." the
    first stays.
    """
    report = reports[0]
    predicted_cost_s = report.predicted_cost_s
    if predicted_cost_s is not None:
        predicted_cost_s = sum(of_rank.predicted_cost_s or 0.0 for of_rank in reports)
    subjects_of_reports = [{_subject(note) for note in of_rank.notes} for of_rank in reports]
    common_subjects = set.intersection(*subjects_of_reports)
    notes = tuple(note for note in report.notes if _subject(note) in common_subjects)
    solve_time_s = max(of_rank.solve_time_s for of_rank in reports)
    return replace(report, predicted_cost_s=predicted_cost_s, solve_time_s=solve_time_s, notes=notes)


def _subject(note: str) -> str:
    return note.partition(":")[0]


def _with_layers(placement: ExpertPlacement, shares: Sequence[LayerShare]) -> ExpertPlacement:
    """Return the placement with the planned layers of all shares."""
    slots, home_rank = placement.physical_to_logical_map.copy(), placement.home_rank.copy()
    for share in shares:
        if share.placement is not None:
            slots[share.layers] = share.placement.physical_to_logical_map
            home_rank[share.layers] = share.placement.home_rank
    return replace(placement, physical_to_logical_map=slots, home_rank=home_rank)


def _replicated(replicas: ReplicaPlan) -> NDArray[np.bool_]:
    """Return [M, L] whether an EP group has replicas."""
    num_replicas = np.diff(replicas.offsets)
    return (num_replicas > 0).reshape(replicas.num_micro_batches, replicas.num_layers)
