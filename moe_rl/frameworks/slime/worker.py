"""One process of slime, or of a framework that is built alike: hooks around its schedule and readers of weights."""

import functools
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from moe_rl.balancing.pass_source import PassSource
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.plan_file import load_plan
from moe_rl.core.post_import import when_imported, wrap
from moe_rl.frameworks.contract import Framework
from moe_rl.frameworks.run_settings import Settings
from moe_rl.frameworks.slime.driver import plan_path
from moe_rl.frameworks.slime.manager import install_when_imported
from moe_rl.frameworks.slime.micro_batches import CallData, is_packed, replayed_routes

if TYPE_CHECKING:
    from moe_rl.frameworks.megatron_run import MegatronRun
    from moe_rl.frameworks.router_shift import RouterShiftRun

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
    run: "MegatronRun | None" = None
    """After the first hook."""
    step: tuple[int, int] | None = None
    """(rollout, optimizer step) of the next training call; None once it has run."""
    readers: Mapping[str, bool] = field(default_factory=dict)
    """All that reads or writes weights beside the optimizer, as module:name, and whether that is weights alone; empty
    where not all of it is known: experts stay at home then."""
    options_of_others: tuple[str, ...] = ()
    """Options of the framework under which more reads or writes weights than `readers`: experts stay at home then."""
    router_shift: "RouterShiftRun | None" = None
    """After the first call, if gamma was asked for."""
    model: str = "actor"
    """Whose weights are in the parameters: actor, old_actor, ref or teacher."""

    def init(self, args: Any) -> None:
        """Read the settings and take note of Megatron's schedule; called on all ranks when Megatron has its groups.

        Settings that our loss would not honor, or that differ between ranks, are refused here, before any rollout.
        """
        from moe_rl.frameworks.ranks import settings_of_all_ranks  # imports torch

        is_own_loss = str(getattr(args, "custom_loss_function_path", "")).startswith("moe_rl.frameworks.slime.losses.")
        if is_own_loss:
            from moe_rl.frameworks.slime.losses import objective_of

            objective_of(args)
        self.settings, self.args = settings_of_all_ranks(self.framework.name), args
        name = self.framework.name
        if self.settings is None:
            logger.warning("moe_rl: this %s run is not balanced, because MOE_RL is not set.", name)
            return
        if self.settings.router_shift:
            require(is_own_loss, "MOE_RL_ROUTER_SHIFT needs a loss from moe_rl.frameworks.slime.losses.")
            no_pass = getattr(args, "use_rollout_logprobs", False)
            require(
                not no_pass,
                "the router shift needs the pass for old log-probabilities, but --use-rollout-logprobs skips it.",
            )
            require(is_packed(args), "the router shift needs --qkv-format thd, and does not work with --allgather-cp.")
        model: Any = import_module(f"{name}.backends.megatron_utils.model")
        actor: Any = import_module(f"{name}.backends.megatron_utils.actor")
        # A second call in one process must not plan every pass twice.
        if not hasattr(model.get_forward_backward_func, "__wrapped__"):
            install_when_imported(name, self.settings)
            wrap(model, "get_forward_backward_func", lambda original: self.planned(original()))
            wrap(actor, "reload_process_groups", self.reloaded)
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

    def note_models(self, copies: Any) -> None:
        """Note whose weights slime puts into the parameters; `copies` is its module `utils.tensor_backper`."""

        def restored(restore: Callable[..., Any], backups: Any, tag: str) -> Any:
            self.model = tag
            return restore(backups, tag)

        # There are several kinds of backups, and each has its own `restore`.
        for kind in vars(copies).values():
            if isinstance(kind, type) and issubclass(kind, copies.TensorBackuper):
                wrap(kind, "restore", restored)

    def is_of_another_model(self, *, forward_only: bool) -> bool:
        """Return whether a call runs a reference or teacher model; an update is the actor's, whatever was last in."""
        return forward_only and not self.model.endswith("actor")

    def keys_ahead(self, kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Return the keys of the micro-batches of a call; None where gamma was not asked for, or of another model."""
        import torch

        from moe_rl.frameworks.router_shift import RouterShiftRun

        forward_only = bool(kwargs.get("forward_only", False))
        floor = 0.0 if self.settings is None else self.settings.router_shift
        if not floor or self.is_of_another_model(forward_only=forward_only):
            return None
        if self.router_shift is None:
            self.router_shift = RouterShiftRun(list(kwargs["model"]), floor=floor)
        data = self.call_data(kwargs)
        tokens = data.tokens()
        if tokens is None:
            raise InvalidInputError(
                "the router shift cannot find the micro-batches among the arguments of Megatron's schedule."
            )
        keys = [self.router_shift.keys(sequences, forward_only=forward_only) for sequences in tokens]
        return [(keys_of_batch, torch.from_numpy(data.rows(keys_of_batch))) for keys_of_batch in keys]

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
        """Return Megatron's schedule function with the actor's calls planned.

        Those of reference and teacher models run outside of passes, with experts where they are: their routers choose
        other experts for the same tokens, from which nothing may be learned for the actor.
        """

        @functools.wraps(function)
        def planned(**kwargs: Any) -> Any:
            run, settings = self.run, self.settings
            if settings is None:
                return function(**kwargs)
            forward_only = bool(kwargs.get("forward_only", False))
            if self.is_of_another_model(forward_only=forward_only):
                return function(**kwargs)
            if run is not None and run.packs and settings.plans is None and not forward_only:
                self.call_data(kwargs).pack(run.balancer)
            call, keys = functools.partial(function, **kwargs), self.keys_ahead(kwargs)
            if run is None:
                shift = None if keys is None else self.router_shift
                if shift is None:
                    return call()
                return shift.around(call, keys or [], forward_only=forward_only)
            run.router_shift = self.router_shift
            source = None
            if run.balancer is not None:
                source = self.source_of(self.call_data(kwargs), kwargs["num_microbatches"], forward_only=forward_only)
            result = run.around(call, source, keys=keys, forward_only=forward_only)
            if run.last_metrics:
                logger.info("moe_rl: %s", run.last_metrics)
            return result

        return planned

    def call_data(self, kwargs: Mapping[str, Any]) -> CallData:
        """Return the data of a call of Megatron's schedule."""
        return CallData(self.args, kwargs["data_iterator"], kwargs["num_microbatches"])

    def source_of(self, data: CallData, num_micro_batches: int, *, forward_only: bool) -> PassSource:
        """Return what is known of the next call: the driver's plan, routes to replay, sequences, or their number."""
        folder = None if self.settings is None else self.settings.plans
        if not forward_only and folder is not None and self.step is not None:
            return PassSource.given(load_plan(plan_path(folder, *self.step)))
        # Homes are learned from what passes count by sequence, of replayed routes, too.
        sequences = data.sequences()
        if not forward_only or self.stage() == "replay_forward":
            routes = replayed_routes(self.run, num_micro_batches)
            if routes is not None:
                return PassSource.replayed(routes, sequences)
        if sequences is None:
            return PassSource.unknown(num_micro_batches)
        return PassSource.expected(sequences)
