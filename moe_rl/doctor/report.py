"""A diagnosis in a terminal."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_rl.doctor.diagnosis import Diagnosis, Finding, framework_title
from moe_rl.doctor.traps import ERROR, NOTE, SEVERITIES, WARNING

STYLES = {ERROR: "bold red", WARNING: "yellow", NOTE: "cyan"}
MAX_WIDTH = 100
NUM_SHOWN = 6
"""Unresolved settings that are listed; the JSON has all."""


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print what was read, every finding with why and what to do, and the count."""
    width = min(console.width, MAX_WIDTH)
    for line in what_was_read(diagnosis):
        console.print(Text(line, style="dim"), width=width)
    if diagnosis.findings:
        console.print(findings_table(diagnosis), width=width)
    console.print(Text(summary(diagnosis), style="bold"), width=width)


def what_was_read(diagnosis: Diagnosis) -> list[str]:
    """Return the files, what in them was not understood, and whether the machine was looked at."""
    lines = []
    run, here = diagnosis.run, diagnosis.environment
    if run is not None:
        lines.append(f"{framework_title(run.settings.framework)}: {', '.join(run.files)}")
        if run.num_ignored:
            lines.append(f"{run.num_ignored} settings that no check looks at were passed over")
        lines += [f"not resolved: {sentence}" for sentence in run.unresolved[:NUM_SHOWN]]
        if len(run.unresolved) > NUM_SHOWN:
            lines.append(f"not resolved: {len(run.unresolved) - NUM_SHOWN} more (--json lists them)")
        lines += [f"note: {note}" for note in run.notes]
    if here is not None and here.trains:
        packages = ", ".join(f"{name} {version}" for name, version in sorted(here.versions.items()))
        lines.append(f"environment: Python {here.python}, {packages}")
    elif here is not None:
        lines.append("environment: no Megatron here, so the installation was not checked")
    return lines


def findings_table(diagnosis: Diagnosis) -> Table:
    """Return one row per finding."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 1, 0), pad_edge=False, show_header=False)
    table.add_column("severity", no_wrap=True, vertical="top")
    table.add_column("finding", overflow="fold")
    for finding in diagnosis.findings:
        table.add_row(Text(finding.severity, style=STYLES[finding.severity]), _told(finding))
    return table


def _told(finding: Finding) -> Text:
    told = Text(f"{finding.trap.name}: {finding.trap.title}\n", style="bold")
    told.append(f"{finding.sentence}\n", style="not bold")
    told.append(f"Why: {finding.trap.why}\n", style="not bold dim")
    told.append(f"Do: {finding.remedy}", style="not bold green")
    return told


def summary(diagnosis: Diagnosis) -> str:
    """Return e.g. "1 error, 2 warnings, 3 notes; 34 traps looked for"."""
    counts = [(diagnosis.count(severity), severity) for severity in SEVERITIES]
    said = ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts)
    return f"{said}; {diagnosis.num_checked} traps looked for"
