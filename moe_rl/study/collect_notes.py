"""Warnings that moe_rl logs, collected so that they reach the report and not only the screen."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from moe_rl.core.outputs import encodable


class NoteCollector(logging.Handler):
    """Collects warnings of moe_rl, so that they reach the report and not only the screen."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.notes: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message once."""
        message = encodable(record.getMessage())
        if message not in self.notes:
            self.notes.append(message)


@contextmanager
def collected_notes() -> Iterator[list[str]]:
    """Yield a list that fills with the warnings that moe_rl logs meanwhile."""
    logger, collector = logging.getLogger("moe_rl"), NoteCollector()
    propagate = logger.propagate
    logger.addHandler(collector)
    logger.propagate = False
    try:
        yield collector.notes
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagate
