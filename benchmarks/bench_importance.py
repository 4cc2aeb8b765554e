"""Time and peak memory of the importance package: router shift, rollout correction, and every objective.

    python benchmarks/bench_importance.py                 table for people
    python benchmarks/bench_importance.py --json          one JSON document
    python benchmarks/bench_importance.py --storage-bias  gamma with no true shift, by storage type
    python benchmarks/bench_importance.py --against-plain policy_loss over the plain formula, as ratios within one run
    python benchmarks/bench_importance.py --router-tap    share of a pass that reading the routers takes
    .venv-frameworks/bin/python benchmarks/bench_importance.py --router-tap-verl    the same in verl's Megatron engine
    pytest benchmarks/bench_importance.py                 the same cases under pytest-benchmark

Cases run on `--device` (default: cuda if there is one, else cpu), with one CPU thread unless `--threads` says
otherwise, on `--tokens` float32 tokens (default 1,000,000, in rows of 4096) and 48 layers x top-8 for the router
shift. Times are medians of `--rounds` after one warm-up. Peak memory is what a run adds on top of its inputs: on CUDA
the allocator's peak, on Linux the process's peak resident size (reset through /proc/self/clear_refs, freed heap
given back first), elsewhere absent. An objective's case is the loss and its gradient.

`--against-plain` runs 65,536 tokens (unless `--tokens` says otherwise) through `policy_loss` and through the plain
formula of `benchmarks/plain_objectives.py`, which checks no input, after comparing their losses, gradients and metrics.
Both sides take turns; the figures are ratios of their fastest rounds in CPU time, since what disturbs a shared machine
only ever adds: one where nobody makes metrics, one where both report theirs as numbers.

`--router-tap` runs 1,024 tokens (unless `--tokens` says otherwise) through Transformers' Qwen3-MoE: 4 layers as wide as
1,024, 64 experts as wide as 512 each, top-8. One figure is of the old log-probabilities' forward, one of an update's
forward and backward with its gamma. `--router-tap-verl` runs `share_of_time` of tests/frameworks/verl/shift_cases.py:
two CPU ranks, EP 2; all that MOE_RL_ROUTER_SHIFT runs is counted, keys, collectives and metrics too; the larger share.
"""

import argparse
import ctypes
import gc
import importlib
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.hardware import record_hardware
from benchmarks.plain_objectives import PLAIN, with_metrics, without_metrics
from moe_rl.importance import (
    OBJECTIVES,
    PolicyLossInputs,
    RouterShiftAccumulator,
    RouterTap,
    as_floats,
    policy_loss,
    rollout_correction,
    router_log_probs,
    router_shift_ratio,
    store_router_log_probs,
)

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


def policy_batch(tokens: int, device: str, row: int = ROW) -> dict[str, Tensor]:
    """A padded batch of `tokens` tokens whose rows are 60 to 100 % full."""
    generator = torch.Generator().manual_seed(0)
    width = min(row, tokens)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """Time of `policy_loss` with its gradient over that of the plain formula."""

    loss: float
    """Nobody reads metrics, and the plain formula makes none."""
    metrics: float
    """Both report theirs as numbers."""


def plain_batch(tokens: int, device: str, row: int = ROW) -> dict[str, Tensor]:
    """`policy_batch` with what some objectives draw from."""
    batch = policy_batch(tokens, device, row)
    generator = torch.Generator().manual_seed(1)
    batch["draw"] = torch.rand(batch["log_prob"].shape, generator=generator).to(device)
    return batch


def equal_to_plain(name: str, batch: dict[str, Tensor]) -> None:
    """Raise unless loss, gradient and shared metrics of `policy_loss` are those of the plain formula."""
    leaf = batch["log_prob"]
    output = policy_loss(PolicyLossInputs(**batch), objective=name)
    loss, metrics = with_metrics(PLAIN[name], batch)
    pairs = [(output.loss, loss), *(torch.autograd.grad(each, leaf) for each in (output.loss, loss))]
    tight = {"rtol": 1e-4, "atol": 1e-6} if leaf.dtype == torch.float32 else {}
    torch.testing.assert_close(pairs[0][0], pairs[0][1], **tight)
    torch.testing.assert_close(pairs[1][0], pairs[2][0], **tight)
    ours = as_floats(output.metrics)
    for key, value in metrics.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


def against_plain(tokens: int, device: str, rounds: int, names: Sequence[str] = ()) -> dict[str, Against]:
    """Fastest round of `policy_loss` over that of the plain formula, by objective."""
    found = {}
    on_gpu = device.startswith("cuda")
    clock = time.perf_counter if on_gpu else time.process_time
    for name in names or OBJECTIVES.names:
        batch = plain_batch(tokens, device)
        log_prob = batch["log_prob"].requires_grad_()
        equal_to_plain(name, batch)

        def ours(name: str = name, batch: dict[str, Tensor] = batch) -> Tensor:
            return policy_loss(PolicyLossInputs(**batch), objective=name).loss

        def ours_read(name: str = name, batch: dict[str, Tensor] = batch) -> Tensor:
            output = policy_loss(PolicyLossInputs(**batch), objective=name)
            as_floats(output.metrics)
            return output.loss

        def by_hand(name: str = name, batch: dict[str, Tensor] = batch) -> Tensor:
            return PLAIN[name](batch, without_metrics)

        def by_hand_read(name: str = name, batch: dict[str, Tensor] = batch) -> Tensor:
            return with_metrics(PLAIN[name], batch)[0]

        fastest: dict[Callable[[], Tensor], float] = dict.fromkeys((ours, by_hand, ours_read, by_hand_read), math.inf)
        for _ in range(rounds):
            for side in fastest:
                start = clock()
                torch.autograd.grad(side(), log_prob)
                if on_gpu:
                    torch.cuda.synchronize()
                fastest[side] = min(fastest[side], clock() - start)
        found[name] = Against(loss=fastest[ours] / fastest[by_hand], metrics=fastest[ours_read] / fastest[by_hand_read])
    return found


def router_tap(tokens: int, device: str, rounds: int) -> dict[str, float]:
    """Time that reading the routers takes, over that of the rest of the pass, by pass."""
    transformers = importlib.import_module("transformers")
    config = transformers.Qwen3MoeConfig(
        **{"vocab_size": 1024, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "head_dim": 64},
        **{"num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
    )
    model = transformers.Qwen3MoeForCausalLM(config).to(device)
    ids, keys = torch.randint(1024, (1, tokens), device=device), torch.arange(tokens, device=device)
    tap = RouterTap(model)
    with torch.no_grad(), tap.old_pass(tokens) as store, tap.told([keys]):
        model(ids)

    on_gpu = device.startswith("cuda")
    clock, spent, hook_of = time.perf_counter if on_gpu else time.process_time, [0.0], tap._hook

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return clock()

    def timed(*how: Any) -> Callable[..., None]:
        hook = hook_of(*how)

        def run(*args: Any) -> None:
            start = now()
            hook(*args)
            spent[0] += now() - start

        return run

    tap._hook = timed  # type: ignore[method-assign]

    def forward() -> None:
        with torch.no_grad(), tap.old_pass(tokens), tap.told([keys]):
            model(ids)

    def update() -> None:
        with tap.update_pass(store) as reading, tap.told([keys]):
            logits = model(ids).logits
        start = now()
        as_floats(reading.finish(keys).metrics)
        spent[0] += now() - start
        logits.logsumexp(dim=-1).sum().backward()

    shares = {}
    for name, one in {"old log-probabilities": forward, "update": update}.items():
        one()
        spent[0], start = 0.0, now()
        for _ in range(rounds):
            one()
        shares[name] = spent[0] / (now() - start - spent[0])
    return shares


def router_tap_in_verl(rounds: int) -> dict[str, float]:
    """CPU time that MOE_RL_ROUTER_SHIFT takes in passes of verl's engine, over that of the rest of them."""
    tests = Path(__file__).resolve().parent.parent / "tests"
    sys.path.insert(0, str(tests))
    os.environ["MOE_RL_BENCH_ROUNDS"] = str(rounds)
    case = "shift_cases.share_of_time"
    run_cases = importlib.import_module("local_ranks").run_cases
    with tempfile.TemporaryDirectory() as folder:
        launch = run_cases(tests / "frameworks" / "verl", [case], world_size=2, folder=Path(folder), timeout_s=500.0)
    ranks = launch.of(case)
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


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
    sums = {(name, rounded): RouterShiftAccumulator(tokens) for name in kept for rounded in (False, True)}
    words = RouterShiftAccumulator(tokens)
    generator = torch.Generator().manual_seed(0)
    for _ in range(LAYERS):
        logits = 2.0 * torch.randn(tokens, EXPERTS, generator=generator)
        ids = logits.topk(TOP_K, dim=1).indices
        new = router_log_probs(logits, ids)
        stored = store_router_log_probs(ids, new, num_experts=EXPERTS)
        words.add_layer(stored.rounded(new), stored.log_probs)
        for (name, rounded), accumulator in sums.items():
            # In fp32 the accumulator cannot tell that the old ones were rounded, and leaves the new ones as they are.
            accumulator.add_layer(new, kept[name](new) if rounded else kept[name](new).float())
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
    parser.add_argument("--router-tap", action="store_true")
    parser.add_argument("--router-tap-verl", action="store_true")
    parser.add_argument("--objectives", nargs="*", default=[], help="of --against-plain; default: all")
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
        print(f"{'policy_loss / plain formula':30s} {'loss':>6s} {'and metrics':>12s}")
        for name, ratio in against_plain(
            args.tokens or 65_536, args.device, args.rounds or 100, args.objectives
        ).items():
            print(f"{name:30s} {ratio.loss:6.2f} {ratio.metrics:12.2f}", flush=True)
        return
    if args.router_tap or args.router_tap_verl:
        rounds = args.rounds or 10
        shares = (
            router_tap_in_verl(rounds) if args.router_tap_verl else router_tap(args.tokens or 1024, args.device, rounds)
        )
        for name, share in shares.items():
            print(f"{name:30s} {share:7.2%} of the rest of the pass")
        return
    rows = measured(args.tokens or TOKENS, args.device, args.rounds or 3)
    if args.json:
        machine = record_hardware(Path(__file__).parent) | {"device": args.device, "threads": args.threads}
        found = [{k: v for k, v in asdict(row).items() if v is not None} for row in rows]
        print(json.dumps({"schema": "moe_rl.bench_importance/1", "machine": machine, "cases": found}))
        return
    print(f"{'case':32s} {'median ms':>10s} {'fastest ms':>11s} {'peak extra MiB':>15s}")
    for row in rows:
        peak = "-" if row.peak_extra_mib is None else f"{row.peak_extra_mib:.0f}"
        print(f"{row.case:32s} {row.median_ms:10.1f} {row.fastest_ms:11.1f} {peak:>15s}")


if __name__ == "__main__":
    main()
