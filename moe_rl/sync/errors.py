"""A sync that failed, or weights that are not of the step that was asked for."""


class SyncError(RuntimeError):
    """A sync did not complete; the sentence says where. Engines keep what they have, and another sync heals them."""
