"""Imports one module of moe_rl from another file: on PYTHONPATH, in every process of a test."""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

MODULE, FILE = os.environ.get("MOE_RL_TEST_MUTANT_MODULE", ""), os.environ.get("MOE_RL_TEST_MUTANT_FILE", "")


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(fullname, FILE) if fullname == MODULE else None


if MODULE:
    sys.meta_path.insert(0, _Finder())
