"""Runs of a sync on local processes over gloo, one per fault: `python rank_runs.py CASE` prints what every rank met.

Without CASE, a line per fault: after how many seconds its sentence stood on the last rank, if ranks may be silent as
long as the product allows. Tests allow more, for busy machines.

Four trainers (EP 2, two expert-data-parallel twins each) and two engines of one rank each, every two ranks a node.
"""

import contextlib
import inspect
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from layout_cases import Slots, TrainerSizes, drawn_homes, drawn_slots, problem_of, reader, weights_of

from moe_rl.sync import EngineLayout, SyncError, SyncPlan, plan_sync
from moe_rl.sync.dense import receive_dense, send_dense
from moe_rl.sync.executor import Traffic
from moe_rl.sync.rank_plan import Parts
from moe_rl.sync.ranks import Address, SyncGroup
from moe_rl.sync.session import EngineSide, TrainerSide, sync_experts

SIZES = TrainerSizes(layers=4, experts=8, ep=2, edp=2)
TRAINERS, ENGINES = SIZES.ranks, 2
RNG = np.random.default_rng(5)
HOMES = drawn_homes(RNG, SIZES)
MAPS = [drawn_slots(RNG, SIZES, 1, 0) for _ in range(3)]
SILENCE = "SYNC_SILENCE_S"
PATIENCE_S, SHORT_S = (float(os.environ.get(SILENCE, seconds)) for seconds in (60.0, 10.0))
"""How long a rank may be silent: where nothing hangs, longer than any pause of a busy machine."""
DENSE = (("embed", (60, 7)), ("empty", (0, 3)), ("norm", (16,)), ("router", (8, 16)), ("head", (50, 16)))


def problem_with(maps: list[np.ndarray]) -> Any:
    engines = tuple(EngineLayout(slots=slots, ep_size=1) for slots in maps)
    nodes = [rank // 2 for rank in range(TRAINERS)]
    return problem_of(HOMES, SIZES, engines, (*nodes, *(nodes[-1] + 1 + index for index in range(len(maps)))))


PROBLEM, SHAPE = problem_with(MAPS[:ENGINES])


def dense_of(step: int) -> Iterator[tuple[str, torch.Tensor]]:
    for number, (name, shape) in enumerate(DENSE):
        generator = torch.Generator().manual_seed(step * 31 + number)
        yield name, torch.randn(shape, generator=generator).to(torch.bfloat16 if number % 2 else torch.float32)


class Rank:
    """One process: a trainer or an engine, whose slots stay from sync to sync."""

    def __init__(self, rank: int, ports: list[int]) -> None:
        self.rank, self.ports = rank, ports
        self.engine = Slots(SHAPE, PROBLEM.engines[0], 0) if rank >= TRAINERS else None
        if self.engine is not None:
            self.take_map(MAPS[rank - TRAINERS])
        self.late = False
        self.note: dict[str, Any] = {}

    def take_map(self, slots: np.ndarray) -> None:
        assert self.engine is not None
        self.engine.engine = replace(self.engine.engine, slots=slots)
        self.engine.local = slots
        self.engine.versions.move(slots)

    def sync(
        self,
        step: int,
        *,
        spoil: Callable[[Any], None] = lambda group: None,
        plan: SyncPlan | None = None,
        read_step: int | None = None,
        own_step: int | None = None,
        silence_s: float = PATIENCE_S,
    ) -> str:
        """Return "" for a sync that ended well, else what this rank was told."""
        plan = plan or plan_sync(PROBLEM, message_bytes=1)
        begun = time.monotonic()
        try:
            address = Address(host="127.0.0.1", port=self.ports.pop(0))
            size = plan.problem.size
            with SyncGroup(
                rank=self.rank, size=size, address=address, serves=self.rank == 0, silence_s=silence_s
            ) as group:
                spoil(group)
                self._sync(
                    group, plan, step if own_step is None else own_step, step if read_step is None else read_step
                )
                self.done(group)
        except SyncError as error:
            self.note["seconds"] = time.monotonic() - begun
            return str(error)
        return ""

    def done(self, group: SyncGroup) -> None:
        """Leave together: the process that keeps the store must be the last."""
        group.store.set(f"done/{self.rank}", "1")
        if self.rank == 0:
            for other in range(group.size):
                group.fetch(f"done/{other}", of=other)

    def _sync(self, group: SyncGroup, plan: SyncPlan, step: int, read_step: int) -> None:
        traffic = Traffic()
        if self.engine is None:
            weights = weights_of(SHAPE, read_step)
            read = reader(self.rank, HOMES, SIZES, SHAPE, weights)
            own = [(layer, expert) for layer, expert in np.argwhere(np.isin(HOMES, self.rank % SIZES.ep)).tolist()]
            bodies = [read(Parts(layer, expert, 0, 1)) for layer, expert in own]
            total = int(torch.cat(bodies).view(torch.int64).sum())
            side: Any = TrainerSide(read=read, weights_sum=total)
        else:
            write = (lambda parts, body: None) if self.late else self.engine.writer(step)
            side = EngineSide(write=write, current_slots=lambda: self.engine.local)
        for _ in sync_experts(group, plan, side, step=step, traffic=traffic):
            pass
        if self.engine is None:
            send_dense(group, plan.problem, dense_of(step), step=step, batch_bytes=600, traffic=traffic)
            self.note["sent"] = traffic.sent_bytes
        else:
            found = list(receive_dense(group, plan.problem, step=step, batch_bytes=600, traffic=traffic))
            right = [(name, tensor) for name, tensor in dense_of(step)]
            assert [name for name, _ in found] == [name for name, _ in right]
            assert all(a.dtype == b.dtype and torch.equal(a, b) for (_, a), (_, b) in zip(found, right, strict=True))

    def state(self, step: int) -> dict[str, Any]:
        """What the engine holds, and whether it would generate."""
        refusal = ""
        if self.engine is not None:
            try:
                self.engine.versions.require(step)
            except SyncError as error:
                refusal = str(error)
        wrong = self.engine.wrong_slots(weights_of(SHAPE, step)) if self.engine is not None else 0
        return {"refusal": refusal, "wrong": wrong, **self.note}


def well(rank: Rank) -> dict[str, Any]:
    """Two syncs; the second brings another map with the weights."""
    first = rank.sync(1)
    problem, _ = problem_with([MAPS[1], MAPS[2]])
    if rank.engine is not None:
        rank.take_map([MAPS[1], MAPS[2]][rank.rank - TRAINERS])
    second = rank.sync(2, plan=plan_sync(problem, message_bytes=1))
    return {"said": [first, second], **rank.state(2)}


def spoiled(rank: Rank, culprit: int, spoil: Callable[[Any], None], **how: Any) -> dict[str, Any]:
    """A good sync, a spoiled one, and one that heals where the culprit lives."""
    assert rank.sync(1) == ""
    said = rank.sync(2, **({"spoil": spoil} if rank.rank == culprit else {}), **how)
    return {
        "said": said,
        **rank.state(2),
        "seconds": rank.note.get("seconds"),
        "healed": rank.sync(2),
        "after": rank.state(2),
    }


def killed(rank: Rank) -> dict[str, Any]:
    return _ends(rank, culprit=2)


def store_killed(rank: Rank) -> dict[str, Any]:
    return _ends(rank, culprit=0)


def _ends(rank: Rank, culprit: int) -> dict[str, Any]:
    def end(group: SyncGroup) -> None:
        send = group.group.send

        def last(*message: Any) -> Any:
            if message[2] >= 3:  # in the middle of the sync
                os._exit(9)
            return send(*message)

        group.group = Wrapped(group.group, send=last)

    assert rank.sync(1) == ""
    said = rank.sync(2, spoil=end if rank.rank == culprit else lambda group: None)
    return {"said": said, **rank.state(2)}


def stopped(rank: Rank) -> dict[str, Any]:
    """Trainer 3 hangs: its connections stay, its heart does not beat."""

    def stop(group: SyncGroup) -> None:
        send = group.group.send

        def stopping(*message: Any) -> Any:
            if message[2] >= 3:
                os.kill(os.getpid(), signal.SIGSTOP)
            return send(*message)

        group.group = Wrapped(group.group, send=stopping)

    assert rank.sync(1) == ""
    said = rank.sync(2, spoil=stop if rank.rank == 3 else lambda group: None, silence_s=SHORT_S)
    return {"said": said, **rank.state(2)}


class Wrapped:
    """A process group of which some methods are others."""

    def __init__(self, group: Any, **methods: Any) -> None:
        self.group = group
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


def cut(rank: Rank) -> dict[str, Any]:
    """A message that is sent and does not come."""

    class Done:
        def wait(self) -> None: ...

    def lose(group: SyncGroup) -> None:
        send = group.group.send
        lost: list[int] = []

        def losing(tensors: Any, other: int, tag: int) -> Any:
            if tag >= 3 and not lost:
                lost.append(other)
                return Done()
            return send(tensors, other, tag)

        group.group = Wrapped(group.group, send=losing)

    return spoiled(rank, 1, lose, silence_s=SHORT_S)


def flipped(rank: Rank) -> dict[str, Any]:
    def flip(group: SyncGroup) -> None:
        send = group.group.send

        def flipping(tensors: Any, other: int, tag: int) -> Any:
            if tag == 2:
                tensors[0][-5] ^= 4
            return send(tensors, other, tag)

        group.group = Wrapped(group.group, send=flipping)

    return spoiled(rank, 3, flip)


def stale_twin(rank: Rank) -> dict[str, Any]:
    """Trainer 2 has not gathered: it still holds the experts of step 1."""
    return spoiled(rank, 2, lambda group: None, **({"read_step": 1} if rank.rank == 2 else {}))


def other_step(rank: Rank) -> dict[str, Any]:
    return spoiled(rank, 5, lambda group: None, **({"own_step": 1} if rank.rank == 5 else {}))


def other_plan(rank: Rank) -> dict[str, Any]:
    other = plan_sync(PROBLEM, message_bytes=1, relays=False)
    return spoiled(rank, 1, lambda group: None, **({"plan": other} if rank.rank == 1 else {}))


def other_map(rank: Rank) -> dict[str, Any]:
    """Rank 0 plans for a map that engine 1 does not have."""
    other = plan_sync(problem_with([MAPS[0], MAPS[2]])[0], message_bytes=1)
    return spoiled(rank, 0, lambda group: None, **({"plan": other} if rank.rank == 0 else {}))


def rebalanced(rank: Rank) -> dict[str, Any]:
    """Engine 1 moves its experts by itself between two syncs."""
    assert rank.sync(1) == ""
    if rank.rank == 5:
        rank.take_map(MAPS[2])
    said = rank.sync(2)
    return {"said": said, **rank.state(2)}


def late_loader(rank: Rank) -> dict[str, Any]:
    """Engine 0's loader has not begun when the sync ends: the next engine has right weights, this one refuses."""
    assert rank.sync(1) == ""
    rank.late = rank.rank == 4
    said = rank.sync(2)
    return {"said": said, **rank.state(2)}


def joins(rank: Rank) -> dict[str, Any]:
    """A third engine comes to the second sync."""
    said = [rank.sync(1)] if rank.rank < TRAINERS + ENGINES else [""]
    problem, _ = problem_with(MAPS)
    if rank.rank >= TRAINERS + ENGINES:
        rank.ports.pop(0)
    said.append(rank.sync(2, plan=plan_sync(problem, message_bytes=1)))
    return {"said": said, **rank.state(2)}


CASES = {
    case.__name__: case
    for case in (
        well, killed, store_killed, stopped, cut, flipped, stale_twin, other_step, other_plan, other_map, rebalanced,
        late_loader, joins,
    )
}  # fmt: skip


def no_sums(body: torch.Tensor, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


MUTANTS: dict[str, Callable[[], Any]] = {
    "without sums": lambda: patch("moe_rl.sync.executor.part_sums", no_sums),
    "without vote": lambda: patch("moe_rl.sync.ranks.verdict", lambda ballots, twins: ""),
    "without twins' sums": lambda: patch("moe_rl.sync.session.twins_of", lambda problem: []),
    "without heartbeat": lambda: patch("moe_rl.sync.ranks._Watch._look_after", lambda watch, waiting: None),
}


def main(name: str, mutant: str = "") -> None:
    """Run a case on forked ranks and print, as JSON, what each of them returned; null for one that died or hangs."""
    torch.set_num_threads(1)
    size = TRAINERS + ENGINES + (name == "joins")
    context = multiprocessing.get_context("fork")
    ports = free_ports(4)
    pipes, processes = [], []
    with MUTANTS[mutant]() if mutant else contextlib.nullcontext():
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(name, rank, list(ports), theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
    # Ranks of a mutant may wait for ever, and one that is stopped answers never.
    deadline = time.monotonic() + (30 if mutant else 240)
    results: list[Any] = [None] * size
    waiting = [rank for rank in range(size) if not (name == "stopped" and rank == 3)]
    for rank in waiting:
        with contextlib.suppress(EOFError):
            if pipes[rank].poll(max(0, deadline - time.monotonic())):
                results[rank] = pipes[rank].recv()
    for process in processes:
        process.kill()
    sys.stdout.write(json.dumps(results))


def _run(name: str, rank: int, ports: list[int], pipe: Any) -> None:
    pipe.send(CASES[name](Rank(rank, ports)))


def free_ports(count: int) -> list[int]:
    """Return ports below those that the system hands out by itself: while the ranks of an earlier sync of this run, or
    of another test, open connections, none of theirs can be one of these.
    """
    first_handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = random.sample(range(10_000, first_handed_out), 1_000)
    ports = []
    for port in candidates:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError(f"{len(ports)} of 1,000 ports are free, {count} are needed.")


FAULTS = (
    "killed", "store_killed", "stopped", "cut", "flipped", "stale_twin", "other_step", "other_plan", "other_map",
    "rebalanced",
)  # fmt: skip


def print_seconds() -> None:
    """Print a line per fault: seconds from the start of the spoiled sync to its sentence on the last rank."""
    environment = os.environ | {SILENCE: str(inspect.signature(SyncGroup).parameters["silence_s"].default)}
    for name in FAULTS:
        command = [sys.executable, __file__, name]
        ran = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        living = [result for result in json.loads(ran.stdout) if result is not None]
        seconds = max(result["seconds"] for result in living)
        sys.stdout.write(f"{name:12s} {seconds:5.1f} s  {living[0]['said']}\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(*sys.argv[1:])
    else:
        print_seconds()
