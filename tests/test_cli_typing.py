"""What people mistype: the nearest command or option is named, and numbers are read as they are written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runner import moe_rl, simulated, write_npz

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (("simulat", "x"), "'simulate'"),
        (("help",), "'--help'"),
        (("version",), "'--version'"),
        (("simulate", "x", "--modle", "y"), "'--model'"),
        (("tune", "--gpu", 8), "'--gpus'"),
        (("trace", "convrt"), "'convert'"),
        (("sweep", "x", "--micro-batch-token", 8), "'--micro-batch-tokens'"),
    ],
)
def test_the_nearest_command_or_option_is_named(arguments: tuple[object, ...], near: str) -> None:
    ran = moe_rl(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert f"Did you mean {near}?" in ran.err
    assert "--help." in ran.err


def test_what_is_near_nothing_gets_no_suggestion() -> None:
    assert "Did you mean" not in moe_rl("zzzzzzzz").err


def test_a_short_name_with_size_is_known_in_a_file_of_options(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("ep_size: 8\n")
    ran = moe_rl("simulate", write_npz(tmp_path / "t.npz"), "--config", config)
    assert "unknown key 'ep_size'. Did you mean 'ep'?" in ran.err


@pytest.mark.parametrize("written", ["4000", "4,000", "4_000", "4k", "4.0k", "0.004M"])
def test_numbers_are_read_as_people_write_them(tmp_path: Path, written: str) -> None:
    trace = write_npz(tmp_path / "t.npz")
    document = simulated(tmp_path, trace, "--ep", 4, "--micro-batch-tokens", written, "--policy", "static")
    assert "at most 4000 tokens" in document["setting"]["micro_batches"]


@pytest.mark.parametrize("written", ["8kk", "8,19", "1.5", "-", "eight"])
def test_what_is_no_whole_number_is_refused(tmp_path: Path, written: str) -> None:
    ran = moe_rl("simulate", write_npz(tmp_path / "t.npz"), "--micro-batch-tokens", written)
    assert ran.code == 2
    assert "--micro-batch-tokens must be a whole number" in ran.err


def test_two_names_of_one_page_are_refused_together(tmp_path: Path) -> None:
    ran = moe_rl(
        "simulate", write_npz(tmp_path / "t.npz"), "--html", tmp_path / "a.html", "--plot", tmp_path / "b.html"
    )
    assert (ran.code, ran.out) == (2, "")
    assert "--html and --plot both name the HTML output" in ran.err


def test_python_m_is_the_command_and_says_which_copy_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moe_rl", "--version"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip().endswith(f"in {ROOT / 'moe_rl'}")


@pytest.mark.lengthy
@pytest.mark.parametrize("flag", ["--html", "--plot"])
def test_a_page_has_one_flag_in_every_command(tmp_path: Path, flag: str) -> None:
    trace, page = write_npz(tmp_path / "t.npz"), tmp_path / "new" / "page.html"
    same = ("--ep", 4, "--policy", "static,ultraep")
    for command in (
        ("simulate", trace, *same),
        ("sweep", trace, *same, "--sweep", "seq_length=512,1024", "--out", tmp_path / f"{flag}.jsonl"),
        ("rl-step", trace, *same),
    ):
        page.unlink(missing_ok=True)
        ran = moe_rl(*command, flag, page)
        assert ran.code == 0, ran.err
        assert page.read_text().startswith("<!doctype html>")
