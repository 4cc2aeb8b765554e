"""Cases of test_grouped_experts.py: the same training with SequentialMLP and with our `GroupedExperts` in its place."""

import collections
import contextlib
import copy
import itertools
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from reorder_cases import random_placement
from replica_cases import ONE_STEP, balanced, counted, occurring, poisoned
from torch.utils._python_dispatch import TorchDispatchMode

from moe_rl.balancing.pass_source import PassSource
from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.grouped_experts import GroupedExperts
from moe_rl.kernels.recipes import RECIPES, prepare
from moe_rl.megatron import Balancer, BalancerConfig, attach, elastic_spec
from moe_rl.megatron.exchange import ReplicatedExperts
from moe_rl.megatron.expert_views.grouped import GroupedSlots
from moe_rl.megatron.expert_views.grouped_compute import GroupedCompute
from moe_rl.megatron.expert_views.grouped_module import grouped_spec
from moe_rl.megatron.expert_views.sequential import SequentialExperts
from moe_rl.megatron.model_spec import built_as, submodules_of

MICRO_BATCHES = 3
GROUPED = BalancerConfig(policy="ultraep", objective="imbalance", experts="grouped")
FP8 = BalancerConfig(policy="ultraep", objective="imbalance", experts="grouped", recipe="fp8-block")
OWN = BalancerConfig(policy="ultraep", objective="imbalance")
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

Curve = dict[str, list[float]]


def trained(spec_of: Callable[[Any], Any] = lambda spec: spec, **changes: Any) -> Curve:
    return tiny_gpt.train(tiny_gpt.build(spec_of, **changes), steps=ONE_STEP, micro_batches=MICRO_BATCHES)


def elastic_grouped(spec: ModuleSpec) -> ModuleSpec:
    return elastic_spec(grouped_spec(spec))


def compare(**changes: Any) -> dict[str, Any]:
    """SequentialMLP; grouped by spec without a balancer; grouped with replicas, attached and by spec."""
    with tiny_gpt.parallel(2):
        found = {"plain": trained(**changes), "by_spec": trained(grouped_spec, **changes)}
        found["balanced"], metrics = balanced(tiny_gpt.build(**changes), steps=ONE_STEP, config=GROUPED)
        found["again"], _ = balanced(tiny_gpt.build(elastic_grouped, **changes), steps=ONE_STEP, config=OWN)
    return {**found, "metrics": metrics}


def alltoall() -> dict[str, Any]:
    return compare()


def allgather() -> dict[str, Any]:
    return compare(moe_token_dispatcher_type="allgather")


def full_recompute() -> dict[str, Any]:
    return compare(**RECOMPUTE)


def overlapped_gradient_reduction() -> dict[str, Any]:
    return compare(overlap_grad_reduce=True)


def gpt_oss_experts() -> dict[str, Any]:
    """Biases in both projections, clamped quick-GELU gates, and 1 added to the up projection."""
    changes = {
        "add_bias_linear": True,
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 0.1,
        "glu_linear_offset": 1.0,
    }

    def build(spec_of: Callable[[Any], Any] = lambda spec: spec) -> tiny_gpt.Run:
        return with_distinct_experts(tiny_gpt.build(spec_of, **changes))

    with tiny_gpt.parallel(2):
        plain, by_spec = (
            tiny_gpt.train(run, steps=ONE_STEP, micro_batches=MICRO_BATCHES) for run in (build(), build(grouped_spec))
        )
        (attached, metrics), (again, _) = (balanced(build(), steps=ONE_STEP, config=GROUPED) for _ in range(2))
    return {"plain": plain, "by_spec": by_spec, "balanced": attached, "again": again, "metrics": metrics}


def bf16() -> dict[str, Any]:
    return compare(**BF16)


def reordered() -> dict[str, Any]:
    """A reorder and new replicas before every step."""
    with tiny_gpt.parallel(2):
        plain, run = trained(), tiny_gpt.build()
        balancer, curve = attach([run.model], run.optimizer, GROUPED), tiny_gpt.history()
        for step in range(ONE_STEP):
            balancer.reorder(random_placement(balancer, step))
            routes = occurring(step, count=MICRO_BATCHES)
            balancer.begin_pass(PassSource.replayed(routes))
            tiny_gpt.update(run, step, routes, curve)
            balancer.end_pass()
    return {"plain": plain, "balanced": curve}


def fp8_block() -> dict[str, Any]:
    """FP8 experts in a bf16 model: by spec, attached without and with replicas, with recomputation, and in bf16."""
    static = BalancerConfig(policy="static", experts="grouped", recipe="fp8-block")

    def fp8_spec(spec: ModuleSpec) -> ModuleSpec:
        return grouped_spec(spec, recipe="fp8-block")

    with tiny_gpt.parallel(2):
        found = {"wide": trained(grouped_spec, **BF16), "by_spec": trained(fp8_spec, **BF16)}
        found["without_replicas"], _ = balanced(tiny_gpt.build(**BF16), steps=ONE_STEP, config=static)
        found["balanced"], _ = balanced(tiny_gpt.build(**BF16), steps=ONE_STEP, config=FP8)
        found["recomputed"], _ = balanced(tiny_gpt.build(**BF16, **RECOMPUTE), steps=ONE_STEP, config=FP8)
        copies = FP8.with_words(transposed_codes=True)
        found["transposed"], _ = balanced(tiny_gpt.build(**BF16), steps=ONE_STEP, config=copies)
    return found


def triton_interpreter() -> dict[str, Any]:
    """The Triton kernels, interpreted, against the reference; one step of one micro-batch."""
    found = {}
    with tiny_gpt.parallel(2):
        for recipe, backend in itertools.product(("bf16", "fp8-block"), ("reference", "triton")):
            config = BalancerConfig(
                policy="ultraep", objective="imbalance", experts="grouped", recipe=recipe, backend=backend
            )
            curve, metrics = balanced(
                tiny_gpt.build(**BF16), steps=1, config=config, routes_of=lambda step: occurring(step, count=1)
            )
            found[f"{recipe}/{backend}"] = [curve, metrics[0]["moe_rl/replicas"]]
    return found


def controls() -> dict[str, Any]:
    """Faults of the grouped path that the comparisons must see."""

    def nothing(*_: Any) -> None:
        return

    with tiny_gpt.parallel(2):
        found = {"right": balanced(tiny_gpt.build(), steps=ONE_STEP, config=GROUPED)[0]}
        with patch.object(ReplicatedExperts, "start_backward", ReplicatedExperts.wait_for_push):
            found["replica_gradients_not_cleared"], _ = balanced(tiny_gpt.build(), steps=ONE_STEP, config=GROUPED)
        found["fp8"], _ = balanced(tiny_gpt.build(), steps=ONE_STEP, config=FP8)
        with patch.object(GroupedSlots, "begin", nothing):
            found["old_codes"], _ = balanced(tiny_gpt.build(), steps=ONE_STEP, config=FP8)
        with patch.object(GroupedSlots, "quantize_replicas", _only_once(GroupedSlots.quantize_replicas)):
            found["codes_of_another_replica"], _ = balanced(tiny_gpt.build(), steps=ONE_STEP, config=FP8)
    return found


def _only_once(quantize: Callable[..., None]) -> Callable[..., None]:
    def once(self: GroupedSlots, replicas: Sequence[Any]) -> None:
        quantize(self, [r for r in replicas if (r.slot, 0) not in self.replica_codes])

    return once


@contextlib.contextmanager
def poisoned_codes(balancer: Balancer) -> Iterator[None]:
    """Overwrite the FP8 codes of replicas, and all buffers, with NaN after every forward."""

    def poison(*_: Any) -> None:
        for codes in balancer._states[0].experts.replica_codes.values():
            for side in codes.both:
                side.data.view(torch.uint8).fill_(0x7F)

    handles = [layer.register_forward_hook(poison) for layer in balancer.layers]
    with poisoned(balancer, told=True):
        yield
    for handle in handles:
        handle.remove()


def poisoned_buffers() -> dict[str, Any]:
    found = {}
    with tiny_gpt.parallel(2):
        for name, config in (("fp32", GROUPED), ("fp8", FP8)):
            clean, _ = balanced(tiny_gpt.build(), steps=1, config=config)
            found[name] = [clean, balanced(tiny_gpt.build(), steps=1, config=config, around=poisoned_codes)[0]]
    return found


def extreme_routes() -> dict[str, Any]:
    """All tokens of a micro-batch to one rank's experts, so that the other rank's have none; then the other way."""

    def routes_of(step: int) -> list[torch.Tensor]:
        return [torch.tensor([shift, shift + 1]).expand(len(r), r.shape[1], 2) for shift, r in enumerate_homes(step)]

    def enumerate_homes(step: int) -> list[tuple[int, torch.Tensor]]:
        return list(zip((0, 6), occurring(step, count=2), strict=True))

    found = {}
    with tiny_gpt.parallel(2):
        for name, config in (("fp32", GROUPED), ("fp8", FP8)):
            static = BalancerConfig(policy="static", experts="grouped", recipe=config.kernels.recipe)
            curves = [
                balanced(tiny_gpt.build(), steps=1, config=each, routes_of=routes_of)[0] for each in (static, config)
            ]
            found[name] = curves
    return found


class _Operations(TorchDispatchMode):
    """Counts every operation of torch on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def static_costs_nothing() -> dict[str, Any]:
    """Grouped experts by spec in Megatron's layer, and attached with an empty plan: collectives, operations, bits."""
    found = {}
    with tiny_gpt.parallel(2):
        tiny_gpt.forward_backward(
            tiny_gpt.build(), 0, occurring(0)
        )  # Megatron sets its loss scale up in the first pass
        for name, static in (("plain", False), ("static", True)):
            run = tiny_gpt.build() if static else tiny_gpt.build(grouped_spec)
            if static:
                config = BalancerConfig(policy="static", experts="grouped")
                attach([run.model], run.optimizer, config).begin_pass(PassSource.replayed(occurring(0)))
            with counted() as collectives, _Operations() as operations:
                loss = tiny_gpt.forward_backward(run, 0, occurring(0))
            gradient = [b.grad_data.double().sum().item() for b in run.model.expert_parallel_buffers]
            found[name] = [loss, gradient, collectives, dict(operations.calls)]
    return found


def addresses() -> dict[str, Any]:
    """Which memory the tables point into after a balanced pass, and what autograd left on the parameters."""
    with tiny_gpt.parallel(2):
        run = tiny_gpt.build()
        balancer = attach([run.model], run.optimizer, GROUPED)
        routes = occurring(0)
        balancer.begin_pass(PassSource.replayed(routes))
        tiny_gpt.forward_backward(run, 0, routes)
        replicas = balancer.end_pass().replicas
        views = [state.experts for state in balancer._states]
        homes = [p for view in views for slot in range(view.num_local_experts) for p in view.parameters_of(slot)]
        buffers = balancer.transport.buffers
        rows = range(len(buffers.weights))
        known = {t.data_ptr() for p in homes for t in (p, p.main_grad)}
        known |= {t.data_ptr() for row in rows for t in (*buffers.weights_of(row), *buffers.gradients_of(row))}
        pointed = {address for view in views for key in view._tables for address in key}
    return {
        "replicas": replicas,
        "unknown": len(pointed - known),
        "homes_missed": len({p.data_ptr() for p in homes} - pointed),
        "marked": all(p.grad_added_to_main_grad and p.grad is None for p in homes),
    }


def checkpoints_interchange() -> dict[str, Any]:
    """Keys and shapes of the grouped module's states, and a checkpoint of it loaded into SequentialMLP."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    with tiny_gpt.parallel(2):
        routes = occurring(0)
        saved, plain = tiny_gpt.build(grouped_spec), tiny_gpt.build()
        update = tiny_gpt.history()
        tiny_gpt.update(saved, 0, routes, update)
        dist_checkpointing.save({"model": saved.gpt.sharded_state_dict()}, folder[0])
        state = dist_checkpointing.load({"model": plain.gpt.sharded_state_dict()}, folder[0])
        plain.gpt.load_state_dict(state["model"])
        losses = [tiny_gpt.forward_backward(run, 0, routes, forward_only=True) for run in (saved, plain)]
        pairs = zip(saved.gpt.parameters(), plain.gpt.parameters(), strict=True)
        same = all(torch.equal(a, b) for a, b in pairs)
        keys = [sorted(run.gpt.sharded_state_dict()) for run in (saved, plain)]
        names = [[(n, list(p.shape)) for n, p in run.gpt.named_parameters()] for run in (saved, plain)]
    return {"losses": losses, "same": same, "keys": keys, "names": names}


class _Homes:
    """Expert parameters by themselves."""

    def __init__(self, fc1: torch.Tensor, fc2: torch.Tensor) -> None:
        self.num_local_experts = len(fc1)
        self._parameters = [[torch.nn.Parameter(m.clone()) for m in pair] for pair in zip(fc1, fc2, strict=True)]

    def parameters_of(self, slot: int) -> list[torch.nn.Parameter]:
        return self._parameters[slot]


def _problem(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "fc1": random(4, 96, 32).to(dtype), "fc2": random(4, 32, 48).to(dtype),
        "x": random(33, 32).to(dtype), "grad": random(33, 32).to(dtype),
        "probs": torch.rand(33, generator=generator),
    }  # fmt: skip


def slots_are_the_kernels() -> dict[str, Any]:
    """Three homes, an empty replica slot and a filled one, against `GroupedExperts` on four stacked experts.

    Home 1 has no tokens. Returns per recipe whether results and gradients have the same bits.
    """
    rows_per_slot, replica = [7, 0, 20, 0, 6], 3
    offsets = torch.tensor([0, 7, 7, 27, 33], dtype=torch.int32)
    found = {}
    with tiny_gpt.parallel(2):
        cfg = tiny_gpt.config()
        for recipe, dtype in itertools.product(("bf16", "fp8-block"), (torch.float32, torch.bfloat16)):
            p = _problem(dtype)
            x, probs = p["x"].clone().requires_grad_(), p["probs"].clone().requires_grad_()
            expected_gradients = tuple(torch.zeros_like(p[name], dtype=torch.float32) for name in ("fc1", "fc2"))
            matrices = [prepare(p[name], RECIPES[recipe], transpose=False) for name in ("fc1", "fc2")]
            kernel = GroupedExperts(recipe=RECIPES[recipe])
            expected = kernel(x, probs, *matrices, offsets, main_grads=expected_gradients)
            expected.backward(p["grad"])
            wanted = [expected, x.grad, probs.grad, *expected_gradients]
            for main_grads in (True, False):
                homes = _Homes(p["fc1"][:replica], p["fc2"][:replica])
                parameters = [homes.parameters_of(slot) for slot in range(replica)]
                for parameter in itertools.chain.from_iterable(parameters if main_grads else ()):
                    parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
                view = GroupedSlots(homes, cfg, GroupedCompute(recipe=recipe))
                weights = [p["fc1"][replica].clone(), p["fc2"][replica].clone()]
                gradients = [torch.zeros_like(w, dtype=torch.float32) for w in weights]
                x, probs = p["x"].clone().requires_grad_(), p["probs"].clone().requires_grad_()
                nothing = [None] * replica
                y = view.forward(x, rows_per_slot, probs, [*nothing, None, weights], [*nothing, None, gradients])
                y.backward(p["grad"])
                per_matrix = [
                    torch.stack([pair[i].main_grad if main_grads else pair[i].grad for pair in parameters]
                                + [gradients[i].to(dtype if not main_grads else torch.float32)])
                    for i in range(2)
                ]  # fmt: skip
                got = [y, x.grad, probs.grad, *per_matrix]
                found[f"{recipe}/{dtype}/{main_grads}"] = [
                    torch.equal(a, b.to(a.dtype)) for a, b in zip(got, wanted, strict=True)
                ]
    return found


def outputs_within_rounding() -> list[float]:
    """Largest |SequentialMLP - grouped| on one layer's rows, in units of the bound on the fp32 rounding of both.

    With h = W1 x, g and u its halves, a = silu(g) u p and y = W2 a: a sum of n products errs by at most n u |.||.|
    (u = 2^-24, first order); |silu'| <= 1.1; a few more roundings in the activation.
    """
    unit, hidden, width = 2.0**-24, 32, 48
    worst = []
    with tiny_gpt.parallel(2):
        for layer in tiny_gpt.build().gpt.decoder.layers:
            module = layer.mlp.experts
            generator = torch.Generator().manual_seed(layer.layer_number)
            counts = torch.tensor([9, 0, 14, 1])
            x, p = torch.randn(24, hidden, generator=generator) * 4, torch.rand(24, generator=generator)
            sequential, _ = module(x, counts, p)
            view = GroupedSlots(SequentialExperts(module), module.config, GroupedCompute())
            difference = (view.forward_homes(x, counts, p) - sequential).abs().double()
            bounds = []
            for expert, rows, probs in zip(
                module.local_experts, x.double().split(counts.tolist()), p.double().split(counts.tolist()), strict=True
            ):
                w1, w2 = expert.linear_fc1.weight.double(), expert.linear_fc2.weight.double()
                g, u = (rows @ w1.t()).chunk(2, dim=1)
                dg, du = (hidden * unit * (rows.abs() @ w1.abs().t())).chunk(2, dim=1)
                a = torch.nn.functional.silu(g) * u
                da = 1.1 * u.abs() * dg + torch.nn.functional.silu(g).abs() * du + 8 * unit * a.abs()
                bounds.append((probs[:, None] * (da + (width + 2) * unit * a.abs())) @ w2.abs().t())
            worst.append(float((difference / (2 * torch.cat(bounds))).max()))
    return worst


def refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except InvalidInputError as error:
        return str(error)
    return ""


def refusals() -> dict[str, str]:
    def attached(config: BalancerConfig, spec_of: Callable[[Any], Any] = lambda spec: spec, **changes: Any) -> str:
        run = tiny_gpt.build(spec_of, **changes)
        return refusal(lambda: attach([run.model], None, config))

    def grouped_config(**changes: Any) -> BalancerConfig:
        return BalancerConfig(experts="grouped", **changes)

    with tiny_gpt.parallel(2):
        return {
            "experts": refusal(lambda: BalancerConfig(experts="ours")),
            "recipe": attached(grouped_config(recipe="fp9")),
            "recipe_alone": refusal(lambda: BalancerConfig(recipe="fp8-block")),
            "rowwise": attached(grouped_config(recipe="fp8-rowwise")),
            "backend": attached(grouped_config(backend="torch")),
            "activation": attached(grouped_config(), activation_func=torch.nn.functional.gelu),
            "bf16_gradients": attached(GROUPED, grad_reduce_in_fp32=False, **BF16),
            "bf16_gradients_by_spec": attached(OWN, grouped_spec, grad_reduce_in_fp32=False, **BF16),
            "spec": refusal(lambda: grouped_spec(get_gpt_layer_local_spec())),
            "unknown": attached(BalancerConfig(experimental=True), other_spec),
        }


class OtherExperts(SequentialMLP):
    """Experts that may compute anything: a subclass of a class that there is a view of."""


def other_spec(spec: ModuleSpec) -> ModuleSpec:
    spec = copy.deepcopy(spec)
    inside = submodules_of(spec.submodules.mlp)
    inside.experts = built_as(inside.experts, SequentialMLP, OtherExperts)
    return spec


def with_distinct_experts(run: tiny_gpt.Run) -> tiny_gpt.Run:
    """Draw the experts' weights anew, another set on every EP rank."""
    for layer in run.gpt.decoder.layers:
        for name, parameter in layer.mlp.experts.named_parameters():
            text = f"{layer.layer_number}.{parallel_state.get_expert_model_parallel_rank()}.{name}"
            generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.08)
    run.optimizer.reload_model_params()
    return run
