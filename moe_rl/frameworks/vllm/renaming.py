"""vLLM with a permutation of its experts, an experiment: weights renamed on their way in, captured ids mapped back.

    renaming = ExpertRenaming.read("map.json", model)
    llm_model.load_weights(renaming.renamed(named_tensors))
    routed_experts = renaming.expert_ids(output.routed_experts)

vLLM takes no expert map. Under its linear placement the names of experts say where they are, so a permutation from
`moe-rl plan --export vllm-permutation` balances ranks without it: router rows, correction bias and experts move
together, and the function of a layer stays what it was. Not run inside vLLM. L MoE layers, E experts, K choices.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.model import MoeModelSpec
from moe_rl.frameworks.routes import of_moe_layers
from moe_rl.rollout_engines import read_expert_map
from moe_rl.rollout_engines.base import Shape

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
ONE_EXPERT = re.compile(r"(^|\.)experts\.(\d+)\.")
BY_EXPERT = re.compile(r"(^|\.)(experts\.[^.]+|(gate|router)(\.linear)?\.(weight|bias|e_score_correction_bias))$")
"""Tensors whose first axis is the experts: fused ones, and what a router has per expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRenaming:
    """Names of experts inside vLLM, for every MoE layer."""

    expert_of_name: NDArray[np.int64]
    """[L, E]"""
    model: MoeModelSpec

    @classmethod
    def read(cls, path: Path | str, model: MoeModelSpec) -> Self:
        """Return the renaming in a file of `plan --export vllm-permutation`; raise where it is of another model."""
        shape = Shape(
            num_layers=model.num_layers, moe_layer_ids=model.moe_layer_ids, num_experts=model.num_experts, ep_size=1
        )
        engine, read = read_expert_map(path, shape)
        require(engine.name == "vllm-permutation", f"{path} is a map for {engine.name}, not a permutation for vLLM.")
        return cls(expert_of_name=read.slots.astype(np.int64), model=model)

    def renamed(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights under Hugging Face names with experts renamed; those of other layers and modules as they are.

        Raises for a tensor in an MoE layer that has a row per expert and is none that is known to be permuted.
        """
        row_of_layer = {layer: row for row, layer in enumerate(self.model.moe_layer_ids)}
        name_of_expert = np.argsort(self.expert_of_name, axis=1)
        for name, tensor in named_tensors:
            found = LAYER.search(name)
            row = None if found is None else row_of_layer.get(int(found[1]))
            if found is None or row is None:
                yield name, tensor
            elif one := ONE_EXPERT.search(found[2]):
                start = found.start(2) + one.start(2)
                renamed = name_of_expert[row, self._known(name, int(one[2]))]
                yield f"{name[:start]}{renamed}{name[start + len(one[2]) :]}", tensor
            elif BY_EXPERT.search(found[2]):
                require(
                    tensor.ndim >= 1 and tensor.shape[0] == self.model.num_experts,
                    f"{name} has shape {list(tensor.shape)}, not a row for each of {self.model.num_experts} experts.",
                )
                yield name, tensor[torch.from_numpy(self.expert_of_name[row]).to(tensor.device)]
            else:
                self._refuse_unknown(name, found[2], tensor)
                yield name, tensor

    def expert_ids(self, routed_experts: Any) -> NDArray[np.int64]:
        """Return [..., L, K] experts of the names that vLLM captured, of the MoE layers or of all; -1 stays -1."""
        names = of_moe_layers(routed_experts, self.model)
        experts = self.expert_of_name[np.arange(len(self.expert_of_name))[:, None], names]
        return np.where(names < 0, -1, experts)

    def _known(self, name: str, expert: int) -> int:
        if expert >= self.model.num_experts:
            raise InvalidInputError(f"{name} is of expert {expert}, the model has {self.model.num_experts}.")
        return expert

    def _refuse_unknown(self, name: str, inside: str, tensor: torch.Tensor) -> None:
        routes = re.search(r"gate|router|expert", inside) and not re.search(r"shared_expert|gate_(up_)?proj", inside)
        if routes and tensor.ndim >= 1 and tensor.shape[0] == self.model.num_experts:
            raise InvalidInputError(f"{name} has a row per expert, and it is not known how it goes with a renaming.")
