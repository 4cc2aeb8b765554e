"""Output of a command. Files are checked before the work and renamed after it, all or none; text is made printable."""

import os
from collections.abc import Mapping
from pathlib import Path

from moe_rl.core.errors import InvalidInputError, require


def check_outputs(paths: Mapping[str, Path | None], *, inputs: tuple[Path, ...] = ()) -> None:
    """Raise where a file could not be written: `paths` are by option ("" where none is named); None is not asked for.

    Nothing is created. A path may not be a folder, an input, or the same as another output; `-`, standard output, is
    for `--json` alone.
    """
    # Checked before hours of work, not after: a typing error in a path must not cost a result.
    files = {option: path for option, path in paths.items() if path is not None}
    asked = {option: path for option, path in files.items() if (option, str(path)) != ("--json", "-")}
    for option, path in asked.items():
        name = f"{option} {path}".strip()
        require(str(path) != "-", f"{name} does not stand for standard output: name a file.")
        require(not path.is_dir(), f"{name} is a folder, not a file.")
        folder = path.absolute().parent
        require(folder.exists(), f"{name} cannot be written: there is no folder {folder}.")
        require(
            folder.is_dir() and os.access(folder, os.W_OK),
            f"{name} cannot be written: {folder} is not a folder that you may write to.",
        )
        require(not path.exists() or os.access(path, os.W_OK), f"{name} cannot be written: the file is read-only.")
        for given in inputs:
            inside = given.is_dir() and path.resolve().is_relative_to(given.resolve())
            require(path.resolve() != given.resolve() and not inside, f"{name} would overwrite the input {given}.")
    places = [path.resolve() for path in asked.values()]
    require(len(set(places)) == len(places), f"two outputs go to one file: {', '.join(asked)}.")


def write_outputs(contents: Mapping[Path, bytes]) -> None:
    """Write every file; when one of them fails, none of them changes."""
    written: list[tuple[Path, Path]] = []
    try:
        for path, content in contents.items():
            # Beside its target: a rename to another file system would be a copy, which can stop half-way.
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            written.append((partial, path))
            partial.write_bytes(content)
        # Every content is on disk before the first file changes.
        for partial, path in written:
            partial.replace(path)
    except OSError as error:
        for partial, _ in written:
            partial.unlink(missing_ok=True)
        # The partial file's name would say nothing to the user.
        named = next((target for partial, target in written if str(partial) == error.filename), error.filename)
        raise InvalidInputError(f"{named} cannot be written: {error.strerror}.") from error


def printable(text: str) -> str:
    """Return the text for a terminal: control characters, line breaks and stray surrogates as escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def encodable(text: str) -> str:
    """Return the text with what UTF-8 cannot hold replaced: bytes of file names that are not UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")
