"""The watch on routers and loads, in one process: routers whose scores are their inputs, in the place of Megatron's."""

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
from moe_rl.core.metrics import imbalance
from moe_rl.routes.online import load_metrics, nodes_per_token

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says of what it does without TransformerEngine and Apex
    from moe_rl.megatron import load_watch, router_watch
    from moe_rl.megatron.load_watch import LoadWatch
    from moe_rl.megatron.router_watch import ROWS, RouterWatch

LAYERS, EXPERTS, EP_SIZE, EP_RANK = 2, 8, 4, 1
SUMS = "the ranks that share the layers"


class Router(torch.nn.Module):
    """Chooses by its input, [n, E] scores, or as it is told."""

    def __init__(self, **words: Any) -> None:
        super().__init__()
        self.score_function, self.topk, self.expert_bias = "softmax", 2, None
        self.told: torch.Tensor | None = None
        self.config = SimpleNamespace(
            num_moe_experts=EXPERTS,
            moe_router_num_groups=None,
            moe_router_group_topk=None,
            moe_router_pre_softmax=False,
        )
        for name, value in words.items():
            setattr(self if hasattr(self, name) else self.config, name, value)

    def gating(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * 1.0

    def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = scores.reshape(-1, EXPERTS)
        ids = own_choice(self, rows) if self.told is None else self.told
        routing_map = torch.zeros(len(rows), EXPERTS, dtype=torch.bool).scatter(1, ids, value=True)
        return rows * routing_map, routing_map


def biased(router: Router, rows: torch.Tensor) -> torch.Tensor:
    scores = rows.sigmoid() if router.score_function == "sigmoid" else rows
    return scores if router.expert_bias is None else scores + router.expert_bias


def own_choice(router: Router, rows: torch.Tensor) -> torch.Tensor:
    """Return [n, K] what a router of these settings chooses, row by row from its definition."""
    chosen = []
    for scores in biased(router, rows).tolist():
        allowed = range(EXPERTS)
        if groups := router.config.moe_router_num_groups:
            size = EXPERTS // groups
            # A group is worth the sum of its best K / groups-that-may-be-chosen scores.
            most = router.topk // router.config.moe_router_group_topk
            if router.config.moe_router_pre_softmax:
                scores = torch.tensor(scores).softmax(0).tolist()
            worth = [sum(sorted(scores[g * size : (g + 1) * size])[-most:]) for g in range(groups)]
            best = sorted(range(groups), key=lambda g: -worth[g])[: router.config.moe_router_group_topk]
            allowed = [expert for expert in allowed if expert // size in best]
        chosen.append(sorted(allowed, key=lambda expert: -scores[expert])[: router.topk])
    return torch.tensor(chosen)


class Chunk(torch.nn.Module):
    def __init__(self, routers: list[Router]) -> None:
        super().__init__()
        self.routers = torch.nn.ModuleList(routers)

    def forward(self, scores: list[torch.Tensor]) -> None:
        for router, of_layer in zip(self.routers, scores, strict=True):
            router(of_layer)


def scores_of(seed: int, rows: int = 64) -> list[torch.Tensor]:
    """Return per layer [rows, E] scores, all experts of a row apart and low ones liked best."""
    draw = np.random.default_rng(seed)
    liking = np.linspace(1.5, 0, EXPERTS)
    return [torch.tensor(draw.gumbel(size=(rows, EXPERTS)) + liking, dtype=torch.float32) for _ in range(LAYERS)]


@pytest.fixture(autouse=True)
def summed_over() -> Iterator[list[Any]]:
    """One rank of EP_SIZE, as Megatron's groups say; returns the groups of sums, each of which adds this rank twice."""
    groups: list[Any] = []

    def all_reduce(counts: torch.Tensor, group: Any = None) -> None:
        groups.append(group)
        counts.mul_(2)

    def shared_by(**words: Any) -> str:
        assert words == {"with_context_parallel": True}
        return SUMS

    parallel = router_watch.parallel_state
    with (
        patch.object(router_watch, "TopKRouter", Router),
        patch.object(torch.distributed, "all_reduce", all_reduce),
        patch.object(parallel, "get_tensor_and_data_parallel_group", shared_by),
        patch.object(parallel, "get_expert_model_parallel_group", lambda: "the EP group"),
        patch.object(parallel, "get_expert_model_parallel_world_size", lambda: EP_SIZE),
        patch.object(parallel, "get_expert_model_parallel_rank", lambda: EP_RANK),
    ):
        yield groups


def watch_of(routers: list[Router], **words: Any) -> RouterWatch:
    return RouterWatch([Chunk(routers)], **{"check": True, "telemetry": True, "ranks_per_node": 2} | words)


def ran(routers: list[Router], scores: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run the routers; return the [rows, E] maps."""
    return [router(of_layer)[1] for router, of_layer in zip(routers, scores, strict=True)]


KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid": {"score_function": "sigmoid"},
    "a bias": {"expert_bias": torch.linspace(0, 3, EXPERTS), "score_function": "sigmoid"},
    "groups": {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    "groups of probabilities": {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_pre_softmax": True},
    "groups of sigmoids": {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "score_function": "sigmoid"},
    "one choice": {"topk": 1},
    "all experts": {"topk": EXPERTS},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_routers_own_choice_is_what_it_would_choose(kind: str) -> None:
    router, rows = Router(**KINDS[kind]), scores_of(1)[0]
    ids, margin = router_watch._own_choice(router, rows)
    assert ids.sort(dim=1).values.tolist() == own_choice(router, rows).sort(dim=1).values.tolist()
    assert margin.shape == (len(rows),)
    if "groups" in kind or kind == "all experts":
        assert (margin == -1).all(), "not known"
        return
    ordered = biased(router, rows).sort(dim=1, descending=True).values
    expected = (ordered[:, router.topk - 1] - ordered[:, router.topk]) / biased(router, rows).abs().max(dim=1).values
    torch.testing.assert_close(margin, expected)


@pytest.mark.parametrize("kind", ["softmax", "groups"])
def test_right_replay_agrees_and_wrong_replay_is_said_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    routers = [Router(**KINDS[kind]) for _ in range(LAYERS)]
    watch, scores = watch_of(routers), scores_of(2)
    ran(routers, scores)
    right = watch.end_pass()
    assert (right["r3/agreement"], right["r3/alarm"]) == (1.0, 0.0)
    for router, of_layer in zip(routers, scores, strict=True):
        router.told = own_choice(router, of_layer).roll(1, dims=0)
    alarms = []
    for _ in range(2):
        ran(routers, scores)
        metrics = watch.end_pass()
        alarms.append(metrics["r3/alarm"])
        assert metrics["r3/agreement"] < 0.9
        assert metrics["r3/shift"] > 0.5
    assert alarms == [1.0, 1.0]
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    assert said[0].getMessage().startswith("moe_rl: the replayed routes are wrong: ")


def test_loads_are_of_all_forwards_and_of_all_ranks(summed_over: list[Any]) -> None:
    routers = [Router() for _ in range(LAYERS)]
    watch, previous = watch_of(routers, check=False), None
    for step in range(3):
        passes = [scores_of(10 * step + index, rows=32 + index) for index in range(3)]
        maps = [ran(routers, scores) for scores in passes]
        counts = np.array([2 * sum(of_pass[layer].sum(dim=0).numpy() for of_pass in maps) for layer in range(LAYERS)])
        metrics = watch.end_pass()
        first = np.stack([of_layer.to(torch.int8).topk(2, dim=1).indices.numpy() for of_layer in maps[0]], axis=1)
        # Experts of ranks 0 and 1 are on node 0, which is rank 1's own.
        node = np.arange(EXPERTS) // (EXPERTS // EP_SIZE) // 2
        expected = load_metrics(counts, previous) | {"moe_rl/nodes_per_token": nodes_per_token(first, node, 0)}
        assert metrics == pytest.approx(expected)
        previous = counts
    assert summed_over == [SUMS] * 3


def test_without_telemetry_nobody_is_asked_and_without_check_nothing_is_compared(summed_over: list[Any]) -> None:
    routers = [Router()]
    watch = watch_of(routers, telemetry=False)
    ran(routers, scores_of(3)[:1])
    names = set(watch.end_pass())
    assert names
    assert all(name.startswith("r3/") for name in names)
    assert summed_over == []
    routers = [Router()]
    watch = watch_of(routers, check=False)
    ran(routers, scores_of(3)[:1])
    assert not [name for name in watch.end_pass() if name.startswith("r3/")]


def test_the_first_rows_of_a_passes_first_forward_are_sampled() -> None:
    routers = [Router()]
    watch, scores = watch_of(routers), scores_of(4, rows=ROWS + 40)[0]
    routers[0].told = own_choice(routers[0], scores)
    routers[0].told[ROWS:] = (routers[0].told[ROWS:] + 1) % EXPERTS
    ran(routers, [scores.reshape(2, -1, EXPERTS)])  # [S, B, H], as Megatron has it
    routers[0].told = (routers[0].told + 1) % EXPERTS
    ran(routers, [scores])
    assert watch.end_pass()["r3/agreement"] == 1.0
    ran(routers, [scores])
    assert watch.end_pass()["r3/agreement"] < 1.0, "the next pass samples anew"


def test_rows_that_are_dropped_count_as_rows_without_a_route() -> None:
    routers = [Router()]
    watch, scores = watch_of(routers, telemetry=False), scores_of(5, rows=64)[0]
    handle = routers[0].register_forward_hook(
        lambda _, __, output: (output[0], output[1] & (torch.arange(64) > 2)[:, None])
    )
    routers[0]._forward_hooks.move_to_end(handle.id, last=False)
    ran(routers, [scores])
    assert watch._samples[0][0][:3].tolist() == [[0, 0]] * 3
    watch.end_pass()


def test_a_pass_that_broke_off_is_forgotten(summed_over: list[Any]) -> None:
    routers = [Router()]
    watch = watch_of(routers)
    ran(routers, scores_of(6)[:1])
    watch.give_up()
    assert watch.end_pass() == {}
    assert summed_over == []
    ran(routers, scores_of(7, rows=16)[:1])
    metrics = watch.end_pass()
    counts = 2 * ran([Router()], scores_of(7, rows=16)[:1])[0].sum(dim=0, keepdim=True).numpy()
    assert metrics["moe_rl/expert_load_max"] == load_metrics(counts)["moe_rl/expert_load_max"]


def test_what_is_recomputed_in_backward_is_counted_once(summed_over: list[Any]) -> None:
    routers = [Router()]
    watch, scores = watch_of(routers), scores_of(8)[0].requires_grad_()
    output = torch.utils.checkpoint.checkpoint(lambda rows: routers[0](rows)[0], scores, use_reentrant=True)
    once = watch._counts[0].clone()
    output.sum().backward()
    assert torch.equal(watch._counts[0], once)
    watch.end_pass()


def test_metrics_come_when_they_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they travel behind the pass: until then passes have none, and what comes is of the pass that sent it."""
    event = SimpleNamespace(ready=False, query=lambda: event.ready)
    monkeypatch.setattr(router_watch, "_on_the_way", lambda columns: ([column.clone() for column in columns], event))
    routers = [Router()]
    watch, scores = watch_of(routers), scores_of(9)[:1]
    ran(routers, scores)
    assert watch.end_pass() == {}
    routers[0].told = own_choice(routers[0], scores[0]).roll(1, dims=0)
    ran(routers, scores)
    assert watch.end_pass() == {}, "still under way"
    event.ready = True
    ran(routers, scores)
    event.ready = True
    assert watch.end_pass()["r3/agreement"] == 1.0, "of the first pass"
    assert watch.end_pass()["r3/agreement"] < 1.0, "of the third: the second found no room"
    assert watch.end_pass() == {}


def test_a_closed_watch_sees_nothing_and_a_router_without_a_margin_is_refused() -> None:
    routers = [Router()]
    watch = watch_of(routers)
    watch.close()
    ran(routers, scores_of(1)[:1])
    assert watch.end_pass() == {}
    with pytest.raises(InvalidInputError, match="softmax and sigmoid routers, but the score function is sinkhorn"):
        watch_of([Router(), Router(score_function="sinkhorn")])


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (torch.zeros(3, EXPERTS), r"returned \(torch.float32 \[3, 8\]\)"),
        ((torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64)), r"torch.int64 \[3, 2\]"),
        ((torch.zeros(3, 2), torch.zeros(3, EXPERTS)), r"torch.float32 \[3, 8\]\)"),
        ((torch.zeros(3, 2), torch.zeros(3, EXPERTS + 1, dtype=torch.bool)), r"torch.bool \[3, 9\]"),
        ((torch.zeros(3, EXPERTS), torch.zeros(3, EXPERTS, dtype=torch.bool), None), "None"),
        ((torch.zeros(3, EXPERTS), None), "None"),
    ],
)
def test_what_is_no_routing_map_is_refused_with_what_it_is(output: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        router_watch._routing_map(output, EXPERTS)
    routing_map = torch.zeros(3, EXPERTS, dtype=torch.bool)
    assert router_watch._routing_map((None, routing_map), EXPERTS) is routing_map


def loads_of(chunk: Chunk, *, overlaps: bool = False) -> LoadWatch:
    """Watch the loads of a chunk whose layers are its routers."""
    config = SimpleNamespace(overlap_moe_expert_parallel_comm=overlaps)
    layers = [SimpleNamespace(router=router, config=config) for router in chunk.routers]
    with (
        patch.object(load_watch, "moe_layers", lambda chunk: layers),
        patch.object(load_watch, "unwrapped", lambda chunk: chunk),
    ):
        return LoadWatch([chunk])


@pytest.mark.parametrize("forward_only", [False, True])
def test_the_imbalance_of_a_pass_is_that_of_megatrons_homes(forward_only: bool, summed_over: list[Any]) -> None:
    chunk = Chunk([Router() for _ in range(LAYERS)])
    watch = loads_of(chunk)
    for step in range(2):
        watch.begin_pass(forward_only=forward_only)
        rows = []
        for index in range(3):
            scores = scores_of(20 * step + index)
            with torch.set_grad_enabled(not forward_only):
                chunk(scores)
            maps = [
                chunk.routers[layer](of_layer)[1] for layer, of_layer in enumerate(scores)
            ]  # recomputed: not counted
            rows.append([of_layer.sum(dim=0).view(EP_SIZE, -1).sum(dim=1).tolist() for of_layer in maps])
            with torch.no_grad():
                if not forward_only:
                    chunk(scores_of(99))  # beside the pass
        metrics = watch.end_pass()
        assert metrics == {"moe_rl/imbalance": imbalance(np.array(rows)[None])}
    assert summed_over == ["the EP group"] * 2


def test_a_pass_in_which_nothing_ran_or_that_broke_off_has_no_imbalance(summed_over: list[Any]) -> None:
    chunk = Chunk([Router() for _ in range(LAYERS)])
    watch = loads_of(chunk)
    chunk(scores_of(1))  # between passes
    watch.begin_pass(forward_only=False)
    assert watch.end_pass() == {}
    watch.begin_pass(forward_only=False)
    chunk(scores_of(1))
    watch.give_up()
    chunk(scores_of(2))
    assert watch.end_pass() == {}
    watch.begin_pass(forward_only=False)
    watch.close()
    chunk(scores_of(1))
    assert watch.end_pass() == {}
    assert summed_over == []


class OnDevice:
    """Stands in for a tensor of a GPU: what is copied from it arrives when its event has been waited for."""

    is_cuda, dtype = True, torch.int64

    def __init__(self, values: list[int]) -> None:
        self.values = torch.tensor(values)
        self.shape = self.values.shape


def test_what_lies_on_a_gpu_is_read_from_pinned_memory_behind_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Pinned:
        def __init__(self, shape: Any, *, dtype: torch.dtype, pin_memory: bool) -> None:
            assert pin_memory
            self.values = torch.zeros(shape, dtype=dtype)

        def copy_(self, source: OnDevice, *, non_blocking: bool) -> None:
            assert non_blocking
            order.append("copy")
            self.values.copy_(source.values)

    monkeypatch.setattr(router_watch.torch, "empty", Pinned)
    event = SimpleNamespace(record=lambda: order.append("event"))
    monkeypatch.setattr(router_watch.torch.cuda, "Event", lambda: event)
    columns: Any = [OnDevice([1, 2]), OnDevice([3])]
    host, behind = router_watch._on_the_way(columns)
    assert [column.values.tolist() for column in host] == [[1, 2], [3]]  # type: ignore[attr-defined]
    assert behind is event
    assert order == ["copy", "copy", "event"]
    here = [torch.zeros(2)]
    assert router_watch._on_the_way(here) == (here, None)
