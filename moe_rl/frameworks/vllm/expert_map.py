"""vLLM, an experiment: it takes no map, so experts are renamed in the weights that it is sent.

vLLM keeps experts 0 .. E/P - 1 on rank 0, and so on (`expert_placement_strategy` linear). A permutation of their names
moves them without a copy: name p then stands for the expert in slot p. `moe_rl.frameworks.vllm.renaming` renames
weights and maps captured ids back. Read in vllm 0.33.0.
"""

from pathlib import Path

from moe_rl.core.decode import DecodeBatches
from moe_rl.core.errors import require
from moe_rl.core.expert_map import ExpertMap
from moe_rl.rollout_engines.base import Document, Ints, ReplicaChoice, RolloutEngine, Shape, layer_by_layer

SCHEMA = "moe_rl.expert-permutation/1"


def _only_slot(expert_map: ExpertMap, batches: DecodeBatches, ranks_per_node: int) -> Ints:
    return layer_by_layer(expert_map, batches, lambda ids, count: 0 * ids)


def _document(expert_map: ExpertMap) -> Document:
    rows = zip(expert_map.moe_layer_ids, expert_map.slots.tolist(), strict=True)
    return {"schema": SCHEMA, "expert_of_name": {str(layer): row for layer, row in rows}}


def _rows(document: Document, shape: Shape) -> dict[int, list[int]] | None:
    if document.get("schema") != SCHEMA:
        return None
    names = document.get("expert_of_name")
    missing = [layer for layer in shape.moe_layer_ids if not isinstance(names, dict) or str(layer) not in names]
    require(not missing, f"expert_of_name has no row for MoE layer {missing[0] if missing else ''}.")
    assert isinstance(names, dict)
    return {layer: names[str(layer)] for layer in shape.moe_layer_ids}


def _told(expert_map: ExpertMap, path: Path) -> tuple[str, ...]:
    return (
        "an experiment, not run inside vLLM: leave --enable-eplb off and expert_placement_strategy linear, and send "
        "weights through",
        f"    renaming = ExpertRenaming.read({str(path)!r}, model); load(renaming.renamed(named_tensors))",
        "    of moe_rl.frameworks.vllm.renaming, and captured ids through renaming.expert_ids(routed_experts)",
    )


ENGINE = RolloutEngine(
    name="vllm-permutation",
    summary="vLLM, an experiment: experts renamed in the weights, without copies, as .json.",
    suffixes=(".json",),
    choices=(ReplicaChoice(name="only slot", when="always", serve=_only_slot),),
    document=_document,
    rows=_rows,
    told=_told,
    copies=False,
    groups_stay_whole=True,
)
