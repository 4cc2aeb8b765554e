"""What `moe_rl.megatron.attach` would refuse, read from its own table."""

from collections.abc import Iterator
from functools import partial

from moe_rl.doctor.settings import Setting
from moe_rl.doctor.traps import ERROR, NOTE, Case, Found, Trap
from moe_rl.megatron.refusals import DDP_REFUSALS, REFUSALS, refused


@partial(
    Trap,
    name="attach-refuses",
    severity=ERROR,
    title="an option under which moe_rl does not balance",
    remedy="Change the option for the balanced run; simulating and planning from a trace do not need it.",
    source="moe_rl/megatron/refusals.py",
)
def attach_refuses(case: Case) -> Iterator[Found]:
    """`moe_rl.megatron.attach` refuses a model whose options its plans were not made or tested for, before anything is
    changed. It is an error only where the run is to be balanced (--attach).
    """
    if not case.is_moe:
        return
    severity = ERROR if case.attach else NOTE
    sentences = [pair for table in (REFUSALS, DDP_REFUSALS) for pair in refused(partial(_value, case), table=table)]
    for option, sentence in sentences:
        setting: Setting[object] = getattr(case.settings, option)
        yield Found(f"{sentence} Set by {setting}.", (setting,), severity=severity)


def _value(case: Case, option: str) -> object:
    setting = getattr(case.settings, option)
    return None if setting is None else setting.value
