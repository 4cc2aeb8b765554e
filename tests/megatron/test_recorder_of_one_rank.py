"""What a recorder writes of the routers of one rank, in one process: two model chunks of one MoE layer each.

Megatron's layer, its groups and collectives are stand-ins; hooks, rows and files are the recorder's.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import TraceReader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says of what it does without TransformerEngine and Apex
    from moe_rl.megatron import recorder as recorder_module
    from moe_rl.megatron.recorder import RoutingRecorder
    from moe_rl.megatron.routed_rows import RowSlice

EXPERTS, TOP_K, MOE_LAYERS = 8, 2, (1, 3)
DP_RANK, DP_SIZE = 1, 3


class Router(torch.nn.Module):
    """Returns the probabilities and map of the routes [N, K] that it is told, the first choice likeliest."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = np.zeros((0, TOP_K), np.int64)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        probs = torch.zeros(len(self.ids), EXPERTS)
        for choice in range(TOP_K):
            known = np.flatnonzero(self.ids[:, choice] >= 0)
            probs[known, self.ids[known, choice]] = 1.0 / (choice + 1)
        return probs, probs > 0


class Layer(torch.nn.Module):
    """An MoE layer by its number, from 1 on."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer_number = index + 1
        self.router = Router()
        self.config = SimpleNamespace(sequence_parallel=False)


class Model(torch.nn.Module):
    """A chunk of one MoE layer, inside a wrapper such as DDP."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.module = Inner(index)

    def forward(self, *args: Any, **kwargs: Any) -> None:
        self.module(*args, **kwargs)


class Inner(torch.nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.attention, self.mlp = torch.nn.Identity(), Layer(index)

    def forward(self, *_: Any, **__: Any) -> None:
        self.mlp.router()


class Run:
    """The recorded model; `groups` are those that were made, as tuples of ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.groups = folder, []  # type: ignore[var-annotated]
        self.chunks = [Model(index) for index in MOE_LAYERS]
        self.recorder = self.opened()

    def opened(self, **words: Any) -> RoutingRecorder:
        return RoutingRecorder(self.chunks, self.folder, **words)

    def forward(self, routes: np.ndarray, *args: Any, **kwargs: Any) -> None:
        """Run a micro-batch whose rows have these routes [N, L, K]."""
        for layer, chunk in enumerate(self.chunks):
            chunk.module.mlp.router.ids = routes[:, layer]
            chunk(*args, **kwargs)

    def trace(self, step: int) -> RoutingTrace:
        trace = TraceReader(self.folder / f"dp{DP_RANK:05d}.moetrace").load(step)
        assert isinstance(trace, RoutingTrace)
        return trace


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    distributed, parallel = recorder_module.dist, recorder_module.parallel_state
    spec = SimpleNamespace(num_experts=EXPERTS, top_k=TOP_K, moe_layer_ids=MOE_LAYERS)
    groups: list[Any] = []

    def own_group(of_ranks: Any, *, backend: str) -> str:
        groups.extend(of_ranks)
        return "sharing"

    def gather(own: Any, records: list[Any], *, dst: int, group: str) -> None:
        assert (dst, group) == (4, "sharing")
        records[0] = own

    with (
        patch.object(recorder_module, "MoELayer", Layer),
        patch.object(recorder_module, "model_spec", lambda config: spec),
        patch.object(recorder_module, "gathered", lambda own: [0, own, 0, own]),
        patch.object(recorder_module, "own_group", own_group),
        patch.object(RowSlice, "current", RowSlice),
        patch.object(parallel, "get_data_parallel_rank", lambda: DP_RANK),
        patch.object(parallel, "get_data_parallel_world_size", lambda: DP_SIZE),
        patch.object(distributed, "get_rank", lambda group: {"sharing": 0}[group]),
        patch.object(distributed, "get_world_size", lambda group: {"sharing": 1}[group]),
        patch.object(distributed, "get_global_rank", lambda group, rank: 4 + rank),
        patch.object(distributed, "gather_object", gather),
        patch.object(distributed, "barrier", lambda: None),
        patch.object(distributed, "destroy_process_group", lambda group: None),
    ):
        made = Run(tmp_path)
        made.groups = groups
        yield made


def drawn(rows: int, seed: int) -> np.ndarray:
    """Return [N, L, K] routes, all choices of a row apart and in no order."""
    draw = np.random.default_rng(seed)
    return np.argsort(draw.random((rows, len(MOE_LAYERS), EXPERTS)), axis=2)[:, :, :TOP_K]


def test_routes_are_of_their_sequences_however_tokens_are_handed_over(run: Run) -> None:
    assert run.groups == [(0, 2), (1, 3), (0, 2), (1, 3)]
    padded, named, packed, dense = (drawn(rows, seed) for seed, rows in enumerate((6, 4, 5, 5)))
    ends, own_ends = torch.tensor([0, 3, 5]), torch.tensor([0, 2, 3])
    with run.recorder.step(7, sample_id=np.arange(30, 37)):
        run.forward(padded, torch.zeros(2, 3))
        run.forward(named, input_ids=torch.zeros(1, 4))
        params = SimpleNamespace(cu_seqlens_q_padded=ends, cu_seqlens_q=own_ends)
        run.forward(packed, packed_seq_params=params)
        params = SimpleNamespace(cu_seqlens_q_padded=None, cu_seqlens_q=torch.tensor([0, 2, 5]))
        run.forward(dense, packed_seq_params=params)
    run.recorder.close()
    trace = run.trace(7)
    # Rows of a padded batch are [S, B]: row 2 s + b is token s of sequence b.
    by_sequence = [padded[0::2], padded[1::2], named, packed[:3], packed[3:], dense[:2], dense[2:]]
    assert np.diff(trace.cu_seqlens).tolist() == [len(routes) for routes in by_sequence]
    assert trace.routed_experts.tolist() == np.concatenate(by_sequence).tolist()
    assert trace.valid.all()
    assert np.asarray(trace.micro_batch).tolist() == [0, 0, 1, 2, 2, 3, 3]
    assert np.asarray(trace.sample_id).tolist() == np.asarray(trace.group_id).tolist() == list(range(30, 37))
    assert set(np.asarray(trace.dp_rank).tolist()) == {DP_RANK}
    assert tuple(trace.moe_layer_ids) == MOE_LAYERS


def test_a_row_without_all_its_choices_has_no_route(run: Run) -> None:
    routes = drawn(4, 0)
    routes[2, 1, 1] = -1
    with run.recorder.step(0):
        run.forward(routes, torch.zeros(1, 4))
    run.recorder.close()
    assert run.trace(0).valid.tolist() == [True, True, False, True]


def test_numbers_go_on_from_step_to_step_and_only_a_steps_own_forwards_are_recorded(run: Run) -> None:
    run.forward(drawn(4, 1), torch.zeros(1, 4))  # no step
    routes = drawn(4, 2)
    for step in (3, 4):
        with run.recorder.step(step):
            run.forward(routes, torch.zeros(2, 2))
            run.chunks[0].module.mlp.router()  # recomputed, outside of the model's forward
        run.forward(drawn(4, 3), torch.zeros(1, 4))

    def failing_step() -> None:
        with run.recorder.step(5):
            run.forward(drawn(4, 4), torch.zeros(1, 4))
            raise KeyError

    with pytest.raises(KeyError):
        failing_step()
    with run.recorder.step(5):
        run.forward(routes, torch.zeros(1, 4))
    with pytest.raises(InvalidInputError, match="already being recorded"), run.recorder.step(6):  # noqa: SIM117
        with run.recorder.step(6):
            pass
    with pytest.raises(InvalidInputError, match="ran no forward pass"), run.recorder.step(6):
        pass
    run.recorder.close()
    found = [np.asarray(run.trace(step).sample_id).tolist() for step in (3, 4, 5)]
    # Sequence n of this rank, of all those in the run: n x 3 + 1.
    assert found == [[1, 4], [7, 10], [13]]
    assert np.asarray(run.trace(4).group_id).tolist() == [7, 10]
    assert run.trace(5).routed_experts.tolist() == routes.tolist()
    run.forward(routes, torch.zeros(1, 4))
    assert run.recorder._chunks[0].running is None, "hooks are gone"


def test_a_recording_tells_its_origin_once_and_is_continued_on_request(run: Run) -> None:
    for append in (False, True):
        recorder = run.opened(append=append, origin={"experiment": "a"})
        with recorder.step(int(append)):
            run.forward(drawn(4, 0), torch.zeros(1, 4))
        recorder.close()
    reader = TraceReader(run.folder / f"dp{DP_RANK:05d}.moetrace")
    assert reader.steps == (0, 1)
    assert dict(reader.manifest.origin) == {"data_parallel_size": DP_SIZE, "experiment": "a"}


def test_one_model_needs_no_list_and_a_rank_that_does_not_write_sends_its_part(run: Run) -> None:
    sent: list[Any] = []

    def gather(own: Any, records: Any, *, dst: int, group: str) -> None:
        assert records is None
        sent.append(own)

    with (
        patch.object(recorder_module.dist, "get_rank", lambda group: 1),
        patch.object(recorder_module.dist, "gather_object", gather),
    ):
        recorder = RoutingRecorder(run.chunks[1], run.folder)
        routes = drawn(4, 0)
        with recorder.step(0):
            run.forward(routes, torch.zeros(1, 4))
        recorder.close()
    ((row_slice, parts),) = sent
    assert row_slice == RowSlice()
    ((layer_ids, micro_batches),) = parts
    assert layer_ids == [1], "among the model's MoE layers"
    ((ids, valid),) = micro_batches
    assert ids.tolist() == routes[:, 1:].tolist()
    assert valid.all()
    assert not list(run.folder.iterdir())
