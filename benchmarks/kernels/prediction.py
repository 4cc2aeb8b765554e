"""How long our kernels would take on an H100, from the roofs of their machine code: static, optimistic, not measured.

Grouped GEMMs are recorded on a CPU, where nothing is verified, so the plain loop is predicted. On an H200, 8 groups of
4,096 rows took it 0.9 to 1.6 times as long as predicted, 16 groups of 256 rows 1.4 times. A launch takes as long as
what bounds it, at the share of that roof which kernels reach in practice:

    products   operations of whole tiles in whole waves of programs / (product share x lowest roof of the tile)
    others     bytes of the arguments / (memory share x memory bandwidth), or the roof of issuing where that is lower

The roofs are those that `make kernel-proof` wrote; launches are recorded on the CPU, as they would be made. The shares
come from published timings, or from `shares.json` beside the proof.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from moe_rl.kernels.devices import UnsupportedGpuError

if TYPE_CHECKING:
    from benchmarks.kernels.recording import Launch

STATIC = Path(__file__).resolve().parents[1] / "results" / "static"
"""Where the kernel proof writes the roofs."""

HOPPER = 90
SMS = 132
H100_GB_PER_S = 3350.0
"""NVIDIA H100 SXM data sheet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What of a roof kernels reach, and what a launch costs beside."""

    product: float = 0.93
    """Median of the published timings of grouped products that the kernel proof lists, of the roof of their tiles."""
    memory: float = 0.9
    """What large copies reach of the data sheet's bandwidth."""
    launch_us: float = 2.0
    """A kernel of a CUDA graph that does next to nothing; assumed, never fitted."""
    source: str = "published timings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Roofs by the name of a launch, and the shares of them."""

    tflops: dict[str, float]
    gb_per_s: dict[str, float]
    shares: Shares

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Read `kernel_proof.json` and, where a GPU has been measured, `shares.json`; None where there are no roofs."""
        proof, fitted = folder / "kernel_proof.json", folder / "shares.json"
        if not proof.is_file():
            return None
        document = json.loads(proof.read_text(encoding="utf-8"))
        shares = Shares(**json.loads(fitted.read_text(encoding="utf-8"))) if fitted.is_file() else Shares()
        return cls(
            tflops={row["name"]: row["ceiling_tflops"] for row in document["products"]},
            gb_per_s={row["name"]: row["issue_gb_per_s"] for row in document["elements"]},
            shares=shares,
        )

    def predict(self, call: Callable[[], object]) -> dict[str, object]:
        """Return what a row tells of the prediction of a call of our kernels.

        Nothing where a product has no roof, or where an H100 does not have it at all.
        """
        from benchmarks.kernels.recording import recorded  # needs triton, which only predictions need

        with recorded(HOPPER) as launches:
            try:
                call()
            except UnsupportedGpuError:
                return {}
        sizes = sizes_of(launches)
        product_us = memory_us = 0.0
        for launch in launches:
            if flops := operations(launch, sizes):
                roof = self.tflops.get(launch.name)
                if roof is None:
                    return {}
                product_us += flops / (self.shares.product * roof * 1e6)
            else:
                moved = sum(tensor.nbytes for tensor in launch.tensors.values())
                rate = min(self.shares.memory * H100_GB_PER_S, self.gb_per_s.get(launch.name, math.inf))
                memory_us += moved / (rate * 1e3)
        total = product_us + memory_us + self.shares.launch_us * len(launches)
        return {"predicted_us": total, "bound_by": "product" if product_us > memory_us else "memory"}


def load_model() -> Model | None:
    """Return the model of this checkout; None before its first kernel proof."""
    return Model.load(STATIC)


def sizes_of(launches: "Sequence[Launch]") -> list[int] | None:
    """Return the rows of each group that launches name; None where none has groups."""
    named = (t for launch in launches for name, t in launch.tensors.items() if name == "m_offsets_ptr")
    return next((offsets.diff().tolist() for offsets in named), None)


def operations(launch: "Launch", sizes: list[int] | None) -> float:
    """Return the operations of a grouped GEMM, those of partly empty tiles and of the last wave's idle programs too."""
    tensors, constants = launch.tensors, launch.constants
    if "BLOCK_K" not in constants:
        return 0.0
    if "a_ptr" in tensors:
        rows, summed = tensors["a_ptr"].shape
        side, columns, step = constants["BLOCK_M"], tensors["out_ptr"].shape[1], summed
        width = constants["BLOCK_N"] + constants.get("MORE_N", 0)
        tiles = sum(math.ceil(size / side) for size in sizes or [rows]) * math.ceil(columns / width)
        sms = launch.options["num_ctas"]
        return float(2 * _whole_waves(tiles * sms) * side * width // sms * step)
    dy, x = tensors["dy_ptr"], tensors["x_ptr"]
    axis = 0 if dy.dtype == torch.float8_e4m3fn else 1
    of_group = math.ceil(dy.shape[axis] / constants["BLOCK_N"]) * math.ceil(x.shape[axis] / constants["BLOCK_K"])
    tokens = [math.ceil(size / constants["BLOCK_T"]) * constants["BLOCK_T"] for size in sizes or [dy.shape[1 - axis]]]
    idle = _whole_waves(of_group * len(tokens)) / max(1, of_group * len(tokens))
    return float(2 * idle * of_group * sum(tokens) * constants["BLOCK_N"] * constants["BLOCK_K"])


def _whole_waves(tiles: int) -> int:
    """Return how many tiles would fill the waves that `tiles` take; less than one wave leaves SMs idle as well."""
    return math.ceil(tiles / SMS) * SMS
