"""Give back the memory of pages that a pass over a memory-mapped array has consumed."""

import mmap

import numpy as np
from numpy.typing import NDArray


def drop_pages(array: NDArray[np.generic]) -> None:
    """Tell the kernel that the pages under `array` are not needed soon; without effect on arrays in memory.

    Only whole pages inside `array` of a read-only mapping of a file are dropped, so no value can be lost: the next
    access reads the file again. Keeps the resident size of a pass over a large trace at one chunk.
    """
    mapping = _read_only_mapping(array)
    if mapping is None or not array.size or not array.flags.c_contiguous:
        return
    # Through numpy, since mmap objects do not tell their address.
    base = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    first_byte = array.__array_interface__["data"][0] - base
    # Up at the start, down at the end: a page that other data share stays.
    start = -(-first_byte // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (first_byte + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start:
        # MADV_DONTNEED on a private writable mapping would throw data away: hence read-only ones alone.
        mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _read_only_mapping(array: object) -> mmap.mmap | None:
    """Return the mapping that the chain of views under `array` ends in, if it is one that nobody can write."""
    while True:
        if isinstance(array, np.ndarray):
            array = array.base
        elif isinstance(array, memoryview):
            array = array.obj
        else:
            break
    if not isinstance(array, mmap.mmap) or array.closed:
        return None
    with memoryview(array) as view:
        return array if view.readonly else None
