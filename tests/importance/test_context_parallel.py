"""Sequences split over ranks equal whole ones: every objective, correction, aggregation and diagnostic."""

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from context_parallel_cases import places, results

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import ContextParallel, PolicyLossInputs, all_reduce_sum, policy_loss


@pytest.mark.multi_rank(world_size=4, case="context_parallel_cases.split")
def test_split_sequences_equal_whole_ones(outcome: list[Any]) -> None:
    close = torch.testing.assert_close
    for packed in (False, True):
        alone = results(packed, ContextParallel.whole())
        assert alone["same/clip_cov/before-clip/actor/pg_clipfrac"] > 0, "no token lies between its bounds"
        for size, members in ((2, (0, 1)), (2, (2, 3)), (4, range(4))):
            for split in ("contiguous", "zigzag"):
                prefix = f"{size}/{split}/{'packed' if packed else 'padded'}"
                for name, expected in alone.items():
                    parts = [torch.tensor(outcome[rank][f"{prefix}/{name}"], dtype=expected.dtype) for rank in members]
                    message = f"{prefix}/{name}"
                    if name.startswith("share/"):
                        close(sum(parts), expected, rtol=1e-9, atol=1e-12, msg=message)
                    elif name.startswith("same/"):
                        for part in parts:
                            close(part, expected, rtol=1e-9, atol=1e-12, msg=message)
                    else:
                        for number, part in enumerate(parts):
                            mine = places(
                                packed,
                                ContextParallel(rank=number, size=size, split=split, sum_over_group=all_reduce_sum()),
                            )
                            close(part, expected[..., mine], rtol=1e-9, atol=1e-12, msg=message)


REFUSED = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megatron.core import parallel_state

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # groups without a second process
parallel_state.initialize_model_parallel(context_parallel_size=2, create_gloo_process_groups=False)

import torch
from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import ContextParallel, PolicyLossInputs, off_policy_metrics, policy_loss

values, mask = torch.zeros(2, 2), torch.ones(2, 2)
inputs = {"log_prob": values, "old_log_prob": values, "advantages": values, "response_mask": mask}
for call in (lambda: policy_loss(PolicyLossInputs(**inputs)), lambda: off_policy_metrics(values, values, mask)):
    try:
        call()
    except InvalidInputError as error:
        assert "splits sequences over 2 context-parallel ranks: pass context_parallel" in str(error)
    else:
        raise SystemExit("not refused")
policy_loss(PolicyLossInputs(**inputs, context_parallel=ContextParallel.whole()))
"""


@pytest.mark.lengthy
def test_megatrons_split_sequences_without_a_group_are_refused() -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", REFUSED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_group_says_what_is_wrong_with_it() -> None:
    with pytest.raises(InvalidInputError, match=r"rank 2 must be less than size 2"):
        ContextParallel(rank=2, size=2, sum_over_group=all_reduce_sum())
    with pytest.raises(InvalidInputError, match=r"needs sum_over_group"):
        ContextParallel(rank=0, size=2)
    with pytest.raises(InvalidInputError, match=r"unknown split 'zig-zag'. Did you mean 'zigzag'"):
        ContextParallel(split="zig-zag")


def test_verls_split_sequences_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ulysses = ModuleType("verl.utils.ulysses")  # a stand-in of the two functions that are asked
    ulysses.get_ulysses_sequence_parallel_group = object  # type: ignore[attr-defined]
    ulysses.get_ulysses_sequence_parallel_world_size = lambda: 2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verl.utils.ulysses", ulysses)
    values = {name: torch.zeros(2, 2) for name in ("log_prob", "old_log_prob", "advantages", "response_mask")}
    with pytest.raises(InvalidInputError, match=r"verl.utils.ulysses splits sequences over 2 context-parallel ranks"):
        policy_loss(PolicyLossInputs(**values))
    policy_loss(PolicyLossInputs(**values, context_parallel=ContextParallel.whole()))
