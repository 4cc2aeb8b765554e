"""Views of expert modules and of a model's options, in one process; modules stand in for Megatron's and TE's."""

import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core", reason="needs megatron-core")

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.step_words import Dispatcher, Recompute

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says of what it does without TransformerEngine and Apex
    from megatron.core.transformer.spec_utils import ModuleSpec

    from moe_rl.megatron.expert_views import registry
    from moe_rl.megatron.expert_views.grouped_compute import GroupedCompute, glu_spec
    from moe_rl.megatron.expert_views.sequential import SequentialExperts
    from moe_rl.megatron.expert_views.te_grouped import TEGroupedExperts
    from moe_rl.megatron.experts import filled_slots
    from moe_rl.megatron.model_spec import built_as, model_spec, step_setting_of, submodules_of
    from moe_rl.megatron.param_gather import ParameterGather

HIDDEN, HOMES = 4, 2


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Expert(torch.nn.Module):
    """One matrix; scales rows by their probabilities."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, rows: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return rows @ self.weight * probs[:, None], None


class Sequential(torch.nn.Module):
    """Stands in for `SequentialMLP`."""

    def __init__(self, *, fusion: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(gradient_accumulation_fusion=fusion)
        self.num_local_experts = HOMES
        self.local_experts = torch.nn.ModuleList([Expert(drawn(HIDDEN, HIDDEN, seed=slot)) for slot in range(HOMES)])


class GroupedLinear(torch.nn.Module):
    """Stands in for TransformerEngine's: a matrix per GEMM, by its number."""

    def __init__(self, seed: int, num_gemms: int = HOMES) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        for slot in range(num_gemms):
            setattr(self, f"weight{slot}", torch.nn.Parameter(drawn(HIDDEN, HIDDEN, seed=seed + slot)))

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        parts = zip(rows.split(counts), range(self.num_gemms), strict=True)
        return torch.cat([part @ getattr(self, f"weight{slot}") for part, slot in parts])


class TEGrouped(torch.nn.Module):
    """Stands in for `TEGroupedMLP`."""

    def __init__(self, num_gemms: int = HOMES) -> None:
        super().__init__()
        self.config = SimpleNamespace(gradient_accumulation_fusion=False, add_bias_linear=False)
        self.num_local_experts = num_gemms
        self.linear_fc1, self.linear_fc2 = GroupedLinear(10, num_gemms), GroupedLinear(20, num_gemms)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        hidden = self.linear_fc1(rows, counts.tolist())
        return self.linear_fc2(hidden, counts.tolist()) * probs[:, None], None


COUNTS = [2, 1, 0, 3]
"""Two homes, an empty slot of copies and a filled one."""


@pytest.mark.parametrize("fusion", [False, True])
def test_sequential_experts_run_copies_with_the_copies_weights(fusion: bool) -> None:
    module = Sequential(fusion=fusion)
    view = SequentialExperts(module)
    rows, probs = drawn(sum(COUNTS), HIDDEN, seed=5).requires_grad_(), torch.linspace(0.5, 1, sum(COUNTS))
    copied, gathered = drawn(HIDDEN, HIDDEN, seed=6).requires_grad_(), torch.zeros(HIDDEN, HIDDEN)
    for expert in module.local_experts:
        expert.weight.main_grad = torch.zeros(HIDDEN, HIDDEN)
    output = view.forward(rows, COUNTS, probs, [None, None, None, [copied]], [None, None, None, [gathered]])
    weights = [expert.weight.detach().clone().requires_grad_() for expert in module.local_experts]
    weights += [copied.detach().clone().requires_grad_()]
    parts = zip((rows.detach() * probs[:, None]).split([2, 1, 3]), weights, strict=True)
    expected = torch.cat([part @ weight for part, weight in parts])
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    found = [expert.weight.main_grad if fusion else expert.weight.grad for expert in module.local_experts]
    for gradient, weight in zip([*found, gathered if fusion else copied.grad], weights, strict=True):
        torch.testing.assert_close(gradient, weight.grad)
    assert view.own_compute(module, spare_slots=1).parameters_of(1) == [module.local_experts[1].weight]


def test_grouped_linears_run_homes_and_copies_in_two_modules_and_homes_alone_in_one() -> None:
    module, copies = TEGrouped(), TEGrouped()
    view = TEGroupedExperts(module)
    calls: list[str] = []
    module.register_forward_hook(lambda *_: calls.append("homes"))
    copies.register_forward_hook(lambda *_: calls.append("copies"))
    view._copies = copies
    rows, probs = drawn(sum(COUNTS), HIDDEN, seed=5), torch.linspace(0.5, 1, sum(COUNTS))
    copied = [drawn(HIDDEN, HIDDEN, seed=6), drawn(HIDDEN, HIDDEN, seed=7)]
    homes = [view.parameters_of(slot) for slot in range(HOMES)]
    assert homes[1] == [module.linear_fc1.weight1, module.linear_fc2.weight1]
    given = [homes[0], None, None, copied]
    parts = zip(rows.split([2, 1, 3]), [*homes, copied], strict=True)
    expected = torch.cat([part @ fc1 @ fc2 for part, (fc1, fc2) in parts]) * probs[:, None]
    torch.testing.assert_close(view.forward(rows, COUNTS, probs, given, [None] * 4), expected)
    assert calls == ["homes", "copies"]
    calls.clear()
    at_home = view.forward(rows[:3], [2, 1, 0, 0], probs[:3], given, [None] * 4)
    torch.testing.assert_close(at_home, expected[:3])
    assert calls == ["homes"]
    assert TEGroupedExperts.own_compute(module, spare_slots=0)._copies is None  # type: ignore[attr-defined]


def test_rows_in_a_slot_without_an_expert_are_an_error() -> None:
    assert filled_slots([0, 3, 0, 2, 0], [None, None, None, [], []], 2) == [0, 1, 3, 4]
    assert filled_slots([1, 1], [None, None], 2) == [0, 1]
    with pytest.raises(RuntimeError, match="3 token-expert pairs arrived in slot 2"):
        filled_slots([0, 0, 3], [None, None, None], 2)


class Untried(torch.nn.Module):
    """Experts of a kind that was never run."""


def test_experts_of_a_kind_that_was_never_run_are_used_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    view = SimpleNamespace(
        name="untried",
        module_class=f"{__name__}.Untried",
        never_run="nobody has a machine for it",
        own_compute=lambda module, spare_slots: (module, spare_slots),
    )
    monkeypatch.setattr(registry, "EXPERT_VIEWS", [view])
    module = Untried()
    with pytest.raises(InvalidInputError, match=r"^Untried is experimental: nobody has a machine for it"):
        registry.experts_of(module)
    assert registry.experts_of(module, spare_slots=3, experimental=True) == (module, 3)
    view.never_run = ""
    assert registry.experts_of(module) == (module, 0)
    with pytest.raises(InvalidInputError, match=r"type Linear are not supported\. Supported types: Untried\."):
        registry.experts_of(torch.nn.Linear(1, 1))


def test_a_backend_is_asked_whether_it_runs_where_the_weights_are() -> None:
    GroupedCompute(backend="reference").require_device(torch.device("cpu"))
    GroupedCompute(backend="auto").require_device(torch.device("meta"))  # it takes what there is
    with pytest.raises(InvalidInputError, match=r"'triton' of grouped_gemm.* runs on .*, not on meta"):
        GroupedCompute(backend="triton").require_device(torch.device("meta"))
    with pytest.raises(InvalidInputError, match=r"'torch' is not supported inside Megatron.*Use one of: auto, "):
        GroupedCompute(backend="torch")


def test_the_activation_is_megatrons_and_others_are_refused() -> None:
    def config(**words: Any) -> Any:
        words = {"gated_linear_unit": True, "activation_func": F.silu, "glu_linear_offset": 1.0} | words
        return SimpleNamespace(**{"activation_func_clamp_value": None} | words)

    spec, clamped = glu_spec(config()), glu_spec(config(activation_func_clamp_value=7.0))
    assert (spec.alpha, spec.limit, spec.up_shift) == (1.0, float("inf"), 1.0)
    assert clamped.limit == 7.0
    for words in ({"gated_linear_unit": False}, {"activation_func": F.gelu}, {"use_te_activation_func": True}):
        with pytest.raises(InvalidInputError, match="experts='grouped'"):
            glu_spec(config(**words))


def config_of(**words: Any) -> Any:
    return SimpleNamespace(
        **{
            "num_layers": 6,
            "moe_layer_freq": 2,
            "num_moe_experts": 8,
            "moe_router_topk": 2,
            "moe_latent_size": None,
            "hidden_size": 64,
            "moe_ffn_hidden_size": 32,
            "expert_tensor_parallel_size": 2,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 16,
            "gated_linear_unit": True,
        }
        | words
    )


def test_a_models_shape_is_what_its_options_say() -> None:
    spec = model_spec(config_of())
    assert spec.moe_layer_ids == (0, 2, 4)
    assert (spec.moe_ffn_hidden_size, spec.activation) == (16, "swiglu")
    assert model_spec(config_of(moe_layer_freq=[0, 1, 1, 0, 0, 1])).moe_layer_ids == (1, 2, 5)
    assert model_spec(config_of(gated_linear_unit=False), moe_layer_ids=[3]).activation == "gelu"
    assert model_spec(config_of(), moe_layer_ids=[3]).moe_layer_ids == (3,)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"moe_flex_dispatcher_backend": "hybridep"}, {"dispatcher": Dispatcher.ALLTOALL, "precision": "bf16"}),
        (
            {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
            {"dispatcher": Dispatcher.HYBRIDEP},
        ),
        ({"moe_token_dispatcher_type": "flex"}, {"dispatcher": Dispatcher.DEEPEP}),
        ({"fp8": "e4m3"}, {"precision": "fp8"}),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["moe", "moe_act", "mlp"]},
            {"recompute": Recompute.MOE, "recompute_modules": ("mlp", "moe_act")},
        ),
        (
            {"recompute_granularity": "full", "recompute_modules": ["moe_act"]},
            {"recompute": Recompute.FULL, "recompute_modules": ()},
        ),
    ],
)
def test_a_step_runs_as_the_options_say(words: dict[str, Any], expected: dict[str, Any]) -> None:
    setting = step_setting_of(SimpleNamespace(**words))
    assert {name: getattr(setting, name) for name in expected} == expected


def test_a_part_of_a_spec_is_built_as_another_class_whichever_form_it_has() -> None:
    spec = ModuleSpec(module=Expert, params={"a": 1}, submodules="parts")
    built = built_as(spec, Expert, Untried, b=2)
    assert (built.module, built.params, built.submodules) == (Untried, {"a": 1, "b": 2}, "parts")
    assert submodules_of(built) == "parts"
    part = built_as(partial(Expert, 5, a=1, submodules="parts"), Expert, Untried, b=2)
    assert (part.func, part.args, part.keywords) == (Untried, (5,), {"a": 1, "submodules": "parts", "b": 2})
    assert submodules_of(part) == "parts"
    for other in (ModuleSpec(module=Untried), partial(Untried), None):
        assert built_as(other, Expert, Untried) is None


def test_experts_wait_for_the_buckets_that_hold_them_and_each_once() -> None:
    modules = [Expert(torch.zeros(1)) for _ in range(3)]
    calls: list[Any] = []

    def bucket(name: str, *, dispatched: bool, handle: Any) -> Any:
        return SimpleNamespace(
            param_gather_dispatched=dispatched,
            param_gather_handle=handle,
            finish_param_sync=lambda skip_next_bucket_dispatch: calls.append((name, skip_next_bucket_dispatch)),
            start_param_sync=lambda force_sync: calls.append((name, force_sync)),
        )

    shared, whole = (
        bucket("shared", dispatched=False, handle=None),
        bucket("whole", dispatched=True, handle=None),
    )
    under_way = bucket("under way", dispatched=True, handle="one")
    settings = SimpleNamespace(overlap_param_gather=True, align_param_gather=False)
    chunk = SimpleNamespace(
        ddp_config=settings,
        overlap_param_gather_with_optimizer_step=False,
        param_to_bucket_group={modules[0].weight: shared, modules[1].weight: shared},
    )
    gather = ParameterGather.of(chunk, modules)
    assert gather is not None
    gather.wait()
    assert calls == [("shared", False)]
    settings.align_param_gather = True
    chunk.param_to_bucket_group |= {modules[1].weight: whole, modules[2].weight: under_way}
    gather = ParameterGather.of(chunk, modules)
    assert gather is not None
    calls.clear()
    gather.wait()
    assert calls == [("shared", True), ("whole", True), ("under way", True)]
    calls.clear()
    gather.complete()
    assert calls == [("shared", True), ("under way", True)]
    settings.overlap_param_gather = False
    assert ParameterGather.of(chunk, modules) is None
    assert ParameterGather.of(SimpleNamespace(), modules) is None
