"""moe_rl: plan, simulate and run balanced Mixture-of-Experts RL training on replayed rollout routing.

    report = moe_rl.simulate("run.moetrace", model="qwen3-235b-a22b", cluster="h100", expert_model_parallel_size=32)
    print(report)
    report.save("report.html")
    report.plans["moe-rl"].save("step.plan.npz")

These functions, `plan`, `sweep`, `tune`, `rl_step`, `open_trace` and `load_plan` are loaded when first used: importing
this package loads no numpy. `moe_rl.study` does the same in single steps, and `moe_rl.importance` corrects the loss.
"""

from typing import TYPE_CHECKING, Any

from moe_rl.version import __version__

if TYPE_CHECKING:
    from moe_rl.study import load_plan, open_trace, plan, rl_step, simulate, sweep, tune

__all__ = ["__version__", "load_plan", "open_trace", "plan", "rl_step", "simulate", "sweep", "tune"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from moe_rl import study

        return getattr(study, name)
    raise AttributeError(f"module 'moe_rl' has no attribute {name!r}")
