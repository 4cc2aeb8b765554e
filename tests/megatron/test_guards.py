"""Guards of functions that go through parameters, wherever they were imported to."""

import sys
from types import ModuleType

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

from moe_rl.megatron.guards import Walker, _guard_walker


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
