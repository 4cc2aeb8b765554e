"""Every objective against the few lines of torch in which a reader of its paper would write it."""

import pytest

from benchmarks.bench_importance import equal_to_plain, plain_batch
from benchmarks.plain_objectives import PLAIN
from moe_rl.importance import OBJECTIVES


def test_every_objective_has_a_plain_form() -> None:
    assert set(PLAIN) == set(OBJECTIVES.names)


@pytest.mark.parametrize("spread", [1.0, 10.0])
@pytest.mark.parametrize("objective", OBJECTIVES.names)
def test_loss_gradient_and_metrics_are_those_of_the_plain_form(objective: str, spread: float) -> None:
    batch = plain_batch(6 * 50, "cpu", row=50)
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    old = batch["old_log_prob"]
    for name in ("log_prob", "rollout_log_prob"):
        batch[name] = (old + spread * (batch[name] - old)).clamp(max=-1e-3)
    batch["log_prob"].requires_grad_()
    equal_to_plain(objective, batch)
