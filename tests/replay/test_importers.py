"""Every importer gives back the routes that its producer wrote, and marks rows without a route by their position."""

import base64
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import producers
import pytest
import torch
from hypothesis import given
from rollouts import Rollout, assert_routes, make_rollout, rollouts

from moe_rl.core.errors import InvalidInputError
from moe_rl.replay import ImportOptions, open_source, recorded_sequences


@given(rollout=rollouts())
def test_npz_rows_are_all_routes(rollout: Rollout) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.npz"
        producers.write_npz(path, rollout.sequences, rollout.num_experts)
        source = open_source(path, options=ImportOptions(num_experts=rollout.num_experts))
        trace = source.load()
        assert trace.valid.all()
        np.testing.assert_array_equal(trace.routed_experts, np.concatenate(rollout.sequences))
        names = [record.name for record in recorded_sequences(path)]
        assert names == [f"suite|c{i}|True_False" for i in range(len(rollout.sequences))]
        assert len(set(trace.group_id.tolist())) == len(rollout.sequences)


@pytest.mark.parametrize("field", ["routed_experts", "experts"])
def test_json_lines_of_ones_own_records_name_their_lists_as_they_like(tmp_path: Path, field: str) -> None:
    rollout = make_rollout(lengths=(3, 2, 4))
    records = [{"prompt_id": index // 2, field: ids.tolist()} for index, ids in enumerate(rollout.sequences)]
    producers.write_json_lines(tmp_path / "t.jsonl", records)
    (tmp_path / "list.json").write_text(json.dumps(records))
    for name in ("t.jsonl", "list.json"):
        trace = open_source(tmp_path / name, options=ImportOptions(num_experts=32)).load()
        np.testing.assert_array_equal(trace.routed_experts, np.concatenate(rollout.sequences))
        assert trace.group_id.tolist() == [0, 0, 1]
    lines = [json.dumps(ids.tolist()) for ids in rollout.sequences]
    (tmp_path / "bare.jsonl").write_text("\n".join(lines))
    trace = open_source(tmp_path / "bare.jsonl", options=ImportOptions(num_experts=32)).load()
    np.testing.assert_array_equal(trace.routed_experts, np.concatenate(rollout.sequences))


def test_a_record_with_two_lists_of_routes_is_refused(tmp_path: Path) -> None:
    ids = make_rollout(lengths=(3,)).sequences[0].tolist()
    producers.write_json_lines(tmp_path / "t.jsonl", [{"experts": ids, "again": ids}])
    with pytest.raises(
        InvalidInputError, match=r"record 0: exactly one field must contain nested lists.*experts, again"
    ):
        open_source(tmp_path / "t.jsonl", options=ImportOptions(num_experts=32))


def test_stuck_rows_and_shared_prompts_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Sequence 0 holds one row 20 times; 1 and 2 begin alike. Without groups both are said, with groups the first."""
    ids = [routes.copy() for routes in make_rollout(lengths=(40, 40, 40, 40)).sequences]
    ids[0][20:] = ids[0][20]
    ids[2][:10] = ids[1][:10]
    np.savez(tmp_path / "alone.npz", **{f"s{index}": routes for index, routes in enumerate(ids)})
    np.savez(tmp_path / "groups.npz", **{f"group{index // 3}_{index}": routes for index, routes in enumerate(ids)})
    open_source(tmp_path / "alone.npz", options=ImportOptions(num_experts=32))
    assert "in 1 of 4 sequences (the first is sequence 0), at least" in caplog.text
    assert "2 of 4 sequences share the routes of their first 8 tokens with another sequence." in caplog.text
    caplog.clear()
    open_source(tmp_path / "groups.npz", options=ImportOptions(num_experts=32))
    assert "consecutive tokens have the same routes" in caplog.text
    assert "share the routes" not in caplog.text


def test_npz_prompt_lengths_add_rows_without_a_route(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(3, 2))
    producers.write_npz(tmp_path / "t.npz", rollout.sequences, 32)
    options = ImportOptions(num_experts=32, prompt_lengths=(2, 0))
    trace = open_source(tmp_path / "t.npz", options=options).load()
    assert trace.sequence_lengths.tolist() == [5, 2]
    assert trace.valid.tolist() == [False, False, True, True, True, True, True]


def test_npz_keys_that_name_a_group_share_it(tmp_path: Path) -> None:
    ids = make_rollout().sequences[0].astype(np.uint8)
    np.savez(tmp_path / "t.npz", **{"group1/a": ids, "group12/a": ids, "group1/b": ids, "other": ids})
    group_id = open_source(tmp_path / "t.npz").load().group_id.tolist()
    assert group_id[0] == group_id[2]
    assert len(set(group_id)) == 3


def test_the_development_trace_is_read_as_documented(dev_trace_path: Path) -> None:
    source = open_source(dev_trace_path)
    assert (source.num_experts, source.top_k, source.moe_layer_ids) == (32, 4, tuple(range(24)))
    assert source.inferred_fields == ("num_experts",)
    with np.load(dev_trace_path) as arrays:
        assert [record.name for record in recorded_sequences(dev_trace_path)] == list(arrays)
        np.testing.assert_array_equal(source.load().routed_experts, np.concatenate([arrays[key] for key in arrays]))


def test_experts_are_inferred_as_a_power_of_two_and_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = np.array([[[0, 5]], [[17, 3]]], np.uint8)
    np.savez(tmp_path / "t.npz", a=ids)
    with caplog.at_level(logging.WARNING):
        source = open_source(tmp_path / "t.npz")
    assert source.num_experts == 32
    assert source.inferred_fields == ("num_experts",)
    assert "assumes 32" in caplog.text


# ---- vLLM -----------------------------------------------------------------------------------------------------------


def test_vllm_npy_is_taken_as_it_is(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(6,))
    (tmp_path / "t.npy").write_bytes(producers.npy_bytes(rollout.sequences[0].astype(np.uint8)))
    trace = open_source(tmp_path / "t.npy", options=rollout.options()).load()
    np.testing.assert_array_equal(trace.routed_experts, rollout.sequences[0])
    assert trace.valid.all()


def test_vllm_lists_may_be_indented(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(6,))
    body = producers.vllm_response(rollout.sequences[0], 3, 32, lists=True)
    (tmp_path / "t.json").write_text(json.dumps(body, indent=2))
    assert_routes(open_source(tmp_path / "t.json", options=rollout.options()).load(), rollout)


def test_vllm_samples_of_one_prompt_are_a_group(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(5, 6, 7))
    bodies = [producers.vllm_response(ids, 3, 32) for ids in rollout.sequences]
    bodies[2]["prompt_token_ids"] = [8, 8, 8]
    producers.write_json_lines(tmp_path / "t.jsonl", bodies)
    group_id = open_source(tmp_path / "t.jsonl", options=rollout.options()).load().group_id.tolist()
    assert group_id[0] == group_id[1] != group_id[2]


def test_vllm_choices_of_one_response_are_a_group(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(5, 6))
    first, second = (producers.vllm_response(ids, 3, 32) for ids in rollout.sequences)
    first["choices"] += second["choices"]
    first["usage"]["completion_tokens"] = 7
    producers.write_json_lines(tmp_path / "t.jsonl", [first])
    trace = open_source(tmp_path / "t.jsonl", options=rollout.options()).load()
    assert_routes(trace, rollout)
    assert len(set(trace.group_id.tolist())) == 1


def test_vllm_rows_that_do_not_fit_the_tokens_are_refused(tmp_path: Path) -> None:
    body = producers.vllm_response(make_rollout(lengths=(6,)).sequences[0], 2, 32)
    body["choices"][0]["token_ids"] += [1, 1]
    producers.write_json_lines(tmp_path / "t.jsonl", [body])
    with pytest.raises(
        InvalidInputError, match=r"t\.jsonl, sequence 0 \(chatcmpl-1\): there are routes for 6 tokens, but 9 tokens"
    ):
        open_source(tmp_path / "t.jsonl")


def test_vllm_rows_before_the_asked_start_have_no_route(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(6,))
    body = producers.vllm_response(rollout.sequences[0][2:], 1, 32)
    body |= {"routed_experts_prompt_start": 2, "prompt_token_ids": [7] * 3}
    producers.write_json_lines(tmp_path / "t.jsonl", [body])
    trace = open_source(tmp_path / "t.jsonl", options=rollout.options()).load()
    assert trace.valid.tolist() == [False, False, True, True, True, True, False]
    np.testing.assert_array_equal(trace.routed_experts[2:6], rollout.sequences[0][2:])


def test_rows_of_the_profile_run_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rollout = make_rollout(lengths=(200,))
    ids = rollout.sequences[0]
    with caplog.at_level(logging.WARNING):
        producers.write_npz(tmp_path / "good.npz", [ids], 32)
        open_source(tmp_path / "good.npz", options=rollout.options())
        assert not caplog.records
        ids[:70] = ids[0]
        producers.write_npz(tmp_path / "bad.npz", [ids], 32)
        open_source(tmp_path / "bad.npz", options=rollout.options())
    assert "35 % of the tokens have the same expert ids" in caplog.text


# ---- SGLang ---------------------------------------------------------------------------------------------------------


def test_sglang_rows_start_where_asked(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(6,), dense=1)
    body = producers.sglang_response(rollout.sequences[0], 4, dense=1, start=3)
    (tmp_path / "t.json").write_text(json.dumps(body))
    trace = open_source(tmp_path / "t.json", options=rollout.options(top_k=4)).load()
    assert trace.valid.tolist() == [False] * 3 + [True] * 3 + [False]
    np.testing.assert_array_equal(trace.routed_experts[3:6], rollout.sequences[0][3:])


@pytest.mark.parametrize(
    ("options", "message"), [({}, "set --num-layers"), ({"top_k": 5}, "--num-layers or --moe-router-topk is wrong")]
)
def test_sglang_needs_the_shape(tmp_path: Path, options: dict[str, int], message: str) -> None:
    body = producers.sglang_response(make_rollout(lengths=(6,)).sequences[0], 4)
    (tmp_path / "t.json").write_text(json.dumps(body))
    with pytest.raises(InvalidInputError, match=message):
        open_source(tmp_path / "t.json", options=ImportOptions(**options))


def test_sglang_openai_responses_have_an_extension(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(6,))
    meta = producers.sglang_response(rollout.sequences[0], 4)["meta_info"]
    body = {
        "choices": [{"index": 0, "message": {"content": "..."}}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 3},
        "sglext": {"routed_experts": meta["routed_experts"]},
    }
    (tmp_path / "t.json").write_text(json.dumps(body))
    assert_routes(open_source(tmp_path / "t.json", options=rollout.options(top_k=4)).load(), rollout)


# ---- NeMo-RL --------------------------------------------------------------------------------------------------------


def test_nemo_rl_missing_rows_have_no_route_and_tails_are_found_by_position(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(6,))
    # A route that looks exactly like the filler is still a route.
    rollout.sequences[0][3] = np.arange(4)
    rows = producers.nemo_rows(rollout.sequences[0], 10, missing=[1, 4])
    record = {"routed_experts": producers.nemo_envelope(rows, 32), "valid_length": 7}
    producers.write_json_lines(tmp_path / "t.jsonl", [record])
    trace = open_source(tmp_path / "t.jsonl", options=rollout.options()).load()
    assert trace.valid.tolist() == [True, False, True, True, False, True, False]


def test_nemo_rl_chat_choices_have_one_row_per_token(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(6,))
    envelope = producers.nemo_envelope(producers.nemo_rows(rollout.sequences[0], 7), 32)
    producers.write_json_lines(tmp_path / "t.jsonl", [{"choices": [{"message": {"routed_experts": envelope}}]}])
    assert_routes(open_source(tmp_path / "t.jsonl", options=rollout.options()).load(), rollout)


def test_nemo_rl_message_logs_end_with_the_last_assistant_message(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(6,))
    rows = producers.nemo_rows(rollout.sequences[0], 10)
    log = [
        {"role": "user", "token_ids": [1, 2]},
        {"role": "assistant", "token_ids": [1] * 5, "routed_experts": producers.nemo_envelope(rows[2:7], 32)},
        {"role": "environment", "token_ids": [1] * 3, "routed_experts": producers.nemo_envelope(rows[7:], 32)},
    ]
    producers.write_json_lines(tmp_path / "t.jsonl", [{"message_log": log, "idx": 5}])
    trace = open_source(tmp_path / "t.jsonl", options=rollout.options()).load()
    assert trace.valid.tolist() == [False, False, True, True, True, True, False]
    np.testing.assert_array_equal(trace.routed_experts[2:6], rollout.sequences[0][2:])


@pytest.mark.parametrize(
    "envelope",
    [
        "nrlre1:int8:2x1x2",
        "nrlre1:float32:2x1x2:AAAA",
        "nrlre1:int8:2x1:AAAA",
        "nrlre1:int8:2x-1x2:AAAA",
        "nrlre1:int8:9999999999x9999999999x9999999999:AAAA",
        "nrlre1:int8:2x1x2:AAA",
        "nrlre1:int8:2x1x2:AA!A",
        "nrlre2:int8:2x1x2:AAAAAA==",
    ],
)
def test_nemo_rl_broken_envelopes_are_refused(tmp_path: Path, envelope: str) -> None:
    producers.write_json_lines(tmp_path / "t.jsonl", [{"routed_experts": envelope}])
    with pytest.raises(InvalidInputError, match="record 0"):
        open_source(tmp_path / "t.jsonl", format="nemo-rl")


# ---- verl -----------------------------------------------------------------------------------------------------------


def test_verl_needs_the_mask_to_know_the_padding(tmp_path: Path) -> None:
    batch = producers.verl_batch(make_rollout().sequences, [2, 1, 3])
    torch.save({"routed_experts": torch.from_numpy(batch["routed_experts"])}, tmp_path / "t.pt")
    with pytest.raises(InvalidInputError, match="routed_experts needs an attention_mask"):
        open_source(tmp_path / "t.pt")


def test_verl_prompt_groups_and_steps_are_kept(tmp_path: Path) -> None:
    rollout = make_rollout()
    batch: dict[str, Any] = producers.verl_batch(rollout.sequences, [2, 1, 3])
    batch |= {"uid": np.array(["a", "b", "a"], object).tolist(), "global_steps": 12}
    torch.save(batch, tmp_path / "t.pt")
    trace = open_source(tmp_path / "t.pt", options=rollout.options()).load()
    assert trace.group_id[0] == trace.group_id[2] != trace.group_id[1]
    assert trace.step.tolist() == [12] * 3


def test_verl_rows_without_a_token_are_left_out(tmp_path: Path) -> None:
    rollout = make_rollout()
    batch: dict[str, Any] = producers.verl_batch(rollout.sequences, [2, 1, 3])
    batch["attention_mask"][0] = 0
    batch["uid"] = ["a", "b", "b"]
    torch.save(batch, tmp_path / "t.pt")
    trace = open_source(tmp_path / "t.pt", options=rollout.options()).load()
    assert trace.sequence_lengths.tolist() == [3, 10]
    assert trace.group_id[0] == trace.group_id[1]


def test_verl_holes_in_the_mask_are_refused(tmp_path: Path) -> None:
    batch = producers.verl_batch(make_rollout().sequences, [2, 1, 3])
    batch["attention_mask"][2, 4] = 0
    torch.save(batch, tmp_path / "t.pt")
    with pytest.raises(InvalidInputError, match="has a gap inside a sequence"):
        open_source(tmp_path / "t.pt")


def test_verl_nested_tensors_say_how_to_save_them(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 1, 2), torch.zeros(3, 1, 2)], layout=torch.jagged)
    torch.save({"routed_experts": nested}, tmp_path / "t.pt")
    with pytest.raises(InvalidInputError, match="Save the list of its parts"):
        open_source(tmp_path / "t.pt")


# ---- slime and miles ------------------------------------------------------------------------------------------------


def test_slime_layout_comes_from_the_train_dump(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(5, 2, 9, 4))
    torch.save({"rollout_id": 3, "samples": producers.slime_samples(rollout.sequences)}, tmp_path / "3.pt")
    (tmp_path / "train").mkdir()
    dump = producers.slime_train_dump(3, [[2, 0], [3, 1]], [[[0], [1]], [[0, 1], []]])
    torch.save(dump, tmp_path / "train" / "3.pt")
    for layout in (tmp_path / "train", tmp_path / "train" / "3.pt"):
        source = open_source(tmp_path / "3.pt", options=rollout.options(layout_path=layout))
        trace = source.load()
        assert_routes(trace, rollout)
        assert trace.dp_rank.tolist() == [0, 1, 0, 1]
        assert trace.micro_batch.tolist() == [1, 0, 0, 0]
        assert trace.step.tolist() == [3] * 4
        assert trace.group_id[0] == trace.group_id[1] != trace.group_id[2] == trace.group_id[3]


def test_slime_optimizer_steps_become_steps(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(5, 2, 9, 4))
    torch.save({"rollout_id": 3, "samples": producers.slime_samples(rollout.sequences)}, tmp_path / "3.pt")
    dump = producers.slime_train_dump(3, [[0, 2, 3]], [[[0], [1], [2]]])
    dump["dp_shards"][0]["num_microbatches"] = [2, 1]
    torch.save(dump, tmp_path / "t.pt")
    source = open_source(tmp_path / "3.pt", options=rollout.options(layout_path=tmp_path / "t.pt"))
    trace = source.load()
    assert trace.sequence_lengths.tolist() == [6, 10, 5]
    assert trace.step.tolist() == [6, 6, 7]
    assert trace.micro_batch.tolist() == [0, 1, 0]
    assert source.steps == (6, 7)
    assert source.load(7).num_sequences == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(rollout_id=4), "belongs to rollout 4, but the samples belong to rollout 3"),
        (lambda d: d.pop("dp_shards"), "it has no dp_shards"),
        (lambda d: d["dp_shards"][0].update(partition=[0, 0]), "sample 0 appears in two micro-batches"),
        (lambda d: d["dp_shards"][0].update(partition=[0, 9]), "not in the rollout dump"),
        (lambda d: d["dp_shards"][0].update(micro_batch_indices=[[0], [7]]), "contains 7, which is not an index"),
        (lambda d: d["dp_shards"][0].update(num_microbatches=[5]), "do not add up"),
        (lambda d: d["dp_shards"][0].update(data_parallel_rank="0"), "must be an integer"),
    ],
)
def test_slime_layouts_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    rollout = make_rollout(lengths=(5, 2))
    torch.save({"rollout_id": 3, "samples": producers.slime_samples(rollout.sequences)}, tmp_path / "3.pt")
    dump = producers.slime_train_dump(3, [[0], [1]], [[[0]], [[0]]])
    dump["dp_shards"] = [dump["dp_shards"][0] | {"partition": [0, 1], "micro_batch_indices": [[0], [1]]}]
    dump["dp_shards"][0]["num_microbatches"] = [2]
    change(dump)
    torch.save(dump, tmp_path / "t.pt")
    with pytest.raises(InvalidInputError, match=message):
        open_source(tmp_path / "3.pt", options=rollout.options(layout_path=tmp_path / "t.pt"))


def test_slime_folders_are_read_in_the_order_of_rollouts(tmp_path: Path) -> None:
    rollouts_by_id = {number: make_rollout(number, (3, 4)) for number in (10, 2)}
    for number, rollout in rollouts_by_id.items():
        torch.save(
            {"rollout_id": number, "samples": producers.slime_samples(rollout.sequences)}, tmp_path / f"{number}.pt"
        )
    source = open_source(tmp_path, options=make_rollout().options())
    assert source.steps == (2, 10)
    for number, rollout in rollouts_by_id.items():
        assert_routes(source.load(number), rollout)


def test_slime_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInputError, match=r"empty does not contain any .pt file"):
        open_source(tmp_path / "empty", format="slime")
    rollout = make_rollout(lengths=(5, 2))
    torch.save({"rollout_id": 3, "samples": producers.slime_samples(rollout.sequences)}, tmp_path / "3.pt")
    for layout, message in (("absent", "absent does not exist"), ("empty", "empty does not contain 3.pt")):
        with pytest.raises(InvalidInputError, match=message):
            open_source(tmp_path / "3.pt", options=rollout.options(layout_path=tmp_path / layout))


def test_miles_surplus_rows_and_missing_rows_have_no_route(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(5,))
    samples = producers.slime_samples(rollout.sequences)
    ids = samples[0]["rollout_routed_experts"]
    ids[2] = -1
    samples[0]["rollout_routed_experts"] = np.concatenate([ids, ids[:1]])
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "0.pt")
    trace = open_source(tmp_path / "0.pt", options=rollout.options()).load()
    assert trace.valid.tolist() == [True, True, False, True, True, False]


def test_rows_half_missing_are_refused(tmp_path: Path) -> None:
    samples = producers.slime_samples(make_rollout(lengths=(5,)).sequences)
    samples[0]["rollout_routed_experts"][2, 1, 0] = -1
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "0.pt")
    with pytest.raises(InvalidInputError, match="has the negative expert id -1 at token 2"):
        open_source(tmp_path / "0.pt")


def test_capture_holes_are_refused_unless_masked(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(5,))
    rollout.sequences[0][1:3] = 0
    torch.save({"rollout_id": 0, "samples": producers.slime_samples(rollout.sequences)}, tmp_path / "0.pt")
    with pytest.raises(InvalidInputError, match=r"routes of 2 of 5 tokens \(first: token 1\).*--mask-capture-holes"):
        open_source(tmp_path / "0.pt", options=rollout.options())
    trace = open_source(tmp_path / "0.pt", options=rollout.options(mask_capture_holes=True)).load()
    assert trace.valid.tolist() == [True, False, False, True, True, False]


# ---- prime-rl -------------------------------------------------------------------------------------------------------


def test_prime_rl_ranks_and_steps_come_from_the_paths(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(3, 5, 4, 2))
    for step in (9, 10):
        (tmp_path / f"step_{step}").mkdir()
        for rank in (0, 1):
            batches = [producers.prime_micro_batch([ids], 32) for ids in rollout.sequences[2 * rank : 2 * rank + 2]]
            (tmp_path / f"step_{step}" / f"rank_{rank}.bin").write_bytes(producers.msgpack(batches))
    source = open_source(tmp_path, options=rollout.options())
    assert source.steps == (9, 10)
    trace = source.load(10)
    assert_routes(trace, rollout)
    assert trace.dp_rank.tolist() == [0, 0, 1, 1]
    assert trace.micro_batch.tolist() == [0, 1, 0, 1]


def test_prime_rl_older_samples_have_prompt_and_completion(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(5, 7))
    samples = []
    for ids in rollout.sequences:
        new = producers.prime_sample(ids, 32, aligned=False)
        count = len(ids) + 1
        samples.append([[4, 4], [False] * 2, [6] * (count - 2), [True] * (count - 2), [0.0] * (count - 2), new[-1]])
    (tmp_path / "rollouts.bin").write_bytes(producers.msgpack([samples, 1.0, 3]))
    trace = open_source(tmp_path / "rollouts.bin", options=rollout.options()).load()
    assert_routes(trace, rollout)
    assert len(set(trace.group_id.tolist())) == 1


def test_prime_rl_routes_as_json(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(6,))
    data, shape, dtype = producers.prime_routes(rollout.sequences[0], 32)
    payload = {"data": base64.b64encode(data).decode(), "shape": shape, "dtype": dtype}
    producers.write_json_lines(tmp_path / "t.jsonl", [{"token_ids": [1] * 7, "routed_experts": payload}])
    source = open_source(tmp_path / "t.jsonl", options=rollout.options())
    assert source.format == "prime-rl"
    assert_routes(source.load(), rollout)


# ---- Megatron -------------------------------------------------------------------------------------------------------


def write_megatron(
    folder: Path, rollout: Rollout, ranks: int, *, recompute: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
) -> None:
    """Sequence i is micro-batch i // ranks of rank i % ranks; two steps of the same."""
    for rank in range(ranks):
        records = []
        for step in (0, 1):
            for ids in rollout.sequences[rank::ranks]:
                forward = producers.megatron_records(ids, step=step, rank=rank, first_layer=rollout.dense)
                records += recompute(forward)
                records += producers.megatron_records(ids[:, :1], step=step, rank=rank, block="mtp")
        producers.write_json_lines(folder / f"router_trace_rank{rank}.jsonl", records)


def test_megatron_numbers_its_layers_so_dense_ones_are_the_models(tmp_path: Path) -> None:
    """Records of dense layers do not exist: `first_k_dense` must not drop MoE layers instead."""
    rollout = make_rollout(lengths=(4, 6), dense=1)
    write_megatron(tmp_path, rollout, 1, recompute=lambda records: records)
    source = open_source(tmp_path, options=ImportOptions(num_experts=32, first_k_dense=1))
    assert source.moe_layer_ids == (1, 2, 3)
    np.testing.assert_array_equal(source.load(0).routed_experts, np.concatenate(rollout.sequences))
    alone = open_source(tmp_path / "router_trace_rank0.jsonl", options=ImportOptions(num_experts=32))
    assert (alone.format, alone.steps) == ("megatron", (0, 1))


@pytest.mark.parametrize("twice", [False, True])
def test_megatron_micro_batches_follow_from_the_order(
    tmp_path: Path, twice: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rollout = make_rollout(lengths=(4, 6, 3, 5), dense=1)
    write_megatron(tmp_path, rollout, 2, recompute=lambda records: records * (1 + twice))
    with caplog.at_level(logging.WARNING):
        source = open_source(tmp_path, options=ImportOptions(num_experts=32))
    assert ("records repeated by activation recomputation were left out" in caplog.text) == twice
    assert source.provenance == "live"
    assert source.moe_layer_ids == (1, 2, 3)
    assert source.steps == (0, 1)
    trace = source.load(1)
    assert trace.valid.all()
    assert trace.dp_rank.tolist() == [0, 0, 1, 1]
    assert trace.micro_batch.tolist() == [0, 1, 0, 1]
    expected = [rollout.sequences[index] for index in (0, 2, 1, 3)]
    np.testing.assert_array_equal(trace.routed_experts, np.concatenate(expected))


def test_megatron_recompute_of_some_layers_is_recognized(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(4, 6))
    write_megatron(tmp_path, rollout, 1, recompute=lambda records: [*records, records[1]])
    trace = open_source(tmp_path, options=rollout.options()).load(0)
    np.testing.assert_array_equal(trace.routed_experts, np.concatenate(rollout.sequences))


def test_megatron_recompute_that_cannot_be_told_is_refused(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(4, 6))
    first = {"left": 1}

    def only_once(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        first["left"] -= 1
        return records * 2 if first["left"] == 0 else records

    write_megatron(tmp_path, rollout, 1, recompute=only_once)
    with pytest.raises(InvalidInputError, match="Record without activation recomputation"):
        open_source(tmp_path)


def test_megatron_micro_batches_without_a_token_are_kept(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(0, 4, 0, 0, 3))
    write_megatron(tmp_path, rollout, 1, recompute=list)
    assert open_source(tmp_path, options=rollout.options()).load(0).sequence_lengths.tolist() == [0, 4, 0, 0, 3]
    write_megatron(tmp_path, rollout, 1, recompute=lambda records: records * 2)
    assert open_source(tmp_path, options=rollout.options()).load(0).sequence_lengths.tolist() == [0, 4, 0, 0, 3]


def test_megatron_pipeline_stages_are_joined(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(4, 6), layers=4)
    for rank, half in enumerate((slice(0, 2), slice(2, 4))):
        records = [
            record
            for ids in rollout.sequences
            for record in producers.megatron_records(ids[:, half], step=0, rank=rank)
        ]
        producers.write_json_lines(tmp_path / f"router_trace_rank{rank}.jsonl", records)
    trace = open_source(tmp_path, options=ImportOptions(num_experts=32, pipeline_size=2)).load()
    assert trace.moe_layer_ids == (0, 1, 2, 3)
    assert set(trace.dp_rank.tolist()) == {0}
    np.testing.assert_array_equal(trace.routed_experts, np.concatenate(rollout.sequences))


def test_megatron_ranks_are_ordered_by_their_number_and_those_of_a_stage_follow_each_other(tmp_path: Path) -> None:
    """Twelve ranks in two stages: rank 10 is the fifth of the second stage, whatever its name sorts as."""
    rollout = make_rollout(lengths=(2, 3, 4, 5, 6, 7), layers=4)
    for rank in range(12):
        half = slice(0, 2) if rank < 6 else slice(2, 4)
        records = producers.megatron_records(rollout.sequences[rank % 6][:, half], step=0, rank=rank)
        producers.write_json_lines(tmp_path / f"router_trace_rank{rank}.jsonl", records)
    trace = open_source(tmp_path, options=ImportOptions(num_experts=32, pipeline_size=2)).load()
    assert trace.dp_rank.tolist() == list(range(6))
    np.testing.assert_array_equal(trace.routed_experts, np.concatenate(rollout.sequences))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda first, second: first[0].pop("topk"), "lacks topk"),
        (lambda first, second: first[0].update(num_tokens=5), r"of shape \[5, 2\], got int64 \[4, 2\]"),
        (lambda first, second: first[0].update(top_indices=[[0.5, 1]] * 4), r"of shape \[4, 2\], got float64"),
        (lambda first, second: [of_rank.reverse() for of_rank in (first, second)], "has step 0 after step 1"),
        (lambda first, second: [each.update(step=-1) for each in first[:4]], "has step -1"),
        (lambda first, second: first.pop(3), "layers have different numbers of micro-batches"),
        (lambda first, second: [second.pop(2) for _ in range(2)], "stages recorded different numbers of micro-batches"),
        (
            lambda first, second: [each.update(num_tokens=3, top_indices=[[0, 1]] * 3) for each in second[2:4]],
            "micro-batch 1: the layers differ in the number of tokens",
        ),
    ],
)
def test_megatron_files_that_contradict_themselves_are_refused(
    tmp_path: Path, change: Callable[[list[dict[str, Any]], list[dict[str, Any]]], object], message: str
) -> None:
    """Two stages of two layers each, in two steps of two micro-batches."""
    rollout = make_rollout(lengths=(4, 6), layers=4, top_k=2)
    of_ranks = [
        [
            record
            for step in (0, 1)
            for ids in rollout.sequences
            for record in producers.megatron_records(ids[:, half], step=step, rank=rank)
        ]
        for rank, half in enumerate((slice(0, 2), slice(2, 4)))
    ]
    change(*of_ranks)
    for rank, records in enumerate(of_ranks):
        producers.write_json_lines(tmp_path / f"router_trace_rank{rank}.jsonl", records)
    with pytest.raises(InvalidInputError, match=message):
        open_source(tmp_path, options=ImportOptions(num_experts=32, pipeline_size=2))


def test_megatron_folders_that_do_not_hold_the_files_of_all_stages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="does not contain any file named router_trace_rank"):
        open_source(tmp_path, format="megatron")
    write_megatron(tmp_path, make_rollout(lengths=(4, 6, 3)), 3, recompute=list)
    with pytest.raises(InvalidInputError, match=r"files of 3 ranks, .* number of pipeline stages \(2\)"):
        open_source(tmp_path, options=ImportOptions(num_experts=32, pipeline_size=2))


def test_megatron_files_cut_short_are_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path, make_rollout(lengths=(4, 6)), 2, recompute=list)
    file = tmp_path / "router_trace_rank1.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[: len(lines) // 2]))
    with pytest.raises(InvalidInputError, match="at least one of its files lacks step"):
        open_source(tmp_path)
    file.write_text("\n".join(lines[:-3]) + '\n{"step": 1, "blo')
    with pytest.raises(InvalidInputError, match="is not JSON"):
        open_source(tmp_path)
