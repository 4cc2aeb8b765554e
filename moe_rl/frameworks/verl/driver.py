"""verl's driver: an update's sequences are packed over all data-parallel ranks, where verl balances a batch.

verl calls `_balance_batch` before it recomputes log-probabilities: it sorts the samples of a step so that ranks, which
take equal shares in order, get about equal work. Right after that the samples of every mini-batch change their ranks,
under verl's rules (equally many samples for each rank, equally many micro-batches, the token budget), so that what runs
side by side takes as long. Advantages, losses and the samples of an update stay what they are: group statistics go by
uid, losses are divided by constants of the whole mini-batch.

The micro-batches go to the workers as a column: of the batch under v0, of TransferQueue under v1.

With `padding_samples` ranks may get unequal numbers of samples under v1: the others are filled up (`padding`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.driver_packing import DriverPacking, PackedShares, packed_shares, packs_in_driver
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.post_import import when_imported, wrap
from moe_rl.frameworks.contract import logger
from moe_rl.frameworks.run_settings import Settings
from moe_rl.frameworks.verl.micro_batch_losses import BY_LONGEST, CONSTANT, why_micro_batches_matter
from moe_rl.frameworks.verl.padding import mini_batches_of, why_not_padded, with_padding_samples
from moe_rl.huggingface import model_of_config
from moe_rl.simulators.setting import StepSetting

COLUMN = "moe_rl_micro_batch"
"""[S] of a batch: the micro-batch, inside its mini-batch, in which the driver wants a sample to run."""
TRAINERS = {
    "verl.trainer.ppo.ray_trainer": "RayPPOTrainer",
    "verl.trainer.ppo.v1.trainer_base": "PPOTrainer",
}


def install_when_imported(settings: Settings) -> None:
    """Pack in this process as soon as verl imports a trainer's module; where nothing is to be packed, do nothing."""
    if not (settings.balances and packs_in_driver(settings.balancer)):
        return
    for module, trainer in TRAINERS.items():
        when_imported(module, partial(install, trainer=trainer, settings=settings))


@dataclass(slots=True)
class DriverState:
    """What is known of one trainer between its calls."""

    packing: DriverPacking | None
    """None: sequences stay where verl puts them."""
    mini_batch_size: int | None = None
    """Samples of a mini-batch on all ranks, padding samples included; None: as verl's configuration has it."""


def install(module: ModuleType, trainer: str, settings: Settings) -> Callable[[], None]:
    """Wrap `_balance_batch` and `_update_actor` of the module's trainer and return what undoes it."""
    drivers: dict[int, DriverState] = {}

    def balanced(original: Callable[..., Any], self: Any, batch: Any, *arguments: Any, **more: Any) -> Any:
        result = original(self, batch, *arguments, **more)
        returned = batch if result is None else result
        if id(self) not in drivers:
            drivers[id(self)] = DriverState(packing=_packing_or_warning(self, settings, pads=hasattr(returned, "tags")))
        packed = _pack(returned, drivers[id(self)], self)
        return None if result is None else packed

    def updated(original: Callable[..., Any], self: Any, *arguments: Any, **more: Any) -> Any:
        driver = drivers.get(id(self))
        if driver is None or driver.mini_batch_size is None:
            return original(self, *arguments, **more)
        with mini_batches_of(self.actor_rollout_wg, driver.mini_batch_size):
            return original(self, *arguments, **more)

    undo = [
        wrap(getattr(module, trainer), "_balance_batch", balanced),
        wrap(getattr(module, trainer), "_update_actor", updated),
    ]

    def uninstall() -> None:
        for restore in undo:
            restore()

    return uninstall


def _packing_or_warning(trainer: Any, settings: Settings, *, pads: bool) -> DriverPacking | None:
    """Return how the run's updates are packed; None, after a sentence, where verl's settings leave nothing to pack.

    `pads`: the trainer is v1's, which knows padding samples.
    """
    _say_if_losses_change(trainer.config.actor_rollout_ref.actor)
    try:
        packing = packing_of(trainer.config, num_dp_ranks=_num_dp_ranks(trainer), settings=settings)
    except InvalidInputError as error:
        logger.warning("moe_rl: sequences stay on the ranks to which verl assigns them: %s", error)
        return None
    if not settings.balancer.micro_batches.padding_samples:
        return packing
    reason = why_not_padded(trainer) if pads else "verl's trainer v0 does not support them."
    if reason:
        logger.warning("moe_rl: sequences are packed without padding samples: %s", reason)
        return packing
    return replace(packing, padding_samples=settings.balancer.micro_batches.padding_samples)


def _say_if_losses_change(actor: Any) -> None:
    """Say which setting makes the loss depend on its micro-batches, in the driver or only in its workers.

    verl's own dynamic micro-batches change it from update to update, so that is no reason not to pack.
    """
    loss_mode = (actor.get("policy_loss", None) or {}).get("loss_mode", "vanilla")
    reason = why_micro_batches_matter(
        loss_mode, actor.get("loss_agg_mode", "token-mean"), actor.get("loss_scale_factor", None)
    )
    if reason and actor.get("use_dynamic_bsz", False):
        remedy = f" {CONSTANT}" if reason == BY_LONGEST else ""
        logger.warning(
            "moe_rl: packing changes this loss, as verl's own dynamic micro-batches do: %s.%s", reason, remedy
        )


def packing_of(config: Any, *, num_dp_ranks: int, settings: Settings) -> DriverPacking:
    """Return how updates are packed, from verl's configuration.

    Raises `InvalidInputError` where verl's settings allow no other order of the samples, and where the model's
    configuration is of no family that we know.
    """
    from transformers import AutoConfig

    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    require(
        actor.get("use_dynamic_bsz", False),
        "with actor.use_dynamic_bsz=False, micro-batches hold a fixed number of samples.",
    )
    require(
        not actor.get("shuffle", False),
        "actor.shuffle draws mini-batches at random within each rank, so moving sequences would change these "
        "mini-batches.",
    )
    grouped = actor.get("use_prefix_grouper", False) or config.trainer.get("use_prefix_grouper", False)
    require(not grouped, "use_prefix_grouper keeps the samples of a prompt on one rank.")
    megatron = actor.get("megatron", None)
    require(megatron is not None, "actor.megatron is missing, but moe_rl balances only verl's Megatron engine.")
    path = str(model.path)
    spec, _ = model_of_config(
        AutoConfig.from_pretrained(path, trust_remote_code=bool(model.get("trust_remote_code", False))).to_dict(),
        where=path,
    )
    virtual = megatron.get("virtual_pipeline_model_parallel_size", None)
    shape = StepSetting(
        pipeline_model_parallel_size=int(megatron.pipeline_model_parallel_size),
        num_virtual_stages=int(virtual or 1),
        tensor_model_parallel_size=int(megatron.tensor_model_parallel_size),
        context_parallel_size=int(megatron.context_parallel_size),
    )
    return DriverPacking.of_run(
        "verl",
        settings.balancer,
        model=spec,
        shape=shape,
        num_dp_ranks=num_dp_ranks,
        ep_size=int(megatron.expert_model_parallel_size),
        tokens_per_gpu=int(actor.ppo_max_token_len_per_gpu),
    )


def _num_dp_ranks(trainer: Any) -> int:
    """Return the data-parallel ranks of the actor, as verl's own `_balance_batch` asks for them."""
    workers = trainer.actor_rollout_wg
    if "actor" not in workers._dispatch_info:
        workers._dispatch_info["actor"] = workers._query_dispatch_info("actor")
    return int(max(workers._dispatch_info["actor"])) + 1


def _pack(batch: Any, driver: DriverState, trainer: Any) -> Any:
    """Return the batch with the samples of every mini-batch in the order of their new ranks."""
    driver.mini_batch_size = None
    if driver.packing is None:
        return batch
    config, lengths = trainer.config.actor_rollout_ref, _lengths(batch)
    samples = int(config.actor.ppo_mini_batch_size) * int(config.rollout.n)
    if not len(lengths) or len(lengths) % samples:
        return batch
    shares = packed_shares(driver.packing, lengths, mini_batches=len(lengths) // samples)
    if shares is None:
        return batch
    if shares.padding_samples:
        batch = with_padding_samples(batch, len(shares.order), trainer.tokenizer.eos_token_id)
        driver.mini_batch_size = len(shares.order) * samples // len(lengths)
    _reorder(batch, shares)
    return batch


def _lengths(batch: Any) -> NDArray[np.int64]:
    """Return [S] tokens of the samples: v1 keeps them as tags, v0 has an attention mask."""
    if hasattr(batch, "tags"):
        return np.array([tag["seq_len"] for tag in batch.tags], np.int64)
    mask = batch.batch["attention_mask"]
    return np.asarray(mask.reshape(len(mask), -1).sum(-1).cpu().numpy(), np.int64)


def _reorder(batch: Any, shares: PackedShares) -> None:
    import torch

    micro_batch = torch.from_numpy(shares.micro_batch)
    if hasattr(batch, "tags"):
        batch.reorder(shares.order.tolist())
        _put_column(batch, micro_batch)
        return
    batch.reorder(torch.from_numpy(shares.order))
    batch.batch[COLUMN] = micro_batch


def _put_column(batch: Any, micro_batch: Any) -> None:
    """Put the column beside the samples' other fields: v1 hands keys to the workers, which fetch the fields by them."""
    from tensordict import TensorDict
    from verl.utils.transferqueue_utils import tq

    # [S, 1]: TransferQueue may hand a tensor of one dimension back with two.
    column = TensorDict({COLUMN: micro_batch[:, None]}, batch_size=len(micro_batch))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=column)
    # None: all fields that are there.
    if batch.fields is not None and COLUMN not in batch.fields:
        batch.fields = [*batch.fields, COLUMN]


def micro_batches_of_column(data: Any, budget: int) -> list[list[int]] | None:
    """Return the samples of a mini-batch by the driver's micro-batches; None without the column or over the budget.

    A collective where the column is there: ranks agree, since all must run as many micro-batches.
    """
    from moe_rl.balancing.exchange import gathered

    column = data.get(COLUMN, None)
    if column is None:
        return None
    numbers = column.values() if column.is_nested else column  # v1's are [S, 1], or one row per sample
    of_sample = np.asarray(numbers.reshape(-1).cpu().numpy(), np.int64)
    tokens = np.asarray(data["input_ids"].offsets().diff().cpu().numpy(), np.int64)
    count = int(of_sample.max()) + 1
    tokens_held, members = np.bincount(of_sample, weights=tokens), np.bincount(of_sample)
    usable = len(of_sample) == len(tokens) and tokens_held.max() <= budget and members.min() > 0
    usable_of_ranks, count_of_ranks = zip(*gathered((bool(usable), count)), strict=True)
    if not all(usable_of_ranks) or len(set(count_of_ranks)) > 1:
        return None
    return [np.flatnonzero(of_sample == number).tolist() for number in range(count)]
