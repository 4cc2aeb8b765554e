"""Three lines around a Megatron step: attach once, then begin and end every pass.

balancer = attach(model_chunks, optimizer, config)
plan = balancer.begin_pass(routes)
forward_backward_func(...)
metrics = balancer.end_pass()
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
)

from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.config import BalancerConfig
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.megatron.balancer import Balancer
from moe_rl.megatron.entry import hook_entry
from moe_rl.megatron.expert_views.grouped import GroupedSlots, share_replica_codes
from moe_rl.megatron.expert_views.grouped_compute import GroupedCompute
from moe_rl.megatron.expert_views.registry import experts_of
from moe_rl.megatron.experts import Experts
from moe_rl.megatron.groups import ExpertGroups, check_groups
from moe_rl.megatron.layer import ElasticMoELayer, LayerState, dispatcher_over_slots
from moe_rl.megatron.model_spec import model_spec, unwrapped
from moe_rl.megatron.param_gather import ParameterGather
from moe_rl.megatron.refusals import DDP_REFUSALS, refused
from moe_rl.megatron.replica_buffers import ReplicaBuffers
from moe_rl.megatron.transport import Transport


def attach(
    model_chunks: torch.nn.Module | Sequence[torch.nn.Module], optimizer: Any, config: BalancerConfig
) -> Balancer:
    """Make the MoE layers of built models follow plans; a collective of all ranks.

    `model_chunks` are what the framework hands to `forward_backward_func` (with or without DDP around), `optimizer` is
    its Megatron optimizer, or None where nothing is reordered. No parameter, buffer or state_dict key is added: the
    layers change their class to `ElasticMoELayer`. Raises `InvalidInputError` with the reason where the model cannot
    be balanced.
    """
    chunks = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)
    found = [(chunk, layer) for chunk in chunks for layer in _moe_layers(chunk)]
    experts, problem = _views(chunks, [layer for _, layer in found], config)
    _raise_on_all_ranks(problem)
    groups = ExpertGroups.current()
    model = model_spec(found[0][1].config)
    buffers = ReplicaBuffers(experts, replica_slots=config.replica_slots, cross_node_slots=config.cross_node_slots)
    clocks = {id(chunk): MicroBatchClock(unwrapped(chunk)) for chunk in chunks}
    states, chunks_begun = [], set()
    for (chunk, layer), view in zip(found, experts, strict=True):
        # A push to other nodes begins a layer early, and which layer's depends on the plan: all wait in the first one.
        waits_for_all = config.cross_node_slots > 0 and id(chunk) not in chunks_begun
        chunks_begun.add(id(chunk))
        state = LayerState(
            layer=model.moe_layer_ids.index(layer.layer_number - 1),
            experts=view,
            clock=clocks[id(chunk)],
            original_class=type(layer),
            routed={} if config.forecast else None,
            gather=ParameterGather.of(
                chunk, [each.experts for one, each in found if one is chunk] if waits_for_all else [layer.experts]
            ),
            placement_bitwise=config.placement_bitwise,
            home_dispatcher=layer.token_dispatcher,
            slot_dispatcher=dispatcher_over_slots(layer, num_slots=view.num_local_experts + config.spare_slots),
        )
        layer.__class__ = ElasticMoELayer
        layer._elastic = state
        state.entry = hook_entry(chunk, layer)
        states.append(state)
    return Balancer(
        layers=[layer for _, layer in found],
        states=states,
        clocks=list(clocks.values()),
        optimizer=optimizer,
        config=config,
        model=model,
        groups=groups,
        transport=Transport(group=groups.replicas, buffers=buffers),
    )


def _views(
    chunks: Sequence[torch.nn.Module], layers: Sequence[MoELayer], config: BalancerConfig
) -> tuple[list[Experts], str]:
    """Return the views of the layers' experts, and why this rank's layers cannot be balanced; empty when they can."""
    try:
        require(bool(layers), "the model has no MoELayer: there is nothing to balance.")
        for chunk in chunks:
            _refuse(getattr(chunk, "ddp_config", None), table=DDP_REFUSALS)
        for layer in layers:
            _check_layer(layer, config)
        check_groups(layers[0].config.expert_model_parallel_size)
        grouped = config.experts == "grouped"
        compute = GroupedCompute(recipe=config.recipe, backend=config.backend) if grouped else None
        views = [experts_of(layer.experts, compute, experimental=config.experimental) for layer in layers]
        for view in views:
            if isinstance(view, GroupedSlots):
                view.require_float32_gradients()
        share_replica_codes(views)
        return views, ""
    except InvalidInputError as error:
        return [], str(error)


def _raise_on_all_ranks(problem: str) -> None:
    """Raise where any rank has a problem: the others would wait for it in the first collective."""
    problems = [problem]
    if dist.is_initialized():
        problems = [""] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    for rank, each in enumerate(problems):
        if each:
            raise InvalidInputError(problem or f"rank {rank} cannot be balanced: {each}")


def _moe_layers(chunk: torch.nn.Module) -> Iterator[MoELayer]:
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            yield module


def _check_layer(layer: MoELayer, config: BalancerConfig) -> None:
    if type(layer) not in (MoELayer, ElasticMoELayer):
        raise InvalidInputError(f"layer {layer.layer_number} is a {type(layer).__name__}, not Megatron's MoELayer.")
    if isinstance(layer, ElasticMoELayer) and layer._elastic is not None:
        raise InvalidInputError("a balancer is attached to this model already: call its detach() first.")
    _refuse(layer.config, experimental=config.experimental)
    require(
        not layer.config.gradient_accumulation_fusion or config.experts == "grouped",
        "gradient_accumulation_fusion needs experts='grouped': Megatron's experts then add weight gradients to "
        "main_grad, which replicas do not have.",
    )
    require(
        not _mixes_up_messages(layer.config),
        "virtual stages over two pipeline ranks send activations and gradients to one peer, and in batches Megatron "
        "mixes them up: set overlap_p2p_comm=True and batch_p2p_comm=False.",
    )
    dispatcher = type(layer.token_dispatcher)
    require(
        not (config.placement_bitwise and layer.config.moe_permute_fusion),
        "placement_bitwise does not go with moe_permute_fusion: the map of rows is TransformerEngine's own then.",
    )
    require(
        not config.placement_bitwise or dispatcher is MoEAlltoAllTokenDispatcher,
        "placement_bitwise needs moe_token_dispatcher_type alltoall: the others sum in the order of their ranks.",
    )
    require(
        dispatcher in (MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher, MoEFlexTokenDispatcher),
        f"dispatcher {dispatcher.__name__} is not supported: set moe_token_dispatcher_type to alltoall or allgather.",
    )


def _refuse(settings: Any, **how: Any) -> None:
    """Raise for the first of `settings` that is refused; see `refusals.refused`."""
    for _, sentence in refused(lambda option: getattr(settings, option, None), **how):
        raise InvalidInputError(sentence)


def _mixes_up_messages(config: Any) -> bool:
    """Return whether the previous and the next pipeline rank are one, and batched messages to both go to it."""
    two_stages = config.pipeline_model_parallel_size == 2
    return bool(config.virtual_pipeline_model_parallel_size) and two_stages and not config.overlap_p2p_comm
