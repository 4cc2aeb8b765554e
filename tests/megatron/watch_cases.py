"""Cases of test_watch.py: routers that choose, that replay their own choice, and that replay it wrongly."""

from typing import Any
from unittest.mock import patch

import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from recorder_cases import live

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.metrics import imbalance
from moe_rl.megatron.load_watch import LoadWatch
from moe_rl.megatron.router_watch import RouterWatch
from moe_rl.routes.online import load_metrics


def refusals(run: Any) -> list[str]:
    """What the watch says of routers that return ids, a map of other experts, and probabilities alone."""
    router = tiny_gpt.gpt_of(run.models[0]).decoder.layers[0].mlp.router
    hidden = torch.zeros(tiny_gpt.SEQUENCE, tiny_gpt.BATCH, router.config.hidden_size)
    num_rows, num_experts = tiny_gpt.SEQUENCE * tiny_gpt.BATCH, router.config.num_moe_experts
    probabilities = torch.zeros(num_rows, num_experts)
    outputs = (
        (probabilities, torch.zeros(num_rows, router.topk, dtype=torch.int64)),
        (probabilities, torch.zeros(num_rows, num_experts + 1, dtype=torch.bool)),
        probabilities,
    )
    sentences = []
    for output in outputs:
        watch = RouterWatch(run.models, check=False, telemetry=True, ranks_per_node=1)
        with patch.object(router, "forward", lambda _, returned=output: returned):
            try:
                router(hidden)
                sentences.append("")
            except InvalidInputError as error:
                sentences.append(str(error))
        watch.close()
    return sentences


def watched() -> dict[str, Any]:
    """Metrics of a pass under each kind of replay; the weights never change."""
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        gpt = tiny_gpt.gpt_of(run.models[0])
        shape = tiny_gpt.SEQUENCE * tiny_gpt.BATCH, len(gpt.decoder.layers), run.config.moe_router_topk
        own = torch.zeros(shape, dtype=torch.int64)

        def keep(layer: Any) -> Any:
            def hook(_: Any, __: Any, output: Any) -> None:
                own[:, layer.layer_number - 1] = output[1].to(torch.int8).topk(shape[2], dim=1).indices

            return layer.mlp.router.register_forward_hook(hook)

        watch = RouterWatch(run.models, check=True, telemetry=True, ranks_per_node=1)
        found: dict[str, Any] = {}

        def passed(name: str, routes: torch.Tensor) -> None:
            tiny_gpt.forward_backward(run, 0, [routes], forward_only=True)
            found[name] = watch.end_pass()

        handles = [keep(layer) for layer in gpt.decoder.layers]
        with patch.object(tiny_gpt, "replay", live):
            passed("live", own)
        for handle in handles:
            handle.remove()
        passed("replayed", own.clone())
        passed("shifted", own.roll(tiny_gpt.BATCH, dims=0))
        zeros = own.clone()
        zeros[:32] = 0
        passed("zeros", zeros)
        # The ranks that share a stage's layers are not all ranks of a run: here every rank has layers for itself.
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        with patch.object(parallel_state, "get_tensor_and_data_parallel_group", lambda **_: alone):
            passed("of one rank", own.clone())
        counts = [torch.bincount(ids.ravel(), minlength=run.config.num_moe_experts) for ids in own.unbind(1)]
        found["own loads"] = load_metrics(torch.stack(counts).numpy())
        watch.close()
        tiny_gpt.forward_backward(run, 0, [own.clone()], forward_only=True)
        found["closed"] = watch.end_pass()
        loads = LoadWatch(run.models)
        loads.begin_pass(forward_only=True)
        with (
            patch.object(parallel_state, "get_expert_model_parallel_group", lambda: alone),
            patch.object(parallel_state, "get_expert_model_parallel_world_size", lambda: 2),
        ):
            tiny_gpt.forward_backward(run, 0, [own.clone()], forward_only=True)
            found["imbalance of one rank"] = loads.end_pass()["moe_rl/imbalance"]
        loads.close()
        of_homes = torch.stack(counts).view(1, 1, len(counts), 2, -1).sum(dim=4)
        found["own imbalance"] = imbalance(of_homes.numpy())
        found["refused"] = refusals(run)
        found["counts"] = torch.bincount(own[:, 0].ravel(), minlength=run.config.num_moe_experts).tolist()
        return found
