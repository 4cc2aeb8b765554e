"""What the check says of a sequence."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.routes.faults import THREADS, Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The first fault of a sequence; `fault` is None if there is none."""

    fault: Fault | None = None
    row: int = 0
    """First row at fault."""
    layer: int | None = None
    """Place of the (first) layer at fault among the L; None: all."""
    share: float = 0.0
    """Share of the rows that are at fault; where `layer` is set, of that layer's rows or, if all, of the layers."""
    agreement: float | None = None
    """Mean share of the reference's experts that the routes name; None without reference."""

    def __str__(self) -> str:
        if self.fault is None:
            if self.agreement is None:
                return "ok"
            return f"ok, agrees with {self.agreement:.1%} of the reference's expert choices"
        place = f"row {self.row}" + ("" if self.layer is None else f", layer {self.layer}")
        thread = ""
        if self.fault in THREADS:
            thread = f" (as in {THREADS[self.fault]})"
        return f"{self.fault}: first at {place}, {self.share:.0%} affected{thread}"

    @classmethod
    def on_rows(
        cls,
        fault: Fault,
        at_fault: NDArray[np.bool_],
        *,
        layer: int | None = None,
        agreement: float | None = None,
    ) -> "Verdict":
        """Return the verdict on the rows [T] that are marked."""
        first_fault, share = int(np.argmax(at_fault)), float(at_fault.mean())
        return cls(fault=fault, row=first_fault, layer=layer, share=share, agreement=agreement)

    @classmethod
    def on_cells(cls, fault: Fault, cells: NDArray[np.bool_]) -> "Verdict":
        """Return the verdict on the cells [T, L] that are marked: on the first layer that has any, or on all layers."""
        marked = np.asarray(np.any(cells, axis=0))
        if marked.all():
            return cls.on_rows(fault, np.asarray(np.any(cells, axis=1)))
        layer = int(np.argmax(marked))
        return cls.on_rows(fault, cells[:, layer], layer=layer)

    @classmethod
    def on_layers(
        cls, fault: Fault, layers: NDArray[np.integer], num_layers: int, agreement: float | None = None
    ) -> "Verdict":
        """Return the verdict on these layers, as a whole."""
        return cls(fault=fault, layer=int(layers[0]), share=len(layers) / num_layers, agreement=agreement)
