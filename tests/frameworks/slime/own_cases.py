"""Cases of test_own_code.py: a training loop on slime's and miles' own code, from checkouts: schedule, iterator, replay
lists, copies of weights and process groups.

Of their packages only `backends.megatron_utils.model` and `.actor`, which need Megatron-LM and a GPU, are stand-ins:
the loop below is theirs in the order of `train_actor`, with Megatron's own schedule and optimizer.
"""

import os
import sys
import types
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "megatron"))
import tiny_gpt
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from rollout_cases import like_some

from moe_rl.frameworks.contract import Framework
from moe_rl.frameworks.miles import attach as miles
from moe_rl.frameworks.router_shift import READING
from moe_rl.frameworks.slime import attach as slime
from moe_rl.frameworks.slime.losses import _gamma as shift_of_micro_batch

ROLLOUTS, SAMPLES, UPDATES, LEARNING_RATE = 3, 16, 2, 1e-5
TOLD = {
    "MOE_RL": "moe-rl",
    "MOE_RL_OBJECTIVE": "imbalance",
    "MOE_RL_RANKS_PER_NODE": "1",
    "MOE_RL_STRICT": "1",
}
BY_TIME = {"MOE_RL_OBJECTIVE": "time"}
"""All samples like the same experts here, so packing goes by what their lengths cost."""
ARGS = Namespace(
    micro_batch_size=1,
    use_dynamic_batch_size=True,
    max_tokens_per_gpu=90,
    balance_data=False,
    balance_by_flops=False,
    qkv_format="thd",
    data_pad_size_multiplier=8,
    num_experts=tiny_gpt.NUM_EXPERTS,
    update_weight_buffer_size=2**30,
    pause_generation_mode="in_place",
    q_lora_rank=None,
)


class Absent(MetaPathFinder, Loader):
    """Stands in for packages that the modules' imports name and the loop does not use."""

    NAMES = ("httpx", "sglang", "sglang_router", "starlette", "torch_memory_saver", "wandb", "ring_flash_attn")

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        there = fullname.split(".")[0] in self.NAMES or fullname.startswith("megatron.training")
        return ModuleSpec(fullname, self, is_package=True) if there else None

    def create_module(self, spec: ModuleSpec) -> Any:
        module = MagicMock(__name__=spec.name, __path__=[], __spec__=spec)
        del module.__all__
        return module

    def exec_module(self, module: Any) -> None: ...


class Loop:
    """One model in training, as an actor of `package` trains it."""

    def __init__(self, package: str, model: Any, *, replays: bool) -> None:
        self.package, self.model_module, self.replays = package, model, replays
        self.run = tiny_gpt.build(moe_enable_routing_replay=replays)
        like_some(self.run.gpt)
        self.run.optimizer.reload_model_params()
        for group in self.run.optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        backups = import_module(f"{package}.utils.tensor_backper").TensorBackuper
        options = {"single_tag": None} if package == "slime" else {}
        self.backups = backups.create(lambda: self.run.gpt.named_parameters(), **options)
        for tag in ("actor", "ref"):
            self.backups.backup(tag)
        self.curve = tiny_gpt.history()
        self.metrics: list[dict[str, float]] = []
        self.gamma: list[list[float]] = []
        self.layers = [layer.mlp.router for layer in self.run.gpt.decoder.layers]
        for router in self.layers if replays else ():
            router.routing_replay = replay_class(package)()

    def rollout(self, number: int, worker: Any) -> None:
        """Wake up, log-probs of the reference and of the actor, updates; then the copy that engines get."""
        groups = import_module(f"{self.package}.utils.reloadable_process_group").ReloadableProcessGroup
        groups.destroy_process_groups()
        sys.modules[f"{self.package}.backends.megatron_utils.actor"].reload_process_groups()
        self.backups.restore("actor")
        data, counts = batch(self.package, number)
        for router in self.layers if self.replays else ():
            router.routing_replay.clear()
            for routes in data.routes:
                router.routing_replay.record(routes[:, router.layer_number - 1].contiguous())
        self.backups.restore("ref")
        self.forward_only(data, sum(counts), "fallthrough")
        self.backups.restore("actor")
        self.forward_only(data, sum(counts), "replay_forward")
        for router in self.layers if self.replays else ():
            router.routing_replay.clear_forward()
        for step, count in enumerate(counts):
            before = [list(each) for each in data.micro_batch_indices]
            self.run.model.zero_grad_buffer()
            self.run.optimizer.zero_grad()
            if worker is not None:
                worker.before_train_step(None, number, step, self.run.models, self.run.optimizer, None)
            self.curve["loss"].append(self.call(data, count, "replay_backward", forward_only=False))
            self.curve["grad_norm"].append(float(self.run.optimizer.step()[1]))
            if worker is not None:
                now, sizes = data.micro_batch_indices, [len(each) for each in data.rollout_data["tokens"]]
                kept: list[Any] = [sorted(chain(*each[sum(counts[:step]) :][:count])) for each in (before, now)]
                kept.append(max(sum(sizes[one] for one in batch) for batch in now) <= ARGS.max_tokens_per_gpu)
                told = {"micro_batches": count, "packed": now != before, "kept": kept[0] == kept[1] and kept[2]}
                self.metrics.append(dict(worker.run.last_metrics) | told)
        self.backups.backup("actor")

    def forward_only(self, data: Any, count: int, stage: str) -> None:
        data.reset()
        with torch.no_grad():
            self.call(data, count, stage, forward_only=True)
        data.reset()

    def call(self, data: Any, count: int, stage: str, *, forward_only: bool) -> float:
        os.environ["ROUTING_REPLAY_STAGE"] = stage
        if self.package == "miles":
            import_module("miles.utils.replay_base").routing_replay_manager.stage = stage
        reduced = self.model_module.get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=data,
            model=self.run.models,
            num_microbatches=count,
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        loss = torch.stack([each["loss"] for each in reduced]).sum()
        dist.all_reduce(loss)
        return float(loss)

    def forward_step(self, data: Any, model: Any) -> Any:
        """Packed sequences as one of all their tokens, with a mask that keeps them apart, and slime's padding."""
        sequences = data.get_next(["tokens"])["tokens"]
        lengths = [len(each) for each in sequences]
        lengths.append(-sum(lengths) % ARGS.data_pad_size_multiplier)
        tokens = torch.cat([*sequences, torch.zeros(lengths[-1], dtype=torch.int64)])[None]
        of_token = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        mask = (of_token[:, None] != of_token) | torch.ones(len(of_token), len(of_token)).triu(1).bool()
        if self.replays and os.environ["ROUTING_REPLAY_STAGE"] != "fallthrough":
            for router in self.layers:
                router.router_replay.set_target_indices(router.routing_replay.pop_forward().long())
                router.router_replay.set_router_replay_action(tiny_gpt.RouterReplayAction.REPLAY_FORWARD)
        elif self.replays:
            for router in self.layers:
                router.router_replay.clear_router_replay_action()
        positions = torch.arange(len(of_token))[None]
        # Inside each sequence, so that no loss depends on which sequences are its neighbors.
        labels = torch.cat([*(each.roll(-1) for each in sequences), torch.zeros(lengths[-1], dtype=torch.int64)])[None]
        out = model(tokens, positions, mask[None, None], labels=labels)

        def summed(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            if shift := READING.get():
                gamma = shift_of_micro_batch(shift, [len(each) // 2 for each in sequences])
                self.gamma.append([float(gamma.min()), float(gamma.max())])
            loss = losses.float()[:, : sum(lengths[:-1])].sum() / 100
            return loss, {"loss": loss.detach().clone()}

        return out, summed


def replay_class(package: str) -> Any:
    module = "slime.utils.routing_replay" if package == "slime" else "miles.utils.replay_base"
    return import_module(module).RoutingReplay if package == "slime" else import_module(module).Replay


def batch(package: str, number: int) -> tuple[Any, list[int]]:
    """This rank's part of a rollout: the package's schedule and iterator, and routes of its rows."""
    draw = np.random.default_rng(number)
    tokens = [torch.from_numpy(draw.integers(0, tiny_gpt.VOCABULARY, size)) for size in draw.integers(12, 40, SAMPLES)]
    parallel = {"dp_size": dist.get_world_size(), "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    partitions, indices, counts, _ = import_module(f"{package}.utils.dp_schedule").build_dp_schedule(
        ARGS,
        parallel,
        [len(each) for each in tokens],
        global_batch_size=SAMPLES // UPDATES,
        rollout_indices=list(range(SAMPLES)),
    )
    rank = dist.get_rank()
    mine = {"tokens": [tokens[sample] for sample in partitions[rank]], "micro_batch_indices": indices[rank]}
    where = "megatron_utils" if package == "slime" else "training_utils"
    iterator = import_module(f"{package}.backends.{where}.data").DataIterator
    data = iterator(rollout_data=mine, micro_batch_indices=indices[rank])
    chosen = torch.Generator().manual_seed(100 * number + rank)
    sizes = [sum(len(mine["tokens"][sample]) for sample in each) for each in indices[rank]]
    liking = (torch.arange(tiny_gpt.NUM_EXPERTS, 0, -1.0) ** 2).expand(2, -1)
    data.routes = []
    for size in sizes:
        rows = size + -size % ARGS.data_pad_size_multiplier
        drawn = [torch.multinomial(liking, 2, generator=chosen) for _ in range(rows)]
        data.routes.append(torch.stack(drawn).int())
    return data, counts


def sent_to_engines(package: str, loop: Loop) -> list[torch.Tensor]:
    """What the package's own class sends to rollout engines on other GPUs, from the model: one tensor of every rank's
    experts, under no name. What stands in are Ray, the conversion to Hugging Face's names, and the engines."""
    where = f"{package}.backends.megatron_utils.update_weight.update_weight_from_distributed"
    sender = import_module(where if package == "slime" else f"{where}.broadcast")
    reader = import_module(where if package == "slime" else f"{where}.mixin")
    for parameter in loop.run.gpt.parameters():  # as Megatron-LM's get_model does
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    ep, one = parallel_state.get_expert_model_parallel_group(), Namespace(size=1, rank=0, group=None)
    here = Namespace(ep=Namespace(size=ep.size(), rank=ep.rank(), group=ep), etp=one, tp=one, intra_dp_cp=one)
    updater = sender.UpdateWeightFromDistributed(ARGS, loop.run.models, dict, model_name="", quantization_config=None)
    updater.rollout_engines, updater._is_pp_src_rank, updater._group_name = [], True, ""
    sent: list[torch.Tensor] = []

    def send(chunk: list[tuple[str, torch.Tensor]], pbar: Any = None) -> None:
        sent.extend(value.clone() for _, value in chunk)

    updater._update_bucket_weights_from_distributed = updater._update_weight_implementation = send
    known: dict[str, Any] = {"ray": MagicMock(), "convert_to_hf": lambda args, model, name, value, _: [(name, value)]}
    known["get_gloo_group"] = lambda: dist.group.WORLD
    patched = {name: value for name, value in known.items() if hasattr(reader, name)}
    with patch.multiple(reader, **patched), patch("torch.cuda.current_device", lambda: "cpu"):
        if package == "miles":
            common = import_module("miles.backends.megatron_utils.update_weight.common")
            common.ray = known["ray"]  # type: ignore[attr-defined]
            import_module("miles.backends.training_utils.parallel").set_parallel_state(here)
        updater.update_weights()
    return sent


def modules_of(package: str) -> Iterator[tuple[str, Any]]:
    """Stand-ins of the modules that need Megatron-LM or a GPU, and of packages that their imports name."""
    groups = import_module(f"{package}.utils.reloadable_process_group").ReloadableProcessGroup
    utils = f"{package}.backends.megatron_utils"
    model, actor = types.ModuleType(f"{utils}.model"), types.ModuleType(f"{utils}.actor")
    model.get_forward_backward_func = get_forward_backward_func  # type: ignore[attr-defined]
    actor.reload_process_groups = groups.reload_process_groups  # type: ignore[attr-defined]
    for name in ("save", "save_hf_model_to_path", "load_checkpoint"):
        setattr(actor, name, lambda *_: None)
    yield f"{utils}.model", model
    yield f"{utils}.actor", actor


def whole_loop(package: str, worker: Any, *, replays: bool, told: Mapping[str, str] = TOLD) -> dict[str, Any]:
    sys.path.insert(0, str(Path(os.environ["FRAMEWORK_SOURCES"], package)))
    sys.meta_path.insert(0, Absent())
    if package == "slime":
        device = MagicMock()
        device.current_device.return_value, device.mem_get_info.return_value = "cpu", (2**40, 2**40)
        device.memory_allocated.return_value = device.memory_reserved.return_value = 0
        import_module("slime.utils.accelerator")._backend = lambda: device
    groups = import_module(f"{package}.utils.reloadable_process_group")
    if package == "slime":
        groups.register_default_process_group(timedelta(seconds=60))
    groups.monkey_patch_torch_dist()
    for module in ("tensor_parallel.mappings", "distributed.param_and_grad_buffer"):  # which slime imports after it
        bound: Any = import_module(f"megatron.core.{module}")
        bound.dist_all_gather_func, bound.dist_reduce_scatter_func = (
            dist.all_gather_into_tensor,
            dist.reduce_scatter_tensor,
        )
        bound._coalescing_manager = dist._coalescing_manager
    empty = torch.empty_like

    def pageable(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)

    found: dict[str, Any] = {"package": package}
    version = patch.object(Framework, "version", lambda _: "a checkout")
    with patch.dict(sys.modules, dict(modules_of(package))), version, patch.object(torch, "empty_like", pageable):
        model = sys.modules[f"{package}.backends.megatron_utils.model"]
        copies, sent = [], []
        loss = "moe_rl.frameworks.slime.losses.policy_loss_function"
        args = Namespace(**vars(ARGS), **({"custom_loss_function_path": loss} if "MOE_RL_ROUTER_SHIFT" in told else {}))
        with tiny_gpt.parallel(dist.get_world_size()), patch.dict(os.environ, told):
            for name in ("plain", "balanced"):
                if name == "balanced":
                    worker.init(args)
                loop = Loop(package, model, replays=replays)
                for number in range(ROLLOUTS):
                    loop.rollout(number, worker if name == "balanced" else None)
                found[name] = loop.curve
                copies.append({key: value.clone() for key, value in loop.backups.get("actor").items()})
                sent.append(sent_to_engines(package, loop))
            balancer = worker.run.balancer
            away = balancer.placement.home_rank != balancer.megatron_placement.home_rank
            found |= {"metrics": loop.metrics, "moved": int(away.sum()), "wrappers": len(all_groups(groups))}
            found["gamma"] = loop.gamma
    pairs = [(value, copies[1][key]) for key, value in copies[0].items()]
    found["sent"] = [len(each) for each in sent]
    found["apart"], found["sent_apart"] = (
        max(float((one - other).abs().max() / one.abs().max()) for one, other in each)
        for each in (pairs, list(zip(*sent, strict=True)))
    )
    return found


def all_groups(groups: Any) -> list[Any]:
    known = groups.ReloadableProcessGroup.GROUPS
    return list(known.get(os.getpid(), []))


def slime_without_replay() -> dict[str, Any]:
    return whole_loop("slime", slime.WORKER, replays=False)


def slime_packed() -> dict[str, Any]:
    return whole_loop("slime", slime.WORKER, replays=False, told=TOLD | BY_TIME)


def miles_packed() -> dict[str, Any]:
    return whole_loop("miles", miles.WORKER, replays=False, told=TOLD | BY_TIME)


def slime_with_replay() -> dict[str, Any]:
    return whole_loop("slime", slime.WORKER, replays=True)


def miles_without_replay() -> dict[str, Any]:
    return whole_loop("miles", miles.WORKER, replays=False)


def miles_with_replay() -> dict[str, Any]:
    return whole_loop("miles", miles.WORKER, replays=True)


def slime_with_router_shift() -> dict[str, Any]:
    worker = replace(slime.WORKER, settings=None, run=None, step=None)
    return whole_loop("slime", worker, replays=True, told=TOLD | {"MOE_RL_ROUTER_SHIFT": "0.001"})


def miles_with_router_shift() -> dict[str, Any]:
    worker = replace(miles.WORKER, settings=None, run=None, step=None)
    return whole_loop("miles", worker, replays=False, told=TOLD | {"MOE_RL_ROUTER_SHIFT": "0.001"})
