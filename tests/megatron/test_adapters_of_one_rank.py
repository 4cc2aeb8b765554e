"""Where TEGroupedMLP's grouped linear is in an adapter around it, in one process; modules stand in for TE's."""

import warnings

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from moe_rl.core.errors import InvalidInputError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says of what it does without TransformerEngine and Apex
    from moe_rl.megatron.expert_views.te_grouped import _path


class GroupedLinear(torch.nn.Module):
    """Weights by the names that TE gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight0 = torch.nn.Parameter(torch.zeros(2, 2))


class Adapter(torch.nn.Module):
    """One adapter of all experts around a linear."""

    def __init__(self, linear: torch.nn.Module, *, experts: int | None = None) -> None:
        super().__init__()
        self.to_wrap = linear
        self.low_rank = torch.nn.Parameter(torch.zeros((2, 1) if experts is None else (experts, 2, 1)))


def test_a_linear_is_found_alone_and_in_one_adapter() -> None:
    assert _path(GroupedLinear(), "linear_fc1") == ""
    assert _path(Adapter(GroupedLinear()), "linear_fc1") == "to_wrap."


@pytest.mark.parametrize(
    "linear",
    [
        Adapter(Adapter(GroupedLinear())),
        Adapter(GroupedLinear(), experts=3),
        torch.nn.Sequential(GroupedLinear(), GroupedLinear()),
        torch.nn.Linear(2, 2),
    ],
    ids=["two adapters", "one per expert", "two linears", "none"],
)
def test_adapters_that_are_not_shared_by_all_experts_are_refused(linear: torch.nn.Module) -> None:
    with pytest.raises(InvalidInputError, match=r"linear_fc2 of TEGroupedMLP is a .*with one adapter shared by all"):
        _path(linear, "linear_fc2")
