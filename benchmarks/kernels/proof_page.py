"""The Markdown page of `make kernel-proof`."""

from collections.abc import Sequence

from benchmarks.kernels.peers import PUBLISHED, Published, fitted_share
from benchmarks.kernels.roofs import (
    BLACKWELL_PEAK_TFLOPS,
    FEW_ROWS,
    SUMS,
    BlackwellRow,
    CountedRow,
    ElementRow,
    ProductRow,
)

HEAD = """# What the kernels' machine code says about their speed

`make kernel-proof`: static, not measured. Roofs of one H100 in TFLOPS; what they mean stands in
`benchmarks/kernels/roofs.py` and in docs/kernels.md. A roof is a bound, which no run reaches.

"latency": at which latency of a load in the loop, in cycles, a kernel leaves its lowest roof; nothing where TMA alone
loads. An H100 takes some 300 cycles to L2 and 600 to 800 to HBM. "rows per group": the lowest roof of small groups of
a product of 1,536 columns and a sum of 2,048, whose tiles are partly empty and whose weights come from HBM, 3.35 TB/s.
"waits": MEMBAR / FENCE / barriers of some warps / descriptors that are written anew, which no roof knows.
The tiles of "gluon" and "gluon_wide" are of two SMs, and their 256 rows of one group; in FP8 both SMs need all rows, in
bf16 (as in "multicast 2") all 256 columns. No roof knows of power: an H200 at 700 W multiplied bf16 at 1.5 GHz.
"""


def page(
    products: Sequence[ProductRow], elements: Sequence[ElementRow], counted: Sequence[BlackwellRow] = (),
    on_blackwell: Sequence[ElementRow] = (), notes: Sequence[str] = (),
) -> str:  # fmt: skip
    """Return the page; `counted` and `on_blackwell` are what `products` and `elements` are on sm_100a."""
    every: dict[str, tuple[CountedRow | ElementRow, ...]] = {
        "sm_90a": (*products, *elements), "sm_100a": (*counted, *on_blackwell)
    }  # fmt: skip
    wrong = [f"- {arch}, {row.name}: {what}" for arch, rows in every.items() for row in rows for what in row.problems]
    lines = [
        HEAD, *(f"{note}\n" for note in notes),
        "## Products on sm_90a\n", *_products(products),
        "\n## Products on sm_100a\n",
        "Counted in the same way. There is no roof of the loop: the tensor cores run beside all warps, and rates of L2 "
        "are not published. So the page says what L2 has to give for a B200's peak, "
        f"{BLACKWELL_PEAK_TFLOPS[1]:.0f} TFLOPS in FP8 and {BLACKWELL_PEAK_TFLOPS[2]:.0f} in bf16, and which roof "
        "filled tiles and HBM, 8 TB/s, leave to small groups.\n", *_counted(counted),
        "\n## Kernels that go over elements\n",
        "Spills are those of both architectures; the roof is that of an H100.\n", *_elements(elements, on_blackwell),
        "\n## What others measured\n", *_published(),
        *(["\n## Problems\n", *wrong] if wrong else []),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _table(names: Sequence[str], texts: int, rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table whose first `texts` columns are aligned to the left."""
    cells = [f"| {' | '.join(map(str, row))} |" for row in (names, *rows)]
    return [cells[0], f"|{'---|' * texts}{'--:|' * (len(names) - texts)}", *cells[1:]]


def _of_code(row: CountedRow) -> tuple[object, ...]:
    """Return the cells that both architectures have."""
    return (
        row.name, row.tile, row.registers or "", row.spills, f"{row.shared_bytes / 1024:.0f}",
        f"{row.instructions_per_step:.0f} / {row.cta_barriers_per_step:.0f}", row.instructions_per_tile or "",
        *(_waits(row.waits_per_step), _waits(row.loader_waits_per_step), _waits(row.waits_per_tile)),
    )  # fmt: skip


def _waits(counts: Sequence[float]) -> str:
    return " / ".join(f"{count:.0f}" for count in counts)


_OF_CODE = (
    "kernel", "tile", "registers", "spills", "shared, KiB", "instructions / barriers per step", "instructions per tile",
    "waits per step", "of the loading warp", "per tile",
)  # fmt: skip


def _products(rows: Sequence[ProductRow]) -> list[str]:
    names = (
        *_OF_CODE,
        f"of its time at a sum of {', '.join(map(str, SUMS))}",
        "T",
        "E",
        "lockstep",
        "issue",
        "shared",
        "L2",
        "lowest",
        "latency",
        f"lowest with {', '.join(map(str, FEW_ROWS))} rows per group",
    )
    cells = []
    for row in sorted(rows, key=lambda row: -row.ceiling_tflops):
        roofs = (row.lockstep_tflops, row.issue_tflops, row.shared_tflops, row.l2_tflops, row.ceiling_tflops)
        cells.append(
            (
                *_of_code(row),
                " / ".join(f"{share:.0%}" for share in row.fixed_shares),
                f"{row.tensor_cycles:.0f}",
                row.exposed_cycles,
                *(f"{roof:.0f}" for roof in roofs),
                "" if row.load_latency_cycles is None else f"{row.load_latency_cycles:.0f}",
                " / ".join(f"{roof:.0f}" for roof in row.few_rows_tflops),
            )
        )
    return _table(names, 2, cells)


def _counted(rows: Sequence[BlackwellRow]) -> list[str]:
    names = (*_OF_CODE, "L2 for the peak, TB/s", f"roof with {', '.join(map(str, FEW_ROWS))} rows per group")
    few = (" / ".join(f"{roof:.0f}" for roof in row.few_rows_tflops) for row in rows)
    cells = [(*_of_code(row), f"{row.needed_l2_tb_per_s:.0f}", of_few) for row, of_few in zip(rows, few, strict=True)]
    return _table(names, 2, cells)


def _elements(rows: Sequence[ElementRow], on_blackwell: Sequence[ElementRow]) -> list[str]:
    beside = {row.name: row for row in on_blackwell}
    names = ("kernel", "registers: sm_90a / sm_100a", "spills", "shared, KiB",
             "instructions per element: sm_90a / sm_100a", "bytes per element", "issue roof, GB/s")  # fmt: skip
    cells = []
    alone = [row for row in on_blackwell if row.name not in {row.name for row in rows}]
    for row in sorted((*rows, *alone), key=lambda row: row.issue_gb_per_s):
        other = beside.get(row.name)
        both = (row,) if other is None or other is row else (row, other)
        mark = "" if row in rows else "- / "
        cells.append((
            row.name, mark + " / ".join(str(one.registers) for one in both), sum(one.spills for one in both),
            f"{row.shared_bytes / 1024:.0f}", mark + " / ".join(f"{one.instructions_per_element:.1f}" for one in both),
            f"{row.bytes_per_element:.2f}", f"{row.issue_gb_per_s:.0f}" if row in rows else "",
        ))  # fmt: skip
    return _table(names, 1, cells)


def _published() -> list[str]:
    share = fitted_share()
    grouped = [timing for timing in PUBLISHED if timing.is_grouped]
    above = [timing for timing in PUBLISHED if timing.share > 1]
    lines = [
        "Roofs are those of L2, at a rate that is a constant and not fitted. What is fitted is one share of the "
        f"roof: {share:.0%}, the median of the {len(grouped)} grouped products. The dense ones are left out of it and "
        "predicted with it. Within each kind timings are in the order of their roofs. DeepGEMM's bf16 kernel was bound "
        "by power: an H200 at 700 W runs it at about 1.4 GHz.\n",
    ]  # fmt: skip
    names = ("kernel", "product", "tile", "source", "roof", "published", "of the roof", "predicted")
    lines += _table(names, 4, [_cells(timing, share) for timing in PUBLISHED])
    lines += ["", "*: the tile is assumed."]
    if above:
        said = ", ".join(f"{timing.name} at {timing.tflops:.0f} of {timing.roof_tflops:.0f}" for timing in above)
        lines += [
            "",
            f"Above its roof: {said}, so L2 gave at least {max(t.share for t in above) - 1:.0%} more than 8 TB/s.",
        ]
    return lines


def _cells(timing: Published, share: float) -> tuple[object, ...]:
    tile, roof = timing.tile, timing.roof_tflops
    predicted = f"{share * roof:.0f} ({100 * (share * roof / timing.tflops - 1):+z.0f}%)"
    return (
        timing.name, "grouped" if timing.is_grouped else "dense",
        f"{tile.rows}x{tile.columns}x{tile.step}{'' if timing.is_tile_known else '*'}", timing.source, f"{roof:.0f}",
        f"{timing.tflops:.0f}", f"{timing.share:.0%}",
        "in the fit" if timing.is_grouped else predicted,
    )  # fmt: skip
