"""What `make test-frameworks-newest` says of failures: who raised, and what others get wrong without us."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
REPORT = """<testsuites><testsuite><testcase classname="tests.x" name="test_a"><failure message="KeyError: 1
more">  File "/here/tests/x.py", line 3
  File "/env/lib/python3.12/site-packages/mbridge/core/util.py", line 52
  File "/env/lib/python3.12/enum.py", line 9</failure></testcase>
<testcase classname="tests.x" name="test_b"><error message="">{root}/moe_rl/frameworks/contract.py:61: InvalidInputError
</error></testcase><testcase classname="tests.x" name="test_c"/></testsuite></testsuites>"""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(TESTS))
    from newest import __main__ as program

    return program


def test_a_failure_is_listed_under_the_package_in_whose_code_it_was_raised(program, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    report = tmp_path / "report.xml"
    report.write_text(REPORT.replace("{root}", str(program.ROOT)))
    by_package = program.failures(report)
    assert set(by_package) == {"mbridge", "moe_rl"}
    assert by_package["mbridge"] == ["tests.x::test_a: KeyError: 1 more"]


def test_of_every_package_that_moves_it_says_what_is_here_and_what_is_pinned(program) -> None:  # type: ignore[no-untyped-def]
    lines = list(program.versions())
    assert [line.split()[0] for line in lines] == list(program.MOVING)
    assert not [line for line in lines if line.endswith("any)")], "constraints.txt pins all of them"


def test_its_files_and_tests_exist(program) -> None:  # type: ignore[no-untyped-def]
    assert all((program.ROOT / path).exists() for path in program.TESTS)
    for test in program.OF_PINNED_VERSIONS:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (program.ROOT / file).read_text(), test


@pytest.mark.lengthy
def test_a_name_that_others_miss_is_put_back(tmp_path: Path) -> None:
    """The hook of `sys.path` gives the enumeration a member that was dropped, and leaves others alone."""
    ask = "from megatron.core.enums import ModelType as M; print(M.encoder_and_decoder == M.encoder_or_decoder)"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ask],
        env={"PYTHONPATH": str(TESTS / "newest" / "hook"), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.strip() == "False", ran.stderr
