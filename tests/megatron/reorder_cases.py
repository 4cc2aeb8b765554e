"""Cases of test_reorder.py: training while experts move, against training in which they stay."""

import contextlib
import functools
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import tiny_gpt
import torch
import torch.distributed as dist

from moe_rl.balancing import migrate
from moe_rl.balancing.pass_source import PassSource
from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.placement import ExpertPlacement
from moe_rl.megatron import Balancer, BalancerConfig, attach, expert_state
from moe_rl.megatron.activate import home_experts

STEPS = 4
MICRO_BATCHES = 2
SMALL = {"num_experts": 6, "num_layers": 3}
"""Three layers of three experts per rank at EP 2: with expert-DP 2 a shard boundary falls inside an expert."""


def routes_of(step: int, **shape: int) -> list[torch.Tensor]:
    return [tiny_gpt.skewed_routes(step, m, **shape) for m in range(MICRO_BATCHES)]


def random_placement(balancer: Balancer, seed: int) -> ExpertPlacement:
    """Another home for most experts of every layer, a different one per layer."""
    rng = np.random.default_rng(seed)
    home = balancer.megatron_placement.home_rank
    return ExpertPlacement.from_home_rank(np.stack([rng.permutation(row) for row in home]), ep_size=dist_ep(balancer))


def random_residents(balancer: Balancer, seed: int, *, slots: int = 2, move: bool = True) -> ExpertPlacement:
    """Random homes, or Megatron's, and on most ranks one or two experts of other ranks; none at all in one layer."""
    rng = np.random.default_rng(seed)
    home = balancer.megatron_placement.home_rank
    ranks = balancer.megatron_placement.ep_size
    home = np.stack([rng.permutation(row) for row in home]) if move else home
    residents = np.full((len(home), ranks, slots), -1)
    for layer, rank in np.ndindex(len(home), ranks):
        foreign = rng.permutation(np.flatnonzero(home[layer] != rank))[:slots]
        residents[layer, rank] = np.where(rng.random(slots) < 0.8, foreign, -1)
    residents[seed % len(home)] = -1
    return ExpertPlacement.from_home_rank(home, ep_size=ranks, resident_experts=residents)


def dist_ep(balancer: Balancer) -> int:
    return balancer.megatron_placement.ep_size


def reordered(run: tiny_gpt.Run, *, policy: str, top_k: int) -> dict[str, Any]:
    """Train with a reorder before every step: random with `ultraep` replicas on top, or what `policy` plans."""
    config = BalancerConfig(objective="imbalance", policy=policy or "ultraep", ranks_per_node=1 if policy else 8)
    balancer = attach([run.model], run.optimizer, config)
    curve, received, metrics = tiny_gpt.history(), [], []
    for step in range(STEPS):
        routes = routes_of(step, top_k=top_k)
        if policy:
            plan = balancer.plan_reorder(routes)
            received.append(balancer.reorder(plan))
            balancer.begin_pass(PassSource.given(plan))
        else:
            received.append(balancer.reorder(random_placement(balancer, step)))
            balancer.begin_pass(PassSource.replayed(routes))
        tiny_gpt.update(run, step, routes, curve)
        metrics.append(balancer.end_pass().as_dict())
    with balancer.canonical():
        state = expert_tensors(run)
    moved = expert_tensors(run)
    balancer.reorder(balancer.megatron_placement)
    balancer.detach()
    return {"curve": curve, "received": received, "metrics": metrics, "state": state, "moved": moved}


def expert_tensors(run: tiny_gpt.Run) -> list[torch.Tensor]:
    """Weights of every local expert in slot order, then this rank's optimizer state of them."""
    experts = [e for layer in run.gpt.decoder.layers for e in layer.mlp.experts.local_experts]
    parameters = [p for expert in experts for _, p in sorted(expert.named_parameters())]
    found = expert_state.ExpertOptimizerState(run.optimizer)
    state = [tensor for parameter in parameters for places in found.tensors(parameter) for tensor in places]
    return [tensor.detach().clone() for tensor in [*parameters, *state]]


def distance(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    """Largest difference of two lists of tensors, each relative to its largest entry."""
    assert [t.shape for t in first] == [t.shape for t in second]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in zip(first, second, strict=True))


def compare(*, top_k: int = 2, policy: str = "") -> dict[str, Any]:
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build(moe_router_topk=top_k)
        plain = tiny_gpt.train(run, steps=STEPS, micro_batches=MICRO_BATCHES, top_k=top_k)
        state = expert_tensors(run)
        first = reordered(tiny_gpt.build(moe_router_topk=top_k), policy=policy, top_k=top_k)
        second = reordered(tiny_gpt.build(moe_router_topk=top_k), policy=policy, top_k=top_k)
    return {
        "plain": plain,
        "reordered": first["curve"],
        "again": second["curve"],
        "received": first["received"],
        "metrics": first["metrics"],
        "state": distance(first["state"], state),
        "moved": distance(first["moved"], state),
        "same_state": distance(first["state"], second["state"]),
    }


def top4() -> dict[str, Any]:
    return compare(top_k=4)


def planned_by_relibra() -> dict[str, Any]:
    return compare(policy="relibra")


def there_and_back() -> dict[str, Any]:
    """Two reorders that undo each other, with optimizer state in place; and what the first one put where."""
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build(num_moe_experts=6, num_layers=3)
        tiny_gpt.update(run, 0, routes_of(0, **SMALL), tiny_gpt.history())
        balancer = attach([run.model], run.optimizer, BalancerConfig(policy="static"))
        before = expert_tensors(run)
        placement = random_placement(balancer, 3)
        received = balancer.reorder(placement)
        moved = expert_tensors(run)
        again = balancer.reorder(placement)
        with balancer.canonical():
            canonical = expert_tensors(run)
        after_canonical = expert_tensors(run)
        detach_refused = ""
        try:
            balancer.detach()
        except ValueError as error:
            detach_refused = str(error)
        balancer.reorder(balancer.megatron_placement)
        back = expert_tensors(run)
        balancer.detach()
    return {
        "canonical": distance(canonical, before),
        "after_canonical": distance(after_canonical, moved),
        "back": distance(back, before),
        "moved": distance(moved, before),
        "received": [received, again],
        "detach_refused": detach_refused,
    }


def controls() -> dict[str, Any]:
    """Reorders that leave the optimizer state, or one moved expert, behind."""
    moves_of, tensors_of = migrate.moves_between, expert_state.ExpertOptimizerState.tensors
    with tiny_gpt.parallel(2):
        found: dict[str, Any] = {"right": tiny_gpt.train(tiny_gpt.build(), steps=STEPS, micro_batches=MICRO_BATCHES)}
        with patch.object(expert_state.ExpertOptimizerState, "tensors", lambda self, parameter: []):
            found["without_state"] = reordered_curve()
        with patch.object(expert_state.ExpertOptimizerState, "tensors", lambda self, p: tensors_of(self, p)[:1]):
            found["without_second_moment"] = reordered_curve()
        with patch("moe_rl.balancing.migrate.moves_between", lambda *given: moves_of(*given)[1:]):
            found["one_move_lost"] = reordered_curve()
    return found


def reordered_curve() -> dict[str, list[float]]:
    run = tiny_gpt.build()
    balancer = attach([run.model], run.optimizer, BalancerConfig(policy="static"))
    curve = tiny_gpt.history()
    for step in range(STEPS):
        balancer.reorder(random_placement(balancer, step))
        tiny_gpt.update(run, step, routes_of(step), curve)
    return curve


def failure_before_commit() -> dict[str, Any]:
    """One rank cannot allocate its scratch: all ranks say so, nothing moved, and training goes on."""

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise MemoryError("no scratch memory")

    with tiny_gpt.parallel(2):
        plain = tiny_gpt.train(tiny_gpt.build(), steps=2, micro_batches=MICRO_BATCHES)
        run = tiny_gpt.build()
        balancer = attach([run.model], run.optimizer, BalancerConfig(policy="static"))
        curve, messages, untouched = tiny_gpt.history(), [], []
        for step in range(2):
            before, placement = expert_tensors(run), balancer.placement
            broken = patch.object(migrate, "_scratch", out_of_memory) if dist.get_rank() else contextlib.nullcontext()
            with broken:
                try:
                    balancer.reorder(random_placement(balancer, step))
                except migrate.ReorderError as error:
                    messages.append(str(error))
            untouched.append(distance(expert_tensors(run), before) == 0.0 and balancer.placement is placement)
            tiny_gpt.update(run, step, routes_of(step), curve)
    return {"plain": plain, "curve": curve, "messages": messages, "untouched": untouched}


def failure_after_a_round(error: Exception) -> dict[str, Any]:
    """The second of several rounds fails: the first one stands, and what is there trains on."""
    exchange, rounds = migrate._exchange, []

    def exchange_once(*given: Any) -> None:
        rounds.append(1)
        if len(rounds) == 2:
            raise error
        exchange(*given)

    with tiny_gpt.parallel(2):
        plain_run, run = tiny_gpt.build(), tiny_gpt.build()
        plain, curve = tiny_gpt.history(), tiny_gpt.history()
        tiny_gpt.update(plain_run, 0, routes_of(0), plain)
        tiny_gpt.update(run, 0, routes_of(0), curve)
        balancer = attach([run.model], run.optimizer, BalancerConfig(policy="static", reorder_scratch_bytes=0))
        target, message = random_placement(balancer, 1), ""
        try:
            with patch.object(migrate, "_exchange", exchange_once):
                balancer.reorder(target)
        except migrate.ReorderError as reorder_error:
            message = str(reorder_error)
        start_and_end = [home_experts(each) for each in (balancer.megatron_placement, target)]
        between = home_experts(balancer.placement)
        found = {"message": message, "on_the_way": [not np.array_equal(between, each) for each in start_and_end]}
        tiny_gpt.update(plain_run, 1, routes_of(1), plain)
        tiny_gpt.update(run, 1, routes_of(1), curve)
        balancer.reorder(target)
        tiny_gpt.update(plain_run, 2, routes_of(2), plain)
        tiny_gpt.update(run, 2, routes_of(2), curve)
        balancer.reorder(balancer.megatron_placement)
        state = distance(expert_tensors(run), expert_tensors(plain_run))
    return found | {"plain": plain, "curve": curve, "state": state}


ACCUMULATED = BalancerConfig(
    policy="moe-rl", objective="imbalance", ranks_per_node=1, replica_slots=1, cross_node_slots=1, reorders=True
)


def two_calls_per_step() -> dict[str, Any]:
    """Experts move by themselves while each optimizer step takes the gradients of two schedule calls.

    With `prepared` the second call of a step is planned beside the first, for homes that are proposed by then.
    """
    found: dict[str, Any] = {}
    with tiny_gpt.parallel(2):
        for name in ("plain", "ours", "prepared"):
            run, curve = tiny_gpt.build(), tiny_gpt.history()
            balancer = None if name == "plain" else attach(run.models, run.optimizer, ACCUMULATED)
            moved, fits = [], []
            for step in range(STEPS):
                run.model.zero_grad_buffer()
                run.optimizer.zero_grad()
                for half in (0, 1):
                    routes = routes_of(2 * step + half)
                    if balancer is not None:
                        before = balancer.placement.home_rank
                        source: PassSource | None = PassSource.replayed(routes, sequences_of(2 * step + half))
                        if name == "prepared" and half:
                            balancer.prepare(source)
                            source = None
                        balancer.begin_pass(source)
                        moved.append(bool((balancer.placement.home_rank != before).any()))
                    curve["loss"].append(tiny_gpt.forward_backward(run, 2 * step + half, routes))
                    if balancer is not None:
                        fits.append(balancer.end_pass().misfit is None)
                curve["grad_norm"].append(float(run.optimizer.step()[1]))
            curve["grad_norm"] += curve["grad_norm"]  # as many as losses
            found[name] = {"curve": curve, "moved": moved, "fits": fits}
    return found


def sequences_of(step: int) -> list[SequenceRows]:
    """The rows of every micro-batch as the layers have them: [S, B]."""
    found = []
    for micro_batch in range(MICRO_BATCHES):
        rows = SequenceRows.of_padded(tiny_gpt.tokens_of(step, micro_batch)[:, :-1])
        by_position = rows.sequence_of_row.reshape(tiny_gpt.BATCH, tiny_gpt.SEQUENCE).T.ravel()
        found.append(replace(rows, sequence_of_row=by_position))
    return found


def by_hand_over_gradients() -> dict[str, Any]:
    """reorder() after a backward, on one rank without gradients; after the step; and with gradients of zero."""
    said = []
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        balancer = attach(run.models, run.optimizer, BalancerConfig(policy="static"))

        def reorder(seed: int) -> None:
            try:
                said.append(balancer.reorder(random_placement(balancer, seed)) > 0)
            except InvalidInputError as error:
                said.append(str(error))

        tiny_gpt.forward_backward(run, 0, routes_of(0))
        placement = balancer.placement
        if dist.get_rank() == 1:
            run.model.zero_grad_buffer()
        reorder(1)
        stayed = balancer.placement is placement
        balancer.reorder(balancer.placement)  # where nothing moves, nothing is left behind
        run.optimizer.step()
        reorder(2)
        tiny_gpt.forward_backward(run, 1, routes_of(1))
        run.model.zero_grad_buffer()
        reorder(3)
        tiny_gpt.forward_backward(run, 2, routes_of(2))
        with balancer.canonical():  # there and back
            pass
        reorder(4)
    return {"said": said, "stayed": stayed}


connection_lost = functools.partial(failure_after_a_round, RuntimeError("connection closed by peer"))
message_refused = functools.partial(failure_after_a_round, TypeError("the backend does not know this type"))
