"""Coded routes between the processes of a framework: one setting, of Ray's runtime environment or of the environment.

    ray job submit --runtime-env-json '{"worker_process_setup_hook": "moe_rl.frameworks.coded_routes.install"}' ...
    MOE_RL_ROUTES=coded    # with verl's plug-in, and where a process imports this module

| framework | sender | reader |
|---|---|---|
| SGLang | `DetokenizerManager`, `TokenizerManager` | its own `extract_routed_experts_from_meta_info`, slime's decoder |
| slime | `Sample`, `RolloutManager` hold them coded | `prepare_routed_experts_for_routing_replay`: rows of a rank |
| miles | the shards that the driver packages | `process_rollout_data_shard` |
| verl | `DataProto.__getstate__` | `DataProto.__setstate__` |
| NeMo-RL (vLLM) | `encode_routed_experts` | `decode_routed_experts` |
| SkyRL (vLLM) | `pack_routed_experts` | `decode_packed_routed_experts` |
| prime-rl (vLLM) | `MicroBatchSender` | `MicroBatchReceiver` |

Readers take what is not coded too. The ids that come out are those that went in, in
ascending order within a row. Versions: docs/routes.md.
"""

import base64
import copy
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import DTypeLike, NDArray

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.post_import import when_imported, wrap
from moe_rl.routes.chunk import MAGIC
from moe_rl.routes.coded import CodedRoutes
from moe_rl.routes.reader import Bytes
from moe_rl.routes.shard import RankOfModel, read_rows, slime_rows

VARIABLE = "MOE_RL_ROUTES"
# How the base64 of any stream begins.
TEXT_START = base64.b64encode(MAGIC[:6]).decode()


def coded(ids: Any) -> CodedRoutes:
    """Return routes [T, L, K] coded, as of a model with the next power of two of experts."""
    array = np.asarray(ids)
    # A stream is coded for E experts; K distinct ids need at least K of them.
    highest = max(int(array.max(initial=0)), array.shape[2] - 1)
    return CodedRoutes.of(array, num_experts=1 << highest.bit_length())


def plain(data: Bytes, dtype: DTypeLike) -> NDArray[Any]:
    """Return the ids [T, L, K] of a stream; rows that were -1 are -1 again."""
    routes = CodedRoutes(data)
    ids = routes[:].astype(dtype)
    ids[routes.missing] = np.array(-1).astype(dtype)
    return ids


def to_text(ids: Any) -> str:
    """Return routes [T, L, K] as base64."""
    return base64.b64encode(coded(ids).data.tobytes()).decode()


def from_text(text: str, dtype: DTypeLike) -> NDArray[Any]:
    """Return the ids [T, L, K] of such a text."""
    try:
        return plain(base64.b64decode(text, validate=True), dtype)
    except ValueError as error:
        raise InvalidInputError(f"the routes cannot be decoded: {error}") from error


def is_coded(value: object) -> TypeGuard[str]:
    """Return whether a payload is `to_text`'s."""
    return isinstance(value, str) and value.startswith(TEXT_START)


def _sglang_detokenizer(module: ModuleType) -> None:
    def handled(original: Any, self: Any, output: Any) -> Any:
        # SGLang's own code would turn them into base64 of int32, eight times the size.
        routes, output.routed_experts = output.routed_experts, None
        result = original(self, output)
        result.routed_experts = _texts(routes)
        return result

    wrap(module.DetokenizerManager, "handle_batch_token_id_out", handled)


def _sglang_tokenizer(module: ModuleType) -> None:
    async def handled(original: Any, self: Any, output: Any) -> Any:
        output.routed_experts = _texts(getattr(output, "routed_experts", None))
        return await original(self, output)

    wrap(module.TokenizerManager, "_handle_batch_output", handled)


def _texts(routes: Sequence[Any] | None) -> list[Any] | None:
    if routes is None:
        return None
    return [
        to_text(routes_of_sample) if hasattr(routes_of_sample, "numpy") else routes_of_sample
        for routes_of_sample in routes
    ]


def _sglang_client(module: ModuleType) -> None:
    def extracted(original: Any, data: Any) -> Any:
        value = data["meta_info"].get("routed_experts")
        if is_coded(value):
            return from_text(value, np.int32).ravel()
        return original(data)

    wrap(module, "extract_routed_experts_from_meta_info", extracted)


def _slime_client(module: ModuleType) -> None:
    import torch

    def decoded(original: Any, meta_info: Any, keys: Any) -> Any:
        names = (keys,) if isinstance(keys, str) else keys
        value = next((meta_info[key] for key in names if key in meta_info), None)
        if is_coded(value):
            return torch.from_numpy(from_text(value, np.int32).ravel())
        return original(meta_info, keys)

    wrap(module, "decode_int32_meta_array", decoded)


ROUTES = "rollout_routed_experts"


def _slime_samples(module: ModuleType) -> None:
    import torch

    def applied(original: Any, self: Any, *arguments: Any, **more: Any) -> None:
        if isinstance(self.rollout_routed_experts, CodedRoutes):  # a later turn is added to them
            self.rollout_routed_experts = torch.from_numpy(plain(self.rollout_routed_experts.data, np.int32))
        original(self, *arguments, **more)
        if torch.is_tensor(self.rollout_routed_experts):
            self.rollout_routed_experts = coded(self.rollout_routed_experts)

    wrap(module.Sample, "_apply_meta_info", applied)


def _slime_manager(module: Any) -> None:
    import torch

    def converted(original: Any, self: Any, samples: Any) -> Any:
        routes_of_samples: list[Any] = [getattr(sample, ROUTES, None) for sample in samples]
        if self.custom_convert_samples_to_train_data_func is not None or not isinstance(
            routes_of_samples[0], CodedRoutes
        ):
            return original(self, samples)
        for sample, routes in zip(samples, routes_of_samples, strict=True):
            if getattr(self.args, "use_rollout_routing_replay", False):  # one at a time: each is eight times as large
                ids = torch.from_numpy(plain(routes.data, np.int32))
                module.validate_rollout_routed_experts_for_replay([ids], self.args)
            sample.rollout_routed_experts = None
        data = original(self, samples)
        for sample, routes in zip(samples, routes_of_samples, strict=True):
            sample.rollout_routed_experts = routes
        return data | {ROUTES: routes_of_samples}

    manager = module.RolloutManager  # Ray keeps the class itself elsewhere
    remote = getattr(manager, "__ray_metadata__", None)
    wrap(manager if remote is None else remote.modified_class, "_convert_samples_to_train_data", converted)


def _slime_sender(module: ModuleType) -> None:
    def tensorized(original: Any, rollout_data: Any) -> None:
        routes = rollout_data.pop(ROUTES, None)
        original(rollout_data)
        if routes is not None:
            rollout_data[ROUTES] = [
                routes_of_sample if isinstance(routes_of_sample, CodedRoutes) else coded(routes_of_sample)
                for routes_of_sample in routes
            ]

    wrap(module, "tensorize_rollout_data_for_training", tensorized)


class CodedRankRows:
    """The rows of a rank for one micro-batch; `rows[:, layer]` are those of a layer, decoded when slime asks."""

    def __init__(self, *rows_of: Any, layer: int = 0) -> None:
        self._rows_of, self._layer = rows_of, layer

    def __getitem__(self, index: tuple[slice, int]) -> "CodedRankRows":
        return CodedRankRows(*self._rows_of, layer=index[1])

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        routes, rows, num_experts = self._rows_of
        return read_rows(routes, rows, [self._layer], round_robin=num_experts)[:, 0].astype(dtype or np.int32)

    def materialize_for_routing_replay(self, stage: str) -> Any:
        """Return the layer's ids [n, K] on the device, as often as slime asks: in the forward and in the backward."""
        import torch

        ids = torch.from_numpy(np.asarray(self))
        if torch.cuda.is_available():
            return ids.pin_memory().to("cuda", non_blocking=True)
        return ids


def _slime_actor(module: ModuleType) -> None:
    def prepared(original: Any, routes: Any, tokens: Any, **options: Any) -> Any:
        if not all(isinstance(sequence, CodedRoutes) for sequence in routes):
            return original(routes, tokens, **options)
        mpu = module.mpu
        rank = RankOfModel(
            tp_rank=mpu.get_tensor_model_parallel_rank(),
            tp_size=mpu.get_tensor_model_parallel_world_size(),
            cp_rank=mpu.get_context_parallel_rank(),
            cp_size=mpu.get_context_parallel_world_size(),
            sequence_parallel=options["sequence_parallel"],
        )
        multiplier, allgather = options["data_pad_size_multiplier"], options["allgather_cp"]
        rows = slime_rows(
            [len(sequence) for sequence in tokens], rank, pad_multiplier=multiplier, allgather_cp=allgather
        )
        return CodedRankRows(routes, rows, options["num_experts"])

    wrap(module, "prepare_routed_experts_for_routing_replay", prepared)


def _miles(module: ModuleType) -> None:
    # miles' object store takes arrays of int32, as many dimensions as they have: a stream is its size and its words.
    def packaged(original: Any, *arguments: Any, **more: Any) -> Any:
        shards = original(*arguments, **more)
        for shard in shards:
            if ROUTES in shard:
                shard[ROUTES] = [
                    _as_words(coded(routes_of_sample).data.tobytes()) for routes_of_sample in shard[ROUTES]
                ]
        return shards

    def processed(original: Any, args: Any, data: Any) -> Any:
        if ROUTES in data:
            data[ROUTES] = [
                plain(words[1:].tobytes()[: words[0]], np.int32) if words.ndim == 1 else words for words in data[ROUTES]
            ]
        return original(args, data)

    wrap(module, "_package_shards", packaged)
    wrap(module, "process_rollout_data_shard", processed)


def _as_words(data: bytes) -> NDArray[np.int32]:
    words = np.frombuffer(data + bytes(-len(data) % 4), np.int32)
    return np.concatenate([np.array([len(data)], np.int32), words])


def _verl(module: ModuleType) -> None:
    import torch

    key = "routed_experts"

    def sent(original: Any, self: Any) -> Any:
        routes = None
        if self.batch is not None:
            routes = self.batch.get(key, None)
        if routes is None:
            return original(self)
        # A copy without the routes: __getstate__ must not change the batch that is sent.
        stripped = object.__new__(type(self))
        stripped.__dict__.update(self.__dict__, batch=self.batch.exclude(key))
        shape, offsets = (None, routes.offsets().cpu()) if routes.is_nested else (routes.shape, None)
        rows = routes.values() if routes.is_nested else routes.flatten(0, 1)
        batch, non_tensors, meta = original(stripped)
        return batch, non_tensors, {**meta, VARIABLE: (coded(rows.cpu().numpy()), shape, offsets, routes.dtype)}

    def received(original: Any, self: Any, state: Any) -> None:
        batch, non_tensors, meta = state
        coded_columns = meta.get(VARIABLE)
        original(self, (batch, non_tensors, {name: value for name, value in meta.items() if name != VARIABLE}))
        if coded_columns is not None:
            routes, shape, offsets, dtype = coded_columns
            rows = torch.from_numpy(plain(routes.data, np.int32)).to(dtype)
            nested = offsets is not None
            if nested:
                rebuilt = torch.nested.nested_tensor_from_jagged(rows, offsets)
            else:
                rebuilt = rows.reshape(shape)
            self.batch[key] = rebuilt

    wrap(module.DataProto, "__getstate__", sent)
    wrap(module.DataProto, "__setstate__", received)


def _nemo_rl(module: ModuleType) -> None:
    import torch

    def decoded(original: Any, payload: Any, dtype: Any) -> Any:
        if is_coded(payload):
            return torch.from_numpy(from_text(payload, np.int32)).to(dtype)
        return original(payload, dtype)

    wrap(module, "encode_routed_experts", lambda original, routes: to_text(routes.detach().cpu().numpy()))
    wrap(module, "decode_routed_experts", decoded)


def _skyrl(module: Any) -> None:
    def packed(original: Any, routes: Any) -> Any:
        compact = module.compact_routed_expert_indices(module._to_host_array(routes))
        return {"data": to_text(compact), "shape": list(compact.shape), "dtype": compact.dtype.name}

    def decoded(original: Any, payload: Any) -> Any:
        data = payload.get("data") if isinstance(payload, dict) else None
        if is_coded(data):
            return from_text(data, payload["dtype"])
        return original(payload)

    wrap(module, "pack_routed_experts", packed)
    wrap(module, "decode_packed_routed_experts", decoded)


class _Coder:
    """A msgpack encoder or decoder of micro-batches, with their routes changed on the way."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def encode(self, batches: Sequence[Any]) -> Any:
        return self._inner.encode([self._changed(batch, self._code) for batch in batches])

    def decode(self, data: Any) -> list[Any]:
        return [self._changed(batch, self._expand) for batch in self._inner.decode(data)]

    @staticmethod
    def _changed(batch: Any, change: Callable[[Any], Any]) -> Any:
        # The trainer goes on with its own batch after it was sent.
        changed = copy.copy(batch)
        if batch.routed_experts is not None:
            changed.routed_experts = copy.copy(batch.routed_experts)
            changed.routed_experts.data = change(batch.routed_experts)
        return changed

    @staticmethod
    def _code(routes: Any) -> bytes:
        if routes.dtype == "int32":  # ids and the bits of their combine weights: a trainer wants both
            return bytes(routes.data)
        return coded(np.frombuffer(routes.data, routes.dtype).reshape(routes.shape)).data.tobytes()

    @staticmethod
    def _expand(routes: Any) -> bytes:
        data: bytes = routes.data
        if data.startswith(MAGIC):
            return plain(data, routes.dtype).tobytes()
        return data


def _prime_rl(module: ModuleType) -> None:
    def made(name: str) -> Callable[..., None]:
        def initialized(original: Any, self: Any, *arguments: Any, **more: Any) -> None:
            original(self, *arguments, **more)
            setattr(self, name, _Coder(getattr(self, name)))

        return initialized

    wrap(module.MicroBatchSender, "__init__", made("encoder"))
    wrap(module.MicroBatchReceiver, "__init__", made("decoder"))


# What is changed where, when the module has been imported.
POINTS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.managers.detokenizer_manager": _sglang_detokenizer,
    "sglang.srt.managers.tokenizer_manager": _sglang_tokenizer,
    "sglang.srt.state_capturer.routed_experts": _sglang_client,
    "slime.utils.misc": _slime_client,
    "slime.utils.types": _slime_samples,
    "slime.observability.rollout_data_utils": _slime_sender,
    "slime.ray.rollout": _slime_manager,
    "slime.backends.megatron_utils.cp_utils": _slime_actor,
    "miles.ray.rollout.train_data_conversion": _miles,
    "verl.protocol": _verl,
    "nemo_rl.utils.routed_experts_codec": _nemo_rl,
    "skyrl.backends.skyrl_train.inference_servers.generate_wire": _skyrl,
    "prime_rl.transports.rollouts.base": _prime_rl,
}


def install() -> None:
    """Code routes from now on in this process, in every framework that it imports."""
    for name in tuple(POINTS):
        when_imported(name, POINTS.pop(name))  # once, however often a process is told


mode = os.environ.get(VARIABLE, "plain")
require(mode in ("plain", "coded"), f"{VARIABLE} must be 'coded' or 'plain', got {mode!r}.")
if mode == "coded":
    install()
