"""prime-rl: TOML files. It trains with FSDP2 and expert parallelism of its own: `attach` balances none of its runs.

Keys: PrimeIntellect-ai/prime-rl:packages/prime-rl-configs (559b447).
"""

from moe_rl.doctor.keys import Keys, Known, Reader, Rule, last_entry
from moe_rl.doctor.settings import defaults
from moe_rl.doctor.sources import RawRun

KEYS: Keys = {
    "trainer.model.ep": Rule("expert_model_parallel_size"),
    "model.ep": Rule("expert_model_parallel_size"),
    "inference.enable_return_routed_experts": Rule("rollout_returns_routes"),
}


def _complete(known: Known, raw: RawRun) -> Known:
    return known | defaults("prime-rl", trainer="FSDP2")


def _recognizes(raw: RawRun) -> bool:
    toml = any(file.endswith(".toml") for file in raw.files)
    own = any(entry.key.startswith(("orchestrator.", "trainer.model.", "weight_broadcast.")) for entry in raw.entries)
    return own or (toml and last_entry(raw, "model.name") is not None)


READER = Reader(
    name="prime_rl", title="prime-rl", recognizes=_recognizes, keys=KEYS, complete=_complete, verdict_only=True
)
