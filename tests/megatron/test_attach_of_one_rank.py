"""What `attach` and a balancer do with the layers and buffers of one rank, in one process; layers are stand-ins."""

import dataclasses
import logging
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from moe_rl.balancing.config import BalancerConfig
from moe_rl.core.errors import InvalidInputError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says of what it does without TransformerEngine and Apex
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    from moe_rl.megatron import balancer as balancer_module
    from moe_rl.megatron.attach import CAPTURED, _check_layer, _digest_of_shared, _states, moe_layers
    from moe_rl.megatron.balancer import Balancer
    from moe_rl.megatron.layer import ElasticMoELayer

attach_module = sys.modules["moe_rl.megatron.attach"]
"""The package's `attach` is the function."""
MOE_LAYERS = (1, 2, 5)


def made(kind: type, **facts: Any) -> Any:
    """Return a module of a class of Megatron's that was not built by it."""
    module = object.__new__(kind)
    torch.nn.Module.__init__(module)
    for name, value in facts.items():
        setattr(module, name, value)
    return module


def layer_of(index: int, *, kind: type = MoELayer, **options: Any) -> Any:
    config = SimpleNamespace(
        **{
            "overlap_moe_expert_parallel_comm": False,
            "cuda_graph_impl": "none",
            "cuda_graph_scope": [],
            "moe_permute_fusion": False,
        }
        | options
    )
    return made(
        kind,
        layer_number=index + 1,
        config=config,
        experts=f"experts of {index}",
        token_dispatcher=object.__new__(MoEAlltoAllTokenDispatcher),
        router=SimpleNamespace(router_replay=None),
    )


@pytest.mark.parametrize("cross_node_slots", [0, 1])
def test_a_layer_waits_for_its_own_experts_and_the_first_for_all_where_pushes_begin_early(
    cross_node_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(attach_module.ParameterGather, "of", lambda chunk, experts: waits.append((chunk, experts)))
    slots: list[int] = []
    monkeypatch.setattr(attach_module, "dispatcher_over_slots", lambda layer, num_slots: slots.append(num_slots))
    layers = [layer_of(index) for index in MOE_LAYERS]
    chunks: list[Any] = ["first", "first", "second"]
    views: Any = [SimpleNamespace(num_local_experts=4) for _ in layers]
    config = BalancerConfig(replica_slots=2, cross_node_slots=cross_node_slots, ranks_per_node=2)
    states = _states(
        list(zip(chunks, layers, strict=True)),
        views,
        {id("first"): "a clock", id("second"): "its clock"},  # type: ignore[dict-item]
        model=SimpleNamespace(moe_layer_ids=MOE_LAYERS),  # type: ignore[arg-type]
        config=config,
    )
    assert [(state.layer, state.index, state.clock) for state in states] == [
        (0, 0, "a clock"),
        (1, 1, "a clock"),
        (2, 2, "its clock"),
    ]
    assert [state.experts for state in states] == views
    assert {state.original_class for state in states} == {MoELayer}
    assert slots == [4 + 2 + cross_node_slots] * 3
    own = [[layer.experts] for layer in layers]
    if cross_node_slots:
        own[0] = ["experts of 1", "experts of 2"]
    assert waits == list(zip(chunks, own, strict=True))


def test_options_that_nobody_knows_are_named_once_in_a_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @dataclasses.dataclass
    class Options:
        moe_new_trick: int = 3
        moe_other_trick: bool = False
        moe_third_trick: str = ""
        hidden_size: int = 0

    options = Options(moe_new_trick=4, moe_third_trick="on", hidden_size=8)
    for rank, expected in ((1, []), (0, ["moe_new_trick=4", "moe_third_trick='on'"])):
        monkeypatch.setattr(attach_module.dist, "get_rank", lambda rank=rank: rank)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            attach_module._warn_of_unknown_options(options)
        assert len(caplog.messages) == len(expected)
        assert all(words in message for words, message in zip(expected, caplog.messages, strict=True))
    caplog.clear()
    attach_module._warn_of_unknown_options(Options())
    assert caplog.messages == []


def test_layers_of_multi_token_prediction_stay_plain() -> None:
    layers = [layer_of(index) for index in MOE_LAYERS]
    chunk = torch.nn.Sequential(layers[0], torch.nn.Sequential(torch.nn.Identity(), layers[1]))
    chunk.append(made(MultiTokenPredictionLayer, mlp=layers[2]))
    assert list(moe_layers(chunk)) == layers[:2]


def test_shared_parameters_are_compared_and_an_experts_own_are_not() -> None:
    def digest(own: float, shared: float) -> str:
        experts = torch.nn.Module()
        experts.own, experts.shared = (torch.nn.Parameter(torch.tensor([value])) for value in (own, shared))
        view: Any = SimpleNamespace(num_local_experts=1, parameters_of=lambda slot: [experts.own])
        return _digest_of_shared([(None, SimpleNamespace(experts=experts))], [view])  # type: ignore[list-item]

    assert digest(1.0, 2.0) == digest(3.0, 2.0)
    assert digest(1.0, 2.0) != digest(1.0, 3.0)


def test_a_layer_that_cannot_follow_plans_is_refused() -> None:
    config = BalancerConfig(replica_slots=1, experimental=True)
    _check_layer(layer_of(1), config)
    _check_layer(layer_of(1, kind=ElasticMoELayer), config)  # built so, and not attached
    _check_layer(layer_of(1, cuda_graph_impl="transformer_engine", cuda_graph_scope=sorted(CAPTURED)), config)
    _check_layer(layer_of(1, cuda_graph_scope=["moe"]), config)  # without an implementation it captures nothing
    attached = layer_of(1, kind=ElasticMoELayer)
    attached._elastic = object()
    other = layer_of(1)
    other.token_dispatcher = SimpleNamespace()
    replayed = layer_of(1, cuda_graph_impl="transformer_engine", cuda_graph_scope=["moe_router"])
    _check_layer(replayed, config)
    replayed.router.router_replay = object()
    for layer, words in (
        (layer_of(1, kind=type("Own", (MoELayer,), {})), "must be Megatron's MoELayer, but it is a Own"),
        (attached, "already has a balancer"),
        (layer_of(1, cuda_graph_impl="transformer_engine", cuda_graph_scope=["moe", "attn"]), "captures moe, but"),
        (replayed, "use the routes of the captured one"),
        (other, "SimpleNamespace is not supported"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            _check_layer(layer, config)


def test_what_copies_cannot_do_is_fine_where_there_are_none() -> None:
    layer = layer_of(1, delay_wgrad_compute=True)
    _check_layer(layer, BalancerConfig(replica_slots=0))
    for words in ({"replica_slots": 1}, {"replica_slots": 0, "experts": "grouped"}):
        with pytest.raises(InvalidInputError, match="delay_wgrad_compute is not supported with expert replicas"):
            _check_layer(layer, BalancerConfig(**words))


class Held:
    """A balancer's buffers, groups and layers, which note what they are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, observe: bool = False) -> None:
        self.calls: list[str] = []
        note = self.calls.append

        def noting(name: str, *verbs: str) -> Any:
            return SimpleNamespace(**{verb: lambda verb=verb: note(f"{name} {verb}") for verb in verbs})

        self.groups: Any = SimpleNamespace(rebuilt=lambda: self.new_groups, destroy=lambda: note("groups destroy"))
        self.new_groups: Any = self.groups
        self.run_layers = SimpleNamespace(
            groups=self.groups,
            use=lambda groups: note(f"layers use {'the same' if groups is self.groups else 'new'}"),
            static_rows=SimpleNamespace(fixed_factor=1.5),
        )
        exchange = noting("exchange", "destroy")
        self.homes: Any = SimpleNamespace(groups=self.groups)
        self.entry = noting("entry", "remove")
        self.states = [
            SimpleNamespace(
                experts=SimpleNamespace(num_local_experts=2, release=lambda: note("experts release")),
                home_table=None,
                entry=entry,
                original_class=MoELayer,
                slot_dispatcher="old",
            )
            for entry in (self.entry, None)
        ]
        self.layers = [layer_of(index, kind=ElasticMoELayer) for index in (1, 2)]
        for layer, state in zip(self.layers, self.states, strict=True):
            layer._elastic = state
        self.balancer = object.__new__(Balancer)
        vars(self.balancer).update(
            transport=SimpleNamespace(buffers=noting("buffers", "allocate", "release")),
            residents=noting("residents", "allocate", "release"),
            run=SimpleNamespace(
                config=BalancerConfig(policy="static", observe=True) if observe else BalancerConfig(replica_slots=3),
                finish_planning=lambda: note("planning ends"),
                planner=SimpleNamespace(exchange=exchange),
                thread=noting("thread", "shutdown"),
                homes=self.homes,
            ),
            layers=self.layers,
            _run_layers=self.run_layers,
            _experts=noting("gradients", "release"),
            _states=self.states,
            _guards=noting("guards", "remove"),
            _clocks=[noting("clock", "remove")],
            _offloaded=False,
        )
        monkeypatch.setattr(Balancer, "_require_no_pass", lambda self, call: None)
        monkeypatch.setattr(balancer_module.PassCycle, "_require_ready", lambda self: None)
        monkeypatch.setattr(balancer_module, "plan_exchange", lambda groups: ("exchange of", groups))
        monkeypatch.setattr(
            balancer_module, "dispatcher_over_slots", lambda layer, num_slots: (layer.layer_number, num_slots)
        )
        self.limits: list[Any] = []
        monkeypatch.setattr(
            balancer_module.flex, "limit_rows", lambda dispatcher, rows, factor: self.limits.append((rows, factor))
        )


@pytest.mark.parametrize("observe", [False, True])
def test_memory_that_was_given_away_is_taken_again_before_the_next_pass(
    observe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch, observe=observe)
    held.balancer._require_ready()
    held.balancer.offload()
    assert held.calls == ["planning ends", "buffers release", "residents release", *["experts release"] * 2]
    with pytest.raises(InvalidInputError, match=r"call onload\(\) before"):
        held.balancer._require_ready()
    held.calls.clear()
    held.balancer.onload()
    held.balancer._require_ready()
    assert held.calls == ([] if observe else ["buffers allocate", "residents allocate"]), "who observes copies nothing"


@pytest.mark.parametrize("new", [False, True])
def test_new_groups_are_used_everywhere_and_the_same_ones_go_on(new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    planner = held.balancer.run.planner
    before = planner.exchange
    if new:
        held.new_groups = SimpleNamespace()
    held.balancer.rebuild_groups()
    if new:
        assert planner.exchange == ("exchange of", held.new_groups)
        assert held.calls == ["planning ends", "exchange destroy", "layers use new"]
    else:
        assert planner.exchange is before
        assert held.calls == ["planning ends", "layers use the same"]
    assert held.homes.groups is held.new_groups
    assert [state.slot_dispatcher for state in held.states] == [(2, 5), (3, 5)]
    held.balancer.run.homes, held.new_groups = None, held.run_layers.groups  # type: ignore[assignment]
    held.balancer.rebuild_groups()


def test_detached_layers_are_megatrons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    held.states[1].home_table = "elsewhere"
    with pytest.raises(InvalidInputError, match="experts are not on the ranks where Megatron puts them"):
        held.balancer.detach()
    assert held.calls == []
    held.states[1].home_table = None
    held.balancer.detach()
    assert [type(layer) for layer in held.layers] == [MoELayer] * 2
    assert not any(hasattr(layer, "_elastic") for layer in held.layers)
    assert held.limits == [(None, 1.5)] * 2, "Megatron's own factor"
    for part in ("buffers release", "gradients release", "guards remove", "thread shutdown", "exchange destroy"):
        assert held.calls.count(part) == 1
    assert held.calls[-3:] == ["groups destroy", "entry remove", "clock remove"]


@pytest.mark.parametrize("observe", [False, True])
def test_layers_begin_at_their_transformer_layer_but_where_a_graph_captures_it(
    observe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch, observe=observe)
    held.layers[:] = [layer_of(1), layer_of(2, cuda_graph_impl="transformer_engine")]
    for state in held.states:
        state.entry = None
    guarded: list[Any] = []
    monkeypatch.setattr(balancer_module, "hook_entry", lambda chunk, layer: (chunk, layer.layer_number))
    monkeypatch.setattr(
        balancer_module, "NameGuards", lambda layers, optimizer, state_is_home: guarded.append((layers, optimizer))
    )
    monkeypatch.setattr(balancer_module.flex, "limit_rows", lambda dispatcher, rows: held.limits.append(rows))
    monkeypatch.setattr(Balancer, "_forecast_of", lambda self, chunks: ("forecast of", chunks))
    held.balancer._optimizer = "the optimizer"
    held.balancer.install(["first", "second"])  # type: ignore[list-item]
    assert [type(layer) for layer in held.layers] == [ElasticMoELayer] * 2
    assert [layer._elastic for layer in held.layers] == held.states
    assert [state.entry for state in held.states] == [("first", 2), None]
    assert guarded == [(held.layers, "the optimizer")]
    assert held.balancer.run.memory == ("forecast of", ["first", "second"])
    assert held.limits == [None, None]
    assert held.calls == (["buffers release", "residents release"] if observe else []), "who observes copies nothing"
