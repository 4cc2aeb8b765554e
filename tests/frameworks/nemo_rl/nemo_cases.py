"""Cases of test_nemo_rl.py: NeMo-RL's own loop around Megatron's schedule and its own loss, from a checkout.

What it imports beside them (megatron.bridge, Ray, its batches) is not on CPU: `megatron_forward_backward`,
`forward_with_post_processing_fn`, `model_forward`, `LossPostProcessor`, `wrap_loss_fn_with_input_preparation` and
`ClippedPGLossFn` are taken from its files; batches are stand-ins, a `UserDict` as NeMo-RL's own are.
"""

import functools
import importlib
import os
import sys
from collections import UserDict
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2] / "megatron"))
import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from tap_cases import drift
from torch import Tensor

from moe_rl.frameworks import router_shift
from moe_rl.frameworks.nemo_rl import attach as nemo

tests = ModuleType("tests")  # a package of verl's environment is called tests, too
tests.__path__ = [str(Path(__file__).parents[2])]
sys.modules["tests"] = tests
own_losses = importlib.import_module("tests.frameworks.own_losses")
functions, nemo_rls_loss = own_losses.functions, own_losses.nemo_rls_loss

SHAPE = (2, tiny_gpt.SEQUENCE)
LENGTHS = ((9, 16), (12, 14))
"""Of the sequences of both micro-batches."""


class Batch(UserDict[str, Any]):
    """A stand-in of NeMo-RL's `BatchedDataDict`."""

    def get_multimodal_dict(self, **_: Any) -> dict[str, Any]:
        return {}


class Train:
    """The names that the loop below finds beside it, as attributes of a module."""

    def __init__(self, root: Path) -> None:
        wrapper = functions(
            root / "algorithms/loss/wrapper.py", "wrap_loss_fn_with_input_preparation", Optional=Any, Callable=Any
        )
        found = functions(
            root / "models/megatron/train.py",
            *("megatron_forward_backward", "forward_with_post_processing_fn", "model_forward", "LossPostProcessor"),
            "apply_temperature_scaling",
            wrap_loss_fn_with_input_preparation=wrapper.wrap_loss_fn_with_input_preparation,
            LogprobsPostProcessor=(),
            TopkLogitsPostProcessor=(),
            partial=functools.partial,
            nullcontext=nullcontext,
            get_capture_context=lambda *_: (nullcontext(), None),
            suspend_activation_offload_for_forward_only=lambda *_: nullcontext(),
            get_forward_backward_func=get_forward_backward_func,
            prepare_loss_input=None,
            **{name: getattr(parallel_state, name) for name in GROUPS},
        )
        vars(self)["names"] = found.megatron_forward_backward.__globals__

    def __getattr__(self, name: str) -> Any:
        return self.names[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.names[name] = value


GROUPS = (
    *("get_context_parallel_world_size", "get_context_parallel_group"),
    *("get_tensor_model_parallel_rank", "get_tensor_model_parallel_group"),
)


def tensor_parallel() -> dict[str, Any]:
    return shift(tensor=2)


def pipeline_parallel() -> dict[str, Any]:
    return shift(pipeline=2)


def shift(**layout: int) -> dict[str, Any]:
    """A log-prob pass, a reference's, an update by the same weights, and one by others."""
    root = Path(os.environ["FRAMEWORK_SOURCES"]) / "nemo_rl" / "nemo_rl"
    train, losses = Train(root), nemo_rls_loss(root.parents[1])
    with tiny_gpt.parallel(1, **layout), patch.object(router_shift, "WORD", torch.int32):
        nemo.install(train, floor=1e-3)  # type: ignore[arg-type]
        run = tiny_gpt.build()
        weights = [each.detach().clone() for model in run.models for each in model.parameters()]
        seen: list[Tensor] = []
        own = losses.ClippedPGLossFn(losses.ClippedPGLossConfig(reference_policy_kl_penalty=0.0))

        def loss(data: Batch, **given: Any) -> Any:
            seen.append(data["advantages"].clone())
            return own(data=data, **given)

        def passed(*, forward_only: bool) -> list[Tensor]:
            seen.clear()
            post = train.LossPostProcessor(loss, {"sequence_packing": {"enabled": False}}, 2, prepare_fn=log_probs)
            train.megatron_forward_backward(
                run.models, iter(micro_batches()), 2, SHAPE[1], SHAPE[0], post, forward_only=forward_only,
                global_valid_seqs=torch.tensor(4.0), global_valid_toks=torch.tensor(47.0),
            )  # fmt: skip
            return [each.clone() for each in seen]

        old = passed(forward_only=True)
        before = every_router(run, train)
        for model in run.models:
            drift(tiny_gpt.gpt_of(model))
        passed(forward_only=True)  # a reference's weights, which are not those of the log-prob pass
        moved_by, kept = every_router(run, train), [e.detach().clone() for m in run.models for e in m.parameters()]
        put(run, weights)
        unmoved = passed(forward_only=False)
        put(run, kept)
        moved = passed(forward_only=False)
        expected = gamma_of(before, moved_by)
        advantages = [each.data_dict["advantages"] for each in micro_batches()]
        return {
            "last": parallel_state.is_pipeline_last_stage(),
            "micro_batches": len(moved),
            "old": all(torch.equal(a, b) for a, b in zip(old, advantages, strict=False)),
            "unmoved": all(torch.equal(a, b) for a, b in zip(unmoved, advantages, strict=False)),
            "difference": max(
                (float((a / b - g).abs().max()) for a, b, g in zip(moved, advantages, expected, strict=False)),
                default=0.0,
            ),
            "least": float(torch.stack(expected).min()),
        }


def micro_batches() -> list[Any]:
    """As `get_microbatch_iterator` of NeMo-RL yields them where sequences are padded."""
    draw, found = torch.Generator().manual_seed(5), []
    for lengths in LENGTHS:
        ids = torch.randint(1, tiny_gpt.VOCABULARY, SHAPE, generator=draw)
        real = torch.arange(SHAPE[1]) < torch.tensor(lengths)[:, None]
        floats = {
            name: torch.randn(SHAPE, generator=draw) - 1.0
            for name in ("advantages", "prev_logprobs", "generation_logprobs")
        }
        data = Batch(input_ids=ids * real, input_lengths=torch.tensor(lengths), token_mask=real.float(), **floats)
        data["sample_mask"] = torch.ones(SHAPE[0])
        size = SHAPE[1]
        found.append(
            SimpleNamespace(
                data_dict=data,
                input_ids=data["input_ids"],
                input_ids_cp_sharded=data["input_ids"],
                attention_mask=torch.triu(torch.ones(size, size, dtype=torch.bool), 1)[None, None],
                position_ids=torch.arange(size).expand(SHAPE),
                **dict.fromkeys(("packed_seq_params", "cu_seqlens_padded", "mtp_loss_mask")),
                **dict.fromkeys(("routed_experts_cp_sharded", "media_token_validity_mask")),
            )
        )
    return found


def log_probs(logits: Tensor, data: Batch, **_: Any) -> tuple[dict[str, Tensor], Batch]:
    """In the place of NeMo-RL's preparation, whose vocabulary is split: log-probabilities of the next tokens."""
    whole = gather_from_tensor_model_parallel_region(logits)[:, :-1].log_softmax(dim=-1)
    return {"next_token_logprobs": whole.gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)}, data


def put(run: Any, weights: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip((e for m in run.models for e in m.parameters()), weights, strict=True):
            parameter.copy_(value)


def every_router(run: Any, train: Train) -> Tensor:
    """[2, L, micro-batches, B, S, E]: float64 log-probabilities, and 1 for used experts; of all stages and ranks.

    Where a row is among a micro-batch's tokens is computed here: Megatron runs [S, B], and sequence parallelism gives
    every rank consecutive positions.
    """
    layers = [layer for model in run.models for layer in tiny_gpt.gpt_of(model).decoder.layers]
    found = torch.zeros(2, run.config.num_layers, len(LENGTHS), *SHAPE, tiny_gpt.NUM_EXPERTS, dtype=torch.float64)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    here = SHAPE[1] // tp
    first = here * parallel_state.get_tensor_model_parallel_rank()

    def keep(layer: int, numbers: Any, router: Any, args: Any, output: Any) -> None:
        logs = (args[0].detach().flatten(0, 1).double() @ router.weight.detach().double().T).log_softmax(dim=1)
        for kind, values in enumerate((logs, output[1].double())):
            number = next(numbers[kind])
            found[kind, layer, number, :, first : first + here] = values.view(here, SHAPE[0], -1).transpose(0, 1)

    handles = [
        layer.mlp.router.register_forward_hook(
            functools.partial(keep, layer.layer_number - 1, [iter(range(len(LENGTHS))) for _ in range(2)])
        )
        for layer in layers
    ]
    plain = get_forward_backward_func()  # of Megatron, so that nothing of ours runs
    post = train.LossPostProcessor(
        lambda **_: (torch.zeros(()), {}), {"sequence_packing": {"enabled": False}}, 2, prepare_fn=log_probs
    )
    step = functools.partial(train.forward_with_post_processing_fn, post_processing_fn=post)
    plain(
        forward_step_func=step, data_iterator=iter(micro_batches()), model=run.models, num_microbatches=len(LENGTHS),
        seq_length=SHAPE[1], micro_batch_size=SHAPE[0], forward_only=True,
    )  # fmt: skip
    for handle in handles:
        handle.remove()
    dist.all_reduce(found)
    return found


def gamma_of(before: Tensor, after: Tensor) -> list[Tensor]:
    """[B, S] of each micro-batch: at every token exp(-mean |delta|) of the token before, 1 on padding."""
    delta, used = (after[0] - before[0]).abs() * before[1], before[1]
    gamma = torch.exp(-delta.sum(dim=(0, 4)) / used.sum(dim=(0, 4)))
    found = [torch.ones(SHAPE, dtype=torch.float64) for _ in LENGTHS]
    for number, lengths in enumerate(LENGTHS):
        for row, length in enumerate(lengths):
            found[number][row, 1:length] = gamma[number, row, : length - 1]
    return found
