"""Resident memory of this process, from the kernel's own accounting. Linux only, like the rest of the package."""

import resource

KIB = 1024


def peak_resident_bytes() -> int:
    """Return the largest resident set of this process so far, in bytes; memory-mapped pages count while resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
