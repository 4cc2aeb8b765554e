"""prime-rl: plans and traces from the micro-batches that its driver makes.

    batches = prepare_batch(...)  # of prime_rl.trainer.batch: [data-parallel rank][micro-batch]
    plan = plan_of_batches(batches, config=config, model=model, topology=topology)
    export_trace(batches, "step7.moetrace", model=model, step=7)

prime-rl trains on models of its own, in which nothing carries out a plan yet: what is here says what balancing would
bring (`moe-rl simulate`), and hands a plan to whoever has an actuator. A micro-batch is an object with `routed_experts`
(`data`, `shape`, `dtype`) and `sequence_lengths`, or `position_ids` that start anew with each sequence
(PrimeIntellect-ai/prime-rl:src/prime_rl/trainer/batch.py). T tokens, L MoE layers, K choices.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.schedule import plan_from_schedule
from moe_rl.core.errors import InvalidInputError, located, require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.plan import Plan
from moe_rl.core.topology import ClusterTopology
from moe_rl.core.trace import RoutingTrace
from moe_rl.frameworks.routes import of_moe_layers
from moe_rl.replay import write_trace
from moe_rl.replay.importers.payloads import from_bytes

Batches = Sequence[Sequence[Any]]
"""[data-parallel rank][micro-batch]"""


def sequences_of_batches(
    batches: Batches, model: MoeModelSpec
) -> tuple[list[NDArray[np.int64]], list[list[list[int]]]]:
    """Return ([T, L, K] routes of every sequence with -1 where there is none, `[dp_rank][micro_batch]` = sequences).

    Rows of zeros are rows without a route: the last token of a sequence, and padding, which stands as a sequence of its
    own. A micro-batch that stands in the list several times, as the driver fills ranks up, is run as often. Raises for
    a micro-batch without routes, and for models with one expert per token, in which zeros may be a route.
    """
    require(model.top_k > 1, "prime-rl marks missing routes by zeros, which with one expert per token may be a route.")
    sequences: list[NDArray[np.int64]] = []
    schedule: list[list[list[int]]] = []
    for rank, micro_batches in enumerate(batches):
        schedule.append([])
        for index, micro_batch in enumerate(micro_batches):
            with located(f"micro-batch {index} of rank {rank}"):
                cut = _sequences(micro_batch, model)
            schedule[-1].append(list(range(len(sequences), len(sequences) + len(cut))))
            sequences += cut
    return sequences, schedule


def plan_of_batches(
    batches: Batches, *, config: BalancerConfig, model: MoeModelSpec, topology: ClusterTopology
) -> Plan:
    """Return the plan of one optimizer step; `topology` is `moe_rl.balancing.cluster_topology(config, ep_size=...)`."""
    sequences, schedule = sequences_of_batches(batches, model)
    return plan_from_schedule(sequences, schedule, config=config, model=model, topology=topology)


def export_trace(
    batches: Batches, path: Path | str, *, model: MoeModelSpec, step: int = 0, overwrite: bool = False
) -> None:
    """Write the step as a trace for `moe-rl simulate`, with the micro-batch and rank of every sequence."""
    sequences, schedule = sequences_of_batches(batches, model)
    places = np.array(
        [(m, rank) for rank, cells in enumerate(schedule) for m, cell in enumerate(cells) for _ in cell], np.int32
    ).reshape(-1, 2)
    trace = RoutingTrace.from_sequences(
        sequences,
        num_experts=model.num_experts,
        moe_layer_ids=model.moe_layer_ids,
        valid=[np.asarray((ids >= 0).all(axis=(1, 2))) for ids in sequences],
        provenance="R3",
        model=model.name,
        micro_batch=places[:, 0],
        dp_rank=places[:, 1],
        step=np.full(len(places), step, np.int32),
    )
    write_trace(
        [trace],
        Path(path),
        num_experts=model.num_experts,
        moe_layer_ids=model.moe_layer_ids,
        top_k=model.top_k,
        origin={"framework": "prime-rl"},
        overwrite=overwrite,
    )


def _sequences(micro_batch: Any, model: MoeModelSpec) -> list[NDArray[np.int64]]:
    routes = getattr(micro_batch, "routed_experts", None)
    if routes is None:
        raise InvalidInputError("it has no routed_experts: set trainer.enable_router_replay.")
    rows = of_moe_layers(from_bytes(routes.data, routes.dtype, tuple(routes.shape)), model)
    rows = np.where((rows == 0).all(axis=(1, 2), keepdims=True), -1, rows)
    lengths = getattr(micro_batch, "sequence_lengths", None)
    if lengths is None:
        starts = np.flatnonzero(np.asarray(micro_batch.position_ids) == 0)
        lengths = np.diff([*starts, len(rows)]).tolist()
    require(sum(lengths) == len(rows), f"its sequences have {sum(lengths)} tokens, its routes {len(rows)} rows.")
    return np.split(rows, np.cumsum(lengths)[:-1])
