"""The trainer of one rank: Megatron's model, optimizer and balancer, and one GRPO step on rollouts.

S sequences, T packed tokens, M cells per update, R ranks (expert-parallel and data-parallel alike), L MoE layers,
K experts per token, E experts. All ranks hold the same rollouts; every rank runs its own cells of them.
"""

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from torch.func import functional_call

from examples.countdown.batches import Cell, cells_of_rank
from examples.countdown.config import CountdownGrpoConfig
from examples.countdown.model import build_gpt
from examples.countdown.old_policy import Metrics, OldPolicy, OldPolicyCells
from examples.countdown.passes import CellLoss, run_pass
from examples.countdown.rollout_engine import DTYPES
from examples.countdown.rollouts import Rollouts
from examples.countdown.update_loss import Targets, UpdateLoss
from examples.countdown.weights import export_weights, import_weights
from moe_rl.core.placement import ExpertPlacement
from moe_rl.importance import BatchTotals, RouterTap
from moe_rl.megatron import PassMetrics, PassSource, attach
from moe_rl.megatron.expert_views.grouped_module import grouped_spec


class Trainer:
    """Every method is called on all ranks alike."""

    def __init__(self, config: CountdownGrpoConfig, state_dict: Mapping[str, Tensor]) -> None:
        """Build everything with Hugging Face weights `state_dict` in it; Megatron's parallel state must be set up."""
        self._config = config
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        dtype = DTYPES[config.train.precision]
        self._is_bf16 = dtype == torch.bfloat16
        self.gpt = build_gpt(
            config.model,
            config.problems.spec().vocabulary_size,
            dtype,
            changed_spec=functools.partial(_spec_of_experts, config),
        )
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        module = Float16Module(self.gpt.config, self.gpt) if self._is_bf16 else self.gpt
        self.model = DistributedDataParallel(self.gpt.config, ddp, module)
        import_weights(self.gpt, state_dict)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.train.learning_rate,
                weight_decay=config.train.weight_decay,
                clip_grad=config.train.clip_grad,
                use_distributed_optimizer=True,
                bf16=self._is_bf16,
                params_dtype=dtype,
            ),
            [self.model],
        )
        self.gpt.config.finalize_model_grads_func = finalize_model_grads
        self.gpt.config.grad_scale_func = self.optimizer.scale_loss
        self._tap = RouterTap(self.gpt, agreement=True)
        self.balancer = (
            attach([self.model], self.optimizer, config.balancer.config()) if config.balancer.enabled else None
        )

    def step(self, rollouts: Rollouts, step: int) -> Metrics:
        """Do the updates of one step, numbered from 1, on rollouts that all ranks hold; return what to log."""
        started, train = time.perf_counter(), self._config.train
        parts = torch.arange(rollouts.num_sequences).chunk(train.num_mini_batches)  # whole prompt groups
        cells = [self._cells(rollouts, part, train.micro_batch_size) for part in parts]
        every_cell = [cell for of_update in cells for cell in of_update]
        metrics = self._reorder(rollouts, every_cell, step)
        old = self.old_policy(rollouts, every_cell, replayed=train.replay == "R3")
        metrics |= old.mismatch(rollouts) | {"policy/entropy": float(old.entropy[rollouts.response_mask].mean())}
        if train.compare_replay:
            metrics |= self._compared_replay(rollouts, every_cell, metrics["mismatch/k3_kl"])
        targets = Targets.of(rollouts, old, train)
        metrics |= targets.metrics
        old_done = time.perf_counter()
        updates = []
        for part, of_update in zip(parts, cells, strict=True):
            totals = targets.totals(part, max_response_tokens=self._config.problems.spec().max_response_tokens)
            updates.append(self._update(targets, totals, of_update))
        metrics |= _means(updates)
        metrics["time/old_policy_s"], metrics["time/update_s"] = old_done - started, time.perf_counter() - old_done
        return metrics

    def old_policy(self, rollouts: Rollouts, cells: Sequence[Cell], *, replayed: bool) -> OldPolicy:
        """Return the present policy's view of rollouts, with the rollout engine's routes or its own.

        `cells` of all ranks together are all their sequences.
        """
        found = OldPolicyCells(rollouts, cells)
        routes = [self._routes(cell, rollouts.routed_experts, replayed) for cell in cells]
        tapped = self._tap.old_pass(len(rollouts.tokens))
        with torch.no_grad(), self._balanced(routes, forward_only=True), tapped as routers:
            self._run(cells, found, rollouts.temperature, routes if replayed else None, forward_only=True)
        return found.of_all_ranks(routers)

    def probe(self, rollouts: Rollouts) -> Tensor:
        """Return [T] the present policy's log-probabilities of the response tokens, the rollouts' routes replayed.

        S must be a multiple of R. No plan is followed: experts run wherever they are. Everything but experts in FP8 is
        computed in float32, with the weights that the model runs.
        """
        every = torch.arange(rollouts.num_sequences)
        cells = self._cells(rollouts, every, rollouts.num_sequences // self._num_ranks)
        found = OldPolicyCells(rollouts, cells)
        routes = [self._routes(cell, rollouts.routed_experts, True) for cell in cells]
        model = _InFloat32(self.gpt) if self._is_bf16 else self.model
        with torch.no_grad():
            self._run(cells, found, rollouts.temperature, routes, forward_only=True, model=model)
        return found.logprobs_of_all_ranks() * rollouts.response_mask

    def export(self) -> dict[str, Tensor]:
        """Return the weights that the model runs, in its precision, under Hugging Face's names, on every rank."""
        with self._canonical(weights_only=True):
            return export_weights(self.gpt)

    def state(self) -> dict[str, Any]:
        """Return this rank's share of a checkpoint: weights and optimizer state in Megatron's order, and the homes."""
        with self._canonical(weights_only=False):
            model = {name: value.detach().clone() for name, value in self.gpt.named_parameters()}
            optimizers = [_cloned(one.optimizer.state_dict()) for one in self.optimizer.chained_optimizers]
            main_weights = [value.clone() for value in self._main_weights()]
        home = None if self.balancer is None else torch.from_numpy(self.balancer.placement.home_rank.copy())
        return {"model": model, "optimizers": optimizers, "main_weights": main_weights, "home_rank": home}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take what `state` returned on this rank of a run of the same config."""
        for name, parameter in self.gpt.named_parameters():
            parameter.copy_(state["model"][name])
        for one, saved in zip(self.optimizer.chained_optimizers, state["optimizers"], strict=True):
            one.optimizer.load_state_dict(saved)
        for main, saved in zip(self._main_weights(), state["main_weights"], strict=True):
            main.copy_(saved)
        if self.balancer is not None:
            self.balancer.reorder(ExpertPlacement.from_home_rank(state["home_rank"].numpy(), ep_size=self._num_ranks))

    def _main_weights(self) -> list[Tensor]:
        """Return this rank's shards of the optimizer's float32 weights; none where they are the model's own."""
        if not self._is_bf16:
            return []
        optimizers = [one.optimizer for one in self.optimizer.chained_optimizers]
        return [shard.detach() for one in optimizers for group in one.param_groups for shard in group["params"]]

    def _cells(self, rollouts: Rollouts, sequences: Tensor, micro_batch_size: int) -> list[Cell]:
        """Return this rank's cells of an update."""
        return cells_of_rank(
            rollouts, sequences, rank=self._rank, num_ranks=self._num_ranks, micro_batch_size=micro_batch_size
        )

    def _routes(self, cell: Cell, routed_experts: Tensor, replayed: bool) -> Tensor:
        if replayed:
            return cell.replayed_rows(routed_experts, self._config.model.num_experts)
        return cell.expected_rows(routed_experts)

    def _compared_replay(self, rollouts: Rollouts, cells: Sequence[Cell], measured: float) -> Metrics:
        """Return the mismatch with replay and without: one was measured, the other is measured here."""
        replayed = self._config.train.replay == "R3"
        other = self.old_policy(rollouts, cells, replayed=not replayed).mismatch(rollouts)["mismatch/k3_kl"]
        return {
            "mismatch/replayed_k3_kl": measured if replayed else other,
            "mismatch/free_k3_kl": other if replayed else measured,
        }

    def _reorder(self, rollouts: Rollouts, cells: Sequence[Cell], step: int) -> Metrics:
        """Move experts to the homes that suit this step's routes, when it is time to."""
        section, balancer = self._config.balancer, self.balancer
        if balancer is None or section.reorder_every == 0 or (step - 1) % section.reorder_every:
            return {}
        started = time.perf_counter()
        plan = balancer.plan_reorder([self._routes(cell, rollouts.routed_experts, False) for cell in cells])
        moved = int((plan.placement.home_rank != balancer.placement.home_rank).sum())
        received = self._sum(float(balancer.reorder(plan)))
        return {
            "moe_rl/moved_experts": float(moved),
            "moe_rl/reorder_bytes": received,
            "time/reorder_s": time.perf_counter() - started,
        }

    def _update(self, targets: Targets, totals: BatchTotals, cells: Sequence[Cell]) -> Metrics:
        """Do one optimizer update on cells."""
        replayed = self._config.train.replay != "off"
        routes = [self._routes(cell, targets.old.routed_experts, replayed) for cell in cells]
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        tapped = self._tap.update_pass(targets.old.routers)
        with self._balanced(routes, forward_only=False) as balance, tapped as routers:
            loss = UpdateLoss(self._config.train, targets, totals, cells, routers)
            temperature = targets.rollouts.temperature
            self._run(cells, loss, temperature, routes if replayed else None, forward_only=False)
        updated, grad_norm, _ = self.optimizer.step()
        if not updated:
            raise RuntimeError("the optimizer skipped an update: a gradient is not finite.")
        return loss.metrics() | {"train/grad_norm": float(grad_norm)} | self._balance_metrics(balance)

    def _run(
        self,
        cells: Sequence[Cell],
        loss: CellLoss,
        temperature: float,
        replay: Sequence[Tensor] | None,
        *,
        forward_only: bool,
        model: torch.nn.Module | None = None,
    ) -> None:
        model = self.model if model is None else model
        given = {"temperature": temperature, "replay": replay, "tap": self._tap, "forward_only": forward_only}
        run_pass(model, self.gpt, cells, loss, **given)  # type: ignore[arg-type]  # of four kinds

    @contextlib.contextmanager
    def _balanced(self, routes: Sequence[Tensor], *, forward_only: bool) -> Iterator[list[PassMetrics]]:
        """Run the pass inside under a plan for its routes; the list holds its metrics afterwards, if any."""
        done: list[PassMetrics] = []
        if self.balancer is not None:
            self.balancer.begin_pass(PassSource.replayed(routes), forward_only=forward_only)
        yield done
        if self.balancer is not None:
            done.append(self.balancer.end_pass())

    def _balance_metrics(self, passes: Sequence[PassMetrics]) -> Metrics:
        metrics: Metrics = {}
        for one in passes:
            metrics |= one.as_dict()
            metrics["time/plan_s"] = metrics.pop("moe_rl/plan_time_s")
            for name in ("plan_wait_s", "plan_cpu_s"):
                metrics[f"time/{name}"] = metrics.pop(f"moe_rl/{name}")
            for name in ("moe_rl/pushed_bytes", "moe_rl/returned_bytes"):
                metrics[name] = self._sum(metrics[name])
        return metrics

    def _canonical(self, *, weights_only: bool) -> contextlib.AbstractContextManager[None]:
        balancer = self.balancer
        return contextlib.nullcontext() if balancer is None else balancer.canonical(weights_only=weights_only)

    def _sum(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)


class _InFloat32(torch.nn.Module):
    """A bfloat16 model run on float32 copies of its weights: in its own layers, with all that is attached to them."""

    def __init__(self, gpt: GPTModel) -> None:
        super().__init__()
        self.config, self.model_type = gpt.config, gpt.model_type  # what Megatron's schedule reads
        self._gpt = [gpt]  # in a list: its parameters are not this module's
        self._weights = {name: value.detach().float() for name, value in gpt.named_parameters()}

    def set_input_tensor(self, tensor: Any) -> None:
        """Take what an earlier pipeline stage sends: Megatron's schedule calls it on every model."""
        self._gpt[0].set_input_tensor(tensor)

    def forward(self, *arguments: Any) -> Any:
        return functional_call(self._gpt[0], self._weights, arguments)


def _spec_of_experts(config: CountdownGrpoConfig, spec: Any) -> Any:
    """Return a layer's spec with the experts that the config asks for; a balancer brings its own."""
    section = config.balancer
    if section.enabled or section.experts == "megatron":
        return spec
    balancer = section.config()
    return grouped_spec(spec, recipe=balancer.kernels.recipe, backend=balancer.kernels.backend)


def _means(updates: Sequence[Metrics]) -> Metrics:
    """Return the mean of every metric over the updates that have it: one that rejected all tokens has few."""
    names = dict.fromkeys(name for each in updates for name in each)
    return {name: float(np.mean([each[name] for each in updates if name in each])) for name in names}


def _cloned(value: Any) -> Any:
    """Return a nested state with its tensors copied, so that nothing in it changes any more."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _cloned(inner) for key, inner in value.items()}
    return [_cloned(inner) for inner in value] if isinstance(value, list) else value
