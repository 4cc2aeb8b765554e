"""What cannot be opened or converted, or contradicts itself, is refused in a sentence that changes nothing on disk."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import producers
import pytest
from replay_traces import assert_same, random_trace
from rollouts import make_rollout

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import (
    IMPORTERS,
    ImportOptions,
    TraceReader,
    TraceWriter,
    convert_trace,
    count_sequences,
    open_source,
)

pytestmark = pytest.mark.lengthy


def test_formats_are_named_or_recognized(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(3,))
    producers.write_npz(tmp_path / "t.npz", rollout.sequences, 32)
    with pytest.raises(InvalidInputError, match=r"unknown trace format 'sglng'\. Did you mean 'sglang'\?"):
        open_source(tmp_path / "t.npz", format="sglng")
    with pytest.raises(InvalidInputError, match="there is no trace at"):
        open_source(tmp_path / "absent.npz")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(
        InvalidInputError, match=r"the trace format of .* is not recognized\. Set --format to one of: npz"
    ):
        open_source(tmp_path / "notes.txt")
    body = producers.vllm_response(rollout.sequences[0], 2, 32) | {"meta_info": {"note": 1}}
    producers.write_json_lines(tmp_path / "both.jsonl", [body])
    with pytest.raises(InvalidInputError, match=r"could be sglang or vllm: set --format"):
        open_source(tmp_path / "both.jsonl")
    assert open_source(tmp_path / "both.jsonl", format="vllm", options=rollout.options()).num_sequences == 1


def drawn_routes(*shape: int) -> np.ndarray:
    """Distinct ids of 128 experts, top-8, in an array of that shape before the last axis."""
    rng = np.random.default_rng(0)
    return np.argsort(rng.random((*shape, 128)), axis=-1)[..., :8].astype(np.uint8)


def test_layers_before_tokens_are_refused_with_the_cure(tmp_path: Path) -> None:
    cure = r"The axes must be \[tokens, layers, top-k\]: swap the first two \(array\.swapaxes\(0, 1\)"
    swapped = drawn_routes(4, 300)
    np.savez(tmp_path / "swapped.npz", a=swapped)
    with pytest.raises(InvalidInputError, match=r"\[4, 300, 8\], which would mean 4 tokens in 300 layers\. " + cure):
        open_source(tmp_path / "swapped.npz")
    with pytest.raises(InvalidInputError, match=cure):
        RoutingTrace.from_sequences([swapped], num_experts=128)
    # Few enough tokens to be layers: the model says it, or that another sequence has another number of them.
    np.savez(tmp_path / "short.npz", a=drawn_routes(4, 20))
    with pytest.raises(InvalidInputError, match=cure):
        open_source(tmp_path / "short.npz", options=ImportOptions(num_layers=4))
    np.savez(tmp_path / "two.npz", a=drawn_routes(4, 20), b=drawn_routes(4, 21))
    with pytest.raises(InvalidInputError, match=r"21 layers and top-8.*swap the first two"):
        open_source(tmp_path / "two.npz")
    np.savez(tmp_path / "right.npz", a=swapped.swapaxes(0, 1))
    assert open_source(tmp_path / "right.npz").num_tokens == 300
    told = open_source(tmp_path / "swapped.npz", options=ImportOptions(axes="LTK"))
    assert (told.num_tokens, len(told.moe_layer_ids)) == (300, 4)
    with pytest.raises(InvalidInputError, match="axes must be TLK or LTK, got 'KLT'"):
        ImportOptions(axes="KLT")


def test_an_array_of_one_layer_is_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", a=drawn_routes(50))
    trace = open_source(tmp_path / "one.npz")
    assert (trace.num_tokens, len(trace.moe_layer_ids), trace.top_k) == (50, 1, 8)
    np.save(tmp_path / "one.npy", drawn_routes(50))
    assert open_source(tmp_path / "one.npy").load().routed_experts.shape == (50, 1, 8)


@pytest.mark.parametrize("key", ["layer_{}", "layers.{}", "model.layers.{}.mlp.gate", "L{}"])
def test_arrays_that_are_numbered_by_layer_are_the_layers_of_one_sequence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    ids = drawn_routes(50, 12)
    # The order in the file, and that of the names as text, is another one.
    np.savez(tmp_path / "t.npz", **{key.format(layer + 1): ids[:, layer] for layer in reversed(range(12))})
    for axes in ("TLK", "LTK"):
        source = open_source(tmp_path / "t.npz", options=ImportOptions(num_experts=128, axes=axes))
        assert (source.num_sequences, source.moe_layer_ids) == (1, tuple(range(1, 13)))
        np.testing.assert_array_equal(source.load().routed_experts, ids)
    first, last = key.format(1), key.format(12)
    assert f"the 12 arrays ({first} to {last}) as the layers of a single sequence of 50 tokens" in caplog.text


def test_keys_that_do_not_number_layers_once_name_sequences(tmp_path: Path) -> None:
    ids = drawn_routes(50, 2)
    np.savez(tmp_path / "groups.npz", group0_layer_1=ids[:, 0], group1_layer_1=ids[:, 1])
    np.savez(tmp_path / "mixed.npz", layer_0=ids[:, 0], other=ids[:, 1])
    for name in ("groups.npz", "mixed.npz"):
        source = open_source(tmp_path / name)
        assert (source.num_sequences, len(source.moe_layer_ids)) == (2, 1)
    for other in (ids[:, 1:], ids[:49, 1]):
        np.savez(tmp_path / "unequal.npz", layer_0=ids[:, 0], layer_1=other)
        with pytest.raises(InvalidInputError, match=r"are named by layer number, so they must .* 'layer_1' has \["):
            open_source(tmp_path / "unequal.npz")


def test_a_single_tensor_is_one_sequence(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    ids = drawn_routes(50, 3)
    torch.save(torch.from_numpy(ids), tmp_path / "t.pt")
    torch.save(torch.from_numpy(ids[:, 0]), tmp_path / "layer.pt")
    np.testing.assert_array_equal(open_source(tmp_path / "t.pt").load().routed_experts, ids)
    assert open_source(tmp_path / "layer.pt").load().routed_experts.shape == (50, 1, 8)
    torch.save(torch.from_numpy(ids[None]), tmp_path / "batch.pt")
    with pytest.raises(
        InvalidInputError, match=r"uint8 and shape \[1, 50, 3, 8\]. Store each sequence as a separate array"
    ):
        open_source(tmp_path / "batch.pt")
    torch.save({"topk_ids": torch.from_numpy(ids)}, tmp_path / "named.pt")
    with pytest.raises(InvalidInputError, match=r"is not recognized.*np\.savez"):
        open_source(tmp_path / "named.pt")


def test_a_table_of_text_is_refused_with_what_to_write(tmp_path: Path) -> None:
    np.savetxt(tmp_path / "t.csv", drawn_routes(20), fmt="%d", delimiter=",")
    with pytest.raises(InvalidInputError, match=r"t\.csv is a text table\. .* np\.savez"):
        open_source(tmp_path / "t.csv")


def test_lists_of_nested_lists_are_read(tmp_path: Path) -> None:
    sequences = [drawn_routes(20 + index, 3) for index in range(3)]
    (tmp_path / "own.json").write_text(json.dumps([ids.tolist() for ids in sequences]))
    trace = open_source(tmp_path / "own.json", options=ImportOptions(num_experts=128)).load()
    assert trace.routed_experts.tolist() == np.concatenate(sequences).tolist()
    assert trace.sequence_lengths.tolist() == [20, 21, 22]
    ragged = [ids.tolist() for ids in sequences]
    ragged[1][3][0].pop()
    (tmp_path / "ragged.json").write_text(json.dumps(ragged))
    with pytest.raises(InvalidInputError, match="record 1: the nested lists of routes have unequal lengths"):
        open_source(tmp_path / "ragged.json")


def test_a_list_of_tensors_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sequences = [drawn_routes(20 + index, 3) for index in range(3)]
    torch.save([torch.from_numpy(ids) for ids in sequences], tmp_path / "own.pt")
    trace = open_source(tmp_path / "own.pt", options=ImportOptions(num_experts=128)).load()
    assert trace.routed_experts.tolist() == np.concatenate(sequences).tolist()


def test_router_logits_become_routes_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logits = np.random.default_rng(0).normal(size=(40, 3, 16)).astype(np.float32)
    np.savez(tmp_path / "logits.npz", a=logits)
    with pytest.raises(InvalidInputError, match=r"router logits .* set --moe-router-topk \(1 to 16\)"):
        open_source(tmp_path / "logits.npz")
    trace = open_source(tmp_path / "logits.npz", options=ImportOptions(num_experts=16, top_k=2)).load()
    assert "wrong if the router has expert groups" in caplog.text
    ids = trace.routed_experts
    chosen = np.take_along_axis(logits, ids.astype(np.int64), axis=2)
    assert (chosen.min(axis=2) == np.sort(logits, axis=2)[..., -2]).all()
    logits[0, 0, 0] = np.nan
    np.savez(tmp_path / "nan.npz", a=logits)
    with pytest.raises(InvalidInputError, match="All logits must be finite"):
        open_source(tmp_path / "nan.npz", options=ImportOptions(num_experts=16, top_k=2))


@pytest.mark.parametrize("name", IMPORTERS.names)
def test_folders_and_empty_files_are_refused_by_every_format(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    paths = [tmp_path / "folder"]
    for suffix in ("npz", "npy", "json", "jsonl", "pt", "bin"):
        paths.append(tmp_path / f"empty.{suffix}")
        paths[-1].touch()
    for path in paths:
        for format_name in (name, None):
            with pytest.raises(InvalidInputError):
                open_source(path, format=format_name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "is empty: it has no sequences"),
        ({"a": np.zeros((0, 2, 2), np.uint8)}, "is empty: no token has a recorded route"),
        ({"a": np.zeros(4, np.uint8)}, r"'a' must contain integers of shape \[tokens, layers, top-k\]"),
        ({"a": np.zeros((2, 2, 2), np.float32)}, r"router logits .* set --moe-router-topk"),
        ({"a": np.array([[[0, 9]]])}, r"has expert id 9, but expert ids must be 0 to 7"),
        ({"a": np.array([[[3, 3]]])}, "is routed to one expert twice"),
        ({"a": np.array([[[3, -7]]])}, "negative expert id -7"),
        ({"a": np.array([[[3, 1], [0, 0]]])}, "in MoE layer 1, every token is routed to expert 0 only"),
        (
            {"a": np.array([[[3, 1]]]), "b": np.array([[[3, 1], [2, 1]]])},
            "has 2 layers and top-2, but earlier sequences of the file",
        ),
        ({"a": np.array([[[70_000, 1]]])}, "has expert id 70000"),
    ],
)
def test_wrong_routes_are_refused(tmp_path: Path, content: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "t.npz", **content)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InvalidInputError, match=message):
        convert_trace(open_source(tmp_path / "t.npz", options=ImportOptions(num_experts=8)), tmp_path / "out.moetrace")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 0}, "num_experts must be at least 1"),
        ({"moe_layer_ids": ()}, "moe_layer_ids must be ascending"),
        ({"moe_layer_ids": (2, 1)}, "moe_layer_ids must be ascending"),
        ({"moe_layer_ids": (1,), "first_k_dense": 1}, "set either moe_layer_ids or first_k_dense"),
        ({"first_k_dense": -1}, "first_k_dense must be at least 0"),
        ({"provenance": "R7"}, "the provenance 'R7' is unknown"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        ImportOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moe_layer_ids": (1, 2, 3, 4)}, "has 3 recorded layers"),
        ({"moe_layer_ids": (2, 3)}, r"lacks \[3\] of the 2 layers"),
        ({"first_k_dense": 3}, "layers of .* are dense"),
        ({"num_experts": 16}, "expert ids must be 0 to 15"),
        ({"num_experts": 70_000}, "num_experts must be 1 to 65536"),
        ({"prompt_lengths": (1,)}, r"more sequences than there are prompt lengths \(1\)"),
    ],
)
def test_options_that_contradict_the_file_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    producers.write_npz(tmp_path / "t.npz", make_rollout(lengths=(40, 3)).sequences, 32)
    with pytest.raises(InvalidInputError, match=message):
        open_source(tmp_path / "t.npz", options=ImportOptions(**options)).load()


def test_a_layer_with_routes_is_not_left_out_as_dense(tmp_path: Path) -> None:
    """Where a file holds MoE layers alone, `first_k_dense` of the model would drop real ones."""
    producers.write_npz(tmp_path / "t.npz", make_rollout(lengths=(4,)).sequences, 32)
    with pytest.raises(
        InvalidInputError, match="has routes in layer 0, but first_k_dense = 1 says that this layer is dense"
    ):
        open_source(tmp_path / "t.npz", options=ImportOptions(first_k_dense=1))


def test_an_id_that_no_model_has_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", a=np.array([[[1, 10**9]]]))
    with pytest.raises(InvalidInputError, match="expert id 1000000000, but expert ids must be 0 to 65535"):
        open_source(tmp_path / "t.npz")


def test_a_duplicate_names_file_sample_and_row(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", a=np.array([[[1, 2]]]), b=np.array([[[1, 2]], [[3, 3]]]))
    with pytest.raises(
        InvalidInputError, match=r"t\.npz: token 1 of sample 1 is routed to one expert twice .* \[3, 3\]"
    ):
        open_source(tmp_path / "t.npz").validate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"provenance": "R3"}, "has provenance = unknown, but you set R3"),
        ({"first_k_dense": 1}, "first_k_dense has no effect on"),
        ({"mask_capture_holes": True}, "mask_capture_holes has no effect on"),
        ({"pipeline_size": 2}, "pipeline_size has no effect on"),
    ],
)
def test_options_for_foreign_formats_are_not_ignored(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    producers.write_npz(tmp_path / "t.npz", make_rollout(lengths=(40,)).sequences, 32)
    source = open_source(tmp_path / "t.npz", options=ImportOptions(num_experts=32))
    convert_trace(source, tmp_path / "t.moetrace")
    with pytest.raises(InvalidInputError, match=message):
        open_source(tmp_path / "t.moetrace", options=ImportOptions(**options))


def test_layers_are_picked_or_named(tmp_path: Path) -> None:
    rollout = make_rollout(lengths=(4,))
    producers.write_npz(tmp_path / "t.npz", rollout.sequences, 32)
    picked = open_source(tmp_path / "t.npz", options=ImportOptions(num_experts=32, moe_layer_ids=(0, 2))).load()
    np.testing.assert_array_equal(picked.routed_experts, rollout.sequences[0][:, [0, 2]])
    named = open_source(tmp_path / "t.npz", options=ImportOptions(num_experts=32, moe_layer_ids=(5, 6, 9)))
    assert named.moe_layer_ids == (5, 6, 9)
    assert named.load().num_layers == 3


def stored(path: Path, seed: int = 0) -> Path:
    trace = random_trace(seed, [4, 3], steps=[0, 1])
    with TraceWriter(path, num_experts=8, moe_layer_ids=(1, 2, 3), top_k=2) as writer:
        writer.append(trace)
    return path


def test_a_stored_trace_is_copied_and_reduced_to_counts(tmp_path: Path) -> None:
    source = open_source(stored(tmp_path / "t"))
    calls: list[tuple[int, int]] = []
    copy = convert_trace(source, tmp_path / "copy", model="named", progress=lambda *args: calls.append(args))
    assert copy.manifest.model == "named"
    assert copy.manifest.origin == {"converted_from": "t", "format": "moetrace"}
    assert calls == [(4, 7), (7, 7)]
    counts = convert_trace(source, tmp_path / "counts", counts_only=True)
    counts.validate()
    assert_same(counts.load(), count_sequences(source.load()))
    with pytest.raises(InvalidInputError, match="contains only counts: routes cannot be restored from them"):
        convert_trace(open_source(tmp_path / "counts"), tmp_path / "back")


def test_a_conversion_that_fails_changes_nothing(tmp_path: Path) -> None:
    source = open_source(stored(tmp_path / "t"))
    stored(tmp_path / "old", seed=5)
    before = TraceReader(tmp_path / "old").load()
    (tmp_path / "t" / "shard-000001.safetensors").unlink()
    for overwrite in (False, True):
        with pytest.raises(InvalidInputError, match=r"already exists|cannot be read"):
            convert_trace(source, tmp_path / "old", overwrite=overwrite)
    with pytest.raises(InvalidInputError, match="cannot be read"):
        convert_trace(source, tmp_path / "new")
    assert_same(TraceReader(tmp_path / "old").load(), before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "t"]


def test_a_conversion_may_replace_a_trace_but_not_its_source(tmp_path: Path) -> None:
    source = open_source(stored(tmp_path / "t"))
    stored(tmp_path / "old", seed=5)
    convert_trace(source, tmp_path / "old", overwrite=True)
    assert_same(TraceReader(tmp_path / "old").load(), source.load())
    with pytest.raises(InvalidInputError, match="is the input trace"):
        convert_trace(source, tmp_path / "t", overwrite=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(InvalidInputError, match="does not belong to a trace"):
        convert_trace(source, tmp_path / "home", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "old", "t"]


def test_a_stored_trace_contradicts_wrong_options(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="has num_experts = 8, but you set 16"):
        open_source(stored(tmp_path / "t"), options=ImportOptions(num_experts=16))
