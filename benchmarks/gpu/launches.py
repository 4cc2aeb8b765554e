"""Every launch of a kernel, by what is carried for it."""

import contextlib
from collections.abc import Iterator
from typing import Any

from triton.runtime.jit import JITFunction

from moe_rl.kernels.carried_driver import carried_launch


class NotCarriedError(RuntimeError):
    """A launch for which no machine code is carried, where nothing can compile it."""


@contextlib.contextmanager
def carried_launches(*, must_be_carried: bool) -> Iterator[list[str]]:
    """Launch carried code wherever one of our kernels is launched; yield keys of what Triton compiled instead."""
    compiled: list[str] = []
    real = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        carried, key = carried_launch(self, args, settings)
        if carried is not None:
            carried(grid)
            return None
        if must_be_carried:
            raise NotCarriedError(f"not carried: {key}")
        compiled.append(key)
        return real(self, *args, grid=grid, warmup=warmup, **settings)

    JITFunction.run = run
    try:
        yield compiled
    finally:
        JITFunction.run = real


@contextlib.contextmanager
def noted_launches() -> Iterator[dict[str, tuple[Any, tuple[Any, ...], Any, dict[str, Any]]]]:
    """Make no launch; yield what would have been launched by its key: (kernel, arguments, grid, settings)."""
    noted: dict[str, tuple[Any, tuple[Any, ...], Any, dict[str, Any]]] = {}
    real = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        from moe_rl.kernels.carried import launch_key

        key, _ = launch_key(self, args, settings)
        noted.setdefault(key, (self, args, grid, settings))

    JITFunction.run = run
    try:
        yield noted
    finally:
        JITFunction.run = real
