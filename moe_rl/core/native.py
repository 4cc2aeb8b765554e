"""The C++ core `moe_rl._native`, and whether it is used.

Where it cannot be built, routes are counted and drawn in numpy (the same ones), tokens are not followed to ranks and
nodes (visits are those of independent choices), and `moe-rl` plans are made by the short planner of
`moe_rl.planner.reference` (other plans, which say so). Weight syncs are planned in Python: the same plans, slower. The
variable MOE_RL_NATIVE decides otherwise: 0 does without the core where it is there, 1 makes its absence an error.
"""

import logging
import os
from functools import cache
from importlib import import_module
from types import ModuleType

from moe_rl.core.errors import InvalidInputError, require

logger = logging.getLogger(__name__)

VARIABLE = "MOE_RL_NATIVE"


@cache
def _load() -> tuple[ModuleType | None, str]:
    """Return the extension module, or None and the reason why it cannot be had."""
    try:
        return import_module("moe_rl._native"), ""  # by name: core stands below the package that it is part of
    except ImportError as error:
        return None, str(error)


@cache
def _say_once(reason: str) -> None:
    logger.warning(
        "the C++ core is not available (%s). Without it, routes are counted and sampled more slowly, traffic "
        "between nodes is estimated as if each token chose its experts independently, and the policy "
        "moe-rl uses the slower reference planner. To build the core, install a C++20 compiler and reinstall moe_rl.",
        reason,
    )


def native_core() -> ModuleType | None:
    """Return `moe_rl._native`, or None where numpy is to be used; `why_not_native` says why.

    Raises `InvalidInputError` where MOE_RL_NATIVE is neither 0 nor 1, or is 1 and the extension is not built.
    """
    wanted = os.environ.get(VARIABLE, "")
    require(
        wanted in ("", "0", "1"), f"{VARIABLE} must be 0 (do not use the C++ core) or 1 (require it), got {wanted!r}."
    )
    if wanted == "0":
        return None
    module, reason = _load()
    if module is None and wanted:
        raise InvalidInputError(f"{VARIABLE}=1 requires the C++ core, which is not available: {reason}.")
    if module is None:
        _say_once(reason)
    return module


def why_not_native() -> str:
    """Return the reason why `native_core` gives nothing, for people."""
    if os.environ.get(VARIABLE) == "0":
        return f"{VARIABLE}=0"
    return f"the C++ core is not available ({_load()[1]})"
