"""On what kernels are timed: the expert layers of a model, tokens per rank, and how they are routed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.trace import RoutingTrace

BUNDLED_TRACE = Path(__file__).resolve().parents[2] / "configs" / "traces" / "countdown-grpo.moetrace"
GPU_TOKENS, CPU_TOKENS = 4096, 48
"""Tokens of each rank where a benchmark does not say."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The expert layers of a model, and over how many ranks its experts lie in these benchmarks."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    ep_size: int
    is_oai: bool = False
    """gpt-oss's activation: clamped, biased, interleaved; and a bias of the down projection."""

    @property
    def num_slots(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.ep_size


# Sizes as in configs/models; tests/test_bench_kernels.py compares. Not read from there: a GPU image may lack pydantic.
MODELS = {
    shape.name: shape
    for shape in (
        ModelShape(name="qwen3-30b-a3b", num_experts=128, top_k=8, hidden=2048, intermediate=768, ep_size=8),
        ModelShape(name="qwen3-235b-a22b", num_experts=128, top_k=8, hidden=4096, intermediate=1536, ep_size=8),
        ModelShape(name="deepseek-v3", num_experts=256, top_k=8, hidden=7168, intermediate=2048, ep_size=32),
        ModelShape(
            name="gpt-oss-120b", num_experts=128, top_k=4, hidden=2880, intermediate=2880, ep_size=8, is_oai=True
        ),
    )
}
TINY = ModelShape(name="tiny", num_experts=8, top_k=2, hidden=272, intermediate=144, ep_size=2)
TINY_OAI = ModelShape(name="tiny-oai", num_experts=8, top_k=2, hidden=144, intermediate=80, ep_size=2, is_oai=True)
SHAPES = {**MODELS, TINY.name: TINY, TINY_OAI.name: TINY_OAI}

Routing = Literal["uniform", "zipf", "hot", "hot-last", "trace", "even", "one_expert", "dropped"]
ROUTINGS: tuple[Routing, ...] = ("uniform", "zipf", "hot", "hot-last", "trace", "even")
"""Random; random with Zipf's law; random, and the first expert of rank 0 gets every token, or the last, whose tiles
then begin when all others have been handed out; recorded; every expert as many tokens."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch: `tokens` of each of the model's EP ranks, routed."""

    model: ModelShape
    tokens: int
    routing: Routing = "uniform"
    trace: Path = BUNDLED_TRACE
    """Where routing "trace" was recorded."""

    def __str__(self) -> str:
        recorded = f" {self.trace.name}" if self.routing == "trace" and self.trace != BUNDLED_TRACE else ""
        usual = SHAPES.get(self.model.name)
        ranks = "" if usual is None or usual.ep_size == self.model.ep_size else f" EP{self.model.ep_size}"
        return f"{self.model.name}{ranks} T{self.tokens} {self.routing}{recorded}"

    def routes(self, num_tokens: int, device: str) -> torch.Tensor:
        """Return int32 [num_tokens, K] expert ids; -1 is dropped."""
        generator = torch.Generator(device).manual_seed(0)
        experts, top_k = self.model.num_experts, self.model.top_k
        if self.routing == "trace":
            return recorded_routes(self.trace, self.model, num_tokens).to(device)
        if self.routing == "one_expert":
            return torch.zeros((num_tokens, top_k), dtype=torch.int32, device=device)
        if self.routing == "even":
            in_turn = torch.arange(num_tokens * top_k, dtype=torch.int32, device=device) % experts
            return in_turn.view(num_tokens, top_k)
        scores = torch.rand((num_tokens, experts), generator=generator, device=device)
        if self.routing == "zipf":
            rank = torch.arange(1, experts + 1, device=device)
            scores = -torch.log(-torch.log(scores.clamp(1e-6, 1 - 1e-6))) - torch.log(rank)
        elif self.routing in ("hot", "hot-last"):
            scores[:, 0 if self.routing == "hot" else self.model.num_slots - 1] = 2.0
        ids = scores.topk(top_k, dim=1).indices.to(torch.int32)
        if self.routing == "dropped":
            ids[torch.rand(ids.shape, generator=generator, device=device) < 0.3] = -1
        return ids

    def m_offsets(self, device: str) -> torch.Tensor:
        """Return int32 [S + 1]: rows that all ranks' tokens bring to the slots of rank 0."""
        ids = self.routes(self.tokens * self.model.ep_size, device)
        sizes = (ids.flatten()[:, None] == torch.arange(self.model.num_slots, device=device)).sum(0)
        return torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)


def can_replay(trace: Path, model: ModelShape) -> bool:
    """Return whether a trace fits: n of its layers side by side have n times its experts and its top-k."""
    recorded = _load(trace)
    times = model.num_experts // recorded.num_experts
    wanted = (times * recorded.num_experts, times * recorded.top_k)
    return 1 <= times <= recorded.num_layers and (model.num_experts, model.top_k) == wanted


def recorded_routes(trace: Path, model: ModelShape, num_tokens: int) -> torch.Tensor:
    """Return [num_tokens, K] recorded expert ids of the first layers of a trace, repeated if it is short.

    Rows that hold no route, such as last tokens of sequences, are left out.
    """
    require(can_replay(trace, model), f"{trace.name} does not fit {model.name}: its experts and top-k do not divide.")
    loaded = _load(trace)
    times = model.num_experts // loaded.num_experts
    recorded = np.asarray(loaded.routed_experts[loaded.valid, :times], np.int32)
    side_by_side = recorded + loaded.num_experts * np.arange(times, dtype=np.int32)[:, None]
    flat = side_by_side.reshape(len(recorded), -1)
    return torch.from_numpy(flat[np.arange(num_tokens) % len(flat)])


@cache
def _load(trace: Path) -> RoutingTrace:
    from moe_rl.replay import TraceReader  # needs pydantic, which a GPU image may lack

    loaded = TraceReader(trace).load()
    if not isinstance(loaded, RoutingTrace):
        raise InvalidInputError(f"{trace.name} holds counts per sequence; a benchmark needs the routes of every token.")
    return loaded
