"""Which homes the experts get before the next update, and which copies stay.

Homes are chosen for the rollout whose log-prob passes have run or, in a run without such passes, for batches like the
last update. They are chosen on the planning thread when a pass has ended, and experts move when the next update begins:

    log-prob pass ends     its loads are counted, homes are proposed for them
    update begins          experts move to the proposed homes; if gradients wait, at the begin of a later pass
    later updates          stay there

A log-prob pass may also be over a validation set. Which passes were of the rollout is known when an update comes:
those that had sequences of it. A proposal by any other pass is taken back.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Generic

import torch.distributed as dist

from moe_rl.balancing.balanced_run import BalancedRun, Tables
from moe_rl.balancing.exchange import gathered
from moe_rl.balancing.homes import GradientsWaitError
from moe_rl.balancing.loads import RankRows
from moe_rl.balancing.pass_request import PassRequest, PlannedPass
from moe_rl.balancing.pass_source import CountingRows
from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.core.plan import Plan
from moe_rl.planner.base import PLACEMENT

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedHomes:
    """Homes and copies that are due; at most one of the two."""

    fresh: Future[PlannedPass] | None = None
    """For the rollout whose log-prob pass has run, or like the last update."""
    postponed: Future[PlannedPass] | None = None
    """Gradients waited when it was due: the next pass that nobody has prepared tries again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCounts:
    """Optimizer steps per rollout: homes have as many to pay back in."""

    since_log_probs: int = 0
    of_last_rollout: int = 1

    def after(self, *, forward_only: bool) -> "UpdateCounts":
        """Return the counts after a pass.

        Of log-prob passes l and updates u in the order l u u l they are (0, 1) (1, 1) (2, 1) (0, 2).
        """
        if forward_only:
            return UpdateCounts(of_last_rollout=self.since_log_probs or self.of_last_rollout)
        return replace(self, since_log_probs=self.since_log_probs + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbPasses:
    """Forward-only passes since the last update: of its rollout, or of a validation set."""

    sequences: tuple[frozenset[int], ...]
    """Keys of this rank's sequences, by pass."""
    proposals: tuple[Future[PlannedPass] | None, ...] = ()
    """The homes that were chosen by each of them."""
    homes_before: ProposedHomes
    """Due before the first of them."""
    were_usual: bool
    """Whether such passes went before earlier updates."""
    updates_before: UpdateCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMoves:
    """What was moved before a pass."""

    received_bytes: int = 0
    """By this rank."""
    seconds: float = 0.0


class HomeChoice(Generic[Tables]):
    """Proposes homes after passes and moves experts before updates. Every method is called on all ranks alike."""

    def __init__(self, run: BalancedRun[Tables]) -> None:
        self._run = run
        self.proposed = ProposedHomes()
        self.notes: dict[str, str] = {}
        """Notes of the plan by which experts have moved last, by how they begin."""
        self.moves = ExpertMoves()
        """Before the pass that is under way, or the one that comes."""
        self._log_probs_are_usual = False
        """Whether passes without backward go before the updates."""
        self._log_prob_passes: LogProbPasses | None = None
        """None if an update has come since."""
        self._updates = UpdateCounts()
        self._warned_of_gradients = False

    @property
    def searches(self) -> bool:
        """Whether experts may move when the next update begins."""
        return self.proposed != ProposedHomes()

    def after_pass(self, rows: Sequence[SequenceRows], loads: Future[RankRows], *, forward_only: bool) -> None:
        """Take note of a pass whose routers were counted, and start to choose homes for batches with its loads."""
        self._log_prob_passes = self._with_log_probs(rows) if forward_only else None
        self._log_probs_are_usual |= forward_only
        self._updates = self._updates.after(forward_only=forward_only)
        if self._run.config.homes.reorders and forward_only == self._log_probs_are_usual:
            self.proposed = ProposedHomes(fresh=self._propose(loads))
        if self._log_prob_passes is not None:
            proposals = (*self._log_prob_passes.proposals, self.proposed.fresh)
            self._log_prob_passes = replace(self._log_prob_passes, proposals=proposals)

    def settle(self, rows: Sequence[SequenceRows]) -> bool:
        """Let the last log-prob pass that had sequences of this update say the homes; return whether others come.

        A later one was over a validation set. If none had any, homes are chosen as if they had not been. A collective
        of the run, once after such passes; `rows` are those of the update, on all ranks or on none. Between the two a
        driver may have handed sequences to other ranks.
        """
        passes = self._log_prob_passes
        if passes is None or not rows or self._run.homes is None or not self._run.config.homes.reorders:
            return False
        self._log_prob_passes = None
        keys_of_ranks = gathered((passes.sequences, _keys_of(rows)))
        update_keys = frozenset[int]().union(*(keys for _, keys in keys_of_ranks))
        # Of every pass, by rank.
        passes_of_ranks = [keys_of_passes for keys_of_passes, _ in keys_of_ranks]
        pass_keys = [frozenset[int]().union(*keys) for keys in zip(*passes_of_ranks, strict=True)]
        of_update = [not keys.isdisjoint(update_keys) for keys in pass_keys]
        if of_update[-1]:
            return False
        if any(of_update):
            last_index = max(index for index, is_of_update in enumerate(of_update) if is_of_update)
            self.proposed = ProposedHomes(fresh=passes.proposals[last_index])
        else:
            self.proposed = passes.homes_before
            self._log_probs_are_usual, self._updates = passes.were_usual, passes.updates_before
        return True

    def move(self) -> bool:
        """Move experts and choose copies as was proposed; return False if gradients wait, and they go later."""
        proposal = self.proposed.fresh or self.proposed.postponed
        self.proposed = ProposedHomes()
        if proposal is None:
            return True
        started = time.perf_counter()
        plan = proposal.result().plan
        homes = self._run.homes
        assert homes is not None, "experts that cannot move get no proposal"
        try:
            received_bytes = homes.reorder(self._run.layers.of_all_stages(plan.placement))
        except GradientsWaitError:
            self._warn_of_gradients()
            self.proposed = ProposedHomes(postponed=proposal)
            return False
        self.notes = {note.partition(":")[0]: note for note in plan.notes}
        self.moves = ExpertMoves(received_bytes=received_bytes, seconds=time.perf_counter() - started)
        return True

    def notes_of(self, plan: Plan) -> tuple[str, ...]:
        """Return the notes of a pass; of copies that stay, what the plan says that was free to choose them."""
        return tuple(self.notes.get(note.partition(":")[0], note) for note in plan.notes)

    def _propose(self, loads: Future[RankRows]) -> Future[PlannedPass] | None:
        """Start to choose homes and copies that stay for batches with these loads."""
        run = self._run
        levers = replace(
            PLACEMENT, move_homes=run.why_homes_stay is None, choose_residents=run.config.slots.resident_slots > 0
        )
        if not (levers.move_homes or levers.choose_residents):
            return None
        request = PassRequest(
            config=run.config,
            placement=run.placement,
            may=levers,
            of_stage=True,
            updates=self._updates.of_last_rollout,
        )
        return run.thread.submit(run.planner.plan_pass, request, CountingRows(loads))

    def _with_log_probs(self, rows: Sequence[SequenceRows]) -> LogProbPasses:
        """Return the forward-only passes since the last update, with one over these rows."""
        keys = _keys_of(rows)
        if self._log_prob_passes is not None:
            return replace(self._log_prob_passes, sequences=(*self._log_prob_passes.sequences, keys))
        return LogProbPasses(
            sequences=(keys,),
            homes_before=self.proposed,
            were_usual=self._log_probs_are_usual,
            updates_before=self._updates,
        )

    def _warn_of_gradients(self) -> None:
        if not self._warned_of_gradients and dist.get_rank() == 0:
            logger.warning(
                "moe_rl: experts cannot move to other ranks now, because gradients of an earlier pass still wait "
                "for the optimizer step. The experts will move at the start of the first pass without such gradients."
            )
        self._warned_of_gradients = True


def _keys_of(rows: Sequence[SequenceRows]) -> frozenset[int]:
    return frozenset[int]().union(*(of_batch.sequence_keys for of_batch in rows))
