"""The C++ core `moe_rl._native`, looked for once per process.

Every function that has a native form takes `backend`: "auto" takes the C++ core where it is built and numpy where not
(said once in the log), "native" insists on it, "numpy" never uses it. Both give identical results.
"""

import logging
from functools import cache
from types import ModuleType
from typing import Literal, get_args

from moe_rl.core.errors import InvalidInputError, nearest_name

logger = logging.getLogger(__name__)

Backend = Literal["auto", "native", "numpy"]


@cache
def _load() -> tuple[ModuleType | None, str]:
    """Return the extension module, or None and the reason why it cannot be had."""
    try:
        from moe_rl import _native
    except ImportError as error:
        return None, str(error)
    return _native, ""


@cache
def _say_once(reason: str) -> None:
    logger.warning(
        "the C++ core is not available (%s): using numpy, with the same results but slower. "
        "Install with a C++20 compiler at hand to build it.",
        reason,
    )


def native_core(backend: Backend = "auto") -> ModuleType | None:
    """Return `moe_rl._native`, or None where numpy is to be used.

    Raises `InvalidInputError` for an unknown backend, and for "native" where the extension is not built.
    """
    if backend not in get_args(Backend):
        raise InvalidInputError(f"unknown backend {backend!r}.{nearest_name(backend, get_args(Backend))}")
    if backend == "numpy":
        return None
    module, reason = _load()
    if module is None and backend == "native":
        raise InvalidInputError(f"backend 'native' was asked for, but the C++ core is not available: {reason}.")
    if module is None:
        _say_once(reason)
    return module
