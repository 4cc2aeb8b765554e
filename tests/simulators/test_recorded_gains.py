"""Gains under recorded imbalance: the rows that stand for a recording have its busiest rank and leave no node."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.validate_model.compare import PUBLISHED, validate
from benchmarks.validate_model.gains import rows_in_nodes
from moe_rl.config import load_cluster, load_model
from moe_rl.core.topology import ClusterTopology

HARDWARE = load_cluster("a100")


def received(rows: np.ndarray[tuple[int, int], np.dtype[np.int32]], ranks: int) -> list[int]:
    """Rows [P] that arrive at every rank."""
    return rows.sum(axis=0).reshape(ranks, -1).sum(axis=1).tolist()


def test_two_nodes_of_two_ranks() -> None:
    """The busiest rank has half as much again, its neighbor pays for it, the other node is even."""
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    rows = rows_in_nodes(1.5, topology, rows=100, slots=1)
    assert received(rows, 4) == [150, 50, 100, 100]
    assert rows.tolist() == [[75, 25, 0, 0], [75, 25, 0, 0], [0, 0, 50, 50], [0, 0, 50, 50]]


@given(
    nodes=st.integers(1, 3),
    width=st.integers(2, 8),
    slots=st.integers(1, 4),
    rows=st.integers(0, 70_000),
    part=st.floats(0.0, 1.0),
)
def test_rows_are_conserved_and_the_busiest_rank_has_its_share(
    nodes: int, width: int, slots: int, rows: int, part: float
) -> None:
    """From the mean to all rows of a node on its first rank, to within a whole row per slot and sender."""
    ranks = nodes * width
    topology = ClusterTopology(hardware=HARDWARE, ep_size=ranks, ranks_per_node=width)
    busiest = 1.0 + part * (width - 1)
    sent = rows_in_nodes(busiest, topology, rows=rows, slots=slots)
    assert sent.min() >= 0
    assert sent.sum(axis=1).tolist() == [rows] * ranks
    assert np.array(received(sent, ranks)).reshape(nodes, width).sum(axis=1).tolist() == [rows * width] * nodes
    assert abs(received(sent, ranks)[0] - busiest * rows) <= slots * width
    if nodes > 1:
        assert not sent[:width, width * slots :].any()


def test_more_imbalance_in_the_recording_is_a_slower_step() -> None:
    """Static homes, FlexMoE and LAER in this order, for both models, as published."""
    _, seconds = validate(
        PUBLISHED,
        model_named=lambda name: load_model(name).spec,
        cluster_named=load_cluster,
        kinds=("recorded_gains",),
    )
    for first in (0, 3):
        static, flexmoe, laer = (point.predicted for point in seconds.points[first : first + 3])
        assert static > flexmoe > laer
    assert {point.unit for point in seconds.points} == {"s"}
