"""Reads Megatron's experts where they are, for a weight sync: no expert goes home for it.

reader = MegatronExpertReader(balancer)
layout = reader.trainer_layout()          # a collective of all trainers
plan = plan_sync(SyncProblem(trainer=layout, engines=..., node_of=..., expert_bytes=...))
shape = reader.shape(plan.problem.parts_per_expert)
sync_experts(group, plan, reader.side(plan.problem), step=step)
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.megatron.balancer import Balancer
from moe_rl.megatron.experts import Experts
from moe_rl.sync.executor import part_sums
from moe_rl.sync.expert_parts import ExpertShape
from moe_rl.sync.layouts import SyncProblem, TrainerLayout
from moe_rl.sync.rank_plan import Parts
from moe_rl.sync.session import TrainerSide


class _Position(NamedTuple):
    """Where a trainer stands in Megatron's groups, which order them in more than one way."""

    stage: int
    twin: int
    ep: int
    etp: int

    @classmethod
    def current(cls) -> "_Position":
        return cls(
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            twin=parallel_state.get_expert_data_parallel_rank(),
            ep=parallel_state.get_expert_model_parallel_rank(),
            etp=parallel_state.get_expert_tensor_parallel_rank(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayersOfRank:
    """What a trainer tells the others: its position, and the homes in the layers that it has."""

    position: _Position
    homes: dict[int, NDArray[np.int32]]
    """MoE layer -> [E] home rank."""


class MegatronExpertReader:
    """The experts of this trainer, by layer and expert, wherever a balancer has put them.

    Making it completes gathers of parameters that overlap with the next forward: after an optimizer step a rank has its
    own shard of every bucket, and the rest is of the step before.
    """

    def __init__(self, balancer: Balancer) -> None:
        self._experts = balancer.experts_by_layer()
        self._placement = balancer.placement
        self._position = _Position.current()
        # Homes stand first among a rank's slots, so that the slot is the module's own number of the expert.
        self._slot_LE = self._placement.home_slot() % self._placement.slots_per_rank

    def shape(self, parts_per_expert: int) -> ExpertShape:
        """Return the sizes of a whole expert, cut into so many parts. Raises `InvalidInputError` for other experts."""
        parameters = next(iter(self._experts.values()), None)
        require(
            parameters is not None, "this trainer rank has no MoE layer to send, because its pipeline stage has none."
        )
        assert parameters is not None
        fc1, fc2 = self._two_weights(parameters, 0)
        etp_size = parallel_state.get_expert_tensor_parallel_world_size()
        return ExpertShape(
            hidden_size=fc1.shape[1],
            ffn_size=fc2.shape[1] * etp_size,
            parts_per_expert=parts_per_expert,
            dtype=fc1.dtype,
        )

    def trainer_layout(self) -> TrainerLayout:
        """Return the layout of all trainers; a collective of all of them, since a rank knows its own stage alone."""
        own_layers = _LayersOfRank(
            position=self._position,
            homes={layer: np.asarray(self._placement.home_rank[layer], np.int32) for layer in self._experts},
        )
        layouts_of_ranks: list[_LayersOfRank | None] = [None] * dist.get_world_size()
        dist.all_gather_object(layouts_of_ranks, own_layers)
        ranks = [layers_of_rank for layers_of_rank in layouts_of_ranks if layers_of_rank is not None]
        sizes = np.array([layers_of_rank.position for layers_of_rank in ranks]).max(axis=0) + 1
        numbers = np.full(sizes, -1, np.int32)
        homes: dict[int, NDArray[np.int32]] = {}
        stages: dict[int, int] = {}
        for rank, layers_of_rank in enumerate(ranks):
            numbers[layers_of_rank.position] = rank
            for layer, home in layers_of_rank.homes.items():
                homes[layer], stages[layer] = home, layers_of_rank.position.stage
        layers = sorted(homes)
        require(
            layers == list(range(len(layers))),
            f"some MoE layers are on no trainer rank: the ranks have only the MoE layers {layers}.",
        )
        return TrainerLayout(
            home_rank=np.array([homes[layer] for layer in layers], np.int32),
            stage_of_layer=tuple(stages[layer] for layer in layers),
            ranks=numbers,
        )

    def side(self, problem: SyncProblem) -> TrainerSide:
        """Return what this trainer brings to a sync."""
        shape = self.shape(problem.parts_per_expert)
        shard = problem.parts_per_expert // problem.trainer.etp_size
        first_part = self._position.etp * shard

        def read(parts: Parts) -> torch.Tensor:
            slot = int(self._slot_LE[parts.layer, parts.expert])
            fc1, fc2 = self._two_weights(self._experts[parts.layer], slot)
            gate, up = fc1.detach().chunk(2)
            body = shape.pack(gate, up, fc2.detach(), parts.first - first_part, parts.stop - first_part)
            return body.cpu()  # messages travel on the host so far

        total = 0
        if problem.trainer.edp_size > 1:
            for layer in self._experts:
                for expert in np.flatnonzero(self._placement.home_rank[layer] == self._position.ep).tolist():
                    own_parts = Parts(layer, expert, first_part, first_part + shard)
                    total += int(part_sums(read(own_parts), shard).sum())
        return TrainerSide(read=read, weights_sum=total)

    @staticmethod
    def _two_weights(experts: Experts, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return linear_fc1 [2 * FFN, H], gate above up, and linear_fc2 [H, FFN] of a home slot."""
        weights: list[Any] = experts.parameters_of(slot)
        require(
            len(weights) == 2 and weights[0].ndim == 2 and weights[0].shape[0] == 2 * weights[1].shape[1],
            "a planned weight sync needs gated experts with two weight matrices and no biases or adapters, but the "
            f"weights of an expert have the shapes {[list(weight.shape) for weight in weights]}.",
        )
        return weights[0], weights[1]
