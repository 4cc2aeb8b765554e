"""NeMo-RL's Megatron workers weigh tokens by the router shift; written from its code (ced083a96), not run inside it.

    from moe_rl.frameworks.nemo_rl.attach import install_when_imported

    install_when_imported()          # in the launch script, and in the module of a worker extension class

with MOE_RL_ROUTER_SHIFT=0.8 in the environment of the script and in `policy.megatron_cfg.env_vars`. gamma multiplies a
micro-batch's advantages once its forward has run. NeMo-RL's policy term is proportional to them, clipped or not, so
this is gamma after the clip (order "after-clip"), and no KL, importance weight or logged mismatch sees it.
"""

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from moe_rl.core.errors import require
from moe_rl.core.post_import import when_imported
from moe_rl.frameworks.megatron.attach import routes_of_nemo_rl
from moe_rl.frameworks.run_settings import settings_from_environment

logger = logging.getLogger("moe_rl.frameworks")


def install_when_imported() -> None:
    """Weigh NeMo-RL's policy losses in this process, as soon as it imports them, where MOE_RL_ROUTER_SHIFT says so."""
    settings = settings_from_environment()
    if settings is not None and settings.router_shift:
        when_imported("nemo_rl.models.megatron.train", functools.partial(install, floor=settings.router_shift))
        when_imported("nemo_rl.algorithms.loss.loss_functions", refuse_on_policy)


def refuse_on_policy(losses: ModuleType) -> None:
    """Refuse, where NeMo-RL makes its loss, the setting that leaves out the pass which gamma compares with."""
    original_init = losses.ClippedPGLossFn.__init__

    @functools.wraps(original_init)
    def checked(self: Any, cfg: Any, *args: Any, **kwargs: Any) -> None:
        require(
            not cfg.force_on_policy_ratio,
            "MOE_RL_ROUTER_SHIFT needs a pass for old log-probabilities, but force_on_policy_ratio skips it.",
        )
        original_init(self, cfg, *args, **kwargs)

    losses.ClippedPGLossFn.__init__ = checked


def install(train: ModuleType, *, floor: float) -> None:
    """Read the routers in every call of Megatron's schedule; `train` is nemo_rl.models.megatron.train."""
    from moe_rl.frameworks.router_shift import READING, RouterShiftRun

    schedules, original_call = train.get_forward_backward_func, train.LossPostProcessor.__call__
    runs: dict[Any, RouterShiftRun] = {}

    def reading_schedules() -> Callable[..., Any]:
        schedule = schedules()

        @functools.wraps(schedule)
        def reading(**kwargs: Any) -> Any:
            if isinstance(kwargs["model"], Sequence):
                chunks = list(kwargs["model"])
            else:
                chunks = [kwargs["model"]]
            # Made at the first call: the model is not there when its module is imported.
            run = runs.get(chunks[0]) or runs.setdefault(chunks[0], RouterShiftRun(chunks, floor=floor))
            result = run.reading(schedule, functools.partial(_keys_of, run))(**kwargs)
            if not kwargs.get("forward_only", False):
                logger.info("moe_rl: %s", run.metrics())
            return result

        return reading

    @functools.wraps(original_call)
    def weighing(self: Any, data_dict: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        def loss(*output: Any, **named: Any) -> Any:
            run, batch = READING.get(), data_dict
            if run is not None:
                # A shallow copy: the advantages of the caller's batch stay what they were.
                batch, keys = copy.copy(data_dict), _padded(data_dict, run.coming(), predicting=True)
                batch["advantages"] = batch["advantages"] * run.of(keys).ratio.to(batch["advantages"])
            return original_call(self, batch, *args, **kwargs)(*output, **named)

        return loss

    train.get_forward_backward_func = functools.wraps(schedules)(reading_schedules)  # type: ignore[attr-defined]
    train.LossPostProcessor.__call__ = weighing


def _keys_of(run: Any, micro_batches: list[Any], forward_only: bool) -> list[tuple[Sequence[Any], Any]]:
    """Return of each micro-batch the keys of its sequences, and those of the rows that this rank holds."""
    import torch

    keys_of_batches = []
    for batch_data in micro_batches:
        batch, packed = batch_data.data_dict, batch_data.packed_seq_params
        require(
            packed is None or batch_data.attention_mask is None,
            "moe_rl does not support models that pack sequences themselves.",
        )
        lengths = batch["input_lengths"].tolist()
        tokens = [row[:length] for row, length in zip(batch["input_ids"], lengths, strict=True)]
        keys = run.keys(tokens, forward_only=forward_only)
        # Rows are found as those of routes are, of one layer and one expert.
        as_routes = {"routed_experts": _padded(batch, keys)[..., None, None], "input_lengths": batch["input_lengths"]}
        rows = routes_of_nemo_rl([SimpleNamespace(data_dict=as_routes, packed_seq_params=packed)])
        assert rows is not None
        keys_of_batches.append((keys, torch.from_numpy(rows[0][:, 0, 0])))
    return keys_of_batches


def _padded(batch: Any, keys: Sequence[Any], *, predicting: bool = False) -> Any:
    """Return keys [B, S] as NeMo-RL's tensors lie, -1 on padding; `predicting`: of the token before each."""
    import torch

    padded = torch.full(tuple(batch["input_ids"].shape), -1)
    for row, keys_of_row in zip(padded, keys, strict=True):
        row[int(predicting) : len(keys_of_row)] = keys_of_row[:-1] if predicting else keys_of_row
    return padded
