"""One color per policy and per part of a step, the same in every chart; readable without color vision."""

from collections.abc import Iterable

BASELINE_COLOR = "#7d8590"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#c98500", "#3595cf", "#8c6bb1", "#a6761d")
"""The palette of Okabe and Ito without black, and two more. Its orange and its sky blue are darker here: a line has a
contrast of 3:1 to light paper and to dark."""

PART_COLORS = {
    "attention": "#5b84b1",
    "tensor_parallel": "#7f9fc0",
    "shared_experts": "#6d9a94",
    "dense_mlp": "#93b5b0",
    "fixed": "#a3b4c4",
    "head": "#c3ccd4",
    "pipeline_bubble": "#dcdfe3",
    "pipeline_imbalance": "#cdd3da",
    "pipeline_p2p": "#b4bfc9",
    "host": "#4d5966",
    "grad_reduce": "#4f7290",
    "param_gather": "#87a3b5",
    "step_fixed": "#b9c9d6",
    "optimizer": "#8792a0",
    "expert_gemm": "#e08a2c",
    "all_to_all": "#c8553d",
    "replicate": "#7a5195",
    "prefetch": "#a877b8",
    "reorder": "#c75a9c",
    "weights": "#5b84b1",
    "gradients": "#93b1d0",
    "attention_activations": "#6d9a94",
    "logits": "#c3ccd4",
    "routed_rows": "#e08a2c",
    "replica_slots": "#7a5195",
    "resident_slots": "#a877b8",
    "node": "#c8553d",
    "placement": "#e08a2c",
    "split": "#d9bd4a",
    "busy": "#93b1d0",
    "waiting": "#c8553d",
}
"""Of a step, of memory and of what is left of the imbalance. Cool: does not depend on balance. Warm: grows with
imbalance. Purple: what a plan itself costs."""


def policy_colors(names: Iterable[str]) -> dict[str, str]:
    """Return a color for each policy, in the order given; static is gray."""
    colors, used = {}, 0
    for name in names:
        if name == "static":
            colors[name] = BASELINE_COLOR
        else:
            colors[name] = SERIES[used % len(SERIES)]
            used += 1
    return colors


def part_color(part: str) -> str:
    """Return the color of a part of the step; a part that is not listed gets one of the series, by its name."""
    return PART_COLORS.get(part, SERIES[sum(part.encode()) % len(SERIES)])
