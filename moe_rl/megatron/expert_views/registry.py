"""Which expert modules there is a view of. To add one: a module here with an `ExpertView`, and its class in the list.

Loads no Megatron.
"""

from typing import TYPE_CHECKING, Any

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.registry import Registry
from moe_rl.megatron.expert_views.sequential import GroupedModuleExperts, SequentialExperts
from moe_rl.megatron.expert_views.te_grouped import TEGroupedExperts
from moe_rl.megatron.experts import Experts, ExpertView
from moe_rl.megatron.refusals import experimental_sentence

if TYPE_CHECKING:
    from moe_rl.megatron.expert_views.grouped_compute import GroupedCompute

EXPERT_VIEWS: Registry[type[ExpertView]] = Registry(
    "expert view", [SequentialExperts, GroupedModuleExperts, TEGroupedExperts]
)


def experts_of(
    module: Any, compute: "GroupedCompute | None" = None, *, spare_slots: int = 0, experimental: bool = False
) -> Experts:
    """Return the view of a layer's experts module, computed by itself, or by `GroupedExperts` if `compute` is given.

    `spare_slots` copies at most are on a rank at a time.

    Raises `InvalidInputError` for a module that is not supported, or was never run and is not asked for.
    """
    from moe_rl.megatron.expert_views.grouped import GroupedSlots

    kind = type(module)
    views = {view.module_class: view for view in EXPERT_VIEWS}
    view = views.get(f"{kind.__module__}.{kind.__qualname__}")
    if view is None:
        names = ", ".join(name.rpartition(".")[2] for name in views)
        raise InvalidInputError(f"experts of type {kind.__name__} are not supported. Supported types: {names}.")
    if view.never_run and not experimental:
        raise InvalidInputError(experimental_sentence(kind.__name__, view.never_run))
    if compute is None:
        return view.own_compute(module, spare_slots=spare_slots)
    require(
        not module.config.fp8,
        "Megatron's option fp8 does not work with experts='grouped', which has its own FP8 recipes: set `recipe` "
        "instead.",
    )
    compute.require_device(next(module.parameters()).device)
    return GroupedSlots(view(module), module.config, compute)
