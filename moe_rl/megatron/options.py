"""The options of Megatron's MoE layers that are known here, by the version that brought them. Loads no torch.

Known means that somebody looked at what it does to a layer whose experts have replicas or have moved: it is accepted,
or it is refused in `refusals.py`. A new version brings new ones, and a list of what is refused cannot know them: an
option that stands nowhere here and is switched on is named in a warning.
"""

from collections.abc import Mapping

KNOWN: Mapping[str, frozenset[str]] = {
    version: frozenset(names.split())
    for version, names in {
        "0.16": """
            delay_wgrad_compute expert_model_parallel_size expert_tensor_parallel_size
            moe_apply_probs_on_input moe_aux_loss_coeff moe_deepep_num_sms moe_enable_deepep
            moe_enable_routing_replay moe_expert_capacity_factor moe_extended_tp moe_ffn_hidden_size
            moe_flex_dispatcher_backend moe_grouped_gemm moe_hybridep_num_sms moe_input_jitter_eps
            moe_latent_size moe_layer_freq moe_layer_recompute moe_pad_expert_input_to_capacity
            moe_per_layer_logging moe_permute_fusion moe_router_bias_update_rate moe_router_dtype
            moe_router_enable_expert_bias moe_router_force_load_balancing moe_router_fusion
            moe_router_group_topk moe_router_load_balancing_type moe_router_num_groups
            moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_router_pre_softmax
            moe_router_score_function moe_router_topk moe_router_topk_limited_devices
            moe_router_topk_scaling_factor moe_shared_expert_gate moe_shared_expert_intermediate_size
            moe_shared_expert_overlap moe_token_dispatcher_type moe_token_drop_policy moe_token_dropping
            moe_use_legacy_grouped_gemm moe_z_loss_coeff num_moe_experts overlap_moe_expert_parallel_comm
        """,
        "0.17": """
            inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels
            moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
            moe_pad_experts_for_cuda_graph_inference moe_permute_fusion_into_hybridep
            moe_router_force_biased
        """,
        "0.18": """
            inference_moe_token_dispatcher_type moe_expert_rank_capacity_factor
            moe_hybridep_num_sms_preprocessing moe_mlp_glu_interleave_size moe_paged_stash
            moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda
            moe_paged_stash_page_size moe_single_grouped_bias moe_single_grouped_weight
            overlap_dispatch_backward_with_experts_wgrad use_grouped_gemm_for_dense_mlp
            use_transformer_engine_op_fuser
        """,
        "0.19": """
            expert_gtp_weight_remat_size expert_tensor_parallel_num_weight_shards
            moe_flex_dispatcher_num_sms moe_grad_scale_func moe_hybridep_pad_uneven_dispatch_inputs
            moe_ncclep_static_shape moe_ncclep_zero_copy moe_router_quantile_balancing_ema
            moe_shared_expert_glu_interleave_size use_grouped_gemm_for_shared_expert
        """,
    }.items()
}
"""By minor version of megatron-core, from the oldest that is supported: the options that it has and none before it."""

WORDS = ("moe", "expert", "grouped_gemm")
"""Parts of the names by which an option of the MoE layers is recognized."""


def is_of_moe(option: str) -> bool:
    """Return whether an option is about the MoE layers, by its name."""
    return any(word in option for word in WORDS) or any(option in brought for brought in KNOWN.values())


def is_unknown(option: str) -> bool:
    """Return whether an option is about the MoE layers and nobody here looked at what it does."""
    return is_of_moe(option) and not any(option in brought for brought in KNOWN.values())


def unknown_sentence(option: str, value: object) -> str:
    """Return what is said of an unknown option that is switched on."""
    newest = list(KNOWN)[-1]
    return (
        f"{option}={value!r} is not an option that moe_rl knows of megatron-core up to {newest}: what it does to "
        "replicas and moved experts was not looked at."
    )
