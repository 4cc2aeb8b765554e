"""A Megatron run inside a framework: its balancer, or none, and the recorder of its routing."""

import os
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_model_config

from moe_rl.balancing.common_facts import require_in_common
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.exchange import agreed, gathered
from moe_rl.balancing.homes import GradientsWaitError
from moe_rl.balancing.pass_source import PassSource
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.native import native_core, why_not_native
from moe_rl.frameworks.contract import Framework, logger
from moe_rl.frameworks.prometheus import publish
from moe_rl.frameworks.ranks import (
    announce,
    ranks_per_host,
    require_distributed,
    unbalanced,
)
from moe_rl.frameworks.router_shift import MicroBatchKeys, RouterShiftRun
from moe_rl.frameworks.run_settings import Settings
from moe_rl.megatron import Balancer, RoutingRecorder, attach
from moe_rl.megatron.load_watch import LoadWatch
from moe_rl.megatron.router_watch import RouterWatch
from moe_rl.planner.registry import POLICIES

# Of a device's memory, what copies that stay may take where nobody said how many.
RESIDENT_SHARE = 0.05


def chosen(config: BalancerConfig, stated: AbstractSet[str], models: Sequence[torch.nn.Module]) -> BalancerConfig:
    """Return the configuration with what nobody set: reorders, and slots that the memory has room for.

    Where an EP group spans nodes and the policy fills them, a rank gets one slot for copies from other nodes, and one
    or two for copies that stay, if these take at most a twentieth of the device with the least memory.
    """
    levers = POLICIES[config.policy].levers
    require(
        "pack" not in stated or not config.micro_batches.pack or levers.pack,
        f"pack=True has no effect, because the policy {config.policy!r} does not pack sequences.",
    )
    if "reorders" not in stated:
        config = config.with_words(reorders=levers.move_homes)
    if parallel_state.get_expert_model_parallel_world_size() <= config.slots.ranks_per_node:
        for name in ("cross_node_slots", "resident_slots"):
            require(
                not config.value_of(name), f"{name} has no effect, because all ranks of an EP group are on one node."
            )
        return config
    if "cross_node_slots" not in stated and levers.cross_node:
        config = config.with_words(cross_node_slots=1)
    if "resident_slots" not in stated and levers.choose_residents:
        layers = [module for model in models for module in model.modules() if isinstance(module, MoELayer)]
        sizes = [
            sum(parameter.numel() * (parameter.element_size() + 4) for parameter in layer.experts.parameters())
            for layer in layers
        ]
        # A copy that stays takes the weights and an fp32 gradient (4 bytes) of one expert in every layer.
        a_slot = sum(sizes) // max(1, layers[0].num_local_experts if layers else 1)
        # The rank with the least memory decides: plans need one number of slots everywhere.
        slots_here = int(RESIDENT_SHARE * memory_bytes()) // max(1, a_slot)
        config = config.with_words(resident_slots=min(2, *gathered(slots_here)))
    return config


def idle_levers(config: BalancerConfig, stated: AbstractSet[str], why_homes_stay: str | None) -> Iterator[str]:
    """Yield of every lever that is on and cannot act in this process: which, and why.

    `stated` are the settings that somebody set. Of moves, which are on by themselves, nothing is said where nobody
    asked for them: where they cannot act is part of the framework's page.
    """
    packs = config.moves_sequences and POLICIES[config.policy].levers.pack
    if packs and native_core() is None:
        yield f"pack=True has no effect here, because {why_not_native()}. Sequences stay in their micro-batches."
    if config.homes.reorders and "reorders" in stated and why_homes_stay is not None:
        yield (
            f"reorders=True has no effect here, because {why_homes_stay}. Experts stay on the ranks where Megatron "
            "puts them."
        )


def say_once(sentence: str) -> None:
    """Warn on rank 0."""
    if dist.get_rank() == 0:
        logger.warning("moe_rl: %s", sentence)


def memory_bytes() -> int:
    """Return the bytes of this rank's device, or of the host where it is none."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class MicroBatchLimit:
    """How many tokens the micro-batches of an update have per GPU: the framework's limit, or fewer."""

    def __init__(self, framework_name: str) -> None:
        self._framework_name = framework_name
        self.tokens: int | None = None
        """Of the update that comes; None if nobody asked."""

    def next(self, limit: int, longest: int, *, fitting_tokens: int | None) -> int:
        """Return the framework's `limit`, or fewer tokens if that is forecast not to fit; a collective of all ranks.

        Fewer by the rows of the last pass, with which `fitting_tokens` per rank would fit, but never fewer than the
        `longest` sequence of any rank has. `limit` and `longest` count what a tensor-parallel group shares.
        """
        # A longer sequence cannot be cut: the limit never goes below it.
        fitting, lengths = zip(*gathered((fitting_tokens, longest)), strict=True)
        shared_by = parallel_state.get_tensor_model_parallel_world_size()
        fits = min((limit_of_rank * shared_by for limit_of_rank in fitting if limit_of_rank is not None), default=limit)
        tokens: int = min(limit, max(*lengths, fits))
        # Said when the limit first falls, not at every update of a run that stays below it.
        if tokens < limit and self.tokens in (None, limit):
            logger.warning(
                "moe_rl: micro-batches get at most %d tokens per GPU, because %s's limit of %d tokens is predicted to "
                "exceed the GPU memory.",
                tokens,
                self._framework_name,
                limit,
            )
        self.tokens = tokens
        return tokens


class MegatronRun:
    """State of an adapter that an environment variable turned on; call every method on all ranks."""

    def __init__(
        self, framework: Framework, chunks: Sequence[torch.nn.Module], balancer: Balancer | None, settings: Settings
    ) -> None:
        self.framework = framework
        self.balancer = balancer
        """None where the run cannot be balanced."""
        self.settings = settings
        self.last_metrics: dict[str, float] = {}
        """Of the last pass; empty where it had no plan."""
        self.router_shift: RouterShiftRun | None = None
        """Given by the adapter where gamma was asked for."""
        self._limit = MicroBatchLimit(framework.name)
        self._chunks = chunks
        self._recorder: RoutingRecorder | None = None
        self._steps = 0
        self._updates = 0
        """Passes with backward that have begun."""
        self._away = False
        self._loads = LoadWatch(chunks) if settings.measures_alone else None
        """Of a run that is measured alone."""
        self._watch: RouterWatch | None = None
        if settings.record is not None:
            self.record(settings.record)
        if settings.check or settings.telemetry:
            if balancer is not None:
                per_node = balancer.config.slots.ranks_per_node
            else:
                per_node = settings.balancer.slots.ranks_per_node
            self._watch = RouterWatch(
                chunks, check=settings.check, telemetry=settings.telemetry, ranks_per_node=per_node
            )

    @classmethod
    def attach(
        cls,
        framework: Framework,
        chunks: Any,
        optimizer: Any,
        settings: Settings,
        *,
        refusal: str = "",
        guarded: bool = False,
    ) -> Self:
        """Balance the model chunks, or say in one warning why not (`Settings.strict` raises); a collective.

        The settings are those of this rank: other versions or settings elsewhere are refused. So is the run where
        `refusal` says why on any rank. Whatever fails on one rank, the framework's own check included, is said on all.
        Experts move only where all that reads or writes weights beside the optimizer is `guarded` by the adapter.
        """
        models = [chunks] if isinstance(chunks, torch.nn.Module) else list(chunks)
        balancer = None
        if not settings.balances or settings.measures_alone:
            return cls(framework, models, balancer, settings)

        def looked_at() -> str:
            version = framework.check()
            require(
                bool(get_model_config(models[0]).num_moe_experts),
                "there is nothing to balance, because the model has no MoE layer.",
            )
            ep_size = parallel_state.get_expert_model_parallel_world_size()
            require(ep_size > 1, "with expert_model_parallel_size 1, every rank holds all experts.")
            require(not refusal, refusal)
            return version

        try:
            require_distributed(framework.name)
            version = agreed(looked_at)
            config = settings.balancer
            facts = {f"the version of {framework.name}": version, **settings.in_common()}
            require_in_common(config, facts, whose=f"{framework.name}: ")
            if "ranks_per_node" not in settings.given:
                hosts = ranks_per_host(parallel_state.get_expert_model_parallel_group())
                config = config.with_words(ranks_per_node=hosts)
            config = chosen(config, settings.given, models)
            balancer = attach(models, optimizer, config)
            if not guarded:
                balancer.run.homes_stay = f"{framework.name} reads and writes weights without first moving experts back"
            for sentence in idle_levers(config, settings.given, balancer.run.why_homes_stay):
                say_once(sentence)
            announce(framework.name, version, num_layers=balancer.model.num_moe_layers, policy=settings.balancer.policy)
        except InvalidInputError as error:
            unbalanced(framework.name, error, strict=settings.strict)
        return cls(framework, models, balancer, settings)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do around a pass: it runs as the framework left it."""
        parts = (self.balancer, self.router_shift, self._recorder, self._watch, self._loads)
        return all(part is None for part in parts)

    @property
    def layer_ids(self) -> list[int]:
        """Which of the model's MoE layers those of this rank are, in the order of `balancer.layers`."""
        if self.balancer is None:
            return []
        return [self.balancer.model.moe_layer_ids.index(layer.layer_number - 1) for layer in self.balancer.layers]

    def micro_batch_limit(self, limit: int, longest: int) -> int:
        """Return the tokens of the next update's micro-batches per GPU, at most; see `MicroBatchLimit`."""
        if self.balancer is None or not self.balancer.config.cuts_micro_batches:
            return limit
        return self._limit.next(limit, longest, fitting_tokens=self.balancer.fitting_tokens)

    @property
    def packs(self) -> bool:
        """Whether sequences may change their micro-batch: as set, where the policy has the lever."""
        if self.balancer is None:
            return False
        config = self.balancer.config
        return config.moves_sequences and POLICIES[config.policy].levers.pack

    def record(self, path: Path | str) -> None:
        """Record the routing of every training pass from now on, as one trace per data-parallel rank in `path`."""
        self._recorder = RoutingRecorder(self._chunks, path)

    def around(
        self,
        call: Callable[[], Any],
        source: PassSource | None,
        *,
        forward_only: bool,
        keys: Sequence[MicroBatchKeys] | None = None,
    ) -> Any:
        """Return what `call`, a `forward_backward_func` call, returned; `last_metrics` are those of the pass.

        `source` is what `Balancer.begin_pass` is given; None: the pass that is prepared, or a run without balancer.
        `keys` of the micro-batches are for the router shift, where there is one.
        Whatever `call` raises, this rank is outside of a pass afterwards: it can save, export and go on.
        """
        try:
            if self.balancer is not None and self._is_over():
                self._switch_off()
            self._updates += not forward_only
            return self._around(call, source, forward_only=forward_only, keys=keys)
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """Forget the pass under way, on this rank alone; see `Balancer.give_up`."""
        self.last_metrics = {}
        if self.balancer is not None:
            self.balancer.give_up()
        if self._watch is not None:
            self._watch.give_up()
        if self._loads is not None:
            self._loads.give_up()

    def drop_prepared(self) -> None:
        """Forget the passes that were prepared: others come."""
        if self.balancer is not None:
            self.balancer.drop_prepared()

    def _is_over(self) -> bool:
        """Return whether balancing ends here, by `Settings.until`; a collective of the run if that is a file."""
        until = self.settings.until
        if until is None:
            return False
        if until.file is not None:
            return bool(gathered(until.file.exists())[0])  # hosts may see a shared folder late: rank 0 decides
        return until.updates is not None and self._updates >= until.updates

    def _switch_off(self) -> None:
        """Bring the experts home and go on without balancing; a collective.

        While gradients wait for an optimizer step nothing may move: the pass after it tries again.
        """
        balancer = self.balancer
        assert balancer is not None
        balancer.drop_prepared()
        try:
            if balancer.run.homes_stay is None:
                balancer.reorder(balancer.megatron_placement)
        except GradientsWaitError:
            return
        balancer.detach()
        self.balancer = None
        if dist.get_rank() == 0:
            logger.warning(
                "moe_rl: balancing ended after %d updates, because of the setting `until`. All experts are on the "
                "ranks where Megatron puts them, and the run continues.", self._updates,
            )  # fmt: skip

    def _around(
        self,
        call: Callable[[], Any],
        source: PassSource | None,
        *,
        forward_only: bool,
        keys: Sequence[MicroBatchKeys] | None,
    ) -> Any:
        if self.router_shift is not None and keys is not None:
            call = partial(self.router_shift.around, call, keys, forward_only=forward_only)
        balancer = self.balancer
        self.last_metrics = {}
        if balancer is not None:
            balancer.begin_pass(source, forward_only=forward_only)
        if self._loads is not None:
            self._loads.begin_pass(forward_only=forward_only)
        if self._recorder is not None and not forward_only:
            with self._recorder.step(self._steps):
                result = call()
            self._steps += 1
        else:
            result = call()
        if balancer is not None:
            self.last_metrics = balancer.end_pass().as_dict()
            if self._limit.tokens is not None and not forward_only:
                self.last_metrics["moe_rl/micro_batch_limit_tokens"] = float(self._limit.tokens)
        if self._loads is not None:
            self.last_metrics |= self._loads.end_pass()
        if self._watch is not None:
            self.last_metrics |= self._watch.end_pass()
        if self.router_shift is not None and not forward_only:
            self.last_metrics |= self.router_shift.metrics()
        if self.settings.prometheus:
            publish(self.last_metrics, self.settings.prometheus)
        return result

    def move(self, *, to_host: bool) -> None:
        """Give the balancer's memory back when the framework has put the parameters away, and take it again."""
        # A framework may ask twice, by its offload and by its sleep.
        if self.balancer is not None and to_host != self._away:
            self._away = to_host
            (self.balancer.offload if to_host else self.balancer.onload)()

    def rebuild_groups(self) -> None:
        """Go on after the framework has destroyed and made its process groups anew; a collective of all ranks."""
        if self.balancer is not None:
            self.balancer.rebuild_groups()

    def detach(self) -> None:
        """Give the model back to Megatron and close the recording."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._loads is not None:
            self._loads.close()
            self._loads = None
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        if self.balancer is not None:
            self.balancer.detach()
            self.balancer = None
