"""What the report says in sentences: each follows from the numbers."""

from dataclasses import replace
from typing import Any

import pytest
from report_samples import BOUNDS, SETTING, prediction, report, untimed

from moe_rl.core.metrics import StepPrediction
from moe_rl.report.headline import headline
from moe_rl.report.limits import limits
from moe_rl.report.simulation import LoadBounds
from moe_rl.report.whole_step import MemoryMisfit, Remedy, RlGain
from moe_rl.simulators.rl_step import RlStep


def test_the_headline_names_the_fastest_policy_with_its_gain() -> None:
    said = headline(report())
    assert said.title == ("ultraep makes this update 1.43x as fast as static placement.")
    assert "ultraep reaches 86% of the speed of perfectly balanced routing." in said.details
    assert "2.20 times the mean load" in said.details[0]
    assert "would save 40.0% of the update" in said.details[0]


def test_the_headline_says_what_balancing_and_packing_bring() -> None:
    rows = {"static": 10.0, "relibra": 7.5, "moe-rl": 6.5}
    alone = prediction("moe-rl-unpacked", 7.0, load=1.1)
    said = headline(
        report(*(prediction(name, seconds, load=1.1) for name, seconds in rows.items()), balancing_alone=alone)
    )
    assert said.title == (
        "moe-rl makes this update 1.54x as fast as static placement. Balancing experts accounts for 86% of the time "
        "saved, packing sequences for 14%."
    )
    assert "The second-fastest policy, relibra, takes 15% longer." in said.details


@pytest.mark.parametrize(("static", "verdict"), [(6.1, "Balancing can gain little"), (10.0, "moe-rl makes")])
def test_a_gain_that_is_mostly_packing_is_split_with_the_runs_that_pack(static: float, verdict: str) -> None:
    """Balancing makes 0.7 % of it, packing 2.0 % or more: who does not pack has the former alone."""
    unpacked, all_levers = static / 1.007, static / 1.007 / (1.02 if static < 7 else 1.1)
    rows = tuple(prediction(name, seconds, load=1.1) for name, seconds in (("static", static), ("moe-rl", all_levers)))
    alone = prediction("moe-rl-unpacked", unpacked, load=1.1)
    title = headline(report(*rows, balancing_alone=alone, setting=SETTING | {"packing": "run"})).title
    assert title.startswith(verdict)
    packed = "2.0%" if static < 7 else "10.0%"
    assert "Moved and copied experts make the update 0.7% faster. Packing sequences, which evens out attention" in title
    assert f"makes it another {packed} faster, but only if your run packs (" in title
    assert "in your own Megatron loop, balancer.packed packs inside each rank" in title
    assert "accounts for" not in title
    free = headline(report(*rows, balancing_alone=alone, setting=SETTING | {"packing": "free"})).title
    assert "in your own driver, pack_schedule does" in free
    # Where balancing brings most, there is nothing to warn of.
    balanced = replace(alone, step_time_s=1.001 * all_levers)
    assert "your run packs" not in headline(report(*rows, balancing_alone=balanced)).title


def test_without_times_it_says_so_of_the_excess() -> None:
    rows = {"static": 3.0, "static+pack": 2.9, "moe-rl-unpacked": 1.5, "moe-rl": 1.0}
    said = headline(report(*(untimed(prediction(name, 1.0, load=load)) for name, load in rows.items())))
    assert said.title == (
        "moe-rl cuts the load of the busiest rank from 3.00 to 1.00 times the mean, which removes 100% of the excess. "
        "Balancing experts accounts for 75% of this reduction, packing sequences for 25%."
    )


def test_the_headline_says_what_is_gained_over_the_best_engine() -> None:
    rows = {"static": 10.0, "ultraep": 8.0, "moonep": 7.5, "moe-rl": 7.0}
    policies = tuple(prediction(name, seconds, load=1.1) for name, seconds in rows.items())
    shown = report(*policies, engines=("ultraep", "moonep"))
    assert headline(shown).title == (
        "moe-rl makes this update 1.43x as fast as static placement and 1.07x as fast as the best load-balancing "
        "dispatcher, moonep."
    )
    gains = [shown.speedup_vs_best_engine(row) for row in shown.policies]
    assert gains == [None, pytest.approx(7.5 / 8), 1.0, pytest.approx(7.5 / 7)]
    # The engine itself is not compared with itself, and without engines there is nothing to compare with.
    assert "dispatcher" not in headline(report(*policies[:3], engines=("ultraep", "moonep"))).title
    assert report(*policies).best_engine is None


def test_the_headline_has_the_interval_of_drawn_batches_and_the_step_of_rl() -> None:
    policies = (prediction("static", 10.0, load=2.0), prediction("moe-rl", 7.5, load=1.1))
    said = headline(report(*policies, speedups=(1.33, 1.31, 1.36), rl=rl_gain()))
    assert said.lines == (
        "An RL step is 1.06x to 1.08x as fast with moe-rl as with static placement, saving 6.5% (25 of 384 GPU "
        "hours a day). With static placement, its largest parts are rollout 50%, update 40%, weight sync 10%.",
        "moe-rl makes this update 1.31x to 1.36x as fast as static placement.",
    )


def rl_gain(*, beside: bool = False, speedup: float = 1.07) -> RlGain:
    """A step of RL of 10 s on 16 GPUs under static placement."""

    def step(seconds: float) -> RlStep:
        parts = {"rollout": 5.0, "reward": 0.0, "log_prob": 0.0, "reference": 0.0, "update": seconds - 6.0}
        return RlStep(parts_s={**parts, "framework": 0.0, "offload": 0.0, "weight_sync": 1.0}, beside=beside)

    steps = {"static": step(10.0), "moe-rl": step(10.0 / speedup)}
    return RlGain(speedup=speedup, low=speedup - 0.01, high=speedup + 0.01, gpus=16, steps=steps)


def test_a_step_that_waits_for_the_rollout_gains_nothing() -> None:
    policies = (prediction("static", 10.0, load=2.0), prediction("moe-rl", 7.5, load=1.1))
    waiting = rl_gain(beside=True, speedup=1.0)
    assert waiting.waits_for_rollout
    assert headline(report(*policies, rl=waiting)).title == (
        "This RL step waits for the rollout, so balancing the update saves no time."
    )
    little = headline(report(*policies, rl=rl_gain(speedup=1.003))).title
    assert little.startswith(
        "Balancing the update saves only 29.9 ms (0.30%) of an RL step of 10 s, whose largest parts are rollout 50%"
    )
    tiny = headline(report(*policies, rl=rl_gain(speedup=1.0004))).title
    assert tiny.startswith("Balancing the update saves only 4 ms (0.04%) of an RL step of 10 s")
    for speedup in (1.0, 0.999):
        slower = headline(report(*policies, rl=rl_gain(speedup=speedup))).title
        assert slower.startswith("Balancing the update does not shorten an RL step, whose largest parts are rollout")


def test_whether_it_fits_comes_first_with_the_option_and_its_cost() -> None:
    policies = (prediction("static", 10.0, load=2.0), prediction("moe-rl", 7.5, load=1.1))
    remedy = Remedy(options="--recompute-granularity full", peak_gib=50.1, slower=0.31, speedup=1.174, rl_speedup=1.05)
    misfit = MemoryMisfit(peak_gib=84.4, hbm_gib=79.6, remedy=remedy)
    said = headline(report(*policies, rl=rl_gain(), misfit=misfit))
    assert said.lines == (
        "The run does not fit: the fullest GPU needs 84.4 GiB and has 79.6 GiB. The run fits with "
        "--recompute-granularity full (50.1 GiB). The update then takes 31% longer. With moe-rl, the update is 1.17x "
        "as fast as with static placement, and an RL step 1.05x as fast.",
        "moe-rl makes this update 1.33x as fast as static placement.",
    )
    lost = headline(report(*policies, misfit=replace(misfit, remedy=None)))
    assert lost.title == "The run does not fit: the fullest GPU needs 84.4 GiB and has 79.6 GiB."
    assert "moe-rl tune" in lost.more[0]


def test_a_gain_inside_the_models_error_is_called_no_help() -> None:
    said = headline(report(prediction("static", 10.0, load=2.2), prediction("eplb", 9.8, load=2.1)))
    assert (
        said.title == "No policy gains much: the best one, eplb, makes this update 1.02x as fast as static placement."
    )


def test_a_balanced_step_is_called_balanced() -> None:
    static, eplb = prediction("static", 6.05, load=1.01), prediction("eplb", 6.04, load=1.0)
    said = headline(report(static, eplb))
    assert said.title == "Balancing can gain little: uneven expert loads cost only 0.8% of the time of this update."


def test_static_may_be_the_best_policy() -> None:
    said = headline(report(prediction("static", 10.0, load=2.0), prediction("eplb", 12.0, load=2.0)))
    assert "the best one, static, makes this update 1.00x" in said.title


@pytest.mark.parametrize("shown", [prediction("static", 10.0, load=2.0), untimed(prediction("static", 1, load=2.0))])
def test_static_alone_is_compared_with_nothing(shown: StepPrediction) -> None:
    assert headline(report(shown)).title.startswith("Only static placement was simulated")


def test_equals_are_called_equal() -> None:
    policies = (
        prediction("static", 10.0, load=2.2),
        prediction("ultraep", 7.0, load=1.1),
        prediction("relibra", 7.03, load=1.05),
    )
    assert "relibra is less than 1 % slower than ultraep," in " ".join(headline(report(*policies)).details)


def test_more_than_balanced_routing_is_explained() -> None:
    policies = (prediction("static", 10.0, load=2.2), prediction("moe-rl", 5.5, load=1.02))
    said = headline(report(*policies))
    assert any(
        "reaches 109% of the speed of perfectly balanced routing, for two reasons: packing also" in d
        for d in said.details
    )


def test_the_headline_says_that_loads_are_scaled_and_does_not_start_with_it() -> None:
    title = headline(report(setting=SETTING | {"scaled": True})).title
    assert title == (
        "ultraep makes this update 1.43x as fast as static placement (loads scaled to 8,192 tokens per rank)."
    )


def test_without_times_the_balance_is_compared() -> None:
    policies = tuple(untimed(p) for p in report().policies)
    said = headline(report(*policies, yardsticks=()))
    assert said.title == (
        "ultraep cuts the load of the busiest rank from 2.20 to 1.10 times the mean, which removes 92% of the excess."
    )
    assert "Step times were not computed, because the objective counts token-expert pairs." in said.details


@pytest.mark.parametrize(
    ("static", "best", "expected"),
    [(1.02, 1.0, "Balancing can gain little"), (2.0, 1.99, "No policy improves on static placement")],
)
def test_without_times_too_little_is_called_little(static: float, best: float, expected: str) -> None:
    policies = (untimed(prediction("static", 1, load=static)), untimed(prediction("eplb", 1, load=best)))
    assert headline(report(*policies, yardsticks=())).title.startswith(expected)


def test_without_static_no_speed_up_is_claimed() -> None:
    said = headline(report(prediction("ultraep", 7.0, load=1.1)))
    assert "as fast" not in said.title
    assert "no speed-up is given" in said.details[0]


def limited(
    *, node: float | None = 1.05, placement: float = 1.08, load: float = 1.1, ideal_host: float = 0.0,
    **breakdown: float,
) -> Any:  # fmt: skip
    """The limits of a policy of 7 s beside forced balance of 6 s and a bound of 5 s."""
    parts = {"attention": 3.0, "expert_gemm": 2.0, "all_to_all": 1.0, "reorder": 0.0}
    policies = (
        prediction("static", 10.0, load=2.2),
        replace(prediction("ultraep", 7.0, load=load), breakdown_s=parts | breakdown),
    )
    yardsticks = tuple(
        replace(prediction(name, 6.0, load=1.0), breakdown_s=parts | {"host": ideal_host})
        for name in ("forced_balance", "ideal")
    )
    bounds = BOUNDS | {"ultraep": LoadBounds(lb0=1.0, node=node, placement=placement)}
    found = limits(report(*policies, yardsticks=yardsticks, bounds=bounds))
    assert found is not None
    return found


def test_a_step_without_waiting_is_limited_by_its_kernels() -> None:
    found = limited()
    assert found.verdict == "kernel"
    assert "still take 100% of the time" in found.sentences[0]
    assert found.sentences[1].startswith(
        "The largest parts of the step are attention 50%, expert GEMM 33%, all-to-all 17%."
    )


@pytest.mark.parametrize(
    ("bounds", "verdict", "said"),
    [
        (
            {"node": 1.09, "placement": 1.1},
            "node",
            "replicas inside nodes cannot bring the busiest rank's load below 1.090",
        ),
        ({"node": None, "placement": 1.1}, "node", "the busiest node 1.050"),
        ({"node": 1.01, "placement": 1.1}, "placement", "reaches less than 1.100"),
        ({"node": 1.01, "placement": 1.02}, "split", "reaches 1.020"),
    ],
)
def test_waiting_for_the_busiest_rank_is_put_down_to_the_bound_that_explains_most(
    bounds: dict[str, Any], verdict: str, said: str
) -> None:
    found = limited(**bounds, expert_gemm=3.0)
    expected = "node" if bounds["node"] is None else verdict
    assert found.verdict == expected
    assert found.sentences[0].startswith(f"{verdict.capitalize()}-limited: under ultraep, 14.3% of the step")
    assert said in found.sentences[0]


def test_waits_that_the_host_goes_on_in_are_put_down_to_the_host() -> None:
    """Balance saves 1 s of expert GEMM, for which the host's part grows by as much: the step is no shorter."""
    found = limited(host=1.0, ideal_host=2.0, expert_gemm=3.0)
    assert found.verdict == "host"
    assert found.sentences[0].startswith("Host-limited")
    assert found.seconds["routing"] == 0
    assert limited(host=1.0, ideal_host=1.01).verdict == "kernel"
    half = limited(host=1.0, ideal_host=1.5, expert_gemm=3.0)
    assert half.verdict == "node"
    assert half.seconds["routing"] == pytest.approx(0.5)


def test_waiting_for_long_sequences_is_limited_by_packing() -> None:
    found = limited(attention=4.0)
    assert found.verdict == "packing"
    assert found.sentences[0].startswith("Packing-limited: under ultraep, 14.3% of the step")


def test_a_plan_may_be_limited_by_its_own_cost() -> None:
    assert limited(reorder=0.4, replicate=0.1).verdict == "plan"


def test_the_step_is_cut_without_remainder() -> None:
    found = limited(attention=3.5, expert_gemm=2.5, reorder=0.1, pipeline_bubble=0.4)
    assert sum(found.seconds.values()) == pytest.approx(3.5 + 2.5 + 1.0 + 0.1 + 0.4)
    assert found.seconds["kernels"] == pytest.approx(6.0)


def test_less_time_than_balanced_routing_is_no_negative_waiting() -> None:
    found = limited(all_to_all=0.5)
    assert min(found.seconds.values()) >= 0
    assert found.seconds["kernels"] == pytest.approx(5.5)


def test_the_excess_of_a_plan_is_split_without_remainder() -> None:
    policy = prediction("ultraep", 7.0, load=1.3, node=1.05)
    for node, placement in ((1.1, 1.2), (None, 1.2), (1.2, 1.1), (1.3, 1.3), (1.0, 1.0)):
        excess = LoadBounds(lb0=1.0, node=node, placement=placement).excess(policy)
        assert sum(excess.values()) == pytest.approx(0.3)
        assert min(excess.values()) >= 0.0


def test_without_times_the_bounds_alone_are_judged() -> None:
    def judged(load: float) -> Any:
        policies = (untimed(prediction("static", 1, load=2.2)), untimed(prediction("ultraep", 1, load=load)))
        return limits(report(*policies, yardsticks=(), bounds=BOUNDS))

    assert judged(1.1).verdict == "node"
    assert judged(1.01).verdict == "balanced"
    assert judged(1.1).seconds == {}
