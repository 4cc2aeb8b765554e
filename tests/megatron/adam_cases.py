"""Cases of test_adam.py: Adam state that lies on the host or in other types moves with its expert."""

import standins  # noqa: F401, I001 - before Megatron

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from reorder_cases import SMALL, random_placement, routes_of
from torch.overrides import TorchFunctionMode

from moe_rl.balancing.schedule import home_experts
from moe_rl.core.errors import InvalidInputError
from moe_rl.megatron import Balancer, BalancerConfig, attach, expert_state

STEPS = 2
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
OFFLOADED = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True, "pin_cpu_grads": False}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "offloaded": {**OFFLOADED, "optimizer_offload_fraction": 1.0},
    "half_offloaded": {**OFFLOADED, "optimizer_offload_fraction": 0.5},
    "precision_aware_offloaded": {
        **OFFLOADED,
        "optimizer_offload_fraction": 0.5,
        "use_precision_aware_optimizer": True,
    },
    "precision_aware": {"use_precision_aware_optimizer": True, "store_param_remainders": False},
    "remainders": {"use_precision_aware_optimizer": True, "store_param_remainders": True},
    "narrow_moments": {
        "use_precision_aware_optimizer": True,
        "store_param_remainders": True,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    },
}


class _HostIsNotDevice(TorchFunctionMode):
    """Where all tensors are the host's: what comes from `Tensor.cpu` is on the host, everything else is on a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not getattr(args[0], "on_host", False)
        if func is torch.Tensor.pin_memory:
            return args[0]
        result = args[0].clone() if func is torch.Tensor.cpu else func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and (func is torch.Tensor.cpu or getattr(args[0], "on_host", False)):
            result.on_host = True  # type: ignore[attr-defined]
        return result


@contextlib.contextmanager
def host_and_device() -> Iterator[None]:
    """Megatron's HybridDeviceOptimizer tells parameters of a device from its own copies on the host, on CPU alone."""
    share = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def shared(self: Any, offload_fraction: float) -> Any:
        with _HostIsNotDevice():
            return share(self, offload_fraction)

    with patch.object(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", shared):
        yield


def whole_experts(run: tiny_gpt.Run, balancer: Balancer) -> dict[str, np.ndarray]:
    """Weights and state of every expert of every layer by its logical id, put together from all ranks' pieces.

    What a mirror has otherwise is not a number, and so equal to nothing.
    """
    groups, state = balancer._run_layers.groups, expert_state.ExpertOptimizerState(run.optimizer)
    experts = home_experts(balancer.placement).reshape(len(balancer._states), groups.ep_size, -1)[:, groups.place[1]]
    mine = []
    for layer in balancer._states:
        for slot, expert in enumerate(experts[layer.layer].tolist()):
            for index, parameter in enumerate(layer.experts.parameters_of(slot)):
                name = f"{layer.layer}.{expert}.{index}"
                mine.append((f"{name}.weight", 0, parameter.numel(), parameter.detach().float().flatten().numpy()))
                start, stop = state.shards(parameter)[groups.place[0]]
                for number, (tensor, *mirrors) in enumerate(state.tensors(parameter)):
                    agree = all(torch.equal(tensor, mirror) for mirror in mirrors)
                    values = tensor.double() if agree else torch.full_like(tensor, float("nan")).double()
                    mine.append((f"{name}.{number}", start, parameter.numel(), values[: stop - start].numpy()))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found: dict[str, np.ndarray] = {}
    for name, start, numel, values in (piece for rank in everyone for piece in rank):
        whole = found.setdefault(name, np.full(numel, np.nan))
        whole[start : start + len(values)] = values
    return found


def differing(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> list[str]:
    """Names of what has other bits, or is missing, or was never complete."""
    return [
        name
        for name in before.keys() | after.keys()
        if name not in before or name not in after or not np.array_equal(before[name], after[name])
    ]


def compare(adam: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Training with a reorder before every step, also the first; what every reorder left different of any expert."""
    changes |= {"num_moe_experts": SMALL["num_experts"], "num_layers": SMALL["num_layers"]}
    with host_and_device(), tiny_gpt.parallel(2):
        plain = tiny_gpt.train(tiny_gpt.build(adam=adam, **changes), steps=STEPS, micro_batches=2, **SMALL)
        run, curve = tiny_gpt.build(adam=adam, **changes), tiny_gpt.history()
        balancer = attach(run.models, run.optimizer, BalancerConfig(policy="static", placement_bitwise=True))
        left, kept = [], []
        for step in range(STEPS):
            before = whole_experts(run, balancer)
            balancer.reorder(random_placement(balancer, step))
            after = whole_experts(run, balancer)
            left.append(differing(before, after))
            kept.append(len({name.split(".", 3)[3] for name in after}))
            tiny_gpt.update(run, step, routes_of(step, **SMALL), curve)
        optimizers = [type(one.optimizer).__name__ for one in run.optimizer.chained_optimizers]
    return {"plain": plain, "curve": curve, "left": left, "kept": kept, "optimizers": optimizers}


for _name, _adam in OPTIMIZERS.items():
    globals()[_name] = functools.partial(compare, _adam, **BF16)


def master_left_behind() -> dict[str, Any]:
    """The fault: an offloaded master is taken for Megatron's own."""
    tensors = expert_state.ExpertOptimizerState.tensors

    def without_host(self: Any, parameter: torch.nn.Parameter) -> Any:
        return [places[-1:] for places in tensors(self, parameter)]

    with host_and_device(), tiny_gpt.parallel(2):
        run = tiny_gpt.build(adam=OPTIMIZERS["offloaded"], **BF16)
        balancer = attach(run.models, run.optimizer, BalancerConfig(policy="static"))
        before = whole_experts(run, balancer)
        with patch.object(expert_state.ExpertOptimizerState, "tensors", without_host):
            balancer.reorder(random_placement(balancer, 0))
        return {"left": len(differing(before, whole_experts(run, balancer)))}


def scaled_state() -> dict[str, str]:
    """State that is scaled tensor by tensor."""
    found = {}
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        balancer = attach(run.models, run.optimizer, BalancerConfig(policy="static"))
        run.optimizer.chained_optimizers[0].config.use_precision_aware_optimizer = True
        for option in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"):
            config = run.optimizer.chained_optimizers[0].config
            setattr(config, option, torch.float16)
            try:
                balancer.reorder(random_placement(balancer, 0))
            except InvalidInputError as error:
                found[option] = str(error)
            setattr(config, option, torch.float32)
    return found
