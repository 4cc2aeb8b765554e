"""slime: two flags on the worker, and plans from the driver's own schedule; `miles.attach` is the same for miles.

--custom-megatron-init-path moe_rl.frameworks.slime.attach.init
--custom-megatron-before-train-step-hook-path moe_rl.frameworks.slime.attach.before_train_step

with MOE_RL=moe-rl in the environment of the workers. Routes come from slime's own replay lists, one entry per
micro-batch and router; where these are lazy objects, which cannot be read without being used up, from plans that the
driver wrote into MOE_RL_PLANS with `write_plans`. Where nothing is replayed, plans are made from what routers chose for
the same tokens in the log-prob pass.
"""

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.driver_packing import DriverPacking
from moe_rl.balancing.loads import as_array
from moe_rl.balancing.pass_source import PassSource
from moe_rl.balancing.schedule import pack_schedule, plan_from_schedule
from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.plan import Plan
from moe_rl.core.plan_file import load_plan
from moe_rl.core.post_import import when_imported, wrap
from moe_rl.core.topology import ClusterTopology
from moe_rl.frameworks.contract import Framework
from moe_rl.frameworks.routes import of_moe_layers, signed, with_missing_last_rows
from moe_rl.frameworks.run_settings import Settings, settings_from_environment
from moe_rl.frameworks.slime.contract import FRAMEWORK

logger = logging.getLogger("moe_rl.frameworks")


@dataclass(slots=True, kw_only=True)
class Worker:
    """This process's run inside slime, or a framework that is built as slime is."""

    framework: Framework
    stage: Callable[[], str | None]
    """What the routers do in the call that comes: record, replay_forward, replay_backward or fallthrough."""
    args: Any = None
    """Of the framework, after `init`."""
    settings: Settings | None = None
    """None before `init`, and where nobody set MOE_RL."""
    run: Any = None
    """`moe_rl.frameworks.megatron_run.MegatronRun` after the first hook."""
    step: tuple[int, int] | None = None
    """(rollout, optimizer step) of the next training call; None once it has run."""
    readers: Mapping[str, bool] = field(default_factory=dict)
    """All that reads or writes weights beside the optimizer, as module:name, and whether that is weights alone; empty
    where not all of it is known: experts stay at home then."""
    options_of_others: tuple[str, ...] = ()
    """Options of the framework under which more reads or writes weights than `readers`: experts stay at home then."""
    router_shift: Any = None
    """`moe_rl.frameworks.router_shift.RouterShiftRun` after the first call, where gamma was asked for."""
    model: str = "actor"
    """Whose weights are in the parameters: actor, old_actor, ref or teacher."""

    def init(self, args: Any) -> None:
        """Read the settings and take note of Megatron's schedule; called when Megatron has its groups.

        Settings that our loss would not honor are refused here, before any rollout.
        """
        is_own_loss = str(getattr(args, "custom_loss_function_path", "")).startswith("moe_rl.frameworks.slime.losses.")
        if is_own_loss:
            from moe_rl.frameworks.slime.losses import objective_of

            objective_of(args)
        self.settings, self.args = settings_from_environment(), args
        name = self.framework.name
        if self.settings is None:
            logger.warning("moe_rl: MOE_RL is not set, so this %s run is not balanced.", name)
            return
        if self.settings.router_shift:
            require(is_own_loss, "MOE_RL_ROUTER_SHIFT weighs the loss of moe_rl.frameworks.slime.losses: choose it.")
            no_pass = getattr(args, "use_rollout_logprobs", False)
            require(not no_pass, "the router shift needs the pass that --use-rollout-logprobs leaves out.")
            require(self.packed, "the router shift needs --qkv-format thd, without --allgather-cp.")
        model: Any = import_module(f"{name}.backends.megatron_utils.model")
        actor: Any = import_module(f"{name}.backends.megatron_utils.actor")
        # A second call in one process must not plan every pass twice.
        if not hasattr(model.get_forward_backward_func, "__wrapped__"):
            wrap(model, "get_forward_backward_func", lambda original: self.planned(original()))
            wrap(actor, "reload_process_groups", self.reloaded)
            if self.settings.router_shift:
                when_imported(f"{name}.utils.tensor_backper", self.note_models)
            for path, weights_only in self.readers.items():
                module, _, attribute = path.partition(":")
                guard = functools.partial(self.guard, attribute, weights_only=weights_only)
                when_imported(f"{name}.{module}", guard)

    def before_train_step(
        self, args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any
    ) -> None:
        """Attach at the first step, and say which step comes; called before every optimizer step's passes."""
        if self.settings is None:
            return
        if self.run is None:
            from moe_rl.frameworks.megatron_run import MegatronRun

            # Where one reader of weights is not guarded, experts must not move: it would ship them under wrong names.
            guarded = bool(self.readers) and not any(getattr(args, option, None) for option in self.options_of_others)
            self.run = MegatronRun.attach(self.framework, model, optimizer, self.settings, guarded=guarded)
        self.step = rollout_id, step_id

    @property
    def packed(self) -> bool:
        """Whether sequences follow each other in one row of tokens, each cut by context parallelism by itself."""
        option = functools.partial(getattr, self.args)
        return bool(option("qkv_format", "thd") == "thd" and not option("allgather_cp", False))

    def tokens_ahead(self, data: Any, count: int) -> list[list[Any]] | None:
        """Return the token ids of the sequences in every micro-batch that comes; None where they are not known."""
        chunk = data[0] if isinstance(data, Sequence) else data
        indices, size = getattr(chunk, "micro_batch_indices", None), getattr(chunk, "micro_batch_size", None) or 0
        if not self.packed or not (indices or size):
            return None
        tokens, start = chunk.rollout_data["tokens"], chunk.offset
        if indices is None:  # miles without --use-dynamic-batch-size, where `offset` counts samples
            return [list(tokens[start + size * index :][:size]) for index in range(count)]
        return [[tokens[index] for index in batch] for batch in indices[start : start + count]]

    def pack(self, balancer: Any, data: Any, count: int) -> None:
        """Let the samples of an update change their micro-batch, in the list that the framework's iterators share.

        Not under routing replay, whose lists have the routes in the order of the given micro-batches, and not where a
        micro-batch is a number of samples.
        """
        chunk = data[0] if isinstance(data, Sequence) else data
        indices, limit = getattr(chunk, "micro_batch_indices", None), getattr(self.args, "max_tokens_per_gpu", None)
        replays = any(getattr(layer.router, "routing_replay", None) is not None for layer in balancer.layers)
        if not getattr(self.args, "use_dynamic_batch_size", False) or not indices or not limit or replays or count < 2:
            return
        part = slice(chunk.offset, chunk.offset + count)
        samples = [sample for batch in indices[part] for sample in batch]
        ends = np.cumsum([len(batch) for batch in indices[part]])[:-1]
        batches = [indices.tolist() for indices in np.split(np.arange(len(samples)), ends)]
        tokens = [chunk.rollout_data["tokens"][sample] for sample in samples]
        budget = limit * getattr(self.args, "context_parallel_size", 1)
        packed = balancer.packed(batches, tokens, token_budget=budget)
        indices[part] = [[samples[place] for place in batch] for batch in packed]

    def rows(self, of_token: Sequence[Any]) -> NDArray[np.int64]:
        """Return [N] what is said of every token of packed sequences, in the order of this rank's rows."""
        from moe_rl.megatron import RowSlice

        return packed_part(of_token, getattr(self.args, "data_pad_size_multiplier", 128), RowSlice.current())

    def held(self, sequences: Sequence[Any]) -> SequenceRows:
        """Return of which sequence each of this rank's rows is."""
        return SequenceRows.of_tokens(
            sequences, self.rows([np.full(len(sequence), i) for i, sequence in enumerate(sequences)])
        )

    def note_models(self, copies: Any) -> None:
        """Note whose weights slime puts into the parameters; `copies` is its module `utils.tensor_backper`."""

        def restored(restore: Callable[..., Any], backups: Any, tag: str) -> Any:
            self.model = tag
            return restore(backups, tag)

        # There are several kinds of backups, and each has its own `restore`.
        for kind in vars(copies).values():
            if isinstance(kind, type) and issubclass(kind, copies.TensorBackuper):
                wrap(kind, "restore", restored)

    def keys_ahead(self, kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Return the keys of the micro-batches of a call; None where gamma was not asked for, or of another model."""
        import torch

        from moe_rl.frameworks.router_shift import RouterShiftRun

        forward_only = bool(kwargs.get("forward_only", False))
        floor = 0.0 if self.settings is None else self.settings.router_shift
        if not floor or (forward_only and not self.model.endswith("actor")):
            return None
        if self.router_shift is None:
            self.router_shift = RouterShiftRun(list(kwargs["model"]), floor=floor)
        coming = self.tokens_ahead(kwargs["data_iterator"], kwargs["num_microbatches"])
        if coming is None:
            raise InvalidInputError("the router shift finds no micro-batches in what Megatron's schedule is given.")
        keys = [self.router_shift.keys(sequences, forward_only=forward_only) for sequences in coming]
        return [(keys_of_batch, torch.from_numpy(self.rows(keys_of_batch))) for keys_of_batch in keys]

    def reloaded(self, reload: Callable[..., Any], *arguments: Any) -> Any:
        """Reload the process groups that a colocated rollout has destroyed, ours among them, and connect ours."""
        result = reload(*arguments)
        if self.run is not None:
            self.run.rebuild_groups()
        return result

    def guard(self, attribute: str, module: ModuleType, *, weights_only: bool) -> None:
        """Let a function of a module, or a method of a class of it, see every expert where Megatron put it."""
        of_class, _, name = attribute.rpartition(".")
        owner: Any = getattr(module, of_class) if of_class else module

        def at_home(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            balancer = None if self.run is None else self.run.balancer
            with nullcontext() if balancer is None else balancer.canonical(weights_only=weights_only):
                return function(*args, **kwargs)

        wrap(owner, name, at_home)

    def planned(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return Megatron's schedule function with training and replayed log-prob calls planned."""

        @functools.wraps(function)
        def planned(**kwargs: Any) -> Any:
            run, settings = self.run, self.settings
            if settings is None:
                return function(**kwargs)
            forward_only = bool(kwargs.get("forward_only", False))
            if run is not None and run.packs and settings.plans is None and not forward_only:
                self.pack(run.balancer, kwargs["data_iterator"], kwargs["num_microbatches"])
            call, keys = functools.partial(function, **kwargs), self.keys_ahead(kwargs)
            if run is None:
                return call() if keys is None else self.router_shift.around(call, keys, forward_only=forward_only)
            run.router_shift = self.router_shift
            source = None
            if run.balancer is not None:
                source = self.source_of(kwargs["data_iterator"], kwargs["num_microbatches"], forward_only=forward_only)
            result = run.around(call, source, keys=keys, forward_only=forward_only)
            if run.last_metrics:
                logger.info("moe_rl: %s", run.last_metrics)
            return result

        return planned

    def source_of(self, data: Any, num_micro_batches: int, *, forward_only: bool) -> PassSource:
        """Return what is known of the next call: the driver's plan, routes to replay, sequences, or their number."""
        folder = None if self.settings is None else self.settings.plans
        if not forward_only and folder is not None and self.step is not None:
            return PassSource.given(load_plan(plan_path(folder, *self.step)))
        if not forward_only or self.stage() == "replay_forward":
            routes = _replayed_routes(self.run, num_micro_batches)
            if routes is not None:
                return PassSource.replayed(routes)
        coming = self.tokens_ahead(data, num_micro_batches)
        if coming is None:
            return PassSource.unknown(num_micro_batches)
        return PassSource.expected([self.held(sequences) for sequences in coming])


ACTOR, BACKUPS = "backends.megatron_utils.actor", "utils.tensor_backper:_TensorBackuperNormal"
UPDATES = "backends.megatron_utils.update_weight.update_weight_from"
# Of slime and miles. A colocated engine gets the weights from the copy on the host that `backup` makes, others from
# the model itself; `restore` puts other models' weights in their place (THUDM/slime:slime/backends/megatron_utils).
READERS = {
    f"{ACTOR}:save": False,
    f"{ACTOR}:load_checkpoint": True,
    f"{BACKUPS}.backup": True,
    f"{BACKUPS}.restore": True,
}
OWN_READERS = {
    f"{ACTOR}:save_hf_model_to_path": True,
    f"{UPDATES}_distributed:UpdateWeightFromDistributed.update_weights": True,
    f"{UPDATES}_disk:UpdateWeightFromDisk.update_weights": True,
    f"{UPDATES}_disk_delta:UpdateWeightFromDiskDelta.update_weights": True,
}
WORKER = Worker(
    framework=FRAMEWORK, stage=lambda: os.environ.get("ROUTING_REPLAY_STAGE"), readers=READERS | OWN_READERS
)
init, before_train_step = WORKER.init, WORKER.before_train_step


def _replayed_routes(run: Any, num_micro_batches: int) -> list[NDArray[np.signedinteger]] | None:
    return next_routes(
        [getattr(layer.router, "routing_replay", None) for layer in run.balancer.layers],
        layer_ids=run.layer_ids,
        num_layers=run.balancer.model.num_moe_layers,
        num_micro_batches=num_micro_batches,
    )


def packed_part(of_token: Sequence[Any], multiple: int, where: Any) -> NDArray[np.int64]:
    """Return [N] what is said of every token of packed sequences, of the rows that a rank at `where` holds.

    Under context parallelism every sequence is filled up to 2 x CP equal chunks, of which a rank has two. What is left
    of the packed rows is filled up to a multiple of `multiple` x TP. Rows that fill up say -1.
    """
    from moe_rl.megatron.routed_rows import zigzag

    chunks = 2 * where.cp_size if where.cp_size > 1 else 1
    parts = [
        zigzag(np.pad(of_sequence, (0, -len(of_sequence) % chunks), constant_values=-1), where)
        for of_sequence in of_token
    ]
    rows = np.concatenate([np.zeros(0, np.int64), *parts])
    filled = np.pad(rows, (0, -len(rows) % (multiple * where.tp_size)), constant_values=-1)
    own_part: NDArray[np.int64] = filled.reshape(where.tp_size, -1)[where.tp_rank]
    return own_part


def next_routes(
    replays: Sequence[Any], *, layer_ids: Sequence[int], num_layers: int, num_micro_batches: int
) -> list[NDArray[np.signedinteger]] | None:
    """Return [N, L, K] of the next micro-batches that slime's replay objects will give, without using them up.

    `replays` are those of this rank's MoE layers, `layer_ids` which of the model's `num_layers` MoE layers these are;
    layers of other pipeline stages stay unknown. None where the entries are lazy, or where nothing is replayed.
    """
    per_layer = []
    for replay in replays:
        if replay is None:
            return None
        queue = replay.top_indices_list[replay.forward_index : replay.forward_index + num_micro_batches]
        # A lazy object gives its ids once, to the router; one that numpy can read gives them again.
        used_up = [
            hasattr(queued, "materialize_for_routing_replay") and not hasattr(queued, "__array__") for queued in queue
        ]
        if len(queue) < num_micro_batches or any(used_up):
            return None
        per_layer.append(queue)
    routes = []
    for of_layers in zip(*per_layer, strict=True):
        top_indices = signed(as_array(of_layers[0]))
        by_layer = np.full(
            (num_layers, *top_indices.shape), -1, top_indices.dtype
        )  # as slime has them: whole layers are copied
        for layer, ids in zip(layer_ids, of_layers, strict=True):
            by_layer[layer] = as_array(ids)
        routes.append(by_layer.transpose(1, 0, 2))
    return routes or None


def schedules_of_steps(
    partitions: Sequence[Sequence[int]],
    micro_batch_indices: Sequence[Sequence[Sequence[int]]],
    num_microbatches: Sequence[int],
) -> list[list[list[list[int]]]]:
    """Return `[step][dp_rank][micro_batch]` = global sample ids, from what slime's `build_dp_schedule` returned.

    Its micro-batches name samples by their place in the rank's partition, and those of an optimizer step are one slice
    of the rank's list.
    """
    total = sum(num_microbatches)
    for rank, batches in enumerate(micro_batch_indices):
        require(
            len(batches) == total,
            f"rank {rank} has {len(batches)} micro-batches, its optimizer steps run {total}.",
        )
    ends = np.cumsum([0, *num_microbatches]).tolist()
    return [
        [
            [[partition[place] for place in batch] for batch in batches[start:stop]]
            for partition, batches in zip(partitions, micro_batch_indices, strict=True)
        ]
        for start, stop in pairwise(ends)
    ]


def schedule_from_steps(
    steps: Sequence[Sequence[Sequence[Sequence[int]]]],
) -> tuple[list[list[int]], list[list[list[int]]], list[int]]:
    """Return (partitions, micro_batch_indices, num_microbatches) as slime's driver packages them, of such steps."""
    partitions: list[list[int]] = [[] for _ in steps[0]] if steps else []
    indices: list[list[list[int]]] = [[] for _ in partitions]
    for schedule in steps:
        for partition, places, batches in zip(partitions, indices, schedule, strict=True):
            for batch in batches:
                places.append(list(range(len(partition), len(partition) + len(batch))))
                partition.extend(batch)
    return partitions, indices, [len(schedule[0]) for schedule in steps]


def packed_steps(
    routed_experts: Sequence[Any],
    total_lengths: Sequence[int],
    steps: Sequence[Sequence[Sequence[Sequence[int]]]],
    *,
    token_budget: int,
    config: BalancerConfig,
    model: MoeModelSpec,
    topology: ClusterTopology,
) -> list[list[list[list[int]]]]:
    """Return `steps` with the samples of every optimizer step packed anew by their routes, on the driver.

    Arguments are those of `plans_of_rollout`; `token_budget` is slime's `max_tokens_per_gpu` times the context-parallel
    size. See `moe_rl.balancing.schedule.pack_schedule` for what stays as it is.
    """
    packed = []
    for ids, samples, schedule in _by_step(routed_experts, total_lengths, steps, model):
        packed_schedule = pack_schedule(
            samples, schedule, token_budget=token_budget, config=config, model=model, topology=topology
        )
        packed.append([[[ids[sample] for sample in batch] for batch in batches] for batches in packed_schedule])
    return packed


def packed_by_lengths(
    total_lengths: Sequence[int], steps: Sequence[Sequence[Sequence[Sequence[int]]]], packing: DriverPacking
) -> list[list[list[list[int]]]]:
    """Return `steps` with the samples of every optimizer step packed over all ranks by their lengths alone.

    No routes are needed, so this works with replay and without. slime has no rule of equal counts: ranks get as many
    micro-batches each, and any number of samples. A step that cannot be packed (one sample above the budget) stays.
    """
    packed = []
    for schedule in steps:
        ids = np.array(sorted({sample for batches in schedule for batch in batches for sample in batch}), np.int64)
        layout = packing.layout(np.array([total_lengths[index] for index in ids], np.int64))
        if layout is None:
            packed.append([[list(batch) for batch in batches] for batches in schedule])
            continue
        cells: list[list[list[int]]] = [[[] for _ in range(layout.num_micro_batches)] for _ in schedule]
        for index in np.argsort(layout.order, kind="stable").tolist():
            cells[layout.dp_rank[index]][layout.micro_batch[index]].append(int(ids[index]))
        packed.append(cells)
    return packed


def plans_of_rollout(
    routed_experts: Sequence[Any],
    total_lengths: Sequence[int],
    steps: Sequence[Sequence[Sequence[Sequence[int]]]],
    *,
    config: BalancerConfig,
    model: MoeModelSpec,
    topology: ClusterTopology,
) -> list[Plan]:
    """Return the plan of every optimizer step of a rollout, on the driver.

    `routed_experts` are slime's `rollout_routed_experts`, one [tokens - 1, layers, K] array per sample, of the MoE
    layers or of all; `steps` comes from `schedules_of_steps`. Samples that no step runs are left out.
    """
    return [
        plan_from_schedule(samples, schedule, config=config, model=model, topology=topology)
        for _, samples, schedule in _by_step(routed_experts, total_lengths, steps, model)
    ]


def _by_step(
    routes: Sequence[Any],
    lengths: Sequence[int],
    steps: Sequence[Sequence[Sequence[Sequence[int]]]],
    model: MoeModelSpec,
) -> Iterator[tuple[list[int], list[NDArray[np.signedinteger]], list[list[list[int]]]]]:
    """Yield, by step, the global ids of its samples, their routes, the schedule with samples numbered from 0 on."""
    require(len(routes) == len(lengths), f"there are routes of {len(routes)} samples and lengths of {len(lengths)}.")
    for schedule in steps:
        # Ascending, so that the plan of a step does not depend on how the driver ordered its samples.
        ids = sorted({sample for batches in schedule for batch in batches for sample in batch})
        number = {sample: index for index, sample in enumerate(ids)}
        samples = [with_missing_last_rows(of_moe_layers(routes[index], model), lengths[index]) for index in ids]
        yield ids, samples, [[[number[index] for index in batch] for batch in batches] for batches in schedule]


def write_plans(plans: Sequence[Plan], folder: Path | str, *, rollout_id: int) -> list[Path]:
    """Write the plans of a rollout's optimizer steps where workers with MOE_RL_PLANS=`folder` look for them."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = [plan_path(Path(folder), rollout_id, step) for step in range(len(plans))]
    for plan, path in zip(plans, paths, strict=True):
        plan.save(path)
    return paths


def plan_path(folder: Path, rollout_id: int, step_id: int) -> Path:
    """Return where the plan of one optimizer step lies."""
    return folder / f"rollout{rollout_id:06d}-step{step_id:04d}.plan.npz"
