"""Leave every term of the cost model out in turn: how much worse each class of published figures is met.

    python -m benchmarks.validate_model --ablation

A term is left out by the value at which it does nothing (no latency, no bytes of the loss); nothing is refitted. What
worsens no class's mean |log| by `WORTH` is tried once more as a forecaster meets it, on clusters that no fit has seen:
each cluster's runs by constants that are fitted without the term on the runs of the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from math import log
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.validate_model.compare import validate
from benchmarks.validate_model.fit import first_fit, held_out_errors
from benchmarks.validate_model.forecasts import user_runs, vendor_runs
from moe_rl.config import load_cluster, load_model, load_software
from moe_rl.core import cost
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.software import TUNED, TYPICAL, SoftwareCosts
from moe_rl.core.topology import HardwareSpec
from moe_rl.simulators import base_time, data_parallel, movement, pipeline
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.whole_runs import WholeRun

WORTH = 0.003
# Sets of single layers, transfers and settings beside the whole runs, by kind.
SMALL_SETS = ("throughput", "moe_layer", "all_to_all", "memory_peaks", "layer_gains", "recorded_gains")
SMALL_CLASSES = {
    "qwen3-235b-long-context": "long 235B",
    "laer-gains": "LAER",
    "llep-layer-gains": "spilling",
    "llep-layer-gains-flat": "spilled rows",
    "megatron-moe-layer-deepseek-mixtral": "one layer",
    "deepep-one-node": "DeepEP",
    "hybridep-all-to-all": "HybridEP",
    "memory-peaks-recompute-time": "recompute",
}

# Class of published figures to its mean |log|.
Errors = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One term of the cost model and the values at which it does nothing."""

    name: str
    hardware: Mapping[str, float] = field(default_factory=dict)
    software: Mapping[str, float] = field(default_factory=dict)
    module: ModuleType | None = None
    """Where `attributes` lie: constants or functions of the simulator."""
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def cluster(self, name: str) -> HardwareSpec:
        """Return the shipped cluster without the term."""
        return replace(load_cluster(name), **self.hardware)  # type: ignore[arg-type]  # all are numbers

    def costs(self, software: str) -> SoftwareCosts:
        """Return that kind of software without the term."""
        return replace(load_software(software).costs, **self.software)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Take the term's own constants out of the simulator for as long as the context lasts."""
        with ExitStack() as stack:
            for name, value in self.attributes.items():
                assert self.module is not None  # attributes come with their module
                stack.enter_context(patch.object(self.module, name, value))
            yield


def _nothing(*_: object, **__: object) -> float:
    return 0.0


def _even_stages(model: MoeModelSpec, setting: StepSetting) -> tuple[float, ...]:
    stages = setting.pipeline_model_parallel_size
    return ((model.num_layers + setting.mtp_num_layers) / stages,) * stages


NOTHING = Term(name="nothing left out")
TERMS: Sequence[Term] = (
    Term(name="width of a GEMM", hardware={"gemm_half_width": 0.0}),
    Term(name="unaligned GEMM", hardware={"gemm_unaligned": 1.0}),
    Term(name="tile of a GEMM", hardware={"gemm_tile_rows": 1}),
    Term(name="launch of a GEMM", hardware={"gemm_fixed_us": 1e-9}),
    Term(name="latency in a node", hardware={"intra_node_latency_us": 1e-9}),
    Term(name="latency between nodes", hardware={"inter_node_latency_us": 1e-9}),
    Term(name="mixing of links", hardware={"a2a_mixing": 0.0}),
    Term(name="copies of a flat all-to-all", module=cost, attributes={"FLAT_COPY_PASSES": 0.0}),
    Term(name="small kernels", hardware={"layer_fixed_forward_ms": 1e-9, "layer_fixed_backward_ms": 1e-9}),
    Term(name="host per layer", hardware={"host_layer_ms": 0.0}),
    Term(name="host per expert", hardware={"host_expert_ms": 0.0}),
    Term(name="host per TP rank", software={"host_per_tensor_rank": 0.0}),
    Term(name="host in FP8", software={"host_fp8": 0.0}),
    Term(name="host of recomputation", software={"host_recompute_ms": 0.0}),
    Term(name="host under overlap", software={"overlap_host": 0.0}),
    Term(name="partial graphs", software={"partial_graph_share": 1.0}),
    Term(name="left by overlap", software={"overlap_left": 0.0}),
    Term(name="clamped activation", software={"clamped_activation_bytes": 10.0}),
    Term(name="fused grouped MLP", software={"fused_mlp_share": 1.0}),
    Term(name="Adam on the host", software={"host_adam_gb_per_s": 1e9}),
    Term(name="step", hardware={"step_fixed_s": 0.0}),
    Term(name="optimizer", module=movement, attributes={"OPTIMIZER_PASS_BYTES": 0}),
    Term(name="gradients and weights", module=data_parallel, attributes={"collective_seconds": _nothing}),
    Term(name="norms", module=base_time, attributes={"NORM_PASSES": (0.0, 0.0)}),
    Term(name="queries, keys, values", module=base_time, attributes={"QKV_PASSES": (0.0, 0.0)}),
    Term(name="bytes of the loss", module=base_time, attributes={"LOSS_BYTES": (0.0, 0.0)}),
    Term(name="tensor parallelism", module=base_time, attributes={"TENSOR_PARALLEL_COLLECTIVES": (0.0, 0.0)}),
    Term(name="sends of a pipeline", module=pipeline, attributes={"send_seconds": _nothing}),
    Term(name="uneven stages", module=pipeline, attributes={"stage_layers": _even_stages}),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """What leaving one term out does to every class."""

    term: str
    worse: Errors
    """Growth of the mean |log| by class; negative: better without."""
    held_out: float | None = None
    """The same of a vendor's runs, each cluster held out in turn, for a term that no class carries.

    None for costs of software, too: fits start from the shipped ones.
    """

    @property
    def most(self) -> tuple[str, float]:
        """The class that is worsened most, and by how much."""
        return max(self.worse.items(), key=lambda one: one[1])

    @property
    def stays(self) -> bool:
        """Return whether some class is worsened by `WORTH`."""
        return self.most[1] >= WORTH


def ablations(folder: Path, terms: Sequence[Term] = TERMS) -> Iterator[Ablation]:
    """Yield what each term is worth."""
    runs = [(run, "vendor", TUNED) for run in vendor_runs(folder)]
    runs += [(run, kind.split()[0], TYPICAL) for run, kind in user_runs(folder)]
    whole = class_errors(NOTHING, folder, runs)
    for term in terms:
        without = class_errors(term, folder, runs)
        found = Ablation(term=term.name, worse={name: without[name] - error for name, error in whole.items()})
        if not found.stays and not term.software:
            found = replace(found, held_out=held_out_error(term, folder) - held_out_error(NOTHING, folder))
        yield found


def held_out_error(term: Term, folder: Path) -> float:
    """Return the mean |log| of a vendor's runs, each cluster's by a fit without the term on all others."""
    with term.left_out():
        groups = held_out_errors(vendor_runs(folder, term.cluster), first_fit(term.cluster), "cluster").values()
    return float(np.mean(np.abs(np.log1p(np.concatenate([errors for _, errors in groups])))))


def class_errors(term: Term, folder: Path, runs: Sequence[tuple[WholeRun, str, str]]) -> Errors:
    """Return the mean |log| of forecast / published of every class without the term; runs: (run, class, software)."""
    errors: dict[str, list[float]] = {}
    with term.left_out():
        for run, kind, software in runs:
            step = run.predicted(term.cluster(run.cluster), term.costs(software))
            errors.setdefault(kind, []).append(log(step.tokens_per_s_per_gpu / run.tokens_per_s))
        for result in validate(folder, kinds=SMALL_SETS, model_named=_model, cluster_named=term.cluster):
            if result.name in SMALL_CLASSES:
                logs = [log(point.predicted / point.published) for point in result.points]
                errors.setdefault(SMALL_CLASSES[result.name], []).extend(logs)
    return {kind: float(np.mean(np.abs(logs))) for kind, logs in errors.items()}


def _model(name: str) -> MoeModelSpec:
    return load_model(name).spec
