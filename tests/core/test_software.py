"""Kinds of training software: files, spreads, and costs that a user states."""

from pathlib import Path

import pytest

from moe_rl.config import load_software, software_names
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.software import SoftwareCosts
from moe_rl.study.options import SimulationOptions


def test_tuned_is_what_the_simulator_was_fitted_with_and_typical_has_a_slower_host() -> None:
    tuned, typical = load_software("tuned"), load_software("Typical")
    assert software_names() == ["tuned", "typical"]
    assert tuned.costs == SoftwareCosts()
    assert typical.costs.host > 1.5
    assert typical.costs.overlap_host < tuned.costs.overlap_host
    assert typical.left_open > tuned.left_open  # other people's runs scatter more
    for software in (tuned, typical):
        assert all(len(source) > 10 for source in software.sources.values())


def test_a_file_repeats_only_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("name: ours\nlike: typical\nhost: {value: 1.4, source: a profile of ours}\n")
    ours = load_software(str(path))
    assert (ours.name, ours.costs.host, ours.sources["host"]) == ("ours", 1.4, "a profile of ours")
    assert "host" not in ours.spreads  # what was measured has no spread unless the file gives one
    assert ours.costs.overlap_host == load_software("typical").costs.overlap_host
    with pytest.raises(InvalidInputError, match=r"unknown software 'tunde'\. Did you mean 'tuned'"):
        load_software("tunde")
    path.write_text("name: ours\nlike: fast\n")
    with pytest.raises(InvalidInputError, match="'like' must be the name of known training software, got 'fast'"):
        load_software(str(path))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "typical"),
        ({"cuda_graph_impl": "none"}, "typical"),
        ({"cuda_graph_impl": "local"}, "tuned"),
        ({"overlap_moe_expert_parallel_comm": True}, "tuned"),
        ({"use_transformer_engine_op_fuser": True, "fp8_format": "e4m3"}, "tuned"),
        ({"cuda_graph_impl": "local", "software": "typical"}, "typical"),
        ({"software": "tuned"}, "tuned"),
    ],
)
def test_software_is_what_is_stated_else_what_the_setting_shows_else_typical(
    options: dict[str, object], name: str
) -> None:
    assert SimulationOptions(**options).chosen_software().name == name


def test_single_costs_change_a_named_software_and_are_then_known() -> None:
    software = SimulationOptions(software="typical,host=1.5,overlap_left=0.1").chosen_software()
    assert (software.name, software.costs.host, software.costs.overlap_left) == ("typical", 1.5, 0.1)
    assert "host" not in software.spreads
    assert SimulationOptions(software="tuned,host=1.5").step_setting().software.host == 1.5


@pytest.mark.parametrize(
    ("stated", "sentence"),
    [
        ("tuned,typical", "--software names two kinds of software: tuned and typical"),
        ("tund", "unknown software 'tund'. Did you mean 'tuned'"),
        ("tuned,hots=2", "--software 'hots' is unknown. Did you mean 'host'"),
        ("host=fast", "--software host=fast: 'fast' is not a number"),
        ("host=-1", "software: host must be at least 0, got -1"),
        ("everything=0", "software: everything must be positive, got 0"),
    ],
)
def test_a_wrong_statement_is_refused_in_a_sentence(stated: str, sentence: str) -> None:
    with pytest.raises((InvalidInputError, ValueError), match=sentence):
        SimulationOptions(software=stated)
