"""Cases of test_static_rows.py: experts on buffers of one size, with DeepEP's HybridEP as a CPU stand-in."""

import standins  # noqa: F401, I001 - before Megatron

import contextlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import deep_ep
import tiny_gpt
import torch
from megatron.core.transformer import TransformerConfig, cuda_graphs
from megatron.core.transformer.moe import fused_a2a, token_dispatcher
from megatron.core.transformer.moe.experts import TEGroupedMLP
from reorder_cases import random_placement
from replica_cases import occurring
from rollout_cases import like_some
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_rl.balancing.pass_source import PassSource
from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels import operands
from moe_rl.megatron import BalancerConfig, attach
from moe_rl.megatron.layer import ElasticMoELayer

STEPS, MICRO_BATCHES = 2, 3
WIDTH = {"moe_ffn_hidden_size": 64}
"""A multiple of torch's unrolled vectors: at 48 its sigmoid on a CPU computes the last elements of a buffer otherwise,
so that bits depend on the length of the buffer."""
HYBRID = {
    "moe_token_dispatcher_type": "flex",
    "moe_router_dtype": "fp32",
    "moe_flex_dispatcher_backend": "hybridep",
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16,
}
DROPLESS = BalancerConfig(
    policy="ultraep", objective="imbalance", experts="grouped", backend="reference", ranks_per_node=4
)
PLAIN_EXPERTS = BalancerConfig(policy="ultraep", objective="imbalance", ranks_per_node=4, experimental=True)
HOMES_ALONE = DROPLESS.with_words(policy="static", replica_slots=0)
WAITS = ("item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor for which a host waits on a device, or whose result has a shape that only the device knows."""

Shapes = list[tuple[str, tuple[int, ...]]]


class HostSyncs(TorchFunctionMode):
    """Hears what a captured graph cannot hold: a host that waits for the device, and a shape that data decides."""

    def __init__(self, heard: list[str]) -> None:
        super().__init__()
        self.heard = heard

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The kernels check the values of offsets where there is no device to wait for, on a CPU alone.
        checks_offsets = sys._getframe(1).f_code.co_filename == operands.__file__
        if getattr(func, "__name__", "") in WAITS and not checks_offsets:
            self.heard.append(func.__name__)
        return func(*args, **(kwargs or {}))


class ShapeRecorder(TorchDispatchMode):
    """Records every operator with the shape of what it returns, in place of graph capture."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Shapes = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) and result else result
        self.shapes.append((str(func), tuple(first.shape) if isinstance(first, torch.Tensor) else ()))
        return result


@contextlib.contextmanager
def recorded(waits: list[str]) -> Iterator[list[Shapes]]:
    """Record what each run of a layer does between its router and its dispatch, and between dispatch and combine.

    Dispatch and combine themselves are the stand-in's, which exchanges counts over gloo; what is checked is that their
    results have one shape.
    """
    runs: list[Shapes] = []

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with ShapeRecorder() as shapes, HostSyncs(waits):
                result = method(self, *args, **kwargs)
            runs.append(shapes.shapes)
            return result

        return run

    with contextlib.ExitStack() as stack:
        for name in ("preprocess", "routed_experts_compute"):
            stack.enter_context(patch.object(ElasticMoELayer, name, watched(getattr(ElasticMoELayer, name))))
        yield runs


def has_static_budget() -> bool:
    """HybridEP's manager takes a budget of rows from megatron-core 0.18 on."""
    return "moe_expert_rank_capacity_factor" in inspect.getsource(token_dispatcher)


def trained(config: BalancerConfig, *, record: bool = False, **changes: Any) -> dict[str, Any]:
    run = tiny_gpt.build(**WIDTH, **changes)
    balancer, curve, metrics = attach(run.models, run.optimizer, config), tiny_gpt.history(), []
    runs: list[Shapes] = []
    waits: list[str] = []
    for step in range(STEPS):
        balancer.reorder(random_placement(balancer, step))
        routes = occurring(step, count=MICRO_BATCHES)
        balancer.begin_pass(PassSource.replayed(routes))
        with recorded(waits) if record else contextlib.nullcontext([]) as seen:
            tiny_gpt.update(run, step, routes, curve)
        runs += seen
        metrics.append(balancer.end_pass().as_dict())
    return {"curve": curve, "metrics": metrics, "runs": runs, "waits": waits}


def as_dropless(**changes: Any) -> dict[str, Any]:
    with tiny_gpt.parallel(4), deep_ep.any_float():
        found = {
            "dropless": trained(DROPLESS, **changes),
            "static": trained(DROPLESS.with_words(static_rows=True), **changes),
        }
    return {name: (each["curve"], each["metrics"]) for name, each in found.items()}


def alltoall() -> dict[str, Any]:
    return as_dropless()


def recomputed() -> dict[str, Any]:
    return as_dropless(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1, moe_router_topk=2
    )


def hybridep() -> dict[str, Any]:
    return as_dropless(**HYBRID) if has_static_budget() else {}


def growing_micro_batches() -> dict[str, Any]:
    """Micro-batches of 4 and 8 tokens per sequence, then of 4 and 16: the buffer of a pass is made for the larger."""
    found: dict[str, Any] = {"reallocations": []}
    with tiny_gpt.parallel(4), deep_ep.any_float():
        for name, config in (("dropless", DROPLESS), ("static", DROPLESS.with_words(static_rows=True))):
            run, curve = tiny_gpt.build(**WIDTH, **HYBRID), tiny_gpt.history()
            balancer = attach(run.models, run.optimizer, config)
            for step, lengths in enumerate(((4, 8), (4, 16))):
                every = zip(occurring(step, count=2), lengths, strict=True)
                routes = [rows[: length * tiny_gpt.BATCH] for rows, length in every]
                balancer.begin_pass(PassSource.replayed(routes))
                tiny_gpt.update(run, step, routes, curve)
                balancer.end_pass()
                if name == "static":
                    found["reallocations"].append(fused_a2a._hybrid_ep_buffer.reallocations)
            found[name] = curve
    return found


def a_recorded_layer() -> dict[str, Any]:
    """One step alone: a capacity is for a step, so shapes may differ between steps."""
    if not has_static_budget():
        return {}
    with tiny_gpt.parallel(4):
        static = trained(HOMES_ALONE.with_words(static_rows=True), record=True, **HYBRID)
        dropless = trained(HOMES_ALONE, record=True, **HYBRID)
    per_step = len(static["runs"]) // STEPS
    return {
        "steps": [static["runs"][step * per_step : (step + 1) * per_step] for step in range(STEPS)],
        "runs_per_step": per_step,
        "waits": static["waits"],
        "dropless": dropless["waits"],
    }


def overflow(**changes: Any) -> list[str]:
    """The routes that come are others than those that the plan knew: all rows want expert 0 and 1."""
    with tiny_gpt.parallel(4), deep_ep.any_float():
        run = tiny_gpt.build(**changes)
        balancer = attach(run.models, run.optimizer, HOMES_ALONE.with_words(static_rows=True))
        before = [parameter.detach().clone() for parameter in run.model.parameters()]
        told = occurring(0, count=MICRO_BATCHES)
        balancer.begin_pass(PassSource.replayed(told))
        hot = [torch.zeros_like(each) + torch.arange(2) for each in told]
        tiny_gpt.forward_backward(run, 0, [told[0], hot[1], told[2]])
        try:
            balancer.end_pass()
            said = ""
        except InvalidInputError as error:
            said = str(error)
        same = all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
        balancer.begin_pass(PassSource.replayed(told))  # the next pass is as if nothing had been
        tiny_gpt.forward_backward(run, 0, told)
        balancer.end_pass()
    return [said, str(same)]


def overflow_alltoall() -> list[str]:
    return overflow()


def overflow_hybridep() -> list[str]:
    return overflow(**HYBRID) if has_static_budget() else []


def unknown_routes() -> list[Any]:
    """Rows of which nothing is known, and no risk is stated: the pass takes them as they come."""
    with tiny_gpt.parallel(4):
        run = tiny_gpt.build()
        balancer = attach(run.models, run.optimizer, HOMES_ALONE.with_words(static_rows=True))
        told = occurring(0, count=MICRO_BATCHES)
        balancer.begin_pass(PassSource.replayed(without_some(told)))
        limits = {state.capacity_rows for state in balancer._states}
        tiny_gpt.forward_backward(run, 0, told)
        balancer.end_pass()
    return sorted(map(str, limits))


def without_some(routes: list[torch.Tensor], count: int = 4) -> list[torch.Tensor]:
    """The routes with nothing known of the first rows of micro-batch 0."""
    hidden = [each.clone() for each in routes]
    hidden[0][:count] = -1
    return hidden


def stated_risk() -> dict[str, Any]:
    """The same with a stated risk: buffers hold the certified rows, and training is the dropless run's."""
    found: dict[str, Any] = {"limits": []}
    with tiny_gpt.parallel(4), deep_ep.any_float():
        for name, config in (
            ("dropless", DROPLESS),
            ("static", DROPLESS.with_words(static_rows=True, capacity_risk=1e-4)),
        ):
            run, curve = tiny_gpt.build(**WIDTH), tiny_gpt.history()
            balancer = attach(run.models, run.optimizer, config)
            for step in range(STEPS):
                routes = occurring(step, count=MICRO_BATCHES)
                balancer.begin_pass(PassSource.replayed(without_some(routes)))
                limits = {state.capacity_rows for state in balancer._states}
                tiny_gpt.update(run, step, routes, curve)
                most = int(balancer.end_pass().actual_rows.max())
                if name == "static":
                    found["limits"].append((sorted(limits), most))
            found[name] = curve
    return found


def adversarial_rows() -> str:
    """Rows without a route that all want two experts, against a bound that most draws stay below."""
    with tiny_gpt.parallel(4), deep_ep.any_float():
        run = tiny_gpt.build()
        balancer = attach(run.models, run.optimizer, HOMES_ALONE.with_words(static_rows=True, capacity_risk=0.9))
        told = occurring(0, count=MICRO_BATCHES)
        count = len(told[0]) // 2
        balancer.begin_pass(PassSource.replayed(without_some(told, count)))
        told[0][:count] = torch.arange(2)
        tiny_gpt.forward_backward(run, 0, told)
        try:
            balancer.end_pass()
        except InvalidInputError as error:
            return str(error)
    return ""


def fixed_factor() -> dict[str, Any]:
    """Megatron's fixed factor: one that the plans keep, one that they exceed, and a pass without a bound under it.

    TEGroupedMLP with fused operators, whose place our kernels take: of TransformerEngine's the stand-in has none.
    """
    if not has_static_budget():
        return {}
    found: dict[str, Any] = {}
    fused = {**HYBRID, "moe_grouped_gemm": True, "use_transformer_engine_op_fuser": True}
    with (
        tiny_gpt.parallel(4),
        deep_ep.any_float(),
        patch.object(TEGroupedMLP, "_is_fused_impl_supported", lambda self: True),
    ):
        for name, factor in (("dropless", None), ("kept", 4.0), ("exceeded", 1.0)):
            run = tiny_gpt.build(tiny_gpt.te_spec, **WIDTH, **fused, moe_expert_rank_capacity_factor=factor)
            config = DROPLESS.with_words(static_rows=factor is not None, experimental=True)
            balancer, curve = attach(run.models, run.optimizer, config), tiny_gpt.history()
            for step, routes in enumerate([occurring(0, count=MICRO_BATCHES), occurring(1, count=MICRO_BATCHES)]):
                told = without_some(routes) if step else routes  # the second pass has no bound
                try:
                    balancer.begin_pass(PassSource.replayed(told))
                except InvalidInputError as error:
                    found["said"] = str(error)
                    continue
                tiny_gpt.update(run, step, routes, curve)
                balancer.end_pass()
            found[name] = curve
            manager = run.gpt.decoder.layers[0].mlp.token_dispatcher._comm_manager
            found[f"{name}_attached"] = manager.moe_expert_rank_capacity_factor
            balancer.detach()
            found[f"{name}_detached"] = manager.moe_expert_rank_capacity_factor
    return found


class RecordedRouter:
    """In place of a CUDA graph of a layer up to its router: computes it, and hears what a graph could not hold."""

    def __init__(self, layer: Any, waits: list[str], runs: list[Shapes]) -> None:
        self.layer, self.waits, self.runs = layer, waits, runs

    def capture(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer as Megatron has it captured; whatever the host does besides is done now, and in no replay."""
        cuda_graphs._set_capture_start()
        try:
            with ShapeRecorder() as shapes, HostSyncs(self.waits):
                outputs = self.layer._te_cuda_graph_capture(*args, **kwargs)
        finally:
            cuda_graphs._set_capture_end()
        self.runs.append(shapes.shapes)
        return outputs

    def __call__(self, *args: Any, is_first_microbatch: bool, **kwargs: Any) -> Any:
        """Replay: operators alone, and nothing that our layer does on the host."""
        moe = self.layer.mlp
        with patch.object(moe, "_elastic", None) if hasattr(moe, "_elastic") else contextlib.nullcontext():
            return self.capture(*args, **kwargs)


def captured_router() -> dict[str, Any]:
    """A recorder where Megatron has the graph of a router; plans for the routes that the routers choose."""
    scope = "cuda_graph_modules" if hasattr(TransformerConfig, "cuda_graph_modules") else "cuda_graph_scope"
    graphs = {"cuda_graph_impl": "transformer_engine", scope: ["moe_router"]}
    found: dict[str, Any] = {"waits": [], "runs": []}
    told: list[torch.Tensor] = []
    with tiny_gpt.parallel(4), patch.object(tiny_gpt, "replay", lambda gpt, routes: None):
        routes = occurring(0, count=MICRO_BATCHES)
        for name in ("plain", "balanced"):
            run = tiny_gpt.build(moe_enable_routing_replay=False, **graphs)
            like_some(run.gpt)
            chosen: list[torch.Tensor] = []
            for layer in run.gpt.decoder.layers:
                layer.mlp.router.register_forward_hook(
                    lambda module, given, out, chosen=chosen: chosen.append(out[1].float().topk(2).indices)
                )
                layer.cuda_graphs.append(RecordedRouter(layer, found["waits"], found["runs"]))
            if name == "balanced":
                balancer = attach(run.models, run.optimizer, PLAIN_EXPERTS)
                for layer in run.gpt.decoder.layers:
                    layer.cuda_graphs[0].capture(torch.ones(tiny_gpt.SEQUENCE, tiny_gpt.BATCH, 32, requires_grad=True))
                chosen.clear()
                balancer.begin_pass(PassSource.replayed(told))
            found[name] = tiny_gpt.forward_backward(run, 0, routes)
            found[f"{name}_gradients"] = [
                float(each.main_grad.norm()) for each in run.model.parameters() if each.requires_grad
            ]
            told = [torch.stack(chosen[m * 2 : m * 2 + 2], dim=1) for m in range(MICRO_BATCHES)]
        metrics = balancer.end_pass()
        found["imbalance"] = metrics.as_dict()["moe_rl/imbalance"], metrics.as_dict()["moe_rl/static_imbalance"]
        found["misplaced"] = metrics.as_dict()["moe_rl/misplaced_share"]
    return found


def forecasts() -> dict[str, Any]:
    """What rank 0 says of memory before updates: on a GPU where they fit, and on one that is too small."""
    said: list[tuple[int, str]] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("moe_rl.balancing.passes")
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    found: dict[str, Any] = {"metrics": []}
    with tiny_gpt.parallel(4), deep_ep.any_float():
        run = tiny_gpt.build()
        balancer = attach(run.models, run.optimizer, HOMES_ALONE.with_words(static_rows=True))
        for step in range(3):
            if step == 2:
                peak = found["metrics"][0]["moe_rl/forecast_peak_bytes"]
                balancer.run.memory = partial(balancer.run.memory, hbm_bytes=int(peak) - 1000)
            said.clear()
            routes = occurring(0, count=MICRO_BATCHES)
            balancer.begin_pass(PassSource.replayed(routes))
            found.setdefault("said", []).append([each for each in said if "predicted peak memory" in each[1]])
            tiny_gpt.forward_backward(run, 0, routes)
            metrics = balancer.end_pass()
            found["metrics"].append(metrics.as_dict())
            rows = metrics.actual_rows.sum(axis=1).max(axis=0)  # of the fullest micro-batch, all layers, by rank
            found["fullest"] = int(rows.argmax()), metrics.memory.fullest_rank
        balancer.begin_pass(PassSource.replayed(routes), forward_only=True)
        tiny_gpt.forward_backward(run, 0, routes, forward_only=True)
        found["forward_only"] = sorted(balancer.end_pass().as_dict())
    logger.removeHandler(listener)
    return found
