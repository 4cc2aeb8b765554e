"""Traps of routing replay: it is silently off, or replays the routes of another layer or micro-batch."""

from collections.abc import Iterator

from moe_rl.doctor.traps import NOTE, WARNING, Case, Found, above


def fused_router_bypasses_replay(case: Case) -> Iterator[Found]:
    """The fused branch of Megatron's topk_routing_with_score_function returns before it consults RouterReplay, and
    nothing rejects the combination of fused router and replay. Every token then goes to the experts that the live
    router chooses, so replay is silently off.
    """
    replay, fusion = case.replays, case.settings.moe_router_fusion
    if replay and fusion:
        yield Found("{} fuses the router while {} replays routes.", fusion, replay)


def replay_half_on(case: Case) -> Iterator[Found]:
    """With R3, the trainer replays the routes that the rollout engine returns. If the engine returns no routes, the
    trainer fails on the first batch. If the trainer does not replay the returned routes, transferring them costs time
    and has no effect.
    """
    settings, replay = case.settings, case.replays
    returns, engine = settings.rollout_returns_routes, settings.rollout_engine
    if replay and replay.value == "R3" and returns is not None and not returns:
        yield Found("{} replays the rollout's routes, but {} does not return them.", replay, returns)
    if returns and settings.framework == "verl" and (not replay or replay.value != "R3"):
        mode = "router_replay.mode is not R3"
        if replay:
            mode = "{} does not replay them"
        yield Found(f"{{}} returns routes, but {mode}.", returns, replay, severity=WARNING)
    if settings.framework == "nemo_rl" and replay and engine and engine.value != "vllm":
        yield Found("{} works only with vLLM, but the backend is {}.", replay, engine)


def mtp_aliases_decoder_layers(case: Case) -> Iterator[Found]:
    """Megatron numbers multi-token prediction (MTP) layers from 1, as it does decoder layers, and the RouterReplay
    instances of both are in one list. MTP layer k then silently replays the routes of decoder layer k, or replay fails
    because the list has more entries than the routes have layers.
    """
    replay, layers, training = case.replays, case.settings.mtp_num_layers, case.settings.mtp_training
    if not replay or not layers:
        return
    sentence = "{} adds layers of multi-token prediction while {} replays routes"
    covers, framework = case.settings.replay_covers_mtp, case.settings.framework
    # What each framework does about it: Megatron nothing, miles always, slime where the layers do not train.
    if framework == "megatron":
        yield Found(f"{sentence} from a list that mixes both kinds of layers.", layers, replay)
    elif covers:
        yield Found(f"{sentence}, and {{}} replays in those layers too.", layers, replay, covers)
    elif framework == "miles" or (framework == "slime" and not training):
        remedy = "Do nothing unless replay metrics show more layers than the trace has."
        left_out = f"{sentence}, but {framework} leaves these layers out of replay."
        yield Found(left_out, layers, replay, severity=NOTE, remedy=remedy)
    else:
        yield Found(f"{sentence}.", layers, replay, severity=WARNING)


def virtual_pipeline_replay(case: Case) -> Iterator[Found]:
    """With virtual stages, a rank's RouterReplay instances are in the order of its model chunks, so its first two
    instances can belong to layers 1 and 3. Forward passes of other micro-batches run between the forward and the
    backward pass of a micro-batch. Routes that are assigned by position then reach the wrong layers, and the recompute
    queue mixes up micro-batches.
    """
    settings, replay = case.settings, case.replays
    stages, layers = settings.virtual_pipeline_model_parallel_size, settings.num_layers_per_virtual_pipeline_stage
    if above(stages, 1):
        interleaved = stages
    else:
        interleaved = layers if above(layers, 0) else None
    if not replay or interleaved is None:
        return
    sentence = "{} interleaves pipeline stages while {} replays routes"
    if settings.framework == "nemo_rl":
        yield Found(f"{sentence}: NeMo-RL stops at startup.", interleaved, replay)
    elif settings.framework == "megatron":
        yield Found(f"{sentence}.", interleaved, replay, severity=WARNING)
    else:
        remedy = "Compare one step with and without virtual stages before a long run."
        by_chunk = f"{sentence}; {settings.framework} assigns routes by chunk."
        yield Found(by_chunk, interleaved, replay, severity=NOTE, remedy=remedy)


def recompute_replay_order(case: Case) -> Iterator[Found]:
    """With recomputation, the backward pass runs the router again and must take its own micro-batch's routes from a
    queue. In a pipeline, forward passes of other micro-batches run between the forward and the backward pass of a
    micro-batch. Each backward pass must therefore start by switching to REPLAY_BACKWARD. Without the switch, results
    are wrong only with PP > 1, so a test without pipeline parallelism does not show the fault.
    """
    settings, replay = case.settings, case.replays
    recompute, stages = case.router_recompute, settings.pipeline_model_parallel_size
    if replay and recompute and stages and above(stages, 1):
        yield Found("{} recomputes routers under {} while {} replays routes.", recompute, stages, replay)


def layer_axis_counts_dense_layers(case: Case) -> Iterator[Found]:
    """SGLang and vLLM return routes for all transformer layers, dense layers included. Other sources return routes
    for MoE layers only. Code that expects one layer axis and gets the other silently assigns routes to the wrong
    layers.
    """
    replay, pattern = case.replays, case.settings.moe_layer_freq
    if not replay or not pattern:
        return
    layers = pattern.value
    # One number n means every n-th layer, a list has 1 for an MoE layer.
    num_dense = layers.count(0) if len(layers) > 1 else 0
    if num_dense or (len(layers) == 1 and layers[0] > 1):
        if num_dense:
            how_many = f"{num_dense} of {len(layers)} layers"
        else:
            how_many = f"all but one of every {layers[0]} layers"
        is_megatron = case.settings.framework == "megatron"
        if is_megatron:
            instances = ": RouterReplay instances count MoE layers only."
        else:
            instances = "."
        sentence = f"{{}} makes {how_many} dense while {{}} replays routes{instances}"
        yield Found(sentence, pattern, replay, severity=WARNING if is_megatron else NOTE)


def no_replay(case: Case) -> Iterator[Found]:
    """Without replay, the rollout engine and the trainer choose experts independently. About 10 % of the router
    decisions differ, and most tokens get different experts in at least one layer. These differences add noise to
    importance ratios. Balancing does not need replay: without it, plans come from the log-prob pass, and are nearly
    exact for the first update of a rollout.
    """
    settings = case.settings
    setting = settings.num_moe_experts or settings.expert_model_parallel_size
    if case.is_moe and setting and not case.replays and not settings.rollout_returns_routes:
        yield Found("{} shows that the model is an MoE model, but no setting turns on routing replay.", setting)
