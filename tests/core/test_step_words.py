"""Words of a training step: texts outside, which answer for themselves inside."""

import json
import re
from pathlib import Path

import pytest

from moe_rl.core.step_words import CudaGraph, Dispatcher, Recompute
from moe_rl.simulators.setting import StepSetting
from moe_rl.study.options import SimulationOptions

PACKAGE = Path(__file__).parents[2] / "moe_rl"
COMPARED = re.compile(r"\b(dispatcher|recompute|cuda_graph|domain_balance|objective)\b (==|!=|in|not in) \(?\"")


@pytest.mark.parametrize("dispatcher", Dispatcher)
def test_options_of_megatron_choose_the_dispatcher_that_they_are_of(dispatcher: Dispatcher) -> None:
    assert SimulationOptions(**dispatcher.as_options).step_setting().dispatcher is dispatcher


@pytest.mark.parametrize("recompute", Recompute)
def test_options_of_megatron_repeat_what_they_are_of(recompute: Recompute) -> None:
    options = SimulationOptions().with_words(**recompute.as_options)
    assert options.step_setting().recompute is recompute
    assert all(word.repeats_experts for word in recompute.stronger)
    assert recompute not in recompute.stronger


@pytest.mark.parametrize("implementation", [None, "none", "local", "transformer_engine", "full_iteration"])
@pytest.mark.parametrize("scope", [["attn", "moe_router"], ["moe_router"]])
def test_a_graph_spares_all_launches_only_if_it_holds_the_iteration(
    implementation: str | None, scope: list[str]
) -> None:
    options = SimulationOptions(cuda_graph_impl=implementation, cuda_graph_scope=scope)
    graph = options.kernels.cuda_graph
    assert graph.spares_all_launches == (implementation == "full_iteration")
    assert (graph is CudaGraph.NONE) == (implementation in (None, "none"))
    assert (graph is CudaGraph.ROUTER) == (implementation in ("local", "transformer_engine") and "attn" not in scope)


def test_a_file_has_words_and_a_setting_their_objects() -> None:
    setting = StepSetting(dispatcher="alltoall", recompute="full", cuda_graph="router")  # type: ignore[arg-type]
    words = json.loads(json.dumps([setting.dispatcher, setting.recompute, setting.cuda_graph]))
    assert words == ["alltoall", "full", "router"]
    assert setting.dispatcher.sends_rows
    assert setting.recompute.repeats_layer


def test_no_module_compares_a_word_that_answers_for_itself() -> None:
    owners = {"core/step_words.py"}
    compared = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if str(path.relative_to(PACKAGE)) not in owners
        for line in path.read_text(encoding="utf-8").splitlines()
        if COMPARED.search(line)
    ]
    assert compared == []


def test_a_sentence_quotes_a_word_as_text() -> None:
    assert [f"{word!r}" for word in (Dispatcher.DEEPEP, CudaGraph("none"))] == ["'deepep'", "'none'"]
