"""Write what README.md and the pages of docs/ take from the code: `make tables`.

It stands between `<!-- begin: SOURCE -->` and `<!-- end -->`. SOURCE is `registry NAME`, whose entries are listed,
`docstring MODULE`, `names NAME ...` (the first sentence of each), `options SCHEMA`, or a `moe-rl` call that can write
`--json`: it is run, and its policies (of `validate-model`: its published sets) become the rows of a table. A command
whose trace is not on this machine keeps its table, and the script says so.
"""

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from markupsafe import Markup

import moe_rl
from benchmarks import board, concept_pictures, public_recipes, recipe_gains
from benchmarks.gpu import rows as gpu_rows
from benchmarks.gpu.roofs import ROOF_TFLOPS
from benchmarks.kernels import expert_times
from benchmarks.validate_model.compare import PUBLISHED
from benchmarks.validate_model.constants import carried_constants
from benchmarks.validate_model.picture import forecast_picture
from moe_rl.doctor.checks.registry import TRAPS
from moe_rl.doctor.traps import Trap
from moe_rl.importance import OBJECTIVES
from moe_rl.launch.readers import READERS
from moe_rl.megatron.options import KNOWN
from moe_rl.megatron.refusals import REFUSALS
from moe_rl.report.bars import WORDS_RIGHT, Bar, Limit, rl_bars, stacked
from moe_rl.report.faces import SimulationReport
from moe_rl.report.maps import rank_maps
from moe_rl.report.svg import DARK, LIGHT, Svg, standalone
from moe_rl.report.sweep_chart import sweep_panels
from moe_rl.study.options import shown_words
from moe_rl.study.shown import SHOWN
from moe_rl.yaml_files import with_names
from tests.frameworks import own_losses, recipe_losses, record_losses

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("board", "simulator", "planner", "doctor", "importance-reference", "kernels", "traces", "status")
    ),
    ROOT / "docs" / "reference" / "python.md",
    ROOT / "docs" / "reference" / "options.md",
)
PICTURES = ROOT / "docs" / "pictures"
BLOCK = re.compile(r"(<!-- begin: (?P<source>.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
ELSEWHERE = (ROOT, ROOT.parent / "shared" / "data")
"""Folders in which a trace that a command names may lie."""

COLUMNS = {
    "max/mean of ranks": ("imbalance", "{:.3f}"),
    "max/mean of nodes": ("node_imbalance", "{:.3f}"),
    "predicted step (s)": ("step_time_s", "{:.2f}"),
    "vs static": ("speedup_vs_static", "{:.2f}x"),
    "of forced balance": ("fraction_of_forced_balance", "{:.0%}"),
    "copies per layer": ("replicas_per_plan", "{:.1f}"),
    "planning time (s)": ("plan_time_s", "{:.2f}"),
}


BAR_IN_TABLE = "\\|"


class MissingTraceError(Exception):
    """The trace that a command reads is not on this machine."""


def located(argument: str) -> str:
    """Return the path of a trace that the command names by its file name, or the argument as it is."""
    if Path(argument).suffix not in (".npz", ".moetrace"):
        return argument
    for folder in ELSEWHERE:
        if (folder / argument).exists():
            return str(folder / argument)
    raise MissingTraceError(argument)


def run(command: str) -> Mapping[str, Mapping[str, float]]:
    """Run the command and return its policies."""
    words = [located(word) for word in shlex.split(command)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.json"
        executable = [sys.executable, "-c", "from moe_rl.cli import main; main()"]
        subprocess.run([*executable, *words[1:], "--json", str(output)], check=True, cwd=ROOT, capture_output=True)
        policies: Mapping[str, Mapping[str, float]] = json.loads(output.read_text())["policies"]
    return policies


def terminal(command: str) -> str:
    """Return the rows and the headline that the command prints, as they stand in a terminal of 100 columns."""
    executable = [sys.executable, "-c", "from moe_rl.cli import main; main()", *shlex.split(command)[1:]]
    environment = os.environ | {"COLUMNS": "100"}
    out = subprocess.run(executable, check=True, cwd=ROOT, capture_output=True, text=True, env=environment).stdout
    rows = re.findall(r"^ +max/mean.*$|^ (?:policy +rank|[a-z_-]+ +\d).*$", out, re.MULTILINE)
    # From the first sentence below the table to the ones that explain it.
    sentences = r"^(?:The run does not fit|An RL step|\S+ makes) .*?\. *(?=\n(?:With static|\d+ more))"
    headline = re.search(sentences, out, re.MULTILINE | re.DOTALL)
    said = re.split(" *\n", headline[0]) if headline else []
    return "\n".join(("```text", *(row.rstrip() for row in rows), *said, "```", ""))


def table(policies: Mapping[str, Mapping[str, float]]) -> str:
    """Return a Markdown table with the columns that some policy has."""
    shown = {title: at for title, at in COLUMNS.items() if any(at[0] in figures for figures in policies.values())}
    lines = ["| policy | " + " | ".join(shown) + " |", "|---" * (len(shown) + 1) + "|"]
    for name, figures in policies.items():
        cells = [form.format(figures[key]) if key in figures else "" for key, form in shown.values()]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def errors_table() -> str:
    """Return what `python -m benchmarks.validate_model` says, as a Markdown table."""
    command = [sys.executable, "-m", "benchmarks.validate_model", "--json"]
    ran = subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    lines = [
        "| published set | points | mean error | median | largest | constants fitted, and on which data |",
        "|---" * 6 + "|",
    ]
    for found in json.loads(ran.stdout)["sets"].values():
        cells = (
            found["title"],
            str(len(found["points"])),
            f"{found['mean_error']:.1%}",
            f"{found['median_error']:.1%}",
            f"{found['largest_error']:.1%}",
            found["fitted"],
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def carried_table() -> str:
    """Return every constant that published rows determine, by kind of rows, as a Markdown table."""
    lines = ["| constant | value | runs that determine it | kind |", "|---" * 4 + "|"]
    lines += [
        f"| {found.name} | {found.value:g} | {found.rows} of {found.of} | {found.kind} |"
        for found in carried_constants(PUBLISHED)
    ]
    return "\n".join(lines) + "\n"


def traps() -> str:
    """Return every trap of the doctor with its severity, why, what to do and its source."""
    return "\n" + "\n".join(_trap(trap) for trap in TRAPS) + "\n"


def _trap(trap: Trap) -> str:
    named = [reader.title for reader in READERS if trap.concerns(reader)]
    frameworks = "all frameworks" if len(named) == len(READERS) else ", ".join(named)
    also = "; also without a run" if trap.of_installation else ""
    return (
        f"### `{trap.name}`\n\n"
        f"{trap.severity}: {trap.title} ({frameworks}{also})\n\n"
        f"{trap.why}\n\n"
        f"*Remedy:* {trap.remedy}\n\n"
        f"*Source:* {trap.source}\n"
    )


def objectives() -> str:
    """Return one row of Markdown per policy objective."""
    columns = ("name", "loss", "ratio per", "widths on", "needs", "default aggregation", "found in", "source")
    rows = [
        (
            f"`{entry.name}`",
            entry.formula,
            *(entry.ratio_level, entry.widths, ", ".join(f"`{name}`" for name in entry.needs) or "-"),
            *(entry.default_loss_agg_mode, ", ".join(entry.frameworks) or "-", entry.source),
        )
        for entry in OBJECTIVES
    ]
    lines = [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]
    return "".join(f"{line}\n" for line in ("", *lines, ""))


def loss_contracts() -> str:
    """Return one row of Markdown per loss mode of a framework: by how much ours differs under its defaults."""
    document = json.loads(record_losses.FILE.read_text())
    return f"\n{own_losses.table(document)}\n"


def recipe_contracts() -> str:
    """Return one row of Markdown per public recipe: its loss settings, and by how much ours differs under them."""
    return f"\n{recipe_losses.table()}\n"


def megatron_options() -> str:
    """Return the known options of the MoE layers by the version of Megatron that brought them, refused ones marked."""
    refused = {refusal.option for refusal in REFUSALS}
    lines = ["", "| megatron-core | new options |", "|---|---|"]
    for version, options in KNOWN.items():
        shown = [f"**`{option}`**" if option in refused else f"`{option}`" for option in sorted(options)]
        lines.append(f"| {version} | {', '.join(shown)} |")
    return "".join(f"{line}\n" for line in (*lines, ""))


PRODUCTS = {
    "FP8 forward, dgrad": ("DeepGEMM 1d2d", "FBGEMM FP8", r"gemm (tma|gluon) .*block .*fp8e4nv"),
    "FP8 wgrad": ("DeepGEMM 1d1d", "none", r"gemm (fp8|gluon_wgrad) .*fp8e4nv"),
    "BF16": ("DeepGEMM bf16", "(FBGEMM|Liger) bf16", r"gemm (tma|gluon_wide) (?!.*fp8e4nv).*bf16"),
}
"""A kind of grouped GEMM: DeepGEMM's kernel, another in Triton, and ours, by the names of `make kernel-proof`."""


TILES = {
    "FP8 forward, specialized": "gemm gluon 256x256x128 w4 s3 block stages4 specialized fp8e4nv fp32 bf16",
    "FP8 forward, specialized, weighted bias": (
        "gemm gluon 256x256x128 w4 s3 block weighted stages4 specialized fp8e4nv fp32 bf16"
    ),
    "DeepGEMM 1d2d, no bias": "DeepGEMM 1d2d, multicast 2",
    "bf16, specialized": "gemm gluon_wide 256x256x64 w4 s3 stages4 specialized bf16",
    "bf16, specialized, weighted bias": (
        "gemm gluon_wide 256x256x64 w4 s3 weighted sum_is_dense stages4 specialized bf16 fp32"
    ),
    "DeepGEMM bf16": "DeepGEMM bf16, multicast 2",
    "FP8 wgrad, specialized, result written": "gemm gluon_wgrad 128x256x128 w4 s3 stages6 specialized fp8e4nv fp32",
    "FP8 wgrad, specialized, result added in fp32": (
        "gemm gluon_wgrad 128x256x128 w4 s3 accumulate stages6 specialized fp8e4nv fp32"
    ),
    "DeepGEMM 1d1d, result added by TMA": "DeepGEMM 1d1d (wgrad)",
    "plain loop, FP8": "gemm tma 128x128x128 w8 s4 block sum_is_dense fp8e4nv fp32 bf16",
    "plain loop, bf16": "gemm tma 128x256x64 w8 s3 sum_is_dense bf16",
}
"""Kernels whose fixed cost docs/kernels.md compares, by the names of `make kernel-proof`."""


def docstring(name: str) -> str:
    """Return what a module says of itself."""
    return f"\n{inspect.getdoc(import_module(name))}\n\n"


def public_names(names: str) -> str:
    """Return a folded row of Markdown per name: what the first sentence of its docstring says. The site shows all."""
    rows = ["| name | what |", "|---|---|"]
    for name in names.split():
        said = " ".join((inspect.getdoc(resolve_name(name)) or "").split("\n\n")[0].split())
        rows.append(f"| `{name}` | {said.replace('|', BAR_IN_TABLE)} |")
    shown = ", ".join(f"<code>{name.rpartition('.')[2]}</code>" for name in names.split())
    return "\n" + folded(shown, "".join(f"{row}\n" for row in rows)) + "\n"


def options_table(name: str) -> str:
    """Return a folded table per panel of the help: an option's flag, the field's type and default, what it does."""
    words = shown_words(resolve_name(name))
    panels: dict[str, list[str]] = {SHOWN[word].panel: [] for word in words}
    for word in words:
        panels[SHOWN[word].panel].append(word)
    tables = []
    for panel, names in panels.items():
        rows = "".join(option_row(word, words[word].default) for word in names)
        heading = "| option | in Python | default | what |\n|---|---|---|---|\n"
        tables.append(folded(f"{panel} ({len(names)})", heading + rows))
    return "\n" + "\n".join(tables) + "\n"


def option_row(field: str, default: object) -> str:
    """Return a row of Markdown: the flags of a field of the options, its name, its default, what it does."""
    flags = ", ".join(f"`{flag}`" for flag in SHOWN[field].flags)
    shown = "" if default is None else f"`{default!r}`"
    return f"| {flags} | `{field}` | {shown} | {with_names(SHOWN[field].told).replace('|', BAR_IN_TABLE)} |\n"


def folded(summary: str, text: str) -> str:
    """Return Markdown that GitHub and the site show as its summary until a reader opens it."""
    return f'<details markdown="1"><summary>{summary}</summary>\n\n{text}\n</details>\n'


def proof_rows() -> list[Mapping[str, Any]]:
    """Return the grouped GEMMs of the committed kernel proof."""
    proof = ROOT / "benchmarks" / "results" / "static" / "kernel_proof.json"
    rows: list[Mapping[str, Any]] = json.loads(proof.read_text())["products"]
    return rows


def kernel_tiles() -> str:
    """Return the instructions of a tile outside its loop, and their share of its time for three lengths of the sum."""
    lines = ["", "| kernel | tile | instructions per tile | share of tile time |", "|---|---|--:|--:|"]
    for label, name in TILES.items():
        tiles = [row for row in proof_rows() if row["name"] == name]
        assert tiles, f"make kernel-proof names no kernel {name!r}"
        for row in tiles:
            shares = " / ".join(f"{100 * share:.0f}" for share in row["fixed_shares"])
            lines.append(f"| {label} | {row['tile']} | {row['instructions_per_tile']:.0f} | {shares} % |")
    return "".join(f"{line}\n" for line in (*lines, ""))


def kernel_roofs() -> str:
    """Return, per kind of grouped GEMM, the lowest roof of each maker's best tile, and what its loop issues."""
    rows = proof_rows()

    def best(pattern: str) -> str:
        found = [row for row in rows if re.match(pattern, row["name"])]
        if not found:
            return "not compared"
        row = max(found, key=lambda row: (row["ceiling_tflops"], -row["instructions_per_step"]))
        loop = f"{row['instructions_per_step']:.0f} / {row['cta_barriers_per_step']:.0f}"
        return f"{row['ceiling_tflops']:.0f} ({row['tile']}; {loop})"

    lines = [
        "",
        "| grouped GEMM (FP8 in 128-blocks) | DeepGEMM | Triton elsewhere (FP8: FBGEMM, row-wise) | ours, specialized "
        "| ours, plain |",
        "|---|---|---|---|---|",
    ]
    for kind, (theirs, elsewhere, ours) in PRODUCTS.items():
        cells = (
            kind, best(theirs), best(elsewhere), best(f"(?=.*specialized){ours}"), best(f"(?!.*specialized){ours}")
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in (*lines, ""))


def gpu_figures(phase: str) -> dict[str, Mapping[str, Any]]:
    """Return the figures of the steps of a phase that were right on the GPU whose run is committed."""
    rows = gpu_rows.read(ROOT / "benchmarks" / "results" / "gpu" / "h200")
    return {row.step: row.figures for row in rows if row.phase == phase and row.outcome is gpu_rows.Outcome.RIGHT}


def gpu_products() -> str:
    """Return what the specialized loops reached on a GPU, in TFLOPS, beside the plain loop, a roof and a peer."""
    ours, peers = gpu_figures("roofs"), gpu_figures("peers")
    lines = [
        "",
        "| grouped GEMM, 8 groups of 4,096 rows, N x K | specialized | plain | of its roof | others |",
        "|---|--:|--:|--:|---|",
    ]
    for step, figures in ours.items():
        loop, _, shape = step.rpartition(" ")
        peer = {"FP8 forward": "DeepGEMM FP8", "bf16 forward": "torch bf16"}.get(loop)
        other = f"{peer.split()[0]} {peers[f'{peer} {shape}']['TFLOPS']:.0f}" if peer else ""
        roof = ROOF_TFLOPS[loop.removesuffix(" behind a table")]
        shown = loop.replace("behind a table", "with a weight table")
        cells = (f"{shown}, {shape.replace('x', ' x ')}", f"{figures['TFLOPS']:.0f}", f"{figures['plain TFLOPS']:.0f}",
                 f"{100 * figures['TFLOPS'] / roof:.0f} %", other)  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in (*lines, ""))


def gpu_groups() -> str:
    """Return the microseconds of products of small groups on a GPU: specialized loop / plain loop."""
    figures = gpu_figures("small groups")
    rows = sorted({int(step.split()[-1]) for step in figures})
    kinds = dict.fromkeys(step.rpartition(" of ")[0] for step in figures)
    lines = [
        "",
        f"| groups, 1536 x 2048 | {' | '.join(f'{n} rows' for n in rows)} |",
        "|---" + "|--:" * len(rows) + "|",
    ]
    for kind in kinds:
        times = [figures[f"{kind} of {n}"] for n in rows]
        cells = [f"{row['us']:.0f} / {row['plain us']:.0f}" for row in times]
        lines.append(f"| {' | '.join((kind, *cells))} |")
    return "".join(f"{line}\n" for line in (*lines, ""))


def gpu_memory_bound() -> str:
    """Return the rates of kernels that only move bytes, and their share of what a copy reaches on the same GPU."""
    lines = ["", "| kernel | TB/s | of a copy |", "|---|--:|--:|"]
    for step, figures in gpu_figures("memory-bound").items():
        operator, _, variant = step.partition(" ")
        name = f"`{operator}`" if variant == "swiglu" else f"`{operator}`, {variant}"
        lines.append(f"| {name} | {figures['TB/s']:.2f} | {100 * figures['of the copy']:.0f} % |")
    return "".join(f"{line}\n" for line in (*lines, ""))


def gpu_promise() -> str:
    """Return how much longer the slowest EP ranks take under static homes: measured on a GPU, and as simulated."""
    lines = ["", "| experts | plan | measured | simulated | by rows alone |", "|---|---|--:|--:|--:|"]
    for kind, figures in gpu_figures("promise").items():
        if kind == "other widths":
            continue
        for policy in ("ultraep", "moe-rl"):
            values = [figures[f"static / {policy}{suffix}"] for suffix in ("", ", simulate", ", rows")]
            cells = (kind.replace("fp8", "FP8"), f"`{policy}`", *(f"{value:.2f}x" for value in values))
            lines.append(f"| {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in (*lines, ""))


def fp8_speedups() -> str:
    """Return how many times as fast FP8 is as BF16: measured, and as `moe-rl bench layer` predicts."""
    return f"\n{expert_times.table(expert_times.read())}\n"


def levers() -> str:
    """Return what every lever was predicted to do in an update of Megatron on four CPU ranks, and what it did."""
    sys.path.insert(0, str(ROOT / "tests"))
    from local_ranks import run_cases

    cases = ROOT / "tests" / "megatron"
    with tempfile.TemporaryDirectory() as folder:
        name = "plan_path_cases.levers"
        found = run_cases(cases, [name], world_size=4, folder=Path(folder), timeout_s=240.0).of(name)[0]
    lines = [
        "",
        "| lever | rows of the busiest rank: predicted | executed | copies between nodes: predicted | executed "
        "| bytes moved: predicted | executed |",
        "|---|---|---|---|---|---|---|",
    ]
    for lever, figures in found.items():
        cells = [f"{each:,}" for kind in ("rows", "copies", "bytes") for each in figures[kind]]
        lines.append(f"| {' | '.join((lever, *cells))} |")
    return "".join(f"{line}\n" for line in (*lines, ""))


def board_table() -> str:
    """Return the board of all shipped policies as a table of Markdown."""
    lines = ["", f"| {' | '.join(board.HEAD)} |", "|---" * len(board.HEAD) + "|"]
    lines += [f"| {' | '.join(board.cells_of(row))} |" for row in board.board(())]
    return "".join(f"{line}\n" for line in (*lines, ""))


REGISTRIES: Mapping[str, Callable[[], str]] = {
    "board": board_table,
    "traps": traps,
    "objectives": objectives,
    "loss-contracts": loss_contracts,
    "recipe-contracts": recipe_contracts,
    "kernel-roofs": kernel_roofs,
    "kernel-tiles": kernel_tiles,
    "gpu-products": gpu_products,
    "gpu-groups": gpu_groups,
    "gpu-memory-bound": gpu_memory_bound,
    "gpu-promise": gpu_promise,
    "fp8-speedups": fp8_speedups,
    "levers": levers,
    "recipes": public_recipes.table,
    "recipe-gains": recipe_gains.table,
    "recipe-gains-short": recipe_gains.short_table,
    "validate-model": errors_table,
    "carried-constants": carried_table,
    "megatron-options": megatron_options,
}


FROM_CODE = {"docstring": docstring, "names": public_names, "options": options_table}


def renewed(block: re.Match[str]) -> str:
    """Return a block with what its source says now."""
    kind, name, *_ = shlex.split(block["source"])
    if kind in FROM_CODE:
        return block[1] + FROM_CODE[kind](block["source"].removeprefix(f"{kind} ")) + block[3]
    if kind == "registry":
        return block[1] + REGISTRIES[name]() + block[3]
    if kind == "terminal":
        return block[1] + terminal(block["source"].removeprefix("terminal ")) + block[3]
    try:
        return block[1] + table(run(block["source"])) + block[3]
    except MissingTraceError as missing:
        print(f"kept the table of `{block['source']}`: {missing} is not on this machine")
        return block[0]


def wait_bars(imbalance: Mapping[str, float], ends: Mapping[str, str]) -> Markup:
    """Draw the load of the busiest rank under every policy, in units of the mean: what is above 1 is waiting.

    `ends` are the words behind the bars.
    """
    bars = [
        Bar(name=name, parts={"busy": min(load, 1.0), "waiting": load - 1.0}, end=f"{load:.3f}, {ends[name]}")
        for name, load in imbalance.items()
    ]
    return stacked(
        bars,
        label="Load of the busiest rank under every policy, in units of the mean load",
        axis="load of the busiest rank",
        unit="mean load = 1",
        limit=Limit(at=1.0, name="perfect balance"),
        right=WORDS_RIGHT,
    )


def wait_picture() -> Markup:
    """Draw the demo's policies."""
    policies = run("moe-rl demo")
    return wait_bars(
        {name: figures["imbalance"] for name, figures in policies.items()},
        {name: f"{figures['speedup_vs_static']:.2f}x as fast" for name, figures in policies.items()},
    )


def load_maps() -> Markup:
    """Draw the load of every rank and layer of the bundled trace before and after planning, side by side."""
    report = moe_rl.simulate("countdown-grpo", cluster="h100", ep=16, policy="static,moe-rl")
    return side_by_side(report, ("before: static placement", "after: moe-rl"))


def side_by_side(report: SimulationReport, titles: tuple[str, str]) -> Markup:
    """Draw the maps of the loads under a report's two policies, a title above each."""
    maps = rank_maps(report)
    drawn = [str(maps.picture(name)) for name in maps.shown]
    sizes = [size_of(each) for each in drawn]
    width, height = (max(size[axis] for size in sizes) for axis in (0, 1))
    both = Svg(height=height + 24, width=2 * width, label="Load of every rank before and after planning")
    for index, (each, title) in enumerate(zip(drawn, titles, strict=True)):
        both.text(index * width + 52, 16, title, css="title")
        both.raw(placed(each, x=index * width, y=24, width=width, height=height))
    return both.markup()


def first_look() -> Markup:
    """Draw the demo for README: loads before and after planning, and below them a whole step of RL in seconds."""
    report = moe_rl.simulate("countdown-grpo", config="demo", policy="static,moe-rl")
    steps = moe_rl.rl_step("countdown-grpo", config="demo", policy="static,moe-rl")
    busiest = {row.policy: row.imbalance for row in report.policies}
    titles = (
        f"static placement: busiest rank {busiest['static']:.2f} x mean",
        f"moe-rl: busiest rank {busiest['moe-rl']:.2f} x mean",
    )
    maps, bars = str(side_by_side(report, titles)), str(rl_bars(steps))
    width, height = size_of(maps)
    bars_width, bars_height = size_of(bars)
    whole = Svg(height=height + bars_height + 44, width=width, label="Load of every rank, and a step of RL, simulated")
    whole.raw(placed(maps, x=0, y=0, width=width, height=height))
    if report.rl is not None:
        title = f"a whole step of RL, simulated: {report.rl.low:.2f}x to {report.rl.high:.2f}x as fast (80 % interval)"
        whole.text(52, height + 30, title, css="title")
    whole.raw(placed(bars, x=(width - bars_width) // 2, y=height + 44, width=bars_width, height=bars_height))
    return whole.markup()


def size_of(drawing: str) -> tuple[int, int]:
    """Return the width and height of a picture."""
    size = re.search(r'viewBox="0 0 (\d+) (\d+)"', drawing)
    assert size is not None, drawing[:200]
    return int(size[1]), int(size[2])


def placed(drawing: str, *, x: int, y: int, width: int, height: int) -> str:
    """Return a picture as a part of another one."""
    return drawing.replace("<svg ", f'<svg x="{x}" y="{y}" width="{width}" height="{height}" ', 1)


def sweep_picture() -> Markup:
    """Draw the bundled trace over EP sizes and lengths of sequences."""
    swept = {"expert_model_parallel_size": [4, 8, 16, 32], "seq_length": [2048, 8192]}
    return sweep_panels(moe_rl.sweep("countdown-grpo", swept, cluster="h100", policy="static,eplb,moe-rl"))


def tune_picture() -> Markup:
    """Draw the trade between memory and speed of one model on 16 GPUs."""
    lengths = {"num_samples": 64, "mean_length": 4000, "max_length": 16384}
    return moe_rl.tune(model="qwen3-30b-a3b", gpus=16, **lengths).picture()


def timeline_picture() -> Markup:
    """Draw who works when in a step of RL on the bundled trace."""
    steps = moe_rl.rl_step("countdown-grpo", cluster="h100", ep=16, policy="static,eplb,moe-rl", rollout_engine_size=4)
    return rl_bars(steps)


def roofs_picture() -> Markup:
    """Draw the lowest roof of the best tile of DeepGEMM and of ours, per kind of grouped GEMM."""
    rows = [line.strip("| ").split(" | ") for line in kernel_roofs().splitlines()[3:] if line]
    bars = []
    for (kind, deepgemm, _, ours, _), name in zip(rows, ("FP8 forward", "FP8 wgrad", "BF16"), strict=True):
        assert kind.startswith(name)
        for maker, cell in {"DeepGEMM": deepgemm, "ours": ours}.items():
            tflops = float(cell.split()[0])
            color = "busy" if maker == "ours" else "fixed"
            bars.append(Bar(name=maker, parts={color: tflops}, end=f"{tflops:.0f}, {name}"))
    return stacked(
        bars,
        label="Roofs of grouped GEMMs",
        axis="roof by the machine code, not measured",
        unit="TFLOPS of an H100",
        right=WORDS_RIGHT,
    )


DRAWN = {
    "roofs": roofs_picture,
    "forecasts": forecast_picture,
    "policies": wait_picture,
    "first-look": first_look,
    "load-maps": load_maps,
    "sweep": sweep_picture,
    "tune": tune_picture,
    "rl-step": timeline_picture,
    "packing": concept_pictures.packing_waits,
    "weight-sync": concept_pictures.sync_calendar,
    "recipe-parts": concept_pictures.recipe_parts,
    "correction-weights": concept_pictures.correction_weights,
}
"""Pictures of the documents, each on white and on black."""


def draw(name: str) -> None:
    """Write one picture."""
    drawing = DRAWN[name]()
    for scheme, colors in {"light": LIGHT, "dark": DARK}.items():
        (PICTURES / f"{name}-{scheme}.svg").write_text(standalone(drawing, colors) + "\n")


def run_notebook() -> None:
    """Run the notebook of examples/ and keep what it shows."""
    import nbformat
    from nbclient import NotebookClient

    path = ROOT / "examples" / "simulate_my_trace.ipynb"
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=400, resources={"metadata": {"path": folder}}, record_timing=False).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if len(output.get("data", {})) > 1:
                del output["data"]["text/plain"]  # the page or picture says the same, without paths of this machine
    path.write_text(nbformat.writes(notebook) + "\n")


def main() -> None:
    """Rewrite the documents in place, and the pictures that they show."""
    for name in DRAWN:
        draw(name)
    run_notebook()
    for document in DOCUMENTS:
        document.write_text(BLOCK.sub(renewed, document.read_text()))


if __name__ == "__main__":
    main()
