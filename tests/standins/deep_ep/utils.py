"""Events of work that is done when the call returns (deep_ep/utils.py: `EventOverlap`)."""


class EventHandle:
    """An event."""

    def current_stream_wait(self) -> None:
        """Return at once."""


class EventOverlap:
    """An event, perhaps with tensors to keep until then."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[object, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        """Wait for the event; there must be one."""
        if self.event is None:
            raise AssertionError("there is no event to wait for.")
        self.event.current_stream_wait()
