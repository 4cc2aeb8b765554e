"""Coded routes through the frameworks' own modules: the same ids come out, in fewer bytes.

`FRAMEWORK_SOURCES` names a folder with checkouts (slime, nemo_rl, skyrl, prime_rl), on no registry. A module is
loaded alone, with stand-ins for what it imports beside routes. What is not there is skipped, with its reason. verl and
SGLang come from `make test-integrations`.
"""

import ast
import base64
import importlib.util
import inspect
import itertools
import os
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks import coded_routes
from moe_rl.frameworks.coded_routes import POINTS, coded, from_text, is_coded, plain, to_text
from moe_rl.routes.coded import CodedRoutes

torch = pytest.importorskip("torch")
SOURCES = Path(os.environ.get("FRAMEWORK_SOURCES", ""))
RNG = np.random.default_rng(31)


def drawn(rows, layers=6, experts=128, top_k=8):
    return np.argsort(RNG.random((rows, layers, experts)), axis=2)[:, :, :top_k]


def assert_same_ids(got, wanted):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(np.sort(got, axis=-1), np.sort(wanted, axis=-1))


def stand_in(monkeypatch, name, **values):
    """A module in place of one that the tested one imports for something else than routes."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        package = ".".join(parts[:end])
        if package not in sys.modules:
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
            sys.modules[package].__path__ = []
    for key, value in values.items():
        monkeypatch.setattr(sys.modules[name], key, value, raising=False)


def loaded(monkeypatch, checkout, path, name):
    """The framework's own module from a checkout."""
    source = SOURCES / checkout / path
    if not os.environ.get("FRAMEWORK_SOURCES") or not source.is_file():
        pytest.skip(f"FRAMEWORK_SOURCES names no folder with {checkout}/{path} (it is on no registry)")
    stand_in(monkeypatch, name.rpartition(".")[0])
    spec = importlib.util.spec_from_file_location(name, source)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_texts_hold_any_producers_rows():
    for dtype in (np.uint8, np.int16, np.int32, np.int64):
        ids = drawn(300).astype(dtype)
        ids[-1] = 0
        if dtype is not np.uint8:
            ids[7] = -1
        ids[:, 0] = np.where(ids[:, :1, 0] < 0, -1, 0)  # a dense layer
        text = to_text(ids)
        assert is_coded(text)
        assert len(text) < len(base64.b64encode(ids.astype(np.int32).tobytes())) / 4
        assert_same_ids(from_text(text, dtype), ids)
    assert not is_coded(base64.b64encode(drawn(1).tobytes()).decode())
    with pytest.raises(InvalidInputError, match="cannot be decoded"):
        from_text("\x89", np.int32)
    with pytest.raises(InvalidInputError, match="truncated"):
        from_text(to_text(drawn(30))[:-40], np.int32)


def test_experts_above_256_and_single_choices_come_out():
    for experts, top_k in ((512, 10), (384, 8), (8, 1), (1, 1)):
        ids = drawn(50, experts=experts, top_k=top_k).astype(np.int32)
        assert_same_ids(plain(coded(ids).data.tobytes(), np.int32), ids)


def test_a_point_that_is_gone_says_so():
    with pytest.raises(
        InvalidInputError, match="has no attribute encode_routed_experts: moe_rl does not support this version"
    ):
        POINTS["nemo_rl.utils.routed_experts_codec"](ModuleType("codec"))


def test_nemo_rl(monkeypatch):
    module = loaded(
        monkeypatch, "nemo_rl", "nemo_rl/utils/routed_experts_codec.py", "nemo_rl.utils.routed_experts_codec"
    )
    routes = torch.from_numpy(drawn(200).astype(np.int16))
    routes[-20:] = torch.arange(8)
    routes[3] = -1
    before = module.encode_routed_experts(routes)
    POINTS[module.__name__](module)
    text = module.encode_routed_experts(routes)
    assert len(text) < 0.5 * len(before)
    assert_same_ids(module.decode_routed_experts(text, torch.int16), routes)
    assert_same_ids(module.decode_routed_experts(before, torch.int16), routes)  # what is not coded
    assert module.decode_routed_experts([[[1, 2]]], torch.int32).tolist() == [[[1, 2]]]


def test_skyrl(monkeypatch):
    pytest.importorskip("pybase64", reason="SkyRL's module needs pybase64")
    folder = "skyrl/backends/skyrl_train"
    loaded(monkeypatch, "skyrl", f"{folder}/utils/routed_experts.py", "skyrl.backends.skyrl_train.utils.routed_experts")
    name = "skyrl.backends.skyrl_train.inference_servers.generate_wire"
    module = loaded(monkeypatch, "skyrl", f"{folder}/inference_servers/generate_wire.py", name)
    routes = drawn(200)
    before = module.pack_routed_experts(routes)
    wanted = module.decode_packed_routed_experts(before)
    POINTS[name](module)
    packed = module.pack_routed_experts(torch.from_numpy(routes))
    assert len(packed["data"]) < 0.75 * len(before["data"])
    assert {key: packed[key] for key in ("shape", "dtype")} == {key: before[key] for key in ("shape", "dtype")}
    assert_same_ids(module.decode_packed_routed_experts(packed), wanted)
    assert_same_ids(module.decode_packed_routed_experts(before), wanted)


def test_prime_rl(monkeypatch, tmp_path):
    pytest.importorskip("msgspec", reason="prime-rl's module needs msgspec")
    folder = "src/prime_rl/transports/rollouts"
    stand_in(monkeypatch, "prime_rl.utils.logger", get_logger=lambda: None)
    types = loaded(monkeypatch, "prime_rl", f"{folder}/types.py", "prime_rl.transports.rollouts.types")
    module = loaded(monkeypatch, "prime_rl", f"{folder}/base.py", "prime_rl.transports.rollouts.base")
    routes = drawn(300).astype(np.uint8)
    routes[-30:] = 0

    def batch(experts):
        fields = {name: [] for name in types.MicroBatch.__struct_fields__[: -len(types.MicroBatch.__struct_defaults__)]}
        return types.MicroBatch(**fields, routed_experts=experts)

    experts = types.RoutedExperts(data=routes.tobytes(), shape=list(routes.shape), dtype="uint8")
    sends = type("Sends", (module.MicroBatchSender,), {"send": None})
    receives = type("Receives", (module.MicroBatchReceiver,), dict.fromkeys(("wait", "can_receive", "receive")))
    before = sends(tmp_path, 1).encoder.encode([batch(experts)])
    POINTS[module.__name__](module)
    sender, receiver = sends(tmp_path, 1), receives(tmp_path, 0)
    data = sender.encoder.encode([batch(experts), batch(None)])
    assert len(data) < 0.75 * len(before)
    assert experts.data == routes.tobytes()
    for wire in (data, before):
        got = receiver.decoder.decode(wire)[0].routed_experts
        assert (got.shape, got.dtype) == (experts.shape, experts.dtype)
        assert_same_ids(np.frombuffer(got.data, np.uint8).reshape(got.shape), routes)
    assert receiver.decoder.decode(data)[1].routed_experts is None


def slime_driver(monkeypatch):
    pytest.importorskip("pybase64", reason="slime's module needs pybase64")
    stand_in(monkeypatch, "slime.utils.http_utils", is_port_available=None)
    misc = loaded(monkeypatch, "slime", "slime/utils/misc.py", "slime.utils.misc")
    POINTS["slime.utils.misc"](misc)
    types = loaded(monkeypatch, "slime", "slime/utils/types.py", "slime.utils.types")
    POINTS["slime.utils.types"](types)
    name = "slime.observability.rollout_data_utils"
    driver = loaded(monkeypatch, "slime", "slime/observability/rollout_data_utils.py", name)
    POINTS[name](driver)
    return misc, types, driver


def test_slimes_samples_hold_coded_routes_turn_after_turn(monkeypatch):
    misc, types, _ = slime_driver(monkeypatch)
    whole = drawn(90).astype(np.int32)
    for value in (to_text(whole), base64.b64encode(whole.tobytes()).decode()):
        got = misc.decode_int32_meta_array({"routed_experts": value}, "routed_experts")
        assert_same_ids(got.reshape(whole.shape), whole)
    assert misc.decode_int32_meta_array({}, "routed_experts") is None
    args = SimpleNamespace(num_layers=6, moe_router_topk=8)
    sample = types.Sample()
    for end, start in ((50, 0), (90, 50)):
        sample.tokens = list(range(end + 1))
        meta = {"routed_experts": to_text(whole[start:end]), "routed_experts_start_len": start}
        parameters = inspect.signature(types.Sample._apply_meta_info).parameters
        known = {"args": args, "meta_info": meta, "update_terminal_info": False, "new_token_count": 0}
        sample._apply_meta_info(**{key: value for key, value in known.items() if key in parameters})
        assert isinstance(sample.rollout_routed_experts, CodedRoutes)
    assert_same_ids(sample.rollout_routed_experts[:].astype(np.int32), whole)


def test_slimes_driver_hands_out_coded_routes(monkeypatch):
    """`RolloutManager` is a stand-in: its module imports Ray and an engine."""
    _, _, driver = slime_driver(monkeypatch)

    class RolloutManager:
        args = SimpleNamespace(use_rollout_routing_replay=True, num_layers=6, moe_router_topk=8)
        custom_convert_samples_to_train_data_func = None

        def _convert_samples_to_train_data(self, samples):
            assert samples[0].rollout_routed_experts is None
            return {"tokens": [sample.tokens for sample in samples]}

    module = ModuleType("rollout")
    module.RolloutManager = RolloutManager
    module.validate_rollout_routed_experts_for_replay = driver.validate_rollout_routed_experts_for_replay
    POINTS["slime.ray.rollout"](module)
    routes = [drawn(rows).astype(np.int32) for rows in (90, 40)]
    samples = [SimpleNamespace(tokens=[1, 2], rollout_routed_experts=coded(each)) for each in routes]
    data = RolloutManager()._convert_samples_to_train_data(samples)
    driver.tensorize_rollout_data_for_training(data)
    assert data["tokens"][0].dtype == torch.long
    sent = pickle.loads(pickle.dumps(data["rollout_routed_experts"]))
    assert len(pickle.dumps(sent)) < 0.25 * sum(each.nbytes for each in routes)
    for got, sample, wanted in zip(sent, samples, routes, strict=True):
        assert_same_ids(got[:].astype(np.int32), wanted)
        assert_same_ids(sample.rollout_routed_experts[:].astype(np.int32), wanted)
    samples[1].rollout_routed_experts = coded(np.zeros((40, 6, 8), np.int32))
    with pytest.raises(ValueError, match="all zero for MoE layers"):
        RolloutManager()._convert_samples_to_train_data(samples)
    data = {"rollout_routed_experts": [torch.from_numpy(each) for each in routes]}
    driver.tensorize_rollout_data_for_training(data)
    assert_same_ids(data["rollout_routed_experts"][0][:].astype(np.int32), routes[0])


@pytest.mark.parametrize("allgather_cp", [False, True])
def test_slimes_actor_gets_its_rows_layer_by_layer(monkeypatch, allgather_cp):
    pytest.importorskip("megatron.core", reason="slime's module needs megatron-core")
    path, name = "slime/backends/megatron_utils/cp_utils.py", "slime.backends.megatron_utils.cp_utils"
    module = loaded(monkeypatch, "slime", path, name)
    original = module.prepare_routed_experts_for_routing_replay
    POINTS[name](module)
    lengths = (37, 2, 64, 101)
    routes = [np.sort(drawn(length - 1, experts=32, top_k=4), axis=2).astype(np.int32) for length in lengths]
    tokens = [torch.zeros(length) for length in lengths]
    for tp, cp in ((1, 1), (2, 1), (2, 2), (1, 4)):
        for tp_rank, cp_rank in itertools.product(range(tp), range(cp)):
            for key, value in {
                "get_tensor_model_parallel_world_size": tp,
                "get_tensor_model_parallel_rank": tp_rank,
                "get_context_parallel_world_size": cp,
                "get_context_parallel_rank": cp_rank,
            }.items():
                monkeypatch.setattr(module.mpu, key, lambda value=value: value)
            options = {"num_experts": 32, "data_pad_size_multiplier": 8}
            options |= {"sequence_parallel": True, "allgather_cp": allgather_cp}
            wanted = original([torch.from_numpy(each) for each in routes], tokens, **options)
            got = module.prepare_routed_experts_for_routing_replay([coded(e) for e in routes], tokens, **options)
            for layer in (0, 5):
                for stage in ("forward", "backward"):
                    assert torch.equal(got[:, layer].materialize_for_routing_replay(stage), wanted[:, layer])
            same = module.prepare_routed_experts_for_routing_replay(
                [torch.from_numpy(each) for each in routes], tokens, **options
            )
            assert torch.equal(same, wanted)


def test_miles_shards(monkeypatch):
    for name, values in {
        "miles.utils.object_store": {"ValueSpec": lambda **given: given},
        "miles.utils.multi_lora": {"is_multi_lora_enabled": None},
        "miles.utils.timer": {"Timer": SimpleNamespace},
        "miles.utils.types": {"Sample": SimpleNamespace},
        "miles.utils.dp_schedule": {"build_dp_schedule": None, "has_full_schedule_config": None},
        "miles.utils.seqlen_balancing": {"get_seqlen_balanced_partitions": None},
    }.items():
        stand_in(monkeypatch, name, **values)
    monkeypatch.setattr(
        sys.modules["miles.utils"], "object_store", sys.modules["miles.utils.object_store"], raising=False
    )
    name = "miles.ray.rollout.train_data_conversion"
    module = loaded(monkeypatch, "miles", "miles/ray/rollout/train_data_conversion.py", name)
    routes = [drawn(rows).astype(np.int32) for rows in (90, 41, 7)]
    routes[1][-3:] = -1
    data = {"tokens": [[0] * (len(each) + 1) for each in routes], "rollout_routed_experts": routes}
    args = SimpleNamespace(balance_data=False)
    split = module.split_train_data_by_dp_raw
    plainly = split(args, dict(data), dp_size=2)
    POINTS[name](module)
    shards = split(args, dict(data), dp_size=2)
    sizes = [
        sum(each.nbytes for shard in given for each in shard["rollout_routed_experts"]) for given in (shards, plainly)
    ]
    assert sizes[0] < 0.25 * sizes[1]
    for shard, wanted in zip(shards, plainly, strict=True):
        assert all(each.dtype == np.int32 for each in shard["rollout_routed_experts"])
        for given in (shard, dict(wanted)):  # what is not coded is read too
            got = module.process_rollout_data_shard(args, dict(given))["rollout_routed_experts"]
            for ids, ours in zip(got, wanted["rollout_routed_experts"], strict=True):
                assert_same_ids(ids, ours)
    assert coded_routes.ROUTES not in module.process_rollout_data_shard(args, {"partition": [], "total_lengths": []})


def test_sglangs_detokenizer_and_tokenizer_hand_out_texts():
    """A stand-in of the two managers: what they do with routes, by SGLang 0.5.23's own lines."""
    import asyncio

    class DetokenizerManager:
        def handle_batch_token_id_out(self, output):
            assert output.routed_experts is None
            return SimpleNamespace(rids=output.rids, routed_experts=None)

    class TokenizerManager:
        async def _handle_batch_output(self, output):
            return output.routed_experts

    module = ModuleType("managers")
    module.DetokenizerManager, module.TokenizerManager = DetokenizerManager, TokenizerManager
    POINTS["sglang.srt.managers.detokenizer_manager"](module)
    POINTS["sglang.srt.managers.tokenizer_manager"](module)
    routes = [torch.from_numpy(drawn(20).astype(np.int32)), None]
    out = DetokenizerManager().handle_batch_token_id_out(SimpleNamespace(rids=[1, 2], routed_experts=list(routes)))
    texts = asyncio.run(TokenizerManager()._handle_batch_output(SimpleNamespace(routed_experts=list(routes))))
    for given in (out.routed_experts, texts):
        assert given[1] is None
        assert_same_ids(from_text(given[0], np.int32), routes[0])
    assert (
        DetokenizerManager().handle_batch_token_id_out(SimpleNamespace(rids=[], routed_experts=None)).routed_experts
        is None
    )


@pytest.mark.framework
@pytest.mark.filterwarnings("ignore")
def test_sglangs_own_reader():
    """Its function alone: the module imports an engine."""
    found = importlib.util.find_spec("sglang")
    if found is None:
        pytest.skip("sglang is not installed (make test-integrations installs it)")
    source = Path(found.submodule_search_locations[0]) / "srt/state_capturer/routed_experts.py"
    name = "extract_routed_experts_from_meta_info"
    functions = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", "") == name]
    module = ModuleType("routed_experts")
    module.np, module.pybase64 = np, base64
    exec(compile(ast.Module(functions, []), str(source), "exec"), module.__dict__)
    POINTS["sglang.srt.state_capturer.routed_experts"](module)
    routes = drawn(20).astype(np.int32)
    for value in (to_text(routes), base64.b64encode(routes.tobytes()).decode()):
        got = module.extract_routed_experts_from_meta_info({"meta_info": {"routed_experts": value}})
        assert_same_ids(got.reshape(routes.shape), routes)


@pytest.mark.framework
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["torch", "numpy"])
def test_verls_batches(monkeypatch, method):
    protocol = pytest.importorskip("verl.protocol", reason="verl is not installed (make test-integrations installs it)")
    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", method)
    routes = torch.from_numpy(drawn(240).astype(np.int16)).reshape(4, 60, 6, 8)
    routes[:, :11] = 0
    data = protocol.DataProto.from_dict({"routed_experts": routes, "input_ids": torch.arange(240).reshape(4, 60)})
    before = len(pickle.dumps(data))
    kept = {name: getattr(protocol.DataProto, name) for name in ("__getstate__", "__setstate__")}
    POINTS["verl.protocol"](protocol)
    try:
        wire = pickle.dumps(data)
        got = pickle.loads(wire)
    finally:
        for name, value in kept.items():
            setattr(protocol.DataProto, name, value)
    assert len(wire) < 0.5 * before
    assert_same_ids(got.batch["routed_experts"], routes)
    assert torch.equal(got.batch["input_ids"], data.batch["input_ids"])
    assert coded_routes.VARIABLE not in got.meta_info
    assert torch.equal(data.batch["routed_experts"], routes)


def test_the_setting_has_two_values(monkeypatch):
    monkeypatch.setenv(coded_routes.VARIABLE, "always")
    with pytest.raises(InvalidInputError, match="must be 'coded' or 'plain'"):
        importlib.reload(coded_routes)
    monkeypatch.setenv(coded_routes.VARIABLE, "plain")
    importlib.reload(coded_routes)


def test_coded_routes_are_small_beside_what_slime_sends():
    routes = drawn(4000).astype(np.int32)
    assert isinstance(coded(routes), CodedRoutes)
    assert coded(routes).data.nbytes <= routes.size / 8 * 41 / 8 * 1.03
