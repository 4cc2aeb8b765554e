"""What a run says in its log while passes come and go: each thing once, on one rank."""

import logging
from typing import TYPE_CHECKING

import torch.distributed as dist

from moe_rl.balancing.loads import SOURCES, Source

if TYPE_CHECKING:
    from moe_rl.simulators.memory import MemoryForecast

logger = logging.getLogger("moe_rl.balancing.passes")


class PassNotices:
    """Remembers what was said, so that a change is said and nothing is repeated."""

    def __init__(self) -> None:
        self._source: Source | None = None
        """By what the last update was planned."""
        self._note_subjects: tuple[str, ...] = ()
        """Of the notes of the last plan."""
        self._memory_peak: tuple[bool, int] | None = None
        """Whether the last forecast peak fits, and whose it is."""
        self._warned_of_micro_batches = False

    def say_source(self, source: Source) -> None:
        """Say by what updates are planned, if that is another thing than before."""
        if dist.get_rank() == 0 and source != self._source:
            logger.info("moe_rl: updates are planned from %s.", SOURCES[source])
        self._source = source

    def say_memory(self, memory: "MemoryForecast | None", *, ep_rank: int) -> None:
        """Say before micro-batches run whose forecast peak is highest, if that is another rank, or fits no longer."""
        if memory is None or ep_rank != 0:
            return
        fullest_rank = -1 if memory.fits else memory.fullest_rank
        if (memory.fits, fullest_rank) != self._memory_peak:
            logger.log(logging.INFO if memory.fits else logging.WARNING, "moe_rl: %s.", memory)
        self._memory_peak = memory.fits, fullest_rank

    def say_notes(self, notes: tuple[str, ...]) -> None:
        """Warn of each lever that plans make no use of."""
        subjects = tuple(note.partition(":")[0] for note in notes)
        if dist.get_rank() == 0:
            for subject, note in zip(subjects, notes, strict=True):
                if subject not in self._note_subjects:
                    logger.warning("moe_rl: %s", note)
        self._note_subjects = subjects

    def say_micro_batches(self, announced: int, ran: int) -> None:
        """Warn that a pass had other micro-batches than it was planned for."""
        if ran == announced or self._warned_of_micro_batches:
            return
        self._warned_of_micro_batches = True
        consequence = "replicas planned for the missing ones were not used"
        if ran > announced:
            consequence = "the additional ones ran without replicas"
        if dist.get_rank() == 0:
            logger.warning(
                "moe_rl: a pass was planned for %d micro-batches but ran %d, so %s. Results are correct. Metrics "
                "include only the micro-batches that ran.",
                announced,
                ran,
                consequence,
            )
