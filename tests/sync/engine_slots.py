"""Engine ranks whose slots are filled by SGLang's and vLLM's own weight loaders.

Layers are not built: the loaders' methods run on instances that have the attributes which they read.
"""

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from engine_code import SGLANG, VLLM, engine_modules
from layout_cases import Expert, Slots, Weights

from moe_rl.frameworks.sglang import weight_loader
from moe_rl.frameworks.vllm import sync_map
from moe_rl.sync import EngineLayout
from moe_rl.sync.expert_parts import ExpertShape
from moe_rl.sync.versions import SlotVersions

NAMES = ("gate_proj", "up_proj", "down_proj")


class LoadedSlots(Slots):
    """Slots [W / EP] of every layer as an engine keeps them: gate and up in one parameter, down in another."""

    def __init__(self, shape: ExpertShape, engine: EngineLayout, index: int) -> None:
        super().__init__(shape, engine, index)
        layers, slots = self.local.shape
        ffn, hidden = shape.ffn_size // engine.tp_size, shape.hidden_size
        self.w13 = [_unwritten(slots, 2 * ffn, hidden) for _ in range(layers)]
        self.w2 = [_unwritten(slots, hidden, ffn) for _ in range(layers)]

    def change_map(self, engine: EngineLayout) -> None:
        """Take a map of as many slots, before the weights for it come."""
        self.engine, self.local = engine, engine.local_slots(self.index)
        self.versions = SlotVersions(self.local)

    def load(self, layer: int, expert: int, tensors: Expert) -> None:
        for name, tensor in zip(NAMES, tensors, strict=True):
            self.load_named(layer, expert, name, tensor.contiguous())
        self.loads += int((self.local[layer] == expert).sum())

    def load_named(self, layer: int, expert: int, name: str, tensor: torch.Tensor) -> None:
        raise NotImplementedError

    def wrong_slots(self, weights: Weights) -> int:
        wrong = 0
        for (layer, slot), expert in np.ndenumerate(self.local):
            gate, up, down = self.slice(weights(layer, int(expert)))
            gates = torch.equal(self.w13[layer][slot], torch.cat([gate, up]))
            wrong += not (gates and torch.equal(self.w2[layer][slot], down))
        return wrong

    def wrong_quantized_slots(self, weights: Weights, quantizer: "Quantizer") -> int:
        """Return the slots that, quantized where they are, differ from whole experts that were quantized and cut."""
        wrong, where = 0, {"tp_size": self.engine.tp_size, "index": self.index % self.engine.tp_size}
        for (layer, slot), expert in np.ndenumerate(self.local):
            gate, up, down = weights(layer, int(expert))
            own_gate, own_up = self.w13[layer][slot].chunk(2)
            right = quantizer.same(own_gate, gate, dim=0, **where) and quantizer.same(own_up, up, dim=0, **where)
            wrong += not (right and quantizer.same(self.w2[layer][slot], down, dim=1, **where))
        return wrong


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """vLLM's cast of a matrix to FP8 in blocks, with blocks as small as the experts of these tests."""

    block: tuple[int, int]
    power_of_two_scales: bool

    def __call__(self, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes [N, K] and scales [N / block, K / block]."""
        cast = _vllm()[3].per_block_cast_to_fp8
        return cast(matrix, list(self.block), use_ue8m0=self.power_of_two_scales)

    def same(self, own: torch.Tensor, whole: torch.Tensor, *, tp_size: int, index: int, dim: int) -> bool:
        """Return whether a slice cast by itself has the bits of the same slice of the whole matrix's cast."""
        own_codes, own_scales = self(own.contiguous())
        codes, scales = (part.chunk(tp_size, dim)[index] for part in self(whole))
        return torch.equal(own_codes.view(torch.uint8), codes.contiguous().view(torch.uint8)) and torch.equal(
            own_scales, scales
        )


# Blocks of 128 x 128, and rows of 32, of experts that are 16 times as large.
QUANTIZERS = {
    "FP8": Quantizer(block=(8, 8), power_of_two_scales=False),
    "MXFP8": Quantizer(block=(1, 8), power_of_two_scales=True),
}


def _unwritten(*sizes: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(sizes, float("nan"), dtype=torch.bfloat16), requires_grad=False)


class SglangSlots(LoadedSlots):
    """`FusedMoE.weight_loader` and `ExpertLocationMetadata`: SGLang finds an expert's slots by its own table."""

    def __init__(self, shape: ExpertShape, engine: EngineLayout, index: int) -> None:
        super().__init__(shape, engine, index)
        self.location = self._location(engine)
        self.layers = [self._layer(number) for number in range(len(self.local))]
        experts = int(engine.slots.max()) + 1
        table = _sglang()[1].FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", experts)
        self.table = {weight: (parameter, expert, shard) for parameter, weight, expert, shard in table}

    def change_map(self, engine: EngineLayout) -> None:
        """Take the map that comes with the next weights: SGLang updates its own table in place."""
        super().change_map(engine)
        _sglang()[0].get_global_expert_location_metadata = lambda: self.location
        weight_loader.load(self, weight_loader.packed((), engine.slots))

    def load(self, layer: int, expert: int, tensors: Expert) -> None:
        """Load by the loader of `--custom-weight-loader`, from a batch with names inside."""
        names = [f"layers.{layer}.mlp.experts.{expert}.{name}.weight" for name in NAMES]
        weight_loader.load(self, weight_loader.packed(zip(names, tensors, strict=True)))
        self.loads += int((self.local[layer] == expert).sum())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What an SGLang model does with named weights."""
        for name, tensor in weights:
            _, layer, _, _, expert, matrix, _ = name.split(".")
            self.load_named(int(layer), int(expert), matrix, tensor)

    def map_of_routers(self) -> torch.Tensor:
        return self.location.physical_to_logical_map

    @staticmethod
    def _location(engine: EngineLayout) -> Any:
        location = _sglang()[0]
        physical = torch.as_tensor(np.array(engine.slots), dtype=torch.int64)
        every_slot = location._compute_logical_to_all_physical_map(
            physical, int(engine.slots.max()) + 1, engine.ep_size, None
        )
        return location.ExpertLocationMetadata._init_raw(
            ep_size=engine.ep_size,
            physical_to_logical_map=physical,
            logical_to_all_physical_map=every_slot,
            moe_ep_rank=0,
        )

    def _layer(self, number: int) -> Any:
        fused = _sglang()[1].FusedMoE
        layer = fused.__new__(fused)
        torch.nn.Module.__init__(layer)
        facts = {
            "layer_id": number,
            "quant_config": None,
            "uses_expert_location": True,
            "_has_fused_shared": False,
            "num_fused_shared_experts": 0,
            "_expert_storage_rank": self.index // self.engine.tp_size,
            "_num_local_routed": self.local.shape[1],
            "_num_global_routed": self.engine.slots.shape[1],
            "num_local_experts": self.local.shape[1],
            "moe_tp_rank": self.index % self.engine.tp_size,
            "moe_tp_size": self.engine.tp_size,
            "quant_method": object(),
            "scheme": None,
            "use_flashinfer_trtllm_moe": False,
            "use_triton_kernels": False,
            "use_presharded_weights": not self.engine.whole_tensors,
            "moe_runner_config": SimpleNamespace(is_gated=True),
        }
        for name, value in facts.items():
            setattr(layer, name, value)
        layer.w13_weight, layer.w2_weight = self.w13[number], self.w2[number]
        return layer

    def load_named(self, layer: int, expert: int, name: str, tensor: torch.Tensor) -> None:
        _sglang()[1].get_global_expert_location_metadata = lambda: self.location
        parameter, number, shard = self.table[f"experts.{expert}.{name}."]
        target = self.layers[layer]
        into = target.w13_weight if parameter.endswith("w13_") else target.w2_weight
        target.weight_loader(into, tensor, f"{parameter}weight", shard_id=shard, expert_id=number)


class VllmSlots(LoadedSlots):
    """`RoutedExperts.load_weights` and `determine_expert_map`; the sync brings the map of its table of names."""

    SHARDS: ClassVar = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

    def __init__(self, shape: ExpertShape, engine: EngineLayout, index: int) -> None:
        super().__init__(shape, engine, index)
        experts, maps = _vllm()[:2]
        own = index // engine.tp_size
        local, table, _ = maps.determine_expert_map(engine.ep_size, own, engine.slots.shape[1])
        assert local == self.local.shape[1]
        self.modules = [self._layer(experts, table, number) for number in range(len(self.local))]
        runner = SimpleNamespace(model=SimpleNamespace(modules=lambda: self.modules), eplb_state=self._routers(engine))
        self.model_runner = runner
        sync_map.take_map(runner, engine.slots)

    def change_map(self, engine: EngineLayout) -> None:
        """Take the map that comes with the next weights."""
        super().change_map(engine)
        brought = (sync_map.MAP_NAME, torch.as_tensor(engine.slots))
        assert sync_map.without_map(self.model_runner, [brought]) == []

    def map_of_routers(self) -> torch.Tensor:
        return self.model_runner.eplb_state.model_states["model"].physical_to_logical_map

    @staticmethod
    def _routers(engine: EngineLayout) -> Any:
        """What routers read: vLLM's state of a model with as many slots, of no map yet."""
        layers, slots = engine.slots.shape
        num_experts = int(engine.slots.max()) + 1
        maps = SimpleNamespace(
            physical_to_logical_map=torch.full((layers, slots), -1),
            logical_to_physical_map=torch.full((layers, num_experts, slots), -1),
            logical_replica_count=torch.zeros(layers, num_experts, dtype=torch.int64),
        )
        return SimpleNamespace(model_states={"model": maps})

    def _layer(self, experts: Any, table: Any, number: int) -> Any:
        engine, index = self.engine, self.index
        module = experts.RoutedExperts.__new__(experts.RoutedExperts)
        parallel = SimpleNamespace(tp_size=engine.tp_size)
        vars(module).update(
            layer_name="mlp.experts",
            ckpt_gate_proj_name="gate_proj",
            ckpt_up_proj_name="up_proj",
            ckpt_down_proj_name="down_proj",
            lora_base_layer_prefix="",
            quant_config=None,
            quant_method=object(),
            _fused_shared_expert_quantizer=None,
            expert_map_manager=SimpleNamespace(
                map_global_to_local=lambda slot: slot if table is None else int(table[slot]),
                num_fused_shared_experts=0,
            ),
            moe_config=SimpleNamespace(
                tp_shard_with_padding=False,
                is_act_and_mul=True,
                tp_rank=index % engine.tp_size,
                num_experts=engine.slots.shape[1],
                num_logical_experts=int(engine.slots.max()) + 1,
                moe_parallel_config=parallel,
            ),
            w13_weight=self.w13[number],
            w2_weight=self.w2[number],
        )
        for parameter in (self.w13[number], self.w2[number]):
            parameter.weight_loader = module.weight_loader  # type: ignore[attr-defined]
        return module

    def load_named(self, layer: int, expert: int, name: str, tensor: torch.Tensor) -> None:
        shard = self.SHARDS[name]
        parameter, module = self.w2[layer] if shard == "w2" else self.w13[layer], self.modules[layer]
        if self.engine.whole_tensors:
            assert list(module.load_weights([(f"{expert}.{name}.weight", tensor)]))
            return
        for slot in np.flatnonzero(self.engine.slots[layer] == expert).tolist():
            here = module._map_global_expert_id_to_local_expert_id(slot)
            if here < 0:
                continue
            slices = {"expert_data": parameter.data[here], "loaded_weight": tensor, "tp_rank": 0, "load_full": True}
            if shard == "w2":
                module._load_w2(shard_dim=1, **slices)
            else:
                module._load_w13(shard_dim=0, shard_id=shard, **slices)


@cache
def _sglang() -> list[Any]:
    location, layer = engine_modules(SGLANG)
    layer._is_cpu = layer._is_hip = layer._use_aiter = False
    unset = SimpleNamespace(get=lambda: False)
    layer.envs = SimpleNamespace(SGLANG_MOE_COPY_WEIGHT_VIEWS_BEFORE_H2D=unset)
    no_dispatch = SimpleNamespace(ep_dispatch_algorithm=None, moe_a2a_backend="none")
    location.get_exec = lambda: SimpleNamespace(moe=no_dispatch)
    return [location, layer]


@cache
def _vllm() -> list[Any]:
    # What vLLM asks of the GPU: the CPU has the same type of numbers.
    cpu = SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn, simple_compile_backend="eager")
    experts, maps, numbers, quantization, routers = engine_modules(VLLM, current_platform=cpu)
    experts.logger = logging.getLogger("vllm")
    routers.PIN_MEMORY = False
    routers.gpu_sync_allowed = contextlib.nullcontext
    cast = quantization.per_block_cast_to_fp8
    quantization.per_block_cast_to_fp8 = getattr(cast, "_torchdynamo_orig_callable", cast)
    finite = torch.finfo(torch.float8_e4m3fn)
    quantization.get_fp8_min_max = lambda: (finite.min, finite.max)
    return [experts, maps, numbers, quantization]
