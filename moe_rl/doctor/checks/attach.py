"""What `moe_rl.megatron.attach` would refuse, read from its own table."""

from collections.abc import Iterator

from moe_rl.doctor.traps import ERROR, NOTE, Case, Found
from moe_rl.doctor.verdict import refusals_of


def attach_refuses(case: Case) -> Iterator[Found]:
    """moe_rl refuses to balance a model if an option is not supported by moe_rl's plans or was never tested with
    moe_rl. It refuses before it changes anything. The finding is an error only with --attach.
    """
    if not case.is_moe:
        return
    severity = ERROR if case.attach else NOTE
    for option, sentence in refusals_of(case.settings):
        yield Found("{} Set by {}.", sentence, case.settings.option(option), severity=severity)
