"""Cases of test_transformers_ep.py: Transformers' own expert parallelism, plain and balanced by the adapter."""

import sys
import tempfile
import warnings
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # after what is installed: folders there have names of frameworks

import numpy as np
import torch
import torch.distributed as dist
import transformers
from tiny_hf import (
    BATCH,
    FAMILIES,
    LENGTH,
    MICRO_BATCHES,
    NUM_LAYERS,
    SHAPE,
    TOP_K,
    difference,
    micro_batches,
    model_of,
    routes,
    said_by,
    tokens,
)
from transformers.distributed.configuration_utils import DistributedConfig

import moe_rl
from moe_rl.balancing import BalancerConfig
from moe_rl.balancing.pass_source import PassSource
from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.frameworks.transformers import attach as transformers_ep
from moe_rl.replay import TraceReader
from moe_rl.replay.merge import merge_recordings

if find_spec("deepspeed") is not None:
    import deepspeed  # noqa: F401 - accelerate does where a model is saved: once here, or in every rank

warnings.filterwarnings("ignore")
CONFIG = BalancerConfig(objective="imbalance", replica_slots=2)


def saved(family: str = "Qwen3Moe", **changes: Any) -> str:
    """Folder of a tiny model of the family, the same on all ranks."""
    shared = [""]
    if dist.get_rank() == 0:
        shared = [tempfile.mkdtemp()]
        model_of(family, **changes).save_pretrained(shared[0])
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


def compared(path: str, given: list[Any], *, experts: str = "eager", checkpointing: bool = False) -> dict[str, Any]:
    """Plain all-to-all that replays the same routes, against ours without plan and with replicas."""
    results: dict[str, Any] = {}
    for name, config in (("plain", None), ("static", BalancerConfig(policy="static")), ("balanced", CONFIG)):
        model = loaded(path, "moe_rl", experts)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        balancer = transformers_ep.attach(model, config or BalancerConfig(policy="static"))
        balancer.begin_pass(PassSource.replayed(given))
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


def without_replay() -> dict[str, Any]:
    """A log-prob pass over all sequences at once, then an update of the same ones; the routers choose freely."""
    path, results = saved(), {}
    for name, config in (("plain", BalancerConfig(policy="static")), ("balanced", CONFIG)):
        model = loaded(path, "moe_rl")
        balancer = transformers_ep.attach(model, config, replay=False)
        batches = [tokens(0, micro_batch) for micro_batch in range(MICRO_BATCHES)]
        together = torch.cat(batches[::-1])
        balancer.begin_pass(PassSource.expected([SequenceRows.of_padded(together)]), forward_only=True)
        with torch.no_grad():
            model(input_ids=together)
        balancer.end_pass()
        given = np.arange(len(together)).reshape(MICRO_BATCHES, -1).tolist()
        packed = balancer.packed(given, list(together), token_budget=len(given[0]) * together.shape[1])
        balancer.begin_pass(PassSource.expected([SequenceRows.of_padded(each) for each in batches]))
        losses, gradients = step_of(model, 0)
        metrics = balancer.end_pass()
        results[name] = losses, gradients, metrics.as_dict() | {"source": metrics.source}
        results["same sizes"] = [len(each) for each in packed] == [len(each) for each in given]
        results["same sequences"] = sorted(chain(*packed)) == sorted(chain(*given))
        balancer.detach()
    plain, balanced = results["plain"], results["balanced"]
    return {
        "losses": [plain[0], balanced[0]],
        "gradients": difference(plain[1], balanced[1]),
        "metrics": balanced[2],
        "packed": results["same sizes"] and results["same sequences"],
    }


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
    passes = [micro_batches(step, unknown=False) for step in range(2)]
    balancer.begin_pass(PassSource.replayed(passes[0]))
    balancer.prepare(PassSource.replayed(passes[1]))
    metrics = []
    for step in range(2):
        if step == 1:
            balancer.begin_pass()
        step_of(model, step)
        metrics.append(balancer.end_pass().as_dict())
    balancer.detach()
    mine = TraceReader(path / "run" / f"dp{dist.get_rank():05d}.moetrace")
    trace = next(iter(mine.parts(1)))
    expected = np.concatenate(passes[1]).reshape(-1, NUM_LAYERS, TOP_K)
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
        said[name] = said_by(call)

    path = saved()
    model = loaded(path, "moe_rl")
    sentence("implementation", lambda: transformers_ep.attach(loaded(path, "all_to_all"), CONFIG))
    sentence("dense", lambda: transformers_ep.attach(dense(), CONFIG))
    sentence(
        "megatron", lambda: transformers_ep.attach(model, BalancerConfig(experimental=True, placement_bitwise=True))
    )
    sentence("ranks", lambda: transformers_ep.attach(model, BalancerConfig(replica_slots=1 + dist.get_rank())))
    balancer = transformers_ep.attach(model, CONFIG)
    sentence("twice", lambda: transformers_ep.attach(model, CONFIG))
    sentence("model", lambda: balancer.begin_pass(PassSource.replayed([np.zeros((2, 4, 5, 2), np.int64)])))
    sentence("nothing", balancer.begin_pass)
    sentence("reorder", lambda: balancer.reorder(None))
    sentence("canonical", lambda: balancer.canonical())
    balancer.begin_pass(PassSource.replayed([routes(0, 0)[:1]]))
    ids = tokens(0, 0)
    sentence("rows", lambda: model(input_ids=ids, labels=ids))
    return said


def dense() -> Any:
    shape = {name: value for name, value in SHAPE.items() if "experts" not in name}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, intermediate_size=64))


def contract() -> dict[str, Any]:
    framework = transformers_ep.FRAMEWORK
    return {"problems": framework.problems(), "tested": framework.version() in framework.tested}
