"""Rollout engines by name."""

from moe_rl.core.registry import Registry
from moe_rl.rollout_engines import sglang, tensorrt_llm, vllm
from moe_rl.rollout_engines.base import RolloutEngine

ROLLOUT_ENGINES: Registry[RolloutEngine] = Registry("rollout engine", [sglang.ENGINE, tensorrt_llm.ENGINE, vllm.ENGINE])
