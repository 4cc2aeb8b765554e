"""A record names the commit it was made at and whether the checkout had changed; what is unknown is None."""

import json
import subprocess
from pathlib import Path

from benchmarks.hardware import parse_gpu_query, record_hardware


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_record_holds_the_commit_and_whether_it_was_changed(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    tracked = tmp_path / "file"
    tracked.write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "-m", "Add a file")
    clean = record_hardware(tmp_path)
    assert clean["commit"] == git(tmp_path, "rev-parse", "HEAD")
    assert clean["dirty"] is False
    (tmp_path / "untracked").write_text("does not count")
    assert record_hardware(tmp_path)["dirty"] is False
    tracked.write_text("two")
    assert record_hardware(tmp_path)["dirty"] is True


def test_a_folder_without_history_has_no_commit(tmp_path: Path) -> None:
    found = record_hardware(tmp_path)
    assert found["commit"] is None
    assert found["dirty"] is None
    assert int(str(found["cores"])) >= 1
    assert json.loads(json.dumps(found))["python"] == found["python"]


def test_a_gpu_query_is_read_by_name_and_what_it_does_not_say_is_left_out() -> None:
    found = parse_gpu_query("NVIDIA H200, 580.65.06, 345, 1980, 3201, [N/A], 31")
    assert found["name"] == "NVIDIA H200"
    assert found["clocks.max.sm"] == "1980"
    assert "power.limit" not in found
