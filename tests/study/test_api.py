"""The Python face: five lines do what the command line does, with the same figures and the same refusals."""

import inspect
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from cli_runner import moe_rl as command_line
from cli_runner import routes, snapshot, write_npz

import moe_rl
import moe_rl.study
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.trace import RoutingTrace
from moe_rl.report.html import render_html
from moe_rl.study.conditions import SoftwareNote

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {"num_experts": 8, "ep_group_tokens": 200, "expert_model_parallel_size": 4}
POLICIES = ["static", "ultraep"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A trace of 3 MoE layers of 8 experts, top-2."""
    return write_npz(tmp_path / "good.npz")


def in_memory() -> RoutingTrace:
    """What `path` holds."""
    return RoutingTrace.from_sequences([routes(40, seed=index) for index in range(12)], num_experts=8)


def arguments(options: dict[str, Any]) -> list[object]:
    """The options as flags."""
    given: list[object] = []
    for name, value in options.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else value
        given += [f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", text]
    return given


def figures(report: Any) -> dict[str, Any]:
    """What the report says of every policy, the planner's own time apart."""
    policies = report.as_json()["policies"]
    return {name: {k: v for k, v in one.items() if k != "plan_time_s"} for name, one in policies.items()}


# --- the model of a trace ------------------------------------------------------------------------------------


def of_model(name: str, *, layers: int = 16) -> RoutingTrace:
    """Routes of OLMoE's shape, 64 experts and top-8, under a name."""
    chosen = np.argsort(np.random.default_rng(0).random((40, layers, 64)), axis=2)[..., :8].astype(np.uint8)
    return RoutingTrace.from_sequences([chosen], num_experts=64, model=name)


def test_a_listed_model_that_the_trace_names_is_simulated_without_being_named_again() -> None:
    options: dict[str, Any] = {"ep_group_tokens": 200, "expert_model_parallel_size": 4, "policy": ["static"]}
    named = moe_rl.simulate(of_model("OLMoE"), **options)
    assert figures(named) == figures(moe_rl.simulate(of_model("OLMoE"), model="olmoe", **options))
    assert not named.model_caution


@pytest.mark.parametrize("trace", [of_model("mine"), of_model("olmoe", layers=2), of_model("")])
def test_a_model_that_is_assumed_is_announced_above_the_table_and_everywhere(trace: RoutingTrace) -> None:
    options: dict[str, Any] = {"ep_group_tokens": 200, "expert_model_parallel_size": 4, "policy": ["static"]}
    report = moe_rl.simulate(trace, **options)
    above, _, _ = str(report).partition("policy")
    assert "model assumed from the trace, on" in above
    assert above.count("are assumed. Give --model.") == 1
    assert report.model_caution in report.as_json()["notes"]
    assert report.model_caution in report._repr_html_()
    assert report.model_caution in render_html(report)
    chosen = moe_rl.simulate(trace, model="from-trace", **options)
    assert not chosen.model_caution
    assert figures(chosen) == figures(report)


# --- arrays of a program ------------------------------------------------------------------------------------


def test_a_list_of_arrays_is_a_trace() -> None:
    arrays = [routes(40, seed=index) for index in range(12)]
    options: dict[str, Any] = {**SMALL, "policy": ["static"]}
    assert figures(moe_rl.simulate(arrays, **options)) == figures(moe_rl.simulate(in_memory(), **options))
    assert moe_rl.open_trace(arrays, num_experts=8).num_tokens == 480
    with pytest.raises(InvalidInputError, match="give num_experts"):
        moe_rl.open_trace(arrays)
    with pytest.raises(
        InvalidInputError, match=r"\[tokens, layers, topk\], with the same number of layers and the same topk"
    ):
        moe_rl.open_trace([arrays[0][:, 0]], num_experts=8)


@pytest.mark.parametrize("name", ["routes.pkl", "routes.npy"])
def test_pickled_arrays_are_refused_with_the_line_that_saves_them(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith(".npy"):
        np.save(path, np.array([{}], dtype=object))
    else:
        path.write_bytes(pickle.dumps([routes(4)]))
    with pytest.raises(InvalidInputError, match=r'np\.savez\("routes\.npz", \*arrays\)'):
        moe_rl.open_trace(path, num_experts=8)


# --- GPUs ---------------------------------------------------------------------------------------------------


def test_gpus_set_the_number_of_ep_groups_and_stand_in_the_header(path: Path) -> None:
    options: dict[str, Any] = {"num_experts": 8, "expert_model_parallel_size": 4, "policy": ["static"]}
    report = moe_rl.simulate(path, gpus=8, micro_batch_tokens=200, **options)
    assert report.setting["num_ep_groups"] == 2
    assert "on 8 GPUs of h100, 2 EP groups of EP4" in str(report)
    assert figures(report) == figures(moe_rl.simulate(path, num_ep_groups=2, micro_batch_tokens=200, **options))
    staged = moe_rl.simulate(path, gpus=8, pipeline_model_parallel_size=2, micro_batch_tokens=200, **options)
    assert (staged.setting["num_ep_groups"], staged.setting["num_gpus"]) == (1, 8)
    assert staged.setting["num_nodes"] == 1
    memory = report.memory["static"]
    assert f"fits: {memory.peak_bytes / 2**30:.1f} of {memory.hbm_bytes / 2**30:.1f} GiB" in " ".join(
        str(report).split()
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gpus": 6}, r"--gpus 6 is not a multiple of 4, the number of GPUs in one EP group \(EP 4\)\."),
        ({"gpus": 2}, "--gpus 2 is not a multiple of 4"),
        (
            {"gpus": 8, "num_ep_groups": 1},
            "--gpus 8 gives 2 EP groups, but --num-ep-groups is 1. Set only one of them.",
        ),
        ({"gpus": 8, "ep_group_tokens": 200}, "--ep-group-tokens is for a single EP group: leave --gpus at 4."),
    ],
)
def test_gpus_that_fill_no_ep_groups_are_refused(path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        moe_rl.simulate(path, num_experts=8, expert_model_parallel_size=4, **options)


# --- one report ---------------------------------------------------------------------------------------------


@pytest.mark.lengthy
def test_python_and_the_command_line_report_the_same(tmp_path: Path, path: Path) -> None:
    report = moe_rl.simulate(path, policy=POLICIES, sensitivity=True, **SMALL)
    written = tmp_path / "a.json"
    options = arguments({**SMALL, "policy": POLICIES, "sensitivity": True})
    assert command_line("simulate", path, *options, "--json", written).code == 0
    report.save(tmp_path / "b.json")
    theirs, ours = (json.loads(file.read_text()) for file in (written, tmp_path / "b.json"))
    for document in (theirs, ours):
        document.pop("command")
        for one in document["policies"].values():
            one.pop("plan_time_s")
    assert ours == theirs
    assert report.command.startswith("moe_rl.simulate('")


@pytest.mark.parametrize("kind", ["text", "path", "opened", "stored", "memory"])
def test_a_trace_may_be_a_path_or_open_or_in_memory(tmp_path: Path, path: Path, kind: str) -> None:
    moe_rl.open_trace(in_memory()).save(tmp_path / "s.moetrace")
    trace: Any = {
        "text": str(path),
        "path": path,
        "opened": moe_rl.open_trace(path, num_experts=8),
        "stored": tmp_path / "s.moetrace",
        "memory": in_memory(),
    }[kind]
    expected = figures(moe_rl.simulate(path, policy="static,ultraep", **SMALL))
    assert figures(moe_rl.simulate(trace, policy="static,ultraep", **SMALL)) == expected


def test_a_trace_in_memory_is_cut_into_its_steps(tmp_path: Path) -> None:
    step = np.array([7] * 6 + [9] * 6)
    sequences = [routes(40, seed=index) for index in range(12)]
    trace = moe_rl.open_trace(RoutingTrace.from_sequences(sequences, num_experts=8, step=step))
    assert trace.steps == (7, 9)
    assert [part.num_sequences for part in trace.parts(9)] == [6]
    trace.save(tmp_path / "s.moetrace")
    stored = moe_rl.open_trace(tmp_path / "s.moetrace")
    assert (stored.steps, stored.num_tokens) == (trace.steps, trace.num_tokens)
    for name in trace.steps:
        assert np.array_equal(stored.load(name).routed_experts, trace.load(name).routed_experts)
    with pytest.raises(InvalidInputError, match="already exists"):
        trace.save(tmp_path / "s.moetrace")


def test_an_open_trace_takes_no_options_of_reading(path: Path) -> None:
    trace = moe_rl.open_trace(path, num_experts=8)
    with pytest.raises(InvalidInputError, match="has num_experts = 8, but you set 16"):
        moe_rl.simulate(trace, **{**SMALL, "num_experts": 16})
    with pytest.raises(InvalidInputError, match="was opened in format npz, but format is set to vllm"):
        moe_rl.simulate(trace, format="vllm", **SMALL)


def test_ids_in_memory_are_checked(path: Path) -> None:
    trace = in_memory()
    trace.routed_experts[5, 1] = 3
    with pytest.raises(InvalidInputError, match="is routed to one expert twice"):
        moe_rl.simulate(trace, **SMALL)


def test_a_report_prints_as_the_command_line_does(path: Path) -> None:
    report = moe_rl.simulate(path, policy=POLICIES, **SMALL)
    printed = command_line("simulate", path, *arguments({**SMALL, "policy": POLICIES}), "--explain").out
    assert [line.split()[:4] for line in str(report).splitlines()] == [
        line.split()[:4] for line in printed.splitlines()
    ]
    table = report.table()
    assert table in str(report)
    assert max(map(len, table.splitlines())) <= 80
    assert "of ideal" not in " ".join(table.split())
    assert report.table("all").splitlines()[1].split()[0] == "max/mean"
    assert len(report.table("imbalance").splitlines()[1].split()) == 1


def test_a_notebook_shows_headline_table_and_bars(path: Path) -> None:
    shown = moe_rl.simulate(path, policy=POLICIES, **SMALL)._repr_html_()
    tree = ElementTree.fromstring(shown)  # one well-formed element, which a notebook may put anywhere
    assert [row[0].text for row in tree.iter("tr")][1:] == ["static", "ultraep", "forced_balance", "ideal"]
    assert len(list(tree.iter("{http://www.w3.org/2000/svg}svg"))) == 1
    assert "<script" not in shown
    (style,) = re.findall("<style>(.*?)</style>", shown)
    selectors = [one for rule in style.split("}") if rule for one in rule.split("{")[0].split(",")]
    assert all(selector.startswith(".moe-rl") for selector in selectors)  # nothing else in the notebook is styled
    untimed = moe_rl.simulate(path, policy=POLICIES, objective="imbalance", **SMALL)._repr_html_()
    assert "<svg" not in untimed


def test_a_name_from_outside_stays_a_name_in_a_notebook(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "<b>&.npz")
    report = moe_rl.simulate(path, policy="static", ep_group_tokens=200, expert_model_parallel_size=4, num_experts=8)
    ElementTree.fromstring(report._repr_html_())


def test_plans_are_saved_and_loaded(tmp_path: Path, path: Path) -> None:
    report = moe_rl.simulate(path, policy=POLICIES, **SMALL)
    file = tmp_path / "step.plan.npz"
    report.plans["ultraep"].save(file)
    assert moe_rl.load_plan(file).hash == report.plans["ultraep"].hash
    alone = moe_rl.plan(path, policy="ultraep", **SMALL)
    assert alone.hash == report.plans["ultraep"].hash
    with pytest.raises(InvalidInputError, match=r"must end in \.npz, got .*step\.txt"):
        alone.save(tmp_path / "step.txt")


@pytest.mark.lengthy
def test_a_sweep_is_its_points(tmp_path: Path, path: Path) -> None:
    values = {"expert_model_parallel_size": [2, 4], "replica_slots": (0, 1)}
    options = {"num_experts": 8, "ep_group_tokens": 200, "policy": POLICIES}
    found = moe_rl.sweep(path, values, **options)
    assert [dict(point.point) for point in found.points] == [
        {"expert_model_parallel_size": ep, "replica_slots": slots} for ep in (2, 4) for slots in (0, 1)
    ]
    one = moe_rl.simulate(path, replica_slots=1, **SMALL, policy=POLICIES)
    assert found.points[3].policies["ultraep"] == one.as_json()["policies"]["ultraep"]["speedup_vs_static"]  # type: ignore[index]
    out = tmp_path / "s.jsonl"
    kept = moe_rl.sweep(in_memory(), values, out=out, ep_group_tokens=200, policy=POLICIES)
    assert kept.table() == str(kept)
    before = out.read_bytes()
    assert moe_rl.sweep(in_memory(), values, out=out, ep_group_tokens=200, policy=POLICIES).points == kept.points
    assert out.read_bytes() == before
    kept.save(tmp_path / "s.svg")
    ElementTree.parse(tmp_path / "s.svg")
    assert kept._repr_svg_() == (tmp_path / "s.svg").read_text()
    with pytest.raises(InvalidInputError, match=r"must end in one of \.html, \.svg, \.png, \.pdf"):
        kept.save(tmp_path / "s.gif")


# --- refusals -----------------------------------------------------------------------------------------------

WRONG: list[tuple[str, dict[str, Any]]] = [
    ("--ep 3 does not divide the 8 experts; --ep 2 or --ep 4 does.", {"expert_model_parallel_size": 3}),
    ("give either --micro-batch-tokens or --ep-group-tokens, not both.", {"micro_batch_tokens": 100}),
    ("--ep-group-tokens is for a single EP group: leave --num-ep-groups at 1.", {"num_ep_groups": 2}),
    ("--objective 'tme' is unknown. Did you mean 'time'?", {"objective": "tme"}),
    ("unknown policy 'ultrep'. Did you mean 'ultraep'?", {"policy": "ultrep"}),
    ("--policy names a policy twice: static, static.", {"policy": ["static", "static"]}),
    ("policy 'ultraep' has no parameter 'x'. Known:", {"policy": "ultraep", "policy_option": "ultraep.x=1"}),
    ("unknown cluster 'h1000'. Did you mean 'h100'?", {"cluster": "h1000"}),
    ("is not a trace of model 'OLMoE-1B-7B': the trace has 3 MoE layers, the model has 16", {"model": "olmoe"}),
    ("good.npz does not have step 9: it has only step 0.", {"step": 9}),
    ("--num-nodes must be at least 1, got 0.", {"num_nodes": 0}),
    ("--expert-model-parallel-size must be at least 1, got 0.", {"expert_model_parallel_size": 0}),
    ("replica_slots must be at least 0, got -1.", {"replica_slots": -1}),
    ("--recompute-modules needs --recompute-granularity selective.", {"recompute_modules": "moe"}),
    ("needs times, which the objective imbalance does not predict.", {"objective": "imbalance", "sensitivity": True}),
    ("unknown trace format 'vlm'. Did you mean 'vllm'?", {"format": "vlm"}),
]


@pytest.mark.parametrize(("sentence", "options"), WRONG, ids=[next(iter(reversed(options))) for _, options in WRONG])
def test_python_refuses_in_the_words_of_the_command_line(
    tmp_path: Path, path: Path, sentence: str, options: dict[str, Any]
) -> None:
    before = snapshot(tmp_path)
    with pytest.raises(InvalidInputError) as raised:
        moe_rl.simulate(path, **{**SMALL, **options})
    assert sentence in str(raised.value)
    ran = command_line("simulate", path, *arguments({**SMALL, **options}), "--json", tmp_path / "a.json")
    assert ran.code == 2
    assert ran.err.strip().removeprefix("error: ").removeprefix("--") == str(raised.value).removeprefix("--")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"replica_slot": 2}, "unknown key 'replica_slot'. Did you mean 'replica_slots'?"),
        ({"expert_model_parallel_size": "many"}, "--expert-model-parallel-size must be a whole number"),
        ({"config": "no.yaml"}, "there is no file no.yaml."),
    ],
)
def test_a_keyword_that_does_not_exist_or_fit_is_refused(path: Path, options: dict[str, Any], sentence: str) -> None:
    for call in (moe_rl.simulate, moe_rl.plan):
        with pytest.raises(InvalidInputError) as raised:
            call(path, **{**SMALL, **options})
        assert sentence in str(raised.value)


def test_short_names_of_the_command_line_are_taken_and_shown(path: Path) -> None:
    small = {name: value for name, value in SMALL.items() if name != "expert_model_parallel_size"}
    assert figures(moe_rl.simulate(path, ep=4, policy="static", **small)) == figures(
        moe_rl.simulate(path, policy="static", **SMALL)
    )
    with pytest.raises(InvalidInputError, match="ep and expert_model_parallel_size are the same option"):
        moe_rl.simulate(path, ep=4, **SMALL)
    for call in (moe_rl.simulate, moe_rl.plan, moe_rl.sweep, moe_rl.tune, moe_rl.rl_step):
        shown = inspect.signature(call).parameters
        assert shown["expert_model_parallel_size"].default == 8
        assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in shown.values())


def test_paths_and_numbers_of_numpy_are_taken_as_options(path: Path) -> None:
    cluster = ROOT / "configs" / "clusters" / "h100.yaml"
    options = {"expert_model_parallel_size": np.int64(4), "cluster": cluster, "policy": ("static", "ultraep")}
    report = moe_rl.simulate(path, **{**SMALL, **options})
    assert figures(report) == figures(moe_rl.simulate(path, policy=POLICIES, **SMALL))


@pytest.mark.parametrize("trace", [None, 5, ["a.npz"]])
def test_what_is_not_a_trace_is_refused(trace: Any) -> None:
    for call in (moe_rl.simulate, moe_rl.open_trace):
        with pytest.raises(InvalidInputError, match="a path, an open trace, a RoutingTrace or a list of arrays"):
            call(trace)


def test_a_missing_trace_and_a_wrong_reading_option_are_refused(tmp_path: Path, path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"there is no trace at \S*nothing\.npz\.$"):
        moe_rl.simulate(tmp_path / "nothing.npz", model="qwen3-30b-a3b")  # the model is not to blame
    with pytest.raises(InvalidInputError, match=r"unknown key 'experts'\. Did you mean 'num_experts'"):
        moe_rl.open_trace(path, experts=8)
    with pytest.raises(
        InvalidInputError, match="a plan file contains the plan of one policy: give one --policy instead of 2"
    ):
        moe_rl.plan(path, policy=POLICIES, **SMALL)


@pytest.mark.parametrize("values", [{"replica_slot": [1]}, {"policy": ["static"]}, {"seq_length": 5}, {}])
def test_a_wrong_grid_is_refused(tmp_path: Path, path: Path, values: Any) -> None:
    with pytest.raises(InvalidInputError, match="--sweep"):
        moe_rl.sweep(path, values, out=tmp_path / "s.jsonl", **SMALL)
    assert not (tmp_path / "s.jsonl").exists()


@pytest.mark.parametrize("name", ["r.txt", "taken", "taken.html/x.html"])
def test_a_report_that_cannot_be_saved_leaves_nothing(tmp_path: Path, path: Path, name: str) -> None:
    report = moe_rl.simulate(path, policy="static", **SMALL)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken.html").write_text("mine")
    before = snapshot(tmp_path)
    with pytest.raises(InvalidInputError):
        report.save(tmp_path / name)
    assert snapshot(tmp_path) == before


# --- loading ------------------------------------------------------------------------------------------------


def loaded_by(code: str) -> set[str]:
    wanted = ("numpy", "pydantic", "typer", "rich", "torch", "moe_rl.study", "moe_rl.cli")
    code = f"import sys\n{code}\nprint(*({wanted!r} & sys.modules.keys()))".replace(repr(wanted), f"set({wanted!r})")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return set(ran.stdout.split())


@pytest.mark.lengthy
def test_importing_the_package_loads_nothing_and_the_library_no_terminal() -> None:
    assert loaded_by("import moe_rl; dir(moe_rl)") == set()
    assert loaded_by("import moe_rl; moe_rl.simulate") == {"numpy", "pydantic", "moe_rl.study"}
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = moe_rl.simulat  # type: ignore[attr-defined]
    for module in (moe_rl, moe_rl.study):
        assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.lengthy
def test_the_lines_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.lengthy
def test_a_gain_outside_the_interval_stands_below_the_headline() -> None:
    """Other software at EP8: 1.01x of static, where the headline says 1.00x to 1.00x; at EP16 both say 1.00x."""
    outside, inside = (
        moe_rl.simulate("countdown-grpo", ep=ep, batch="recorded", policy="static,moe-rl") for ep in (8, 16)
    )
    (caution,) = (sentence for sentence in outside.cautions if sentence.startswith("software:"))
    assert "With --software tuned" in caution
    assert "outside the 80 % interval of 1.00x to 1.00x" in caution
    assert not any(sentence.startswith("software:") for sentence in outside.notes)
    assert not any(sentence.startswith("software:") for sentence in inside.cautions)
    assert any(sentence.startswith("software:") for sentence in inside.notes)


def test_only_a_gain_outside_the_interval_as_printed_is_a_caution() -> None:
    note = SoftwareNote(sentence="software: typical. moe-rl is 1.02x as fast as static.", gain=1.02)
    assert note.caution((1.03, 1.01, 1.05)) == ""
    assert note.caution((1.03, 1.0249, 1.05)) == ""
    assert "static, outside the 80 % interval of 1.03x to 1.05x. Set --software" in note.caution((1.04, 1.03, 1.05))
    assert note.caution(()) == ""
    assert SoftwareNote(sentence="software: typical.").caution((1.0, 1.0, 1.0)) == ""
