"""Plan files: what is loaded is what was saved, and nothing damaged is accepted."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import load_of, placements, random_pairs, seeds

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.layout import BatchLayout
from moe_rl.core.metrics import rank_load
from moe_rl.core.placement import ExpertMigration, ExpertPlacement
from moe_rl.core.plan import Plan, ReplicaPlan
from moe_rl.core.plan_file import load_plan
from moe_rl.planner.objective import OBJECTIVES


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans with replicas in random cells, a migration, odd parameters and a layout of random sequences."""
    rng = np.random.default_rng(draw(seeds))
    layers, experts, ep_size, spare = draw(st.integers(1, 3)), 8, 4, draw(st.integers(0, 2))
    groups, micro_batches, replicas = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(0, 6))
    slots = {"spare_slots": spare, "resident_slots": draw(st.integers(0, 2))}
    placement, before = (
        draw(placements(num_layers=layers, num_experts=experts, ep_size=ep_size, **slots)) for _ in range(2)
    )
    cells = np.sort(rng.integers(0, groups * micro_batches * layers, replicas))
    counts = np.bincount(cells, minlength=groups * micro_batches * layers)
    sequences = draw(st.integers(0, 5))
    return Plan(
        policy=draw(st.text(min_size=1, max_size=12)),
        layout=BatchLayout(
            micro_batch=rng.integers(0, micro_batches, sequences).astype(np.int32),
            dp_rank=rng.integers(0, 2, sequences).astype(np.int32),
            order=np.arange(sequences, dtype=np.int32),
            num_micro_batches=micro_batches,
            num_dp_ranks=2,
            token_budget=draw(st.none() | st.integers(1, 100)),
            fixed=draw(st.booleans()),
        ),
        placement=placement,
        replicas=ReplicaPlan(
            offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            expert=rng.integers(0, experts, replicas).astype(np.int32),
            physical_id=rng.integers(0, placement.slots_per_rank * ep_size, replicas).astype(np.int32),
            source_quota=rng.integers(0, 50, (replicas, ep_size)).astype(np.int32),
            source_pairs=rng.integers(50, 90, (replicas, ep_size)).astype(np.int32),
            resident=rng.random(replicas) < 0.5,
            num_ep_groups=groups,
            num_micro_batches=micro_batches,
            num_layers=layers,
        ),
        migration=ExpertMigration.between(before, placement, expert_bytes=14),
        objective=draw(st.sampled_from(OBJECTIVES.names)),
        parameters={"slots": 1, "rate": 0.1, "name": "x", "on": True},
        predicted_cost_s=draw(st.none() | st.floats(0, 10)),
        solve_time_s=0.25,
        notes=("first, with ünicode", "second"),
    )


@settings(max_examples=30)
@given(plan=plans(), seed=seeds)
def test_a_saved_plan_loads_equal_and_sends_every_row_to_the_same_rank(
    tmp_path_factory: pytest.TempPathFactory, plan: Plan, seed: int
) -> None:
    path = tmp_path_factory.mktemp("plan") / "a.npz"
    plan.save(path)
    loaded = load_plan(path)
    assert loaded.hash == plan.hash
    for field in ("policy", "objective", "predicted_cost_s", "solve_time_s", "notes"):
        assert getattr(loaded, field) == getattr(plan, field)
    assert dict(loaded.parameters) == dict(plan.parameters)
    assert (loaded.placement.resident_experts == plan.placement.resident_experts).all()
    assert loaded.layout.token_budget == plan.layout.token_budget
    assert loaded.layout.fixed == plan.layout.fixed
    assert list(loaded.migration.moves()) == list(plan.migration.moves())
    shape = (
        plan.replicas.num_ep_groups,
        plan.replicas.num_micro_batches,
        plan.placement.num_layers,
        plan.placement.ep_size,
        plan.placement.num_experts,
    )
    load = load_of(random_pairs(np.random.default_rng(seed), shape, most=20), top_k=2)
    assert np.array_equal(rank_load(loaded, load), rank_load(plan, load))


def small_plan(policy: str = "static") -> Plan:
    placement = ExpertPlacement.contiguous(num_layers=2, num_experts=4, ep_size=2)
    return Plan(
        policy=policy,
        layout=BatchLayout.ep_group(np.array([3, 4]), token_budget=5),
        placement=placement,
        replicas=ReplicaPlan.empty(num_ep_groups=1, num_micro_batches=2, num_layers=2, ep_size=2),
        migration=ExpertMigration.between(placement, placement, expert_bytes=1),
    )


def test_the_same_plan_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        small_plan().save(tmp_path / name)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_saving_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.npz"
    small_plan("static").save(path)
    small_plan("other").save(path)
    assert load_plan(path).policy == "other"
    assert [file.name for file in tmp_path.iterdir()] == ["plan.npz"]


def test_a_save_that_fails_keeps_the_old_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.npz"
    small_plan().save(path)
    before = path.read_bytes()
    unwritable = small_plan()
    object.__setattr__(unwritable, "parameters", {"x": object()})
    with pytest.raises(TypeError):
        unwritable.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["plan.npz"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="there is no plan file"):
        load_plan(tmp_path / "none.npz")


@pytest.mark.parametrize("keep", [0, 1, 10, 200, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "plan.npz"
    small_plan().save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InvalidInputError, match="damaged, or is not a plan file"):
        load_plan(path)


@settings(max_examples=60)
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, position: float, bit: int
) -> None:
    path = tmp_path_factory.mktemp("plan") / "a.npz"
    plan = small_plan()
    plan.save(path)
    content = bytearray(path.read_bytes())
    content[int(position * len(content))] ^= 1 << bit
    path.write_bytes(content)
    try:
        loaded = load_plan(path)
    except InvalidInputError:
        return
    assert loaded.hash == plan.hash
    assert loaded.policy == plan.policy


def rewritten(path: Path, name: str, content: bytes) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    members[name] = content
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)


def npy(array: np.ndarray, tmp_path: Path) -> bytes:
    np.save(tmp_path / "x.npy", array)
    return (tmp_path / "x.npy").read_bytes()


def test_a_changed_placement_does_not_match_the_hash(tmp_path: Path) -> None:
    path = tmp_path / "plan.npz"
    small_plan().save(path)
    swapped = np.array([[1, 0, 2, 3], [0, 1, 2, 3]], np.int32)
    rewritten(path, "placement.physical_to_logical_map.npy", npy(swapped, tmp_path))
    with pytest.raises(InvalidInputError, match="does not match its checksum"):
        load_plan(path)


def test_another_schema_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.npz"
    small_plan().save(path)
    description = np.frombuffer(json.dumps({"schema": "moe_rl.plan/9"}).encode(), np.uint8)
    rewritten(path, "description.npy", npy(description, tmp_path))
    with pytest.raises(
        InvalidInputError, match=r"schema 'moe_rl\.plan/9', but this version of moe_rl reads only 'moe_rl\.plan/2'"
    ):
        load_plan(path)


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    path = tmp_path / "plan.npz"
    small_plan().save(path)
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    rewritten(path, "layout.order.npy", (tmp_path / "x.npy").read_bytes())
    with pytest.raises(InvalidInputError, match="damaged, or is not a plan file"):
        load_plan(path)
