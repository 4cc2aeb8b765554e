"""Guards of functions that go through parameters, wherever they were imported to."""

import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from moe_rl.core.errors import InvalidInputError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says of what it does without TransformerEngine and Apex
    from moe_rl.megatron import guards
    from moe_rl.megatron.guards import NameGuards, Walker, _guard_walker


def test_a_function_is_guarded_where_it_was_imported_to_beside_a_barred_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sys.modules` holds None for an import that somebody barred."""
    walks, uses = ModuleType("walks"), ModuleType("uses")
    unguarded = walks.walk = uses.walk = lambda args, model: iter(["a weight"])
    monkeypatch.setitem(sys.modules, "barred", None)
    monkeypatch.setitem(sys.modules, "uses", uses)
    _guard_walker(Walker(module="walks", function="walk", model=1), walks)
    assert uses.walk is walks.walk
    assert uses.walk is not unguarded
    assert list(uses.walk(None, [])) == ["a weight"]


class Optimizer:
    """Reads and writes its state by the names of Megatron's distributed optimizer."""

    def __init__(self, *parts: Any) -> None:
        self.chained_optimizers = list(parts)

    def save_parameter_state(self, name: str) -> str:
        return f"saved {name}"

    def load_state_dict(self, state: str) -> str:
        return f"loaded {state}"


def test_experts_and_their_optimizer_are_guarded_until_the_guards_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every module of a layer's experts asks before it gives or takes weights; so does every part of an optimizer."""
    monkeypatch.setattr(guards, "guard_walkers", lambda: None)
    asked: list[str] = []
    is_home = [True]

    def require_home(does: str) -> None:
        asked.append(does)
        if not is_home[0]:
            raise InvalidInputError(f"nothing can be {does}")

    experts = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    state = experts.state_dict()
    part = Optimizer()
    chained = Optimizer(part, None)
    layers = [SimpleNamespace(experts=experts, require_home=require_home)]
    name_guards = NameGuards(layers, chained, state_is_home=lambda: is_home[0])
    experts.load_state_dict(experts.state_dict())
    assert asked.count("saved") == asked.count("loaded") == 3, "of three modules"
    for optimizer in (chained, part):
        assert optimizer.save_parameter_state("it") == "saved it"
        assert optimizer.load_state_dict("it") == "loaded it"
    is_home[0] = False
    for module in (experts, experts[1]):
        with pytest.raises(InvalidInputError, match="nothing can be saved"):
            module.state_dict()
    with pytest.raises(InvalidInputError, match="nothing can be loaded"):
        experts[0].load_state_dict(torch.nn.Linear(2, 2).state_dict())
    for optimizer in (chained, part):
        with pytest.raises(InvalidInputError, match="nothing can be saved now, because the optimizer state"):
            optimizer.save_parameter_state("it")
        with pytest.raises(InvalidInputError, match="nothing can be loaded now, because the optimizer state"):
            optimizer.load_state_dict("it")
    name_guards.remove()
    asked.clear()
    experts.load_state_dict(state)
    experts.state_dict()
    assert asked == []
    for optimizer in (chained, part):
        assert optimizer.save_parameter_state("it") == "saved it"
        assert optimizer.load_state_dict("it") == "loaded it"
    NameGuards([], None, state_is_home=lambda: True).remove()


@pytest.mark.parametrize("by_name", [False, True])
def test_a_walk_asks_when_it_is_called_or_at_its_first_item(by_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(guards, "require_home", lambda chunks, does: asked.append((chunks, does)))
    walks: Any = ModuleType("walks")
    walks.items = lambda *given, **words: iter(["a weight"])
    walks.Saver = type("Saver", (), {"save": lambda own, *given, **words: "saved"})
    _guard_walker(Walker(module="walks", function="items", model=1), walks)
    _guard_walker(Walker(module="walks", function="Saver.save", model=1, does="kept", returns_iterator=False), walks)
    _guard_walker(Walker(module="walks", function="Gone.save", model=1), walks)
    _guard_walker(Walker(module="walks", function="gone", model=1), walks)
    items = walks.items("args", model="chunks") if by_name else walks.items("args", "chunks")
    assert asked == [], "a caller may go home before the first item"
    assert list(items) == ["a weight"]
    saved = walks.Saver().save(megatron_model="chunks") if by_name else walks.Saver().save("chunks")
    assert saved == "saved"
    assert asked == [("chunks", "exported"), ("chunks", "kept")]
