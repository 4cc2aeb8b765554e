"""Help on two levels, sentences for arguments that the parser refuses, and hints where a result would mislead."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import yaml
from cli_runner import moe_rl, routes, write_npz

from moe_rl.cli.commands import COMMANDS, command_named
from moe_rl.cli.help import WORDS
from moe_rl.config import load_software
from moe_rl.core.cost import REPLICA_CONTENTION
from moe_rl.core.reduce import Filler
from moe_rl.core.schedules import FRAMEWORK_LAYOUTS
from moe_rl.core.trace import RoutingTrace
from moe_rl.option_groups import words_of
from moe_rl.planner.base import OURS
from moe_rl.planner.domain_engine import ENGINES
from moe_rl.planner.objective import OBJECTIVES
from moe_rl.replay import TraceReader, TraceWriter
from moe_rl.simulators.rl_step import FITTED, PRECISIONS, ROUTES_FROM, STATE_BYTES
from moe_rl.simulators.setting import OFFLOAD_MODULES
from moe_rl.simulators.weight_sync import TRANSPORTS
from moe_rl.study import options
from moe_rl.study.groups import GRAPHS
from moe_rl.study.options import SimulationOptions
from moe_rl.study.rl_options import KnownStepOptions, RlStepOptions, TrainerOptions, TuneOptions
from moe_rl.study.shown import SHOWN

BATCH = ("--ep", 4, "--ep-group-tokens", 200)
SCREEN = 48
"""Lines of a help at 80 columns: those of `sweep`, which has the most options of its own."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_npz(tmp_path / "good.npz")


@pytest.mark.parametrize("command", ["simulate", "plan", "sweep", "rl-step", "tune"])
def test_help_fits_a_screen_and_help_all_has_every_option(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    first, everything = moe_rl(command, "--help"), moe_rl(command, "--help-all")
    assert (first.code, everything.code) == (0, 0)
    assert len(first.out.splitlines()) <= SCREEN
    for common in ("--model", "--cluster", "--ep", "--micro-batch-tokens", "--policy", "--help-all"):
        assert common in first.out
    assert "--optimizer-offload" not in first.out
    assert ("--current" in first.out) == (command == "tune")
    schema = {"rl-step": RlStepOptions, "tune": TuneOptions}.get(command, SimulationOptions)
    for name in words_of(schema):
        assert f"--{name.replace('_', '-')}" in everything.out


@pytest.mark.parametrize("group", [(), ("trace",), ("replay",)])
def test_a_group_alone_prints_its_help(group: tuple[str, ...]) -> None:
    alone, asked = moe_rl(*group), moe_rl(*group, "--help")
    assert (alone.code, alone.err) == (0, "")
    assert alone.out == asked.out
    assert len(alone.out.splitlines()) > 5


def test_help_of_all_commands_imports_none() -> None:
    code = "import sys; from moe_rl.cli import main\ntry: main()\nfinally: sys.exit('numpy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    assert all(f"  {name} " in ran.stdout for name in COMMANDS)


def test_an_option_of_the_second_level_is_still_an_option(trace: Path) -> None:
    ran = moe_rl("simulate", trace, *BATCH, "--policy", "static", "--fp8-format", "hybrid", "--json", "-")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["setting"]["precision"] == "fp8"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("simulate", "x", "--ep", "abc"), "error: --ep must be a whole number, got 'abc'."),
        (
            ("simulate", "x", "--expert-model-parallel-size=1.5"),
            "error: --expert-model-parallel-size must be a whole number, got '1.5'.",
        ),
        (("simulate", "x", "--reroute", "much"), "error: --reroute must be a number, got 'much'."),
        (("simulate", "x", "--trace-micro-batches", "0"), "error: --trace-micro-batches must be at least 1, got '0'."),
        (("simulate",), "error: Missing argument 'trace'. See moe-rl simulate --help."),
        (("frob",), "error: No such command 'frob'. See moe-rl --help."),
        (("simulate", "x", "--ep"), "error: Option '--ep' requires an argument."),
        (("simulate", "x", "--columns", "speed"), "error: --columns: there is no column 'speed'."),
    ],
)
def test_what_the_parser_refuses_is_one_sentence(arguments: tuple[str, ...], expected: str) -> None:
    ran = moe_rl(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(expected)
    assert len(ran.err.splitlines()) == 1


def test_the_number_of_experts_is_not_guessed_in_a_copy(tmp_path: Path, trace: Path) -> None:
    """A guess made for one simulation is said; a guess in a file would be taken for a fact."""
    target = tmp_path / "t.moetrace"
    ran = moe_rl("trace", "convert", trace, target)
    assert ran.code == 2
    assert "Set --num-experts, or set --model" in ran.err
    assert moe_rl("trace", "convert", trace, target, "--model", "my-model").code == 2
    assert not target.exists()
    assert moe_rl("trace", "convert", trace, target, "--model", "my-model", "--num-experts", 11).code == 0
    assert (TraceReader(target).manifest.num_experts, TraceReader(target).manifest.model) == (11, "my-model")


def test_a_known_model_says_how_many_experts_a_copy_has(tmp_path: Path) -> None:
    source = write_npz(tmp_path / "s.npz", layers=24, experts=30, top_k=4)
    target = tmp_path / "copy.moetrace"
    ran = moe_rl("trace", "convert", source, target, "--model", "gpt-oss-20b")
    assert ran.code == 0, ran.err
    assert (TraceReader(target).manifest.num_experts, TraceReader(target).manifest.model) == (32, "gpt-oss-20b")


def test_a_trace_that_leaves_micro_batches_empty_is_pointed_to_a_drawn_batch(trace: Path) -> None:
    sparse = moe_rl("simulate", trace, "--ep", 4, "--ep-group-tokens", 32_768, "--policy", "static")
    said = " ".join(sparse.out.split())
    assert "The trace fills only 120 of the 8,192 tokens (1%) that a rank's micro-batch may have." in said
    assert "set --batch drawn" in said
    # It is the first sentence below the table.
    assert said.index("The trace fills only") < said.index("Balancing can gain little")
    drawn = ("--micro-batch-tokens", 32_768, "--global-batch-tokens", 2_000)
    small = moe_rl("simulate", trace, "--ep", 4, *drawn, "--policy", "static")
    assert "The batch fills only" in " ".join(small.out.split())
    full = moe_rl("simulate", trace, *BATCH, "--policy", "static", "--explain")
    assert "The trace fills" not in full.out
    scaled = moe_rl("simulate", trace, *BATCH, "--policy", "static", "--tokens-per-rank", 8192, "--explain")
    assert "The trace fills" not in scaled.out


def test_a_policy_that_moving_homes_makes_slow_says_so(tmp_path: Path, trace: Path) -> None:
    """Little work and large experts: the moves take most of the step, and are shared by the steps that homes serve."""
    large = ("--policy", "eplb-oracle", "--hidden-size", 4096, "--moe-ffn-hidden-size", 4096)
    ran = moe_rl("simulate", trace, *BATCH, *large, "--json", tmp_path / "a.json")
    assert ran.code == 0, ran.err
    figures = json.loads((tmp_path / "a.json").read_text())["policies"]
    eplb, static = figures["eplb-oracle"], figures["static"]
    assert eplb["step_time_s"] > static["step_time_s"]
    said = " ".join(ran.out.split())
    assert f"eplb-oracle is {eplb['speedup_vs_static']:.2f}x as fast as static, because moving experts" in said
    assert f"takes {eplb['reorder_share']:.0%} of this step" in said
    spread = json.loads(moe_rl("simulate", trace, *BATCH, *large, "--reorder-interval", 10, "--json", "-").out)[
        "policies"
    ]["eplb-oracle"]
    expected = spread["speedup_vs_static"]
    assert (
        "If the experts then stayed for 10 equally balanced steps (--reorder-interval 10), "
        f"it would be {expected:.2f}x as fast." in said
    )


def test_lengths_weighted_by_tokens_are_called_so(tmp_path: Path) -> None:
    lengths = (30, 40, 110)
    given = RoutingTrace.from_sequences([routes(n, seed=n) for n in lengths], num_experts=8)
    with TraceWriter(tmp_path / "t.moetrace", num_experts=8, moe_layer_ids=(0, 1, 2), top_k=2) as writer:
        writer.append(given)
    ran = moe_rl("simulate", tmp_path / "t.moetrace", *BATCH, "--policy", "static")
    weighted = round(float(np.square(lengths).sum() / np.sum(lengths)))
    assert f"sequences of {weighted} tokens (weighted by tokens; plain mean 60)" in " ".join(ran.out.split())
    alike = moe_rl("simulate", tmp_path / "t.moetrace", *BATCH, "--policy", "static", "--seq-length", 400)
    assert "sequences of 400 tokens," in " ".join(alike.out.split())


def test_words_and_defaults_of_options_are_those_of_the_code() -> None:
    """Help is printed without numpy, so options.yaml has the words of tables that live elsewhere."""
    known: dict[str, Iterable[str]] = {
        "objective": OBJECTIVES.names,
        "domain_balance": (OURS, *ENGINES),
        "layout": FRAMEWORK_LAYOUTS,
        "filler": Filler,
        "cuda_graph_impl": GRAPHS,
        "rollout_precision": PRECISIONS,
        "routes_from": ROUTES_FROM,
    }
    assert {name: list(SHOWN[name].choices) for name in known} == {name: list(words) for name, words in known.items()}
    assert all(module in SHOWN["offload_modules"].help for module in OFFLOAD_MODULES)
    assert all(name in SHOWN["weight_sync_transport"].help for name in TRANSPORTS.names)
    assert list(STATE_BYTES) == TrainerOptions().offloaded_state
    assert all(name in SHOWN["offloaded_state"].help for name in STATE_BYTES)
    assert SimulationOptions().pricing.replica_exposed == REPLICA_CONTENTION
    assert load_software("tuned").costs.framework_share == FITTED["framework_share"]
    assert set(SHOWN) == set(words_of(KnownStepOptions)) | set(words_of(TuneOptions))


def test_no_option_stands_in_two_panels() -> None:
    """The later of two entries would win, and its help would be that of both."""
    panels = yaml.safe_load((Path(options.__file__).with_suffix(".yaml")).read_text())
    names = [name for entries in panels.values() for name in entries]
    assert len(names) == len(set(names))


def test_every_parameter_of_every_command_says_what_it_is() -> None:
    for name in COMMANDS:
        group = command_named(name)
        for command in getattr(group, "commands", {name: group}).values():
            assert not [param.name for param in command.params if param.name != "help" and not param.help], name
    assert (
        not {*WORDS}
        - {"every command", "bench kernels"}
        - {
            f"{name} {sub}" if hasattr(command_named(name), "commands") else name
            for name in COMMANDS
            for sub in getattr(command_named(name), "commands", {"": None})
        }
    )


@pytest.mark.lengthy
def test_help_of_a_simulation_loads_no_numpy() -> None:
    code = "import sys; from moe_rl.cli import main\ntry: main()\nfinally: sys.exit('numpy' in sys.modules)"
    for command in ("simulate", "sweep", "tune", "demo"):
        subprocess.run([sys.executable, "-c", code, command, "--help"], capture_output=True, check=True)
