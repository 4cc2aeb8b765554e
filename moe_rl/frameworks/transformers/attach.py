"""Transformers' own expert parallelism (FSDP2 + EP), and with it TRL and Accelerate: replay and replicas, no Megatron.

from moe_rl.frameworks.transformers.attach import attach          # registers the implementation "moe_rl"

model = AutoModelForCausalLM.from_pretrained(
    path, distributed_config=DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="moe_rl")
)
balancer = attach(model, BalancerConfig())

balancer.begin_pass(PassSource.replayed(routes))    # one [B, S, L, K] array per micro-batch, -1 if unknown; or
sequences = [SequenceRows.of_padded(batch["input_ids"], batch["attention_mask"]) for batch in micro_batches]
balancer.begin_pass(PassSource.expected(sequences))
...                                   # the forwards and backwards of an optimizer step
metrics = balancer.end_pass()

The implementation is Transformers' own all-to-all over slots instead of experts; without a plan it is the very same.
"""

import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch

from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.common_facts import require_in_common
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.pass_source import PassSource
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.model import MoeModelSpec
from moe_rl.frameworks.ep_balancer import EpBalancer, EpGroups, require_supported, rows_of
from moe_rl.frameworks.ep_exchange import Weights, forward_of, parameters_of, replicated
from moe_rl.frameworks.ep_layer import LayerRun
from moe_rl.frameworks.ranks import announce, require_distributed
from moe_rl.frameworks.transformers.contract import FRAMEWORK
from moe_rl.huggingface import model_of_config
from moe_rl.replay.hf_recorder import find_routers, record_routing

try:
    from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface
except ImportError as error:
    raise InvalidInputError(f"the expert parallelism of transformers cannot be imported: {error}.") from error

NAME = "moe_rl"
# Experts module -> what runs it.
IMPLEMENTATIONS: "WeakKeyDictionary[torch.nn.Module, SlotsEP]" = WeakKeyDictionary()


class SlotsEP(AllToAllEP):
    """All-to-all over the slots of a plan: pairs are sent by slot, and replica rows run on weights that were pushed."""

    num_local_experts: int
    experts_forward: Any

    def __init__(self, experts: torch.nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.layer: LayerRun | None = None
        """Set by `attach`."""
        IMPLEMENTATIONS[experts] = self

    def __call__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        """Return [T, H] from [T, H], [T, K] expert ids and [T, K] weights."""
        layer, num_homes, experts_forward = self.layer, self.num_local_experts, self.experts_forward
        if layer is None:
            return super().__call__(hidden_states, top_k_index, top_k_weights)
        slots = layer.slots(top_k_index, num_homes * self.ep_mesh.size(), num_homes)
        exchange = layer.exchange
        if exchange is None:
            return super().__call__(hidden_states, top_k_index, top_k_weights)

        def over_slots(rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            at_home = slots[:, 0] < num_homes
            home, replica = at_home.nonzero()[:, 0], (~at_home).nonzero()[:, 0]
            if len(home):
                of_homes = experts_forward(rows[home], slots[home], weights[home])
            else:  # the parameters stay part of the graph, or FSDP would not reduce them here
                of_homes = experts_forward(rows.sum(0, keepdim=True), slots.new_zeros(1, 1), weights.new_ones(1, 1))[:0]
            of_replicas = replicated(
                exchange, self._compute, slots[replica, 0] - num_homes, rows[replica], parameters_of(self.experts)
            )
            output = torch.zeros_like(rows).index_add(0, home, of_homes.to(rows.dtype))
            return output.index_add(0, replica, of_replicas.to(rows.dtype))

        # Transformers sizes its exchange by num_local_experts and calls experts_forward on what came: both are of slots
        # for this one run.
        self.experts_forward, self.num_local_experts = over_slots, num_homes + exchange.num_replica_slots
        try:
            return super().__call__(hidden_states, slots, top_k_weights)
        finally:
            self.experts_forward, self.num_local_experts = experts_forward, num_homes

    def _compute(self, rows: torch.Tensor, slots: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Run the module's own forward as a module with as many experts as there are replica slots."""
        inputs = (rows, slots[:, None], rows.new_ones(len(rows), 1))
        return forward_of(self.experts, weights, *inputs, _is_expert_parallel=False, num_experts=len(weights[0]))


EPImplementationInterface.register(NAME, SlotsEP)


def attach(model: torch.nn.Module, config: BalancerConfig, *, replay: bool = True) -> EpBalancer:
    """Balance a model that was loaded with `ep_implementation="moe_rl"`; a collective of all ranks.

    With `replay` the routers choose what `begin_pass` is given, where it is known; their scores and gradients stay
    their own. Raises `InvalidInputError` where the model cannot be balanced.
    """
    require_distributed("expert parallelism")
    version = FRAMEWORK.check()
    require_supported(config)
    routers = find_routers(model)
    inner: Any = model
    implementations = [IMPLEMENTATIONS[module] for module in model.modules() if module in IMPLEMENTATIONS]
    if not implementations:
        raise InvalidInputError(
            f"no expert module of this {type(model).__name__} runs through moe_rl. Import "
            "moe_rl.frameworks.transformers.attach, then load the model with DistributedConfig(ep_size=..., "
            'ep_implementation="moe_rl").'
        )
    # One mesh spreads all layers: the first one's is every one's.
    head = implementations[0]
    require(
        head.ep_mesh.size() > 1, "there is nothing to balance with ep_size 1, because every rank holds all experts."
    )
    require(
        head.tp_mesh.size() == 1,
        f"tp_size {head.tp_mesh.size()} is not supported: ranks of a tensor-parallel group share a batch, but moe_rl "
        "needs a separate batch on every rank.",
    )
    attached = any(implementation.layer is not None for implementation in implementations)
    require(not attached, "this model already has a balancer: call its detach() first.")
    spec, _ = model_of_config(inner.config.to_dict(), where=type(model).__name__)
    require(
        len(routers) == len(implementations) == spec.num_moe_layers,
        f"the model has {len(implementations)} expert modules and {len(routers)} routers, but its configuration has "
        f"{spec.num_moe_layers} MoE layers.",
    )
    require_in_common(config, {f"the version of {FRAMEWORK.name}": version, "replay": replay})
    replayed = RoutingReplay(model, model_spec=spec)
    for implementation, layer in zip(implementations, replayed.layers, strict=True):
        implementation.layer = layer

    def release() -> None:
        for implementation in implementations:
            implementation.layer = None
        replayed.detach()

    announce(FRAMEWORK.name, version, num_layers=len(implementations), policy=config.policy)
    return EpBalancer(
        replayed.layers,
        clock=replayed.clock,
        groups=EpGroups.of(head.ep_mesh.get_group(), device=next(model.parameters()).device),
        recorder=functools.partial(record_routing, model),
        release=release,
        movable="FSDP owns the shards of the experts and the state of the optimizer.",
        config=config,
        model=spec,
        replay=replay,
    )


class RoutingReplay:
    """Replay alone, for a model that is not spread over ranks; TRL has none, nor has Transformers.

    The routers choose what `begin_pass` is given, where it is known.
    """

    def __init__(self, model: torch.nn.Module, *, model_spec: MoeModelSpec | None = None) -> None:
        inner: Any = model
        self.model = model_spec or model_of_config(inner.config.to_dict(), where=type(model).__name__)[0]
        self.clock = MicroBatchClock(model)
        self.layers: list[LayerRun] = []
        self._forwards: list[tuple[Any, Any]] = []
        for index, (_, _, router) in enumerate(find_routers(model)):
            self.layers.append(LayerRun(index=index, clock=self.clock))
            self._forwards.append((router, router.forward))
            router.forward = functools.partial(self.layers[-1].routed, router, router.forward)

    def begin_pass(self, source: PassSource) -> None:
        """Replay the source's routes, [B, S, L, K] or [N, L, K] each, in the next forwards and recomputations."""
        if source.routes is None:
            raise InvalidInputError(
                "without a balancer, replay needs routes: call begin_pass(PassSource.replayed(routes))."
            )
        rows = [torch.from_numpy(rows_of(routes_of_batch, self.model)) for routes_of_batch in source.routes]
        for layer in self.layers:
            device = self._forwards[layer.index][0].weight.device
            layer.begin([rows_of_batch[:, layer.index].to(device) for rows_of_batch in rows], len(rows))
        self.clock.reset()

    def end_pass(self) -> None:
        """Let the routers choose again."""
        self.clock.stop()

    give_up = end_pass
    """What a balancer has for a pass whose code raised; here it is the same."""

    def detach(self) -> None:
        """Give the routers back."""
        self.clock.remove()
        for router, forward in self._forwards:
            router.forward = forward
