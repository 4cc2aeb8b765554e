"""What an MoE layer does before and after Megatron's own steps, in one process.

Megatron's `MoELayer` is replaced step by step: a step notes what it was given and returns what the test says.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from moe_rl.core.errors import InvalidInputError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says of what it does without TransformerEngine and Apex
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import ModuleSpec

    from moe_rl.balancing.clock import OUTSIDE
    from moe_rl.megatron import layer as layer_module
    from moe_rl.megatron.layer import (
        ElasticMoELayer,
        LayerState,
        _expert_order,
        dispatcher_over_slots,
        elastic_spec,
        hook_entry,
    )

EXPERTS = 4


class Layer:
    """An `ElasticMoELayer` whose neighbors note what they are asked, in `calls`."""

    def __init__(self, **facts: Any) -> None:
        self.calls: list[Any] = []
        note = self.calls.append
        self.clock = SimpleNamespace(
            recomputing=False, current_pass="this pass", micro_batch=lambda layer: note(("visit", layer)) or self.now
        )
        self.now = 1
        self.replicated = SimpleNamespace(
            enter=lambda hidden: note("enter") or hidden + 1,
            start_push=lambda: note("push"),
            compute=lambda rows, counts, probs: note(("copies", len(rows), counts, len(probs))) or rows * 2,
        )
        self.plan: Any = SimpleNamespace(table=None, replicated=self.replicated)
        self.plans = SimpleNamespace(
            plan=lambda micro_batch: note(("plan", micro_batch)) or self.plan,
            begin=lambda micro_batch, recomputing: note(("begin", micro_batch, recomputing)) or self.plan,
            end=lambda micro_batch, output: note(("end", micro_batch)) or output + 10,
        )
        self.experts = SimpleNamespace(
            num_local_experts=2,
            begin=lambda current_pass: note(("experts", current_pass)),
            forward_homes=lambda rows, counts, probs: note(("homes", len(rows), counts.tolist(), len(probs))) or rows,
            forward=lambda rows, counts, probs, weights, gradients: (
                note(("slots", rows.tolist(), counts.tolist(), probs.tolist(), weights, gradients)) or rows
            ),
        )
        self.state = LayerState(
            **{
                "layer": 5,
                "experts": self.experts,
                "clock": self.clock,
                "original_class": MoELayer,
                "home_dispatcher": "over homes",
                "slot_dispatcher": "over slots",
                "plans": self.plans,
            }
            | facts
        )
        self.module = object.__new__(ElasticMoELayer)
        torch.nn.Module.__init__(self.module)
        self.module.layer_number = 6
        self.module.moe_layer_recompute = False
        self.module._elastic = self.state


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `flex` is asked to limit, and to make room for."""
    asked: list[Any] = []
    monkeypatch.setattr(layer_module.flex, "limit_rows", lambda dispatcher, rows: asked.append(rows))
    monkeypatch.setattr(layer_module.flex, "make_room", lambda dispatcher, rows, tokens: asked.append(("room", tokens)))
    return asked


def megatrons(monkeypatch: pytest.MonkeyPatch, step: str, result: Any) -> list[Any]:
    """Replace a step of Megatron's layer; return what it is given from now on."""
    given: list[Any] = []

    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        given.append((*args, *kwargs.values()))
        return result

    monkeypatch.setattr(MoELayer, step, replaced)
    return given


VISIT = [("visit", 5), ("experts", "this pass"), ("begin", 1, False)]


def test_a_run_begins_once_at_the_transformer_layers_input_or_else_at_the_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, hidden = Layer(), torch.zeros(2)
    routed = megatrons(monkeypatch, "route", "routes")
    assert layer.module.enter(hidden).tolist() == [1, 1]
    assert layer.calls == [*VISIT, "enter"]
    assert layer.module.route(hidden, "a mask") == "routes"
    assert routed == [(hidden, "a mask")]
    assert layer.calls == [*VISIT, "enter"], "it has begun"
    layer.calls.clear()
    layer.module.route(hidden)
    assert layer.calls == VISIT, "of the next run nobody has told it"


def test_the_layers_input_stays_as_it_is_where_no_gradient_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.zeros(2)
    alone = Layer(plans=None)
    assert alone.module.enter(hidden) is hidden
    recomputed = Layer()
    recomputed.module.moe_layer_recompute = True
    assert recomputed.module.enter(hidden) is hidden
    assert "enter" not in recomputed.calls
    plain = Layer()
    plain.module._elastic = None
    routed = megatrons(monkeypatch, "route", "routes")
    assert plain.module.enter(hidden) is hidden
    assert plain.module.route(hidden) == "routes"
    assert routed == [(hidden,)]
    assert plain.calls == []


def test_a_run_beside_the_pass_is_megatrons_own() -> None:
    """Also right after one that had copies: an evaluation, for instance, between two micro-batches."""
    layer = Layer()
    layer.plan.table = "over copies"
    layer.module.enter(torch.zeros(2))
    assert layer.state.current is layer.plan
    assert layer.module.token_dispatcher == "over slots"
    assert layer.state.replica_table == "over copies"
    layer.calls.clear()
    layer.now = OUTSIDE
    layer.module.enter(torch.zeros(2))
    assert layer.calls == [("visit", 5), ("experts", "this pass")]
    assert layer.state.current is None
    assert layer.state.replica_table is None
    assert layer.module.token_dispatcher == "over homes"
    layer.now, layer.plan.table = 1, None
    layer.module.enter(torch.zeros(2))
    assert layer.module.token_dispatcher == "over homes", "of this EP group no copy is used"


def test_weights_are_waited_for_and_an_overlapped_run_pushes_at_its_dispatch(
    monkeypatch: pytest.MonkeyPatch, limits: list[Any]
) -> None:
    layer = Layer(overlapped=True, most_tokens=7)
    layer.state.gather = SimpleNamespace(wait=lambda: layer.calls.append("gathered"))  # type: ignore[assignment]
    layer.module.enter(torch.zeros(2))
    assert layer.calls == [("visit", 5), "gathered", ("experts", "this pass"), ("plan", 1), "enter"]
    layer.calls.clear()
    dispatched = megatrons(monkeypatch, "dispatch", ("hidden", "probs"))
    hidden, probs = torch.zeros(2), torch.ones(2)
    assert layer.module.dispatch(hidden, probs) == ("hidden", "probs")
    assert layer.calls == ["push"]
    assert len(dispatched) == 1
    assert (dispatched[0][0] is hidden, dispatched[0][1] is probs) == (True, True)
    assert limits == [("room", 7), None]
    for overlapped, current in ((False, layer.plan), (True, None)):
        layer.calls.clear()
        layer.state.overlapped, layer.state.current = overlapped, current
        layer.module.dispatch(hidden, probs)
        assert layer.calls == []


def test_routes_are_counted_and_turned_into_slots(monkeypatch: pytest.MonkeyPatch, limits: list[Any]) -> None:
    counted: list[Any] = []
    layer = Layer(
        counter=SimpleNamespace(count_map=lambda micro_batch, index, chosen: counted.append((micro_batch, index))),
        index=2,
        micro_batch=1,
    )
    state, prepared = layer.state, megatrons(monkeypatch, "preprocess", "prepared")
    layer.module.token_dispatcher = SimpleNamespace(ep_size=4)
    chosen = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)
    probs = chosen / 2
    swapped = [2, 3, 0, 1]  # expert -> slot, its own inverse
    table = SimpleNamespace(to_slots=lambda p, m: (p[:, swapped], m[:, swapped]), expert=torch.tensor(swapped))

    def given() -> tuple[list[list[float]], list[list[bool]]]:
        hidden, its_probs, its_map = prepared[-1]
        assert hidden == "hidden"
        return its_probs.tolist(), its_map.tolist()

    def run() -> None:
        assert layer.module.preprocess("hidden", probs, chosen) == "prepared"  # type: ignore[arg-type]

    run()
    assert given() == (probs.tolist(), chosen.tolist()), "homes are where Megatron put them"
    assert counted == [(1, 2)]
    assert state.combined_experts is None
    assert limits == []
    state.home_table = table  # type: ignore[assignment]
    run()
    assert given() == (probs[:, swapped].tolist(), chosen[:, swapped].tolist())
    assert state.combined_experts is None, "rows are summed slot by slot"
    state.placement_bitwise, state.capacity_rows = True, 9
    run()
    assert state.combined_experts is not None
    assert [part.tolist() for part in state.combined_experts] == [swapped, [1, 1, 2, 2]]
    assert limits == [9]
    assert {m: sent.tolist() for m, sent in state.sent.items()} == {1: [1, 1, 2, 2]}
    state.recomputing, state.home_table = True, None
    state.sent.clear()
    run()
    assert state.combined_experts is None, "of the run before"
    assert state.sent == {}, "counted when it ran first"
    assert len(counted) == 3
    assert limits == [9, 9]
    state.recomputing, state.micro_batch = False, OUTSIDE
    run()
    assert limits == [9, 9], "beside the pass as many as come"
    assert len(counted) == 3
    state.current, state.home_table = SimpleNamespace(table=table), "unused"  # type: ignore[assignment]
    run()
    assert given()[1] == chosen[:, swapped].tolist(), "the copies' table goes before the homes'"
    layer.module._elastic = None
    run()
    assert given()[1] == chosen.tolist()


def arrived(monkeypatch: pytest.MonkeyPatch, layer: Layer) -> torch.Tensor:
    """Let three rows arrive, one at the first expert and two at the second."""
    rows = torch.tensor([[1.0], [2.0], [3.0]])

    def postprocess(hidden: str, probs: str) -> tuple[torch.Tensor, ...]:
        assert (hidden, probs) == ("hidden", "probs")
        return rows, torch.tensor([1, 2]), torch.ones(3)

    layer.module.token_dispatcher = SimpleNamespace(
        dispatch_postprocess=postprocess,
        combine_preprocess=lambda output: output,
    )
    return rows


def test_rows_are_counted_once_and_go_to_homes_or_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(micro_batch=2)
    rows = arrived(monkeypatch, layer)

    def run() -> list[list[float]]:
        layer.calls.clear()
        output, none = layer.module.routed_experts_compute("hidden", "probs")  # type: ignore[arg-type]
        assert none is None
        return output.tolist()  # type: ignore[no-any-return]

    assert run() == rows.tolist()
    assert layer.calls == [("homes", 3, [1, 2], 3)]
    assert layer.state.rows == {2: 3}
    layer.state.rows.clear()
    layer.state.current, layer.state.recomputing = layer.plan, True
    assert run() == (2 * rows).tolist()
    assert layer.calls == [("copies", 3, [1, 2], 3)]
    assert layer.state.rows == {}
    layer.module._elastic = None
    given = megatrons(monkeypatch, "routed_experts_compute", "Megatron's")
    assert layer.module.routed_experts_compute("hidden", "probs") == "Megatron's"  # type: ignore[arg-type]
    assert given == [("hidden", "probs")]


def test_a_buffer_of_one_size_is_filled_up_and_given_back_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(micro_batch=0, capacity_rows=5)
    rows = arrived(monkeypatch, layer)
    for capacity in (5, 3, 2):  # of two rows too few end_pass() says so
        layer.calls.clear()
        layer.state.capacity_rows = capacity
        output, _ = layer.module.routed_experts_compute("hidden", "probs")  # type: ignore[arg-type]
        assert output.tolist() == rows.tolist()
        added = max(0, capacity - 3)
        filled, probs = [*rows.tolist(), *[[0.0]] * added], [1.0] * 3 + [0.0] * added
        assert layer.calls == [("slots", filled, [1, 2], probs, [None] * 2, [None] * 2)]
    assert layer.state.rows == {}, "what was sent says it"


def test_an_output_goes_on_in_the_order_of_experts_and_through_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(micro_batch=1)
    combined = megatrons(monkeypatch, "postprocess", torch.zeros(1))
    output = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    dispatcher = SimpleNamespace(reversed_local_input_permutation_mapping=torch.tensor([1, 0, 1, 2]))
    layer.module.token_dispatcher = dispatcher
    # Slot 0 has expert 3 and one row of token 1; slot 1 has expert 0 and rows of the tokens 0, 1 and 2.
    layer.state.combined_experts = torch.tensor([3, 0]), torch.tensor([1, 3])
    assert layer.module.postprocess(output, "shared").tolist() == [10]  # type: ignore[arg-type]
    assert layer.calls == [("end", 1)]
    assert combined[-1][0].tolist() == [[1], [2], [3], [0]]
    assert combined[-1][1] == "shared"
    assert dispatcher.reversed_local_input_permutation_mapping.tolist() == [0, 1, 2, 1]
    layer.state.combined_experts = None
    for words in ({"micro_batch": OUTSIDE}, {"plans": None}, {"micro_batch": 1}):
        for name, value in words.items():
            setattr(layer.state, name, value)
        layer.calls.clear()
        assert layer.module.postprocess(output, None).tolist() == [0]
        assert layer.calls == []
        assert combined[-1][0] is output


def test_rows_stand_by_expert_and_then_by_token() -> None:
    draw = torch.Generator().manual_seed(3)
    for _ in range(20):
        expert = torch.randperm(6, generator=draw)
        chosen = torch.rand(5, 6, generator=draw) < 0.4  # token, slot
        slots, tokens = chosen.T.nonzero(as_tuple=True)
        order = _expert_order(expert, chosen.sum(dim=0), tokens)
        rows = list(zip(expert[slots].tolist(), tokens.tolist(), strict=True))
        assert [rows[index] for index in order.tolist()] == sorted(rows)


@pytest.mark.parametrize(("recomputing", "phase"), [(False, "forward"), (True, "recompute")])
def test_ranges_say_which_run_they_are_of(recomputing: bool, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    @contextmanager
    def noted(category: str, *, layer: int, micro_batch: int, phase: str) -> Iterator[None]:
        opened.append((category, layer, micro_batch, phase))
        yield

    marked: list[Any] = []
    monkeypatch.setattr(layer_module.ranges, "range", noted)
    layer = Layer()
    layer.clock.recomputing = recomputing
    layer.state.backward_ranges = SimpleNamespace(  # type: ignore[assignment]
        mark=lambda category, inputs, results, *, layer, micro_batch: marked.append((category, layer, micro_batch))
    )
    megatrons(monkeypatch, "route", "routes")
    megatrons(monkeypatch, "combine", torch.zeros(1))
    layer.module.route(torch.zeros(1))
    layer.module.combine(torch.zeros(1))
    assert opened == [(part, 5, 1, phase) for part in ("replicate", "router", "combine")]
    assert marked == [("combine", 5, 1)]
    assert layer.calls[-1] == ("begin", 1, recomputing)
    layer.module._elastic = None
    layer.module.combine(torch.zeros(1))
    assert len(marked) == 1
    assert len(opened) == 3


class TransformerLayer(torch.nn.Module):
    """Has an MoE layer as `mlp`, and returns what it was given."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def test_a_transformer_layer_hands_its_input_over_however_it_is_called() -> None:
    layer, other, hidden = Layer(), Layer(), torch.zeros(1)
    around = TransformerLayer(layer.module)
    chunk = torch.nn.Sequential(TransformerLayer(other.module), around)
    handle = hook_entry(chunk, layer.module)
    assert handle is not None
    assert around(hidden, "a mask", context="some") == ((torch.ones(1), "a mask"), {"context": "some"})
    assert around(hidden_states=hidden, mask="a mask") == ((), {"hidden_states": torch.ones(1), "mask": "a mask"})
    assert other.calls == []
    handle.remove()
    assert around(hidden) == ((hidden,), {})
    assert hook_entry(torch.nn.Sequential(layer.module), layer.module) is None


def test_a_layer_spec_builds_elastic_layers_and_stays_what_it_was() -> None:
    moe = ModuleSpec(module=MoELayer, params={"width": 3}, submodules="experts")
    spec: Any = ModuleSpec(module=object, submodules=SimpleNamespace(mlp=moe, attention="some"))
    elastic = elastic_spec(spec)
    built: Any = elastic.submodules
    assert (built.mlp.module, built.mlp.params, built.mlp.submodules) == (ElasticMoELayer, {"width": 3}, "experts")
    assert built.attention == "some"
    assert spec.submodules.mlp is moe
    with pytest.raises(ValueError, match=r"must have MoELayer at submodules\.mlp"):
        elastic_spec(ModuleSpec(module=object, submodules=SimpleNamespace(mlp=ModuleSpec(module=object))))


def test_names_of_experts_are_neither_saved_nor_loaded_while_they_are_elsewhere() -> None:
    layer = Layer()
    for elsewhere in (False, True, False):
        layer.state.home_table = object() if elsewhere else None  # type: ignore[assignment]
        for what, call in (
            ("saved", layer.module.state_dict),
            ("loaded", lambda: layer.module.load_state_dict({})),
            ("reset", lambda: layer.module.require_home("reset")),
        ):
            if not elsewhere:
                call()
                continue
            with pytest.raises(InvalidInputError, match=f"nothing can be {what} now, because the experts of layer 6"):
                call()
    layer.state.home_table, layer.module._elastic = object(), None  # type: ignore[assignment]
    layer.module.require_home("saved")


class Dispatcher:
    """A token dispatcher on EP rank 1 of 2, of which only the facts are known that another one is made from."""

    def __init__(self, num_local: int, indices: list[int], *, config: Any, pg_collection: Any) -> None:
        self.num_local, self.indices, self.config = num_local, indices, config
        self.ep_size, self.ep_group = 2, pg_collection.ep
        self.tp_group, self.tp_ep_group = pg_collection.expt_tp, pg_collection.tp_ep
        self.shared_experts = None

    def set_shared_experts(self, shared_experts: Any) -> None:
        self.shared_experts = shared_experts


@pytest.mark.parametrize("overlap", [False, True])
def test_a_dispatcher_over_slots_is_megatrons_own_over_more_columns(overlap: bool) -> None:
    config = SimpleNamespace(num_moe_experts=EXPERTS)
    groups = SimpleNamespace(ep=SimpleNamespace(rank=lambda: 1), expt_tp="TP", tp_ep="TP and EP")
    own = Dispatcher(2, [2, 3], config=config, pg_collection=groups)
    layer: Any = SimpleNamespace(
        token_dispatcher=own, config=config, shared_expert_overlap=overlap, shared_experts="shared"
    )
    made: Any = dispatcher_over_slots(layer, num_slots=3)
    assert type(made) is Dispatcher
    assert (made.num_local, made.indices, made.config.num_moe_experts) == (3, [3, 4, 5], 6)
    assert config.num_moe_experts == EXPERTS, "Megatron's own stays as it is"
    assert (made.ep_group, made.tp_group, made.tp_ep_group) == (groups.ep, "TP", "TP and EP")
    assert made.shared_experts == ("shared" if overlap else None)
