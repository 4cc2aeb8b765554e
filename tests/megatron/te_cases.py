"""Cases of test_te.py: Megatron's own TEGroupedMLP, flex dispatcher and fused gradients, on the stand-ins.

Every one compares plain Megatron with training in which every step has replicas and a reorder before it.
"""

import standins  # noqa: F401, I001 - before Megatron

import contextlib
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import deep_ep
import tiny_gpt
import torch
import torch.distributed as dist
from adam_cases import OPTIMIZERS, host_and_device
from attach_cases import refusal
from grouped_cases import with_distinct_experts
from megatron.core import dist_checkpointing
from megatron.core.transformer.enums import CudaGraphScope
from megatron.core.transformer.moe import fused_a2a
from reorder_cases import random_placement
from replica_cases import occurring, poisoned

from moe_rl.balancing.pass_source import PassSource
from moe_rl.megatron import BalancerConfig, ElasticMoELayer, attach
from moe_rl.megatron.exchange import ReplicatedExperts
from moe_rl.megatron.expert_state import ExpertOptimizerState
from moe_rl.megatron.expert_views import main_grad, te_grouped

STEPS, MICRO_BATCHES = 3, 3
EXPERTS = ["TEGroupedMLP", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"]
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}
FUSED = {"gradient_accumulation_fusion": True}
PERMUTED = {"moe_permute_fusion": True}
SMALL_BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 2000}

HYBRID = {**FLEX, "moe_flex_dispatcher_backend": "hybridep"}
BLOCKWISE = {**BF16, "fp8": "e4m3", "fp8_recipe": "blockwise"}
ACT_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
BIASED = {"add_bias_linear": True}

SETTINGS: dict[str, dict[str, Any]] = {
    "own": {},
    "fused": FUSED,
    "fused_permuted": {**FUSED, **PERMUTED},
    "sequential_fused": {**FUSED, "sequential": True},
    "biased": BIASED,
    "biased_fused": {**BIASED, **FUSED},
    "act_recomputed": {**ACT_RECOMPUTED, **FUSED},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "deepep": FLEX,
    "deepep_permuted": {**FLEX, **PERMUTED},
    "hybridep": HYBRID,
    "parameters_gathered_meanwhile": {**FUSED, "overlap_param_gather": True},
    "mtp": {"mtp_num_layers": 1},
    "mtp_fused_deepep": {"mtp_num_layers": 1, **FUSED, **FLEX},
    "shared_overlapped": {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_overlap": True, **FUSED},
    "latent": {"moe_latent_size": 16, **FUSED},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "bf16_gradients": {**BF16, "grad_reduce_in_fp32": False},
}
BACKWARDS: dict[str, dict[str, Any]] = {"stored": {}, "recomputed": RECOMPUTED}

Curve = dict[str, list[float]]


def build(**changes: Any) -> tiny_gpt.Run:
    """A tiny GPT of Megatron's TE layers, whose experts are what this file is about; other biases than zero.

    `sequential` takes Megatron's own layers.
    """
    if changes.pop("sequential", False):
        return tiny_gpt.build(**changes)
    run = tiny_gpt.build(tiny_gpt.te_spec, moe_grouped_gemm=True, **changes)
    experts = run.gpt.decoder.layers[0].mlp.experts
    found = [type(module).__name__ for module in (experts, experts.linear_fc1, experts.linear_fc2)]
    if found != EXPERTS or bool(changes.get("mtp_num_layers")) != hasattr(run.gpt, "mtp"):
        raise AssertionError(found)
    expected = "HybridDeviceOptimizer" if changes.get("adam", {}).get("optimizer_cpu_offload") else "FusedAdam"
    optimizers = [type(one.optimizer).__name__ for one in run.optimizer.chained_optimizers]
    if set(optimizers) != {expected}:
        raise AssertionError(optimizers)
    return with_distinct_experts(run) if changes.get("add_bias_linear") else run


def routes_of(step: int, changes: dict[str, Any]) -> list[torch.Tensor]:
    top_k, num_layers = changes.get("moe_router_topk", 2), changes.get("num_layers", tiny_gpt.NUM_LAYERS)
    return [tiny_gpt.skewed_routes(step, m, top_k=top_k, num_layers=num_layers) for m in range(MICRO_BATCHES)]


def balanced(*, poison: bool = False, policy: str = "ultraep", **changes: Any) -> tuple[Curve, list[dict[str, float]]]:
    """Train with replicas and a reorder before every step; `poison` empties all buffers of numbers in between."""
    run = build(**changes)
    balancer = attach(run.models, run.optimizer, BalancerConfig(objective="imbalance", policy=policy))
    if any(type(module) is ElasticMoELayer for module in getattr(run.gpt, "mtp", torch.nn.Module()).modules()):
        raise AssertionError("a layer of multi-token prediction follows plans")
    curve, metrics = tiny_gpt.history(), []
    with poisoned(balancer, told=True) if poison else contextlib.nullcontext():
        for step in range(STEPS):
            routes = routes_of(step, changes)
            balancer.reorder(random_placement(balancer, step))
            balancer.begin_pass(PassSource.replayed([tiny_gpt.held_rows(each) for each in routes]))
            tiny_gpt.update(run, step, routes, curve)
            metrics.append(balancer.end_pass().as_dict())
    return curve, metrics


def plain(**changes: Any) -> Curve:
    run, curve = build(**changes), tiny_gpt.history()
    for step in range(STEPS):
        tiny_gpt.update(run, step, routes_of(step, changes), curve)
    return curve


@contextlib.contextmanager
def parallel(ep_size: int, *, bf16: bool, **layout: Any) -> Iterator[None]:
    """Groups of Megatron's, and DeepEP for the types of the model."""
    with contextlib.nullcontext() if bf16 else deep_ep.any_float(), tiny_gpt.parallel(ep_size, **layout):
        yield


def compare(*, pipeline: int = 1, repeat: bool = False, **changes: Any) -> dict[str, Any]:
    """Plain, and balanced with poisoned buffers; four choices per token, buckets smaller than a layer.

    `repeat` trains balanced without poison too.
    """
    changes = {"moe_router_topk": 4, **SMALL_BUCKETS, **changes}
    with parallel(2, bf16=changes.get("bf16", False), pipeline=pipeline):
        found: dict[str, Any] = {"plain": plain(**changes)}
        found["balanced"], found["metrics"] = balanced(**changes, poison=True)
        if repeat:
            found["again"], _ = balanced(**changes)
    return found


def whole_matrix(setting: str, precision: str, backward: str) -> dict[str, Any]:
    return compare(**{**SETTINGS[setting], **PRECISIONS[precision], **BACKWARDS[backward]})


DEEPSEEK = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-3,
    "moe_shared_expert_intermediate_size": 32,
}
COMBINATIONS: dict[str, dict[str, Any]] = {
    # scripts/run-qwen3-235B-A22B.sh of slime: alltoall, fused permutation and gradients, everything recomputed
    "slime_qwen3_235b": {"pipeline": 2, "num_layers": 4, "num_query_groups": 2, **PERMUTED, **FUSED, **RECOMPUTED}
    | {"adam": OPTIMIZERS["precision_aware_offloaded"]},
    # examples/configs/recipes/llm/grpo-math-dsv3-*.yaml of NeMo-RL: parameters gathered meanwhile, bf16 gradients
    "nemo_rl_deepseek_v3": {**DEEPSEEK, **PERMUTED, **RECOMPUTED, "moe_router_dtype": "fp64"}
    | {"overlap_param_gather": True, "adam": OPTIMIZERS["precision_aware"]},
    # examples/grpo_trainer/run_deepseek671b_math_megatron_*.sh of verl: DeepEP, fused permutation and gradients
    "verl_deepseek_v3": {"pipeline": 2, "num_layers": 4, **DEEPSEEK, **FLEX, **PERMUTED, **FUSED, **RECOMPUTED}
    | {"adam": OPTIMIZERS["precision_aware_offloaded"]},
}


def combination(name: str, precision: str) -> dict[str, Any]:
    """Four ranks: two stages, or two EP groups that reduce gradients together.

    In fp32 Adam stays on the device: Megatron's offloading takes no parts of fp32 parameters ("non-leaf Tensor").
    """
    changes = dict(COMBINATIONS[name])
    if precision == "fp32":
        changes["adam"] = OPTIMIZERS["precision_aware"]
    if name.startswith("nemo_rl") and precision == "bf16":
        precision = "bf16_gradients"
    with host_and_device():
        return compare(repeat=True, **changes, **PRECISIONS[precision])


def own_router() -> dict[str, Any]:
    """The fused router replays nothing: routes that were announced do not occur, and results stay Megatron's."""
    return compare(moe_router_fusion=True)


def state_of(run: tiny_gpt.Run) -> dict[str, list[torch.Tensor]]:
    """Weights and this rank's optimizer state of every local expert, by name."""
    state = ExpertOptimizerState(run.optimizer)
    named = [(name, p) for name, p in run.gpt.named_parameters() if "mlp.experts" in name]
    return {name: [t.detach().clone() for places in ([p], *state.tensors(p)) for t in places] for name, p in named}


def difference(found: dict[str, list[torch.Tensor]], expected: dict[str, list[torch.Tensor]]) -> float:
    """Largest difference of two tensors of one name, relative to the largest number of that tensor."""
    assert {name: len(tensors) for name, tensors in found.items()} == {n: len(t) for n, t in expected.items()}
    pairs = [pair for name in expected for pair in zip(found[name], expected[name], strict=True)]
    return max((float((a - b).abs().max() / b.abs().max()) for a, b in pairs if b.numel()), default=0.0)


def kept(setting: str) -> dict[str, Any]:
    """Weights and optimizer state after steps with moves, in a checkpoint and an export; and a run that loads it."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    changes = SETTINGS[setting]
    with parallel(2, bf16=False):
        plain_run, run, curve = build(**changes), build(**changes), tiny_gpt.history()
        balancer = attach(run.models, run.optimizer, BalancerConfig(policy="ultraep", objective="imbalance"))
        for step in range(STEPS):
            routes = routes_of(step, changes)
            tiny_gpt.update(plain_run, step, routes, tiny_gpt.history())
            balancer.reorder(random_placement(balancer, step))
            balancer.begin_pass(PassSource.replayed(routes))
            tiny_gpt.update(run, step, routes, curve)
            balancer.end_pass()
        expected = state_of(plain_run)
        found: dict[str, Any] = {"moved": difference(state_of(run), expected)}
        with balancer.canonical(weights_only=True):
            weights = {name: tensors[:1] for name, tensors in state_of(run).items()}
            found["exported"] = difference(weights, {name: tensors[:1] for name, tensors in expected.items()})
        if changes.get("overlap_param_gather"):
            run.model.start_param_sync(force_sync=True)  # as Megatron's training loop does before it saves
        with balancer.canonical():
            found["saved"] = difference(state_of(run), expected)
            saved = run.gpt.sharded_state_dict()
            dist_checkpointing.save({"model": saved}, folder[0])
        fresh = build(**changes)
        state = dist_checkpointing.load({"model": fresh.gpt.sharded_state_dict()}, folder[0])
        fresh.gpt.load_state_dict(state["model"])
        routes = routes_of(STEPS, changes)
        found["losses"] = [tiny_gpt.forward_backward(r, STEPS, routes, forward_only=True) for r in (plain_run, fresh)]
        found["keys"] = sorted(saved) == sorted(plain_run.gpt.sharded_state_dict())
    return found


def fp8_blockwise() -> dict[str, Any]:
    """TransformerEngine's blocks: plain, balanced without replicas and with, with fused gradients, and in bf16."""
    with parallel(2, bf16=True):
        found: dict[str, Any] = {"wide": plain(**BF16), "plain": plain(**BLOCKWISE)}
        found["static"], _ = balanced(**BLOCKWISE, policy="static")
        found["balanced"], found["metrics"] = balanced(**BLOCKWISE)
        found["again"], _ = balanced(**BLOCKWISE, poison=True)
        found["fused"], _ = balanced(**BLOCKWISE, **FUSED)
        found["permuted"], _ = balanced(**BLOCKWISE, **PERMUTED)
        hybrid = {**BLOCKWISE, "fp8": "hybrid"}
        found["hybrid"], (found["hybrid_balanced"], _) = plain(**hybrid), balanced(**hybrid)
        with patch.object(te_grouped, "_without_memory", keeping_codes(te_grouped._without_memory)):
            found["codes_of_another_replica"], _ = balanced(**BLOCKWISE)
    return found


def keeping_codes(build_replicas: Callable[..., Any]) -> Callable[..., Any]:
    def build_one(module: Any, num_gemms: int) -> Any:
        replicas = build_replicas(module, num_gemms)
        for linear in (replicas.linear_fc1, replicas.linear_fc2):
            linear.disable_parameter_transpose_cache = False
        return replicas

    return build_one


def faults() -> dict[str, Any]:
    """What the comparison has to see: marks on parameters, buffers that keep old gradients."""
    with parallel(2, bf16=False):
        found: dict[str, Any] = {"plain": plain(**FUSED)}
        with patch.object(ReplicatedExperts, "start_backward", ReplicatedExperts.wait_for_push):
            found["replica_gradients_not_emptied"], _ = balanced(**FUSED)
        with patch.object(main_grad, "marked_as_added", lambda parameter: torch.zeros_like(parameter) / 0):
            found["homes_not_marked"], _ = balanced(**FUSED)
    return found


def forward_alone() -> dict[str, Any]:
    """Log-prob passes with replicas, on all dispatchers; and how HybridEP's buffer was used."""
    found: dict[str, Any] = {}
    with parallel(2, bf16=True):
        for name, changes in (("alltoall", FUSED), ("deepep", FLEX), ("hybridep", HYBRID), ("fp8", BLOCKWISE)):
            run, routes = build(**BF16 | changes), occurring(0)
            before = tiny_gpt.forward_backward(run, 0, routes, forward_only=True)
            balancer = attach(run.models, run.optimizer, BalancerConfig(policy="ultraep", objective="imbalance"))
            balancer.begin_pass(PassSource.replayed(routes), forward_only=True)
            loss = tiny_gpt.forward_backward(run, 0, routes, forward_only=True)
            found[name] = [before, loss, balancer.end_pass().replicas]
        found["reallocations"] = fused_a2a._hybrid_ep_buffer.reallocations
        found["experts_with_room"] = fused_a2a._hybrid_ep_buffer.size[1]
    return found


def choices_of_no_weight() -> list[list[list[int]]]:
    """DeepEP's choice among slots where a token has fewer positive probabilities than K, and none at all."""
    with parallel(2, bf16=True):
        run = build(**BF16, **FLEX)
        attach(run.models, run.optimizer, BalancerConfig(policy="ultraep", objective="imbalance"))
        dispatcher = run.gpt.decoder.layers[0].mlp._elastic.slot_dispatcher
        probs = torch.zeros(3, 10)
        probs[0, [2, 7]], probs[1, 3] = 0.5, 1.0
        dispatcher.dispatch_preprocess(torch.zeros(3, 1, 32), probs > 0, probs)
        return [sorted(row) for row in dispatcher._comm_manager.token_indices.tolist()]


def attached_and_detached(run: tiny_gpt.Run, config: BalancerConfig) -> None:
    balancer = attach(run.models, None, config)
    hooks = sum(len(layer._forward_pre_hooks) for layer in run.gpt.decoder.layers)
    balancer.detach()
    if hooks != (0 if run.config.cuda_graph_impl == "transformer_engine" else tiny_gpt.NUM_LAYERS):
        raise AssertionError(f"{hooks} hooks where graphs are {run.config.cuda_graph_impl}")


def refusals() -> dict[str, str]:
    found = {}
    with parallel(2, bf16=True):
        run = build(**BF16)
        experts = run.gpt.decoder.layers[0].mlp.experts
        for name, changes in {
            "delayed": {"fp8": "e4m3", "fp8_recipe": "delayed"},
            "tensorwise": {"fp8": "e4m3", "fp8_recipe": "tensorwise"},
            "parameters": {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": True},
            "not_in_fp8": {"fp8_recipe": "delayed"},
            "graphs": {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": [CudaGraphScope.attn]},
            "local_graphs": {"cuda_graph_impl": "local"},
            "try_graphs": {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": [CudaGraphScope.attn]},
            "try_whole_layers": {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": []},
            "try_router": {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": [CudaGraphScope.moe_router]},
            "try_preprocess": {
                "cuda_graph_impl": "transformer_engine",
                "cuda_graph_scope": [CudaGraphScope.moe_router, CudaGraphScope.moe_preprocess],
            },
        }.items():
            config = BalancerConfig(experimental=name.startswith("try_"))
            with contextlib.ExitStack() as stack:
                for option, value in changes.items():
                    stack.enter_context(patch.object(experts.config, option, value))
                found[name] = refusal(functools.partial(attached_and_detached, run, config))
        with patch.object(experts.config, "fp8", "e4m3"), patch.object(experts.config, "fp8_recipe", "blockwise"):
            found["grouped"] = refusal(lambda: attach(run.models, None, BalancerConfig(experts="grouped")))
    return found


for _names in itertools.product(COMBINATIONS, ("fp32", "bf16")):
    globals()["_".join(_names)] = functools.partial(combination, *_names)
for _name in SETTINGS:
    globals()[f"{_name}_kept"] = functools.partial(kept, _name)
for _names in itertools.product(SETTINGS, PRECISIONS, BACKWARDS):
    globals()["_in_".join([_names[0], "_".join(_names[1:])])] = functools.partial(whole_matrix, *_names)
