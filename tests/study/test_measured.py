"""Calibration from attention, layers, other precisions and whole steps: the truth is found, or the constant refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_rl.config import load_cluster, load_software
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.topology import HardwareSpec
from moe_rl.profiling.calibration import calibrate
from moe_rl.profiling.measurements import Measurement, measurements_csv
from moe_rl.study.measured import TimedStep, predicted_seconds, read_timed

H100 = load_cluster("h100")
TRUTH = replace(H100, attention_linear_tflops=450.0, attention_forward_tflops=500.0, fp8_speedup=1.5, host_layer_ms=2.0)
SHAPE = Measurement(
    kind="attention",
    phase="forward",
    dispatcher="deepep",
    hidden_size=4096,
    moe_ffn_hidden_size=1536,
    num_experts=128,
    top_k=8,
    ep_size=8,
    ranks_per_node=8,
    tokens_per_rank=8192,
    time_ms=1.0,
    group="mine",
    sequence_length=4096,
    num_attention_heads=64,
    num_query_groups=4,
    kv_channels=128,
)
STEP: dict[str, Any] = {
    "model": "qwen3-30b-a3b",
    "gpus": 16,
    "ep_size": 16,
    "sequence_length": 4096,
    "tokens_per_rank": 4096,
    "num_micro_batches": 16,
    "setting": {"dispatcher": "hybridep"},
    "tokens_per_s": 1.0,
}


def taken_on(hardware: HardwareSpec, shapes: list[Measurement]) -> list[Measurement]:
    return [replace(one, time_ms=1e3 * predicted_seconds(one, hardware)) for one in shapes]


def steps_taken_on(hardware: HardwareSpec, path: Path, *settings: dict[str, Any]) -> Path:
    rows = []
    for setting in settings:
        row = {**STEP, "name": "mine", "cluster": "h100", **setting}
        step = TimedStep.of(row)
        rows.append(row | {"tokens_per_s": 1.0 / predicted_seconds(step, hardware)})
    path.write_text(yaml.safe_dump({"points": rows}))
    return path


def fitted(measured: Any, *constants: str) -> dict[str, float]:
    found = calibrate(measured, H100, constants, source="s", predict=predicted_seconds)
    return {item.name: item.after for item in found.constants}


@pytest.mark.parametrize("kind", ["attention", "layer"])
def test_attention_of_several_lengths_tells_its_rates(kind: str) -> None:
    shapes = [replace(SHAPE, kind=kind, sequence_length=length) for length in (1024, 4096, 16384, 65536)]
    found = fitted(taken_on(TRUTH, shapes), "attention_linear_tflops", "attention_forward_tflops")
    assert found == pytest.approx({"attention_linear_tflops": 450.0, "attention_forward_tflops": 500.0}, rel=1e-3)


def test_one_length_does_not_tell_them_apart_and_forward_says_nothing_of_backward() -> None:
    alike = taken_on(TRUTH, [SHAPE] * 4)
    names = ("attention_linear_tflops", "attention_forward_tflops")
    found = calibrate(alike, H100, names, source="s", predict=predicted_seconds)
    assert min(item.uncertainty for item in found.constants) > 0.1  # either of them may be what is slower
    assert found.mean_error("in_sample") < 2e-3
    with pytest.raises(InvalidInputError, match="do not depend on attention_backward_tflops"):
        fitted(alike, "attention_backward_tflops")


def test_fp8_rows_tell_what_fp8_brings_and_bf16_rows_do_not() -> None:
    sizes = (2048, 8192, 32768)
    shapes = [replace(SHAPE, kind="expert_gemm", precision="fp8", tokens_per_rank=tokens) for tokens in sizes]
    assert fitted(taken_on(TRUTH, shapes), "fp8_speedup")["fp8_speedup"] == pytest.approx(1.5, rel=1e-3)
    with pytest.raises(InvalidInputError, match="do not depend on fp8_speedup"):
        fitted([replace(one, precision="bf16") for one in shapes], "fp8_speedup")


def test_whole_steps_tell_the_host_and_steps_inside_a_graph_do_not(tmp_path: Path) -> None:
    plain = [{"tokens_per_rank": 1024 * n, "num_micro_batches": 8 * n} for n in (1, 2, 4, 8, 16)]
    truth = {"host_layer_ms": 2.0, "attention_linear_tflops": 450.0}
    file = steps_taken_on(replace(H100, **truth), tmp_path / "steps.yaml", *plain)
    assert fitted(read_timed(file, "h100"), *truth) == pytest.approx(truth, rel=2e-3)
    whole = [one | {"setting": {"dispatcher": "hybridep", "cuda_graph": "full_iteration"}} for one in plain]
    graphs = steps_taken_on(TRUTH, tmp_path / "graphs.yaml", *whole)
    with pytest.raises(InvalidInputError, match="do not depend on host_layer_ms"):
        fitted(read_timed(graphs, "h100"), "host_layer_ms")


def test_rows_in_the_users_words_are_steps_too(tmp_path: Path) -> None:
    """Seconds of a step with its options: typical software's host moves, and is written with the software."""
    words = {"model": "qwen3-30b-a3b", "gpus": 16, "ep": 16, "global_batch_size": 128, "seq_length": 4096}
    file = tmp_path / "ours.yaml"
    file.write_text(yaml.safe_dump({"steps": [words | {"seconds": 1.0}]}))
    (step,) = read_timed(file, "h100")
    typical = load_software("typical")
    slower = replace(typical.costs, host=1.3 * typical.costs.host)
    file.write_text(yaml.safe_dump({"steps": [words | {"seconds": predicted_seconds(step, H100, slower)}]}))
    found = calibrate(
        read_timed(file, "h100"), H100, ("host",), source="s", predict=predicted_seconds, software=typical
    )
    assert found.software.costs.host == pytest.approx(slower.host, rel=0.05)
    assert found.hardware == replace(H100, sources=found.hardware.sources, spreads=found.hardware.spreads)


def test_files_without_the_new_columns_are_read_and_wrong_ones_refused(tmp_path: Path) -> None:
    file = tmp_path / "old.csv"
    lines = [line.split(",") for line in measurements_csv([replace(SHAPE, kind="expert_gemm")]).splitlines()]
    file.write_text("\n".join(",".join(line[:12]) for line in lines))
    assert [one.precision for one in read_timed(file, "h100") if isinstance(one, Measurement)] == ["bf16"]
    for text, said in (
        ("{]", "is not a YAML file"),
        ("points: []", "contains no steps"),
        ("a: 1", "contains no steps"),
    ):
        (tmp_path / "wrong.yaml").write_text(text)
        with pytest.raises(InvalidInputError, match=said):
            read_timed(tmp_path / "wrong.yaml", "h100")
    with pytest.raises(InvalidInputError, match="sequence_length must be at least 1"):
        replace(SHAPE, sequence_length=0)
