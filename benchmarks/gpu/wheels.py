"""Wheels that `make gpu-pack` carries, unpacked where a run needs them. Standard library only."""

import zipfile
from pathlib import Path

CORE = "moe_rl_core"
"""Folder of this package's C++ core: the rest of its wheel is the checkout."""
SITE_CUSTOMIZE = '''"""Python imports this when it starts: it finds moe_rl's C++ core, which lies here."""

import importlib.util
import sys
from pathlib import Path

CORE = next(iter(sorted((Path(__file__).parent / "moe_rl_core").glob("_native*.so"))), None)


class CoreFinder:
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, CORE) if name == "moe_rl._native" and CORE else None


sys.meta_path.append(CoreFinder())
'''


def unpack(wheels: Path, into: Path) -> list[str]:
    """Unpack wheels into a folder to import from; of ours the core alone. Return their names."""
    names = []
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            if wheel.name.startswith("moe_rl-"):
                _unpack_core(archive, into / CORE)
            else:
                archive.extractall(into)
        names.append(wheel.name)
    if names:
        (into / "sitecustomize.py").write_text(SITE_CUSTOMIZE, encoding="utf-8")
    return names


def _unpack_core(archive: zipfile.ZipFile, into: Path) -> None:
    into.mkdir(exist_ok=True)
    for name in archive.namelist():
        if name.startswith("moe_rl/_native") and name.endswith(".so"):
            (into / Path(name).name).write_bytes(archive.read(name))
