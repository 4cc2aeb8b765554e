"""RouterTap's gamma under PEFT: LoRA beside the router, the router trained whole, LoRA on the router, and far drift."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import RouterTap, as_floats
from tests.importance import tap_setups as setups

pytestmark = [
    pytest.mark.framework,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing. is deprecated"),  # PEFT 0.21 asks for it
]
RUNS = setups.batches(setups.padded, [5, 0, 3], [2, 4, 1])
ATTENTION = ["q_proj", "v_proj"]


def adapted(**given: Any) -> nn.Module:
    """The model under LoRA, whose second matrices are not 0, as after a step."""
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, **given)
    model: nn.Module = peft.get_peft_model(setups.built("Qwen3Moe"), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def adapted_weight(router: Any) -> Tensor:
    """The weight that acts: PEFT puts LoRA of a parameter into a parametrization, active within a forward only."""
    base: Tensor = router.weight
    wrapper = WRAPPERS.get(id(router))
    if wrapper is None:
        return base
    down, up = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
    return base + wrapper.scaling["default"] * (up @ down)


WRAPPERS: dict[int, Any] = {}


def with_wrappers(model: nn.Module) -> nn.Module:
    """Remember which LoRA belongs to which router."""
    WRAPPERS.clear()
    for module in model.modules():
        if hasattr(module, "lora_A") and setups.is_router(getattr(module, "base_layer", module)):
            WRAPPERS[id(module.base_layer)] = module
    return model


def test_lora_beside_the_router() -> None:
    model = adapted(target_modules=ATTENTION)
    assert setups.worst_error(model, RUNS) <= setups.TOLERANCE


def test_the_router_trained_whole_beside_lora() -> None:
    model = adapted(target_modules=ATTENTION, modules_to_save=["gate"])
    assert len(RouterTap(model)) == setups.SIZES["num_hidden_layers"]
    assert setups.worst_error(model, RUNS) <= setups.TOLERANCE


def on_the_router(**given: Any) -> nn.Module:
    model = with_wrappers(adapted(target_modules=[], target_parameters=["gate.weight"], **given))
    assert len(WRAPPERS) == setups.SIZES["num_hidden_layers"]
    return model


def test_lora_on_the_router() -> None:
    model = on_the_router()
    assert setups.worst_error(model, RUNS, weight_of=adapted_weight) <= setups.TOLERANCE


def far(model: nn.Module) -> None:
    setups.drifted(model, scale=1.0)


def test_lora_on_the_router_that_drifts_far_is_off_by_the_stores_floor_alone() -> None:
    """log p below -16 is read as -16: gamma comes out too large, by at most what lies below, and the result says so."""
    model = on_the_router()
    shares: list[float] = []
    error = setups.worst_error(model, RUNS, weight_of=adapted_weight, drift=far, at_floor=shares, lowest=-16.0)
    assert error <= setups.TOLERANCE, "of a brute force with the same floor"
    assert shares[-1] > 0.0
    model = on_the_router()
    assert setups.worst_error(model, RUNS, weight_of=adapted_weight, at_floor=shares) <= setups.TOLERANCE
    assert shares[-1] == 0.0


def test_a_reference_forward_without_the_adapter_belongs_outside_of_the_pass() -> None:
    model: Any = adapted(target_modules=ATTENTION)
    tap, (batch, _) = RouterTap(model), setups.old_batches()
    with torch.no_grad(), tap.old_pass(setups.KEYS.numel()) as store:
        tap.rows = batch.keys
        model(**batch.arguments)
    with torch.no_grad(), model.disable_adapter():
        model(**batch.arguments)  # between the passes
    with torch.no_grad(), tap.update_pass(store) as update:
        tap.rows = batch.keys
        model(**batch.arguments)
        shift = update.finish(batch.keys)
        with (
            model.disable_adapter(),
            pytest.raises(InvalidInputError, match="such as those of a reference model, outside"),
        ):
            model(**batch.arguments)
    assert as_floats(shift.metrics)["router_corr/gamma_min"] == 1.0
