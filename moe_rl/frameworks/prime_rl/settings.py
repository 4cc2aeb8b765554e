"""prime-rl: TOML files. It trains with FSDP2 and expert parallelism of its own: `attach` balances none of its runs.

Keys: PrimeIntellect-ai/prime-rl:packages/prime-rl-configs (559b447).
"""

from pathlib import Path

from moe_rl.launch.keys import Keys, Known, Reader, last_entry, rules_of, sets_key_under
from moe_rl.launch.settings import defaults
from moe_rl.launch.sources import RawRun
from moe_rl.yaml_files import read_yaml

KEYS: Keys = rules_of(read_yaml(Path(__file__).with_suffix(".yaml")))


def _complete(settings: Known, raw: RawRun) -> Known:
    return settings | defaults("prime-rl", trainer="FSDP2 with experts")


def _recognizes(raw: RawRun) -> bool:
    toml = any(file.endswith(".toml") for file in raw.files)
    is_own = sets_key_under(raw, "orchestrator.", "trainer.model.", "weight_broadcast.")
    return is_own or (toml and last_entry(raw, "model.name") is not None)


READER = Reader(
    name="prime_rl", title="prime-rl", recognizes=_recognizes, keys=KEYS, complete=_complete, verdict_only=True
)
