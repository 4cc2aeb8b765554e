"""A diagnosis in a terminal."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_rl.core.mappings import in_words
from moe_rl.core.outputs import printable
from moe_rl.doctor.diagnosis import Diagnosis, Finding
from moe_rl.doctor.traps import ERROR, NOTE, SEVERITIES, WARNING
from moe_rl.launch.readers import READERS

if TYPE_CHECKING:
    from moe_rl.cli.attach_steps import Step

STYLES = {ERROR: "bold red", WARNING: "yellow", NOTE: "cyan"}
MAX_WIDTH = 100
NUM_SHOWN = 6  # Unresolved settings that are listed; the JSON has all.


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print what was read, every finding with its reason and remedy, and the counts."""
    width = min(console.width, MAX_WIDTH)
    for line in what_was_read(diagnosis):
        console.print(Text(printable(line), style="dim"), width=width)
    if diagnosis.findings:
        console.print(findings_table(diagnosis), width=width)
    for line in verdict_lines(diagnosis):
        console.print(Text(printable(line), style="bold"), width=width)
    console.print(Text(summary(diagnosis), style="bold"), width=width)


def print_steps(steps: "tuple[Step, ...]", console: Console) -> None:
    """Print what to write into the run's files and what that changes, a title before the lines of each step."""
    table = Table.grid(padding=(0, 1))
    table.add_column("step", no_wrap=True, style="bold")
    table.add_column("what", overflow="fold")
    for step in steps:
        titles = (step.title, *[""] * (len(step.sentences) - 1))
        for title, sentence in zip(titles, step.sentences, strict=True):
            table.add_row(title, Text(printable(sentence)))
    if steps:
        console.print(table, width=min(console.width, MAX_WIDTH))


def what_was_read(diagnosis: Diagnosis) -> list[str]:
    """Return lines on the files, on settings that were not understood, and on the environment."""
    lines = []
    run, environment = diagnosis.run, diagnosis.environment
    if run is not None:
        reader = READERS[run.settings.framework]
        lines.append(f"{reader.title}: {', '.join(run.files)}")
        if reader.verdict_only:
            lines.append(
                f"only a few traps can be checked for {reader.title} (docs/doctor.md). "
                "--attach shows whether moe_rl can attach"
            )
        lines += [f"not resolved: {sentence}" for sentence in run.unresolved[:NUM_SHOWN]]
        if len(run.unresolved) > NUM_SHOWN:
            lines.append(f"not resolved: {len(run.unresolved) - NUM_SHOWN} more (--json lists them)")
        lines += [f"note: {note}" for note in run.notes]
    if environment is not None and environment.trains:
        packages = in_words(dict(sorted(environment.versions.items())))
        lines.append(f"environment: Python {environment.python}, {packages}")
    elif environment is not None:
        lines.append("environment: Megatron is not installed here, so the installation was not checked")
    return lines


def verdict_lines(diagnosis: Diagnosis) -> list[str]:
    """Return the verdict of `attach`, with reasons that no finding gives; empty if no verdict was requested."""
    verdict = diagnosis.verdict
    if verdict is None:
        return []
    sentences = {finding.sentence for finding in diagnosis.findings}
    reasons = [f"  {reason}" for reason in verdict.reasons if reason not in sentences]
    lines = [f"verdict: {verdict.word}{':' if reasons else ''}", *reasons]
    if verdict.accepts and diagnosis.errors:
        lines.append("Fix the errors above first: they stop this run or spoil its results even without moe_rl.")
    return lines


def findings_table(diagnosis: Diagnosis) -> Table:
    """Return one row per finding."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 1, 0), pad_edge=False, show_header=False)
    table.add_column("severity", no_wrap=True, vertical="top")
    table.add_column("finding", overflow="fold")
    for (severity, _, _), findings in _by_trap(diagnosis).items():
        table.add_row(Text(severity, style=STYLES[severity]), _told(findings))
    return table


def _by_trap(diagnosis: Diagnosis) -> dict[tuple[str, str, str], list[Finding]]:
    """Return the findings, grouped by severity, trap and remedy."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in diagnosis.findings:
        groups.setdefault((finding.severity, finding.trap.name, finding.remedy), []).append(finding)
    return groups


def _told(findings: list[Finding]) -> Text:
    trap = findings[0].trap
    text = Text(f"{trap.name}: {trap.title}\n", style="bold")
    for finding in findings:
        text.append(f"{printable(finding.sentence)}\n", style="not bold")
    text.append(f"Why: {trap.why}\n", style="not bold dim")
    text.append(f"Do: {findings[0].remedy}", style="not bold green")
    return text


def summary(diagnosis: Diagnosis) -> str:
    """Return e.g. "1 error, 2 warnings, 3 notes; 34 traps checked; 60 other settings not needed"."""
    counts = []
    for severity in SEVERITIES:
        count = diagnosis.count(severity)
        counts.append(f"{count} {severity}{'' if count == 1 else 's'}")
    unneeded = ""
    if diagnosis.run is not None and diagnosis.run.num_ignored:
        unneeded = f"; {diagnosis.run.num_ignored} other settings not needed"
    return f"{', '.join(counts)}; {diagnosis.num_checked} traps checked{unneeded}"
