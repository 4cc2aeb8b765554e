"""`moe-rl tune`: settings at a fixed number of GPUs, their order, and what can be pasted."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from cli_runner import moe_rl

import moe_rl as product
from moe_rl.config import load_cluster, load_model
from moe_rl.core.errors import InvalidInputError
from moe_rl.report.tuned_settings import ALIKE, PASTED, ParallelLayout, TunedSetting
from moe_rl.report.tuning import Tuned
from moe_rl.simulators.whole_runs import WholeRun
from moe_rl.study.parallel_shapes import shapes_of
from moe_rl.study.search_layouts import COMPARED
from moe_rl.study.shape_task import ShapeTask

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "published_runs.json"
LONG_TAIL = {
    "model": "gpt-oss-20b", "cluster": "h100", "gpus": 32, "num_samples": 256, "mean_length": 4000,
    "max_length": 32768, "length_spread": 1.3,
}  # fmt: skip
SMALL = ("--model", "gpt-oss-20b", "--gpus", 8, "--num-samples", 64, "--mean-length", 1000,
         "--tensor-model-parallel-size", 1, "--pipeline-model-parallel-size", 1)  # fmt: skip
TELLING = 0.02
"""Published runs whose speeds differ by less are as fast."""


@pytest.fixture(scope="module")
def long_tail() -> Tuned:
    return product.tune(**LONG_TAIL, tensor_model_parallel_size=1, pipeline_model_parallel_size=1, jobs=1)


@pytest.mark.lengthy
def test_the_group_of_one_node_is_best_and_a_larger_one_says_why_not(long_tail: Tuned) -> None:
    """EP8 is a node: beyond it the all-to-all goes through NICs; below it less memory is left for micro-batches."""
    sizes = list(long_tail.first_of("expert_model_parallel_size"))
    assert sizes[0] == 8
    assert sizes.index(16) < sizes.index(32)
    (said,) = (sentence for sentence in long_tail.sentences() if "EP32" in sentence)
    # Only layouts whose intervals part are told apart; such a one says what takes its time.
    assert "all to all alone adds" in said or "within the error" in said


@pytest.mark.lengthy
def test_settings_are_in_order_and_their_parts_add_up(long_tail: Tuned) -> None:
    speeds = [row.tokens_per_s_per_gpu for row in long_tail.settings]
    slower = [speed for speed in speeds if speed < (1 - ALIKE) * max(speeds)]
    assert speeds[-len(slower) :] == sorted(slower, reverse=True)
    alike = long_tail.settings[: len(speeds) - len(slower)]
    told_apart = [row.told_apart for row in long_tail.settings if row.behind_fastest is not None]
    assert long_tail.num_alike == told_apart.count(False) > 1
    assert len(told_apart) <= COMPARED + len(long_tail.first_of("expert_model_parallel_size"))
    assert [row.num_kinds for row in alike] == sorted(row.num_kinds for row in alike)
    for row in long_tail.settings:
        assert sum(row.parts.values()) == pytest.approx(1.0)
        assert row.peak_gib < load_cluster("h100").hbm_gib
        assert row.micro_batch_tokens >= 32768 or row.micro_batch_tokens >= LONG_TAIL["mean_length"]


def test_more_recomputation_is_tried_only_where_less_does_not_fit(long_tail: Tuned) -> None:
    taken = [
        (row.expert_model_parallel_size, row.context_parallel_size, row.dispatcher, row.micro_batch_tokens)
        for row in long_tail.settings
    ]
    assert len(set(taken)) == len(taken)


@pytest.mark.parametrize(("gpus", "cut"), [(32, False), (64, True)])
def test_every_shape_fills_the_gpus_and_its_nodes(gpus: int, cut: bool) -> None:
    """The 32 experts of GPT-OSS-20B are cut only where EP32 leaves ranks over."""
    model, hardware = load_model("gpt-oss-20b").spec, load_cluster("h100")
    shapes = list(shapes_of(model, hardware, gpus, 8))
    assert any(shape.expert_tensor_parallel_size > 1 for shape in shapes) == cut
    for shape in shapes:
        ranks = gpus // shape.pipeline_model_parallel_size
        assert ranks % shape.slices == 0
        assert ranks % shape.expert_ranks == 0
        assert shape.expert_tensor_parallel_size == 1 or model.num_experts % shape.expert_ranks
        assert model.num_experts % shape.expert_model_parallel_size == 0
        assert shape.num_virtual_stages == 1 or shape.pipeline_model_parallel_size > 1


def test_cut_experts_hold_as_much_and_take_longer() -> None:
    """EP4 x expert TP 2 has EP8's weights on a rank; its tokens go to both parts, whose matrices are narrower."""
    asked = {"model": "gpt-oss-20b", "gpus": 8, "num_samples": 64, "mean_length": 1000, "micro_batch_tokens": 8192,
             "tensor_model_parallel_size": 1, "context_parallel_size": 1, "pipeline_model_parallel_size": 1,
             "recompute_granularity": "full", "moe_flex_dispatcher_backend": "deepep", "jobs": 1}  # fmt: skip
    cut = product.tune(**asked, expert_model_parallel_size=4, expert_tensor_parallel_size=2).best
    whole = product.tune(**asked, expert_model_parallel_size=8).best
    assert cut.name == "EP4 ETP2"
    assert "expert_tensor_parallel_size=2" in cut.lines("verl")
    assert cut.tokens_per_s_per_gpu < whole.tokens_per_s_per_gpu
    assert cut.peak_gib >= whole.peak_gib


def test_resident_slots_count_in_the_peak_or_fill_what_is_left() -> None:
    asked = {"model": "gpt-oss-20b", "gpus": 16, "num_samples": 64, "mean_length": 1000, "micro_batch_tokens": 8192,
             "expert_model_parallel_size": 16, "tensor_model_parallel_size": 1, "context_parallel_size": 1,
             "pipeline_model_parallel_size": 1, "moe_flex_dispatcher_backend": "deepep", "jobs": 1}  # fmt: skip
    none, two, most = (product.tune(**asked, resident_slots=slots).best for slots in (0, 2, "auto"))
    assert (none.resident_slots, two.resident_slots) == (0, 2)
    assert two.peak_gib > none.peak_gib
    assert most.resident_slots > 2
    assert two.peak_gib < most.peak_gib < load_cluster("h100").hbm_gib
    of_one_node = product.tune(**{**asked, "expert_model_parallel_size": 8}, resident_slots="auto").best
    assert of_one_node.resident_slots == 0


@pytest.mark.lengthy
def test_the_command_draws_pastes_and_resumes(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("found.jsonl", "found.json", "trade.svg", "trade.html")}
    asked = ("tune", *SMALL, "--jobs", 1, "--out", files["found.jsonl"])
    ran = moe_rl(*asked, "--json", files["found.json"], "--plot", files["trade.svg"])
    said = re.search(r"([\d,]+) layouts were simulated in full; ([\d,]+) were skipped", " ".join(ran.err.split()))
    fitting = re.search(r"and ([\d,]+) of them fit", " ".join(ran.err.split()))
    assert said is not None
    assert fitting is not None
    assert int(said[1]) + int(said[2]) == int(fitting[1])
    assert ran.code == 0, ran.err
    document = json.loads(files["found.json"].read_text())
    best = TunedSetting(**{name: value for name, value in document["settings"][0].items() if name != "limits"})
    for framework in PASTED:
        assert best.lines(framework) in ran.out
    assert "EP8" in files["trade.svg"].read_text()
    again = moe_rl(*asked, "--plot", files["trade.html"])
    page = files["trade.html"].read_text()
    assert f"<h1>{best.name} trains" in page
    assert best.lines("verl") in page.replace("&#39;", "'")
    assert "points are in" in again.err
    assert again.out == ran.out


def test_context_parallelism_is_left_out_where_no_sequence_needs_it() -> None:
    """Published runs of packed sequences with CP took 5 to 16 times as long as predicted."""
    asked = {
        "model": "gpt-oss-20b", "gpus": 16, "num_samples": 64, "mean_length": 1000, "jobs": 1,
        "expert_model_parallel_size": 8, "pipeline_model_parallel_size": 1, "micro_batch_tokens": 8192,
    }  # fmt: skip
    short = product.tune(**asked)
    assert all(row.context_parallel_size == 1 for row in short.settings)
    assert not any("context parallelism" in caution for caution in short.cautions)
    stated = product.tune(**asked, context_parallel_size=2)
    assert all(row.context_parallel_size == 2 for row in stated.settings)
    head = str(stated).partition("tokens/s/GPU  80 %")[0]
    assert "5 to 16 times as long as predicted" in head
    assert "the fastest layout without" not in head  # which nobody searched


@pytest.mark.lengthy
def test_a_layout_with_context_parallelism_stands_below_its_warning(long_tail: Tuned) -> None:
    """A sequence of 32,768 tokens alone on a GPU would make all others wait: CP is searched, and comes first."""
    assert long_tail.best.context_parallel_size > 1
    head = str(long_tail).partition("tokens/s/GPU  80 %")[0]
    assert "5 to 16 times as long as predicted" in head
    (without,) = re.findall(
        r"the fastest layout without context parallelism, (.*?), changes the step time by (\S+)%", head
    )
    assert "CP" not in without[0]
    assert float(without[1]) > 0
    document = long_tail.as_json()
    assert document["notes"][: len(long_tail.cautions)] == list(long_tail.cautions)


def test_what_is_given_is_not_searched() -> None:
    found = product.tune(
        model="gpt-oss-20b", gpus=16, num_samples=64, mean_length=1000, expert_model_parallel_size=8, jobs=1,
        moe_token_dispatcher_type="alltoall", micro_batch_tokens=8192, recompute_granularity="full",
        pipeline_model_parallel_size=1,
    )  # fmt: skip
    for row in found.settings:
        said = (row.expert_model_parallel_size, row.dispatcher, row.micro_batch_tokens, row.recompute)
        assert said == (8, "alltoall", 8192, "full")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", 0), "--gpus must be at least 1"),
        (("--gpus", 8, "--expert-model-parallel-size", 3), "no parallel layout"),
        (("--batch", "scaled"), "tune packs sequences"),
        (("--tokens-per-rank", 4096), "Set --micro-batch-tokens"),
        (("--model", "deepseek-v3"), "does not fit on 8 GPUs"),
        (("--plot", "a.png"), "must end in .html"),
        (("--out", "a.json"), "must end in .jsonl"),
        (("--mean-length", 0), "--mean-length must be at least 1"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments: tuple[object, ...], message: str) -> None:
    ran = moe_rl("tune", *SMALL, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


def test_without_lengths_it_asks_for_them() -> None:
    with pytest.raises(InvalidInputError, match="--num-samples is required"):
        product.tune(model="gpt-oss-20b", gpus=8)


@pytest.mark.lengthy
def test_the_faster_of_published_settings_wins() -> None:
    """Pairs of one model on one machine; runs of the same facts share their mean, as releases differ in software."""
    if not PUBLISHED.exists():
        pytest.skip("the published runs do not lie in the repository")
    runs: dict[str, list[WholeRun]] = {}
    for row in json.loads(PUBLISHED.read_text())["points"]:
        run = WholeRun.of(row, lambda name: load_model(name).spec, load_cluster)
        runs.setdefault(run.facts, []).append(run)
    of_machine: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for same in runs.values():
        run = same[0]
        published = float(np.mean([other.tokens_per_s for other in same]))
        gpus = run.batch.topology.num_ranks * run.batch.setting.pipeline_model_parallel_size
        machine = (run.model, run.cluster, gpus)
        of_machine.setdefault(machine, []).append((published, _tuned_speed(run)))
    pairs = [pair for found in of_machine.values() for pair in itertools.combinations(found, 2)]
    telling = [(one, other) for one, other in pairs if abs(one[0] / other[0] - 1.0) > TELLING]
    right = [(one[0] > other[0]) == (one[1] > other[1]) for one, other in telling]
    assert len(right) >= 20
    assert np.mean(right) >= 0.85, f"{sum(right)} of {len(right)}"


def _tuned_speed(run: WholeRun) -> float:
    """Return tokens/s/GPU as `tune` prices the setting of a published run: equal sequences, the run's micro-batches."""
    setting, topology = run.batch.setting, run.batch.topology
    slices = setting.tensor_model_parallel_size * setting.context_parallel_size
    shape = ParallelLayout(
        expert_model_parallel_size=topology.ep_size,
        tensor_model_parallel_size=setting.tensor_model_parallel_size,
        context_parallel_size=setting.context_parallel_size,
        pipeline_model_parallel_size=setting.pipeline_model_parallel_size,
        num_virtual_stages=setting.num_virtual_stages,
        dispatcher=setting.dispatcher,
    )
    length, budget = run.batch.sequence_length, int(run.batch.work.tokens.mean()) * slices
    count = topology.num_ranks // slices * run.num_micro_batches * max(1, budget // length)
    task = ShapeTask(
        shapes=(shape,), model=run.batch.model, hardware=topology.hardware, base=setting,
        lengths=np.full(count, length, np.int64), gpus=topology.num_ranks * setting.pipeline_model_parallel_size,
        ranks_per_node=topology.hardware.ranks_per_node,
    )  # fmt: skip
    return task.priced(shape, setting, max(budget, length)).tokens_per_s_per_gpu
