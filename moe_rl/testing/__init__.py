"""Tools to test with, for this project's tests and for yours.

`run_cases` runs functions on several local processes over gloo; inside `cpu_megatron()` real megatron-core needs no
GPU. No other part of moe_rl imports this package (`cpu_megatron` itself lies in `moe_rl.megatron.on_cpu`, because
examples/countdown trains with it).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_rl.megatron.on_cpu import cpu_megatron
    from moe_rl.testing.launcher import Launch, RankFailureError, run_cases

__all__ = ["Launch", "RankFailureError", "cpu_megatron", "run_cases"]


def __getattr__(name: str) -> Any:
    # Lazily: ranks run the launcher as a program, and cpu_megatron imports torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "moe_rl.megatron.on_cpu" if name == "cpu_megatron" else "moe_rl.testing.launcher"
    return getattr(import_module(module), name)
