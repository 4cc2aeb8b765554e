"""Cases of test_shift.py: gamma as verl's own loss sees it, against all logits of a run of one sequence at a time."""

import functools
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import verl_on_cpu
from megatron.core import parallel_state
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.utils.tensordict_utils import assign_non_tensor, make_iterator
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding
from verl_on_cpu import NUM_EXPERTS, batch, engine, impl

from moe_rl.frameworks import router_shift
from moe_rl.frameworks.router_shift import RouterShiftRun
from moe_rl.frameworks.run_settings import settings_from_environment
from moe_rl.frameworks.verl import attach as adapter
from moe_rl.frameworks.verl import passes
from moe_rl.frameworks.verl.losses import GAMMA, policy_losses
from moe_rl.importance import RouterStore, RouterTap
from moe_rl.megatron.routed_rows import RowSlice, held_positions

SEQUENCES, FLOOR = 8, 1e-3


def shift(num_layers: int = 2, **sizes: Any) -> dict[str, Any]:
    """A log-prob pass, then two updates of shuffled halves; both in dynamic micro-batches of other budgets.

    The first update reads a store of 16-bit words: weights are those of the log-prob pass. The second one of 32 bits.
    """
    seen: list[tuple[Any, Tensor]] = []
    forwards, wanted = [0], [0]
    with verl_on_cpu.verl_on_cpu():
        original = impl.get_forward_backward_func

        def counted() -> Any:
            def schedule(**kwargs: Any) -> Any:
                wanted[0] += kwargs["num_microbatches"]
                return original()(**kwargs)

            return schedule

        with patch.object(impl, "get_forward_backward_func", counted):
            given = settings_from_environment({"MOE_RL_ROUTER_SHIFT": str(FLOOR)})
            assert given is not None
            uninstall = adapter.install(impl, settings=given)
            built = engine(mode="disabled", num_layers=num_layers, lr=1e-2, **sizes)
            run = adapter.run_of(built)
            short = run.router_shift
            with patch.object(router_shift, "WORD", torch.int32):
                exact = RouterShiftRun(built.module, floor=FLOOR)
            data = rollout()
            for run.router_shift in (exact, short):
                output = log_probs(built, data)
            data["old_log_probs"] = (
                torch.zeros(data["response_mask"].shape)
                if output is None
                else no_padding_2_padding(output["log_probs"], data)
            )
            before = every_logit(built, data)
            loss = verls_loss(seen)
            built.module[0].register_forward_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
            halves = make_iterator(data, SEQUENCES // 2, 1, seed=1, dataloader_kwargs={"shuffle": True})
            found: dict[str, Any] = {"last": parallel_state.is_pipeline_last_stage(), "bytes": short.num_bytes}
            wanted[0] = 0
            for name, run.router_shift, half in zip(("unmoved", "moved"), (short, exact), halves, strict=True):
                after = before if name == "unmoved" else every_logit(built, data)
                seen.clear()
                forwards_then, wanted[0] = forwards[0], 0
                budget = 60 // parallel_state.get_context_parallel_world_size()
                assign_non_tensor(half, max_token_len_per_gpu=budget, global_batch_size=len(half))
                with built.train_mode():
                    built.train_batch(half, loss)
                gamma = [expected(data, micro_batch, before, after) for micro_batch, _ in seen]
                pairs = list(zip((each for _, each in seen), gamma, strict=True))
                found[name] = {
                    "difference": max((float((a - b).abs().max()) for a, b in pairs), default=0.0),
                    "rounding": rounding_of_gamma(before, after),
                    "least": min((float(a.min()) for a, _ in pairs), default=1.0),
                    "micro_batches": len(seen),
                    "additional": forwards[0] - forwards_then - wanted[0] * len(built.module),
                    "metrics": dict(run.last_metrics),
                }
            uninstall()
    return found


WIDE = {
    **{"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 32},
    **{"num_experts_per_tok": 8, "moe_intermediate_size": 192, "max_position_embeddings": 512},
}
"""A quarter of Qwen3-30B-A3B's widths, and its ratio of the router's work to that of a token's experts: 0.7 %."""


def share_of_time() -> dict[str, float]:
    """CPU time that the router shift takes of a log-prob pass and of an update's forward and backward, over the rest's.

    Of verl's engine, EP 2, two layers of `WIDE`, 3,200 tokens per rank in dynamic micro-batches of at most 2,048;
    the median over rounds of ratios within one pass, since what else runs on a machine slows both alike.
    """
    shares: dict[str, list[float]] = {"old log-probabilities": [], "update": []}
    spent, depth = 0.0, 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent, depth
            start, depth = time.process_time(), depth + 1
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1
                if not depth:  # what is called from another that is counted is in its time
                    spent += time.process_time() - start

        return call

    hook = RouterTap._hook
    with (
        verl_on_cpu.verl_on_cpu(),
        patch.object(RouterTap, "_hook", lambda *how: counted(hook(*how))),
        patch.object(RouterStore, "share", counted(RouterStore.share)),
        patch.object(RouterShiftRun, "of", counted(RouterShiftRun.of)),
        patch.object(RouterShiftRun, "metrics", counted(RouterShiftRun.metrics)),
        patch.object(passes, "keys_of", counted(passes.keys_of)),
    ):
        given = settings_from_environment({"MOE_RL_ROUTER_SHIFT": str(FLOOR)})
        assert given is not None
        adapter.install(impl, settings=given)
        built = engine(mode="disabled", num_layers=2, model=WIDE)
        loss, data = verls_loss([]), rollout(300, 512, 2048)
        data["old_log_probs"] = torch.zeros(data["response_mask"].shape)
        assign_non_tensor(data, global_batch_size=SEQUENCES)
        calls = {"old log-probabilities": lambda: log_probs(built, data)}
        calls["update"] = lambda: built.forward_backward_batch(data, loss)
        for turn in range(int(os.environ["MOE_RL_BENCH_ROUNDS"]) + 1):
            for name, call in calls.items():
                with built.train_mode() if name == "update" else nullcontext():
                    spent, start = 0.0, time.process_time()
                    call()
                    if turn:  # what runs for the first time takes longer
                        shares[name].append(spent / (time.process_time() - start - spent))
    return {name: statistics.median(each) for name, each in shares.items()}


def rollout(least: int = 9, most: int = 24, budget: int = 90) -> Any:
    sizes = tuple(np.random.default_rng(3).integers(least, most, SEQUENCES).tolist())
    data = batch(
        0, sizes, routes=False, use_dynamic_bsz=True, max_token_len_per_gpu=budget, enable_routing_replay=False
    )
    responses = [size // 2 for size in sizes]
    parts = [
        each.split([len(each) - count, count])
        for each, count in zip(data["input_ids"].unbind(), responses, strict=True)
    ]
    for index, name in enumerate(("prompts", "responses")):
        data[name] = torch.nested.as_nested_tensor([each[index] for each in parts], layout=torch.jagged)
    data["response_mask"] = data["response_mask"][:, : max(responses)]
    data["advantages"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(4))
    assign_non_tensor(data, max_response_len=max(responses))
    return data


def log_probs(built: Any, data: Any) -> Any:
    with built.eval_mode(), torch.no_grad():
        return built.infer_batch(data).get("model_output")


def verls_loss(seen: list[tuple[Any, Tensor]]) -> Any:
    """verl's `ppo_loss` with our objective by its name; notes the micro-batch and the gamma that the objective read."""
    read: list[Tensor] = []

    def gamma(_: Tensor) -> Tensor:
        read.append(GAMMA.get())
        return read[-1]

    for name, loss in policy_losses(gamma=gamma).items():
        core_algos.register_policy_loss(name)(loss)
    config = ActorConfig(
        policy_loss=PolicyLossConfig(loss_mode="moe_rl_ppo"), strategy="megatron", rollout_n=1, use_dynamic_bsz=True
    )

    def noted(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        result = ppo_loss(config, model_output, data, dp_group)
        seen.append((data, read.pop()))
        return result

    return noted


def every_logit(built: Any, data: Any) -> Tensor:
    """[2, DP, L, tokens, E]: float64 log-probabilities of all experts, and 1 for those that were used.

    One sequence at a time; where its rows are is computed here, from how Megatron cuts a sequence.
    """
    run, where = adapter.RUNS.pop(built.module[0]), RowSlice.current()
    sequences = [len(each) for each in data["input_ids"].unbind()]
    num_layers = built.tf_config.num_layers
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    found = torch.zeros(2, size, num_layers, sum(sequences), NUM_EXPERTS, dtype=torch.float64)
    held, first = [], 0
    for length in sequences:
        multiple = where.tp_size * (2 * where.cp_size if where.cp_size > 1 else 1)
        ends = np.array([0, -(-length // multiple) * multiple])
        positions = torch.from_numpy(held_positions(ends, where, side_by_side=False))
        real = (positions < length).nonzero()[:, 0]
        held.append((real, first + positions[real]))
        first += length

    def keep(layer: int, micro_batches: Any, router: Any, args: Any, output: Any) -> None:
        logits = router.gating(args[0].detach())  # bfloat16, the least that verl's engine runs in
        logs = logits.flatten(0, -2).double().log_softmax(dim=1)
        position, key = next(micro_batches)
        found[0, rank, layer, key] = logs[position]
        found[1, rank, layer, key] = output[1][position].double()

    handles = [
        layer.mlp.router.register_forward_hook(functools.partial(keep, layer.layer_number - 1, iter(held)))
        for layer in built.module[0].module.module.decoder.layers
    ]
    dynamic = {"use_dynamic_bsz": True, "micro_batch_size_per_gpu": 2}
    assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
    log_probs(built, data)
    assign_non_tensor(data, **dynamic)
    for handle in handles:
        handle.remove()
    dist.all_reduce(found)
    adapter.RUNS[built.module[0]] = run
    return found


def rounding_of_gamma(before: Tensor, after: Tensor) -> float:
    """Return how far a gamma in float32, from 32-bit words, may be from that of float64 logits.

    gamma = exp(-mean |new - old|) is at most 1, so it is off by no more than its exponent, which is a mean of
    differences, plus its own rounding and that of the mean over layers and choices. A log-softmax over E experts adds E
    exponentials, takes a logarithm and subtracts twice numbers as large as the largest |log-probability|; a 32-bit word
    keeps 2^-29 of the range of 16 for 8 experts.
    """
    unit_roundoff = 2.0**-24
    largest = max(float(-before[0].min()), float(-after[0].min()))
    of_log_prob = (NUM_EXPERTS + 3 + 2 * largest) * unit_roundoff + 16 * 2.0**-29
    num_terms = before[1, 0, :, 0].count_nonzero().item()
    return 2 * of_log_prob + (num_terms + 2) * unit_roundoff


def expected(data: Any, micro_batch: Any, before: Tensor, after: Tensor) -> Tensor:
    """[B, R] exp(-mean |delta|) at the tokens that predict the response, 1 on padding."""
    rank = parallel_state.get_data_parallel_rank()
    (old, used), new = before[:, rank], after[0, rank]
    gamma = torch.exp(-((new - old).abs() * used).sum(dim=(0, 2)) / used.sum(dim=(0, 2)))
    tokens = list(data["input_ids"].unbind())
    first = np.cumsum([0, *(len(each) for each in tokens)]).tolist()
    result = torch.ones(micro_batch["response_mask"].shape, dtype=torch.float64)
    for row, sequence in enumerate(micro_batch["input_ids"].unbind()):
        index = next(i for i, each in enumerate(tokens) if torch.equal(each, sequence))
        count = len(sequence) // 2
        stop = first[index] + len(sequence) - 1
        result[row, :count] = gamma[stop - count : stop]
    return result


def expert_parallel() -> dict[str, Any]:
    return shift()


def context_parallel() -> dict[str, Any]:
    return shift(context_parallel_size=2)


def tensor_and_context_parallel() -> dict[str, Any]:
    return shift(tensor_model_parallel_size=2, context_parallel_size=2)


def tensor_and_pipeline_parallel() -> dict[str, Any]:
    return shift(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
