"""Settings of a run that contradict each other or mean nothing are refused, and those at the edge of that are taken."""

from typing import Any

import pytest

from moe_rl.balancing.config import BalancerConfig
from moe_rl.core.errors import InvalidInputError

REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({name: -1}, f"{name} must be at least 0, got -1") for name in ("replica_slots", "cross_node_slots")),
    ({"resident_slots": -1}, "resident_slots must be at least 0, got -1"),
    ({"ranks_per_node": 0}, "ranks_per_node must be at least 1, got 0"),
    ({"objective": "sped"}, "sped"),
    ({"dispatcher": "deep"}, "dispatcher 'deep' is unknown"),
    ({"steps_served": 0}, "steps_served must be at least 1, got 0"),
    ({"history_steps": 0}, "history_steps must be at least 1, got 0"),
    ({"history_steps": 2}, "history_steps=2 has no effect"),
    ({"reorder_scratch_bytes": -1}, "reorder_scratch_bytes must be at least 0, got -1"),
    ({"experts": "ours"}, "experts must be one of"),
    ({"recipe": "mxfp8"}, "need experts='grouped'"),
    ({"backend": "triton"}, "need experts='grouped'"),
    ({"static_rows": True}, "static_rows needs experts='grouped'"),
    ({"capacity_risk": 0.1}, "capacity_risk needs static_rows"),
    ({"capacity_risk": 1.0, "static_rows": True, "experts": "grouped"}, r"must lie in \[0, 1\)"),
    ({"capacity_risk": -0.1, "static_rows": True, "experts": "grouped"}, r"must lie in \[0, 1\)"),
    ({"transposed_codes": True, "experts": "grouped"}, "transposed_codes needs an FP8 or FP4 recipe"),
    ({"padding_samples": -1}, "padding_samples must be at least 0, got -1"),
    ({"observe": True, "experts": "grouped"}, "which leaves the experts to the framework"),
    ({"observe": True, "placement_bitwise": True}, "placement_bitwise has no effect"),
    ({"observe": True, "experts": "grouped", "static_rows": True}, "static_rows has no effect"),
    (
        {"domain_balance": "engine:ultraep", "replica_slots": 1},
        r"replica_slots=0 \(now policy='moe-rl' and replica_slots=1\)",
    ),
    ({"domain_balance": "other"}, "domain_balance .other. is unknown"),
    ({"domain_balance": "engine:ultraep", "replica_slots": 0, "policy": "lplb"}, "Set policy='moe-rl'"),
    ({"replica_slot": 1}, "replica_slots"),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSED, ids=lambda value: str(value))
def test_what_means_nothing_is_refused_in_a_sentence(words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        BalancerConfig(**words)


@pytest.mark.parametrize(
    "words",
    [
        {"replica_slots": 0, "cross_node_slots": 0, "resident_slots": 0, "ranks_per_node": 1},
        {"history_steps": 1, "steps_served": 1, "reorder_scratch_bytes": 0},
        {"history_steps": 2, "steps_served": 2},
        {"experts": "grouped", "static_rows": True, "capacity_risk": 0.0},
        {"experts": "grouped", "recipe": "mxfp8", "transposed_codes": True},
        {"padding_samples": 0, "observe": True},
        {"dispatcher": "deepep"},
    ],
    ids=str,
)
def test_what_is_at_the_edge_is_taken(words: dict[str, Any]) -> None:
    config = BalancerConfig(**words)
    assert all(config.value_of(name) == value for name, value in words.items())
    assert BalancerConfig(**config.words()) == config


@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize("name", ["pack", "fit_micro_batches"])
def test_a_run_that_is_observed_leaves_micro_batches_as_they_are(name: str, observe: bool) -> None:
    config, without = BalancerConfig(observe=observe), BalancerConfig(observe=observe, **{name: False})
    assert config.moves_sequences == config.cuts_micro_batches == (not observe)
    other = "fit_micro_batches" if name == "pack" else "pack"
    found = {"pack": without.moves_sequences, "fit_micro_batches": without.cuts_micro_batches}
    assert found == {name: False, other: not observe}


def test_slots_add_up() -> None:
    slots = BalancerConfig(replica_slots=2, cross_node_slots=1, resident_slots=4, ranks_per_node=2).slots
    assert (slots.spare, slots.foreign) == (3, 7)
    changed = BalancerConfig(replica_slots=2).with_words(steps_served=3)
    assert (changed.slots.replica_slots, changed.homes.steps_served) == (2, 3)
