"""Expert maps for rollout engines: what each loads at start, which copy it then sends a token to, and reading it back.

`ROLLOUT_ENGINES` knows every engine. Needs numpy.
"""

from moe_rl.rollout_engines.base import ROLLOUT_ENGINES, ReplicaChoice, RolloutEngine
from moe_rl.rollout_engines.files import encoded_map, read_expert_map

__all__ = ["ROLLOUT_ENGINES", "ReplicaChoice", "RolloutEngine", "encoded_map", "read_expert_map"]
