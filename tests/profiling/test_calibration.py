"""A fit finds the constants that made the data, and refuses what the data cannot tell."""

import csv
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from strategies import HARDWARE, measurement

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.topology import HardwareSpec
from moe_rl.profiling.calibration import calibrate as calibrate_by
from moe_rl.profiling.measurements import Measurement, measurements_csv, read_measurements
from moe_rl.study.measured import predicted_seconds

calibrate = partial(calibrate_by, predict=predicted_seconds)
TRUTH = replace(HARDWARE, gemm_tflops=610.0, hbm_gb_per_s=2100.0, nvlink_gb_per_s=210.0, rdma_gb_per_s=31.0)


def taken_on(hardware: HardwareSpec, items: list[Measurement], noise: float = 0.0) -> list[Measurement]:
    rng = np.random.default_rng(0)
    return [
        replace(item, time_ms=1e3 * predicted_seconds(item, hardware) * float(np.exp(noise * rng.standard_normal())))
        for item in items
    ]


def a_sweep() -> list[Measurement]:
    """GEMMs from the weight-read floor to the plateau, and exchanges on one and on four nodes, for two model shapes."""
    items = []
    for group, hidden, width in (("small", 2048, 768), ("large", 4096, 1536)):
        shape = {"hidden_size": hidden, "moe_ffn_hidden_size": width, "group": group}
        for tokens in (64, 512, 2048, 8192, 32768):
            items += [measurement(**shape, tokens_per_rank=tokens, phase=phase) for phase in ("forward", "backward")]
            items += [
                measurement(**shape, tokens_per_rank=tokens, kind="all_to_all", ep_size=ep_size) for ep_size in (8, 32)
            ]
    return items


def test_the_fit_finds_the_constants_that_made_the_data() -> None:
    constants = ("gemm_tflops", "hbm_gb_per_s", "nvlink_gb_per_s", "rdma_gb_per_s")
    result = calibrate(taken_on(TRUTH, a_sweep()), HARDWARE, constants, source="a test")
    for name in constants:
        assert getattr(result.hardware, name) == pytest.approx(getattr(TRUTH, name), rel=1e-3)
        assert result.hardware.sources[name] == "a test"
    assert result.mean_error("in_sample") < 1e-3
    assert {group.group for group in result.groups} == {"small", "large"}
    assert max(group.held_out or 1.0 for group in result.groups) < 1e-3
    assert max(item.uncertainty for item in result.constants) < 1e-3
    assert result.mean_error("before") > 0.05


def test_held_out_error_shows_the_noise_that_the_fit_cannot_explain() -> None:
    """5 % log-normal noise has a mean absolute error of 0.05 sqrt(2/pi) = 4.0 %; a fit of 40 points stays near it."""
    result = calibrate(taken_on(TRUTH, a_sweep(), noise=0.05), HARDWARE, ("gemm_tflops", "nvlink_gb_per_s"), source="s")
    expected = 0.05 * np.sqrt(2 / np.pi)
    assert all((group.held_out or 0.0) > 0.5 * expected for group in result.groups)


@pytest.mark.lengthy
def test_the_standard_error_covers_the_truth() -> None:
    """Over 20 draws of 10 % noise the truth lies within 3 standard errors; a normal error fails once in 370."""
    data = [replace(item, time_ms=1e3 * predicted_seconds(item, TRUTH)) for item in a_sweep()]
    exact = replace(TRUTH, gemm_tflops=700.0, nvlink_gb_per_s=250.0)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        noisy = [replace(m, time_ms=m.time_ms * float(np.exp(0.1 * rng.standard_normal()))) for m in data]
        result = calibrate(noisy, exact, ("gemm_tflops", "nvlink_gb_per_s"), source="s")
        for item in result.constants:
            distance = abs(np.log(item.after / getattr(TRUTH, item.name)))
            assert distance < 3 * np.log1p(item.uncertainty), (seed, item)


def test_scatter_shows_in_the_spread_of_the_constant() -> None:
    """Six exchanges that take 1 or 30 ms hardly say what the link carries; six that agree do."""
    exchanges = [measurement(kind="all_to_all", tokens_per_rank=n) for n in (4096, 8192, 16384) for _ in range(2)]
    agreed = taken_on(HARDWARE, exchanges)
    scattered = [replace(m, time_ms=m.time_ms * factor) for m, factor in zip(agreed, (1, 3) * 3, strict=True)]
    ours, theirs = (
        calibrate(data, HARDWARE, ("nvlink_gb_per_s",), source="s").constants[0] for data in (agreed, scattered)
    )
    assert ours.uncertainty < 1e-3
    assert theirs.uncertainty > 0.15


def test_a_group_without_which_nothing_is_known_is_predicted_as_before() -> None:
    """Only the group "small" holds exchanges: without it NVLink stays where the prior has it."""
    items = [m for m in a_sweep() if m.group == "small" or m.kind == "expert_gemm"]
    result = calibrate(taken_on(TRUTH, items), HARDWARE, ("gemm_tflops", "nvlink_gb_per_s"), source="s")
    by_name = {group.group: group for group in result.groups}
    assert by_name["small"].held_out > by_name["small"].in_sample  # its exchanges are as far off as before
    assert by_name["large"].held_out < 0.5 * by_name["large"].before


def test_a_constant_that_no_measurement_sees_is_refused_by_name_and_left_out_unnamed() -> None:
    data = taken_on(TRUTH, [measurement(tokens_per_rank=t) for t in (512, 2048, 8192)])
    with pytest.raises(InvalidInputError, match="do not depend on rdma_gb_per_s"):
        calibrate(data, HARDWARE, ("gemm_tflops", "rdma_gb_per_s"), source="s")
    moved = {item.name for item in calibrate(data, HARDWARE, source="s").constants}
    assert "gemm_tflops" in moved
    assert not {"rdma_gb_per_s", "nvlink_gb_per_s", "host_layer_ms"} & moved


def test_constants_that_act_alike_share_what_was_measured_and_keep_their_spread() -> None:
    """One exchange size: bandwidth and latency cannot be told apart, and neither becomes known."""
    data = taken_on(TRUTH, [measurement(kind="all_to_all", tokens_per_rank=t) for t in (256, 256, 256)])
    alike = calibrate(data, HARDWARE, ("nvlink_gb_per_s", "intra_node_latency_us"), source="s")
    assert all(item.uncertainty > 0.2 for item in alike.constants)
    assert alike.mean_error("in_sample") < 0.01


def test_one_measurement_is_enough() -> None:
    (data,) = taken_on(replace(HARDWARE, gemm_tflops=610.0), [measurement(tokens_per_rank=32768)])
    (constant,) = calibrate([data], HARDWARE, ("gemm_tflops",), source="s").constants
    assert constant.after == pytest.approx(610.0, rel=0.02)
    assert 0.02 < constant.uncertainty < 0.1  # one measurement is taken to be 5 % off


def test_what_was_not_fitted_keeps_the_spread_that_it_had() -> None:
    """So a known step may still move it on the calibrated cluster."""
    before = replace(HARDWARE, spreads={"gemm_tflops": 0.06, "rdma_gb_per_s": 0.5}, fabric_left_open=0.1)
    data = taken_on(TRUTH, [measurement(tokens_per_rank=32768)])
    fitted = calibrate(data, before, ("gemm_tflops",), source="s").hardware
    assert fitted.spreads["rdma_gb_per_s"] == 0.5
    assert fitted.spreads["gemm_tflops"] != 0.06
    assert fitted.fabric_left_open == 0.1


def test_an_unknown_constant_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidInputError, match="Did you mean 'gemm_tflops'"):
        calibrate([measurement()] * 3, HARDWARE, ("gem_tflops",), source="s")


def test_wrong_units_are_noticed() -> None:
    data = [replace(m, time_ms=m.time_ms * 1e4) for m in taken_on(HARDWARE, a_sweep())]
    with pytest.raises(InvalidInputError, match="check the units"):
        calibrate(data, HARDWARE, ("gemm_tflops", "hbm_gb_per_s"), source="s")


def write_csv(path: Path, rows: list[dict[str, object]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_csv_reads_back(tmp_path: Path) -> None:
    items = a_sweep()[:4]
    assert read_measurements(write_csv(tmp_path / "m.csv", [asdict(item) for item in items])) == items
    (tmp_path / "ours.csv").write_text(measurements_csv(items))
    assert read_measurements(tmp_path / "ours.csv") == items


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"time_ms": "fast"}, "line 2: time_ms 'fast' is not a number"),
        ({"time_ms": "-1"}, "line 2: measurement: time_ms must be positive"),
        ({"kind": "gem"}, "line 2: measurement: kind 'gem' is unknown"),
        ({"ep_size": "7"}, "line 2: measurement: ep_size 7 does not divide the 128 experts"),
        ({"ep_size": "16", "ranks_per_node": "3"}, "line 2: .* is not a multiple of ranks_per_node 3"),
        ({"ep_size": "0"}, "line 2: measurement: ep_size must be at least 1"),
        ({"hidden_size": "-4"}, "line 2: .*hidden_size must be at least 1"),
        ({"top_k": "129"}, "line 2: .*exceeds num_experts"),
        ({"colour": "red"}, "unknown column 'colour'"),
    ],
)
def test_a_wrong_csv_names_its_line(tmp_path: Path, change: dict[str, object], sentence: str) -> None:
    path = write_csv(tmp_path / "m.csv", [asdict(measurement()) | change])
    with pytest.raises(InvalidInputError, match=sentence):
        read_measurements(path)


def test_a_csv_without_a_column_is_refused(tmp_path: Path) -> None:
    row = asdict(measurement())
    del row["ep_size"]
    with pytest.raises(InvalidInputError, match="lacks the columns ep_size"):
        read_measurements(write_csv(tmp_path / "m.csv", [row]))
    with pytest.raises(InvalidInputError, match="does not exist"):
        read_measurements(tmp_path / "absent.csv")
