"""One process of slime, between stand-ins of its modules: what is wrapped, what is guarded, and from what is planned.

The stand-ins have slime's names and do nothing; `own_cases.py` runs the same worker on slime's own code.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")

from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks.slime import worker as module
from moe_rl.frameworks.slime.worker import Worker

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says of what it does without TransformerEngine and Apex
    from moe_rl.frameworks import megatron_run

LOSS = "moe_rl.frameworks.slime.losses.policy_loss"
PLAIN: dict[str, Any] = {"packs": False, "router_shift": None, "last_metrics": {}, "layer_ids": (0,)}


def worker(**words: Any) -> Worker:
    words = {"framework": SimpleNamespace(name="slimelike"), "stage": lambda: "fallthrough"} | words
    return Worker(**words)


class Package:
    """Modules of slime by the names that the worker asks for."""

    def __init__(self, monkeypatch: Any) -> None:
        self.calls: list[Any] = []
        for name in ("", ".utils", ".backends", ".backends.megatron_utils"):
            self._add(monkeypatch, name)
        self.model = self._add(monkeypatch, ".backends.megatron_utils.model")
        self.actor = self._add(monkeypatch, ".backends.megatron_utils.actor")
        self.sender = self._add(monkeypatch, ".backends.megatron_utils.sender")
        self.copies = self._add(monkeypatch, ".utils.tensor_backper")
        self.model.get_forward_backward_func = lambda: self.schedule
        self.actor.reload_process_groups = lambda: self.calls.append("reloaded") or "groups"
        self.sender.send = lambda name: self.calls.append(("sent", name)) or "sent"
        self.sender.Sender = type("Sender", (), {"send": lambda own, name: self.calls.append(("sent by one", name))})
        self.copies.TensorBackuper = type("TensorBackuper", (), {"restore": None})
        self.copies.Own = type(
            "Own", (self.copies.TensorBackuper,), {"restore": lambda own, tag: self.calls.append(("restored", tag))}
        )
        self.copies.Other = type("Other", (), {})
        self.copies.CONSTANT = 3
        monkeypatch.setattr(module, "install_when_imported", lambda name, settings: self.calls.append(("packs", name)))

    @staticmethod
    def _add(monkeypatch: Any, name: str) -> Any:
        added: Any = ModuleType(f"slimelike{name}")
        added.__path__ = []
        monkeypatch.setitem(sys.modules, added.__name__, added)
        return added

    def schedule(self, **kwargs: Any) -> str:
        self.calls.append(("schedule", kwargs["num_microbatches"]))
        return "losses"


@pytest.fixture
def package(monkeypatch: Any) -> Package:
    for name in ("MOE_RL", "MOE_RL_ROUTER_SHIFT"):
        monkeypatch.delenv(name, raising=False)
    return Package(monkeypatch)


def test_without_the_setting_nothing_is_wrapped_and_a_line_says_so(package: Package, caplog: Any) -> None:
    own = worker()
    own.init(SimpleNamespace())
    assert own.settings is None
    assert "this slimelike run is not balanced, because MOE_RL is not set" in caplog.text
    assert not hasattr(package.model.get_forward_backward_func, "__wrapped__")
    own.before_train_step(SimpleNamespace(), 1, 2, "model", "optimizer", None)
    assert (own.run, own.step) == (None, None)
    assert own.planned(package.schedule)(num_microbatches=3) == "losses"


def test_hooks_are_laid_once_and_readers_of_weights_are_guarded(package: Package, monkeypatch: Any) -> None:
    monkeypatch.setenv("MOE_RL", "moe-rl")
    reader = "backends.megatron_utils.sender"
    own = worker(readers={f"{reader}:send": True, f"{reader}:Sender.send": False})
    args = SimpleNamespace(custom_loss_function_path="somewhere.else.loss")
    for _ in range(2):
        own.init(args)
    assert own.args is args
    assert package.calls == [("packs", "slimelike")]
    assert package.model.get_forward_backward_func()(num_microbatches=2) == "losses"
    assert package.calls[1:] == [("schedule", 2)]
    package.calls.clear()

    assert package.actor.reload_process_groups() == "groups"
    assert package.sender.send("before the first step") == "sent"
    assert package.calls == ["reloaded", ("sent", "before the first step")]
    package.calls.clear()

    @contextmanager
    def canonical(*, weights_only: bool) -> Iterator[None]:
        package.calls.append(("at home", weights_only))
        yield
        package.calls.append("moved again")

    own.run = SimpleNamespace(  # type: ignore[assignment]
        balancer=SimpleNamespace(canonical=canonical), rebuild_groups=lambda: package.calls.append("connected")
    )
    assert package.sender.send("weights") == "sent"
    package.sender.Sender().send("a checkpoint")
    assert package.actor.reload_process_groups() == "groups"
    assert package.calls == [
        *(("at home", True), ("sent", "weights"), "moved again"),
        *(("at home", False), ("sent by one", "a checkpoint"), "moved again"),
        *("reloaded", "connected"),
    ]
    own.run.balancer = None  # a run that is not balanced
    package.calls.clear()
    assert package.sender.send("weights") == "sent"
    assert package.calls == [("sent", "weights")]
    package.copies.Own().restore("ref")
    assert own.model == "ref", "passes of another model are not planned"


def test_the_router_shift_is_refused_where_it_cannot_act(package: Package, monkeypatch: Any) -> None:
    monkeypatch.setenv("MOE_RL", "moe-rl")
    monkeypatch.setenv("MOE_RL_ROUTER_SHIFT", "0.8")
    own = worker()
    losses = "moe_rl.frameworks.slime.losses"
    monkeypatch.setattr(f"{losses}.objective_of", lambda args: package.calls.append("objective read"))
    for words, said in (
        ({}, "needs a loss from moe_rl.frameworks.slime.losses"),
        ({"custom_loss_function_path": LOSS, "use_rollout_logprobs": True}, "--use-rollout-logprobs skips it"),
        ({"custom_loss_function_path": LOSS, "qkv_format": "bshd"}, "needs --qkv-format thd"),
        ({"custom_loss_function_path": LOSS, "allgather_cp": True}, "does not work with --allgather-cp"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            own.init(SimpleNamespace(**words))
    package.calls.clear()
    own.init(SimpleNamespace(custom_loss_function_path=LOSS))
    assert package.calls == ["objective read", ("packs", "slimelike")]
    package.copies.Own().restore("ref")
    assert own.model == "ref"
    package.copies.Own().restore("actor")
    assert own.model == "actor"
    assert package.calls[2:] == [("restored", "ref"), ("restored", "actor")]


@pytest.mark.parametrize(
    ("readers", "options", "args", "guarded"),
    [
        ({"sender:send": True}, (), {}, True),
        ({"sender:send": True}, ("lora",), {"lora": None}, True),
        ({"sender:send": True}, ("lora",), {}, True),
        ({"sender:send": True}, ("fast", "lora"), {"lora": "there"}, False),
        ({}, (), {}, False),
    ],
)
def test_a_run_is_attached_at_the_first_step_and_moves_experts_where_every_reader_is_known(
    readers: Any, options: Any, args: Any, guarded: bool, monkeypatch: Any
) -> None:
    attached: list[Any] = []
    monkeypatch.setattr(
        megatron_run.MegatronRun,
        "attach",
        lambda *given, guarded: attached.append((*given, guarded)) or SimpleNamespace(),  # type: ignore[func-returns-value]
    )
    settings: Any = SimpleNamespace()
    own = worker(readers=readers, options_of_others=options, settings=settings)
    for step in (0, 1):
        own.before_train_step(SimpleNamespace(**args), 7, step, "model", "optimizer", "scheduler")
        assert own.step == (7, step)
    assert attached == [(own.framework, "model", "optimizer", settings, guarded)]


class Shift:
    """The router shift of a run: notes the sequences that it is given keys for."""

    def __init__(self, chunks: Any, *, floor: float) -> None:
        self.made, self.sequences, self.passes = (chunks, floor), [], []  # type: ignore[var-annotated]

    def keys(self, sequences: Any, *, forward_only: bool) -> Any:
        self.sequences.append((sequences, forward_only))
        return [torch.arange(len(sequence)) + 10 for sequence in sequences]

    def around(self, call: Any, keys: Any, *, forward_only: bool) -> Any:
        self.passes.append((len(keys), forward_only))
        return call()


def kwargs(*, forward_only: bool | None, tokens: Any = ([1, 2], [3])) -> dict[str, Any]:
    data = SimpleNamespace(
        rollout_data={"tokens": list(tokens)}, micro_batch_indices=[[0], [1]], micro_batch_size=None, offset=0
    )
    words = {} if forward_only is None else {"forward_only": forward_only}
    return {"data_iterator": data, "num_microbatches": 2, "model": iter(["chunk"])} | words


def test_gamma_is_read_of_the_actors_passes_alone(monkeypatch: Any, package: Package) -> None:
    from moe_rl.frameworks import router_shift
    from moe_rl.frameworks.slime import micro_batches
    from moe_rl.megatron.routed_rows import RowSlice

    monkeypatch.setattr(router_shift, "RouterShiftRun", Shift)
    monkeypatch.setattr(micro_batches, "RowSlice", SimpleNamespace(current=RowSlice))
    args = SimpleNamespace(data_pad_size_multiplier=4)
    for settings in (None, SimpleNamespace(router_shift=0.0)):
        assert worker(args=args, settings=settings).keys_ahead(kwargs(forward_only=True)) is None
    own = worker(args=args, settings=SimpleNamespace(router_shift=0.8, plans=None))
    for model in ("ref", "teacher"):
        own.model = model
        assert own.keys_ahead(kwargs(forward_only=True)) is None
        assert own.planned(package.schedule)(**kwargs(forward_only=True)) == "losses"
    assert own.router_shift is None
    own.model = "old_actor"
    for forward_only in (True, None):  # the pass of old log-probabilities, then an update
        keys = own.keys_ahead(kwargs(forward_only=forward_only))
        assert keys is not None
        assert [rows.tolist() for _, rows in keys] == [[10, 11, -1, -1], [10, -1, -1, -1]]
        assert [[key.tolist() for key in of_batch] for of_batch, _ in keys] == [[[10, 11]], [[10]]]
    shift: Any = own.router_shift
    assert shift.made == (["chunk"], 0.8)
    assert shift.sequences == [([each], only) for only in (True, False) for each in ([1, 2], [3])]
    own.model = "ref"
    assert own.keys_ahead(kwargs(forward_only=False)) is not None, "an update is the actor's, whatever was last in"
    assert own.router_shift is shift
    own.model = "actor"
    package.calls.clear()
    assert own.planned(package.schedule)(**kwargs(forward_only=True)) == "losses"
    assert (shift.passes, package.calls) == ([(2, True)], [("schedule", 2)])
    with pytest.raises(InvalidInputError, match="cannot find the micro-batches among the arguments"):
        own.keys_ahead(kwargs(forward_only=True) | {"data_iterator": iter([0])})


class Run(SimpleNamespace):
    """A MegatronRun that notes its passes."""

    def around(self, call: Any, source: Any, *, keys: Any, forward_only: bool) -> Any:
        self.passes.append((source, keys, forward_only))
        return call()


@pytest.mark.parametrize("balanced", [False, True])
def test_a_pass_goes_through_the_run_with_its_source(
    balanced: bool, package: Package, caplog: Any, monkeypatch: Any
) -> None:
    caplog.set_level("INFO")
    own = worker(settings=SimpleNamespace(router_shift=0.0, plans=None), args=SimpleNamespace())
    run: Any = Run(**(PLAIN | {"balancer": object() if balanced else None, "passes": [], "packs": False}))
    own.run, own.router_shift = run, "the shift"  # type: ignore[assignment]
    asked: list[Any] = []

    def source_of(own: Worker, data: Any, count: int, *, forward_only: bool) -> Any:
        asked.append((count, forward_only))
        return "source"

    monkeypatch.setattr(Worker, "source_of", source_of)
    run.last_metrics = {}
    for forward_only in (True, None):
        assert own.planned(package.schedule)(**kwargs(forward_only=forward_only)) == "losses"
    source = "source" if balanced else None
    assert run.passes == [(source, None, True), (source, None, False)]
    assert asked == ([(2, True), (2, False)] if balanced else [])
    assert run.router_shift == "the shift"
    assert caplog.text == ""
    run.last_metrics = {"moe_rl/imbalance": 1.25}
    own.planned(package.schedule)(**kwargs(forward_only=True))
    assert "moe_rl: {'moe_rl/imbalance': 1.25}" in caplog.text


@pytest.mark.parametrize(
    ("packs", "plans", "forward_only", "packed"),
    [
        (True, None, False, True),
        (False, None, False, False),
        (True, Path("plans"), False, False),
        (True, None, True, False),
    ],
)
def test_an_update_is_packed_before_it_is_planned(
    packs: bool, plans: Any, forward_only: bool, packed: bool, package: Package, monkeypatch: Any
) -> None:
    own = worker(settings=SimpleNamespace(router_shift=0.0, plans=plans), args=SimpleNamespace())
    run: Any = Run(**(PLAIN | {"balancer": "the balancer", "passes": [], "packs": packs}))
    own.run = run
    monkeypatch.setattr(
        module.CallData, "pack", lambda data, balancer: package.calls.append(("packed", balancer, len(run.passes)))
    )
    monkeypatch.setattr(Worker, "source_of", lambda own, data, count, *, forward_only: "source")
    own.planned(package.schedule)(**kwargs(forward_only=forward_only))
    assert package.calls == [*([("packed", "the balancer", 0)] if packed else []), ("schedule", 2)]


def test_a_pass_of_another_model_is_neither_planned_nor_learned_from(monkeypatch: Any, package: Package) -> None:
    around: list[bool] = []

    def planned(call: Any, source: Any, *, keys: Any, forward_only: bool) -> Any:
        around.append(forward_only)
        return call()

    own = worker(args=SimpleNamespace(), settings=SimpleNamespace(router_shift=0.0, plans=None))
    own.run = SimpleNamespace(**PLAIN, balancer=None, around=planned)  # type: ignore[assignment]
    for model in ("ref", "teacher", "actor", "old_actor"):
        own.model = model
        assert own.planned(package.schedule)(**kwargs(forward_only=True)) == "losses"
    assert around == [True, True], "log-prob passes of the actor alone"
    own.model = "ref"
    own.planned(package.schedule)(**kwargs(forward_only=False))
    assert around == [True, True, False], "an update is the actor's"
    assert len(package.calls) == 5


def test_a_source_is_the_drivers_plan_then_replayed_routes_then_sequences_then_a_number(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "plan_path", lambda folder, *step: (folder, *step))
    monkeypatch.setattr(module, "load_plan", lambda path: ("plan of", path))
    found: list[Any] = [None]
    asked: list[Any] = []
    monkeypatch.setattr(module, "replayed_routes", lambda run, count: asked.append((run, count)) or found[0])
    stages = ["replay_forward"]
    own = worker(settings=SimpleNamespace(plans="there"), stage=lambda: stages[0])
    own.run, own.step = "the run", (4, 2)  # type: ignore[assignment]
    rows = module.PassSource.unknown(2).sequences_to_count
    data: Any = SimpleNamespace(sequences=lambda: rows)
    unknown: Any = SimpleNamespace(sequences=lambda: None)
    given: Any = own.source_of(data, 2, forward_only=False)
    assert given.plan == ("plan of", ("there", 4, 2))
    assert not asked
    found[0] = [np.zeros((3, 1, 2), np.int64)] * 2
    replayed = own.source_of(data, 2, forward_only=True)
    assert len(replayed.routes or ()) == 2
    assert replayed.sequences == rows, "homes are learned where routes are replayed, too"
    assert asked == [("the run", 2)]
    stages[0] = "fallthrough"
    assert own.source_of(data, 2, forward_only=True).routes is None, "routes are recorded, or none are replayed"
    assert own.source_of(data, 2, forward_only=True).sequences == rows
    for settings, step in (
        (SimpleNamespace(plans=None), (4, 2)),
        (SimpleNamespace(plans="there"), None),
        (None, (1, 1)),
    ):
        own.settings, own.step = settings, step
        assert own.source_of(data, 2, forward_only=False).routes is not None, "an update replays what it can"
    found[0] = None
    assert own.source_of(data, 2, forward_only=False).sequences == rows
    assert own.source_of(unknown, 2, forward_only=False).is_unknown
    assert own.source_of(unknown, 3, forward_only=True).num_micro_batches == 3
