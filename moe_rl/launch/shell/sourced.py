"""Which file a script sources, if its path is that of another machine or of another folder."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath

# How far below a script's folder a sourced file is looked for: `scripts/models/x.sh` is two folders down.
MAX_FOLDERS_DOWN = 3
# Folders that are looked into; with more of them, nobody knows whether a name is unique.
MAX_FOLDERS = 2_000


def given_file(target: str, given: Sequence[Path], script: Path) -> Path | None:
    """Return the one of the given files that a script sources under another path; None if no or several names fit.

    Example: `/data/slime/scripts/models/x.sh` is the given file `models/x.sh`.
    """
    return _closest(target, [path for path in given if path != script and path.is_file()])


def nearby_file(target: str, script: Path) -> Path | None:
    """Return the only file below a script's folder that has the name of what it sources; None if it is not unique."""
    candidates = []
    for num_before, (folder, names) in enumerate(_folders_below(script.parent)):
        if num_before == MAX_FOLDERS:
            return None
        if PurePath(target).name in names:
            candidates.append(folder / PurePath(target).name)
    if len(candidates) != 1:
        return None
    return candidates[0]


def _folders_below(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield every folder that is not hidden, with the names of its files."""
    for folder, inside, names in os.walk(root):
        depth = len(Path(folder).relative_to(root).parts)
        inside[:] = [name for name in inside if not name.startswith(".") and depth < MAX_FOLDERS_DOWN]
        yield Path(folder), names


def _closest(target: str, paths: Iterable[Path]) -> Path | None:
    """Return the path that shares the most of its last parts with the target, at least its name; None for a tie."""
    shared = {path: _num_shared_parts(target, path) for path in paths}
    most = max(shared.values(), default=0)
    closest = [path for path, number in shared.items() if number == most]
    if most == 0 or len(closest) > 1:
        return None
    return closest[0]


def _num_shared_parts(target: str, path: Path) -> int:
    number = 0
    for part, other in zip(reversed(PurePath(target).parts), reversed(path.resolve().parts), strict=False):
        if part != other:
            break
        number += 1
    return number
