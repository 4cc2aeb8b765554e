"""Cases of test_faults.py: a rank is killed or hangs in the middle of a step or of a reorder, and the run restarts."""

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import give_up_cases
import tiny_gpt
import torch
import torch.distributed as dist
from checkpoint_cases import load, save, with_state
from megatron.core import parallel_state
from reorder_cases import random_placement, routes_of

from moe_rl.balancing import migrate
from moe_rl.balancing.pass_planner import PassPlanner
from moe_rl.balancing.pass_source import PassSource
from moe_rl.megatron import Balancer, BalancerConfig, attach, restore_placement, save_placement
from moe_rl.megatron.transport import Transport

FOLDER = "MOE_RL_TEST_CHECKPOINTS"
"""Environment variable with a folder that outlives the launch."""
SAVED, KILLED, STEPS = 1, 2, 4
GROUP_TIMEOUT_S = 6.0
KIND = "fully_reshardable"


def balancer_of(run: tiny_gpt.Run) -> Balancer:
    """A balancer whose reorders take several rounds."""
    return attach(
        run.models, run.optimizer, BalancerConfig(policy="ultraep", objective="imbalance", reorder_scratch_bytes=0)
    )


def one_step(run: tiny_gpt.Run, balancer: Balancer, step: int, curve: dict[str, list[float]]) -> None:
    balancer.reorder(random_placement(balancer, step))
    balancer.begin_pass(PassSource.replayed(routes_of(step)))
    tiny_gpt.update(run, step, routes_of(step), curve)
    balancer.end_pass()


@contextmanager
def told() -> Iterator[None]:
    """Say which error this rank got, and after how long."""
    started = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        waited = time.monotonic() - started
        raise RuntimeError(f"rank {dist.get_rank()} was told after {waited:.0f} s: {str(error)[:300]}") from error


def raises_alone(*, balanced: bool) -> None:
    """Rank 1's loss raises, and it saves what it has at once; then it ends, and the other rank waits for it no more."""
    folder = Path(os.environ[FOLDER])
    with tiny_gpt.parallel(2):
        run, curve = tiny_gpt.build(), tiny_gpt.history()
        balancer = attach(run.models, run.optimizer, BalancerConfig(objective="imbalance")) if balanced else None

        def step_of(step: int) -> None:
            routes = [tiny_gpt.skewed_routes(step, m) for m in range(give_up_cases.MICRO_BATCHES)]
            if balancer is None:
                tiny_gpt.update(run, step, routes, curve)
                return
            balancer.begin_pass(PassSource.replayed(routes))
            try:
                tiny_gpt.update(run, step, routes, curve)
            except BaseException:
                balancer.give_up()
                raise
            balancer.end_pass()

        step_of(0)
        if dist.get_rank() == 0:
            with told():
                step_of(1)
            return
        with give_up_cases.in_the_loss(1, give_up_cases.OfTheUserError):
            try:
                step_of(1)
            except give_up_cases.OfTheUserError:
                with balancer.canonical() if balancer is not None else nullcontext():
                    torch.save(run.gpt.state_dict(), folder / "of_rank_1.pt")
                raise


def moved_and_alone() -> None:
    """The same in a run whose experts are elsewhere, of a kind that is drawn: nobody can bring them home alone, so the
    rank saves what it holds, and where each expert's home is."""
    folder = Path(os.environ[FOLDER])
    setting = give_up_cases.SETTINGS[give_up_cases.ALONE[0]["setting"]]
    with tiny_gpt.parallel(**setting.parallel):
        run, curve = tiny_gpt.build(**setting.build), tiny_gpt.history()
        balancer = attach(run.models, run.optimizer, setting.config)
        balancer.reorder(setting.placement(balancer, 1))
        balancer.begin_pass(PassSource.replayed(setting.routes(0)))
        if dist.get_rank() == 0:
            with told():
                tiny_gpt.update(run, 0, setting.routes(0), curve)
            return
        with give_up_cases.in_the_loss(1, give_up_cases.OfTheUserError):
            try:
                tiny_gpt.update(run, 0, setting.routes(0), curve)
            except give_up_cases.OfTheUserError:
                balancer.give_up()
                weights = {name: value.detach() for name, value in run.gpt.named_parameters()}
                torch.save({"weights": weights, "homes": balancer.placement.home_rank}, folder / "of_rank_1.pt")
                raise


alone_in_megatron = functools.partial(raises_alone, balanced=False)
alone_balanced = functools.partial(raises_alone, balanced=True)


def in_a_reorder(happen: Callable[[], None]) -> None:
    """Let it happen in the second round of this rank's next reorder: the first one is committed."""
    exchange, rounds = migrate._exchange, []

    def exchange_once(*given: Any) -> None:
        rounds.append(1)
        if len(rounds) > 1:
            happen()
        exchange(*given)

    patch.object(migrate, "_exchange", exchange_once).start()


def in_a_step(happen: Callable[[], None]) -> None:
    """Let it happen in backward, where gradients of replicas start their way home."""
    patch.object(Transport, "start_return", lambda *_: happen()).start()


def in_a_push(happen: Callable[[], None]) -> None:
    """Let it happen where the weights of replicas are about to leave."""
    patch.object(Transport, "start_push", lambda *_: happen()).start()


def while_planning(happen: Callable[[], None]) -> None:
    """Let it happen on the thread that plans, when the others wait for this rank's share."""
    patch.object(PassPlanner, "_plan_share", lambda *_: happen()).start()


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def until_killed(where: Callable[[Callable[[], None]], None], *, ep_size: int = 2) -> None:
    """Train, save a checkpoint while experts are reordered, go on, and lose rank 1."""
    folder = Path(os.environ[FOLDER]) / where.__name__
    if dist.get_rank() == 0:
        folder.mkdir()
    with tiny_gpt.parallel(ep_size):
        run, curve = tiny_gpt.build(), tiny_gpt.history()
        balancer = balancer_of(run)
        for step in range(STEPS):
            if step == SAVED:
                with balancer.canonical():
                    save(run, str(folder), KIND)
                save_placement(balancer, folder)
            if step == KILLED and dist.get_rank() == 1:
                where(killed)
            with told():
                one_step(run, balancer, step, curve)


killed_in_a_reorder = functools.partial(until_killed, in_a_reorder)
killed_in_a_step = functools.partial(until_killed, in_a_step)
killed_in_a_push = functools.partial(until_killed, in_a_push)
killed_while_planning = functools.partial(until_killed, while_planning)
killed_in_a_reorder_at_ep4 = functools.partial(until_killed, in_a_reorder, ep_size=4)
killed_in_a_step_at_ep4 = functools.partial(until_killed, in_a_step, ep_size=4)


def restarted() -> dict[str, Any]:
    """The curves of runs that go on from the checkpoints of the killed ones, and of plain Megatron."""
    found: dict[str, Any] = {}
    with tiny_gpt.parallel(2):
        plain = tiny_gpt.history()
        run = tiny_gpt.build()
        for step in range(STEPS):
            tiny_gpt.update(run, step, routes_of(step), plain)
        found["plain"] = {name: values[SAVED:] for name, values in plain.items()}
        for where in (in_a_reorder, in_a_step):
            folder = Path(os.environ[FOLDER]) / where.__name__
            run, curve = with_state(), tiny_gpt.history()
            load(run, str(folder), KIND)
            balancer = balancer_of(run)
            expected = random_placement(balancer, SAVED - 1).home_rank.tolist()
            found[f"{where.__name__}_placement"] = (
                restore_placement(balancer, folder) and balancer.placement.home_rank.tolist() == expected
            )
            for step in range(SAVED, STEPS):
                one_step(run, balancer, step, curve)
            found[where.__name__] = curve
    return found


def hangs_in_a_reorder() -> None:
    """Rank 1 stops without dying: nothing closes its connections."""
    initialize = functools.partial(
        parallel_state.initialize_model_parallel, distributed_timeout_minutes=GROUP_TIMEOUT_S / 60
    )
    with patch.object(parallel_state, "initialize_model_parallel", initialize), tiny_gpt.parallel(2):
        balancer = balancer_of(tiny_gpt.build())
        if dist.get_rank() == 1:
            in_a_reorder(stopped)
        with told():
            balancer.reorder(random_placement(balancer, 0))
