"""The schedule of slime's and miles' rollout manager, packed over all ranks where its trainers have MOE_RL set.

Neither is on a registry. `STAND_IN` is a schedule of our own with slime's name, arguments and results; with checkouts
(`FRAMEWORK_SOURCES`) their own functions run as well.
"""

import pickle
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from checkouts import SOURCES, needs_checkout

from moe_rl.balancing.config import BalancerConfig
from moe_rl.core.native import native_core
from moe_rl.core.post_import import wrap_everywhere
from moe_rl.frameworks.run_settings import Settings
from moe_rl.frameworks.slime import manager

pytest.importorskip("transformers")
needs_core = pytest.mark.skipif(native_core() is None, reason="packing needs the C++ core")

STAND_IN = '''
def build_dp_schedule(args, train_parallel_config, total_lengths, *, global_batch_size, rollout_indices):
    """Samples one by one, every rank in turn: no more than one in a micro-batch, as many micro-batches as needed."""
    ranks = train_parallel_config["dp_size"]
    partitions, indices, counts = [[] for _ in range(ranks)], [[] for _ in range(ranks)], []
    for first in range(0, len(total_lengths), global_batch_size):
        samples = list(range(first, first + global_batch_size))
        for place, sample in enumerate(samples):
            indices[place % ranks].append([len(partitions[place % ranks])])
            partitions[place % ranks].append(sample)
        counts.append(global_batch_size // ranks)
    return partitions, indices, counts, [global_batch_size] * len(counts)
'''
RANKS, SAMPLES, STEPS, BUDGET = 4, 64, 2, 2048
MODEL = {
    "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 2, "hidden_size": 256,
    "moe_intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 1024,
}  # fmt: skip
PARALLEL = {"dp_size": RANKS, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
SETTINGS = Settings(balancer=BalancerConfig(ranks_per_node=4))


def lengths_of(seed: int) -> list[int]:
    drawn = np.exp(np.random.default_rng(seed).normal(5.0, 1.2, SAMPLES * STEPS))
    return np.clip(drawn, 8, BUDGET).astype(int).tolist()


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    """What slime's arguments hold, as far as its schedule and ours read them."""
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(**MODEL).save_pretrained(tmp_path / "model")
    return Namespace(
        use_dynamic_batch_size=True, max_tokens_per_gpu=BUDGET, micro_batch_size=None, balance_data=False,
        balance_by_flops=False, hf_checkpoint=str(tmp_path / "model"), tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1, expert_model_parallel_size=4,
    )  # fmt: skip


def package(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Write the stand-in as `name`.utils.dp_schedule and import it."""
    (folder / name / "utils").mkdir(parents=True)
    for path in (folder / name, folder / name / "utils"):
        (path / "__init__.py").touch()
    (folder / name / "utils" / "dp_schedule.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(folder))
    return import_module(f"{name}.utils.dp_schedule")


def call(function: Any, args: Namespace, parallel: dict[str, Any], seed: int) -> Any:
    indices = list(range(SAMPLES * STEPS))
    return function(args, parallel, lengths_of(seed), global_batch_size=SAMPLES, rollout_indices=indices)


def check_schedule(before: Any, after: Any, seed: int) -> None:
    """Steps keep their samples, ranks get as many micro-batches each, and micro-batches keep to the budget."""
    from moe_rl.frameworks.slime.driver import schedules_of_steps

    lengths = lengths_of(seed)
    steps = [schedules_of_steps(*schedule[:3]) for schedule in (before, after)]
    assert steps[0] != steps[1]
    assert before[3] == after[3]
    for step, packed in zip(*steps, strict=True):
        samples = [sorted(s for rank in each for batch in rank for s in batch) for each in (step, packed)]
        assert samples[0] == samples[1]
        assert len({len(rank) for rank in packed}) == 1
        assert all(0 < sum(lengths[sample] for sample in batch) <= BUDGET for rank in packed for batch in rank)
    for partition, indices in zip(*after[:2], strict=True):
        assert [place for batch in indices for place in batch] == list(range(len(partition)))


@needs_core
def test_a_packing_that_travels_with_the_trainers_ranks_reaches_who_holds_the_function(
    args: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = package(tmp_path, monkeypatch, "slime_stand_in_travel")
    function: Any = module.__dict__["build_dp_schedule"]  # as a class that was pickled by value holds it
    before = call(function, args, PARALLEL, 0)
    travels = manager.ParallelConfig(PARALLEL, framework="slime_stand_in_travel", settings=SETTINGS)
    assert call(function, args, travels, 0) == before
    there = pickle.loads(pickle.dumps(travels))
    assert dict(there) == PARALLEL
    check_schedule(before, call(function, args, there, 0), 0)
    again = pickle.loads(pickle.dumps(there))  # a critic's trainers tell the same once more
    assert call(function, args, again, 0) == call(function, args, there, 0)


@needs_core
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"use_dynamic_batch_size": False}, "all micro-batches have the same number of samples"),
        ({"indep_dp": True}, "data-parallel cells run independently"),
        ({"expert_model_parallel_size": 3}, "4 ranks of a pipeline stage cannot be divided into EP groups of 3"),
    ],
)
def test_settings_that_leave_nothing_to_pack_are_named_and_change_nothing(
    args: Namespace,
    changes: dict[str, Any],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = f"slime_stand_in_{len(sentence)}"
    module: Any = package(tmp_path, monkeypatch, name)
    for option, value in changes.items():
        setattr(args, option, value)
    before = call(module.build_dp_schedule, args, PARALLEL, 1)
    manager.install(name, SETTINGS)
    with caplog.at_level("WARNING"):
        assert call(module.build_dp_schedule, args, PARALLEL, 1) == before
        assert call(module.build_dp_schedule, args, PARALLEL, 1) == before
    assert caplog.text.count(sentence) == 1


@needs_core
def test_virtual_stages_keep_their_multiple_of_micro_batches(
    args: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = package(tmp_path, monkeypatch, "slime_stand_in_virtual")
    args.pipeline_model_parallel_size = 2
    manager.install("slime_stand_in_virtual", SETTINGS)
    virtual = PARALLEL | {"vpp_size": 2, "microbatch_group_size_per_vp_stage": 4}
    counts = call(module.build_dp_schedule, args, virtual, 2)[2]
    assert all(count % 4 == 0 for count in counts)


@pytest.mark.parametrize(("stages", "multiple"), [(None, 1), (1, 1), (2, 4)])
def test_without_virtual_stages_any_number_of_micro_batches_will_do(stages: int | None, multiple: int) -> None:
    """Megatron has a size of groups there, too, which nothing reads."""
    assert manager._multiple({"vpp_size": stages, "microbatch_group_size_per_vp_stage": 4}) == multiple


def test_trainers_send_the_packing_where_it_is_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class TrainRayActor:
        train_parallel_config: Any = PARALLEL

        def set_rollout_manager(self, calls: list[Any]) -> None:
            calls.append(self.train_parallel_config)

    module = ModuleType("slime_stand_in_trainer.ray.train_actor")
    module.TrainRayActor = TrainRayActor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sent: list[Any] = []
    off = Settings(balancer=BalancerConfig(ranks_per_node=4, pack=False))
    manager.install_when_imported("slime_stand_in_trainer", off)
    TrainRayActor().set_rollout_manager(sent)
    manager.install_when_imported("slime_stand_in_trainer", SETTINGS)
    TrainRayActor().set_rollout_manager(sent)
    unknown = TrainRayActor()
    unknown.train_parallel_config = None  # miles, where it does not know its ranks
    unknown.set_rollout_manager(sent)
    assert [type(each) for each in sent] == [dict, manager.ParallelConfig, type(None)]


def test_a_function_is_replaced_for_all_who_hold_it() -> None:
    def doubled(value: int, *, plus: int = 1) -> int:
        return 2 * value + plus

    holder = doubled
    wrap_everywhere(doubled, lambda original, *given, **more: -original(*given, **more))  # type: ignore[arg-type]
    assert (holder(3), holder(3, plus=2)) == (-7, -8)


@needs_core
@pytest.mark.framework
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=needs_checkout(each), id=each) for each in ("slime", "miles")]
)
def test_the_frameworks_own_schedule_is_packed(name: str, args: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SOURCES / name))
    function = import_module(f"{name}.utils.dp_schedule").build_dp_schedule
    before = [call(function, args, PARALLEL, seed) for seed in range(3)]
    manager.install(name, SETTINGS)
    for seed in range(3):
        check_schedule(before[seed], call(function, args, PARALLEL, seed), seed)
