"""Three lines around a Megatron step: attach once, then begin and end every pass.

balancer = attach(model_chunks, optimizer, config)
plan = balancer.begin_pass(PassSource.replayed(routes))
forward_backward_func(...)
metrics = balancer.end_pass()
"""

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
)
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.common_facts import require_in_common
from moe_rl.balancing.config import BalancerConfig, ExpertKernels
from moe_rl.balancing.exchange import agreed, gathered
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.model import MoeModelSpec
from moe_rl.megatron.balancer import Balancer
from moe_rl.megatron.expert_views.grouped import GroupedSlots, share_replica_codes
from moe_rl.megatron.expert_views.grouped_compute import GroupedCompute
from moe_rl.megatron.expert_views.registry import experts_of
from moe_rl.megatron.experts import Experts, home_parameters
from moe_rl.megatron.groups import ExpertGroups, check_groups, plan_exchange
from moe_rl.megatron.layer import ElasticMoELayer, LayerState, dispatcher_over_slots, experts_by_layer
from moe_rl.megatron.model_spec import model_spec, unwrapped
from moe_rl.megatron.options import is_unknown, unknown_sentence
from moe_rl.megatron.param_gather import ParameterGather
from moe_rl.megatron.refusals import DDP_REFUSALS, refused
from moe_rl.megatron.replica_buffers import ReplicaBuffers
from moe_rl.megatron.residents import ResidentCopies
from moe_rl.megatron.transport import Transport

logger = logging.getLogger(__name__)

# What Megatron's CUDA graphs may capture: of an MoE layer its router alone, which no plan changes.
CAPTURED = {"attn", "mlp", "mamba", "moe_router"}


def attach(
    model_chunks: torch.nn.Module | Sequence[torch.nn.Module], optimizer: Any, config: BalancerConfig
) -> Balancer:
    """Make the MoE layers of models follow plans; a collective call on all ranks.

    `model_chunks` are what the framework hands to `forward_backward_func` (with or without DDP around), `optimizer` is
    its Megatron optimizer, or None where nothing is reordered. No parameter, buffer or state_dict key is added: the
    layers change their class to `ElasticMoELayer`. Where it fails on any rank, for whatever reason, every rank raises
    `InvalidInputError` with that reason, and the model is what it was.
    """
    chunks = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)
    require_in_common(config)
    chunks_and_layers, experts = agreed(lambda: _looked_at(chunks, config))
    shared_digests = gathered(
        _digest_of_shared(chunks_and_layers, experts), parallel_state.get_expert_model_parallel_group()
    )
    agreed(
        lambda: require(
            len(set(shared_digests)) == 1,
            "an adapter that all experts share must have the same weights on all ranks of an EP group, but the "
            "weights differ.",
        )
    )
    owners, layers = zip(*chunks_and_layers, strict=True)
    layer_ids = _of_all_stages([layer.layer_number - 1 for layer in layers])
    # Groups are made on all ranks or on none: what may fail on one rank comes before or after, and is voted on.
    groups = ExpertGroups.current()
    exchange = plan_exchange(groups)
    clocks: dict[int, MicroBatchClock] = {}

    def built() -> Balancer:
        for chunk in chunks:
            clocks[id(chunk)] = MicroBatchClock(unwrapped(chunk), recomputes=not _overlaps(layers[0]))
        model = model_spec(layers[0].config, moe_layer_ids=layer_ids)
        states = _states(chunks_and_layers, experts, clocks, model=model, config=config)
        slots = config.slots
        buffers = ReplicaBuffers(experts, replica_slots=slots.replica_slots, cross_node_slots=slots.cross_node_slots)
        transport = Transport(group=groups.replicas, buffers=buffers)
        residents = ResidentCopies(
            experts_by_layer(states),
            groups=groups,
            resident_slots=config.slots.resident_slots,
            counters=transport.counters,
        )
        return Balancer(
            layers=list(layers),
            states=states,
            clocks=list(clocks.values()),
            optimizer=optimizer,
            config=config,
            model=model,
            groups=groups,
            transport=transport,
            residents=residents,
            exchange=exchange,
        )

    try:
        balancer = agreed(built)
    except InvalidInputError:
        for clock in clocks.values():
            clock.remove()
        exchange.destroy()
        groups.destroy()
        raise
    balancer.install(owners)
    _warn_of_unknown_options(layers[0].config)
    return balancer


def _looked_at(
    chunks: Sequence[torch.nn.Module], config: BalancerConfig
) -> tuple[list[tuple[torch.nn.Module, MoELayer]], list[Experts]]:
    """Return the MoE layers with their chunks, and views of their experts; raise where they cannot be balanced."""
    chunks_and_layers = [(chunk, layer) for chunk in chunks for layer in moe_layers(chunk)]
    require(bool(chunks_and_layers), "there is nothing to balance, because the model has no MoELayer.")
    for chunk in chunks:
        _refuse(getattr(chunk, "ddp_config", None), table=DDP_REFUSALS)
    for _, layer in chunks_and_layers:
        _check_layer(layer, config)
    check_groups(chunks_and_layers[0][1].config.expert_model_parallel_size)
    grouped = config.kernels.are_ours
    compute = _compute_of(config.kernels) if grouped else None
    views = []
    for _, layer in chunks_and_layers:
        view = experts_of(layer.experts, compute, spare_slots=config.slots.foreign, experimental=config.experimental)
        if isinstance(view, GroupedSlots):
            view.require_float32_gradients()
        views.append(view)
    share_replica_codes(views)
    return chunks_and_layers, views


def _digest_of_shared(chunks_and_layers: Sequence[tuple[torch.nn.Module, MoELayer]], experts: Sequence[Experts]) -> str:
    """Return a digest of parameters that are no single expert's: of adapters around grouped linears."""
    digest = hashlib.sha256()
    for (_, layer), view in zip(chunks_and_layers, experts, strict=True):
        of_homes = itertools.chain.from_iterable(home_parameters(view))
        own_ids = {id(parameter) for parameter in of_homes}
        for parameter in layer.experts.parameters():
            if id(parameter) not in own_ids:
                digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _states(
    chunks_and_layers: Sequence[tuple[torch.nn.Module, MoELayer]],
    experts: Sequence[Experts],
    clocks: Mapping[int, MicroBatchClock],
    *,
    model: MoeModelSpec,
    config: BalancerConfig,
) -> list[LayerState]:
    """Return what `attach` will add to every layer; none is changed yet."""
    states: list[LayerState] = []
    chunks_begun = set()
    for (chunk, layer), view in zip(chunks_and_layers, experts, strict=True):
        # A push to other nodes begins a layer early, and which layer's depends on the plan: all wait in the first one.
        waits_for_all = config.slots.cross_node_slots > 0 and id(chunk) not in chunks_begun
        chunks_begun.add(id(chunk))
        if waits_for_all:
            waiting_experts = [moe_layer.experts for owner, moe_layer in chunks_and_layers if owner is chunk]
        else:
            waiting_experts = [layer.experts]
        state = LayerState(
            layer=model.moe_layer_ids.index(layer.layer_number - 1),
            experts=view,
            clock=clocks[id(chunk)],
            original_class=type(layer),
            index=len(states),
            gather=ParameterGather.of(chunk, waiting_experts),
            overlapped=_overlaps(layer),
            placement_bitwise=config.kernels.placement_bitwise,
            home_dispatcher=layer.token_dispatcher,
            slot_dispatcher=dispatcher_over_slots(layer, num_slots=view.num_local_experts + config.slots.foreign),
        )
        states.append(state)
    return states


def _compute_of(kernels: ExpertKernels) -> GroupedCompute:
    return GroupedCompute(recipe=kernels.recipe, backend=kernels.backend, transposed_codes=kernels.transposed_codes)


def _warn_of_unknown_options(config: Any) -> None:
    """Name, on rank 0, what is switched on and stands in no table of known options."""
    if dist.get_rank():
        return
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if is_unknown(field.name) and value and value != field.default:
            logger.warning("moe_rl: %s", unknown_sentence(field.name, value))


def _of_all_stages(layer_ids: list[int]) -> tuple[int, ...]:
    """Return the indices of the MoE layers of all pipeline stages, each rank giving its own.

    Of a hybrid model (attention, Mamba and MoE layers by a pattern) the configuration does not say which they are.
    """
    return tuple(sorted({layer for layers in gathered(layer_ids) for layer in layers}))


def moe_layers(chunk: torch.nn.Module) -> Iterator[MoELayer]:
    """Yield the chunk's MoE layers but those of multi-token prediction, which no routing trace has: they stay plain."""
    if isinstance(chunk, MultiTokenPredictionLayer):
        return
    if isinstance(chunk, MoELayer):
        yield chunk
    for module in chunk.children():
        yield from moe_layers(module)


def _check_layer(layer: MoELayer, config: BalancerConfig) -> None:
    if type(layer) not in (MoELayer, ElasticMoELayer):
        raise InvalidInputError(
            f"layer {layer.layer_number} must be Megatron's MoELayer, but it is a {type(layer).__name__}."
        )
    if isinstance(layer, ElasticMoELayer) and layer._elastic is not None:
        raise InvalidInputError("this model already has a balancer: call its detach() first.")
    copies = config.slots.foreign > 0 or config.kernels.are_ours
    facts = {"experts": config.kernels.experts, "static_rows": config.kernels.static_rows}
    _refuse(layer.config, experimental=config.experimental, copies=copies, facts=facts)
    # From 0.18 on Megatron has another name for it.
    scopes = layer.config.cuda_graph_scope or getattr(layer.config, "cuda_graph_modules", None) or ("the whole layer",)
    captured_scopes = {str(getattr(scope, "name", scope)) for scope in scopes}
    require(
        layer.config.cuda_graph_impl == "none" or captured_scopes <= CAPTURED,
        f"cuda_graph_scope captures {', '.join(sorted(captured_scopes - CAPTURED))}, but with a plan, the "
        f"work of an MoE layer differs between micro-batches. Capture only {' or '.join(sorted(CAPTURED))}.",
    )
    require(
        layer.config.cuda_graph_impl == "none"
        or "moe_router" not in captured_scopes
        or layer.router.router_replay is None,
        "cuda_graph_scope captures moe_router, so all micro-batches would use the routes of the captured one. Remove "
        "moe_router from the scope, or turn moe_enable_routing_replay off.",
    )
    require(
        not (_overlaps(layer) and config.slots.cross_node_slots),
        "cross_node_slots does not work with overlap_moe_expert_parallel_comm, because the slots are filled one "
        "layer ahead, while another micro-batch still uses them.",
    )
    dispatcher = type(layer.token_dispatcher)
    require(
        not (config.kernels.placement_bitwise and layer.config.moe_permute_fusion),
        "placement_bitwise does not work with moe_permute_fusion, because TransformerEngine's fused permutation "
        "chooses the order of the rows itself.",
    )
    require(
        not config.kernels.placement_bitwise or dispatcher is MoEAlltoAllTokenDispatcher,
        "placement_bitwise needs moe_token_dispatcher_type alltoall, because other dispatchers add expert outputs "
        "in the order of the ranks that hold the experts.",
    )
    require(
        dispatcher in (MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher, MoEFlexTokenDispatcher),
        f"the token dispatcher {dispatcher.__name__} is not supported: set moe_token_dispatcher_type to alltoall, "
        "allgather or flex.",
    )


def _overlaps(layer: MoELayer) -> bool:
    return bool(layer.config.overlap_moe_expert_parallel_comm)


def _refuse(settings: Any, **how: Any) -> None:
    """Raise for the first of `settings` that is refused; see `refusals.refused`."""
    for _, sentence in refused(lambda option: getattr(settings, option, None), **how):
        raise InvalidInputError(sentence)
