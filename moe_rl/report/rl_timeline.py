"""The step of RL as a picture: who works when, one pair of lanes per policy."""

from collections.abc import Mapping

from markupsafe import Markup

from moe_rl.report.colors import part_color
from moe_rl.report.svg import WIDTH, Svg
from moe_rl.report.units import decimals, time_unit
from moe_rl.simulators.rl_step import TRAINING_PARTS, RlStep

LEFT, RIGHT, LANE, GAP, TOP, BOTTOM = 118, 66, 18, 10, 8, 56
LANE_OF = {"rollout": "expert_gemm", "reward": "fixed", "log_prob": "attention", "reference": "head",
           "update": "all_to_all", "framework": "host", "offload": "prefetch", "weight_sync": "replicate"}  # fmt: skip
"""Colors of the parts, by the part of a training step that has them in the other charts."""


def rl_timeline(steps: Mapping[str, RlStep]) -> Markup:
    """Draw rollout GPUs above the trainer's where they are apart, one lane where they take turns."""
    lanes = {name: 2 if step.beside else 1 for name, step in steps.items()}
    height = TOP + sum(count * LANE + GAP for count in lanes.values()) + BOTTOM
    longest = max(step.step_time_s for step in steps.values())
    unit, size = time_unit([longest])
    places = decimals(longest / size, 3)
    svg = Svg(height=height, label="Who works when in a step of RL")
    scale, top = (WIDTH - LEFT - RIGHT) / longest, float(TOP)
    for name, step in steps.items():
        svg.text(LEFT - 8, top + lanes[name] * LANE / 2 + 4, name, anchor="end")
        starts = {"rollout": 0.0, "reward": step.parts_s["rollout"]}
        at = 0.0 if step.beside else step.rollout_s
        for part in TRAINING_PARTS:
            starts[part] = at
            at += step.parts_s[part]
        starts["weight_sync"] = step.step_time_s - step.parts_s["weight_sync"]
        starts["offload"] = starts["weight_sync"] - step.parts_s["offload"]
        for part, seconds in step.parts_s.items():
            lane = int(step.beside and part in TRAINING_PARTS)
            both = lanes[name] if part == "weight_sync" else 1
            svg.raw(
                f'<rect x="{LEFT + scale * starts[part]:.1f}" y="{top + lane * LANE:.1f}" '
                f'width="{scale * seconds:.1f}" height="{both * LANE - 2}" fill="{part_color(LANE_OF[part])}"/>'
            )
        svg.text(
            LEFT + scale * step.step_time_s + 6,
            top + lanes[name] * LANE / 2 + 4,
            f"{step.step_time_s / size:.{places}f}",
        )
        top += lanes[name] * LANE + GAP
    x = float(LEFT)
    for part in LANE_OF:
        if x + 14 + 7 * len(part) > WIDTH:
            x, top = float(LEFT), top + 16
        svg.raw(f'<rect x="{x:.1f}" y="{top + 4:.1f}" width="10" height="10" fill="{part_color(LANE_OF[part])}"/>')
        svg.text(x + 14, top + 13, part.replace("_", " "), css="label")
        x += 32 + 7 * len(part)
    svg.text(LEFT, top + 32, f"one step of RL, in {unit}", css="label")
    return svg.markup()
