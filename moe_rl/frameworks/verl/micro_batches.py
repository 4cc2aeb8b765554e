"""What verl's micro-batches say before their pass: routes to replay, sequences, rows of this rank; and other cuts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.balancing.pass_source import PassSource
from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.core.model import MoeModelSpec
from moe_rl.frameworks.router_shift import MicroBatchKeys, RouterShiftRun
from moe_rl.frameworks.routes import of_moe_layers
from moe_rl.frameworks.verl.driver import micro_batches_of_column
from moe_rl.frameworks.verl.engine_runs import UPDATE, engine_run_of


def source_of(micro_batches: list[Any], engine: Any, model: MoeModelSpec) -> PassSource:
    """Return what verl's micro-batches say before their pass: routes to replay, sequences, or their number alone."""
    sequences = None
    if engine.engine_config.use_remove_padding:  # the order of padded rows is not read here
        sequences = [_sequence_rows(batch, engine) for batch in micro_batches]
    if all(batch.get("routed_experts", None) is not None for batch in micro_batches):
        return PassSource.replayed([_replayed_rows(batch, engine, model) for batch in micro_batches], sequences)
    if sequences is None:
        return PassSource.unknown(len(micro_batches))
    return PassSource.expected(sequences)


def keys_of(micro_batch: Any, engine: Any, shift: RouterShiftRun, *, forward_only: bool) -> MicroBatchKeys:
    """Return what the router shift knows the tokens of each sequence by, and this rank's rows."""
    keys = shift.keys(micro_batch["input_ids"].unbind(), forward_only=forward_only)
    return keys, _packed([keys_of_sequence + 1 for keys_of_sequence in keys], micro_batch, engine) - 1


def _replayed_rows(micro_batch: Any, engine: Any, model: MoeModelSpec) -> NDArray[np.signedinteger]:
    """Return [N, L, K]: the routes that this rank's rows will replay, in Megatron's order, -1 on the others.

    Rows are packed by verl's own function, so that padding, context parallelism and their order are verl's. It pads
    with zeros, so ids go in plus one. R3 replays neither the last token of a sequence nor a sequence without response.
    """
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


def _sequence_rows(micro_batch: Any, engine: Any) -> SequenceRows:
    """Return of which sequence each of this rank's rows is."""
    tokens = micro_batch["input_ids"].unbind()
    numbers = [torch.full((len(ids),), index + 1, dtype=torch.int32) for index, ids in enumerate(tokens)]
    return SequenceRows.of_tokens(tokens, _packed(numbers, micro_batch, engine) - 1)


def _packed(sequences: list[Any], micro_batch: Any, engine: Any) -> Any:
    """Return [N, ...] of one [tokens, ...] tensor per sequence: the rows that this rank holds, 0 on padding."""
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


def packed_anew(original: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """Let an update's sequences run in the driver's micro-batches, and change them, where verl's own are dynamic."""
    from verl.utils.tensordict_utils import get_non_tensor_data, index_select_tensor_dict

    def selected(indices: list[list[int]]) -> tuple[list[Any], list[list[int]]]:
        return [index_select_tensor_dict(data, of_batch) for of_batch in indices], indices

    engine_run = engine_run_of(UPDATE.get())
    if engine_run is not None:
        look_ahead = engine_run.look_ahead
        if look_ahead.prepared_batch is data and look_ahead.indices is not None:
            return selected(look_ahead.indices)
    micro_batches, indices = original(data, *args, **kwargs)
    grouped = get_non_tensor_data(data, "force_group_size", 1) > 1
    if engine_run is None or indices is None or grouped:
        return micro_batches, indices
    run = engine_run.run
    budget = data["max_token_len_per_gpu"] * get_non_tensor_data(data, "sp_size", 1)
    of_driver = micro_batches_of_column(data, budget)
    if of_driver is not None:
        micro_batches, indices = selected(of_driver)
    if run.balancer is None or not run.packs or len(indices) == 1:
        return micro_batches, indices
    replayed = data.get("routed_experts", None)
    routes = None
    if replayed is not None:
        routes = [of_moe_layers(routes_of_sequence, run.balancer.model) for routes_of_sequence in replayed.unbind()]
    return selected(run.balancer.packed(indices, data["input_ids"].unbind(), token_budget=budget, routes=routes))
