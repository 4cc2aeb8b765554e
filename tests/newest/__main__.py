"""Run the tests of the runtime and the adapters on whatever releases are installed; say what breaks, and whose fault.

    python -m newest [OPTIONS OF PYTEST]

PYTHONPATH holds tests/. First the versions beside those of constraints.txt, what other packages get wrong together, and
which symbols of each framework are not what its adapter knows. Then the tests; each that fails is listed under the
package in whose code its last error was raised. Ends as pytest does.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
MOVING = ("megatron-core", "verl", "transformers", "trl", "ray", "tensordict", "mbridge")
ADAPTERS = ("verl", "transformers", "trl", "megatron")
TESTS = (
    "tests/replay/test_hf_recorder.py",
    *(f"tests/frameworks/{name}" for name in ("trl", "transformers", "ray", "verl")),
    *(
        "tests/frameworks/test_contract.py",
        "tests/frameworks/test_losses.py",
        "tests/frameworks/test_megatron_loops.py",
    ),
    "tests/megatron",
)
OF_PINNED_VERSIONS = (
    "tests/frameworks/test_contract.py::test_the_doctor_reports_what_is_there_and_what_to_write",
    "tests/frameworks/test_megatron_loops.py::test_megatrons_schedules_take_what_the_wrapper_gives",
    "tests/frameworks/transformers/test_transformers_ep.py::test_every_symbol_is_there_with_its_parameters",
    "tests/frameworks/verl/test_verl.py::test_every_symbol_is_there_with_its_parameters",
)
"""They hold that the versions of constraints.txt are the tested ones; `symbols` says what they would of others."""
FRAME = re.compile(r"(?:File \"|^|\n)([^\s\":]+\.py)(?:\", line |:)(\d+)")
"""Of Python's tracebacks, and of pytest's."""


@dataclass(frozen=True, kw_only=True)
class FaultOfOthers:
    """Something that two packages get wrong together, without us."""

    package: str
    sentence: str
    is_there: Callable[[], bool]


def mbridge_asks_for_a_dropped_name() -> bool:
    """Whether mbridge names a member of ModelType that megatron-core no longer has; both read as text."""
    spec = find_spec("mbridge")
    if spec is None or spec.origin is None:
        return False
    asks = "ModelType.encoder_and_decoder" in Path(spec.origin).with_name("core").joinpath("util.py").read_text()
    files = distribution("megatron-core").locate_file("megatron/core/enums.py")
    return asks and "encoder_and_decoder" not in Path(str(files)).read_text()


def verl_misses_orjson() -> bool:
    """Whether verl imports orjson without asking for it."""
    return not any(need.startswith("orjson") for need in requires("verl") or ())


FAULTS = (
    FaultOfOthers(
        package="mbridge",
        sentence="asks for ModelType.encoder_and_decoder, which megatron-core dropped in 0.19: verl builds no model. "
        "tests/newest/hook puts the name back for the tests.",
        is_there=mbridge_asks_for_a_dropped_name,
    ),
    FaultOfOthers(
        package="verl",
        sentence="imports orjson and does not ask for it: tensordict brought it along up to 0.10.",
        is_there=verl_misses_orjson,
    ),
)


def installed(package: str) -> str:
    """Return a package's version, "not installed" where it is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def versions() -> Iterator[str]:
    """Yield a line per package that moves: what is here, and what all other tests run on."""
    lines = (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    pinned = {name: number for name, equal, number in lines if equal}
    for package in MOVING:
        yield f"{package} {installed(package)} (constraints.txt: {pinned.get(package, 'any')})"


def symbols() -> Iterator[str]:
    """Yield what of a framework's symbols is not as its adapter knows it."""
    from moe_rl.frameworks import FRAMEWORKS

    for name in ADAPTERS:
        yield from (f"{name}: {problem}" for problem in FRAMEWORKS[name].problems())


def raised_in(text: str) -> str:
    """Return the package in whose file the last frame of a failure is: "moe_rl", "tests", or one in site-packages."""
    files = [file for file, _ in FRAME.findall(text)]
    inside = [file for file in files if "/lib/python" not in file or "site-packages/" in file]
    if not inside:
        return "unknown"
    last = inside[-1].partition("site-packages/")[2] or inside[-1].removeprefix(f"{ROOT}/")
    return last.partition("/")[0].removesuffix(".py")


def failures(report: Path) -> dict[str, list[str]]:
    """Return failed tests by the package that raised: "test: last line of its error"."""
    by_package: defaultdict[str, list[str]] = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        for outcome in (*case.findall("failure"), *case.findall("error")):
            text = f"{outcome.text or ''}"
            last = (outcome.get("message") or text).strip().splitlines()[:1]
            by_package[raised_in(text)].append(f"{case.get('classname')}::{case.get('name')}: {' '.join(last)[:200]}")
    return by_package


def run(options: list[str]) -> int:
    """Run the tests and print the failures by package."""
    path = os.pathsep.join([str(Path(__file__).parent / "hook"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        left_out = [f"--deselect={test}" for test in OF_PINNED_VERSIONS]
        command = [sys.executable, "-m", "pytest", "-m", "not slow", f"--junitxml={report}", *left_out, *options]
        chosen = [] if any(option.startswith("tests/") for option in options) else list(TESTS)
        code = subprocess.run(
            [*command, *chosen], cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False
        ).returncode
        for package, tests in sorted(failures(report).items()) if report.exists() else ():
            print(f"\nraised in {package} {installed(package) if package not in ('moe_rl', 'tests') else ''}")
            print(*(f"  {test}" for test in tests), sep="\n")
    return code


def main() -> int:
    """Say what is installed, what others get wrong, what symbols changed; then run the tests."""
    print(*versions(), sep="\n")
    for fault in FAULTS:
        if fault.is_there():
            print(f"not ours: {fault.package} {installed(fault.package)} {fault.sentence}")
    print(*(f"changed: {problem}" for problem in symbols()), sep="\n")
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
