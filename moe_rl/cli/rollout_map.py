"""`moe-rl plan --export` and `moe-rl simulate --expert-map`: expert maps of rollout engines."""

import json
from functools import partial
from pathlib import Path

from rich.console import Console

from moe_rl.cli.console import command_line, deliver, json_text, progress_bar, say, say_notes
from moe_rl.core.errors import require
from moe_rl.core.outputs import check_outputs
from moe_rl.report.tables import figures_table
from moe_rl.rollout_engines import ROLLOUT_ENGINES, encoded_map
from moe_rl.study.collect_notes import collected_notes
from moe_rl.study.options import SimulationOptions
from moe_rl.study.rollout_map import RolloutMap, plan_rollout_map, score_expert_map
from moe_rl.study.traces import digest_of


def export_map(trace: Path, engine_name: str, options: SimulationOptions, out: Path, json_path: Path | None) -> None:
    """Write the map and, to a separate file, its provenance, which engines would refuse inside the map."""
    engine = ROLLOUT_ENGINES[engine_name]
    provenance = out.with_name(out.name + ".provenance.json")
    require(out.suffix == ".json", f"--out {out} must end in .json.")
    check_outputs({"--out": out, "": provenance, "--json": json_path}, inputs=(trace,))
    with progress_bar() as advance, collected_notes() as warnings:
        rollout_map = plan_rollout_map(trace, engine_name, options, advance)
        content = encoded_map(engine, rollout_map.expert_map)
        origin = rollout_map.as_json() | {"trace_sha256": digest_of(trace), "command": command_line()}
    files = {out: content, provenance: (json.dumps(origin, indent=1) + "\n").encode()}
    _deliver(rollout_map, [*rollout_map.notes, *warnings], files, json_path)
    for line in engine.start_lines(rollout_map.expert_map, out):
        say(line)


def score_map_file(trace: Path, path: Path, options: SimulationOptions, json_path: Path | None) -> None:
    """Print the scores of a map file on the trace."""
    check_outputs({"--json": json_path}, inputs=(trace, path))
    with progress_bar() as advance, collected_notes() as warnings:
        scored = score_expert_map(trace, path, options, advance)
    _deliver(scored, [*scored.notes, *warnings], {}, json_path)


def _deliver(rollout_map: RolloutMap, notes: list[str], files: dict[Path, bytes], json_path: Path | None) -> None:
    document = rollout_map.as_json() | {"notes": notes, "command": command_line()}
    deliver(files, partial(json_text, document), json_path, lambda console: _print(rollout_map, console))
    say_notes(notes)


def _print(rollout_map: RolloutMap, console: Console) -> None:
    facts = rollout_map.facts
    console.print(
        f"{rollout_map.engine.name}, EP{facts['ep_size']}, {facts['slots_per_rank']} slots per rank, "
        f"{facts['requests_at_once']} requests at once; planned on {facts['planned_on']}, scored on "
        f"{facts['scored_on']}",
        soft_wrap=True,
    )
    choices = [choice.name for choice in rollout_map.engine.choices]
    console.print("simulated max/mean rank load of decode batches, and experts read by the rank that reads the most")
    headings = []
    for choice_name in choices:
        headings += [choice_name, "read"]
    table = figures_table("map", *headings, gap=2)
    for name, scores in rollout_map.scores.items():
        cells = []
        for choice_name in choices:
            score = scores[choice_name]
            cells += [f"{score.imbalance:.3f}", f"{score.active_slots:.1f}"]
        table.add_row(name, *cells)
    console.print(table)
    for choice in rollout_map.engine.choices:
        console.print(f"{choice.name}: {choice.when}", soft_wrap=True)
