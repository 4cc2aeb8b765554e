"""Cases of test_checkpoint.py: a checkpoint saved while experts are reordered is a plain Megatron checkpoint."""

import contextlib
import hashlib
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import tiny_gpt
import torch
import torch.distributed as dist
from attach_cases import refusal
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from reorder_cases import distance, expert_tensors, random_placement, routes_of

from moe_rl.megatron import Balancer, BalancerConfig, attach, guards, restore_placement, save_placement
from moe_rl.megatron.checkpoint import FILE_NAME, resized

BEFORE, AFTER = 2, 2
DISTRIBUTED = ("fully_reshardable", "dp_reshardable")
"""Megatron's dist-checkpointing, with the optimizer's state by parameter, and by bucket as it lies in memory."""
LEGACY = "torch"
"""One file per (tensor, pipeline, expert) parallel rank, and one with the optimizer's state beside it."""


def save(run: tiny_gpt.Run, folder: str, kind: str) -> None:
    path = Path(folder) / kind
    if dist.get_rank() == 0:
        path.mkdir()
    dist.barrier()
    if kind == LEGACY:
        if parallel_state.get_expert_data_parallel_rank() == 0:
            state = {"model": run.gpt.state_dict_for_save_checkpoint(), "optimizer": run.optimizer.state_dict()}
            torch.save(state, path / f"{legacy_name()}.pt")
        run.optimizer.save_parameter_state(str(path / f"{legacy_name()}.optimizer.pt"))
        dist.barrier()
    else:
        dist_checkpointing.save(sharded(run, kind, loading=False), str(path))


@torch.no_grad()  # Megatron forgets it for state by bucket, where an fp32 model's masters are its weights
def load(run: tiny_gpt.Run, folder: str, kind: str) -> None:
    path = Path(folder) / kind
    with loading_into_torchs_adam(run.optimizer):
        if kind == LEGACY:
            state = torch.load(path / f"{legacy_name()}.pt", weights_only=False)
            run.gpt.load_state_dict(state["model"])
            run.optimizer.load_state_dict(state["optimizer"])
            run.optimizer.load_parameter_state(str(path / f"{legacy_name()}.optimizer.pt"))
        else:
            state = dist_checkpointing.load(sharded(run, kind, loading=True), str(path))
            run.gpt.load_state_dict(state["model"])
            run.optimizer.load_state_dict(state["optimizer"])


@contextlib.contextmanager
def loading_into_torchs_adam(optimizer: Any) -> Iterator[None]:
    """Let Megatron load a checkpoint into torch's Adam, which keeps `step` per parameter; it has stepped before."""
    set_state = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: DistributedOptimizer, parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        # Megatron has set `step` by now but asks for it again.
        loaded = {name: tensor for name, tensor in tensors.items() if name != "step"}
        set_state(self, parameter, {**self._get_main_param_and_optimizer_states(parameter), **loaded})

    with patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", with_step):
        yield
    for one in optimizer.chained_optimizers:
        for values in one.optimizer.state.values():
            if "step" in values:  # of a parameter that this rank holds a shard of
                values["step"] = values["step"].clone()  # Megatron gives all one tensor, which Adam counts up


def legacy_name() -> str:
    tensor, pipeline = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    return f"{tensor}-{pipeline}-{parallel_state.get_expert_model_parallel_rank()}"


def sharded(run: tiny_gpt.Run, kind: str, *, loading: bool) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": kind, "distrib_optim_fully_reshardable_mem_efficient": False}
    model = run.gpt.sharded_state_dict()
    return {"model": model, "optimizer": run.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)}


def train(run: tiny_gpt.Run, start: int, stop: int) -> dict[str, list[float]]:
    curve = tiny_gpt.history()
    for step in range(start, stop):
        tiny_gpt.update(run, step, routes_of(step), curve)
    return curve


def with_state() -> tiny_gpt.Run:
    """A model one step from its start: without Apex and TE Megatron's optimizer loads only over state that is there."""
    run = tiny_gpt.build()
    train(run, 9, 10)
    return run


def attached(run: tiny_gpt.Run) -> Balancer:
    return attach([run.model], run.optimizer, BalancerConfig(policy="static"))


def shared_folder() -> str:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    return str(folder[0])


def resumed(folder: str, kind: str) -> dict[str, list[float]]:
    """The curve of plain Megatron after it has loaded the checkpoint."""
    run = with_state()
    load(run, folder, kind)
    return train(run, BEFORE, BEFORE + AFTER)


def resumed_reordered(folder: str) -> tuple[dict[str, list[float]], Any]:
    """The curve of a run that loads a checkpoint while its experts are elsewhere, then takes the saved placement."""
    run = with_state()
    balancer = attached(run)
    balancer.reorder(random_placement(balancer, 77))
    with balancer.canonical():
        load(run, folder, "fully_reshardable")
    assert restore_placement(balancer, folder)
    return train(run, BEFORE, BEFORE + AFTER), balancer.placement.home_rank.tolist()


def saved_while_reordered() -> dict[str, Any]:
    """A checkpoint in every format, from a reordered run at EP 2 with expert-DP 2; and who can go on from it."""
    folder, plain_folder = shared_folder(), shared_folder()
    found: dict[str, Any] = {}
    with tiny_gpt.parallel(2):
        plain = tiny_gpt.build()
        train(plain, 0, BEFORE)
        save(plain, plain_folder, "fully_reshardable")
        run = tiny_gpt.build()
        balancer = attached(run)
        for step in range(BEFORE):
            balancer.reorder(random_placement(balancer, step))
            train(run, step, step + 1)
        saved = balancer.placement
        with balancer.canonical():
            for kind in (*DISTRIBUTED, LEGACY):
                save(run, folder, kind)
        save_placement(balancer, folder)
        save_placement(balancer, plain_folder)
        evaluated = tiny_gpt.forward_backward(plain, 9, routes_of(9), forward_only=True)
        found["plain"] = train(plain, BEFORE, BEFORE + AFTER)
        found["curves"] = {
            "still_reordered": train(run, BEFORE, BEFORE + AFTER),
            **{f"{kind}_at_ep2": resumed(folder, kind) for kind in (*DISTRIBUTED, LEGACY)},
        }
        found["curves"]["reordered_from_its_own"], same_homes = resumed_reordered(folder)
        found["curves"]["reordered_from_plain"], _ = resumed_reordered(plain_folder)
        found["homes_kept"] = same_homes == saved.home_rank.tolist()
    with tiny_gpt.parallel(4):
        found["curves"]["fully_reshardable_at_ep4"] = resumed(folder, "fully_reshardable")
        found["curves"]["reordered_at_ep4"], homes = resumed_reordered(folder)
        found["homes_resized"] = homes == resized(saved, ep_size=4).home_rank.tolist()
    with tiny_gpt.parallel(1):
        # Megatron cannot load the optimizer's state here: a parameter of experts becomes one of the dense model.
        run = tiny_gpt.build()
        weights = run.gpt.sharded_state_dict()
        run.gpt.load_state_dict(dist_checkpointing.load({"model": weights}, f"{folder}/fully_reshardable")["model"])
        found["loss_at_ep1"] = [evaluated, tiny_gpt.forward_backward(run, 9, routes_of(9), forward_only=True)]
    return found


class AutoBridge:
    """Goes through parameters by attribute, as Megatron-Bridge's does (models/conversion/auto_bridge.py)."""

    def export_hf_weights(self, model: list[Any], cpu: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        for chunk in model:
            yield from tiny_gpt.gpt_of(chunk).named_parameters()

    def export_adapter_weights(self, model: list[Any], cpu: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        return self.export_hf_weights(model, cpu)

    def save_hf_weights(self, model: list[Any], path: str) -> None:
        list(self.export_hf_weights(model))

    def load_hf_weights(self, model: list[Any], hf_path: str | None = None) -> None:
        list(self.export_hf_weights(model))


def named_params_and_buffers(args: Any, model: Any, convert_to_global_name: bool = True) -> Any:
    """As slime's and miles' (backends/megatron_utils/update_weight/common.py)."""
    return (each for chunk in model for each in chunk.named_parameters())


def walkers() -> dict[str, Any]:
    """Stand-ins of the packages that walk parameters, imported as they would be; and one that took a name of theirs."""
    bridge = types.ModuleType("megatron.bridge.models.conversion.auto_bridge")
    vars(bridge)["AutoBridge"] = type("AutoBridge", (AutoBridge,), dict(vars(AutoBridge)))
    modules = {bridge.__name__: bridge}
    for package in ("slime", "miles"):
        common = types.ModuleType(f"{package}.backends.megatron_utils.update_weight.common")
        user = types.ModuleType(f"{package}_update")
        walker = types.FunctionType(named_params_and_buffers.__code__, globals(), argdefs=(True,))
        vars(common)["named_params_and_buffers"] = vars(user)["named_params_and_buffers"] = walker
        modules |= {module.__name__: module for module in (common, user)}
    return modules


def outside_canonical() -> dict[str, Any]:
    """What every way of saving and loading says while experts are elsewhere, and whether it works before and inside."""
    guards.guard_walkers.cache_clear()
    with tiny_gpt.parallel(2), patch.dict(sys.modules, walkers()):
        return doors()


def doors() -> dict[str, Any]:
    """Every row of the table in `moe_rl.megatron.guards`."""
    found: dict[str, Any] = {"said": {}, "works": []}
    bridge: Any = sys.modules["megatron.bridge.models.conversion.auto_bridge"]
    slime: Any = sys.modules["slime_update"]
    miles: Any = sys.modules["miles_update"]
    folder = shared_folder()
    run = with_state()
    balancer = attached(run)
    state = {name: value.clone() for name, value in run.gpt.state_dict().items() if value is not None}
    one_expert = run.gpt.decoder.layers[0].mlp.experts.local_experts[0]
    of_expert = {name: value.clone() for name, value in one_expert.state_dict().items() if value is not None}
    of_optimizer, at_home = run.optimizer.state_dict(), run.gpt.sharded_state_dict()
    how = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}
    ways: dict[str, Callable[[], Any]] = {
        "state_dict": run.gpt.state_dict,
        "wrapped": run.model.state_dict_for_save_checkpoint,
        "sharded_state_dict": run.gpt.sharded_state_dict,
        "distributed": lambda: save(run, shared_folder(), "fully_reshardable"),
        "torch": lambda: save(run, shared_folder(), LEGACY),
        "load": lambda: run.gpt.load_state_dict(state, strict=False),
        "experts": run.gpt.decoder.layers[0].mlp.experts.state_dict,
        "one_expert": run.gpt.decoder.layers[0].mlp.experts.local_experts[0].state_dict,
        "one_linear": run.gpt.decoder.layers[0].mlp.experts.local_experts[0].linear_fc1.state_dict,
        "load_expert": lambda: one_expert.load_state_dict(of_expert),
        "optimizer": lambda: run.optimizer.save_parameter_state(f"{folder}/{dist.get_rank()}.pt"),
        "one_optimizer": lambda: run.optimizer.chained_optimizers[-1].sharded_state_dict(at_home, metadata=how),
        "load_optimizer": lambda: run.optimizer.load_state_dict(of_optimizer),
        "bridge": lambda: list(bridge.AutoBridge().export_hf_weights(run.models, cpu=True)),
        "bridge_adapters": lambda: list(bridge.AutoBridge().export_adapter_weights(run.models)),
        "bridge_save": lambda: bridge.AutoBridge().save_hf_weights(run.models, "nowhere"),
        "bridge_load": lambda: bridge.AutoBridge().load_hf_weights(model=run.models),
        "slime": lambda: list(slime.named_params_and_buffers(None, run.models)),
        "miles": lambda: list(miles.named_params_and_buffers(None, run.models)),
    }

    def works() -> list[str]:
        return [name for name, way in ways.items() if not refusal(way)]

    found["works"].append(works())
    balancer.reorder(random_placement(balancer, 5))
    found["said"] = {name: refusal(way) for name, way in ways.items()}
    found["open"] = len(list(run.gpt.named_parameters())), len(list(run.gpt.named_buffers()))
    with balancer.canonical():
        found["works"].append(works())
    with balancer.canonical(weights_only=True):
        found["state_away"] = [name for name, way in ways.items() if refusal(way)]
    # Made outside, walked inside: what an adapter may do with an exporter's iterator.
    exported = bridge.AutoBridge().export_hf_weights(run.models)
    with balancer.canonical(weights_only=True):
        found["exported"] = len(list(exported))
    run.optimizer.zero_grad()
    found["trains"] = refusal(lambda: train(run, 1, 2))
    balancer.reorder(balancer.megatron_placement)
    balancer.detach()
    found["works"].append(works())
    found["names"] = len(list(run.gpt.named_parameters()))
    return found


def exported(run: tiny_gpt.Run) -> dict[str, str]:
    """The hash of every expert of every layer, by the name that an exporter would give it."""
    mine = {}
    for layer in run.gpt.decoder.layers:
        for index, expert in zip(layer.mlp.local_expert_indices, layer.mlp.experts.local_experts, strict=True):
            weights = b"".join(p.detach().numpy().tobytes() for _, p in sorted(expert.named_parameters()))
            mine[f"layers.{layer.layer_number - 1}.experts.{index}"] = hashlib.sha256(weights).hexdigest()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: digest for each in everyone for name, digest in each.items()}


def unclipped() -> tiny_gpt.Run:
    """A model whose updates do not depend on the gradient norm, a sum whose order differs when experts move."""
    run = tiny_gpt.build()
    for one in (run.optimizer, *run.optimizer.chained_optimizers):
        one.config.clip_grad = 0.0
    return run


def weight_export() -> dict[str, Any]:
    """Weights exported from a run that reorders before every step, and what the export leaves behind."""
    with tiny_gpt.parallel(2):
        plain, run = unclipped(), unclipped()
        balancer = attached(run)
        found: dict[str, Any] = {"plain": [], "reordered": [], "moved": []}
        for step in range(3):
            balancer.reorder(random_placement(balancer, step))
            train(run, step, step + 1)
            train(plain, step, step + 1)
            found["plain"].append(exported(plain))
            found["moved"].append(exported(run))
            with balancer.canonical(weights_only=True):
                found["reordered"].append(exported(run))
        before = expert_tensors(run)
        with balancer.canonical(weights_only=True):
            inside = expert_tensors(run)
        after = expert_tensors(run)
        weights = len(inside) // 3  # one weight and two moments of every parameter
        return found | {
            "state_moved": distance(inside[weights:], before[weights:]),
            "weights_moved": distance(inside[:weights], before[:weights]),
            "left_behind": distance(after, before),
        }


def failed_way_back() -> dict[str, Any]:
    """The export is done, but a rank cannot bring the weights back; a later reorder repairs that."""

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise MemoryError("the export has taken it all")

    with tiny_gpt.parallel(2):
        run = with_state()
        balancer = attached(run)
        balancer.reorder(random_placement(balancer, 0))
        home, before = balancer.placement, expert_tensors(run)
        message = ""
        broken = patch("moe_rl.balancing.migrate._scratch", out_of_memory)
        try:
            with balancer.canonical(weights_only=True):
                if dist.get_rank():
                    broken.start()
        except RuntimeError as error:
            message = str(error)
        if dist.get_rank():
            broken.stop()
        apart = distance(expert_tensors(run), before)
        balancer.reorder(home)
        return {"message": message, "apart": apart, "repaired": distance(expert_tensors(run), before)}


def placement_files() -> dict[str, Any]:
    """What restore_placement does where there is no file, or a wrong one, on any rank's disk but rank 0's."""
    folder = shared_folder()
    with tiny_gpt.parallel(2):
        balancer = attached(tiny_gpt.build())

        def restored() -> bool:
            return restore_placement(balancer, folder)

        found: dict[str, Any] = {"missing": restored()}
        if dist.get_rank() == 0:  # a folder stands where the file belongs
            Path(folder, "taken", "moe_rl_placement.json").mkdir(parents=True)
        found["unwritable"] = refusal(lambda: save_placement(balancer, f"{folder}/taken"))
        save_placement(balancer, folder)
        found["own"] = restored()
        dist.barrier()
        if dist.get_rank() == 0:
            path = Path(folder) / FILE_NAME
            path.write_text(path.read_text().replace('"ep_size": 2', '"ep_size": 4'))
        found["damaged"] = refusal(restored)
        larger = attached(tiny_gpt.build(num_moe_experts=16))
        save_placement(larger, folder)
        found["other_model"] = refusal(restored)
        found["untouched"] = bool(np.array_equal(balancer.placement.home_rank, balancer.megatron_placement.home_rank))
    return found
