"""Carries a plan out. One rank's work is a generator that hands out messages and is sent what came in, so that
`torch.distributed` (`ranks.py`) and a stand-in in one process (`in_process`) drive the same code.

A message starts with the step, the plan's digest and the sums of its parts *as their trainer counted them*. A rank that
passes parts on sends the trainer's sums along and never counts anew: whatever changed on the way is found wherever it
arrives. What is passed on stays in staging until then; it is never read from an engine's slots, which may be filled
late or hold the weights in another layout.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from moe_rl.sync.errors import SyncError
from moe_rl.sync.plan import SyncPlan
from moe_rl.sync.rank_plan import Parts, RankPlan, RankRound, num_parts_of

WORD = 8
HEADER_WORDS = 2  # step and digest, before one sum per part

Read = Callable[[Parts], torch.Tensor]
"""Returns the bytes (uint8) of parts that this trainer holds, part after part."""
Write = Callable[[Parts, torch.Tensor], None]
"""Takes all parts of an expert that this engine rank needs, once all have come."""


class Exchange(NamedTuple):
    """Messages of one round: what a rank sends, and how many bytes it expects of whom."""

    round: int
    outbox: dict[int, torch.Tensor]
    expected: dict[int, int]


@dataclass(slots=True)
class Traffic:
    """What a rank's part of a sync moved."""

    sent_bytes: int = 0
    """Weights alone, without sums."""
    received_bytes: int = 0
    peak_staging_bytes: int = 0
    """Largest sum of messages out and in, and of parts that wait to be passed on."""


@dataclass(slots=True)
class _Staging:
    """Parts that wait to be passed on or for the other parts of their expert, with their trainers' sums."""

    body: dict[Parts, torch.Tensor] = field(default_factory=dict)
    sums: dict[Parts, torch.Tensor] = field(default_factory=dict)

    def slice(self, wanted: Parts) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return bytes and sums of parts that lie within an atom which is here, None where it is not."""
        for staged in self._wholes(wanted):
            body, sums = self.body[staged], self.sums[staged]
            size = body.numel() // staged.num_parts
            start, stop = wanted.first - staged.first, wanted.stop - staged.first
            return body[start * size : stop * size], sums[start:stop]
        return None

    def _wholes(self, wanted: Parts) -> list[Parts]:
        if wanted in self.body:
            return [wanted]
        unit = wanted[:2]
        return [w for w in self.body if w[:2] == unit and w.first <= wanted.first and wanted.stop <= w.stop]

    @property
    def num_bytes(self) -> int:
        return sum(body.numel() for body in self.body.values())


def rank_work(
    plan: SyncPlan,
    rank: int,
    *,
    step: int,
    read: Read | None = None,
    write: Write | None = None,
    traffic: Traffic | None = None,
    rank_plan: RankPlan | None = None,
) -> Generator[Exchange, Mapping[int, torch.Tensor], None]:
    """Yield this rank's exchanges, round by round, and be sent the inbox of each: {rank: message}.

    Trainers give `read`, engine ranks `write`. Raises `SyncError` for a message of another step or plan, and for parts
    whose sums are not their trainer's.
    """
    work = _RankWork(plan, rank, step, read, write, traffic or Traffic(), rank_plan or RankPlan.of_rank(plan, rank))
    return work.run()


class _RankWork:
    """The work of one rank in one sync."""

    def __init__(
        self,
        plan: SyncPlan,
        rank: int,
        step: int,
        read: Read | None,
        write: Write | None,
        traffic: Traffic,
        rank_plan: RankPlan,
    ) -> None:
        self.plan, self.rank, self.step = plan, rank, step
        self.read, self.write, self.traffic = read, write, traffic
        self.rank_plan = rank_plan
        self.part_bytes = plan.problem.part_bytes
        self.staging = _Staging()
        self.arrived: dict[tuple[int, int], dict[Parts, torch.Tensor]] = defaultdict(dict)
        self.needs = self._own_needs()

    def _own_needs(self) -> Callable[[int, int], range]:
        """Return the function that says which parts of an expert this rank keeps: none on a trainer."""
        problem = self.plan.problem
        engine_rank = problem.engine_rank(self.rank)
        if engine_rank is None:
            return lambda layer, expert: range(0)
        local = [set(row.tolist()) for row in engine_rank.engine.local_slots(engine_rank.index)]
        parts = engine_rank.engine.parts_of(engine_rank.index, problem.parts_per_expert)
        return lambda layer, expert: parts if expert in local[layer] else range(0)

    def run(self) -> Generator[Exchange, Mapping[int, torch.Tensor], None]:
        """Yield the exchanges."""
        for number in sorted(self.rank_plan.rounds):
            rank_round = self.rank_plan.rounds[number]
            outbox = {other: self._message(parts) for other, parts in rank_round.sends.items()}
            expected = {other: self._message_bytes(parts) for other, parts in rank_round.receives.items()}
            in_flight = sum(message.numel() for message in outbox.values()) + sum(expected.values())
            waiting = sum(body.numel() for bodies in self.arrived.values() for body in bodies.values())
            peak = in_flight + self.staging.num_bytes + waiting
            self.traffic.peak_staging_bytes = max(self.traffic.peak_staging_bytes, peak)
            inbox = yield Exchange(number, outbox, expected)
            self._take_in(number, rank_round, inbox)
            self._forget(number)

    def _message_bytes(self, runs: list[Parts]) -> int:
        count = num_parts_of(runs)
        return WORD * (HEADER_WORDS + count) + count * self.part_bytes

    def _message(self, runs: list[Parts]) -> torch.Tensor:
        """Return step, digest, sums and bytes of some parts."""
        bodies, sums = [], []
        for parts in runs:
            staged = self.staging.slice(parts)
            if staged is None:
                assert self.read is not None, f"rank {self.rank} has no {parts} to send"
                body = self.read(parts)
                staged = body, part_sums(body, parts.num_parts)
            bodies.append(staged[0])
            sums.append(staged[1])
            self.traffic.sent_bytes += staged[0].numel()
        header = torch.tensor([self.step, self.plan.digest], dtype=torch.int64)
        return torch.cat([torch.cat([header, *sums]).view(torch.uint8), *bodies])

    def _take_in(self, number: int, rank_round: RankRound, inbox: Mapping[int, torch.Tensor]) -> None:
        for other, runs in rank_round.receives.items():
            message = inbox[other]
            count = num_parts_of(runs)
            words = message[: WORD * (HEADER_WORDS + count)].view(torch.int64)
            step, digest = words[:HEADER_WORDS].tolist()
            if (step, digest) != (self.step, self.plan.digest):
                raise SyncError(
                    f"rank {self.rank}, round {number}: rank {other} sent weights of step {step}"
                    f"{'' if digest == self.plan.digest else ' under a different plan'}, but rank {self.rank} expects "
                    f"step {self.step} under its own plan."
                )
            body, sums = message[words.numel() * WORD :], words[HEADER_WORDS:]
            self.traffic.received_bytes += body.numel()
            at = 0
            for parts in runs:
                own_body, own_sums = (
                    body[at * self.part_bytes : (at + parts.num_parts) * self.part_bytes],
                    sums[at:][: parts.num_parts],
                )
                at += parts.num_parts
                if not torch.equal(part_sums(own_body, parts.num_parts), own_sums):
                    raise SyncError(
                        f"rank {self.rank}, round {number}: expert {parts.expert} of MoE layer {parts.layer} from rank "
                        f"{other} differs from what its trainer sent."
                    )
                self._keep(parts, own_body, own_sums)

    def _keep(self, parts: Parts, body: torch.Tensor, sums: torch.Tensor) -> None:
        """Stage what is passed on; write an expert whose parts have all come."""
        if parts in self.rank_plan.last_use:
            self.staging.body[parts], self.staging.sums[parts] = body, sums
        needed = self.needs(parts.layer, parts.expert)
        start, stop = max(parts.first, needed.start), min(parts.stop, needed.stop)
        if start >= stop:
            return
        needed_body = body[(start - parts.first) * self.part_bytes : (stop - parts.first) * self.part_bytes]
        arrived = self.arrived[parts.layer, parts.expert]
        arrived[parts._replace(first=start, stop=stop)] = needed_body
        if num_parts_of(arrived) == len(needed):
            assert self.write is not None, f"rank {self.rank} has nothing that takes experts"
            del self.arrived[parts.layer, parts.expert]
            unit_parts = parts._replace(first=needed.start, stop=needed.stop)
            bodies = [arrived[piece] for piece in sorted(arrived)]
            self.write(unit_parts, bodies[0] if len(bodies) == 1 else torch.cat(bodies))

    def _forget(self, number: int) -> None:
        """Drop what is passed on no more."""
        for parts in [parts for parts in self.staging.body if self.rank_plan.last_use[parts] <= number]:
            del self.staging.body[parts], self.staging.sums[parts]


def part_sums(body: torch.Tensor, count: int) -> torch.Tensor:
    """Return [count] the sum of every part's bits, as words of 8 bytes where its size allows."""
    parts = body.reshape(count, -1)
    if parts.shape[1] % WORD == 0:
        if parts.storage_offset() % WORD:
            parts = parts.clone()
        parts = parts.view(torch.int64)
    return parts.sum(dim=1, dtype=torch.int64)


Spoil = Callable[[int, int, int, torch.Tensor], torch.Tensor]
"""(round, sender, receiver, message) -> the message that arrives."""


def in_process(
    works: Mapping[int, Generator[Exchange, Mapping[int, torch.Tensor], None]], spoil: Spoil | None = None
) -> None:
    """Drive all ranks' work in this process, round by round: for tests, and for engines that share a process."""
    waiting = {rank: exchange for rank, work in works.items() if (exchange := next(work, None)) is not None}
    while waiting:
        number = min(exchange.round for exchange in waiting.values())
        exchanges: dict[int, Exchange] = {}
        inboxes: dict[int, dict[int, torch.Tensor]] = {}
        for rank, exchange in waiting.items():
            if exchange.round == number:
                exchanges[rank], inboxes[rank] = exchange, {}
        for rank, exchange in exchanges.items():
            for other, message in exchange.outbox.items():
                inboxes[other][rank] = spoil(number, rank, other, message) if spoil else message
        for rank, exchange in exchanges.items():
            sizes = {other: message.numel() for other, message in inboxes[rank].items()}
            if sizes != exchange.expected:
                raise SyncError(
                    f"rank {rank}, round {number}: received {sizes} bytes per source rank, "
                    f"expected {exchange.expected}."
                )
            try:
                waiting[rank] = works[rank].send(inboxes[rank])
            except StopIteration:
                del waiting[rank]
