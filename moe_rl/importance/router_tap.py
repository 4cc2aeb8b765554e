"""Router statistics read from a model's ordinary forward passes, and found again by token in whatever packing follows.

    tap = RouterTap(model)                       # Transformers or Megatron; finds the routers
    with tap.old_pass(num_tokens) as store:      # the pass that gives the old log-probabilities
        for micro_batch in batch:
            tap.rows = micro_batch.keys          # which token each row is
            model(micro_batch.tokens)
    with tap.update_pass(store) as update:       # the pass that is differentiated, packed in any other way
        for micro_batch in other_batch:
            tap.rows = micro_batch.keys
            model(micro_batch.tokens)
            gamma = update.finish(keys_of_predicting_tokens).ratio

A key is a token's place among the tokens of the step, `cu_seqlens[sample] + position` (`token_keys`), and -1 where a
row is padding. The store keeps one 16-bit word per layer and expert of a token; the update pass two numbers per token.
A forward that activation recomputation repeats in the backward pass is skipped. A forward uses up `tap.rows`, so that
one that was not announced, such as a reference model's inside the pass, is an error and not read as the tokens before.

Row t of a router belongs to the input token t, whose output predicts token t + 1: for the log-probability of token t
ask for the key of token t - 1. Rows are as the router sees them, flattened: [B * S] in Transformers, [S * B] in
Megatron. Under sequence parallelism a rank reads its part of the rows. Pipeline stages hand their sums on as they hand
on their activations (`pipeline`), so that the last stage has gamma in its loss function, without another forward.

T tokens of the step, R rows of a forward, L layers, K experts per token, E experts.
"""

import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.importance.context_parallel import SumReducer
from moe_rl.importance.diagnostics import router_agreement
from moe_rl.importance.router_kinds import MEGATRON, ROUTER_KINDS, RouterKind, refuse_strange_routers
from moe_rl.importance.router_ranks import AfterChunk, between_stages, part_of_rank
from moe_rl.importance.router_shift import (
    DEFAULT_FLOOR,
    RouterShift,
    ScoreFunction,
    layer_sums,
    router_log_probs,
    shift_of,
)
from moe_rl.importance.router_store import RouterStore
from moe_rl.importance.tensors import measured, say_losses

# (logits [R, E], ids [R, K], score_function=...) -> [R, K]: `router_log_probs`, or a kernel in its place.
LogProbs = Callable[..., Tensor]


_READ_AS = ("softmax", "sigmoid", "sqrtsoftplus")


class UpdatePass:
    """The shift of every token of an update, summed over routers as they run."""

    def __init__(self, store: RouterStore, device: torch.device) -> None:
        self.store = store
        self.sums = torch.zeros(2, store.num_tokens + 1, device=device)
        """|delta| and the number of experts, of the token with key k in column k + 1; column 0 takes padding."""
        self.agreement: Tensor | None = None
        """[T] the share of the old policy's experts that the router now likes best, mean over this rank's routers."""
        self._layers: dict[int, Tensor] = {}
        self._floored = torch.zeros(2, device=device)

    def add(
        self, router: int, keys: Tensor, logits: Tensor, log_probs: LogProbs, score_function: ScoreFunction
    ) -> Tensor:
        """Add a router's logits [R, E] of the tokens `keys` [R]; return the old policy's ids [R, K] there."""
        self.store.require_keys(keys, "tap.rows contains")
        stored = self.store.of(router, keys)
        new_log_probs = stored.rounded(log_probs(logits, stored.expert_ids, score_function=score_function))
        sums = layer_sums(new_log_probs, stored.log_probs.to(new_log_probs), stored.valid)
        self._floored += stored.floored(new_log_probs)
        # index_add, not assignment: each layer adds to what those before it left.
        self.sums.index_add_(1, keys + 1, sums)
        self._layers[router] = self._layers.get(router, 0.0) + sums.sum(dim=1)
        return stored.expert_ids

    def finish(
        self,
        keys: Tensor,
        *,
        floor: float = DEFAULT_FLOOR,
        noise: float | Tensor = 0.0,
        sum_over_ranks: SumReducer | None = None,
    ) -> RouterShift:
        """Return the router shift of the tokens `keys`, any shape; 1 at -1 and where no router has run the token.

        `sum_over_ranks` adds the sums over ranks that hold other rows of the same tokens: the tensor-parallel group
        under sequence parallelism, the context-parallel group where the loss has whole sequences, and pipeline stages
        where they do not travel; a collective, with the same keys on every rank.
        """
        self.store.require_keys(keys, "finish got")
        sums = self.sums[:, keys.reshape(-1).to(self.sums.device) + 1]
        sums = sums if sum_over_ranks is None else sum_over_ranks(sums)
        has_key = keys.reshape(-1).to(sums.device) >= 0
        router_shift = shift_of(sums * has_key, self._layers, floor=floor, noise=noise, floored=self._floored)
        lost = torch.stack([(has_key & (sums[1] == 0)).sum(), has_key.sum()])
        unusable = {"the old pass or this pass has no route": lost}
        if self.store.mistaken is not None:
            unusable["tap.rows has keys of other tokens"] = self.store.mistaken
        say_losses(unusable, consequence="their gamma is 1, or another token's")
        metrics = measured(router_shift.metrics, unusable)
        ratio, shift = router_shift.ratio.view(keys.shape), router_shift.shift.view(keys.shape)
        return replace(router_shift, ratio=ratio, shift=shift, metrics=metrics)


@dataclass(slots=True, eq=False)
class _ForwardRows:
    """Which tokens the rows of one forward are, and which routers have read them."""

    keys: Tensor
    """int64, [R] or any shape of R."""
    readers: set[int] = field(default_factory=set)
    """Numbers of the routers."""


class RouterTap:
    """Records the router outputs of a model (or of a pipeline stage's chunks) during forward passes."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        log_probs: LogProbs | None = None,
        word: torch.dtype = torch.int16,
        agreement: bool = False,
        pipeline: "dist.ProcessGroup | None" = None,
        split: "dist.ProcessGroup | None" = None,
    ) -> None:
        """Find the routers, in the order of `modules()`.

        `log_probs`: None takes the fused kernel of `moe_rl.kernels` on a GPU, the plain function on a CPU. `word` of
        what the old pass stores: 16 bits, or torch.int32 for log-probabilities exact to 1e-6. `agreement`: measure,
        in both passes, how many of the experts the router itself would choose; one top-k per router and forward.
        `pipeline`: a group of this pipeline's stages, in order, that nothing else uses (`group_like`): the sums then
        travel from stage to stage behind each chunk's forward. `model` is the list of this stage's chunks. `split`: the
        ranks that hold parts of one micro-batch (tensor and context parallelism): each gets what all of them stored.
        """
        chunks = [model] if isinstance(model, nn.Module) else list(model)
        modules = [(name, module) for chunk in chunks for name, module in chunk.named_modules()]
        routers = []
        for _, module in modules:
            for router_kind in ROUTER_KINDS:
                if router_kind.matches(module):
                    routers.append((module, router_kind))
        router_ids = {id(module) for module, _ in routers}
        refuse_strange_routers(modules, router_ids)
        # A stage of dense layers hands on what the stages before it summed.
        known_kinds = ", ".join(ROUTER_KINDS.names)
        require(bool(routers) or pipeline is not None, f"the model has no router of a supported class ({known_kinds}).")
        for module, router_kind in routers:
            named = router_kind.score_function(module)
            require(
                named in _READ_AS,
                f"score function {named!r} of {type(module).__name__} is not supported. Supported score functions: "
                f"{', '.join(_READ_AS)}.",
            )
        self._routers, self._chunks, self._pipeline, self._split = routers, chunks, pipeline, split
        # PEFT keeps a router beside its copies that are trained (`modules_to_save`), of which one runs.
        names: dict[int, str] = {}
        for number, chunk in enumerate(chunks):
            prefix = f"chunk {number}, " if len(chunks) > 1 else ""
            names |= {id(module): prefix + _COPY.sub("", name) for name, module in chunk.named_modules()}
        self._places = tuple(dict.fromkeys(names[id(module)] for module, _ in routers))
        self._place = [self._places.index(names[id(module)]) for module, _ in routers]
        self._log_probs, self._word, self._agreement = log_probs or _fused_on_a_gpu, word, agreement
        self._forward: _ForwardRows | None = None
        # Of the pass that runs: whether rows were set in it, and whether a router has read any.
        self._rows_were_set = self._rows_were_read = False

    def __len__(self) -> int:
        """Routers of the model; PEFT's copies of one are one."""
        return len(self._places)

    @property
    def rows(self) -> Tensor | None:
        """int64 [R] keys of the rows of the next forward, -1 for padding: set it before each. A forward uses it up."""
        if self._forward is None:
            return None
        return self._forward.keys

    @rows.setter
    def rows(self, keys: Tensor | None) -> None:
        require(
            keys is None or keys.dtype in (torch.int64, torch.int32),
            f"tap.rows must be an int64 tensor of keys, not {None if keys is None else keys.dtype}.",
        )
        self._forward = None if keys is None else _ForwardRows(keys.long())
        self._rows_were_set |= keys is not None

    @contextmanager
    def old_pass(self, num_tokens: int, store: RouterStore | None = None) -> Iterator[RouterStore]:
        """Store the experts that each token uses, and their log-probabilities; `num_tokens`: T, above every key.

        `store`: what an earlier pass over other tokens of the rollout stored, to go on with.
        """
        store = store or RouterStore(num_tokens, len(self), self._word)
        self._require_store(store)
        store.num_tokens = num_tokens

        def keep(router: int, keys: Tensor, logits: Tensor, ids: Tensor, score_function: ScoreFunction) -> None:
            store.put(router, keys, ids, self._log_probs(logits, ids, score_function=score_function), logits.shape[1])
            self._agree(store, keys, logits, ids)

        with self._hooked(keep, store):
            yield store
        store.share(self._split)

    @contextmanager
    def update_pass(self, store: RouterStore) -> Iterator[UpdatePass]:
        """Compare each token with what is stored of it; one `with` per optimizer update."""
        self._require_store(store)
        update = UpdatePass(store, next(self._chunks[0].parameters()).device)

        def compare(router: int, keys: Tensor, logits: Tensor, ids: Tensor, score_function: ScoreFunction) -> None:
            self._agree(update, keys, logits, update.add(router, keys, logits, self._log_probs, score_function))

        with (
            between_stages(update.sums, self._pipeline, num_chunks=len(self._chunks)) as pass_on,
            self._hooked(compare, store, pass_on, update=True),
        ):
            yield update

    def _require_store(self, store: RouterStore) -> None:
        require(
            store.num_routers == len(self),
            f"the store is for a model with {store.num_routers} routers, but this model has {len(self)}.",
        )

    @contextmanager
    def told(self, rows: Sequence[Tensor]) -> Iterator[None]:
        """Set `rows` before each forward of a chunk, from the keys of the coming micro-batches in order."""
        micro_batches = [iter(rows) for _ in self._chunks]

        def tell(chunk: int) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                self.rows = next(micro_batches[chunk])

            return hook

        with ExitStack() as hooks:
            for number, chunk in enumerate(self._chunks):
                hooks.callback(chunk.register_forward_pre_hook(tell(number)).remove)
            yield

    def _agree(self, holder: RouterStore | UpdatePass, keys: Tensor, logits: Tensor, ids: Tensor) -> None:
        """Add a router's share of agreement at its tokens."""
        if not self._agreement:
            return
        store = holder if isinstance(holder, RouterStore) else holder.store
        if holder.agreement is None:
            holder.agreement = torch.zeros(0, device=logits.device)
        missing_rows = store.num_tokens - len(holder.agreement)
        if missing_rows:
            holder.agreement = nn.functional.pad(holder.agreement, (0, missing_rows))
        own_choice = logits.topk(ids.shape[1], dim=1).indices
        share = router_agreement(ids[:, None], own_choice[:, None]) / len(self)
        holder.agreement.index_add_(0, keys.clamp(min=0), share * (keys >= 0))

    @contextmanager
    def _hooked(
        self,
        take: Callable[[int, Tensor, Tensor, Tensor, ScoreFunction], None],
        store: RouterStore,
        pass_on: AfterChunk = lambda chunk, keys: None,
        *,
        update: bool = False,
    ) -> Iterator[None]:
        """Hand what each router did in each forward to `take`, and each chunk that has run to `pass_on`.

        Raises `InvalidInputError` at the end if rows were set and no router has read any.
        """
        self._rows_were_set, self._rows_were_read = self._forward is not None, False
        with ExitStack() as hooks:
            for place, (module, router_kind) in zip(self._place, self._routers, strict=True):
                hooks.callback(module.register_forward_hook(self._hook(place, router_kind, take)).remove)
            for number, chunk in enumerate(self._chunks):
                after_hook = self._after_chunk(number, store, pass_on, update)
                hooks.callback(chunk.register_forward_hook(after_hook, with_kwargs=True).remove)
            try:
                yield
            finally:
                self._forward = None  # keys of this pass must not serve the next one
        if self._routers and self._rows_were_set:
            require(self._rows_were_read, f"tap.rows was set in this pass, but no router ran. {_COMPILED_BEFORE}")

    def _hook(
        self, number: int, router_kind: RouterKind, take: Callable[[int, Tensor, Tensor, Tensor, ScoreFunction], None]
    ) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        @torch.no_grad()
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if _in_backward_pass():
                return  # activation recomputation runs a forward again that was seen already
            logits, ids = router_kind.read(module, args, output)
            score_function: Any = router_kind.score_function(module)
            take(number, self._keys_for(number, logits), logits, ids, score_function)

        return _uncompiled(hook)

    def _after_chunk(self, number: int, store: RouterStore, pass_on: AfterChunk, update: bool) -> Callable[..., None]:
        """Return the hook of a chunk whose forward has ended: its rows must not serve another forward."""
        own_modules = {id(module) for module in self._chunks[number].modules()}
        places = {
            place for place, (router, _) in zip(self._place, self._routers, strict=True) if id(router) in own_modules
        }
        sequence_first = False
        for router, router_kind in self._routers:
            sequence_first |= id(router) in own_modules and router_kind is MEGATRON

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if _in_backward_pass():
                return
            forward, self._forward = self._forward, None
            if places:
                require(
                    forward is not None and bool(forward.readers),
                    f"a forward pass ran, but the tap saw none of its routers. {_COMPILED_BEFORE}",
                )
            if forward is None:
                raise InvalidInputError(_NO_ROWS)
            self._look_for_unseen(places - forward.readers, store if update else None)
            keys = forward.keys.reshape(-1)
            input_ids = _input_ids(args, kwargs, keys.numel())
            if input_ids is not None:
                if sequence_first and input_ids.ndim == 2:
                    in_order = input_ids.transpose(0, 1)
                else:
                    in_order = input_ids
                store.note_tokens(keys.to(input_ids.device), in_order.detach().reshape(-1))
            pass_on(number, keys)

        return _uncompiled(hook)

    def _look_for_unseen(self, places: set[int], old: RouterStore | None) -> None:
        """Raise, or warn in the old pass, if some routers of a chunk were not seen where others were."""
        if old is not None:
            lost_routers = [self._places[place] for place in sorted(places) if old.read_by(place)]
            require(
                not lost_routers,
                "these routers ran in the old-policy pass, but the tap did not see them run in this forward pass: "
                f"{', '.join(lost_routers)}. {_COMPILED_BEFORE}",
            )
        elif places:
            names = ", ".join(self._places[place] for place in sorted(places))
            text = f"the tap did not see these routers in a forward pass: {names}. gamma covers only the other routers."
            warnings.warn(f"{text} {_COMPILED_BEFORE}", stacklevel=2)

    def _keys_for(self, router: int, logits: Tensor) -> Tensor:
        """Return the keys of the rows that this router has just read, [R]; each router reads a forward's rows once."""
        forward = self._forward
        if forward is None:
            raise InvalidInputError(_NO_ROWS)
        require(
            router not in forward.readers,
            f"router {self._places[router]} ran twice with the same tap.rows: set tap.rows before every forward pass.",
        )
        forward.readers.add(router)
        self._rows_were_read = True
        return part_of_rank(forward.keys.reshape(-1), logits.shape[0]).to(logits.device)


# In the name of a router: PEFT's own module, and its copies that are trained.
_COPY = re.compile(r"\.(original_module|modules_to_save\.[^.]+)(?=\.|$)")


def _input_ids(args: tuple[Any, ...], kwargs: dict[str, Any], num_rows: int) -> Tensor | None:
    """Return the input ids of a chunk's call: by their name, or the first whole numbers; None if it has none."""
    named = kwargs.get("input_ids")
    for value in (named, *args):
        if isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32) and value.numel() == num_rows:
            return value
    return None


def _in_backward_pass() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that runs as it stands in a compiled model too: it reads state, on which a trace would be guarded.

    Without torch._dynamo, whose import takes a second, nothing is compiled.
    """
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook


_NO_ROWS = (
    "a router ran, but tap.rows does not say which tokens the router read. Set tap.rows before every forward pass, and "
    "run other forward passes, such as those of a reference model, outside the tap's `with` block."
)
_COMPILED_BEFORE = (
    "A model that was compiled before the pass does not call the tap: compile the model inside the first pass, or set "
    "torch._dynamo.config.skip_nnmodule_hook_guards = False."
)


def _fused_on_a_gpu(logits: Tensor, ids: Tensor, *, score_function: ScoreFunction) -> Tensor:
    # The kernel knows softmax and the two sigmoid scores.
    if not logits.is_cuda or score_function == "sqrtsoftplus":
        return router_log_probs(logits, ids, score_function=score_function)
    # By name: this package is plain torch, and kernels come with Triton.
    kernels = importlib.import_module("moe_rl.kernels")
    log_probs: Tensor = kernels.gather_logprobs(logits, ids, score_function=score_function)
    return log_probs
