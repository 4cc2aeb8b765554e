"""Outputs of commands: files change all together or not at all; pipes, devices and links stay what they are."""

import os
import stat
import threading
from pathlib import Path
from unittest import mock

import pytest

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.outputs import check_outputs, naming, write_outputs


def test_a_pipe_stays_a_pipe_and_its_reader_gets_everything(tmp_path: Path) -> None:
    pipe, content = tmp_path / "pipe", b"x" * 200_000  # More than a pipe holds: writer and reader take turns.
    os.mkfifo(pipe)
    arrived = list[bytes]()
    reader = threading.Thread(target=lambda: arrived.append(pipe.read_bytes()))
    reader.start()
    check_outputs({"--html": pipe})
    write_outputs({pipe: content})
    reader.join(timeout=60)
    assert arrived == [content]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_stays_a_link_and_the_file_behind_it_changes(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "report.html", tmp_path / "latest.html"
    target.write_text("old")
    link.symlink_to(target)
    write_outputs({link: b"new"})
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]


def test_a_device_stays_a_device() -> None:
    null = Path("/dev/null")
    check_outputs({"--json": null, "--html": null})
    write_outputs({null: b"anything"})
    assert stat.S_ISCHR(null.stat().st_mode)


def test_a_full_disk_is_named_and_no_file_changes(tmp_path: Path) -> None:
    full, page = Path("/dev/full"), tmp_path / "page.html"
    if not full.exists():
        pytest.skip("no /dev/full here, a device that is always full")
    page.write_text("old")
    with pytest.raises(InvalidInputError, match=r"^/dev/full cannot be written: No space left on device"):
        write_outputs({page: b"new", full: b"x"})
    assert stat.S_ISCHR(full.stat().st_mode)
    assert page.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_an_error_without_a_file_name_gets_the_name_that_the_user_gave(tmp_path: Path) -> None:
    """A full disk names no file, and a partial file's name says nothing to the user."""
    path = tmp_path / "page.html"
    full_disk = mock.patch.object(Path, "write_bytes", side_effect=OSError(28, "No space left on device"))
    with full_disk, pytest.raises(InvalidInputError, match=f"^{path} cannot be written: No space left on device"):
        write_outputs({path: b"x"})
    with pytest.raises(InvalidInputError, match=f"^{path} cannot be written"), naming(path):
        raise OSError(28, "No space left on device")


def test_what_goes_to_our_standard_output_does_not_replace_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`moe-rl ... --json /dev/stdout > file`: figures and table are both in the file."""
    path = tmp_path / "both"
    with path.open("wb") as file:
        monkeypatch.setattr("moe_rl.core.outputs.STANDARD_OUTPUT", file.fileno())
        file.write(b"before ")
        file.flush()
        write_outputs({path: b"figures"})
        file.write(b" after")
    assert path.read_bytes() == b"before figures after"


def test_missing_folders_are_made_when_the_file_is_written(tmp_path: Path) -> None:
    path = tmp_path / "out" / "today" / "page.html"
    check_outputs({"--html": path})
    assert not (tmp_path / "out").exists()
    write_outputs({path: b"page"})
    assert path.read_bytes() == b"page"
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="is not a writable folder"):
        check_outputs({"--html": tmp_path / "file" / "page.html"})
