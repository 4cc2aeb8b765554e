"""Cases of test_deepspeed.py: DeepSpeed AutoEP, plain and balanced by the adapter."""

import functools
import os
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.append(str(Path(__file__).parents[1]))  # after what is installed: folders there have names of frameworks

import numpy as np
import torch
import torch.distributed as dist
from tiny_hf import (
    BATCH,
    MICRO_BATCHES,
    NUM_LAYERS,
    TOP_K,
    difference,
    micro_batches,
    model_of,
    routes,
    said_by,
    tokens,
)

import moe_rl
from moe_rl.balancing import BalancerConfig
from moe_rl.balancing.pass_source import PassSource
from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.core.placement import ExpertPlacement
from moe_rl.frameworks.deepspeed import attach as adapter
from moe_rl.frameworks.deepspeed.contract import FRAMEWORK
from moe_rl.replay import TraceReader
from moe_rl.replay.merge import merge_recordings

# isort: split
import deepspeed
from deepspeed.module_inject import auto_ep_layer
from deepspeed.utils import safe_get_full_grad

warnings.filterwarnings("ignore")
# On a CPU DeepSpeed compiles an operation when its communication starts, and waits for ever where a build was killed.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

STEPS = 3
STATIC = BalancerConfig(policy="static")
CONFIG = BalancerConfig(objective="imbalance", replica_slots=2)
MOVING = BalancerConfig(objective="imbalance", replica_slots=1, policy="relibra")
"""Its policy moves experts as well."""
PRESETS = {"Qwen3Moe": "qwen3_moe", "Mixtral": "mixtral", "DeepseekV3": "deepseek_v3"}


def built(model: Any = None, *, family: str = "Qwen3Moe", stage: int = 1, **sections: Any) -> Any:
    """An engine; `sections` are added to DeepSpeed's configuration."""
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK="0", WORLD_SIZE=str(dist.get_world_size()))
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    model = model_of(family) if model is None else model
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": PRESETS[family]},
        **sections,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def step_of(engine: Any, step: int) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of an accumulation cycle, and what it summed of the gradients of routers."""
    losses, gradients = [], []
    for micro_batch in range(MICRO_BATCHES):
        ids = tokens(step, micro_batch)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        losses.append(loss.item())
        if micro_batch == MICRO_BATCHES - 1:
            named = [(name, p) for name, p in engine.module.named_parameters() if ".mlp." in name]
            gradients = [safe_get_full_grad(p).double().clone() for _, p in named]
        engine.step()
    return losses, gradients


def plainly(engine: Any) -> None:
    """Take the adapter out of the layers of an attached engine, less the replay: all else is DeepSpeed's own."""
    for module in layers_of(engine):
        slots = module.router.forward.__self__
        module.router.forward = functools.partial(slots.run.routed, module.router, slots._route)
        module.experts.forward = slots._compute


def layers_of(engine: Any) -> list[Any]:
    return [each for each in engine.module.modules() if isinstance(each, auto_ep_layer.AutoEPMoELayer)]


def moved(balancer: Any, seed: int) -> ExpertPlacement:
    """Another home for most experts, another one in every layer."""
    rng = np.random.default_rng(seed)
    home = balancer.own_placement.home_rank
    return ExpertPlacement.from_home_rank(np.stack([rng.permutation(row) for row in home]), ep_size=2)


def weights(engine: Any) -> list[torch.Tensor]:
    """Parameters of the experts of this rank and what ZeRO keeps for them, by slot: nothing else may differ."""
    state = adapter.AutoEpExperts(
        engine.optimizer, layers_of(engine), [], adapter.EpGroups.of(layers_of(engine)[0].ep_group, device="cpu")
    ).ready()
    return [
        each.detach().double().clone()
        for experts in state[0]
        for slot in range(experts.num_local_experts)
        for parameter in experts.parameters_of(slot)
        for each in (parameter, *(tensor for places in state[1].tensors(parameter) for tensor in places))
    ]


def trained(
    engine: Any, config: BalancerConfig, *, reorder: bool = False, plain: bool = False, **how: Any
) -> dict[str, Any]:
    balancer = adapter.attach(engine, config)
    if plain:
        plainly(engine)
    losses, norms, gradients, metrics, received = [], [], [], [], []
    for step in range(STEPS):
        if reorder and step == 1:
            received.append(balancer.reorder(moved(balancer, 3)))
        if reorder and step == 2:
            plan = balancer.plan_reorder(micro_batches(step, **how))
            received.append(balancer.reorder(plan))
            balancer.begin_pass(PassSource.given(plan, micro_batches(step, **how)))
        else:
            balancer.begin_pass(PassSource.replayed(micro_batches(step, **how)))
        step_losses, step_gradients = step_of(engine, step)
        losses += step_losses
        norms.append(float(engine.get_global_grad_norm()))
        gradients.append(step_gradients)
        metrics.append(balancer.end_pass().as_dict())
    if reorder:
        balancer.reorder(balancer.own_placement)
    found = weights(engine)
    balancer.detach()
    return {
        "curve": {"loss": losses, "grad_norm": norms},
        "gradients": gradients[0],
        "metrics": metrics,
        "state": found,
        "received": received,
    }


def compared(make: Any, **how: Any) -> dict[str, Any]:
    """DeepSpeed's own layers that replay the same routes, against ours with replicas, without and with reorders."""
    plain = trained(make(), STATIC, plain=True, **how)
    replicas = trained(make(), CONFIG, **how)
    reordered = trained(make(), MOVING, reorder=True, **how)
    return {
        "plain": plain["curve"],
        **{
            name: {
                "curve": run["curve"],
                "gradients": difference(plain["gradients"], run["gradients"]),
                "state": difference(plain["state"], run["state"]),
                "metrics": run["metrics"],
                "received": run["received"],
            }
            for name, run in (("replicas", replicas), ("reordered", reordered))
        },
    }


def without_replay() -> dict[str, Any]:
    """A log-prob pass over all sequences of a step at once, then its update; experts move by themselves."""
    results: dict[str, Any] = {}
    for name, config in (("plain", STATIC), ("balanced", CONFIG.with_words(replica_slots=1, reorders=True))):
        engine = built()
        balancer = adapter.attach(engine, config, replay=False)
        losses, norms, metrics = [], [], []
        for step in range(STEPS):
            batches = [tokens(step, micro_batch) for micro_batch in range(MICRO_BATCHES)]
            together = torch.cat(batches[::-1])
            balancer.begin_pass(PassSource.expected([SequenceRows.of_padded(together)]), forward_only=True)
            with torch.no_grad():
                engine.module(input_ids=together)
            balancer.end_pass()
            balancer.begin_pass(PassSource.expected([SequenceRows.of_padded(each) for each in batches]))
            losses += step_of(engine, step)[0]
            norms.append(float(engine.get_global_grad_norm()))
            found = balancer.end_pass()
            metrics.append(found.as_dict() | {"source": found.source})
        moved = int((balancer.placement.home_rank != balancer.own_placement.home_rank).sum())
        results[name] = {"curve": {"loss": losses, "grad_norm": norms}, "metrics": metrics, "moved": moved}
        balancer.reorder(balancer.own_placement)
        balancer.detach()
    return results


def a_loss_raises() -> dict[str, Any]:
    """The loss of a cycle's second micro-batch raises: save, take the rest of the cycle as another pass, go on."""
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    results: dict[str, Any] = {}
    for name, config in (("plain", STATIC), ("ours", MOVING)):
        engine = built(stage=2)
        balancer = adapter.attach(engine, config)
        if name == "plain":
            plainly(engine)
        else:
            balancer.reorder(moved(balancer, 3))
            balancer.record(Path(shared[0]) / "recorded")
        found: dict[str, Any] = {"curve": {"loss": [], "grad_norm": []}}

        def cycle(step: int, begin: int, stop: int, found: Any = found, ran: Any = (engine, balancer)) -> None:
            engine, balancer = ran
            balancer.begin_pass(PassSource.replayed(micro_batches(step, unknown=False)[begin:]))
            for micro_batch in range(begin, MICRO_BATCHES):
                ids = tokens(step, micro_batch)
                loss = engine(input_ids=ids, labels=ids).loss
                if micro_batch == stop:
                    raise OfTheUserError
                engine.backward(loss)
                found["curve"]["loss"].append(loss.item())
                engine.step()
            found["curve"]["grad_norm"].append(float(engine.get_global_grad_norm()))
            found["metrics"] = balancer.end_pass().as_dict()

        cycle(0, 0, MICRO_BATCHES)
        try:
            cycle(1, 0, 1)
        except OfTheUserError:
            balancer.give_up()
        engine.save_checkpoint(f"{shared[0]}/{name}", tag="one")
        if name == "ours":
            found["refused"] = said_by(lambda b=balancer: b.reorder(b.own_placement))
        cycle(1, 1, MICRO_BATCHES)
        cycle(2, 0, MICRO_BATCHES)
        balancer.reorder(balancer.own_placement)
        balancer.detach()
        results[name] = found
    dist.barrier()
    results["steps"] = list(TraceReader(Path(shared[0]) / "recorded" / f"dp{dist.get_rank():05d}.moetrace").steps)
    results["files"] = len(list(Path(shared[0], "ours", "one").glob("*expert*")))
    return results


class OfTheUserError(Exception):
    """What a user's loss raises."""


def fp32() -> dict[str, Any]:
    return compared(built, unknown=False)


def bf16() -> dict[str, Any]:
    exact = trained(built(stage=2), STATIC, plain=True)["curve"]
    return {"exact": exact, **compared(functools.partial(built, stage=2, bf16={"enabled": True}))}


def two_groups() -> dict[str, Any]:
    """Four ranks: two EP groups, between which ZeRO cuts every expert's state; one group has nothing to balance."""
    return compared(functools.partial(built, stage=2), unknown=False, even=dist.get_rank() >= 2)


def checkpointed() -> dict[str, Any]:
    """Gradient checkpointing: every layer runs again in backward."""

    def make() -> Any:
        model = model_of()
        model.gradient_checkpointing_enable()
        return built(model)

    return compared(make, unknown=False)


def families() -> dict[str, Any]:
    return {
        name: compared(functools.partial(built, family=name), unknown=False) for name in PRESETS if name != "Qwen3Moe"
    }


def live() -> dict[str, Any]:
    """Without replay and without replicas it is DeepSpeed's own to the bit; what arrives is what the metrics say."""
    engine = built()
    plain = step_of(engine, 0)
    engine = built()
    balancer = adapter.attach(engine, STATIC, replay=False)
    balancer.begin_pass(PassSource.replayed(micro_batches(0)))
    attached = step_of(engine, 0)
    balancer.end_pass()
    balancer.detach()

    engine = built()
    balancer = adapter.attach(engine, CONFIG)
    arrived = []
    permute = auto_ep_layer.permute_by_local_expert

    def counting(rows: torch.Tensor, counts: torch.Tensor) -> Any:
        arrived.append(len(rows))
        return permute(rows, counts)

    with patch.object(auto_ep_layer, "permute_by_local_expert", counting):
        balancer.begin_pass(PassSource.replayed(micro_batches(0)))
        utilization = [module.tokens_per_expert.clone() for module in layers_of(engine)]
        step_of(engine, 0)
        metrics = balancer.end_pass()
    utilization = [
        (module.tokens_per_expert - before).tolist()
        for module, before in zip(layers_of(engine), utilization, strict=True)
    ]
    mine = metrics.actual_rows[:, :, dist.get_group_rank(layers_of(engine)[0].ep_group, dist.get_rank())]
    return {
        "losses": [plain[0], attached[0]],
        "gradients": difference(plain[1], attached[1]),
        "arrived": arrived,
        "counted": mine.ravel().tolist(),
        "utilization": utilization,
    }


def saved_and_loaded() -> dict[str, Any]:
    """A run that reorders, saves, goes on; one that loads what it saved; and one whose experts never moved."""
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    curves: dict[str, list[float]] = {}
    first = built(stage=2)
    balancer = adapter.attach(first, CONFIG)
    balancer.begin_pass(PassSource.replayed(micro_batches(0)))
    step_of(first, 0)
    balancer.end_pass()
    placement = moved(balancer, 3)
    balancer.reorder(placement)
    refused = said_by(first.module.state_dict)
    first.save_checkpoint(str(folder / "reordered"), tag="one")
    still = bool((balancer.placement.home_rank == placement.home_rank).all())
    curves["went on"] = follow(first, balancer)

    plain = built(stage=2)
    balancer = adapter.attach(plain, STATIC)
    plainly(plain)
    balancer.begin_pass(PassSource.replayed(micro_batches(0)))
    step_of(plain, 0)
    balancer.end_pass()
    plain.save_checkpoint(str(folder / "plain"), tag="one")
    curves["plain"] = follow(plain, balancer)

    loaded = built(stage=2)
    balancer = adapter.attach(loaded, CONFIG)
    balancer.reorder(moved(balancer, 4))  # homes of a run do not have to be those of the checkpoint
    loaded.load_checkpoint(str(folder / "reordered"), tag="one")
    curves["loaded"] = follow(loaded, balancer)

    dist.barrier()
    files = sorted(path.name for path in (folder / "plain" / "one").glob("*expert*"))
    distances = [
        difference(
            *(
                [value.double() for value in torch.load(folder / run / "one" / name, weights_only=False).values()]
                for run in ("plain", "reordered")
            )
        )
        for name in files
    ]
    return {"curves": curves, "files": files, "distance": max(distances), "refused": refused, "still": still}


def follow(engine: Any, balancer: Any) -> list[float]:
    losses = []
    for step in (1, 2):
        balancer.begin_pass(PassSource.replayed(micro_batches(step)))
        losses += step_of(engine, step)[0]
        balancer.end_pass()
    return losses


def recorded() -> dict[str, Any]:
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    path = Path(shared[0])
    engine = built()
    balancer = adapter.attach(engine, CONFIG)
    balancer.reorder(moved(balancer, 3))
    balancer.record(path / "run")
    passes = [micro_batches(step, unknown=False) for step in range(2)]
    balancer.begin_pass(PassSource.replayed(passes[0]))
    balancer.prepare(PassSource.replayed(passes[1]))
    step_of(engine, 0)
    balancer.end_pass()
    balancer.begin_pass()  # planned beside the first
    step_of(engine, 1)
    metrics = balancer.end_pass().as_dict()
    balancer.prepare(PassSource.replayed(passes[0]))
    balancer.reorder(balancer.own_placement)
    balancer.begin_pass()  # planned for other homes
    step_of(engine, 0)
    late = balancer.end_pass().as_dict()
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
        "steps": list(mine.steps),
        "simulated": simulated,
        "metrics": metrics,
        "late": late,
    }


def misuse() -> dict[str, str]:
    said = {}

    def sentence(name: str, call: Any) -> None:
        said[name] = said_by(call)

    sentence("engine", lambda: adapter.attach(model_of(), CONFIG))
    one = built(expert_parallel={"enabled": True, "autoep_size": 1, "preset_model": "qwen3_moe"})
    sentence("ep_size", lambda: adapter.attach(one, CONFIG))
    off = built(expert_parallel={"enabled": False})
    sentence("no_layer", lambda: adapter.attach(off, CONFIG))
    sentence("zero3", lambda: adapter.attach(built(stage=3), CONFIG))
    engine = built(stage=0)
    sentence("megatron", lambda: adapter.attach(engine, BalancerConfig(experimental=True, placement_bitwise=True)))
    sentence("ranks", lambda: adapter.attach(engine, BalancerConfig(replica_slots=1 + dist.get_rank())))
    layer = layers_of(engine)[0]
    # These need a GPU, or packages for one, to be built.
    for name, attribute, value in (
        ("deepep", "comm_backend", "deepep"),
        ("async", "async_split_plan", True),
        ("fused", "combine_impl", "fused_weighted_sum"),
        ("folding", "folding_group_handles", SimpleNamespace(spec=SimpleNamespace(tp_size=2))),
    ):
        with patch.object(layer, attribute, value):
            sentence(name, lambda: adapter.attach(engine, CONFIG))
    balancer = adapter.attach(engine, CONFIG)
    sentence("twice", lambda: adapter.attach(engine, CONFIG))
    sentence("model", lambda: balancer.begin_pass(PassSource.replayed([np.zeros((2, 4, 5, 2), np.int64)])))
    sentence("reorder", lambda: balancer.reorder(moved(balancer, 0)))
    balancer.begin_pass(PassSource.replayed([routes(0, 0)[:1]]))
    ids = tokens(0, 0)
    sentence("rows", lambda: engine(input_ids=ids, labels=ids))
    return said


def contract() -> dict[str, Any]:
    return {"problems": FRAMEWORK.problems(), "tested": FRAMEWORK.version() in FRAMEWORK.tested}
