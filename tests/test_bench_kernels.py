"""The kernel benchmark catches wrong kernels, knows the models' real shapes, and runs on a bare machine."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch", reason="kernel benchmarks need torch")
pytest.importorskip("triton", reason="kernel benchmarks need triton")

import torch

from benchmarks import gpu_report, targets
from benchmarks.kernels.prediction import Model, Shares
from benchmarks.kernels.specialized_suite import proven
from benchmarks.operators import cases, harness
from benchmarks.operators.gemm_suites import ALL_SUITES
from benchmarks.operators.roofline import Roofline, Work
from moe_rl.config import load_model
from moe_rl.kernels.gemm.proven import proven_on
from moe_rl.kernels.gemm.tiling import GemmProblem, candidates

pytestmark = pytest.mark.triton

ROOT = Path(__file__).resolve().parent.parent


def load_gpu_check() -> ModuleType:
    """The script as a module; `benchmarks` is not a package."""
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "benchmarks" / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu_check = load_gpu_check()
RATES = Roofline(device="cpu", fill_gb_per_s=1.0, copy_gb_per_s=1.0, bf16_tflops=1.0, fp8_tflops=None)
EXPECTED = torch.arange(1.0, 13.0).reshape(3, 4)


def problem(call: object, **settings: object) -> object:
    case = cases.Case(model=cases.TINY, tokens=3)
    return harness.Problem(
        operator="double", variant="plain", case=case, work=Work(bytes_moved=96), of_pass="forward",
        calls={"triton": call}, expected=lambda: (EXPECTED,), **settings,
    )  # fmt: skip


def rows(made: object, roofline: Roofline | None = None) -> list[dict[str, object]]:
    return list(harness.run_problem(made, roofline, budget_s=0.0))


def test_the_shapes_are_those_of_the_models() -> None:
    for shape in cases.MODELS.values():
        spec = load_model(shape.name).spec
        assert (shape.num_experts, shape.top_k) == (spec.num_experts, spec.top_k)
        assert (shape.hidden, shape.intermediate) == (spec.hidden_size, spec.moe_ffn_hidden_size)
        assert shape.is_oai == (spec.activation == "swiglu_oai")
        assert shape.num_experts % shape.ep_size == 0


def test_a_right_result_is_timed() -> None:
    (row,) = rows(problem(lambda: (EXPECTED.clone(),)), RATES)
    assert row["passed"] is True
    assert row["clock"] == "perf_counter on the CPU"
    assert "| double | plain | forward | tiny T3 uniform | triton |" in harness.table([row])


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda good: good[:2], "shape"),
        (lambda good: good.index_fill(0, torch.tensor([1]), float("nan")), "4 values are not finite"),
        (lambda good: good * torch.tensor([[1.0], [1.001], [1.0]]), r"row \(1,\) errs by 0.001"),
    ],
)
def test_a_wrong_result_is_reported_and_not_timed(damage: object, sentence: str) -> None:
    (row,) = rows(problem(lambda: (damage(EXPECTED),)), RATES)
    assert row["passed"] is False
    assert re.search(sentence, str(row["problem"]))
    assert "time_us" not in row


def test_one_differing_bit_fails_where_bits_are_promised() -> None:
    (row,) = rows(problem(lambda: (EXPECTED.nextafter(torch.tensor(9e9)),), bitwise=True))
    assert "12 of 12 values differ in their bits" in str(row["problem"])
    (row,) = rows(problem(lambda: (EXPECTED.nextafter(torch.tensor(9e9)),)))
    assert row["passed"] is True


def test_a_result_that_differs_between_runs_fails() -> None:
    results = iter([EXPECTED, EXPECTED.nextafter(torch.tensor(9e9))])
    (row,) = rows(problem(lambda: (next(results),)))
    assert row["problem"] == "1 of 1 more runs differ from the first"


def test_a_provider_that_raises_fails_and_leaves_the_others_their_rows() -> None:
    def broken() -> object:
        raise RuntimeError("misaligned address")

    made = problem(broken)
    first, second = rows(harness.replace(made, calls={"triton": broken, "reference": lambda: (EXPECTED,)}))
    assert (first["passed"], first["problem"]) == (False, "RuntimeError: misaligned address")
    assert second["passed"] is True


def test_only_peers_may_use_the_wider_limit() -> None:
    made = problem(lambda: (EXPECTED * 1.001,), peer_limit=2.0**-8)
    (row,) = rows(made)
    assert row["passed"] is False
    (row,) = rows(harness.replace(made, calls={"torch": made.calls["triton"]}))
    assert row["passed"] is True


def test_every_routing_gives_ids_of_the_model_and_the_hot_expert_gets_every_token() -> None:
    model = cases.MODELS["qwen3-30b-a3b"]
    for routing in cases.ROUTINGS:
        ids = cases.Case(model=model, tokens=64, routing=routing).routes(64, "cpu")
        assert tuple(ids.shape) == (64, model.top_k)
        assert 0 <= int(ids.min()) <= int(ids.max()) < model.num_experts
        assert all(len(set(row)) == model.top_k for row in ids.tolist())
    hot = cases.Case(model=model, tokens=64, routing="hot").routes(64, "cpu")
    assert bool((hot == 0).any(dim=1).all())
    assert not cases.can_replay(cases.BUNDLED_TRACE, cases.MODELS["deepseek-v3"])


def test_sizes_of_rank_0_are_the_pairs_of_its_slots() -> None:
    case = cases.Case(model=cases.TINY, tokens=40, routing="zipf")
    ids = case.routes(40 * cases.TINY.ep_size, "cpu")
    sizes = case.m_offsets("cpu").diff().tolist()
    assert sizes == [int((ids == slot).sum()) for slot in range(cases.TINY.num_slots)]


def test_every_registered_operator_has_a_check() -> None:
    """An operator without a suite would pass by not being looked at."""
    batch = [cases.Case(model=model, tokens=4) for model in (cases.TINY, cases.TINY_OAI)]
    named = [
        {"operator": made.operator} for build in ALL_SUITES.values() for case in batch for made in build(case, "cpu")
    ]
    assert gpu_report.uncovered_operators(named) == []


def test_the_report_names_what_failed_and_what_was_not_there() -> None:
    (good,) = rows(problem(lambda: (EXPECTED,)), RATES)
    bad = good | {"passed": False, "problem": "wrong", "provider": "bad"}
    gone = good | {"passed": None, "problem": "no module named deep_gemm", "provider": "deepgemm"}
    document = {
        "machine": gpu_check.record_hardware(ROOT), "roofline": RATES.as_dict(), "command": "test",
        "operators_without_checks": [],
    }  # fmt: skip
    page = gpu_report.report(document, [row | {"phase": "timings"} for row in (good, bad, gone)])
    assert "1 passed, 1 failed, 1 not available" in page
    assert "- timings double plain, tiny T3 uniform, bad: wrong" in page
    assert "- deepgemm: no module named deep_gemm" in page


def test_the_models_that_are_compiled_first_are_small_and_choose_the_tiles_of_the_timed_ones() -> None:
    for case in gpu_check.TIMED:
        small = gpu_check.compiled_alike(case.model)
        assert small.hidden * small.intermediate <= 2112 * 2112
        for op in ("forward", "dgrad", "wgrad"):
            for scaling in ("none", "block"):
                tiles = [
                    candidates(GemmProblem(
                        op=op, scaling=scaling, num_rows=4096, num_groups=8, n=2 * model.intermediate, k=model.hidden,
                        capability=(9, 0),
                    )) for model in (case.model, small)
                ]  # fmt: skip
                assert tiles[0] == tiles[1], (case, op, scaling)


def test_a_peer_that_fails_is_reported_and_not_our_fault() -> None:
    (bad,) = rows(problem(lambda: (EXPECTED * 2,)))
    bad |= {"phase": "numerics", "suite": "gemm"}
    peer, tile = bad | {"provider": "deepgemm:aligned"}, bad | {"provider": "triton:tma 128x128x128 w4 s4 specialized"}
    lost = bad | {"provider": "?"}
    assert gpu_report.faults([peer]) == []
    assert gpu_report.faults([bad, peer, tile, lost]) == [bad, tile, lost]
    document = {
        "machine": gpu_check.record_hardware(ROOT), "roofline": RATES.as_dict(), "command": "test",
        "operators_without_checks": [],
    }  # fmt: skip
    page = gpu_report.report(document, [peer])
    assert "## Peers that failed" in page
    assert "## Failed" not in page


def test_a_verdict_says_in_its_first_line_whether_something_of_ours_is_wrong() -> None:
    (good,) = rows(problem(lambda: (EXPECTED,)))
    good |= {"phase": "numerics", "suite": "gemm"}
    bad, peer = good | {"passed": False}, good | {"passed": False, "provider": "deepgemm:aligned"}
    assert gpu_report.verdict([good, peer])[0].startswith(
        "VERDICT: all of ours right; 1 checks of ours passed, 0 failed"
    )
    wrong = gpu_report.verdict([good, bad, bad])
    assert wrong[0].startswith("VERDICT: WRONG; 1 checks of ours passed, 2 failed")
    assert "failed 2 times: numerics gemm" in wrong[1]


def test_a_run_is_resumed_from_sections_of_the_same_code_that_were_finished(tmp_path: Path) -> None:
    (good,) = rows(problem(lambda: (EXPECTED,)))
    whole, first, lost = (
        good | {"phase": "numerics", "suite": "gemm"}, good | {"phase": "timings", "suite": "gemm"},
        gpu_check.unreached("out of time") | {"phase": "timings", "suite": "gemm"},
    )  # fmt: skip
    path = tmp_path / "gpu_check.json"
    path.write_text(json.dumps({"code": "abc", "rows": [whole, first, lost]}))
    assert [row["phase"] for row in gpu_report.finished_rows(path, "abc")] == ["numerics"]
    assert gpu_report.finished_rows(path, "another") == []
    assert gpu_report.finished_rows(tmp_path / "none.json", "abc") == []
    assert len(gpu_report.code_digest(ROOT)) == 16


def special(
    provider: str, *, op: str = "forward", passed: bool = True, runs: int = 1000, us: float | None = None
) -> dict[str, object]:
    """A row of the specialized suite: repeated in numerics, or timed."""
    row: dict[str, object] = {
        "operator": f"grouped_gemm {op}", "variant": "none table", "pass": op, "case": "qwen T4096 even",
        "provider": provider, "passed": passed, "problem": "", "runs": runs, "suite": "specialized",
        "phase": "numerics" if us is None else "timings",
    }  # fmt: skip
    return row if us is None else row | {"time_us": {"p50": us}}


WIDE = "triton:gluon 256x256x64 w4 s4 specialized"


def test_a_tile_is_proven_by_a_thousand_runs_and_a_shorter_time_than_the_plain_loop() -> None:
    def timed_rows(us: float) -> list[dict[str, object]]:
        plain = [special("triton:plain", op=op, runs=2, us=100.0) for op in ("forward", "dgrad")]
        return [*plain, special(WIDE, runs=2, us=us), special(WIDE, op="dgrad", runs=2, us=50.0)]

    repeated = [special(WIDE), special(WIDE, op="dgrad")]
    found = proven([*repeated, *timed_rows(80.0)])
    assert {(str(tile.tile), tile.op, tile.scaling, tile.speedup) for tile in found} == {
        (WIDE.removeprefix("triton:"), op, "none", speedup) for op, speedup in (("forward", 1.25), ("dgrad", 2.0))
    }
    wrong = [special(WIDE, passed=False), special(WIDE, op="dgrad")]
    assert [tile.op for tile in proven([*wrong, *timed_rows(80.0)])] == ["dgrad"]
    assert proven(timed_rows(80.0)) == (), "nothing was repeated"
    assert proven(repeated) == (), "nothing was timed"
    assert [tile.op for tile in proven([*repeated, *timed_rows(101.0)])] == ["dgrad"], "slower"


def test_what_a_run_learned_is_read_back_by_the_kernels_and_the_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_RL_PROVEN_TILES", str(tmp_path))
    monkeypatch.setattr(gpu_report, "STATIC", tmp_path)
    (tmp_path / "kernel_proof.json").write_text('{"products": [], "elements": []}')
    predicted = special("triton", runs=2, us=100.0) | {"suite": "gemm", "predicted_us": 80.0, "bound_by": "product"}
    rows = [special(WIDE), special("triton:plain", runs=2, us=9.0), special(WIDE, runs=2, us=6.0), predicted]
    page = "\n".join(gpu_report.learn(rows, "NVIDIA H100", "nvidia-h100"))
    assert "lets the kernels choose 1 specialized tiles" in page
    found = proven_on("NVIDIA H100")
    assert [str(tile.tile) for tile in found.tiles] == [WIDE.removeprefix("triton:")]
    model = Model.load(tmp_path)
    assert model is not None
    # The row took longer than predicted: kernels reach less of their roofs than was thought.
    assert model.shares.product == pytest.approx(Shares().product * 0.8)
    assert (model.shares.memory, model.shares.source) == (Shares().memory, "gpu_check on nvidia-h100")


def timed(operator: str, variant: str, provider: str, median_us: float, **more: object) -> dict[str, object]:
    return {
        "operator": operator, "variant": variant, "pass": "forward", "case": "qwen T4096 even", "provider": provider,
        "passed": True, "time_us": {"p20": 0.0, "p50": median_us, "p80": 9e9}, **more,
    }  # fmt: skip


def test_targets_are_ratios_of_medians_within_the_run() -> None:
    found = targets.judge([
        timed("projection", "fc1 block", "triton", 100.0), timed("projection", "fc1 none", "torch", 150.0),
        timed("projection", "fc1 block", "deepgemm", 60.0), timed("grouped_gemm", "fc1 block", "triton", 50.0),
        timed("quantize", "1x128", "triton", 10.0, roofline_fraction=0.74),
        timed("quantize", "1x128", "reference", 10.0, roofline_fraction=0.9),
    ])  # fmt: skip
    assert [(round(target.measured, 3), target.goal, target.met) for target in found] == [
        (1.5, 1.3, True), (0.6, 0.7, False), (0.74, 0.75, False),
    ]  # fmt: skip
    assert "| quantize 1x128, share of copy bandwidth | qwen T4096 even | 0.75 | 0.74 | no |" in targets.table(found)


def test_a_case_that_faults_costs_its_own_rows_and_not_those_of_the_next() -> None:
    """As where a kernel takes the process with it: the section goes on with the next case, and says what it lost."""
    section = gpu_check.Section.__new__(gpu_check.Section)
    section.suite, section.phase, section.roofline, section.case = "router", "rehearsal", None, 0
    section.rows, section.errors, section.readers = [{"passed": True, "operator": "kept"}], ["illegal address"], []
    section.process = subprocess.Popen([sys.executable, "-c", "import os; os._exit(7)"])
    found = section.finish(time.monotonic() + 300)
    assert found[0]["operator"] == "kept"
    assert "ended with code 7: illegal address" in found[1]["problem"]
    assert found[1]["case"] == str(gpu_check.REHEARSED[0])
    after = {row["case"] for row in found[2:]}
    assert after == {str(case) for case in gpu_check.REHEARSED[1:]}
    assert [row for row in found[2:] if row["passed"] is False] == []


def test_problems_that_cannot_be_built_are_reported_and_the_next_case_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(case: object, device: str) -> object:
        if case == gpu_check.REHEARSED[1]:
            raise RuntimeError("out of memory")
        return iter(())

    monkeypatch.setitem(gpu_check.SUITES, "router", build)
    found = list(gpu_check.section_rows("router", "rehearsal", 0, None))
    assert [row["started"] for row in found if "started" in row] == list(range(len(gpu_check.REHEARSED)))
    (lost,) = [row for row in found if "started" not in row]
    assert lost["passed"] is False
    assert "RuntimeError: out of memory" in lost["problem"]


def test_results_are_written_as_they_come_and_are_strict_json(tmp_path: Path) -> None:
    (good,) = rows(problem(lambda: (EXPECTED,)), RATES)
    endless = good | {"phase": "timings", "suite": "x", "row_error": float("inf")}
    document = {
        "machine": gpu_check.record_hardware(ROOT), "roofline": RATES.as_dict(), "command": "test"
    }  # fmt: skip
    gpu_report.write_results(tmp_path, document, [endless])
    read = json.loads((tmp_path / "gpu_check.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert read["rows"][0]["row_error"] is None
    assert "grouped_gemm" in read["operators_without_checks"]
    assert "1 passed, 0 failed" in (tmp_path / "gpu_check.md").read_text()


def test_carried_wheels_are_importable_in_the_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ".")
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "carried_peer-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_peer/__init__.py", "ANSWER = 42\n")
    assert gpu_check.unpack_wheels(tmp_path / "wheels", tmp_path / "into") == ["carried_peer-1.0-py3-none-any.whl"]
    done = subprocess.run(
        [sys.executable, "-c", "import carried_peer; print(carried_peer.ANSWER)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "42\n"
    assert gpu_check.unpack_wheels(tmp_path / "none", tmp_path / "into") == []


BLOCKED = """
import importlib.metadata, re, sys

def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()

def with_needs(name, found):
    # torch and triton bring what they name; a GPU image has that and numpy, and may have nothing else.
    if name not in found:
        found.add(name)
        for line in importlib.metadata.requires(name) or ():
            if "extra ==" not in line and (need := plain(re.match(r"[\\w.-]+", line)[0])) in installed:
                with_needs(need, found)
    return found

installed = {plain(d.metadata["Name"]) for d in importlib.metadata.distributions()}
there = with_needs("numpy", with_needs("triton", with_needs("torch", set())))
packages = importlib.metadata.packages_distributions()
missing = {p for p, owners in packages.items() if not there & {plain(o) for o in owners}} - {"moe_rl", "setuptools"}

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(f"{name} is not on a bare machine", name=name)
sys.meta_path.insert(0, Blocked())
sys.argv = ["gpu_check.py"] + sys.argv[1:]
import runpy
runpy.run_path("benchmarks/gpu_check.py", run_name="__main__")
"""


def run_bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = "."
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_exits_2() -> None:
    done = run_bare()
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("There is no CUDA GPU here, so nothing was checked")


def test_numerics_run_interpreted_on_a_bare_machine() -> None:
    done = run_bare("--rehearse", "--suites", "router")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[1-9]\d* passed, 0 failed", done.stdout)


@pytest.mark.slow
def test_all_numerics_run_interpreted() -> None:
    done = run_bare("--rehearse")
    assert done.returncode == 0, done.stdout + done.stderr
