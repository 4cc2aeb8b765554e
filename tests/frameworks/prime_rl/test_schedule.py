"""prime-rl's micro-batches as plans and traces: every token once, zeros are no routes, dummies are run too."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import model_spec

from moe_rl.balancing import BalancerConfig, cluster_topology
from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks.prime_rl.schedule import export_trace, plan_of_batches, sequences_of_batches
from moe_rl.replay.reader import TraceReader

CONFIG = BalancerConfig(objective="imbalance")
LAYERS, EXPERTS, TOP_K = 2, 8, 2
MODEL = model_spec(num_experts=EXPERTS, num_layers=LAYERS, top_k=TOP_K)


@dataclass
class RoutedExperts:
    data: bytes
    shape: list[int]
    dtype: str


@dataclass
class MicroBatch:
    """The fields of prime-rl's struct that matter here."""

    routed_experts: RoutedExperts | None
    position_ids: list[int]
    sequence_lengths: list[int] | None = field(default=None)


def packed(rng: np.random.Generator, lengths: list[int], *, padding: int = 0, by_position: bool = False) -> MicroBatch:
    """Sequences whose last rows are zeros, and a padding of zeros behind them."""
    rows = np.argsort(rng.random((sum(lengths) + padding, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K].astype(np.uint8)
    rows[np.cumsum(lengths) - 1] = 0
    rows[sum(lengths) :] = 0
    all_lengths = [*lengths, *([padding] if padding else [])]
    return MicroBatch(
        RoutedExperts(rows.tobytes(), list(rows.shape), "uint8"),
        [position for length in all_lengths for position in range(length)],
        None if by_position else all_lengths,
    )


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    padding=st.integers(0, 3),
    by_position=st.booleans(),
    seed=st.integers(0, 20),
)
def test_every_token_comes_back_once(lengths: list[int], padding: int, by_position: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    batches = [[packed(rng, lengths, padding=padding, by_position=by_position)], [packed(rng, [3])]]
    sequences, schedule = sequences_of_batches(batches, MODEL)
    assert [len(ids) for ids in sequences] == [*lengths, *([padding] if padding else []), 3]
    assert sorted(index for rank in schedule for cell in rank for index in cell) == list(range(len(sequences)))
    for ids in sequences[: len(lengths)]:
        assert (ids[-1] == -1).all()
        assert (ids[:-1] >= 0).all()
    if padding:
        assert (sequences[len(lengths)] == -1).all()


def test_a_plan_counts_dummies_as_often_as_they_are_run(rng: np.random.Generator, tmp_path: Path) -> None:
    dummy = packed(rng, [9, 4])
    batches = [[packed(rng, [12, 6], padding=2), dummy], [packed(rng, [20]), dummy]]
    topology = cluster_topology(CONFIG, ep_size=2)
    plan = plan_of_batches(batches, config=CONFIG, model=MODEL, topology=topology)
    assert plan.replicas.num_micro_batches == 2
    assert plan.layout.num_sequences == 3 + 1 + 2 * 2
    export_trace(batches, tmp_path / "step.moetrace", model=MODEL, step=7)
    manifest = TraceReader(tmp_path / "step.moetrace").manifest
    assert (manifest.num_sequences, manifest.num_tokens) == (8, 20 + 20 + 2 * 13)


def test_batches_that_cannot_be_read_are_refused(rng: np.random.Generator) -> None:
    good = packed(rng, [4])
    with pytest.raises(InvalidInputError, match="micro-batch 1 of rank 0: it has no routed_experts"):
        sequences_of_batches([[good, MicroBatch(None, [0])]], MODEL)
    good.sequence_lengths = [3]
    with pytest.raises(InvalidInputError, match="its sequences have 3 tokens, its routes 4 rows"):
        sequences_of_batches([[good]], MODEL)
    with pytest.raises(InvalidInputError, match="one expert per token"):
        sequences_of_batches([], replace(MODEL, top_k=1))
