"""What stands in the way of DeepSpeed on a machine: set right where that is safe, else said to the doctor."""

import functools
import inspect
import os
from pathlib import Path
from typing import Any


def let_registry_take_names() -> None:
    """Let transformers' registry of recorded outputs take a class's name and a default, as AutoEP asks it.

    In transformers 5.23 its `get` takes a model alone, and `deepspeed.initialize` fails with a TypeError. A model is
    still looked up by its class, and what is not there is still {} without a default. Does nothing where it is not
    needed.
    """
    registry: Any = _registry()
    if registry is None or _takes_default(registry):
        return
    original = registry.get

    @functools.wraps(original)
    def get(self: Any, model: Any, default: Any = None) -> Any:
        # The registry keeps classes by their text.
        key = model if isinstance(model, str) else str(model.__class__)
        return dict.get(self, key) or ({} if default is None else default)

    registry.get = get


def found() -> list[tuple[str, bool]]:
    """Return (sentence, whether it is well) for every trap."""
    registry = _registry()
    fails = registry is not None and not _takes_default(registry)
    why = "deepspeed.initialize fails with this version of transformers, unless you import the adapter first"
    sentences = [(why if fails else "AutoEP can register with transformers", True)]
    waits = (
        "exists: either an extension is being built now, or a build was killed. If a build was killed, remove the "
        "file, because every run waits for it"
    )
    locks = [(f"{lock} {waits}", False) for lock in build_locks()]
    return sentences + (locks or [("no build of an extension was interrupted", True)])


def build_locks() -> list[Path]:
    """Return the lock files of torch's folder of extensions, where DeepSpeed's operations are built at first use."""
    from torch.utils.cpp_extension import get_default_build_root

    # An extension lies one folder deeper where torch adds the versions of Python and CUDA.
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return sorted([*root.glob("*/lock"), *root.glob("*/*/lock")])


def _registry() -> Any:
    """Return the class of transformers' registry; None where it has none."""
    try:
        from transformers.utils import output_capturing
    except ImportError:
        return None
    return getattr(output_capturing, "_CanRecordRegistry", None)


def _takes_default(registry: Any) -> bool:
    return len(inspect.signature(registry.get, follow_wrapped=False).parameters) > 2
