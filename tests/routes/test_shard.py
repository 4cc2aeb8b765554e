"""A rank's rows and layers, beside the functions of the frameworks that hand them out."""

import importlib.util
import io
import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from moe_rl.routes import RoutesWriter
from moe_rl.routes.coded import CodedRoutes
from moe_rl.routes.shard import RankOfModel, read_rows, slime_rows, stage_layers, verl_rows

TOKENS = (37, 2, 64, 101)
RANKS = [(tp, cp) for tp in (1, 2, 4) for cp in (1, 2, 4)]


@pytest.fixture(scope="module")
def routes():
    rng = np.random.default_rng(1)
    sink, plain = io.BytesIO(), []
    with RoutesWriter(sink, num_experts=32, top_k=4, layer_ids=range(6)) as writer:
        for key, tokens in enumerate(TOKENS):
            ids = np.sort(np.argsort(rng.random((tokens - 1, 6, 32)), axis=2)[:, :, :4], axis=2)
            writer.add(key, ids)
            plain.append(ids)
    return [CodedRoutes(sink.getvalue(), key) for key in range(4)], plain


@pytest.mark.parametrize("order", [slime_rows, verl_rows])
@pytest.mark.parametrize(("tp", "cp"), RANKS)
def test_every_row_goes_to_exactly_one_rank(order, tp, cp, routes):
    coded, plain = routes
    taken = []
    for tp_rank, cp_rank in itertools.product(range(tp), range(cp)):
        rows = order(TOKENS, RankOfModel(tp_rank=tp_rank, tp_size=tp, cp_rank=cp_rank, cp_size=cp))
        taken += [
            (span.sequence, row)
            for span in rows
            if span.sequence >= 0
            for row in range(span.first, span.first + span.rows)
        ]
        got = read_rows(coded, rows, (4, 1))
        wanted = [
            plain[s.sequence][s.first : s.first + s.rows][:, [4, 1]] if s.sequence >= 0 else np.zeros((s.rows, 2, 4))
            for s in rows
        ]
        np.testing.assert_array_equal(got, np.concatenate(wanted))
    assert sorted(taken) == [(s, row) for s, tokens in enumerate(TOKENS) for row in range(tokens - 1)]


def test_stages_hold_every_layer_once():
    stages = [stage_layers(12, pp_rank=p, pp_size=2, vp_stage=v, vp_size=3) for v in range(3) for p in range(2)]
    assert [layer for stage in stages for layer in stage] == list(range(12))
    assert list(stage_layers(12, pp_rank=1, pp_size=2, vp_stage=1, vp_size=3)) == [6, 7]


def patched_ranks(monkeypatch, tp, cp, tp_rank, cp_rank):
    from megatron.core import parallel_state as mpu

    for name, value in {
        "get_tensor_model_parallel_world_size": tp,
        "get_tensor_model_parallel_rank": tp_rank,
        "get_context_parallel_world_size": cp,
        "get_context_parallel_rank": cp_rank,
    }.items():
        monkeypatch.setattr(mpu, name, lambda value=value: value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.framework
@pytest.mark.parametrize("allgather_cp", [False, True])
def test_slices_are_slimes_bit_for_bit(allgather_cp, routes, monkeypatch):
    torch = pytest.importorskip("torch")
    source = Path(os.environ.get("FRAMEWORK_SOURCES", "")) / "slime/slime/backends/megatron_utils/cp_utils.py"
    if not source.is_file():
        pytest.skip("FRAMEWORK_SOURCES names no checkout of slime (it is on no registry)")
    spec = importlib.util.spec_from_file_location("slime_cp_utils", source)
    slime = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(slime)
    coded, plain = routes
    given = [torch.from_numpy(ids.astype(np.int32)) for ids in plain]
    for tp, cp in RANKS:
        for tp_rank, cp_rank in itertools.product(range(tp), range(cp)):
            patched_ranks(monkeypatch, tp, cp, tp_rank, cp_rank)
            wanted = slime.prepare_routed_experts_for_routing_replay(
                given,
                [torch.zeros(tokens) for tokens in TOKENS],
                num_experts=32,
                data_pad_size_multiplier=8,
                sequence_parallel=True,
                allgather_cp=allgather_cp,
            )
            rank = RankOfModel(tp_rank=tp_rank, tp_size=tp, cp_rank=cp_rank, cp_size=cp)
            rows = slime_rows(TOKENS, rank, pad_multiplier=8, allgather_cp=allgather_cp)
            got = read_rows(coded, rows, range(6), round_robin=32)
            np.testing.assert_array_equal(got.astype(np.int32), wanted.numpy())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.framework
@pytest.mark.parametrize("contiguous", [False, True])
def test_slices_are_verls_bit_for_bit(contiguous, routes, monkeypatch):
    torch = pytest.importorskip("torch")
    pytest.importorskip("verl", reason="verl is not installed (make test-integrations installs it)")
    replay = pytest.importorskip("verl.utils.megatron.router_replay_utils", reason="verl's dependencies are missing")
    from types import SimpleNamespace

    coded, plain = routes
    jagged = torch.nested.as_nested_tensor(
        [torch.from_numpy(np.concatenate([ids, np.zeros_like(ids[:1])]).astype(np.int16)) for ids in plain],
        layout=torch.jagged,
    )
    config = SimpleNamespace(fp8=None, num_layers=6, moe_layer_freq=1)
    monkeypatch.setattr(replay, "_context_parallel_layout", lambda config: "contiguous" if contiguous else "zigzag")
    monkeypatch.setattr(replay, "device_name", "cpu", raising=False)
    util = pytest.importorskip("verl.models.mcore.util")
    # Row order is what is compared; older megatron-core cannot tell its kernels of a contiguous split.
    monkeypatch.setattr(util, "_PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE", True)
    monkeypatch.setattr(util, "PackedSeqParams", lambda **given: SimpleNamespace(**given))
    for tp, cp in RANKS:
        for tp_rank, cp_rank in itertools.product(range(tp), range(cp)):
            patched_ranks(monkeypatch, tp, cp, tp_rank, cp_rank)
            monkeypatch.setattr(
                replay, "scatter_to_sequence_parallel_region", lambda rows, tp=tp, r=tp_rank: rows.chunk(tp, dim=0)[r]
            )
            routers = [replay.RouterReplay() for _ in range(6)]
            monkeypatch.setattr(replay.RouterReplayHelper, "get_micro_batch_router_list", lambda *a, r=routers: r)
            monkeypatch.setattr(
                replay, "get_current_rank_layer_info", lambda *a, **k: {"start": 0, "end": 6, "count": 6}
            )
            replay.set_router_replay_data(jagged, None, config)
            wanted = torch.stack([router.target_topk_idx for router in routers], dim=1)
            rank = RankOfModel(tp_rank=tp_rank, tp_size=tp, cp_rank=cp_rank, cp_size=cp)
            got = read_rows(coded, verl_rows(TOKENS, rank, contiguous=contiguous), range(6))
            np.testing.assert_array_equal(got.astype(np.int64), wanted.numpy().astype(np.int64))
