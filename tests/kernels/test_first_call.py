"""The first call on a GPU machine: its phases and its verdict, with an emulator as libcuda and faults put in.

`make test-first-call` runs this with what a GPU machine has: Python 3.12, Triton 3.6, no pydantic.
"""

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.first_call import Child
from benchmarks.gpu.page import page, verdict
from benchmarks.gpu.phases import PHASES
from benchmarks.gpu.record import proven_tiles
from benchmarks.gpu.rows import Outcome, Row, append, read
from benchmarks.gpu.wheels import unpack

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("FIRST_CALL_PYTHON") or sys.executable
CARRIED = ROOT / "carried"
IS_PACKED = "FIRST_CALL_PYTHON" in os.environ and CARRIED.is_dir()
"""Whether Python is that of a GPU machine, without pydantic, and what it lacks is carried."""
PATIENCE = 20.0
"""Times twenty seconds: a busy machine must not make a step look as if it hung."""
BLOCKED = """
import sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pydantic", "pydantic_core"):
            raise ModuleNotFoundError(f"No module named {name!r}: it is not on a GPU machine", name=name)


sys.meta_path.insert(0, Blocked())
"""


def first_call(tmp_path: Path, *arguments: str, carried: Path | None = None) -> tuple[int, list[Row], str]:
    """Run the script without pydantic, unless it is carried, and return (exit code, rows, what it printed)."""
    (tmp_path / "site").mkdir(exist_ok=True)
    (tmp_path / "site" / "sitecustomize.py").write_text(BLOCKED)
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    if carried is None:
        environment["PYTHONPATH"] = str(tmp_path / "site")
    command = [PYTHON, "benchmarks/first_call.py", "--out", str(tmp_path / "out"), "--rehearse", "--carried",
               str(carried or tmp_path / "none"), "--patience", str(PATIENCE), *arguments]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, read(tmp_path / "out"), done.stdout


def outcomes(rows: list[Row]) -> list[Outcome]:
    return [row.outcome for row in rows]


@pytest.mark.lengthy
def test_a_wrong_kernel_ends_in_wrong(tmp_path: Path) -> None:
    code, rows, printed = first_call(tmp_path, "--only", "roofs", "--steps", "1", "--fault", "wrong kernel")
    assert (code, outcomes(rows)) == (1, [Outcome.WRONG]), printed
    assert "beside the plain loop: result 0 differs in 1 of" in rows[0].why
    assert "VERDICT: WRONG; 0 steps of ours right, 1 wrong, 0 not reached" in printed


@pytest.mark.lengthy
def test_a_right_kernel_ends_in_right_and_a_hang_costs_its_own_step_alone(tmp_path: Path) -> None:
    code, rows, printed = first_call(tmp_path, "--only", "facts", "--fault", "hang@cubins load")
    assert code == 0, printed
    by_step = {row.step: row for row in rows}
    assert by_step["cubins load"].outcome is Outcome.NOT_REACHED
    assert by_step["cubins load"].why == "hangs: said nothing for 2 s"
    assert by_step["machine"].outcome is by_step["clusters fit"].outcome is Outcome.RIGHT
    assert "VERDICT: right, as far as it was reached; 2 steps of ours right, 0 wrong, 1 not reached" in printed


@pytest.mark.lengthy
def test_a_missing_module_and_time_that_runs_out_are_not_reached(tmp_path: Path) -> None:
    code, rows, _ = first_call(tmp_path, "--only", "facts", "--fault", "missing module")
    assert (code, set(outcomes(rows))) == (2, {Outcome.NOT_REACHED})
    assert "No module named 'torch'" in rows[0].why
    code, rows, printed = first_call(tmp_path, "--only", "facts,loops", "--limit-s", "0.2")
    assert (code, set(outcomes(rows))) == (2, {Outcome.NOT_REACHED}), printed
    assert {row.why.partition(":")[0] for row in rows} == {"out of time"}
    assert len(rows) == sum(len(phase.steps) for phase in PHASES if phase.name in ("facts", "loops"))


@pytest.mark.slow
def test_every_phase_goes_through_and_a_second_call_goes_on(tmp_path: Path) -> None:
    """With two steps of each phase: all of them take ten minutes, and `--rehearse` runs them."""
    carried = CARRIED if IS_PACKED else None
    if carried is not None:
        lacking = subprocess.run([PYTHON, "-c", "import pydantic"], capture_output=True, check=False)
        assert lacking.returncode, "a GPU machine has no pydantic"
    code, rows, printed = first_call(tmp_path, "--steps", "2", "--limit-s", "5000", carried=carried)
    left = {row.phase for row in rows if row.outcome is Outcome.NOT_REACHED and not row.is_peer}
    assert code == 0, printed
    assert left <= ({"ncu"} if carried else {"runtime", "ncu"}), printed
    assert {row.phase for row in rows} == {phase.name for phase in PHASES if not phase.in_second_call}
    (tmp_path / "out").rename(tmp_path / "old")
    code, again, printed = first_call(
        tmp_path, "--resume", str(tmp_path / "old"), "--steps", "2", "--limit-s", "5000", "--only", "facts,casts"
    )
    assert code == 0, printed
    assert [row for row in again if row.phase == "facts"] == [row for row in rows if row.phase == "facts"], "not kept"
    assert {row.outcome for row in again if row.phase == "casts"} == {Outcome.RIGHT}
    assert len(list((tmp_path / "out").rglob("*"))) <= 8


def test_ending_a_child_ends_what_it_has_started(tmp_path: Path) -> None:
    """As the ranks of phase "runtime" are: they would train on, beside the phases that are timed after it."""
    grandchild = "import time; print('starts', flush=True); time.sleep(20); print('lives', flush=True)"
    started = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    child = Child.__new__(Child)
    child.log = (tmp_path / "log.txt").open("w")
    child.process = subprocess.Popen(
        [sys.executable, "-c", started],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert child.process.stdout is not None
    assert child.process.stdout.readline() == "starts\n"
    assert child.end() == -signal.SIGKILL
    assert child.process.stdout.read() == "", "whoever holds the pipe has ended without a word"
    child.process.stdout.close()


def row(phase: str, step: str, outcome: Outcome = Outcome.RIGHT, *, is_peer: bool = False, **figures: object) -> Row:
    why = "" if outcome is Outcome.RIGHT else "why"
    return Row(phase=phase, step=step, outcome=outcome, why=why, figures=figures, is_peer=is_peer)  # type: ignore[arg-type]


def test_limits_of_the_first_call_fit_its_command() -> None:
    assert sum(phase.limit_s for phase in PHASES if not phase.in_second_call) <= 500
    assert sum(phase.limit_s for phase in PHASES if phase.in_second_call) <= 500
    assert all(len(phase.steps) == len(set(phase.steps)) > 0 for phase in PHASES)


def test_only_what_is_ours_and_wrong_is_wrong() -> None:
    peer, late = row("peers", "x", Outcome.WRONG, is_peer=True), row("ncu", "y", Outcome.NOT_REACHED)
    assert verdict([row("facts", "machine"), peer, late])[0] == (
        "VERDICT: right, as far as it was reached; 1 steps of ours right, 0 wrong, 1 not reached"
    )
    assert verdict([late])[0].startswith("VERDICT: nothing was reached")
    assert verdict([row("loops", "z", Outcome.WRONG)])[0].startswith("VERDICT: WRONG")
    assert "rehearsal" in page([late], is_rehearsal=True)


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (1300.0, "93% (4096x7168), 90% (7168x2048); the limit was 85%: ours stays for homes"),
        (1180.0, "84% (4096x7168), 90% (7168x2048); the limit was 85%: homes go through DeepGEMM"),
    ],
)
def test_what_was_agreed_on_of_deep_gemm_is_drawn_from_the_rows(ours: float, expected: str) -> None:
    rows = [
        row("roofs", "FP8 forward 4096x7168", TFLOPS=ours),
        row("roofs", "FP8 forward 7168x2048", TFLOPS=900.0),
        row("peers", "DeepGEMM FP8 4096x7168", is_peer=True, TFLOPS=1400.0),
        row("peers", "DeepGEMM FP8 7168x2048", is_peer=True, TFLOPS=1000.0),
        row("peers", "torch bf16 4096x7168", is_peer=True, TFLOPS=600.0),
    ]
    assert expected in page(rows, is_rehearsal=False)
    assert "Beside DeepGEMM: not reached" in page(rows[:2], is_rehearsal=False)


def test_rows_are_appended_and_a_later_one_of_a_step_counts(tmp_path: Path) -> None:
    append(tmp_path, [row("facts", "a", Outcome.NOT_REACHED), row("facts", "b", us=float("nan"))])
    append(tmp_path, [row("facts", "a")])
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"phase": "facts", "st')  # as a machine leaves it that is taken away
    found = {made.step: made for made in read(tmp_path)}
    assert found["a"].outcome is Outcome.RIGHT
    assert found["b"].figures == {"us": None}
    for line in (tmp_path / "rows.jsonl").read_text().splitlines()[:3]:
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_a_tile_is_proven_if_all_its_forms_were_right_and_it_was_faster() -> None:
    from moe_rl.kernels.devices import has_gluon

    if not has_gluon():
        pytest.skip("Triton before 3.9 has no Gluon tiles among its candidates")
    forms = ("one tensor", "table")
    tile = "gluon 256x256x64 w4 s4 specialized"
    loops = [row("soak", f"dgrad none {form}", runs=1000, codes=[form], tile=tile) for form in forms]
    fast = row("roofs", "bf16 dgrad 1536x2048", speedup=1.5, loop="dgrad none one tensor")
    (found,) = proven_tiles([*loops, fast], "soak")
    assert (found.op, found.scaling, str(found.tile), found.speedup) == ("dgrad", "none", tile, 1.5)  # type: ignore[attr-defined]
    assert set(found.code) == set(forms)  # type: ignore[attr-defined]
    assert proven_tiles([loops[0], fast], "soak") == [], "a form is missing"
    assert proven_tiles([*loops, row("roofs", "x", speedup=0.9, loop="dgrad none one tensor")], "soak") == [], "slower"
    assert proven_tiles(loops, "soak") == [], "nothing was timed"
    assert proven_tiles([*loops, fast], "loops") == []


def test_carried_wheels_are_imported_by_the_children_and_of_ours_the_core_alone(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "a_peer-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a_peer/__init__.py", "ANSWER = 42\n")
    with zipfile.ZipFile(tmp_path / "wheels" / "moe_rl-0.1.0-cp312-abi3-linux_x86_64.whl", "w") as wheel:
        wheel.writestr("moe_rl/__init__.py", "raise RuntimeError\n")
        wheel.writestr("moe_rl/_native.abi3.so", "no library")
    into = tmp_path / "site"
    into.mkdir()
    assert len(unpack(tmp_path / "wheels", into)) == 2
    assert not (into / "moe_rl").exists()
    code = "import a_peer, importlib.util; print(a_peer.ANSWER, importlib.util.find_spec('moe_rl._native').origin)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import sitecustomize; {code}"],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": str(into), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.stdout.split() == ["42", str(into / "moe_rl_core" / "_native.abi3.so")]
    assert unpack(tmp_path / "none", into) == []
