"""All traps. A new one is one function in a module of this folder and one line here."""

from moe_rl.core.registry import Registry
from moe_rl.doctor.checks import attach, environment, parallel, precision, replay, routes
from moe_rl.doctor.traps import Trap

TRAPS: Registry[Trap] = Registry(
    "trap",
    [
        replay.fused_router,
        replay.replay_half_on,
        replay.mtp,
        replay.virtual_pipeline,
        replay.recompute_order,
        replay.layer_axis,
        replay.no_replay,
        routes.padding_routes,
        routes.quantization_padding,
        routes.forced_balance,
        routes.mock_trace,
        routes.recomputed_trace,
        routes.capacity,
        routes.aux_loss,
        routes.expert_bias,
        routes.rollout_eplb,
        routes.export_order,
        routes.offloaded_reorder,
        parallel.experts_not_divisible,
        parallel.without_sequence_parallel,
        parallel.not_aligned,
        parallel.batched_p2p,
        parallel.hybridep,
        parallel.small_groups,
        parallel.same_experts,
        precision.scale_mode,
        precision.precision_differs,
        precision.without_log_probs,
        precision.misaligned,
        environment.missing_psutil,
        environment.half_installed,
        environment.missing_triton,
        environment.old_megatron,
        environment.no_dispatcher,
        environment.no_transformer_engine,
        attach.attach_refuses,
    ],
)
