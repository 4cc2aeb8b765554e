"""verl's calls around a pass: every `forward_backward_batch` is planned, and the update after it beside what runs."""

import functools
from collections.abc import Callable
from typing import Any

from moe_rl.balancing.pass_source import PassSource
from moe_rl.frameworks.megatron.attach import looked_ahead
from moe_rl.frameworks.verl.engine_runs import RUNS, EngineRun, engine_run_of, forming_micro_batches_of, run_of
from moe_rl.frameworks.verl.micro_batches import keys_of, source_of


def planned_schedules(original: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return Megatron's schedule function with every call of a balanced engine planned."""
    function = original()

    @functools.wraps(function)
    def planned(**kwargs: Any) -> Any:
        engine_run = RUNS.get(kwargs["model"][0])
        if engine_run is None or engine_run.run.idle:
            return function(**kwargs)
        engine, run = engine_run.engine, engine_run.run
        micro_batches, kwargs["data_iterator"] = looked_ahead(kwargs["data_iterator"], kwargs["num_microbatches"])
        source: PassSource | None = None  # the pass that is prepared, if there is a balancer
        if run.balancer is not None and engine_run.look_ahead.prepared_batch is None:
            source = source_of(micro_batches, engine, run.balancer.model)
        shift, forward_only = run.router_shift, kwargs["forward_only"]
        keys = None
        if shift is not None:
            keys = [keys_of(batch, engine, shift, forward_only=forward_only) for batch in micro_batches]
        return run.around(lambda: function(**kwargs), source, keys=keys, forward_only=forward_only)

    return planned


def reported(original: Callable[..., Any], self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
    """Let verl cut an update to micro-batches that fit, plan the update after it beside what runs until then, and put
    the pass's metrics beside verl's, where verl has some: on the last pipeline stage."""
    from verl.utils.tensordict_utils import assign_non_tensor, get_non_tensor_data

    engine_run, fact, config = engine_run_of(self), functools.partial(get_non_tensor_data, data), self.engine_config
    if engine_run is None:
        return original(self, data, loss_function, forward_only=forward_only)
    run, look_ahead = engine_run.run, engine_run.look_ahead
    limit = None
    if not forward_only and fact("use_dynamic_bsz", True):
        limit = fact("max_token_len_per_gpu", None)
    if limit is not None and fact("force_group_size", 1) == 1 and not config.dynamic_context_parallel:
        longest = -(-max(map(len, data["input_ids"].unbind())) // config.context_parallel_size)
        assign_non_tensor(data, max_token_len_per_gpu=run.micro_batch_limit(limit, longest))
    if look_ahead.prepared_batch is not None and not look_ahead.comes(data, forward_only=forward_only):
        run.drop_prepared()
    try:
        with forming_micro_batches_of(None if forward_only else self):
            output = original(self, data, loss_function, forward_only=forward_only)
        _look_ahead(data, engine_run, forward_only=forward_only)
    except BaseException:
        # The same batch may come once more, and the pass that was prepared for it is used up.
        look_ahead.prepared_batch = None
        run.drop_prepared()
        raise
    finally:
        if limit is not None:
            assign_non_tensor(data, max_token_len_per_gpu=limit)
    if output.get("metrics") is not None and not forward_only:
        # verl's worker chains the lists of the data-parallel ranks, and raises for a number.
        output["metrics"].update({name: [value] for name, value in run.last_metrics.items()})
    return output


def _look_ahead(data: Any, engine_run: EngineRun, *, forward_only: bool) -> None:
    """Let the update after the pass that has run be planned beside whatever runs until it comes; a collective."""
    engine, run, look_ahead = engine_run.engine, engine_run.run, engine_run.look_ahead
    look_ahead.prepared_batch = None
    # Rows of a dynamic context-parallel group are cut by another scheduler; buffers of one size want replayed routes.
    if run.balancer is None or engine.engine_config.dynamic_context_parallel or run.balancer.config.kernels.static_rows:
        return
    # Sequences change their micro-batch by where the experts will be, which is not known while homes are searched.
    if run.packs and run.balancer.searches_homes:
        return
    with forming_micro_batches_of(engine):
        micro_batches = look_ahead.after(data, engine, forward_only=forward_only)
    if micro_batches is not None:
        run.balancer.prepare(source_of(micro_batches, engine, run.balancer.model))


def weighed(
    original: Callable[..., Any], self: Any, output: Any, data: Any, forward_only: bool, *args: Any, **kwargs: Any
) -> Any:
    """Have gamma at hand for the loss of a micro-batch, whose forward has run."""
    import torch
    from verl.workers.utils.padding import no_padding_2_padding

    from moe_rl.frameworks.verl.losses import GAMMA

    run = run_of(self)
    if run is not None and run.router_shift is not None and not forward_only:
        # verl's function takes the token before each of the response, and fills up with zeros.
        keys = torch.cat(list(run.router_shift.coming())).to(data["input_ids"].device)
        GAMMA.set(run.router_shift.of(no_padding_2_padding(keys + 1, data) - 1).ratio)
    return original(self, output, data, forward_only, *args, **kwargs)
