"""Resident memory of this process, from the kernel's own accounting. Linux only, like the rest of the package."""

import resource
from pathlib import Path

STATUS = Path("/proc/self/status")
KIB = 1024


def peak_resident_bytes() -> int:
    """Return the largest resident set of this process so far, in bytes; memory-mapped pages count while resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def resident_bytes() -> int:
    """Return the current resident set of this process, in bytes."""
    for line in STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmRSS":
            return int(value.split()[0]) * KIB
    raise OSError(f"{STATUS} has no VmRSS line")
