"""Where a run's plans get their routes from, by the run's own files: it decides which passes moe_rl balances.

A plan needs the routes of a pass before it runs (`simulators.rl_step.ROUTES_FROM` has the consequences):

    verl         `routed_experts` of R2 or R3, else the counts of the log-prob pass; neither for padded sequences
    slime, miles replay lists of R2 or R3, else the counts of the log-prob pass if sequences are packed
    other loops  the routes that `forward_backward` is given: those of R3; else the mean of the previous pass

In all of them only R3 says a log-prob pass's routes before it runs. Reference passes have none: verl's reference is an
engine of its own, which stays plain, and nothing is replayed in that of the others.
"""

from moe_rl.launch.settings import RunSettings

# Frameworks in which the log-prob pass counts routes by sequence, for packed sequences.
COUNTS_LOG_PROBS = ("verl", "slime", "miles")
# Frameworks whose loop the user wraps by `forward_backward` with a function that returns replayed routes.
WRAPPED = ("nemo_rl", "skyrl", "roll", "areal")


def routes_from(settings: RunSettings) -> tuple[str | None, str]:
    """Return the value of `--routes-from` (None: the files do not say it) and a sentence on what is unusual, or ""."""
    framework, replay = settings.framework, settings.value_of("replay")
    is_padded = settings.packed is not None and not settings.packed.value
    if is_padded and (framework == "verl" or (framework in COUNTS_LOG_PROBS and replay not in ("R2", "R3"))):
        return "previous_pass", (
            "sequences are padded, so the routes of a pass are not known before it runs (routes_from previous_pass)."
        )
    if replay == "R3":
        return "rollout", ""
    if replay == "R2" or (framework in COUNTS_LOG_PROBS and replay != "native"):
        return "log_prob", ""
    if framework in WRAPPED and replay != "native":
        return "previous_pass", (
            "without router replay, forward_backward gets no routes (routes_from previous_pass). If you pass it "
            "`tokens`, set --routes-from log_prob."
        )
    return None, ""
