"""What a run inside a framework does around its passes, in one process: its parts note what they are told."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("megatron.core")

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.homes import GradientsWaitError
from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks.run_settings import Settings, Until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says of what it does without TransformerEngine and Apex
    from moe_rl.frameworks import megatron_run
    from moe_rl.frameworks.megatron_run import MegatronRun, MicroBatchLimit, chosen, idle_levers

FRAMEWORK: Any = SimpleNamespace(name="loops", check=lambda: "1.0")
CHUNKS: Any = [torch.nn.Linear(1, 1)]


class Part:
    """A watch, a recorder or the like, which notes what it is told."""

    def __init__(self, calls: list[Any], name: str, metrics: dict[str, float] | None = None) -> None:
        self._calls, self._name, self._metrics = calls, name, metrics

    def __getattr__(self, method: str) -> Any:
        def told(*args: Any, **words: Any) -> Any:
            self._calls.append((f"{self._name} {method}", *args, *words.values()))
            return dict(self._metrics) if method in ("end_pass", "metrics") and self._metrics else None

        return told


class Recorder(Part):
    """A recorder of steps."""

    def step(self, number: int) -> Any:
        self._calls.append(("recorder step", number))
        return patch.dict({})  # any context manager


class Balancer(Part):
    """A balancer of a run that can move experts."""

    def __init__(self, calls: list[Any], **words: Any) -> None:
        super().__init__(calls, "balancer")
        self.config = BalancerConfig(**words)
        self.run = SimpleNamespace(homes_stay=None, why_homes_stay=None)
        self.model = SimpleNamespace(num_moe_layers=3, moe_layer_ids=(0, 2, 5))
        self.layers = [SimpleNamespace(layer_number=6), SimpleNamespace(layer_number=3)]
        self.megatron_placement = "where Megatron has them"
        self.fitting_tokens: int | None = None
        self.gradients_wait = False

    def reorder(self, placement: Any) -> None:
        self._calls.append(("balancer reorder", placement))
        if self.gradients_wait:
            raise GradientsWaitError("gradients wait")

    def end_pass(self) -> Any:
        self._calls.append(("balancer end_pass",))
        return SimpleNamespace(as_dict=lambda: {"moe_rl/imbalance": 1.5})


@pytest.fixture
def calls() -> Iterator[list[Any]]:
    found: list[Any] = []
    with (
        patch.object(megatron_run, "LoadWatch", lambda chunks: Part(found, "loads", {"of loads": 2.0})),
        patch.object(megatron_run, "RouterWatch", lambda chunks, **words: watch(found, words)),
        patch.object(megatron_run, "RoutingRecorder", lambda chunks, path: recorder_of(found, chunks, path)),
        patch.object(megatron_run.dist, "get_rank", lambda: 0),
        patch.object(megatron_run, "publish", lambda metrics, port: found.append(("publish", dict(metrics), port))),
    ):
        yield found


def recorder_of(calls: list[Any], chunks: Any, path: Path) -> Recorder:
    assert chunks is CHUNKS
    assert path == Path("there")
    return Recorder(calls, "recorder")


def watch(calls: list[Any], words: dict[str, Any]) -> Part:
    calls.append(("watch made", words))
    return Part(calls, "watch", {"of the watch": 3.0})


def settings(**words: Any) -> Settings:
    return Settings(**({"balancer": BalancerConfig()} | words))


def run_of(calls: list[Any], *, balanced: bool = True, **words: Any) -> tuple[MegatronRun, Any]:
    balancer = Balancer(calls) if balanced else None
    return MegatronRun(FRAMEWORK, CHUNKS, balancer, settings(**words)), balancer  # type: ignore[arg-type]


def names(calls: list[Any]) -> list[str]:
    return [call[0] for call in calls]


def test_a_pass_is_bracketed_by_all_parts_and_its_metrics_are_theirs(calls: list[Any]) -> None:
    run, _ = run_of(calls, record=Path("there"), check=True, prometheus=9400)
    assert not run.idle
    run.router_shift = Part(calls, "shift", {"of the shift": 4.0})  # type: ignore[assignment]
    run.router_shift.around = lambda call, keys, *, forward_only: [call(), keys, forward_only]  # type: ignore[method-assign, union-attr, assignment, return-value]
    for number in range(2):
        calls.clear()
        result = run.around(lambda: calls.append(("the call",)), "source", forward_only=False, keys=["keys"])  # type: ignore[arg-type, list-item]
        assert result == [None, ["keys"], False]
        metrics = {"moe_rl/imbalance": 1.5, "of the watch": 3.0, "of the shift": 4.0}
        assert run.last_metrics == metrics
        assert calls == [
            ("balancer begin_pass", "source", False),
            ("recorder step", number),
            ("the call",),
            ("balancer end_pass",),
            ("watch end_pass",),
            ("shift metrics",),
            ("publish", metrics, 9400),
        ]
    calls.clear()
    run.around(lambda: None, None, forward_only=True)
    assert names(calls) == ["balancer begin_pass", "balancer end_pass", "watch end_pass", "publish"]
    assert "of the shift" not in run.last_metrics
    run.around(lambda: None, None, forward_only=False)
    assert ("recorder step", 2) in calls, "a pass without backward is no step"


def test_a_run_that_is_measured_alone_reports_its_loads(calls: list[Any]) -> None:
    run, _ = run_of(calls, balanced=False, balancer=BalancerConfig(policy="static"))
    assert not run.idle
    run.around(lambda: calls.append(("the call",)), None, forward_only=False)
    assert calls == [("loads begin_pass", False), ("the call",), ("loads end_pass",)]
    assert run.last_metrics == {"of loads": 2.0}
    run.detach()
    assert calls[-1] == ("loads close",)
    assert run.idle


def test_a_run_of_which_nothing_was_asked_is_left_alone(calls: list[Any]) -> None:
    run, _ = run_of(calls, balanced=False)
    assert run.idle
    assert run.around(lambda: 7, None, forward_only=False) == 7
    run.give_up()
    run.drop_prepared()
    run.move(to_host=True)
    run.rebuild_groups()
    run.detach()
    assert calls == []
    assert (run.last_metrics, run.layer_ids, run.packs) == ({}, [], False)
    assert run.micro_batch_limit(100, 10) == 100


@pytest.mark.parametrize("what", ["record", "check", "telemetry", "shift"])
def test_a_run_with_any_part_is_not_idle(what: str, calls: list[Any]) -> None:
    words: dict[str, Any] = {"shift": {}, "record": {"record": Path("there")}}.get(what, {what: True})
    run, _ = run_of(calls, balanced=False, **words)
    if what == "shift":
        run.router_shift = Part(calls, "shift")  # type: ignore[assignment]
    assert not run.idle


def test_the_watch_knows_the_nodes_of_the_run_and_what_was_asked(calls: list[Any]) -> None:
    run_of(calls, telemetry=True, balancer=BalancerConfig(ranks_per_node=4))
    run_of(calls, balanced=False, check=True, balancer=BalancerConfig(ranks_per_node=4))
    own = BalancerConfig().slots.ranks_per_node
    assert [call[1] for call in calls] == [
        {"check": False, "telemetry": True, "ranks_per_node": own},
        {"check": True, "telemetry": False, "ranks_per_node": 4},
    ]


@pytest.mark.parametrize("raised", [ZeroDivisionError, KeyboardInterrupt])
def test_whatever_a_call_raises_the_rank_is_outside_of_a_pass(raised: type[BaseException], calls: list[Any]) -> None:
    run, _ = run_of(calls, telemetry=True)
    run._loads = Part(calls, "loads", {"of loads": 2.0})  # type: ignore[assignment]
    run.around(lambda: None, None, forward_only=False)
    assert run.last_metrics
    calls.clear()

    def call() -> None:
        raise raised

    with pytest.raises(raised):
        run.around(call, None, forward_only=False)
    assert names(calls)[-3:] == ["balancer give_up", "watch give_up", "loads give_up"]
    assert run.last_metrics == {}
    run.around(lambda: None, None, forward_only=False)
    run.give_up()  # by a framework, outside of a call
    assert run.last_metrics == {}


def test_memory_is_given_back_once_and_taken_again_once(calls: list[Any]) -> None:
    run, _ = run_of(calls)
    for to_host in (False, True, True, False, False, True):
        run.move(to_host=to_host)
    assert names(calls) == ["balancer offload", "balancer onload", "balancer offload"]
    run.rebuild_groups()
    run.drop_prepared()
    assert names(calls)[-2:] == ["balancer rebuild_groups", "balancer drop_prepared"]


def test_a_detached_run_has_no_parts(calls: list[Any]) -> None:
    run, _ = run_of(calls, record=Path("there"), check=True)
    calls.clear()
    run.detach()
    assert names(calls) == ["watch close", "recorder close", "balancer detach"]
    assert run.idle
    run.detach()
    assert len(calls) == 3


@pytest.mark.parametrize("homes_stay", [None, "guarded by nobody"])
def test_balancing_ends_after_so_many_updates(
    homes_stay: str | None, calls: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    run, balancer = run_of(calls, until=Until(updates=2))
    balancer.run.homes_stay = homes_stay
    for forward_only in (True, False, True, False):
        run.around(lambda: None, None, forward_only=forward_only)
    assert run.balancer is balancer
    calls.clear()
    balancer.gradients_wait = True
    run.around(lambda: None, None, forward_only=False)
    home = [("balancer reorder", "where Megatron has them")] if homes_stay is None else []
    if homes_stay is None:
        assert calls[:2] == [("balancer drop_prepared",), *home]
        assert run.balancer is balancer, "it tries again when the gradients are used"
        balancer.gradients_wait = False
        calls.clear()
        run.around(lambda: None, None, forward_only=False)
    assert calls == [("balancer drop_prepared",), *home, ("balancer detach",)]
    assert run.balancer is None
    assert run.last_metrics == {}
    said = [record.message for record in caplog.records if "balancing ended" in record.message]
    assert len(said) == 1
    assert f"balancing ended after {3 if homes_stay is None else 2} updates" in said[0]


def test_a_file_ends_balancing_when_the_first_rank_sees_it(tmp_path: Path, calls: list[Any]) -> None:
    run, balancer = run_of(calls, until=Until(file=tmp_path / "off"))
    seen = [False]
    with patch.object(megatron_run, "gathered", lambda own: [seen[0], not seen[0]]):
        run.around(lambda: None, None, forward_only=False)
        assert run.balancer is balancer
        seen[0] = True
        run.around(lambda: None, None, forward_only=False)
    assert run.balancer is None
    run, balancer = run_of(calls)
    assert not run._is_over()


def test_layers_are_found_by_their_number_and_packing_is_a_lever_of_the_policy(calls: list[Any]) -> None:
    run, balancer = run_of(calls)
    assert run.layer_ids == [2, 1], "layers 6 and 3 of Megatron are its MoE layers 2 and 1"
    assert run.packs
    balancer.config = BalancerConfig(pack=False)
    assert not run.packs
    balancer.config = BalancerConfig(policy="eplb")
    assert not run.packs


@pytest.mark.parametrize("limit", [60])
def test_micro_batches_are_cut_to_what_fits_and_never_below_a_sequence(
    limit: int, calls: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[tuple[int | None, int]] = []
    state = megatron_run.parallel_state
    with (
        patch.object(megatron_run, "gathered", lambda own: [own, *answers]),
        patch.object(state, "get_tensor_model_parallel_world_size", lambda: 2),
    ):
        found = MicroBatchLimit("loops")
        assert found.next(limit, 10, fitting_tokens=None) == limit, "nobody can tell"
        assert found.next(limit, 10, fitting_tokens=30) == limit
        assert not caplog.records
        assert found.next(limit, 10, fitting_tokens=25) == 50, "what a tensor-parallel group shares"
        assert found.tokens == 50
        answers = [(20, 12), (None, 44)]
        assert found.next(limit, 10, fitting_tokens=25) == 44, "the longest sequence of any rank"
        answers = [(20, 12), (None, 9)]
        assert found.next(limit, 10, fitting_tokens=25) == 40, "the rank with the least room"
        assert len(caplog.records) == 1, "said when it first falls"
        answers = []
        assert found.next(limit, 70, fitting_tokens=25) == limit
        found.next(limit, 10, fitting_tokens=25)
        assert len(caplog.records) == 2, "and when it falls again"
        run, balancer = run_of(calls)
        balancer.fitting_tokens = 25
        assert run.micro_batch_limit(limit, 10) == 50
        run.around(lambda: None, None, forward_only=False)
        assert run.last_metrics["moe_rl/micro_batch_limit_tokens"] == 50.0
        run.around(lambda: None, None, forward_only=True)
        assert "moe_rl/micro_batch_limit_tokens" not in run.last_metrics
        balancer.config = BalancerConfig(fit_micro_batches=False)
        assert run.micro_batch_limit(limit, 10) == limit


class Layer(torch.nn.Module):
    """Stands in for an MoE layer of two local experts with 100 bf16 elements each."""

    num_local_experts = 2

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Linear(10, 20, bias=False, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("room_slots", "others", "residents"), [(5.5, 7, 2), (1.5, 7, 1), (1.0, 7, 1), (0.9, 7, 0), (5.5, 1, 1)]
)
def test_slots_that_nobody_set_are_those_that_every_rank_has_room_for(
    room_slots: float, others: int, residents: int
) -> None:
    """Of three layers a slot takes 3 x 100 x (2 + 4) bytes, and all slots at most a twentieth of the memory."""
    models = [torch.nn.ModuleList([Layer(), Layer()]), torch.nn.ModuleList([Layer()])]
    state, slot = megatron_run.parallel_state, 3 * 100 * 6
    with (
        patch.object(megatron_run, "MoELayer", Layer),
        patch.object(megatron_run, "memory_bytes", lambda: int(room_slots * slot / 0.05) + 20),
        patch.object(megatron_run, "gathered", lambda own: [own, others]),
        patch.object(state, "get_expert_model_parallel_world_size", lambda: 8),
    ):
        config = BalancerConfig(ranks_per_node=4)
        found = chosen(config, set(), models)
        assert (found.slots.cross_node_slots, found.slots.resident_slots, found.homes.reorders) == (1, residents, True)
        stated = {"cross_node_slots", "resident_slots", "reorders"}
        assert chosen(config, stated, models) == config
        inside = chosen(BalancerConfig(ranks_per_node=8), set(), models)
        assert (inside.slots.cross_node_slots, inside.slots.resident_slots) == (0, 0)
        for name in ("cross_node_slots", "resident_slots"):
            with pytest.raises(InvalidInputError, match=f"{name} has no effect, because all ranks"):
                chosen(BalancerConfig(ranks_per_node=8, **{name: 1}), stated, models)
        with pytest.raises(InvalidInputError, match="pack=True has no effect"):
            chosen(BalancerConfig(policy="eplb"), {"pack"}, models)
        chosen(BalancerConfig(policy="eplb", pack=False), {"pack", *stated}, models)


def test_a_lever_that_is_on_and_cannot_act_says_so() -> None:
    config = BalancerConfig(reorders=True)
    with (
        patch.object(megatron_run, "native_core", lambda: None),
        patch.object(megatron_run, "why_not_native", lambda: "X"),
    ):
        (said,) = idle_levers(config, set(), None)
        assert said.startswith("pack=True has no effect here, because X")
        assert not list(idle_levers(BalancerConfig(pack=False), set(), None))
    with patch.object(megatron_run, "native_core", lambda: "there"):
        assert not list(idle_levers(config, {"reorders"}, None))
        assert not list(idle_levers(config, set(), "weights are read"))
        (said,) = idle_levers(config, {"reorders"}, "weights are read")
        assert said.startswith("reorders=True has no effect here, because weights are read")
        assert not list(idle_levers(BalancerConfig(), {"reorders"}, "weights are read"))


def test_what_holds_on_all_ranks_is_said_on_the_first_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for rank in (1, 0, 3):
        with patch.object(torch.distributed, "get_rank", lambda rank=rank: rank):
            megatron_run.say_once(f"a lever is idle, says rank {rank}")
            megatron_run.announce("loops", "1.0", num_layers=rank, policy="moe-rl")
    assert [record.message for record in caplog.records] == [
        "moe_rl: a lever is idle, says rank 0",
        "moe_rl: loops 1.0, 0 MoE layers balanced by policy 'moe-rl'.",
    ]


def test_the_memory_of_a_rank_is_its_devices_or_the_hosts() -> None:
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "mem_get_info", lambda: (3 << 30, 80 << 30)),
    ):
        assert megatron_run.memory_bytes() == 80 << 30, "all of it, whatever is free now"
    of_host = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}
    with (
        patch.object(torch.cuda, "is_available", lambda: False),
        patch.object(megatron_run.os, "sysconf", of_host.__getitem__),
    ):
        assert megatron_run.memory_bytes() == 4_096_000


class Attached:
    """What `MegatronRun.attach` meets: a model, groups, and an `attach` that is noted."""

    def __init__(self, calls: list[Any], *, experts: int = 8, ep_size: int = 4) -> None:
        self.calls, self.experts, self.ep_size = calls, experts, ep_size
        self.configs: list[BalancerConfig] = []

    def attach(self, models: Any, optimizer: Any, config: BalancerConfig) -> Any:
        self.configs.append(config)
        assert (models, optimizer) == (CHUNKS, "optimizer")
        return Balancer(self.calls)

    def run(self, **words: Any) -> MegatronRun:
        state = megatron_run.parallel_state
        given = words.pop("settings", settings())
        with (
            patch.object(megatron_run, "attach", self.attach),
            patch.object(megatron_run, "require_distributed", lambda name: None),
            patch.object(megatron_run, "agreed", lambda step: step()),
            patch.object(
                megatron_run, "require_in_common", lambda *args, **words: self.calls.append(("common", *args))
            ),
            patch.object(megatron_run, "ranks_per_host", lambda group: {"the EP group": 2}[group]),
            patch.object(megatron_run, "chosen", lambda config, stated, models: config),
            patch.object(
                megatron_run, "announce", lambda *args, **words: self.calls.append(("announced", *args, words))
            ),
            patch.object(megatron_run, "get_model_config", lambda model: SimpleNamespace(num_moe_experts=self.experts)),
            patch.object(state, "get_expert_model_parallel_world_size", lambda: self.ep_size),
            patch.object(state, "get_expert_model_parallel_group", lambda: "the EP group"),
            patch.object(state, "get_expert_data_parallel_group", lambda: "another"),
        ):
            return MegatronRun.attach(FRAMEWORK, CHUNKS[0], "optimizer", given, **words)


def test_a_run_is_attached_with_its_hosts_and_moves_experts_where_it_is_guarded(calls: list[Any]) -> None:
    where = Attached(calls)
    guarded = where.run(guarded=True)
    assert guarded.balancer is not None
    assert guarded.balancer.run.homes_stay is None
    assert where.configs[0].slots.ranks_per_node == 2
    stays = where.run()
    assert stays.balancer is not None
    assert "loops reads and writes weights" in str(stays.balancer.run.homes_stay)
    policy = BalancerConfig().policy
    assert ("announced", "loops", "1.0", {"num_layers": 3, "policy": policy}) in calls
    facts = next(call[2] for call in calls if call[0] == "common")
    assert facts["the version of loops"] == "1.0"
    assert facts["strict"] is False
    given = settings(balancer=BalancerConfig(ranks_per_node=4), given=frozenset({"ranks_per_node"}))
    where.run(settings=given)
    assert where.configs[-1].slots.ranks_per_node == 4


@pytest.mark.parametrize(
    ("words", "refusal", "sentence"),
    [
        ({"experts": 0}, "", "no MoE layer"),
        ({"ep_size": 1}, "", "every rank holds all experts"),
        ({}, "the framework does not say", "the framework does not say"),
    ],
)
def test_a_run_that_cannot_be_balanced_goes_on_or_raises_where_that_was_asked(
    words: dict[str, int], refusal: str, sentence: str, calls: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run = Attached(calls, **words).run(refusal=refusal)
    assert run.balancer is None
    assert sentence in caplog.text
    with pytest.raises(InvalidInputError, match=sentence):
        Attached(calls, **words).run(refusal=refusal, settings=settings(strict=True))


@pytest.mark.parametrize("words", [{"balances": False}, {"balancer": BalancerConfig(policy="static")}])
def test_a_run_that_only_measures_or_only_weighs_is_not_attached(words: dict[str, Any], calls: list[Any]) -> None:
    where = Attached(calls)
    assert where.run(settings=settings(**words)).balancer is None
    assert where.configs == []
