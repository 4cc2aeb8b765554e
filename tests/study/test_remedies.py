"""A run that does not fit: the option that the headline names is the mildest that works, and typed it does work."""

import shlex
from pathlib import Path

import pytest
from cli_runner import simulated, write_npz

import moe_rl
from moe_rl.simulators.setting import StepSetting
from moe_rl.study.remedies import trials

# Four wide layers: weights, gradients and Adam take a third of the memory, activations the rest.
WIDE = {
    "hidden_size": 8192, "moe_ffn_hidden_size": 4096, "num_attention_heads": 64, "num_query_groups": 8,
    "kv_channels": 128, "vocab_size": 32000, "expert_model_parallel_size": 8, "cluster": "h100",
    "policy": "static,moe-rl",
}  # fmt: skip


def flags(options: dict[str, object]) -> list[object]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_npz(tmp_path_factory.mktemp("wide") / "wide.npz", layers=4, experts=16, sequences=24, tokens=400)


@pytest.mark.lengthy
def test_the_option_that_is_named_makes_the_run_fit(tmp_path: Path, trace: Path) -> None:
    report = moe_rl.simulate(trace, micro_batch_tokens=65536, **WIDE)
    assert report.misfit is not None
    assert report.misfit.peak_gib > report.misfit.hbm_gib
    remedy = report.misfit.remedy
    assert remedy is not None
    assert remedy.peak_gib <= report.misfit.hbm_gib
    assert report.headline.startswith(f"The run does not fit: the fullest GPU needs {report.misfit.peak_gib:.1f} GiB")
    asked = flags({"micro_batch_tokens": 65536, "num_experts": 16, **WIDE})
    typed = simulated(tmp_path, trace, *asked, *shlex.split(remedy.options))
    assert "misfit" not in typed
    assert typed["policies"]["moe-rl"]["memory"]["fits"]


def test_a_run_that_fits_has_no_misfit(trace: Path) -> None:
    assert moe_rl.simulate(trace, micro_batch_tokens=2048, **WIDE).misfit is None


def test_trials_go_from_mild_to_strong_and_keep_what_is_set() -> None:
    said = [trial.options for trial in trials(StepSetting(), num_layers=48)]
    assert said[0] == "--recompute-granularity selective --recompute-modules moe"
    assert said[1] == "--recompute-granularity full"
    assert [words.split()[-2:] for words in said[3:]] == [["--pp", "2"], ["--pp", "4"], ["--pp", "8"]]
    assert [trial.gpu_factor for trial in trials(StepSetting(), num_layers=4)] == [1, 1, 1, 2, 4]
    recomputed = StepSetting(recompute="full", optimizer_offload_fraction=1.0)
    assert [trial.options for trial in trials(recomputed, num_layers=2)] == ["--pp 2"]
