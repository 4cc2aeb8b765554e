"""`moe-rl trace info | validate | convert | synth`, help and version."""

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_runner import EXPERTS, LAYERS, TOP_K, moe_rl, routes, snapshot, write_npz

import moe_rl as package
from moe_rl.cli.commands import command_named
from moe_rl.replay import TraceReader, open_source, write_trace
from moe_rl.simulators.registry import SYNTHETIC


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_npz(tmp_path / "good.npz")


def test_info_says_the_shape_in_words_and_in_json(trace: Path) -> None:
    words = moe_rl("trace", "info", trace, "--num-experts", EXPERTS)
    assert words.code == 0
    assert " ".join(words.out.split()).count("num experts 8") == 1
    facts = json.loads(moe_rl("trace", "info", trace, "--num-experts", EXPERTS, "--json", "-").out)
    assert (facts["num_moe_layers"], facts["num_experts"], facts["top_k"]) == (LAYERS, EXPERTS, TOP_K)
    assert (facts["num_sequences"], facts["num_tokens"]) == (12, 480)
    assert facts["inferred"] == []
    assert facts["size_bytes"] == trace.stat().st_size


def test_what_was_guessed_is_said(trace: Path) -> None:
    ran = moe_rl("trace", "info", trace)
    assert "assumes 8" in ran.err
    assert "num_experts" in ran.out.split("inferred", 1)[1]


def test_validate_says_ok(trace: Path) -> None:
    ran = moe_rl("trace", "validate", trace, "--num-experts", EXPERTS)
    assert ran.out == "ok: 12 sequences, 480 tokens, 3 MoE layers, 8 experts, top-2\n"


def test_a_converted_trace_holds_the_same_routes(tmp_path: Path, trace: Path) -> None:
    target = tmp_path / "new.moetrace"
    ran = moe_rl("trace", "convert", trace, target, "--num-experts", EXPERTS, "--model", "mine", "--provenance", "R3")
    assert ran.code == 0, ran.err
    assert "12 sequences, 480 tokens" in ran.out
    source, copy = open_source(trace).load(), TraceReader(target)
    assert np.array_equal(copy.load().routed_experts, source.routed_experts)
    assert (copy.manifest.model, copy.manifest.provenance) == ("mine", "R3")
    assert moe_rl("trace", "validate", target).code == 0
    assert set(snapshot(tmp_path)) == {
        "good.npz",
        "new.moetrace",
        *(f"new.moetrace/{name}" for name in snapshot(target)),
    }


def test_some_steps_of_a_trace_can_be_taken_and_its_routes_alone(tmp_path: Path) -> None:
    generated = SYNTHETIC["grpo"].with_options(num_steps=5).steps()
    steps = [replace(step, policy_version=step.step.repeat(step.sequence_lengths)) for step in generated]
    whole = write_trace(
        steps,
        tmp_path / "whole.moetrace",
        num_experts=steps[0].num_experts,
        moe_layer_ids=steps[0].moe_layer_ids,
        top_k=steps[0].top_k,
        origin={"recipe": "mine"},
    )
    target = tmp_path / "part.moetrace"
    ran = moe_rl("trace", "convert", whole.path, target, "--steps", "3,1", "--routes-only")
    assert ran.code == 0, ran.err
    part = TraceReader(target)
    assert part.steps == (1, 3)
    assert part.manifest.optional_columns == ()
    assert part.manifest.origin == {"recipe": "mine", "converted_from": "whole.moetrace", "format": "moetrace"}
    for step in part.steps:
        assert np.array_equal(part.load(step).routed_experts, whole.load(step).routed_experts)
        assert np.array_equal(part.load(step).group_id, whole.load(step).group_id)
    for wrong, sentence in (
        ("7", "does not have step 7: it has steps 0 to 4"),
        ("1,x", "whole numbers"),
        ("", "whole numbers"),
    ):
        ran = moe_rl("trace", "convert", whole.path, tmp_path / "none.moetrace", "--steps", wrong)
        assert (ran.code, sentence in " ".join(ran.err.split())) == (2, True), ran.err
    assert not (tmp_path / "none.moetrace").exists()


def test_counts_only_keeps_the_loads_and_drops_the_routes(tmp_path: Path, trace: Path) -> None:
    target = tmp_path / "counts.moetrace"
    assert moe_rl("trace", "convert", trace, target, "--counts-only", "--num-experts", EXPERTS).code == 0
    counts = TraceReader(target).load()
    routed = open_source(trace).load().routed_experts
    for layer in range(LAYERS):
        expected = np.bincount(routed[:, layer].ravel(), minlength=EXPERTS)
        assert np.array_equal(counts.tokens_per_expert[:, layer].sum(axis=0), expected)


def test_overwrite_replaces_a_trace(tmp_path: Path, trace: Path) -> None:
    target = tmp_path / "t.moetrace"
    other = write_npz(tmp_path / "other.npz", sequences=3)
    for source in (trace, other):
        assert moe_rl("trace", "convert", source, target, "--num-experts", EXPERTS, "--overwrite").code == 0
    assert TraceReader(target).manifest.num_sequences == 3


def test_recorded_dense_layers_can_be_left_out(tmp_path: Path) -> None:
    ids = routes(60)
    with_dense = np.concatenate([np.zeros_like(ids[:, :1]), ids], axis=1)
    np.savez(tmp_path / "dense.npz", s0=with_dense)
    ran = moe_rl("trace", "info", tmp_path / "dense.npz", "--first-k-dense", 1, "--num-experts", 8, "--json", "-")
    assert json.loads(ran.out)["moe_layer_ids"] == [1, 2, 3]
    ran = moe_rl("trace", "info", tmp_path / "dense.npz", "--moe-layer-ids", "1,2,3", "--num-experts", 8, "--json", "-")
    assert json.loads(ran.out)["moe_layer_ids"] == [1, 2, 3]


SMALL = ("--option", "num_sequences=8", "--option", "mean_length=30")


@pytest.mark.parametrize("name", SYNTHETIC.names)
def test_every_generator_writes_a_valid_trace_that_is_the_same_for_a_seed(tmp_path: Path, name: str) -> None:
    for target in ("a.moetrace", "b.moetrace"):
        ran = moe_rl("trace", "synth", name, tmp_path / target, *SMALL, "--seed", 3)
        assert ran.code == 0, ran.err
    assert moe_rl("trace", "validate", tmp_path / "a.moetrace").code == 0
    first, second = (TraceReader(tmp_path / target) for target in ("a.moetrace", "b.moetrace"))
    assert np.array_equal(first.load().routed_experts, second.load().routed_experts)
    assert first.manifest.provenance == "synthetic"


def test_a_generator_takes_the_shape_of_a_model(tmp_path: Path) -> None:
    target = tmp_path / "s.moetrace"
    shape = ("--num-layers", 2, "--num-experts", 16, "--moe-router-topk", 3)
    steps = ("--option", "num_steps=3", "--option", "num_sequences=8")
    assert moe_rl("trace", "synth", "grpo", target, *shape, *steps).code == 0
    manifest = TraceReader(target).manifest
    assert (manifest.num_layers, manifest.num_experts, manifest.top_k) == (2, 16, 3)
    assert manifest.steps == (0, 1, 2)


def test_the_memory_of_a_generation_does_not_grow_with_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, peaks, sizes = 1 << 17, [], []
    monkeypatch.setattr("moe_rl.simulators.synthetic.PIECE_BYTES", most)
    monkeypatch.setattr("moe_rl.simulators.synthetic.BATCH_VALUES", 1 << 12)  # logits of 16 sequences
    for sequences in (4, 32, 96):  # the first one imports
        target = tmp_path / f"{sequences}.moetrace"
        options = ("--num-layers", 8, "--option", f"num_sequences={sequences}", "--option", "mean_length=400")
        tracemalloc.start()
        ran = moe_rl("trace", "synth", "grpo", target, *options, "--option", "num_steps=1")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert ran.code == 0
        sizes.append(sum(shard.size_bytes for shard in TraceReader(target).manifest.shards))
    assert sizes[2] - sizes[1] > 5 * most
    assert peaks[2] - peaks[1] < (sizes[2] - sizes[1]) / 2, "memory grows with the trace"


def test_a_failed_generation_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_rl.replay import TraceWriter

    append = TraceWriter.append

    def fails_on_the_second(writer: TraceWriter, trace: object) -> None:
        if int(trace.step[0]) == 1:
            raise OSError(28, "No space left on device", str(writer.path))
        append(writer, trace)  # type: ignore[arg-type]

    monkeypatch.setattr(TraceWriter, "append", fails_on_the_second)
    ran = moe_rl("trace", "synth", "grpo", tmp_path / "s.moetrace", "--option", "num_sequences=8")
    assert ran.code == 2
    assert "No space left on device" in ran.err
    assert snapshot(tmp_path) == {}


def test_version_and_help() -> None:
    assert moe_rl("--version").out.startswith(f"moe-rl {package.__version__}")
    for command in ((), ("simulate",), ("plan",), ("demo",), ("trace",), ("trace", "synth")):
        ran = moe_rl(*command, "--help")
        assert ran.code == 0
        assert "Usage" in ran.out


def test_the_options_are_spelled_as_in_megatron() -> None:
    spelled = {name for parameter in command_named("simulate").params for name in parameter.opts}
    assert spelled >= {
        "--expert-model-parallel-size",
        "--tensor-model-parallel-size",
        "--context-parallel-size",
        "--pipeline-model-parallel-size",
        "--num-virtual-stages-per-pipeline-rank",
        "--num-experts",
        "--moe-router-topk",
        "--moe-ffn-hidden-size",
        "--hidden-size",
        "--num-layers",
        "--num-attention-heads",
        "--num-query-groups",
        "--kv-channels",
        "--vocab-size",
        "--seq-length",
        "--moe-token-dispatcher-type",
        "--moe-flex-dispatcher-backend",
        "--recompute-granularity",
        "--recompute-modules",
        "--overlap-moe-expert-parallel-comm",
        "--moe-shared-expert-overlap",
        "--fp8-format",
        "--micro-batch-tokens",
        "--ep-group-tokens",
        "--tokens-per-rank",
    }


def test_every_option_of_simulate_is_explained() -> None:
    for parameter in command_named("simulate").params:
        assert parameter.help, parameter.name
