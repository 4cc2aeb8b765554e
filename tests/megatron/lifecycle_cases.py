"""Cases of test_lifecycle.py: a run whose framework gives memory and process groups away between two steps."""

import standins  # noqa: F401, I001 - before Megatron

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest.mock import patch

import deep_ep
import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import fused_a2a
from resident_cases import CONFIG, random_residents, routes_of

from moe_rl.balancing.pass_source import PassSource
from moe_rl.megatron import Balancer, BalancerConfig, attach

STEPS = 2


def groups_of_megatron() -> dict[str, Any]:
    """Every process group that Megatron's module of groups holds, by its name."""
    return {name: value for name, value in vars(parallel_state).items() if isinstance(value, dist.ProcessGroup)}


def rebuild_megatrons_groups(run: tiny_gpt.Run) -> None:
    """Destroy every group but the default one, ours among them, make Megatron's anew, and hand them out.

    That is what colocated frameworks do to give the connections' memory to the rollout; here every object of the model,
    of DDP and of the optimizer that held a group gets the new one.
    """
    before, sizes = groups_of_megatron(), run.config
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=sizes.expert_model_parallel_size, expert_tensor_parallel_size=1
    )
    after = groups_of_megatron()
    Handover({id(group): after[name] for name, group in before.items() if group is not dist.group.WORLD}).visit(
        [run.models, run.optimizer]
    )


class Handover:
    """Puts new objects in the place of old ones in everything that can be reached through attributes and containers."""

    def __init__(self, new_of: dict[int, Any]) -> None:
        self.new_of, self._seen = new_of, {id(self)}

    def visit(self, thing: Any) -> None:
        if id(thing) in self._seen or isinstance(thing, torch.Tensor | ModuleType | type | str | int | float):
            return
        self._seen.add(id(thing))
        if isinstance(thing, dict):
            self._replace(list(thing.items()), thing.__setitem__)
        elif isinstance(thing, list):
            self._replace(list(enumerate(thing)), thing.__setitem__)
        elif isinstance(thing, tuple):
            for each in thing:
                self.visit(each)
        elif hasattr(thing, "__dict__"):
            self._replace(list(vars(thing).items()), vars(thing).__setitem__)

    def _replace(self, items: list[tuple[Any, Any]], put: Callable[[Any, Any], None]) -> None:
        for key, value in items:
            if id(value) in self.new_of:
                put(key, self.new_of[id(value)])
            elif key != "_elastic":  # what is ours, we look after ourselves
                self.visit(value)


def step_of(balancer: Balancer, run: tiny_gpt.Run, step: int, curve: dict[str, list[float]]) -> None:
    """A reorder, a log-prob pass and an update."""
    balancer.reorder(random_residents(balancer, step))
    routes = routes_of(step)
    balancer.begin_pass(PassSource.replayed(routes), forward_only=True)
    with torch.no_grad():
        tiny_gpt.forward_backward(run, step, routes, forward_only=True)
    balancer.end_pass()
    balancer.begin_pass(PassSource.replayed(routes))
    tiny_gpt.update(run, step, routes, curve)
    balancer.end_pass()


def trained(
    between: Callable[[Balancer, tiny_gpt.Run], None], *, dispatcher: dict[str, Any] | None = None, **config: Any
) -> dict[str, list[float]]:
    run = tiny_gpt.build(overlap_grad_reduce=True, bucket_size=2000, **(dispatcher or {}))
    curve = tiny_gpt.history()
    balancer = attach(run.models, run.optimizer, BalancerConfig(**{**CONFIG, **config}))
    for step in range(STEPS):
        if step:
            between(balancer, run)
        step_of(balancer, run, step, curve)
    balancer.reorder(balancer.megatron_placement)
    balancer.detach()
    return curve


def away(balancer: Balancer, run: tiny_gpt.Run) -> None:
    """Everything goes and comes back."""
    balancer.offload()
    rebuild_megatrons_groups(run)
    balancer.rebuild_groups()
    balancer.onload()


def nothing(balancer: Balancer, run: tiny_gpt.Run) -> None:
    """The control."""


def offloaded() -> dict[str, Any]:
    """Curves with and without the interruption, of plain Megatron, and with experts that keep codes of their own."""
    grouped = {"experts": "grouped", "experimental": True}
    with tiny_gpt.parallel(2):
        plain = tiny_gpt.train(tiny_gpt.build(), steps=STEPS, micro_batches=3)
        found = {"plain": plain, "straight": trained(nothing), "grouped_straight": trained(nothing, **grouped)}
        found |= {"away": trained(away), "grouped_away": trained(away, **grouped)}
    return found


def hybridep() -> dict[str, Any]:
    """HybridEP's buffer belongs to Megatron's module and keeps the group that it was allocated for."""
    flex = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32", "moe_flex_dispatcher_backend": "hybridep"}
    buffers = []

    def away_with_buffer(balancer: Balancer, run: tiny_gpt.Run) -> None:
        buffers.append(fused_a2a._hybrid_ep_buffer)
        away(balancer, run)

    with deep_ep.any_float(), tiny_gpt.parallel(2):
        found: dict[str, Any] = {"straight": trained(nothing, dispatcher=flex)}
        found["away"] = trained(away_with_buffer, dispatcher=flex)
        buffers.append(fused_a2a._hybrid_ep_buffer)
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        found["of_this_group"] = [buffer.group is group for buffer in buffers]
        found["reallocations"] = [buffer.reallocations for buffer in buffers]
    return found


class Reloadable(dist.ProcessGroup):
    """A group that stands for another one, which can be destroyed and made anew behind it."""

    def __init__(self, ranks: Any, how: dict[str, Any]) -> None:
        self.made_of, self.group = (ranks, how), new_group(ranks, **how)
        super().__init__(max(0, dist.get_rank(self.group)), max(1, len(ranks)))

    def __getattribute__(self, name: str) -> Any:
        own = ("group", "made_of", "__class__", "__dict__")
        return object.__getattribute__(self, name) if name in own else getattr(self.group, name)


new_group = dist.new_group
UNWRAPPED = (
    "get_rank get_world_size get_backend get_global_rank get_process_group_ranks all_reduce all_gather broadcast"
)
UNWRAPPED += (
    " all_gather_into_tensor all_to_all_single reduce_scatter_tensor barrier all_gather_object _coalescing_manager"
)


@contextlib.contextmanager
def reloadable_groups() -> Iterator[list[Reloadable]]:
    """What slime does so that its groups can be destroyed around a rollout: `new_group` returns stand-ins for groups,
    and torch's functions look behind them; torch's own records know nothing of them."""
    made: list[Reloadable] = []

    def behind(value: Any) -> Any:
        return object.__getattribute__(value, "group") if type(value) is Reloadable else value

    def looking_behind(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: function(*map(behind, given), **{k: behind(v) for k, v in named.items()})

    def wrapped(ranks: Any = None, *given: Any, **how: Any) -> Any:
        if how.get("backend") == "gloo" or ranks is None or len(ranks) == 1:
            return new_group(ranks, *given, **how)
        made.append(Reloadable(ranks, how))
        return made[-1]

    p2p = dist.P2POp.__init__, dist.P2POp.__new__
    with contextlib.ExitStack() as stack:
        for name in UNWRAPPED.split():
            stack.enter_context(patch.object(dist, name, looking_behind(getattr(dist, name))))
        stack.enter_context(patch.object(dist, "new_group", wrapped))
        stack.enter_context(patch.object(dist.P2POp, "__init__", looking_behind(p2p[0])))
        stack.enter_context(patch.object(dist.P2POp, "__new__", looking_behind(p2p[1])))
        yield made


def reloaded() -> dict[str, Any]:
    """The same, where groups are destroyed and made anew behind objects that stay."""

    def away_behind(balancer: Balancer, run: tiny_gpt.Run) -> None:
        balancer.offload()
        for each in made:
            dist.destroy_process_group(object.__getattribute__(each, "group"))
        for each in made:
            ranks, how = each.made_of
            each.group = new_group(ranks, **how)
        balancer.rebuild_groups()
        balancer.onload()

    with tiny_gpt.parallel(2):
        straight = trained(nothing)
    with reloadable_groups() as made, tiny_gpt.parallel(2):
        return {"straight": straight, "away": trained(away_behind), "groups": len(made)}


def warmed() -> dict[str, Any]:
    """The groups that somebody has used before the first message between two ranks: all that the balancer uses."""
    used: list[str] = []
    all_reduce = dist.all_reduce

    def noted(tensor: torch.Tensor, *given: Any, group: Any = None, **how: Any) -> Any:
        used.append("" if group is None else group.group_name)
        return all_reduce(tensor, *given, group=group, **how)

    found: dict[str, Any] = {}
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        with patch.object(dist, "all_reduce", noted):
            balancer = attach(run.models, run.optimizer, BalancerConfig(**CONFIG))
            found["attached"] = unused(balancer, used)
            used.clear()
            balancer.offload()
            rebuild_megatrons_groups(run)
            balancer.rebuild_groups()
            balancer.onload()
            found["rebuilt"] = unused(balancer, used)
            used.clear()
            balancer.rebuild_groups()
            found["connected_again"] = unused(balancer, used)
        groups = len(dist.distributed_c10d._world.pg_map)
        balancer.detach()
        found["given_back"] = groups - len(dist.distributed_c10d._world.pg_map)
    return found


def unused(balancer: Balancer, used: list[str]) -> list[str]:
    groups = balancer._run_layers.groups
    names = {name: getattr(groups, name).group_name for name in ("ep", "expert_dp", "replicas", "grid_group")}
    return [name for name, group in names.items() if group not in used]


def refusals() -> dict[str, str]:
    """In the middle of a pass nothing can be given away."""
    found = {}
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        balancer = attach(run.models, run.optimizer, BalancerConfig(**CONFIG))
        balancer.begin_pass(PassSource.replayed(routes_of(0)))
        for name in ("offload", "rebuild_groups"):
            try:
                getattr(balancer, name)()
            except ValueError as error:
                found[name] = str(error)
        balancer.end_pass()
        balancer.offload()
        try:
            balancer.begin_pass(PassSource.replayed(routes_of(0)))
        except ValueError as error:
            found["begin_pass"] = str(error)
    return found
