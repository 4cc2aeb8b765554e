"""Coded routes through stand-ins of what the frameworks' modules do with routes, where these are not installed.

test_coded_routes.py does the same through their own modules. A stand-in has the names that are wrapped and does with
routes what the framework does: packs, copies, pickles.
"""

import asyncio
import base64
import copy
import importlib
import itertools
import pickle
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_rl.core import post_import
from moe_rl.frameworks import coded_routes
from moe_rl.frameworks.coded_routes import POINTS, coded, from_text, is_coded, plain, to_text
from moe_rl.routes.coded import CodedRoutes

torch = pytest.importorskip("torch")


@pytest.fixture
def routes(rng: np.random.Generator) -> np.ndarray:
    """[T, L, K] ids of 128 experts in rising order, as a stream holds them; some rows were not routed."""
    ids = np.sort(np.argsort(rng.random((40, 3, 128)), axis=2)[:, :, :8], axis=2)
    ids[:5] = -1
    return ids


class Batch(dict[str, Any]):
    """Columns, as TensorDict has them."""

    def exclude(self, key: str) -> "Batch":
        return Batch({name: value for name, value in self.items() if name != key})


class DataProto:
    def __init__(self, batch: Batch | None, meta_info: dict[str, Any]) -> None:
        self.batch, self.non_tensor_batch, self.meta_info = batch, {"uid": [1]}, meta_info

    def __getstate__(self) -> tuple[Any, ...]:
        return self.batch, self.non_tensor_batch, self.meta_info

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.batch, self.non_tensor_batch, self.meta_info = state


@pytest.mark.parametrize("nested", [False, True])
def test_verls_batches_are_coded_on_the_wire_alone(nested: bool, routes: np.ndarray, monkeypatch: Any) -> None:
    for name in ("__getstate__", "__setstate__"):
        monkeypatch.setattr(DataProto, name, vars(DataProto)[name])
    rows = torch.from_numpy(routes.astype(np.int16))
    offsets = torch.tensor([0, 25, 40])
    column = torch.nested.nested_tensor_from_jagged(rows, offsets) if nested else rows.reshape(2, 20, 3, 8)
    batch = DataProto(Batch(routed_experts=column, input_ids=torch.arange(40)), {"temperature": 0.7})
    without = [DataProto(None, {}), DataProto(Batch(input_ids=torch.arange(3)), {})]
    before = len(pickle.dumps(batch))
    POINTS["verl.protocol"](SimpleNamespace(DataProto=DataProto))  # type: ignore[arg-type]
    wire = pickle.dumps(batch)
    assert len(wire) < 0.8 * before
    received = pickle.loads(wire)
    assert batch.batch["routed_experts"] is column, "what is sent stays as it is"
    assert received.meta_info == batch.meta_info
    assert received.non_tensor_batch == batch.non_tensor_batch
    assert torch.equal(received.batch["input_ids"], batch.batch["input_ids"])
    got = received.batch["routed_experts"]
    assert (got.is_nested, got.dtype) == (nested, torch.int16)
    if nested:
        assert torch.equal(got.offsets(), offsets)
    assert torch.equal(got.values() if nested else got.reshape(rows.shape), rows)
    for other in without:
        assert pickle.loads(pickle.dumps(other)).__getstate__()[1:] == other.__getstate__()[1:]


def test_nemo_rls_payloads_are_texts(routes: np.ndarray) -> None:
    module = ModuleType("codec")
    module.encode_routed_experts = lambda ids: ids.tolist()
    module.decode_routed_experts = lambda payload, dtype: torch.tensor(payload).to(dtype)
    POINTS["nemo_rl.utils.routed_experts_codec"](module)
    ids = torch.from_numpy(routes)
    text = module.encode_routed_experts(ids)
    assert is_coded(text)
    got = module.decode_routed_experts(text, torch.int16)
    assert got.dtype == torch.int16
    assert torch.equal(got.long(), ids)
    assert torch.equal(module.decode_routed_experts(ids.tolist(), torch.int64), ids), "what is not coded"


def test_skyrls_payloads_are_texts_with_a_shape_and_a_type(routes: np.ndarray) -> None:
    module = ModuleType("wire")
    module._to_host_array = np.asarray
    module.compact_routed_expert_indices = lambda ids: ids.astype(np.int16)
    module.pack_routed_experts = None
    module.decode_packed_routed_experts = lambda payload: ("its own", payload)
    POINTS["skyrl.backends.skyrl_train.inference_servers.generate_wire"](module)
    payload = module.pack_routed_experts(torch.from_numpy(routes))
    assert (payload["shape"], payload["dtype"]) == (list(routes.shape), "int16")
    got = module.decode_packed_routed_experts(payload)
    assert got.dtype == np.int16
    np.testing.assert_array_equal(got, routes)
    for other in ({"data": base64.b64encode(bytes(9)).decode()}, [1], None):
        assert module.decode_packed_routed_experts(other) == ("its own", other)


class Pickler:
    def encode(self, batches: list[Any]) -> bytes:
        return pickle.dumps(batches)

    def decode(self, data: bytes) -> list[Any]:
        return pickle.loads(data)


class MicroBatchSender:
    def __init__(self, folder: str) -> None:
        self.folder, self.encoder = folder, Pickler()


class MicroBatchReceiver:
    def __init__(self, folder: str) -> None:
        self.folder, self.decoder = folder, Pickler()


@pytest.mark.parametrize("dtype", ["uint8", "int32"])
def test_prime_rls_micro_batches_are_coded_between_its_processes(
    dtype: str, routes: np.ndarray, monkeypatch: Any
) -> None:
    """int32 words hold combine weights, too: they are sent as they are."""
    module = ModuleType("base")
    for kind in (MicroBatchSender, MicroBatchReceiver):
        monkeypatch.setattr(kind, "__init__", kind.__init__)
        setattr(module, kind.__name__, kind)
    ids = np.where(routes < 0, 0, routes).astype(dtype)
    ids[:5] = np.arange(8)
    experts = SimpleNamespace(data=ids.tobytes(), shape=list(ids.shape), dtype=dtype)
    batches = [SimpleNamespace(routed_experts=experts), SimpleNamespace(routed_experts=None)]
    POINTS["prime_rl.transports.rollouts.base"](module)
    sender, receiver = MicroBatchSender("sent"), MicroBatchReceiver("received")
    assert (sender.folder, receiver.folder) == ("sent", "received")
    wire = sender.encoder.encode(batches)
    assert batches[0].routed_experts is experts
    assert experts.data == ids.tobytes(), "the trainer goes on with its own batch"
    sent = pickle.loads(wire)[0].routed_experts.data
    assert (sent == experts.data) == (dtype == "int32")
    for data in (wire, pickle.dumps(batches)):
        first, second = receiver.decoder.decode(data)
        assert first.routed_experts.data == experts.data
        assert (first.routed_experts.shape, first.routed_experts.dtype) == (experts.shape, dtype)
        assert second.routed_experts is None


def test_sglangs_managers_hand_out_texts_and_its_client_reads_them(routes: np.ndarray) -> None:
    class DetokenizerManager:
        def handle_batch_token_id_out(self, output: Any) -> Any:
            assert output.routed_experts is None, "SGLang would make base64 of int32 of them"
            return copy.copy(output)

    class TokenizerManager:
        async def _handle_batch_output(self, output: Any) -> Any:
            return output.routed_experts

    module = SimpleNamespace(
        DetokenizerManager=DetokenizerManager,
        TokenizerManager=TokenizerManager,
        extract_routed_experts_from_meta_info=lambda data: ("its own", data),
    )
    for name in ("managers.detokenizer_manager", "managers.tokenizer_manager", "state_capturer.routed_experts"):
        POINTS[f"sglang.srt.{name}"](module)
    ids = torch.from_numpy(routes.astype(np.int32))
    (text, none), nothing = (
        DetokenizerManager().handle_batch_token_id_out(SimpleNamespace(routed_experts=given)).routed_experts
        for given in ([ids, None], None)
    )
    assert (none, nothing) == (None, None)
    passed_on = asyncio.run(TokenizerManager()._handle_batch_output(SimpleNamespace(routed_experts=[text, ids])))
    assert passed_on == [text, text]
    client = module.extract_routed_experts_from_meta_info
    got = client({"meta_info": {"routed_experts": text}})
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, routes.ravel())
    for other in ({}, {"routed_experts": "AAAA"}):
        assert client({"meta_info": other}) == ("its own", {"meta_info": other})


def test_slimes_client_takes_the_first_of_several_names(routes: np.ndarray) -> None:
    module = ModuleType("misc")
    module.decode_int32_meta_array = lambda meta_info, keys: ("its own", keys)
    POINTS["slime.utils.misc"](module)
    meta = {"second": to_text(routes), "third": to_text(routes[:7])}
    for keys, wanted in ((("first", "second", "third"), routes), ("third", routes[:7])):
        got = module.decode_int32_meta_array(meta, keys)
        assert torch.equal(got, torch.from_numpy(wanted.astype(np.int32).ravel()))
    assert module.decode_int32_meta_array(meta, "first") == ("its own", "first")


def test_a_stream_is_of_the_fewest_experts_that_hold_its_ids_and_their_number() -> None:
    """Ids 0 and 1 are of two experts; eight choices of which none was made are still of eight."""
    for ids, num_experts in (
        ([[[0, 1]]], 2),
        ([[[1, 2]]], 4),
        ([[[-1] * 8]], 8),
        ([[[0, 127]]], 128),
        ([[[128]]], 256),
    ):
        stream = coded(np.array(ids))
        assert stream.num_experts == num_experts
        np.testing.assert_array_equal(from_text(to_text(np.array(ids)), np.int32), ids)
    assert isinstance(stream, CodedRoutes)
    assert not is_coded(base64.b64encode(b"MOE").decode())
    assert to_text(np.zeros((2, 1, 1), np.int64))[: len(coded_routes.TEXT_START)] == coded_routes.TEXT_START


@pytest.mark.parametrize("count", [1, 3, 40])
def test_miless_shards_carry_streams_as_words_and_give_the_routes_back(count: int, routes: np.ndarray) -> None:
    """Its store takes arrays of int32 alone: a stream of any number of bytes comes out as it went in."""
    received: list[Any] = []
    module: Any = SimpleNamespace(
        _package_shards=lambda shards: shards,
        process_rollout_data_shard=lambda args, data: received.append(data) or data,
    )
    POINTS["miles.ray.rollout.train_data_conversion"](module)
    given = [routes[:count].astype(np.int32), routes[count - 1 :].astype(np.int32)]
    plain_shard = {"tokens": [[1, 2]]}
    shards = module._package_shards([{"rollout_routed_experts": list(given), "tokens": [[3]]}, dict(plain_shard)])
    words = shards[0]["rollout_routed_experts"]
    assert all(sent.dtype == np.int32 and sent.ndim == 1 for sent in words)
    assert sum(sent.nbytes for sent in words) < sum(each.nbytes for each in given) / 2
    assert (shards[0]["tokens"], shards[1]) == ([[3]], plain_shard)
    for shard in (*shards, {"rollout_routed_experts": list(given)}):  # the last of a sender without coded routes
        module.process_rollout_data_shard("the arguments", shard)
    for data in (received[0], received[2]):
        for found, expected in zip(data["rollout_routed_experts"], given, strict=True):
            np.testing.assert_array_equal(found, expected)
    assert received[1] == plain_shard


class Sample:
    """A sample of slime: the routes of a turn are added to those of the turns before, as tensors."""

    def __init__(self) -> None:
        self.rollout_routed_experts: Any = None

    def _apply_meta_info(self, args: str, turn: Any, *, start: int) -> None:
        assert args == "the arguments"
        if turn is not None:
            earlier = [] if start == 0 else [self.rollout_routed_experts[:start]]
            self.rollout_routed_experts = torch.cat([*earlier, turn])


def test_slimes_samples_hold_coded_routes_turn_after_turn(routes: np.ndarray, monkeypatch: Any) -> None:
    monkeypatch.setattr(Sample, "_apply_meta_info", Sample._apply_meta_info)
    POINTS["slime.utils.types"](SimpleNamespace(Sample=Sample))  # type: ignore[arg-type]
    ids = torch.from_numpy(routes.astype(np.int32))
    sample = Sample()
    sample._apply_meta_info("the arguments", None, start=0)
    assert sample.rollout_routed_experts is None, "a sample without routes has none"
    for start, end in ((0, 25), (20, 40)):
        sample._apply_meta_info("the arguments", ids[start:end], start=start)
        held = sample.rollout_routed_experts
        assert isinstance(held, CodedRoutes)
        np.testing.assert_array_equal(plain(held.data, np.int32), routes[:end])


class RolloutManager:
    """What is left of slime's manager: it makes tensors of what the samples have."""

    def __init__(self, *, replays: bool = True, custom: Any = None) -> None:
        self.args = SimpleNamespace(use_rollout_routing_replay=replays)
        self.custom_convert_samples_to_train_data_func = custom

    def _convert_samples_to_train_data(self, samples: list[Any]) -> dict[str, Any]:
        data = {"tokens": [sample.tokens for sample in samples]}
        held = [sample.rollout_routed_experts for sample in samples]
        return data if held[0] is None else data | {"rollout_routed_experts": held}


def slime_manager(monkeypatch: Any, *, remote: bool) -> list[Any]:
    """Let the stand-in hand out coded routes, as a class or as what Ray makes of one; return what it validates."""
    method = "_convert_samples_to_train_data"
    monkeypatch.setattr(RolloutManager, method, vars(RolloutManager)[method])
    validated: list[Any] = []
    actor = SimpleNamespace(__ray_metadata__=SimpleNamespace(modified_class=RolloutManager))
    module = SimpleNamespace(
        RolloutManager=actor if remote else RolloutManager,
        validate_rollout_routed_experts_for_replay=lambda ids, args: validated.append((ids, args)),
    )
    POINTS["slime.ray.rollout"](module)  # type: ignore[arg-type]
    return validated


@pytest.mark.parametrize("remote", [False, True])
def test_slimes_manager_hands_out_coded_routes_and_validates_them_one_by_one(
    remote: bool, routes: np.ndarray, monkeypatch: Any
) -> None:
    validated = slime_manager(monkeypatch, remote=remote)
    streams = [coded(routes), coded(routes[:7])]
    samples = [SimpleNamespace(tokens=number, rollout_routed_experts=stream) for number, stream in enumerate(streams)]
    for replays in (True, False):
        validated.clear()
        manager = RolloutManager(replays=replays)
        data = manager._convert_samples_to_train_data(samples)
        assert data == {"tokens": [0, 1], "rollout_routed_experts": streams}
        assert [sample.rollout_routed_experts for sample in samples] == streams, "the samples keep theirs"
        assert len(validated) == 2 * replays
        for (ids, args), stream in zip(validated, streams, strict=False):
            assert args is manager.args
            assert len(ids) == 1
            np.testing.assert_array_equal(ids[0], plain(stream.data, np.int32))
            assert ids[0].dtype == torch.int32


def test_slimes_manager_leaves_what_is_not_coded_or_is_converted_by_a_users_function(
    routes: np.ndarray, monkeypatch: Any
) -> None:
    validated = slime_manager(monkeypatch, remote=False)
    ids, stream = torch.from_numpy(routes), coded(routes)
    for custom, held in ((None, ids), (print, stream), (print, ids)):
        samples = [SimpleNamespace(tokens=1, rollout_routed_experts=held)]
        data = RolloutManager(custom=custom)._convert_samples_to_train_data(samples)
        assert data["rollout_routed_experts"][0] is held
    assert not validated
    assert RolloutManager()._convert_samples_to_train_data(
        [SimpleNamespace(tokens=1, rollout_routed_experts=None)]
    ) == {"tokens": [1]}


def test_slimes_sender_makes_tensors_of_all_but_the_routes_and_codes_those_that_are_not(routes: np.ndarray) -> None:
    module = ModuleType("rollout_data_utils")
    named: list[set[str]] = []
    module.tensorize_rollout_data_for_training = lambda data: named.append(set(data))
    POINTS["slime.observability.rollout_data_utils"](module)
    stream = coded(routes)
    data = {"tokens": [1], "rollout_routed_experts": [stream, torch.from_numpy(routes[:7])]}
    module.tensorize_rollout_data_for_training(data)
    first, second = data["rollout_routed_experts"]
    assert first is stream
    assert isinstance(second, CodedRoutes)
    np.testing.assert_array_equal(plain(second.data, np.int64), routes[:7])
    without = {"tokens": [1]}
    module.tensorize_rollout_data_for_training(without)
    assert without == {"tokens": [1]}
    assert named == [{"tokens"}] * 2


class Groups:
    """Megatron's groups of one rank, by the names by which slime asks for them."""

    def __init__(self, tp: tuple[int, int], cp: tuple[int, int]) -> None:
        for name, (rank, size) in {"tensor_model": tp, "context": cp}.items():
            setattr(self, f"get_{name}_parallel_rank", lambda rank=rank: rank)
            setattr(self, f"get_{name}_parallel_world_size", lambda size=size: size)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_slimes_actor_gets_the_rows_of_its_rank_layer_by_layer(tp: int, cp: int, rng: np.random.Generator) -> None:
    """Row for row those of `packed_part`, by which plans count them; rows without a route are filler."""
    from moe_rl.frameworks.slime.micro_batches import packed_part
    from moe_rl.megatron.routed_rows import RowSlice

    lengths, num_experts, multiple = (37, 2, 1, 64), 32, 8
    ids = [np.sort(np.argsort(rng.random((n - 1, 3, num_experts)), axis=2)[:, :, :4], axis=2) for n in lengths]
    unrouted = np.full((1, 3, 4), -1)
    table = np.concatenate([rows for sequence in ids for rows in (sequence, unrouted)] + [unrouted])
    numbers = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    tokens, multiplier = [torch.zeros(length) for length in lengths], {"data_pad_size_multiplier": multiple}
    given = [coded(sequence) for sequence in ids]
    for tp_rank, cp_rank in itertools.product(range(tp), range(cp)):
        module: Any = SimpleNamespace(
            mpu=Groups((tp_rank, tp), (cp_rank, cp)),
            prepare_routed_experts_for_routing_replay=lambda routes, tokens, **options: ("its own", routes, options),
        )
        POINTS["slime.backends.megatron_utils.cp_utils"](module)
        prepare = module.prepare_routed_experts_for_routing_replay
        options = {"num_experts": num_experts, "allgather_cp": False, "sequence_parallel": True, **multiplier}
        rows = prepare(given, tokens, **options)
        expected = table[
            packed_part(numbers, multiple, RowSlice(tp_size=tp, tp_rank=tp_rank, cp_size=cp, cp_rank=cp_rank))
        ]
        routed = expected[:, 0, 0] >= 0
        for layer in range(3):
            for _ in ("forward", "backward"):
                got = rows[:, layer].materialize_for_routing_replay("replay_forward")
                assert got.dtype == torch.int32
                np.testing.assert_array_equal(got.numpy()[routed], expected[routed, layer])
                assert int(got.min()) >= 0
                assert int(got.max()) < num_experts
        assert np.asarray(rows, dtype=np.int64).dtype == np.int64
        whole = prepare(given, tokens, **(options | {"sequence_parallel": False}))
        assert len(np.asarray(whole)) == tp * len(expected)
        own = [*given[:-1], torch.from_numpy(ids[-1])]
        assert prepare(own, tokens, **options) == ("its own", own, options), "where one sequence is not coded"


def test_every_point_is_taken_once_and_only_where_the_setting_says_so(monkeypatch: Any) -> None:
    taken: list[str] = []
    with monkeypatch.context() as patches:
        patches.setattr(post_import, "when_imported", lambda name, change: taken.append(name))
        patches.setenv(coded_routes.VARIABLE, "plain")
        importlib.reload(coded_routes)
        assert taken == []
        names = list(coded_routes.POINTS)
        patches.setenv(coded_routes.VARIABLE, "coded")
        importlib.reload(coded_routes)
        coded_routes.install()
        assert taken == names
    importlib.reload(coded_routes)
