"""The kernel benchmark catches wrong kernels and knows the models' real shapes."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="kernel benchmarks need torch")
pytest.importorskip("triton", reason="kernel benchmarks need triton")

import torch

from benchmarks.operators import cases, harness
from benchmarks.operators.gemm_suites import ALL_SUITES
from benchmarks.operators.roofline import Roofline, Work
from moe_rl.config import load_model
from moe_rl.kernels import operators

pytestmark = pytest.mark.triton

ROOT = Path(__file__).resolve().parent.parent


RATES = Roofline(device="cpu", fill_gb_per_s=1.0, copy_gb_per_s=1.0, bf16_tflops=1.0, fp8_tflops=None)
EXPECTED = torch.arange(1.0, 13.0).reshape(3, 4)


def problem(call: object, **settings: object) -> object:
    case = cases.Case(model=cases.TINY, tokens=3)
    return harness.Problem(
        operator="double", variant="plain", case=case, work=Work(bytes_moved=96), of_pass="forward",
        calls={"triton": call}, expected=lambda: (EXPECTED,), **settings,
    )  # fmt: skip


def rows(made: object, roofline: Roofline | None = None) -> list[dict[str, object]]:
    return list(harness.run_problem(made, roofline, budget_s=0.0))


def test_the_shapes_are_those_of_the_models() -> None:
    for shape in cases.MODELS.values():
        spec = load_model(shape.name).spec
        assert (shape.num_experts, shape.top_k) == (spec.num_experts, spec.top_k)
        assert (shape.hidden, shape.intermediate) == (spec.hidden_size, spec.moe_ffn_hidden_size)
        assert shape.is_oai == (spec.activation == "swiglu_oai")
        assert shape.num_experts % shape.ep_size == 0


def test_a_right_result_is_timed() -> None:
    (row,) = rows(problem(lambda: (EXPECTED.clone(),)), RATES)
    assert row["passed"] is True
    assert row["clock"] == "perf_counter on the CPU"
    assert "| double | plain | forward | tiny T3 uniform | triton |" in harness.table([row])


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda good: good[:2], "shape"),
        (lambda good: good.index_fill(0, torch.tensor([1]), float("nan")), "4 values are not finite"),
        (lambda good: good * torch.tensor([[1.0], [1.001], [1.0]]), r"row \(1,\) errs by 0.001"),
    ],
)
def test_a_wrong_result_is_reported_and_not_timed(damage: object, sentence: str) -> None:
    (row,) = rows(problem(lambda: (damage(EXPECTED),)), RATES)
    assert row["passed"] is False
    assert re.search(sentence, str(row["problem"]))
    assert "time_us" not in row


def test_one_differing_bit_fails_where_bits_are_promised() -> None:
    (row,) = rows(problem(lambda: (EXPECTED.nextafter(torch.tensor(9e9)),), bitwise=True))
    assert "12 of 12 values differ in their bits" in str(row["problem"])
    (row,) = rows(problem(lambda: (EXPECTED.nextafter(torch.tensor(9e9)),)))
    assert row["passed"] is True


def test_a_result_that_differs_between_runs_fails() -> None:
    results = iter([EXPECTED, EXPECTED.nextafter(torch.tensor(9e9))])
    (row,) = rows(problem(lambda: (next(results),)))
    assert row["problem"] == "1 of 1 more runs differ from the first"


def test_a_provider_that_raises_fails_and_leaves_the_others_their_rows() -> None:
    def broken() -> object:
        raise RuntimeError("misaligned address")

    made = problem(broken)
    first, second = rows(harness.replace(made, calls={"triton": broken, "reference": lambda: (EXPECTED,)}))
    assert (first["passed"], first["problem"]) == (False, "RuntimeError: misaligned address")
    assert second["passed"] is True


def test_only_peers_may_use_the_wider_limit() -> None:
    made = problem(lambda: (EXPECTED * 1.001,), peer_limit=2.0**-8)
    (row,) = rows(made)
    assert row["passed"] is False
    (row,) = rows(harness.replace(made, calls={"torch": made.calls["triton"]}))
    assert row["passed"] is True


def test_every_routing_gives_ids_of_the_model_and_the_hot_expert_gets_every_token() -> None:
    model = cases.MODELS["qwen3-30b-a3b"]
    for routing in cases.ROUTINGS:
        ids = cases.Case(model=model, tokens=64, routing=routing).routes(64, "cpu")
        assert tuple(ids.shape) == (64, model.top_k)
        assert 0 <= int(ids.min()) <= int(ids.max()) < model.num_experts
        assert all(len(set(row)) == model.top_k for row in ids.tolist())
    hot = cases.Case(model=model, tokens=64, routing="hot").routes(64, "cpu")
    assert bool((hot == 0).any(dim=1).all())
    assert not cases.can_replay(cases.BUNDLED_TRACE, cases.MODELS["deepseek-v3"])


def test_sizes_of_rank_0_are_the_pairs_of_its_slots() -> None:
    case = cases.Case(model=cases.TINY, tokens=40, routing="zipf")
    ids = case.routes(40 * cases.TINY.ep_size, "cpu")
    sizes = case.m_offsets("cpu").diff().tolist()
    assert sizes == [int((ids == slot).sum()) for slot in range(cases.TINY.num_slots)]


def test_every_registered_operator_has_a_check() -> None:
    """An operator without a suite would pass by not being looked at."""
    batch = [cases.Case(model=model, tokens=4) for model in (cases.TINY, cases.TINY_OAI)]
    named = [
        {"operator": made.operator} for build in ALL_SUITES.values() for case in batch for made in build(case, "cpu")
    ]
    assert {operator.name for operator in operators()} <= {str(row["operator"]) for row in named}
