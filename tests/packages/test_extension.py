"""A package outside the repository adds policy, objective, framework and kernel backend; the command line has them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_runner import routes, write_npz

pytestmark = pytest.mark.lengthy

pytest.importorskip("setuptools", reason="pip builds the package with it; torch brings it")

SOURCE = Path(__file__).parent / "moe_rl_example_extension"
ROOT = Path(__file__).parents[2]


def run(arguments: list[object], *packages: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with this checkout and these packages on its path."""
    path = [str(ROOT), *map(str, packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, *map(str, arguments)], env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def moe_rl(*arguments: object, package: Path) -> str:
    done = run(["-c", "from moe_rl.cli import main; main()", *arguments], package)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_npz(tmp_path / "t.npz")


def test_the_policy_plans_and_is_simulated(installed: Path, trace: Path, tmp_path: Path) -> None:
    options = ("--ep", 4, "--micro-batch-tokens", 60)
    out = tmp_path / "report.json"
    moe_rl("simulate", trace, *options, "--policy", "static,dealt", "--json", out, package=installed)
    policies = json.loads(out.read_text())["policies"]
    assert set(policies) == {"static", "dealt"}
    # Loads fall with the expert's number: contiguous homes are the worst of placements.
    assert policies["dealt"]["imbalance"] < policies["static"]["imbalance"]
    moe_rl("plan", trace, *options, "--policy", "dealt", "-o", tmp_path / "plan.npz", package=installed)
    assert (tmp_path / "plan.npz").is_file()


def test_the_objective_is_followed(installed: Path, trace: Path, tmp_path: Path) -> None:
    options = ("--ep", 4, "--micro-batch-tokens", 60, "--policy", "static,moe-rl", "--objective")
    out = tmp_path / "report.json"
    moe_rl("simulate", trace, *options, "rms", "--json", out, package=installed)
    policies = json.loads(out.read_text())["policies"]
    assert policies["moe-rl"]["imbalance"] < policies["static"]["imbalance"]
    unknown = run(["-c", "from moe_rl.cli import main; main()", "simulate", trace, *options, "rsm"], installed)
    assert unknown.returncode == 2
    assert "--objective 'rsm' is unknown. Did you mean 'rms'" in unknown.stderr


def test_the_policy_is_swept(installed: Path, trace: Path, tmp_path: Path) -> None:
    options = ("--micro-batch-tokens", 60, "--policy", "static,dealt", "--sweep", "ep=2,4")
    moe_rl("sweep", trace, *options, "--out", tmp_path / "sweep.jsonl", package=installed)
    points = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()]
    assert [set(point["policies"]) for point in points] == [{"static", "dealt"}] * 2


INSIDE_MEGATRON = """
import json
import numpy as np
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.schedule import cluster_topology, plan_of_load
from moe_rl.config import model_from_trace
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.load import StepLoad
from moe_rl.planner.base import PLACEMENT

pairs = np.broadcast_to(np.arange(8, 0, -1, dtype=np.int32), (1, 2, 3, 4, 8)).copy()
load = StepLoad(pairs=pairs, tokens=np.full((1, 2, 4), 18), top_k=2)
config = BalancerConfig(policy="dealt")
model = model_from_trace(name="", moe_layer_ids=(0, 1, 2), num_experts=8, top_k=2, overrides={}).spec
given = {"config": config, "model": model, "topology": cluster_topology(config, ep_size=4)}
try:
    refused = plan_of_load(load, **given)
except InvalidInputError as error:
    refused = str(error)
print(json.dumps([refused, plan_of_load(load, **given, may=PLACEMENT).placement.home_rank[0].tolist()]))
"""


def test_the_policy_reorders_experts_in_megatron_and_is_refused_where_they_must_stay(installed: Path) -> None:
    done = run(["-c", INSIDE_MEGATRON], installed)
    assert done.returncode == 0, done.stderr
    refused, home_rank = json.loads(done.stdout)
    assert refused.startswith("policy 'dealt' moves experts to other home ranks in every plan")
    assert home_rank == [0, 1, 2, 3, 3, 2, 1, 0]


def test_the_doctor_knows_what_the_policy_declares(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python pretrain.py --num-layers 4 --num-experts 8 --moe-rl-policy dealt\n")
    found = json.loads(moe_rl("doctor", script, "--no-environment", "--json", "-", package=installed))
    assert "expert-order-in-export" in [each["trap"] for each in found["findings"]]


def write_csv(path: Path, sequences: list[np.ndarray]) -> Path:
    lines = ["sequence,token,layer,expert,expert"]
    for number, ids in enumerate(sequences):
        for token, layer in np.ndindex(ids.shape[:2]):
            lines.append(",".join(map(str, (f"s{number}", token, layer, *ids[token, layer]))))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("options", [(), ("--format", "routes-csv")], ids=["recognized", "named"])
def test_the_trace_format_is_read(installed: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    path = write_csv(tmp_path / "t.csv", [routes(5), routes(30, seed=1)])
    facts = json.loads(moe_rl("trace", "info", path, "--num-experts", 8, "--json", "-", *options, package=installed))
    assert (facts["format"], facts["num_sequences"], facts["num_tokens"]) == ("routes-csv", 2, 35)
    assert (facts["num_moe_layers"], facts["top_k"]) == (3, 2)


def test_the_settings_of_the_framework_are_read(installed: Path, tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text("courier:\n  num_layers: 4\n  num_moe_experts: 8\n  moe_token_dispatcher_type: flex\n")
    found = json.loads(moe_rl("doctor", run_file, "--no-environment", "--json", "-", package=installed))
    settings = {name: each["value"] for name, each in found["run"]["settings"].items()}
    assert found["run"]["framework"] == "courier"
    assert settings["num_moe_experts"] == 8
    assert settings["moe_token_dispatcher_type"] == "flex"


def test_the_kernel_backend_is_checked_and_timed(installed: Path) -> None:
    pytest.importorskip("torch", reason="kernel benchmarks need torch")
    options = ("--device", "cpu", "--provider", "log-softmax", "--routing", "zipf", "--budget-s", 0.001, "--json", "-")
    document = json.loads(moe_rl("bench", "router", *options, package=installed))
    rows = [row for row in document["rows"] if row["operator"] == "gather_logprobs"]
    assert rows
    # It has softmax scores alone, and says so of the others.
    assert {row["passed"] for row in rows} == {True, None}
    assert all(row["provider"] == "log-softmax" and (row["passed"] is None or row["gb_per_s"] > 0) for row in rows)


def conformance(package: Path, module: str, name: str) -> subprocess.CompletedProcess[str]:
    path = ROOT / "tests" / "conformance" / f"test_{module}.py"
    return run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", name, path], package)


def test_the_conformance_suite_runs_over_what_a_package_adds(installed: Path) -> None:
    for module, name in (("policies", "dealt"), ("plan_objectives", "rms")):
        done = conformance(installed, module, name)
        assert done.returncode == 0, done.stdout
        assert " passed" in done.stdout


@pytest.mark.parametrize(
    ("module", "name", "missing"),
    [("importers", "routes-csv", "write a producer"), ("readers", "courier", "write a good run")],
)
def test_a_part_that_nothing_exercises_fails_the_conformance_suite(
    module: str, name: str, missing: str, installed: Path
) -> None:
    done = conformance(installed, module, name)
    assert done.returncode == 1, done.stdout
    assert missing in done.stdout


def test_without_the_package_nothing_of_it_is_there(trace: Path, tmp_path: Path) -> None:
    done = run(["-c", "from moe_rl.cli import main; main()", "simulate", trace, "--policy", "dealt"])
    assert done.returncode == 2
    assert "unknown policy 'dealt'" in done.stderr


@pytest.mark.parametrize(
    ("group", "value", "kind", "command"),
    [
        ("policies", "no_such_module:MINE", "policy", ("simulate", ".")),
        ("frameworks", "no_such_package", "framework", ("doctor", "--no-environment", "run.yaml")),
    ],
)
def test_a_package_that_cannot_be_used_is_named_in_one_sentence(
    group: str, value: str, kind: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[moe_rl.{group}]\nmine = {value}\n")
    (tmp_path / "run.yaml").write_text("num_layers: 2\n")
    *words, file = command
    done = run(["-c", "from moe_rl.cli import main; main()", *words, tmp_path / file], tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: the {kind} 'mine' of broken ({value}) cannot be loaded:")


def test_the_page_shows_what_the_packages_hold() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```(?:python|toml)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    files = [*SOURCE.rglob("*.*"), *(SOURCE.parent / "tinyrl_package" / "tinyrl_moe_rl").glob("*.py")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in files if path.is_file()}
    sources = [name for snippet in shown for name, text in texts.items() if snippet in text]
    parts = ["attach.py"] * 2 + ["contract.py", "dealt.py", "log_softmax.py", "pyproject.toml", "rms.py"]
    assert sorted(sources) == [*parts, "settings.py", "trace.py"]
    assert len(shown) == len(sources)


def test_the_page_names_files_that_there_are() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    for path in re.findall(r"`((?:moe_rl|kernels|tests|configs)/[\w./]+)`", page):
        assert (ROOT / path).exists(), path
