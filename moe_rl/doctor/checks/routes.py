"""Traps of the routes themselves: rows and experts that the model never chose."""

from collections.abc import Iterator

from moe_rl.doctor.traps import ERROR, NOTE, WARNING, Case, Found, above
from moe_rl.planner.registry import POLICIES


def padding_routes_on_one_expert(case: Case) -> Iterator[Found]:
    """Padding tokens and the last token of a sequence have no route. For these tokens, verl's R2 replays zeros, so
    they all go to expert 0; miles replays experts 0 to K-1, so they all go to EP rank 0. With padded batches,
    expert 0 seems hot in every load metric: it gets 6 % of the load at 2k tokens and 25 % at 512 tokens
    (verl-project/verl#7075).
    """
    settings, replay = case.settings, case.replays
    packed, framework = settings.packed, settings.framework
    if not replay or packed is None or (framework == "verl" and (replay.value != "R2" or not packed.value)):
        return
    # miles replays 0 .. K-1 in such a row, verl zeros.
    target = "the first top-k experts"
    if framework == "verl":
        target = "expert 0"
    if packed.value:
        remedy = "In moe-rl's commands, set --filler so that plans count the tokens that are really dispatched."
        few = f"{{}} sends tokens without a route to {target}; with {{}} there are few of these tokens."
        yield Found(few, replay, packed, severity=NOTE, remedy=remedy)
    else:
        yield Found(f"{{}} sends tokens without a route to {target}, and {{}} pads every batch.", replay, packed)


def replay_without_packing(case: Case) -> Iterator[Found]:
    """verl packs the routes of a micro-batch, sequence after sequence, even if it pads the sequences to a common
    length. After the first padding token, route i and token i no longer belong together, and there are more tokens than
    routes. moe_rl refuses to balance such a run.
    """
    replay, packed = case.replays, case.settings.packed
    if replay and packed is not None and not packed:
        yield Found("{} replays packed routes, and {} pads the tokens.", replay, packed)


def quantization_padding_edits_routes(case: Case) -> Iterator[Found]:
    """After replay, Megatron changes the routing map so that each expert gets a multiple of 16 or 32 tokens. The loss
    is correct, but the loads counted from the routes differ from the dispatched loads. moe_rl therefore refuses to
    balance runs with this option.
    """
    replay, padding = case.replays, case.settings.moe_router_padding_for_quantization
    if replay and padding:
        yield Found("{} changes the routing map that {} has set.", padding, replay)


def forced_balance_left_on(case: Case) -> Iterator[Found]:
    """moe_router_force_load_balancing replaces the router's logits with random ones. This is useful for measuring
    speed, but the model cannot learn, and the routes say nothing about the balance of a real run.
    """
    forced = case.settings.moe_router_force_load_balancing
    if forced:
        # Random routers on random tokens are how speed is measured.
        if case.learns:
            severity = ERROR
        elif case.settings.mock_data:
            severity = NOTE
        else:
            severity = WARNING
        yield Found("{} makes routing random.", forced, severity=severity)


def trace_of_mock_data(case: Case) -> Iterator[Found]:
    """Random tokens are routed far less evenly than text: the Gini coefficient of the load is up to 2.35 times too
    high. Load imbalance measured on such a trace is meaningless.
    """
    mock, path = case.settings.mock_data, case.settings.moe_routing_trace_path
    if path is not None and mock:
        yield Found("{} records the routing of the random tokens of {}.", path, mock)


def trace_under_recompute(case: Case) -> Iterator[Found]:
    """Megatron's router trace has no micro-batch ids, and recomputation records every router's choices a second time in
    the backward pass. The file does not show which record belongs to which micro-batch.
    """
    path, recompute = case.settings.moe_routing_trace_path, case.router_recompute
    if path is not None and recompute:
        yield Found("{} records every call of a router, and {} calls each router twice.", path, recompute)


def capacity_drops_tokens(case: Case) -> Iterator[Found]:
    """With a capacity factor, Megatron drops tokens that exceed an expert's capacity. Rollout engines never drop
    tokens. For dropped tokens, the log-probabilities of trainer and engine differ even with routing replay.
    """
    factor = case.settings.moe_expert_capacity_factor
    if factor and above(factor, 0) and case.learns:
        yield Found("{} limits how many tokens an expert accepts.", factor)


def aux_loss_moves_router(case: Case) -> Iterator[Found]:
    """The auxiliary loss moves the router toward even load, but the replayed routes remain those of the rollout. The
    router then drifts away from the experts that compute the tokens. NeMo-RL saw log-probability errors diverge with
    seq_aux_loss.
    """
    settings = case.settings
    coefficient, kind = settings.moe_aux_loss_coeff, settings.moe_router_load_balancing_type
    if settings.freeze_moe_router or not case.learns or (kind and kind.value == "none"):
        return
    if coefficient and above(coefficient, 0):
        yield Found("{} trains the router for even load.", coefficient)


def expert_bias_drifts(case: Case) -> Iterator[Found]:
    """Loss-free balancing adjusts each expert's bias to the measured load. With replay, the measured load comes from
    the rollout's routes, including padding, and does not respond to the bias. The bias therefore keeps drifting, and
    the next weight sync sends it to the rollout engine.
    """
    bias, rate = case.settings.moe_router_enable_expert_bias, case.settings.moe_router_bias_update_rate
    if case.replays and bias and rate and above(rate, 0):
        yield Found("{} and {} update the expert bias while {} replays routes.", bias, rate, case.replays)


def rollout_places_experts(case: Case) -> Iterator[Found]:
    """A rollout engine with EPLB or redundant experts maps expert ids to physical copies. If it records routes after
    that mapping, as SGLang does on Ascend, the routes contain physical ids, and the trainer replays the wrong experts.
    SGLang 0.5.23 on CUDA and vLLM 0.33.0 record routes before the mapping.
    """
    replay, eplb = case.replays, case.settings.rollout_eplb
    if replay and replay.value == "R3" and eplb and not _of_vllm(case):
        yield Found("{} moves experts in the engine whose routes {} replays.", eplb, replay)


def vllm_eplb_misplaces_updates(case: Case) -> Iterator[Found]:
    """vLLM always loads weights according to its initial expert map. Its balancer (EPLB) rearranges experts for the
    first time after a quarter of step_interval. From then on, every weight update silently writes experts into the
    slots of other experts, so rollouts come from a model that was never trained.
    """
    eplb = case.settings.rollout_eplb
    if eplb and _of_vllm(case):
        yield Found("{} moves experts, but every step's weight update goes to the experts' old slots.", eplb)


def _of_vllm(case: Case) -> bool:
    """Return whether the EPLB setting is one of vLLM's and, as far as the files say, the engine is vLLM."""
    eplb, engine = case.settings.rollout_eplb, case.settings.rollout_engine
    if eplb is None:
        return False
    if case.settings.framework == "skyrl":  # whose key names no engine
        return engine is not None and engine.value == "vllm"
    return "vllm" in eplb.written and (engine is None or engine.value == "vllm")


def fixed_pause_before_weight_sync(case: Case) -> Iterator[Found]:
    """AReaL asks its engines to pause and then sleeps for pause_grace_period, whether or not the engines have paused.
    If the period is too short, weights arrive while requests still run, so one request mixes tokens of two policies
    under one version number. If the period is too long, every sync wastes time. A sync that waits for the engines'
    confirmation needs no such setting.
    """
    pause = case.settings.weight_sync_pause_s
    if pause and above(pause, 0):
        yield Found("{} delays every weight sync, whatever the engines do.", pause)


def expert_order_in_export(case: Case) -> Iterator[Found]:
    """The export and checkpoint code of every framework assumes that local expert i has the global id ep_rank *
    num_local + i. After experts have moved permanently, this code exports expert a's weights as expert b's. The rollout
    engine then silently computes with the wrong experts.
    """
    policy, placement = case.settings.balancing_policy, case.settings.enable_expert_placement
    if placement:
        yield Found("{} moves experts between ranks permanently.", placement)
    if policy and _may_move_experts(policy.value):
        yield Found("{} may reorder experts between steps.", policy, severity=WARNING)


def reorder_of_offloaded_state(case: Case) -> Iterator[Found]:
    """Moving an expert to another rank moves its weights, fp32 master weights and both Adam moments. If this state is
    offloaded to the CPU, every move passes through host memory twice, so moving experts seldom saves time.
    """
    settings = case.settings
    policy, offload = settings.balancing_policy or settings.adapter_policy, settings.optimizer_cpu_offload
    stay = settings.adapter_reorders is not None and not settings.adapter_reorders
    if policy and offload and _may_move_experts(policy.value) and not stay:
        yield Found("{} may move experts whose optimizer state {} keeps on the host.", policy, offload)


def _may_move_experts(policy: str) -> bool:
    return policy in POLICIES and POLICIES[policy].levers.move_homes


def updates_planned_from_history(case: Case) -> Iterator[Found]:
    """If verl packs sequences, moe_rl knows to which sequence each token belongs, and plans an update from the routes
    of that update's own log-prob pass. If verl pads sequences, moe_rl plans an update from the mean load of the
    previous pass, which helps only if loads hardly change. The run logs once that it plans from "history".
    """
    packed, framework = case.settings.packed, case.settings.framework
    if framework == "verl" and packed is not None and not packed.value and not case.replays:
        yield Found("{} pads the tokens, and nothing is replayed.", packed)
