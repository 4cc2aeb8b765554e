"""Cases of test_transformers_ep.py: Transformers' own expert parallelism, plain and balanced by the adapter."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from transformers.distributed.configuration_utils import DistributedConfig

import moe_rl
from moe_rl.balancing import BalancerConfig
from moe_rl.core.errors import InvalidInputError
from moe_rl.integrations import transformers_ep
from moe_rl.replay.merge import merge_recordings
from moe_rl.replay.reader import TraceReader

warnings.filterwarnings("ignore")
NUM_LAYERS, NUM_EXPERTS, TOP_K, VOCABULARY, BATCH, LENGTH, MICRO_BATCHES = 3, 8, 2, 128, 2, 16, 2
POPULARITY = np.array([0.4, 0.25, 0.15, 0.1, 0.04, 0.03, 0.02, 0.01])
"""Experts 0 .. 3 live on EP rank 0."""
CONFIG = BalancerConfig(objective="imbalance", replica_slots=2)
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "intermediate_size": 64, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "Olmoe": {"num_experts": 8, "intermediate_size": 16},
    "Mixtral": {"num_local_experts": 8, "intermediate_size": 16},
    "GptOss": {"num_local_experts": 8, "intermediate_size": 16, "layer_types": ["full_attention"] * NUM_LAYERS},
    "DeepseekV3": {
        "n_routed_experts": 8,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "num_hidden_layers": NUM_LAYERS + 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}


def saved(family: str = "Qwen3Moe", **changes: Any) -> str:
    """Folder of a tiny model of the family, the same on all ranks."""
    shared = [""]
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**SHAPE, **FAMILIES[family], **changes})
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.1)
        shared = [tempfile.mkdtemp()]
        model.save_pretrained(shared[0])
    dist.broadcast_object_list(shared)
    return shared[0]


def loaded(path: str, implementation: str, experts: str = "eager", **sizes: int) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation=experts,
        distributed_config=DistributedConfig(
            **{"fsdp_size": dist.get_world_size(), "ep_size": 2, "ep_implementation": implementation, **sizes}
        ),
    )


def tokens(step: int, micro_batch: int) -> torch.Tensor:
    seed = (10 * step + micro_batch) * 100 + dist.get_rank()
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def routes(step: int, micro_batch: int, *, layers: int = NUM_LAYERS, unknown: bool = True) -> np.ndarray[Any, Any]:
    """[B, S, L, K], the last token of every sequence unknown."""
    draw = np.random.default_rng((10 * step + micro_batch) * 100 + dist.get_rank())
    noise = np.log(POPULARITY) + draw.gumbel(size=(BATCH, LENGTH, layers, NUM_EXPERTS))
    ids = np.argsort(-noise, axis=-1)[..., :TOP_K]
    if unknown:
        ids[:, -1] = -1
    return ids


def step_of(model: Any, step: int) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of the micro-batches, and the summed gradients of experts and routers."""
    model.zero_grad()
    losses = []
    for micro_batch in range(MICRO_BATCHES):
        ids = tokens(step, micro_batch)
        loss = model(input_ids=ids, labels=ids).loss
        (loss / MICRO_BATCHES).backward()
        losses.append(loss.item())
    gradients = []
    for name, parameter in model.named_parameters():
        if ".mlp." in name and parameter.grad is not None:
            whole = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            gradients.append(whole.double())
    return losses, gradients


def difference(plain: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Largest difference of a gradient, over the largest gradient of its tensor."""
    assert len(plain) == len(other) > 0
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in zip(plain, other, strict=True))


def compared(path: str, given: list[Any], *, experts: str = "eager", checkpointing: bool = False) -> dict[str, Any]:
    """Plain all-to-all that replays the same routes, against ours without plan and with replicas."""
    results: dict[str, Any] = {}
    for name, config in (("plain", None), ("static", BalancerConfig(policy="static")), ("balanced", CONFIG)):
        model = loaded(path, "moe_rl", experts)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        balancer = transformers_ep.attach(model, config or BalancerConfig(policy="static"))
        balancer.begin_pass(given)
        if config is None:
            for each in transformers_ep.IMPLEMENTATIONS.values():
                each.__class__ = transformers_ep.AllToAllEP
        losses, gradients = step_of(model, 0)
        results[name] = losses, gradients
        metrics = balancer.end_pass()
        if config is CONFIG:
            results["metrics"] = metrics.as_dict()
        balancer.detach()
    plain = results["plain"]
    return {
        "losses": [[float(x) for x in results[name][0]] for name in ("plain", "static", "balanced")],
        "static": difference(plain[1], results["static"][1]),
        "balanced": difference(plain[1], results["balanced"][1]),
        "metrics": results["metrics"],
    }


def micro_batches(**how: Any) -> list[Any]:
    return [routes(0, m, **how) for m in range(MICRO_BATCHES)]


def eager() -> dict[str, Any]:
    return compared(saved(), micro_batches())


def grouped_mm() -> dict[str, Any]:
    return compared(saved(), micro_batches(), experts="grouped_mm")


def checkpointed() -> dict[str, Any]:
    return compared(saved(), micro_batches(unknown=False), checkpointing=True)


def families() -> dict[str, Any]:
    """Every family with both kinds of experts, once as they are and once recomputed."""
    given, results = micro_batches(unknown=False), {}
    for name in FAMILIES:
        path = saved(name)
        if name != "Qwen3Moe":
            results[name] = compared(path, given)
        results[f"{name}, grouped, recomputed"] = compared(path, given, experts="grouped_mm", checkpointing=True)
    return results


def empty_ranks() -> dict[str, Any]:
    """All pairs go to experts of rank 0: rank 1's homes get no row; and one rank hosts what no row uses."""
    given = [np.zeros((BATCH, LENGTH, NUM_LAYERS, TOP_K), np.int64) for _ in range(MICRO_BATCHES)]
    for each in given:
        each[...] = [0, 1]
    return compared(saved(), given)


def two_copies() -> dict[str, Any]:
    """Four ranks: two EP groups, whose experts FSDP shards and gathers."""
    return compared(saved(), micro_batches(unknown=False))


def recorded() -> dict[str, Any]:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    path = Path(folder[0])
    model = loaded(saved(), "moe_rl")
    balancer = transformers_ep.attach(model, CONFIG)
    balancer.record(path / "run")
    passes = [[routes(step, m, unknown=False) for m in range(MICRO_BATCHES)] for step in range(2)]
    balancer.begin_pass(passes[0])
    balancer.prepare(passes[1])
    metrics = []
    for step in range(2):
        if step == 1:
            balancer.begin_pass()
        step_of(model, step)
        metrics.append(balancer.end_pass().as_dict())
    balancer.detach()
    mine = TraceReader(path / "run" / f"dp{dist.get_rank():05d}.moetrace")
    trace = next(iter(mine.parts(1)))
    expected = np.concatenate([routes(1, m, unknown=False) for m in range(MICRO_BATCHES)]).reshape(
        -1, NUM_LAYERS, TOP_K
    )
    dist.barrier()
    simulated: list[str] = []
    if dist.get_rank() == 0:
        merged = merge_recordings(path / "run", path / "run.moetrace").path
        report = moe_rl.simulate(
            str(merged), model="from-trace", hidden_size=32, moe_ffn_hidden_size=16, expert_model_parallel_size=2
        )
        simulated = list(report.plans)
    dist.barrier()
    return {
        "same": bool((trace.routed_experts == expected).all()),
        "micro_batches": sorted(set(trace.micro_batch.tolist())),
        "steps": list(mine.steps),
        "simulated": simulated,
        "metrics": metrics,
    }


def misuse() -> dict[str, str]:
    said = {}

    def sentence(name: str, call: Any) -> None:
        try:
            call()
            said[name] = ""
        except InvalidInputError as error:
            said[name] = str(error)

    path = saved()
    model = loaded(path, "moe_rl")
    sentence("implementation", lambda: transformers_ep.attach(loaded(path, "all_to_all"), CONFIG))
    sentence("dense", lambda: transformers_ep.attach(dense(), CONFIG))
    sentence("megatron", lambda: transformers_ep.attach(model, BalancerConfig(forecast=True, placement_bitwise=True)))
    sentence("ranks", lambda: transformers_ep.attach(model, BalancerConfig(replica_slots=1 + dist.get_rank())))
    balancer = transformers_ep.attach(model, CONFIG)
    sentence("twice", lambda: transformers_ep.attach(model, CONFIG))
    sentence("model", lambda: balancer.begin_pass([np.zeros((2, 4, 5, 2), np.int64)]))
    sentence("nothing", balancer.begin_pass)
    sentence("reorder", lambda: balancer.reorder(None))
    sentence("canonical", lambda: balancer.canonical())
    balancer.begin_pass([routes(0, 0)[:1]])
    ids = tokens(0, 0)
    sentence("rows", lambda: model(input_ids=ids, labels=ids))
    return said


def dense() -> Any:
    shape = {name: value for name, value in SHAPE.items() if "experts" not in name}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, intermediate_size=64))


def contract() -> dict[str, Any]:
    framework = transformers_ep.TRANSFORMERS
    return {"problems": framework.problems(), "tested": framework.version() in framework.tested}
