"""`moe-rl replay check`: what it says of files of the producers, with each kind of reference."""

import json

import numpy as np
import pytest
from cli_runner import EXPERTS, LAYERS, TOP_K, moe_rl, routes
from replay.producers import sglang_response, vllm_response

from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import TraceReader, recorded_sequences, write_trace
from moe_rl.routes import RoutesWriter

SHAPE = ("--num-experts", EXPERTS, "--num-layers", LAYERS, "--moe-router-topk", TOP_K)


def trace(path, sequences, **columns):
    made = RoutingTrace.from_sequences(sequences, num_experts=EXPERTS, **columns)
    write_trace([made], path, num_experts=EXPERTS, moe_layer_ids=range(LAYERS), top_k=TOP_K)
    return path


@pytest.fixture
def sequences():
    return [routes(60 + 5 * index, seed=index).astype(np.int64) for index in range(4)]


def test_clean_responses_are_right_with_and_without_a_reference(tmp_path, sequences):
    path = tmp_path / "sglang.jsonl"
    path.write_text("\n".join(json.dumps(sglang_response(ids, 7)) for ids in sequences))
    assert moe_rl("replay", "check", path, *SHAPE).out == "4 of 4 sequences are correct\n"
    own = trace(tmp_path / "own.moetrace", sequences)
    ran = moe_rl("replay", "check", path, *SHAPE, "--reference", own)
    assert (ran.code, ran.out) == (0, "4 of 4 sequences are correct\n"), ran.err


def test_faults_of_responses_are_named_and_end_with_code_1(tmp_path, sequences):
    shifted = np.concatenate([sequences[0][1:], sequences[0][-1:]])
    answers = [sglang_response(shifted, 7), *(sglang_response(ids, 7) for ids in sequences[1:])]
    answers[2]["meta_info"]["completion_tokens"] += 1  # as if the last row had been lost
    path = tmp_path / "sglang.jsonl"
    path.write_text("\n".join(map(json.dumps, answers)))
    own = trace(
        tmp_path / "own.moetrace", [*sequences[:2], np.concatenate([sequences[2], sequences[2][:1]]), sequences[3]]
    )
    ran = moe_rl("replay", "check", path, *SHAPE, "--reference", own)
    assert ran.code == 1
    assert ran.out.splitlines()[-1] == "2 of 4 sequences are correct"
    assert "sequence 0 (r1): shifted_by_a_token" in ran.out
    assert "sequence 2 (r1): last_row_lost" in ran.out
    assert "sglang#20964" in ran.out
    document = json.loads(moe_rl("replay", "check", path, *SHAPE, "--reference", own, "--json", "-").out)
    assert [fault["fault"] for fault in document["faults"]] == ["shifted_by_a_token", "last_row_lost"]


def test_a_stream_and_its_versions(tmp_path, sequences):
    path = tmp_path / "run.routes"
    with RoutesWriter(path, num_experts=EXPERTS, top_k=TOP_K, layer_ids=range(LAYERS)) as writer:
        for key, ids in enumerate(sequences):
            writer.add(key, ids, policy_version=3 + key)
    ran = moe_rl("replay", "check", path, "--num-experts", EXPERTS, "--policy-versions", "4:6")
    assert (ran.code, ran.out.splitlines()[-1]) == (1, "3 of 4 sequences are correct")
    assert "other_policy_version" in ran.out
    converted = tmp_path / "run.moetrace"
    assert moe_rl("trace", "convert", path, converted, "--num-experts", EXPERTS).code == 0
    assert TraceReader(converted).load().num_sequences == 4


def test_a_trace_of_ours_says_its_experts_itself(tmp_path, sequences):
    own = trace(tmp_path / "own.moetrace", sequences)
    path = tmp_path / "sglang.jsonl"
    path.write_text("\n".join(json.dumps(sglang_response(ids, 7)) for ids in sequences))
    for given in ([own], [own, "--reference", own], [path, "--num-layers", LAYERS, "--reference", own]):
        assert moe_rl("replay", "check", *given).out == "4 of 4 sequences are correct\n"
    ran = moe_rl("replay", "check", path)
    assert (ran.code, "set --num-experts" in ran.err) == (2, True)


def test_a_model_is_a_reference(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from moe_rl.replay.hf_recorder import router_choices

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, moe_intermediate_size=16, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=2, num_experts=EXPERTS, num_experts_per_tok=TOP_K, head_dim=16,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    tokens = torch.randint(0, 64, (2, 60)).tolist()
    (tmp_path / "tokens.jsonl").write_text("\n".join(json.dumps({"token_ids": ids}) for ids in tokens))
    right = [router_choices(model, ids)[0] for ids in tokens]
    path = tmp_path / "vllm.jsonl"
    rolled = np.concatenate([right[1][:1], right[1][:-1]])
    path.write_text("\n".join(json.dumps(vllm_response(ids, 5, EXPERTS)) for ids in (right[0], rolled)))
    ran = moe_rl("replay", "check", path, "--reference", tmp_path / "model", "--tokens", tmp_path / "tokens.jsonl")
    assert "1 of 2 sequences are correct" in ran.out, ran.err
    assert "shifted_by_a_token" in ran.out
    no_tokens = moe_rl("replay", "check", path, "--reference", tmp_path / "model")
    assert (no_tokens.code, no_tokens.err.strip().endswith("(--tokens).")) == (2, True)


def test_what_does_not_fit_is_one_sentence(tmp_path, sequences):
    path = tmp_path / "vllm.jsonl"
    path.write_text("\n".join(json.dumps(vllm_response(ids, 5, EXPERTS)) for ids in sequences))
    assert "set --num-experts" in moe_rl("replay", "check", path).err
    few = trace(tmp_path / "few.moetrace", sequences[:2])
    ran = moe_rl("replay", "check", path, "--num-experts", EXPERTS, "--reference", few)
    assert (ran.code, ran.err.count("error: ")) == (2, 1)
    assert "fewer sequences" in ran.err
    assert moe_rl("replay", "check", path, "--num-experts", EXPERTS, "--policy-versions", "x").code == 2
    assert len(list(recorded_sequences(path))) == 4
