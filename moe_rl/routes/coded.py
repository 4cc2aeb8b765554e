"""Routes as coded bytes that stand where an array of ids would: they are decoded when rows are asked for."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from moe_rl.core.trace import route_dtype
from moe_rl.routes.reader import Bytes, RoutesReader
from moe_rl.routes.writer import RoutesWriter

ROWS_AT_ONCE = 8192


class CodedRoutes:
    """Encoded routes [T, L, K] of one sequence; an array-like with shape, dtype, slicing and `np.asarray`.

    Ids of a row ascend. A pickle holds the coded bytes. Raises `InvalidInputError` where these are not a stream.
    """

    ndim = 3

    def __init__(self, data: Bytes, key: int = 0) -> None:
        if not isinstance(data, np.ndarray):
            self.data = np.frombuffer(data, np.uint8)
        else:
            self.data = data
        self._reader, self._key = RoutesReader(self.data), key
        self.num_experts = self._reader.num_experts
        self.shape = (self._reader.length(key), len(self._reader.layer_ids), self._reader.top_k)
        self.dtype = np.dtype(route_dtype(self.num_experts))

    @classmethod
    def of(cls, ids: Any, *, num_experts: int, valid: NDArray[np.bool_] | None = None) -> "CodedRoutes":
        """Return ids [T, L, K] coded. Rows that are not `valid` [T] come out as zeros.

        So do rows of -1, and `missing` names them.
        """
        sink, is_valid = io.BytesIO(), np.ones(len(ids), np.bool_) if valid is None else valid
        with RoutesWriter(sink, num_experts=num_experts, top_k=ids.shape[2], layer_ids=range(ids.shape[1])) as writer:
            for start in range(0, max(len(ids), 1), ROWS_AT_ONCE):
                rows = np.asarray(ids[start : start + ROWS_AT_ONCE])
                # A row of zeros comes out as zeros either way, and as a gap it takes no bytes.
                is_routed = is_valid[start : start + ROWS_AT_ONCE] & (rows > 0).any(axis=(1, 2))
                missing = (rows == -1).all(axis=(1, 2))
                writer.add(0, rows, start=start, valid=is_routed, policy_version=-missing.astype(np.int32))
        return cls(sink.getvalue())

    def read(self, rows: slice, layers: Sequence[int], out: NDArray[Any]) -> None:
        """Write rows of some layers into `out` [n, l, K]."""
        self._reader.ids(self._key, rows, layers, out=out)

    @property
    def missing(self) -> NDArray[np.bool_]:
        """[T] True for the rows that were -1, a producer's word for a route that it did not capture."""
        return np.asarray(self._reader.policy_version(self._key) == -1)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> NDArray[Any]:
        rows, *axes = index if isinstance(index, tuple) else (index,)
        if isinstance(rows, slice) and rows.step in (None, 1):
            ids = self._reader.ids(self._key, rows)
        else:
            wanted = np.arange(len(self))[rows]
            ids = np.zeros((*wanted.shape, *self.shape[1:]), self.dtype)
            # Rows in any order, but decoded once each: blocks are read front to back.
            for start in range(0, len(self), ROWS_AT_ONCE):
                in_window = (wanted >= start) & (wanted < start + ROWS_AT_ONCE)
                if in_window.any():
                    ids[in_window] = self._reader.ids(self._key, slice(start, start + ROWS_AT_ONCE))[
                        wanted[in_window] - start
                    ]
        if axes:
            return ids[(*[slice(None)] * (ids.ndim - 2), *axes)]
        return ids

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if dtype is None:
            return self[:]
        return self[:].astype(dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return CodedRoutes, (self.data, self._key)  # Ray shares the bytes of arrays between processes
