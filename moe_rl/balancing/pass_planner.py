"""The plan of a pass, made by the ranks that will run it: a share of the work each, and the result on all.

Of the routes of its own rows a rank counts the layers of its pipeline stage. The P ranks of an EP group divide these
layers; each is sent what the others counted for its share, plans it, and sends the plan to all. EP groups plan for
themselves and tell each other only where they have replicas. Everything travels on the host (`PlanExchange`), so that
a thread may do it while the pass before runs. All methods are collectives, called by all ranks in one order.

G EP groups, M micro-batches, L MoE layers of the model, l of them of this pipeline stage, E experts.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.exchange import PlanExchange, attempted, told
from moe_rl.balancing.idle import why_no_replicas
from moe_rl.balancing.loads import gather_load, narrow
from moe_rl.balancing.pass_metrics import Misfit
from moe_rl.balancing.schedule import cluster_topology, home_experts, plan_of_load, worker_layout
from moe_rl.core.errors import require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertMigration, ExpertPlacement
from moe_rl.core.plan import Plan, ReplicaPlan

FACTS = ("policy", "objective", "parameters", "predicted_cost_s", "solve_time_s", "notes")
"""Fields of `Plan` that a policy fills beside placement, layout and replicas."""

Counts = tuple[NDArray[np.int32], NDArray[np.int64]]
"""[M, l, E] token-expert pairs of this rank's rows, and [M] rows."""


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

    def check(self, num_ep_groups: int) -> None:
        """Raise where the given plan is for another model, or another number of ranks, slots or EP groups."""
        if self.plan is None:
            return
        ours, theirs = self.placement, self.plan.placement
        for name in ("ep_size", "num_layers", "num_experts", "slots_per_rank", "resident_slots"):
            given, needed = getattr(theirs, name), getattr(ours, name)
            require(given == needed, f"the plan has {name} {given}, this run has {needed}.")
        groups = self.plan.replicas.num_ep_groups
        require(groups in (1, num_ep_groups), f"the plan is for {groups} EP groups, this run has {num_ep_groups}.")

    @property
    def digest(self) -> str:
        """Hex digest by which the ranks of an EP group know that they ask for the same."""
        digest = hashlib.sha256(repr((self.config, self.forward_only, self.plan and self.plan.hash)).encode())
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
    """As it was given, or made here: for the EP group and the pipeline stage of this rank alone."""
    here: Plan
    """Its replicas in this EP group and the layers of this stage: one EP group, L layers, of other stages empty."""
    anywhere: NDArray[np.bool_]
    """[M, L] whether some EP group has replicas."""
    misfit: Misfit | None = None
    """Why the pass must do without the plan; the same on all ranks."""
    predicted_rows: NDArray[np.int64] | None = None
    """[M, l, P] rows that the plan expects of every rank; None where the loads are not known."""
    static_rows: NDArray[np.int64] | None = None
    """[M, l, P] the same where Megatron puts the experts."""
    why_no_replicas: str = ""
    plan_time_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What all ranks must know of each other's request."""

    digest: str
    misfit: Misfit | None
    num_micro_batches: int | None
    """M of the routes; None without routes."""
    most: int
    """Largest count."""
    rows: NDArray[np.int64]
    """[M]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What one rank planned: some layers of its stage."""

    layers: Sequence[int]
    replicas: ReplicaPlan | None
    """Of these layers alone; None where the plan was given."""
    facts: dict[str, Any]
    """Other fields of the `Plan`."""
    predicted_rows: NDArray[np.int64]
    """[M, layers, P]"""
    static_rows: NDArray[np.int64]


class PassPlanner:
    """Plans the passes of one pipeline stage, together with the other ranks of the stage."""

    def __init__(self, exchange: PlanExchange, *, layers: Sequence[int], model: MoeModelSpec) -> None:
        self.exchange, self.model = exchange, model
        self.layers = list(layers)
        """The l layers of this stage, as indices among the model's MoE layers."""
        parts = np.array_split(np.arange(len(self.layers)), exchange.size)
        self._places = [slice(int(part[0]), int(part[-1]) + 1) if len(part) else slice(0, 0) for part in parts]
        """Which of `layers` each EP rank plans."""
        self._why_no_replicas = ""
        """Of the last pass; looked up once per run of passes without replicas."""

    def plan_pass(self, request: PassRequest, count: Callable[[], Counts] | None) -> PlannedPass:
        """Return the plan of a pass from what `count` counts, or the given one, with what `count` says of it.

        Where ranks ask for different things, or for a plan that does not fit, there is a misfit on all of them; an
        error on any rank is raised on all.
        """
        started = time.perf_counter()
        counts, told_by = self.exchange.together(
            lambda: None if count is None else count(), lambda counts: self._facts(request, counts)
        )
        facts = [one for of_group in told_by for one in of_group]
        sizes = {one.num_micro_batches for one in facts}
        said = ", ".join(sorted(map(str, sizes)))
        require(len(sizes) == 1, f"the ranks gave routes of different numbers of micro-batches: {said}.")
        misfit = next((one.misfit for one in facts if one.misfit), None)
        if misfit is None and any(len({one.digest for one in of_group}) > 1 for of_group in told_by):
            misfit = Misfit(kind="ranks", sentence="the ranks hold different plans")
        num_micro_batches = sizes.pop()
        if request.plan is not None:
            num_micro_batches = request.plan.replicas.num_micro_batches
        nothing = self._nothing(num_micro_batches or 0, request.placement.ep_size)
        if misfit is not None:
            empty = self._plan(request, nothing, {})
            return PlannedPass(
                plan=request.plan or empty,
                here=empty,
                anywhere=self._filled(nothing),
                misfit=misfit,
                plan_time_s=time.perf_counter() - started,
            )
        mine = told_by[self.exchange.group_index]
        load = None if counts is None else self._load_of_my_share(counts[0], mine, most=max(one.most for one in facts))
        given = None if request.plan is None else self._given_here(request.plan)
        share, error = attempted(lambda: None if load is None else self._share(request, load, given))
        shares = self.exchange.gather((share, told(error)))

        def joined() -> Plan:
            if error is not None:
                raise error
            for rank, (_, said) in enumerate(shares):
                require(not said, f"EP rank {rank} cannot plan its layers: {said}")
            return self._joined(request, [one for one, _ in shares if one is not None], given, nothing)

        here, filled = self.exchange.together(joined, lambda plan: np.packbits(self._filled(plan.replicas)))
        anywhere = np.bitwise_or.reduce([each for of_group in filled for each in of_group])
        planned = PlannedPass(
            plan=request.plan or here,
            here=here,
            anywhere=np.unpackbits(anywhere, count=here.replicas.offsets.size - 1)
            .astype(np.bool_)
            .reshape(nothing.num_micro_batches, -1),
        )
        if load is not None and counts is not None:
            planned = self._with_rows(planned, request, [one for one, _ in shares if one is not None], counts)
        return replace(planned, plan_time_s=time.perf_counter() - started)

    def load_of(self, counts: Counts) -> StepLoad:
        """Return the loads of all ranks from what each counts in all layers of the model: pairs [M, L, E], rows [M]."""

        def gather(local: NDArray[Any]) -> NDArray[Any]:
            return np.array(self.exchange.gather_in_grid(local))

        return gather_load(*counts, gather=gather, top_k=self.model.top_k)

    def _facts(self, request: PassRequest, counts: Counts | None) -> _Facts:
        pairs, rows = (np.zeros(0, np.int32), np.zeros(0, np.int64)) if counts is None else counts
        size = None if counts is None else len(pairs)
        request.check(self.exchange.num_groups)
        return _Facts(
            digest=request.digest,
            misfit=request.misfit(size),
            num_micro_batches=size,
            most=int(pairs.max(initial=0)),
            rows=rows,
        )

    def _load_of_my_share(self, pairs: NDArray[np.int32], facts: Sequence[_Facts], *, most: int) -> StepLoad:
        """Return [1, M, my layers, P, E] from what every rank counted of this rank's share of the layers."""
        narrowed = narrow(pairs, most)
        place = self._places[self.exchange.rank]
        received = self.exchange.scatter(
            [np.ascontiguousarray(narrowed[:, each]) for each in self._places],
            shape=(len(pairs), place.stop - place.start, self.model.num_experts),
        )
        return StepLoad(
            pairs=np.ascontiguousarray(received.transpose(1, 2, 0, 3), dtype=np.int32)[None],
            tokens=np.stack([one.rows for one in facts], axis=1)[None],
            top_k=self.model.top_k,
        )

    def _share(self, request: PassRequest, load: StepLoad, given: Plan | None) -> _Share:
        """Plan this rank's share of the layers, or say what a given plan makes of their load."""
        layers = self.layers[self._places[self.exchange.rank]]
        if not layers:
            no_rows = np.zeros((load.num_micro_batches, 0, load.ep_size), np.int64)
            return _Share(layers=[], replicas=None, facts={}, predicted_rows=no_rows, static_rows=no_rows)
        placement = request.placement.of_layers(layers)
        if given is None:
            plan = plan_of_load(
                load,
                config=request.config,
                model=self._model_of(layers),
                topology=cluster_topology(request.config, ep_size=load.ep_size),
                placement=placement,
                forward_only=request.forward_only,
            )
        else:
            plan = replace(given, placement=placement, replicas=given.replicas.of_layers(layers, group=0))
        most = int(load.pairs.max(initial=0))
        columns: dict[str, Any] = {
            name: narrow(getattr(plan.replicas, name), most) for name in ("source_quota", "source_pairs")
        }
        return _Share(
            layers=layers,
            replicas=replace(plan.replicas, **columns) if given is None else None,
            facts={name: getattr(plan, name) for name in FACTS},
            predicted_rows=rank_load(plan, load)[0],
            static_rows=rows_of_contiguous_homes(load)[0],
        )

    def _joined(self, request: PassRequest, shares: Sequence[_Share], given: Plan | None, nothing: ReplicaPlan) -> Plan:
        """Return the plan of this EP group and stage from those of all ranks."""
        if given is not None:
            return given
        planned = [(share.layers, share.replicas) for share in shares if share.replicas is not None]
        replicas = ReplicaPlan.joined(planned, num_layers=nothing.num_layers, like=nothing)
        facts = [share.facts for share in shares if share.facts]
        together = dict(facts[0]) if facts else {}
        if facts and facts[0]["predicted_cost_s"] is not None:
            together["predicted_cost_s"] = sum(each["predicted_cost_s"] for each in facts)
            together["solve_time_s"] = max(each["solve_time_s"] for each in facts)
            together["notes"] = tuple(dict.fromkeys(note for each in facts for note in each["notes"]))
        return self._plan(request, replicas, together)

    def _with_rows(
        self, planned: PlannedPass, request: PassRequest, shares: Sequence[_Share], counts: Counts
    ) -> PlannedPass:
        """Return the pass with what its plan expects of every rank, and why there are no replicas if there are none."""
        predicted, static = (
            np.concatenate([getattr(share, name) for share in shares], axis=1)
            for name in ("predicted_rows", "static_rows")
        )
        if len(planned.here.replicas.expert):
            self._why_no_replicas = ""
        elif not self._why_no_replicas:
            self._why_no_replicas = why_no_replicas(
                predicted[None],
                lambda micro_batch: self._load_of_micro_batch(counts, micro_batch),
                config=request.config,
                model=self._model_of(self.layers),
                topology=cluster_topology(request.config, ep_size=self.exchange.size),
                placement=request.placement.of_layers(self.layers),
                forward_only=request.forward_only,
            )
        return replace(planned, predicted_rows=predicted, static_rows=static, why_no_replicas=self._why_no_replicas)

    def _load_of_micro_batch(self, counts: Counts, micro_batch: int) -> StepLoad:
        """Return [1, 1, l, P, E], all layers of the stage in one micro-batch."""
        everyone = self.exchange.gather((counts[0][micro_batch], int(counts[1][micro_batch])))
        return StepLoad(
            pairs=np.stack([pairs for pairs, _ in everyone], axis=1)[None, None],
            tokens=np.array([rows for _, rows in everyone], np.int64)[None, None],
            top_k=self.model.top_k,
        )

    def _plan(self, request: PassRequest, replicas: ReplicaPlan, facts: dict[str, Any]) -> Plan:
        """Return a plan that leaves the experts where they are."""
        there, expert_bytes = request.placement, self.model.expert_state_bytes
        layout = request.layout or worker_layout(replicas.num_micro_batches, self.exchange.size)
        return Plan(
            **{"policy": request.config.policy, "objective": request.config.objective, **facts},
            layout=layout,
            placement=there,
            replicas=replicas,
            migration=ExpertMigration.between(there, there, expert_bytes=expert_bytes),
        )

    def _given_here(self, plan: Plan) -> Plan:
        """Return what a given plan has for this EP group and the layers of this stage."""
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

    def _filled(self, replicas: ReplicaPlan) -> NDArray[np.bool_]:
        """Return [M, L] where one EP group has replicas."""
        return (np.diff(replicas.offsets) > 0).reshape(replicas.num_micro_batches, -1)

    def _model_of(self, layers: Sequence[int]) -> MoeModelSpec:
        return replace(self.model, moe_layer_ids=tuple(self.model.moe_layer_ids[layer] for layer in layers))


def moved_since(planned: PlannedPass, placement: ExpertPlacement) -> Misfit | None:
    """Return a misfit where experts are elsewhere than when the pass was planned."""
    if same_places(planned.here.placement, placement):
        return None
    return Misfit(kind="placement", sentence="experts have moved since the pass was prepared")


def same_places(one: ExpertPlacement, other: ExpertPlacement) -> bool:
    """Return whether two placements have the same experts in home and resident slots."""
    return np.array_equal(home_experts(one), home_experts(other)) and np.array_equal(
        one.resident_experts, other.resident_experts
    )


def rows_of_contiguous_homes(load: StepLoad) -> NDArray[np.int64]:
    """Return [G, M, L, P] rows where Megatron puts the experts: rank p has the p-th equal share of their ids."""
    per_expert = load.per_expert()
    rows: NDArray[np.int64] = per_expert.reshape(*per_expert.shape[:3], load.ep_size, -1).sum(axis=4)
    return rows
