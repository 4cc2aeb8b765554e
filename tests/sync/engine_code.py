"""The expert-loading code of SGLang and vLLM as released, run on the CPU without their requirements.

The modules named here are executed from the packages' own files; every other module of a package is an empty one, so
that neither a GPU nor CUDA is needed. No line of theirs is copied. `make test-sync` brings the files.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# Where `make test-sync` has put the packages.
FOLDER = "MOE_RL_ENGINES"
SGLANG = ("sglang.srt.eplb.expert_location", "sglang.srt.layers.moe.fused_moe_triton.layer")
VLLM = (
    "vllm.model_executor.layers.fused_moe.routed_experts",
    "vllm.model_executor.layers.fused_moe.expert_map_manager",
    "vllm.utils.math_utils",
    "vllm.utils.deep_gemm",
    "vllm.distributed.eplb.eplb_state",
)


class _AnyClass(type):
    """The type of classes that have whatever is asked of them."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _keep


def _keep(*args: Any, **_: Any) -> Any:
    """Stand for functions and decorators: return what is decorated."""
    return args[0] if args and callable(args[0]) else (lambda decorated: decorated)


class _EmptyModule(ModuleType):
    """A module with whatever is asked of it: classes without instances, functions that do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_class = name[0].isupper()
        subscript = {"__class_getitem__": classmethod(lambda cls, _: cls)}
        value = _AnyClass(name, (), subscript) if is_class else _keep
        setattr(self, name, value)
        return value


class _EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of one package, and leaves those of `real` to the package's own files."""

    def __init__(self, real: Sequence[str], folder: str) -> None:
        self.root, self.real, self.folder = real[0].split(".")[0], set(real), folder
        self.packages = {name.rsplit(".", depth)[0] for name in real for depth in range(1, name.count(".") + 1)}

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != self.root or name in self.real:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module: Any = _EmptyModule(spec.name)
        own = str(Path(self.folder, *spec.name.split(".")))
        # Only packages on the way to the real modules lead to files.
        module.__path__ = [own] if spec.name in self.packages else []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """An empty module has nothing to execute."""


def engine_modules(real: Sequence[str], **values: Any) -> list[Any]:
    """Return the modules `real` of one engine, executed; `values` are what its package `platforms` then has."""
    folder = os.environ[FOLDER]
    if folder not in sys.path:
        sys.path.append(folder)
    sys.meta_path.insert(0, _EmptyModules(real, folder))
    if values:
        vars(importlib.import_module(f"{real[0].split('.')[0]}.platforms")).update(values)
    return [importlib.import_module(name) for name in real]
