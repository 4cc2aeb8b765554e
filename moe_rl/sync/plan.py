"""The plan of a weight sync: every atom enters every engine node once, over evenly loaded NICs."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.sync.bound import least_steps
from moe_rl.sync.layouts import SyncProblem
from moe_rl.sync.schedule import Deliveries, ScheduleInput, fill_calendars

# An expert of Qwen3-30B has 9 MiB: a NIC of 43 GB/s takes .2 ms for it, far more than a message costs. Longer rounds
# make relays wait: 30B to four engine nodes takes 1.09 times the bound with an atom per round, 1.47 with 28.
MESSAGE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class SyncPlan:
    """The deliveries of one sync; the same on every rank, so that none has to be told."""

    problem: SyncProblem
    deliveries: Deliveries
    steps_per_round: int
    """Ranks exchange messages once per round; what came in one round is handed on in the next."""

    @cached_property
    def by_nic(self) -> NDArray[np.bool_]:
        """[D] whether a delivery leaves its node."""
        node_of = np.array(self.problem.node_of)
        return np.asarray(node_of[self.deliveries.source] != node_of[self.deliveries.ingress])

    @cached_property
    def num_steps(self) -> int:
        """Steps until the last atom has come, each as long as an atom takes over a NIC."""
        return int(self.deliveries.step[self.by_nic].max(initial=-1)) + 1

    @cached_property
    def num_rounds(self) -> int:
        """Rounds in which something travels between nodes, or from a trainer to its node's engines."""
        return int(self.deliveries.step.max(initial=-1)) // self.steps_per_round + 1

    @cached_property
    def least_steps(self) -> int:
        """Steps that no schedule goes below."""
        return least_steps(self.problem)

    @cached_property
    def atoms_out(self) -> NDArray[np.int64]:
        """[R] atoms that each rank's NIC sends."""
        return np.bincount(self.deliveries.source[self.by_nic], minlength=self.problem.size)

    @cached_property
    def atoms_in(self) -> NDArray[np.int64]:
        """[R] atoms that each rank's NIC takes in."""
        return np.bincount(self.deliveries.ingress[self.by_nic], minlength=self.problem.size)

    @cached_property
    def digest(self) -> int:
        """A number that two plans share only if deliveries, homes and maps are equal, in 0 .. 2^56 - 1."""
        hashed = hashlib.blake2b(digest_size=7)
        deliveries, problem = self.deliveries, self.problem
        maps = [engine.slots for engine in problem.engines]
        for column in (
            deliveries.atom,
            deliveries.source,
            deliveries.ingress,
            deliveries.step,
            problem.trainer.home_rank,
            *maps,
        ):
            hashed.update(np.ascontiguousarray(column, np.int32).tobytes())
        hashed.update(str((self.steps_per_round, self.problem.expert_bytes, self.problem.parts_per_expert)).encode())
        return int.from_bytes(hashed.digest(), "big")


def plan_sync(problem: SyncProblem, *, message_bytes: int = MESSAGE_BYTES, relays: bool = True) -> SyncPlan:
    """Return the plan of a sync in rounds of messages of at most `message_bytes`, or of one atom where that is larger.

    `relays`: engine nodes pass on what they received.
    """
    require(message_bytes > 0, f"message_bytes must be positive, got {message_bytes}.")
    steps_per_round = max(1, message_bytes // problem.atom_bytes)
    sender, spare = _senders(problem)
    wanted = problem.wanted_atoms()
    schedule_input = ScheduleInput(
        node_of=np.array(problem.node_of, np.int32),
        num_trainers=problem.trainer.size,
        holders=problem.holders_of_atoms(),
        sender=sender,
        spare_sends=spare,
        order=_in_turn(sender),
        wanted_start=np.cumsum([0, *map(len, wanted)], dtype=np.int64),
        wanted_atom=np.concatenate(wanted),
        steps_per_round=steps_per_round,
        relays=relays,
    )
    return SyncPlan(problem=problem, deliveries=fill_calendars(schedule_input), steps_per_round=steps_per_round)


def _senders(problem: SyncProblem) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return [A] the trainer that sends each atom first, and [T] how many more atoms each may send.

    Twins share the same atoms and no others: each takes every edp-th, which no assignment betters.
    """
    holders = problem.holders_of_atoms()
    atoms, twins = holders.shape
    # Rank of an atom among those with the same holders, in ascending order.
    order = np.argsort(holders[:, 0], kind="stable")
    group = holders[order, 0]
    group_start = np.searchsorted(group, group)
    ordinal = np.empty(atoms, np.int64)
    ordinal[order] = np.arange(atoms) - group_start
    sender = holders[np.arange(atoms), ordinal % twins]
    load = np.bincount(sender, minlength=problem.trainer.size)
    return sender, (load.max(initial=0) - load).astype(np.int32)


def _in_turn(sender: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the atoms in the order of their places in their senders' queues."""
    order = np.argsort(sender, kind="stable")
    place = np.empty(len(sender), np.int64)
    place[order] = np.arange(len(sender)) - np.searchsorted(sender[order], sender[order])
    return np.asarray(np.lexsort((sender, place)), np.int32)
