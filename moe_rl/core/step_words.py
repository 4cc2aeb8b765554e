"""Words for how a training step runs, which know their own facts.

Nobody compares a word. Whoever plans, prices or reports asks what it needs to know:

    dispatcher.sends_rows           does a token travel once for every expert, not once for every rank?
    dispatcher.as_options           which of Megatron's options choose it?
    recompute.repeats_experts       does backward compute a layer's experts again?
    recompute.repeats_layer         does it compute attention again, too?
    cuda_graph.spares_all_launches  does the host launch nothing at all?

A word is a text, as a user types it and as reports keep it: `Dispatcher("alltoall") == "alltoall"`.
"""

from collections.abc import Container
from enum import StrEnum

OURS = "ours"
"""Of `domain_balance`: replicas inside a domain are planned here, and run anywhere; else the name of an engine."""


class StepWord(StrEnum):
    """A word that sentences and reports quote as the text that it is: 'deepep', not <Dispatcher.DEEPEP: 'deepep'>."""

    __repr__ = str.__repr__


class Dispatcher(StepWord):
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
    def engine(self) -> str | None:
        """Of `domain_balance`: the engine that a flag of this dispatcher turns on; None if it has none."""
        if self is Dispatcher.HYBRIDEP:
            return "engine:hybridep"
        return None

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


class Recompute(StepWord):
    """What backward computes again because forward did not keep it."""

    NONE = "none"
    MOE = "moe"
    """A layer's experts, with their all-to-all and shared experts."""
    FULL = "full"
    """The whole layer: forward keeps its input alone."""

    @property
    def repeats_experts(self) -> bool:
        """Experts and their all-to-all run twice; their rows are not kept until backward."""
        return self is not Recompute.NONE

    @property
    def repeats_layer(self) -> bool:
        """Attention and dense layers run twice, too; of a layer only its input is kept."""
        return self is Recompute.FULL

    @property
    def as_options(self) -> dict[str, str | list[str] | None]:
        """The options of Megatron that choose it; `core_attn` are the modules that a run names by default.

        >>> Recompute.MOE.as_options
        {'recompute_granularity': 'selective', 'recompute_modules': ['moe']}
        """
        if self.repeats_layer:
            return {"recompute_granularity": "full", "recompute_modules": ["core_attn"]}
        if self.repeats_experts:
            return {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
        return {"recompute_granularity": None, "recompute_modules": ["core_attn"]}

    @classmethod
    def of_options(cls, granularity: str | None, modules: Container[str]) -> "Recompute":
        """Return what Megatron's options repeat; single modules beside the experts are counted elsewhere."""
        if granularity == "full":
            return cls.FULL
        if granularity == "selective" and "moe" in modules:
            return cls.MOE
        return cls.NONE

    @property
    def stronger(self) -> "tuple[Recompute, ...]":
        """What keeps less, the least change first.

        >>> [str(word) for word in Recompute.NONE.stronger]
        ['moe', 'full']
        """
        words = tuple(Recompute)
        return words[words.index(self) + 1 :]


class CudaGraph(StepWord):
    """What CUDA graphs launch in place of the host."""

    NONE = "none"
    ROUTER = "router"
    """Router and preprocessing."""
    PARTIAL = "partial"
    """Attention, too."""
    FULL_ITERATION = "full_iteration"

    @property
    def spares_all_launches(self) -> bool:
        """The host launches nothing in a step, and can read nothing back either."""
        return self is CudaGraph.FULL_ITERATION

    @classmethod
    def of_options(cls, implementation: str | None, scope: Container[str]) -> "CudaGraph":
        """Return what Megatron's options capture; a graph without attention still launches router and preprocessing.

        >>> str(CudaGraph.of_options("local", ["moe_router"]))
        'router'
        """
        if implementation in (None, "none"):
            return cls.NONE
        if implementation == "full_iteration":
            return cls.FULL_ITERATION
        return cls.PARTIAL if "attn" in scope else cls.ROUTER
