"""Time and peak memory of the importance package: router shift, rollout correction, and every objective.

    python benchmarks/bench_importance.py                 table for people
    python benchmarks/bench_importance.py --json          one JSON document
    python benchmarks/bench_importance.py --storage-bias  gamma with no true shift, by storage type
    python benchmarks/bench_importance.py --against-plain policy_loss over the plain formula, as ratios within one run
    pytest benchmarks/bench_importance.py                 the same cases under pytest-benchmark

Cases run on `--device` (default: cuda if there is one, else cpu), with one CPU thread unless `--threads` says
otherwise, on `--tokens` float32 tokens (default 1,000,000, in rows of 4096) and 48 layers x top-8 for the router
shift. Times are medians of `--rounds` after one warm-up. Peak memory is what a run adds on top of its inputs: on CUDA
the allocator's peak, on Linux the process's peak resident size (reset through /proc/self/clear_refs, freed heap
given back first), elsewhere absent. An objective's case is the loss and its gradient.

`--against-plain` runs 65,536 tokens (unless `--tokens` says otherwise) through `policy_loss` and through what one would
write by hand for the same objective: ratio, clip, masked mean, no check of any input, and verl's three metrics, which
`policy_loss` sums up too. Both sides take turns; the figure is the ratio of their fastest rounds in CPU time, since
what disturbs a shared machine only ever adds.
"""

import argparse
import ctypes
import gc
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_rl.importance import (
    OBJECTIVES,
    PolicyLossInputs,
    RouterShiftAccumulator,
    policy_loss,
    rollout_correction,
    router_log_probs,
    router_shift_ratio,
    store_router_log_probs,
)
from moe_rl.profiling import record_hardware

TOKENS, ROW, LAYERS, TOP_K, EXPERTS = 1_000_000, 4096, 48, 8, 128
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured case."""

    case: str
    tokens: int
    median_ms: float
    fastest_ms: float
    peak_extra_mib: float | None
    """Above the inputs; None where the platform gives no peak."""


def policy_batch(tokens: int, device: str) -> dict[str, Tensor]:
    """A padded batch of `tokens` tokens whose rows are 60 to 100 % full."""
    generator = torch.Generator().manual_seed(0)
    width = min(ROW, tokens)
    rows = max(tokens // width, 1)
    old = -1.0 - torch.rand(rows, width, generator=generator)
    lengths = (width * (0.6 + 0.4 * torch.rand(rows, 1, generator=generator))).long()
    batch = {
        "log_prob": old + 0.1 * torch.randn(rows, width, generator=generator),
        "old_log_prob": old,
        "rollout_log_prob": old + 0.02 * torch.randn(rows, width, generator=generator),
        "advantages": torch.randn(rows, 1, generator=generator).expand(rows, width).contiguous(),
        "response_mask": torch.arange(width).unsqueeze(0) < lengths,
    }
    return {name: value.to(device) for name, value in batch.items()}


def objective_case(objective: str, tokens: int, device: str) -> Callable[[], object]:
    """Loss and gradient of one objective."""
    batch = policy_batch(tokens, device)
    batch["log_prob"].requires_grad_()

    def run() -> Tensor:
        loss = policy_loss(PolicyLossInputs(**batch), objective=objective).loss
        (grad,) = torch.autograd.grad(loss, batch["log_prob"])
        return grad

    return run


def router_shift_case(tokens: int, device: str, layers: int = LAYERS) -> Callable[[], object]:
    """Router shift over `layers` layers; old log-probabilities in float16, one layer alive at a time."""
    generator = torch.Generator().manual_seed(0)
    old = (-1.0 - 4.0 * torch.rand(tokens, TOP_K, generator=generator)).to(device)
    new = old + 0.05 * torch.randn(tokens, TOP_K, generator=generator).to(device)
    stored = old.half()

    def stream() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(layers):
            yield new, stored

    return lambda: router_shift_ratio(stream(), floor=0.7, num_tokens=tokens, device=device)


def router_log_probs_case(tokens: int, device: str) -> Callable[[], object]:
    """One layer of router log-probabilities at given experts, from bfloat16 logits."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, EXPERTS, generator=generator).bfloat16().to(device)
    ids = torch.randint(EXPERTS, (tokens, TOP_K), generator=generator).to(device)
    return lambda: router_log_probs(logits, ids)


def rollout_correction_case(tokens: int, device: str) -> Callable[[], object]:
    """Token weights, geometric rejection and all metrics."""
    batch = policy_batch(tokens, device)
    triple = (batch["old_log_prob"], batch["rollout_log_prob"], batch["response_mask"])
    return lambda: rollout_correction(
        *triple, "token", 2.0, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.999_1.001"
    )


CASES: dict[str, Callable[[int, str], Callable[[], object]]] = {
    f"router_shift_{LAYERS}x{TOP_K}": router_shift_case,
    f"router_log_probs_1x{EXPERTS}": router_log_probs_case,
    "rollout_correction": rollout_correction_case,
} | {f"policy_loss/{name}": lambda t, d, name=name: objective_case(name, t, d) for name in OBJECTIVES.names}


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over valid tokens as frameworks write it."""
    return (values * mask).sum() / (mask.sum() + 1e-8)


def plain_ppo(b: dict[str, Tensor]) -> Tensor:
    """PPO with dual clip by hand."""
    difference = (b["log_prob"] - b["old_log_prob"]).clamp(-20.0, 20.0)
    ratio, advantages, mask = difference.exp(), b["advantages"], b["response_mask"]
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)
    loss, cap = torch.maximum(plain, clipped), -advantages * 3.0
    masked_mean(-difference.detach(), mask)
    masked_mean((clipped > plain).float(), mask)
    masked_mean((loss > cap) * (advantages < 0).float(), mask)
    return masked_mean(torch.where(advantages < 0, torch.min(loss, cap), loss), mask)


def plain_cispo(b: dict[str, Tensor]) -> Tensor:
    """CISPO by hand."""
    difference = (b["log_prob"] - b["old_log_prob"]).clamp(-20.0, 20.0)
    ratio = difference.exp()
    weight = ratio.clamp(-9.0, 1.2)
    masked_mean(-difference.detach(), b["response_mask"])
    masked_mean((weight != ratio).float(), b["response_mask"])
    return masked_mean(-weight.detach() * b["advantages"] * b["log_prob"], b["response_mask"])


def plain_gspo(b: dict[str, Tensor]) -> Tensor:
    """GSPO by hand, mean over sequences of the mean over tokens."""
    mask, log_prob = b["response_mask"], b["log_prob"]
    difference, counts = log_prob - b["old_log_prob"], mask.sum(-1).clamp(min=1)
    mean = (difference * mask).sum(-1) / counts
    ratio = (log_prob - log_prob.detach() + mean.detach().unsqueeze(-1)).clamp(max=10.0).exp()
    plain, clipped = -b["advantages"] * ratio, -b["advantages"] * ratio.clamp(1 - 3e-4, 1 + 4e-4)
    masked_mean(-difference.detach(), mask)
    masked_mean((clipped > plain).float(), mask)
    return ((torch.maximum(plain, clipped) * mask).sum(-1) / counts).mean()


def plain_sapo(b: dict[str, Tensor]) -> Tensor:
    """SAPO by hand, mean over sequences of the mean over tokens."""
    mask, advantages = b["response_mask"], b["advantages"]
    difference = (b["log_prob"] - b["old_log_prob"]).clamp(-20.0, 20.0)
    tau = torch.where(advantages > 0, torch.tensor(1.0), torch.tensor(1.05))
    loss = -torch.sigmoid(tau * (difference.exp() - 1.0)) * 4.0 / tau * advantages
    masked_mean(-difference.detach(), mask)
    return ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def plain_gmpo(b: dict[str, Tensor]) -> Tensor:
    """GMPO by hand, mean over sequences."""
    mask, advantages = b["response_mask"], b["advantages"]
    difference, counts, sign = b["log_prob"] - b["old_log_prob"], mask.sum(-1).clamp(min=1), advantages.sign()
    clipped = difference.clamp(-0.4, 0.4)
    bounded = sign * torch.minimum(sign * difference, sign * clipped)
    ratio = ((bounded * mask).sum(-1) / counts).exp()
    masked_mean(-difference.detach(), mask)
    masked_mean(((clipped != difference) & (advantages > 0)).float(), mask)
    masked_mean(((clipped != difference) & (advantages < 0)).float(), mask)
    return (-(advantages * mask).sum(-1) / counts * ratio).mean()


def plain_dppo_tv(b: dict[str, Tensor]) -> Tensor:
    """DPPO with total variation by hand."""
    log_prob, old, advantages, mask = b["log_prob"], b["old_log_prob"], b["advantages"], b["response_mask"]
    difference = (log_prob - old).detach().clamp(-20.0, 20.0)
    ratio = difference.exp()
    change = log_prob.detach().exp() - old.exp()
    keep = torch.where(advantages > 0, change <= 0.2, change >= -0.2)
    masked_mean(-difference, mask)
    masked_mean((~keep).float(), mask)
    masked_mean((ratio > 20.0).float(), mask)
    return masked_mean(-advantages * ratio.clamp(max=20.0) * keep * log_prob, mask)


def plain_reinforce(b: dict[str, Tensor]) -> Tensor:
    """REINFORCE by hand."""
    masked_mean((b["old_log_prob"] - b["log_prob"]).detach(), b["response_mask"])
    return masked_mean(-b["advantages"] * b["log_prob"], b["response_mask"])


PLAIN: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "ppo": plain_ppo,
    "cispo": plain_cispo,
    "gspo": plain_gspo,
    "sapo": plain_sapo,
    "gmpo": plain_gmpo,
    "dppo_tv": plain_dppo_tv,
    "reinforce": plain_reinforce,
}
"""One of each kind of loss: clipped ratio of a token and of a sequence, weighted log-likelihood, soft gate, geometric
mean of clipped tokens, masked log-likelihood, no ratio."""


def against_plain(tokens: int, device: str, rounds: int) -> dict[str, float]:
    """Fastest round of `policy_loss` with its gradient and metrics, over that of the plain formula, by objective."""
    ratios = {}
    on_gpu = device.startswith("cuda")
    clock = time.perf_counter if on_gpu else time.process_time
    for name, plain in PLAIN.items():
        batch = policy_batch(tokens, device)
        log_prob = batch["log_prob"].requires_grad_()

        def by_hand(plain: Callable[[dict[str, Tensor]], Tensor] = plain, batch: dict[str, Tensor] = batch) -> Tensor:
            return plain(batch)

        def ours(name: str = name, batch: dict[str, Tensor] = batch) -> Tensor:
            return policy_loss(PolicyLossInputs(**batch), objective=name).loss

        torch.testing.assert_close(ours(), by_hand(), rtol=1e-4, atol=1e-6)
        fastest = {by_hand: math.inf, ours: math.inf}
        for _ in range(rounds):
            for side in fastest:
                start = clock()
                torch.autograd.grad(side(), log_prob)
                if on_gpu:
                    torch.cuda.synchronize()
                fastest[side] = min(fastest[side], clock() - start)
        ratios[name] = fastest[ours] / fastest[by_hand]
    return ratios


class PeakMemory:
    """Peak memory between `start` and `extra_mib`, above what was held at `start`."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        self._clear = Path("/proc/self/clear_refs")

    def start(self) -> None:
        """Forget earlier peaks."""
        gc.collect()
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._held = torch.cuda.memory_allocated()
        elif self._clear.exists():
            if platform.libc_ver()[0] == "glibc":
                # Freed tensors stay resident in the heap and would be used again without raising the peak.
                ctypes.CDLL(None).malloc_trim(0)
            self._clear.write_text("5")
            self._held = _status_bytes("VmRSS")

    def extra_mib(self) -> float | None:
        """Return the peak above the start, or None where it cannot be read."""
        if self._cuda:
            torch.cuda.synchronize()
            return (torch.cuda.max_memory_allocated() - self._held) / MIB
        if self._clear.exists():
            return max(_status_bytes("VmHWM") - self._held, 0) / MIB
        return None


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def peak_memory(case: str, tokens: int, device: str) -> float | None:
    """Return the peak of one run in MiB above its inputs."""
    run = CASES[case](tokens, device)
    run()
    memory = PeakMemory(device)
    memory.start()
    run()
    return memory.extra_mib()


def measure(case: str, tokens: int, device: str, rounds: int) -> list[float]:
    """Return the times of `rounds` runs in ms, after one warm-up."""
    run = CASES[case](tokens, device)
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def storage_bias(tokens: int = 20_000) -> dict[str, float]:
    """Mean gamma (ideal 1) when nothing moved, by how the old log-probabilities were kept."""
    kept: dict[str, Callable[[Tensor], Tensor]] = {
        "float16": lambda lp: lp.half(),
        "bfloat16": lambda lp: lp.bfloat16(),
        "uint16 linear on [-16, 0]": lambda lp: _linear(lp, 2**16 - 1),
        "uint8 linear on [-16, 0]": lambda lp: _linear(lp, 2**8 - 1),
    }
    sums = {
        (name, rounded): RouterShiftAccumulator(tokens, round_new_to_old_dtype=rounded)
        for name in kept
        for rounded in (False, True)
    }
    words = RouterShiftAccumulator(tokens)
    generator = torch.Generator().manual_seed(0)
    for _ in range(LAYERS):
        logits = 2.0 * torch.randn(tokens, EXPERTS, generator=generator)
        ids = logits.topk(TOP_K, dim=1).indices
        new = router_log_probs(logits, ids)
        stored = store_router_log_probs(ids, new, num_experts=EXPERTS)
        words.add_layer(stored.rounded(new), stored.log_probs)
        for (name, _rounded), accumulator in sums.items():
            accumulator.add_layer(new, kept[name](new))
    gammas = {key: accumulator.finish(floor=0.0).ratio.mean().item() for key, accumulator in sums.items()}
    return {
        f"{name}, {'both sides rounded' if rounded else 'one side rounded'}": gamma
        for (name, rounded), gamma in gammas.items()
        if not (rounded and name.startswith("uint"))
    } | {"16-bit words, both sides rounded": words.finish(floor=0.0).ratio.mean().item()}


def _linear(log_probs: Tensor, steps: int) -> Tensor:
    return (log_probs.clamp(-16.0, 0.0) * steps / 16.0).round() * 16.0 / steps


def measured(tokens: int, device: str, rounds: int) -> list[Row]:
    """Time every case, then measure the memory of every case."""
    times = {case: measure(case, tokens, device, rounds) for case in CASES}
    return [
        Row(
            case=case,
            tokens=tokens,
            median_ms=statistics.median(times[case]),
            fastest_ms=min(times[case]),
            peak_extra_mib=peak_memory(case, tokens, device),
        )
        for case in CASES
    ]


@pytest.mark.parametrize("case", CASES)
def test_importance(benchmark: Any, case: str) -> None:
    """Time one case under pytest-benchmark."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = CASES[case](TOKENS, device)

    def synchronized() -> None:
        run()
        if device == "cuda":
            torch.cuda.synchronize()

    benchmark.extra_info["tokens"] = TOKENS
    benchmark.pedantic(synchronized, rounds=3, warmup_rounds=1)


def main() -> None:
    """Run the cases and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--storage-bias", action="store_true")
    parser.add_argument("--against-plain", action="store_true")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.storage_bias:
        for name, gamma in storage_bias().items():
            print(f"{name:45s} gamma {gamma:.6f}   shift {-math.log(gamma):.2e}")
        return
    if args.against_plain:
        for name, ratio in against_plain(args.tokens or 65_536, args.device, args.rounds or 200).items():
            print(f"{name:10s} policy_loss takes {ratio:.2f} of the plain formula's time")
        return
    rows = measured(args.tokens or TOKENS, args.device, args.rounds or 3)
    if args.json:
        machine = record_hardware(Path(__file__).parent).as_dict() | {"device": args.device, "threads": args.threads}
        found = [{k: v for k, v in asdict(row).items() if v is not None} for row in rows]
        print(json.dumps({"schema": "moe_rl.bench_importance/1", "machine": machine, "cases": found}))
        return
    print(f"{'case':32s} {'median ms':>10s} {'fastest ms':>11s} {'peak extra MiB':>15s}")
    for row in rows:
        peak = "-" if row.peak_extra_mib is None else f"{row.peak_extra_mib:.0f}"
        print(f"{row.case:32s} {row.median_ms:10.1f} {row.fastest_ms:11.1f} {peak:>15s}")


if __name__ == "__main__":
    main()
