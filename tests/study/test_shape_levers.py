"""`moe-rl tune` with routes: the best of shape, engine and levers together; and a search that lays out few shapes."""

import json
import shlex
from dataclasses import replace

import numpy as np
import pytest
from cli_runner import moe_rl
from strategies import model_spec

import moe_rl as product
from moe_rl.config import bundled_traces, load_cluster, load_model
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.native import native_core
from moe_rl.core.schedules import FRAMEWORK_LAYOUTS, PACKINGS, framework_layout
from moe_rl.report.size_comparison import ComparedSize, with_moe_rl
from moe_rl.report.tuned_settings import ALIKE, LEVERS, ShapeLevers, TunedSetting
from moe_rl.report.tuning import Tuned
from moe_rl.simulators.coactivation import coactivation
from moe_rl.simulators.synthetic import PRESET_C, synthetic_trace
from moe_rl.study.current_setting import current_setting
from moe_rl.study.options import SimulationOptions
from moe_rl.study.parallel_shapes import OF_EVERY_SIZE, next_shapes
from moe_rl.study.plan_and_price import make_plans, pricing_of
from moe_rl.study.priced_setting import command_of, levers_on_all_layers, row_of_lever, simulated_options
from moe_rl.study.rl_options import TuneOptions
from moe_rl.study.scenario import state_scenario
from moe_rl.study.shape_levers import LAYERS, SampledRoutes, compared_shapes, routes_like
from moe_rl.study.shape_task import ShapeTask
from moe_rl.study.tuned_batch import TunedBatch

QWEN = load_model("qwen3-30b-a3b")
needs_core = pytest.mark.skipif(native_core() is None, reason="levers over an engine need the C++ core")


def setting_of(ep: int, speed: float, **changes: object) -> TunedSetting:
    """A setting of EP `ep`, by default without other parallelism."""
    given = {
        "expert_model_parallel_size": ep, "tensor_model_parallel_size": 1, "context_parallel_size": 1,
        "pipeline_model_parallel_size": 1, "num_virtual_stages": 1, "dispatcher": "deepep", "micro_batch_tokens": 8192,
        "num_micro_batches": 4, "recompute": "none", "tokens_per_s_per_gpu": speed, "peak_gib": 50.0,
        "parts": {"expert_gemm": 0.6, "all_to_all": 0.4}, **changes,
    }  # fmt: skip
    return TunedSetting(**given)  # type: ignore[arg-type]


def levers_of(ep: int, **speeds: float) -> ShapeLevers:
    named = {name.replace("_", " "): speed for name, speed in speeds.items()}
    return ShapeLevers(setting=setting_of(ep, 1000.0), engine="engine:moonep", resident_slots=1, speeds=named)


def test_gains_are_of_one_lever_after_the_other() -> None:
    shape = levers_of(
        32, static=800, engine=880, packing=880, homes=900, resident_copies=990, **{"moe-rl replicas": 980}
    )
    assert shape.lever == "resident copies"
    assert shape.fastest == 990
    added = {"engine": 880 / 800 - 1, "packing": 0.0, "homes": 900 / 880 - 1, "resident copies": 0.1}
    assert shape.gains == pytest.approx(added)
    assert shape.name == "EP32, deepep, engine:moonep, packing, homes, 1 resident copies per rank"
    ours = levers_of(32, static=800, engine=880, packing=880, homes=870, **{"moe-rl replicas": 960})
    assert ours.gains == pytest.approx({"moe-rl replicas": 0.2})
    assert levers_of(8, static=800, engine=800, packing=800, homes=700).gains == {}


@pytest.mark.parametrize("fast", [0, 5])
def test_shapes_are_laid_out_until_no_estimate_is_better(fast: int) -> None:
    """30 shapes of two EP sizes; laid out, all but one are 20 % slower than estimated."""
    shapes = [replace(setting_of(8 if index % 2 else 16, 1.0), context_parallel_size=index + 1) for index in range(30)]
    estimates = np.linspace(1000.0, 700.0, 30)
    true_speeds = np.where(np.arange(30) == fast, estimates, 0.8 * estimates)
    laid_out: dict[int, list[TunedSetting]] = {}
    while chosen := next_shapes(shapes, estimates, laid_out):
        assert not set(chosen) & set(laid_out)
        laid_out |= {index: [setting_of(8, float(true_speeds[index]))] for index in chosen}
    best = max(row.tokens_per_s_per_gpu for rows in laid_out.values() for row in rows)
    assert best == true_speeds.max()
    assert all(estimates[index] < (1 - ALIKE) * best for index in set(range(30)) - set(laid_out))
    for size in (8, 16):
        assert sum(shapes[index].expert_ranks == size for index in laid_out) >= OF_EVERY_SIZE
    assert len(laid_out) < 30
    assert next_shapes(shapes, np.zeros(30), {}) == []  # none fits


def test_of_equally_fast_budgets_the_one_that_needs_no_packing_is_compared() -> None:
    """verl cuts the smaller budget's batch into two micro-batches; packed, both are one."""
    small = setting_of(8, 1010.0, micro_batch_tokens=4136, packing_gain=1.9)
    large = setting_of(8, 1000.0, packing_gain=1.02)
    assert compared_shapes([small, large]) == compared_shapes([large, small]) == [large]
    slower = replace(large, tokens_per_s_per_gpu=950.0)
    other_shape = replace(large, tensor_model_parallel_size=2)
    assert compared_shapes([small, slower, other_shape]) == [small]


def test_an_ep_size_that_is_compared_by_routes_has_no_other_percentage() -> None:
    shapes = (levers_of(32, static=800, packing=1000), levers_of(8, static=700, packing=900))
    settings = (setting_of(32, 1000.0), setting_of(8, 960.0), setting_of(4, 500.0, behind_fastest=(1.5, 2.5)))
    found = Tuned(
        model="m", cluster="h100", gpus=64, num_tokens=1, num_sequences=1, num_shapes=3, num_laid_out=3, num_alike=2,
        settings=settings, levers=shapes,
    )  # fmt: skip
    said = found.sentences()
    (of_8,) = (sentence for sentence in said if "EP8" in sentence)
    assert "takes 11.1% longer" in of_8
    assert sum("EP4" in sentence for sentence in said) == 1
    # Without routes, balanced routing alone compares them.
    assert any(
        "EP8 is probably" in sentence or "EP8 is equally" in sentence or "with EP8" in sentence
        for sentence in replace(found, levers=()).sentences()
    )


def test_routes_of_another_model_meet_as_those_of_the_trace() -> None:
    model = model_spec(num_experts=64, num_layers=2, top_k=4)
    trace = synthetic_trace(replace(PRESET_C, num_layers=2, num_sequences=80))
    lengths = np.full(20, 200, np.int64)
    made = routes_like(trace, model, lengths, seed=0)
    assert (made.num_layers, made.num_experts, made.top_k) == (LAYERS, 64, 4)
    assert made.sequence_lengths.max() <= 200
    assert 0.4 < coactivation(made) / coactivation(trace) < 2.5
    sampled = SampledRoutes.of(made, model)
    assert sampled.model.spec.num_moe_layers == sampled.trace.num_layers


@pytest.fixture(scope="module")
def with_routes() -> Tuned:
    return product.tune(
        "countdown-grpo", gpus=16, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        context_parallel_size=1, micro_batch_tokens=8192, jobs=1,
    )  # fmt: skip


@pytest.mark.lengthy
@needs_core
def test_with_a_trace_the_best_of_shape_engine_and_levers_comes_first(with_routes: Tuned) -> None:
    assert with_routes.levers
    speeds = [shape.fastest for shape in with_routes.levers]
    assert speeds == sorted(speeds, reverse=True)
    assert with_routes.best is with_routes.levers[0].setting
    for shape in with_routes.levers:
        assert set(shape.speeds) <= set(LEVERS)
        assert (shape.engine is None) == (shape.setting.dispatcher == "alltoall")
        assert all(gain >= -0.002 for gain in shape.gains.values())
        assert shape.fastest >= shape.speeds["static"]
        # No lever is faster than rows that are nowhere above the mean but by saving visits of other nodes.
        if shape.setting.expert_model_parallel_size <= 8:
            assert shape.fastest <= 1.01 * shape.setting.tokens_per_s_per_gpu


@pytest.mark.lengthy
@needs_core
def test_the_report_names_what_each_lever_adds(with_routes: Tuned) -> None:
    document = with_routes.as_json()
    first = document["levers"][0]
    assert first["best"] == with_routes.levers[0].lever
    said = with_routes.sentences()
    assert said[0].startswith(f"With these routes, {with_routes.levers[0].name}")
    assert sum("% longer" in sentence for sentence in said) >= len(with_routes.levers) - 1
    assert "moe-rl replicas" in str(with_routes)


@pytest.mark.lengthy
@needs_core
def test_the_setting_in_front_has_simulates_own_figures(with_routes: Tuned) -> None:
    """One run, one number: the command that `tune` names prints the speeds that `tune` prints."""
    best = with_routes.levers[0]
    command = shlex.split(best.command)
    assert command[:3] == ["moe-rl", "simulate", "countdown-grpo"]
    ran = moe_rl("simulate", bundled_traces()["countdown-grpo"], *command[3:], "--json", "-")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    policies, gpus = document["policies"], document["setting"]["ep_size"] * document["setting"]["num_ep_groups"]
    assert policies["static"]["tokens_per_s"] / gpus == pytest.approx(best.speeds["static"], rel=1e-9)
    assert policies[row_of_lever(best.lever, best).policy]["tokens_per_s"] / gpus == pytest.approx(
        best.fastest, rel=1e-9
    )


@pytest.mark.lengthy
@needs_core
def test_the_setting_in_front_is_simulated_on_all_gpus_with_the_peak_of_the_search(with_routes: Tuned) -> None:
    """One of two EP groups alone would hold all of the optimizer's state that the two share out."""
    row = next(row for row in with_routes.settings if row.expert_model_parallel_size == 8)
    options = TuneOptions(gpus=16, micro_batch_tokens=8192)
    stated = simulated_options(row, options, num_tokens=with_routes.num_tokens, batch="drawn")
    shape = ShapeLevers(setting=row, engine=None, resident_slots=0, speeds={"static": 1.0})
    assert "--gpus 16" in command_of("countdown-grpo", stated, shape, "static")
    scenario = state_scenario("countdown-grpo", stated.with_words(policy=["static"]), lambda *_: None)
    assert scenario.topology.num_ranks == 16
    simulate, _ = pricing_of(scenario, make_plans(scenario, ["static"], lambda *_: None))
    memory = simulate(scenario.training_step.setting).forced_balance.memory
    assert memory.peak_bytes / 2**30 == pytest.approx(row.peak_gib, rel=0.05)


@pytest.mark.lengthy
@needs_core
@pytest.mark.parametrize(
    ("layout", "engine"),
    [
        ("verl", "engine:moonep"), ("slime", "engine:ultraep"), ("slime", None), ("megatron", "engine:moonep"),
        ("in-order", None),
    ],
)  # fmt: skip
def test_every_lever_has_the_figure_of_its_command(layout: str, engine: str | None) -> None:
    """A random setting: `simulate` prints packing's and two other levers' speeds, and none exceeds the ideal there."""
    rng = np.random.default_rng([len(layout), engine is None])
    sizes = {
        "dispatcher": "alltoall" if engine is None else "deepep",
        "micro_batch_tokens": int(rng.choice([1500, 4096])),
    }
    row = setting_of(int(rng.choice([8, 16])), 1.0, **sizes)
    options = TuneOptions(gpus=16, layout=layout, seed=int(rng.integers(99)))
    levers = [lever for lever in LEVERS if engine is not None or lever not in ("engine", "moe-rl replicas")]
    shape = ShapeLevers(setting=row, engine=engine, resident_slots=1, speeds=dict.fromkeys(levers, 1.0))
    priced = levers_on_all_layers(shape, "countdown-grpo", options, num_tokens=30_000, batch="drawn")
    stated = simulated_options(row, options, num_tokens=30_000, batch="drawn")
    for lever in {"packing", *map(str, rng.choice(levers, 2, replace=False))}:
        speed = priced.speeds[lever]
        command = shlex.split(command_of("countdown-grpo", stated, shape, lever))
        ran = moe_rl("simulate", bundled_traces()["countdown-grpo"], *command[3:], "--json", "-")
        assert ran.code == 0, ran.err
        document = json.loads(ran.out)
        policy = row_of_lever(lever, shape).policy
        assert document["policies"][policy]["tokens_per_s"] / 16 == pytest.approx(speed, rel=1e-9), lever
        assert speed <= document["yardsticks"]["ideal"]["tokens_per_s"] / 16 * (1 + 1e-9), lever


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("layout", sorted(FRAMEWORK_LAYOUTS))
def test_packing_gains_over_the_layout_that_the_run_has(layout: str, packing: str) -> None:
    """Packing gains over the micro-batches of `--layout`, not over verl's; if they stay as they are, it gains nothing.

    For a time that is affine in tokens, as that of these short sequences nearly is, the gain is at most the product of
    how many micro-batches are saved and how uneven the framework's are.
    """
    asked = {"gpus": 16, "layout": layout, "packing": packing, "global_batch_tokens": 30_000}
    model, batch = TunedBatch.of("countdown-grpo", TuneOptions(**asked))
    base = TuneOptions().step_setting()
    for budget in (1500, 2048, 4096):
        shape = setting_of(8, 1.0).shape
        task = ShapeTask(
            shapes=(shape,), model=model, hardware=load_cluster("h100"), base=base, lengths=batch.lengths, gpus=16,
            ranks_per_node=8, layout=layout, packing=packing, micro_batch_tokens=budget,
        )  # fmt: skip
        (row,) = task.settings_of(0)
        options = SimulationOptions(expert_model_parallel_size=8, micro_batch_tokens=budget, batch="drawn", **asked)
        scenario = state_scenario("countdown-grpo", options.with_words(policy=["static"]), lambda *_: None)
        assert sorted(scenario.batch.lengths) == sorted(batch.lengths)
        own_layout = scenario.batch.layout
        assert row.num_micro_batches <= own_layout.num_micro_batches
        tokens = own_layout.rank_tokens(scenario.batch.lengths)
        most = own_layout.num_micro_batches / row.num_micro_batches * float(tokens.max() / tokens.mean())
        assert 1.0 - 1e-9 <= row.packing_gain <= most
        if own_layout.fixed:
            assert (row.packing_gain, row.num_micro_batches) == (1.0, own_layout.num_micro_batches)


def task_of(lengths: list[int], *, is_recorded: bool, **changes: object) -> ShapeTask:
    """EP8 of Qwen3-30B-A3B on 32 H100, whose experts and optimizer leave little memory."""
    asked = {"layout": "slime", "micro_batch_tokens": 16384, **changes}
    return ShapeTask(
        shapes=(setting_of(8, 1.0).shape,), model=QWEN.spec, hardware=load_cluster("h100"),
        base=TuneOptions().step_setting(), lengths=np.array(lengths, np.int64), gpus=32, ranks_per_node=8,
        is_recorded=is_recorded, **asked,
    )  # type: ignore[arg-type] # fmt: skip


def test_packing_gains_nothing_from_a_second_micro_batch_that_only_another_framework_needs() -> None:
    """Long tails: ranks of verl have equally many sequences, so some need two micro-batches where slime needs one."""
    rng, seconds = np.random.default_rng(0), 0
    for _ in range(6):
        lengths = np.sort(rng.lognormal(6.1, 0.75, 192).astype(np.int64) + 1)
        budget = int(max(lengths.max(), 1.1 * lengths.sum() / 32))
        gains, counts = dict[str, float](), dict[str, int]()
        for layout in ("verl", "slime"):
            (row,) = task_of(lengths.tolist(), is_recorded=True, layout=layout, micro_batch_tokens=budget).settings_of(
                0
            )
            own = framework_layout(layout, lengths, num_dp_ranks=32, token_budget=budget, model=QWEN.spec)
            gains[layout], counts[layout] = row.packing_gain, own.num_micro_batches
            assert gains[layout] >= 1.0 - 1e-9
        if counts == {"verl": 2, "slime": 1}:
            seconds += 1
            assert gains["verl"] > gains["slime"]
    assert seconds > 0


def test_a_recorded_batch_needs_memory_for_the_micro_batches_that_it_has() -> None:
    """3,000 tokens of a budget of 16,384 fit without recomputation, and full micro-batches only with it."""
    small, full = [1000] * 96, [1000] * 32 * 16
    (recorded,) = task_of(small, is_recorded=True).settings_of(0)
    (drawn,) = task_of(small, is_recorded=False).settings_of(0)
    (filled,) = task_of(full, is_recorded=True).settings_of(0)
    assert (recorded.recompute, drawn.recompute, filled.recompute) == ("none", "full", "full")
    assert recorded.tokens_per_s_per_gpu > drawn.tokens_per_s_per_gpu
    for row in (recorded, filled):
        assert row.peak_gib <= 0.956 * 79.6
    assert task_of(small, is_recorded=True).estimated(0) >= 0.95 * recorded.tokens_per_s_per_gpu
    assert task_of([1, 16000], is_recorded=True).settings_of(0)[0].recompute == "full"
    # A budget below the batch is searched no further once the batch is one micro-batch.
    searched = task_of(small, is_recorded=True, micro_batch_tokens=None).settings_of(0)
    assert [row.micro_batch_tokens for row in searched] == [4096]


@pytest.mark.parametrize("recompute", ["none", "moe", "full"])
def test_todays_setting_is_taken_as_stated_and_the_rest_is_named(recompute: str) -> None:
    task = task_of([1000] * 96, is_recorded=True, micro_batch_tokens=None)
    options = TuneOptions(gpus=32, layout="slime", current=f"ep=8,tokens=16k,recompute={recompute}")
    today = current_setting(options, task)
    assert (today.row.micro_batch_tokens, today.row.recompute) == (16000, recompute)
    assert today.unstated == ("moe_token_dispatcher_type=flex",)
    chosen = current_setting(TuneOptions(gpus=32, current="ep=8"), task)
    assert chosen.unstated == ("tokens=4096", "recompute=none", "moe_token_dispatcher_type=flex")
    every_part = f"ep=8,tokens=8192,recompute={recompute},moe_token_dispatcher_type=alltoall"
    assert current_setting(TuneOptions(gpus=32, current=every_part), task).unstated == ()


def test_a_batch_is_drawn_as_simulate_draws_it() -> None:
    """EP16 on 16 GPUs: `tune` lays out the very sequences that `simulate` draws."""
    asked = {"micro_batch_tokens": 8192, "seed": 3}
    _, batch = TunedBatch.of("countdown-grpo", TuneOptions(gpus=16, **asked))
    of_group = SimulationOptions(expert_model_parallel_size=16, **asked)
    simulated = state_scenario("countdown-grpo", of_group, lambda *_: None)
    assert sorted(batch.lengths) == sorted(simulated.batch.lengths)
    assert batch.lengths.sum() == simulated.batch.lengths.sum()
    assert batch.words == f"batch of {len(batch.lengths)} sequences (492k tokens) sampled from 1024 recorded sequences"


def test_a_batch_of_a_number_of_sequences_has_that_number() -> None:
    options = TuneOptions(gpus=16, global_batch_size=300)
    _, batch = TunedBatch.of("countdown-grpo", options)
    assert len(batch.lengths) == 300
    stated = simulated_options(setting_of(8, 1000.0), options, num_tokens=int(batch.lengths.sum()), batch="drawn")
    shape = ShapeLevers(setting=setting_of(8, 1000.0), engine=None, resident_slots=0, speeds={"static": 1.0})
    command = command_of("countdown-grpo", stated, shape, "static")
    assert "--global-batch-size 300" in command
    assert "--global-batch-tokens" not in command


@pytest.fixture(scope="module")
def beside_today() -> Tuned:
    return product.tune(
        "countdown-grpo", gpus=16, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        context_parallel_size=1, micro_batch_tokens=8192, global_batch_size=2000, policy="static",
        moe_flex_dispatcher_backend="deepep", current="ep=16", jobs=1,
    )  # fmt: skip


@pytest.mark.lengthy
@needs_core
def test_every_ep_size_is_compared_with_the_setting_of_today(beside_today: Tuned) -> None:
    compared = beside_today.comparison
    assert compared is not None
    today, *sizes = compared.rows
    assert (today.setting.expert_model_parallel_size, today.static) == (16, 1.0)
    assert [row.setting.expert_model_parallel_size for row in sizes] == sorted(
        {shape.setting.expert_model_parallel_size for shape in beside_today.levers}
    )
    for row in compared.rows:
        assert row.interval[0] <= row.moe_rl <= row.interval[1]
        assert row.other is not None
    # What one setting gains is known better than how two settings compare.
    (same,) = (row for row in sizes if row.setting.shape == today.setting.shape)
    assert same.moe_rl == pytest.approx(today.moe_rl, rel=0.02)
    (other, *_) = (row for row in sizes if row.setting.shape != today.setting.shape)

    def width(row: ComparedSize) -> float:
        return row.interval[1] / row.interval[0]

    assert width(today) < width(other)
    said = str(beside_today)
    assert "speed relative to today's setting (EP16, deepep, micro-batches of 8,192 tokens, recompute " in said
    assert "not stated by --current, so assumed of today's setting: recompute=" in said
    assert "At today's setting, moe-rl is " in said
    assert beside_today.as_json()["current"]["sizes"][0]["static"] == 1.0
    # The first row is what `simulate` prints of it.
    command = shlex.split(compared.today.command)
    ran = moe_rl("simulate", bundled_traces()["countdown-grpo"], *command[3:], "--json", "-")
    figures = json.loads(ran.out)["policies"]
    static = compared.today.speeds["static"]
    assert static == pytest.approx(figures["static"]["tokens_per_s"] / 16, rel=1e-9)
    policy = row_of_lever(with_moe_rl(compared.today.speeds), compared.today).policy
    assert today.moe_rl * static == pytest.approx(figures[policy]["tokens_per_s"] / 16, rel=1e-9)


@pytest.mark.parametrize(
    ("current", "message"),
    [
        ("ep", "must have the form option=value"),
        ("ep=3", "EP3 is not possible on 16 GPUs"),
        ("eq=8", "unknown key 'eq'"),
        ("cluster=h100", "--current cannot contain cluster"),
        ("ep=8,recompute=some", "--current recompute=some is unknown"),
        ("ep=8,tokens=8192,micro_batch_tokens=8192", "give only one"),
    ],
)
def test_a_setting_that_nobody_can_have_today_is_refused(current: str, message: str) -> None:
    asked = {"gpus": 16, "expert_model_parallel_size": 8, "pipeline_model_parallel_size": 1, "jobs": 1,
             "tensor_model_parallel_size": 1, "micro_batch_tokens": 8192}  # fmt: skip
    with pytest.raises(InvalidInputError, match=message):
        product.tune("countdown-grpo", current=current, **asked)
    with pytest.raises(InvalidInputError, match="--current compares settings by routes"):
        product.tune(model="gpt-oss-20b", num_samples=64, mean_length=1000, current=current, **asked)
