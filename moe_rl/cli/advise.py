"""`moe-rl advise`: recommend corrections from a run's metrics."""

from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from moe_rl.cli.console import deliver, json_text
from moe_rl.core.outputs import check_outputs


def advise(
    metrics: Path,
    json_path: Path | None = None,
) -> None:
    """Recommend changes to a run from its metrics; print the measured value, the rule and its source for each.

    Example: moe-rl advise out/countdown_grpo/metrics.jsonl
    """
    from moe_rl.doctor import advisor

    check_outputs({"--json": json_path}, inputs=(metrics,))
    records = advisor.read_metrics(metrics)
    advice, silent = advisor.advise(records), advisor.not_judged(records)
    verdict = advisor.verdict(records)
    heads = {
        True: "This run is in danger",
        False: "No sign of danger",
        None: "Cannot judge whether the run is in danger",
    }

    def show(console: Console) -> None:
        console.print(f"{heads[verdict.in_danger]}: {verdict.reason}\n", soft_wrap=True)
        for item in advice:
            console.print(f"{item.rule}: {item}\n", soft_wrap=True)
        if not advice:
            console.print("No advice: all logged values are within their limits.")
        for rule, why in silent.items():
            console.print(f"not judged: {rule}: {why}.", soft_wrap=True)

    document = {"advice": [asdict(item) for item in advice], **asdict(verdict), "not_judged": silent}
    deliver({}, partial(json_text, document), json_path, show)
