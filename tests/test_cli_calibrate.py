"""`moe-rl calibrate`: a cluster file that loads again, honest errors beside it, and refusals that leave nothing."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_runner import moe_rl, snapshot, write_npz
from strategies import measurement

from moe_rl.config import cluster_names, cluster_yaml, load_cluster, load_software
from moe_rl.profiling.measurements import measurements_csv
from moe_rl.study.measured import predicted_seconds

TRUTH = replace(load_cluster("h100"), gemm_tflops=610.0, nvlink_gb_per_s=210.0, rdma_gb_per_s=31.0)
FITTED = ("gemm_tflops", "nvlink_gb_per_s", "rdma_gb_per_s")


def measured(*, noise: float = 0.0, groups: tuple[str, ...] = ("small", "large"), factor: float = 1e3) -> str:
    """The CSV of a sweep taken on `TRUTH`; two model shapes, GEMMs and exchanges on one and on four nodes."""
    rng = np.random.default_rng(0)
    shapes = {"small": (2048, 768), "large": (4096, 1536)}
    rows = []
    for group in groups:
        hidden, width = shapes[group]
        for tokens in (512, 2048, 8192, 32768):
            for kind, ep_size in (("expert_gemm", 8), ("all_to_all", 8), ("all_to_all", 32)):
                row = measurement(
                    kind=kind, ep_size=ep_size, hidden_size=hidden, moe_ffn_hidden_size=width, group=group,
                    tokens_per_rank=tokens,
                )  # fmt: skip
                seconds = predicted_seconds(row, TRUTH) * float(np.exp(noise * rng.standard_normal()))
                rows.append(replace(row, time_ms=factor * seconds))
    return measurements_csv(rows)


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    path = tmp_path / "m.csv"
    path.write_text(measured())
    return path


def calibrate(*arguments: object, constants: tuple[str, ...] = FITTED) -> object:
    return moe_rl("calibrate", *arguments, "--cluster", "h100", "--constants", ",".join(constants))


def test_the_written_file_is_a_cluster_with_the_fitted_constants(tmp_path: Path, csv: Path) -> None:
    out = tmp_path / "mine.yaml"
    ran = calibrate(csv, "--out", out)
    assert ran.code == 0, ran.err
    loaded, start = load_cluster(str(out)), load_cluster("h100")
    assert loaded.name == "mine"
    for name in FITTED:
        assert getattr(loaded, name) == pytest.approx(getattr(TRUTH, name), rel=1e-3)
        assert "24 measurements in m.csv" in loaded.sources[name]
    kept = set(start.sources) - set(FITTED)
    assert all(getattr(loaded, name) == getattr(start, name) for name in kept)
    assert all(loaded.sources[name] == f"cluster h100: {start.sources[name]}" for name in kept)
    trace = write_npz(tmp_path / "t.npz")
    simulated = moe_rl("simulate", trace, "--cluster", out, "--ep", 4, "--ep-group-tokens", 200, "--policy", "static")
    assert simulated.code == 0, simulated.err
    assert "GPUs of mine, EP4" in simulated.out


def test_the_table_shows_both_values_and_the_errors_of_every_group(tmp_path: Path, csv: Path) -> None:
    csv.write_text(measured(noise=0.05))
    ran = calibrate(csv, "--out", tmp_path / "mine.yaml")
    assert ran.code == 0, ran.err
    lines = {line.split()[0]: line.split() for line in ran.out.splitlines() if line.split()}
    loaded = load_cluster(str(tmp_path / "mine.yaml"))
    assert lines["gemm_tflops"][1:3] == [f"{cluster.gemm_tflops:.4g}" for cluster in (load_cluster("h100"), loaded)]
    for group in ("small", "large", "all"):
        before, fitted, held_out = (float(cell.rstrip("%")) for cell in lines[group][2:5])
        assert before > held_out >= 0.8 * fitted > 0


def test_json_holds_what_the_table_shows(tmp_path: Path, csv: Path) -> None:
    ran = calibrate(csv, "--out", tmp_path / "mine.yaml", "--json", "-")
    document = json.loads(ran.out)
    assert document["schema"] == "moe_rl.calibrate/1"
    assert list(document["constants"]) == list(FITTED)
    loaded = load_cluster(str(tmp_path / "mine.yaml"))
    for name, item in document["constants"].items():
        assert item["after"] == getattr(loaded, name)
        assert item["before"] == getattr(load_cluster("h100"), name)
    assert set(document["groups"]) == {"small", "large"}
    assert document["held_out_error"] < 1e-3 < document["error_before"]


def test_one_group_has_no_held_out_error_and_says_so(tmp_path: Path, csv: Path) -> None:
    csv.write_text(measured(groups=("small",)))
    ran = calibrate(csv, "--out", tmp_path / "mine.yaml", "--json", "-")
    assert "held_out_error" not in json.loads(ran.out)
    assert "held-out errors need at least two groups" in calibrate(csv, "--out", tmp_path / "mine.yaml").out


def test_files_add_up(tmp_path: Path) -> None:
    for group in ("small", "large"):
        (tmp_path / f"{group}.csv").write_text(measured(groups=(group,)))
    ran = calibrate(tmp_path / "small.csv", tmp_path / "large.csv", "--out", tmp_path / "mine.yaml", "--json", "-")
    assert json.loads(ran.out)["num_measurements"] == 24


def test_calibrating_the_calibrated_file_changes_nothing(tmp_path: Path, csv: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    assert calibrate(csv, "--out", first).code == 0
    ran = moe_rl("calibrate", csv, "--cluster", first, "--constants", ",".join(FITTED), "--out", second)
    assert ran.code == 0, ran.err
    one, two = load_cluster(str(first)), load_cluster(str(second))
    assert all(getattr(two, name) == pytest.approx(getattr(one, name), rel=1e-6) for name in FITTED)
    assert two.sources["hbm_gib"] == one.sources["hbm_gib"]


@pytest.mark.parametrize("name", cluster_names())
def test_every_shipped_cluster_survives_writing_and_reading(tmp_path: Path, name: str) -> None:
    (tmp_path / "c.yaml").write_text(cluster_yaml(load_cluster(name)))
    assert load_cluster(str(tmp_path / "c.yaml")) == load_cluster(name)


@pytest.mark.parametrize(
    ("constants", "sentence"),
    [
        (("gemm_tflops", "layer_fixed_forward_ms"), "do not depend on layer_fixed_forward_ms"),
        (("gem_tflops",), "Did you mean 'gemm_tflops'"),
        (("gemm_tflops", "gemm_tflops"), "a constant to calibrate is named twice"),
    ],
)
def test_what_cannot_be_fitted_is_refused_and_nothing_is_written(
    tmp_path: Path, csv: Path, constants: tuple[str, ...], sentence: str
) -> None:
    before = snapshot(tmp_path)
    ran = calibrate(csv, "--out", tmp_path / "mine.yaml", constants=constants)
    assert (ran.code, ran.out) == (2, "")
    assert sentence in ran.err
    assert ran.err.count("\n") == 1
    assert snapshot(tmp_path) == before


def test_an_old_file_survives_a_refused_fit(tmp_path: Path, csv: Path) -> None:
    out = tmp_path / "mine.yaml"
    out.write_text("precious")
    csv.write_text(measured(factor=1e9))
    ran = calibrate(csv, "--out", out)
    assert ran.code == 2
    assert "check the units" in ran.err
    assert out.read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("m.csv", "--out", "mine.json"), "must end in .yaml"),
        (("m.csv", "--out", "folder.yaml"), "is a folder"),
        (("absent.csv", "--out", "mine.yaml"), "does not exist"),
        (("folder.yaml", "--out", "mine.yaml"), "folder.yaml cannot be read: Is a directory"),
        (("same.yaml", "--out", "same.yaml"), "would overwrite the input"),
    ],
)
def test_wrong_files_are_refused(
    tmp_path: Path, csv: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "same.yaml").write_text(measured())
    before = snapshot(tmp_path)
    ran = calibrate(*arguments)
    assert ran.code == 2
    assert sentence in ran.err
    assert snapshot(tmp_path) == before


def test_an_unknown_cluster_is_refused_with_the_nearest(tmp_path: Path, csv: Path) -> None:
    ran = moe_rl("calibrate", csv, "--cluster", "h10", "--constants", "gemm_tflops", "--out", tmp_path / "x.yaml")
    assert ran.code == 2
    assert "Did you mean 'h100'" in ran.err


def test_one_step_is_enough_and_software_gets_a_file_of_its_own(tmp_path: Path) -> None:
    steps = tmp_path / "steps.yaml"
    steps.write_text(
        "steps:\n- {model: qwen3-30b-a3b, gpus: 16, ep: 16, global_batch_size: 128, seq_length: 4096, seconds: 6.5}\n"
    )
    ran = moe_rl("calibrate", steps, "--cluster", "h100", "--out", tmp_path / "mine.yaml")
    assert ran.code == 0, ran.err
    software = load_software(str(tmp_path / "mine.software.yaml"))
    assert software.costs.host != load_software("typical").costs.host
    assert "1 measurements in steps.yaml" in software.sources["host"]
    assert software.spreads["host"] < 0.5  # narrower than before it was measured
    assert load_cluster(str(tmp_path / "mine.yaml")).name == "mine"
