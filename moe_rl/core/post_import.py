"""Change a framework's functions, and run a function when a module has been imported, without importing it before.

A plug-in is loaded while its framework is; what it changes is imported later, or never.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from moe_rl.core.errors import require


def when_imported(name: str, call: Callable[[ModuleType], object]) -> None:
    """Call `call(module)` right after module `name` is first imported; at once where it is there already."""
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, call))


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replace a function of a module, or a method of a class or an object, by `around(original, ...)`.

    Returns what undoes it. Raises `InvalidInputError` where there is none of that name.
    """
    require(
        hasattr(owner, name),
        f"{getattr(owner, '__name__', owner)} has no attribute {name}: moe_rl does not support this version of the "
        "package.",
    )
    # An inherited method is put on the class itself, and undone by taking it away again.
    original, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, functools.wraps(original)(lambda *given, **more: around(original, *given, **more)))
    return functools.partial(setattr, owner, name, original) if own else functools.partial(delattr, owner, name)


def wrap_everywhere(function: FunctionType, around: Callable[..., Any]) -> None:
    """Replace a function by `around(original, ...)` for all who hold it already, under whatever name.

    The function stays the same object and gets other code. Example: a class that was pickled by value holds the
    function that its module imported, and a name set anew in that module would not reach it.
    """
    require(not function.__code__.co_freevars, f"moe_rl cannot replace {function.__name__}, because it is a closure.")
    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    function.__code__ = _through.__code__
    function.__defaults__, function.__kwdefaults__ = None, {"moe_rl_around": functools.partial(around, original)}


def _through(*arguments: Any, moe_rl_around: Callable[..., Any], **keywords: Any) -> Any:
    return moe_rl_around(*arguments, **keywords)


class _Finder(MetaPathFinder):
    """Leaves finding to the others, and hooks the loader that they found."""

    def __init__(self, name: str, call: Callable[[ModuleType], object]) -> None:
        self._name, self._call = name, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        # Taken off first, or the search below would come back here.
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            self._call(module)

        loader.exec_module = execute_and_call
        return spec
