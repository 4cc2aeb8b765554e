"""Output of a command. Files are checked before the work and renamed after it, all or none; pipes and devices are
written to. Text is made printable."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.mappings import not_none

STANDARD_OUTPUT = 1  # The descriptor.


def check_outputs(paths: Mapping[str, Path | None], *, inputs: tuple[Path, ...] = ()) -> None:
    """Raise where a file could not be written: `paths` are by option ("" where none is named); None is not asked for.

    Nothing is created: missing folders are, when the file is written. A path may not be a folder, an input, or the
    same as another output; `-`, standard output, is for `--json` alone, which replaces no file but JSON: in
    `moe-rl doctor --json run.sh` somebody took it for a flag.
    """
    # Checked before hours of work, not after: a typing error in a path must not cost a result.
    files = not_none(paths)
    output_files = {option: path for option, path in files.items() if (option, str(path)) != ("--json", "-")}
    for option, path in output_files.items():
        name = f"{option} {path}".strip()
        require(str(path) != "-", f"{name} cannot be standard output: give a file name.")
        require(not path.is_dir(), f"{name} is a folder: give a file name.")
        _check_place(path, name)
        for source in inputs:
            is_inside = source.is_dir() and path.resolve().is_relative_to(source.resolve())
            require(
                path.resolve() != source.resolve() and not is_inside,
                f"{name} would overwrite the input file {source}: choose another file.",
            )
    document = output_files.get("--json")
    require(
        document is None or _may_hold_json(document),
        f"--json {document} would overwrite a file that does not contain JSON: give another file name, or - "
        "for standard output.",
    )
    places = [path.resolve() for path in output_files.values() if not _is_stream(path)]
    require(
        len(set(places)) == len(places),
        f"the options {', '.join(output_files)} name the same output file: give each option its own file.",
    )


def _check_place(path: Path, name: str) -> None:
    """Raise where nothing can be written at `path`, which `name` calls in the sentence."""
    if _is_stream(path):
        require(os.access(path, os.W_OK), f"{name} cannot be written: permission denied.")
        return
    # Of the file behind a link; a missing folder is made where the file is, so what counts is where it would be.
    folder = next(folder for folder in path.resolve().parents if folder.exists())
    require(
        folder.is_dir() and os.access(folder, os.W_OK),
        f"{name} cannot be written: {folder} is not a writable folder.",
    )
    require(not path.exists() or os.access(path, os.W_OK), f"{name} cannot be written: the file is read-only.")


def _may_hold_json(path: Path) -> bool:
    """Return whether a document may go to `path`: there is no file, an empty one, or one that starts as JSON does."""
    if not path.is_file():
        return True
    with path.open("rb") as file:
        start = file.read(1024).lstrip()
    return not start or start.startswith((b"{", b"["))


def _is_stream(path: Path) -> bool:
    """Return whether `path` is a pipe, a device or our standard output: it is written to and stays what it is."""
    return path.exists() and not path.is_dir() and (not path.is_file() or _is_standard_output(path))


def _is_standard_output(path: Path) -> bool:
    """Return whether what we print goes to `path` as well: /dev/stdout, or the file that a shell has opened for us."""
    try:
        return os.path.samestat(path.stat(), os.fstat(STANDARD_OUTPUT))
    except OSError:  # closed (`>&-`)
        return False


def write_outputs(contents: Mapping[Path, bytes]) -> None:
    """Write every file; if one of them fails, none of them changes.

    A link stays a link: the file behind it changes. What is written into a pipe or a device cannot be taken back, so
    they come before the first file changes.
    """
    partials: dict[Path, Path] = {}
    streams = [path for path in contents if _is_stream(path)]
    try:
        for path in contents:
            if path not in streams:
                target = path.resolve()
                # Beside its target: a rename to another file system would be a copy, which can stop half-way.
                partials[path] = target.with_name(f".{target.name}.{os.getpid()}.partial")
                with naming(path):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    partials[path].write_bytes(contents[path])
        for path in streams:
            with naming(path):
                _write_stream(path, contents[path])
        # Every content is on disk before the first file changes.
        for path, partial in partials.items():
            with naming(path):
                partial.replace(path.resolve())
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)


def _write_stream(path: Path, content: bytes) -> None:
    if _is_standard_output(path):
        # Through the open file: a second one would have a place of its own, and what we print would write over it.
        sys.stdout.flush()
        with open(STANDARD_OUTPUT, "wb", closefd=False) as stream:
            stream.write(content)
    else:
        path.write_bytes(content)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an error of the system into a sentence about `path`.

    The error itself may name no file (a full disk) or one that the user has never seen (a partial file).
    """
    try:
        yield
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be written: {error.strerror}.") from error


def printable(text: str) -> str:
    """Return the text for a terminal: control characters, line breaks and stray surrogates as escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def encodable(text: str) -> str:
    """Return the text with what UTF-8 cannot hold replaced: bytes of file names that are not UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")
