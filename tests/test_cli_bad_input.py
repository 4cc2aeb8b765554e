"""Bad input: one sentence on stderr, exit code 2, nothing on disk changed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from cli_runner import Ran, moe_rl, routes, snapshot, write_npz

from moe_rl.config import CONFIGS
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import TraceWriter

BATCH = ("--ep", 4, "--ep-group-tokens", 200)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A good npz trace: 3 MoE layers of 8 experts, top-2."""
    return write_npz(tmp_path / "good.npz")


@pytest.fixture
def stored(tmp_path: Path, trace: Path) -> Path:
    """The same as a trace directory."""
    target = tmp_path / "good.moetrace"
    assert moe_rl("trace", "convert", trace, target, "--num-experts", 8).code == 0
    return target


def refused(folder: Path, *arguments: object) -> str:
    """Run a command that must be refused; return its sentence."""
    before = snapshot(folder)
    ran = moe_rl(*arguments)
    assert ran.code == 2, ran
    assert ran.out == ""
    assert snapshot(folder) == before
    lines = ran.err.strip().splitlines()
    assert len(lines) == 1, ran.err
    assert lines[0].startswith("error: ")
    assert lines[0].endswith((".", ")", "?")), lines[0]
    return lines[0].removeprefix("error: ")


def refused_by_the_parser(folder: Path, *arguments: object) -> str:
    """Run a command whose options are wrong; return what the parser says in one line."""
    before = snapshot(folder)
    ran = moe_rl(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert snapshot(folder) == before
    return " ".join(ran.err.replace("│", " ").split())


def outputs(tmp_path: Path) -> tuple[object, ...]:
    return ("--json", tmp_path / "a.json", "--html", tmp_path / "a.html")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gpt-oss-20b", "is not a trace of model 'gpt-oss-20b': the trace has 3 MoE layers, the model has 24"),
        ("layers-2", "is not a trace of model 'mine': the trace has 3 MoE layers, the model has 2"),
        ("experts-16", "has no expert id above 7, so it is probably not a trace of model 'mine', which has 16 experts"),
        ("experts-4", "has expert id 7, but expert ids must be 0 to 3"),
        ("topk-3", "is not a trace of model 'mine': the trace has 2 experts per token, the model has 3"),
    ],
)
def test_the_wrong_model_for_the_trace_is_refused(tmp_path: Path, trace: Path, model: str, expected: str) -> None:
    shape = {"layers": 3, "experts": 8, "topk": 2}
    if "-" in model and model.split("-")[0] in shape:
        name, value = model.split("-")
        shape[name] = int(value)
        config = {
            "model_type": "mixtral",
            "num_hidden_layers": shape["layers"],
            "num_local_experts": shape["experts"],
            "num_experts_per_tok": shape["topk"],
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_attention_heads": 4,
            "vocab_size": 100,
        }
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "config.json").write_text(json.dumps(config))
        model = str(tmp_path / "mine")
    assert expected in refused(tmp_path, "simulate", trace, "--model", model, *BATCH, *outputs(tmp_path))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (["--num-experts", 16], "num_experts = 8, but you set 16"),
        (["--model", "olmoe"], "is not a trace of model 'OLMoE-1B-7B': the trace has 3 MoE layers, the model has 16"),
    ],
)
def test_a_stored_trace_says_its_own_shape(tmp_path: Path, stored: Path, change: list[object], expected: str) -> None:
    assert expected in refused(tmp_path, "simulate", stored, *change, *BATCH, *outputs(tmp_path))


def npz_of(path: Path, ids: np.ndarray) -> Path:
    np.savez(path, s0=routes(60), s1=ids)
    return path


def out_of_range(ids: np.ndarray) -> None:
    ids[5, 1, 0] = 9


def duplicate(ids: np.ndarray) -> None:
    ids[5, 1] = 3


def zero_layer(ids: np.ndarray) -> None:
    ids[:, 1] = 0


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (out_of_range, "has expert id 9, but expert ids must be 0 to 7"),
        (duplicate, "is routed to one expert twice in MoE layer 1: its expert ids are [3, 3]"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "validate", "convert", "plan"])
def test_impossible_ids_are_refused_by_every_command(
    tmp_path: Path, command: str, damage: Callable[[np.ndarray], None], expected: str
) -> None:
    ids = routes(40, seed=1)
    damage(ids)
    bad = npz_of(tmp_path / "bad.npz", ids)
    arguments = {
        "simulate": ("simulate", bad, *BATCH, *outputs(tmp_path)),
        "plan": ("plan", bad, *BATCH, "--policy", "ultraep", "--out", tmp_path / "plan.npz"),
        "validate": ("trace", "validate", bad),
        "convert": ("trace", "convert", bad, tmp_path / "new.moetrace"),
    }[command]
    assert expected in refused(tmp_path, *arguments, "--num-experts", 8)


def test_a_layer_that_was_not_captured_is_refused(tmp_path: Path) -> None:
    ids = routes(60)
    zero_layer(ids)
    np.savez(tmp_path / "bad.npz", s0=ids)
    sentence = refused(tmp_path, "simulate", tmp_path / "bad.npz", "--num-experts", 8, *BATCH, *outputs(tmp_path))
    assert sentence.startswith(
        "in MoE layer 1, every token is routed to expert 0 only: the rollout engine did not record this layer"
    )


def test_a_truncated_shard_is_refused(tmp_path: Path, stored: Path) -> None:
    shard = next(stored.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-40])
    for command in (("simulate", stored, *BATCH, *outputs(tmp_path)), ("trace", "info", stored)):
        assert shard.name in refused(tmp_path, *command)


def test_a_corrupted_shard_is_refused(tmp_path: Path, stored: Path) -> None:
    shard = next(stored.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-7] ^= 4
    shard.write_bytes(content)
    for command in (("simulate", stored, *BATCH, *outputs(tmp_path)), ("trace", "validate", stored)):
        assert shard.name in refused(tmp_path, *command)


def test_expert_parallelism_that_does_not_divide_the_experts_is_refused(tmp_path: Path, trace: Path) -> None:
    sentence = refused(tmp_path, "simulate", trace, "--ep", 3, "--ep-group-tokens", 200, *outputs(tmp_path))
    assert sentence == "--ep 3 does not divide the 8 experts; --ep 2 or --ep 4 does."


def test_an_ep_group_that_does_not_fill_its_nodes_is_refused(tmp_path: Path, trace: Path) -> None:
    sentence = refused(tmp_path, "simulate", trace, *BATCH, "--ranks-per-node", 3, *outputs(tmp_path))
    assert sentence == ("--ep 4 must fill whole nodes of 3 ranks (--ranks-per-node), or fit into one. Use --ep 2.")


def own_cluster(folder: Path, **changes: object) -> Path:
    """H100 nodes under another name, with changed keys; None removes one."""
    content = yaml.safe_load((CONFIGS / "clusters" / "h100.yaml").read_text()) | {"name": "mine"} | changes
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return path


def test_more_nodes_than_the_cluster_has_are_refused(tmp_path: Path, trace: Path) -> None:
    mine = own_cluster(tmp_path, num_nodes={"value": 3, "source": "our cluster"})
    batch = ("--ep", 4, "--ranks-per-node", 2, "--micro-batch-tokens", 200, "--num-ep-groups", 2, "--cluster", mine)
    sentence = refused(tmp_path, "simulate", trace, *batch, *outputs(tmp_path))
    assert sentence == (
        "EP 4 x 2 EP groups x PP 1 = 8 ranks need 4 nodes of 2 GPUs, but the cluster 'mine' has 3 nodes (num_nodes)."
    )
    more = refused(tmp_path, "simulate", trace, *batch, "--num-nodes", 7, "--pipeline-model-parallel-size", 2)
    assert "PP 2 = 16 ranks need 8 nodes of 2 GPUs, but the cluster 'mine' has 7 nodes" in more
    assert "--num-nodes must be at least 1" in refused(tmp_path, "simulate", trace, *batch, "--num-nodes", 0)
    assert moe_rl("simulate", trace, *batch, "--num-nodes", 4, "--policy", "static").code == 0


def test_a_cluster_file_without_a_constant_is_refused(tmp_path: Path, trace: Path) -> None:
    mine = own_cluster(tmp_path, rdma_gb_per_s=None)
    sentence = refused(tmp_path, "simulate", trace, *BATCH, "--cluster", mine, *outputs(tmp_path))
    assert sentence == f"{mine}: key 'rdma_gb_per_s' is missing."


@pytest.mark.parametrize("budget", ["--ep-group-tokens", "--micro-batch-tokens"])
def test_a_sequence_longer_than_its_budget_is_refused(tmp_path: Path, trace: Path, budget: str) -> None:
    asked = ("--ep", 4, budget, 39, "--batch", "recorded")
    sentence = refused(tmp_path, "simulate", trace, *asked, *outputs(tmp_path))
    assert "has 40 tokens, which is more than the token budget of a micro-batch (39)" in sentence


def test_a_drawn_micro_batch_takes_a_longer_sequence_whole_and_says_so(trace: Path) -> None:
    """Budgets of launch scripts are no hard limit in every framework: slime puts such a sequence alone."""
    ran = moe_rl("simulate", trace, "--ep", 4, "--micro-batch-tokens", 39, "--policy", "static", "--explain")
    assert ran.code == 0, ran.err
    assert "micro-batches have up to 40 tokens instead of 39" in " ".join(ran.out.split())


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--policy", "static,ultra-ep", "unknown policy 'ultra-ep'. Did you mean 'ultraep'?"),
        ("--policy", "static,static", "--policy names a policy twice"),
        ("--policy", ",", "--policy must name at least one policy."),
        ("--policy-option", "eplb.hierarchy=true", "has no parameter 'hierarchy'. Did you mean 'hierarchical'?"),
        ("--policy-option", "elpb.hierarchical=true", "--policy does not contain the policy 'elpb'"),
        ("--policy-option", "hierarchical", "must have the form policy.parameter=value"),
        ("--model", "qwen3-30b", "unknown model 'qwen3-30b'. Did you mean 'qwen3-30b-a3b'?"),
        ("--cluster", "h1000", "unknown cluster 'h1000'. Did you mean 'h100'?"),
        ("--objective", "times", "--objective 'times' is unknown. Did you mean 'time'?"),
        ("--filler", "zeros", "--filler 'zeros' is unknown."),
        ("--moe-token-dispatcher-type", "all2all", "is unknown. Did you mean 'alltoall'?"),
        ("--recompute-granularity", "ful", "is unknown. Did you mean 'full'?"),
        ("--format", "np", "unknown trace format 'np'. Did you mean 'npz'?"),
        ("--step", "7", "does not have step 7"),
        ("--tokens-per-rank", "0", "--tokens-per-rank must be at least 1, got 0."),
        ("--replica-slots", "-1", "replica_slots must be at least 0, got -1."),
        ("--expert-model-parallel-size", "0", "--expert-model-parallel-size must be at least 1, got 0."),
        ("--context-parallel-size", "0", "--context-parallel-size must be at least 1, got 0."),
        ("--ranks-per-node", "0", "--ranks-per-node must be at least 1, got 0."),
        ("--num-ep-groups", "0", "--num-ep-groups must be at least 1, got 0."),
        ("--seq-length", "0", "--seq-length must be at least 1, got 0."),
        ("--pipeline-model-parallel-size", "0", "--pipeline-model-parallel-size must be at least 1, got 0."),
        ("--num-ep-groups", "2", "leave --num-ep-groups at 1"),
        ("--provenance", "R4", "the provenance 'R4' is unknown"),
        ("--moe-layer-ids", "1,x", "'1,x' is not a list of whole numbers"),
        ("--hidden-size", "0", "hidden_size must be at least 1, got 0."),
        ("--replica-slots", "9" * 20, "--replica-slots must be at most 2,147,483,647, got 99999999999999999999."),
        ("--seq-length", "9" * 20, "--seq-length must be at most 2,147,483,647"),
        ("--ranks-per-node", "9" * 20, "--ranks-per-node must be at most 2,147,483,647"),
        (
            "--replica-slots",
            "7",
            "--replica-slots 7 is too high, because the other ranks of an EP group have only 6 experts in all.",
        ),
        (
            "--resident-slots",
            "7",
            "--resident-slots 7 is too high, because the other ranks of an EP group have only 6 experts in all.",
        ),
        ("--resident-slots", "banana", "--resident-slots: neither a whole number nor auto (got 'banana')."),
        ("--reroute", "nan", "--reroute must be finite, got nan."),
        ("--unknown-routes", "inf", "--unknown-routes must be finite, got inf."),
    ],
)
def test_a_wrong_value_is_named_with_the_nearest_right_one(
    tmp_path: Path, trace: Path, option: str, value: str, expected: str
) -> None:
    assert expected in refused(tmp_path, "simulate", trace, *BATCH, option, value, *outputs(tmp_path))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--num-ep-groups", 100_000), "is too large to sample"),
        (
            ("--num-ep-groups", 100, "--micro-batch-tokens", 200, "--batch", "recorded"),
            "needs 400 data-parallel ranks, too many for 12 sequences",
        ),
        (("--global-batch-tokens", 2_147_483_648), "--global-batch-tokens must be at most 2,147,483,647"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(
    tmp_path: Path, trace: Path, options: tuple[object, ...], expected: str
) -> None:
    assert expected in refused(tmp_path, "simulate", trace, "--ep", 4, *options, *outputs(tmp_path))


def test_two_budgets_are_refused(tmp_path: Path, trace: Path) -> None:
    assert "not both" in refused(tmp_path, "simulate", trace, *BATCH, "--micro-batch-tokens", 100)


def test_an_unknown_option_is_answered_with_the_nearest(tmp_path: Path, trace: Path) -> None:
    said = refused_by_the_parser(tmp_path, "simulate", trace, "--polcy", "static")
    assert "No such option: --polcy" in said
    assert "--policy" in said


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("expert_model_parallel_sise: 4", "unknown key 'expert_model_parallel_sise'. Did you mean"),
        ("seed: one", "key 'seed' must be a whole number, got 'one'."),
        ("[1, 2]", "must contain a mapping of keys to values"),
        ("objective: balance", "--objective 'balance' is unknown"),
    ],
)
def test_a_wrong_config_file_is_named(tmp_path: Path, trace: Path, content: str, expected: str) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(content)
    sentence = refused(tmp_path, "simulate", trace, *BATCH, "--config", config, *outputs(tmp_path))
    assert expected in sentence
    assert "mine.yaml" in sentence


def empty_npz(folder: Path) -> Path:
    np.savez(folder / "empty.npz")
    return folder / "empty.npz"


def no_token(folder: Path) -> Path:
    np.savez(folder / "empty.npz", s0=np.zeros((0, 3, 2), np.uint8))
    return folder / "empty.npz"


def not_a_trace(folder: Path) -> Path:
    (folder / "notes.txt").write_text("no trace")
    return folder / "notes.txt"


def not_a_zip(folder: Path) -> Path:
    (folder / "broken.npz").write_bytes(b"PK but no more")
    return folder / "broken.npz"


def missing(folder: Path) -> Path:
    return folder / "none.npz"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (empty_npz, "empty"),
        (no_token, "empty"),
        (not_a_trace, "notes.txt"),
        (not_a_zip, "broken.npz"),
        (missing, "there is no trace at"),
    ],
)
@pytest.mark.parametrize("command", [("simulate",), ("trace", "info"), ("trace", "validate")])
def test_what_is_no_trace_is_refused(
    tmp_path: Path, command: tuple[str, ...], make: Callable[[Path], Path], expected: str
) -> None:
    more = (*BATCH, *outputs(tmp_path)) if command == ("simulate",) else ()
    assert expected in refused(tmp_path, *command, make(tmp_path), *more)


@pytest.mark.parametrize("answer", [{"choices": [{"token_ids": [1]}]}, {"meta_info": {"prompt_tokens": 3}}])
def test_answers_without_routes_say_how_to_ask_for_them(tmp_path: Path, answer: dict[str, object]) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(answer) + "\n")
    sentence = refused(tmp_path, "simulate", tmp_path / "a.jsonl", *outputs(tmp_path))
    assert "start vLLM or SGLang with --enable-return-routed-experts" in sentence


def test_an_empty_trace_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.moetrace").mkdir()
    assert "empty.moetrace" in refused(tmp_path, "trace", "validate", tmp_path / "empty.moetrace")


def test_a_trace_from_another_schema_version_is_refused(tmp_path: Path, stored: Path) -> None:
    manifest = stored / "manifest.json"
    content = manifest.read_text()
    assert "moe_rl.trace/1" in content
    manifest.write_text(content.replace("moe_rl.trace/1", "moe_rl.trace/7"))
    sentence = refused(tmp_path, "simulate", stored, *BATCH, *outputs(tmp_path))
    assert "moe_rl.trace/7" in sentence


def test_an_output_that_cannot_be_written_is_found_before_the_work(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "file").write_text("")
    sentence = refused(tmp_path, "simulate", tmp_path / "none.npz", *BATCH, "--json", tmp_path / "file" / "a.json")
    assert "--json" in sentence
    assert "cannot be written" in sentence
    assert "is a folder" in refused(tmp_path, "simulate", trace, *BATCH, "--html", tmp_path)
    assert "would overwrite the input" in refused(tmp_path, "simulate", trace, *BATCH, "--json", trace)
    assert "the options --json, --html name the same output file" in refused(
        tmp_path, "simulate", trace, *BATCH, "--json", tmp_path / "a", "--html", tmp_path / "a"
    )


def test_an_output_inside_the_trace_directory_is_refused(tmp_path: Path, stored: Path) -> None:
    sentence = refused(tmp_path, "simulate", stored, *BATCH, "--json", stored / "out.json")
    assert "would overwrite the input" in sentence


def test_a_taken_target_is_not_overwritten(tmp_path: Path, trace: Path, stored: Path) -> None:
    assert "already exists" in refused(tmp_path, "trace", "convert", trace, stored, "--num-experts", 8)
    assert "already exists" in refused(tmp_path, "trace", "synth", "preset_a", stored)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("preset_d",), "unknown synthetic trace 'preset_d'. Did you mean 'preset_c'?"),
        (("preset_a", "--option", "num_stops=2"), "no option 'num_stops'. Did you mean 'num_steps'?"),
        (("preset_a", "--option", "num_steps"), "must have the form name=value"),
        (("preset_a", "--num-experts", 4), "top_k (6) exceeds num_experts (4)"),
    ],
)
def test_a_wrong_generator_is_refused(tmp_path: Path, arguments: tuple[object, ...], expected: str) -> None:
    name, *options = arguments
    assert expected in refused(tmp_path, "trace", "synth", name, tmp_path / "new.moetrace", *options)


def test_eplb_needs_some_history(tmp_path: Path, trace: Path) -> None:
    wide = ("--ep", 4, "--ep-group-tokens", 10_000)
    sentence = refused(tmp_path, "simulate", trace, *wide, "--policy", "static,eplb", *outputs(tmp_path))
    assert sentence == (
        "policy 'eplb' plans from an earlier step, but the trace has only one step of one micro-batch: use eplb-oracle."
    )


def test_a_recorded_layout_that_fills_no_ep_group_is_refused(tmp_path: Path) -> None:
    recorded = RoutingTrace.from_sequences(
        [routes(30, seed=index) for index in range(6)],
        num_experts=8,
        micro_batch=np.array([0, 0, 0, 1, 1, 1]),
        dp_rank=np.array([0, 1, 2, 0, 1, 2]),
    )
    with TraceWriter(tmp_path / "r.moetrace", num_experts=8, moe_layer_ids=(0, 1, 2), top_k=2) as writer:
        writer.append(recorded)
    sentence = refused(tmp_path, "simulate", tmp_path / "r.moetrace", "--ep", 4, *outputs(tmp_path))
    assert "has 3 ranks" in sentence
    assert "cannot be divided into EP groups of 4" in sentence


@pytest.mark.parametrize("out", ["plan.json", "trace"])
def test_a_plan_goes_only_to_an_npz_file(tmp_path: Path, trace: Path, out: str) -> None:
    said = refused(tmp_path, "plan", trace, *BATCH, "--policy", "ultraep", "--out", tmp_path / out)
    assert "must end in .npz" in said


def test_a_plan_holds_one_policy(tmp_path: Path, trace: Path) -> None:
    said = refused(tmp_path, "plan", trace, *BATCH, "--policy", "static,ultraep", "--out", tmp_path / "p.npz")
    assert "one policy" in said


def test_a_plan_does_not_overwrite_its_trace(tmp_path: Path, trace: Path) -> None:
    said = refused(tmp_path, "plan", trace, *BATCH, "--policy", "ultraep", "--out", trace)
    assert "would overwrite the input" in said


@pytest.mark.lengthy
def test_the_installed_command_ends_with_code_2_and_leaves_old_outputs_alone(tmp_path: Path, trace: Path) -> None:
    old = tmp_path / "a.json"
    old.write_text("{}")
    command = [sys.executable, "-c", "from moe_rl.cli import main; main()", "simulate", str(trace), "--ep", "3"]
    ran = subprocess.run([*command, "--ep-group-tokens", "200", "--json", str(old)], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "error: --ep 3 does not divide the 8 experts; --ep 2 or --ep 4 does.\n"
    assert old.read_text() == "{}"


def test_when_one_output_fails_none_changes(tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second file fails while it is written, as on a full disk."""
    first, second = tmp_path / "a.html", tmp_path / "b.json"
    second.write_text("{}")
    before = snapshot(tmp_path)
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if "b.json" in path.name:
            raise OSError(28, "No space left on device", str(path))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    ran: Ran = moe_rl("simulate", trace, *BATCH, "--html", first, "--json", second)
    monkeypatch.undo()
    assert ran.code == 2
    assert "No space left on device" in ran.err
    assert snapshot(tmp_path) == before


def test_a_document_replaces_no_file_that_is_not_one(tmp_path: Path) -> None:
    """`--json` was a flag once: what stands behind it may be the file that was meant to be read."""
    script = tmp_path / "run.sh"
    script.write_text("python3 train.py\n")
    sentence = refused(tmp_path, "doctor", "--json", script)
    assert f"--json {script} would overwrite a file that does not contain JSON" in sentence
    script.write_text("")
    assert moe_rl("policies", "--json", script).code == 0
    assert json.loads(script.read_text())[0]["policy"] == "static"


def test_a_document_needs_a_place(tmp_path: Path) -> None:
    assert refused(tmp_path, "policies", "--json") == "--json takes a file, or - for standard output."


@pytest.mark.parametrize("command", ["models", "clusters", "policies"])
def test_a_document_on_standard_output_leaves_the_table_to_stderr(command: str) -> None:
    ran = moe_rl(command, "--json", "-")
    assert json.loads(ran.out)
    assert moe_rl(command).out in ran.err
