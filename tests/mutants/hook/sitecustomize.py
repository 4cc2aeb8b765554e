"""Lets one module of moe_rl have another text: on PYTHONPATH, in every process of a test.

The module keeps its file's name, beside which it finds its tables, and whoever asks for its source (Triton compiles
from it) gets the other text.
"""

import importlib.util
import linecache
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

MODULE, FILE, TEXT = (os.environ.get(f"MOE_RL_TEST_MUTANT_{name}", "") for name in ("MODULE", "FILE", "TEXT"))


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        text = Path(TEXT).read_text(encoding="utf-8")
        linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
        return compile(text, FILE, "exec")


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        return importlib.util.spec_from_file_location(fullname, FILE, loader=_Loader(fullname, FILE))


if MODULE:
    sys.meta_path.insert(0, _Finder())
