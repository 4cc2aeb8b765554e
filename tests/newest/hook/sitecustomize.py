"""Gives mbridge 0.15.1 the name that megatron-core dropped in 0.19: on PYTHONPATH, in every process of a test.

Without it verl builds no model there, and nothing would be known of ours.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MODULE = "megatron.core.enums"
DROPPED = "encoder_and_decoder"


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == MODULE else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def with_the_name(module: ModuleType) -> None:
            run(module)
            if not hasattr(module.ModelType, DROPPED):
                setattr(module.ModelType, DROPPED, None)  # equal to no model's type

        spec.loader.exec_module = with_the_name  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
