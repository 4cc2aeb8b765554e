"""Traps of the routes themselves: rows and experts that the model never chose."""

from collections.abc import Iterator
from functools import partial

from moe_rl.doctor.traps import ERROR, NOTE, WARNING, Case, Found, Trap, is_on
from moe_rl.planner.registry import POLICIES


@partial(
    Trap,
    name="padding-routes-on-one-expert",
    severity=WARNING,
    title="rows without a route all go to the same experts",
    remedy=(
        "Pack sequences (verl: use_remove_padding=True; miles: --qkv-format thd). In moe-rl give "
        "--filler, so that plans count the rows that are really dispatched."
    ),
    source="verl-project/verl#7075, #7524; miles fills -1 rows by arange(topk)",
    only=("verl", "miles"),
)
def padding_routes(case: Case) -> Iterator[Found]:
    """Padding and the last token of a sequence have no route. verl's R2 replays zeros there, so expert 0 takes them
    all; miles replays 0 .. K-1, so EP rank 0 does. With padded batches that is a phantom hot expert (6 % of the
    load at 2k tokens, 25 % at 512, verl-project/verl#7075), in the step and in every load metric.
    """
    settings, replay = case.settings, case.replays
    packed, framework = settings.packed, settings.framework
    if not replay or packed is None or (framework == "verl" and (replay.value != "R2" or not packed.value)):
        return
    target = "expert 0" if framework == "verl" else "the first top-k experts"
    if packed.value:
        yield Found(
            f"{replay} sends rows without a route to {target}; {packed} leaves few of them.",
            (replay, packed),
            severity=NOTE,
            remedy="In moe-rl give --filler, so that plans count the rows that are really dispatched.",
        )
    else:
        yield Found(
            f"{replay} sends rows without a route to {target}, and {packed} pads every batch.", (replay, packed)
        )


@partial(
    Trap,
    name="replay-without-packing",
    severity=ERROR,
    title="routes are packed, tokens are not: replay gives rows the routes of other tokens",
    remedy="Leave actor_rollout_ref.model.use_remove_padding at True wherever routes are replayed.",
    source="verl 0.9.1 verl/utils/megatron/router_replay_utils.py, set_router_replay_data",
    only=("verl",),
)
def replay_without_packing(case: Case) -> Iterator[Found]:
    """verl packs the sequences of a micro-batch's routes one after the other, whatever it does with the tokens. Where
    these are padded to a common length, row i of the router and row i of the routes are different tokens from the
    first padding on, and there are more rows than routes. moe_rl refuses to balance such a run.
    """
    replay, packed = case.replays, case.settings.packed
    if replay and packed is not None and not packed.value:
        yield Found(f"{replay} replays packed routes, and {packed} pads the tokens.", (replay, packed))


@partial(
    Trap,
    name="quantization-padding-edits-routes",
    severity=WARNING,
    title="padding for quantization adds rows to the routing map after replay",
    remedy=("Leave moe_router_padding_for_quantization (old name ..._for_fp8) off; the grouped GEMM pads by itself."),
    source="NVIDIA/Megatron-LM:megatron/core/transformer/moe/router.py; verl's patch treats it apart",
)
def quantization_padding(case: Case) -> Iterator[Found]:
    """Megatron pads every expert's rows to a multiple of 16 or 32 by editing the routing map after routes were
    replayed. The loss is right, but loads counted from the routes are not what is dispatched, and attach refuses
    it.
    """
    replay, padding = case.replays, case.settings.moe_router_padding_for_quantization
    if replay and padding and padding.value:
        yield Found(f"{padding} pads the map that {replay} has set.", (padding, replay))


@partial(
    Trap,
    name="forced-balance-left-on",
    severity=ERROR,
    title="a benchmark's forced balance is left on",
    remedy="Leave out --moe-router-force-load-balancing.",
    source="NVIDIA/Megatron-LM:megatron/core/transformer/moe/moe_utils.py",
)
def forced_balance(case: Case) -> Iterator[Found]:
    """moe_router_force_load_balancing replaces the router's logits by random ones: good for measuring speed, useless
    for training, and its routes say nothing about balance.
    """
    forced = case.settings.moe_router_force_load_balancing
    if forced and forced.value:
        trains, mock = case.trains_by_rl or case.replays, is_on(case.settings.mock_data)
        severity = ERROR if trains else NOTE if mock else WARNING
        yield Found(f"{forced} makes the router random.", (forced,), severity=severity)


@partial(
    Trap,
    name="trace-of-mock-data",
    severity=WARNING,
    title="routing of mock data is recorded",
    remedy="Record routing on real data.",
    source="arXiv 2605.20982 (as summarized)",
    only=("megatron",),
)
def mock_trace(case: Case) -> Iterator[Found]:
    """Random tokens route far less evenly than text (the Gini coefficient of the load is overstated by up to 2.35
    times): figures for balance from such a trace mean nothing.
    """
    mock, path = case.settings.mock_data, case.settings.moe_routing_trace_path
    if path and mock and mock.value:
        yield Found(f"{path} records the routing of {mock}.", (path, mock))


@partial(
    Trap,
    name="trace-under-recompute",
    severity=WARNING,
    title="the routing trace holds every micro-batch twice",
    remedy="Record without recompute of the MoE layer, or only for a few steps.",
    source="NVIDIA/Megatron-LM:megatron/core/transformer/moe/router_trace.py",
    only=("megatron",),
)
def recomputed_trace(case: Case) -> Iterator[Found]:
    """Megatron's router trace has no micro-batch id, and recomputation fires its hook a second time in backward: what
    record belongs to which micro-batch cannot be told from the file.
    """
    path, recompute, modules = (
        case.settings.moe_routing_trace_path,
        case.settings.recompute_granularity,
        case.settings.recompute_modules,
    )
    if path and recompute and (recompute.value == "full" or (modules and "moe" in modules.value)):
        yield Found(f"{path} records routers that {recompute} runs twice.", (path, recompute))


@partial(
    Trap,
    name="capacity-drops-tokens",
    severity=WARNING,
    title="the trainer drops tokens that the rollout engine keeps",
    remedy="Leave out --moe-expert-capacity-factor in RL.",
    source="NVIDIA/Megatron-LM:megatron/core/transformer/moe/moe_utils.py",
)
def capacity(case: Case) -> Iterator[Found]:
    """With a capacity factor Megatron drops what an expert has no room for; rollout engines never drop.
    Log-probabilities of the two differ for those tokens whatever is replayed.
    """
    factor = case.settings.moe_expert_capacity_factor
    if factor and factor.value > 0 and (case.trains_by_rl or case.replays):
        yield Found(f"{factor} limits what an expert takes.", (factor,))


@partial(
    Trap,
    name="aux-loss-moves-router",
    severity=WARNING,
    title="a balancing loss pulls the router away from the routes that are replayed",
    remedy=("Set --moe-aux-loss-coeff 0 (moe_router_load_balancing_type none); moe_rl balances by placement instead."),
    source="NVIDIA-NeMo/RL:examples/configs/grpo_math_1B.yaml",
)
def aux_loss(case: Case) -> Iterator[Found]:
    """The auxiliary loss moves the router to even load while the routes stay the rollout's: the router learns to
    choose other experts than those that act. NeMo-RL saw log-probability errors diverge under seq_aux_loss.
    """
    settings = case.settings
    coefficient, kind = settings.moe_aux_loss_coeff, settings.moe_router_load_balancing_type
    learns = case.trains_by_rl or case.replays
    if is_on(settings.freeze_moe_router) or not learns or (kind and kind.value == "none"):
        return
    if coefficient and coefficient.value > 0:
        yield Found(f"{coefficient} trains the router for even load.", (coefficient,))


@partial(
    Trap,
    name="expert-bias-drifts",
    severity=WARNING,
    title="the expert bias is updated from replayed routes",
    remedy="Set --moe-router-bias-update-rate 0, as slime's, miles' and NeMo-RL's own configurations do.",
    source="PrimeIntellect-ai/prime-rl#2953; Megatron's default rate is 1e-3",
)
def expert_bias(case: Case) -> Iterator[Found]:
    """Loss-free balancing nudges each expert's bias by the load it sees. Under replay that load is the rollout's,
    padding rows included, and does not answer to the bias: it drifts on, and the rollout engine gets it with the
    next weights.
    """
    bias, rate = case.settings.moe_router_enable_expert_bias, case.settings.moe_router_bias_update_rate
    if case.replays and bias and bias.value and rate and rate.value > 0:
        yield Found(f"{bias} is updated at {rate} under {case.replays}.", (bias, rate))


@partial(
    Trap,
    name="rollout-places-experts",
    severity=NOTE,
    title="the rollout engine's balancer may renumber experts",
    remedy="Check on one prompt that returned ids stay below num_experts and match the router's.",
    source="sgl-project/sglang:python/sglang/srt/hardware_backend/npu/moe/topk.py; layers/moe/topk.py of 0.5.23",
    only=("verl", "slime", "miles"),
)
def rollout_eplb(case: Case) -> Iterator[Found]:
    """An engine with EPLB or redundant experts sends tokens to physical copies. Where it records after that mapping, as
    SGLang's Ascend path does, the routes hold physical ids, and the trainer replays other experts. SGLang 0.5.23 on
    CUDA and vLLM 0.33.0 record before it.
    """
    replay, eplb = case.replays, case.settings.rollout_eplb
    if replay and replay.value == "R3" and eplb and eplb.value and not _of_vllm(case):
        yield Found(f"{eplb} moves experts in the engine whose routes {replay} replays.", (eplb, replay))


@partial(
    Trap,
    name="vllm-eplb-misplaces-updates",
    severity=ERROR,
    title="vLLM's EPLB moves experts, and weight updates go where they were",
    remedy=(
        "Leave enable_eplb off in vLLM. To balance its ranks without it: moe-rl plan --export vllm-permutation, an "
        "experiment (docs/frameworks/rollout-engines.md)."
    ),
    source="vllm 0.33.0: fused_moe/routed_experts.py, distributed/eplb/eplb_state.py; vllm-project/vllm#55228",
    only=("verl", "nemo_rl"),
)
def vllm_eplb(case: Case) -> Iterator[Found]:
    """vLLM loads weights by the map that it started with. After its balancer has rearranged experts, which it does for
    the first time after a quarter of step_interval, an update writes them into the slots of other experts, without a
    word, and the rollouts come from a model that nobody trained.
    """
    eplb = case.settings.rollout_eplb
    if eplb and eplb.value and _of_vllm(case):
        yield Found(f"{eplb} rearranges experts that every step's weight update overwrites.", (eplb,))


def _of_vllm(case: Case) -> bool:
    """Return whether the setting of EPLB is one of vLLM's, and vLLM is what runs, as far as the files say."""
    eplb, engine = case.settings.rollout_eplb, case.settings.rollout_engine
    return eplb is not None and "vllm" in eplb.written and (engine is None or engine.value == "vllm")


@partial(
    Trap,
    name="expert-order-in-export",
    severity=ERROR,
    title="weights are exported under the wrong expert's name",
    remedy=(
        "Wrap export and checkpoint in `with balancer.canonical():`, or take a policy that only replicates (ultraep)."
    ),
    source=("slime/backends/megatron_utils/update_weight/common.py; megatron-core experts.py sharded_state_dict"),
)
def export_order(case: Case) -> Iterator[Found]:
    """Every framework's export and checkpoint takes the global expert id to be ep_rank * num_local + i. After experts
    have moved for good, that ships expert a's weights as expert b's, and the rollout engine runs them without a
    word.
    """
    policy, placement = case.settings.balancing_policy, case.settings.enable_expert_placement
    if placement and placement.value:
        yield Found(f"{placement} moves experts between ranks for good.", (placement,))
    if policy and _may_move_experts(policy.value):
        yield Found(f"{policy} may reorder experts between steps.", (policy,), severity=WARNING)


@partial(
    Trap,
    name="reorder-of-offloaded-state",
    severity=WARNING,
    title="reordered experts whose optimizer state lies in host memory",
    remedy="Reorder rarely, with the predicted pay-back, or take a policy that only replicates (ultraep).",
    source="ReLibra and RoutePack move state on the GPU; moe_rl.balancing.migrate",
)
def offloaded_reorder(case: Case) -> Iterator[Found]:
    """A reorder moves weights, fp32 masters and both Adam moments. With the state offloaded to the CPU every move
    passes through host memory twice, and seldom pays back.
    """
    policy, offload = case.settings.balancing_policy, case.settings.optimizer_cpu_offload
    if policy and _may_move_experts(policy.value) and offload and offload.value:
        yield Found(f"{policy} may move experts whose state {offload} keeps on the host.", (policy, offload))


def _may_move_experts(policy: str) -> bool:
    return policy in POLICIES and POLICIES[policy].moves_experts()
