"""All-to-all split sizes from the plan's own numbers: no count all-gather and no wait for the device per layer.

Megatron's alltoall dispatcher asks every rank in every layer how many rows it will send, and copies the answer to the
host. Where every row of a micro-batch is replayed, the host has known all of that since `begin_pass`. Every rank then
takes its split sizes from one and the same table, so that sizes always match and no rank can hang; what could be wrong
is the table, so the EP group agrees on it first:

1. `begin_pass`: every row of the micro-batch has K different experts, on all ranks.
2. First MoE layer of the micro-batch: the routers of every rank hold, for replay, the very ids that were counted. One
   all-gather of one number in the EP group per micro-batch; one no is enough for all to take the ordinary way.
3. Every layer: the device compares its own counts with the table, without waiting. `end_pass` reads the result, on all
   ranks, and raises before the optimizer can step: then ids were changed between 2 and the layer.

M micro-batches, L MoE layers, P EP ranks, S slots of the EP group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.load import ExpertLoad
from moe_rl.core.metrics import rows_taken
from moe_rl.core.plan import Plan
from moe_rl.megatron.groups import ExpertGroups


class KnownSplitsDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher; where `known` is set, split sizes come from there."""

    known: torch.Tensor | None = None
    """[P, S] int64 on the host: rows that every rank sends to every slot in the layer that runs now."""
    differs: torch.Tensor | None = None
    """Truth value on the device: some layer's own counts were others."""

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Return [slots of this rank] rows, and set the split sizes."""
        if self.known is None:
            counted_rows: torch.Tensor = super().preprocess(routing_map)
            return counted_rows
        rank, slots = self.ep_group.rank(), self.num_local_experts
        sent = self.known[rank]
        arriving = self.known[:, self.local_expert_indices[0] : self.local_expert_indices[0] + slots].contiguous()
        self.num_out_tokens = int(sent.sum())
        self.input_splits = sent.view(self.ep_size, slots).sum(dim=1).numpy()
        self.output_splits = arriving.sum(dim=1).numpy()
        self.num_global_tokens_per_local_expert = arriving
        counted = routing_map.sum(dim=0)
        differs = (counted != sent.to(counted.device, non_blocking=True)).any()
        self.differs = differs if self.differs is None else self.differs | differs
        return arriving.sum(dim=0)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: torch.Tensor | None = None) -> Any:
        if self.known is not None:
            return tokens_per_expert  # everything is on the host
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)


@dataclass(slots=True, kw_only=True, eq=False)
class KnownSplits:
    """The table of one pass, and in which micro-batches the EP group has agreed to use it."""

    pairs: NDArray[np.int64]
    """[M, L, P, E] token-expert pairs."""
    home_slot: NDArray[np.int64]
    """[L, E] physical id of every expert's home, where layers have replicas."""
    home_order: NDArray[np.int64]
    """[L, E] expert in every home slot, rank by rank."""
    plan: Plan | None
    """None where no layer has replicas."""
    taken: NDArray[np.int64]
    """[N, P] pairs that each of the plan's replicas takes."""
    routes: Sequence[torch.Tensor]
    """Per micro-batch the ids [N, L, K] that were counted."""
    complete: NDArray[np.bool_]
    """[M] whether every row of every rank has K different experts."""
    routers: Mapping[int, Mapping[int, Any]]
    """Model chunk -> layer -> router."""
    groups: ExpertGroups
    agreed: dict[tuple[int, int], bool] = field(default_factory=dict)
    """(model chunk, micro-batch) -> whether the table is used."""

    @classmethod
    def of_plan(
        cls,
        plan: Plan | None,
        load: ExpertLoad,
        *,
        home_order: NDArray[np.integer],
        routes: Sequence[Any],
        routers: Mapping[int, Mapping[int, Any]],
        groups: ExpertGroups,
    ) -> "KnownSplits":
        """Return the table of a pass that follows `plan` and was told `routes`; a collective of all ranks."""
        complete = np.all(groups.gather(_complete(routes).astype(np.int64)), axis=(0, 1))
        return cls(
            pairs=load.pairs[groups.ep_group_index].astype(np.int64),
            home_slot=home_order.astype(np.int64) if plan is None else plan.placement.home_slot().astype(np.int64),
            home_order=home_order.astype(np.int64),
            plan=plan,
            taken=np.zeros((0, load.ep_size), np.int64) if plan is None else rows_taken(plan.replicas, load),
            routes=[torch.as_tensor(each) for each in routes],
            complete=complete,
            routers=routers,
            groups=groups,
        )

    def rows(self, micro_batch: int, layer: int, *, with_replicas: bool) -> torch.Tensor:
        """Return [P, S] rows that each rank sends to each slot; S counts home slots alone without replicas."""
        pairs = self.pairs[micro_batch, layer]
        if self.plan is None or not with_replicas:
            return torch.from_numpy(np.ascontiguousarray(pairs[:, self.home_order[layer]]))
        rows = np.zeros((len(pairs), self.plan.placement.physical_to_logical_map.shape[1]), np.int64)
        rows[:, self.home_slot[layer]] = pairs
        replicas = self.plan.replicas
        cell = replicas.cell(self.groups.ep_group_index, micro_batch, layer)
        taken = self.taken[cell]
        rows[:, replicas.physical_id[cell]] = taken.T
        np.subtract.at(rows.T, self.home_slot[layer, replicas.expert[cell]], taken)  # an expert may have several
        return torch.from_numpy(rows)

    def apply(self, dispatcher: Any, *, chunk: int, micro_batch: int, layer: int, with_replicas: bool) -> None:
        """Tell a dispatcher its split sizes for the run of a layer that starts now, where the EP group agrees.

        The first call of a (model chunk, micro-batch) asks it: a collective of the EP group, if the rows are complete.
        """
        key = (chunk, micro_batch)
        if key not in self.agreed:
            possible = micro_batch < len(self.complete) and bool(self.complete[micro_batch])
            self.agreed[key] = possible and self._all_hold(micro_batch, self.routers[chunk])
        dispatcher.known = self.rows(micro_batch, layer, with_replicas=with_replicas) if self.agreed[key] else None

    def _all_hold(self, micro_batch: int, routers: Mapping[int, Any]) -> bool:
        held = all(self._may_hold(micro_batch, layer, router) for layer, router in routers.items())
        if held:
            routes = self.routes[micro_batch]
            equal = [
                (_target(router) == routes[:, layer].to(_target(router).device)).all()
                for layer, router in routers.items()
            ]
            held = bool(torch.stack(equal).all())
        return bool(self.groups.gather_in_ep(np.array([int(held)], np.int64)).all())

    def _may_hold(self, micro_batch: int, layer: int, router: Any) -> bool:
        replay, wanted = getattr(router, "router_replay", None), self.routes[micro_batch][:, layer]
        if replay is None or replay.router_replay_action != RouterReplayAction.REPLAY_FORWARD:
            return False
        return _target(router) is not None and _target(router).shape == wanted.shape


def know_splits(dispatcher: Any) -> None:
    """Make one of Megatron's alltoall dispatchers able to take known split sizes; raise for another kind."""
    require(
        type(dispatcher) is MoEAlltoAllTokenDispatcher,
        f"host_known_splits needs moe_token_dispatcher_type alltoall, the model has a {type(dispatcher).__name__}.",
    )
    dispatcher.__class__ = KnownSplitsDispatcher


def forget_splits(dispatcher: Any) -> bool:
    """Let a dispatcher count again; return whether a layer's own counts were others than the known ones."""
    if not isinstance(dispatcher, KnownSplitsDispatcher):
        return False
    differs, dispatcher.differs, dispatcher.known = dispatcher.differs, None, None
    return differs is not None and bool(differs)


def _complete(routes: Sequence[Any]) -> NDArray[np.bool_]:
    """Return [M]: whether every row of this rank has K different known experts in every layer."""
    complete = []
    for given in routes:
        ids = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
        ordered = np.sort(ids, axis=2)
        different = bool((np.diff(ordered, axis=2) > 0).all())
        complete.append(different and not (ids < 0).any())
    return np.array(complete, np.bool_)


def _target(router: Any) -> Any:
    return router.router_replay.target_topk_idx
