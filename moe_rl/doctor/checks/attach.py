"""What `moe_rl.megatron.attach` would refuse, read from its own table."""

from collections.abc import Iterator

from moe_rl.doctor.traps import ERROR, NOTE, Case, Found
from moe_rl.doctor.verdict import refusals_of


def attach_refuses(case: Case) -> Iterator[Found]:
    """`moe_rl.megatron.attach` refuses, before it changes anything, a model with options that its plans were not made
    for or not tested with. This is an error only with --attach, that is, if the run is to be balanced.
    """
    if not case.is_moe:
        return
    severity = ERROR if case.attach else NOTE
    for option, sentence in refusals_of(case.settings):
        yield Found("{} Set by {}.", sentence, case.settings.option(option), severity=severity)
