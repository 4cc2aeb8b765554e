"""For every trap and framework: what to change in a good run so that it is in the trap."""

from dataclasses import dataclass, field

from runs import CHECKED, ENGINE, REMOVED, Change, own_key

from moe_rl.doctor.traps import ERROR, NOTE, WARNING

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
NO_LOAD, UNSET = ("load", REMOVED), ("load", None)
ON_GPU: Change = ("--optimizer-cpu-offload", REMOVED)
RELIBRA: Change = ("moe_rl.policy", "relibra")
R2 = ("text:REPLAY:-R3", "REPLAY:-R2")
FP8_SCALES = "env:NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
DENSE_FIRST = [0] + [1] * 47


@dataclass(frozen=True)
class Seed:
    """A trap, the run it is put into, and the one change that does it."""

    trap: str
    run: str
    change: Change
    severity: str
    before: tuple[Change, ...] = field(default=())
    """Changes that lead up to it and are not the trap."""

    def __str__(self) -> str:
        """Return the test's id."""
        return f"{self.trap}-{self.run}"


FLAGS = ("slime", "miles")
REPLAYING = ("megatron", "megatron-log", "verl", "verl-yaml", "slime", "miles", "nemo_rl")


def option(
    trap: str, name: str, value: object, severity: str, *runs: str, before: tuple[Change, ...] = ()
) -> list[Seed]:
    """Return seeds that set one of Megatron's options in all the runs."""
    return [
        Seed(trap, run, (own_key(run, name), value), severity, tuple((own_key(run, key), to) for key, to in before))
        for run in runs or REPLAYING
    ]


SEEDS = [
    *option("fused-router-bypasses-replay", "moe_router_fusion", True, ERROR),
    Seed("replay-half-on", "verl", (ROLLOUT + "enable_rollout_routing_replay", False), ERROR),
    Seed("replay-half-on", "verl-yaml", (ENGINE + "router_replay.mode", "disabled"), WARNING),
    Seed("replay-half-on", "nemo_rl", ("policy.generation.backend", "sglang"), ERROR),
    *option("mtp-aliases-decoder-layers", "mtp_num_layers", 1, ERROR, "megatron", "megatron-log"),
    *option("mtp-aliases-decoder-layers", "mtp_num_layers", 1, WARNING, "nemo_rl"),
    Seed("mtp-aliases-decoder-layers", "verl", ("actor_rollout_ref.model.mtp.enable", True), WARNING),
    Seed(
        "mtp-aliases-decoder-layers",
        "slime",
        ("--enable-mtp-training", True),
        WARNING,
        (("--mtp-num-layers", 1),),
    ),
    Seed("mtp-aliases-decoder-layers", "miles", ("--mtp-num-layers", 1), NOTE, (("--mtp-num-layers", REMOVED),)),
    *option("virtual-pipeline-replay", "num_virtual_stages_per_pipeline_rank", 2, WARNING, "megatron"),
    *option("virtual-pipeline-replay", "virtual_pipeline_model_parallel_size", 2, WARNING, "megatron-log"),
    *option("virtual-pipeline-replay", "virtual_pipeline_model_parallel_size", 2, ERROR, "nemo_rl"),
    *option("virtual-pipeline-replay", "num_layers_per_virtual_pipeline_stage", 6, NOTE, "slime", "miles"),
    Seed("virtual-pipeline-replay", "verl", (ENGINE + "virtual_pipeline_model_parallel_size", 2), NOTE),
    *option(
        "recompute-replay-order",
        "recompute_granularity",
        "full",
        WARNING,
        "megatron",
        "megatron-log",
        before=(("pipeline_model_parallel_size", 2),),
    ),
    *option("layer-axis-counts-dense-layers", "moe_layer_freq", DENSE_FIRST, WARNING, "megatron", "megatron-log"),
    Seed("layer-axis-counts-dense-layers", "slime", ("text:NUM_DENSE=0", "NUM_DENSE=1"), NOTE),
    Seed(
        "layer-axis-counts-dense-layers",
        "miles",
        ("text:LEADING_DENSE=0", "LEADING_DENSE=1"),
        NOTE,
        (("text:LEADING_DENSE=1", "LEADING_DENSE=0"),),
    ),
    Seed("layer-axis-counts-dense-layers", "verl", ("actor_rollout_ref.model.path", "deepseek-ai/DeepSeek-V3"), NOTE),
    Seed("layer-axis-counts-dense-layers", "nemo_rl", ("policy.model_name", "deepseek-ai/DeepSeek-V3"), NOTE),
    Seed("no-replay", "verl", (ENGINE + "router_replay.mode", "disabled"), NOTE, (R2,)),
    Seed("no-replay", "slime", ("--use-rollout-routing-replay", REMOVED), NOTE),
    Seed("no-replay", "miles", ("--use-rollout-routing-replay", REMOVED), NOTE),
    Seed("no-replay", "nemo_rl", ("policy.router_replay.enabled", False), NOTE),
    Seed("padding-routes-on-one-expert", "verl", R2, NOTE, ((ROLLOUT + "enable_rollout_routing_replay", False),)),
    Seed("replay-without-packing", "verl", ("actor_rollout_ref.model.use_remove_padding", False), ERROR),
    Seed(
        "updates-planned-from-history",
        "verl",
        ("actor_rollout_ref.model.use_remove_padding", False),
        NOTE,
        ((ENGINE + "router_replay.mode", "disabled"), (ROLLOUT + "enable_rollout_routing_replay", False)),
    ),
    Seed("padding-routes-on-one-expert", "miles", ("--qkv-format", "bshd"), WARNING),
    *option("quantization-padding-edits-routes", "moe_router_padding_for_quantization", True, WARNING),
    *option("quantization-padding-edits-routes", "moe_router_padding_for_fp8", True, WARNING, "megatron", "slime"),
    *option("forced-balance-left-on", "moe_router_force_load_balancing", True, ERROR, *CHECKED),
    *option(
        "trace-of-mock-data",
        "mock_data",
        True,
        WARNING,
        "megatron",
        "megatron-log",
        before=(("moe_routing_trace_path", "/traces"),),
    ),
    *option(
        "trace-under-recompute",
        "recompute_granularity",
        "full",
        WARNING,
        "megatron",
        "megatron-log",
        before=(("moe_routing_trace_path", "/traces"),),
    ),
    *option("capacity-drops-tokens", "moe_expert_capacity_factor", 1.25, WARNING),
    *option("aux-loss-moves-router", "moe_aux_loss_coeff", 0.001, WARNING, "megatron", "megatron-log", *FLAGS),
    *option(
        "aux-loss-moves-router",
        "moe_aux_loss_coeff",
        0.001,
        WARNING,
        "verl",
        "verl-yaml",
        before=(("moe_router_load_balancing_type", "aux_loss"),),
    ),
    *option(
        "aux-loss-moves-router",
        "moe_aux_loss_coeff",
        0.001,
        WARNING,
        "nemo_rl",
        before=(("freeze_moe_router", False), ("moe_router_load_balancing_type", "seq_aux_loss")),
    ),
    *option("expert-bias-drifts", "moe_router_enable_expert_bias", True, WARNING, "megatron", "megatron-log", "slime"),
    *option("expert-bias-drifts", "moe_router_bias_update_rate", 0.001, WARNING, "miles"),
    *option(
        "expert-bias-drifts",
        "moe_router_enable_expert_bias",
        True,
        WARNING,
        "verl",
        "nemo_rl",
        before=(("moe_router_bias_update_rate", 0.001),),
    ),
    *option("rollout-places-experts", "sglang_enable_eplb", True, NOTE, "slime", "miles"),
    Seed("rollout-places-experts", "slime", ("--sglang-ep-num-redundant-experts", 16), NOTE),
    Seed("rollout-places-experts", "verl", (ROLLOUT + "engine_kwargs.sglang.enable_eplb", True), NOTE),
    Seed("vllm-eplb-misplaces-updates", "verl", (ROLLOUT + "engine_kwargs.vllm.enable_eplb", True), ERROR),
    Seed("vllm-eplb-misplaces-updates", "nemo_rl", ("policy.generation.vllm_kwargs.enable_eplb", True), ERROR),
    Seed(
        "vllm-eplb-misplaces-updates",
        "skyrl",
        ("generator.inference_engine.engine_init_kwargs.enable_eplb", True),
        ERROR,
        (("generator.inference_engine.backend", "vllm"),),
    ),
    Seed("fixed-pause-before-weight-sync", "areal", ("rollout.pause_grace_period", 1.0), NOTE),
    *option("expert-order-in-export", "enable_expert_placement", True, ERROR),
    Seed("expert-order-in-export", "verl-yaml", ("moe_rl.policy", "relibra"), WARNING),
    Seed(
        "expert-order-in-export",
        "slime",
        ("env:MOE_RL_POLICY", "moe-rl"),
        WARNING,
        (ON_GPU,),
    ),
    *option(
        "reorder-of-offloaded-state",
        "optimizer_cpu_offload",
        True,
        WARNING,
        "megatron",
        "megatron-log",
        before=(("moe_rl_policy", "relibra"),),
    ),
    *(
        Seed(
            "reorder-of-offloaded-state",
            run,
            ("--optimizer-cpu-offload", True),
            WARNING,
            (("--optimizer-cpu-offload", REMOVED), ("--moe-rl-policy", "relibra")),
        )
        for run in ("slime", "miles")
    ),
    Seed(
        "reorder-of-offloaded-state",
        "verl-yaml",
        (ACTOR + "optim.override_optimizer_config.optimizer_cpu_offload", True),
        WARNING,
        (RELIBRA,),
    ),
    Seed(
        "reorder-of-offloaded-state",
        "nemo_rl",
        ("policy.megatron_cfg.optimizer.optimizer_cpu_offload", True),
        WARNING,
        (RELIBRA,),
    ),
    Seed("gpus-do-not-add-up", "slime", ("--actor-num-nodes", 3), ERROR),
    Seed("gpus-do-not-add-up", "slime", ("text:--colocate", "--rollout-num-gpus 16"), NOTE),
    Seed(
        "gpus-do-not-add-up",
        "miles",
        ("text:--actor-num-nodes 2", "--actor-num-nodes 3"),
        ERROR,
        (("text:--colocate", "--colocate --actor-num-nodes 2 --actor-num-gpus-per-node 4"),),
    ),
    Seed(
        "gpus-do-not-add-up",
        "verl",
        (ENGINE + "expert_tensor_parallel_size", REMOVED),
        ERROR,
        (
            ("trainer.n_gpus_per_node", 8),
            ("text:NODES:-2", "NODES:-1"),
            ("text:EP:-8", "EP:-4"),
            (ENGINE + "pipeline_model_parallel_size", 2),
        ),
    ),
    Seed(
        "gpus-do-not-add-up",
        "roll",
        ("actor_train.strategy_args.strategy_config.expert_tensor_parallel_size", None),
        ERROR,
    ),
    Seed("gpus-do-not-add-up", "skyrl", ("trainer.placement.policy_num_gpus_per_node", 6), ERROR),
    Seed("gpus-do-not-add-up", "areal", ("actor.backend", "megatron:(attn:d3p4t2|ffn:d1p4e8)"), ERROR),
    Seed(
        "gpus-do-not-add-up",
        "nemo_rl",
        ("cluster.num_nodes", 3),
        ERROR,
        (("cluster.gpus_per_node", 8), ("cluster.num_nodes", 2)),
    ),
    Seed(
        "reorder-of-offloaded-state", "slime", ("env:MOE_RL", "moe-rl"), WARNING, (("--optimizer-cpu-offload", True),)
    ),
    Seed("rollout-engine-of-other-size", "verl", (ROLLOUT + "expert_parallel_size", 8), ERROR),
    Seed(
        "rollout-engine-of-other-size",
        "skyrl",
        ("generator.inference_engine.expert_parallel_size", 8),
        ERROR,
        (("generator.inference_engine.tensor_parallel_size", 4),),
    ),
    *option(
        "experts-not-divisible",
        "expert_model_parallel_size",
        7,
        ERROR,
        "megatron",
        "megatron-log",
        "miles",
        "nemo_rl",
    ),
    Seed("experts-not-divisible", "slime", ("--expert-model-parallel-size", 7), ERROR, (("--actor-num-nodes", 7),)),
    Seed("experts-not-divisible", "verl", (ENGINE + "expert_model_parallel_size", 7), ERROR),
    *option(
        "tensor-parallel-without-sequence-parallel",
        "sequence_parallel",
        False,
        ERROR,
        "megatron",
        before=(("tensor_model_parallel_size", 2),),
    ),
    *option("tensor-parallel-without-sequence-parallel", "tensor_model_parallel_size", 2, ERROR, "megatron-log"),
    *option("tensor-parallel-without-sequence-parallel", "sequence_parallel", REMOVED, ERROR, "miles"),
    *option("tensor-parallel-without-sequence-parallel", "sequence_parallel", False, ERROR, "nemo_rl"),
    *option(
        "tensor-parallel-without-sequence-parallel",
        "sequence_parallel",
        REMOVED,
        ERROR,
        "slime",
        before=(("tensor_model_parallel_size", 2),),
    ),
    Seed("tensor-parallel-without-sequence-parallel", "verl", (ENGINE + "sequence_parallel", False), ERROR),
    *option("micro-batches-not-aligned", "dynamic_context_parallel", True, WARNING),
    Seed("loss-depends-on-micro-batches", "verl", (ACTOR + "policy_loss.loss_mode", "geo_mean"), NOTE),
    Seed("loss-depends-on-micro-batches", "verl-yaml", (ACTOR + "loss_agg_mode", "seq-mean-token-sum-norm"), NOTE),
    *option(
        "interleaved-batched-p2p",
        "overlap_p2p_comm",
        False,
        ERROR,
        "megatron",
        "megatron-log",
        before=(
            ("pipeline_model_parallel_size", 2),
            ("virtual_pipeline_model_parallel_size", 2),
            ("overlap_p2p_comm", True),
        ),
    ),
    *option(
        "uneven-lengths-under-hybridep",
        "moe_flex_dispatcher_backend",
        "hybridep",
        WARNING,
        "slime",
        "miles",
        "nemo_rl",
        before=(("moe_token_dispatcher_type", "flex"), ("moe_enable_deepep", False)),
    ),
    *option(
        "uneven-lengths-under-hybridep",
        "moe_flex_dispatcher_backend",
        "hybridep",
        WARNING,
        "verl",
        before=(("moe_enable_deepep", REMOVED),),
    ),
    *option("deepep-in-small-groups", "moe_flex_dispatcher_backend", "deepep", NOTE, "megatron"),
    *option("deepep-in-small-groups", "moe_token_dispatcher_type", "flex", NOTE, "megatron-log"),
    *option(
        "deepep-in-small-groups",
        "moe_enable_deepep",
        True,
        NOTE,
        "verl",
        "slime",
        "miles",
        "nemo_rl",
        before=(("moe_enable_deepep", False), ("moe_token_dispatcher_type", "flex")),
    ),
    *option(
        "expert-group-leaves-node", "expert_model_parallel_size", 16, NOTE, "slime", before=(("actor_num_nodes", 8),)
    ),
    Seed("expert-group-leaves-node", "verl", ("trainer.n_gpus_per_node", 4), NOTE),
    Seed("expert-group-leaves-node", "miles", ("--actor-num-gpus-per-node", 4), NOTE),
    Seed("expert-group-leaves-node", "nemo_rl", ("cluster.gpus_per_node", 2), NOTE),
    *option(
        "expert-adapters-under-expert-tensor-parallel",
        "expert_tensor_parallel_size",
        2,
        ERROR,
        "slime",
        "miles",
        before=(("lora_rank", 16), ("actor_num_nodes", 4)),
    ),
    Seed(
        "expert-adapters-under-expert-tensor-parallel",
        "verl",
        (ENGINE + "expert_tensor_parallel_size", 2),
        ERROR,
        (("actor_rollout_ref.model.lora.rank", 16),),
    ),
    Seed(
        "expert-adapters-under-expert-tensor-parallel",
        "nemo_rl",
        ("policy.megatron_cfg.expert_tensor_parallel_size", 2),
        ERROR,
        (("policy.megatron_cfg.peft", {"enabled": True}),),
    ),
    *option("same-experts-on-every-rank", "use_cpu_initialization", True, WARNING, "megatron", before=(NO_LOAD,)),
    *option("same-experts-on-every-rank", "use_cpu_initialization", True, WARNING, "megatron-log", before=(UNSET,)),
    Seed("fp8-scale-mode-differs", "slime", (FP8_SCALES, "0"), WARNING),
    Seed("fp8-scale-mode-differs", "nemo_rl-fp8", (FP8_SCALES, "0"), WARNING),
    Seed(
        "fp8-scale-mode-differs",
        "nemo_rl-fp8",
        ("policy.generation.vllm_cfg.pow2_weight_scaling_factors", True),
        WARNING,
    ),
    Seed(
        "fp8-scale-mode-differs",
        "miles",
        (FP8_SCALES, "0"),
        WARNING,
        (("--fp8-format", "e4m3"), ("--fp8-recipe", "blockwise"), ("--sglang-quantization", "fp8")),
    ),
    Seed(
        "fp8-scale-mode-differs",
        "verl",
        (FP8_SCALES, "0"),
        WARNING,
        (
            (own_key("verl", "fp8"), "e4m3"),
            (own_key("verl", "fp8_recipe"), "blockwise"),
            (ROLLOUT + "quantization", "fp8"),
            (FP8_SCALES, "1"),
        ),
    ),
    Seed(
        "precision-differs-without-correction",
        "slime",
        ("--fp8-format", REMOVED),
        WARNING,
        (("--use-tis", REMOVED),),
    ),
    Seed("precision-differs-without-correction", "miles", ("--sglang-quantization", "fp8"), WARNING),
    Seed("precision-differs-without-correction", "verl", (ROLLOUT + "quantization", "fp8"), WARNING),
    Seed("precision-differs-without-correction", "nemo_rl", ("policy.generation.vllm_cfg.precision", "fp8"), WARNING),
    Seed(
        "precision-differs-without-correction",
        "nemo_rl-fp8",
        ("policy.generation.vllm_cfg.precision", "bfloat16"),
        WARNING,
        (("loss_fn.use_importance_sampling_correction", False),),
    ),
    Seed(
        "correction-without-log-probs",
        "verl",
        (ROLLOUT + "calculate_log_probs", False),
        ERROR,
        (("algorithm.rollout_correction.rollout_is", "token"),),
    ),
    Seed("correction-without-log-probs", "verl-yaml", ("algorithm.rollout_correction.rollout_rs", "token_k1"), ERROR),
    Seed("fp8-misaligned-batches", "slime", ("--data-pad-size-multiplier", 64), WARNING),
    Seed(
        "fp8-misaligned-batches",
        "miles",
        ("--data-pad-size-multiplier", 64),
        WARNING,
        (("--fp8-format", "e4m3"), ("--fp8-recipe", "blockwise")),
    ),
]
