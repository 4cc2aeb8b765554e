"""verl's Megatron engine: passes are planned from the routes that verl replays (R2 and R3), or from what routers chose
in the log-prob pass, with no user code.

MOE_RL=moe-rl python -m verl.trainer.main_ppo ...

Every `forward_backward_batch` is one pass: micro-batches, static, dynamic or of dynamic context parallelism, are
complete when verl hands them to Megatron's schedule, which is where they are looked at. Experts move at the begin of an
update's pass, when verl has set gradients to zero. Reference and value models run as they are.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.pass_source import PassSource
from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.core.errors import require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.post_import import when_imported, wrap
from moe_rl.frameworks.megatron.attach import looked_ahead
from moe_rl.frameworks.routes import of_moe_layers
from moe_rl.frameworks.run_settings import Settings
from moe_rl.frameworks.verl.contract import FRAMEWORK
from moe_rl.frameworks.verl.driver import micro_batches_of_column
from moe_rl.frameworks.verl.export import ExportedWeights, split_weights

ENGINE = "verl.workers.engine.megatron.transformer_impl"
# First model chunk of an engine -> its engine, its `MegatronRun` and its `LookAhead`.
RUNS: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()
# The engine that forms the micro-batches of an update.
UPDATE: "ContextVar[Any]" = ContextVar("moe_rl_verl_update", default=None)


def install_when_imported(settings: Settings) -> None:
    """Balance the engines of this process as soon as verl imports their module."""
    when_imported(ENGINE, lambda module: install(module, settings=settings))


def install(module: ModuleType, *, settings: Settings) -> Callable[[], None]:
    """Wrap the engine's methods and return what undoes it; `module` is verl's `transformer_impl`."""
    from verl.utils import tensordict_utils

    from moe_rl.frameworks.verl.ahead import iterated

    engine, home = module.MegatronEngine, functools.partial(_at_home, module=module)
    undo = [
        wrap(module, "get_forward_backward_func", _planned_schedules),
        wrap(module, "prepare_micro_batches", _packed_anew),
        wrap(engine, "_build_optimizer", functools.partial(_built, settings=settings)),
        wrap(engine, "forward_backward_batch", _reported),
        wrap(module.MegatronEngineWithLMHead, "postprocess_micro_batch_func", _weighed),
        wrap(engine, "to", functools.partial(_moved, module=module)),
        wrap(engine, "get_per_tensor_param", _exported),
        wrap(engine, "get_per_tensor_param_shard", _exported),
        wrap(engine, "save_checkpoint", home),
        wrap(engine, "load_checkpoint", home),
        wrap(tensordict_utils, "make_iterator", iterated),
    ]

    def uninstall() -> None:
        for restore in undo:
            restore()

    return uninstall


def _run_of(engine: Any) -> Any:
    """Return the engine's `MegatronRun`, None where it has none."""
    chunks = getattr(engine, "module", None)
    return RUNS[chunks[0]][1] if chunks and chunks[0] in RUNS else None


def _built(original: Callable[..., Any], self: Any, *args: Any, settings: Settings, **kwargs: Any) -> Any:
    """Attach when the optimizer is built: the parameters are still where they will be trained, and not yet offloaded.

    Engines without optimizer (the reference) and value models stay plain.
    """
    from moe_rl.frameworks.megatron_run import MegatronRun, say_once
    from moe_rl.frameworks.router_shift import RouterShiftRun
    from moe_rl.frameworks.verl.ahead import LookAhead

    optimizer = original(self, *args, **kwargs)
    if optimizer is not None and not getattr(self, "is_value_model", False):
        packed = self.engine_config.use_remove_padding or not self.enable_routing_replay
        refusal = (
            "" if packed else "use_remove_padding is False: verl packs the routes that it replays, not the tokens."
        )
        run = MegatronRun.attach(FRAMEWORK, self.module, optimizer, settings, refusal=refusal, guarded=True)
        if run.balancer is not None and not self.engine_config.use_remove_padding:
            say_once(
                "verl pads the tokens (use_remove_padding=False), so updates are planned from the pass before them "
                "(source history), and not from their own log-prob pass."
            )
        if settings.router_shift:
            FRAMEWORK.check()
            for name, wanted in {"use_remove_padding": True, "dynamic_context_parallel": False}.items():
                value = getattr(self.engine_config, name, wanted)
                require(value == wanted, f"MOE_RL_ROUTER_SHIFT wants {name}={wanted} of verl's engine.")
            run.router_shift = RouterShiftRun(self.module, floor=settings.router_shift)
        RUNS[self.module[0]] = self, run, LookAhead()
    return optimizer


def _planned_schedules(original: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    function = original()

    @functools.wraps(function)
    def planned(**kwargs: Any) -> Any:
        engine, run, look_ahead = RUNS.get(kwargs["model"][0], (None, None, None))
        if run is None or run.idle:
            return function(**kwargs)
        micro_batches, kwargs["data_iterator"] = looked_ahead(kwargs["data_iterator"], kwargs["num_microbatches"])
        source: PassSource | None = None  # the pass that is prepared, if there is a balancer
        if run.balancer is not None and look_ahead.prepared is None:
            source = _source_of(micro_batches, engine, run.balancer.model)
        shift, forward_only = run.router_shift, kwargs["forward_only"]
        keys = shift and [_keys(batch, engine, shift, forward_only=forward_only) for batch in micro_batches]
        return run.around(lambda: function(**kwargs), source, keys=keys, forward_only=forward_only)

    return planned


def _packed_anew(original: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """Let an update's sequences run in the driver's micro-batches, and change them, where verl's own are dynamic."""
    from verl.utils.tensordict_utils import get_non_tensor_data, index_select_tensor_dict

    engine = UPDATE.get()
    _, run, look_ahead = (None, None, None) if engine is None else RUNS.get(engine.module[0], (None, None, None))
    if look_ahead is not None and look_ahead.prepared is data and look_ahead.indices is not None:
        return [
            index_select_tensor_dict(data, indices_of_batch) for indices_of_batch in look_ahead.indices
        ], look_ahead.indices
    micro_batches, indices = original(data, *args, **kwargs)
    grouped = get_non_tensor_data(data, "force_group_size", 1) > 1
    if run is None or indices is None or grouped:
        return micro_batches, indices
    budget = data["max_token_len_per_gpu"] * get_non_tensor_data(data, "sp_size", 1)
    of_driver = micro_batches_of_column(data, budget)
    if of_driver is not None:
        indices = of_driver
        micro_batches = [index_select_tensor_dict(data, indices_of_batch) for indices_of_batch in indices]
    if not run.packs or len(indices) == 1:
        return micro_batches, indices
    replayed = data.get("routed_experts", None)
    routes = None
    if replayed is not None:
        routes = [of_moe_layers(indices_of_batch, run.balancer.model) for indices_of_batch in replayed.unbind()]
    packed = run.balancer.packed(indices, data["input_ids"].unbind(), token_budget=budget, routes=routes)
    return [index_select_tensor_dict(data, indices_of_batch) for indices_of_batch in packed], packed


def _source_of(micro_batches: list[Any], engine: Any, model: MoeModelSpec) -> PassSource:
    """Return what verl's micro-batches say before their pass: routes to replay, sequences, or their number alone."""
    sequences = None
    if engine.engine_config.use_remove_padding:  # the order of padded rows is not read here
        sequences = [_held(batch, engine) for batch in micro_batches]
    if all(batch.get("routed_experts", None) is not None for batch in micro_batches):
        return PassSource.replayed([_rows(batch, engine, model) for batch in micro_batches], sequences)
    return PassSource.unknown(len(micro_batches)) if sequences is None else PassSource.expected(sequences)


def _keys(micro_batch: Any, engine: Any, shift: Any, *, forward_only: bool) -> Any:
    """Return what the router shift knows the tokens of each sequence by, and this rank's rows."""
    keys = shift.keys(micro_batch["input_ids"].unbind(), forward_only=forward_only)
    return keys, _packed([keys_of_sequence + 1 for keys_of_sequence in keys], micro_batch, engine) - 1


def _rows(micro_batch: Any, engine: Any, model: MoeModelSpec) -> NDArray[np.signedinteger]:
    """Return [N, L, K]: the routes that this rank's rows will replay, in Megatron's order, -1 on the others.

    Rows are packed by verl's own function, so that padding, context parallelism and their order are verl's. It pads
    with zeros, so ids go in plus one. R3 replays neither the last token of a sequence nor a sequence without response.
    """
    import torch
    from verl.utils.megatron import router_replay_utils as replay

    tokens, routes = micro_batch["input_ids"], micro_batch["routed_experts"]
    masks = [torch.ones(len(routes_of_sequence), dtype=torch.bool) for routes_of_sequence in routes.unbind()]
    if engine.engine_config.router_replay.mode == "R3":
        routes = replay.align_r3_router_replay_data(routes, tokens)
        masks = list(replay.build_r3_replay_mask(tokens, micro_batch["response_mask"]).unbind())
    shifted = [
        (routes_of_sequence.to(torch.int32) + 1) * mask[:, None, None].to(routes_of_sequence.device)
        for routes_of_sequence, mask in zip(routes.unbind(), masks, strict=True)
    ]
    return of_moe_layers(_packed(shifted, micro_batch, engine) - 1, model)


def _held(micro_batch: Any, engine: Any) -> SequenceRows:
    """Return of which sequence each of this rank's rows is."""
    import torch

    tokens = micro_batch["input_ids"].unbind()
    numbers = [torch.full((len(ids),), index + 1, dtype=torch.int32) for index, ids in enumerate(tokens)]
    return SequenceRows.of_tokens(tokens, _packed(numbers, micro_batch, engine) - 1)


def _packed(sequences: list[Any], micro_batch: Any, engine: Any) -> Any:
    """Return [N, ...] of one [tokens, ...] tensor per sequence: the rows that this rank holds, 0 on padding."""
    import torch
    from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
    from verl.models.mcore.util import preprocess_thd_engine
    from verl.utils import tensordict_utils
    from verl.utils.device import get_device_id
    from verl.utils.megatron import router_replay_utils as replay

    config = engine.tf_config
    latent = getattr(config, "experimental_attention_variant", None) == "dsv4_hybrid"
    packed, _, _ = preprocess_thd_engine(
        torch.nested.as_nested_tensor(sequences, layout=torch.jagged),
        pre_process=True,
        use_fp8_padding=config.fp8 in ("e4m3", "hybrid"),
        min_local_rows=config.csa_window_size if latent else None,
        local_cp_size=tensordict_utils.get_non_tensor_data(micro_batch, key="local_cp_size", default=None),
        cp_layout=replay._context_parallel_layout(config),
    )
    return scatter_to_sequence_parallel_region(packed.squeeze(0).contiguous().to(get_device_id()))


def _reported(
    original: Callable[..., Any], self: Any, data: Any, loss_function: Any, forward_only: bool = False
) -> Any:
    """Let verl cut an update to micro-batches that fit, plan the update after it beside what runs until then, and put
    the pass's metrics beside verl's, where verl has some: on the last pipeline stage."""
    from verl.utils.tensordict_utils import assign_non_tensor, get_non_tensor_data

    run, fact, config = _run_of(self), functools.partial(get_non_tensor_data, data), self.engine_config
    if run is None:
        return original(self, data, loss_function, forward_only=forward_only)
    limit = None
    if not forward_only and fact("use_dynamic_bsz", True):
        limit = fact("max_token_len_per_gpu", None)
    if limit is not None and fact("force_group_size", 1) == 1 and not config.dynamic_context_parallel:
        longest = -(-max(map(len, data["input_ids"].unbind())) // config.context_parallel_size)
        assign_non_tensor(data, max_token_len_per_gpu=run.micro_batch_limit(limit, longest))
    look_ahead = RUNS[self.module[0]][2]
    if look_ahead.prepared is not None and not look_ahead.comes(data, forward_only=forward_only):
        run.balancer.drop_prepared()
    try:
        with _forming_micro_batches_of(None if forward_only else self):
            output = original(self, data, loss_function, forward_only=forward_only)
        _look_ahead(data, self, run, look_ahead, forward_only=forward_only)
    except BaseException:
        look_ahead.prepared = (
            None  # the same batch may come once more, and the pass that was prepared for it is used up
        )
        if run.balancer is not None:
            run.balancer.drop_prepared()
        raise
    finally:
        if limit is not None:
            assign_non_tensor(data, max_token_len_per_gpu=limit)
    if output.get("metrics") is not None and not forward_only:
        # verl's worker chains the lists of the data-parallel ranks, and raises for a number.
        output["metrics"].update({name: [value] for name, value in run.last_metrics.items()})
    return output


@contextlib.contextmanager
def _forming_micro_batches_of(engine: Any) -> Iterator[None]:
    """Let `_packed_anew` know whose update forms micro-batches inside; None: nobody's."""
    token = UPDATE.set(engine)
    try:
        yield
    finally:
        UPDATE.reset(token)


def _look_ahead(data: Any, engine: Any, run: Any, look_ahead: Any, *, forward_only: bool) -> None:
    """Let the update after the pass that has run be planned beside whatever runs until it comes; a collective."""
    look_ahead.prepared = None
    # Rows of a dynamic context-parallel group are cut by another scheduler; buffers of one size want replayed routes.
    if run.balancer is None or engine.engine_config.dynamic_context_parallel or run.balancer.config.static_rows:
        return
    # Sequences change their micro-batch by where the experts will be, which is not known while homes are searched.
    if run.packs and run.balancer.searches_homes:
        return
    with _forming_micro_batches_of(engine):
        micro_batches = look_ahead.after(data, engine, forward_only=forward_only)
    if micro_batches is not None:
        run.balancer.prepare(_source_of(micro_batches, engine, run.balancer.model))


def _weighed(
    original: Callable[..., Any], self: Any, output: Any, data: Any, forward_only: bool, *args: Any, **kwargs: Any
) -> Any:
    """Have gamma at hand for the loss of a micro-batch, whose forward has run."""
    import torch
    from verl.workers.utils.padding import no_padding_2_padding

    from moe_rl.frameworks.verl.losses import GAMMA

    run = _run_of(self)
    if run is not None and run.router_shift is not None and not forward_only:
        # verl's function takes the token before each of the response, and fills up with zeros.
        keys = torch.cat(run.router_shift.coming()).to(data["input_ids"].device)
        GAMMA.set(run.router_shift.of(no_padding_2_padding(keys + 1, data) - 1).ratio)
    return original(self, output, data, forward_only, *args, **kwargs)


def _moved(
    original: Callable[..., Any], self: Any, device: str, model: bool = True, *args: Any, module: Any, **kwargs: Any
) -> Any:
    """Let the balancer's memory come and go with the parameters (`param_offload`)."""
    result = original(self, device, model, *args, **kwargs)
    run = _run_of(self)
    if run is not None and model:
        run.move(to_host=device != module.get_device_name())
    return result


def _at_home(original: Callable[..., Any], self: Any, *args: Any, module: Any, **kwargs: Any) -> Any:
    """Run with every expert where Megatron put it: a checkpoint has Megatron's expert ids."""
    run = _run_of(self)
    if run is None or run.balancer is None:
        return original(self, *args, **kwargs)
    with _on_device(self, module.get_device_name()), run.balancer.canonical():
        return original(self, *args, **kwargs)


@contextlib.contextmanager
def _on_device(engine: Any, device: str) -> Iterator[None]:
    """Keep on the device what verl has put away, and itself would put away before the experts are back."""
    offloads = {"model": engine.is_param_offload_enabled, "optimizer": engine.is_optimizer_offload_enabled}
    offloads["grad"] = offloads["model"]
    if not any(offloads.values()):
        yield
        return
    engine.to(device=device, **offloads)
    engine._is_offload_param = engine._is_offload_optimizer = False
    try:
        yield
    finally:
        engine._is_offload_param, engine._is_offload_optimizer = offloads["model"], offloads["optimizer"]
        engine.to(device="cpu", **offloads)


def _exported(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Hand out weights with every expert where Megatron put it, or split for a planned sync: nothing moves for it."""
    parameters, config = original(self, *args, **kwargs)
    run = _run_of(self)
    if run is None or run.balancer is None:
        return parameters, config
    whole_weights = _inside(functools.partial(run.balancer.canonical, weights_only=True), parameters)
    return ExportedWeights(whole_weights, lambda: split_weights(self, run.balancer, parameters)), config


def _inside(context: Callable[[], AbstractContextManager[None]], items: Iterator[Any]) -> Iterator[Any]:
    with context():
        yield from items
