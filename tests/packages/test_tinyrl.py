"""A framework with a loop of its own, outside the repository, gets an adapter as docs/extending.md says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from local_ranks import Launch, run_cases

pytest.importorskip("megatron.core", reason="tinyrl trains Megatron's layers")
pytest.importorskip("setuptools", reason="pip builds the package with it; torch brings it")

pytestmark = pytest.mark.multi_rank

SOURCE = Path(__file__).parent / "tinyrl_package"
ROOT = Path(__file__).parents[2]
CASES = ("gradients_are_equal", "a_whole_run", "one_rank_has_routes_of_another_model", "switched_on_from_outside")
LIMIT = 1e-5
"""Only the order of sums differs; of a loss, a gradient norm or a gradient, by the largest."""
WEIGHTS_LIMIT = 2 * 4 * 3e-3
"""After four steps of Adam with a learning rate of 3e-3: a gradient of zero but for rounding steps either way."""


@pytest.fixture(scope="module")
def launch(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(installed)]))
        return run_cases(
            Path(__file__).parent,
            [f"tinyrl_cases.{case}" for case in CASES],
            world_size=2,
            folder=tmp_path_factory.mktemp("ranks"),
            timeout_s=300.0,
        )


def apart(plain: dict[str, list[float]], ours: dict[str, list[float]]) -> float:
    """The largest relative difference of two curves."""
    assert plain.keys() == ours.keys()
    pairs = [pair for name in plain for pair in zip(plain[name], ours[name], strict=True)]
    return max(abs(a - b) / abs(a) for a, b in pairs)


def test_the_gradients_of_balanced_updates_are_those_of_plain_ones(launch: Launch) -> None:
    for rank in launch.of("tinyrl_cases.gradients_are_equal"):
        assert rank["losses"]["balanced"] == pytest.approx(rank["losses"]["plain"], rel=LIMIT)
        assert rank["apart"] <= LIMIT * rank["largest"]
        for update in rank["metrics"]:
            assert update["moe_rl/replicas"] > 0
            assert update["moe_rl/fallback"] == 0
            assert update["moe_rl/static_imbalance"] > 1.2
            assert update["moe_rl/imbalance"] < 1.06
            assert update["moe_rl/imbalance"] < update["moe_rl/static_imbalance"]


def test_a_run_whose_loss_raises_once_is_the_plain_one_after_that_too(launch: Launch) -> None:
    """It scores, validates, saves, publishes and is resumed, with and without the adapter."""
    for rank in launch.of("tinyrl_cases.a_whole_run"):
        assert apart(rank["plain"], rank["balanced"]) <= LIMIT
        assert rank["weights"] <= WEIGHTS_LIMIT
        assert rank["moved"][-1] > 0
        assert rank["homes"] == rank["moved"][-1]
        assert len(rank["updates"]) == 4
        assert all(update["moe_rl/imbalance"] < update["moe_rl/static_imbalance"] for update in rank["updates"])
        for update in rank["updates"]:  # every row has a route, so nothing is expected that does not come
            assert update["moe_rl/imbalance"] == pytest.approx(update["moe_rl/predicted_imbalance"])
        going_on, plain, balanced = rank["next"]
        assert plain == pytest.approx(going_on, rel=LIMIT)
        assert balanced == pytest.approx(going_on, rel=LIMIT)


def test_routes_that_are_wrong_on_one_rank_are_refused_on_all(launch: Launch) -> None:
    for rank in launch.of("tinyrl_cases.one_rank_has_routes_of_another_model"):
        assert "the routes come from another model" in rank["message"]
        assert rank["loss"] == pytest.approx(rank["plain"], rel=LIMIT)


def test_variables_switch_it_on_and_off(launch: Launch) -> None:
    for rank in launch.of("tinyrl_cases.switched_on_from_outside"):
        assert rank["nothing"]
        assert rank["losses"]["balanced"] == pytest.approx(rank["losses"]["plain"], rel=LIMIT)
        balanced, switched_off = rank["metrics"]
        assert balanced["moe_rl/imbalance"] < balanced["moe_rl/static_imbalance"]
        assert switched_off == {}


def run(arguments: list[str], package: Path) -> str:
    """Return what Python prints with this checkout and the package on its path."""
    path = os.pathsep.join([str(ROOT), str(package)])
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_doctor_knows_the_adapter(installed: Path) -> None:
    code = "from moe_rl.cli import main; main()"
    printed = run(["-c", code, "doctor", "--framework", "tinyrl"], installed)
    assert "tinyrl 0.3.0" in printed
    assert "balancer = attach(trainer, BalancerConfig(reorders=True))" in printed


def test_the_conformance_suite_runs_over_the_contract(installed: Path) -> None:
    suite = ROOT / "tests" / "conformance" / "test_adapters.py"
    printed = run(["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "tinyrl", str(suite)], installed)
    assert "3 passed, 1 skipped" in printed
