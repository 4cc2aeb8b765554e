"""No registry is left out of this folder, and every entry says what it is.

Each module here exercises the entries of one registry, or of a tuple of them, which it names as `REGISTRY`. A registry
without such a module fails, and so does an entry that its module does not know how to exercise.
"""

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import moe_rl
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.registry import Registry

PACKAGE = Path(moe_rl.__file__).parent
NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([-_+][A-Za-z0-9]+)*")


def constructed() -> dict[str, Registry[Any]]:
    """Every registry of ours by "module:NAME"; each is made by `NAME = Registry(...)` at the top of a module."""
    found = {}
    for path in sorted(_sources(PACKAGE)):
        text = path.read_text(encoding="utf-8")
        if "Registry(" not in text:
            continue
        module = ".".join(("moe_rl", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        tree = ast.parse(text)
        made = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_registry(node.func)]
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if value in made:
                    pass
                case ast.AnnAssign(target=ast.Name(id=name), value=value) if value in made:
                    pass
                case _:
                    continue
            found[f"{module}:{name}"] = getattr(importlib.import_module(module), name)
            made.remove(value)
        assert not made, f"{path}:{made[0].lineno} makes a registry that is no name of its module"
    return found


def _is_registry(function: ast.expr) -> bool:
    return ast.unparse(function).split("[")[0] == "Registry"


def _sources(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.py") if "__pycache__" not in path.parts]


REGISTRIES = constructed()
every_registry = pytest.mark.parametrize("registry", REGISTRIES.values(), ids=REGISTRIES)


def exercised() -> list[Registry[Any]]:
    """The registries that the modules beside this one name."""
    found = []
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if path == Path(__file__):
            continue
        spec = importlib.util.spec_from_file_location(f"conformance_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += module.REGISTRY if isinstance(module.REGISTRY, tuple) else [module.REGISTRY]
    return found


def test_every_registry_has_a_module_here_that_exercises_it() -> None:
    covered = {id(registry) for registry in exercised()}
    assert [where for where, registry in REGISTRIES.items() if id(registry) not in covered] == []
    assert len(REGISTRIES) >= 3


@every_registry
def test_every_entry_has_a_name_and_says_what_it_is(registry: Registry[Any]) -> None:
    assert len(registry) > 0
    for entry in registry:
        assert NAME.fullmatch(entry.name), entry.name
        said = [getattr(entry, fact) for fact in ("summary", "title") if hasattr(entry, fact)]
        assert any(said or [inspect.getdoc(entry)]), f"{registry.kind} {entry.name} has no summary"


@every_registry
def test_an_unknown_name_is_refused_with_the_nearest(registry: Registry[Any]) -> None:
    name = registry.names[0]
    with pytest.raises(InvalidInputError, match=rf"^unknown {registry.kind} '{name}x'\. Did you mean '.*'\?$"):
        registry[name + "x"]
