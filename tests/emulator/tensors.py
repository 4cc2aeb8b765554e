"""Tensors of torch as the memory of a launch; knows nothing of Triton."""

import ctypes
import gc
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from emulator.memory import GlobalMemory


def value_of(memory: GlobalMemory, argument: Any) -> int:
    """Return an argument as a parameter, after making what it points to addressable."""
    if isinstance(argument, torch.Tensor):
        add_tensor(memory, argument)
        if argument.dtype == torch.int64 and argument.numel():
            _add_pointed_at(memory, argument)
        return argument.data_ptr()
    if isinstance(argument, float):
        return int(np.float32(argument).view(np.uint32))
    return int(argument)


def add_tensor(memory: GlobalMemory, tensor: torch.Tensor) -> None:
    """Make the storage of a tensor addressable."""
    storage = tensor.untyped_storage()
    if storage.nbytes():
        raw = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
        memory.add(storage.data_ptr(), np.ctypeslib.as_array(raw), tensor)


def add_tensors_at(memory: GlobalMemory, addresses: Iterable[int]) -> None:
    """Make all tensors that lie at some addresses, or hold them, addressable, and what tables among them point to.

    An address may lie within a tensor: a table's part, or scratch memory that is aligned.
    """
    wanted = sorted(address for address in addresses if address)
    for thing in gc.get_objects():
        if type(thing) not in (torch.Tensor, torch.nn.Parameter) or thing.device.type != "cpu":
            continue
        storage = thing.untyped_storage()
        low = storage.data_ptr()
        if low and any(low <= address < low + storage.nbytes() for address in wanted):
            add_tensor(memory, thing)
            if thing.dtype == torch.int64 and thing.numel() and thing.data_ptr() in wanted:
                _add_pointed_at(memory, thing)


_pointed_at: dict[frozenset[int], list[Any]] = {}
"""Tensors by their addresses in a table. To look through all objects takes a tenth of a second."""


def _add_pointed_at(memory: GlobalMemory, table: torch.Tensor) -> None:
    """Find the tensors at the addresses of a pointer table, among all that are alive."""
    addresses = frozenset(table.flatten().tolist())
    found = [ref() for ref in _pointed_at.get(addresses, ())]
    if addresses not in _pointed_at or any(tensor is None for tensor in found):
        found = [thing for thing in gc.get_objects()
                 if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.data_ptr() in addresses]  # fmt: skip
        _pointed_at[addresses] = [weakref.ref(tensor) for tensor in found]
    for tensor in found:
        add_tensor(memory, tensor)
