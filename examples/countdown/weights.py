"""Weights between Megatron and Hugging Face, by name: the one place that says which tensor is which.

E experts, P expert-parallel ranks, H hidden size, F expert width, G query groups of Q heads of D channels each.
Experts must be where Megatron expects them (`Balancer.canonical`): rank p holds experts p E/P .. (p + 1) E/P - 1.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from moe_rl.core.errors import require

_MODEL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_EXPERT = {"linear_fc1": "mlp.experts.gate_up_proj", "linear_fc2": "mlp.experts.down_proj"}
"""Both keep the gate before the up projection; Hugging Face stacks the experts, [E, 2F, H] and [E, H, F]."""


@torch.no_grad()
def import_weights(gpt: GPTModel, state_dict: Mapping[str, Tensor]) -> None:
    """Copy Hugging Face weights into this rank's model; raise `InvalidInputError` where names or shapes do not fit."""
    parameters = dict(gpt.named_parameters())
    used = set()

    def take(name: str) -> Tensor:
        require(name in state_dict, f"the weights lack {name}.")
        used.add(name)
        return state_dict[name]

    def put(parameter: str, value: Tensor) -> None:
        own = parameters.pop(parameter)
        require(own.shape == value.shape, f"{parameter} is {list(own.shape)}, the weights have {list(value.shape)}.")
        own.copy_(value)

    for own, theirs in _MODEL.items():
        put(own, take(theirs))
    for index, layer in enumerate(gpt.decoder.layers):
        ours, hf = f"decoder.layers.{index}.", f"model.layers.{layer.layer_number - 1}."
        for own, theirs in _LAYER.items():
            put(ours + own, take(hf + theirs))
        q, k, v = (take(f"{hf}self_attn.{part}_proj.weight") for part in "qkv")
        put(f"{ours}self_attention.linear_qkv.weight", _joined(q, k, v, gpt.config.num_query_groups))
        for own, theirs in _EXPERT.items():
            stacked = take(hf + theirs)
            for slot, expert in enumerate(layer.mlp.local_expert_indices):
                put(f"{ours}mlp.experts.local_experts.{slot}.{own}.weight", stacked[expert])
    left = sorted(set(state_dict) - used)
    require(not left and not parameters, f"the weights do not fit the model: {[*left, *parameters][:4]} are left over.")


@torch.no_grad()
def export_weights(gpt: GPTModel) -> dict[str, Tensor]:
    """Return copies of all weights under Hugging Face's names, on every rank; a collective of the EP group."""
    parameters = dict(gpt.named_parameters())
    weights = {theirs: parameters[own].clone() for own, theirs in _MODEL.items()}
    for index, layer in enumerate(gpt.decoder.layers):
        ours, hf = f"decoder.layers.{index}.", f"model.layers.{layer.layer_number - 1}."
        weights |= {hf + theirs: parameters[ours + own].clone() for own, theirs in _LAYER.items()}
        qkv = _split(parameters[f"{ours}self_attention.linear_qkv.weight"], gpt.config)
        weights |= {f"{hf}self_attn.{part}_proj.weight": value for part, value in zip("qkv", qkv, strict=True)}
        for own, theirs in _EXPERT.items():
            experts = layer.mlp.experts.local_experts
            weights[hf + theirs] = gathered_experts(torch.stack([getattr(e, own).weight for e in experts]))
    return weights


def gathered_experts(local: Tensor) -> Tensor:
    """Return [E, ...] from the [E / P, ...] of every rank, in the order of the ranks; a collective of the EP group."""
    group = parallel_state.get_expert_model_parallel_group()
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local.contiguous(), group=group)
    return torch.cat(parts)


def _joined(q: Tensor, k: Tensor, v: Tensor, num_query_groups: int) -> Tensor:
    """Return Megatron's [G * (Q + 2) * D, H]: per group its query heads, its key head, its value head."""
    hidden = q.shape[1]
    return torch.cat([part.view(num_query_groups, -1, hidden) for part in (q, k, v)], dim=1).reshape(-1, hidden)


def _split(qkv: Tensor, config: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q, k, v), the inverse of `_joined`."""
    groups, channels = config.num_query_groups, config.kv_channels  # type: ignore[attr-defined]
    hidden = qkv.shape[1]
    per_group = qkv.view(groups, -1, hidden)
    heads = per_group.shape[1] - 2 * channels
    parts = torch.split(per_group, [heads, channels, channels], dim=1)
    q, k, v = (part.reshape(-1, hidden).clone() for part in parts)
    return q, k, v
