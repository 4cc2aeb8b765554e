"""`moe-rl simulate`, `plan` and `demo`: what they write, and what they say about it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cli_runner import moe_rl, simulated, snapshot, write_npz

from moe_rl.config import CONFIGS
from moe_rl.core.plan_file import load_plan

BATCH = ("--ep", 4, "--ep-group-tokens", 200)
FIGURES = {
    "imbalance",
    "node_imbalance",
    "step_time_s",
    "tokens_per_s",
    "speedup_vs_static",
    "fraction_of_forced_balance",
    "fraction_of_ideal",
    "phi",
    "replicas_per_plan",
    "cross_node_replicas_per_plan",
    "moved_bytes",
    "inter_node_copies_per_token",
    "node_to_node_copies",
    "reorder_share",
    "resident_bytes",
    "plan_time_s",
    "breakdown_s",
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_npz(tmp_path / "good.npz")


def numbers_in(value: object) -> list[object]:
    """Every leaf of a JSON document."""
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in numbers_in(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in numbers_in(item)]
    return [value]


@pytest.mark.lengthy
def test_the_json_document_follows_its_schema(tmp_path: Path, trace: Path) -> None:
    document = simulated(tmp_path, trace, *BATCH)
    assert document["schema"] == "moe_rl.simulate/1"
    assert {"trace", "setting", "policies", "yardsticks", "notes", "command"} <= set(document)
    assert list(document["policies"]) == [
        "static",
        "eplb",
        "eplb-oracle",
        "ultraep",
        "moonep",
        "relibra",
        "moe-rl",
    ]
    assert set(document["yardsticks"]) == {"forced_balance", "ideal"}
    for figures in document["policies"].values():
        assert set(figures) >= FIGURES
    setting = document["setting"]
    for key in (
        "ep_size",
        "ranks_per_node",
        "num_micro_batches",
        "tokens_per_rank",
        "sequence_length",
        "slots",
        "cross_node_slots",
        "objective",
        "dispatcher",
        "recompute",
        "scaled",
        "phi",
        "imbalance_static",
    ):
        assert key in setting, key
    assert (setting["ep_size"], setting["scaled"], setting["objective"]) == (4, False, "time")
    assert document["trace"]["num_tokens"] == 12 * 40
    assert len(document["policies"]["static"]["imbalance_by_micro_batch"]) == setting["num_micro_batches"]


@pytest.mark.lengthy
def test_what_is_not_computed_is_absent_and_never_null(tmp_path: Path, trace: Path) -> None:
    for objective in ("time", "imbalance"):
        document = simulated(tmp_path, trace, *BATCH, "--objective", objective)
        assert None not in numbers_in(document)
    figures = document["policies"]["ultraep"]
    assert not {"step_time_s", "speedup_vs_static", "phi", "breakdown_s", "tokens_per_s"} & set(figures)
    assert "yardsticks" not in document
    assert "phi" not in document["setting"]


def test_parts_of_the_step_add_up_and_ratios_agree_with_times(tmp_path: Path, trace: Path) -> None:
    document = simulated(tmp_path, trace, *BATCH)
    static = document["policies"]["static"]["step_time_s"]
    for figures in (*document["policies"].values(), *document["yardsticks"].values()):
        assert sum(figures["breakdown_s"].values()) == pytest.approx(figures["step_time_s"], rel=1e-12)
        assert figures["speedup_vs_static"] == pytest.approx(static / figures["step_time_s"], rel=1e-12)
        assert figures["fraction_of_ideal"] <= 1.0 + 1e-12


@pytest.mark.lengthy
def test_the_same_command_gives_the_same_figures(tmp_path: Path, trace: Path) -> None:
    documents = [simulated(tmp_path, trace, *BATCH) for _ in range(2)]
    for document in documents:
        for figures in (*document["policies"].values(), document["balancing_alone"]):
            del figures["plan_time_s"]
    assert documents[0] == documents[1]


def test_static_is_simulated_whether_or_not_it_is_asked_for(tmp_path: Path, trace: Path) -> None:
    document = simulated(tmp_path, trace, *BATCH, "--policy", "ultraep")
    assert list(document["policies"]) == ["static", "ultraep"]


def test_scaled_results_say_so_everywhere(tmp_path: Path, trace: Path) -> None:
    page = tmp_path / "a.html"
    ran = moe_rl(
        "simulate", trace, *BATCH, "--tokens-per-rank", 4096, "--html", page, "--json", tmp_path / "a.json", "--explain"
    )
    assert ran.code == 0
    assert "4,096 tokens per rank (scaled)" in ran.out
    assert "step*" in ran.out
    assert "loads are scaled to 4,096 tokens per rank, from recorded micro-batches of 40 tokens per rank." in " ".join(
        ran.out.split()
    )
    assert '<li class="mark">scaled</li>' in page.read_text()
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["setting"]["scaled"] is True
    assert document["setting"]["tokens_per_rank"] == 4096
    assert document["setting"]["recorded_tokens_per_rank"] == 40


def test_scaling_to_the_recorded_size_changes_no_imbalance(tmp_path: Path, trace: Path) -> None:
    same = ("--policy", "static,eplb-oracle", "--objective", "imbalance")
    recorded = simulated(tmp_path, trace, "--ep", 4, "--ep-group-tokens", 160, *same)
    scaled = simulated(tmp_path, trace, "--ep", 4, "--ep-group-tokens", 160, *same, "--tokens-per-rank", 40)
    for policy in ("static", "eplb-oracle"):
        assert scaled["policies"][policy]["imbalance"] == recorded["policies"][policy]["imbalance"]


@pytest.mark.lengthy
def test_every_constant_in_the_json_has_its_source(tmp_path: Path, trace: Path) -> None:
    constants = simulated(tmp_path, trace, *BATCH)["setting"]["constants"]
    assert constants["rdma_gb_per_s"]["value"] == 43.0
    assert all(constant["source"] for constant in constants.values())


def test_the_command_line_wins_over_the_config_file_and_the_file_over_the_default(tmp_path: Path, trace: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("expert-model-parallel-size: 2\nep_group_tokens: 160\nreplica_slots: 2\npolicy: [ultraep]\n")
    document = simulated(tmp_path, trace, "--config", config, "--ep", 4)
    assert document["setting"]["ep_size"] == 4
    assert document["setting"]["slots"] == 2
    assert document["setting"]["objective"] == "time"
    assert list(document["policies"]) == ["static", "ultraep"]


SETTINGS = [path for path in sorted((CONFIGS / "experiments").glob("*.yaml")) if "num_steps" not in path.read_text()]
"""Experiments of the simulator; the others are training runs."""


@pytest.mark.lengthy
@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.stem)
def test_every_shipped_experiment_is_a_valid_setting(tmp_path: Path, trace: Path, path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    if content["model"] == "from-trace":
        assert simulated(tmp_path, trace, "--config", path, *BATCH)["setting"]["ep_size"] == 4
    else:
        assert "MoE layers" in moe_rl("simulate", trace, "--config", path).err


@pytest.mark.lengthy
def test_options_reach_the_simulator(tmp_path: Path, trace: Path) -> None:
    alone = (*BATCH, "--policy", "static")
    base = simulated(tmp_path, trace, *alone)

    def step_time(*options: object) -> float:
        return float(simulated(tmp_path, trace, *alone, *options)["policies"]["static"]["step_time_s"])

    plain = base["policies"]["static"]["step_time_s"]
    assert step_time("--recompute-granularity", "full") > plain
    assert step_time("--recompute-granularity", "selective", "--recompute-modules", "moe,layernorm") > plain
    assert step_time("--recompute-granularity", "selective", "--recompute-modules", "shared_experts") == plain
    graphs = ("--cuda-graph-impl", "full_iteration")
    assert step_time(*graphs) < step_time("--cuda-graph-impl", "transformer_engine") < plain
    again = ("--recompute-granularity", "selective", "--recompute-modules", "moe")
    assert step_time(*graphs, *again) > step_time(*graphs)
    assert step_time(*graphs, "--fp8-format", "e4m3", "--use-transformer-engine-op-fuser") < step_time(
        *graphs, "--fp8-format", "e4m3"
    )
    assert step_time("--mtp-num-layers", 1) > plain
    assert step_time("--seq-length", 32768) > plain
    assert step_time("--log-prob-passes", 1) > plain
    assert step_time("--forward-only") < plain
    overlapped, tuned = "--overlap-moe-expert-parallel-comm", ("--software", "tuned")
    # So few tokens wait for the host, which overlap keeps busier.
    assert step_time(*tuned, overlapped) > step_time(*tuned)
    assert step_time(*tuned) < plain == step_time("--software", "typical")
    assert step_time("--software", "tuned,host=2,overlap_host=0.05") == pytest.approx(plain)
    assert step_time(*graphs, overlapped) < step_time(*graphs)
    assert step_time("--no-overlap-grad-reduce") > plain
    assert step_time("--no-overlap-param-gather") > plain
    assert step_time("--hidden-size", 8192) > plain
    assert step_time("--moe-token-dispatcher-type", "alltoall") != plain
    assert step_time("--cluster", "a100") != plain


def test_unpriced_recomputation_is_mentioned(tmp_path: Path, trace: Path) -> None:
    modules = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn,shared_experts")
    document = simulated(tmp_path, trace, *BATCH, "--policy", "static", *modules)
    assert "the step time does not include the recomputation of shared_experts." in document["notes"]


@pytest.mark.lengthy
def test_what_is_not_said_of_the_software_is_assumed_and_what_cannot_be_is_refused(tmp_path: Path, trace: Path) -> None:
    alone = (*BATCH, "--policy", "static")
    assumed = (
        "the forecast assumes no CUDA graphs, so the host launches every kernel; change this with --cuda-graph-impl."
    )
    assert assumed in simulated(tmp_path, trace, *alone)["notes"]
    assert assumed not in simulated(tmp_path, trace, *alone, "--cuda-graph-impl", "none")["notes"]
    beside = "the forecast assumes that gradient reduction and weight gathering overlap"
    assert any(note.startswith(beside) for note in simulated(tmp_path, trace, *alone)["notes"])
    said = simulated(tmp_path, trace, *alone, "--overlap-grad-reduce", "--overlap-param-gather")["notes"]
    assert not any(note.startswith(beside) for note in said)
    flat = ("--moe-token-dispatcher-type", "alltoall", "--cuda-graph-impl", "full_iteration")
    ran = moe_rl("simulate", trace, *alone, *flat)
    assert ran.code == 2
    assert "does not work with the alltoall dispatcher" in ran.err
    ran = moe_rl("simulate", trace, *alone, "--cuda-graph-impl", "full")
    assert ran.code == 2
    assert "--cuda-graph-impl 'full' is unknown" in ran.err


def test_policy_parameters_reach_the_planner(tmp_path: Path, trace: Path) -> None:
    flat = simulated(tmp_path, trace, *BATCH, "--ranks-per-node", 2, "--policy", "eplb-oracle")
    options = ("--policy", "eplb-oracle", "--policy-option", "eplb-oracle.hierarchical=true")
    ran = moe_rl("simulate", trace, *BATCH, "--ranks-per-node", 2, *options)
    assert flat["policies"]["eplb-oracle"]["imbalance"] >= 1.0
    assert ran.code == 2  # this model's router has no groups to pack
    assert "group" in ran.err


def test_json_on_standard_output_is_nothing_but_json(trace: Path) -> None:
    ran = moe_rl("simulate", trace, *BATCH, "--json", "-")
    assert json.loads(ran.out)["schema"] == "moe_rl.simulate/1"
    assert "max/mean" in ran.err


def test_results_go_to_stdout_and_the_rest_to_stderr(tmp_path: Path, trace: Path) -> None:
    ran = moe_rl("simulate", trace, *BATCH, "--html", tmp_path / "a.html")
    assert "ultraep" in ran.out
    assert ran.err == f"wrote {tmp_path / 'a.html'}\n"


def test_the_table_fits_100_columns_and_one_line_per_policy(trace: Path) -> None:
    policies = "static,eplb,eplb-oracle,lplb-oracle"
    ran = moe_rl("simulate", trace, *BATCH, "--tokens-per-rank", 8192, "--policy", policies)
    lines = ran.out.splitlines()
    assert max(len(line) for line in lines) <= 100
    for policy in (*policies.split(","), "forced_balance", "ideal"):
        assert sum(bool(re.match(rf"\s*{policy}\s+\d", line)) for line in lines) == 1
    assert "…" not in ran.out


def test_nothing_is_left_beside_the_outputs(tmp_path: Path, trace: Path) -> None:
    moe_rl("simulate", trace, *BATCH, "--json", tmp_path / "a.json", "--html", tmp_path / "a.html")
    assert set(snapshot(tmp_path)) == {"good.npz", "a.json", "a.html"}


@pytest.mark.lengthy
def test_the_timeline_is_a_chrome_trace_of_every_policy(tmp_path: Path, trace: Path) -> None:
    out = tmp_path / "t.json"
    options = ("--policy", "static,moe-rl", "--trace-out", out, "--trace-micro-batches", 2)
    assert moe_rl("simulate", trace, *BATCH, "--ranks-per-node", 2, *options).code == 0
    events = json.loads(out.read_text())["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {"static, node 0", "static, node 1", "moe-rl, node 0", "moe-rl, node 1"}
    assert {event["args"]["micro_batch"] for event in events if event["ph"] == "X"} == {0, 1}
    assert min(event["dur"] for event in events if event["ph"] == "X") >= 0


def test_a_timeline_without_times_is_refused(tmp_path: Path, trace: Path) -> None:
    ran = moe_rl("simulate", trace, *BATCH, "--objective", "imbalance", "--trace-out", tmp_path / "t.json")
    assert (ran.code, ran.out) == (2, "")
    assert "--trace-out draws times" in ran.err
    assert not (tmp_path / "t.json").exists()


@pytest.mark.lengthy
def test_visits_are_counted_where_routes_are_known(tmp_path: Path, trace: Path) -> None:
    counts = tmp_path / "c.moetrace"
    assert moe_rl("trace", "convert", trace, counts, "--counts-only", "--num-experts", 8).code == 0
    assert simulated(tmp_path, trace, *BATCH)["setting"]["visits"] == "counted in the trace"
    assert simulated(tmp_path, counts, *BATCH)["setting"]["visits"] == "of independent choices of experts"
    flat = simulated(tmp_path, counts, *BATCH, "--moe-token-dispatcher-type", "alltoall")["setting"]["visits"]
    assert flat == "of token-expert pairs, counted in the loads"


def test_a_plan_file_holds_what_was_planned(tmp_path: Path, trace: Path) -> None:
    out = tmp_path / "step.npz"
    ran = moe_rl("plan", trace, *BATCH, "--policy", "relibra", "--out", out)
    assert ran.code == 0, ran.err
    made = load_plan(out)
    assert made.policy == "relibra"
    assert made.hash in ran.out
    assert made.layout.num_sequences == 12
    expected = simulated(tmp_path, trace, *BATCH, "--policy", "relibra")["policies"]["relibra"]["imbalance"]
    assert f"{expected:.3f} planned" in ran.out


def test_a_counts_only_trace_is_simulated_as_its_routes_are(tmp_path: Path, trace: Path) -> None:
    counts = tmp_path / "c.moetrace"
    assert moe_rl("trace", "convert", trace, counts, "--counts-only", "--num-experts", 8).code == 0
    wide = ("--ep", 4, "--micro-batch-tokens", 40, "--policy", "static,ultraep")
    from_routes = simulated(tmp_path, trace, *wide)["policies"]
    from_counts = simulated(tmp_path, counts, *wide)["policies"]
    assert from_counts["static"]["imbalance"] == from_routes["static"]["imbalance"]


@pytest.mark.lengthy
def test_the_whole_run_loads_no_torch(tmp_path: Path, trace: Path) -> None:
    code = (
        "import sys\nfrom moe_rl.cli import main\n"
        "try: main()\nexcept SystemExit as stop: assert not stop.code\n"
        "print(sorted({'torch', 'triton', 'megatron', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "simulate", str(trace), "--ep", "4", "--ep-group-tokens", "200"]
    ran = subprocess.run([*command, "--html", str(tmp_path / "a.html")], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def memory_notes(tmp_path: Path, trace: Path, *options: object) -> list[str]:
    document = simulated(tmp_path, trace, *BATCH, "--policy", "ultraep", *options)
    return [note for note in document["notes"] if "out of memory" in note]


def test_a_step_that_only_balance_makes_fit_is_announced(tmp_path: Path, trace: Path) -> None:
    (note,) = memory_notes(tmp_path, trace, "--tokens-per-rank", 68_000)
    expected = (
        r"out of memory under static: the predicted peak exceeds the 79.6 GiB of h100: static 8[\d.]+ GiB on rank \d\. "
        r"ultraep fits\. "
    )
    remedies = r"Any of these would make static fit: micro-batches with 9\d% of the tokens under static; "
    assert re.match(expected + remedies, note)
    assert memory_notes(tmp_path, trace) == []


def test_a_step_that_no_balance_makes_fit_is_announced_once(tmp_path: Path, trace: Path) -> None:
    page = tmp_path / "a.html"
    (note,) = memory_notes(tmp_path, trace, "--tokens-per-rank", 2_000_000, "--html", page)
    assert note.startswith("out of memory even with perfect balance: the predicted peak of 2")
    assert "exceeds the 79.6 GiB of h100 (logits " in note
    assert note.endswith("No plan can change that.")
    assert note in page.read_text()
    # Bars of static, ultraep and the two yardsticks say it; so does the headline, without a number before it.
    assert len(re.findall(r"\d does not fit", page.read_text())) == 4


def test_every_plan_has_its_bounds_beside_it(tmp_path: Path, trace: Path) -> None:
    options = ("--ranks-per-node", 2, "--policy", "static,eplb-oracle,lplb-oracle,ultraep,moe-rl")
    document = simulated(tmp_path, trace, *BATCH, *options)
    policies = document["policies"]
    for figures in policies.values():
        bounds = figures["bounds"]
        assert 1.0 <= bounds["lb0"] <= bounds["placement"] + 1e-12
        assert bounds["placement"] <= figures["imbalance"] + 1e-12
        assert bounds.get("node", 1.0) <= figures["imbalance"] + 1e-12
    assert policies["static"]["bounds"]["placement"] == pytest.approx(policies["static"]["imbalance"])
    assert policies["lplb-oracle"]["bounds"]["placement"] == pytest.approx(policies["lplb-oracle"]["imbalance"])
    assert "node" in policies["ultraep"]["bounds"]
    assert "node" not in policies["eplb-oracle"]["bounds"]  # its copies cross nodes
    assert document["limits"]["verdict"] in ("kernel", "packing", "node", "placement", "split", "plan")
    best = policies[document["limits"]["policy"]]
    assert sum(document["limits"]["seconds"].values()) == pytest.approx(best["step_time_s"])


def test_the_bounds_are_printed_beside_a_plan(tmp_path: Path, trace: Path) -> None:
    options = ("--ranks-per-node", 2, "--policy", "ultraep")
    bounds = simulated(tmp_path, trace, *BATCH, *options)["policies"]["ultraep"]["bounds"]
    ran = moe_rl("plan", trace, *BATCH, *options, "--out", tmp_path / "plan.npz")
    assert re.search(rf"^bound of its replicas +{bounds['placement']:.3f},", ran.out, re.MULTILINE)
    assert re.search(rf"^bound of its nodes +{bounds['node']:.3f},", ran.out, re.MULTILINE)
    assert re.search(rf"^bound of every plan +{bounds['lb0']:.3f}$", ran.out, re.MULTILINE)
    crossing = moe_rl("plan", trace, *BATCH, *options[:2], "--policy", "eplb-oracle", "--out", tmp_path / "p.npz")
    assert "none, because replicas cross nodes" in crossing.out


def test_sensitivity_reaches_every_output(tmp_path: Path, trace: Path) -> None:
    page = tmp_path / "a.html"
    scaled = ("--tokens-per-rank", 8192, "--policy", "static,eplb-oracle,moe-rl", "--sensitivity")
    options = (*scaled, "--html", page)
    document = simulated(tmp_path, trace, *BATCH, *options)
    found = document["sensitivity"]
    assert {case["factor"] for case in found["perturbed"]} == {0.7, 1.3}
    assert found["holds"] is all(not case["turned"] for case in found["perturbed"])
    for case in found["perturbed"]:
        assert case["speedup_vs_static"]["static"] == 1.0
        # moe-rl-unpacked is what balancing alone brings, the row behind the headline
        assert set(case["speedup_vs_static"]) == {"static", "eplb-oracle", "moe-rl", "moe-rl-unpacked"}
    assert len({case["speedup_vs_static"]["moe-rl"] for case in found["perturbed"]}) > 2
    sentence = "The ranking of the policies holds" if found["holds"] else "the ranking of the policies changes"
    assert sentence in page.read_text()
    assert sentence in " ".join(moe_rl("simulate", trace, *BATCH, *scaled).out.split())


@pytest.mark.lengthy
def test_a_policy_has_the_same_figures_whatever_else_is_asked(tmp_path: Path, trace: Path) -> None:
    """Neither other policies nor --sensitivity decide how many tokens are followed: the trace does."""
    seen = []
    for asked in (("static,eplb-oracle",), ("static,ultraep,eplb-oracle,relibra", "--sensitivity")):
        document = simulated(tmp_path, trace, *BATCH, "--policy", *asked)
        assert document["setting"]["visits"] == "counted in the trace"
        figures = document["policies"]["eplb-oracle"]
        beside = ("plan_time_s", "vs_best_engine")  # the engine is another policy
        seen.append({name: value for name, value in figures.items() if name not in beside})
    assert seen[0] == seen[1]


def test_the_sensitivity_of_times_needs_times(tmp_path: Path, trace: Path) -> None:
    ran = moe_rl("simulate", trace, *BATCH, "--objective", "imbalance", "--sensitivity")
    assert (ran.code, ran.out) == (2, "")
    assert "--sensitivity needs times" in ran.err


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("ep_size", "static", "oracle", "ultraep", "relibra"),
    [
        (8, 1.573, 1.299, 1.058, 1.03),
        (16, 2.195, 1.512, 1.183, 1.11),
        (32, 3.177, 1.755, 1.357, 1.30),
    ],
)
def test_the_development_trace_gives_the_published_imbalance(
    tmp_path: Path, dev_trace_path: Path, ep_size: int, static: float, oracle: float, ultraep: float, relibra: float
) -> None:
    protocol = ("--ep-group-tokens", 2048, "--objective", "imbalance", "--cluster", "h100", "--model", "gpt-oss-20b")
    document = simulated(tmp_path, dev_trace_path, "--expert-model-parallel-size", ep_size, *protocol)
    found = {name: figures["imbalance"] for name, figures in document["policies"].items()}
    assert found["static"] == pytest.approx(static, abs=0.03)
    assert found["eplb-oracle"] == pytest.approx(oracle, abs=0.03)
    assert found["ultraep"] == pytest.approx(ultraep, abs=0.03)
    assert found["relibra"] <= relibra + 0.03
    assert document["setting"]["num_micro_batches"] * 2048 >= document["trace"]["num_tokens"]


@pytest.mark.lengthy
def test_the_demo_shows_the_bundled_trace(tmp_path: Path) -> None:
    if not list((CONFIGS / "traces").glob("*.moetrace")):
        pytest.skip("no trace is bundled in this checkout")
    ran = moe_rl("demo", "--html", tmp_path / "report.html", "--json", tmp_path / "a.json")
    assert ran.code == 0, ran.err
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["setting"]["ep_size"] == 16
    assert document["setting"]["scaled"] is False  # its batch is drawn, not scaled
    assert document["setting"]["eplb_history"].startswith("previous step")


def test_a_cluster_of_assumed_constants_says_so_under_every_table(tmp_path: Path, trace: Path) -> None:
    alone = ("simulate", trace, *BATCH, "--policy", "static")
    assumed = " ".join(moe_rl(*alone, "--cluster", "h200").out.split())
    assert "constants are assumed rather than measured" in assumed
    assert "are assumed rather than measured" not in " ".join(moe_rl(*alone, "--cluster", "h100").out.split())


def test_nodes_are_those_of_all_gpus(tmp_path: Path, trace: Path) -> None:
    four_nodes = ("--ep", 4, "--gpus", 8, "--ranks-per-node", 2, "--micro-batch-tokens", 80, "--num-experts", 8)
    document = simulated(tmp_path, trace, *four_nodes, "--policy", "static", "--objective", "imbalance")
    assert (document["setting"]["num_gpus"], document["setting"]["num_nodes"]) == (8, 4)
