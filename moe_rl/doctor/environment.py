"""What is installed on the machine where the doctor runs, from package metadata; no package is imported."""

import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

PACKAGES = (
    "megatron-core",
    "transformer-engine",
    "transformer-engine-torch",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
    "torch",
    "triton",
    "psutil",
    "numpy",
    "deep-ep",
    "nvidia-nvshmem-cu12",
    "nvidia-nvshmem-cu13",
)
MODULES = (
    "megatron",
    "transformer_engine",
    "transformer_engine_torch",
    "triton",
    "psutil",
    "deep_ep",
    "moe_rl._native",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Python and packages of a machine."""

    python: str
    versions: Mapping[str, str] = field(default_factory=dict)
    """Installed packages of `PACKAGES`, with their versions."""
    modules: frozenset[str] = frozenset()
    """Modules of `MODULES` that could be imported, whether or not they belong to an installed package."""
    transformer_engine_built: bool = False
    """Whether the base package of TransformerEngine contains its libraries, as a build from source does."""

    @property
    def trains(self) -> bool:
        """Whether Megatron is installed: only then does the environment say something about the run."""
        return "megatron" in self.modules

    def version(self, package: str) -> tuple[int, ...] | None:
        """Return the leading numbers of a package's version; None if it is not installed."""
        text = self.versions.get(package)
        if text is None:
            return None
        numbers = []
        for piece in text.split("+")[0].split("."):
            if not piece.isdigit():  # 0.18.0rc0, 2.1.dev3
                break
            numbers.append(int(piece))
        return tuple(numbers)


def probe() -> Environment:
    """Return the environment of this process."""
    installed = {name: found for name in PACKAGES if (found := _installed(name)) is not None}
    # A build from source needs no transformer-engine-cu12: its base package has the libraries.
    base = installed.get("transformer-engine")
    return Environment(
        python=platform.python_version(),
        versions={name: package.version for name, package in installed.items()},
        modules=frozenset(name for name in MODULES if _found(name)),
        transformer_engine_built=base is not None and any(".so" in file.name for file in base.files or ()),
    )


def _installed(package: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _found(module: str) -> bool:
    try:
        # Looks for the file alone: importing transformer_engine without a GPU raises, and costs seconds with one.
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
