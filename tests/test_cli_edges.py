"""What shells, terminals and file systems do to the command line: odd names, readers that leave, narrow windows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_runner import moe_rl, routes, snapshot, write_npz

from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import TraceWriter

BATCH = ("--ep", 4, "--ep-group-tokens", 200)
UNPRINTABLE = b"na\xffme<script>\n\x1b[31m"
"""Not UTF-8, markup, a line break and a terminal's escape sequence."""


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[bytes]:
    """Run the entry point in a process of its own."""
    command = [sys.executable, "-c", "from moe_rl.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, check=False, timeout=120, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.lengthy
def test_a_file_name_may_be_any_bytes(tmp_path: Path) -> None:
    trace = write_npz(tmp_path / (os.fsdecode(UNPRINTABLE) + ".npz"))
    page, figures = tmp_path / "a.html", tmp_path / "a.json"
    ran = run("simulate", trace, *BATCH, "--policy", "static", "--json", figures, "--html", page)
    assert ran.returncode == 0, ran.stderr
    shown = ran.stdout.splitlines()[0]
    assert b"\x1b" not in ran.stdout + ran.stderr
    assert rb"<script>\n\x1b[31m.npz" in shown
    assert json.loads(figures.read_text(encoding="utf-8"))["trace"]["name"].startswith("na")
    assert "me<script>" not in page.read_text(encoding="utf-8")
    assert run("trace", "info", trace).returncode == 0


def test_the_name_of_a_model_cannot_steer_the_terminal(tmp_path: Path) -> None:
    trace = RoutingTrace.from_sequences([routes(40)], num_experts=8, model="red\x1b[31m\nsecond line")
    with TraceWriter(tmp_path / "t.moetrace", num_experts=8, moe_layer_ids=trace.moe_layer_ids, top_k=2) as writer:
        writer.append(trace)
    for arguments in (("trace", "info", tmp_path / "t.moetrace"), ("simulate", tmp_path / "t.moetrace", *BATCH)):
        ran = moe_rl(*arguments)
        assert ran.code == 0, ran.err
        assert "\x1b" not in ran.out
        assert r"red\x1b[31m\nsecond line" in ran.out


@pytest.mark.lengthy
def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    trace = write_npz(tmp_path / "t.npz")
    arguments = " ".join(map(str, ("simulate", trace, *BATCH, "--policy", "static")))
    program = f'"{sys.executable}" -c "from moe_rl.cli import main; main()" {arguments} | head -c 1'
    ran = subprocess.run(
        ["bash", "-c", f'{program}; echo "${{PIPESTATUS[0]}}"'], capture_output=True, check=True, timeout=120
    )
    assert ran.stdout.decode().endswith("0\n"), ran


def test_a_trace_of_one_micro_batch_needs_no_options(tmp_path: Path) -> None:
    """The default policies hold eplb, which cannot be planned here; asked for by name it is refused."""
    trace = write_npz(tmp_path / "t.npz", sequences=4)
    ran = moe_rl("simulate", trace, *BATCH, "--json", tmp_path / "a.json")
    assert ran.code == 0, ran.err
    assert "eplb is left out" in " ".join(ran.out.split())
    assert {"static", "eplb-oracle", "moe-rl"} <= set(json.loads((tmp_path / "a.json").read_text())["policies"])
    assert moe_rl("simulate", trace, *BATCH, "--policy", "eplb").code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seed", -1), "seed must be at least 0"),
        (("--tokens-per-rank", 2_000_000_000), "2000000000 tokens per rank are too many"),
        (("--policy", "relibra", "--policy-option", "relibra.iterations=abc"), "iterations must be a whole number"),
        (("--policy", "eplb", "--policy-option", "eplb.hierarchical=7"), "hierarchical must be true or false"),
        (
            ("--pipeline-model-parallel-size", 4),
            "4 model chunks (pipeline stages x virtual stages) need at least as many layers",
        ),
        (("--recompute-modules", "moe"), "--recompute-modules needs --recompute-granularity selective"),
        (("--html", "-"), "--html - cannot be standard output"),
        (("--objective", "tim"), "Did you mean 'time'?\n"),
    ],
)
def test_values_that_nothing_can_be_made_of_get_a_sentence(
    tmp_path: Path, arguments: tuple[object, ...], said: str
) -> None:
    trace = write_npz(tmp_path / "t.npz")
    before = snapshot(tmp_path)
    ran = moe_rl("simulate", trace, *BATCH, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("grpo", "--option", "num_steps=abc"), "num_steps must be a whole number, got 'abc'"),
        (("grpo", "--option", "num_steps=1.5"), "num_steps must be a whole number, got 1.5"),
        (("preset_a", "--option", "mean_length=nan"), "mean_length must be a number, got nan"),
        (("preset_a", "--seed", "-1"), "seed must be at least 0, got -1"),
    ],
)
def test_options_of_generators_are_checked(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    name, *options = arguments
    ran = moe_rl("trace", "synth", name, tmp_path / "s.moetrace", *options)
    assert ran.code == 2
    assert said in ran.err
    assert snapshot(tmp_path) == {}


def test_a_trace_is_not_converted_into_itself(tmp_path: Path) -> None:
    """Also under a path that only exists once its folders do."""
    moe_rl("trace", "convert", write_npz(tmp_path / "t.npz"), tmp_path / "t.moetrace", "--num-experts", 8)
    before = snapshot(tmp_path)
    for target in (tmp_path / "new" / ".." / "t.moetrace", tmp_path / "t.moetrace" / "inner.moetrace"):
        ran = moe_rl("trace", "convert", tmp_path / "t.moetrace", target, "--overwrite")
        assert ran.code == 2
        assert "choose another path" in ran.err
        assert snapshot(tmp_path) == before


@pytest.mark.lengthy
def test_a_train_dump_gives_the_recorded_layout(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    samples = [
        {"index": i, "tokens": list(range(41)), "rollout_routed_experts": routes(40, seed=i).astype(np.int32)}
        for i in range(4)
    ]
    torch.save({"rollout_id": 2, "samples": samples}, tmp_path / "rollout.pt")
    shards = [
        {"data_parallel_rank": rank, "partition": [rank, 2 + rank], "micro_batch_indices": [[0], [1]]}
        for rank in (0, 1)
    ]
    torch.save({"rollout_id": 2, "dp_shards": shards}, tmp_path / "train.pt")
    asked = ("simulate", tmp_path / "rollout.pt", "--format", "slime", "--num-experts", 8, "--ep", 2)
    assert moe_rl(*asked, "--json", tmp_path / "a.json").code == 0
    assert json.loads((tmp_path / "a.json").read_text())["setting"]["micro_batches"] != "as recorded"
    ran = moe_rl(*asked, "--train-dump", tmp_path / "train.pt", "--json", tmp_path / "b.json")
    assert ran.code == 0, ran.err
    assert json.loads((tmp_path / "b.json").read_text())["setting"]["micro_batches"] == "as recorded"
