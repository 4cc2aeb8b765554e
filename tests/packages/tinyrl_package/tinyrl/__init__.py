"""tinyrl: policy gradients on a small MoE model of Megatron's layers. It knows nothing of moe_rl."""

from tinyrl.episodes import Episodes
from tinyrl.trainer import Trainer

__all__ = ["Episodes", "Trainer"]
