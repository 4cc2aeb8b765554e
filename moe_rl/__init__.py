"""moe_rl: plan, simulate and run balanced Mixture-of-Experts RL training on replayed rollout routing.

Start with `moe_rl.replay` (read a routing trace), `moe_rl.planner` (decide), `moe_rl.simulators` (predict) and
`moe_rl.importance` (correct). Importing this package loads none of them and no torch.
"""

__version__ = "0.1.0"
