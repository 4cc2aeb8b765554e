"""Published training runs: their settings, their measured speed, and the speed that the cost model predicts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moe_rl.core.cost import SoftwareCosts
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.topology import ClusterTopology, HardwareSpec
from moe_rl.simulators.balanced import BalancedBatch, BalancedStep, flops_per_token
from moe_rl.simulators.setting import StepSetting, TrainingRun

ModelNamed = Callable[[str], MoeModelSpec]
ClusterNamed = Callable[[str], HardwareSpec]


# Keys of a row that decide its prediction, beside its setting.
DECIDING = ("model", "cluster", "gpus", "ep_size", "sequence_length", "tokens_per_rank", "num_micro_batches")


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """One published run."""

    name: str
    model: str
    cluster: str
    tokens_per_s: float
    """Published, per GPU."""
    batch: BalancedBatch
    num_micro_batches: int
    peak_bytes: float | None
    """Published peak of allocated memory."""
    facts: str
    """The facts that decide the prediction: releases with the same facts share it."""

    @classmethod
    def of(cls, row: Mapping[str, Any], model_named: ModelNamed, cluster_named: ClusterNamed) -> "WholeRun":
        """Return the run of a row; raise where its facts do not fit together."""
        try:
            model, hardware = model_named(row["model"]), cluster_named(row["cluster"])
            setting = StepSetting(**_facts(row))
            groups = row["gpus"] // (row["ep_size"] * setting.pipeline_model_parallel_size)
            topology = ClusterTopology(
                hardware=hardware,
                ep_size=row["ep_size"],
                num_ep_groups=max(1, groups),
                ranks_per_node=min(hardware.ranks_per_node, row["ep_size"]),
            )
            published = row.get("tokens_per_s")
            if published is None:
                published = row["tflops"] * 1e12 / flops_per_token(model, row["sequence_length"])
            run = TrainingRun(model=model, topology=topology, setting=setting)
            tokens, length = row["tokens_per_rank"], row["sequence_length"]
            return cls(
                name=row["name"],
                model=row["model"],
                cluster=row["cluster"],
                tokens_per_s=float(published),
                batch=BalancedBatch.of(run, tokens_per_rank=tokens, sequence_length=length),
                num_micro_batches=row["num_micro_batches"],
                peak_bytes=1e9 * row["peak_gb"] if "peak_gb" in row else None,
                facts=repr([row[name] for name in DECIDING] + [setting]),
            )
        except KeyError as missing:
            raise InvalidInputError(f"the published run {row.get('name', row)} lacks {missing.args[0]!r}.") from missing

    def predicted(self, hardware: HardwareSpec | None = None, software: SoftwareCosts | None = None) -> BalancedStep:
        """Return the step as predicted, with other constants where they are given."""
        batch = self.batch
        if hardware is not None:
            batch = replace(batch, topology=replace(batch.topology, hardware=hardware))
        if software is not None:
            batch = replace(batch, setting=replace(batch.setting, software=software))
        return batch.step(self.num_micro_batches)


def _facts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of the row's setting.

    Rows may say CUDA graphs and a fused grouped MLP in one phrase beside the setting ("full_iteration + fused grouped
    MLP"). A fact that a row does not state has the default of the command's option.
    """
    facts = dict(row["setting"])
    graph, _, fused = str(row.get("cuda_graph", "")).partition(" + ")
    if graph:
        facts.setdefault("cuda_graph", graph)
        facts.setdefault("fused_grouped_mlp", bool(fused))
    facts["recompute_modules"] = tuple(facts.get("recompute_modules", ()))
    require(row["gpus"] >= row["ep_size"], f"{row['name']} has only {row['gpus']} GPUs, fewer than its ep_size.")
    return facts
