"""The trainer of one rank: Megatron's model, optimizer and balancer, and one GRPO step on rollouts.

S sequences, T packed tokens, M cells per update, R ranks (expert-parallel and data-parallel alike), L MoE layers,
K experts per token, E experts. All ranks hold the same rollouts; every rank runs its own cells of them.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from moe_rl.core.placement import ExpertPlacement
from moe_rl.importance import (
    BatchTotals,
    PolicyLossInputs,
    RouterShiftAccumulator,
    apply_rollout_correction,
    group_normalized_advantages,
    off_policy_metrics,
    policy_loss,
    router_agreement,
)
from moe_rl.megatron import PassMetrics, attach
from moe_rl.recipes.countdown_grpo.batches import Cell, cells_of_rank
from moe_rl.recipes.countdown_grpo.config import CountdownGrpoConfig
from moe_rl.recipes.countdown_grpo.model import build_gpt
from moe_rl.recipes.countdown_grpo.passes import CellLoss, CellOutput, run_pass
from moe_rl.recipes.countdown_grpo.rollouts import Rollouts
from moe_rl.recipes.countdown_grpo.weights import export_weights, import_weights

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OldPolicy:
    """What the trainer says about rollouts before an update; the same on all ranks."""

    logprobs: Tensor
    """[T] float32, 0 for the first token of a sequence."""
    entropy: Tensor
    """[T] float32 of the distribution the token was predicted from."""
    routed_experts: Tensor
    """[T, L, K] int64 experts used: the replayed ones, or the trainer's own."""
    own_experts: Tensor
    """[T, L, K] int64 the K experts that the trainer's router likes best."""
    router_logprobs: Tensor
    """[T, L, K] float32 of `routed_experts`, over all E experts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """What an update trains on, packed."""

    advantages: Tensor
    """[T] float32, constant over a sequence."""
    mask: Tensor
    """[T] bool, response tokens that the rollout correction keeps."""
    weights: Tensor | None
    """[T] float32 of the rollout correction."""


class Trainer:
    """Every method is called on all ranks alike."""

    def __init__(self, config: CountdownGrpoConfig, state_dict: Mapping[str, Tensor]) -> None:
        """Build everything with Hugging Face weights `state_dict` in it; Megatron's parallel state must be set up."""
        self._config = config
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self.gpt = build_gpt(config.model)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(self.gpt.config, ddp, self.gpt)
        import_weights(self.gpt, state_dict)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.train.learning_rate,
                weight_decay=config.train.weight_decay,
                clip_grad=config.train.clip_grad,
                use_distributed_optimizer=True,
            ),
            [self.model],
        )
        self.gpt.config.finalize_model_grads_func = finalize_model_grads
        self.gpt.config.grad_scale_func = self.optimizer.scale_loss
        self.balancer = (
            attach([self.model], self.optimizer, config.balancer.config()) if config.balancer.enabled else None
        )

    def step(self, rollouts: Rollouts, step: int) -> Metrics:
        """Do the updates of one step, numbered from 1, on rollouts that all ranks hold; return what to log."""
        started = time.perf_counter()
        updates = self._cells(rollouts)
        metrics = self._reorder(rollouts, updates, step)
        every_cell, replayed = [cell for cells in updates for cell in cells], self._config.train.replay == "R3"
        old = self.old_policy(rollouts, every_cell, replayed=replayed)
        metrics |= _mismatch(rollouts, old)
        if self._config.train.compare_replay:
            other = _mismatch(rollouts, self.old_policy(rollouts, every_cell, replayed=not replayed))
            for name, one in (("replayed", replayed), ("free", not replayed)):
                metrics[f"mismatch/{name}_k3_kl"] = (metrics if one else other)["mismatch/k3_kl"]
        targets, correction = self._targets(rollouts, old)
        metrics |= correction
        old_done = time.perf_counter()
        passes = [self._update(rollouts, old, targets, index, cells) for index, cells in enumerate(updates)]
        metrics |= {name: float(np.mean([each[name] for each in passes])) for name in passes[0]}
        metrics["time/old_policy_s"], metrics["time/update_s"] = old_done - started, time.perf_counter() - old_done
        return metrics

    def old_policy(self, rollouts: Rollouts, cells: Sequence[Cell], *, replayed: bool) -> OldPolicy:
        """Return the present policy's view of rollouts, with the rollout engine's routes or its own.

        `cells` of all ranks together are all their sequences.
        """
        shape = rollouts.routed_experts.shape
        logprobs, entropy = torch.zeros(shape[0]), torch.zeros(shape[0])
        experts, own = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        router_logprobs = torch.zeros(shape)

        def keep(index: int, output: CellOutput) -> Tensor:
            cell = cells[index]
            cell.scatter(output.logprobs, logprobs)
            cell.scatter(output.entropy, entropy)
            cell.scatter_inputs(output.routed_experts, experts)
            cell.scatter_inputs(output.router_logprobs.topk(shape[2], dim=-1).indices, own)
            cell.scatter_inputs(output.router_logprobs.gather(-1, output.routed_experts), router_logprobs)
            return torch.zeros(())

        routes = [self._routes(cell, rollouts.routed_experts, replayed) for cell in cells]
        with torch.no_grad(), self._balanced(routes, forward_only=True):
            self._run(cells, keep, rollouts.temperature, routes if replayed else None, forward_only=True)
        for packed in (logprobs, entropy, experts, own, router_logprobs):
            dist.all_reduce(packed)  # every token was seen by one rank, the others add zero
        return OldPolicy(
            logprobs=logprobs,
            entropy=entropy,
            routed_experts=experts,
            own_experts=own,
            router_logprobs=router_logprobs,
        )

    def probe(self, rollouts: Rollouts) -> Tensor:
        """Return [T] the present policy's log-probabilities of rollouts, their routes replayed.

        S must be a multiple of R. No plan is followed: experts run wherever they are.
        """
        every = torch.arange(rollouts.num_sequences)
        size = rollouts.num_sequences // self._num_ranks
        cells = cells_of_rank(rollouts, every, rank=self._rank, num_ranks=self._num_ranks, micro_batch_size=size)
        logprobs = torch.zeros(len(rollouts.tokens))

        def keep(index: int, output: CellOutput) -> Tensor:
            cells[index].scatter(output.logprobs, logprobs)
            return torch.zeros(())

        routes = [self._routes(cell, rollouts.routed_experts, True) for cell in cells]
        with torch.no_grad():
            self._run(cells, keep, rollouts.temperature, routes, forward_only=True)
        dist.all_reduce(logprobs)
        return logprobs * rollouts.response_mask

    def export(self) -> dict[str, Tensor]:
        """Return all weights under Hugging Face's names, on every rank, wherever the experts are."""
        with self._canonical(weights_only=True):
            return export_weights(self.gpt)

    def state(self) -> dict[str, Any]:
        """Return this rank's share of a checkpoint: weights and optimizer state in Megatron's order, and the homes."""
        with self._canonical(weights_only=False):
            model = {name: value.detach().clone() for name, value in self.gpt.named_parameters()}
            optimizers = [_cloned(one.optimizer.state_dict()) for one in self.optimizer.chained_optimizers]
        home = None if self.balancer is None else torch.from_numpy(self.balancer.placement.home_rank.copy())
        return {"model": model, "optimizers": optimizers, "home_rank": home}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take what `state` returned on this rank of a run of the same config."""
        for name, parameter in self.gpt.named_parameters():
            parameter.copy_(state["model"][name])
        for one, saved in zip(self.optimizer.chained_optimizers, state["optimizers"], strict=True):
            one.optimizer.load_state_dict(saved)
        if self.balancer is not None:
            self.balancer.reorder(ExpertPlacement.from_home_rank(state["home_rank"].numpy(), ep_size=self._num_ranks))

    def _cells(self, rollouts: Rollouts) -> list[list[Cell]]:
        """Return this rank's cells of every update; an update takes whole prompt groups."""
        train = self._config.train
        return [
            cells_of_rank(
                rollouts,
                sequences,
                rank=self._rank,
                num_ranks=self._num_ranks,
                micro_batch_size=train.micro_batch_size,
            )
            for sequences in torch.arange(rollouts.num_sequences).chunk(train.num_mini_batches)
        ]

    def _routes(self, cell: Cell, routed_experts: Tensor, replayed: bool) -> Tensor:
        if replayed:
            return cell.replayed_rows(routed_experts, self._config.model.num_experts)
        return cell.expected_rows(routed_experts)

    def _reorder(self, rollouts: Rollouts, updates: Sequence[Sequence[Cell]], step: int) -> Metrics:
        """Move experts to the homes that suit this step's routes, when it is time to."""
        section, balancer = self._config.balancer, self.balancer
        if balancer is None or section.reorder_every == 0 or (step - 1) % section.reorder_every:
            return {}
        started = time.perf_counter()
        replicating = balancer.config
        cells = [cell for cells in updates for cell in cells]
        balancer.config = replace(replicating, policy=section.reorder_policy, parameters=section.reorder_parameters)
        try:
            plan = balancer.plan([self._routes(cell, rollouts.routed_experts, False) for cell in cells])
        finally:
            balancer.config = replicating
        moved = int((plan.placement.home_rank != balancer.placement.home_rank).sum())
        received = self._sum(float(balancer.reorder(plan)))
        return {
            "moe_rl/moved_experts": float(moved),
            "moe_rl/reorder_bytes": received,
            "time/reorder_s": time.perf_counter() - started,
        }

    def _targets(self, rollouts: Rollouts, old: OldPolicy) -> tuple[Targets, Metrics]:
        per_sequence = group_normalized_advantages(rollouts.rewards, rollouts.problem_id)
        mask, weights, metrics = rollouts.response_mask, None, {}
        correction = self._config.train.correction()
        if correction is not None:
            weights, mask, metrics = apply_rollout_correction(
                correction, old.logprobs, rollouts.logprobs, mask, cu_seqlens=rollouts.cu_seqlens
            )
        return Targets(advantages=per_sequence[rollouts.sequence_of_token], mask=mask, weights=weights), metrics

    def _update(
        self, rollouts: Rollouts, old: OldPolicy, targets: Targets, index: int, cells: Sequence[Cell]
    ) -> Metrics:
        """Do one optimizer update on the cells of mini-batch `index`."""
        replayed = self._config.train.replay != "off"
        totals = self._totals(rollouts, targets.mask, index)
        routes = [self._routes(cell, old.routed_experts, replayed) for cell in cells]
        sums = _WeightedSums()

        def loss(index: int, output: CellOutput) -> Tensor:
            return self._loss(rollouts, old, targets, totals, cells[index], output, sums)

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self._balanced(routes, forward_only=False) as balance:
            self._run(cells, loss, rollouts.temperature, routes if replayed else None, forward_only=False)
        updated, grad_norm, _ = self.optimizer.step()
        if not updated:
            raise RuntimeError("the optimizer skipped an update: a gradient is not finite.")
        metrics = sums.reduced() | {"train/loss": self._sum(sums.loss), "train/grad_norm": float(grad_norm)}
        return metrics | self._balance_metrics(balance)

    def _totals(self, rollouts: Rollouts, mask: Tensor, index: int) -> BatchTotals:
        """Return the denominators of mini-batch `index`, over all ranks."""
        sequences = torch.arange(rollouts.num_sequences).chunk(self._config.train.num_mini_batches)[index]
        bounds = rollouts.cu_seqlens[int(sequences[0]) : int(sequences[-1]) + 2]
        return BatchTotals.from_mask(
            mask[int(bounds[0]) : int(bounds[-1])],
            cu_seqlens=bounds - bounds[0],
            dp_size=self._num_ranks,
            loss_scale_factor=float(rollouts.lengths.max()),
        )

    def _loss(
        self,
        rollouts: Rollouts,
        old: OldPolicy,
        targets: Targets,
        totals: BatchTotals,
        cell: Cell,
        output: CellOutput,
        sums: "_WeightedSums",
    ) -> Tensor:
        """Return the cell's share of the policy loss and add its metrics to `sums`."""
        train = self._config.train
        mask = cell.of_targets(targets.mask) & cell.real
        shift, use = None, None
        if train.router_shift is not None:
            shift, use = _router_shift(cell, old, output, train.router_shift.floor), train.router_shift.use()
        result = policy_loss(
            PolicyLossInputs(
                log_prob=output.logprobs,
                old_log_prob=cell.of_targets(old.logprobs),
                advantages=cell.of_targets(targets.advantages),
                response_mask=mask,
                rollout_is_weights=None if targets.weights is None else cell.of_targets(targets.weights),
                router_shift_ratio=shift,
                rollout_log_prob=cell.of_targets(rollouts.logprobs),
                policy_version=cell.of_targets(rollouts.policy_version),
                current_version=int(rollouts.policy_version.max()),
            ),
            objective=train.objective,
            loss_agg_mode=train.loss_agg_mode,
            totals=totals,
            router_shift=use,
            **train.objective_options,
        )
        metrics = result.metrics | {"router/agreement": _drifted_agreement(cell, old, output, mask)}
        if shift is not None:
            metrics["router/shift_ratio"] = float(shift[mask].mean()) if mask.any() else 1.0
        sums.add(metrics, int(mask.sum()), float(result.loss.detach()) / self._num_ranks)
        return result.loss

    def _run(
        self,
        cells: Sequence[Cell],
        loss: CellLoss,
        temperature: float,
        replay: Sequence[Tensor] | None,
        *,
        forward_only: bool,
    ) -> None:
        run_pass(self.model, self.gpt, cells, loss, temperature=temperature, replay=replay, forward_only=forward_only)

    @contextlib.contextmanager
    def _balanced(self, routes: Sequence[Tensor], *, forward_only: bool) -> Iterator[list[PassMetrics]]:
        """Run the pass inside under a plan for its routes; the list holds its metrics afterwards, if any."""
        done: list[PassMetrics] = []
        if self.balancer is not None:
            self.balancer.begin_pass(routes, forward_only=forward_only)
        yield done
        if self.balancer is not None:
            done.append(self.balancer.end_pass())

    def _balance_metrics(self, passes: Sequence[PassMetrics]) -> Metrics:
        metrics: Metrics = {}
        for one in passes:
            metrics |= one.as_dict()
            metrics["time/plan_s"] = metrics.pop("moe_rl/plan_time_s")
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


class _WeightedSums:
    """Means over the tokens of all cells and ranks, of metrics that are means over the tokens of a cell."""

    def __init__(self) -> None:
        self.loss = 0.0
        self._tokens = 0
        self._sums: Metrics = {}

    def add(self, metrics: Mapping[str, float], tokens: int, loss: float) -> None:
        """Add one cell."""
        self.loss += loss
        self._tokens += tokens
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * tokens

    def reduced(self) -> Metrics:
        """Return the means; a collective of all ranks."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (self._tokens, self._sums))
        tokens = sum(count for count, _ in everyone)
        names = sorted({name for _, sums in everyone for name in sums})
        return {name: sum(sums.get(name, 0.0) for _, sums in everyone) / max(1, tokens) for name in names}


def _router_shift(cell: Cell, old: OldPolicy, output: CellOutput, floor: float) -> Tensor:
    """Return gamma [B, N]: the drift of the router that predicts a token, since the old policy."""
    experts, before = cell.of_inputs(old.routed_experts), cell.of_inputs(old.router_logprobs)
    now = output.router_logprobs.gather(-1, experts)
    accumulator = RouterShiftAccumulator(cell.real.numel())
    for layer in range(experts.shape[2]):
        accumulator.add_layer(
            now[:, :, layer].flatten(0, 1), before[:, :, layer].flatten(0, 1), valid=cell.real.flatten()
        )
    return accumulator.finish(floor=floor).ratio.view(cell.real.shape)


def _drifted_agreement(cell: Cell, old: OldPolicy, output: CellOutput, mask: Tensor) -> float:
    """Return the share of the old policy's experts that the router, as updated so far, would choose itself."""
    before = cell.of_inputs(old.routed_experts)[mask]
    now = output.router_logprobs[mask].topk(before.shape[-1], dim=-1).indices
    return float(router_agreement(before, now).mean()) if len(before) else 1.0


def _mismatch(rollouts: Rollouts, old: OldPolicy) -> Metrics:
    """Return how far trainer and rollout engine are apart on the same weights, in tokens and in routes."""
    mask = rollouts.response_mask
    found = off_policy_metrics(old.logprobs, rollouts.logprobs, mask, cu_seqlens=rollouts.cu_seqlens)
    agreement = router_agreement(rollouts.routed_experts, old.own_experts)[rollouts.routed]
    return {
        "mismatch/kl": found["kl"],
        "mismatch/k3_kl": found["k3_kl"],
        "mismatch/max_logprob_diff": float((old.logprobs - rollouts.logprobs)[mask].abs().max()),
        "mismatch/router_agreement": float(agreement.mean()),
        "policy/entropy": float(old.entropy[mask].mean()),
    }


def _cloned(value: Any) -> Any:
    """Return a nested state with its tensors copied, so that nothing in it changes any more."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _cloned(inner) for key, inner in value.items()}
    return [_cloned(inner) for inner in value] if isinstance(value, list) else value
