"""Every named synthetic trace, for `moe-rl trace synth`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moe_rl.core.errors import nearest_name, require
from moe_rl.core.registry import Registry
from moe_rl.core.trace import RoutingTrace
from moe_rl.simulators.coactivation import like
from moe_rl.simulators.synthetic import PRESET_A, PRESET_B, PRESET_C, SequenceModel, synthetic_pieces, synthetic_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTrace:
    """A generator's configuration with a line that says what it is."""

    name: str
    summary: str
    config: SequenceModel

    def with_options(self, **options: int | float) -> "NamedTrace":
        """Return the same trace with other values, e.g. num_layers, num_experts, top_k, num_steps, seed.

        Raises `InvalidInputError` for an option that this generator does not have.
        """
        names = self.config.__slots__
        for option in options:
            require(
                option in names,
                f"the synthetic trace {self.name} has no option {option!r}.{nearest_name(option, names)}",
            )
        return replace(self, config=replace(self.config, **options))  # type: ignore[arg-type]

    def like(self, trace: RoutingTrace) -> "NamedTrace":
        """Return the same trace with experts that meet in tokens as often as in `trace` (`simulators.coactivation`)."""
        return replace(self, config=like(self.config, trace))

    def steps(self, *, whole: bool = True) -> Iterator[RoutingTrace]:
        """Yield one trace per step; where steps need not be `whole`, pieces of bounded size, each of one step."""
        if whole:
            return synthetic_steps(self.config)
        return synthetic_pieces(self.config)


GRPO = replace(
    PRESET_B, num_sequences=256, token_persistence=0.3, group_size=8, group_share=0.5, num_steps=4, step_drift=0.005
)
SYNTHETIC = Registry(
    "synthetic trace",
    [
        NamedTrace(
            name="preset_a",
            summary="64 small experts, top-6, routing that depends strongly on the domain, short answers",
            config=PRESET_A,
        ),
        NamedTrace(
            name="preset_b",
            summary="32 large experts, top-4, routing that depends strongly on the sequence, like GPT-OSS-20B",
            config=PRESET_B,
        ),
        NamedTrace(
            name="preset_c",
            summary="preset_b, with experts chosen together as often as in GPT-OSS-20B",
            config=PRESET_C,
        ),
        NamedTrace(
            name="grpo",
            summary="preset_b in groups of 8 samples per prompt over 4 steps of a drifting policy",
            config=GRPO,
        ),
    ],
)
