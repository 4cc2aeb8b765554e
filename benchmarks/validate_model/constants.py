"""Which constants of the simulator published rows determine, and how many rows carry each.

    python -m benchmarks.validate_model --constants

Four lists, because four kinds of rows carry them: a vendor's own runs those of every run, other people's runs those of
a fabric and those of software, and one functional check that of packed rows. A row carries a constant if a tenth more
of it moves the row's forecast by `MOVES`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

from benchmarks.validate_model.fit import CONSTANTS, SHIPPED, Fit
from benchmarks.validate_model.forecasts import user_runs, vendor_runs
from moe_rl.config import load_cluster, load_software
from moe_rl.core.software import TYPICAL, SoftwareCosts
from moe_rl.core.topology import FABRIC_CONSTANTS, HardwareSpec
from moe_rl.simulators import base_time
from moe_rl.simulators.balanced import BalancedStep
from moe_rl.simulators.whole_runs import WholeRun

MORE, MOVES = 1.1, 0.002
VENDOR, FABRIC, SOFTWARE = "fitted on a vendor's runs", "constant of the EFA network", "constant of --software typical"
PACKED = "fitted on one run outside the 20, with packed sequences of 32,768 tokens"
# The fabric whose constants other people's runs determine.
FABRIC_CLUSTER = "h100-efa"

Constants = TypeVar("Constants", HardwareSpec, SoftwareCosts)
# Both sets of constants to the same with one of them larger.
Enlarge = Callable[[HardwareSpec, SoftwareCosts], tuple[HardwareSpec, SoftwareCosts]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedConstant:
    """One constant that rows determine."""

    kind: str
    name: str
    value: float
    rows: int
    """Published rows whose forecast it moves."""
    of: int
    """Rows of the set."""


def carried_constants(folder: Path) -> Iterator[CarriedConstant]:
    """Yield every constant that is fitted on whole runs, with the rows that carry it."""
    vendor, users = vendor_runs(folder), [run for run, _ in user_runs(folder)]
    for name, constant in CONSTANTS.items():
        larger = replace(SHIPPED, factors={**SHIPPED.factors, name: MORE})
        carrying = _carrying(vendor, SoftwareCosts(), _enlarged(larger))
        hardware = load_cluster(constant.at)
        holder = hardware if constant.fields[0] in HardwareSpec.__slots__ else SoftwareCosts()
        value = float(getattr(holder, constant.fields[0]))
        yield CarriedConstant(kind=VENDOR, name=name, value=value, rows=carrying, of=len(vendor))
    typical, over_fabric = load_software(TYPICAL), [run for run in users if run.cluster == FABRIC_CLUSTER]
    for name in FABRIC_CONSTANTS:
        value = float(getattr(load_cluster(FABRIC_CLUSTER), name))
        carrying = _carrying(over_fabric, typical.costs, _with_larger(name))
        yield CarriedConstant(kind=FABRIC, name=name, value=value, rows=carrying, of=len(over_fabric))
    tuned = SoftwareCosts()
    for name in SoftwareCosts.__slots__:
        value = float(getattr(typical.costs, name))
        if value != getattr(tuned, name):
            carrying = _carrying(users, typical.costs, _with_larger(name))
            yield CarriedConstant(kind=SOFTWARE, name=name, value=value, rows=carrying, of=len(users))
    rate = base_time.PACKED_SINK_RATE
    carrying = sum(_moves_by_packed_rate(run, typical.costs) for run in users)
    yield CarriedConstant(kind=PACKED, name="PACKED_SINK_RATE", value=rate, rows=carrying, of=len(users))


def _moves_by_packed_rate(run: WholeRun, costs: SoftwareCosts) -> bool:
    before = run.predicted(software=costs)
    with patch.object(base_time, "PACKED_SINK_RATE", MORE * base_time.PACKED_SINK_RATE):
        return _moves(before, run.predicted(software=costs))


def _enlarged(fit: Fit) -> Enlarge:
    return lambda hardware, costs: (fit.hardware(hardware), fit.software(costs))


def _with_larger(name: str) -> Enlarge:
    """Return what enlarges the constant of that name, of a cluster or of software."""
    if name in HardwareSpec.__slots__:
        return lambda hardware, costs: (_more(hardware, name), costs)
    return lambda hardware, costs: (hardware, _more(costs, name))


def _more(constants: Constants, name: str) -> Constants:
    return replace(constants, **{name: MORE * getattr(constants, name)})


def _carrying(runs: Sequence[WholeRun], costs: SoftwareCosts, enlarge: Enlarge) -> int:
    """Return how many runs' forecasts the larger constant moves."""
    count = 0
    for run in runs:
        hardware = run.batch.topology.hardware
        before, after = run.predicted(hardware, costs), run.predicted(*enlarge(hardware, costs))
        count += _moves(before, after)
    return count


def _moves(before: BalancedStep, after: BalancedStep) -> bool:
    return abs(log(after.tokens_per_s_per_gpu / before.tokens_per_s_per_gpu)) >= MOVES
