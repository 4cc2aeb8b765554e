"""Trainers and engine ranks of a sync over torch.distributed, in a process group of their own: the frameworks' stay
theirs.

What goes wrong on one rank ends the sync on all of them, with the same sentence: whoever notices sets a flag in the
store, which every rank reads once in half a second. A rank that hangs or is killed sets none, so every rank also counts
up a heartbeat, and who waits looks at the heartbeat of the rank that it waits for. A group that failed is of no more
use; the next sync makes another.

So far messages travel by gloo, on the host; nothing here was measured on a GPU.
"""

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from moe_rl.sync.errors import SyncError
from moe_rl.sync.executor import Exchange

FAILURE = "failure"
BEAT_S = 0.5
LINGER_S = 8.0
"""Longest wait of the store for ranks that have not heard of a failure."""
RUN_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the ranks of a sync meet: a store that one of them serves."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """What a rank votes with before the first byte: all must name one step and one plan."""

    step: int
    plan_digest: int
    weights_sum: int = 0
    """Sum of the experts that a trainer holds, where it has twins."""
    problem: str = ""
    """Why this rank cannot take part, empty if it can: an engine with another map, for example."""


class SyncGroup:
    """All ranks of one sync. Use it as a context: leaving it with an exception tells the other ranks."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        address: Address,
        serves: bool,
        connect_s: float = 120.0,
        silence_s: float = 5.0,
    ) -> None:
        """Connect to the others; `serves`: this rank's process keeps the store.

        A rank whose heart does not beat for `silence_s`, or a message that is overdue by as much, ends the sync. It
        must be longer than one message takes.
        """
        self.rank, self.size, self.silence_s, self._serves = rank, size, silence_s, serves
        try:
            self.store = _store(address, size, serves=serves, connect_s=connect_s)
            group_store = PrefixStore("group", self.store)
            # Any: torch's stubs lack send and recv.
            self.group: Any = ProcessGroupGloo(group_store, rank, size, timedelta(hours=1))
            # A client of its own: the other one may block in a call.
            watch_store = _store(address, size, serves=False, connect_s=connect_s)
        except RuntimeError as error:  # DistNetworkError, DistStoreError and gloo's own are RuntimeErrors
            verb = "serve" if serves else "reach"
            raise SyncError(
                f"rank {rank} cannot {verb} the rendezvous at {address.host}:{address.port}: {error}"
            ) from error
        self.watch = _Watch(watch_store, rank, silence_s)
        self._worker = _Waiter()
        self._runs = 0

    def __enter__(self) -> "SyncGroup":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.fail(
                str(error) if isinstance(error, SyncError) else f"rank {self.rank}: {kind and kind.__name__}: {error}"
            )
            self._leave_failed_sync()
        self.watch.close()
        self._worker.close()

    def fail(self, sentence: str) -> str:
        """Tell all ranks why the sync ends, and return the reason that they hear: that of the first rank to fail."""
        try:
            return bytes(self.store.compare_set(FAILURE, "", sentence)).decode()
        except RuntimeError:  # a store that is gone ends the others by itself
            return sentence

    def _leave_failed_sync(self) -> None:
        """Note that this rank knows the failure. The rank that keeps the store leaves after the others, so that all
        hear the same sentence.
        """
        with contextlib.suppress(RuntimeError):  # the store is gone: nobody waits for this rank
            self.store.set(f"left/{self.rank}", "1")
            if self._serves:
                wait_for_others(self.store, set(range(self.size)) - {self.rank}, silence_s=self.silence_s)

    def agree(self, ballot: Ballot, *, twins: Sequence[Sequence[int]] = ()) -> None:
        """Raise `SyncError` on every rank, with the same sentence, unless all ballots fit each other and have no
        problem.

        `twins` are trainers that hold the same experts, and so must have the same sum of weights. Rank 0 counts.
        """
        with self._needs_store():
            self.store.set(f"vote/{self.rank}", json.dumps(asdict(ballot)))
        if self.rank == 0:
            ballots = [Ballot(**json.loads(self.fetch(f"vote/{rank}", of=rank))) for rank in range(self.size)]
            with self._needs_store():
                self.store.set("verdict", verdict(ballots, twins))
        sentence = self.fetch("verdict", of=0).decode()
        if sentence:
            raise SyncError(f"nothing was sent: {sentence}")

    def fetch(self, key: str, *, of: int) -> bytes:
        """Return what rank `of` puts into the store, once it is there."""
        self.watch.waits_for(of)
        start_s = time.monotonic()
        while not self._has(key):
            self.watch.raise_failure()
            time.sleep(min(0.05, 0.001 + (time.monotonic() - start_s) / 10))
        self.watch.waits_for(None)
        with self._needs_store():
            return bytes(self.store.get(key))

    def _has(self, key: str) -> bool:
        with self._needs_store():
            return bool(self.store.check([key]))

    @contextlib.contextmanager
    def _needs_store(self) -> Iterator[None]:
        """Turn torch's errors about the connection to the store into ours."""
        try:
            yield
        except RuntimeError as error:
            raise SyncError(f"rank {self.rank}: the sync's key-value store cannot be reached: {error}") from error

    def run(self, work: Generator[Exchange, Mapping[int, torch.Tensor], None]) -> None:
        """Drive a rank's work to its end."""
        for _ in self.rounds(work):
            pass

    def rounds(self, work: Generator[Exchange, Mapping[int, torch.Tensor], None]) -> Iterator[int]:
        """Drive a rank's work; yield the number of every round once its messages have come and are written."""
        self._runs += 1
        first_number = (
            self._runs << RUN_BITS
        )  # rounds are counted through, so that ranks in different runs can be told apart
        try:
            exchange = next(work)
            while True:
                inbox = self._exchanged(exchange, first_number + exchange.round)
                number = exchange.round
                exchange = work.send(inbox)
                yield number
        except StopIteration:
            self.watch.waits_for(None, round_number=first_number + (1 << RUN_BITS) - 1)

    def _exchanged(self, exchange: Exchange, number: int) -> dict[int, torch.Tensor]:
        boxes = {other: torch.empty(count, dtype=torch.uint8) for other, count in sorted(exchange.expected.items())}
        tag = exchange.round

        def transfer() -> None:
            receives = [(other, self.group.recv([box], other, tag)) for other, box in boxes.items()]
            sends = [(other, self.group.send([message], other, tag)) for other, message in exchange.outbox.items()]
            for other, work in receives:
                self.watch.waits_for(other, round_number=number, receives=True)
                work.wait()
            for other, work in sends:
                self.watch.waits_for(other, round_number=number)
                work.wait()
            self.watch.waits_for(None, round_number=number)

        self._worker.run(transfer, self.watch.raise_failure, self._broken)
        return boxes

    def _broken(self, error: BaseException) -> SyncError:
        other = self.watch.waiting.partner
        where = f"the connection to rank {other}" if other is not None else "a connection"
        reason = str(error).partition(". ")[0].rpartition("] ")[2] or type(error).__name__
        return SyncError(self.fail(f"rank {self.rank}, round {self.watch.waiting.round}: {where} broke ({reason})."))


def _store(address: Address, size: int, *, serves: bool, connect_s: float) -> Any:
    """Return a connection to the store that the ranks meet at."""
    kind: Any = vars(dist)["TCPStore"]  # which torch's stubs do not export
    timeout = timedelta(seconds=connect_s)
    return kind(address.host, address.port, size, serves, timeout, wait_for_workers=False)


class _Waiter:
    """One thread that waits for transfers, so that the caller can be told of a failure meanwhile."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._loop, daemon=True, name="moe_rl sync").start()

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._error = error
            self._done.set()

    def run(
        self, job: Callable[[], None], check: Callable[[], None], translate: Callable[[BaseException], SyncError]
    ) -> None:
        """Run a job to its end; `check` raises if the sync has failed elsewhere."""
        self._done.clear()
        self._jobs.put(job)
        while not self._done.wait(0.1):
            check()
        if self._error is not None:
            error, self._error = self._error, None
            # A connection breaks because its other end left: give the reason that it gave, if there is one.
            deadline = time.monotonic() + 2 * BEAT_S
            while time.monotonic() < deadline:
                check()
                time.sleep(BEAT_S / 5)
            raise translate(error) from error

    def close(self) -> None:
        self._jobs.put(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """What a rank waits for since when."""

    partner: int | None
    round_number: int
    receives: bool
    since: float

    @property
    def round(self) -> int:
        """Number of the round in its run."""
        return self.round_number % (1 << RUN_BITS)


class _Hearts:
    """Since when the hearts of other ranks have shown the same beat, from the first look at them."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._seen: dict[int, tuple[str, float]] = {}  # last beat of a rank, and since when it is that one

    def beat(self, rank: int) -> str:
        """Return a rank's last beat, "" before its first."""
        key = f"beat/{rank}"
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def silent_s(self, rank: int) -> float:
        """Return for how many seconds a rank's beat has been what it is now."""
        beat, now = self.beat(rank), time.monotonic()
        last_beat, since = self._seen.get(rank, ("", now))
        if beat != last_beat:
            since = now
        self._seen[rank] = beat, since
        return now - since


def wait_for_others(store: Any, others: set[int], *, silence_s: float) -> None:
    """Return once every rank knows the failure or has been silent for half of `silence_s`, or after `LINGER_S`.

    Example: rank 3 is stopped. Its partner notices after 5 s; 2.5 s later rank 0 takes it for dead and leaves.
    """
    hearts, waiting, deadline = _Hearts(store), set(others), time.monotonic() + LINGER_S
    while waiting and time.monotonic() < deadline:
        for rank in sorted(waiting):
            if store.check([f"left/{rank}"]) or hearts.silent_s(rank) > silence_s / 2:
                waiting.remove(rank)
        time.sleep(BEAT_S / 10)


class _Watch:
    """A thread that shows this rank's heartbeat, reads the flag, and looks after the rank that is waited for."""

    def __init__(self, store: Any, rank: int, silence_s: float) -> None:
        self.store, self.rank, self.silence_s = store, rank, silence_s
        self.waiting = _Waiting(partner=None, round_number=-1, receives=False, since=time.monotonic())
        self.failure = ""
        self._closing = threading.Event()
        self._hearts = _Hearts(store)
        threading.Thread(target=self._loop, daemon=True, name="moe_rl sync watch").start()

    def waits_for(self, partner: int | None, *, round_number: int | None = None, receives: bool = False) -> None:
        """Note that this rank waits for `partner`; None: for nobody."""
        number = self.waiting.round_number if round_number is None else round_number
        self.waiting = _Waiting(partner=partner, round_number=number, receives=receives, since=time.monotonic())

    def raise_failure(self) -> None:
        """Raise `SyncError` if the sync has failed on any rank."""
        if self.failure:
            raise SyncError(self.failure)

    def close(self) -> None:
        self._closing.set()

    def _loop(self) -> None:
        beat = 0
        while not self._closing.is_set():
            beat += 1
            try:
                waiting = self.waiting
                is_waiting = waiting.partner is not None and time.monotonic() - waiting.since > self.silence_s / 2
                self.store.set(f"beat/{self.rank}", f"{beat} {waiting.round_number} {int(is_waiting)}")
                if self.store.check([FAILURE]):
                    self.failure = self.store.get(FAILURE).decode()
                    self.store.set(f"left/{self.rank}", "1")  # this rank needs the store no more
                    return
                self._look_after(waiting)
            except Exception as error:
                if not self._closing.is_set():
                    kind = type(error).__name__
                    self.failure = (
                        f"rank {self.rank}: the sync's key-value store cannot be reached, because "
                        f"the rank that serves it ended ({kind})."
                    )
                return
            self._closing.wait(BEAT_S)

    def _look_after(self, waiting: _Waiting) -> None:
        """Set the flag if the rank that is waited for is dead, or if its message can come no more."""
        partner, now = waiting.partner, time.monotonic()
        if partner is None:
            return
        if self._hearts.silent_s(partner) > self.silence_s:
            self._fail(f"rank {partner} has been silent for {self.silence_s:g} s; rank {self.rank} waits for it.")
        beat = self._hearts.beat(partner)
        if not beat or not waiting.receives or now - waiting.since < self.silence_s:
            return
        _, round_number, is_waiting = beat.split()
        passed = int(round_number) > waiting.round_number
        posted = int(round_number) == waiting.round_number and is_waiting == "1"
        if passed or posted:
            self._fail(f"rank {self.rank}, round {waiting.round}: the message of rank {partner} did not arrive.")

    def _fail(self, sentence: str) -> None:
        self.failure = self.store.compare_set(FAILURE, "", sentence).decode()


def verdict(ballots: Sequence[Ballot], twins: Sequence[Sequence[int]]) -> str:
    """Return why the sync cannot begin, "" if it can."""
    first_ballot = ballots[0]
    for rank, ballot in enumerate(ballots):
        if ballot.problem:
            return f"rank {rank}: {ballot.problem}"
    for rank, ballot in enumerate(ballots):
        if ballot.step != first_ballot.step:
            return f"rank {rank} wants to sync step {ballot.step}, but rank 0 wants to sync step {first_ballot.step}."
        if ballot.plan_digest != first_ballot.plan_digest:
            return (
                f"rank {rank} and rank 0 have different plans for step {first_ballot.step}: their layouts or expert "
                "maps differ."
            )
    for ranks in twins:
        if len({ballots[rank].weights_sum for rank in ranks}) > 1:
            return (
                f"trainer ranks {', '.join(map(str, ranks))} should hold the same experts, but do not: the weights of "
                "at least one rank are not gathered."
            )
    return ""
