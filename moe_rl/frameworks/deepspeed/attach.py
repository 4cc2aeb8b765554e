"""DeepSpeed AutoEP: replay, replicas and reordered experts under ZeRO 0, 1 and 2, no Megatron.

from moe_rl.frameworks.deepspeed.attach import attach    # before deepspeed.initialize

engine, *_ = deepspeed.initialize(model=model, config={"expert_parallel": {"enabled": True, "autoep_size": 8}, ...})
balancer = attach(engine, BalancerConfig(replica_slots=1))

balancer.begin_pass(PassSource.replayed(routes))    # one [B, S, L, K] array per micro-batch, -1 if unknown; or
sequences = [SequenceRows.of_padded(batch["input_ids"], batch["attention_mask"]) for batch in micro_batches]
balancer.begin_pass(PassSource.expected(sequences))
...                                   # engine(...), engine.backward(loss), engine.step() of an accumulation cycle
metrics = balancer.end_pass()

The layers are DeepSpeed's own over slots instead of experts: its split plan, permutation, exchange and combination run
on slot ids, its grouped experts run twice, on the parameters and on the weights that were pushed.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.common_facts import require_in_common
from moe_rl.balancing.config import BalancerConfig
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.post_import import wrap
from moe_rl.frameworks.deepspeed.contract import FRAMEWORK
from moe_rl.frameworks.deepspeed.state import AutoEpExperts, why_fixed
from moe_rl.frameworks.deepspeed.traps import let_registry_take_names
from moe_rl.frameworks.ep_balancer import EpBalancer, EpGroups, require_supported
from moe_rl.frameworks.ep_exchange import Weights, forward_of, parameters_of, replicated
from moe_rl.frameworks.ep_layer import LayerRun
from moe_rl.frameworks.ranks import announce, require_distributed
from moe_rl.huggingface import model_of_config
from moe_rl.replay.hf_recorder import record_routing

try:
    import deepspeed
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from deepspeed.moe.ep_count import count_tokens_per_expert
except ImportError as error:
    raise InvalidInputError(f"DeepSpeed's AutoEP cannot be imported: {error}.") from error

let_registry_take_names()

# Methods of the engine that take every expert to be where DeepSpeed put it.
HOME_METHODS = ("save_checkpoint", "load_checkpoint", "save_16bit_model")


def attach(engine: Any, config: BalancerConfig, *, replay: bool = True) -> EpBalancer:
    """Balance the AutoEP layers of what `deepspeed.initialize` returned; a collective of all ranks.

    With `replay` the routers choose what `begin_pass` is given, where it is known; their scores and gradients stay
    their own. Checkpoints are saved and loaded with every expert where DeepSpeed put it, from then on. Raises
    `InvalidInputError` where the engine cannot be balanced.
    """
    require_distributed("expert parallelism")
    version = FRAMEWORK.check()
    require_supported(config, "reorder_scratch_bytes", "steps_served", "history_steps", "reorders")
    require(
        isinstance(engine, deepspeed.DeepSpeedEngine),
        f"attach needs the engine that deepspeed.initialize returns, but got a {type(engine).__name__}.",
    )
    modules = [module for module in engine.module.modules() if isinstance(module, AutoEPMoELayer)]
    _require_supported_engine(engine, modules)
    spec, _ = model_of_config(engine.module.config.to_dict(), where=type(engine.module).__name__)
    require(
        len(modules) == spec.num_moe_layers,
        f"the engine has {len(modules)} AutoEP layers, but the model's configuration has {spec.num_moe_layers} MoE "
        "layers.",
    )
    require_in_common(config, {f"the version of {FRAMEWORK.name}": version, "replay": replay})
    clock = MicroBatchClock(engine.module)
    layers = [SlotsLayer(module, LayerRun(index=index, clock=clock)) for index, module in enumerate(modules)]
    groups = EpGroups.of(modules[0].ep_group, device=next(engine.module.parameters()).device)
    of_router = {module.module.router: module for module in layers}
    # The methods below join this list when there is a balancer for them to ask.
    undo: list[Callable[[], None]] = [module.release for module in layers]
    runs, fixed = [module.run for module in layers], why_fixed(engine)

    def release() -> None:
        for restore in undo:
            restore()

    balancer = EpBalancer(
        runs,
        clock=clock,
        groups=groups,
        # The router returns slots by now: the experts behind them are what it chose.
        recorder=functools.partial(
            record_routing,
            engine.module,
            read_output=lambda _, router, output: (output[0], of_router[router].chosen),
        ),
        release=release,
        movable=fixed or AutoEpExperts(engine.optimizer, modules, runs, groups),
        config=config,
        model=spec,
        replay=replay,
    )
    if not fixed:
        undo.extend(_at_home(engine, balancer, name) for name in HOME_METHODS)
        undo.append(engine.module.register_state_dict_pre_hook(functools.partial(_require_home, balancer)).remove)
    announce(FRAMEWORK.name, version, num_layers=len(layers), policy=config.policy)
    return balancer


class SlotsLayer:
    """Lets one AutoEP layer run over the slots of a plan, by its router and its experts."""

    def __init__(self, module: Any, run: LayerRun) -> None:
        self.module, self.run = module, run
        self.chosen: torch.Tensor
        """[T, K] experts of the run of the layer that is under way."""
        self._num_experts, self._num_homes = module.num_experts, module.num_local_experts
        self._route, self._compute = module.router.forward, module.experts.forward
        self._tokens_per_expert: torch.Tensor | None = None
        module.router.forward, module.experts.forward = self.route, self.compute
        self._left = module.register_forward_hook(self._leave, always_call=True)
        run.leave = self._leave  # Ctrl-C in the layer passes by the hook

    def route(self, rows: torch.Tensor, expert_bias: torch.Tensor | None = None) -> Any:
        """Return (scores [T, K], slots [T, K], rows per slot) of rows [T, H]."""
        scores, ids, counts = self.run.routed(self.module.router, self._route, rows, expert_bias)
        self.chosen = ids.detach()
        slots = self.run.slots(ids, self._num_experts, self._num_homes)
        if slots is ids:
            return scores, ids, counts
        # The layer sizes its split plan by these, and adds what the router counted to what it counts itself: that goes
        # on by experts, whatever the slots.
        module, exchange = self.module, self.run.exchange
        self._tokens_per_expert = module.tokens_per_expert
        with torch.no_grad():
            self._tokens_per_expert.add_(counts)
        module.num_local_experts = self._num_homes + (exchange.num_replica_slots if exchange else 0)
        module.num_experts = module.num_local_experts * module.ep_size
        module.tokens_per_expert = self._tokens_per_expert.new_zeros(module.num_experts)
        return scores, slots.contiguous(), count_tokens_per_expert(slots, module.num_experts)

    def compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return [N, H] of rows that stand slot by slot, as many as `counts`, padding included, and padding after."""
        exchange = self.run.exchange
        if exchange is None:
            return self._compute(rows, counts)  # type: ignore[no-any-return]
        at_home, padded = counts[: self._num_homes], counts[self._num_homes :]
        # One copy to the host for both sums: each would wait for the GPU.
        num_home, num_replica = torch.stack((at_home.sum(), padded.sum())).tolist()
        home, replica, padding = rows.split((num_home, num_replica, len(rows) - num_home - num_replica))
        experts = self.module.experts
        of_homes = self._compute(home, at_home)
        of_replicas = replicated(exchange, self._on_replicas, padded, replica, parameters_of(experts))
        return torch.cat((of_homes, of_replicas, torch.zeros_like(padding)))

    def _on_replicas(self, rows: torch.Tensor, counts: torch.Tensor, weights: Weights) -> torch.Tensor:
        return forward_of(self.module.experts, weights, rows, counts)

    def _leave(self, *_: Any) -> None:
        """Give the layer its own sizes back, also where its run failed: checkpoints read them."""
        if self._tokens_per_expert is not None:
            module = self.module
            module.num_experts, module.num_local_experts = self._num_experts, self._num_homes
            module.tokens_per_expert, self._tokens_per_expert = self._tokens_per_expert, None

    def release(self) -> None:
        """Give the router and the experts back."""
        self._left.remove()
        del self.module.router.forward, self.module.experts.forward


def _require_supported_engine(engine: Any, modules: list[Any]) -> None:
    """Raise where AutoEP runs in a way that plans do not know."""
    require(
        len(modules) > 0,
        "the engine has no AutoEP layer. Use a model with MoE layers, and set expert_parallel.enabled and "
        "autoep_size in DeepSpeed's configuration.",
    )
    module = modules[0]
    require("forward" not in vars(module.router), "this engine already has a balancer: call its detach() first.")
    require(
        hasattr(engine.module, "config"),
        f"{type(engine.module).__name__} has no config from which moe_rl could read its MoE layers.",
    )
    stage = engine.zero_optimization_stage()
    handles = module.folding_group_handles
    folded = 1 if handles is None else handles.spec.tp_size
    require(module.ep_size > 1, "there is nothing to balance with autoep_size 1, because every rank holds all experts.")
    require(stage < 3, f"zero_optimization.stage {stage} splits every expert across ranks: use stage 0, 1 or 2.")
    require(
        folded == 1,
        f"tensor_parallel.autotp_size {folded} is not supported, because ranks that share a batch would each "
        "dispatch only part of the batch's tokens.",
    )
    require(
        module.comm_backend == "comm",
        f"expert_parallel.comm_backend {module.comm_backend!r} has no room for replica slots in its buffers: use "
        "'comm'.",
    )
    require(
        not module.async_split_plan,
        "expert_parallel.async_split_plan sets the sizes of the all-to-all before moe_rl knows which tokens go to "
        "replicas: turn it off.",
    )
    require(
        module.combine_impl != "fused_weighted_sum",
        "expert_parallel.combine_impl 'fused_weighted_sum' has never been run with replicas: use 'auto'.",
    )


def _at_home(engine: Any, balancer: EpBalancer, name: str) -> Callable[[], None]:
    """Let a method of the engine run with every expert where DeepSpeed put it; return what undoes it."""

    def at_home(original: Any, *args: Any, **kwargs: Any) -> Any:
        with balancer.canonical():
            return original(*args, **kwargs)

    return wrap(engine, name, at_home)


def _require_home(balancer: EpBalancer, *_: Any) -> None:
    require(
        balancer.at_home,
        "experts have moved to other ranks. Call state_dict inside balancer.canonical(weights_only=True), which "
        "moves them back.",
    )
