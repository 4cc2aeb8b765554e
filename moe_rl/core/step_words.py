"""Words for how a training step runs, which know their own facts.

Nobody compares a word. Whoever plans, prices or reports asks what it needs to know:

    dispatcher.sends_rows           does a token travel once for every expert, not once for every rank?
    dispatcher.as_options           which of Megatron's options choose it?

A word is a text, as a user types it and as reports keep it: `Dispatcher("alltoall") == "alltoall"`.
"""

from enum import StrEnum


class Dispatcher(StrEnum):
    """Who takes tokens to their experts and back."""

    DEEPEP = "deepep"
    """One copy per token and node, then one per rank (Megatron's `flex`)."""
    HYBRIDEP = "hybridep"
    """The same; priced as DeepEP, whose constants were fitted to HybridEP's published bandwidths."""
    ALLTOALL = "alltoall"
    """One copy per token and expert."""

    @property
    def sends_rows(self) -> bool:
        """A token is sent once for each of its experts. Else it is sent once to every node and rank that has any."""
        return self is Dispatcher.ALLTOALL

    @property
    def can_be_captured(self) -> bool:
        """A CUDA graph may hold it: the host of `alltoall` reads counts in every layer."""
        return not self.sends_rows

    @property
    def as_options(self) -> dict[str, str]:
        """The options of Megatron that choose it.

        >>> Dispatcher.HYBRIDEP.as_options
        {'moe_token_dispatcher_type': 'flex', 'moe_flex_dispatcher_backend': 'hybridep'}
        """
        if self.sends_rows:
            return {"moe_token_dispatcher_type": "alltoall"}
        return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": self.value}

    @classmethod
    def of_options(cls, dispatcher_type: str, backend: str) -> "Dispatcher":
        """Return the dispatcher that Megatron's options choose; the backend is read for `flex` alone."""
        return cls.ALLTOALL if dispatcher_type == "alltoall" else cls(backend)
