"""The model: a dense block, then blocks with Megatron's MoE layers. S tokens, B episodes, H channels."""

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from tinyrl.episodes import Episodes


class Block(torch.nn.Module):
    """A causal mean over the tokens, then a dense or a sparse feed-forward."""

    def __init__(self, config: TransformerConfig, number: int, *, sparse: bool) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.norm_in, self.norm_mid = torch.nn.RMSNorm(config.hidden_size), torch.nn.RMSNorm(config.hidden_size)
        if sparse:
            spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
            self.sparse = MoELayer(config, spec.submodules, layer_number=number)
            self.sparse.set_layer_number(number)
        else:
            self.dense = torch.nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[S, B, H] of [S, B, H]."""
        ones = torch.ones(len(x), 1, 1)
        x = x + self.mix(self.norm_in(x).cumsum(0) / ones.cumsum(0))
        middle = self.norm_mid(x)
        return x + (self.sparse(middle)[0] if hasattr(self, "sparse") else F.silu(self.dense(middle)))


class Policy(MegatronModule):
    """Log-probabilities of the next tokens."""

    def __init__(self, config: TransformerConfig, vocabulary: int) -> None:
        super().__init__(config)
        self.embedding = torch.nn.Embedding(vocabulary, config.hidden_size)
        is_sparse = config.moe_layer_freq
        self.blocks = torch.nn.ModuleList(
            Block(config, number + 1, sparse=bool(sparse)) for number, sparse in enumerate(is_sparse)
        )
        self.head = torch.nn.Linear(config.hidden_size, vocabulary, bias=False)

    @property
    def sparse_layers(self) -> list[MoELayer]:
        """The MoE layers, in their order."""
        return [block.sparse for block in self.blocks if hasattr(block, "sparse")]

    def forward(self, token_grid: torch.Tensor) -> torch.Tensor:
        """[B, S - 1] of [B, S]."""
        x = self.embedding(token_grid.T)
        for block in self.blocks:
            x = block(x)
        log_probs = self.head(x[:-1]).log_softmax(-1)
        return log_probs.gather(-1, token_grid.T[1:, :, None])[..., 0].T

    def take_routes_of(self, episodes: Episodes | None) -> None:
        """Let the routers replay what the rollout picked, elsewhere experts 0 .. K-1; None: let them choose."""
        for layer in self.sparse_layers:
            replay = layer.router.router_replay
            if episodes is None or episodes.picked_experts is None:
                replay.clear_router_replay_action()
                continue
            batch, length = episodes.token_grid.shape
            rows = torch.arange(layer.config.moe_router_topk).repeat(length, batch, 1)
            for number, picked in enumerate(episodes.picked_experts):
                own = torch.from_numpy(picked[layer.layer_number - 1].astype("int64"))
                rows[: len(own), number] = own
            replay.set_target_indices(rows.flatten(0, 1))
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
