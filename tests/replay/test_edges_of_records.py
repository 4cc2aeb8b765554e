"""Edges of what engines and trainers record: what is missing or one too short, and what makes sequences a group."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import producers
import pytest
from cli_runner import moe_rl
from rollouts import Rollout, assert_routes, make_rollout

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import ImportOptions, TraceReader, open_source

IDS = make_rollout(lengths=(6,)).sequences[0]


def loaded(path: Path, document: Any, **options: Any) -> RoutingTrace:
    """Write JSON or, to a .bin, MessagePack, and read it as a trace of 32 experts in three layers."""
    if path.suffix == ".bin":
        path.write_bytes(producers.msgpack(document))
    else:
        path.write_text(json.dumps(document))
    return open_source(path, options=ImportOptions(num_experts=32, **options)).load()


def refused(path: Path, document: Any, sentence: str, *, format: str, **options: Any) -> None:
    if path.suffix == ".bin":
        path.write_bytes(producers.msgpack(document))
    else:
        path.write_text(json.dumps(document))
    with pytest.raises(InvalidInputError, match=sentence):
        open_source(path, format=format, options=ImportOptions(num_experts=32, **options)).load()


def are_grouped(trace: RoutingTrace) -> list[bool]:
    """Whether each sequence after the first is of the first one's group."""
    groups = trace.group_id.tolist()
    return [group == groups[0] for group in groups[1:]]


# ---- vLLM -----------------------------------------------------------------------------------------------------------


def test_vllm_responses_that_lack_routes_or_mix_shapes_are_refused(tmp_path: Path) -> None:
    def response(**changes: Any) -> dict[str, Any]:
        body = producers.vllm_response(IDS, 3, 32, lists=True)
        body["choices"][0] |= changes
        return body

    for changes, sentence in (
        ({"routed_experts": []}, "routed_experts is empty"),
        ({"routed_experts": None}, "routed_experts is missing"),
        ({"prompt_routed_experts": IDS[:2, :2].tolist()}, "differ in the number of layers or in top-k"),
        ({"prompt_routed_experts": IDS[:2, :, :2].tolist()}, "differ in the number of layers or in top-k"),
    ):
        refused(tmp_path / "t.json", response(**changes), sentence, format="vllm")


def test_vllms_tokens_are_counted_by_ids_or_by_usage(tmp_path: Path) -> None:
    """Of several choices `usage` has the sum, so it says nothing of one: then all rows are routes, and no more."""
    for ids_of in ("prompt_token_ids", "token_ids"):
        body = producers.vllm_response(IDS, 3, 32, lists=True)
        del (body if ids_of == "prompt_token_ids" else body["choices"][0])[ids_of]
        trace = loaded(tmp_path / "t.json", body)
        assert trace.valid.tolist() == [True] * 6 + [False]
    two = producers.vllm_response(IDS, 3, 32, lists=True)
    del two["choices"][0]["token_ids"]
    two["choices"] *= 2
    trace = loaded(tmp_path / "t.json", two)
    assert trace.sequence_lengths.tolist() == [6, 6]
    assert trace.valid.all()


def test_vllms_groups_are_given_or_prompts_or_single_responses(tmp_path: Path) -> None:
    bodies = [producers.vllm_response(IDS, 3, 32, lists=True) for _ in range(3)]
    bodies[2]["prompt_token_ids"] = [8] * 3
    assert are_grouped(loaded(tmp_path / "t.json", bodies)) == [True, False]
    for body, group in zip(bodies, (4, 7, 4), strict=True):
        body["group_id"] = group
    assert are_grouped(loaded(tmp_path / "t.json", bodies)) == [False, True]
    for body in bodies:
        del body["group_id"], body["prompt_token_ids"]
    assert are_grouped(loaded(tmp_path / "t.json", bodies)) == [False, False]


# ---- SGLang ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"num_layers": 3}, {"top_k": 4}, {"num_layers": 3, "top_k": 4}])
def test_either_half_of_sglangs_shape_is_enough(tmp_path: Path, options: dict[str, int]) -> None:
    rollout = Rollout(sequences=[IDS], prompts=[4], num_experts=32)
    assert_routes(loaded(tmp_path / "t.json", producers.sglang_response(IDS, 4), **options), rollout)


def test_sglangs_rows_that_do_not_fit_the_tokens_are_a_misfit_of_the_sequence(tmp_path: Path) -> None:
    """With both halves of the shape the rows are counted, so that the sentence can say how many there are."""
    body = producers.sglang_response(IDS, 4)
    body["meta_info"]["completion_tokens"] += 2
    sentence = r"sequence 0 \(r1\): there are routes for 6 tokens, but 9 tokens"
    refused(tmp_path / "t.json", body, sentence, format="sglang", num_layers=3, top_k=4)
    refused(tmp_path / "t.json", body, "--num-layers or --moe-router-topk is wrong", format="sglang", top_k=4)
    body = producers.sglang_response(IDS, 4)
    wrong = "72 expert ids cannot be the routes of 6 tokens x 3 layers x top-5"
    refused(tmp_path / "t.json", body, wrong, format="sglang", num_layers=3, top_k=5)


def test_a_copy_keeps_the_mean_length_of_prompts_if_every_response_says_it(tmp_path: Path) -> None:
    bodies = [producers.sglang_response(IDS, prompt) for prompt in (1, 4)]
    source, copy = tmp_path / "t.json", tmp_path / "copy.moetrace"
    source.write_text(json.dumps(bodies))
    shape = ("--num-layers", 3, "--moe-router-topk", 4, "--num-experts", 32)
    ran = moe_rl("trace", "convert", source, copy, *shape)
    assert ran.code == 0, ran.err
    response = len(IDS) + 1 - 2.5
    assert f"mean tokens: prompt 2, response {response:.0f}. For an RL step, give rl-step --prompt-tokens 2." in ran.out
    assert TraceReader(copy).manifest.origin["mean_prompt_tokens"] == 2.5
    step = moe_rl("rl-step", copy, "--ep", 4, "--batch", "recorded", "--policy", "static")
    assert "set --prompt-tokens 2, the mean of the recorded prompts." in " ".join((step.out + step.err).split())
    # A trace that knows no prompts, such as an older one, has no such fact.
    np.savez(tmp_path / "u.npz", IDS)
    ran = moe_rl("trace", "convert", tmp_path / "u.npz", tmp_path / "u.moetrace", "--num-experts", 32)
    assert ran.code == 0, ran.err
    assert "mean tokens" not in ran.out
    assert "mean_prompt_tokens" not in TraceReader(tmp_path / "u.moetrace").manifest.origin


def test_sglang_may_be_asked_for_no_row_and_not_for_rows_behind_the_end(tmp_path: Path) -> None:
    bodies = [producers.sglang_response(IDS, 4, start=start) for start in (0, 6)]
    trace = loaded(tmp_path / "t.json", bodies, num_layers=3, top_k=4)
    assert trace.valid.tolist() == [True] * 6 + [False] * 8
    for start, sentence in ((7, "the routes begin at token 7, but the request has only 7 tokens"), (-1, "token -1")):
        bodies[1]["meta_info"]["routed_experts_start_len"] = start
        refused(tmp_path / "t.json", bodies[1], sentence, format="sglang", num_layers=3, top_k=4)


@pytest.mark.parametrize("options", [{"num_layers": 3}, {"top_k": 4}])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_sglangs_responses_without_rows_have_the_shape_of_the_others(
    tmp_path: Path, options: dict[str, int], order: int, suffix: str
) -> None:
    """They do not show the half of the shape that no option states, wherever they stand in the file."""
    bodies = [producers.sglang_response(IDS, 4, start=start) for start in (6, 0)][::order]
    path = tmp_path / f"t{suffix}"
    path.write_text(json.dumps(bodies) if suffix == ".json" else "\n".join(map(json.dumps, bodies)))
    trace = open_source(path, options=ImportOptions(num_experts=32, **options)).load()
    assert trace.valid.tolist() == ([False] * 7 + [True] * 6 + [False] if order == 1 else [True] * 6 + [False] * 8)
    assert trace.routed_experts.shape == (14, 3, 4)


def test_sglangs_file_without_any_row_is_empty_and_lost_rows_are_a_misfit(tmp_path: Path) -> None:
    body = producers.sglang_response(IDS, 4, start=6)
    refused(tmp_path / "t.json", [body], "no token has a recorded route", format="sglang", num_layers=3)
    body = producers.sglang_response(IDS, 4)
    body["meta_info"]["routed_experts"] = ""
    refused(tmp_path / "t.json", [body], "there are routes for 0 tokens, but 7 tokens", format="sglang", top_k=4)


# ---- NeMo-RL --------------------------------------------------------------------------------------------------------


def nemo_record(**changes: Any) -> dict[str, Any]:
    return {"routed_experts": producers.nemo_envelope(producers.nemo_rows(IDS, 9), 32), "valid_length": 7} | changes


def test_nemo_rls_groups_are_given_or_single_records(tmp_path: Path) -> None:
    for name in ("group_id", "idx"):
        records = [nemo_record(**{name: group}) for group in (3, 5, 3)]
        assert are_grouped(loaded(tmp_path / "t.json", records)) == [False, True]
    assert are_grouped(loaded(tmp_path / "t.json", [nemo_record()] * 2)) == [False]


def test_nemo_rls_lengths_are_those_of_the_rows_at_most(tmp_path: Path) -> None:
    assert loaded(tmp_path / "t.json", nemo_record(valid_length=9)).valid.tolist() == [True] * 8 + [False]
    for length in (-1, 10):
        sentence = f"valid_length is {length}, but there are routes for 9 tokens"
        refused(tmp_path / "t.json", nemo_record(valid_length=length), sentence, format="nemo-rl")
    ids = {"prompt_token_ids": [1] * 3, "generation_token_ids": [1] * 4}
    record = nemo_record(**ids)
    del record["valid_length"]
    assert loaded(tmp_path / "t.json", record).sequence_lengths.tolist() == [7]
    del record["generation_token_ids"]
    assert loaded(tmp_path / "t.json", record).sequence_lengths.tolist() == [9]


@pytest.mark.parametrize("shape", ["7x3", "7x3x4x1", "7x3x999999999999", "7x-3x4", "axbxc"])
def test_a_shape_that_no_nemo_rl_writes_is_named(tmp_path: Path, shape: str) -> None:
    record = {"routed_experts": f"nrlre1:int8:{shape}:AAAA"}
    refused(tmp_path / "t.json", record, f"must be <S>x<L>x<K>, got '{shape}'", format="nemo-rl")


def test_nemo_rls_message_logs_without_routes_are_refused(tmp_path: Path) -> None:
    rows = producers.nemo_envelope(producers.nemo_rows(IDS, 7), 32)
    other = producers.nemo_envelope(producers.nemo_rows(IDS[:, :2], 7), 32)
    for log, sentence in (
        ([], "none of the messages has routed_experts"),
        ([{"role": "assistant", "token_ids": [1, 2]}], "none of the messages has routed_experts"),
        ([{"role": "assistant"}], "neither routed_experts nor token_ids"),
        ([{"routed_experts": rows}, {"routed_experts": other}], "differ in the number of layers or in top-k"),
    ):
        refused(tmp_path / "t.json", {"message_log": log}, sentence, format="nemo-rl")


# ---- verl -----------------------------------------------------------------------------------------------------------


def verl_file(path: Path, batch: dict[str, Any]) -> Path:
    torch = pytest.importorskip("torch")
    torch.save(batch, path)
    return path


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ({"input_ids": [[1]]}, "is not a verl batch: it has no routed_experts"),
        ({"routed_experts": np.zeros((2, 3, 4), np.int16)}, r"\[batch, tokens, layers, top-k\], got int16 \[2, 3, 4\]"),
        ({"routed_experts": np.zeros((1, 2, 3, 4), np.float32)}, "got float32"),
        ({"routed_experts": [IDS, IDS], "input_ids": [[1] * 7]}, "input_ids must contain the tokens of every sequence"),
        ({"routed_experts": [IDS], "input_ids": [7]}, "input_ids must contain the tokens of every sequence"),
    ],
)
def test_verls_batches_that_are_none_are_refused(tmp_path: Path, batch: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        open_source(verl_file(tmp_path / "t.pt", batch), format="verl", options=ImportOptions(num_experts=32)).load()


def test_verls_jagged_rows_may_have_tokens_beside_them_or_none(tmp_path: Path) -> None:
    """Without `input_ids` the last row is that of the last token; with them it may be missing."""
    options = ImportOptions(num_experts=32)
    padded = np.concatenate([IDS, np.zeros_like(IDS[:1])])
    for batch in (
        {"routed_experts": [padded, padded]},
        {"routed_experts": [IDS, padded], "input_ids": [[1] * 7, [1] * 7]},
    ):
        trace = open_source(verl_file(tmp_path / "t.pt", batch), options=options).load()
        assert trace.sequence_lengths.tolist() == [7, 7]
        assert trace.valid.tolist() == ([True] * 6 + [False]) * 2


def test_verls_sequences_behind_the_last_uid_have_groups_of_their_own(tmp_path: Path) -> None:
    batch = producers.verl_batch([IDS] * 4, [2] * 4)
    path = verl_file(tmp_path / "t.pt", batch | {"uid": ["a", "a"]})
    assert are_grouped(open_source(path, options=ImportOptions(num_experts=32)).load()) == [True, False, False]


# ---- prime-rl -------------------------------------------------------------------------------------------------------


def test_prime_rls_batches_without_a_sample_or_a_route_are_refused(tmp_path: Path) -> None:
    batch = producers.prime_micro_batch([IDS], 32)
    no_positions = [field for index, field in enumerate(batch) if index != 4]
    for name, document, sentence in (
        ("rollouts.bin", [], "is empty: it has no sequences"),
        ("rollouts.bin", [[]], "is empty: it has no sequences"),
        ("rollouts.bin", [[[[1, 2, 3]]]], "example 0 lacks routed_experts"),
        ("rollouts.bin", [[[]]], "example 0 does not start with token ids"),
        ("rollouts.bin", [[[[True], [1]]]], "example 0 does not start with token ids"),
        ("rank_0.bin", [no_positions], "micro-batch 0 lacks position_ids"),
        ("rank_0.bin", [batch, [None]], "micro-batch 1 does not start with token ids"),
    ):
        refused(tmp_path / name, document, sentence, format="prime-rl")


def test_prime_rls_samples_are_found_in_the_fields_of_any_version(tmp_path: Path) -> None:
    rollout = Rollout(sequences=[IDS] * 2, prompts=[4] * 2, num_experts=32)
    new = producers.prime_sample(IDS, 32, aligned=True)
    trace = loaded(tmp_path / "rollouts.bin", [[[new[0], new[-1]], new]])
    assert_routes(trace, rollout)
    assert are_grouped(trace) == [False], "equal tokens are no prompt"
    batch = producers.prime_micro_batch([IDS, IDS], 32, padding=3)
    for position in (1, 2, len(batch)):
        fields = [field for index, field in enumerate(batch) if index != 4]
        fields.insert(position, batch[4])
        assert_routes(loaded(tmp_path / "rank_0.bin", [fields]), rollout)


def test_prime_rls_padding_is_a_sequence_at_the_end_and_never_the_only_one(tmp_path: Path) -> None:
    batch = producers.prime_micro_batch([IDS], 32)
    batch[0] = [1] * len(batch[0])
    trace = loaded(tmp_path / "rank_0.bin", [batch])
    assert trace.sequence_lengths.tolist() == [7]


def test_prime_rls_json_has_tokens_in_one_list_or_two_or_none(tmp_path: Path) -> None:
    data, shape, dtype = producers.prime_routes(IDS, 32)
    routes = {"data": base64.b64encode(data).decode(), "shape": shape, "dtype": dtype}
    two = {"prompt_ids": [5, 6], "completion_ids": [7] * 5, "routed_experts": routes}
    trace = loaded(tmp_path / "t.json", [two, two, two | {"prompt_ids": [6, 6]}])
    assert trace.valid.tolist() == ([True] * 6 + [False]) * 3
    assert are_grouped(trace) == [True, False]
    for record in ({"routed_experts": routes}, {"routed_experts": routes, "prompt_ids": [5, 6]}):
        assert loaded(tmp_path / "t.json", record).valid.tolist() == [True] * 6
    flat = {"token_ids": [1] * 7, "routed_experts": routes | {"shape": [6, 12]}}
    refused(tmp_path / "t.json", flat, "the shape of routed_experts must have three dimensions", format="prime-rl")
