"""Case of test_docs.py: the code of docs/megatron.md, block by block, in one run."""

import standins  # noqa: F401, I001 - before Megatron

import copy
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tiny_gpt
import torch
import torch.distributed as dist
from lifecycle_cases import rebuild_megatrons_groups

from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.placement_file import write_placement
from moe_rl.replay import TraceReader

PAGE = Path(__file__).parents[2] / "docs" / "megatron.md"
MICRO_BATCHES = 2


def page_runs() -> dict[str, Any]:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        routes = [tiny_gpt.skewed_routes(0, m) for m in range(MICRO_BATCHES)]
        per_sequence = [r.view(tiny_gpt.SEQUENCE, tiny_gpt.BATCH, *r.shape[1:]).transpose(0, 1) for r in routes]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [one.numpy() for batch in per_sequence for one in batch])
        per_rank = MICRO_BATCHES * tiny_gpt.BATCH
        placement_file = Path(shared[0]) / "placement.json"
        if dist.get_rank() == 0:
            homes = np.tile(np.arange(tiny_gpt.NUM_EXPERTS) // 4, (tiny_gpt.NUM_LAYERS, 1))
            residents = np.tile([[[5], [2]]], (tiny_gpt.NUM_LAYERS, 1, 1))
            placement = ExpertPlacement.from_home_rank(homes, ep_size=2, resident_experts=residents)
            write_placement(placement, placement_file)
        dist.barrier()
        saved: dict[str, Any] = {}
        exported: dict[str, Any] = {}
        logged: list[dict[str, float]] = []

        def forward_backward() -> float:
            run.model.zero_grad_buffer()
            return tiny_gpt.forward_backward(run, 0, routes)

        namespace: dict[str, Any] = {
            "model_chunks": run.models,
            "optimizer": run.optimizer,
            "batches": [{"routed_experts": r, "attention_mask": torch.ones(r.shape[:2])} for r in per_sequence],
            "forward_backward": forward_backward,
            "log": logged.append,
            "folder": Path(shared[0]),
            "rank": dist.get_rank(),
            "save_checkpoint": lambda folder: saved.update(copy.deepcopy(run.model.state_dict())),
            "load_checkpoint": lambda folder: run.model.load_state_dict(saved),
            "placement_file": placement_file,
            "destroy_and_rebuild_groups": lambda: rebuild_megatrons_groups(run),
            "export_weights": lambda: exported.update(copy.deepcopy(run.model.state_dict())),
            "sequences": [one for given in everyone for one in given],
            "schedule": [
                [
                    [rank * per_rank + m * tiny_gpt.BATCH + i for i in range(tiny_gpt.BATCH)]
                    for m in range(MICRO_BATCHES)
                ]
                for rank in range(dist.get_world_size())
            ],
        }
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), namespace)
        dist.barrier()
        trace = TraceReader(namespace["folder"] / "run.moetrace")
        weights = [name for name in saved if "local_experts" in name and torch.is_tensor(saved[name])]
    return {
        "exported": bool(weights) and all(torch.equal(saved[name], exported[name]) for name in weights),
        "blocks": len(blocks),
        "predicted": logged[0]["moe_rl/predicted_imbalance"],
        "actual": logged[0]["moe_rl/imbalance"],
        "misplaced": logged[0]["moe_rl/misplaced_share"],
        "recorded": trace.manifest.num_sequences,
    }
