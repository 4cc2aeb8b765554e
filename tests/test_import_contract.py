"""Imports point one way, and the packages that need no GPU stack load none."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moe_rl"

LIBRARIES = {
    "replay",
    "planner",
    "simulators",
    "profiling",
    "kernels",
    "importance",
    "rollout_engines",
    "routes",
    "sync",
}
ADAPTERS = {"balancing", "megatron", "report", "doctor"}
ALLOWED = {
    "core": set(),
    **{library: {"core"} for library in LIBRARIES},
    "option_groups": {"core"},
    "yaml_files": {"core", "option_groups"},
    **{adapter: {"core"} | LIBRARIES | {"config", "option_groups", "yaml_files"} for adapter in ADAPTERS},
    "config": {"core", "huggingface", "yaml_files"},
    "huggingface": {"core"},
    "study": {"core", "config", "option_groups", "yaml_files", "report"} | LIBRARIES,
    **{
        top: {"core", "config", "option_groups", "yaml_files", "study"} | LIBRARIES | ADAPTERS
        for top in ("frameworks", "cli")
    },
    "launch": {"core", "config", "yaml_files"},
}
"""What each part of moe_rl may import of the others; `cli` may also use `frameworks`."""
ALLOWED["replay"] |= {"routes"}
"""A trace stores its routes coded."""
ALLOWED["kernels"] |= {"profiling"}
"""Operators name themselves to NVTX."""
ALLOWED["megatron"] |= {"balancing"}
for reader in ("doctor", "study", "frameworks", "cli"):
    ALLOWED[reader] |= {"launch"}
ALLOWED["doctor"] |= {"megatron"}
"""For the table of what attach refuses; a test below holds that no torch comes along."""
ALLOWED["frameworks"] |= {"huggingface"}
"""A loaded model's configuration is read as a config.json is."""
ALLOWED["cli"] |= {"frameworks"}

SHARED = {"_native", "configs", "csrc", "version"}
"""The compiled core is reached through `moe_rl.core.native`; all may import version; the others hold no Python."""

TOP_LEVEL_FOLDERS = {"kernels", "profiling", "simulators", "configs"}

LIGHT_MODULES = (
    "moe_rl",
    "moe_rl.planner",
    "moe_rl.balancing",
    "moe_rl.simulators",
    "moe_rl.rollout_engines",
    "moe_rl.profiling",
    "moe_rl.replay",
    "moe_rl.routes",
    "moe_rl.sync",
    "moe_rl.report",
    "moe_rl.doctor",
    "moe_rl.launch",
    "moe_rl.study",
    "moe_rl.cli",
)
NEEDS_TORCH = {
    "moe_rl.balancing.common_facts",
    "moe_rl.balancing.exchange",
    "moe_rl.balancing.balanced_run",
    "moe_rl.balancing.home_choice",
    "moe_rl.balancing.load_exchange",
    "moe_rl.balancing.pass_queue",
    "moe_rl.balancing.pass_notices",
    "moe_rl.balancing.plan_assembly",
    "moe_rl.balancing.rank_packing",
    "moe_rl.balancing.route_counter",
    "moe_rl.balancing.running_pass",
    "moe_rl.balancing.homes",
    "moe_rl.balancing.local",
    "moe_rl.balancing.migrate",
    "moe_rl.balancing.pass_planner",
    "moe_rl.balancing.passes",
    "moe_rl.balancing.slots",
    "moe_rl.balancing.streams",
    "moe_rl.balancing.triton_slots",
    "moe_rl.replay.hf_recorder",
    "moe_rl.sync.dense",
    "moe_rl.sync.executor",
    "moe_rl.sync.expert_parts",
    "moe_rl.sync.ranks",
    "moe_rl.sync.session",
}
"""Work on torch modules, collectives or tensors: imported by name only, never by their package."""
HEAVY = {"torch", "triton", "megatron", "transformers", "deepspeed", "transformer_engine", "nvtx"}


def parts() -> set[str]:
    found = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))
    }
    return found - {"__init__", "__pycache__", "__main__"} - SHARED


def files_of(part: str) -> list[Path]:
    module = PACKAGE / f"{part}.py"
    if module.is_file():
        return [module]
    return [path for path in (PACKAGE / part).rglob("*.py") if "__pycache__" not in path.parts]


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_parts(path: Path) -> set[str]:
    dotted = (name.split(".") for name in imported_modules(path))
    return {name[1] for name in dotted if name[0] == "moe_rl" and len(name) > 1}


def test_every_part_of_the_package_has_its_place_in_the_diagram() -> None:
    assert parts() <= set(ALLOWED)


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_a_part_imports_only_downwards(part: str) -> None:
    for path in files_of(part):
        upward = imported_parts(path) & set(ALLOWED) - ALLOWED[part] - {part}
        assert not upward, f"{path.relative_to(ROOT)} imports moe_rl.{', moe_rl.'.join(sorted(upward))}"


def module_name(path: Path) -> str:
    inside = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(inside[:-1] if inside[-1] == "__init__" else inside)


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {module_name(path): path for part in parts() for path in files_of(part)}
    # A package's __init__ is what its own files stand in, not what they use.
    uses = {
        name: {used for used in imported_modules(path) if used in files and not name.startswith(f"{used}.")} - {name}
        for name, path in files.items()
    }
    while free := {name for name, used in uses.items() if not used}:
        uses = {name: used - free for name, used in uses.items() if name not in free}
    assert not uses, f"in or above a circle: {sorted(uses)}"


def faces_imported(path: Path) -> set[str]:
    """Packages above a file whose own names it imports; `from package import module` asks for a file of theirs."""
    names = module_name(path).split(".")
    above = {".".join(names[:depth]) for depth in range(2, len(names))}
    faces: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            faces |= {alias.name for alias in node.names} & above
        elif isinstance(node, ast.ImportFrom) and node.module in above:
            folder = ROOT.joinpath(*node.module.split("."))
            files = {entry.stem for entry in folder.iterdir()}
            faces |= {node.module} if {alias.name for alias in node.names} - files else set()
    return faces


def test_no_file_imports_the_package_that_it_is_in() -> None:
    """The face of a package imports its files: a file that imports the face back closes a circle."""
    for path in (path for part in parts() for path in files_of(part)):
        assert not faces_imported(path), f"{path.relative_to(ROOT)} imports {sorted(faces_imported(path))}"


def test_the_folders_at_the_top_are_links_into_the_package() -> None:
    """Zip files and pip's copies of them write a link as text: real files must lie where the wheel takes them."""
    if all((ROOT / folder).is_file() for folder in TOP_LEVEL_FOLDERS):
        pytest.skip("this copy of the source was unpacked without links")
    for folder in sorted(TOP_LEVEL_FOLDERS):
        assert (ROOT / folder).readlink() == Path("moe_rl") / folder
        assert not (PACKAGE / folder).is_symlink()


@pytest.mark.lengthy
def test_the_top_level_folders_are_imported_only_through_moe_rl() -> None:
    tests_and_benchmarks = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    for path in [*tests_and_benchmarks, *(path for part in parts() for path in files_of(part))]:
        wrong = {name.split(".")[0] for name in imported_modules(path)} & TOP_LEVEL_FOLDERS
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)} by its folder's name"


def modules_of(package: str) -> list[str]:
    part = package.partition(".")[2]
    if not part:
        return [package]
    root = PACKAGE / part
    if not root.is_dir():
        return [package]
    inside = [path.relative_to(root).with_suffix("").parts for path in files_of(part)]
    names = [".".join((package, *(p for p in parts if p != "__init__"))) for parts in inside]
    return sorted(name for name in names if not name.endswith("__main__") and name not in NEEDS_TORCH)


@pytest.mark.lengthy
@pytest.mark.parametrize("package", LIGHT_MODULES)
def test_importing_every_module_of_a_light_package_loads_no_gpu_stack(package: str) -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {modules_of(package)!r}: importlib.import_module(name)\n"
        f"print(*sorted(set({sorted(HEAVY)!r}) & set(sys.modules)))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []


@pytest.mark.lengthy
def test_what_other_frameworks_need_of_the_balancer_loads_no_megatron() -> None:
    needed = "BalancerConfig, MicroBatchClock, PassMetrics, SlotTables, count_routes, plan_from_local"
    code = (
        f"from moe_rl.balancing import cluster_topology, plan_from_schedule, {needed}\n"
        "import sys\n"
        "assert 'torch' in sys.modules\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'megatron']\n"
        "assert not [name for name in sys.modules if name.startswith('moe_rl.megatron')]\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0, ran.stderr
