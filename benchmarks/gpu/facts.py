"""On what the run runs: versions and clocks, whether every carried cubin loads, whether clusters fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.rows import Figure

STEPS = ("machine", "cubins load", "clusters fit")


def run(step: str, machine: Machine) -> dict[str, Figure]:
    """Look at the machine."""
    import torch

    from moe_rl.kernels.carried import carried_for
    from moe_rl.kernels.carried_driver import HOPPER, driver_of
    from moe_rl.kernels.gemm.proven import Chip

    device = torch.device(machine.device, 0) if machine.is_gpu else torch.device("cpu")
    if step == "machine":
        from benchmarks.hardware import record_hardware

        chip = str(Chip.of(device)) if machine.is_gpu else "rehearsed"
        facts: dict[str, Figure] = {name: str(value) for name, value in record_hardware(machine_root()).items()}
        return {**facts, "chip": chip}
    archive, driver = carried_for(HOPPER), driver_of(device)
    if archive is None or driver is None:
        raise RuntimeError("no machine code of these kernels is carried")
    if step == "cubins load":
        for kernel in archive.kernels.values():
            driver.function(archive, kernel, device)
        return {"cubins": len(archive.kernels), "sources": archive.sources}
    wanted = Chip.of(device).num_sms // 2 if machine.is_gpu else 1
    clustered = {kernel.code: kernel for kernel in archive.kernels.values() if kernel.num_ctas > 1}
    held = [driver.max_clusters(archive, kernel, device) for kernel in clustered.values()]
    # Fewer is no fault: the plain loop runs then, and says so.
    return {"clusters held": min(held), "clusters wanted": wanted}


def machine_root() -> Path:
    """Return the checkout."""
    from benchmarks.gpu.machine import ROOT

    return ROOT
