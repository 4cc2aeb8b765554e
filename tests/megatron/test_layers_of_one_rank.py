"""What a rank keeps of its layers between passes, and where the optimizer has an expert's state, in one process.

Layers are their states, and the optimizer is one of Megatron's of which only the places of its numbers are filled in.
"""

import logging
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.placement import ExpertPlacement

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says of what it does without TransformerEngine and Apex
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from moe_rl.megatron import activate, expert_state, flex, run_layers
    from moe_rl.megatron.activate import PassParts, home_table
    from moe_rl.megatron.expert_state import ExpertOptimizerState, MegatronExperts
    from moe_rl.megatron.layer import LayerState
    from moe_rl.megatron.run_layers import MegatronLayers, StaticRows

LAYERS, EXPERTS, RANKS = (0, 2), 4, 2
SHARDS = 3


def state_of(layer: int, **words: Any) -> LayerState:
    """Return a layer of two experts with one parameter each."""
    weights = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    experts = SimpleNamespace(num_local_experts=2, parameters_of=lambda slot: [weights[slot]], weights=weights)
    facts = {
        "layer": layer,
        "experts": experts,
        "clock": SimpleNamespace(trained=False),
        "original_class": object,
        "home_dispatcher": SimpleNamespace(),
        "slot_dispatcher": SimpleNamespace(),
    }
    return LayerState(**(facts | words))


@pytest.fixture
def states() -> list[LayerState]:
    return [state_of(layer) for layer in LAYERS]


def optimizer_of(parameters: list[torch.nn.Parameter], *, own_shard: int, offset: int = 4, **config: Any) -> Any:
    """Return a distributed optimizer that has the parameters one after the other in its second bucket.

    Its bucket starts at element `offset` of the buffer and is cut evenly into SHARDS, of which this rank holds one.
    """
    total = sum(parameter.numel() for parameter in parameters)
    per_shard = -(-total // SHARDS)
    begin, places, groups, masters, state = offset, {}, {}, [], {}
    for parameter in parameters:
        end = begin + parameter.numel()
        places[parameter] = (begin, end, 1)
        low = max(begin, offset + own_shard * per_shard)
        high = min(end, offset + (own_shard + 1) * per_shard)
        if low < high:
            master = torch.full((high - low,), float(begin))
            groups[parameter] = (0, len(masters))
            state[master] = {
                "exp_avg_sq": master + 2,
                "exp_avg": master + 1,
                "step": torch.tensor(3.0),
                "scale": torch.ones(high - low + 1),
                "name": "a text",
            }
            masters.append(master)
        begin = end
    bucket = SimpleNamespace(offset=offset, grad_data=torch.zeros(per_shard * SHARDS))
    optimizer = object.__new__(DistributedOptimizer)
    vars(optimizer).update(
        config=SimpleNamespace(**({"use_precision_aware_optimizer": False} | config)),
        ddp_config=SimpleNamespace(num_distributed_optimizer_instances=1),
        is_stub_optimizer=False,
        buffers=[SimpleNamespace(param_index_map={}), SimpleNamespace(param_index_map=places, buckets=[None, bucket])],
        data_parallel_group=SimpleNamespace(size=lambda: SHARDS),
        model_param_group_index_map=groups,
        optimizer=SimpleNamespace(param_groups=[{"params": masters}], state=state),
    )
    return optimizer


@pytest.mark.parametrize("own_shard", range(SHARDS))
def test_shards_cover_a_parameter_once_and_state_is_that_of_the_own_one(own_shard: int) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(numel)) for numel in (5, 1, 9, 2)]
    optimizer = optimizer_of(parameters, own_shard=own_shard)
    found = ExpertOptimizerState(SimpleNamespace(chained_optimizers=[optimizer]))
    per_shard = -(-17 // SHARDS)
    begin = 0
    for parameter in parameters:
        shards = found.shards(parameter)
        assert len(shards) == SHARDS
        owners = np.zeros(parameter.numel(), int)
        for rank, (start, stop) in enumerate(shards):
            assert start <= stop
            owners[start:stop] += 1
            assert all((begin + element) // per_shard == rank for element in range(start, stop))
        assert (owners == 1).all()
        tensors = found.tensors(parameter)
        start, stop = shards[own_shard]
        assert len(tensors) == (3 if start < stop else 0)
        for (place,), extra in zip(tensors, (1, 2, 0), strict=False):
            assert place.tolist() == [4.0 + begin + extra] * (stop - start), "moments by name, then the master"
        begin += parameter.numel()


def test_frozen_parameters_have_no_state_and_strange_ones_are_refused() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(6))]
    found = ExpertOptimizerState(optimizer_of(parameters, own_shard=0))
    assert found.shards(torch.nn.Parameter(torch.zeros(2), requires_grad=False)) == []
    for ask in (found.shards, found.tensors):
        with pytest.raises(InvalidInputError, match="the optimizer that attach received lacks"):
            ask(torch.nn.Parameter(torch.zeros(2)))


def test_a_master_that_is_the_parameter_itself_moves_with_the_weights() -> None:
    """Of an fp32 model; its moments are state as ever."""
    parameter = torch.nn.Parameter(torch.zeros(6))
    optimizer = optimizer_of([parameter], own_shard=1)
    own = parameter.detach().view(-1)[2:4]
    optimizer.optimizer.state = {own: {"exp_avg": torch.ones(2)}}
    optimizer.optimizer.param_groups[0]["params"] = [own]
    assert [[place.tolist() for place in places] for places in ExpertOptimizerState(optimizer).tensors(parameter)] == [
        [[1.0, 1.0]]
    ]
    optimizer.optimizer.state = {}
    assert ExpertOptimizerState(optimizer).tensors(parameter) == [], "before the first step"


def test_an_offloaded_master_is_mirrored_by_megatrons_own_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Offloading(SimpleNamespace):
        pass

    monkeypatch.setattr(expert_state, "HybridDeviceOptimizer", Offloading)
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = optimizer_of([parameter], own_shard=0)
    (main,) = optimizer.optimizer.param_groups[0]["params"]
    master = torch.full((1,), 9.0)
    state = {main: {"exp_avg": torch.ones(1), "master_param": master}}
    optimizer.optimizer = Offloading(
        param_groups=[{"params": [main]}], state=state, param_to_inner_param={main: master}
    )
    moments, masters = ExpertOptimizerState(optimizer).tensors(parameter)
    assert [place.tolist() for place in moments] == [[1.0]]
    assert [place.tolist() for place in masters] == [[9.0], [4.0]], "what is used first, its mirror behind it"
    assert masters[0].data_ptr() == master.data_ptr()
    assert masters[1].data_ptr() == main.data_ptr()


@pytest.mark.parametrize("option", ["main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"])
def test_state_that_cannot_move_is_refused(option: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(6))
    with pytest.raises(InvalidInputError, match="needs Megatron's DistributedOptimizer"):
        ExpertOptimizerState(torch.optim.SGD([parameter]))
    for dtype, refused in ((torch.uint8, True), (torch.bfloat16, False), (torch.float32, False)):
        optimizer = optimizer_of([parameter], own_shard=0, use_precision_aware_optimizer=True, **{option: dtype})
        if refused:
            with pytest.raises(InvalidInputError, match=f"does not support {option}"):
                ExpertOptimizerState(optimizer)
        else:
            ExpertOptimizerState(optimizer)
    ExpertOptimizerState(optimizer_of([parameter], own_shard=0, **{option: torch.uint8}))  # an option without effect
    optimizer.ddp_config.num_distributed_optimizer_instances = 2
    with pytest.raises(InvalidInputError, match="one distributed-optimizer instance, got 2"):
        ExpertOptimizerState(optimizer)
    stub = optimizer_of([parameter], own_shard=0)
    stub.is_stub_optimizer = True
    with pytest.raises(InvalidInputError, match="the optimizer that attach received lacks"):
        ExpertOptimizerState(stub).shards(parameter)


@pytest.mark.parametrize("place", ["grad", "main_grad"])
def test_gradients_wait_from_a_backward_to_the_optimizer_step(place: str, states: list[LayerState]) -> None:
    parameters = [weight for state in states for weight in state.experts.weights]  # type: ignore[attr-defined]
    sgd = torch.optim.SGD(parameters, lr=0.1)
    experts = MegatronExperts(
        states,
        optimizer=SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=sgd)]),
        device=torch.device("cpu"),
    )
    assert experts.layers == list(LAYERS)
    for state in states:
        state.clock.trained = True
    assert not experts.gradients_wait(), "nobody has any"
    setattr(parameters[-1], place, torch.zeros(2, 3))
    assert not experts.gradients_wait(), "zeros are lost without harm"
    getattr(parameters[-1], place)[1, 2] = 1e-30
    assert experts.gradients_wait()
    sgd.step()
    assert not any(state.clock.trained for state in states)
    assert not experts.gradients_wait(), "the step has used them"
    states[0].clock.trained = True
    assert experts.gradients_wait()
    getattr(parameters[-1], place).untyped_storage().resize_(0)  # a framework has put them away
    assert not experts.gradients_wait()
    experts.release()
    sgd.step() if place == "main_grad" else None
    assert states[0].clock.trained, "a released one hears of no step"


def test_experts_are_ready_when_what_is_gathered_is_complete(states: list[LayerState]) -> None:
    parameters = [weight for state in states for weight in state.experts.weights]  # type: ignore[attr-defined]
    completed: list[str] = []
    states[1].gather = SimpleNamespace(complete=lambda: completed.append("gathered"))  # type: ignore[assignment]
    optimizer = optimizer_of(parameters, own_shard=0)
    ready, state = MegatronExperts(states, optimizer=optimizer, device=torch.device("cpu")).ready()
    assert completed == ["gathered"]
    assert ready == [state.experts for state in states]
    assert isinstance(state, ExpertOptimizerState)
    with pytest.raises(InvalidInputError, match="attach received no optimizer"):
        MegatronExperts(states, optimizer=None, device=torch.device("cpu")).ready()


def test_layers_follow_experts_to_their_homes_and_back(states: list[LayerState]) -> None:
    own = ExpertPlacement.contiguous(num_layers=3, num_experts=EXPERTS, ep_size=RANKS)
    homes = np.tile([0, 0, 1, 1], (3, 1))
    homes[2] = [1, 0, 1, 0]
    experts = MegatronExperts(states, optimizer=None, device=torch.device("cpu"))
    experts.follow(ExpertPlacement.from_home_rank(homes, ep_size=RANKS))
    assert states[0].home_table is None, "this layer's are where Megatron put them"
    assert states[1].home_table is not None
    experts.follow(own)
    assert states[1].home_table is None
    assert home_table(own, 0, torch.device("cpu")) is None


class Layers:
    """A `MegatronLayers` of two layers, and what it tells its parts."""

    def __init__(self, states: list[LayerState]) -> None:
        self.calls: list[Any] = []
        note = self.calls.append
        self.modules: Any = [SimpleNamespace(config=SimpleNamespace(), token_dispatcher="slots") for _ in states]
        self.transport = SimpleNamespace(
            rank=0,
            group="old",
            reset=lambda: note("reset"),
            buffers=SimpleNamespace(weights=torch.zeros(1)),
            counters=SimpleNamespace(pushed_bytes=3, returned_bytes=5),
        )
        self.residents = SimpleNamespace(
            layers={},
            begin_pass=lambda placement, num_micro_batches: note(("residents", placement, num_micro_batches)),
            end_pass=lambda: note("residents end"),
            give_up=lambda: note("residents give up"),
            use=lambda groups: note(("residents use", groups)),
        )
        self.clock = SimpleNamespace(stop=lambda: note("clock stops"))
        self.groups: Any = SimpleNamespace(
            device=torch.device("cpu"), replicas="replicas", ep_size=RANKS, expert_dp=SimpleNamespace(rank=lambda: 0)
        )
        self.layers = MegatronLayers(
            layers=self.modules,
            states=states,
            clocks=[self.clock],  # type: ignore[list-item]
            optimizer=None,
            model=SimpleNamespace(top_k=2),  # type: ignore[arg-type]
            groups=self.groups,
            transport=self.transport,  # type: ignore[arg-type]
            residents=self.residents,  # type: ignore[arg-type]
        )
        self.layers.placement = lambda: "where they are"  # type: ignore[assignment, return-value]


def tables(num_micro_batches: int) -> Any:
    terms = SimpleNamespace(device=torch.device("cpu"))
    return SimpleNamespace(
        cells=SimpleNamespace(num_micro_batches=num_micro_batches), slots=SimpleNamespace(terms=terms)
    )


def test_a_pass_leaves_nothing_in_the_layers(states: list[LayerState]) -> None:
    run = Layers(states)
    counter: Any = object()
    run.layers.activate(SimpleNamespace(misfit=None), tables(3), [], num_micro_batches=3)  # type: ignore[arg-type]
    assert run.calls == [("residents", "where they are", 3), "reset"]
    run.layers.count_routes(counter)
    assert [state.counter for state in states] == [counter] * 2
    for state in states:
        assert state.plans is not None
        state.current, state.begun, state.capacity_rows = object(), True, 7  # type: ignore[assignment]
        state.rows[0] = 4
    run.calls.clear()
    run.layers.stop(forward_only=False, complete=True)
    assert run.calls == ["clock stops"]
    assert [state.capacity_rows for state in states] == [7, 7], "which end_pass has yet to compare"
    for state, module in zip(states, run.modules, strict=True):
        assert (state.plans, state.current, state.begun, state.rows, state.counter) == (None, None, False, {}, None)
        assert module.token_dispatcher is state.home_dispatcher
    run.layers.stop(forward_only=False, complete=False)
    assert run.calls == ["clock stops", "clock stops", "residents give up"]
    assert [state.capacity_rows for state in states] == [None, None]


def test_a_pass_without_its_plan_runs_on_home_slots_alone(states: list[LayerState]) -> None:
    run = Layers(states)
    run.layers.activate(SimpleNamespace(misfit=None), tables(1), [], num_micro_batches=1)  # type: ignore[arg-type]
    run.calls.clear()
    run.layers.activate(SimpleNamespace(misfit="some"), tables(1), [], num_micro_batches=1)  # type: ignore[arg-type]
    assert run.calls == ["reset"]
    assert [state.plans for state in states] == [None, None]
    gathering: Any = SimpleNamespace(of_all_ranks=lambda count: [count(range(2)), 10 * count(range(2))])
    states[0].rows = {0: 1, 1: 2}
    states[1].rows = {1: 3}
    in_flight = run_layers.parallel_state
    with (
        patch.object(in_flight, "get_virtual_pipeline_model_parallel_world_size", lambda: None),
        patch.object(in_flight, "get_pipeline_model_parallel_world_size", lambda: 4),
        patch.object(in_flight, "get_pipeline_model_parallel_rank", lambda: 1),
    ):
        results = run.layers.results(SimpleNamespace(misfit="some"), gathering, forward_only=False)  # type: ignore[arg-type]
        forward = run.layers.results(SimpleNamespace(misfit=None), gathering, forward_only=True)  # type: ignore[arg-type]
    assert run.calls == ["reset", "residents end"]
    assert results.actual_rows.tolist() == [[[1, 10], [0, 0]], [[2, 20], [3, 30]]], "[M, L, P]"
    assert (results.pushed_bytes, results.returned_bytes) == (3, 5)
    assert (results.micro_batches_in_flight, forward.micro_batches_in_flight) == (3, None)
    with patch.object(in_flight, "get_virtual_pipeline_model_parallel_world_size", lambda: 2):
        assert run_layers._micro_batches_in_flight() is None


def test_new_groups_are_used_everywhere(states: list[LayerState]) -> None:
    run = Layers(states)
    groups: Any = SimpleNamespace(replicas="new", device=torch.device("cpu"))
    run.layers.use(groups)
    assert run.transport.group == "new"
    assert run.layers.groups is run.layers.static_rows.groups is groups
    assert run.calls == [("residents use", groups)]


def test_every_stage_has_its_own_layers_as_it_says(states: list[LayerState]) -> None:
    own = ExpertPlacement.contiguous(num_layers=3, num_experts=EXPERTS, ep_size=RANKS, spare_slots=1)
    homes = np.array([[1, 0, 0, 1], [0, 0, 1, 1], [0, 1, 0, 1]])
    there = ExpertPlacement.from_home_rank(homes, ep_size=RANKS).with_slots(resident_slots=0, spare_slots=1)
    run = Layers(states)

    def gather_in_run(table: np.ndarray) -> np.ndarray:
        other = np.full_like(table, -2)
        source = {own.physical_to_logical_map.shape[1]: there.physical_to_logical_map}.get(
            table.shape[1], there.home_rank
        )
        other[1] = source[1]
        return np.stack([table, other])

    run.groups.gather_in_run = gather_in_run
    merged = run.layers.of_all_stages(there)
    np.testing.assert_array_equal(merged.home_rank, homes)
    np.testing.assert_array_equal(merged.physical_to_logical_map, there.physical_to_logical_map)


@pytest.mark.parametrize(("tp", "cp"), [(0, 0), (1, 0), (0, 1)])
def test_one_of_the_ranks_with_the_same_sequences_speaks(tp: int, cp: int, states: list[LayerState]) -> None:
    state = run_layers.parallel_state
    with (
        patch.object(state, "get_tensor_model_parallel_rank", lambda: tp),
        patch.object(state, "get_context_parallel_rank", lambda: cp),
        patch.object(state, "get_data_parallel_rank", lambda: 5),
        patch.object(state, "get_pipeline_model_parallel_rank", lambda: 2),
    ):
        place = Layers(states).layers.data_parallel_place
    assert (place.dp_rank, place.stage, place.speaks) == (5, 2, tp == cp == 0)


@pytest.mark.parametrize("size", [1, 2])
def test_counts_are_summed_over_the_ranks_that_share_sequences(size: int, states: list[LayerState]) -> None:
    asked: list[Any] = []
    state = run_layers.parallel_state
    with (
        patch.object(state, "get_tensor_model_parallel_world_size", lambda: size),
        patch.object(state, "get_tensor_model_parallel_group", lambda: "the tensor-parallel ranks"),
        patch.object(run_layers.dist, "all_reduce", lambda counts, group: asked.append(group)),
    ):
        Layers(states).layers.sum_counts(torch.zeros(2))
    assert asked == (["the tensor-parallel ranks"] if size > 1 else [])


def test_experts_stay_without_an_optimizer_whose_state_can_move(states: list[LayerState]) -> None:
    run = Layers(states)
    assert run.layers.why_experts_stay() is not None
    run.layers._optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    assert "needs Megatron's DistributedOptimizer" in str(run.layers.why_experts_stay())
    run.layers._optimizer = optimizer_of([torch.nn.Parameter(torch.zeros(1))], own_shard=0)
    assert run.layers.why_experts_stay() is None


@pytest.fixture
def forgotten() -> Iterator[list[Any]]:
    """The dispatchers that were told to allocate anew."""
    told: list[Any] = []
    with patch.object(flex, "forget_room", told.append), patch.object(run_layers, "agreed", lambda step: step()):
        yield told


def planned(rows: Any, tokens: Any = ((6, 4), (8, 2)), misfit: Any = None) -> Any:
    return SimpleNamespace(
        misfit=misfit,
        most_rows=None if rows is None else np.array(rows),
        tokens=None if tokens is None else np.array(tokens),
    )


def static_rows(states: list[LayerState], factor: float | None = None) -> StaticRows:
    groups: Any = SimpleNamespace(ep_size=RANKS, expert_dp=SimpleNamespace(rank=lambda: 1))
    model: Any = SimpleNamespace(top_k=2)
    return StaticRows(states, groups, model, SimpleNamespace(moe_expert_rank_capacity_factor=factor))


def test_buffers_are_sized_for_the_fullest_rank_of_the_pass_and_freed_at_its_end(
    states: list[LayerState], forgotten: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    static = static_rows(states)
    rows = [[[9, 7], [8, 8]], [[10, 10], [11, 9]]]
    static.set_capacity(planned(rows))
    assert [state.capacity_rows for state in states] == [11, 11]
    assert [state.most_tokens for state in states] == [8, 8]
    assert static.limits_pass
    assert forgotten == [states[0].slot_dispatcher], "more tokens than it was allocated for"
    states[1].sent = {0: torch.tensor([3, 4]), 2: torch.tensor([1, 0])}
    assert static.sent(range(2)).tolist() == [[[0, 0], [3, 4]], [[0, 0], [0, 0]]]
    static.end_pass(np.array(rows))
    assert [state.capacity_rows for state in states] == [None, None]
    assert not static.limits_pass
    static.set_capacity(planned(rows, tokens=[[8, 1]]))
    assert len(forgotten) == 1
    assert all(state.sent == {} for state in states)
    too_many = np.array(rows)
    too_many[1, 1, 0] = 12
    with pytest.raises(InvalidInputError, match="12"):
        static.end_pass(too_many)
    static.end_pass(too_many)  # of a pass without buffers nothing is compared
    with caplog.at_level(logging.WARNING):
        for rows_of_pass in (None, None, rows, None):
            static.set_capacity(planned(rows_of_pass))
        static.set_capacity(planned(rows, misfit="another batch"))
    assert [state.capacity_rows for state in states] == [None, None]
    assert sum("static_rows cannot bound the buffers" in record.message for record in caplog.records) == 1, (
        "once in a run"
    )


def test_megatrons_own_factor_is_a_limit_and_the_one_that_is_named_is_enough(
    states: list[LayerState], forgotten: list[Any]
) -> None:
    """Of ranks with 4 tokens each, top-2, the mean is 8 rows; 10 are about 1.25 times as many."""
    one_pass = planned([[[10, 6], [8, 8]]], tokens=[[4, 4]])
    with pytest.raises(InvalidInputError, match=r"on EP group 1, but it is set to 1\.0") as refused:
        static_rows(states, 1.0).set_capacity(one_pass)
    words = str(refused.value).partition("moe_expert_rank_capacity_factor of at least ")[2]
    named = float(words.partition(" ")[0])
    assert named == pytest.approx(1.25, abs=2e-4)
    static_rows(states, named).set_capacity(one_pass)
    assert states[0].capacity_rows == 10
    static = static_rows(states, 1.0)
    static.set_capacity(planned([[[10, 6], [8, 8]]], tokens=[[4, 4]], misfit="another batch"))
    static.set_capacity(planned([[[10, 6], [8, 8]]], tokens=None))


def test_parts_of_a_pass_are_found_by_their_micro_batch_and_waited_for_once() -> None:
    waited: list[str] = []

    def later(name: str, count: int) -> Any:
        def wait() -> Any:
            waited.append(name)
            return tables(count)

        return SimpleNamespace(wait=wait)

    first = tables(1)
    parts = PassParts(
        num_micro_batches=4, device=torch.device("cpu"), ready=[first], later=[later("second", 2), later("third", 1)]
    )
    assert parts.of(0) == (first, 0)
    assert waited == []
    places = [parts.of(micro_batch) for micro_batch in (1, 2, 3, 0, 2)]
    assert [place for _, place in places] == [0, 1, 0, 0, 1]
    assert places[0][0] is places[1][0] is places[4][0]
    assert places[3][0] is first
    assert waited == ["second", "third"]
    with pytest.raises(IndexError, match="for only 4 micro-batches"):
        parts.of(4)


class Manager(SimpleNamespace):
    """A dispatcher's manager, as `flex` meets it."""


def test_a_dispatcher_over_slots_drops_nothing_and_rows_are_limited_while_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resets: list[int] = []
    monkeypatch.setattr(flex, "_fused_a2a", lambda: SimpleNamespace(reset_hybrid_ep_buffer=lambda: resets.append(1)))

    def dispatcher(backend: str, **words: Any) -> Any:
        config = SimpleNamespace(moe_flex_dispatcher_backend=backend)
        return SimpleNamespace(_comm_manager=Manager(**({"config": config, "capacity_factor": None} | words)))

    deepep, limited = dispatcher("deepep"), dispatcher("deepep", capacity_factor=1.5)
    for each in (deepep, limited):
        flex.over_slots(each)
    assert deepep._comm_manager.capacity_factor == float("inf")
    assert limited._comm_manager.capacity_factor == 1.5
    assert resets == []
    hybrid = dispatcher("hybridep", moe_expert_rank_capacity_factor=None, num_permuted_tokens=None)
    flex.over_slots(hybrid)
    assert resets == [1]
    flex.limit_rows(hybrid, 40)
    manager = hybrid._comm_manager
    assert (manager.moe_expert_rank_capacity_factor, manager.num_permuted_tokens) == (1.0, 40)
    flex.limit_rows(hybrid, None, factor=2.0)
    assert (manager.moe_expert_rank_capacity_factor, manager.num_permuted_tokens) == (2.0, 40)
    for without in (SimpleNamespace(), SimpleNamespace(_comm_manager=None), deepep):
        flex.limit_rows(without, 3)
        assert not hasattr(getattr(without, "_comm_manager", None), "num_permuted_tokens")
        flex.forget_room(without)
        flex.over_slots(without)
    assert resets == [1]


@pytest.mark.parametrize(("alignment", "tokens", "expected"), [(None, 5, 7), (16, 5, 16), (16, 40, 48), (7, 3, 7)])
def test_hybrid_eps_buffer_is_made_for_the_most_tokens_once(
    alignment: int | None, tokens: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def allocate(group: Any, width: int, rows: int, slots: int, *, fp8_dispatch: bool, num_blocks_permute: int) -> None:
        made.append((group, width, rows, slots, fp8_dispatch, num_blocks_permute))

    module = SimpleNamespace(_hybrid_ep_buffer=None, init_hybrid_ep_buffer=allocate)
    if alignment is not None:
        module.HYBRIDEP_TOKEN_ALIGNMENT = alignment
    monkeypatch.setattr(flex, "_fused_a2a", lambda: module)
    words = {"moe_hybridep_num_blocks_permute": 9, "moe_hybridep_num_sms": 3}  # of these the function takes one

    def dispatcher(backend: str) -> Any:
        config = SimpleNamespace(moe_flex_dispatcher_backend=backend, **words)
        return SimpleNamespace(_comm_manager=Manager(config=config, group="the group", num_local_experts=6))

    rows = torch.zeros(7, 4)
    for other in (SimpleNamespace(), dispatcher("deepep")):
        flex.make_room(other, rows, tokens)
    assert made == []
    flex.make_room(dispatcher("hybridep"), rows, tokens)
    assert made == [("the group", 4, expected, 6, False, 9)]
    module._hybrid_ep_buffer = "there"
    flex.make_room(dispatcher("hybridep"), rows, 1000)
    assert len(made) == 1, "nobody allocates it anew between a forward and its backward"


def test_plans_are_those_of_the_chunk_a_layer_is_in() -> None:
    clocks = [SimpleNamespace(), SimpleNamespace()]
    states = [state_of(layer, clock=clocks[layer // 2]) for layer in range(4)]
    for state in states:
        state.rows[1] = 3
    parts: Any = PassParts(num_micro_batches=1, device=torch.device("cpu"), ready=[tables(1)], later=[])
    activate.activate(parts, states, transport=None, residents=None)  # type: ignore[arg-type]
    for layer, state in enumerate(states):
        plans: Any = state.plans
        assert plans.state is state
        assert plans.position == layer % 2
        assert [of_layer.state for of_layer in plans.of_chunk] == states[2 * (layer // 2) : 2 * (layer // 2) + 2]
        assert state.rows == {}
        assert plans.plan(1) is None, "beyond the pass"
