"""What must hold of every simulated step, whatever the constants are."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_recount import rank_expert_rows
from step_cases import StepCase, case_of, cases, lengths_for, random_plan
from strategies import HARDWARE, layout_for, model_spec, seeds

from moe_rl.core.cost import independent_visits, layer_time, padded_rows
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.plan import ReplicaPlan
from moe_rl.core.plan_rows import rows_of_plan
from moe_rl.core.topology import ClusterTopology
from moe_rl.core.visits import count_rows
from moe_rl.simulators.base_time import attention_squares
from moe_rl.simulators.movement import STEP_PARTS
from moe_rl.simulators.pricing import ROUTED_PARTS, TrainingStep
from moe_rl.simulators.rows import fewest_rows, uniform_rows
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.step import cost_params_for, simulate_policies

FASTER = ("gemm_tflops", "attention_linear_tflops", "attention_forward_tflops", "attention_backward_tflops")
WIDER = ("hbm_gb_per_s", "nvlink_gb_per_s", "nvlink_p2p_gb_per_s", "rdma_gb_per_s")
SMALL = 1 + 1e-9


def uniform_load(topology: ClusterTopology, *, experts: int, per_expert: int, micro_batches: int = 2) -> StepLoad:
    """Every source sends `per_expert` pairs to every expert of 3 layers; top-2."""
    shape = (topology.num_ep_groups, micro_batches, 3, topology.ep_size, experts)
    tokens = np.full((*shape[:2], topology.ep_size), experts * per_expert // 2)
    return StepLoad(pairs=np.full(shape, per_expert, np.int32), tokens=tokens, top_k=2)


@pytest.mark.lengthy
@given(cases())
def test_no_policy_beats_the_lower_bound(case: StepCase) -> None:
    times = case.times()
    for name, time in times.items():
        assert times["ideal"] <= time * SMALL, name


@pytest.mark.lengthy
@given(cases())
def test_the_parts_add_up_to_the_step(case: StepCase) -> None:
    result = case.simulate()
    for one in (*result.policies.values(), *result.yardsticks().values()):
        parts = one.prediction.breakdown_s
        assert parts is not None
        assert sum(parts.values()) == pytest.approx(one.step_time_s, rel=1e-12)
        assert all(seconds >= 0 for name, seconds in parts.items() if name != "overlap")
        stages, virtual = case.setting.pipeline_model_parallel_size, case.setting.num_virtual_stages
        apart = [name for name in parts if name.startswith("pipeline_") or name in (*STEP_PARTS, "reorder")]
        once = one.step_time_s - sum(parts[name] for name in apart)
        steady = one.micro_batch_s[one.group].sum() / stages
        assert once == pytest.approx(steady, rel=1e-9)
        waiting = (once + parts["pipeline_p2p"]) * (stages - 1) / virtual
        assert parts["pipeline_bubble"] == pytest.approx(waiting / max(1, (one.micro_batch_s[one.group] > 0).sum()))


@pytest.mark.lengthy
@given(cases(), st.sampled_from(FASTER + WIDER))
def test_more_rate_never_costs_time(case: StepCase, constant: str) -> None:
    slow = case.times()
    fast = case.times(setting=replace(case.setting, perturbation={constant: 1.5}))
    for name, time in fast.items():
        assert time <= slow[name] * SMALL, (name, constant)


@pytest.mark.lengthy
@given(cases(), seeds)
def test_fewer_tokens_never_cost_time(case: StepCase, seed: int) -> None:
    """Every source rank loses a share of its tokens, some all of them.

    Without pipelining (fewer micro-batches wait relatively longer) and copies across nodes (which then have less work
    to hide under).
    """
    rng = np.random.default_rng(seed)
    kept = rng.random(case.load.tokens.shape) * (rng.random(case.load.tokens.shape) < 0.8)
    pairs = np.floor(case.load.pairs * kept[:, :, None, :, None]).astype(np.int32)
    fewer = replace(case.load, pairs=pairs, tokens=np.ceil(case.load.tokens * kept).astype(np.int64))
    setting = replace(case.setting, pipeline_model_parallel_size=1, num_virtual_stages=1)
    plans = {"resident": case.plans["resident"]}
    all_of_them = case.times(setting=setting, plans=plans)
    some = case.times(load=fewer, lengths=lengths_for(fewer, case.topology), setting=setting, plans=plans)
    for name, time in some.items():
        assert time <= all_of_them[name] * SMALL, name


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("dispatcher", ["deepep", "alltoall"])
def test_uniform_loads_give_the_closed_form(nodes: int, dispatcher: str) -> None:
    """Imbalance 1 and static = forced balance = what the formulas say, computed here from scratch."""
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4 * nodes, ranks_per_node=4)
    load = uniform_load(topology, experts=8 * nodes, per_expert=128)
    layout, lengths = layout_for(load, topology), lengths_for(load, topology)
    model = model_spec(num_experts=8 * nodes, num_layers=3, top_k=2)
    setting = StepSetting(dispatcher=dispatcher)
    step = TrainingStep(load=load, layout=layout, lengths=lengths, model=model, topology=topology, setting=setting)
    result = simulate_policies({}, step)
    assert result.static.prediction.imbalance == 1.0
    assert result.static.step_time_s == pytest.approx(result.forced_balance.step_time_s, rel=1e-12)

    tokens, ranks, hidden, width = 8 * nodes * 128 // 2, 4 * nodes, 2048, 768
    rows = 2 * tokens
    gemm = rows * 6 * hidden * width / 800e12
    moved = rows * (8 * hidden + 10 * width) / 2680e9
    share = 1 / 4 / nodes
    if dispatcher == "deepep":
        visit_rank, visit_node = 1 - (1 - share) ** 2, 1 - (1 - share) ** 8
        local = tokens * ranks * visit_rank * hidden * 2 / 320e9
        remote = tokens * (nodes - 1) * visit_node * hidden * 2 / 43e9
        a2a = max(local, remote) + 0.25 * min(local, remote) + (25e-6 if nodes == 1 else 60e-6)
    else:
        wire = max(rows * hidden * 2 * 3 / ranks / 320e9, rows * hidden * 2 * (ranks - 4) / ranks / 43e9)
        a2a = wire + 4 * rows * hidden * 2 / 2680e9 + 60e-6
    queries, keys = 32 * 128, 2 * 4 * 128
    linear = 2 * hidden * (2 * queries + keys)
    forward = tokens * (linear / 600e12 + 2 * (14 * hidden + 6 * (queries + keys)) / 2680e9)
    forward += tokens**2 * 2 * queries / 550e12 + 1e-3
    backward = tokens * (2 * linear / 600e12 + 2 * (24 * hidden + 10 * (queries + keys)) / 2680e9)
    backward += 2.5 * tokens**2 * 2 * queries / 450e12 + 1.5e-3
    layer = forward + backward + 3 * gemm + 2.7 * moved + 3 * 40e-6 + 4 * a2a
    head = 6 * tokens * hidden * 1000 / 800e12 + tokens * 1000 * (6 + 8) / 2680e9
    experts, dense = 3 * 2 * 3 * hidden * width, 3 * hidden * (2 * queries + keys + 8 * nodes) + 2 * hidden * 1000
    optimizer = 30 * (experts + dense / ranks) / 2680e9
    assert result.static.step_time_s == pytest.approx(2 * (3 * layer + head) + optimizer, rel=1e-9)


@given(cases())
def test_sparse_rows_equal_the_dense_ones(case: StepCase) -> None:
    """`rows_of_plan` never forms [P, E]; here the same numbers come from every rank's row of every expert."""
    for plan in case.plans.values():
        at = rows_of_plan(plan, case.load, case.topology, tile_rows=128.0)
        for group in range(case.load.num_ep_groups):
            for micro_batch in range(case.load.num_micro_batches):
                dense = rank_expert_rows(plan, case.load, group, micro_batch)
                here = (group, micro_batch)
                tokens = float(case.load.tokens[here].sum())
                mean = np.full(case.load.num_layers, tokens / case.topology.ep_size)
                shares = dense / max(tokens, 1.0)
                visits = independent_visits(shares, mean, case.topology.ranks_per_domain)
                assert (at.rows[here] == dense.sum(axis=2)).all()
                assert (at.padded_rows[here] == padded_rows(dense, 128.0).sum(axis=2)).all()
                assert (at.active_experts[here] == (dense > 0).sum(axis=2)).all()
                for have, want in zip((at.rank_visits, at.nic_ingress, at.nic_egress), visits, strict=True):
                    np.testing.assert_allclose(have[here], want, rtol=1e-9, atol=1e-9)


@given(cases(), st.booleans())
def test_the_lower_bound_holds_quantity_by_quantity(case: StepCase, deduplicated: bool) -> None:
    load, topology = case.load, case.topology
    slots = max(plan.placement.slots_per_rank for plan in case.plans.values())
    least = fewest_rows(load, topology, slots_per_rank=slots, deduplicated=deduplicated)
    found = [rows_of_plan(plan, load, topology, tile_rows=128.0) for plan in case.plans.values()]
    if deduplicated:
        found.append(uniform_rows(load, topology, tile_rows=128.0))
    else:
        counts = [count_rows(plan, load, topology) for plan in case.plans.values()]
        found = [one.put_into(at) for one, at in zip(counts, found, strict=True)]
    for at in found:
        for name in ("rows", "padded_rows", "active_experts", "rank_visits", "nic_ingress", "nic_egress"):
            assert (getattr(at, name).max(axis=-1) * SMALL + 1e-9 >= getattr(least, name)[..., 0]).all(), name


def test_replicas_in_the_node_help_a_hot_rank_and_cost_what_they_move() -> None:
    """One hot expert of 4; a replica that takes half of it brings the max down and adds its copy."""
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, ranks_per_node=2)
    pairs = np.zeros((1, 1, 1, 2, 4), np.int32)
    pairs[0, 0, 0] = [8000, 400, 400, 400]
    load = StepLoad(pairs=pairs, tokens=np.full((1, 1, 2), 9200), top_k=1)
    case = case_of(load, topology, np.random.default_rng(0), policies=("homes",))
    plan = case.plans["homes"]
    slots = plan.placement.slots_per_rank
    replicas = ReplicaPlan(
        offsets=np.array([0, 1]),
        expert=np.array([0], np.int32),
        physical_id=np.array([slots + 2], np.int32),
        source_quota=np.array([[3800, 3800]], np.int32),
        source_pairs=np.array([[8000, 8000]], np.int32),
        resident=np.array([False]),
        num_ep_groups=1,
        num_micro_batches=1,
        num_layers=1,
    )
    result = case.simulate(plans={"one": replace(plan, replicas=replicas)})
    one = result.policies["one"]
    assert one.rank_load.ravel().tolist() == [9200.0, 9200.0]
    assert one.prediction.imbalance == 1.0
    assert result.static.prediction.imbalance == pytest.approx(16800 / 9200)
    assert one.prediction.replicas_per_plan == 1.0
    assert one.prediction.cross_node_replicas_per_plan == 0.0
    # Of the 4 that are priced one is not sent: backward of the only layer finds the weights where forward left them.
    assert one.prediction.moved_bytes == 3 * case.model.expert_bytes
    parts = one.prediction.breakdown_s
    assert parts["replicate"] == pytest.approx(0.3 * 4 * case.model.expert_bytes / 300e9 + 10e-6)
    assert parts["expert_gemm"] < result.static.prediction.breakdown_s["expert_gemm"]


def test_resident_copies_cost_weights_in_and_gradients_out_once_per_step() -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    load = uniform_load(topology, experts=8, per_expert=10)
    layout = layout_for(load, topology)
    plan = random_plan(np.random.default_rng(3), load, layout, resident=False, move_homes=False)
    held = plan.placement.physical_to_logical_map.copy()
    held[0, 2], held[1, 2], held[2, 3] = 7, 2, 1  # rank 0: across nodes, inside its node, and its own expert again
    placement = replace(plan.placement, physical_to_logical_map=held)
    empty = ReplicaPlan.empty(num_ep_groups=1, num_micro_batches=2, num_layers=3, ep_size=4)
    case = case_of(load, topology, np.random.default_rng(0), policies=())
    plans = {"held": replace(plan, placement=placement, replicas=empty)}
    held_result = case.simulate(plans=plans).policies["held"].prediction
    weight = case.model.expert_bytes
    assert held_result.moved_bytes == 2 * 3 * weight
    assert held_result.breakdown_s["reorder"] == pytest.approx(3 * weight / 43e9 + 3 * weight / 300e9)


def test_migrated_homes_cost_their_busiest_nic() -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    load = uniform_load(topology, experts=8, per_expert=10)
    case = case_of(load, topology, np.random.default_rng(5), policies=("replicas",))
    plan = case.plans["replicas"]
    node = topology.node_of_rank
    out = plan.migration.bytes_out_of_node(node)
    parts = case.simulate().policies["replicas"].prediction.breakdown_s
    assert parts["reorder"] >= out.max() / 43e9
    assert out.max() > 0


def test_the_slowest_ep_group_sets_the_step() -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, num_ep_groups=2, ranks_per_node=2)
    load = uniform_load(topology, experts=4, per_expert=100)
    pairs = load.pairs.copy()
    pairs[1, 0, :, :, 0] += 5000
    load = replace(load, pairs=pairs, tokens=load.tokens + np.array([0, 2500])[:, None, None])
    case = case_of(load, topology, np.random.default_rng(0), policies=())
    static = case.simulate().static
    assert static.group == 1
    optimizer = static.prediction.breakdown_s["optimizer"]
    assert static.step_time_s == pytest.approx(static.micro_batch_s[1].sum() + optimizer)
    assert static.micro_batch_s[1].sum() > static.micro_batch_s[0].sum()


def test_packed_sequences_pay_for_the_sum_of_their_squares() -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, ranks_per_node=2)
    load = uniform_load(topology, experts=4, per_expert=4096, micro_batches=1)
    model = model_spec(num_experts=4, num_layers=3, top_k=2)

    def attention(lengths: list[int], rank: list[int], **setting: int) -> tuple[float, float]:
        count = len(lengths)
        layout = BatchLayout(
            micro_batch=np.zeros(count, np.int32),
            dp_rank=np.array(rank, np.int32),
            order=np.arange(count, dtype=np.int32),
            num_micro_batches=1,
            num_dp_ranks=2,
        )
        step = TrainingStep(
            load=load,
            layout=layout,
            lengths=np.array(lengths),
            model=model,
            topology=topology,
            setting=StepSetting(**setting),
        )
        result = simulate_policies({}, step)
        return result.static.prediction.breakdown_s["attention"], result.conditions.sequence_length

    one, long = attention([8192, 8192], [0, 1])
    halves, short = attention([4096] * 4, [0, 0, 1, 1])
    assert (long, short) == (8192, 4096)
    queries = 32 * 128
    per_square = 3 * 2 * queries * (1 / 550e12 + 2.5 / 450e12)
    assert one - halves == pytest.approx(per_square * (8192**2 - 2 * 4096**2), rel=1e-9)
    mixed, _ = attention([4096, 4096, 8192], [0, 0, 1])
    assert mixed == pytest.approx(one)  # the rank with the long sequence keeps the others waiting
    overridden, length = attention([4096] * 4, [0, 0, 1, 1], sequence_length=8192)
    assert (overridden, length) == (pytest.approx(one), 8192)


@pytest.mark.parametrize("windowed", [0, 1, 3])
def test_attention_squares_count_the_pairs_of_causal_attention(windowed: int) -> None:
    model = model_spec(num_layers=3, num_experts=4, top_k=2)
    window = 7 if windowed else 0
    model = replace(model, sliding_window=window, num_sliding_window_layers=windowed)
    lengths = np.array([0, 1, 6, 7, 8, 100])
    squares = attention_squares(lengths, model)
    for length, found in zip(lengths, squares, strict=True):
        keys = np.arange(1, length + 1)  # of each query
        pairs = (windowed * np.minimum(keys, window).sum() + (3 - windowed) * keys.sum()) / 3
        assert abs(found - 2 * pairs) <= length  # n^2 for n (n + 1): the diagonal counts half, as in full attention


def test_a_window_shortens_attention_and_nothing_else() -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, ranks_per_node=2)
    load = uniform_load(topology, experts=4, per_expert=64)
    case = case_of(load, topology, np.random.default_rng(0), policies=())
    windowed = replace(case.model, sliding_window=8, num_sliding_window_layers=case.model.num_layers)
    full, short = case.simulate().static, replace(case, model=windowed).simulate().static
    for name, seconds in full.prediction.breakdown_s.items():
        assert short.prediction.breakdown_s[name] == pytest.approx(seconds) or name == "attention"
    assert short.prediction.breakdown_s["attention"] < full.prediction.breakdown_s["attention"]


def test_scaled_loads_keep_the_effective_sequence_length() -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, ranks_per_node=2)
    load = uniform_load(topology, experts=4, per_expert=64)
    case = case_of(load, topology, np.random.default_rng(0), policies=())
    recorded = case.simulate().conditions
    scaled = case.simulate(load=load.scaled_to(4096)).conditions
    assert not recorded.scaled
    assert scaled.scaled
    assert scaled.tokens_per_rank == 4096
    assert scaled.sequence_length == pytest.approx(recorded.sequence_length)


def test_a_step_without_tokens_takes_no_time_and_has_no_ratios() -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, ranks_per_node=2)
    load = StepLoad(pairs=np.zeros((1, 2, 3, 2, 4), np.int32), tokens=np.zeros((1, 2, 2), np.int64), top_k=2)
    case = case_of(load, topology, np.random.default_rng(0), policies=())
    result = case.simulate()
    assert result.static.step_time_s == 0.0
    assert result.static.prediction.tokens_per_s is None
    assert result.static.prediction.speedup_vs_static is None
    assert result.conditions.phi is None
    assert "phi" not in result.conditions.as_json()


def test_one_rank_sends_nothing() -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=1, ranks_per_node=1)
    case = case_of(uniform_load(topology, experts=4, per_expert=64), topology, np.random.default_rng(0), policies=())
    for dispatcher in ("deepep", "alltoall"):
        parts = case.simulate(setting=StepSetting(dispatcher=dispatcher)).static.prediction.breakdown_s
        assert parts["all_to_all"] == 0.0
        assert parts["expert_gemm"] > 0.0


@pytest.mark.lengthy
@settings(max_examples=15)
@given(cases())
def test_recomputing_and_log_probs_add_their_passes(case: StepCase) -> None:
    plain = replace(case.setting, recompute="none", log_prob_passes=0, overlap_all_to_all=False)

    def parts(**changes: object) -> dict[str, float]:
        result = case.simulate(setting=replace(plain, **changes), plans={})
        return result.forced_balance.prediction.breakdown_s

    update, forward, twice = parts(), parts(forward_only=True), parts(log_prob_passes=2)
    routed, whole = ("all_to_all", "expert_gemm"), ("all_to_all", "expert_gemm", "attention", "fixed")
    for mode, again in (("none", ()), ("moe", routed), ("full", whole)):
        recomputed = parts(recompute=mode)
        for name in (*whole, "head"):
            assert recomputed[name] == pytest.approx(update[name] + forward[name] * (name in again))
            assert twice[name] == pytest.approx(update[name] + 2 * forward[name])


def test_planners_get_the_constants_that_the_simulator_uses() -> None:
    """The MoE time of a plan under `cost_params_for` is the simulated MoE time; the balanced layer hides copies."""
    topology = ClusterTopology(hardware=HARDWARE, ep_size=8, ranks_per_node=4)
    case = case_of(uniform_load(topology, experts=16, per_expert=300), topology, np.random.default_rng(2))
    params = cost_params_for(case.step)
    result = case.simulate()
    balanced = result.forced_balance.prediction.breakdown_s
    layers = 2 * 3
    assert params.prefetch_hidden_s == pytest.approx(
        sum(balanced[name] for name in ("attention", "fixed", "expert_gemm")) / layers
    )
    for name, plan in case.plans.items():
        rows = rows_of_plan(plan, case.load, topology, tile_rows=params.gemm_tile_rows)
        parts = result.policies[name].prediction.breakdown_s
        assert layer_time(params, rows).total_s.sum() == pytest.approx(sum(parts[part] for part in ROUTED_PARTS))


def test_a_policy_that_repacks_needs_its_own_load() -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, ranks_per_node=2)
    case = case_of(uniform_load(topology, experts=4, per_expert=64), topology, np.random.default_rng(0))
    other = replace(case.layout, micro_batch=case.layout.micro_batch[::-1].copy())
    plans = {"packed": replace(case.plans["homes"], layout=other)}
    with pytest.raises(InvalidInputError, match="policy 'packed' changes the batch layout"):
        case.simulate(plans=plans)
    result = simulate_policies(plans, case.step, loads={"packed": case.load})
    assert result.ideal.step_time_s <= result.policies["packed"].step_time_s


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dispatcher": "deepeb"}, "Did you mean 'deepep'"),
        ({"recompute": "mlp"}, "recompute 'mlp' is unknown"),
        ({"pipeline_model_parallel_size": 0}, "pipeline_model_parallel_size must be at least 1, got 0"),
        ({"num_virtual_stages": 2}, "needs a pipeline_model_parallel_size above 1"),
        ({"forward_only": True, "log_prob_passes": 1}, "forward_only means that there is no update"),
        ({"log_prob_passes": -1}, "log_prob_passes must be at least 0"),
        ({"sequence_length": 0}, "sequence_length must be at least 1"),
        ({"precision": "fp4"}, "precision 'fp4' is unknown"),
        ({"replica_exposed": 1.5}, r"replica_exposed must lie in \[0, 1\]"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        StepSetting(**changes)


def test_an_unknown_constant_cannot_be_perturbed() -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, ranks_per_node=2)
    with pytest.raises(InvalidInputError, match="Did you mean 'rdma_gb_per_s'"):
        StepSetting(perturbation={"rdma_gb_s": 2.0}).perturbed(topology)
